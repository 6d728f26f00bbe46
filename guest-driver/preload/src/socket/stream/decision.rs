// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of a socket as one word, and the threads waiting for its decision.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::time::Duration;

use ism_sys::may_delay;
use rustix::thread::futex;

use crate::socket::pair::high;
use crate::socket::states::{self, SocketEvent, SocketStage, SocketState, SocketTransition};
use crate::sys::fork_lock::ForkMutex;
use crate::sys::own_copies::PairPlace;
use crate::sys::raw::Errno;

/// The state of a socket, and the threads waiting for the decision between SMC and TCP.
#[derive(Debug)]
pub(crate) struct Decision {
    /// The number of a [`SocketStage`].
    stage: AtomicU32,
    /// Number of threads that wait. SeqCst: counted before the kernel compares `stage`.
    waiters: AtomicU32,
    pipe: ForkMutex<DecisionPipe>,
    /// The pipe has ends. SeqCst: set before `stage` is read.
    has_pipe: AtomicBool,
}

/// A pipe, readable when the handshake is complete, for callers of poll.
#[derive(Debug, Default)]
struct DecisionPipe {
    ends: Option<(OwnedFd, OwnedFd, PairPlace)>,
    /// Number of callers with the descriptor.
    users: u32,
}

impl Decision {
    /// A socket in this first state.
    pub(super) const fn new(state: SocketState) -> Decision {
        Decision {
            stage: AtomicU32::new(SocketStage::first(state) as u32),
            waiters: AtomicU32::new(0),
            pipe: ForkMutex::new(DecisionPipe { ends: None, users: 0 }),
            has_pipe: AtomicBool::new(false),
        }
    }

    /// The row of the table of states.
    #[inline]
    pub(crate) fn stage(&self) -> SocketStage {
        let stage = SocketStage::of(self.stage.load(Ordering::Acquire));
        may_delay();
        stage
    }

    /// Whether SMC carries the connection.
    #[inline]
    pub(super) fn is_smc(&self) -> bool {
        self.stage.load(Ordering::Acquire) == SocketStage::Smc as u32
    }

    /// Applies an event to the state. Returns the transition; `None`: nothing happens, by the table
    /// of states or because another thread was faster.
    pub(crate) fn store(&self, event: SocketEvent) -> Option<SocketTransition> {
        let mut now = self.stage.load(Ordering::Acquire);
        loop {
            let transition = states::next(SocketStage::of(now), event)?;
            let to = transition.to as u32;
            let stored = self.stage.compare_exchange(now, to, Ordering::AcqRel, Ordering::Acquire);
            match stored {
                Ok(_) => return Some(transition),
                Err(other) => now = other,
            }
        }
    }

    /// Begins the part of a handshake that may end with SMC. `false`: the connection has to stay on
    /// TCP.
    pub(crate) fn begin_proposal(&self) -> bool {
        self.store(SocketEvent::Propose).is_some()
    }

    /// Makes the connection stay on TCP. `false`: too late.
    pub(crate) fn forbid_proposal(&self) -> bool {
        self.store(SocketEvent::Forbid).is_some()
    }

    /// Wakes the waiting threads.
    pub(crate) fn wake(&self) {
        // A waiting thread counts itself before it compares the stage: either the counter is seen
        // here, or the thread sees the new stage.
        fence(Ordering::SeqCst);
        if !self.has_pipe.load(Ordering::SeqCst) && self.waiters.load(Ordering::SeqCst) == 0 {
            return;
        }
        let _ = futex::wake(&self.stage, futex::Flags::PRIVATE, i32::MAX as u32);
        if let Some((_, writer, _)) = &self.pipe.lock().ends {
            let _ = rustix::io::write(writer, &[1]);
        }
    }

    /// Sleeps until the handshake is complete, but not longer than `timeout`. The caller checks the
    /// state again after any end of the sleep.
    ///
    /// # Errors
    /// EINTR, and other errors of futex(2).
    pub(crate) fn wait(&self, timeout: Duration) -> Result<(), Errno> {
        let timeout = timeout.min(Duration::from_secs(3600));
        let now = self.stage.load(Ordering::Acquire);
        if SocketStage::of(now).state() == SocketState::Deciding {
            self.waiters.fetch_add(1, Ordering::SeqCst);
            let result = ism_sys::sleep_on_private((&self.stage, now), Some(timeout));
            self.waiters.fetch_sub(1, Ordering::SeqCst);
            result?;
        }
        Ok(())
    }

    /// A descriptor that becomes readable when the handshake is complete, until as many calls of
    /// [`Decision::release_fd`]. `highest`: the highest number in the caller's wait. `None`:
    /// descriptors are short.
    pub(crate) fn readable_fd(&self, highest: c_int) -> Option<c_int> {
        let mut pipe = self.pipe.lock();
        pipe.users += 1;
        if pipe.ends.is_none() {
            let flags = rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK;
            let place = PairPlace::take(highest)?;
            let (reader, writer) = rustix::pipe::pipe_with(flags).ok()?;
            pipe.ends = Some((high(reader), high(writer), place));
            self.has_pipe.store(true, Ordering::SeqCst);
            // Orders the word before the load of the stage; partner of the fence in `wake`.
            fence(Ordering::SeqCst);
        }
        let (reader, writer, _) = pipe.ends.as_ref()?;
        if !matches!(self.stage().state(), SocketState::Undecided | SocketState::Deciding) {
            let _ = rustix::io::write(writer, &[1]);
        }
        Some(reader.as_raw_fd())
    }

    /// Undoes one [`Decision::readable_fd`]. The last caller closes the pipe.
    pub(crate) fn release_fd(&self) {
        let mut pipe = self.pipe.lock();
        pipe.users = pipe.users.saturating_sub(1);
        if pipe.users == 0 {
            self.has_pipe.store(false, Ordering::SeqCst);
            pipe.ends = None;
        }
    }

    /// The library's descriptors for the wait.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = c_int> {
        let pipe = self.pipe.lock();
        let ends = pipe.ends.as_ref();
        let ends = ends.map(|(reader, writer, _)| [reader, writer].map(|end| end.as_raw_fd()));
        ends.into_iter().flatten()
    }
}
