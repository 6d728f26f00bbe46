// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file of `smc run --status`: its costs, and the effects that it must not have.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "common/c.rs"]
mod c;
mod common;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Fabric, await_listener, free_port, my_role, role};
use rustix::fs::inotify;
use smc_test_support::TestDir;

const CLIENTS: usize = 40;

/// Accepts a client and returns its bytes.
fn serve(listener: &TcpListener) {
    let (mut stream, _) = listener.accept().unwrap();
    let mut word = [0; 5];
    stream.read_exact(&mut word).unwrap();
    stream.write_all(&word).unwrap();
}

/// A client without the library.
fn ask(port: u16) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(b"hello").unwrap();
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    assert_eq!(back, b"hello");
}

/// The lines of each report in a directory.
fn lines(directory: &Path) -> Vec<usize> {
    let files = std::fs::read_dir(directory).unwrap().flatten();
    let texts = files.map(|file| std::fs::read_to_string(file.path()).unwrap());
    let mut lines: Vec<_> = texts
        .map(|text| {
            assert!(text.ends_with("}\n") && text.starts_with('{'), "{text}");
            text.lines().count()
        })
        .collect();
    lines.sort_unstable();
    lines
}

/// How often each file was opened since the descriptor was made.
fn opened(watch: &OwnedFd) -> BTreeMap<String, usize> {
    let mut times = BTreeMap::new();
    let mut room = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(watch, &mut room);
    while let Ok(event) = reader.next() {
        let name = event.file_name().map(|name| name.to_string_lossy().into_owned());
        if event.events().contains(inotify::ReadFlags::OPEN) {
            *times.entry(name.unwrap_or_default()).or_default() += 1;
        }
    }
    times
}

#[test]
fn a_process_opens_its_report_once_and_its_children_have_their_own() {
    const TEST: &str = "a_process_opens_its_report_once_and_its_children_have_their_own";
    if let Some((_, port)) = my_role() {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        (0..CLIENTS).for_each(|_| serve(&listener));
        c::wait(c::fork(|| (0..2).for_each(|_| serve(&listener))));
        (0..2).for_each(|_| serve(&listener));
        return;
    }
    let fabric = Fabric::new(1);
    let status = std::fs::canonicalize(fabric.file("status")).unwrap();
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    // Without something between them, the kernel counts events of a kind as one.
    let events = inotify::WatchFlags::OPEN | inotify::WatchFlags::CLOSE_WRITE;
    inotify::add_watch(&watch, &status, events).unwrap();
    let port = free_port();
    let server = role(&mut fabric.smc(std::env::current_exe().unwrap()), TEST, "server", port);
    await_listener(port);
    (0..CLIENTS + 4).for_each(|_| ask(port));
    server.finish();
    let times = opened(&watch);
    assert_eq!(times.values().copied().collect::<Vec<_>>(), [1, 1], "{times:?}");
    assert_eq!(lines(&status), [2, CLIENTS + 2]);
}

#[test]
fn lines_go_into_no_file_that_has_got_the_number_of_the_report() {
    const TEST: &str = "lines_go_into_no_file_that_has_got_the_number_of_the_report";
    if let Some((_, port)) = my_role() {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        serve(&listener);
        let of_report = |number: &u32| {
            let file = std::fs::read_link(format!("/proc/self/fd/{number}"));
            file.is_ok_and(|file| file.extension().is_some_and(|end| end == "jsonl"))
        };
        let number = (0..1 << 16).find(of_report).unwrap();
        let mut other = tempfile();
        // SAFETY: the number is open. By an instruction of its own, this program takes it away.
        let mut report = unsafe { OwnedFd::from_raw_fd(number as i32) };
        rustix::io::dup3(&other, &mut report, rustix::io::DupFlags::CLOEXEC).unwrap();
        (0..2).for_each(|_| serve(&listener));
        let mut text = String::new();
        other.read_to_string(&mut text).unwrap();
        assert_eq!(text, "");
        std::mem::forget(report);
        return;
    }
    let fabric = Fabric::new(1);
    let port = free_port();
    let server = role(&mut fabric.smc(std::env::current_exe().unwrap()), TEST, "server", port);
    await_listener(port);
    (0..3).for_each(|_| ask(port));
    server.finish();
    assert_eq!(lines(&fabric.file("status")), [3]);
}

/// A file without contents and name.
fn tempfile() -> File {
    let own = TestDir::new();
    File::options().read(true).append(true).create_new(true).open(own.path("file")).unwrap()
}

#[test]
fn a_report_that_was_removed_begins_anew() {
    const TEST: &str = "a_report_that_was_removed_begins_anew";
    if let Some((_, port)) = my_role() {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        (0..3).for_each(|_| serve(&listener));
        return;
    }
    let fabric = Fabric::new(1);
    let port = free_port();
    let server = role(&mut fabric.smc(std::env::current_exe().unwrap()), TEST, "server", port);
    await_listener(port);
    ask(port);
    let report = fabric.file("status").join(format!("{}.jsonl", server.pid()));
    std::fs::remove_file(report).unwrap();
    (0..2).for_each(|_| ask(port));
    server.finish();
    assert_eq!(lines(&fabric.file("status")), [2]);
}

#[test]
fn workers_that_give_up_their_rights_have_their_reports() {
    const TEST: &str = "workers_that_give_up_their_rights_have_their_reports";
    /// The user without rights.
    const USER: u32 = 65534;
    if let Some((_, port)) = my_role() {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        // SAFETY: a path and numbers; each child has one thread.
        let ways: [fn() -> i32; 5] = unsafe {
            [
                || libc::setuid(USER),
                || libc::setresuid(USER, USER, USER),
                || libc::syscall(libc::SYS_setreuid, USER, USER) as i32,
                || libc::chroot(c"/dev/shm".as_ptr()),
                // The process had a report before.
                || libc::seteuid(USER),
            ]
        };
        for (at, way) in ways.into_iter().enumerate() {
            c::wait(c::fork(|| {
                if at == 4 {
                    serve(&listener);
                }
                assert_eq!(way(), 0);
                serve(&listener);
            }));
        }
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: this user has no rights to give up");
        return;
    }
    let fabric = Fabric::new(1);
    let status = fabric.file("status");
    std::fs::set_permissions(&status, std::fs::Permissions::from_mode(0o700)).unwrap();
    let port = free_port();
    let mut server = fabric.smc(std::env::current_exe().unwrap());
    let server = role(server.stderr(Stdio::piped()), TEST, "server", port);
    await_listener(port);
    (0..6).for_each(|_| ask(port));
    server.finish();
    assert_eq!(lines(&status), [1, 1, 1, 1, 2]);
}

/// A server under the library, which accepts three clients, started in a shell after the command
/// `before`. Returns the output.
fn server_after(fabric: &Fabric, test: &str, shell: &[&str], before: &str) -> String {
    let port = free_port();
    let mut command = Command::new(shell[0]);
    command.args(&shell[1..]).args(["-c", &format!("{before} && exec env \"$@\" 2>&1"), "sh"]);
    let program = std::env::current_exe().unwrap();
    let under_library = fabric.smc(&program);
    for (name, value) in under_library.get_envs() {
        let mut word = name.to_owned();
        word.push("=");
        word.push(value.unwrap());
        command.arg(word);
    }
    let server =
        role(command.env("STATUS", fabric.file("status")).arg(program), test, "server", port);
    await_listener(port);
    (0..3).for_each(|_| ask(port));
    server.finish()
}

#[test]
fn a_report_on_a_full_disk_is_said_to_be_incomplete_once() {
    const TEST: &str = "a_report_on_a_full_disk_is_said_to_be_incomplete_once";
    if let Some((_, port)) = my_role() {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        (0..3).for_each(|_| serve(&listener));
        return;
    }
    let shell = ["unshare", "--map-root-user", "--mount", "sh"];
    let disk = "mount -t tmpfs -o size=4k none \"$STATUS\"";
    if smc_test_support::unshare(&["--map-root-user", "--mount"]).is_none() {
        return;
    }
    let fabric = Fabric::new(1);
    let full = format!("{disk} && head -c 4096 /dev/zero >\"$STATUS/full\"");
    let said = server_after(&fabric, TEST, &shell, &full);
    assert_eq!(said.matches("is incomplete: No space left on device").count(), 1, "{said}");
}

#[test]
fn a_report_that_is_as_long_as_a_file_may_be_ends_nothing() {
    const TEST: &str = "a_report_that_is_as_long_as_a_file_may_be_ends_nothing";
    if let Some((_, port)) = my_role() {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        (0..3).for_each(|_| serve(&listener));
        return;
    }
    let fabric = Fabric::new(1);
    let said = server_after(&fabric, TEST, &["sh"], "ulimit -f 0");
    assert_eq!(said.matches("is incomplete: File too large").count(), 1, "{said}");
}
