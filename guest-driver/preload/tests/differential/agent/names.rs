// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Names of constants, as the manual pages have them.

use std::ffi::c_int;

macro_rules! list {
    ($($name:ident)*) => { &[$((stringify!($name), libc::$name as i64)),*] };
}

const ERRORS: &[(&str, i64)] = list! {
    EPERM ENOENT EINTR EIO EBADF EAGAIN ENOMEM EACCES EFAULT EBUSY EEXIST ENODEV EISDIR ENOTDIR EINVAL ENFILE
    EMFILE ENOTTY EFBIG ENOSPC ESPIPE EROFS EPIPE ECHILD ENOSYS ELOOP ENOTSOCK EDESTADDRREQ EMSGSIZE
    EPROTOTYPE ENOPROTOOPT EPROTONOSUPPORT EOPNOTSUPP EAFNOSUPPORT EADDRINUSE EADDRNOTAVAIL ENETDOWN
    ENETUNREACH ENETRESET ECONNABORTED ECONNRESET ENOBUFS EISCONN ENOTCONN ESHUTDOWN ETIMEDOUT
    ECONNREFUSED EHOSTUNREACH EALREADY EINPROGRESS EPROTO EBADFD ECANCELED EDOM ERANGE
};

const FLAGS: &[(&str, i64)] = list! {
    MSG_PEEK MSG_DONTWAIT MSG_WAITALL MSG_TRUNC MSG_OOB MSG_NOSIGNAL MSG_MORE MSG_ERRQUEUE
    MSG_ZEROCOPY MSG_EOR MSG_CONFIRM MSG_DONTROUTE MSG_CTRUNC MSG_WAITFORONE MSG_FASTOPEN
    MSG_CMSG_CLOEXEC
    O_NONBLOCK O_ASYNC O_RDWR O_APPEND O_CLOEXEC FD_CLOEXEC
    SPLICE_F_NONBLOCK SPLICE_F_MORE SPLICE_F_MOVE RWF_NOWAIT
    CLOSE_RANGE_CLOEXEC CLOSE_RANGE_UNSHARE
};

const OPTIONS: &[(&str, i64)] = list! {
    SO_ERROR SO_TYPE SO_PROTOCOL SO_DOMAIN SO_ACCEPTCONN SO_REUSEADDR SO_REUSEPORT SO_KEEPALIVE
    SO_OOBINLINE SO_RCVBUF SO_SNDBUF SO_RCVLOWAT SO_SNDLOWAT SO_ZEROCOPY SO_BROADCAST SO_DONTROUTE
    SO_LINGER SO_PRIORITY SO_MARK SO_TIMESTAMP SO_BUSY_POLL SO_INCOMING_CPU SO_PASSCRED SO_DEBUG
};

const TCP_OPTIONS: &[(&str, i64)] = list! {
    TCP_NODELAY TCP_CORK TCP_QUICKACK TCP_MAXSEG TCP_KEEPIDLE TCP_KEEPINTVL TCP_KEEPCNT
    TCP_SYNCNT TCP_LINGER2 TCP_DEFER_ACCEPT TCP_USER_TIMEOUT TCP_FASTOPEN TCP_FASTOPEN_CONNECT
    TCP_SAVE_SYN TCP_NOTSENT_LOWAT TCP_WINDOW_CLAMP TCP_INQ
};

const IP_OPTIONS: &[(&str, i64)] = list! {
    IP_TOS IP_TTL IP_MTU_DISCOVER IP_RECVERR IP_RECVTOS IP_FREEBIND IP_TRANSPARENT
    IP_BIND_ADDRESS_NO_PORT
};

const POLL: &[(&str, i64)] = list! {
    POLLIN POLLPRI POLLOUT POLLERR POLLHUP POLLNVAL POLLRDNORM POLLRDBAND POLLWRNORM POLLWRBAND
    POLLRDHUP
};

const EPOLL: &[(&str, i64)] = list! {
    EPOLLIN EPOLLPRI EPOLLOUT EPOLLERR EPOLLHUP EPOLLRDNORM EPOLLRDBAND EPOLLWRNORM EPOLLWRBAND
    EPOLLRDHUP EPOLLEXCLUSIVE EPOLLONESHOT EPOLLET
};

const SIGNALS: &[(&str, i64)] = list! {
    SIGHUP SIGINT SIGQUIT SIGABRT SIGKILL SIGUSR1 SIGSEGV SIGUSR2 SIGPIPE SIGALRM SIGTERM SIGCHLD
    SIGSTOP SIGCONT SIGURG SIGIO
};

fn find(lists: &[&[(&str, i64)]], prefixes: &[&str], name: &str) -> Option<i64> {
    lists.iter().copied().flatten().find_map(|(known, value)| {
        let fits = *known == name || prefixes.iter().any(|p| known.strip_prefix(p) == Some(name));
        fits.then_some(*value)
    })
}

/// The name of the current error.
pub(super) fn errno() -> String {
    error_name(std::io::Error::last_os_error().raw_os_error().unwrap())
}

/// The name of an error.
pub(super) fn error_name(error: c_int) -> String {
    let name = ERRORS.iter().find(|(_, value)| *value == i64::from(error));
    name.map_or_else(|| format!("error {error}"), |(name, _)| (*name).to_owned())
}

/// Flags joined by `|`, whose names may lack the prefix.
pub(super) fn flags(prefix: &str, text: &str) -> c_int {
    let names = text.split('|').filter(|name| !name.is_empty() && *name != "0");
    names.map(|name| find(&[FLAGS], &[prefix], name).expect(name) as c_int).fold(0, |a, b| a | b)
}

/// Level and number of a socket option.
pub(super) fn option(name: &str) -> (c_int, c_int) {
    let levels = [
        (libc::SOL_SOCKET, OPTIONS),
        (libc::IPPROTO_TCP, TCP_OPTIONS),
        (libc::IPPROTO_IP, IP_OPTIONS),
    ];
    let found = levels
        .iter()
        .find_map(|(level, list)| find(&[list], &[], name).map(|value| (*level, value as c_int)));
    found.expect(name)
}

/// Events of poll(2), joined by `|`.
pub(super) fn poll_events(text: &str) -> i16 {
    let names = text.split('|').filter(|name| *name != "0");
    names.map(|name| find(&[POLL], &["POLL"], name).expect(name) as i16).fold(0, |a, b| a | b)
}

/// Events of epoll(7), joined by `|`.
pub(super) fn epoll_events(text: &str) -> u32 {
    let names = text.split('|').filter(|name| *name != "0");
    names.map(|name| find(&[EPOLL], &["EPOLL"], name).expect(name) as u32).fold(0, |a, b| a | b)
}

fn show(list: &[(&str, i64)], prefix: &str, value: i64) -> String {
    let names = list.iter().filter(|(_, bit)| value & 0xffff_ffff & bit & 0xffff_ffff != 0);
    let names: Vec<_> = names.map(|(name, _)| name.trim_start_matches(prefix)).collect();
    if names.is_empty() { "0".into() } else { names.join("|") }
}

/// Events of poll(2) as text.
pub(super) fn show_poll(events: i16) -> String {
    show(POLL, "POLL", i64::from(events as u16))
}

/// Events of epoll(7) as text.
pub(super) fn show_epoll(events: u32) -> String {
    show(EPOLL, "EPOLL", i64::from(events))
}

/// Flags that recvmsg(2) returned, as text.
pub(super) fn show_msg_flags(flags: c_int) -> String {
    let returned: &[(&str, i64)] = list! { MSG_TRUNC MSG_CTRUNC MSG_OOB MSG_ERRQUEUE MSG_EOR };
    show(returned, "MSG_", i64::from(flags))
}

/// The number of a signal.
pub(super) fn signal(name: &str) -> c_int {
    find(&[SIGNALS], &["SIG"], name).expect(name) as c_int
}

/// The name of a signal.
pub(crate) fn signal_name(number: c_int) -> String {
    let name = SIGNALS.iter().find(|(_, value)| *value == i64::from(number));
    name.map_or_else(|| format!("signal {number}"), |(name, _)| (*name).to_owned())
}
