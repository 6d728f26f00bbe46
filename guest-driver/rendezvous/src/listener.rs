// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The eBPF program for already listening sockets.
//!
//! For such a socket TCP has already made the callback of listen(2), so the program runs in a call of
//! setsockopt(2) with options unknown to the kernel. [`TAKE`] makes the listener answer. [`RELEASE`] undoes
//! this: the listener's mark becomes WITHDRAWN, and TCP no longer calls for the listener.
//!
//! Before [`RELEASE`] a process pauses the port ([`Rendezvous::pause`](super::Rendezvous::pause)): the port's
//! entry is 0, no listener of the port answers, and the programs know the clients without an answer.
//! [`RELEASE`] makes the entry 1 again, for other listeners of the port. Where the kernel does not let the
//! program do so, the port stays paused.

use super::assembler::{Helper, Instruction, Label, Reg, When, Width};
use super::program::{
    AT_FLAGS, AT_LISTENING, CONTEXT, MARK, Maps, NO_EXIST, Program, SOL_TCP,
    TCP_BPF_SOCK_OPS_CB_FLAGS, VALUE, WRITE_OPTIONS, mark, sockopt,
};

/// Level of the options: "SMCR" in EBCDIC, unused by any kernel.
pub(super) const LEVEL: i32 = 0x62d4_c3d9;
/// Name of the option to make an already listening socket answer.
pub(super) const TAKE: i32 = 254;
/// Name of the option to end the answers.
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
    /// The prepared listener of a call of setsockopt(2) stops answering. Its paused port answers again, for
    /// other listeners. For a listener prepared by another program, TCP goes on calling, and `out` changes
    /// nothing.
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

    /// The port of the listener of a setsockopt(2) call stops answering.
    pub(super) fn pause(&mut self) {
        self.listener();
        self.put(self.maps.ports, AT_LISTENING, 0, 0);
    }

    /// Puts the key of the port on the stack, for the listener of a setsockopt(2) call.
    fn listener(&mut self) {
        let a = &mut self.a;
        a.load(Width::Double, Reg::R1, CONTEXT, sockopt::SK);
        a.load(Width::Word, VALUE, Reg::R1, sockopt::SK_PORT);
        self.listening();
    }

    /// Calls getsockopt or setsockopt for the callback flags, kept on the stack.
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
