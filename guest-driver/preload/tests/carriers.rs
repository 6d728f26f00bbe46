// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ends and times of a connection on each of its carriers: the promises of TCP's kernel hold on the
//! ring, on TCP after the device is gone, and after a return. Each case runs on TCP, which gives
//! the expected result for the other carriers.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/c.rs"]
mod c;
#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use combinations::{accept_and_greet, connect_and_greet, exchange_as_client, exchange_as_server};
use common::{Fabric, await_listener, eventually, free_port, my_role, pattern, role};

/// The carrier of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    /// TCP without the library.
    Plain,
    Ring,
    /// TCP, because the device has gone.
    Tcp,
    /// TCP at first, because the device has gone; then the ring of a new device.
    Back,
}

/// Longer than a connection waits before its return to the ring.
const RETURN: Duration = Duration::from_millis(1600);
/// More than the peer's kernel takes for a program that does not read, and less than the own kernel
/// takes.
const MORE: usize = 300_000;
/// The time limit of calls.
const LIMIT: Duration = Duration::from_millis(200);

fn file(name: &str) -> PathBuf {
    Path::new(&std::env::var_os("FILES").unwrap()).join(name)
}

fn say(name: &str, text: &str) {
    std::fs::write(file("new"), text).unwrap();
    std::fs::rename(file("new"), file(name)).unwrap();
}

/// Reports that this program has its connection, and waits until the carrier is the one of the
/// case.
fn settle(me: &str) {
    std::fs::write(file(me), "").unwrap();
    eventually(|| file("settled").exists());
}

fn words() -> Vec<String> {
    std::env::var("CASE").unwrap().split(' ').map(str::to_owned).collect()
}

/// Runs a case on a carrier, and returns the reports of the programs.
fn run(test: &str, case: &str, carrier: Carrier, pause: Duration) -> String {
    let mut fabric = Fabric::new(6);
    let (port, this) = (free_port(), std::env::current_exe().unwrap());
    let files = fabric.file("files");
    std::fs::create_dir(&files).unwrap();
    let program = |fabric: &Fabric| {
        let mut command = fabric.on(carrier != Carrier::Plain, &this);
        command.env("FILES", &files).env("CASE", case);
        command.env("SMC_RUN_DETECT_MS", "10000").env("SMC_RUN_BUFFER", "16384");
        command
    };
    let server = role(&mut program(&fabric), test, "server", port);
    await_listener(port);
    let client = role(&mut program(&fabric), test, "client", port);
    eventually(|| files.join("server").exists() && files.join("client").exists());
    if carrier != Carrier::Plain {
        assert_eq!(fabric.decided(), (2, 0));
    }
    if matches!(carrier, Carrier::Tcp | Carrier::Back) {
        fabric.kill_daemon();
        if carrier == Carrier::Back {
            fabric.start_daemon(6);
        }
        std::thread::sleep(pause);
    }
    std::fs::write(files.join("settled"), "").unwrap();
    eventually(|| files.join("result").exists());
    client.finish_beside(&[&server]);
    let result = std::fs::read_to_string(files.join("result")).unwrap();
    drop(server);
    result
}

/// Compares a case on each carrier with TCP.
fn compare(test: &str, case: &str, pauses: [Duration; 2]) {
    let plain = run(test, case, Carrier::Plain, Duration::ZERO);
    println!("{case}: {plain}");
    for (carrier, pause) in
        [(Carrier::Ring, Duration::ZERO), (Carrier::Tcp, pauses[0]), (Carrier::Back, pauses[1])]
    {
        let seen = run(test, case, carrier, pause);
        assert_eq!(seen, plain, "{case}, {carrier:?}");
    }
}

fn readable(stream: &TcpStream) -> i32 {
    c::number(stream, libc::FIONREAD).unwrap()
}

/// Ends this process without a word of the library's program.
fn die(how: &str) {
    match how {
        "kill" => drop(unsafe { libc::kill(libc::getpid(), libc::SIGKILL) }),
        "abort" => std::process::abort(),
        "exit" => drop(unsafe { libc::syscall(libc::SYS_exit_group, 0) }),
        _ => {
            let path = std::ffi::CString::new("/bin/true").unwrap();
            unsafe { libc::execl(path.as_ptr(), path.as_ptr(), std::ptr::null::<libc::c_char>()) };
        }
    }
    panic!("lives on after {how}");
}

/// Case: the kind of death, the number of unread bytes, and when the client sends these.
fn dying_server(mut stream: TcpStream) {
    let [how, bytes, when] = words().try_into().unwrap();
    let bytes: i32 = bytes.parse().unwrap();
    settle("server");
    if when == "after" {
        exchange_as_server(&mut stream);
    }
    // A ring holds 16 KiB.
    eventually(|| readable(&stream) >= bytes.min(10_000));
    if when == "read" {
        stream.read_exact(&mut vec![0; bytes as usize]).unwrap();
        // A peer on the ring has to be told of the read bytes.
        std::thread::sleep(Duration::from_millis(300));
    }
    die(&how);
}

fn survivor(mut stream: TcpStream) {
    let [_, bytes, when] = words().try_into().unwrap();
    let bytes = pattern(bytes.parse().unwrap());
    if when != "after" {
        stream.write_all(&bytes).unwrap();
    }
    settle("client");
    if when == "after" {
        exchange_as_client(&mut stream);
        stream.write_all(&bytes).unwrap();
    }
    let mut shown = 0;
    eventually(|| {
        shown = c::poll(&stream, libc::POLLIN | libc::POLLRDHUP, 100).unwrap_or(0);
        shown & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
    });
    let read = c::recv(&stream, &mut [0; 10], 0);
    say("result", &format!("shows {shown:#x}, recv {read:?}"));
}

#[test]
fn a_process_that_ends_with_unread_bytes_is_a_reset_on_each_carrier() {
    const TEST: &str = "a_process_that_ends_with_unread_bytes_is_a_reset_on_each_carrier";
    match my_role() {
        Some((role, port)) if role == "server" => {
            let mut stream = TcpListener::bind(("127.0.0.1", port)).unwrap().accept().unwrap().0;
            exchange_as_server(&mut stream);
            dying_server(stream);
        }
        Some((_, port)) => {
            let stream = connect_and_greet(port);
            survivor(stream);
        }
        None => {
            let some = Duration::from_millis(300);
            for case in ["kill 3 before", "kill 40000 after", "abort 3 after", "exec 3 after"] {
                compare(TEST, case, [some, RETURN]);
            }
            compare(TEST, "exit 3 read", [some, RETURN]);
        }
    }
}

/// A call that waits for bytes; none come.
fn call(stream: &TcpStream, name: &str) -> isize {
    let fd = stream.as_raw_fd();
    let mut room = [0u8; 64];
    let (at, len) = (room.as_mut_ptr().cast::<libc::c_void>(), room.len());
    let mut iov = libc::iovec { iov_base: at, iov_len: len };
    let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
    (message.msg_hdr.msg_iov, message.msg_hdr.msg_iovlen) = (&raw mut iov, 1);
    unsafe {
        match name {
            "read" => libc::read(fd, at, len),
            "readv" => libc::readv(fd, &raw const iov, 1),
            "recvmsg" => libc::recvmsg(fd, &raw mut message.msg_hdr, 0),
            "recvmmsg" => libc::recvmmsg(fd, &raw mut message, 1, 0, std::ptr::null_mut()) as isize,
            "splice" => {
                let mut pipe = [0; 2];
                assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
                let none = std::ptr::null_mut();
                libc::splice(fd, none, pipe[1], none, len, 0)
            }
            "peek" => libc::recv(fd, at, len, libc::MSG_PEEK),
            "waitall" => libc::recv(fd, at, len, libc::MSG_WAITALL),
            _ => libc::recv(fd, at, len, 0),
        }
    }
}

const CALLS: [&str; 8] =
    ["recv", "read", "readv", "recvmsg", "recvmmsg", "splice", "peek", "waitall"];

/// Whether a call has ended in time and has slept until then, and the call's result.
fn timed_call(stream: &TcpStream, name: &str) -> String {
    let (begun, used) = (Instant::now(), c::processor_time());
    let result = call(stream, name);
    let error = std::io::Error::last_os_error();
    let (took, used) = (begun.elapsed(), c::processor_time() - used);
    let is_right = took >= LIMIT && took < 10 * LIMIT && used < LIMIT / 2;
    match (is_right, result) {
        (true, -1) => format!("{name}: {error}"),
        (true, result) => format!("{name}: {result}"),
        (false, result) => format!("{name}: {result} {error} in {took:?}, worked for {used:?}"),
    }
}

fn timed_server(mut stream: TcpStream) {
    settle("server");
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // During the change of the carrier, and after the change.
    let mut said = CALLS.map(|name| timed_call(&stream, name)).to_vec();
    stream.set_read_timeout(None).unwrap();
    say("waited", "");
    exchange_as_server(&mut stream);
    eventually(|| readable(&stream) == 10);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    said.push(timed_call(&stream, "waitall"));
    stream.set_read_timeout(None).unwrap();
    say("timed", "");
    said.push(format!("{}", call(&stream, "waitall")));
    say("result", &said.join(", "));
}

fn timed_client(mut stream: TcpStream) {
    settle("client");
    eventually(|| file("waited").exists());
    exchange_as_client(&mut stream);
    stream.write_all(&pattern(10)).unwrap();
    eventually(|| file("timed").exists());
    // One call returns all 64 bytes.
    for _ in 0..4 {
        stream.write_all(&pattern(16)).unwrap();
        std::thread::sleep(LIMIT / 4);
    }
    eventually(|| file("result").exists());
}

#[test]
fn time_limits_of_reads_hold_on_each_carrier() {
    const TEST: &str = "time_limits_of_reads_hold_on_each_carrier";
    match my_role() {
        Some((role, port)) if role == "server" => {
            let mut stream = TcpListener::bind(("127.0.0.1", port)).unwrap().accept().unwrap().0;
            exchange_as_server(&mut stream);
            timed_server(stream);
        }
        Some((_, port)) => {
            let stream = connect_and_greet(port);
            timed_client(stream);
        }
        None => {
            compare(TEST, "reads", [Duration::from_millis(100), Duration::ZERO]);
        }
    }
}

fn lingering_client(stream: TcpStream) {
    (&stream).write_all(&pattern(MORE)).unwrap();
    let linger = libc::linger { l_onoff: 1, l_linger: 1 };
    let at = (&raw const linger).cast();
    let set = unsafe {
        let len = size_of::<libc::linger>() as u32;
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, at, len)
    };
    assert_eq!(set, 0);
    let begun = Instant::now();
    unsafe { libc::close(stream.into_raw_fd()) };
    let waited = begun.elapsed() >= Duration::from_millis(900);
    say("closed", &format!("waited {waited}"));
    eventually(|| file("result").exists());
}

#[test]
fn a_close_waits_for_bytes_that_are_not_acknowledged_on_each_carrier() {
    const TEST: &str = "a_close_waits_for_bytes_that_are_not_acknowledged_on_each_carrier";
    match my_role() {
        Some((role, port)) if role == "server" => {
            let mut stream = TcpListener::bind(("127.0.0.1", port)).unwrap().accept().unwrap().0;
            exchange_as_server(&mut stream);
            settle("server");
            exchange_as_server(&mut stream);
            eventually(|| file("closed").exists());
            let said = std::fs::read_to_string(file("closed")).unwrap();
            let mut all = Vec::new();
            let read = stream.read_to_end(&mut all);
            say("result", &format!("{said}, all came: {:?}", read.map(|_| all == pattern(MORE))));
        }
        Some((_, port)) => {
            let mut stream = connect_and_greet(port);
            settle("client");
            exchange_as_client(&mut stream);
            lingering_client(stream);
        }
        None => compare(TEST, "linger", [Duration::from_millis(100), RETURN]),
    }
}

/// A listener without SO_REUSEADDR; the standard library sets the option.
fn listen(port: u16) -> std::io::Result<TcpListener> {
    let listener = unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        TcpListener::from_raw_fd(fd)
    };
    let mut address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    address.sin_family = libc::AF_INET as u16;
    address.sin_port = port.to_be();
    address.sin_addr.s_addr = u32::from(std::net::Ipv4Addr::LOCALHOST).to_be();
    let (fd, len) = (listener.as_raw_fd(), size_of::<libc::sockaddr_in>() as u32);
    let done = unsafe {
        libc::bind(fd, (&raw const address).cast(), len) == 0 && libc::listen(fd, 8) == 0
    };
    if done { Ok(listener) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
fn a_server_listens_again_when_its_client_has_closed_first_on_each_carrier() {
    const TEST: &str = "a_server_listens_again_when_its_client_has_closed_first_on_each_carrier";
    match my_role() {
        Some((role, port)) if role == "server" => {
            let listener = listen(port).unwrap();
            let mut stream = accept_and_greet(&listener);
            settle("server");
            exchange_as_server(&mut stream);
            let end = stream.read(&mut [0]).unwrap();
            eventually(|| file("closed").exists());
            drop((stream, listener));
            let again = listen(port).map(|_| ());
            say("result", &format!("end {end}, listens {again:?}"));
        }
        Some((_, port)) => {
            let mut stream = connect_and_greet(port);
            settle("client");
            exchange_as_client(&mut stream);
            if words() == ["shutdown"] {
                stream.shutdown(std::net::Shutdown::Write).unwrap();
            }
            drop(stream);
            say("closed", "");
            eventually(|| file("result").exists());
        }
        None => {
            for case in ["close", "shutdown"] {
                compare(TEST, case, [Duration::from_millis(100), RETURN]);
            }
        }
    }
}
