// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events of the host: signals, full disks and memory, few processors and descriptors.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Resource, Rlimit, Signal, geteuid, getrlimit, kill_process, prlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use vhost_device_ism::management::{AddGuest, Client};
use virtio_ism_abi::command::{BACKING_WINDOW, Op, RegisterReply};
use virtio_ism_abi::{Gid, Status};

use super::front_end::*;
use super::program::{PROGRAM, Program, strict, work};

/// Written past the test harness' capture.
fn not_tested(why: &str) {
    let _ = writeln!(std::io::stderr(), "NOT TESTED: {why}");
}

/// A front end breaking a queue; the daemon logs a line.
fn break_a_queue(path: &Path) {
    let mut a = FrontEnd::connect(path);
    a.descriptor(CONTROL, 0, 0, 8, 1, 0);
    a.offer(CONTROL, 0);
    a.kick(CONTROL);
}

#[test]
fn a_log_on_a_full_disk_stops_nobody() {
    let place = Place::new();
    let management = place.path("m");
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(PROGRAM);
    command.arg(strict()).arg("--management").arg(&management).stderr(full);
    let mut program = Program::start_by(command, &place, &["a", "b"]);
    until_listening(&management);
    let mut client = Client::connect(&management).unwrap();
    for round in 1..=3 {
        break_a_queue(&place.path("a"));
        eventually("a fault", || {
            let guests = client.list().unwrap();
            guests.iter().any(|guest| guest.faults.get("bad_chain") == Some(&round))
        });
        work(&place.path("a"), &place.path("b"));
    }
    assert_eq!(program.end(Signal::TERM), "");
}

#[test]
fn a_log_that_nobody_reads_any_more_stops_nobody() {
    let place = Place::new();
    let mut program = {
        let (read, write) = std::io::pipe().unwrap();
        let mut command = Command::new(PROGRAM);
        command.arg(strict()).stderr(write);
        let program = Program::start_by(command, &place, &["a", "b"]);
        drop(read);
        program
    };
    break_a_queue(&place.path("a"));
    work(&place.path("a"), &place.path("b"));
    program.end(Signal::TERM);
}

#[test]
fn a_log_whose_reader_is_stuck_stops_nobody() {
    let place = Place::new();
    let management = place.path("m");
    let (mut read, mut write) = std::io::pipe().unwrap();
    // The daemon's end of the pipe is full, and blocks.
    rustix::io::ioctl_fionbio(&write, true).unwrap();
    while write.write(&[b'x'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&write, false).unwrap();
    let mut command = Command::new(PROGRAM);
    command.arg(strict()).arg("--management").arg(&management).stderr(write);
    let mut program = Program::start_by(command, &place, &["a", "b"]);
    until_listening(&management);
    let mut client = Client::connect(&management).unwrap();
    let mut break_again = |round| {
        break_a_queue(&place.path("a"));
        eventually("a fault", || {
            let guests = client.list().unwrap();
            guests.iter().any(|guest| guest.faults.get("bad_chain") == Some(&round))
        });
        work(&place.path("a"), &place.path("b"));
    };
    break_again(1);
    // The log is read again.
    let mut log = vec![0; rustix::pipe::fcntl_getpipe_size(&read).unwrap()];
    read.read_exact(&mut log).unwrap();
    break_again(2);
    program.end(Signal::TERM);
    let mut log = String::new();
    read.read_to_string(&mut log).unwrap();
    let (first, rest) = log.split_once('\n').unwrap();
    assert!(first.starts_with("vhost-device-ism: nobody read the log: "), "{log}");
    assert!(rest.contains("ending"), "{log}");
}

#[test]
fn a_front_end_that_comes_and_goes_fills_no_log() {
    let place = Place::new();
    let mut program = Program::start(&place, &["a", "b"], &[strict()]);
    let start = std::time::Instant::now();
    for _ in 0..100 {
        drop(FrontEnd::negotiate(&place.path("a"), &Wish::default()));
    }
    work(&place.path("a"), &place.path("b"));
    let said = program.end(Signal::TERM);
    let lines = said.lines().filter(|line| line.contains("front end")).count();
    // Of two guests.
    let most = 2 * 10 * (start.elapsed().as_secs() as usize / 10 + 1);
    assert!(lines <= most, "{lines} lines");
}

#[test]
fn slabs_need_no_room_in_dev_shm() {
    if !geteuid().is_root() {
        return not_tested("only root can mount a file system");
    }
    let place = Place::new();
    let mut command = Command::new("unshare");
    let mount = "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero >/dev/shm/full \
                 && ! echo x >/dev/shm/more && exec \"$@\"";
    command.args(["--mount", "sh", "-c", mount, "sh", PROGRAM, strict()]).stderr(Stdio::piped());
    let mut program = Program::start_by(command, &place, &["a", "b"]);
    work(&place.path("a"), &place.path("b"));
    program.end(Signal::TERM);
}

/// The daemon measures time by a monotonic clock, so a change of the system clock makes nothing early, late
/// or lost. Only the lines of its log have the time of day.
#[test]
fn the_daemon_reads_no_clock_that_can_be_set() {
    fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap().flatten() {
            let path = entry.path();
            match path.is_dir() {
                true => sources(&path, found),
                false => found.push(path),
            }
        }
    }
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    assert!(files.len() > 50);
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for clock in ["SystemTime::now", "UNIX_EPOCH", "ClockId::Realtime", "CLOCK_REALTIME"] {
            assert!(!text.contains(clock), "{} uses {clock}", file.display());
        }
    }
}

#[test]
fn one_processor_is_enough() {
    let place = Place::new();
    let all = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
    let mut one = CpuSet::new();
    one.set(first);
    // The daemon inherits the affinity.
    sched_setaffinity(None, &one).unwrap();
    let mut program = Program::start(&place, &["a", "b", "m"], &[strict()]);
    sched_setaffinity(None, &all).unwrap();
    std::thread::scope(|scope| {
        let (m, _) = FrontEnd::greet(&place.path("m"));
        let (end, ended) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || {
            while ended.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                (0..QUEUES).for_each(|queue| m.kick(queue));
            }
        });
        (0..3).for_each(|_| work(&place.path("a"), &place.path("b")));
        drop(end);
    });
    program.end(Signal::TERM);
}

/// The broker of a daemon, and its parent.
fn brokers_of(program: &Program) -> [Pid; 2] {
    let child = |of: Pid| {
        let children = format!("/proc/{of}/task/{of}/children");
        let read = || std::fs::read_to_string(&children).unwrap_or_default();
        eventually("a child", || !read().trim().is_empty());
        Pid::from_raw(read().trim().parse().unwrap()).unwrap()
    };
    let keeper = child(program.pid());
    [child(keeper), keeper]
}

/// The environment of a daemon under a service manager.
fn watched(place: &Place, options: &[&str]) -> (Command, std::os::unix::net::UnixDatagram) {
    let said = std::os::unix::net::UnixDatagram::bind(place.path("notify")).unwrap();
    said.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(options).stderr(Stdio::piped());
    command.env("NOTIFY_SOCKET", place.path("notify")).env_remove("WATCHDOG_USEC");
    (command, said)
}

#[test]
fn a_broker_that_is_killed_is_made_again_and_knows_its_names() {
    let place = Place::new();
    let management = place.path("m");
    let pool = place.path("p,devices=8,mode=666");
    let options = [strict(), "--management", management.to_str().unwrap()];
    let options = [&options[..], &["--socket-path", pool.to_str().unwrap()]].concat();
    let mut program = Program::start(&place, &["a", "b"], &options);
    until_listening(&management);
    let mut client = Client::connect(&management).unwrap();
    let add = |name: &str| AddGuest { socket: place.path(name), ..AddGuest::default() };
    client.add(&add("c")).unwrap();
    let (_member, _) = super::pool::front_end(super::pool::ask(&place.path("p")).unwrap());
    let [broker, keeper] = brokers_of(&program);
    kill_process(broker, Signal::KILL).unwrap();
    eventually("a device of the pool", || super::pool::ask(&place.path("p")).is_ok());
    let [another, same] = brokers_of(&program);
    assert!(another != broker && same == keeper);
    work(&place.path("a"), &place.path("b"));
    client.add(&add("d")).unwrap();
    client.remove("c").unwrap();
    assert!(!place.path("c").exists(), "the name is known");
    client.add(&add("c")).unwrap();
    assert!(client.metrics().unwrap().contains("ism_broker_up 1"));
    let said = program.end(Signal::TERM);
    assert!(said.contains("the broker was killed by signal 9"), "{said}");
    // For an audit: who has had a device of the pool.
    let [pid, uid] = [std::process::id(), rustix::process::getuid().as_raw()];
    let who = format!("a device of the pool guest=\"p/1\" pid={pid} uid={uid} network_namespace=");
    assert!(said.contains(&who), "{said}");
    for name in ["a", "b", "c", "d", "p", "m"] {
        eventually("the end of a name", || !place.path(name).exists());
    }
}

#[test]
fn a_broker_whose_keeper_is_killed_goes_on() {
    let place = Place::new();
    let management = place.path("m");
    let options = [strict(), "--management", management.to_str().unwrap()];
    let mut program = Program::start(&place, &["a", "b"], &options);
    until_listening(&management);
    let [_, keeper] = brokers_of(&program);
    kill_process(keeper, Signal::KILL).unwrap();
    let mut client = Client::connect(&management).unwrap();
    client.add(&AddGuest { socket: place.path("c"), ..AddGuest::default() }).unwrap();
    work(&place.path("a"), &place.path("c"));
    program.end(Signal::TERM);
    eventually("the end of the names", || !place.path("c").exists() && !place.path("a").exists());
}

#[test]
fn a_daemon_whose_broker_is_gone_for_good_says_so_and_ends_after_its_front_ends() {
    let place = Place::new();
    let management = place.path("m");
    let options = [strict(), "--management", management.to_str().unwrap()];
    let (command, said) = watched(&place, &options);
    let mut program = Program::start_by(command, &place, &["a", "b"]);
    until_listening(&management);
    let (front_end, _) = FrontEnd::greet(&place.path("a"));
    let [broker, keeper] = brokers_of(&program);
    kill_process(keeper, Signal::KILL).unwrap();
    kill_process(broker, Signal::KILL).unwrap();
    let mut client = Client::connect(&management).unwrap();
    eventually("the metric", || client.metrics().unwrap().contains("ism_broker_up 0"));
    let heard = || {
        let mut bytes = [0; 256];
        let len = said.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    let status = std::iter::repeat_with(heard).find(|what| what.starts_with("STATUS="));
    assert!(status.unwrap().contains("the broker is gone"));
    // The configured guests are served.
    drop(FrontEnd::greet(&place.path("b")));
    let add = AddGuest { socket: place.path("c"), ..AddGuest::default() };
    let refused = client.add(&add).unwrap_err().to_string();
    assert!(refused.contains("broker") || refused.contains("pipe"), "{refused}");
    drop(front_end);
    let (status, log) = program.ended();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("ERROR") && log.contains("the broker is gone"), "{log}");
}

#[test]
fn without_descriptors_a_front_end_is_refused_and_others_go_on() {
    if !geteuid().is_root() {
        return not_tested("only root can count the descriptors of a daemon in its sandbox");
    }
    let place = Place::new();
    let mut program = Program::start(&place, &["a", "b", "c"], &[strict()]);
    let (mut a, gid) = FrontEnd::greet(&place.path("a"));
    let (mut b, _) = FrontEnd::greet(&place.path("b"));
    let highest = std::fs::read_dir(format!("/proc/{}/fd", program.pid())).unwrap();
    let highest = highest.flatten().filter_map(|fd| fd.file_name().to_str()?.parse::<u64>().ok());
    let most = highest.max().unwrap() + 3;
    let before = getrlimit(Resource::Nofile);
    let limit = Rlimit { current: Some(most), ..before };
    prlimit(Some(program.pid()), Resource::Nofile, limit).unwrap();
    let refused = std::os::unix::net::UnixStream::connect(place.path("c")).and_then(|stream| {
        stream.set_read_timeout(Some(TIMEOUT))?;
        std::io::Read::read(&mut &stream, &mut [0])
    });
    assert!(matches!(refused, Ok(0)) || refused.is_err(), "{refused:?}");
    // Connections with their descriptors go on. A slab needs one more.
    assert_eq!(a.command(Op::Stats, &[]).0, Status::Ok);
    assert_eq!(b.command(Op::Stats, &[]).0, Status::Ok);
    let limit = Rlimit { current: before.maximum, ..before };
    prlimit(Some(program.pid()), Resource::Nofile, limit).unwrap();
    let token = b.register(gid, 1, 64 << 10, BACKING_WINDOW).token.get();
    assert_eq!(a.transfer(token, &[(0, b"hello")], false), Status::Ok);
    drop((a, b));
    work(&place.path("a"), &place.path("c"));
    program.end(Signal::TERM);
}

/// A memory cgroup, removed at the end.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// A group with a limit in bytes. `None`: unsupported by this machine, or not permitted for this user.
    fn new(limit: u64) -> Option<MemoryGroup> {
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        let of_type = |wanted: &str, option: Option<&str>| {
            mounts.lines().find_map(|line| {
                let fields: Vec<&str> = line.split(' ').collect();
                let (path, kind, options) = (fields.get(1)?, fields.get(2)?, fields.get(3)?);
                let has = option.is_none_or(|option| options.split(',').any(|o| o == option));
                (*kind == wanted && has).then(|| PathBuf::from(path))
            })
        };
        let name = format!("ism-test-{}", std::process::id());
        let (path, file) = match of_type("cgroup", Some("memory")) {
            Some(root) => (root.join(name), "memory.limit_in_bytes"),
            None => (of_type("cgroup2", None)?.join(name), "memory.max"),
        };
        std::fs::create_dir(&path).ok()?;
        let group = MemoryGroup(path);
        std::fs::write(group.0.join(file), limit.to_string()).ok()?;
        Some(group)
    }

    /// Number of the kernel's OOM kills in the group.
    fn kills(&self) -> u64 {
        let read = |file| std::fs::read_to_string(self.0.join(file)).ok();
        let text = read("memory.oom_control").or_else(|| read("memory.events")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        line.unwrap().trim().parse().unwrap()
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // The group's last process may take a moment.
        eventually("the end of the group", || std::fs::remove_dir(&self.0).is_ok());
    }
}

/// Bytes of slabs a device may own, and bytes of its memory the daemon may touch first.
const QUOTAS: (u64, u64) = (8 << 20, 4 << 20);

/// Fills all slabs `to` may own for `from`, by moves: the daemon touches each page first.
fn fill_slabs(from: &mut FrontEnd, from_gid: Gid, to: &mut FrontEnd) -> usize {
    use zerocopy::{FromBytes, IntoBytes};
    let len = 1 << 20;
    let page = [7; 1];
    let mut filled = 0;
    for idx in 1.. {
        let request = register_request(from_gid, idx, len, BACKING_WINDOW);
        let (status, reply) = to.command(Op::Register, request.as_bytes());
        if status != Status::Ok {
            break;
        }
        let token = RegisterReply::ref_from_prefix(&reply).unwrap().0.token.get();
        let pages: Vec<(u32, &[u8])> =
            (0..len / 4096 - 64).map(|n| (n * 4096, &page[..])).collect();
        for some in pages.chunks(8) {
            assert_eq!(from.transfer(token, some, false), Status::Ok);
        }
        filled += 1;
    }
    filled
}

#[test]
fn in_a_memory_cgroup_of_the_size_of_the_quotas_the_daemon_is_not_killed() {
    let guests = 2;
    // The daemon's own need, a few MiB, and the kernel's additional charges.
    let limit = guests * (QUOTAS.0 + QUOTAS.1) + (24 << 20);
    let Some(group) = MemoryGroup::new(limit) else {
        return not_tested("this machine has no memory cgroups, or they are not ours to make");
    };
    let place = Place::new();
    let config = place.path("config.toml");
    let text = format!(
        "[[fabric]]\nchid = \"ff00\"\n[fabric.quotas]\nmax-slab-bytes = {}\nmax-touched-bytes = {}\n",
        QUOTAS.0, QUOTAS.1
    );
    let sockets =
        ["a", "b"].map(|name| format!("[[guest]]\nsocket = \"{}\"\n", place.path(name).display()));
    std::fs::write(&config, text + &sockets.concat()).unwrap();
    let mut command = Command::new("sh");
    let procs = group.0.join("cgroup.procs");
    command.args(["-c", "echo $$ >\"$1\" && shift && exec \"$@\"", "sh"]).arg(&procs);
    command.args([PROGRAM, strict(), "--config"]).arg(&config).stderr(Stdio::piped());
    let mut program = Program::start_by(command, &place, &[]);
    eventually("a socket", || place.path("b").exists());
    for _ in 0..2 {
        let (mut a, gid_a) = FrontEnd::greet(&place.path("a"));
        let (mut b, gid_b) = FrontEnd::greet(&place.path("b"));
        let filled = fill_slabs(&mut a, gid_a, &mut b) + fill_slabs(&mut b, gid_b, &mut a);
        assert!(filled >= 4, "{filled} MiB");
    }
    work(&place.path("a"), &place.path("b"));
    assert_eq!(group.kills(), 0);
    program.end(Signal::TERM);
}
