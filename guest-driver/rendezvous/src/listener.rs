// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The eBPF program for sockets that listen already.
//!
//! TCP has made the callback of listen(2) for such a socket, so the program runs in a call of
//! setsockopt(2) with options that the kernel does not know. [`TAKE`] makes the listener answer.
//! [`RELEASE`] undoes that: the listener's mark becomes WITHDRAWN, and TCP no longer calls for it.
//!
//! Before that a process pauses the port ([`Rendezvous::pause`](super::Rendezvous::pause)): the
//! port's entry is 0, no listener of the port answers, and the programs know which clients got no
//! answer. [`RELEASE`] makes the entry 1 again, for other listeners that share the port. Where the
//! kernel does not let the program do that, the port stays paused.

use super::assembler::{Helper, Instruction, Label, Reg, When, Width};
use super::program::{
    AT_FLAGS, AT_LISTENING, CONTEXT, MARK, Maps, NO_EXIST, Program, SOL_TCP,
    TCP_BPF_SOCK_OPS_CB_FLAGS, VALUE, WRITE_OPTIONS, mark, sockopt,
};

/// Level of the options: "SMCR" in EBCDIC, which no kernel uses.
pub(super) const LEVEL: i32 = 0x62d4_c3d9;
/// Name of the option that makes a socket answer that listens already.
pub(super) const TAKE: i32 = 254;
/// Name of the option that ends that.
pub(super) const RELEASE: i32 = 253;

/// The program for [`Hook::SetSockOpt`](super::bpf::Hook::SetSockOpt).
pub(super) fn listeners(maps: &Maps<'_>) -> Option<Vec<Instruction>> {
    let mut program = Program::new(maps);
    let a = &mut program.a;
    let (out, done) = (a.label(), a.label());
    let (flag_is_set, release) = (a.label(), a.label());
    a.copy(CONTEXT, Reg::R1);
    a.load(Width::Word, Reg::R1, CONTEXT, sockopt::LEVEL);
    a.jump_if(Reg::R1, When::NotEqual, LEVEL, out);
    a.load(Width::Word, Reg::R1, CONTEXT, sockopt::OPTNAME);
    a.jump_if(Reg::R1, When::Equal, RELEASE, release);
    a.jump_if(Reg::R1, When::NotEqual, TAKE, out);

    program.find_mark(sockopt::SK, out);
    let a = &mut program.a;
    a.load(Width::Word, VALUE, MARK, 0);
    a.jump_if(VALUE, When::NoneOf, mark::ANSWER.cast_signed(), out);

    // Only the flags of the socket show whether another program wants callbacks.
    program.socket_flags(Helper::GetSockOpt);
    let a = &mut program.a;
    a.jump_if(Reg::R0, When::NotEqual, 0, out);
    a.load(Width::Word, Reg::R1, Reg::R10, AT_FLAGS);
    a.jump_if(Reg::R1, When::AnyOf, WRITE_OPTIONS, flag_is_set);
    a.or(Reg::R1, WRITE_OPTIONS);
    a.store(Width::Word, Reg::R10, AT_FLAGS, Reg::R1);
    program.socket_flags(Helper::SetSockOpt);
    let a = &mut program.a;
    a.jump_if(Reg::R0, When::NotEqual, 0, out);
    a.or(VALUE, mark::OWNED.cast_signed());
    a.store(Width::Word, MARK, 0, VALUE);

    a.here(flag_is_set);
    program.listener();
    program.insert(maps.ports, AT_LISTENING, NO_EXIST);
    program.a.jump(done);
    program.release_listener(release, out);
    // Length -1: the kernel does not handle the option itself.
    let a = &mut program.a;
    a.here(done);
    a.set(Reg::R1, -1);
    a.store(Width::Word, CONTEXT, sockopt::OPTLEN, Reg::R1);
    a.here(out);
    a.set(Reg::R0, 1);
    a.exit();
    program.a.finish()
}

impl Program<'_> {
    /// The listener of a call of setsockopt(2) that was prepared answers no more. Its port, which
    /// was paused, answers again, for other listeners. If another program has prepared the listener,
    /// TCP goes on to call for it, and `out` leaves all as it is.
    fn release_listener(&mut self, here: Label, out: Label) {
        self.a.here(here);
        self.find_mark(sockopt::SK, out);
        let a = &mut self.a;
        a.load(Width::Word, VALUE, MARK, 0);
        a.jump_if(VALUE, When::NoneOf, mark::OWNED.cast_signed(), out);
        self.socket_flags(Helper::GetSockOpt);
        let a = &mut self.a;
        a.jump_if(Reg::R0, When::NotEqual, 0, out);
        a.load(Width::Word, Reg::R1, Reg::R10, AT_FLAGS);
        a.and(Reg::R1, !WRITE_OPTIONS);
        a.store(Width::Word, Reg::R10, AT_FLAGS, Reg::R1);
        self.socket_flags(Helper::SetSockOpt);
        let a = &mut self.a;
        a.jump_if(Reg::R0, When::NotEqual, 0, out);
        a.set(VALUE, mark::WITHDRAWN.cast_signed());
        a.store(Width::Word, MARK, 0, VALUE);
        self.listener();
        self.insert(self.maps.ports, AT_LISTENING, 0);
    }

    /// The port of the listener that a call of setsockopt(2) names answers nobody.
    pub(super) fn pause(&mut self) {
        self.listener();
        self.put(self.maps.ports, AT_LISTENING, 0, 0);
    }

    /// The key of the port of the listener that a call of setsockopt(2) names, on the stack.
    fn listener(&mut self) {
        let a = &mut self.a;
        a.load(Width::Double, Reg::R1, CONTEXT, sockopt::SK);
        a.load(Width::Word, VALUE, Reg::R1, sockopt::SK_PORT);
        self.listening();
    }

    /// Calls getsockopt or setsockopt for the callback flags, which are on the stack.
    fn socket_flags(&mut self, helper: Helper) {
        let a = &mut self.a;
        if helper == Helper::GetSockOpt {
            a.set(Reg::R1, 0);
            a.store(Width::Double, Reg::R10, AT_FLAGS, Reg::R1);
        }
        a.load(Width::Double, Reg::R1, CONTEXT, sockopt::SK);
        a.set(Reg::R2, SOL_TCP);
        a.set(Reg::R3, TCP_BPF_SOCK_OPS_CB_FLAGS);
        a.stack(Reg::R4, AT_FLAGS);
        a.set(Reg::R5, 4);
        a.call(helper);
    }
}
