// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An open RNIC: its completion queues, and the queue pairs using them.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use super::inbox::WorkSignal;
use ism_sys::lock;
use smc_verbs::{Channel, Completion, Context, Cq, DeviceInfo, VerbsError};

/// The most completions taken by one poll.
pub(super) const BATCH: usize = 32;
/// The most notices left unread in the channel.
const UNREAD: u32 = 64;
/// Entries of a completion queue, if the device has as many.
const ENTRIES: u32 = 16 << 10;

/// An RNIC.
pub(crate) struct Device {
    context: Arc<Context>,
    channel: Arc<Channel>,
    recv_cq: Arc<Cq>,
    send_cq: Arc<Cq>,
    /// The index among the RNICs of the process.
    index: usize,
    /// Held by the thread taking receive completions, to dispatch them in order.
    receiving: Mutex<Box<[Completion; BATCH]>>,
    /// A thread found `receiving` locked and has left. The lock's owner polls once more.
    /// A fence stands between this word and the lock at both ends.
    overlooked: AtomicBool,
    /// Like `receiving`, for send completions.
    sending: Mutex<Box<[Completion; BATCH]>>,
    /// The queue is armed, or its notice was not handled yet.
    recv_armed: AtomicBool,
    /// The same of the other queue. SeqCst: cleared before `send_awaited` is read.
    send_armed: AtomicBool,
    /// Notices handled, but not read.
    unread: AtomicU32,
    /// Number of links waiting for send completions. SeqCst: raised before `send_armed` is read.
    send_awaited: AtomicUsize,
    /// The device can no longer be used.
    dead: AtomicBool,
    /// A completion queue failed, so all links over the device have to fail.
    broken: AtomicBool,
    signal: Arc<WorkSignal>,
    counters: Counters,
}

/// Counts of unexpected messages.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// CDC messages with a token of no connection of the group.
    pub(crate) unknown_token: AtomicU64,
    /// CDC messages overtaken by later ones.
    pub(crate) overtaken: AtomicU64,
    /// Messages neither of CDC nor of LLC.
    pub(crate) malformed: AtomicU64,
}

impl Device {
    /// Opens an RNIC.
    ///
    /// # Errors
    /// An error of the verbs.
    pub(crate) fn open(
        info: &DeviceInfo,
        index: usize,
        signal: &Arc<WorkSignal>,
    ) -> Result<Arc<Device>, VerbsError> {
        let context = Context::open(info)?;
        let entries = context.limits()?.cq_entries.min(ENTRIES);
        let channel = Channel::new(&context)?;
        let recv_cq = Cq::new(&context, entries, Some(&channel))?;
        let send_cq = Cq::new(&context, entries, Some(&channel))?;
        let scratch = || Mutex::new(Box::new([Completion::default(); BATCH]));
        Ok(Arc::new(Device {
            context,
            channel,
            recv_cq,
            send_cq,
            index,
            receiving: scratch(),
            overlooked: AtomicBool::new(false),
            sending: scratch(),
            recv_armed: AtomicBool::new(false),
            send_armed: AtomicBool::new(false),
            unread: AtomicU32::new(0),
            send_awaited: AtomicUsize::new(0),
            dead: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            signal: Arc::clone(signal),
            counters: Counters::default(),
        }))
    }

    pub(crate) fn name(&self) -> &str {
        self.context.device().name()
    }

    /// The index among the RNICs of the process, from 0.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// The device file.
    pub(crate) fn node(&self) -> &std::path::Path {
        self.context.device().node()
    }

    /// The open device.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The completion queue for receives of the device's queue pairs.
    pub(crate) fn recv_cq(&self) -> &Arc<Cq> {
        &self.recv_cq
    }

    /// The completion queue for sends of the device's queue pairs.
    pub(crate) fn send_cq(&self) -> &Arc<Cq> {
        &self.send_cq
    }

    /// Counts of unexpected messages.
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Readable when there is a notice of a completion.
    pub(crate) fn channel_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Whether the device can no longer be used.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Marks the device as no longer usable.
    pub(crate) fn set_dead(&self) {
        self.dead.store(true, Ordering::Release);
    }

    /// Begins to take receive completions. `None`: another thread takes them, and will poll once more
    /// ([`Device::was_overlooked`]), because a completion from before the arming of the queue causes no
    /// notice.
    #[inline]
    pub(crate) fn try_receives(&self) -> Option<PollGuard<'_>> {
        let batch = try_lock(&self.receiving).or_else(|| {
            self.overlooked.store(true, Ordering::Relaxed);
            // Orders the word before the lock, as in `was_overlooked` behind the lock: either the other
            // thread sees the word, or has left.
            fence(Ordering::SeqCst);
            try_lock(&self.receiving)
        })?;
        Some(PollGuard { device: self, cq: &self.recv_cq, batch })
    }

    /// Like [`Device::try_receives`], with a wait for the other thread.
    pub(crate) fn receives(&self) -> PollGuard<'_> {
        PollGuard { device: self, cq: &self.recv_cq, batch: lock(&self.receiving) }
    }

    /// Whether a thread found the receives taken and has left the rest to this thread, after the drop
    /// of its [`PollGuard`].
    #[inline]
    pub(crate) fn was_overlooked(&self) -> bool {
        // Orders the release of the lock before the load; partner of the fence in `try_receives`.
        fence(Ordering::SeqCst);
        self.overlooked.load(Ordering::Relaxed) && self.overlooked.swap(false, Ordering::Relaxed)
    }

    /// Begins to take send completions. `None`: another thread takes them.
    #[inline]
    pub(crate) fn try_sends(&self) -> Option<PollGuard<'_>> {
        Some(PollGuard { device: self, cq: &self.send_cq, batch: try_lock(&self.sending)? })
    }

    /// Whether a link waits for send completions.
    #[inline]
    pub(crate) fn has_waiting(&self) -> bool {
        self.send_awaited.load(Ordering::SeqCst) != 0
    }

    /// Whether a completion queue failed: every link over the device has to fail.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    #[cold]
    fn fail(&self, error: &VerbsError) {
        if !self.dead.swap(true, Ordering::AcqRel) {
            tracing::warn!(rnic = self.name(), %error, "RNIC failed");
        }
        if !self.broken.swap(true, Ordering::AcqRel) {
            self.signal.post();
        }
    }

    /// A link waits for send completions from now on, and needs a notice for them.
    pub(crate) fn await_sends(&self) {
        self.send_awaited.fetch_add(1, Ordering::SeqCst);
        self.arm_sends();
    }

    /// Undoes one [`Device::await_sends`].
    pub(crate) fn end_await_sends(&self) {
        self.send_awaited.fetch_sub(1, Ordering::SeqCst);
    }

    fn arm_sends(&self) {
        if !self.send_armed.swap(true, Ordering::SeqCst)
            && let Err(error) = self.send_cq.arm(false)
        {
            self.fail(&error);
        }
    }

    /// Arms the receive queue, and the send queue if a link waits for its completions, unless armed
    /// already. `true`: the receive queue was armed just now, so poll once more before waiting.
    pub(crate) fn arm(&self) -> bool {
        if self.unread.load(Ordering::Relaxed) >= UNREAD {
            self.read_notices();
        }
        if self.has_waiting() {
            self.arm_sends();
        }
        if self.recv_armed.swap(true, Ordering::AcqRel) {
            return false;
        }
        if let Err(error) = self.recv_cq.arm(false) {
            self.fail(&error);
        }
        true
    }

    /// Handles a notice, or several. Reading the notice to find out the queue would take a system call.
    /// So both queues are armed again: arming an armed queue has no effect.
    pub(crate) fn on_notice(&self) {
        self.unread.fetch_add(1, Ordering::Relaxed);
        self.mark_unarmed();
    }

    fn mark_unarmed(&self) {
        self.recv_armed.store(false, Ordering::Release);
        self.send_armed.store(false, Ordering::SeqCst);
    }

    /// Reads the notices. The kernel keeps them until then.
    fn read_notices(&self) {
        self.unread.store(0, Ordering::Relaxed);
        self.channel.drain(8 * UNREAD as usize, |_| {});
        // Some of them may not have been handled, and are gone now.
        self.mark_unarmed();
    }
}

/// The right to take completions of one queue, until dropped.
pub(crate) struct PollGuard<'a> {
    device: &'a Device,
    cq: &'a Cq,
    batch: MutexGuard<'a, Box<[Completion; BATCH]>>,
}

impl PollGuard<'_> {
    /// Takes up to [`BATCH`] completions, oldest first. Fewer than [`BATCH`]: the queue is empty, or
    /// has failed, as [`Device::is_broken`] then reports.
    #[inline]
    pub(crate) fn poll(&mut self) -> &[Completion] {
        let n = self.cq.poll(&mut self.batch[..]).unwrap_or_else(|error| {
            self.device.fail(&error);
            0
        });
        self.batch.get(..n).unwrap_or_default()
    }
}

/// The lock, unless another thread has it.
fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        // The content is valid after every statement.
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("name", &self.name()).finish_non_exhaustive()
    }
}
