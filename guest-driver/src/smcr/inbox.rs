// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The inputs of a link group, and the flag for pending work.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use smc_core::link_group::{Cause, LinkKey, Receipt, Rnic, RnicId};

use ism_sys::{EventFd, lock};

/// An input of a link group.
#[derive(Debug)]
pub(crate) enum Input {
    /// An LLC message arrived on this link.
    Message(LinkKey, Vec<u8>),
    /// The link failed.
    Failed(LinkKey, Cause),
    /// The peer's adapter has acknowledged the LLC message with this receipt.
    Sent(Receipt),
    /// A failover validation of the connection with this token named a message, by its sequence number,
    /// not arrived yet.
    Missing(u32, u16),
    /// A port can be used (again).
    PortUp(Rnic),
    /// A port can no longer be used.
    PortDown(RnicId),
    /// The peer has given up the links.
    PeerGaveUp,
}

/// Wakes the thread listening to the RNICs, for work made by this process.
#[derive(Debug)]
pub(crate) struct WorkSignal {
    /// AcqRel at both ends: the swap that takes the word sees the work stored before the last post.
    due: AtomicBool,
    wake: EventFd,
}

impl WorkSignal {
    /// A signal without work.
    ///
    /// # Errors
    /// An error of eventfd(2).
    pub(crate) fn new() -> std::io::Result<Arc<WorkSignal>> {
        Ok(Arc::new(WorkSignal { due: AtomicBool::new(false), wake: EventFd::new()? }))
    }

    /// Some group, link or RNIC has work, already stored by the caller.
    pub(crate) fn post(&self) {
        if !self.due.swap(true, Ordering::AcqRel) {
            self.wake.signal();
        }
    }

    /// Whether work was posted since the last call. The caller then looks for the work.
    pub(crate) fn take(&self) -> bool {
        self.due.load(Ordering::Acquire) && self.due.swap(false, Ordering::AcqRel)
    }

    /// Wakes the listening thread without work for a group.
    pub(crate) fn wake(&self) {
        self.wake.signal();
    }

    /// Makes the descriptor unreadable.
    pub(crate) fn drain(&self) {
        self.wake.clear();
    }
}

impl AsFd for WorkSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Inputs of one link group, in the order of arrival. The links of the group hold the inbox, and need
/// not know the group.
#[derive(Debug)]
pub(crate) struct Inbox {
    inputs: Mutex<Vec<Input>>,
    /// `inputs` may be non-empty. The lock orders the inputs; the word spares the lock.
    due: AtomicBool,
    signal: Arc<WorkSignal>,
}

impl Inbox {
    /// An empty inbox. Each input is announced by `signal`.
    pub(crate) fn new(signal: &Arc<WorkSignal>) -> Arc<Inbox> {
        let signal = Arc::clone(signal);
        Arc::new(Inbox { inputs: Mutex::default(), due: AtomicBool::new(false), signal })
    }

    /// Adds an input, to be handled by the group soon. The call takes no lock but the inbox's own, so
    /// completions may be dispatched under any lock.
    pub(crate) fn put(&self, input: Input) {
        lock(&self.inputs).push(input);
        self.due.store(true, Ordering::Release);
        self.signal.post();
    }

    /// Whether there may be inputs.
    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Ordering::Acquire)
    }

    /// Takes the inputs.
    pub(crate) fn take(&self) -> Vec<Input> {
        // Before the inputs are taken: a later input sets the flag once more.
        self.due.store(false, Ordering::Release);
        std::mem::take(&mut *lock(&self.inputs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_keep_their_order_and_are_announced_once() {
        let signal = WorkSignal::new().unwrap();
        let inbox = Inbox::new(&signal);
        assert!(!inbox.is_due() && !signal.take());
        inbox.put(Input::Failed(LinkKey::FIRST, Cause::QueuePair));
        inbox.put(Input::Missing(7, 3));
        assert!(inbox.is_due() && signal.take() && !signal.take());
        let inputs = inbox.take();
        assert!(matches!(inputs[..], [Input::Failed(..), Input::Missing(7, 3)]));
        assert!(!inbox.is_due() && inbox.take().is_empty());
    }

    #[test]
    fn an_input_that_comes_after_the_others_were_taken_is_due_again() {
        let signal = WorkSignal::new().unwrap();
        let inbox = Inbox::new(&signal);
        inbox.put(Input::Missing(1, 1));
        assert!(signal.take());
        assert_eq!(inbox.take().len(), 1);
        inbox.put(Input::Missing(1, 2));
        assert!(inbox.is_due() && signal.take());
    }
}
