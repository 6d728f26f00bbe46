// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections of a process that ends, or executes another program, while another process still
//! uses them: the bytes keep flowing, and nothing is left behind afterwards.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/c.rs"]
mod c;
#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::ffi::{CString, c_char};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use combinations::{
    accept_and_greet, connect, connect_and_greet, exchange_as_client, exchange_as_server,
    in_all_combinations, pass, take,
};
use common::pattern;

/// More than all buffers on the way hold.
const N: usize = 3 << 20;

/// Sends and checks a pattern in both directions at once.
fn exchange_patterns(stream: &TcpStream) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut to = stream;
            to.write_all(&pattern(N)).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let (mut from, mut all) = (stream, Vec::new());
        from.read_to_end(&mut all).unwrap();
        assert!(all == pattern(N), "{} bytes came", all.len());
    });
}

/// A client with a connection in use that carries patterns.
fn patterns_client(port: u16) {
    exchange_patterns(&connect_and_greet(port));
}

/// The child of a fork goes on, and the process ends at once by `end`.
fn go_to_the_background(end: unsafe extern "C" fn(i32) -> !, f: impl FnOnce()) -> ! {
    c::fork(|| {
        // The caller is gone by now.
        std::thread::sleep(Duration::from_millis(150));
        f();
    });
    unsafe { end(0) }
}

unsafe extern "C" {
    fn quick_exit(status: i32) -> !;
}

#[test]
fn a_client_goes_to_the_background() {
    fn server(listener: TcpListener) {
        for _ in 0..3 {
            exchange_patterns(&accept_and_greet(&listener));
        }
    }
    fn client(port: u16) {
        for end in [libc::_exit, libc::exit, quick_exit] {
            let daemon = c::fork(|| {
                let stream = connect_and_greet(port);
                go_to_the_background(end, move || exchange_patterns(&stream));
            });
            c::wait(daemon);
        }
    }
    in_all_combinations(server, client);
}

#[test]
fn a_server_goes_to_the_background() {
    fn server(listener: TcpListener) {
        let stream = accept_and_greet(&listener);
        go_to_the_background(libc::exit, move || exchange_patterns(&stream));
    }
    in_all_combinations(server, patterns_client);
}

/// Bytes are on their way in both directions when the process ends.
#[test]
fn a_process_ends_in_the_middle_of_a_transfer() {
    fn server(listener: TcpListener) {
        let stream = accept_and_greet(&listener);
        let (ours, theirs) = UnixStream::pair().unwrap();
        c::fork(move || {
            (&theirs).write_all(b"b").unwrap();
            exchange_patterns(&stream);
        });
        // The child has begun.
        (&ours).read_exact(&mut [0]).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        unsafe { libc::_exit(0) };
    }
    in_all_combinations(server, patterns_client);
}

#[test]
fn a_process_passes_a_connection_on_and_ends() {
    fn server(listener: TcpListener) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        c::fork(move || {
            let stream = take(&theirs);
            std::thread::sleep(Duration::from_millis(150));
            exchange_patterns(&stream);
        });
        let stream = accept_and_greet(&listener);
        pass(&ours, stream.as_raw_fd());
    }
    in_all_combinations(server, patterns_client);
}

/// A spawned program outlives its parent.
#[test]
fn a_program_outlives_the_process_that_spawned_it() {
    fn server(listener: TcpListener) {
        let stream = accept_and_greet(&listener);
        let input = std::os::fd::OwnedFd::from(stream.try_clone().unwrap());
        let mut cat = Command::new("sh");
        cat.args(["-c", "sleep 0.2; exec cat"]).stdin(input);
        let cat = cat.stdout(std::os::fd::OwnedFd::from(stream)).stderr(Stdio::null()).spawn();
        // The program goes on after the end of this process.
        std::mem::forget(cat.unwrap());
    }
    in_all_combinations(server, patterns_client);
}

fn execute(words: &[&str]) {
    let words: Vec<_> = words.iter().map(|word| CString::new(*word).unwrap()).collect();
    let mut list: Vec<*const c_char> = words.iter().map(|word| word.as_ptr()).collect();
    list.push(std::ptr::null());
    unsafe { libc::execvp(list[0], list.as_ptr()) };
}

/// Gives a connection the number 77, which programs executed next inherit.
fn inheritable(stream: TcpStream) -> RawFd {
    assert_eq!(unsafe { libc::dup2(stream.as_raw_fd(), 77) }, 77);
    drop(stream);
    77
}

/// The program gets the arrived bytes, half of them read, and the bytes still on their way.
#[test]
fn a_client_executes_a_program_in_the_middle_of_a_transfer() {
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        stream.write_all(&pattern(N)).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "read all\n");
    }
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        let mut begun = vec![0; 1000];
        stream.read_exact(&mut begun).unwrap();
        assert!(begun == pattern(1000));
        let path = PathBuf::from(std::env::var_os("FILES").unwrap()).join("expected");
        std::fs::write(&path, &pattern(N)[1000..]).unwrap();
        inheritable(stream);
        let script = format!("cmp - {} <&77 && echo read all >&77", path.display());
        execute(&["bash", "-c", &script]);
    }
    in_all_combinations(server, client);
}

#[test]
fn a_server_executes_a_program_with_a_connection_in_use() {
    fn server(listener: TcpListener) {
        let stream = accept_and_greet(&listener);
        inheritable(stream);
        unsafe {
            // With arguments in registers and on the stack.
            let (shell, script) = (c"bash".as_ptr(), c"cat <&77 >&77".as_ptr());
            let none = std::ptr::null::<c_char>();
            let x = c"x".as_ptr();
            libc::execlp(shell, shell, c"-c".as_ptr(), script, x, x, x, x, x, x, none);
        }
    }
    in_all_combinations(server, patterns_client);
}

static CHILDREN_ENDED: AtomicU32 = AtomicU32::new(0);

extern "C" fn count_child(_: i32) {
    CHILDREN_ENDED.fetch_add(1, Ordering::SeqCst);
}

/// A program that does not exist: the connection is unchanged, and there is no child to wait for.
#[test]
fn a_failed_exec_leaves_everything_as_it_was() {
    fn server(listener: TcpListener) {
        let stream = accept_and_greet(&listener);
        unsafe { libc::signal(libc::SIGCHLD, count_child as extern "C" fn(i32) as usize) };
        let fd = inheritable(stream);
        for _ in 0..3 {
            execute(&["/no/such/program"]);
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOENT));
            let waited = unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::__WALL) };
            assert_eq!(waited, -1);
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ECHILD));
        }
        assert_eq!(CHILDREN_ENDED.load(Ordering::SeqCst), 0);
        let stream = unsafe { <TcpStream as std::os::fd::FromRawFd>::from_raw_fd(fd) };
        exchange_patterns(&stream);
    }
    in_all_combinations(server, patterns_client);
}

/// A shell reading the output of such a program goes on after the program's end, although the
/// connection lives on.
#[test]
fn nothing_of_the_program_stays_open() {
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "the end");
    }
    fn client(port: u16) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (go, wait) = UnixStream::pair().unwrap();
        let daemon = c::fork(|| {
            drop(ours.try_clone());
            let mut stream = connect_and_greet(port);
            let (fd, theirs) = (theirs.as_raw_fd(), ours.as_raw_fd());
            c::fork(move || {
                c::close(fd);
                c::close(theirs);
                (&wait).read_exact(&mut [0]).unwrap();
                stream.write_all(b"the end").unwrap();
            });
            unsafe { libc::_exit(0) };
        });
        c::wait(daemon);
        drop(theirs);
        ours.set_read_timeout(Some(smc_test_support::TIMEOUT)).unwrap();
        assert_eq!((&ours).read(&mut [0]).unwrap(), 0);
        // Until then the connection lives.
        (&go).write_all(b"g").unwrap();
    }
    in_all_combinations(server, client);
}

/// The client's handshake is under way for as long as this server's program does not use the
/// connection.
fn late_server(listener: TcpListener) {
    let (mut stream, _) = listener.accept().unwrap();
    std::thread::sleep(Duration::from_millis(250));
    exchange_as_server(&mut stream);
    exchange_patterns(&stream);
}

#[test]
fn a_client_goes_to_the_background_before_its_first_byte() {
    fn client(port: u16) {
        let daemon = c::fork(|| {
            let mut stream = connect(port);
            c::fork(move || {
                std::thread::sleep(Duration::from_millis(30));
                exchange_as_client(&mut stream);
                exchange_patterns(&stream);
            });
            unsafe { libc::_exit(0) }
        });
        c::wait(daemon);
    }
    in_all_combinations(late_server, client);
}

/// The parent's bytes from before the fork come before the child's.
#[test]
fn a_client_forks_while_its_handshake_is_under_way() {
    fn client(port: u16) {
        let mut stream = connect(port);
        stream.write_all(b"he").unwrap();
        let child = c::fork(|| {
            (&stream).write_all(b"l").unwrap();
        });
        c::wait(child);
        stream.write_all(b"lo").unwrap();
        let child = c::fork(|| {
            let mut word = [0; 5];
            (&stream).read_exact(&mut word).unwrap();
            assert_eq!(&word, b"there");
        });
        c::wait(child);
        exchange_patterns(&stream);
    }
    in_all_combinations(late_server, client);
}

/// The handshake of a connection closed by its program goes on in the parent only.
#[test]
fn a_child_has_nothing_of_a_closed_connection() {
    const ROUNDS: usize = 20;
    fn server(listener: TcpListener) {
        let mut first = accept_and_greet(&listener);
        // Meanwhile the other handshakes wait for an answer.
        first.read_exact(&mut [0]).unwrap();
        for _ in 0..ROUNDS {
            assert_eq!(listener.accept().unwrap().0.read(&mut [0]).unwrap(), 0);
        }
    }
    fn client(port: u16) {
        // The first connection opens the device.
        let mut first = connect_and_greet(port);
        let link = |fd: &str| std::fs::read_link(format!("/proc/self/fd/{fd}")).ok();
        for round in 0..ROUNDS {
            let stream = c::connect_nonblocking(port);
            let socket = link(&stream.as_raw_fd().to_string()).unwrap();
            drop(stream);
            c::wait(c::fork(|| {
                let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
                let names = all.filter_map(|one| one.file_name().into_string().ok());
                let same = |name: &String| link(name).as_ref() == Some(&socket);
                let kept: Vec<_> = names.filter(same).collect();
                assert!(kept.is_empty(), "round {round}: {kept:?}");
            }));
        }
        first.write_all(b"!").unwrap();
    }
    in_all_combinations(server, client);
}

#[test]
fn a_client_executes_a_program_while_its_handshake_is_under_way() {
    fn client(port: u16) {
        let mut stream = connect(port);
        stream.write_all(b"hello").unwrap();
        inheritable(stream);
        execute(&["bash", "-c", "dd bs=1 count=5 <&77 >/dev/null 2>&1; exec cat <&77 >&77"]);
    }
    in_all_combinations(late_server, client);
}

#[test]
fn a_client_spawns_a_program_while_its_handshake_is_under_way() {
    fn client(port: u16) {
        let mut stream = connect(port);
        stream.write_all(b"hello").unwrap();
        let mut cat = Command::new("bash");
        cat.args(["-c", "dd bs=1 count=5 >/dev/null 2>&1; exec cat"]);
        cat.stdin(std::os::fd::OwnedFd::from(stream.try_clone().unwrap()));
        cat.stdout(std::os::fd::OwnedFd::from(stream)).stderr(Stdio::null());
        assert!(cat.status().unwrap().success());
    }
    in_all_combinations(late_server, client);
}

/// The connection is in an epoll set when its relay begins, and SMC carries the connection in the
/// end.
#[test]
fn an_epoll_set_keeps_a_client_that_starts_a_program_in_its_handshake() {
    fn client(port: u16) {
        let stream = c::connect_nonblocking(port);
        let set = c::Epoll::new();
        set.add(&stream, libc::EPOLLIN, 7);
        assert_eq!(unsafe { libc::fcntl(stream.as_raw_fd(), libc::F_SETFD, 0) }, 0);
        let started = Command::new("true").status().unwrap();
        assert!(started.success());
        assert_eq!((&stream).write(b"hello").unwrap(), 5);
        assert_eq!(set.wait(100_000), [(7, libc::EPOLLIN)]);
        stream.set_nonblocking(false).unwrap();
        let mut word = [0; 5];
        (&stream).read_exact(&mut word).unwrap();
        assert_eq!(&word, b"there");
        exchange_patterns(&stream);
    }
    in_all_combinations(late_server, client);
}

/// The descriptor is closed by exec, and the bytes written before arrive all the same.
#[test]
fn bytes_that_wait_for_a_handshake_survive_an_exec() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        std::thread::sleep(Duration::from_millis(250));
        let mut all = String::new();
        stream.read_to_string(&mut all).unwrap();
        assert_eq!(all, "hello");
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        stream.write_all(b"hello").unwrap();
        execute(&["true"]);
    }
    in_all_combinations(server, client);
}

/// The servers accept only after the processes have ended, so a process waiting for its server
/// would wait for ever.
#[test]
fn a_process_that_has_written_ends_before_its_server_accepts() {
    const ENDS: usize = 6;
    fn name(port: u16) -> SocketAddr {
        SocketAddr::from_abstract_name(format!("smc-keeper-test-{port}")).unwrap()
    }
    fn server(listener: TcpListener) {
        let ended = UnixListener::bind_addr(&name(listener.local_addr().unwrap().port())).unwrap();
        ended.accept().unwrap();
        // Each is one, in any order.
        let mut all: Vec<String> = (0..ENDS)
            .map(|_| {
                let mut all = String::new();
                listener.accept().unwrap().0.read_to_string(&mut all).unwrap();
                all
            })
            .collect();
        all.sort_unstable();
        let expected: Vec<_> = (0..ENDS).map(|n| format!("from process {n}")).collect();
        assert_eq!(all, expected);
    }
    fn client(port: u16) {
        for n in 0..ENDS {
            c::wait(c::fork(move || {
                let mut stream = connect(port);
                stream.write_all(format!("from process {n}").as_bytes()).unwrap();
                match n {
                    0 => unsafe { libc::exit(0) },
                    1 => unsafe { libc::_exit(0) },
                    2 => unsafe { quick_exit(0) },
                    3 => execute(&["true"]),
                    4 => {
                        drop(stream);
                        unsafe { libc::exit(0) }
                    }
                    _ => {
                        drop(stream);
                        execute(&["true"]);
                    }
                }
            }));
        }
        UnixStream::connect_addr(&name(port)).unwrap();
    }
    in_all_combinations(server, client);
}

/// The child's bytes come before the later bytes of its parent.
#[test]
fn a_parent_writes_behind_its_child() {
    const ROUNDS: usize = 20;
    fn server(listener: TcpListener) {
        for round in 0..ROUNDS {
            let mut stream = accept_and_greet(&listener);
            let mut all = String::new();
            stream.read_to_string(&mut all).unwrap();
            assert_eq!(all, "the child, the parent", "round {round}");
        }
    }
    fn client(port: u16) {
        for _ in 0..ROUNDS {
            let mut stream = connect_and_greet(port);
            c::wait(c::fork(|| (&stream).write_all(b"the child, ").unwrap()));
            stream.write_all(b"the parent").unwrap();
        }
    }
    in_all_combinations(server, client);
}

/// Two children, both forked before one of them uses the connection.
#[test]
fn two_children_take_turns() {
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        stream.write_all(b"012345").unwrap();
        let mut all = String::new();
        stream.read_to_string(&mut all).unwrap();
        assert_eq!(all, "012345");
    }
    fn client(port: u16) {
        let stream = connect_and_greet(port);
        let children: Vec<_> = (0..3)
            .map(|_| {
                let (ours, theirs) = UnixStream::pair().unwrap();
                let copy = stream.try_clone().unwrap();
                let child = c::fork(|| {
                    for _ in 0..2 {
                        let mut byte = [0];
                        (&theirs).read_exact(&mut byte).unwrap();
                        (&copy).read_exact(&mut byte).unwrap();
                        (&copy).write_all(&byte).unwrap();
                        (&theirs).write_all(b"t").unwrap();
                    }
                });
                (child, ours)
            })
            .collect();
        for _ in 0..2 {
            for (_, child) in &children {
                let mut child = child;
                child.write_all(b"t").unwrap();
                child.read_exact(&mut [0]).unwrap();
            }
        }
        children.into_iter().for_each(|(child, _)| c::wait(child));
    }
    in_all_combinations(server, client);
}
