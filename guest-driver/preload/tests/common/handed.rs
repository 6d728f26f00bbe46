// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs of the tests with handed-on listeners: owners, the receiving programs, and clients.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

use std::ffi::{CString, c_char, c_int};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::c;
use crate::common::{eventually, my_role};

/// The descriptor number of the listener in the next program.
const HANDED: c_int = 9;
/// Number of connections served by the next program.
pub(crate) const CLIENTS: usize = 4;

fn option(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn speaks_first() -> bool {
    option("FIRST").as_deref() == Some("server")
}

/// One of the programs of these tests.
pub(crate) fn is_program() -> bool {
    let Some((role, port)) = my_role() else { return false };
    match role.as_str() {
        "owner" => own(port),
        "next" => serve_what_was_handed(),
        "receiver" => receive(),
        "thief" => steal(),
        "leaky" => leak(port),
        "heir" => std::thread::sleep(std::time::Duration::from_secs(60)),
        "client" => visit(port, option("VISITS").unwrap().parse().unwrap()),
        other => panic!("{other}"),
    }
    true
}

/// A listening server, which leaves the connections to another program.
fn own(port: u16) {
    let listener = match option("SHARES") {
        None => TcpListener::bind(("127.0.0.1", port)).unwrap(),
        Some(_) => c::listen_with_others(port),
    };
    if option("AFTER").is_none() {
        assert_eq!(c::poll(&listener, libc::POLLIN, 100_000).unwrap(), libc::POLLIN);
    } else if option("SERVES").is_some() {
        serve(&listener);
    }
    let way = option("WAY").unwrap();
    if way == "none" {
        return;
    }
    if way == "stolen" {
        // Until the test ends the process.
        loop {
            std::thread::park();
        }
    }
    if option("CONNECTION").is_some() {
        let (stream, _) = listener.accept().unwrap();
        drop(listener);
        return hand_connection_on(&way, &stream);
    }
    let target = if way == "standard input" { 0 } else { HANDED };
    unsafe { std::env::set_var("HANDED", target.to_string()) };
    // The number stays open in the next program.
    if way != "posix_spawn" && way != "SCM_RIGHTS" {
        assert_eq!(unsafe { libc::dup2(listener.as_raw_fd(), target) }, target);
    }
    hand_on(&way, &listener);
}

/// Like [`own`], for a connection not used yet.
fn hand_connection_on(way: &str, stream: &TcpStream) {
    unsafe { std::env::set_var("HANDED", HANDED.to_string()) };
    assert_eq!(unsafe { libc::dup2(stream.as_raw_fd(), HANDED) }, HANDED);
    hand_on(way, stream);
}

/// The environment of the next program: without the library, unless the program cannot load it
/// anyway.
fn next_environment(keep: bool) -> Vec<CString> {
    let vars = std::env::vars_os().filter(|(name, _)| keep || name != "LD_PRELOAD");
    let entry = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        let name = if name == "PRELOAD_TEST_ROLE" {
            "PRELOAD_TEST_ROLE=next".into()
        } else {
            [name.as_bytes(), b"=", value.as_bytes()].concat()
        };
        CString::new(name).unwrap()
    };
    vars.map(entry).collect()
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
}

fn hand_on(way: &str, listener: &impl AsRawFd) {
    let program = std::env::current_exe().unwrap();
    let program = option("PROGRAM").map_or(program, Into::into);
    let file = CString::new(program.as_os_str().as_bytes()).unwrap();
    let words: Vec<CString> =
        std::env::args_os().map(|word| CString::new(word.as_bytes()).unwrap()).collect();
    match way {
        "noexec" => {
            let library = option("LD_PRELOAD").unwrap();
            c::mount_without_programs(std::path::Path::new(&library).parent().unwrap());
        }
        "unreadable" => {
            let library = option("LD_PRELOAD").unwrap();
            std::fs::set_permissions(library, std::fs::Permissions::from_mode(0o000)).unwrap();
            unsafe {
                assert_eq!(libc::setresgid(65534, 65534, 65534), 0);
                assert_eq!(libc::setresuid(65534, 65534, 65534), 0);
            }
        }
        _ => {}
    }
    let environment = next_environment(way == "setuid" || option("KEEPS").is_some());
    let (words, environment) = (pointers(&words), pointers(&environment));
    let (file, words, environment) = (file.as_ptr(), words.as_ptr(), environment.as_ptr());
    let execute = || unsafe { libc::execve(file, words, environment) };
    match way {
        "execve" | "setuid" | "noexec" | "unreadable" | "standard input" => {
            execute();
        }
        "execvp" => unsafe {
            libc::execvpe(file, words, environment);
        },
        "fexecve" => {
            let open = std::fs::File::open(&program).unwrap();
            unsafe { libc::fexecve(open.as_raw_fd(), words, environment) };
        }
        "execveat" => {
            let open = std::fs::File::open(program.parent().unwrap()).unwrap();
            let name = CString::new(program.file_name().unwrap().as_bytes()).unwrap();
            unsafe {
                libc::execveat(open.as_raw_fd(), name.as_ptr(), words.cast(), environment.cast(), 0)
            };
        }
        "syscall" => unsafe {
            libc::syscall(libc::SYS_execve, file, words, environment);
        },
        "fork" => end_with(c::fork(|| {
            execute();
        })),
        "raw fork" => match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
            0 => {
                execute();
            }
            child => end_with(child as c_int),
        },
        "shared memory" => end_with(share_and_execute((file, words, environment))),
        "posix_spawn" => end_with(spawn((file, words, environment), listener)),
        "system" => {
            let words: Vec<String> =
                std::env::args().skip(1).map(|word| format!("'{word}'")).collect();
            let line = format!(
                "exec env -u LD_PRELOAD PRELOAD_TEST_ROLE=next '{}' {}",
                program.display(),
                words.join(" ")
            );
            let line = CString::new(line).unwrap();
            assert_eq!(unsafe { libc::system(line.as_ptr()) }, 0);
            std::process::exit(0);
        }
        "SCM_RIGHTS" => {
            // The file is there a moment before its process listens.
            let mut stream = None;
            eventually(|| {
                stream = std::os::unix::net::UnixStream::connect(option("SOCKET").unwrap()).ok();
                stream.is_some()
            });
            send_descriptor(&stream.unwrap(), listener);
            // The owner keeps the listener open, too.
            let mut end = [0];
            let _ = std::io::stdin().read(&mut end);
            std::process::exit(0);
        }
        other => panic!("{other}"),
    }
    panic!("{way}: {}", std::io::Error::last_os_error());
}

/// Ends as the child does.
fn end_with(child: c_int) {
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    std::process::exit(i32::from(status != 0));
}

type Program = (*const c_char, *const *const c_char, *const *const c_char);

/// A child as of vfork.
fn share_and_execute(mut program: Program) -> c_int {
    extern "C" fn child(program: *mut libc::c_void) -> c_int {
        let (file, words, environment) = unsafe { *program.cast::<Program>() };
        unsafe { libc::execve(file, words, environment) }
    }
    let mut stack = vec![0u8; 1 << 20];
    let top = unsafe { stack.as_mut_ptr().add(stack.len() & !15) };
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    unsafe { libc::clone(child, top.cast(), flags, (&raw mut program).cast()) }
}

/// The listener is closed by exec, and an action of the call duplicates it.
fn spawn((file, words, environment): Program, listener: &impl AsRawFd) -> c_int {
    unsafe {
        let mut actions: libc::posix_spawn_file_actions_t = std::mem::zeroed();
        libc::posix_spawn_file_actions_init(&raw mut actions);
        let fd = listener.as_raw_fd();
        libc::posix_spawn_file_actions_adddup2(&raw mut actions, fd, HANDED);
        let mut child = 0;
        let (words, environment) = (words.cast(), environment.cast());
        let actions = &raw const actions;
        let no = std::ptr::null();
        assert_eq!(libc::posix_spawn(&raw mut child, file, actions, no, words, environment), 0);
        child
    }
}

fn send_descriptor(stream: &impl AsRawFd, listener: &impl AsRawFd) {
    let mut byte = [0u8];
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut room = [0u64; 4];
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        (header.msg_iov, header.msg_iovlen) = (&raw mut iov, 1);
        header.msg_control = room.as_mut_ptr().cast();
        header.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let control = libc::CMSG_FIRSTHDR(&raw const header);
        (*control).cmsg_level = libc::SOL_SOCKET;
        (*control).cmsg_type = libc::SCM_RIGHTS;
        (*control).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(control).cast::<c_int>().write_unaligned(listener.as_raw_fd());
        assert_eq!(libc::sendmsg(stream.as_raw_fd(), &raw const header, 0), 1);
    }
}

/// A program receiving the listener by SCM_RIGHTS.
fn receive() {
    let unix = std::os::unix::net::UnixListener::bind(option("SOCKET").unwrap()).unwrap();
    let (stream, _) = unix.accept().unwrap();
    let mut byte = [0u8];
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut room = [0u64; 4];
    let listener = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        (header.msg_iov, header.msg_iovlen) = (&raw mut iov, 1);
        header.msg_control = room.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&room);
        assert_eq!(libc::recvmsg(stream.as_raw_fd(), &raw mut header, 0), 1);
        let control = libc::CMSG_FIRSTHDR(&raw const header);
        TcpListener::from_raw_fd(libc::CMSG_DATA(control).cast::<c_int>().read_unaligned())
    };
    (0..CLIENTS).for_each(|_| serve(&listener));
}

fn serve_what_was_handed() {
    let is_secure = unsafe { libc::getauxval(libc::AT_SECURE) } == 1;
    assert!(option("KEEPS").is_some() || option("LD_PRELOAD").is_none() || is_secure);
    let fd = option("HANDED").unwrap().parse().unwrap();
    if option("CONNECTION").is_some() {
        return serve_client(unsafe { TcpStream::from_raw_fd(fd) });
    }
    let listener = unsafe { TcpListener::from_raw_fd(fd) };
    (0..CLIENTS).for_each(|_| serve(&listener));
}

/// Serves a client. No program may read a byte that the client has not written.
fn serve(listener: &TcpListener) {
    serve_client(listener.accept().unwrap().0);
}

fn serve_client(mut stream: TcpStream) {
    if speaks_first() {
        stream.write_all(b"220 ready").unwrap();
    }
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"GET /", "what the client said, and nothing else");
    if !speaks_first() {
        stream.write_all(b"220 ready").unwrap();
    }
}

/// A program taking the listener of another process without a call of the other process. The
/// program reads the Proposal of the first client.
fn steal() {
    let owner: c_int = option("OWNER").unwrap().parse().unwrap();
    let listener = unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, owner, 0) as c_int;
        let number: c_int = option("NUMBER").unwrap().parse().unwrap();
        let taken = libc::syscall(libc::SYS_pidfd_getfd, process, number, 0) as c_int;
        assert!(taken >= 0, "{}", std::io::Error::last_os_error());
        TcpListener::from_raw_fd(taken)
    };
    println!("stolen");
    let mut refused = 0;
    for _ in 0..=CLIENTS {
        let (mut stream, _) = listener.accept().unwrap();
        if speaks_first() {
            let _ = stream.write_all(b"220 ready");
        }
        let mut all = Vec::new();
        let mut byte = [0];
        while stream.read(&mut byte).is_ok_and(|n| n == 1) {
            all.push(byte[0]);
            if all.len() == 5 && all != b"GET /" {
                break;
            }
        }
        match &all[..] {
            b"GET /" if !speaks_first() => stream.write_all(b"220 ready").unwrap(),
            b"GET /" => {}
            _ => refused += 1,
        }
    }
    assert_eq!(refused, 1, "only the first client has proposed SMC");
}

/// A server without the library whose listener a program with the library inherits.
fn leak(port: u16) {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    assert_eq!(unsafe { libc::dup2(listener.as_raw_fd(), HANDED) }, HANDED);
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(std::env::args_os().skip(1)).env("PRELOAD_TEST_ROLE", "heir");
    let mut child = child.env("LD_PRELOAD", option("LIBRARY").unwrap()).spawn().unwrap();
    // The start of the library, with its look at inherited descriptors, is over once the test
    // harness has a second thread.
    eventually(|| std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().count() > 1);
    println!("ready");
    (0..CLIENTS).for_each(|_| serve(&listener));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Connects so many times.
fn visit(port: u16, times: usize) {
    for n in 0..times {
        let mut stream = match (n + times) % 2 {
            0 => TcpStream::connect(("127.0.0.1", port)).unwrap(),
            _ => {
                let stream = c::connect_nonblocking(port);
                assert_eq!(c::poll(&stream, libc::POLLOUT, 100_000).unwrap(), libc::POLLOUT);
                assert!(stream.take_error().unwrap().is_none());
                stream.set_nonblocking(false).unwrap();
                stream
            }
        };
        let name = stream.local_addr().unwrap();
        let mut said = [0; 9];
        if speaks_first() {
            stream.read_exact(&mut said).unwrap();
        }
        stream.write_all(b"GET /").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        if !speaks_first() {
            stream.read_exact(&mut said).unwrap();
        }
        assert_eq!(&said, b"220 ready");
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        assert_eq!(stream.local_addr().unwrap(), name);
    }
}
