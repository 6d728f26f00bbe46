// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! TCP connections within a cgroup without segments, by a map of sockets: for comparison with SMC.
//!
//! The kernel keeps its TCP sockets, and a program hands each message of one end to the queue of the
//! other one. In C the two programs would be:
//!
//! ```c
//! struct key { __u32 remote_ip, local_ip, remote_port, local_port; };
//! sockets: hash table of struct key -> socket
//!
//! int smc_collect(struct bpf_sock_ops *s)
//! {
//!     struct key own = { s->remote_ip4, s->local_ip4, bpf_ntohl(s->remote_port), s->local_port };
//!     if (s->op is BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB or BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
//!         bpf_sock_hash_update(s, &sockets, &own, BPF_ANY);
//!     return 1;
//! }
//!
//! int smc_redirect(struct sk_msg_md *m)
//! {
//!     struct key peer = { m->local_ip4, m->remote_ip4, m->local_port, bpf_ntohl(m->remote_port) };
//!     bpf_msg_redirect_hash(m, &sockets, &peer, BPF_F_INGRESS);
//!     return SK_PASS;                                     // without such a socket: by segments
//! }
//! ```

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use super::assembler::{Assembler, Helper, Instruction, Reg, When, Width};
use super::bpf::{self, Hook, Map, MapKind};
use super::cgroup::Temporary;
use super::unavailable::Unavailable;

/// Connections at most.
const MOST: u32 = 1 << 16;
/// BPF_F_INGRESS
const INGRESS: i32 = 1;
// `enum`s of linux/bpf.h.
const OP_ACTIVE_ESTABLISHED: i32 = 4;
const OP_PASSIVE_ESTABLISHED: i32 = 5;

/// Offsets in the context of a program: remote and local address, remote and local port.
type Offsets = [i16; 4];
/// `struct bpf_sock_ops`.
const OF_CALLBACK: Offsets = [24, 28, 64, 68];
/// `struct sk_msg_md`.
const OF_MESSAGE: Offsets = [20, 24, 60, 64];

/// A cgroup whose connections of TCP over IPv4 bypass TCP's segments. Dropping the value removes the
/// cgroup, if no process is left in there.
#[derive(Debug)]
pub struct Sockmap {
    cgroup: Temporary,
    _link: OwnedFd,
    _sockets: Map<[u32; 4], u32>,
}

impl Sockmap {
    /// Makes a cgroup with this name below the one of this process. A process enters by writing 0 to
    /// `cgroup.procs`.
    ///
    /// # Errors
    /// The process lacks a precondition.
    pub fn make(name: &str) -> Result<Sockmap, Unavailable> {
        let sockets = Map::new(MapKind::SocketHash, MOST, "smc_sockets")
            .map_err(|error| Unavailable::of_bpf("a map of sockets", error))?;
        let number = sockets.as_fd().as_raw_fd();
        let load = |hook, name, code: Option<Vec<Instruction>>| {
            bpf::load(hook, name, &code.unwrap_or_default()).map_err(Unavailable::of_load)
        };
        let collect = load(Hook::SockOps, "smc_collect", collect(number))?;
        let redirect = load(Hook::Message, "smc_redirect", redirect(number))?;
        bpf::attach_to_map(Hook::Message, redirect.as_fd(), sockets.as_fd())
            .map_err(|error| Unavailable::of_bpf("a program for messages", error))?;
        let cgroup = Temporary::make(name)?;
        let link = bpf::attach(Hook::SockOps, collect.as_fd(), cgroup.open()?.as_fd())
            .map_err(|error| Unavailable::of_attaching(cgroup.path(), error))?;
        Ok(Sockmap { cgroup, _link: link, _sockets: sockets })
    }

    /// The directory of the cgroup.
    pub fn cgroup(&self) -> &Path {
        self.cgroup.path()
    }
}

/// Puts the key of an end on the stack, at -16: as this end sees the connection, or as its peer does.
fn put_key(a: &mut Assembler, [remote, local, remote_port, local_port]: Offsets, of_peer: bool) {
    let (ours, theirs) = if of_peer { (-12, -16) } else { (-16, -12) };
    let (our_port, their_port) = if of_peer { (-4, -8) } else { (-8, -4) };
    a.load(Width::Word, Reg::R2, Reg::R6, remote);
    a.store(Width::Word, Reg::R10, ours, Reg::R2);
    a.load(Width::Word, Reg::R2, Reg::R6, local);
    a.store(Width::Word, Reg::R10, theirs, Reg::R2);
    a.load(Width::Word, Reg::R2, Reg::R6, remote_port);
    a.big_endian(Reg::R2);
    a.store(Width::Word, Reg::R10, our_port, Reg::R2);
    a.load(Width::Word, Reg::R2, Reg::R6, local_port);
    a.store(Width::Word, Reg::R10, their_port, Reg::R2);
}

fn collect(sockets: RawFd) -> Option<Vec<Instruction>> {
    let mut a = Assembler::default();
    let (established, out) = (a.label(), a.label());
    a.copy(Reg::R6, Reg::R1);
    a.load(Width::Word, Reg::R7, Reg::R6, 0);
    a.jump_if(Reg::R7, When::Equal, OP_ACTIVE_ESTABLISHED, established);
    a.jump_if(Reg::R7, When::NotEqual, OP_PASSIVE_ESTABLISHED, out);
    a.here(established);
    put_key(&mut a, OF_CALLBACK, false);
    a.copy(Reg::R1, Reg::R6);
    a.set_map(Reg::R2, sockets);
    a.stack(Reg::R3, -16);
    a.set(Reg::R4, 0);
    a.call(Helper::SocketHashUpdate);
    a.here(out);
    a.set(Reg::R0, 1);
    a.exit();
    a.finish()
}

fn redirect(sockets: RawFd) -> Option<Vec<Instruction>> {
    let mut a = Assembler::default();
    a.copy(Reg::R6, Reg::R1);
    put_key(&mut a, OF_MESSAGE, true);
    a.copy(Reg::R1, Reg::R6);
    a.set_map(Reg::R2, sockets);
    a.stack(Reg::R3, -16);
    a.set(Reg::R4, INGRESS);
    a.call(Helper::RedirectMessage);
    a.set(Reg::R0, 1);
    a.exit();
    a.finish()
}
