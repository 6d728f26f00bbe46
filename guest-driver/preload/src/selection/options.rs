// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The treatment of each socket option of Linux 7.2 for TCP sockets.

use std::ffi::c_int;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sys::raw;

/// The library's treatment of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OptionKind {
    /// The kernel has the option on the TCP socket. The option names the connection, or says how
    /// TCP sends packets, and has no visible effect on SMC.
    Kernel,
    /// SMC does what TCP does.
    Followed,
    /// SMC has nothing like the option. A connection with the option set before the decision stays
    /// on TCP. Afterwards the call fails with EOPNOTSUPP.
    TcpOnly,
}
use OptionKind::{Followed, Kernel, TcpOnly};

/// Level, number, name and kind.
type Row = (c_int, c_int, &'static str, OptionKind);

/// The options of Linux 7.2. The kernel refuses any other option, or is newer.
#[rustfmt::skip]
const OPTIONS: [Row; 229] = [
    (libc::SOL_SOCKET, 1, "SO_DEBUG", Kernel),
    (libc::SOL_SOCKET, 2, "SO_REUSEADDR", Kernel),
    (libc::SOL_SOCKET, 3, "SO_TYPE", Kernel),
    (libc::SOL_SOCKET, 4, "SO_ERROR", Followed),
    (libc::SOL_SOCKET, 5, "SO_DONTROUTE", Kernel),
    (libc::SOL_SOCKET, 6, "SO_BROADCAST", Kernel),
    (libc::SOL_SOCKET, 7, "SO_SNDBUF", Followed),
    (libc::SOL_SOCKET, 8, "SO_RCVBUF", Followed),
    (libc::SOL_SOCKET, 9, "SO_KEEPALIVE", Kernel),
    (libc::SOL_SOCKET, 10, "SO_OOBINLINE", Followed),
    (libc::SOL_SOCKET, 11, "SO_NO_CHECK", Kernel),
    (libc::SOL_SOCKET, 12, "SO_PRIORITY", Kernel),
    (libc::SOL_SOCKET, 13, "SO_LINGER", Followed),
    (libc::SOL_SOCKET, 14, "SO_BSDCOMPAT", Kernel),
    (libc::SOL_SOCKET, 15, "SO_REUSEPORT", Kernel),
    (libc::SOL_SOCKET, 16, "SO_PASSCRED", Kernel),
    (libc::SOL_SOCKET, 17, "SO_PEERCRED", Kernel),
    (libc::SOL_SOCKET, 18, "SO_RCVLOWAT", Followed),
    (libc::SOL_SOCKET, 19, "SO_SNDLOWAT", Kernel),
    (libc::SOL_SOCKET, 20, "SO_RCVTIMEO", Followed),
    (libc::SOL_SOCKET, 21, "SO_SNDTIMEO", Followed),
    (libc::SOL_SOCKET, 22, "SO_SECURITY_AUTHENTICATION", Kernel),
    (libc::SOL_SOCKET, 23, "SO_SECURITY_ENCRYPTION_TRANSPORT", Kernel),
    (libc::SOL_SOCKET, 24, "SO_SECURITY_ENCRYPTION_NETWORK", Kernel),
    (libc::SOL_SOCKET, 25, "SO_BINDTODEVICE", Kernel),
    (libc::SOL_SOCKET, 26, "SO_ATTACH_FILTER", TcpOnly),
    (libc::SOL_SOCKET, 27, "SO_DETACH_FILTER", Kernel),
    (libc::SOL_SOCKET, 28, "SO_PEERNAME", Kernel),
    (libc::SOL_SOCKET, 29, "SO_TIMESTAMP", TcpOnly),
    (libc::SOL_SOCKET, 30, "SO_ACCEPTCONN", Kernel),
    (libc::SOL_SOCKET, 31, "SO_PEERSEC", Kernel),
    (libc::SOL_SOCKET, 32, "SO_SNDBUFFORCE", Followed),
    (libc::SOL_SOCKET, 33, "SO_RCVBUFFORCE", Followed),
    (libc::SOL_SOCKET, 34, "SO_PASSSEC", Kernel),
    (libc::SOL_SOCKET, 35, "SO_TIMESTAMPNS", TcpOnly),
    (libc::SOL_SOCKET, 36, "SO_MARK", Kernel),
    (libc::SOL_SOCKET, 37, "SO_TIMESTAMPING", TcpOnly),
    (libc::SOL_SOCKET, 38, "SO_PROTOCOL", Kernel),
    (libc::SOL_SOCKET, 39, "SO_DOMAIN", Kernel),
    (libc::SOL_SOCKET, 40, "SO_RXQ_OVFL", Kernel),
    (libc::SOL_SOCKET, 41, "SO_WIFI_STATUS", Kernel),
    (libc::SOL_SOCKET, 42, "SO_PEEK_OFF", TcpOnly),
    (libc::SOL_SOCKET, 43, "SO_NOFCS", Kernel),
    (libc::SOL_SOCKET, 44, "SO_LOCK_FILTER", TcpOnly),
    (libc::SOL_SOCKET, 45, "SO_SELECT_ERR_QUEUE", Kernel),
    (libc::SOL_SOCKET, 46, "SO_BUSY_POLL", TcpOnly),
    (libc::SOL_SOCKET, 47, "SO_MAX_PACING_RATE", TcpOnly),
    (libc::SOL_SOCKET, 48, "SO_BPF_EXTENSIONS", Kernel),
    (libc::SOL_SOCKET, 49, "SO_INCOMING_CPU", Kernel),
    (libc::SOL_SOCKET, 50, "SO_ATTACH_BPF", TcpOnly),
    (libc::SOL_SOCKET, 51, "SO_ATTACH_REUSEPORT_CBPF", Kernel),
    (libc::SOL_SOCKET, 52, "SO_ATTACH_REUSEPORT_EBPF", Kernel),
    (libc::SOL_SOCKET, 53, "SO_CNX_ADVICE", Kernel),
    (libc::SOL_SOCKET, 55, "SO_MEMINFO", Kernel),
    (libc::SOL_SOCKET, 56, "SO_INCOMING_NAPI_ID", Kernel),
    (libc::SOL_SOCKET, 57, "SO_COOKIE", Kernel),
    (libc::SOL_SOCKET, 59, "SO_PEERGROUPS", Kernel),
    (libc::SOL_SOCKET, 60, "SO_ZEROCOPY", TcpOnly),
    (libc::SOL_SOCKET, 61, "SO_TXTIME", TcpOnly),
    (libc::SOL_SOCKET, 62, "SO_BINDTOIFINDEX", Kernel),
    (libc::SOL_SOCKET, 63, "SO_TIMESTAMP_NEW", TcpOnly),
    (libc::SOL_SOCKET, 64, "SO_TIMESTAMPNS_NEW", TcpOnly),
    (libc::SOL_SOCKET, 65, "SO_TIMESTAMPING_NEW", TcpOnly),
    (libc::SOL_SOCKET, 66, "SO_RCVTIMEO_NEW", Followed),
    (libc::SOL_SOCKET, 67, "SO_SNDTIMEO_NEW", Followed),
    (libc::SOL_SOCKET, 68, "SO_DETACH_REUSEPORT_BPF", Kernel),
    (libc::SOL_SOCKET, 69, "SO_PREFER_BUSY_POLL", TcpOnly),
    (libc::SOL_SOCKET, 70, "SO_BUSY_POLL_BUDGET", TcpOnly),
    (libc::SOL_SOCKET, 71, "SO_NETNS_COOKIE", Kernel),
    (libc::SOL_SOCKET, 72, "SO_BUF_LOCK", Kernel),
    (libc::SOL_SOCKET, 73, "SO_RESERVE_MEM", Kernel),
    (libc::SOL_SOCKET, 74, "SO_TXREHASH", Kernel),
    (libc::SOL_SOCKET, 75, "SO_RCVMARK", Kernel),
    (libc::SOL_SOCKET, 76, "SO_PASSPIDFD", Kernel),
    (libc::SOL_SOCKET, 77, "SO_PEERPIDFD", Kernel),
    (libc::SOL_SOCKET, 78, "SO_DEVMEM_LINEAR", TcpOnly),
    (libc::SOL_SOCKET, 79, "SO_DEVMEM_DMABUF", TcpOnly),
    (libc::SOL_SOCKET, 80, "SO_DEVMEM_DONTNEED", TcpOnly),
    (libc::SOL_SOCKET, 82, "SO_RCVPRIORITY", Kernel),
    (libc::SOL_SOCKET, 83, "SO_PASSRIGHTS", Kernel),
    (libc::SOL_SOCKET, 84, "SO_INQ", Kernel),
    (libc::IPPROTO_TCP, 1, "TCP_NODELAY", Followed),
    (libc::IPPROTO_TCP, 2, "TCP_MAXSEG", Kernel),
    (libc::IPPROTO_TCP, 3, "TCP_CORK", Kernel),
    (libc::IPPROTO_TCP, 4, "TCP_KEEPIDLE", Kernel),
    (libc::IPPROTO_TCP, 5, "TCP_KEEPINTVL", Kernel),
    (libc::IPPROTO_TCP, 6, "TCP_KEEPCNT", Kernel),
    (libc::IPPROTO_TCP, 7, "TCP_SYNCNT", Kernel),
    (libc::IPPROTO_TCP, 8, "TCP_LINGER2", Kernel),
    (libc::IPPROTO_TCP, 9, "TCP_DEFER_ACCEPT", Kernel),
    (libc::IPPROTO_TCP, 10, "TCP_WINDOW_CLAMP", Kernel),
    (libc::IPPROTO_TCP, 11, "TCP_INFO", Followed),
    (libc::IPPROTO_TCP, 12, "TCP_QUICKACK", Followed),
    (libc::IPPROTO_TCP, 13, "TCP_CONGESTION", Kernel),
    (libc::IPPROTO_TCP, 14, "TCP_MD5SIG", TcpOnly),
    (libc::IPPROTO_TCP, 16, "TCP_THIN_LINEAR_TIMEOUTS", Kernel),
    (libc::IPPROTO_TCP, 17, "TCP_THIN_DUPACK", Kernel),
    (libc::IPPROTO_TCP, 18, "TCP_USER_TIMEOUT", Followed),
    (libc::IPPROTO_TCP, 19, "TCP_REPAIR", TcpOnly),
    (libc::IPPROTO_TCP, 20, "TCP_REPAIR_QUEUE", Kernel),
    (libc::IPPROTO_TCP, 21, "TCP_QUEUE_SEQ", Kernel),
    (libc::IPPROTO_TCP, 23, "TCP_FASTOPEN", TcpOnly),
    (libc::IPPROTO_TCP, 24, "TCP_TIMESTAMP", Kernel),
    (libc::IPPROTO_TCP, 25, "TCP_NOTSENT_LOWAT", Followed),
    (libc::IPPROTO_TCP, 26, "TCP_CC_INFO", Kernel),
    (libc::IPPROTO_TCP, 27, "TCP_SAVE_SYN", Followed),
    (libc::IPPROTO_TCP, 28, "TCP_SAVED_SYN", Followed),
    (libc::IPPROTO_TCP, 29, "TCP_REPAIR_WINDOW", Kernel),
    (libc::IPPROTO_TCP, 30, "TCP_FASTOPEN_CONNECT", TcpOnly),
    (libc::IPPROTO_TCP, 31, "TCP_ULP", TcpOnly),
    (libc::IPPROTO_TCP, 32, "TCP_MD5SIG_EXT", TcpOnly),
    (libc::IPPROTO_TCP, 33, "TCP_FASTOPEN_KEY", Kernel),
    (libc::IPPROTO_TCP, 34, "TCP_FASTOPEN_NO_COOKIE", Kernel),
    (libc::IPPROTO_TCP, 35, "TCP_ZEROCOPY_RECEIVE", TcpOnly),
    (libc::IPPROTO_TCP, 36, "TCP_INQ", Followed),
    (libc::IPPROTO_TCP, 37, "TCP_TX_DELAY", TcpOnly),
    (libc::IPPROTO_TCP, 38, "TCP_AO_ADD_KEY", TcpOnly),
    (libc::IPPROTO_TCP, 39, "TCP_AO_DEL_KEY", Kernel),
    (libc::IPPROTO_TCP, 40, "TCP_AO_INFO", Kernel),
    (libc::IPPROTO_TCP, 41, "TCP_AO_GET_KEYS", Kernel),
    (libc::IPPROTO_TCP, 42, "TCP_AO_REPAIR", TcpOnly),
    (libc::IPPROTO_TCP, 43, "TCP_IS_MPTCP", Kernel),
    (libc::IPPROTO_TCP, 44, "TCP_RTO_MAX_MS", Kernel),
    (libc::IPPROTO_TCP, 45, "TCP_RTO_MIN_US", Kernel),
    (libc::IPPROTO_TCP, 46, "TCP_DELACK_MAX_US", Kernel),
    (libc::IPPROTO_IP, 1, "IP_TOS", Kernel),
    (libc::IPPROTO_IP, 2, "IP_TTL", Kernel),
    (libc::IPPROTO_IP, 3, "IP_HDRINCL", Kernel),
    (libc::IPPROTO_IP, 4, "IP_OPTIONS", Kernel),
    (libc::IPPROTO_IP, 5, "IP_ROUTER_ALERT", Kernel),
    (libc::IPPROTO_IP, 6, "IP_RECVOPTS", Kernel),
    (libc::IPPROTO_IP, 7, "IP_RETOPTS", Kernel),
    (libc::IPPROTO_IP, 8, "IP_PKTINFO", Kernel),
    (libc::IPPROTO_IP, 9, "IP_PKTOPTIONS", Kernel),
    (libc::IPPROTO_IP, 10, "IP_MTU_DISCOVER", Kernel),
    (libc::IPPROTO_IP, 11, "IP_RECVERR", Kernel),
    (libc::IPPROTO_IP, 12, "IP_RECVTTL", Kernel),
    (libc::IPPROTO_IP, 13, "IP_RECVTOS", Kernel),
    (libc::IPPROTO_IP, 14, "IP_MTU", Kernel),
    (libc::IPPROTO_IP, 15, "IP_FREEBIND", Kernel),
    (libc::IPPROTO_IP, 16, "IP_IPSEC_POLICY", Kernel),
    (libc::IPPROTO_IP, 17, "IP_XFRM_POLICY", Kernel),
    (libc::IPPROTO_IP, 18, "IP_PASSSEC", Kernel),
    (libc::IPPROTO_IP, 19, "IP_TRANSPARENT", Kernel),
    (libc::IPPROTO_IP, 20, "IP_ORIGDSTADDR", Kernel),
    (libc::IPPROTO_IP, 21, "IP_MINTTL", Kernel),
    (libc::IPPROTO_IP, 22, "IP_NODEFRAG", Kernel),
    (libc::IPPROTO_IP, 23, "IP_CHECKSUM", Kernel),
    (libc::IPPROTO_IP, 24, "IP_BIND_ADDRESS_NO_PORT", Kernel),
    (libc::IPPROTO_IP, 25, "IP_RECVFRAGSIZE", Kernel),
    (libc::IPPROTO_IP, 26, "IP_RECVERR_RFC4884", Kernel),
    (libc::IPPROTO_IP, 32, "IP_MULTICAST_IF", Kernel),
    (libc::IPPROTO_IP, 33, "IP_MULTICAST_TTL", Kernel),
    (libc::IPPROTO_IP, 34, "IP_MULTICAST_LOOP", Kernel),
    (libc::IPPROTO_IP, 35, "IP_ADD_MEMBERSHIP", Kernel),
    (libc::IPPROTO_IP, 36, "IP_DROP_MEMBERSHIP", Kernel),
    (libc::IPPROTO_IP, 37, "IP_UNBLOCK_SOURCE", Kernel),
    (libc::IPPROTO_IP, 38, "IP_BLOCK_SOURCE", Kernel),
    (libc::IPPROTO_IP, 39, "IP_ADD_SOURCE_MEMBERSHIP", Kernel),
    (libc::IPPROTO_IP, 40, "IP_DROP_SOURCE_MEMBERSHIP", Kernel),
    (libc::IPPROTO_IP, 41, "IP_MSFILTER", Kernel),
    (libc::IPPROTO_IP, 42, "MCAST_JOIN_GROUP", Kernel),
    (libc::IPPROTO_IP, 43, "MCAST_BLOCK_SOURCE", Kernel),
    (libc::IPPROTO_IP, 44, "MCAST_UNBLOCK_SOURCE", Kernel),
    (libc::IPPROTO_IP, 45, "MCAST_LEAVE_GROUP", Kernel),
    (libc::IPPROTO_IP, 46, "MCAST_JOIN_SOURCE_GROUP", Kernel),
    (libc::IPPROTO_IP, 47, "MCAST_LEAVE_SOURCE_GROUP", Kernel),
    (libc::IPPROTO_IP, 48, "MCAST_MSFILTER", Kernel),
    (libc::IPPROTO_IP, 49, "IP_MULTICAST_ALL", Kernel),
    (libc::IPPROTO_IP, 50, "IP_UNICAST_IF", Kernel),
    (libc::IPPROTO_IP, 51, "IP_LOCAL_PORT_RANGE", Kernel),
    (libc::IPPROTO_IP, 52, "IP_PROTOCOL", Kernel),
    (libc::IPPROTO_IPV6, 1, "IPV6_ADDRFORM", Kernel),
    (libc::IPPROTO_IPV6, 2, "IPV6_2292PKTINFO", Kernel),
    (libc::IPPROTO_IPV6, 3, "IPV6_2292HOPOPTS", Kernel),
    (libc::IPPROTO_IPV6, 4, "IPV6_2292DSTOPTS", Kernel),
    (libc::IPPROTO_IPV6, 5, "IPV6_2292RTHDR", Kernel),
    (libc::IPPROTO_IPV6, 6, "IPV6_2292PKTOPTIONS", Kernel),
    (libc::IPPROTO_IPV6, 7, "IPV6_CHECKSUM", Kernel),
    (libc::IPPROTO_IPV6, 8, "IPV6_2292HOPLIMIT", Kernel),
    (libc::IPPROTO_IPV6, 9, "IPV6_NEXTHOP", Kernel),
    (libc::IPPROTO_IPV6, 10, "IPV6_AUTHHDR", Kernel),
    (libc::IPPROTO_IPV6, 11, "IPV6_FLOWINFO", Kernel),
    (libc::IPPROTO_IPV6, 16, "IPV6_UNICAST_HOPS", Kernel),
    (libc::IPPROTO_IPV6, 17, "IPV6_MULTICAST_IF", Kernel),
    (libc::IPPROTO_IPV6, 18, "IPV6_MULTICAST_HOPS", Kernel),
    (libc::IPPROTO_IPV6, 19, "IPV6_MULTICAST_LOOP", Kernel),
    (libc::IPPROTO_IPV6, 20, "IPV6_ADD_MEMBERSHIP", Kernel),
    (libc::IPPROTO_IPV6, 21, "IPV6_DROP_MEMBERSHIP", Kernel),
    (libc::IPPROTO_IPV6, 22, "IPV6_ROUTER_ALERT", Kernel),
    (libc::IPPROTO_IPV6, 23, "IPV6_MTU_DISCOVER", Kernel),
    (libc::IPPROTO_IPV6, 24, "IPV6_MTU", Kernel),
    (libc::IPPROTO_IPV6, 25, "IPV6_RECVERR", Kernel),
    (libc::IPPROTO_IPV6, 26, "IPV6_V6ONLY", Kernel),
    (libc::IPPROTO_IPV6, 27, "IPV6_JOIN_ANYCAST", Kernel),
    (libc::IPPROTO_IPV6, 28, "IPV6_LEAVE_ANYCAST", Kernel),
    (libc::IPPROTO_IPV6, 29, "IPV6_MULTICAST_ALL", Kernel),
    (libc::IPPROTO_IPV6, 30, "IPV6_ROUTER_ALERT_ISOLATE", Kernel),
    (libc::IPPROTO_IPV6, 31, "IPV6_RECVERR_RFC4884", Kernel),
    (libc::IPPROTO_IPV6, 32, "IPV6_FLOWLABEL_MGR", Kernel),
    (libc::IPPROTO_IPV6, 33, "IPV6_FLOWINFO_SEND", Kernel),
    (libc::IPPROTO_IPV6, 34, "IPV6_IPSEC_POLICY", Kernel),
    (libc::IPPROTO_IPV6, 35, "IPV6_XFRM_POLICY", Kernel),
    (libc::IPPROTO_IPV6, 36, "IPV6_HDRINCL", Kernel),
    (libc::IPPROTO_IPV6, 49, "IPV6_RECVPKTINFO", Kernel),
    (libc::IPPROTO_IPV6, 50, "IPV6_PKTINFO", Kernel),
    (libc::IPPROTO_IPV6, 51, "IPV6_RECVHOPLIMIT", Kernel),
    (libc::IPPROTO_IPV6, 52, "IPV6_HOPLIMIT", Kernel),
    (libc::IPPROTO_IPV6, 53, "IPV6_RECVHOPOPTS", Kernel),
    (libc::IPPROTO_IPV6, 54, "IPV6_HOPOPTS", Kernel),
    (libc::IPPROTO_IPV6, 55, "IPV6_RTHDRDSTOPTS", Kernel),
    (libc::IPPROTO_IPV6, 56, "IPV6_RECVRTHDR", Kernel),
    (libc::IPPROTO_IPV6, 57, "IPV6_RTHDR", Kernel),
    (libc::IPPROTO_IPV6, 58, "IPV6_RECVDSTOPTS", Kernel),
    (libc::IPPROTO_IPV6, 59, "IPV6_DSTOPTS", Kernel),
    (libc::IPPROTO_IPV6, 60, "IPV6_RECVPATHMTU", Kernel),
    (libc::IPPROTO_IPV6, 61, "IPV6_PATHMTU", Kernel),
    (libc::IPPROTO_IPV6, 62, "IPV6_DONTFRAG", Kernel),
    (libc::IPPROTO_IPV6, 63, "IPV6_USE_MIN_MTU", Kernel),
    (libc::IPPROTO_IPV6, 66, "IPV6_RECVTCLASS", Kernel),
    (libc::IPPROTO_IPV6, 67, "IPV6_TCLASS", Kernel),
    (libc::IPPROTO_IPV6, 70, "IPV6_AUTOFLOWLABEL", Kernel),
    (libc::IPPROTO_IPV6, 72, "IPV6_ADDR_PREFERENCES", Kernel),
    (libc::IPPROTO_IPV6, 73, "IPV6_MINHOPCOUNT", Kernel),
    (libc::IPPROTO_IPV6, 74, "IPV6_ORIGDSTADDR", Kernel),
    (libc::IPPROTO_IPV6, 75, "IPV6_TRANSPARENT", Kernel),
    (libc::IPPROTO_IPV6, 76, "IPV6_UNICAST_IF", Kernel),
    (libc::IPPROTO_IPV6, 77, "IPV6_RECVFRAGSIZE", Kernel),
    (libc::IPPROTO_IPV6, 78, "IPV6_FREEBIND", Kernel),
];

/// Options of TCP only, inherited by an accepted socket from its listener. SO_ZEROCOPY is apart: servers
/// in gRPC's C library set the option of each listener, and few send with MSG_ZEROCOPY ([`COMPLETIONS`]).
const INHERITED: [c_int; 7] = [
    libc::SO_TIMESTAMP,
    libc::SO_TIMESTAMPNS,
    libc::SO_TIMESTAMPING,
    libc::SO_PEEK_OFF,
    libc::SO_BUSY_POLL,
    libc::SO_MAX_PACING_RATE,
    SO_PREFER_BUSY_POLL,
];
const SO_PREFER_BUSY_POLL: c_int = 69;
/// Reads by mapping the socket; a read-only option.
pub(crate) const TCP_ZEROCOPY_RECEIVE: c_int = 35;

/// Whether any socket of the process may have one of [`INHERITED`].
static MAY_BE_INHERITED: AtomicBool = AtomicBool::new(false);

/// Whether the program has sent with MSG_ZEROCOPY on SMC.
static COMPLETIONS: AtomicBool = AtomicBool::new(false);

/// The kind of an option.
pub(crate) fn kind(level: c_int, name: c_int) -> OptionKind {
    let row = OPTIONS.iter().find(|(of, number, ..)| (*of, *number) == (level, name));
    row.map_or(Kernel, |(.., kind)| *kind)
}

/// Whether a value turns on an option of TCP only.
pub(crate) fn is_on(level: c_int, name: c_int, value: c_int) -> bool {
    match name {
        // The value for no limit, and for none.
        libc::SO_MAX_PACING_RATE | libc::SO_PEEK_OFF if level == libc::SOL_SOCKET => value != -1,
        _ => value != 0,
    }
}

/// Notes that a listener may have an option of [`INHERITED`]: the program has set one. `is_on`: not to
/// the value of a new socket, as some programs do with each option of theirs.
pub(crate) fn note(level: c_int, name: c_int, is_on: impl Fn() -> bool) {
    let is_listed = level == libc::SOL_SOCKET && kind(level, name) == TcpOnly;
    if is_listed && name != libc::SO_ZEROCOPY && is_on() {
        note_any();
    }
}

/// Like [`note`], for a socket with unknown options.
pub(crate) fn note_any() {
    MAY_BE_INHERITED.store(true, Ordering::Relaxed);
}

/// Whether an accepted socket has inherited an option of TCP only.
pub(crate) fn has_inherited(fd: c_int) -> bool {
    MAY_BE_INHERITED.load(Ordering::Relaxed) && INHERITED.iter().any(|option| is_set(fd, *option))
        || COMPLETIONS.load(Ordering::Relaxed) && is_set(fd, libc::SO_ZEROCOPY)
}

fn is_set(fd: c_int, name: c_int) -> bool {
    let level = libc::SOL_SOCKET;
    raw::socket_option(fd, level, name).is_ok_and(|value| is_on(level, name, value))
}

/// Whether a send asks for a completion in the error queue. SMC has no such queue: the
/// send fails with ENOBUFS, as TCP fails without memory for completions, and later connections of
/// listeners with SO_ZEROCOPY stay on TCP.
pub(crate) fn asks_for_completion(fd: c_int, flags: c_int, bufs: &[IoSlice<'_>]) -> bool {
    let asks = flags & libc::MSG_ZEROCOPY != 0
        && bufs.iter().any(|buf| !buf.is_empty())
        && is_set(fd, libc::SO_ZEROCOPY);
    if asks {
        COMPLETIONS.store(true, Ordering::Relaxed);
    }
    asks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lists of the page: level, words of the kind, name.
    fn documented() -> Vec<(String, String, String)> {
        let page = include_str!("../../../../docs/preload-contract.md");
        let mut found = Vec::new();
        for part in page.split("\n\n").filter(|part| part.starts_with("**")) {
            let (head, names) = part.split_once(":**").unwrap();
            let (level, words) = head.trim_start_matches('*').split_once(", ").unwrap();
            for name in names.trim().trim_end_matches('.').split(',') {
                found.push((level.to_owned(), words.to_owned(), name.trim().to_owned()));
            }
        }
        found
    }

    #[test]
    fn the_page_lists_each_option_where_the_table_has_it() {
        let mut documented = documented();
        let mut rows: Vec<_> = OPTIONS
            .iter()
            .map(|(level, _, name, kind)| {
                let level = match *level {
                    libc::SOL_SOCKET => "SOL_SOCKET",
                    libc::IPPROTO_TCP => "IPPROTO_TCP",
                    libc::IPPROTO_IP => "IPPROTO_IP",
                    _ => "IPPROTO_IPV6",
                };
                let words = match kind {
                    Kernel => "kernel",
                    Followed => "followed",
                    TcpOnly => "TCP only",
                };
                (level.to_owned(), words.to_owned(), (*name).to_owned())
            })
            .collect();
        documented.sort();
        rows.sort();
        assert_eq!(documented, rows);
    }

    #[test]
    fn only_an_option_switched_on_may_be_inherited() {
        let may_be_inherited = |is_on: bool| {
            note(libc::SOL_SOCKET, libc::SO_TIMESTAMP, || is_on);
            MAY_BE_INHERITED.load(Ordering::Relaxed)
        };
        assert_eq!([false, true, false].map(may_be_inherited), [false, true, true]);
    }

    #[test]
    fn an_option_has_one_row() {
        let mut numbers: Vec<_> =
            OPTIONS.iter().map(|(level, number, ..)| (level, number)).collect();
        numbers.sort();
        let all = numbers.len();
        numbers.dedup();
        assert_eq!(numbers.len(), all);
    }
}
