//! Listeners that get into the hands of a program without the library. TCP option 254 answers for a
//! socket, whoever accepts its clients: no such program may read a byte of SMC, and all clients must
//! be served. The option needs root. Without it these tests print that they are skipped, and fail
//! where `CI=true`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "../../tests/rendezvous/bed.rs"]
mod bed;
#[path = "common/c.rs"]
mod c;
mod common;

use std::ffi::{CString, c_char, c_int};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use common::{Fabric, Running, await_listener, eventually, my_role, role};
use guest_driver::rendezvous::{Options, PassedOn, Rendezvous};

const PORT: u16 = 6000;
/// The number under which the next program gets the listener.
const HANDED: c_int = 9;
/// Connections that the next program serves.
const CLIENTS: usize = 4;

/// The ways from one program to the next.
const WAYS: [&str; 13] = [
    "execve",
    "execvp",
    "fexecve",
    "execveat",
    "syscall",
    "fork",
    "raw fork",
    "shared memory",
    "posix_spawn",
    "system",
    "standard input",
    "setuid",
    "SCM_RIGHTS",
];

/// A program with the library, and the rendezvous as `smc run` passes it on.
fn with_library(fabric: &Fabric, passed: &PassedOn) -> Command {
    let mut command = fabric.smc(std::env::current_exe().unwrap());
    command
        .env("SMC_RUN_CONNECT", "")
        .env("SMC_RUN_RENDEZVOUS", "auto")
        .env("SMC_RUN_OPTION", passed.to_string());
    command
}

fn plain() -> Command {
    Command::new(std::env::current_exe().unwrap())
}

fn option(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn speaks_first() -> bool {
    option("FIRST").as_deref() == Some("server")
}

/// One of the programs of these tests.
fn is_program() -> bool {
    let Some((role, port)) = my_role() else { return false };
    match role.as_str() {
        "owner" => own(port),
        "next" => serve_what_was_handed(),
        "receiver" => receive(),
        "client" => visit(port, option("VISITS").unwrap().parse().unwrap()),
        other => panic!("{other}"),
    }
    true
}

/// A server that listens, and leaves the connections to another program.
fn own(port: u16) {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    if option("AFTER").is_none() {
        assert_eq!(c::poll(&listener, libc::POLLIN, 20_000).unwrap(), libc::POLLIN);
    } else if option("SERVES").is_some() {
        serve(&listener);
    }
    let way = option("WAY").unwrap();
    let target = if way == "standard input" { 0 } else { HANDED };
    unsafe { std::env::set_var("HANDED", target.to_string()) };
    // It stays open in the next program.
    if way != "posix_spawn" && way != "SCM_RIGHTS" {
        assert_eq!(unsafe { libc::dup2(listener.as_raw_fd(), target) }, target);
    }
    hand_on(&way, &listener);
}

/// The environment of the next program: without the library, unless it cannot be loaded anyway.
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

fn hand_on(way: &str, listener: &TcpListener) {
    let program = std::env::current_exe().unwrap();
    let program = option("PROGRAM").map_or(program, Into::into);
    let file = CString::new(program.as_os_str().as_bytes()).unwrap();
    let words: Vec<CString> =
        std::env::args_os().map(|word| CString::new(word.as_bytes()).unwrap()).collect();
    let environment = next_environment(way == "setuid");
    let (words, environment) = (pointers(&words), pointers(&environment));
    let (file, words, environment) = (file.as_ptr(), words.as_ptr(), environment.as_ptr());
    let execute = || unsafe { libc::execve(file, words, environment) };
    match way {
        "execve" | "setuid" | "standard input" => {
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
            let stream = std::os::unix::net::UnixStream::connect(option("SOCKET").unwrap());
            send_descriptor(&stream.unwrap(), listener);
            // The owner, too, keeps it open.
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
fn spawn((file, words, environment): Program, listener: &TcpListener) -> c_int {
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

fn send_descriptor(stream: &impl AsRawFd, listener: &TcpListener) {
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

/// A program that gets the listener by SCM_RIGHTS.
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
    assert!(option("LD_PRELOAD").is_none() || unsafe { libc::getauxval(libc::AT_SECURE) } == 1);
    let fd = option("HANDED").unwrap().parse().unwrap();
    let listener = unsafe { TcpListener::from_raw_fd(fd) };
    (0..CLIENTS).for_each(|_| serve(&listener));
}

/// Serves a client. Nobody may get a byte that the client has not written.
fn serve(listener: &TcpListener) {
    let (mut stream, _) = listener.accept().unwrap();
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

/// Connects so many times.
fn visit(port: u16, times: usize) {
    for n in 0..times {
        let mut stream = match (n + times) % 2 {
            0 => TcpStream::connect(("127.0.0.1", port)).unwrap(),
            _ => {
                let stream = c::connect_nonblocking(port);
                assert_eq!(c::poll(&stream, libc::POLLOUT, 20_000).unwrap(), libc::POLLOUT);
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

fn client(mut command: Command, test: &str, first: &str, visits: usize) -> Running {
    command.env("VISITS", visits.to_string()).env("FIRST", first);
    role(&mut command, test, "client", PORT)
}

/// The kernel's mark says that the client of a connection is answered.
fn await_closed() {
    eventually(|| {
        let text = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
        !text.lines().any(|line| line.contains(":1770 ") && line.contains(" 0A "))
    });
}

/// Hands a listener on in one way, and visits the next program with clients of both kinds.
fn hand_over(test: &str, way: &str, first: &str, early: bool) {
    let fabric = Fabric::new(3);
    let passed = Rendezvous::attach(Options::default()).unwrap().pass_on().unwrap();
    let mut owner = with_library(&fabric, &passed);
    owner.env("WAY", way).env("FIRST", first);
    if !early {
        owner.env("AFTER", "1");
    }
    if way == "setuid" {
        owner.env("PROGRAM", other_users_program(&fabric));
    }
    let socket = fabric.file("socket");
    let mut receiver = None;
    if way == "SCM_RIGHTS" {
        owner.env("SOCKET", &socket);
        let mut command = plain();
        command.env("SOCKET", &socket).env("FIRST", first);
        receiver = Some(role(&mut command, test, "receiver", PORT));
        eventually(|| socket.exists());
    }
    let owner = role(&mut owner, test, "owner", PORT);
    await_listener(PORT);
    if !early {
        // It hands the listener on before anybody comes.
        eventually(|| fabric.said("left_listener") > 0);
    }
    // A client that was answered, if the listener is not handed on yet.
    let before = client(with_library(&fabric, &passed), test, first, 1);
    before.finish_beside(&[&owner]);
    client(plain(), test, first, 1).finish_beside(&[&owner]);
    client(with_library(&fabric, &passed), test, first, CLIENTS - 2).finish_beside(&[&owner]);
    if let Some(receiver) = receiver {
        receiver.finish();
        drop(owner);
    } else {
        owner.finish();
    }
    await_closed();
    assert_eq!(fabric.decided().0, 0, "{way}");
    assert_eq!(fabric.broken(), [""; 0], "{way}");
    assert_eq!(fabric.said("\"again\""), usize::from(early), "{way}");
}

/// A copy of this program that gives its user other rights: no library is loaded into it.
fn other_users_program(fabric: &Fabric) -> std::path::PathBuf {
    let copy = Path::new("/tmp").join(format!("smc-setuid-{}", std::process::id()));
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    std::os::unix::fs::chown(&copy, Some(65534), None).unwrap();
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let _ = fabric;
    copy
}

fn each_way(test: &str, first: &str, early: bool) {
    bed::run(|| {
        bed::ip("link set lo up");
        for way in WAYS {
            println!("{way}");
            hand_over(test, way, first, early);
        }
    });
}

#[test]
fn a_listener_handed_on_before_its_first_client_is_plain_and_the_server_speaks_first() {
    if !is_program() {
        each_way(
            "a_listener_handed_on_before_its_first_client_is_plain_and_the_server_speaks_first",
            "server",
            false,
        );
    }
}

#[test]
fn a_listener_handed_on_before_its_first_client_is_plain_and_the_client_speaks_first() {
    if !is_program() {
        each_way(
            "a_listener_handed_on_before_its_first_client_is_plain_and_the_client_speaks_first",
            "client",
            false,
        );
    }
}

#[test]
fn a_client_that_waits_while_its_listener_is_handed_on_is_served_and_the_server_speaks_first() {
    if !is_program() {
        each_way(
            "a_client_that_waits_while_its_listener_is_handed_on_is_served_and_the_server_speaks_first",
            "server",
            true,
        );
    }
}

#[test]
fn a_client_that_waits_while_its_listener_is_handed_on_is_served_and_the_client_speaks_first() {
    if !is_program() {
        each_way(
            "a_client_that_waits_while_its_listener_is_handed_on_is_served_and_the_client_speaks_first",
            "client",
            true,
        );
    }
}
