// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections live on wherever they would on TCP after a fork: with any call that copies the
//! process, ends the process, or closes descriptors on the way to another program.
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
use std::os::unix::net::UnixStream;
use std::time::Duration;

use combinations::{accept_and_greet, connect_and_greet, exchange_as_server, in_all_combinations};
use common::pattern;

/// More than all buffers on the way hold.
const N: usize = 3 << 20;

unsafe extern "C" {
    fn _Fork() -> i32;
    fn closefrom(first: i32);
    fn error(status: i32, errnum: i32, format: *const c_char, ...);
    fn errx(status: i32, format: *const c_char, ...) -> !;
}

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

/// A server that exchanges patterns on a number of connections.
fn serve(listener: &TcpListener, times: usize) {
    for _ in 0..times {
        let stream = accept_and_greet(listener);
        exchange_patterns(&stream);
    }
}

/// A connection already used.
fn connect_and_use(port: u16) -> TcpStream {
    connect_and_greet(port)
}

#[test]
fn a_program_becomes_a_daemon_by_libc() {
    fn server(listener: TcpListener) {
        let stream = accept_and_greet(&listener);
        assert_eq!(unsafe { libc::daemon(1, 1) }, 0);
        exchange_patterns(&stream);
        serve(&listener, 2);
    }
    fn client(port: u16) {
        for closes in [1, 0, 1] {
            // The parent waits for the process about to become a daemon, and not for the daemon.
            let parent = c::fork(|| {
                let stream = connect_and_use(port);
                let session = unsafe { libc::getsid(0) };
                assert_eq!(unsafe { libc::daemon(closes, closes) }, 0);
                assert_ne!(unsafe { libc::getsid(0) }, session);
                let here = std::env::current_dir().unwrap();
                assert_eq!(here.to_str() == Some("/"), closes == 0);
                exchange_patterns(&stream);
            });
            c::wait(parent);
        }
    }
    in_all_combinations(server, client);
}

/// A way to make a child process, and one to end a process.
type Fork = fn() -> i32;
type End = fn() -> !;

const FORKS: [Fork; 4] = [
    || unsafe { _Fork() },
    || unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32 },
    || unsafe {
        let (none, mut end) = (std::ptr::null_mut(), 0);
        // The terminal ends with the parent.
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
        let child = libc::forkpty(&mut end, none, none.cast(), none.cast());
        if child > 0 {
            // The child needs the terminal until it has made the terminal its own.
            std::thread::sleep(Duration::from_millis(1500));
        }
        child
    },
    || unsafe {
        // Like daemons that must not get a terminal again.
        match libc::fork() {
            0 => {
                libc::setsid();
                match libc::fork() {
                    0 => 0,
                    _ => libc::_exit(0),
                }
            }
            child => child,
        }
    },
];

const ENDS: [End; 4] = [
    || unsafe { libc::_exit(0) },
    || unsafe {
        libc::syscall(libc::SYS_exit_group, 0);
        unreachable!()
    },
    || unsafe {
        error(3, 0, c"an error".as_ptr());
        unreachable!()
    },
    || unsafe { errx(3, c"an error".as_ptr()) },
];

#[test]
fn a_child_goes_on_however_it_was_made_and_its_parent_ends() {
    fn server(listener: TcpListener) {
        serve(&listener, FORKS.len() + ENDS.len() - 1);
    }
    fn client(port: u16) {
        let ways = FORKS.iter().map(|fork| (*fork, ENDS[0]));
        for (fork, end) in ways.chain(ENDS[1..].iter().map(|end| (FORKS[0], *end))) {
            let parent = unsafe { libc::fork() };
            if parent == 0 {
                let stream = connect_and_use(port);
                if fork() == 0 {
                    // The caller is gone by now.
                    std::thread::sleep(Duration::from_millis(2000));
                    exchange_patterns(&stream);
                    unsafe { libc::_exit(0) };
                }
                end();
            }
            let mut status = 0;
            assert_eq!(unsafe { libc::waitpid(parent, &mut status, 0) }, parent);
            assert!(libc::WIFEXITED(status), "{status:x}");
        }
    }
    in_all_combinations(server, client);
}

/// Closes all descriptors but one and the standard ones.
type Closes = fn(RawFd);

fn range(first: i32, last: i32, flags: u32) {
    if first <= last {
        assert_eq!(unsafe { libc::close_range(first as u32, last as u32, flags as i32) }, 0);
    }
}

const CLOSES: [Closes; 6] = [
    |kept| {
        range(3, kept - 1, 0);
        range(kept + 1, i32::MAX, 0);
    },
    |kept| {
        range(3, kept - 1, libc::CLOSE_RANGE_CLOEXEC);
        range(kept + 1, i32::MAX, libc::CLOSE_RANGE_CLOEXEC);
    },
    |kept| {
        range(3, kept - 1, libc::CLOSE_RANGE_UNSHARE);
        range(kept + 1, i32::MAX, libc::CLOSE_RANGE_UNSHARE);
    },
    |kept| unsafe {
        libc::syscall(libc::SYS_close_range, 3, kept - 1, 0);
        libc::syscall(libc::SYS_close_range, kept + 1, u32::MAX, 0);
    },
    |kept| {
        (3..kept).for_each(c::close);
        unsafe { closefrom(kept + 1) };
    },
    |kept| (3..4096).filter(|fd| *fd != kept).for_each(c::close),
];

/// Runs a shell's command with descriptor `fd` at number 9.
fn run_with(fd: RawFd, command: &str) -> ! {
    let words = [c"sh".into(), c"-c".into(), CString::new(command).unwrap()];
    let words: Vec<_> = words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect();
    unsafe {
        assert_eq!(libc::dup2(fd, 9), 9);
        assert_eq!(libc::fcntl(9, libc::F_SETFD, 0), 0);
        libc::execv(c"/bin/sh".as_ptr(), words.as_ptr());
    }
    panic!("no program")
}

#[test]
fn a_program_gets_the_connection_although_its_parent_has_closed_all_others() {
    fn server(listener: TcpListener) {
        for _ in CLOSES {
            let mut stream = accept_and_greet(&listener);
            stream.write_all(b"to a program\n").unwrap();
            let mut all = String::new();
            stream.read_to_string(&mut all).unwrap();
            assert_eq!(all, "to a program\nand its parent");
        }
    }
    fn client(port: u16) {
        for closes in CLOSES {
            let mut stream = connect_and_use(port);
            let fd = stream.as_raw_fd();
            let child = c::fork(|| {
                closes(fd);
                run_with(fd, "read line <&9; echo $line >&9");
            });
            c::wait(child);
            stream.write_all(b"and its parent").unwrap();
            // As on TCP, no other process has the connection any more.
        }
    }
    in_all_combinations(server, client);
}

/// A child of a fork uses an inherited connection after it has closed everything else: the child
/// need not execute a program.
#[test]
fn a_child_uses_the_connection_after_it_has_closed_all_others() {
    fn server(listener: TcpListener) {
        serve(&listener, CLOSES.len());
    }
    fn client(port: u16) {
        for closes in CLOSES {
            let stream = connect_and_use(port);
            let names = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
            let child = c::fork(|| {
                closes(stream.as_raw_fd());
                assert_eq!(names.0, stream.local_addr().unwrap());
                assert_eq!(names.1, stream.peer_addr().unwrap());
                exchange_patterns(&stream);
            });
            c::wait(child);
        }
    }
    in_all_combinations(server, client);
}

#[test]
fn python_passes_a_connection_to_a_program() {
    const CODE: &str = r"
import os, socket, subprocess, sys
s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
s.sendall(b'hello')
assert s.recv(5, socket.MSG_WAITALL) == b'there'
k = s.fileno()
subprocess.run(['sh', '-c', f'read line <&{k}; echo $line >&{k}'], pass_fds=[k], check=True)
s.sendall(b'and its parent')
";
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        stream.write_all(b"to a program\n").unwrap();
        let mut all = String::new();
        stream.read_to_string(&mut all).unwrap();
        assert_eq!(all, "to a program\nand its parent");
    }
    fn client(port: u16) {
        let python =
            std::process::Command::new("python3").args(["-c", CODE, &port.to_string()]).status();
        assert!(python.unwrap().success());
    }
    in_all_combinations(server, client);
}

/// A process that has been on SMC closes all of its descriptors by ranges, and makes its next
/// connections as before. A loop over all numbers would close the library's as well.
#[test]
fn a_process_closes_everything_and_goes_on() {
    fn server(listener: TcpListener) {
        serve(&listener, 2 * (CLOSES.len() - 1));
    }
    fn client(port: u16) {
        for closes in &CLOSES[..CLOSES.len() - 1] {
            let child = c::fork(|| {
                exchange_patterns(&connect_and_use(port));
                closes(9);
                exchange_patterns(&connect_and_use(port));
            });
            c::wait(child);
        }
    }
    in_all_combinations(server, client);
}

/// The threads of the library share the descriptors of the program. The program has one thread, so
/// a close must leave nothing open.
#[test]
fn what_a_program_closes_for_itself_alone_is_closed() {
    fn server(listener: TcpListener) {
        serve(&listener, 2);
    }
    fn alone(port: u16) {
        let stream = connect_and_use(port);
        exchange_patterns(&stream);
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let number = theirs.as_raw_fd();
        range(number, number, libc::CLOSE_RANGE_UNSHARE);
        std::mem::forget(theirs);
        assert_eq!(ours.read(&mut [0]).unwrap(), 0, "the end of the other socket");
        assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert_eq!(ours.read(&mut [0]).unwrap(), 0, "the end of the other socket");
        exchange_patterns(&connect_and_use(port));
    }
    fn client(port: u16) {
        // The test itself has a second thread.
        c::wait(c::fork(|| alone(port)));
    }
    in_all_combinations(server, client);
}

/// A child that shares the descriptors of its parent, and not its memory.
#[test]
fn a_child_that_shares_the_descriptors_leaves_them_alone() {
    fn server(listener: TcpListener) {
        serve(&listener, 2);
    }
    fn client(port: u16) {
        extern "C" fn child(fds: *mut libc::c_void) -> i32 {
            // The child makes some calls with hooks, and closes a file of its parent.
            let number = fds as usize as i32;
            let mut byte = [0u8];
            unsafe {
                libc::read(number, byte.as_mut_ptr().cast(), 1);
                libc::close(number);
                libc::_exit(0)
            }
        }
        let flags = libc::CLONE_FILES | libc::SIGCHLD;
        for by_libc in [true, false] {
            let stream = connect_and_use(port);
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            (&ours).write_all(b"x").unwrap();
            let number = theirs.as_raw_fd();
            let pid = unsafe {
                match by_libc {
                    true => {
                        let top = Vec::leak(vec![0u8; 512 << 10]).as_mut_ptr_range().end;
                        libc::clone(child, top.cast(), flags, number as usize as *mut _)
                    }
                    false => match libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) as i32 {
                        0 => libc::_exit(child(number as usize as *mut _)),
                        pid => pid,
                    },
                }
            };
            c::wait(pid);
            std::mem::forget(theirs);
            assert_eq!(ours.read(&mut [0]).unwrap(), 0, "the child has closed it");
            exchange_patterns(&stream);
        }
    }
    in_all_combinations(server, client);
}

/// Threads send while another one makes children that only execute a program.
#[test]
fn children_that_execute_a_program_do_not_wait_for_the_threads_of_their_parent() {
    const CHILDREN: usize = 60;
    fn server(listener: TcpListener) {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let (mut stream, _) = listener.accept().unwrap();
                scope.spawn(move || {
                    exchange_as_server(&mut stream);
                    std::io::copy(&mut (&stream), &mut (&stream)).unwrap();
                });
            }
        });
    }
    fn client(port: u16) {
        let done = std::sync::atomic::AtomicBool::new(false);
        let done = &done;
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(move || {
                    let mut stream = connect_and_use(port);
                    let mut room = [0; 600];
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        stream.write_all(&[7; 600]).unwrap();
                        stream.read_exact(&mut room).unwrap();
                    }
                });
            }
            for n in 0..CHILDREN {
                let pid = if n % 2 == 0 { FORKS[0]() } else { unsafe { libc::fork() } };
                if pid == 0 {
                    let none = std::ptr::null::<c_char>();
                    unsafe {
                        libc::execlp(c"true".as_ptr(), c"true".as_ptr(), none);
                        libc::_exit(9);
                    }
                }
                c::wait(pid);
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
    in_all_combinations(server, client);
}

/// The first thread of a program ends, and the others go on. The process ends with the last of them.
#[test]
fn a_process_ends_with_the_last_thread_of_the_program() {
    const CODE: &str = r"
import ctypes, socket, sys, threading, time
s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
s.sendall(b'hello')
assert s.recv(5, socket.MSG_WAITALL) == b'there'
libc = ctypes.CDLL(None)
work = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
sleep = ctypes.cast(libc.sleep, ctypes.c_void_p)
thread = ctypes.c_ulong()
assert libc.pthread_create(ctypes.byref(thread), None, sleep, ctypes.c_void_p(1)) == 0
libc.pthread_exit(None)
";
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        assert!(all.is_empty());
    }
    fn client(port: u16) {
        let python =
            std::process::Command::new("python3").args(["-c", CODE, &port.to_string()]).status();
        assert!(python.unwrap().success());
    }
    in_all_combinations(server, client);
}
