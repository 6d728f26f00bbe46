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
use guest_driver::rendezvous::{Options, PassedOn, Policy, Rendezvous, cgroup_of, grant};

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
    with_settings(fabric.smc(std::env::current_exe().unwrap()), passed)
}

/// The same without any capability.
fn without_rights(fabric: &Fabric, passed: &PassedOn) -> Command {
    let mut command = fabric.smc("setpriv");
    command.args(["--bounding-set=-all", "--inh-caps=-all", "--securebits=+noroot"]);
    command.arg(std::env::current_exe().unwrap());
    with_settings(command, passed)
}

fn with_settings(mut command: Command, passed: &PassedOn) -> Command {
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
        "thief" => steal(),
        "leaky" => leak(port),
        "heir" => std::thread::sleep(std::time::Duration::from_secs(60)),
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
    if way == "stolen" {
        // Until the test ends it.
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
    // It stays open in the next program.
    if way != "posix_spawn" && way != "SCM_RIGHTS" {
        assert_eq!(unsafe { libc::dup2(listener.as_raw_fd(), target) }, target);
    }
    hand_on(&way, &listener);
}

/// As [`own`], for a connection that nobody has used.
fn hand_connection_on(way: &str, stream: &TcpStream) {
    unsafe { std::env::set_var("HANDED", HANDED.to_string()) };
    assert_eq!(unsafe { libc::dup2(stream.as_raw_fd(), HANDED) }, HANDED);
    hand_on(way, stream);
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

fn hand_on(way: &str, listener: &impl AsRawFd) {
    let program = std::env::current_exe().unwrap();
    let program = option("PROGRAM").map_or(program, Into::into);
    let file = CString::new(program.as_os_str().as_bytes()).unwrap();
    let words: Vec<CString> =
        std::env::args_os().map(|word| CString::new(word.as_bytes()).unwrap()).collect();
    let environment = next_environment(way == "setuid" || option("KEEPS").is_some());
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
    let is_secure = unsafe { libc::getauxval(libc::AT_SECURE) } == 1;
    assert!(option("KEEPS").is_some() || option("LD_PRELOAD").is_none() || is_secure);
    let fd = option("HANDED").unwrap().parse().unwrap();
    if option("CONNECTION").is_some() {
        return serve_client(unsafe { TcpStream::from_raw_fd(fd) });
    }
    let listener = unsafe { TcpListener::from_raw_fd(fd) };
    (0..CLIENTS).for_each(|_| serve(&listener));
}

/// Serves a client. Nobody may get a byte that the client has not written.
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

/// A program that takes the listener of another process without a call of that one. It gets the
/// Proposal of the first client.
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
    // It is through with what it inherits when its test harness has a second thread.
    eventually(|| std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().count() > 1);
    println!("ready");
    (0..CLIENTS).for_each(|_| serve(&listener));
    child.kill().unwrap();
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

/// How the owner of a listener is started.
type Start = fn(&Fabric, &PassedOn) -> Command;

fn attached() -> PassedOn {
    Rendezvous::attach(Options::default()).unwrap().pass_on().unwrap()
}

/// Hands a listener on in one way, and visits the next program with clients of both kinds.
fn hand_over(
    test: &str,
    way: &str,
    (first, early): (&str, bool),
    (start, passed): (Start, &PassedOn),
) {
    let fabric = Fabric::new(3);
    let mut owner = start(&fabric, passed);
    owner.env("WAY", way).env("FIRST", first);
    if !early {
        owner.env("AFTER", "1");
    }
    if way == "setuid" {
        owner.env("PROGRAM", other_users_program());
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
    let before = client(with_library(&fabric, passed), test, first, 1);
    before.finish_beside(&[&owner]);
    client(plain(), test, first, 1).finish_beside(&[&owner]);
    client(with_library(&fabric, passed), test, first, CLIENTS - 2).finish_beside(&[&owner]);
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

/// Without capabilities the process cannot change the listener itself: no listener of its port answers
/// any more.
#[test]
fn a_process_without_rights_hands_its_listener_on() {
    if is_program() {
        return;
    }
    let test = "a_process_without_rights_hands_its_listener_on";
    bed::run(|| {
        bed::ip("link set lo up");
        for way in ["execve", "fork", "posix_spawn"] {
            for how in [("server", true), ("client", true), ("server", false), ("client", false)] {
                hand_over(test, way, how, (without_rights, &attached()));
            }
        }
    });
}

/// The processes of a container have the option by a grant to their cgroup.
#[test]
fn a_process_with_a_grant_hands_its_listener_on() {
    if is_program() {
        return;
    }
    let test = "a_process_with_a_grant_hands_its_listener_on";
    bed::run(|| {
        bed::ip("link set lo up");
        grant(&cgroup_of(std::process::id()).unwrap()).unwrap();
        let passed = Rendezvous::granted(Policy::default()).unwrap().pass_on().unwrap();
        for way in ["execve", "fork", "posix_spawn"] {
            for how in [("server", true), ("client", true), ("server", false), ("client", false)] {
                hand_over(test, way, how, (without_rights, &passed));
            }
        }
    });
}

/// A server whose listener a program with the library takes over loses nothing.
#[test]
fn a_program_with_the_library_goes_on_with_smc() {
    if is_program() {
        return;
    }
    let test = "a_program_with_the_library_goes_on_with_smc";
    bed::run(|| {
        bed::ip("link set lo up");
        let ways = ["execve", "execvp", "fexecve", "execveat", "syscall", "fork", "posix_spawn"];
        for (way, early) in ways.into_iter().flat_map(|way| [(way, true), (way, false)]) {
            let fabric = Fabric::new(3);
            let passed = attached();
            let mut owner = with_library(&fabric, &passed);
            owner.env("WAY", way).env("KEEPS", "1");
            if !early {
                owner.env("AFTER", "1");
            }
            let owner = role(&mut owner, test, "owner", PORT);
            await_listener(PORT);
            let smc = || with_library(&fabric, &passed);
            client(smc(), test, "client", CLIENTS - 1).finish_beside(&[&owner]);
            client(plain(), test, "client", 1).finish_beside(&[&owner]);
            owner.finish();
            await_closed();
            assert_eq!(fabric.decided(), (2 * (CLIENTS - 1), 1), "{way}, early: {early}");
        }
    });
}

/// A connection that nobody has used is decided before a program without the library gets it.
#[test]
fn a_connection_handed_on_has_no_byte_of_smc() {
    if is_program() {
        return;
    }
    let test = "a_connection_handed_on_has_no_byte_of_smc";
    bed::run(|| {
        bed::ip("link set lo up");
        let ways = ["execve", "execvp", "fexecve", "syscall", "fork", "raw fork", "system"];
        let ways = ways.into_iter().chain(["posix_spawn", "setuid"]);
        for (way, first) in ways.flat_map(|way| [(way, "server"), (way, "client")]) {
            for with in [true, false] {
                println!("{way}, {first} first, library at the client: {with}");
                let fabric = Fabric::new(3);
                let passed = attached();
                let mut owner = with_library(&fabric, &passed);
                owner.env("WAY", way).env("FIRST", first).env("CONNECTION", "1");
                if way == "setuid" {
                    owner.env("PROGRAM", other_users_program());
                }
                let owner = role(&mut owner, test, "owner", PORT);
                await_listener(PORT);
                let command = if with { with_library(&fabric, &passed) } else { plain() };
                client(command, test, first, 1).finish_beside(&[&owner]);
                owner.finish();
                await_closed();
                assert_eq!(fabric.decided().0, 0, "{way}");
                assert_eq!(fabric.broken(), [""; 0], "{way}");
                assert_eq!(fabric.said("\"again\""), 0, "{way}: the Proposal is declined");
            }
        }
    });
}

/// A client whose server got its listener in a way that nobody can see fails once, and its program
/// sees nothing of it.
#[test]
fn a_client_connects_again_where_nobody_took_the_answer_back() {
    if is_program() {
        return;
    }
    let test = "a_client_connects_again_where_nobody_took_the_answer_back";
    bed::run(|| {
        bed::ip("link set lo up");
        for first in ["server", "client"] {
            let fabric = Fabric::new(3);
            let passed = attached();
            let traffic = guest_driver::traffic::create().unwrap();
            let with_library = || {
                let mut command = with_library(&fabric, &passed);
                command.env("SMC_RUN_TRAFFIC", traffic.as_raw_fd().to_string());
                command
            };
            let mut owner = with_library();
            owner.env("WAY", "stolen").env("AFTER", "1");
            let owner = role(&mut owner, test, "owner", PORT);
            await_listener(PORT);
            let mut thief = plain();
            thief.env("OWNER", owner.pid().to_string()).env("FIRST", first);
            thief.env("NUMBER", number_of_listener(owner.pid()).to_string());
            let thief = role(&mut thief, test, "thief", PORT);
            eventually(|| thief.said().contains("stolen"));
            // The second process knows what the first one has seen.
            client(with_library(), test, first, 2).finish_beside(&[&thief]);
            client(with_library(), test, first, 2).finish_beside(&[&thief]);
            thief.finish();
            drop(owner);
            await_closed();
            assert_eq!((fabric.decided().0, fabric.said("\"again\"")), (0, 1));
        }
    });
}

/// The number of the descriptor that listens in a process.
fn number_of_listener(pid: u32) -> c_int {
    let table = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    let line = table.lines().find(|line| line.contains(":1770 ") && line.contains(" 0A ")).unwrap();
    let socket = format!("socket:[{}]", line.split_whitespace().nth(9).unwrap());
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let is_it =
        |fd: &std::fs::DirEntry| std::fs::read_link(fd.path()).unwrap() == Path::new(&socket);
    fds.into_iter().find(is_it).unwrap().file_name().to_str().unwrap().parse().unwrap()
}

/// A listener that a program with the library inherits, and does not use, goes on as it was.
#[test]
fn a_listener_that_leaks_into_a_program_with_the_library_stays_plain() {
    if is_program() {
        return;
    }
    let test = "a_listener_that_leaks_into_a_program_with_the_library_stays_plain";
    bed::run(|| {
        bed::ip("link set lo up");
        let fabric = Fabric::new(3);
        let passed = attached();
        // The settings are for its child, which has the library.
        let mut server = with_library(&fabric, &passed);
        server.env_remove("LD_PRELOAD").env("LIBRARY", common::library());
        let server = role(&mut server, test, "leaky", PORT);
        eventually(|| server.said().contains("ready"));
        client(with_library(&fabric, &passed), test, "client", CLIENTS).finish_beside(&[&server]);
        server.finish();
        await_closed();
        assert_eq!((fabric.decided(), fabric.said("\"again\"")), ((0, CLIENTS), 0));
    });
}

/// A copy of this program that gives its user other rights: no library is loaded into it.
fn other_users_program() -> std::path::PathBuf {
    let copy = Path::new("/tmp").join(format!("smc-setuid-{}", std::process::id()));
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    std::os::unix::fs::chown(&copy, Some(65534), None).unwrap();
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o4755)).unwrap();
    copy
}

fn each_way(test: &str, first: &str, early: bool) {
    bed::run(|| {
        bed::ip("link set lo up");
        for way in WAYS {
            println!("{way}");
            hand_over(test, way, (first, early), (with_library, &attached()));
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
