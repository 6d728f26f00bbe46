// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program itself: options, signals, sandbox, and its costs.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use vhost_device_ism::management::{AddGuest, Client};
use virtio_ism_abi::command::{BACKING_WINDOW, Op};
use virtio_ism_abi::event::Event;
use virtio_ism_abi::slab::{CONTROL_LEN, LINE_ARMED, line_offset};
use virtio_ism_abi::{Gid, Status};

use super::front_end::*;

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_vhost-device-ism");
/// The strictest sandbox. With `cargo llvm-cov` the program writes a profile at its end, forbidden by strict
/// mode.
pub(crate) fn strict() -> &'static str {
    let profiled = std::env::var_os("LLVM_PROFILE_FILE").is_some();
    if profiled { "--sandbox=on" } else { "--sandbox=strict" }
}

const DMB: u32 = 64 << 10;

pub(crate) struct Program(Child);

impl Program {
    /// Starts the program and waits for its sockets.
    pub(crate) fn start(place: &Place, sockets: &[&str], options: &[&str]) -> Program {
        let mut command = Command::new(PROGRAM);
        command.args(options).stderr(Stdio::piped());
        Program::start_by(command, place, sockets)
    }

    /// Like [`start`](Self::start), with the caller's command.
    pub(crate) fn start_by(mut command: Command, place: &Place, sockets: &[&str]) -> Program {
        for socket in sockets {
            command.arg("--socket-path").arg(place.path(socket));
        }
        command.env_remove("RUST_LOG");
        let program = Program(command.spawn().unwrap());
        for socket in sockets {
            eventually("a socket", || place.path(socket).exists());
        }
        program
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    fn count(&self, what: &str) -> usize {
        std::fs::read_dir(format!("/proc/{}/{what}", self.pid())).unwrap().count()
    }

    /// A line of /proc/PID/status, in KiB.
    fn memory(&self, key: &str) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Processor time so far, in ticks of 10 ms.
    pub(crate) fn ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    /// Ends the program by a signal. Returns its output.
    pub(crate) fn end(&mut self, signal: Signal) -> String {
        kill_process(self.pid(), signal).unwrap();
        let (status, said) = self.ended();
        assert!(status.success(), "{status}: {said}");
        said
    }

    /// Waits for the program's end. Returns its status and output.
    pub(crate) fn ended(&mut self) -> (std::process::ExitStatus, String) {
        let deadline = Instant::now() + TIMEOUT;
        let status = loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut said = String::new();
        if let Some(mut stderr) = self.0.stderr.take() {
            stderr.read_to_string(&mut said).unwrap();
        }
        (status, said)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(args: &[&str]) -> Output {
    Command::new(PROGRAM).args(args).env_remove("RUST_LOG").output().unwrap()
}

/// Two front ends, a window DMB, a move, a store, a kick.
pub(crate) fn work(a: &Path, b: &Path) {
    let (mut a, gid_a) = FrontEnd::greet(a);
    let (mut b, _) = FrontEnd::greet(b);
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    let attached = a.attach(dmb.token.get());
    assert_eq!(a.transfer(dmb.token.get(), &[(0, b"hello")], false), Status::Ok);
    assert_eq!(b.read_window(dmb.dmb_off.get(), 5), b"hello");
    a.write_window(attached.dmb_off.get(), b"again");
    assert_eq!(b.read_window(dmb.dmb_off.get(), 5), b"again");
    assert_eq!(a.transfer(dmb.token.get(), &[], true), Status::Ok);
    assert!(matches!(b.event(TIMEOUT), Some(Event::SlabWake(_))));
    let bases = b.pause();
    b.resume(&bases);
    assert_eq!(b.command(Op::Stats, &[]).0, Status::Ok);
}

#[test]
fn capabilities_are_json_with_the_type_of_device() {
    let output = run(&["--print-capabilities"]);
    assert!(output.status.success());
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["type"], "ism");
}

#[test]
fn help_and_mistakes_are_told_apart_by_the_exit_code() {
    assert!(run(&["--help"]).status.success());
    assert_eq!(run(&["--no-such-option"]).status.code(), Some(2));
    let nothing = run(&[]);
    assert_eq!(nothing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nothing.stderr).contains("nothing to do"));
    let both = run(&["--socket-path", "/x", "--fd", "3"]);
    assert_eq!(both.status.code(), Some(2));
}

#[test]
fn a_listening_socket_can_be_inherited() {
    let place = Place::new();
    let path = place.path("inherited");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["--fd", "0", "--chid", "ff12"]).env_remove("RUST_LOG");
    command.stdin(std::os::fd::OwnedFd::from(listener)).stderr(Stdio::piped());
    let mut program = Program(command.spawn().unwrap());
    let mut a = FrontEnd::connect(&path);
    a.hello();
    assert_eq!(a.config(24, 2), [0x12, 0xff]);
    program.end(Signal::TERM);
    assert!(path.exists(), "it is not the daemon's to remove");
}

#[test]
fn signals_end_it_and_remove_its_sockets() {
    for signal in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        let management = place.path("m");
        let options = ["--management", management.to_str().unwrap()];
        let mut program = Program::start(&place, &["a", "b"], &options);
        until_listening(&management);
        // With a connected front end, and a hanging one.
        let (_a, _) = FrontEnd::greet(&place.path("a"));
        let said = program.end(signal);
        assert!(!said.contains("ERROR"), "{said}");
        for socket in ["a", "b", "m"] {
            assert!(!place.path(socket).exists(), "{socket} is left");
        }
    }
}

#[test]
fn the_strict_sandbox_has_all_that_the_daemon_needs() {
    let place = Place::new();
    let management = place.path("m");
    let options = [strict(), "--management", management.to_str().unwrap()];
    let mut program = Program::start(&place, &["a", "b"], &options);
    until_listening(&management);
    for _ in 0..3 {
        work(&place.path("a"), &place.path("b"));
    }
    let mut client = Client::connect(&management).unwrap();
    client.add(&AddGuest { socket: place.path("c"), ..AddGuest::default() }).unwrap();
    work(&place.path("a"), &place.path("c"));
    client.remove("c").unwrap();
    assert!(!place.path("c").exists());
    let pool = AddGuest { socket: place.path("p"), devices: Some(2), ..AddGuest::default() };
    client.add(&pool).unwrap();
    let (_member, _) = super::pool::front_end(super::pool::ask(&place.path("p")).unwrap());
    client.remove("p").unwrap();
    assert!(client.metrics().unwrap().contains("ism_connected"));
    // Outside the directories of configured sockets, no socket can be made.
    let elsewhere = Place::new();
    let refused = client.add(&AddGuest { socket: elsewhere.path("d"), ..AddGuest::default() });
    let status = std::fs::read_to_string(format!("/proc/{}/status", program.pid())).unwrap();
    if refused.is_ok() {
        // Written past the test harness' capture.
        let _ = writeln!(std::io::stderr(), "NOT TESTED: this kernel has no landlock");
    }
    assert!(status.contains("Seccomp:\t2"), "{status}");
    assert!(status.contains("NoNewPrivs:\t1"), "{status}");
    // A hostile front end: faults are counted and logged here, too.
    let mut a = FrontEnd::connect(&place.path("a"));
    a.descriptor(CONTROL, 0, 0, 8, 1, 0);
    a.offer(CONTROL, 0);
    a.kick(CONTROL);
    eventually("a fault", || {
        client.list().unwrap().iter().any(|guest| guest.faults.contains_key("bad_chain"))
    });
    let said = program.end(Signal::TERM);
    assert!(said.contains("bad_chain"), "{said}");
}

#[test]
fn the_sandboxed_program_survives_memory_that_is_gone() {
    let place = Place::new();
    let mut program = Program::start(&place, &["a", "b", "c"], &[strict()]);
    let mut a = FrontEnd::connect_with(&place.path("a"), Wish { sealed: false, ..Wish::default() });
    a.hello();
    rustix::fs::ftruncate(&a.file, 0).unwrap();
    a.kick(CONTROL);
    a.wait_cut();
    work(&place.path("b"), &place.path("c"));
    work(&place.path("a"), &place.path("b"));
    let said = program.end(Signal::TERM);
    assert!(said.contains("lost_memory"), "{said}");
}

#[test]
fn the_program_leaves_no_core_dump() {
    let place = Place::new();
    let program = Program::start(&place, &["a"], &[]);
    let limits = format!("/proc/{}/limits", program.pid());
    let limits = std::fs::read_to_string(limits).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
}

/// A line of /proc/PID/status of the daemon, without its key.
fn status_line(pid: Pid, key: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(&format!("{key}:"))).unwrap();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_daemon_that_is_started_as_root_gives_up_its_rights() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root has rights to give up");
        return;
    }
    for (options, uid) in [(&["--user", "65534:65533"][..], 65534), (&[], 0)] {
        let place = Place::new();
        let management = place.path("m");
        let options = [options, &["--management", management.to_str().unwrap()]].concat();
        let options = [&options[..], &[strict()]].concat();
        let mut program = Program::start(&place, &["a", "b"], &options);
        until_listening(&management);
        work(&place.path("a"), &place.path("b"));
        let line = |key: &str| status_line(program.pid(), key);
        for none in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(u64::from_str_radix(&line(none), 16), Ok(0), "{none}");
        }
        if uid != 0 {
            assert_eq!(line("Uid"), "65534 65534 65534 65534");
            assert_eq!(line("Gid"), "65533 65533 65533 65533");
            assert_eq!(line("Groups"), "");
        }
        let root = std::fs::read_dir(format!("/proc/{}/root", program.pid())).unwrap();
        assert_eq!(root.count(), 0, "its root is empty");
        for namespace in ["net", "ipc", "uts"] {
            let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
            assert_ne!(of(&program.pid().to_string()), of("self"), "{namespace}");
        }
        // The broker makes and removes sockets for the daemon.
        let mut client = Client::connect(&management).unwrap();
        client.add(&AddGuest { socket: place.path("c"), ..AddGuest::default() }).unwrap();
        work(&place.path("a"), &place.path("c"));
        client.remove("c").unwrap();
        assert!(!place.path("c").exists());
        program.end(Signal::TERM);
        assert!(!place.path("a").exists());
    }
}

/// The check of a program connecting to a socket in a directory of its own.
#[test]
fn those_who_connect_see_the_user_who_started_the_daemon() {
    use std::os::unix::net::{UnixListener, UnixStream};
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    let place = Place::new();
    let (management, inherited) = (place.path("m"), place.path("inherited"));
    let listener = UnixListener::bind(&inherited).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["--user", "65534:65533", strict(), "--management"]).arg(&management);
    let mut by_path = Program::start_by(command, &place, &["a"]);
    let mut command = Command::new(PROGRAM);
    command.args(["--user", "65534:65533", strict(), "--fd", "0"]);
    command.stdin(std::os::fd::OwnedFd::from(listener));
    let mut by_descriptor = Program::start_by(command, &place, &[]);
    until_listening(&management);
    drop(FrontEnd::greet(&inherited));
    for path in [place.path("a"), management, inherited] {
        let stream = UnixStream::connect(&path).unwrap();
        let listener = rustix::net::sockopt::socket_peercred(&stream).unwrap();
        assert!(listener.uid.is_root(), "{}: {:?}", path.display(), listener.uid);
    }
    by_path.end(Signal::TERM);
    by_descriptor.end(Signal::TERM);
}

#[test]
fn sockets_go_when_the_daemon_is_killed() {
    let place = Place::new();
    let program = Program::start(&place, &["a"], &[]);
    drop(program);
    eventually("the end of the socket", || !place.path("a").exists());
}

#[test]
fn a_user_that_is_none_or_is_root_is_refused() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    let place = Place::new();
    for user in ["root", "0:0", "no-such-user"] {
        let socket = place.path("a");
        let refused = run(&["--user", user, "-s", socket.to_str().unwrap()]);
        assert_eq!(refused.status.code(), Some(1), "{user}");
        assert!(!socket.exists());
    }
}

#[test]
fn a_service_manager_hears_of_start_life_and_end() {
    let place = Place::new();
    let said = std::os::unix::net::UnixDatagram::bind(place.path("notify")).unwrap();
    said.set_read_timeout(Some(TIMEOUT)).unwrap();
    let heard = || {
        let mut bytes = [0; 64];
        let len = said.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    let mut command = Command::new(PROGRAM);
    command.arg("--socket-path").arg(place.path("a")).arg(strict());
    command.env("NOTIFY_SOCKET", place.path("notify")).env("WATCHDOG_USEC", "100000");
    command.env_remove("WATCHDOG_PID").env_remove("RUST_LOG").stderr(Stdio::piped());
    let mut program = Program(command.spawn().unwrap());
    assert_eq!(heard(), "READY=1");
    assert!(place.path("a").exists(), "it was ready then");
    assert_eq!(heard(), "WATCHDOG=1");
    program.end(Signal::TERM);
    let last = std::iter::repeat_with(heard).find(|what| what != "WATCHDOG=1");
    assert_eq!(last.as_deref(), Some("STOPPING=1\nEXTEND_TIMEOUT_USEC=11000000"));
}

#[test]
fn the_unit_of_systemd_is_well_formed() {
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/systemd/vhost-device-ism.service");
    let text = std::fs::read_to_string(unit).unwrap();
    // systemd-analyze reports a missing program as a mistake.
    let installed = "/usr/bin/vhost-device-ism";
    assert!(text.contains(&format!("ExecStart={installed} ")));
    let place = Place::new();
    let copy = place.path("vhost-device-ism.service");
    std::fs::write(&copy, text.replace(installed, PROGRAM)).unwrap();
    let mut analyze = Command::new("systemd-analyze");
    let Ok(output) = analyze.args(["verify", "--man=no"]).arg(&copy).output() else {
        eprintln!("SKIPPED: there is no systemd-analyze");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("vhost-device-ism.service:"), "{said}");
}

#[test]
fn the_example_of_a_socket_unit_is_well_formed_and_fits_the_configuration() {
    let packaging = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging"));
    let read = |name: &str| std::fs::read_to_string(packaging.join(name)).unwrap();
    let (unit, config) = (read("vhost-device-ism.socket"), read("vhost-device-ism.toml"));
    let listens: Vec<&str> =
        unit.lines().filter_map(|line| line.strip_prefix("ListenSequentialPacket=")).collect();
    assert_eq!(listens, ["/run/vhost-device-ism/any/any.sock"]);
    // A pool has a packet socket, with the same mode as without a unit.
    let pool = format!("socket = {:?}\ndevices = 64\nmode = \"666\"", listens[0]);
    assert!(config.contains(&pool) && unit.contains("SocketMode=0666"), "{config}{unit}");
    let place = Place::new();
    let service = "[Service]\nExecStart=/bin/true\n";
    std::fs::write(place.path("vhost-device-ism.service"), service).unwrap();
    let copy = place.path("vhost-device-ism.socket");
    std::fs::write(&copy, unit).unwrap();
    let mut analyze = Command::new("systemd-analyze");
    let Ok(output) = analyze.args(["verify", "--man=no"]).arg(&copy).output() else {
        eprintln!("SKIPPED: there is no systemd-analyze");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("vhost-device-ism.socket:"), "{said}");
}

#[test]
fn the_unit_of_systemd_leaves_little_open() {
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/systemd/vhost-device-ism.service");
    let mut analyze = Command::new("systemd-analyze");
    analyze.args(["security", "--offline=true", "--no-pager", "--threshold=15", unit]);
    let Ok(output) = analyze.output() else {
        eprintln!("SKIPPED: there is no systemd-analyze");
        return;
    };
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("Overall exposure level"), "{said}");
}

#[test]
fn reconnecting_leaks_neither_descriptors_nor_threads_nor_memory() {
    let place = Place::new();
    // With the sandbox only root may list the daemon's descriptors.
    let program = Program::start(&place, &["a", "b"], &["--no-sandbox"]);
    let stable_state = |program: &Program| {
        // Threads of a disconnected front end take a moment.
        let mut last = (0, 0);
        eventually("an end of changes", || {
            std::thread::sleep(Duration::from_millis(20));
            let now = (program.count("fd"), program.count("task"));
            std::mem::replace(&mut last, now) == now
        });
        last
    };
    work(&place.path("a"), &place.path("b"));
    let before = stable_state(&program);
    let memory = program.memory("VmRSS");
    for _ in 0..50 {
        work(&place.path("a"), &place.path("b"));
    }
    // Some state of the first front ends may still have been present.
    eventually("the state of before", || {
        let now = stable_state(&program);
        now.0 <= before.0 && now.1 <= before.1
    });
    let grown = program.memory("VmRSS").saturating_sub(memory);
    assert!(grown < 4 << 10, "grew by {grown} KiB");
}

#[test]
fn a_hundred_idle_devices_stay_small_and_use_no_processor() {
    // A hundred front ends have more descriptors than a user's usual limit.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let place = Place::new();
    let names: Vec<String> = (0..100).map(|i| format!("g{i}")).collect();
    let sockets: Vec<&str> = names.iter().map(String::as_str).collect();
    let program = Program::start(&place, &sockets, &["--no-sandbox"]);
    let empty = program.memory("VmRSS");
    let guests: Vec<(FrontEnd, Gid)> =
        sockets.iter().map(|name| FrontEnd::greet(&place.path(name))).collect();
    // Work begun by the hellos may take a moment on a loaded machine.
    let mut used = u64::MAX;
    eventually("half a second without work", || {
        let before = program.ticks();
        std::thread::sleep(Duration::from_millis(500));
        used = program.ticks() - before;
        used <= 1
    });
    let (resident, private) = (program.memory("VmRSS"), program.memory("RssAnon"));
    println!(
        "100 sockets: {empty} KiB resident; 100 idle devices: {resident} KiB resident, \
         {private} KiB of it anonymous, {} threads, {} descriptors",
        program.count("task"),
        program.count("fd"),
    );
    drop(guests);
    if !cfg!(debug_assertions) {
        assert!(resident <= 24 << 10, "{resident} KiB");
    }
}

#[test]
fn a_stale_kick_does_not_keep_the_daemon_busy() {
    let place = Place::new();
    let program = Program::start(&place, &["a"], &[]);
    let (mut a, _) = FrontEnd::greet(&place.path("a"));
    let old = a.replace_kick(CONTROL);
    old.write(1).unwrap();
    assert_eq!(a.command(Op::Stats, &[]).0, Status::Ok);
    let before = program.ticks();
    std::thread::sleep(Duration::from_millis(500));
    assert!(program.ticks() - before <= 5);
}

/// A measurement, not a test: `cargo test --release -- --ignored --nocapture latency`.
#[test]
#[ignore = "a measurement"]
fn latency_from_kick_to_the_owners_call() {
    const ROUNDS: usize = 20_000;
    let place = Place::new();
    let program = Program::start(&place, &["a", "b"], &[]);
    let (mut a, gid_a) = FrontEnd::greet(&place.path("a"));
    let (mut b, _) = FrontEnd::greet(&place.path("b"));
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    let tail = dmb.slab_off.get() + u64::from(dmb.slab_len.get()) - CONTROL_LEN as u64;
    let line = tail + line_offset(dmb.line.get()).unwrap() as u64;
    b.write_window(line + LINE_ARMED as u64, &1u32.to_le_bytes());
    let token = dmb.token.get();

    // The owner sleeps on its call descriptor in a thread of its own, like a driver.
    let (stamp, stamps) = std::sync::mpsc::channel();
    let call = b.queues[EVENTS].call.try_clone().unwrap();
    let owner = std::thread::spawn(move || {
        while call.read().is_ok_and(|count| count < 1 << 32) {
            if stamp.send(Instant::now()).is_err() {
                return;
            }
        }
    });
    let (mut whole, mut processed) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        b.want_call(EVENTS);
        let start = Instant::now();
        a.send_move(MOVES, token, &[], true);
        let woken = stamps.recv().unwrap();
        whole.push(woken - start);
        assert!(a.used(MOVES, TIMEOUT).is_some());
        processed.push(start.elapsed());
        assert!(b.event(TIMEOUT).is_some());
        std::thread::sleep(Duration::from_micros(50));
    }
    for (name, times) in
        [("kick to the owner's thread", &mut whole), ("kick to A's", &mut processed)]
    {
        times.sort();
        let at = |percent: usize| times[times.len() * percent / 100].as_nanos() as f64 / 1000.0;
        println!("{name}: median {:.1} us, p90 {:.1}, p99 {:.1}", at(50), at(90), at(99));
    }
    b.queues[EVENTS].call.write(1 << 33).unwrap();
    owner.join().unwrap();
    drop(program);
}
