// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! TCP option 254 for processes without capabilities, by one grant to their cgroup.
//!
//! The processes of a container may not call bpf(2), so they cannot mark their sockets. A process of the host
//! with the capabilities calls [`grant`] for the container's cgroup. The kernel then calls three programs for
//! the sockets of this cgroup: the program of [`super::program`], and two programs for a socket option of
//! their own. A process marks its socket by setsockopt(2), and reads the peer's answer by getsockopt(2):
//!
//! ```c
//! int smc_mark(struct bpf_sockopt *s)                     // setsockopt(2)
//! {
//!     __u32 *value = s->optval, *mark;
//!     if (s->level != SMC || s->optname != MARK || s->optlen < 4
//!             || value + 1 > s->optval_end)
//!         return 1;                                       // the kernel goes on with the option
//!     if (*value == WITHDRAWN) {
//!         ports[{ bpf_get_netns_cookie(s), s->sk->src_port, 0 }] = 0;
//!         s->optlen = -1;
//!     }
//!     if (*value && *value != WANT && *value != ANSWER)
//!         return 1;
//!     mark = bpf_sk_storage_get(&mark, s->sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
//!     if (mark) {
//!         *mark = *value;
//!         s->optlen = -1;                                 // the kernel does not
//!     }
//!     return 1;
//! }
//!
//! int smc_answer(struct bpf_sockopt *s)                   // getsockopt(2)
//! {
//!     __u32 *value = s->optval, *mark;
//!     if (s->level != SMC || s->optname != MARK || s->optlen < 4
//!             || value + 1 > s->optval_end)
//!         return 1;
//!     mark = bpf_sk_storage_get(&mark, s->sk, 0, 0);
//!     *value = mark ? *mark : 0;
//!     s->optlen = 4;
//!     s->retval = 0;
//!     return 1;
//! }
//! ```
//!
//! # Powers of a process with a grant
//!
//! The process reaches only sockets behind its own descriptors. A wrong mark makes the process's own
//! connections send or answer the option, as any process with a raw socket can. Each grant has maps of its
//! own, so the processes of one cgroup cannot fill up the maps of another cgroup. A process with a listener
//! can pause the listener's port, for the other processes of the cgroup as well: their connections to this
//! port are then TCP.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::assembler::{Assembler, Helper, Instruction, Reg, When, Width};
use super::bpf::{self, Hook};
use super::listener::{self, LEVEL, RELEASE, TAKE};
use super::program::{self, Maps, Program, mark, sockopt};
use super::{SocketMaps, Unavailable, cgroup};

/// The name of the option for a socket's mark, of the level [`LEVEL`].
const MARK: i32 = 255;
/// The name of the last program attached by a grant.
const LAST: &str = "smc_answer";
/// BPF_SK_STORAGE_GET_F_CREATE
const CREATE: i32 = 1;

/// Lets all processes of a cgroup and of its descendants ask and answer by TCP option 254, without
/// capabilities, as long as the cgroup exists. They find the grant by [`super::Rendezvous::granted`]. An
/// existing grant of the cgroup is kept.
///
/// # Errors
/// `cgroup` is no directory of cgroup v2, or is the root of all; or this process lacks a precondition.
pub fn grant(cgroup: &Path) -> Result<(), Unavailable> {
    let (directory, path) = cgroup::open_below_root(cgroup)?;
    if has_grant(directory.as_fd()) {
        return Ok(());
    }
    let maps = SocketMaps::new()?;
    let maps = maps.for_programs(None, None);
    let marks = marks(&maps).unwrap_or_default();
    let answers = answers(&maps).unwrap_or_default();
    let options = program::options(&maps).unwrap_or_default();
    let take_listener = listener::listeners(&maps).unwrap_or_default();
    // The mark comes near the end: a process able to set the mark has every needed program.
    for (hook, name, code, needed) in [
        (Hook::SetSockOpt, "smc_listener", take_listener, false),
        (Hook::SockOps, "smc_option", options, true),
        (Hook::SetSockOpt, "smc_mark", marks, true),
        (Hook::GetSockOpt, LAST, answers, true),
    ] {
        let loaded = match bpf::load(hook, name, &code) {
            Ok(loaded) => loaded,
            // Before Linux 6.12. An already listening socket then cannot answer.
            Err(_) if !needed => continue,
            Err(why) => return Err(Unavailable::of_load(why)),
        };
        bpf::attach_for_good(hook, loaded.as_fd(), directory.as_fd())
            .map_err(|error| Unavailable::of_attaching(&path, error))?;
    }
    Ok(())
}

/// Whether this cgroup itself has a grant, from the last of its programs on.
fn has_grant(cgroup: BorrowedFd<'_>) -> bool {
    // A process without the right to ask learns by attaching whether a grant is possible.
    bpf::attached(Hook::GetSockOpt, cgroup).is_ok_and(|names| names.iter().any(|name| name == LAST))
}

/// The directory of a process's cgroup, in the view of this process.
///
/// # Errors
/// There is no such process, or no cgroup v2.
pub fn cgroup_of(process: u32) -> Result<PathBuf, Unavailable> {
    cgroup::of_process(process)
}

/// Whether the cgroup of this process has a grant.
pub(super) fn is_granted() -> bool {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None);
    socket.is_ok_and(|socket| mark_of(socket.as_fd()).is_ok())
}

/// Sets the mark of a socket.
pub(super) fn set_mark(socket: BorrowedFd<'_>, bit: u32) -> io::Result<()> {
    bpf::set_socket_option(socket, LEVEL, MARK, bit.cast_signed())
}

/// The mark of a socket; 0: none.
pub(super) fn mark_of(socket: BorrowedFd<'_>) -> io::Result<u32> {
    bpf::socket_option(socket, LEVEL, MARK).map(i32::cast_unsigned)
}

/// Prepares an already listening socket.
pub(super) fn take_listener(listener: BorrowedFd<'_>) -> io::Result<()> {
    bpf::set_socket_option(listener, LEVEL, TAKE, 0)
}

/// Has the listener's port answer no client.
pub(super) fn pause(listener: BorrowedFd<'_>) -> io::Result<()> {
    set_mark(listener, mark::WITHDRAWN)
}

/// Has a listener of a paused port answer no more.
pub(super) fn release_listener(listener: BorrowedFd<'_>) -> io::Result<()> {
    bpf::set_socket_option(listener, LEVEL, RELEASE, 0)
}

/// The context, in the whole program.
const CONTEXT: Reg = Reg::R6;
/// The address of the option's value.
const VALUE: Reg = Reg::R7;
/// The value of the option.
const BIT: Reg = Reg::R8;

/// The program for setting a mark.
fn marks(maps: &Maps<'_>) -> Option<Vec<Instruction>> {
    let mut program = Program::new(maps);
    let a = &mut program.a;
    let (valid, pause) = (a.label(), a.label());
    let (done, out) = (a.label(), a.label());
    for_the_mark(a, out);
    a.load(Width::Word, BIT, VALUE, 0);
    a.jump_if(BIT, When::Equal, 0, valid);
    a.jump_if(BIT, When::Equal, mark::WANT.cast_signed(), valid);
    a.jump_if(BIT, When::Equal, mark::WITHDRAWN.cast_signed(), pause);
    a.jump_if(BIT, When::NotEqual, mark::ANSWER.cast_signed(), out);
    a.here(valid);
    storage(a, maps, CREATE);
    a.jump_if(Reg::R0, When::Equal, 0, out);
    a.store(Width::Word, Reg::R0, 0, BIT);
    a.jump(done);
    a.here(pause);
    program.pause();
    let a = &mut program.a;
    a.here(done);
    a.set(Reg::R1, -1);
    a.store(Width::Word, CONTEXT, sockopt::OPTLEN, Reg::R1);
    end(program.a, out)
}

/// The program for reading a mark.
fn answers(maps: &Maps<'_>) -> Option<Vec<Instruction>> {
    let mut a = Assembler::default();
    let (none, out) = (a.label(), a.label());
    for_the_mark(&mut a, out);
    storage(&mut a, maps, 0);
    a.set(BIT, 0);
    a.jump_if(Reg::R0, When::Equal, 0, none);
    a.load(Width::Word, BIT, Reg::R0, 0);
    a.here(none);
    a.store(Width::Word, VALUE, 0, BIT);
    a.set(Reg::R1, 4);
    a.store(Width::Word, CONTEXT, sockopt::OPTLEN, Reg::R1);
    a.set(Reg::R1, 0);
    a.store(Width::Word, CONTEXT, sockopt::RETVAL, Reg::R1);
    end(a, out)
}

/// Goes on with VALUE set if the call is about the mark and has room for the value.
fn for_the_mark(a: &mut Assembler, out: super::assembler::Label) {
    a.copy(CONTEXT, Reg::R1);
    a.load(Width::Word, Reg::R1, CONTEXT, sockopt::LEVEL);
    a.jump_if(Reg::R1, When::NotEqual, LEVEL, out);
    a.load(Width::Word, Reg::R1, CONTEXT, sockopt::OPTNAME);
    a.jump_if(Reg::R1, When::NotEqual, MARK, out);
    // The kernel's buffer is longer than a short value.
    a.load(Width::Word, Reg::R1, CONTEXT, sockopt::OPTLEN);
    a.jump_if(Reg::R1, When::Less, 4, out);
    a.load(Width::Double, VALUE, CONTEXT, sockopt::OPTVAL);
    a.load(Width::Double, Reg::R2, CONTEXT, sockopt::OPTVAL_END);
    a.copy(Reg::R1, VALUE);
    a.add(Reg::R1, 4);
    a.jump_if_beyond(Reg::R1, Reg::R2, out);
}

/// `r0 = bpf_sk_storage_get(&marks, context->sk, 0, flags)`
fn storage(a: &mut Assembler, maps: &Maps<'_>, flags: i32) {
    a.set_map(Reg::R1, maps.marks.as_raw_fd());
    a.load(Width::Double, Reg::R2, CONTEXT, sockopt::SK);
    a.set(Reg::R3, 0);
    a.set(Reg::R4, flags);
    a.call(Helper::SocketStorage);
}

fn end(mut a: Assembler, out: super::assembler::Label) -> Option<Vec<Instruction>> {
    a.here(out);
    a.set(Reg::R0, 1);
    a.exit();
    a.finish()
}
