// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The eBPF program to answer and ask by TCP option 254.
//!
//! TCP calls the program for the sockets of a cgroup. In C the program would be:
//!
//! ```c
//! struct listening { __u64 netns; __u32 port; __u32 zero; };
//! mark: storage in a socket, u32, copied to the children of a listener
//! ports: LRU table of struct listening -> u32
//! refused: LRU table of a connection's cookie (u64) -> u32
//! clients: only with a policy that depends on clients: trie of { port, address } -> bool
//! asked: array of u64: number of open connections with answered (or possibly answered) clients, by a
//!     hash of the client's address and port; absent if the kernel cannot map the array
//!
//! int smc_option(struct bpf_sock_ops *s)
//! {
//!     __u32 *mark;
//!     switch (s->op) {
//!     case BPF_SOCK_OPS_TCP_CONNECT_CB:
//!         mark = bpf_sk_storage_get(&mark, s->sk, 0, 0);
//!         if (mark && *mark & WANT)
//!             *mark = WANT | set_callback(s, *mark);  // TCP calls for options
//!         return 1;
//!     case BPF_SOCK_OPS_TCP_LISTEN_CB:
//!         mark = bpf_sk_storage_get(&mark, s->sk, 0, 0);
//!         if (mark && *mark & ANSWER) {
//!             if absent: ports[{ bpf_get_netns_cookie(s), s->local_port, 0 }] = 1;
//!             *mark = ANSWER | set_callback(s, *mark);
//!         }
//!         return 1;
//!     case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
//!         if (speaks(s) && bpf_reserve_hdr_opt(s, 6, 0) < 0 && s->skb_tcp_flags & ACK)
//!             refused[bpf_get_socket_cookie(s)] = 1;  // the cookie is the child's, too
//!         // The same instead of an answer, while ports[...] is 0: see `listener`.
//!         return 1;
//!     case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
//!         if (speaks(s)) {
//!             int n = bpf_store_hdr_opt(s, OPTION, 6, 0);     // the kernel fills up with NOPs
//!             if (s->skb_tcp_flags & ACK && (n == 0 || n == -EEXIST))
//!                 delete refused[bpf_get_socket_cookie(s)];   // another process may have had room
//!         }
//!         return 1;
//!     case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
//!         mark = bpf_sk_storage_get(&mark, s->sk, 0, 0);
//!         if (mark && *mark & WANT)
//!             set_mark(s, mark, found(s, 0) ? KNOWN | PEER : KNOWN);
//!         return 1;
//!     case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
//!         mark = bpf_sk_storage_get(&mark, s->sk, 0, 0);
//!         if (mark && *mark & ANSWER)
//!             set_mark(s, mark, the SYN was not saved ? 0
//!                 : found(s, BPF_LOAD_HDR_OPT_TCP_SYN) && !fast_open(s) && client_allowed(s)
//!                     && !refused[bpf_get_socket_cookie(s)] ? KNOWN | PEER : KNOWN);
//!             // Before the call, unless the mark is KNOWN alone:
//!             //     asked[hash(s)] += 1, the mark gets ASKED, and TCP calls for states
//!         else if (mark && *mark & (WANT | WITHDRAWN))    // both ends connected to each other,
//!             set_mark(s, mark, KNOWN);                   // or the listener answers no more
//!         return 1;
//!     case BPF_SOCK_OPS_STATE_CB:
//!         mark = bpf_sk_storage_get(&mark, s->sk, 0, 0);
//!         if (s->args[1] == BPF_TCP_CLOSE && mark && *mark & ASKED) {
//!             *mark &= ~ASKED;
//!             asked[hash(s)] -= 1;
//!         }
//!         return 1;
//!     }
//!     return 1;
//! }
//!
//! bool speaks(s)
//! {
//!     if (!(s->skb_tcp_flags & SYN)) return false;
//!     if (!(s->skb_tcp_flags & ACK)) {
//!         mark = bpf_sk_storage_get(&mark, s->sk, 0, 0);
//!         return mark && *mark & WANT;
//!     }
//!     // A SYN-ACK: s is not a socket yet, and does not show its listener. TCP calls only for a
//!     // listener prepared by this or another program.
//!     return !s->is_fullsock && s->args[0] != BPF_WRITE_HDR_TCP_SYNACK_COOKIE
//!         && ports[{ bpf_get_netns_cookie(s), s->local_port, 0 }]
//!         && found(s, BPF_LOAD_HDR_OPT_TCP_SYN) && !fast_open(s) && client_allowed(s);
//! }
//!
//! // The longest prefix of { s->local_port, s->remote_ip6 or the like } in clients, if any.
//! bool client_allowed(s);
//!
//! // Kind 254, magic, even length from 6: taken for SMC by Linux.
//! bool found(s, flags)
//! {
//!     char option[8] = { 254, 6, 0xe2, 0xd4, 0xc3, 0xd9 };
//!     int n = bpf_load_hdr_opt(s, option, 8, flags);
//!     return (n >= 6 || n == -ENOSPC) && !(option[1] & 1);
//! }
//!
//! // Kind 34: data of a SYN would overtake the handshake, so such a SYN is plain TCP.
//! bool fast_open(s);
//! // Sets WRITE_HDR_OPT_CB_FLAG unless another program has. Returns OWNED if this program has.
//! __u32 set_callback(s, mark);
//! // Stores the mark and clears WRITE_HDR_OPT_CB_FLAG if this program has set it.
//! void set_mark(s, mark, value);
//! ```

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

use super::assembler::{Assembler, Helper, Instruction, Label, Reg, When, Width};

/// The mark of a socket.
pub(super) mod mark {
    /// A client sends the option.
    pub(in super::super) const WANT: u32 = 1;
    /// A listener answers the option.
    pub(in super::super) const ANSWER: u32 = 2;
    /// The three-way handshake is over, and `PEER` is valid.
    pub(in super::super) const KNOWN: u32 = 4;
    /// Both ends have sent the option.
    pub(in super::super) const PEER: u32 = 8;
    /// This program has set the socket's callback flag, and clears the flag.
    pub(in super::super) const OWNED: u32 = 16;
    /// The connection is counted among the connections with answered, or possibly answered, clients.
    pub(in super::super) const ASKED: u32 = 32;
    /// A listener has answered the option, and does so no more.
    pub(in super::super) const WITHDRAWN: u32 = 64;
}

/// The option, RFC 7609 appendix A.1, as the start of eight bytes: one for all versions (OPT-12). With
/// another magic it would be another experiment (OPT-3).
const OPTION: [u8; 8] = [254, 6, 0xe2, 0xd4, 0xc3, 0xd9, 0, 0];
// OPT-2.
const OPTION_LEN: i32 = 6;
/// TCP Fast Open, RFC 7413.
const FAST_OPEN: [u8; 8] = [34, 0, 0, 0, 0, 0, 0, 0];

// `enum`s of linux/bpf.h.
const OP_CONNECT: i32 = 3;
const OP_ACTIVE_ESTABLISHED: i32 = 4;
const OP_PASSIVE_ESTABLISHED: i32 = 5;
const OP_STATE: i32 = 10;
const OP_LISTEN: i32 = 11;
const OP_OPTIONS_LEN: i32 = 14;
const OP_WRITE_OPTIONS: i32 = 15;
const STATES: i32 = 1 << 2;
pub(super) const WRITE_OPTIONS: i32 = 1 << 6;
const CLOSED: i32 = 7;
const SYNACK_COOKIE: i32 = 2;
const LOAD_SYN: i32 = 1;
pub(super) const SOL_TCP: i32 = 6;
pub(super) const TCP_BPF_SOCK_OPS_CB_FLAGS: i32 = 1008;
pub(super) const NO_EXIST: i32 = 1;
const TCP_SYN: i32 = 2;
const TCP_ACK: i32 = 16;

/// Offsets in `struct bpf_sock_ops`.
mod sock_ops {
    pub(super) const OP: i16 = 0;
    pub(super) const ARG0: i16 = 4;
    pub(super) const ARG1: i16 = 8;
    pub(super) const FAMILY: i16 = 20;
    pub(super) const REMOTE_IP4: i16 = 24;
    pub(super) const REMOTE_IP6: i16 = 32;
    pub(super) const REMOTE_PORT: i16 = 64;
    pub(super) const LOCAL_PORT: i16 = 68;
    pub(super) const IS_FULLSOCK: i16 = 72;
    pub(super) const CALLBACKS: i16 = 84;
    pub(super) const SK: i16 = 184;
    pub(super) const TCP_FLAGS: i16 = 212;
}

/// Offsets in `struct bpf_sockopt`, and the offset of the port in `struct bpf_sock`.
pub(super) mod sockopt {
    pub(in super::super) const SK: i16 = 0;
    pub(in super::super) const OPTVAL: i16 = 8;
    pub(in super::super) const OPTVAL_END: i16 = 16;
    pub(in super::super) const LEVEL: i16 = 24;
    pub(in super::super) const OPTNAME: i16 = 28;
    pub(in super::super) const OPTLEN: i16 = 32;
    pub(in super::super) const RETVAL: i16 = 36;
    pub(in super::super) const SK_PORT: i16 = 44;
}

// The stack.
const AT_OPTION: i16 = -8;
pub(super) const AT_LISTENING: i16 = -24;
pub(super) const AT_VALUE: i16 = -32;
const AT_COOKIE: i16 = -40;
pub(super) const AT_FLAGS: i16 = -48;
const AT_CLIENT: i16 = -72;
const AT_BUCKET: i16 = -80;

/// The maps of the programs.
pub(super) struct Maps<'a> {
    pub(super) marks: BorrowedFd<'a>,
    pub(super) ports: BorrowedFd<'a>,
    pub(super) refused: BorrowedFd<'a>,
    /// The clients of a listener, if the policy depends on clients.
    pub(super) clients: Option<BorrowedFd<'a>>,
    /// The buckets of [`bucket_of`], if there are any.
    pub(super) asked: Option<BorrowedFd<'a>>,
}

pub(super) const BUCKETS: u32 = 1 << BUCKET_BITS;
const BUCKET_BITS: u32 = 14;
/// Where a mark with [`mark::ASKED`] holds the bucket.
const BUCKET_IN_MARK: u32 = 16;
/// 2^32 divided by the golden ratio: the upper bits of a product with this number are a good hash.
const GOLDEN: u32 = 0x9e37_79b1;

/// The bucket of this client in the program's count of connections.
pub(super) fn bucket_of(client: &SocketAddr) -> usize {
    // An IPv4 address and its form in IPv6 have the same end.
    let end = match client.ip() {
        IpAddr::V4(ip) => ip.octets(),
        IpAddr::V6(ip) => {
            let [.., a, b, c, d] = ip.octets();
            [a, b, c, d]
        }
    };
    let [high, low] = client.port().to_be_bytes();
    // Address and port in the byte order of the program's context.
    let key = u32::from_ne_bytes(end) ^ u32::from_ne_bytes([0, 0, high, low]);
    (key.wrapping_mul(GOLDEN) >> (32 - BUCKET_BITS)) as usize
}

/// The program for [`Hook::SockOps`](super::bpf::Hook::SockOps).
pub(super) fn options(maps: &Maps<'_>) -> Option<Vec<Instruction>> {
    let mut program = Program::new(maps);
    let (connect, listen) = (program.a.label(), program.a.label());
    let (length, write) = (program.a.label(), program.a.label());
    let (active, passive) = (program.a.label(), program.a.label());
    let (state, set_mark) = (program.a.label(), program.a.label());
    let out = program.a.label();

    let a = &mut program.a;
    a.copy(CONTEXT, Reg::R1);
    a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::OP);
    for (op, place) in [
        (OP_OPTIONS_LEN, length),
        (OP_WRITE_OPTIONS, write),
        (OP_CONNECT, connect),
        (OP_ACTIVE_ESTABLISHED, active),
        (OP_PASSIVE_ESTABLISHED, passive),
        (OP_LISTEN, listen),
        (OP_STATE, state),
    ] {
        a.jump_if(Reg::R1, When::Equal, op, place);
    }
    a.here(out);
    a.set(Reg::R0, 1);
    a.exit();

    program.connect(connect, out);
    program.listen(listen, out);
    program.write_options(length, write, out);
    program.active(active, set_mark, out);
    program.passive(passive, set_mark, out);
    program.state(state, out);
    program.set_mark(set_mark, out);
    program.a.finish()
}

/// The context, in the whole program.
pub(super) const CONTEXT: Reg = Reg::R6;
/// The address of the socket's mark, once found.
pub(super) const MARK: Reg = Reg::R7;
/// The next value of the mark.
pub(super) const VALUE: Reg = Reg::R8;

pub(super) struct Program<'a> {
    pub(super) a: Assembler,
    pub(super) maps: &'a Maps<'a>,
}

impl<'a> Program<'a> {
    pub(super) fn new(maps: &'a Maps<'a>) -> Program<'a> {
        Program { a: Assembler::default(), maps }
    }

    /// `MARK = mark of the socket`; jumps to `none` without a mark.
    pub(super) fn find_mark(&mut self, sk: i16, none: Label) {
        let a = &mut self.a;
        a.load(Width::Double, Reg::R2, CONTEXT, sk);
        a.jump_if(Reg::R2, When::Equal, 0, none);
        a.set_map(Reg::R1, self.maps.marks.as_raw_fd());
        a.set(Reg::R3, 0);
        a.set(Reg::R4, 0);
        a.call(Helper::SocketStorage);
        a.jump_if(Reg::R0, When::Equal, 0, none);
        a.copy(MARK, Reg::R0);
    }

    /// The mark of the socket is found and has this bit.
    fn require(&mut self, bit: u32, otherwise: Label) {
        self.find_mark(sock_ops::SK, otherwise);
        self.a.load(Width::Word, Reg::R1, MARK, 0);
        self.a.jump_if(Reg::R1, When::NoneOf, bit.cast_signed(), otherwise);
    }

    fn connect(&mut self, here: Label, out: Label) {
        self.a.here(here);
        self.require(mark::WANT, out);
        self.raise(mark::WANT, out);
    }

    fn listen(&mut self, here: Label, out: Label) {
        self.a.here(here);
        self.require(mark::ANSWER, out);
        self.a.load(Width::Word, VALUE, CONTEXT, sock_ops::LOCAL_PORT);
        self.listening();
        self.insert(self.maps.ports, AT_LISTENING, NO_EXIST);
        self.raise(mark::ANSWER, out);
    }

    /// Sets the callback flag and the mark.
    fn raise(&mut self, bit: u32, out: Label) {
        let ours = self.a.label();
        let a = &mut self.a;
        a.load(Width::Word, VALUE, MARK, 0);
        a.and(VALUE, mark::OWNED.cast_signed());
        a.or(VALUE, bit.cast_signed());
        a.load(Width::Word, Reg::R2, CONTEXT, sock_ops::CALLBACKS);
        a.jump_if(Reg::R2, When::AnyOf, WRITE_OPTIONS, ours);
        a.or(VALUE, mark::OWNED.cast_signed());
        a.or(Reg::R2, WRITE_OPTIONS);
        a.copy(Reg::R1, CONTEXT);
        a.call(Helper::SetCallbacks);
        a.here(ours);
        a.store(Width::Word, MARK, 0, VALUE);
        a.jump(out);
    }

    /// Adds the option to a segment with room. The rest of the handshake stays the kernel's (SEC-3).
    fn write_options(&mut self, length: Label, write: Label, out: Label) {
        let (synack_length, synack_write) = (self.a.label(), self.a.label());
        let (answered, refuse) = (self.a.label(), self.a.label());

        self.a.here(length);
        self.syn(synack_length, out);
        self.reserve();
        self.a.jump(out);

        self.a.here(synack_length);
        self.synack(refuse, out);
        self.reserve();
        self.a.jump_if(Reg::R0, When::Equal, 0, out);
        self.a.here(refuse);
        self.cookie();
        self.insert(self.maps.refused, AT_COOKIE, 0);
        self.a.jump(out);

        self.a.here(write);
        self.syn(synack_write, out);
        self.store_option();
        self.a.jump(out);

        self.a.here(synack_write);
        self.synack(refuse, out);
        self.store_option();
        self.a.jump_if(Reg::R0, When::Equal, 0, answered);
        self.a.jump_if(Reg::R0, When::NotEqual, -libc::EEXIST, out);
        self.a.here(answered);
        self.cookie();
        self.remove(self.maps.refused, AT_COOKIE);
        self.a.jump(out);
    }

    /// Goes on if the segment is the SYN of an SMC client (OPT-1). Segments without SYN get no option
    /// (OPT-7).
    fn syn(&mut self, synack: Label, no: Label) {
        let a = &mut self.a;
        a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::TCP_FLAGS);
        a.jump_if(Reg::R1, When::NoneOf, TCP_SYN, no);
        a.jump_if(Reg::R1, When::AnyOf, TCP_ACK, synack);
        self.require(mark::WANT, no);
    }

    /// Goes on if the segment is the SYN-ACK of an answering listener (OPT-4), to a client with the option
    /// (OPT-5). `paused`: such a client, but the port answers no client.
    fn synack(&mut self, paused: Label, no: Label) {
        let a = &mut self.a;
        a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::IS_FULLSOCK);
        a.jump_if(Reg::R1, When::NotEqual, 0, no);
        a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::ARG0);
        a.jump_if(Reg::R1, When::Equal, SYNACK_COOKIE, no);
        a.load(Width::Word, VALUE, CONTEXT, sock_ops::LOCAL_PORT);
        self.listening();
        self.lookup(self.maps.ports, AT_LISTENING);
        self.a.jump_if(Reg::R0, When::Equal, 0, no);
        self.a.load(Width::Double, VALUE, Reg::R0, 0);
        self.load_option(OPTION, LOAD_SYN);
        self.judge_option(no, no);
        self.a.jump_if(VALUE, When::Equal, 0, paused);
        self.load_option(FAST_OPEN, LOAD_SYN);
        self.a.jump_if(Reg::R0, When::NotEqual, -libc::ENOMSG, no);
        self.client(no);
    }

    /// A client's connection is established. A socket without a request takes no answer (OPT-6).
    fn active(&mut self, here: Label, set_mark: Label, out: Label) {
        self.a.here(here);
        self.require(mark::WANT, out);
        self.a.set(VALUE, mark::KNOWN.cast_signed());
        self.load_option(OPTION, 0);
        self.judge_option(set_mark, set_mark);
        self.a.or(VALUE, mark::PEER.cast_signed());
        self.a.jump(set_mark);
    }

    fn passive(&mut self, here: Label, set_mark: Label, out: Label) {
        let (crossed, plain, count) = (self.a.label(), self.a.label(), self.a.label());
        self.a.here(here);
        self.find_mark(sock_ops::SK, out);
        let a = &mut self.a;
        a.load(Width::Word, Reg::R1, MARK, 0);
        a.jump_if(Reg::R1, When::NoneOf, mark::ANSWER.cast_signed(), crossed);
        a.set(VALUE, 0);
        self.load_option(OPTION, LOAD_SYN);
        self.judge_option(plain, count);
        self.load_option(FAST_OPEN, LOAD_SYN);
        self.a.jump_if(Reg::R0, When::NotEqual, -libc::ENOMSG, plain);
        self.client(plain);
        self.cookie();
        self.lookup(self.maps.refused, AT_COOKIE);
        self.a.jump_if(Reg::R0, When::NotEqual, 0, plain);
        self.a.set(VALUE, (mark::KNOWN | mark::PEER).cast_signed());
        self.a.here(count);
        self.count(set_mark);
        self.a.jump(set_mark);

        let a = &mut self.a;
        a.here(crossed);
        let known = mark::WANT | mark::WITHDRAWN;
        a.jump_if(Reg::R1, When::NoneOf, known.cast_signed(), out);
        a.here(plain);
        a.set(VALUE, mark::KNOWN.cast_signed());
        a.jump(set_mark);
    }

    /// Counts a connection with a possible SMC client in its bucket, and notes the count in VALUE.
    fn count(&mut self, no: Label) {
        let Some(asked) = self.maps.asked else { return };
        let (ipv4, hash) = (self.a.label(), self.a.label());
        let a = &mut self.a;
        a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::FAMILY);
        a.jump_if(Reg::R1, When::Equal, libc::AF_INET, ipv4);
        a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::REMOTE_IP6 + 12);
        a.jump(hash);
        a.here(ipv4);
        a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::REMOTE_IP4);
        a.here(hash);
        a.load(Width::Word, Reg::R2, CONTEXT, sock_ops::REMOTE_PORT);
        a.xor(Reg::R1, Reg::R2);
        // The lower 32 bits of the 64-bit product are the 32-bit product.
        a.multiply(Reg::R1, GOLDEN.cast_signed());
        a.shift_right(Reg::R1, (32 - BUCKET_BITS).cast_signed());
        a.and(Reg::R1, (BUCKETS - 1).cast_signed());
        a.store(Width::Word, Reg::R10, AT_BUCKET, Reg::R1);
        self.lookup(asked, AT_BUCKET);
        let a = &mut self.a;
        a.jump_if(Reg::R0, When::Equal, 0, no);
        a.set(Reg::R1, 1);
        a.atomic_add(Reg::R0, 0, Reg::R1);
        a.load(Width::Word, Reg::R1, Reg::R10, AT_BUCKET);
        a.multiply(Reg::R1, 1 << BUCKET_IN_MARK);
        a.xor(VALUE, Reg::R1);
        a.or(VALUE, mark::ASKED.cast_signed());
    }

    /// A counted connection has ended.
    fn state(&mut self, here: Label, out: Label) {
        self.a.here(here);
        let Some(asked) = self.maps.asked else { return self.a.jump(out) };
        self.a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::ARG1);
        self.a.jump_if(Reg::R1, When::NotEqual, CLOSED, out);
        self.require(mark::ASKED, out);
        let a = &mut self.a;
        a.load(Width::Word, VALUE, MARK, 0);
        a.copy(Reg::R1, VALUE);
        a.shift_right(Reg::R1, BUCKET_IN_MARK.cast_signed());
        a.store(Width::Word, Reg::R10, AT_BUCKET, Reg::R1);
        a.and(VALUE, !mark::ASKED.cast_signed());
        a.store(Width::Word, MARK, 0, VALUE);
        self.lookup(asked, AT_BUCKET);
        let a = &mut self.a;
        a.jump_if(Reg::R0, When::Equal, 0, out);
        a.set(Reg::R1, -1);
        a.atomic_add(Reg::R0, 0, Reg::R1);
        a.jump(out);
    }

    /// Stores the mark. Clears a callback flag set by this program, and has TCP call for the states of a
    /// counted connection.
    fn set_mark(&mut self, here: Label, out: Label) {
        let (not_ours, set) = (self.a.label(), self.a.label());
        let a = &mut self.a;
        a.here(here);
        a.load(Width::Word, Reg::R1, MARK, 0);
        a.store(Width::Word, MARK, 0, VALUE);
        a.load(Width::Word, Reg::R2, CONTEXT, sock_ops::CALLBACKS);
        a.jump_if(Reg::R1, When::NoneOf, mark::OWNED.cast_signed(), not_ours);
        a.and(Reg::R2, !WRITE_OPTIONS);
        a.jump_if(VALUE, When::NoneOf, mark::ASKED.cast_signed(), set);
        a.or(Reg::R2, STATES);
        a.jump(set);
        a.here(not_ours);
        a.jump_if(VALUE, When::NoneOf, mark::ASKED.cast_signed(), out);
        a.or(Reg::R2, STATES);
        a.here(set);
        a.copy(Reg::R1, CONTEXT);
        a.call(Helper::SetCallbacks);
        a.jump(out);
    }

    /// `r0 = bpf_load_hdr_opt(context, option, 8, flags)`
    fn load_option(&mut self, option: [u8; 8], flags: i32) {
        let a = &mut self.a;
        a.set64(Reg::R1, u64::from_ne_bytes(option));
        a.store(Width::Double, Reg::R10, AT_OPTION, Reg::R1);
        a.copy(Reg::R1, CONTEXT);
        a.stack(Reg::R2, AT_OPTION);
        a.set(Reg::R3, 8);
        a.set(Reg::R4, flags);
        a.call(Helper::LoadHeaderOption);
    }

    /// Goes on if a loaded option would also be accepted by Linux. `absent`: there is no option, or the
    /// options are malformed; `unknown`: the kernel has not saved the SYN.
    fn judge_option(&mut self, absent: Label, unknown: Label) {
        let there = self.a.label();
        let a = &mut self.a;
        a.jump_if(Reg::R0, When::Equal, -libc::ENOENT, unknown);
        a.jump_if(Reg::R0, When::Equal, -libc::ENOSPC, there);
        a.jump_if(Reg::R0, When::Less, OPTION_LEN, absent);
        a.here(there);
        a.load(Width::Byte, Reg::R1, Reg::R10, AT_OPTION + 1);
        a.jump_if(Reg::R1, When::AnyOf, 1, absent);
    }

    fn reserve(&mut self) {
        let a = &mut self.a;
        a.copy(Reg::R1, CONTEXT);
        a.set(Reg::R2, OPTION_LEN);
        a.set(Reg::R3, 0);
        a.call(Helper::ReserveHeaderOption);
    }

    fn store_option(&mut self) {
        let a = &mut self.a;
        a.set64(Reg::R1, u64::from_ne_bytes(OPTION));
        a.store(Width::Double, Reg::R10, AT_OPTION, Reg::R1);
        a.copy(Reg::R1, CONTEXT);
        a.stack(Reg::R2, AT_OPTION);
        a.set(Reg::R3, OPTION_LEN);
        a.set(Reg::R4, 0);
        a.call(Helper::StoreHeaderOption);
    }

    /// The key of a listening port on the stack; the port is in VALUE.
    pub(super) fn listening(&mut self) {
        let a = &mut self.a;
        a.copy(Reg::R1, CONTEXT);
        a.call(Helper::GetNetnsCookie);
        a.store(Width::Double, Reg::R10, AT_LISTENING, Reg::R0);
        a.store(Width::Double, Reg::R10, AT_LISTENING + 8, VALUE);
    }

    /// Goes on if the policy lets this listener answer this client.
    fn client(&mut self, no: Label) {
        let Some(clients) = self.maps.clients else { return };
        let (ipv4, search, yes) = (self.a.label(), self.a.label(), self.a.label());
        let a = &mut self.a;
        // A whole address: the preceding port, and 128 bits.
        a.set(Reg::R1, 32 + 128);
        a.store(Width::Word, Reg::R10, AT_CLIENT, Reg::R1);
        a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::LOCAL_PORT);
        a.store(Width::Word, Reg::R10, AT_CLIENT + 4, Reg::R1);
        a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::FAMILY);
        a.jump_if(Reg::R1, When::Equal, libc::AF_INET, ipv4);
        for word in [0, 4, 8, 12] {
            a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::REMOTE_IP6 + word);
            a.store(Width::Word, Reg::R10, AT_CLIENT + 8 + word, Reg::R1);
        }
        a.jump(search);
        a.here(ipv4);
        a.set(Reg::R1, 0);
        a.store(Width::Double, Reg::R10, AT_CLIENT + 8, Reg::R1);
        a.set64(Reg::R1, u64::from(u32::from_ne_bytes([0, 0, 0xff, 0xff])));
        a.store(Width::Word, Reg::R10, AT_CLIENT + 16, Reg::R1);
        a.load(Width::Word, Reg::R1, CONTEXT, sock_ops::REMOTE_IP4);
        a.store(Width::Word, Reg::R10, AT_CLIENT + 20, Reg::R1);
        a.here(search);
        self.lookup(clients, AT_CLIENT);
        let a = &mut self.a;
        a.jump_if(Reg::R0, When::Equal, 0, yes);
        a.load(Width::Double, Reg::R1, Reg::R0, 0);
        a.jump_if(Reg::R1, When::Equal, 0, no);
        a.here(yes);
    }

    /// The cookie of the connection on the stack.
    fn cookie(&mut self) {
        let a = &mut self.a;
        a.copy(Reg::R1, CONTEXT);
        a.call(Helper::GetSocketCookie);
        a.store(Width::Double, Reg::R10, AT_COOKIE, Reg::R0);
    }

    fn lookup(&mut self, map: BorrowedFd<'_>, key: i16) {
        let a = &mut self.a;
        a.set_map(Reg::R1, map.as_raw_fd());
        a.stack(Reg::R2, key);
        a.call(Helper::MapLookup);
    }

    fn remove(&mut self, map: BorrowedFd<'_>, key: i16) {
        let a = &mut self.a;
        a.set_map(Reg::R1, map.as_raw_fd());
        a.stack(Reg::R2, key);
        a.call(Helper::MapDelete);
    }

    /// `map[key] = 1`
    pub(super) fn insert(&mut self, map: BorrowedFd<'_>, key: i16, flags: i32) {
        self.put(map, key, 1, flags);
    }

    /// `bpf_map_update_elem(map, key, value, flags)`
    pub(super) fn put(&mut self, map: BorrowedFd<'_>, key: i16, value: i32, flags: i32) {
        let a = &mut self.a;
        a.set(Reg::R1, value);
        a.store(Width::Double, Reg::R10, AT_VALUE, Reg::R1);
        a.set_map(Reg::R1, map.as_raw_fd());
        a.stack(Reg::R2, key);
        a.stack(Reg::R3, AT_VALUE);
        a.set(Reg::R4, flags);
        a.call(Helper::MapUpdate);
    }
}
