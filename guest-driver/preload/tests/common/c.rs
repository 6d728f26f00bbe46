// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls of libc missing in `std`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(dead_code, reason = "not every test uses all of it")]
#![allow(unreachable_pub, reason = "each test is a crate of its own")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

use std::io::{Error, Result};
use std::os::fd::{AsRawFd, RawFd};

fn done(value: isize) -> Result<usize> {
    if value < 0 { Err(Error::last_os_error()) } else { Ok(value as usize) }
}

pub fn recv(fd: &impl AsRawFd, buf: &mut [u8], flags: i32) -> Result<usize> {
    done(unsafe { libc::recv(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), flags) })
}

pub fn send(fd: &impl AsRawFd, buf: &[u8], flags: i32) -> Result<usize> {
    done(unsafe { libc::send(fd.as_raw_fd(), buf.as_ptr().cast(), buf.len(), flags) })
}

/// `sendmsg` of two buffers.
pub fn sendmsg(fd: &impl AsRawFd, pieces: [&[u8]; 2]) -> Result<usize> {
    let mut iov = pieces.map(|piece| libc::iovec {
        iov_base: piece.as_ptr().cast_mut().cast(),
        iov_len: piece.len(),
    });
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (iov.as_mut_ptr(), 2);
    done(unsafe { libc::sendmsg(fd.as_raw_fd(), &header, libc::MSG_NOSIGNAL) })
}

/// `recvmsg` into two buffers.
pub fn recvmsg(fd: &impl AsRawFd, rooms: [&mut [u8]; 2], flags: i32) -> Result<usize> {
    let mut iov =
        rooms.map(|room| libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() });
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (iov.as_mut_ptr(), 2);
    done(unsafe { libc::recvmsg(fd.as_raw_fd(), &mut header, flags) })
}

/// Entries of a list, each behind an entry without address and length, and one more such entry at
/// the end.
fn with_gaps(entries: [libc::iovec; 2]) -> [libc::iovec; 5] {
    let gap = || libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let [first, second] = entries;
    [gap(), first, gap(), second, gap()]
}

/// `writev` of two pieces among empty ones without an address.
pub fn writev_with_gaps(fd: &impl AsRawFd, pieces: [&[u8]; 2]) -> Result<usize> {
    let iov = with_gaps(pieces.map(|piece| libc::iovec {
        iov_base: piece.as_ptr().cast_mut().cast(),
        iov_len: piece.len(),
    }));
    done(unsafe { libc::writev(fd.as_raw_fd(), iov.as_ptr(), 5) })
}

/// `readv` into two buffers among empty ones without an address.
pub fn readv_with_gaps(fd: &impl AsRawFd, rooms: [&mut [u8]; 2]) -> Result<usize> {
    let iov = with_gaps(
        rooms.map(|room| libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() }),
    );
    done(unsafe { libc::readv(fd.as_raw_fd(), iov.as_ptr(), 5) })
}

pub fn number(fd: &impl AsRawFd, request: u64) -> Result<i32> {
    let mut value = 0i32;
    done(unsafe { libc::ioctl(fd.as_raw_fd(), request, &mut value) } as isize).map(|_| value)
}

pub fn poll(fd: &impl AsRawFd, events: i16, millis: i32) -> Result<i16> {
    let mut fds = [libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 }];
    done(unsafe { libc::poll(fds.as_mut_ptr(), 1, millis) } as isize).map(|_| fds[0].revents)
}

/// `ppoll` with an empty signal mask.
pub fn ppoll(fd: &impl AsRawFd, events: i16, millis: i64) -> Result<i16> {
    let mut fds = [libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 }];
    let time = libc::timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 };
    let mask: libc::sigset_t = unsafe { std::mem::zeroed() };
    done(unsafe { libc::ppoll(fds.as_mut_ptr(), 1, &time, &mask) } as isize).map(|_| fds[0].revents)
}

/// `select` for reading.
pub fn select(fd: &impl AsRawFd, millis: i64) -> Result<bool> {
    let mut set: libc::fd_set = unsafe { std::mem::zeroed() };
    let fd = fd.as_raw_fd();
    unsafe { libc::FD_SET(fd, &mut set) };
    let mut time = libc::timeval { tv_sec: millis / 1000, tv_usec: millis % 1000 * 1000 };
    let none = std::ptr::null_mut();
    done(unsafe { libc::select(fd + 1, &mut set, none, none, &mut time) } as isize)?;
    Ok(unsafe { libc::FD_ISSET(fd, &set) })
}

/// Sets RLIMIT_NOFILE.
pub fn limit_descriptors(most: u64) {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}

/// Closes descriptors from a number on, except standard ones.
pub fn close_from(first: RawFd) {
    unsafe { libc::close_range(first as u32, u32::MAX, 0) };
}

/// Closes a descriptor by its number.
pub fn close(fd: RawFd) {
    unsafe { libc::close(fd) };
}

/// Replaces a descriptor by a new file.
pub fn replace(fd: RawFd, path: &std::ffi::OsStr) {
    let file = std::fs::File::create(path).unwrap();
    assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), fd) }, fd);
}

/// Sets SO_SNDBUF, bytes.
pub fn set_send_buffer(socket: &impl AsRawFd, bytes: libc::c_int) {
    let (value, length) = (&raw const bytes, size_of::<libc::c_int>() as libc::socklen_t);
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            value.cast(),
            length,
        )
    };
    assert_eq!(result, 0);
}

/// Begins a non-blocking connect.
pub fn connect_nonblocking(port: u16) -> std::net::TcpStream {
    connect_nonblocking_to(std::net::Ipv4Addr::LOCALHOST, port)
}

/// Like [`connect_nonblocking`], to another machine.
pub fn connect_nonblocking_to(host: std::net::Ipv4Addr, port: u16) -> std::net::TcpStream {
    use std::os::fd::FromRawFd;
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    let fd = unsafe { libc::socket(libc::AF_INET, kind, 0) };
    assert!(fd >= 0);
    let stream = unsafe { std::net::TcpStream::from_raw_fd(fd) };
    if let Err(error) = connect(&stream, host, port) {
        assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS));
    }
    stream
}

/// Calls `connect`, for the first time or again.
pub fn connect(socket: &impl AsRawFd, host: std::net::Ipv4Addr, port: u16) -> Result<usize> {
    let mut addr: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    addr.sin_family = libc::AF_INET as u16;
    addr.sin_port = port.to_be();
    addr.sin_addr.s_addr = u32::from_ne_bytes(host.octets());
    let addr = std::ptr::from_ref(&addr);
    done(unsafe { libc::connect(socket.as_raw_fd(), addr.cast(), 16) } as isize)
}

pub struct Epoll(RawFd);

impl Epoll {
    pub fn new() -> Epoll {
        Epoll(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })
    }

    pub fn control(&self, op: i32, fd: &impl AsRawFd, events: i32, data: u64) -> Result<usize> {
        let mut event = libc::epoll_event { events: events as u32, u64: data };
        done(unsafe { libc::epoll_ctl(self.0, op, fd.as_raw_fd(), &mut event) } as isize)
    }

    pub fn add(&self, fd: &impl AsRawFd, events: i32, data: u64) {
        self.control(libc::EPOLL_CTL_ADD, fd, events, data).unwrap();
    }

    pub fn wait(&self, millis: i32) -> Vec<(u64, i32)> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        let n = unsafe { libc::epoll_wait(self.0, events.as_mut_ptr(), 64, millis) };
        let n = usize::try_from(n).unwrap_or(0);
        events[..n].iter().map(|event| (event.u64, event.events as i32)).collect()
    }

    /// `epoll_pwait` with an empty signal mask.
    pub fn wait_for_signals(&self, millis: i32) -> Result<Vec<(u64, i32)>> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        let mask: libc::sigset_t = unsafe { std::mem::zeroed() };
        let n = unsafe { libc::epoll_pwait(self.0, events.as_mut_ptr(), 64, millis, &mask) };
        let n = done(n as isize)?;
        Ok(events[..n].iter().map(|event| (event.u64, event.events as i32)).collect())
    }

    /// How many descriptors the kernel itself looks at for this set.
    pub fn known_to_the_kernel(&self) -> usize {
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0)).unwrap();
        text.lines().filter(|line| line.starts_with("tfd:")).count()
    }
}

impl AsRawFd for Epoll {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

/// Forks; the child runs `f` and ends.
pub fn fork(f: impl FnOnce()) -> i32 {
    match unsafe { libc::fork() } {
        0 => {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
            unsafe { libc::_exit(if result.is_ok() { 0 } else { 1 }) }
        }
        child => child,
    }
}

/// Waits for a child, which must succeed.
pub fn wait(child: i32) {
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed");
}

/// Sends SIGALRM after a time, to a handler that does nothing, with or without SA_RESTART.
pub fn alarm_in(millis: i64, restart: bool) {
    set_alarm(millis, 0, restart);
}

/// Like [`alarm_in`], again and again: a single signal may come before the call to be interrupted.
pub fn alarm_every(millis: i64, restart: bool) {
    set_alarm(millis, millis, restart);
}

fn set_alarm(millis: i64, again: i64, restart: bool) {
    extern "C" fn nothing(_: i32) {}
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
    action.sa_flags = if restart { libc::SA_RESTART } else { 0 };
    let time = libc::timespec { tv_sec: 0, tv_nsec: millis * 1_000_000 };
    let again = libc::timespec { tv_sec: 0, tv_nsec: again * 1_000_000 };
    let timer = libc::itimerspec { it_interval: again, it_value: time };
    unsafe {
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut());
        // The signal must interrupt the thread of the test, not the thread waiting for the test.
        let this = libc::syscall(libc::SYS_gettid) as i32;
        let mut event: libc::sigevent = std::mem::zeroed();
        (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_THREAD_ID, libc::SIGALRM);
        event.sigev_notify_thread_id = this;
        let mut id: libc::timer_t = std::mem::zeroed();
        libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut id);
        libc::timer_settime(id, 0, &timer, std::ptr::null_mut());
    }
}

/// The processor time that this thread has used.
pub fn processor_time() -> std::time::Duration {
    let mut time: libc::timespec = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    std::time::Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Blocks SIGALRM in this thread.
pub fn block_alarms() {
    unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut mask, libc::SIGALRM);
        libc::pthread_sigmask(libc::SIG_BLOCK, &mask, std::ptr::null_mut());
    }
}

pub fn sendfile(
    to: &impl AsRawFd,
    from: &impl AsRawFd,
    offset: &mut i64,
    n: usize,
) -> Result<usize> {
    done(unsafe { libc::sendfile(to.as_raw_fd(), from.as_raw_fd(), offset, n) })
}

pub fn splice(from: &impl AsRawFd, to: &impl AsRawFd, n: usize) -> Result<usize> {
    let none = std::ptr::null_mut();
    done(unsafe { libc::splice(from.as_raw_fd(), none, to.as_raw_fd(), none, n, 0) })
}

/// From now on the kernel ends this process at any of these system calls.
pub fn forbid(calls: &[i64]) {
    let op = |code: u32, jump: u8, value: u32| libc::sock_filter {
        code: code as u16,
        jt: jump,
        jf: 0,
        k: value,
    };
    let load_number = op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0);
    let mut program = vec![load_number];
    for (at, call) in calls.iter().enumerate() {
        let to_the_end = (calls.len() - at) as u8;
        program.push(op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, to_the_end, *call as u32));
    }
    program.push(op(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW));
    program.push(op(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_KILL_PROCESS));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter), 0);
    }
}

/// A listener that may share its port (SO_REUSEPORT).
pub fn listen_with_others(port: u16) -> std::net::TcpListener {
    use std::os::fd::FromRawFd;
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([127, 0, 0, 1]) },
        sin_zero: [0; 8],
    };
    let (on, size) = (1i32, size_of::<libc::sockaddr_in>() as libc::socklen_t);
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        let value = (&raw const on).cast();
        assert_eq!(libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, value, 4), 0);
        assert_eq!(libc::bind(fd, (&raw const address).cast(), size), 0);
        assert_eq!(libc::listen(fd, 16), 0);
        std::net::TcpListener::from_raw_fd(fd)
    }
}

/// Mounts a directory on itself, for this thread, so that the kernel maps no code from there.
pub(crate) fn mount_without_programs(directory: &std::path::Path) {
    use std::os::unix::ffi::OsStrExt;
    let place = std::ffi::CString::new(directory.as_os_str().as_bytes()).unwrap();
    let mount = |from: &std::ffi::CStr, to: &std::ffi::CStr, flags| {
        let no = std::ptr::null();
        let result = unsafe { libc::mount(from.as_ptr(), to.as_ptr(), no, flags, no.cast()) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    };
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNS) }, 0);
    mount(c"none", c"/", libc::MS_REC | libc::MS_PRIVATE);
    mount(&place, &place, libc::MS_BIND);
    mount(&place, &place, libc::MS_REMOUNT | libc::MS_BIND | libc::MS_NOEXEC);
}
