// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Processes fork, end, execute programs, and pass, copy and close descriptors while daemons end
//! and begin, so connections leave their device or come back at the same moment: no byte is lost
//! and no end waits for ever.
//!
//! `SMC_CHANGES=50` is the number of daemons to end; the default is two. `SMC_SEED` chooses the
//! times of the actions.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/c.rs"]
mod c;
#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::ffi::CString;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use combinations::{accept_and_greet, connect_and_greet, pass, take};
use common::{Fabric, Running, await_listener, eventually, free_port, my_role, role};

/// Actions of the echoing end, at random times.
const ACTS: [&str; 7] =
    ["to-child", "child-closes", "background", "pass", "execute", "spawn", "descriptors"];

/// Numbers without an order.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }

    fn pause(&mut self, millis: u64) {
        sleep(Duration::from_micros(self.below(millis * 1000)));
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// The byte at a position of the stream.
fn byte(at: usize) -> u8 {
    (at.wrapping_mul(0x9e37_79b1) >> 13) as u8
}

fn file(name: &str) -> PathBuf {
    Path::new(&std::env::var_os("FILES").unwrap()).join(name)
}

/// Sends bytes until the test sets the file `stop`, ends the own direction, and checks that all
/// bytes come back, with the end behind them.
fn drive(stream: &TcpStream, act: &str, mut random: Random) {
    let stop = file("stop");
    std::thread::scope(|scope| {
        let sent = scope.spawn(move || {
            let mut sent = 0;
            while !stop.exists() {
                let n = 1 + random.below(20_000) as usize;
                let bytes: Vec<u8> = (sent..sent + n).map(byte).collect();
                { stream }.write_all(&bytes).unwrap_or_else(|e| panic!("{act} at {sent}: {e}"));
                sent += n;
                random.pause(8);
            }
            stream.shutdown(Shutdown::Write).unwrap();
            sent
        });
        let (mut buf, mut got) = (vec![0; 7000], 0);
        loop {
            let n = { stream }.read(&mut buf).unwrap_or_else(|e| panic!("{act} at {got}: {e}"));
            if n == 0 {
                break;
            }
            let wrong = (0..n).find(|k| buf[*k] != byte(got + k));
            assert_eq!(wrong.map(|k| got + k), None, "{act}: the first wrong byte");
            got += n;
        }
        assert_eq!(sent.join().unwrap(), got, "{act}");
    });
}

/// Sends back all bytes, with an action from time to time.
fn echo(mut stream: TcpStream, act: &str, mut random: Random) {
    let mut buf = vec![0; 9000];
    // The connection has been in use before the first action of its process.
    let mut left = 1 + random.below(40);
    // Each fork leaves a waiting process.
    let mut acts = 12;
    loop {
        let n = stream.read(&mut buf).unwrap_or_else(|e| panic!("{act}: {e}"));
        if n == 0 {
            return;
        }
        stream.write_all(&buf[..n]).unwrap_or_else(|e| panic!("{act}: {e}"));
        left = left.saturating_sub(1);
        if left > 0 || acts == 0 {
            continue;
        }
        (left, acts) = (1 + random.below(120), acts - 1);
        let seed = random.below(1 << 30);
        match act {
            "to-child" => {
                let child = c::fork(|| echo(stream.try_clone().unwrap(), act, Random(seed)));
                random.pause(20);
                drop(stream);
                return c::wait(child);
            }
            "background" => {
                c::fork(|| {
                    random.pause(20);
                    echo(stream.try_clone().unwrap(), act, Random(seed));
                });
                unsafe { libc::_exit(0) }
            }
            "child-closes" => {
                let fd = stream.as_raw_fd();
                let child = c::fork(|| {
                    random.pause(20);
                    c::close(fd);
                    random.pause(20);
                });
                random.pause(20);
                if seed.is_multiple_of(2) {
                    c::wait(child);
                }
            }
            "pass" => {
                let (ours, theirs) = UnixStream::pair().unwrap();
                pass(&ours, stream.as_raw_fd());
                random.pause(20);
                drop(stream);
                random.pause(20);
                stream = take(&theirs);
            }
            "spawn" => spawn(&stream, &mut random),
            "execute" => {
                assert_eq!(unsafe { libc::dup2(stream.as_raw_fd(), 77) }, 77);
                drop(stream);
                let words = [c"bash", c"-c", c"cat <&77 >&77"].map(CString::from);
                let [shell, option, script] = words.each_ref().map(|word| word.as_ptr());
                let list = [shell, option, script, std::ptr::null()];
                unsafe { libc::execvp(shell, list.as_ptr()) };
                panic!("{}", std::io::Error::last_os_error());
            }
            _ => stream = move_around(stream, &mut random),
        }
    }
}

/// Starts a program that inherits the connection, and waits for its end.
fn spawn(stream: &TcpStream, random: &mut Random) {
    let copy = unsafe { libc::dup(stream.as_raw_fd()) };
    assert!(copy >= 0);
    let time = format!("0.0{}", random.below(9));
    let program = Command::new("sleep").arg(time).spawn();
    random.pause(20);
    c::close(copy);
    assert!(program.unwrap().wait().unwrap().success());
}

/// Other descriptors, modes, sets and options.
fn move_around(stream: TcpStream, random: &mut Random) -> TcpStream {
    let set = c::Epoll::new();
    set.add(&stream, libc::EPOLLIN | libc::EPOLLRDHUP, 1);
    set.wait(random.below(5) as i32);
    let copy = unsafe { libc::dup(stream.as_raw_fd()) };
    let copy = unsafe { TcpStream::from_raw_fd(copy) };
    stream.set_nonblocking(true).unwrap();
    set.add(&copy, libc::EPOLLIN | libc::EPOLLET, 2);
    let seen = set.wait(random.below(20) as i32);
    assert!(seen.iter().all(|(_, events)| events & (libc::EPOLLERR | libc::EPOLLHUP) == 0));
    let mut peeked = [0; 1];
    match copy.peek(&mut peeked) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}"),
    }
    set.control(libc::EPOLL_CTL_DEL, &stream, 0, 0).unwrap();
    drop(stream);
    random.pause(10);
    copy.set_nonblocking(false).unwrap();
    assert!(copy.take_error().unwrap().is_none());
    copy
}

/// One end of one connection. `echoes` names the echoing end, which acts.
fn take_part(role: &str, port: u16) {
    let word = |name: &str| std::env::var(name).unwrap();
    let (act, random) = (word("ACT"), Random(number("SMC_SEED", 1)));
    let stream = match role {
        "server" => accept_and_greet(&TcpListener::bind(("127.0.0.1", port)).unwrap()),
        _ => connect_and_greet(port),
    };
    let name = format!("{act}-{role}");
    std::fs::write(file(&name), "").unwrap();
    match role == word("ECHOES") {
        true => echo(stream, &act, random),
        false => drive(&stream, &act, random),
    }
}

fn run(test: &str, echoes: &str) {
    if let Some((role, port)) = my_role() {
        return take_part(&role, port);
    }
    let (seed, daemons) = (number("SMC_SEED", 1), number("SMC_CHANGES", 2));
    let mut random = Random(seed);
    let devices = 8 * ACTS.len();
    let mut fabric = Fabric::new(devices);
    let files = fabric.file("files");
    std::fs::create_dir(&files).unwrap();
    let this = std::env::current_exe().unwrap();
    let mut start = |act: &str, name: &str, port: u16| {
        let mut command = fabric.smc(&this);
        command.env("SMC_RUN_DETECT_MS", "10000");
        command.env("FILES", &files).env("ECHOES", echoes).env("ACT", act);
        command.env("SMC_SEED", random.below(1 << 30).to_string());
        role(&mut command, test, name, port).within(Duration::from_secs(60))
    };
    let mut ends = Vec::new();
    for act in ACTS {
        let port = free_port();
        let server = start(act, "server", port);
        await_listener(port);
        let client = start(act, "client", port);
        eventually(|| {
            ["server", "client"].iter().all(|end| files.join(format!("{act}-{end}")).exists())
        });
        ends.push((server, client));
    }
    assert_eq!(fabric.decided(), (2 * ACTS.len(), 0));
    for _ in 0..daemons {
        random.pause(300);
        match random.below(2) {
            0 => fabric.kill_daemon(),
            _ => fabric.end_daemon_in_order(),
        }
        random.pause(200);
        fabric.start_daemon(devices);
        // Connections come back after a second at the earliest.
        random.pause(2500);
    }
    std::fs::write(files.join("stop"), "").unwrap();
    for (server, client) in ends {
        let (drives, other): (Running, Running) = match echoes {
            "server" => (client, server),
            _ => (server, client),
        };
        let driven = catch_unwind(AssertUnwindSafe(|| drives.finish_beside(&[&other])));
        if let Err(panic) = driven {
            // Most failures are caused by the other end.
            eprintln!("the other end said: {}", other.said());
            resume_unwind(panic);
        }
        other.finish();
    }
}

#[test]
fn a_server_does_anything_while_its_connection_changes() {
    run("a_server_does_anything_while_its_connection_changes", "server");
}

#[test]
fn a_client_does_anything_while_its_connection_changes() {
    run("a_client_does_anything_while_its_connection_changes", "client");
}
