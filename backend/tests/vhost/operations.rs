// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An operator's use of the program: checking a configuration, rereading it, asking the daemon.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use vhost_device_ism::management::Client;
use virtio_ism_abi::Status;
use virtio_ism_abi::command::BACKING_WINDOW;

use super::front_end::*;
use super::program::{PROGRAM, Program, strict};

/// A daemon with a configuration file, and its log.
struct Configured {
    place: Place,
    program: Program,
}

impl Configured {
    fn start(guests: &str) -> Configured {
        let place = Place::new();
        write_config(&place, guests);
        let mut command = Command::new(PROGRAM);
        command.arg("--config").arg(place.path("c.toml")).arg(strict());
        command.stderr(File::create(place.path("log")).unwrap());
        let program = Program::start_by(command, &place, &[]);
        for socket in ["m", "r"] {
            until_listening(&place.path(socket));
        }
        Configured { place, program }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.place.path("log")).unwrap()
    }

    /// Sends SIGHUP and waits until the log has another line with `word`.
    fn hang_up(&self, word: &str) {
        let count = |log: &str| log.lines().filter(|line| line.contains(word)).count();
        let before = count(&self.log());
        kill_process(self.program.pid(), Signal::HUP).unwrap();
        eventually(word, || count(&self.log()) > before);
    }

    fn ctl(&self, words: &[&str]) -> Output {
        ctl(&self.place.path("m"), words)
    }
}

/// Replaces the file, like an editor. `%` in `guests` is the place.
fn write_config(place: &Place, guests: &str) {
    let head = "management = \"%/m\"\nmetrics = \"%/r\"\n";
    let text = format!("{head}{guests}")
        .replace('%', place.path("").to_str().unwrap().trim_end_matches('/'));
    std::fs::write(place.path("new"), text).unwrap();
    std::fs::rename(place.path("new"), place.path("c.toml")).unwrap();
}

fn ctl(management: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.arg("ctl").arg("--management").arg(management).args(words);
    command.output().unwrap()
}

fn run(args: &[&str]) -> Output {
    Command::new(PROGRAM).args(args).env("RUST_LOG", "off").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const A_AND_B: &str = "[[guest]]\nsocket = \"%/a\"\n[[guest]]\nsocket = \"%/b\"\n";

#[test]
fn sighup_adds_and_removes_guests_beside_a_running_transfer() {
    let daemon = Configured::start(&format!("{A_AND_B}[[guest]]\nsocket = \"%/c\"\n"));
    let place = &daemon.place;
    let (mut a, gid_a) = FrontEnd::greet(&place.path("a"));
    let (mut b, gid_b) = FrontEnd::greet(&place.path("b"));
    let (mut c, _) = FrontEnd::greet(&place.path("c"));
    let dmb = b.register(gid_a, 1, 64 << 10, BACKING_WINDOW);
    let ended = AtomicBool::new(false);
    let moved = std::thread::scope(|scope| {
        let transfer = scope.spawn(|| {
            let mut moved = 0u32;
            while !ended.load(Ordering::Relaxed) {
                let bytes = moved.to_le_bytes();
                assert_eq!(a.transfer(dmb.token.get(), &[(8, &bytes)], false), Status::Ok);
                assert_eq!(b.read_window(dmb.dmb_off.get() + 8, 4), bytes);
                moved += 1;
            }
            moved
        });
        for round in 0..5 {
            write_config(place, &format!("{A_AND_B}[[guest]]\nsocket = \"%/d{round}\"\n"));
            daemon.hang_up("the configuration was read again");
            assert!(place.path(&format!("d{round}")).exists());
            assert!(!place.path("c").exists());
            assert!(round == 0 || !place.path(&format!("d{}", round - 1)).exists());
        }
        ended.store(true, Ordering::Relaxed);
        transfer.join().unwrap()
    });
    assert!(moved > 0);
    c.wait_cut();
    // The new guest meets the old ones, with unchanged GIDs.
    let (_, gid_d) = FrontEnd::greet(&place.path("d4"));
    assert!(gid_d != gid_a && gid_d != gid_b);
    let listed = text(&daemon.ctl(&["list", "--json"]).stdout);
    assert!(listed.contains(&gid_a.to_string()) && listed.contains(&gid_b.to_string()), "{listed}");
}

#[test]
fn a_file_that_is_wrong_changes_nothing_and_the_log_says_all_that_is() {
    let daemon = Configured::start(A_AND_B);
    let place = &daemon.place;
    let (mut a, _) = FrontEnd::greet(&place.path("a"));
    for (guests, words) in [
        ("[[guest]]\nsocket =", &["c.toml"][..]),
        ("socket-mode = \"x\"\n[[guest]]\nsocket = \"%/a\"\nchid = \"1\"\n", &["\"x\"", "\"1\""]),
        (
            &format!("window-size = \"1G\"\nmove-queues = 3\n{A_AND_B}"),
            &["window-size, move-queues"],
        ),
        (
            &format!("{A_AND_B}[[guest]]\nsocket = \"%/e\"\n[[guest]]\nsocket = \"%/none/d\"\n"),
            &["none/d"],
        ),
        (
            &format!("[[fabric]]\nchid = \"ff00\"\ncaps = {{ devices = 1 }}\n{A_AND_B}"),
            &["fabric ff00"],
        ),
    ] {
        write_config(place, guests);
        daemon.hang_up("nothing is changed");
        let log = daemon.log();
        let last = log.rsplit("nothing is changed").next().unwrap();
        for word in words {
            assert!(last.contains(word), "{word} is missing in {last}");
        }
        let refused = daemon.ctl(&["reload"]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains(words[0]), "{}", text(&refused.stderr));
    }
    std::fs::remove_file(place.path("c.toml")).unwrap();
    daemon.hang_up("No such file");
    assert_eq!(a.command(virtio_ism_abi::command::Op::Stats, &[]).0, Status::Ok);
    assert!(place.path("b").exists());
    // Made before the failing one.
    assert!(!place.path("e").exists());
    let listed = text(&daemon.ctl(&["list"]).stdout);
    assert_eq!(listed.lines().count(), 3, "{listed}");
}

#[test]
fn settings_of_a_guest_and_its_fabric_change_by_a_reload() {
    let daemon = Configured::start(A_AND_B);
    let place = &daemon.place;
    let (mut a, _) = FrontEnd::greet(&place.path("a"));
    let add = place.path("x,name=kept");
    assert!(daemon.ctl(&["add", add.to_str().unwrap()]).status.success());
    write_config(
        place,
        "[[fabric]]\nchid = \"ff00\"\n[[fabric]]\nchid = \"ff01\"\n\
         [[guest]]\nsocket = \"%/a\"\nchid = \"ff01\"\n[[guest]]\nsocket = \"%/b\"\nname = \"bee\"\n",
    );
    let said = text(&daemon.ctl(&["reload"]).stdout);
    assert_eq!(said, "added bee\nremoved b\nchanged a\n");
    a.wait_cut();
    let (mut a, _) = FrontEnd::greet(&place.path("a"));
    assert_eq!(a.config(24, 2), [0x01, 0xff]);
    let listed = text(&daemon.ctl(&["list"]).stdout);
    let names: Vec<&str> = listed.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names, ["NAME", "a", "bee", "kept"]);
}

/// The daemon's child processes, by name.
fn helpers(daemon: &Program) -> Vec<(String, Pid)> {
    let pid = daemon.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let pids = children.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap());
    let name = |pid: &Pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
    pids.map(|pid| (name(&pid).trim().to_owned(), pid)).collect()
}

#[test]
fn a_killed_reader_of_the_file_takes_reloads_away_and_nothing_else() {
    let daemon = Configured::start(A_AND_B);
    let mut names: Vec<_> = helpers(&daemon.program).into_iter().map(|(name, _)| name).collect();
    names.sort();
    assert_eq!(names, ["broker", "config-reader"]);
    let helpers = helpers(&daemon.program);
    let (_, reader) = helpers.iter().find(|(name, _)| name == "config-reader").unwrap();
    kill_process(*reader, Signal::KILL).unwrap();
    eventually("a line", || daemon.log().contains("the reader of the configuration is gone"));
    daemon.hang_up("nothing is changed");
    super::program::work(&daemon.place.path("a"), &daemon.place.path("b"));
    let c = daemon.place.path("c");
    assert!(daemon.ctl(&["add", c.to_str().unwrap()]).status.success());
}

#[test]
fn a_killed_daemon_leaves_no_process_and_no_socket() {
    let daemon = Configured::start(A_AND_B);
    let helpers = helpers(&daemon.program);
    assert_eq!(helpers.len(), 2);
    kill_process(daemon.program.pid(), Signal::KILL).unwrap();
    // A zombie counts as ended.
    let is_alive = |pid: &Pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    };
    eventually("their end", || !helpers.iter().any(|(_, pid)| is_alive(pid)));
    for socket in ["a", "b", "m", "r"] {
        assert!(!daemon.place.path(socket).exists(), "{socket}");
    }
}

#[test]
fn a_front_end_that_is_killed_is_not_counted_as_a_fault() {
    let daemon = Configured::start(A_AND_B);
    let get_features = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    // Like the kernel at the end of a process with an outstanding request: the answer is unsent, or unread.
    for wait in [0, 0, 0, 20, 20, 20] {
        let mut stream = connected(&daemon.place.path("a"));
        stream.write_all(&get_features).unwrap();
        stream.write_all(&get_features).unwrap();
        std::thread::sleep(Duration::from_millis(wait));
    }
    let mut client = Client::connect(daemon.place.path("m")).unwrap();
    eventually("the end of all", || {
        let guests = client.list().unwrap();
        let a = guests.into_iter().find(|guest| guest.name == "a").unwrap();
        assert!(a.faults.is_empty(), "{:?}", a.faults);
        a.connections == 6 && !a.connected
    });
}

#[test]
fn without_a_file_sighup_is_the_end() {
    let place = Place::new();
    let mut program = Program::start(&place, &["a"], &[strict()]);
    program.end(Signal::HUP);
    assert!(!place.path("a").exists());
}

#[test]
fn check_config_names_every_mistake_and_makes_nothing() {
    let place = Place::new();
    let file = place.path("c.toml");
    let check = |text: &str| {
        std::fs::write(&file, text.replace('%', place.path("").to_str().unwrap())).unwrap();
        run(&["--check-config", "--config", file.to_str().unwrap()])
    };
    let good = check("[[guest]]\nsocket = \"%a\"\n");
    assert!(good.status.success());
    assert_eq!(text(&good.stdout), "nothing is wrong; fabrics: 1, guests: 1\n");
    assert!(!place.path("a").exists());

    // RUST_LOG=off hides no mistake.
    let wrong = check(
        "[[guest]]\nsocket = \"%a\"\ngid = \"1\"\n[[guest]]\nsocket = \"%b\"\nmode = \"8\"\n",
    );
    assert_eq!(wrong.status.code(), Some(1));
    let said = text(&wrong.stderr);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 2, "{said}");
    assert!(lines[0].contains("c.toml:1: \"1\"") && lines[1].contains("c.toml:4: socket mode"));
    let nowhere = text(&check("[[guest]]\nsocket = \"/nodir/a\"\n").stderr);
    assert!(nowhere.contains("there is no directory /nodir"), "{nowhere}");
    let empty = text(&check("").stderr);
    assert!(empty.contains("c.toml has no guest"), "{empty}");
    let missing = run(&["--config", "/nope"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).starts_with("vhost-device-ism: cannot read /nope"));
}

#[test]
fn a_mistake_of_any_length_is_a_short_line_that_does_nothing_to_a_terminal() {
    let daemon = Configured::start(A_AND_B);
    let place = &daemon.place;
    let long = "x".repeat(100_000);
    let wrong = [
        format!("socket = \"%/c\"\nchid = \"{long}\""),
        format!("socket = \"%/c\"\n{long} = 1"),
        format!("socket = \"%/{long}\""),
        "socket = \"%/no\\u001b]0;x\\u0007dir/c\"".to_owned(),
        "socket = \"%/c\"\nname = \"a\\u001b\\nforged\"".to_owned(),
    ];
    for (number, guest) in wrong.iter().enumerate() {
        write_config(place, &format!("{A_AND_B}[[guest]]\n{guest}\n"));
        daemon.hang_up("nothing is changed");
        let file = place.path("c.toml");
        let checked = run(&["--check-config", "--config", file.to_str().unwrap()]);
        assert_eq!(checked.status.code(), Some(1), "{number}");
        for line in text(&checked.stderr).lines().chain(daemon.log().lines()) {
            assert!(line.len() < 1000, "{number}: {}", line.len());
            assert!(!line.contains(char::is_control), "{number}: {line:?}");
        }
    }
}

#[test]
fn a_configuration_that_is_no_file_is_refused_at_once() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let place = Place::new();
    let fifo = place.path("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for path in [fifo.to_str().unwrap(), "/dev/zero", "/tmp"] {
        let refused = run(&["--config", path]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains(path), "{}", text(&refused.stderr));
    }
}

#[test]
fn verbs_list_add_and_remove_guests() {
    let daemon = Configured::start(A_AND_B);
    let place = &daemon.place;
    let pool = place.path("any,devices=3,mode=666");
    assert!(daemon.ctl(&["add", pool.to_str().unwrap()]).status.success());
    let listed = text(&daemon.ctl(&["list"]).stdout);
    assert!(
        listed.lines().any(|line| line.starts_with("any ") && line.contains("0 of 3")),
        "{listed}"
    );
    assert!(daemon.ctl(&["remove", "any"]).status.success());
    assert!(!place.path("any").exists());
    assert!(text(&daemon.ctl(&["metrics"]).stdout).ends_with("# EOF\n"));
    let refused = daemon.ctl(&["remove", "any"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("there is no guest \"any\""));
    let elsewhere = Place::new();
    let socket = elsewhere.path("s");
    let refused = text(&daemon.ctl(&["add", socket.to_str().unwrap()]).stderr);
    // A kernel without landlock would allow the request.
    assert!(refused.is_empty() || refused.contains("in its sandbox"), "{refused}");
    let nobody = ctl(&place.path("nobody"), &["list"]);
    assert_eq!(nobody.status.code(), Some(1));
    assert!(text(&nobody.stderr).contains("is the daemon running"));
}

fn http(path: PathBuf, request: &str) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn the_socket_for_metrics_tells_and_changes_nothing() {
    let daemon = Configured::start(A_AND_B);
    let metrics = daemon.place.path("r");
    let answer = http(metrics.clone(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("# EOF\n"), "{answer}");
    let head = http(metrics.clone(), "HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(http(metrics.clone(), "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    assert!(ctl(&metrics, &["list"]).status.success());
    let c = daemon.place.path("c");
    for words in [&["remove", "a"][..], &["reload"], &["add", c.to_str().unwrap()]] {
        let refused = ctl(&metrics, words);
        assert_eq!(refused.status.code(), Some(1), "{words:?}");
        assert!(text(&refused.stderr).contains("for metrics"), "{words:?}");
    }
    assert!(daemon.place.path("a").exists());
}

#[test]
fn counters_go_on_when_front_ends_come_and_go() {
    let daemon = Configured::start(A_AND_B);
    let (a, b) = (daemon.place.path("a"), daemon.place.path("b"));
    let moved = |wanted: u64| {
        let line = format!("ism_move_bytes_total{{guest=\"a\",chid=\"ff00\"}} {wanted}\n");
        eventually(&line, || text(&daemon.ctl(&["metrics"]).stdout).contains(&line));
    };
    for round in 1..=3 {
        super::program::work(&a, &b);
        moved(5 * round);
    }
    let listed = text(&daemon.ctl(&["list", "--json"]).stdout);
    assert!(listed.contains("\"move_bytes\": 15"), "{listed}");
}

#[test]
fn a_last_request_without_a_line_end_is_answered() {
    let daemon = Configured::start(A_AND_B);
    let mut stream = UnixStream::connect(daemon.place.path("m")).unwrap();
    stream.write_all(b"{\"op\":\"list\"}").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("{\"ok\":true,\"guests\":[{"), "{answer}");
}

#[test]
fn under_the_journal_lines_have_a_priority_and_no_time() {
    for journal in [true, false] {
        let place = Place::new();
        let log = File::create(place.path("log")).unwrap();
        let meta = log.metadata().unwrap();
        let other = if journal { 0 } else { 1 };
        let mut command = Command::new(PROGRAM);
        command.env("JOURNAL_STREAM", format!("{}:{}", meta.st_dev(), meta.st_ino() + other));
        command.arg(strict()).stderr(log).stdout(Stdio::null());
        let mut program = Program::start_by(command, &place, &["a"]);
        program.end(Signal::TERM);
        let log = std::fs::read_to_string(place.path("log")).unwrap();
        let line = log.lines().find(|line| line.contains("listening")).unwrap();
        assert_eq!(line.starts_with("<6>vhost_device_ism"), journal, "{line}");
        assert_eq!(line.contains("INFO"), !journal, "{line}");
    }
}

/// Blocks of code of one kind in the README, with its directory replaced by the test's.
fn blocks_of_readme(kind: &str, place: &Place) -> Vec<String> {
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
    let readme = std::fs::read_to_string(readme).unwrap();
    let directory = place.path("ism");
    let fence = format!("```{kind}\n");
    let blocks = readme.split(&fence).skip(1);
    let blocks = blocks.map(|rest| rest.split("```").next().unwrap());
    blocks.map(|block| block.replace("/run/ism", directory.to_str().unwrap())).collect()
}

#[test]
fn the_configuration_of_the_readme_is_right() {
    let place = Place::new();
    std::fs::create_dir(place.path("ism")).unwrap();
    let blocks = blocks_of_readme("toml", &place);
    assert!(!blocks.is_empty());
    for block in blocks {
        std::fs::write(place.path("c.toml"), block).unwrap();
        let file = place.path("c.toml");
        let checked = run(&["--check-config", "--config", file.to_str().unwrap()]);
        assert!(checked.status.success(), "{}", text(&checked.stderr));
    }
}

#[test]
fn the_commands_of_the_readme_work() {
    let place = Place::new();
    let programs = Path::new(PROGRAM).parent().unwrap();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let mut daemons = Vec::new();
    let mut commands = 0;
    for block in blocks_of_readme("console", &place) {
        for command in block.replace("\\\n", " ").lines().filter_map(|l| l.strip_prefix("$ ")) {
            commands += 1;
            let mut words = command.split_whitespace();
            let program = words.next().unwrap();
            if program == "curl" && Command::new("curl").arg("--version").output().is_err() {
                eprintln!("SKIPPED: there is no curl");
                continue;
            }
            let mut shell = Command::new("sh");
            shell.arg("-c").arg(format!("exec {command}")).env("PATH", &path);
            if program == "vhost-device-ism" && words.next() != Some("ctl") {
                shell.stderr(Stdio::null());
                let sockets = command.split_whitespace().filter(|word| word.starts_with('/'));
                let sockets = sockets.map(|word| word.split(',').next().unwrap());
                let sockets: Vec<PathBuf> = sockets.map(PathBuf::from).collect();
                daemons.push(Program::start_by(shell, &place, &[]));
                assert!(!sockets.is_empty(), "{command}");
                eventually(command, || sockets.iter().all(|socket| socket.exists()));
                // Sockets of guests take only one client, and are left alone.
                let others = ["mgmt.sock", "metrics.sock"];
                let others = sockets.iter().filter(|path| others.iter().any(|o| path.ends_with(o)));
                others.for_each(|path| until_listening(path));
                continue;
            }
            let output = shell.output().unwrap();
            assert!(output.status.success(), "{command}: {}", text(&output.stderr));
        }
    }
    assert!(commands >= 7 && daemons.len() == 2, "{commands} commands");
}

/// Child processes of a process, by their names.
fn child(parent: Pid, name: &str) -> Pid {
    let list = format!("/proc/{parent}/task/{parent}/children");
    let children = std::fs::read_to_string(list).unwrap();
    let mut pids = children.split_whitespace();
    let named = |pid: &&str| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap().trim_end() == name
    };
    let pid = pids.find(named).unwrap_or_else(|| panic!("no {name} among {children}"));
    Pid::from_raw(pid.parse().unwrap()).unwrap()
}

#[test]
fn a_file_that_is_slow_to_read_holds_up_nobody_but_who_has_asked_for_it() {
    let daemon = Configured::start(A_AND_B);
    let place = &daemon.place;
    write_config(place, &format!("{A_AND_B}[[guest]]\nsocket = \"%/c\"\n"));
    let reader = child(daemon.program.pid(), "config-reader");
    kill_process(reader, Signal::STOP).unwrap();
    let mut asking = connected(&place.path("m"));
    asking.write_all(b"{\"op\":\"reload\"}\n{\"op\":\"list\"}\n").unwrap();
    // A client leaving after its request.
    connected(&place.path("m")).write_all(b"{\"op\":\"reload\"}\n").unwrap();
    // Front ends and other clients notice nothing.
    let (mut a, _) = FrontEnd::greet(&place.path("a"));
    let mut other = Client::connect(place.path("m")).unwrap();
    assert_eq!(other.list().unwrap().len(), 2);
    assert!(other.metrics().unwrap().contains("ism_connected"));
    assert!(!place.path("c").exists());
    kill_process(reader, Signal::CONT).unwrap();
    let mut answers = BufReader::new(asking).lines();
    let reloaded = answers.next().unwrap().unwrap();
    assert!(reloaded.contains("\"added\":[\"c\"]"), "{reloaded}");
    assert!(answers.next().unwrap().unwrap().contains("\"name\":\"c\""), "in their order");
    drop(FrontEnd::greet(&place.path("c")));
    assert_eq!(a.command(virtio_ism_abi::command::Op::Stats, &[]).0, Status::Ok);
}

#[test]
fn sockets_without_front_ends_cost_no_thread() {
    let names: Vec<String> = (0..20).map(|number| format!("g{number}")).collect();
    let sockets: Vec<&str> = names.iter().map(String::as_str).collect();
    let place = Place::new();
    let management = place.path("m");
    let options = ["--management", management.to_str().unwrap()];
    let mut program = Program::start(&place, &sockets, &options);
    until_listening(&management);
    let tasks = || std::fs::read_dir(format!("/proc/{}/task", program.pid())).unwrap().count();
    let idle = tasks();
    assert!(idle < 6, "{idle} threads");
    let guest = FrontEnd::greet(&place.path("g7"));
    assert!(tasks() > idle);
    drop(guest);
    // The thread for bus errors stays.
    eventually("the end of the threads", || tasks() <= idle + 1);
    program.end(Signal::TERM);
}
