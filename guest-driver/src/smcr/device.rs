//! An open RNIC: its completion queues, and the queue pairs that use them.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

use smc_core::time::Tick;

use super::endpoint::Endpoint;
use super::link::{Link, RECEIVES};
use super::slots::{REQUESTS_PER_SLOT, SLOTS};
use crate::verbs::{Channel, Completion, Context, Cq, DeviceInfo, VerbsError};
use rustc_hash::FxHashMap;

/// Completions taken at once.
const BATCH: usize = 32;
/// Notices that are left in the channel before all of them are read.
const UNREAD: u32 = 64;
/// Entries of a completion queue, if the device has as many.
const ENTRIES: u32 = 16 << 10;

/// What one look at the receive queue found.
pub(crate) trait Sink {
    /// A CDC message was taken: the words of this connection may be new.
    fn on_words(&mut self, endpoint: &Arc<Endpoint>);
    /// The time. Asked once for the messages that are taken at once.
    fn now(&self) -> Tick;
}

thread_local! {
    static RECEIVING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is taking messages, and was called by a [`Sink`].
pub(crate) fn is_receiving() -> bool {
    RECEIVING.get()
}

/// As long as it lives, this thread is taking messages. Knows whether it was before: a sink may come
/// to take those of another device.
struct Receiving(bool);

impl Receiving {
    #[inline]
    fn begin() -> Receiving {
        Receiving(RECEIVING.replace(true))
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        RECEIVING.set(self.0);
    }
}

/// An RNIC.
pub(crate) struct Device {
    context: Arc<Context>,
    channel: Arc<Channel>,
    recv_cq: Arc<Cq>,
    send_cq: Arc<Cq>,
    links: RwLock<FxHashMap<u32, Arc<Link>>>,
    /// Who takes completions; two at a time would only get in each other's way.
    receiving: Mutex<Box<[Completion; BATCH]>>,
    /// Somebody found another one at the receives, who is to look once more.
    overlooked: AtomicBool,
    sending: Mutex<Box<[Completion; BATCH]>>,
    /// A notice is on order, or was not noted yet.
    recv_armed: AtomicBool,
    send_armed: AtomicBool,
    /// Notices noted and not read.
    unread: AtomicU32,
    /// How many wait for send completions.
    send_awaited: AtomicUsize,
    /// The device is of no use any more.
    dead: AtomicBool,
    counters: Counters,
}

/// What was odd about arriving messages.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// CDC messages with a token that no connection of the group has.
    pub(crate) unknown_token: AtomicU64,
    /// CDC messages that were overtaken.
    pub(crate) overtaken: AtomicU64,
    /// Messages that are neither CDC nor LLC.
    pub(crate) malformed: AtomicU64,
}

impl Device {
    /// Opens an RNIC.
    ///
    /// # Errors
    /// What verbs say.
    pub(crate) fn open(info: &DeviceInfo) -> Result<Arc<Device>, VerbsError> {
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
            links: RwLock::default(),
            receiving: scratch(),
            overlooked: AtomicBool::new(false),
            sending: scratch(),
            recv_armed: AtomicBool::new(false),
            send_armed: AtomicBool::new(false),
            unread: AtomicU32::new(0),
            send_awaited: AtomicUsize::new(0),
            dead: AtomicBool::new(false),
            counters: Counters::default(),
        }))
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        self.context.device().name()
    }

    /// Its device file.
    pub(crate) fn node(&self) -> &std::path::Path {
        self.context.device().node()
    }

    /// The open device.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Where its queue pairs tell of receives.
    pub(crate) fn recv_cq(&self) -> &Arc<Cq> {
        &self.recv_cq
    }

    /// Where its queue pairs tell of sends.
    pub(crate) fn send_cq(&self) -> &Arc<Cq> {
        &self.send_cq
    }

    /// What was odd about arriving messages.
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Readable when there is a notice of a completion.
    pub(crate) fn channel_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Whether the device is of no use any more.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// The device is of no use any more.
    pub(crate) fn set_dead(&self) {
        self.dead.store(true, Ordering::Release);
    }

    /// Enters a link. `false`: the completion queues have no room for another one.
    #[must_use = "a link without room would let the queues overrun"]
    pub(crate) fn enter(&self, link: &Arc<Link>) -> bool {
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        let count = links.len() as u32 + 1;
        // Of a queue pair in error every request completes, those without completion included.
        let sends = count.saturating_mul(SLOTS * REQUESTS_PER_SLOT);
        let fits = count.saturating_mul(RECEIVES) <= self.recv_cq.entries()
            && sends <= self.send_cq.entries();
        if fits {
            links.insert(link.qpn().get(), link.clone());
        }
        fits
    }

    /// Removes a link.
    pub(crate) fn leave(&self, link: &Link) {
        self.links.write().unwrap_or_else(PoisonError::into_inner).remove(&link.qpn().get());
    }

    /// All links over this device.
    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        self.links.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    #[inline]
    fn link(&self, qpn: u32) -> Option<Arc<Link>> {
        self.links.read().unwrap_or_else(PoisonError::into_inner).get(&qpn).cloned()
    }

    /// Takes received messages, unless another thread is at it, which then looks once more: what
    /// came before a notice was ordered must not wait for the next notice.
    pub(crate) fn poll_receives(&self, sink: &mut impl Sink) {
        loop {
            let Some(mut scratch) = try_lock(&self.receiving).or_else(|| {
                // SeqCst, as below: either the other one sees this, or it has left.
                self.overlooked.store(true, Ordering::SeqCst);
                try_lock(&self.receiving)
            }) else {
                return;
            };
            // A peer that sends without end only keeps its own messages coming; others get their
            // turn.
            self.receive(&mut scratch, 8, sink);
            drop(scratch);
            if !self.was_overlooked() {
                return;
            }
        }
    }

    /// Whether somebody came while this thread was at it, and has left it the rest.
    #[inline]
    fn was_overlooked(&self) -> bool {
        self.overlooked.load(Ordering::SeqCst) && self.overlooked.swap(false, Ordering::SeqCst)
    }

    /// Takes all messages that have arrived by now, or waits until another thread has. Not to be
    /// called from a sink (see [`is_receiving`]), nor with a lock that a sink may want.
    pub(crate) fn take_receives(&self, sink: &mut impl Sink) {
        // More than the queue holds has come since.
        let rounds = self.recv_cq.entries() as usize / BATCH + 1;
        loop {
            let mut scratch = self.receiving.lock().unwrap_or_else(PoisonError::into_inner);
            self.receive(&mut scratch, rounds, sink);
            drop(scratch);
            if !self.was_overlooked() {
                return;
            }
        }
    }

    #[inline]
    fn receive(&self, scratch: &mut [Completion; BATCH], rounds: usize, sink: &mut impl Sink) {
        let _receiving = Receiving::begin();
        for _ in 0..rounds {
            let n = match self.recv_cq.poll(&mut scratch[..]) {
                Ok(n) => n,
                Err(error) => {
                    self.fail(&error);
                    return;
                }
            };
            let now = if n == 0 { Tick(0) } else { sink.now() };
            for completion in scratch.iter().take(n) {
                // Those of a link that is gone mean nothing to anybody.
                if let Some(link) = self.link(completion.qp_num().get()) {
                    link.on_receive(completion, now, self, sink);
                }
            }
            if n < BATCH {
                break;
            }
        }
    }

    /// Takes send completions; how many. Frees slots, but does not use them:
    /// [`Link::flush_waiting`] does.
    pub(crate) fn poll_sends(&self) -> usize {
        let Some(mut scratch) = try_lock(&self.sending) else { return 0 };
        let mut total = 0;
        loop {
            let n = match self.send_cq.poll(&mut scratch[..]) {
                Ok(n) => n,
                Err(error) => {
                    self.fail(&error);
                    return total;
                }
            };
            for completion in scratch.iter().take(n) {
                if let Some(link) = self.link(completion.qp_num().get()) {
                    link.on_sent(completion);
                }
            }
            total += n;
            if n < BATCH {
                return total;
            }
        }
    }

    /// Whether anybody waits for send completions.
    #[inline]
    pub(crate) fn has_waiting(&self) -> bool {
        self.send_awaited.load(Ordering::SeqCst) != 0
    }

    /// Lets those send who waited for completions. Called without locks.
    #[inline]
    pub(crate) fn flush(&self) {
        if self.has_waiting() {
            for link in self.links() {
                link.flush_waiting();
                link.flush_llc();
            }
        }
    }

    #[cold]
    fn fail(&self, error: &VerbsError) {
        if !self.dead.swap(true, Ordering::AcqRel) {
            tracing::warn!(rnic = self.name(), %error, "RNIC failed");
        }
        self.links().iter().for_each(|link| link.fail());
    }

    /// Somebody waits for send completions from now on, which need a notice therefore.
    pub(crate) fn await_sends(&self) {
        self.send_awaited.fetch_add(1, Ordering::SeqCst);
        self.arm_sends();
    }

    /// Undoes one [`Device::await_sends`].
    pub(crate) fn sends_came(&self) {
        self.send_awaited.fetch_sub(1, Ordering::SeqCst);
    }

    fn arm_sends(&self) {
        if !self.send_armed.swap(true, Ordering::SeqCst)
            && let Err(error) = self.send_cq.arm(false)
        {
            self.fail(&error);
        }
    }

    /// Orders a notice of the next receive (and send completion, if somebody waits for one), unless
    /// one is on order. `true`: it was ordered just now, so poll once more before waiting.
    pub(crate) fn arm(&self) -> bool {
        if self.unread.load(Ordering::Relaxed) >= UNREAD {
            self.read_notices();
        }
        if self.has_waiting() {
            self.arm_sends();
        }
        if self.recv_armed.swap(true, Ordering::SeqCst) {
            return false;
        }
        if let Err(error) = self.recv_cq.arm(false) {
            self.fail(&error);
        }
        true
    }

    /// A notice has come, or several. It is not read (a system call) to see of which queue it is: one
    /// that is ordered although it is on order still is ordered once.
    pub(crate) fn note_notice(&self) {
        self.unread.fetch_add(1, Ordering::Relaxed);
        self.order_anew();
    }

    fn order_anew(&self) {
        self.recv_armed.store(false, Ordering::SeqCst);
        self.send_armed.store(false, Ordering::SeqCst);
    }

    /// Reads the notices, which the kernel keeps until then.
    fn read_notices(&self) {
        self.unread.store(0, Ordering::Relaxed);
        self.channel.drain(8 * UNREAD as usize, |_| {});
        // Some of them may not have been noted, and will not be now.
        self.order_anew();
    }
}

/// The lock, unless another thread has it.
fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        // What is in it is valid after every statement.
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("name", &self.name()).finish_non_exhaustive()
    }
}
