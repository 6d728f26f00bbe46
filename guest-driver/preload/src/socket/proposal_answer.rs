// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How far a server's answer to a client's Proposal is.
//!
//! Between the Proposal and the answer the thread of the handshake only waits. So another process
//! may go on with the handshake, if the thread takes nothing from the stream any more.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use guest_driver::interpose::ProposalClaim;

use crate::sys::fork_lock::ForkMutex;

/// The Proposal is not sent yet.
const NOT_AWAITED: u32 = 0;
/// The Proposal is sent, and the thread waits.
const AWAITED: u32 = 1;
/// The thread must not take the answer.
const HELD: u32 = 2;
/// The thread takes the answer.
const TAKEN: u32 = 3;

/// Pause of the thread between two checks whether the answer is still held.
const PAUSE: Duration = Duration::from_millis(1);

/// The progress of the answer.
#[derive(Debug)]
pub(crate) struct ProposalAnswer {
    state: AtomicU32,
    /// The claim of the Proposal.
    claim: ForkMutex<Option<ProposalClaim>>,
}

impl Default for ProposalAnswer {
    /// The answer to a Proposal not sent yet.
    fn default() -> ProposalAnswer {
        ProposalAnswer { state: AtomicU32::new(NOT_AWAITED), claim: ForkMutex::new(None) }
    }
}

impl ProposalAnswer {
    fn advance(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The Proposal is sent, and nothing of the answer is taken.
    pub(crate) fn is_awaited_from_now(&self, claim: Option<ProposalClaim>) {
        *self.claim.lock() = claim;
        self.state.store(AWAITED, Ordering::Release);
    }

    /// The thread of the handshake is about to take the answer. Waits while the answer is held.
    pub(crate) fn take(&self) {
        loop {
            match self.state.load(Ordering::Acquire) {
                HELD => std::thread::sleep(PAUSE),
                now if self.advance(now, TAKEN) => return,
                _ => {}
            }
        }
    }

    /// Keeps the thread from taking the answer. `false`: the Proposal is not sent yet, or the thread
    /// is taking the answer, or the server has a connection by the claim.
    pub(crate) fn hold(&self) -> bool {
        if !self.advance(AWAITED, HELD) {
            return false;
        }
        let is_declinable = self.claim.lock().as_ref().is_none_or(ProposalClaim::withdraw);
        if !is_declinable {
            self.release();
        }
        is_declinable
    }

    /// Undoes [`ProposalAnswer::hold`].
    pub(crate) fn release(&self) {
        self.advance(HELD, AWAITED);
    }

    /// Whether [`ProposalAnswer::hold`] holds the answer.
    pub(crate) fn is_held(&self) -> bool {
        self.state.load(Ordering::Acquire) == HELD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_held_only_while_it_is_awaited() {
        let answer = ProposalAnswer::default();
        assert!(!answer.hold());
        answer.is_awaited_from_now(None);
        assert!(answer.hold() && answer.is_held());
        assert!(!answer.hold());
        answer.release();
        answer.take();
        assert!(!answer.hold() && !answer.is_held());
    }

    #[test]
    fn a_thread_waits_for_an_answer_that_is_held() {
        let answer = ProposalAnswer::default();
        answer.is_awaited_from_now(None);
        assert!(answer.hold());
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| answer.take());
            std::thread::sleep(Duration::from_millis(20));
            assert!(!thread.is_finished());
            answer.release();
        });
        assert!(!answer.hold());
    }
}
