// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Descriptors outside the library's reach: in stdio, in other processes, in asynchronous I/O. Any
//! use of them has the same result with and without the library at either end.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/c.rs"]
mod c;
#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::ffi::CString;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use combinations::{
    accept_and_greet, connect, connect_and_greet, exchange_as_client, exchange_as_server,
    in_all_combinations, pass, take,
};

/// Sends a line, and expects it in upper case and then the end of data.
fn expect_upper(mut stream: TcpStream) {
    stream.write_all(b"a line\n").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut back = String::new();
    stream.read_to_string(&mut back).unwrap();
    assert_eq!(back, "A LINE\n");
}

/// A stream of C's stdio.
struct File(*mut libc::FILE);

impl File {
    fn open(fd: OwnedFd, mode: &str) -> File {
        use std::os::fd::IntoRawFd;
        let mode = CString::new(mode).unwrap();
        let file = unsafe { libc::fdopen(fd.into_raw_fd(), mode.as_ptr()) };
        assert!(!file.is_null());
        File(file)
    }

    fn line(&self) -> String {
        let mut room = [0; 100];
        let got = unsafe { libc::fgets(room.as_mut_ptr(), 100, self.0) };
        assert!(!got.is_null(), "the end came before the line");
        unsafe { std::ffi::CStr::from_ptr(room.as_ptr()) }.to_str().unwrap().to_owned()
    }

    fn put(&self, text: &str) {
        let text = CString::new(text).unwrap();
        assert!(unsafe { libc::fputs(text.as_ptr(), self.0) } >= 0);
        assert_eq!(unsafe { libc::fflush(self.0) }, 0);
    }
}

impl Drop for File {
    fn drop(&mut self) {
        unsafe { libc::fclose(self.0) };
    }
}

fn answer_by_stdio(stream: TcpStream) {
    let write = File::open(stream.try_clone().unwrap().into(), "w");
    let read = File::open(stream.into(), "r");
    let line = read.line();
    write.put(&line.to_uppercase());
}

#[test]
fn stdio_on_a_fresh_connection() {
    fn server(listener: TcpListener) {
        answer_by_stdio(listener.accept().unwrap().0);
    }
    fn client(port: u16) {
        expect_upper(connect(port));
    }
    in_all_combinations(server, client);
}

#[test]
fn stdio_on_a_connection_in_use() {
    fn server(listener: TcpListener) {
        answer_by_stdio(accept_and_greet(&listener));
    }
    fn client(port: u16) {
        expect_upper(connect_and_greet(port));
    }
    in_all_combinations(server, client);
}

#[test]
fn stdio_at_the_client() {
    fn server(listener: TcpListener) {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            stream.write_all(text.to_uppercase().as_bytes()).unwrap();
        }
    }
    fn client(port: u16) {
        let ask = |stream: TcpStream| {
            let file = File::open(stream.try_clone().unwrap().into(), "r+");
            file.put("a line\n");
            stream.shutdown(Shutdown::Write).unwrap();
            assert_eq!(file.line(), "A LINE\n");
        };
        ask(connect(port));
        let mut stream = connect(port);
        stream.write_all(b"before ").unwrap();
        let file = File::open(stream.try_clone().unwrap().into(), "r+");
        file.put("and after\n");
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(file.line(), "BEFORE AND AFTER\n");
    }
    in_all_combinations(server, client);
}

#[test]
fn formatted_output_to_a_descriptor() {
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        for i in 0..3 {
            let n = unsafe {
                dprintf(stream.as_raw_fd(), c"%d %s %.2f|".as_ptr(), i, c"word".as_ptr(), 1.5)
            };
            assert_eq!(n, 12);
        }
        stream.write_all(b".").unwrap();
    }
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        let mut back = String::new();
        stream.read_to_string(&mut back).unwrap();
        assert_eq!(back, "0 word 1.50|1 word 1.50|2 word 1.50|.");
    }
    in_all_combinations(server, client);
}

/// `hello` by bash's own TCP client, twenty times.
#[test]
fn a_shell_writes_to_a_connection() {
    fn server(listener: TcpListener) {
        for _ in 0..20 {
            let mut text = String::new();
            listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
            assert_eq!(text, "hello\n");
        }
    }
    fn client(port: u16) {
        for _ in 0..20 {
            let script = format!("echo hello > /dev/tcp/127.0.0.1/{port}");
            assert!(Command::new("bash").args(["-c", &script]).status().unwrap().success());
        }
    }
    in_all_combinations(server, client);
}

#[test]
fn a_shell_talks_on_a_connection() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = [0; 5];
        for _ in 0..3 {
            stream.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"ping\n");
            stream.write_all(b"pong\n").unwrap();
        }
    }
    fn client(port: u16) {
        let script = format!(
            "exec 5<>/dev/tcp/127.0.0.1/{port}
             for i in 1 2 3; do echo ping >&5; read -r answer <&5; test \"$answer\" = pong || exit 1; done"
        );
        assert!(Command::new("bash").args(["-c", &script]).status().unwrap().success());
    }
    in_all_combinations(server, client);
}

/// Number of messages of `logger`; `SMC_LOGGER=1000` sends more than the suite does.
fn messages() -> usize {
    std::env::var("SMC_LOGGER").ok().and_then(|n| n.parse().ok()).unwrap_or(40)
}

/// Each client is a process that connects, sends a line, closes and exits at once. The server may
/// find the process gone before the end of the handshake.
#[test]
fn clients_that_send_and_exit_lose_nothing() {
    fn server(listener: TcpListener) {
        for _ in 0..messages() {
            let mut text = String::new();
            listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
            assert!(text.contains("a message"), "{text:?}");
        }
    }
    fn client(port: u16) {
        for _ in 0..messages() {
            let mut logger = Command::new("logger");
            logger.args(["--tcp", "--server", "127.0.0.1", "--port", &port.to_string()]);
            assert!(logger.args(["--", "a message"]).status().unwrap().success());
        }
    }
    in_all_combinations(server, client);
}

#[test]
fn an_end_by_a_signal_is_an_end_of_data() {
    fn server(listener: TcpListener) {
        for _ in 0..5 {
            let mut stream = accept_and_greet(&listener);
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            assert_eq!(text, "last words");
        }
    }
    fn client(port: u16) {
        for _ in 0..5 {
            let child = c::fork(move || {
                let mut stream = connect_and_greet(port);
                stream.write_all(b"last words").unwrap();
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            });
            let mut status = 0;
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert!(libc::WIFSIGNALED(status));
        }
    }
    in_all_combinations(server, client);
}

#[test]
fn what_came_before_a_reset_is_read() {
    fn server(listener: TcpListener) {
        let mut stream = accept_and_greet(&listener);
        stream.write_all(b"last words").unwrap();
        // The client's last byte is unread, so the close is a reset.
        while c::number(&stream, libc::FIONREAD).unwrap() == 0 {}
    }
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        stream.write_all(b"x").unwrap();
        std::thread::sleep(std::time::Duration::from_millis(100));
        let mut words = [0; 100];
        assert_eq!(stream.read(&mut words).unwrap(), 10);
        assert_eq!(&words[..10], b"last words");
        let error = stream.read(&mut words).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ECONNRESET));
    }
    in_all_combinations(server, client);
}

/// A worker, which echoes on its connections and checks their addresses.
fn worker(socket: UnixStream, connections: usize) -> libc::pid_t {
    c::fork(move || {
        for _ in 0..connections {
            let mut stream = take(&socket);
            assert_eq!(stream.local_addr().unwrap().ip().to_string(), "127.0.0.1");
            assert_eq!(stream.peer_addr().unwrap().ip().to_string(), "127.0.0.1");
            stream.set_nodelay(true).unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            stream.write_all(text.to_uppercase().as_bytes()).unwrap();
        }
    })
}

#[test]
fn connections_are_passed_to_another_process() {
    fn server(listener: TcpListener) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child = worker(theirs, 4);
        for i in 0..4 {
            let (mut stream, _) = listener.accept().unwrap();
            if i % 2 == 1 {
                exchange_as_server(&mut stream);
            }
            pass(&ours, stream.as_raw_fd());
        }
        c::wait(child);
    }
    fn client(port: u16) {
        for i in 0..4 {
            let mut stream = connect(port);
            if i % 2 == 1 {
                exchange_as_client(&mut stream);
            }
            expect_upper(stream);
        }
    }
    in_all_combinations(server, client);
}

#[test]
fn a_program_is_spawned_on_a_connection_in_use() {
    fn server(listener: TcpListener) {
        for _ in 0..5 {
            let stream = accept_and_greet(&listener);
            // `std` calls posix_spawn.
            let input = OwnedFd::from(stream.try_clone().unwrap());
            let mut tr = Command::new("tr");
            tr.args(["a-z", "A-Z"]).stdin(input).stdout(OwnedFd::from(stream));
            let mut child = tr.stderr(Stdio::inherit()).spawn().unwrap();
            drop(tr);
            assert!(child.wait().unwrap().success());
        }
    }
    fn client(port: u16) {
        for _ in 0..5 {
            expect_upper(connect_and_greet(port));
        }
    }
    in_all_combinations(server, client);
}

/// Like git's daemon: the parent closes its copy while the child executes a program.
#[test]
fn a_program_that_is_executed_takes_over_a_connection_that_its_parent_closes() {
    const N: usize = 30;
    fn server(listener: TcpListener) {
        for _ in 0..N {
            let stream = accept_and_greet(&listener);
            let fd = stream.as_raw_fd();
            let child = c::fork(move || unsafe {
                libc::dup2(fd, 0);
                libc::dup2(fd, 1);
                let args = [c"tr".as_ptr(), c"a-z".as_ptr(), c"A-Z".as_ptr(), std::ptr::null()];
                libc::execvp(args[0], args.as_ptr());
            });
            drop(stream);
            c::wait(child);
        }
    }
    fn client(port: u16) {
        for _ in 0..N {
            expect_upper(connect_and_greet(port));
        }
    }
    in_all_combinations(server, client);
}

unsafe extern "C" {
    fn dprintf(fd: libc::c_int, format: *const libc::c_char, ...) -> libc::c_int;
    // Rust has no attribute for functions that return twice. So the child only calls functions
    // until it executes a program.
    fn vfork() -> libc::pid_t;
}

#[inline(never)]
fn spawn_by_vfork(fd: RawFd, args: &[*const libc::c_char; 4]) -> libc::pid_t {
    unsafe {
        let child = vfork();
        if child == 0 {
            libc::dup2(fd, 0);
            libc::dup2(fd, 1);
            libc::execvp(args[0], args.as_ptr());
            libc::_exit(127);
        }
        child
    }
}

#[test]
fn vfork_and_a_program_on_a_connection_in_use() {
    fn server(listener: TcpListener) {
        for _ in 0..5 {
            let stream = accept_and_greet(&listener);
            let args = [c"tr".as_ptr(), c"a-z".as_ptr(), c"A-Z".as_ptr(), std::ptr::null()];
            let child = spawn_by_vfork(stream.as_raw_fd(), &args);
            drop(stream);
            c::wait(child);
        }
    }
    fn client(port: u16) {
        for _ in 0..5 {
            expect_upper(connect_and_greet(port));
        }
    }
    in_all_combinations(server, client);
}

/// A number of different files in a child and its parent.
const NUMBER: RawFd = 700;
/// Steps of the parent and its child of vfork, with one memory.
static STEP: AtomicU32 = AtomicU32::new(0);

fn await_step(step: u32) {
    while STEP.load(Ordering::SeqCst) != step {
        std::thread::yield_now();
    }
}

fn read_in_child() -> libc::c_int {
    STEP.store(1, Ordering::SeqCst);
    await_step(2);
    let mut byte = 0u8;
    let n = unsafe { libc::read(NUMBER, (&raw mut byte).cast(), 1) };
    libc::c_int::from(n != 1 || byte != 0)
}

#[inline(never)]
fn read_by_vfork(file: RawFd) -> libc::pid_t {
    unsafe {
        let child = vfork();
        if child == 0 {
            libc::dup2(file, NUMBER);
            libc::_exit(read_in_child());
        }
        child
    }
}

#[test]
fn a_child_of_vfork_reads_its_own_file_although_the_number_is_a_connection_of_its_parent() {
    fn server(listener: TcpListener) {
        let zeros = std::fs::File::open("/dev/zero").unwrap();
        let accepts = std::thread::spawn(move || {
            await_step(1);
            let stream = accept_and_greet(&listener);
            assert_eq!(unsafe { libc::dup2(stream.as_raw_fd(), NUMBER) }, NUMBER);
            STEP.store(2, Ordering::SeqCst);
            stream
        });
        c::wait(read_by_vfork(zeros.as_raw_fd()));
        assert_eq!(unsafe { libc::close(NUMBER) }, 0);
        (&accepts.join().unwrap()).write_all(b"fine").unwrap();
    }
    fn client(port: u16) {
        let mut text = String::new();
        connect_and_greet(port).read_to_string(&mut text).unwrap();
        assert_eq!(text, "fine");
    }
    in_all_combinations(server, client);
}

#[test]
fn vectors_at_no_offset() {
    fn server(listener: TcpListener) {
        let (stream, _) = listener.accept().unwrap();
        let (mut a, mut b) = ([0; 3], [0; 10]);
        let rooms = [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)];
        let n = unsafe { libc::preadv2(stream.as_raw_fd(), rooms.as_ptr().cast(), 2, -1, 0) };
        assert_eq!(n, 5);
        let pieces = [IoSlice::new(b"the"), IoSlice::new(b"re")];
        let n = unsafe { libc::pwritev2(stream.as_raw_fd(), pieces.as_ptr().cast(), 2, -1, 0) };
        assert_eq!(n, 5);
        let n = unsafe { libc::preadv2(stream.as_raw_fd(), rooms.as_ptr().cast(), 2, 0, 0) };
        assert_eq!((n, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::ESPIPE)));
        assert_eq!((&a, &b[..2]), (b"hel", &b"lo"[..]));
    }
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    in_all_combinations(server, client);
}

#[test]
fn asynchronous_reads_and_writes() {
    unsafe fn run(
        start: unsafe extern "C" fn(*mut libc::aiocb) -> i32,
        fd: RawFd,
        buf: &mut [u8],
    ) -> isize {
        unsafe {
            let mut block: libc::aiocb = std::mem::zeroed();
            block.aio_fildes = fd;
            (block.aio_buf, block.aio_nbytes) = (buf.as_mut_ptr().cast(), buf.len());
            assert_eq!(start(&mut block), 0);
            let list = [&raw const block];
            while libc::aio_error(&block) == libc::EINPROGRESS {
                libc::aio_suspend(list.as_ptr(), 1, std::ptr::null());
            }
            libc::aio_return(&mut block)
        }
    }
    fn server(listener: TcpListener) {
        let stream = accept_and_greet(&listener);
        let mut buf = [0; 7];
        assert_eq!(unsafe { run(libc::aio_read, stream.as_raw_fd(), &mut buf) }, 7);
        buf.make_ascii_uppercase();
        assert_eq!(unsafe { run(libc::aio_write, stream.as_raw_fd(), &mut buf) }, 7);
    }
    fn client(port: u16) {
        expect_upper(connect_and_greet(port));
    }
    in_all_combinations(server, client);
}

/// A megabyte, so the process ends long before the peer has taken everything.
#[test]
fn what_stdio_wrote_before_the_program_ended_arrives() {
    const N: usize = 1 << 20;
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(300));
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        assert!(all == common::pattern(N), "{} bytes came", all.len());
    }
    fn client(port: u16) {
        let stream = connect(port);
        let data = common::pattern(N);
        let file = File::open(stream.as_fd().try_clone_to_owned().unwrap(), "w");
        assert_eq!(unsafe { libc::fwrite(data.as_ptr().cast(), 1, N, file.0) }, N);
        // The last bytes are in the buffer of stdio, and this program does not close it.
        std::mem::forget(file);
        std::mem::forget(stream);
        unsafe { libc::exit(0) };
    }
    in_all_combinations(server, client);
}

/// A server like inetd's: the program executed for each client answers by stdio.
#[test]
fn a_program_that_uses_stdio_is_executed_for_each_client() {
    fn server(listener: TcpListener) {
        for _ in 0..3 {
            let (stream, _) = listener.accept().unwrap();
            let input = OwnedFd::from(stream.try_clone().unwrap());
            // bash reads and prints its lines by stdio of its own.
            let mut shell = Command::new("bash");
            shell.args(["-c", "read -r line; echo ${line^^}"]).stdin(input);
            let mut child = shell.stdout(OwnedFd::from(stream)).spawn().unwrap();
            drop(shell);
            assert!(child.wait().unwrap().success());
        }
    }
    fn client(port: u16) {
        (0..3).for_each(|_| expect_upper(connect(port)));
    }
    in_all_combinations(server, client);
}

/// A pipe that is partly full, as HAProxy uses it: bytes that do not fit stay in the connection,
/// and the call does not wait.
#[test]
fn splice_into_a_pipe_that_is_nearly_full_does_not_wait() {
    const N: usize = 300_000;
    fn server(listener: TcpListener) {
        use std::io::pipe;
        let stream = accept_and_greet(&listener);
        let (mut reader, writer) = pipe().unwrap();
        let (none, flags) = (std::ptr::null_mut(), libc::SPLICE_F_NONBLOCK);
        let mut all = Vec::new();
        while all.len() < N {
            // Until the pipe is full, or the connection is empty.
            loop {
                let n = unsafe {
                    libc::splice(stream.as_raw_fd(), none, writer.as_raw_fd(), none, N, flags)
                };
                if n <= 0 {
                    break;
                }
            }
            let mut some = [0; 1000];
            if c::number(&reader, libc::FIONREAD).unwrap() > 0 {
                let n = reader.read(&mut some).unwrap();
                all.extend_from_slice(&some[..n]);
            }
        }
        assert!(all == common::pattern(N));
    }
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        stream.write_all(&common::pattern(N)).unwrap();
    }
    in_all_combinations(server, client);
}

#[test]
fn a_set_with_the_number_of_a_closed_one_is_empty() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        for in_use in [false, true] {
            let add = |set: RawFd| unsafe {
                let mut event = libc::epoll_event { events: libc::EPOLLOUT as u32, u64: 7 };
                libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, stream.as_raw_fd(), &mut event)
            };
            let first = unsafe { libc::epoll_create1(0) };
            assert_eq!(add(first), 0);
            c::close(first);
            let second = unsafe { libc::epoll_create1(0) };
            assert_eq!(first, second);
            assert_eq!(add(second), 0, "{}", std::io::Error::last_os_error());
            c::close(second);
            if !in_use {
                exchange_as_server(&mut stream);
            }
        }
    }
    fn client(port: u16) {
        let mut stream = connect_and_greet(port);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
    in_all_combinations(server, client);
}

/// A forked child shares the set and its signal lines with the parent.
#[test]
fn a_child_that_closes_its_copy_of_a_set_delays_no_event_of_the_parent() {
    const ROUNDS: u8 = 10;
    fn server(listener: TcpListener) {
        let mut stream = listener.accept().unwrap().0;
        let set = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 1 };
        let fd = stream.as_raw_fd();
        assert_eq!(unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, &mut event) }, 0);
        let mut answer = || {
            assert_eq!(unsafe { libc::epoll_wait(set, &mut event, 1, 100_000) }, 1);
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            stream.write_all(&byte).unwrap();
        };
        answer();
        let child = unsafe { libc::fork() };
        if child == 0 {
            unsafe {
                libc::close(set);
                libc::close(fd);
                libc::_exit(0);
            }
        }
        assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
        let begun = smc_test_support::Stopwatch::start();
        (0..ROUNDS).for_each(|_| answer());
        // An unannounced connection is checked once a second.
        let took = begun.elapsed();
        assert!(took < std::time::Duration::from_secs(5), "{ROUNDS} rounds took {took:?}");
        unsafe { libc::close(set) };
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        for round in 0..=ROUNDS {
            // The server is asleep by now.
            std::thread::sleep(std::time::Duration::from_millis(20));
            stream.write_all(&[round]).unwrap();
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            assert_eq!(byte, [round]);
        }
    }
    in_all_combinations(server, client);
}

/// A server that is full: accepts and closes at once, or says why first.
#[test]
fn a_server_that_closes_at_once_is_an_end_of_data() {
    fn server(listener: TcpListener) {
        for i in 0..20 {
            let (stream, _) = listener.accept().unwrap();
            if i % 2 == 1 {
                // Bytes that the kernel would take at once are taken at once.
                stream.set_nonblocking(true).unwrap();
                assert_eq!((&stream).write(b"-ERR full\r\n").unwrap(), 11);
            }
        }
    }
    fn client(port: u16) {
        for i in 0..20 {
            let mut stream = connect(port);
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            assert_eq!(text, if i % 2 == 1 { "-ERR full\r\n" } else { "" });
        }
    }
    in_all_combinations(server, client);
}

#[test]
fn a_server_that_greets_without_blocking_and_ends() {
    fn server(listener: TcpListener) {
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        for word in [b"220 ", b"here"] {
            assert_eq!((&stream).write(word).unwrap(), 4);
        }
    }
    fn client(port: u16) {
        let mut text = String::new();
        connect(port).read_to_string(&mut text).unwrap();
        assert_eq!(text, "220 here");
    }
    in_all_combinations(server, client);
}
