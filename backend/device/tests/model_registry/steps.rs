// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Possible next steps of a driver, its front end and its peers.

use proptest::prelude::*;
use virtio_ism_abi::command::Op;

/// Lengths of DMBs in bytes: the largest gets a slab of its own.
pub(crate) const LENS: [u32; 4] = [16 << 10, 32 << 10, 1 << 20, 4 << 20];

/// One step. Numbers of tokens, GIDs and slabs are random; see [`pick`].
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Hello,
    End,
    Query { gid: usize },
    Register { user: usize, idx: u32, len: usize, wait_group: u16 },
    RegisterGuest { user: usize, idx: u32 },
    Unregister { token: usize },
    Attach { token: usize },
    Detach { token: usize },
    Release { slab: usize },
    Move { token: usize, offset: u32, len: u32, signal: bool },
    Kick { token: usize },
    Store { token: usize, offset: u32 },
    SwEvent { gid: usize },
    TakeEvents,
    Malformed { op: usize, change: i8 },
    FrontEnd(Mode),
}

/// The front end's reaction to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Serves,
    Refuses,
    /// The virtio side loses the job.
    Loses,
}

/// Any step.
pub(crate) fn step() -> impl Strategy<Value = Step> {
    let which = 0usize..10_000;
    let token = which.clone();
    prop_oneof![
        1 => Just(Step::Hello),
        1 => Just(Step::End),
        2 => which.clone().prop_map(|gid| Step::Query { gid }),
        8 => (which.clone(), 0u32..16, 0usize..LENS.len(), 0u16..3).prop_map(
            |(user, idx, len, wait_group)| Step::Register { user, idx, len, wait_group }
        ),
        3 => (which.clone(), 0u32..16).prop_map(|(user, idx)| Step::RegisterGuest { user, idx }),
        4 => token.clone().prop_map(|token| Step::Unregister { token }),
        8 => token.clone().prop_map(|token| Step::Attach { token }),
        4 => token.clone().prop_map(|token| Step::Detach { token }),
        3 => which.clone().prop_map(|slab| Step::Release { slab }),
        6 => (token.clone(), 0u32..40_000, 0u32..9_000, any::<bool>()).prop_map(
            |(token, offset, len, signal)| Step::Move { token, offset, len, signal }
        ),
        3 => token.clone().prop_map(|token| Step::Kick { token }),
        4 => (token, 0u32..16_000).prop_map(|(token, offset)| Step::Store { token, offset }),
        2 => which.prop_map(|gid| Step::SwEvent { gid }),
        3 => Just(Step::TakeEvents),
        1 => (0usize..Op::ALL.len(), -8i8..8).prop_map(|(op, change)| Step::Malformed {
            op,
            change
        }),
        1 => prop_oneof![3 => Just(Mode::Serves), 1 => Just(Mode::Refuses), 1 => Just(Mode::Loses)]
            .prop_map(Step::FrontEnd),
    ]
}

/// In seven of eight cases one of `likely`, if not empty.
pub(crate) fn pick<T: Copy>(which: usize, likely: &[T]) -> Option<T> {
    if which.is_multiple_of(8) || likely.is_empty() {
        return None;
    }
    likely.get(which / 8 % likely.len()).copied()
}
