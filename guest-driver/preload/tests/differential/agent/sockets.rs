// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets: making, naming, options, descriptors.

use std::ffi::{c_int, c_void};
use std::mem::{size_of, zeroed};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use super::{FDS_BY_NAME, fd, named, names, ok, ret};
use crate::script::Words;

/// The server's port, from the last `port` operation of a client.
static PORT: AtomicU16 = AtomicU16::new(0);

/// The loopback address with a port, and its length.
fn loopback(v6: bool, port: u16) -> (libc::sockaddr_storage, libc::socklen_t) {
    let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
    let pointer = &raw mut storage;
    if v6 {
        let addr = unsafe { &mut *pointer.cast::<libc::sockaddr_in6>() };
        addr.sin6_family = libc::AF_INET6 as u16;
        addr.sin6_port = port.to_be();
        addr.sin6_addr.s6_addr[15] = 1;
        return (storage, size_of::<libc::sockaddr_in6>() as u32);
    }
    let addr = unsafe { &mut *pointer.cast::<libc::sockaddr_in>() };
    addr.sin_family = libc::AF_INET as u16;
    addr.sin_port = port.to_be();
    addr.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
    (storage, size_of::<libc::sockaddr_in>() as u32)
}

/// `connect` to the loopback address.
pub(super) fn connect_to(fd: c_int, v6: bool, port: u16) -> c_int {
    let (addr, len) = loopback(v6, port);
    unsafe { libc::connect(fd, (&raw const addr).cast(), len) }
}

fn get_int(fd: c_int, (level, name): (c_int, c_int)) -> Option<c_int> {
    let (mut value, mut len) = (0 as c_int, 4);
    let result = unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &mut len) };
    (result == 0).then_some(value)
}

pub(super) fn set_int(fd: c_int, (level, name): (c_int, c_int), value: c_int) -> c_int {
    unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), 4) }
}

fn set_struct<T>(fd: c_int, name: c_int, value: &T) -> String {
    let pointer = std::ptr::from_ref(value).cast::<c_void>();
    let len = size_of::<T>() as u32;
    ret(unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, name, pointer, len) } as isize)
}

/// The local port of a socket.
pub(super) fn port_of(fd: c_int) -> u16 {
    let mut addr: libc::sockaddr_in6 = unsafe { zeroed() };
    let mut len = size_of::<libc::sockaddr_in6>() as u32;
    unsafe { libc::getsockname(fd, (&raw mut addr).cast(), &mut len) };
    u16::from_be(addr.sin6_port)
}

fn listen(name: &str, options: &[String]) -> String {
    let has = |word: &str| options.iter().any(|option| option == word);
    let (v6, nb) = (has("v6"), has("nb"));
    let backlog = options.iter().find_map(|word| word.parse().ok()).unwrap_or(64);
    let domain = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    let kind = libc::SOCK_STREAM | if nb { libc::SOCK_NONBLOCK } else { 0 };
    let (addr, len) = loopback(v6, 0);
    unsafe {
        let fd = libc::socket(domain, kind, 0);
        for option in options.iter().filter_map(|word| word.strip_prefix("set=")) {
            let (option, value) = option.split_once('=').unwrap_or((option, "1"));
            set_int(fd, names::option(option), value.parse().unwrap());
        }
        if libc::bind(fd, (&raw const addr).cast(), len) < 0 || libc::listen(fd, backlog) < 0 {
            return ret(-1);
        }
        named(name, fd);
        // The test tells the port to the other agents.
        format!("ok port={}", port_of(fd))
    }
}

fn address(name: &str, peer: bool) -> String {
    let mut addr: libc::sockaddr_storage = unsafe { zeroed() };
    let mut len = size_of::<libc::sockaddr_storage>() as u32;
    let pointer = (&raw mut addr).cast::<libc::sockaddr>();
    let result = match peer {
        true => unsafe { libc::getpeername(fd(name), pointer, &mut len) },
        false => unsafe { libc::getsockname(fd(name), pointer, &mut len) },
    };
    if result < 0 { ret(-1) } else { show_address(&addr, len) }
}

/// An address without the port of a client, which varies.
pub(super) fn show_address(addr: &libc::sockaddr_storage, len: libc::socklen_t) -> String {
    if len == 0 {
        return "no address".into();
    }
    let family = c_int::from(addr.ss_family);
    let pointer = std::ptr::from_ref(addr);
    if family == libc::AF_INET {
        let addr = unsafe { &*pointer.cast::<libc::sockaddr_in>() };
        let ip = std::net::Ipv4Addr::from(addr.sin_addr.s_addr.to_ne_bytes());
        let port = if addr.sin_port == 0 { "0" } else { "port" };
        return format!("{ip} {port} {len}");
    }
    format!("family {family} {len}")
}

/// TCP_INFO of the TCP socket. `None`: the call failed.
fn raw_tcp_info(name: &str) -> Option<[u8; 256]> {
    let mut info = [0u8; 256];
    let mut len = 256;
    let pointer = info.as_mut_ptr().cast();
    let level = libc::IPPROTO_TCP;
    let result = unsafe { libc::getsockopt(fd(name), level, libc::TCP_INFO, pointer, &mut len) };
    (result == 0).then_some(info)
}

/// The bytes of TCP_INFO, once the peer's kernel has acknowledged everything sent.
fn tcp_counts(name: &str) -> String {
    let begun = Instant::now();
    loop {
        let Some(info) = raw_tcp_info(name) else { return ret(-1) };
        let number = |at: usize| u64::from_ne_bytes(info[at..at + 8].try_into().unwrap());
        let mut unsent = 0 as c_int;
        unsafe { libc::ioctl(fd(name), libc::TIOCOUTQ, &mut unsent) };
        if unsent == 0 || begun.elapsed() > Duration::from_secs(3) {
            let [acknowledged, received] = [120, 128].map(number);
            return format!("acked {acknowledged} received {received} waiting {unsent}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn tcp_info(name: &str) -> String {
    let states = [
        "?",
        "ESTABLISHED",
        "SYN_SENT",
        "SYN_RECV",
        "FIN_WAIT1",
        "FIN_WAIT2",
        "TIME_WAIT",
        "CLOSE",
        "CLOSE_WAIT",
        "LAST_ACK",
        "LISTEN",
        "CLOSING",
    ];
    raw_tcp_info(name).map_or_else(|| ret(-1), |info| states[info[0] as usize].into())
}

fn duplicate(op: &str, name: &str, words: &mut Words<'_>) -> String {
    let (old, to) = (fd(name), words.word());
    let new = match op {
        "dup" => unsafe { libc::dup(old) },
        "dupfd" => unsafe { libc::fcntl(old, libc::F_DUPFD, words.number() as c_int) },
        "dupfd-cloexec" => unsafe {
            libc::fcntl(old, libc::F_DUPFD_CLOEXEC, words.number() as c_int)
        },
        "sys-dup" => unsafe { libc::syscall(libc::SYS_dup, old) as c_int },
        "dup3" => unsafe { libc::dup3(old, words.number() as c_int, libc::O_CLOEXEC) },
        _ => unsafe { libc::dup2(old, words.number() as c_int) },
    };
    named(&to, new)
}

fn descriptors(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    let fd = fd(name);
    Some(unsafe {
        match op {
            "close" => {
                FDS_BY_NAME.lock().unwrap().remove(name);
                ret(libc::close(fd) as isize)
            }
            // The name stays, for calls on a closed number.
            "close-number" => ret(libc::close(fd) as isize),
            "sys-close" => ret(libc::syscall(libc::SYS_close, fd) as isize),
            "close-range" => {
                let (first, last) = (words.number() as u32, words.number() as u32);
                let flags = names::flags("CLOSE_RANGE_", &words.word());
                ret(libc::close_range(first, last, flags) as isize)
            }
            "dup" | "dup2" | "dup3" | "dupfd" | "dupfd-cloexec" | "sys-dup" => {
                duplicate(op, name, words)
            }
            "number" => ret(fd as isize),
            "getfl" => {
                let flags = libc::fcntl(fd, libc::F_GETFL);
                if flags < 0 { ret(-1) } else { format!("{:x}", flags & 0o7777) }
            }
            "getfd" => ret(libc::fcntl(fd, libc::F_GETFD) as isize),
            "setfd" => ret(libc::fcntl(fd, libc::F_SETFD, words.number() as c_int) as isize),
            "setfl" => {
                ret(libc::fcntl(fd, libc::F_SETFL, names::flags("O_", &words.word())) as isize)
            }
            "setown" => ret(libc::fcntl(fd, libc::F_SETOWN, libc::getpid()) as isize),
            "setsig" => {
                let signal = names::signal(&words.word());
                ret(libc::fcntl(fd, 10, signal) as isize)
            }
            "fionbio" => {
                let mut on = words.number() as c_int;
                ret(libc::ioctl(fd, libc::FIONBIO, &mut on) as isize)
            }
            "fioasync" => {
                let mut on = words.number() as c_int;
                ret(libc::ioctl(fd, libc::FIOASYNC, &mut on) as isize)
            }
            "fionread" | "outq" | "atmark" | "outqnsd" => {
                let request = match op {
                    "fionread" => libc::FIONREAD,
                    "outq" => libc::TIOCOUTQ,
                    "outqnsd" => 0x894b,
                    _ => 0x8905,
                };
                let mut value = -7 as c_int;
                match libc::ioctl(fd, request, &mut value) {
                    0 => value.to_string(),
                    _ => ret(-1),
                }
            }
            "ioctl-null" => {
                ret(libc::ioctl(fd, libc::FIONREAD, std::ptr::null_mut::<c_int>()) as isize)
            }
            "sockatmark" => {
                unsafe extern "C" {
                    fn sockatmark(fd: c_int) -> c_int;
                }
                ret(sockatmark(fd) as isize)
            }
            "fstat" => {
                let mut stat: libc::stat = zeroed();
                match libc::fstat(fd, &mut stat) {
                    0 => format!("{:o} size {}", stat.st_mode & libc::S_IFMT, stat.st_size),
                    _ => ret(-1),
                }
            }
            "lseek" => ret(libc::lseek(fd, 0, libc::SEEK_CUR) as isize),
            "fsync" => ret(libc::fsync(fd) as isize),
            "ftruncate" => ret(libc::ftruncate(fd, 0) as isize),
            "isatty" => ret(libc::isatty(fd) as isize),
            "limit" => {
                let most = words.number() as u64;
                let limit = libc::rlimit { rlim_cur: most, rlim_max: 4096 };
                ret(libc::setrlimit(libc::RLIMIT_NOFILE, &limit) as isize)
            }
            _ => return None,
        }
    })
}

fn options(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    let fd = fd(name);
    Some(match op {
        "get" => {
            get_int(fd, names::option(&words.word())).map_or_else(|| ret(-1), |n| n.to_string())
        }
        "set" => {
            let option = names::option(&words.word());
            ret(set_int(fd, option, words.number() as c_int) as isize)
        }
        // Short, absent and wrong arguments.
        "get-short" => {
            let (level, option) = names::option(&words.word());
            let (mut value, mut len) = ([9u8; 4], words.number() as u32);
            let pointer = value.as_mut_ptr().cast();
            let result = unsafe { libc::getsockopt(fd, level, option, pointer, &mut len) };
            if result < 0 { ret(-1) } else { format!("{value:?} {len}") }
        }
        "get-null" => {
            let (level, option) = names::option(&words.word());
            let none = std::ptr::null_mut();
            ret(unsafe { libc::getsockopt(fd, level, option, none, std::ptr::null_mut()) } as isize)
        }
        "get-unknown" => {
            let (mut value, mut len) = (0 as c_int, 4);
            let pointer = (&raw mut value).cast();
            let level = words.number() as c_int;
            let option = words.number() as c_int;
            ret(unsafe { libc::getsockopt(fd, level, option, pointer, &mut len) } as isize)
        }
        "linger" => {
            let linger = libc::linger { l_onoff: 1, l_linger: words.number() as c_int };
            set_struct(fd, libc::SO_LINGER, &linger)
        }
        "rcvtimeo" | "sndtimeo" => {
            let millis = words.number();
            let time = libc::timeval { tv_sec: millis / 1000, tv_usec: millis % 1000 * 1000 };
            let option = if op == "rcvtimeo" { libc::SO_RCVTIMEO } else { libc::SO_SNDTIMEO };
            set_struct(fd, option, &time)
        }
        "tcpinfo" => tcp_info(name),
        "tcpcounts" => tcp_counts(name),
        _ => return None,
    })
}

fn connect(op: &str, name: &str, words: &mut Words<'_>) -> String {
    let options = words.all();
    let has = |word: &str| options.iter().any(|option| option == word);
    let v6 = has("v6");
    let fd = if op == "connect" {
        let domain = if v6 { libc::AF_INET6 } else { libc::AF_INET };
        let kind = libc::SOCK_STREAM | if has("nb") { libc::SOCK_NONBLOCK } else { 0 };
        let fd = unsafe { libc::socket(domain, kind, libc::IPPROTO_TCP) };
        if fd < 0 {
            return ret(-1);
        }
        for option in options.iter().filter_map(|word| word.strip_prefix("set=")) {
            let (option, value) = option.split_once('=').unwrap_or((option, "1"));
            set_int(fd, names::option(option), value.parse().unwrap());
        }
        named(name, fd);
        fd
    } else {
        fd(name)
    };
    // On a port without a listener, if the test says so.
    let port = if has("refused") { 1 } else { PORT.load(Ordering::Relaxed) };
    ret(connect_to(fd, v6, port) as isize)
}

pub(super) fn operate(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    Some(match op {
        "port" => {
            PORT.store(words.number() as u16, Ordering::Relaxed);
            "ok".into()
        }
        "socket" => {
            let kind =
                libc::SOCK_STREAM | if words.word() == "nb" { libc::SOCK_NONBLOCK } else { 0 };
            named(name, unsafe { libc::socket(libc::AF_INET, kind, 0) })
        }
        "socket-kind" => {
            let (domain, kind) = (words.number() as c_int, words.number() as c_int);
            named(name, unsafe { libc::socket(domain, kind, words.number() as c_int) })
        }
        "bind" => {
            let (addr, len) = loopback(false, 0);
            ret(unsafe { libc::bind(fd(name), (&raw const addr).cast(), len) } as isize)
        }
        "listen" => listen(if name == "x" { "l" } else { name }, &words.all()),
        "listen-again" => ret(unsafe { libc::listen(fd(name), 5) } as isize),
        "connect" | "reconnect" => connect(op, name, words),
        "connect-null" => ret(unsafe { libc::connect(fd(name), std::ptr::null(), 16) } as isize),
        "connect-short" => {
            let (addr, _) = loopback(false, 1);
            ret(unsafe { libc::connect(fd(name), (&raw const addr).cast(), 4) } as isize)
        }
        "disconnect" => {
            let addr: libc::sockaddr_storage = unsafe { zeroed() };
            ret(unsafe { libc::connect(fd(name), (&raw const addr).cast(), 16) } as isize)
        }
        "accept" | "accept-old" | "accept-sys" | "accept-address" => {
            let nb = if words.word() == "nb" { libc::SOCK_NONBLOCK } else { 0 };
            let (listener, none) = (fd("l"), std::ptr::null_mut());
            let mut addr: libc::sockaddr_storage = unsafe { zeroed() };
            let mut len = size_of::<libc::sockaddr_storage>() as u32;
            let accepted = unsafe {
                match op {
                    "accept" => libc::accept4(listener, none, std::ptr::null_mut(), nb),
                    "accept-address" => libc::accept(listener, (&raw mut addr).cast(), &mut len),
                    "accept-sys" => libc::syscall(libc::SYS_accept4, listener, 0, 0, nb) as c_int,
                    _ => libc::accept(listener, none, std::ptr::null_mut()),
                }
            };
            let answer = named(name, accepted);
            if op == "accept-address" && accepted >= 0 { show_address(&addr, len) } else { answer }
        }
        "accept-on" => {
            ok(unsafe { libc::accept(fd(name), std::ptr::null_mut(), std::ptr::null_mut()) }
                as isize)
        }
        "getsockname" => address(name, false),
        "getpeername" => address(name, true),
        "shutdown" => {
            let how = match &*words.word() {
                "r" => libc::SHUT_RD,
                "w" => libc::SHUT_WR,
                "rw" => libc::SHUT_RDWR,
                number => number.parse().unwrap(),
            };
            ret(unsafe { libc::shutdown(fd(name), how) } as isize)
        }
        _ => return descriptors(op, name, words).or_else(|| options(op, name, words)),
    })
}

/// The port that this agent connects to.
pub(super) fn server_port() -> u16 {
    PORT.load(Ordering::Relaxed)
}
