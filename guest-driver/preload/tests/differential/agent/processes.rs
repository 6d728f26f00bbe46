// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Processes: forks, programs, passed descriptors, ends.

use std::ffi::{CString, c_char, c_int};
use std::mem::zeroed;
use std::os::unix::ffi::OsStrExt;

use super::{FDS, FDS_BY_NAME, NAME, OWN_NAME, around, fd, named, names, ret, serve};
use crate::script::Words;

/// Environment: the server's port for a program of `burst`.
pub(super) const ONCE: &str = "SMC_DIFFERENTIAL_ONCE";

/// A program of `burst`: connects, sends a line, closes and exits.
pub(super) fn connect_send_exit(port: u16) -> ! {
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
        let line = b"one line\n";
        let done = super::sockets::connect_to(fd, false, port) == 0
            && libc::send(fd, line.as_ptr().cast(), line.len(), 0) == line.len() as isize
            && libc::close(fd) == 0;
        libc::exit(if done { 0 } else { 1 });
    }
}

fn terminated(texts: &[String]) -> (Vec<CString>, Vec<*mut c_char>) {
    let texts: Vec<_> = texts.iter().map(|text| CString::new(text.as_str()).unwrap()).collect();
    let mut pointers: Vec<_> = texts.iter().map(|text| text.as_ptr().cast_mut()).collect();
    pointers.push(std::ptr::null_mut());
    (texts, pointers)
}

/// A program, its arguments and its environment, in the form of execve(2).
struct Image {
    path: CString,
    _texts: [Vec<CString>; 2],
    arguments: Vec<*mut c_char>,
    environment: Vec<*mut c_char>,
}

impl Image {
    fn new(path: &std::path::Path, words: &[String], more: &[(&str, String)]) -> Image {
        let mut environment: Vec<String> = std::env::vars()
            .filter(|(name, _)| more.iter().all(|(other, _)| other != name))
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        environment.extend(more.iter().map(|(name, value)| format!("{name}={value}")));
        let (arguments, environment) = (terminated(words), terminated(&environment));
        Image {
            path: CString::new(path.as_os_str().as_bytes()).unwrap(),
            _texts: [arguments.0, environment.0],
            arguments: arguments.1,
            environment: environment.1,
        }
    }

    /// This executable.
    fn own(more: &[(&str, String)]) -> Image {
        let words: Vec<_> = std::env::args().collect();
        Image::new(&std::env::current_exe().unwrap(), &words, more)
    }

    /// This executable as a new agent with those descriptors.
    fn agent(name: &str, fds: &[(String, c_int)]) -> Image {
        let fds: Vec<_> = fds.iter().map(|(name, number)| format!("{name}={number}")).collect();
        Image::own(&[(NAME, name.to_owned()), (FDS, fds.join(","))])
    }

    /// Like [`Image::agent`], without the library.
    fn plain_agent(name: &str, fds: &[(String, c_int)]) -> Image {
        let fds: Vec<_> = fds.iter().map(|(name, number)| format!("{name}={number}")).collect();
        let library = ("LD_PRELOAD", String::new());
        Image::own(&[(NAME, name.to_owned()), (FDS, fds.join(",")), library])
    }

    fn execute(&self) -> c_int {
        unsafe {
            libc::execve(
                self.path.as_ptr(),
                self.arguments.as_ptr().cast(),
                self.environment.as_ptr().cast(),
            )
        }
    }
}

/// `x=0` or `x=0,1`: a descriptor and the numbers that a program has it under.
fn mapping(text: &str) -> Vec<(String, c_int)> {
    let mut name = "";
    let pairs = text.split(',').filter(|part| !part.is_empty()).map(|part| {
        let number = match part.split_once('=') {
            Some((new, number)) => {
                name = new;
                number
            }
            None => part,
        };
        (name.to_owned(), number.parse().unwrap())
    });
    pairs.collect()
}

/// Starts a program with posix_spawn(3).
fn spawn(image: &Image, fds: &[(String, c_int)]) -> Result<c_int, String> {
    unsafe {
        let mut actions: libc::posix_spawn_file_actions_t = zeroed();
        libc::posix_spawn_file_actions_init(&mut actions);
        for (name, number) in fds {
            libc::posix_spawn_file_actions_adddup2(&mut actions, fd(name), *number);
        }
        let mut pid = 0;
        let result = libc::posix_spawn(
            &mut pid,
            image.path.as_ptr(),
            &actions,
            std::ptr::null(),
            image.arguments.as_ptr(),
            image.environment.as_ptr(),
        );
        libc::posix_spawn_file_actions_destroy(&mut actions);
        if result == 0 { Ok(pid) } else { Err(names::error_name(result)) }
    }
}

unsafe extern "C" {
    // The libc crate marks its own declaration as deprecated. The child below calls only dup2,
    // execve and _exit.
    fn vfork() -> c_int;
}

fn vfork_and_execute(image: &Image, fds: &[(String, c_int)]) -> c_int {
    let pairs: Vec<_> = fds.iter().map(|(name, number)| (fd(name), *number)).collect();
    unsafe {
        let pid = vfork();
        if pid == 0 {
            for (old, new) in &pairs {
                libc::dup2(*old, *new);
            }
            image.execute();
            libc::_exit(127);
        }
        pid
    }
}

/// The child of a clone, which goes on as another agent.
extern "C" fn cloned(name: *mut libc::c_void) -> c_int {
    let name = unsafe { Box::from_raw(name.cast::<String>()) };
    serve(&name)
}

/// `fork NAME`, and the like: a child that is another agent.
fn fork(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    let agent = match op {
        "fork" | "clone" | "clone-sys" | "clone-asm" | "vfork" | "spawn" => words.word(),
        _ => return None,
    };
    let fds = mapping(&words.word());
    let _ = name;
    let pid = match op {
        "fork" => unsafe { libc::fork() },
        "clone" => unsafe {
            let stack = Vec::leak(vec![0u8; 512 << 10]).as_mut_ptr_range().end;
            let name = Box::into_raw(Box::new(agent.clone()));
            libc::clone(cloned, stack.cast(), libc::SIGCHLD, name.cast())
        },
        "clone-sys" => unsafe {
            libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as c_int
        },
        "clone-asm" => {
            around::inline(libc::SYS_clone, [libc::SIGCHLD as usize, 0, 0, 0, 0, 0]) as c_int
        }
        "vfork" => vfork_and_execute(&Image::agent(&agent, &fds), &fds),
        _ => match spawn(&Image::agent(&agent, &fds), &fds) {
            Ok(pid) => pid,
            Err(error) => return Some(error),
        },
    };
    if pid == 0 {
        serve(&agent);
    }
    Some(if pid < 0 { ret(-1) } else { "ok".into() })
}

fn status_text(status: c_int) -> String {
    if libc::WIFSIGNALED(status) {
        return names::signal_name(libc::WTERMSIG(status));
    }
    format!("exit {}", libc::WEXITSTATUS(status))
}

fn wait_for(pid: c_int) -> String {
    let mut status = 0;
    if unsafe { libc::waitpid(pid, &mut status, 0) } < 0 { ret(-1) } else { status_text(status) }
}

/// `program MAPPING PATH WORDS...`: runs a program with the connection as some of its descriptors
/// and waits for its end. `popen MAPPING` would be the same.
fn program(words: &mut Words<'_>, vfork: bool) -> String {
    let fds = mapping(&words.word());
    let path = words.word();
    let mut arguments = vec![path.clone()];
    match words.rest() {
        rest if rest.starts_with('\'') => {
            arguments.extend(["-c".into(), rest.trim_matches('\'').into()]);
        }
        rest => arguments.extend(rest.split_whitespace().map(str::to_owned)),
    }
    let image = Image::new(std::path::Path::new(&path), &arguments, &[]);
    if vfork {
        return wait_for(vfork_and_execute(&image, &fds));
    }
    match spawn(&image, &fds) {
        Ok(pid) => wait_for(pid),
        Err(error) => error,
    }
}

/// `burst N`: N processes connect, send a line, close and exit; two at a time.
fn burst(n: i64) -> String {
    let port = super::sockets::server_port();
    let image = Image::own(&[(ONCE, port.to_string())]);
    let mut running = std::collections::VecDeque::new();
    let mut failed = 0;
    for _ in 0..n {
        running.push_back(spawn(&image, &[]).unwrap());
        if running.len() == 2 {
            failed += i64::from(wait_for(running.pop_front().unwrap()) != "exit 0");
        }
    }
    failed += running.into_iter().filter(|pid| wait_for(*pid) != "exit 0").count() as i64;
    format!("{} done, {failed} failed", n - failed)
}

/// `count N`: accepts connections, reads each to its end and counts lines and errors.
fn count(n: i64) -> String {
    let (mut lines, mut ends, mut errors) = (0, 0, 0);
    for _ in 0..n {
        let none = std::ptr::null_mut();
        let fd = unsafe { libc::accept(fd("l"), none, std::ptr::null_mut()) };
        let mut room = [0u8; 64];
        loop {
            let n = unsafe { libc::recv(fd, room.as_mut_ptr().cast(), room.len(), 0) };
            match usize::try_from(n) {
                Ok(0) => break ends += 1,
                Ok(n) => lines += room[..n].iter().filter(|byte| **byte == b'\n').count(),
                Err(_) => break errors += 1,
            }
        }
        unsafe { libc::close(fd) };
    }
    format!("{lines} lines, {ends} ends, {errors} errors")
}

/// `pass:SOCKET NAME`: sends a descriptor with SCM_RIGHTS.
fn pass(socket: c_int, passed: c_int) -> String {
    let mut byte = *b"p";
    let mut control = [0u64; 8];
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    unsafe {
        let mut header: libc::msghdr = zeroed();
        (header.msg_iov, header.msg_iovlen) = (&mut iov, 1);
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let first = libc::CMSG_FIRSTHDR(&header);
        (*first).cmsg_level = libc::SOL_SOCKET;
        (*first).cmsg_type = libc::SCM_RIGHTS;
        (*first).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(first).cast::<c_int>().write_unaligned(passed);
        ret(libc::sendmsg(socket, &header, 0))
    }
}

/// `take:SOCKET NAME`: receives a descriptor.
fn take(socket: c_int, name: &str) -> String {
    let mut byte = [0u8];
    let mut control = [0u64; 8];
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    unsafe {
        let mut header: libc::msghdr = zeroed();
        (header.msg_iov, header.msg_iovlen) = (&mut iov, 1);
        (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), 64);
        if libc::recvmsg(socket, &mut header, 0) < 0 {
            return ret(-1);
        }
        let first = libc::CMSG_FIRSTHDR(&header);
        if first.is_null() {
            return "nothing".into();
        }
        named(name, libc::CMSG_DATA(first).cast::<c_int>().read_unaligned())
    }
}

/// A descriptor of another process, by pidfd_getfd(2).
fn fetch(name: &str, words: &mut Words<'_>) -> String {
    let parent = unsafe { libc::getppid() };
    let theirs = fd(&words.word());
    unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, parent, 0) as c_int;
        named(name, libc::syscall(libc::SYS_pidfd_getfd, process, theirs, 0) as c_int)
    }
}

/// Ways to end this process.
fn end(op: &str, words: &mut Words<'_>) -> Option<String> {
    unsafe {
        match op {
            "exit" => libc::exit(words.number() as c_int),
            "_exit" => libc::_exit(words.number() as c_int),
            "quick-exit" => {
                unsafe extern "C" {
                    fn quick_exit(status: c_int) -> !;
                }
                quick_exit(words.number() as c_int)
            }
            "exit-sys" => {
                libc::syscall(libc::SYS_exit_group, words.number());
                None
            }
            "exit-asm" => {
                around::inline(libc::SYS_exit_group, [words.number() as usize, 0, 0, 0, 0, 0]);
                None
            }
            "abort" => libc::abort(),
            "kill" => Some(ret(libc::kill(libc::getpid(), names::signal(&words.word())) as isize)),
            "crash" => {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                Some(ret(libc::raise(libc::SIGSEGV) as isize))
            }
            _ => None,
        }
    }
}

pub(super) fn operate(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    Some(match op {
        "wait" => wait_for(-1),
        "program" => program(words, false),
        "program-vfork" => program(words, true),
        "burst" => burst(words.number()),
        "count" => count(words.number()),
        // Executes this program anew, as the same agent with the same descriptors; `exec-plain`
        // without the library.
        "exec" | "exec-plain" => {
            let fds: Vec<_> =
                FDS_BY_NAME.lock().unwrap().iter().map(|(n, fd)| (n.clone(), *fd)).collect();
            let own = OWN_NAME.lock().unwrap().clone();
            let image = match op {
                "exec" => Image::agent(&own, &fds),
                _ => Image::plain_agent(&own, &fds),
            };
            ret(image.execute() as isize)
        }
        "pair" => {
            let mut ends = [0; 2];
            let kind = libc::SOCK_STREAM;
            let result = unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) };
            named(&format!("{name}0"), ends[0]);
            named(&format!("{name}1"), ends[1]);
            ret(result as isize)
        }
        "pass" => pass(fd(name), fd(&words.word())),
        "take" => take(fd(name), &words.word()),
        "fetch" => fetch(name, words),
        _ => return fork(op, name, words).or_else(|| end(op, words)),
    })
}
