// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vring for the framework. Unlike the framework's own: descriptors are checked, no kick can block a
//! worker, and a restart differs from a resumption.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use vhost_user_backend::{VringMutex, VringState, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::{Error as QueueError, Queue, QueueT};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use super::call::Call;
use super::eventfd::{drain_eventfd, is_eventfd, is_semaphore};
use ism_device::shm::Kicker;
use ism_device::sync::lock;

/// How long a new call descriptor waits for threads signalling the old one.
const LONGEST_SIGNAL: Duration = Duration::from_secs(1);
/// Interval between two checks for such threads.
const PAUSE: Duration = Duration::from_micros(50);

/// Guest memory with an exchangeable table.
pub(super) type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// Observes the front end's changes to a ring.
pub(super) trait RingObserver: Send + Sync {
    /// The front end passed a descriptor unusable as kick or call.
    fn bad_descriptor(&self, queue: usize, what: &'static str);
    /// A kick descriptor is about to be replaced or dropped.
    fn kick_closing(&self, fd: RawFd);
    /// A message about a ring has come, or part of a message.
    fn message(&self);
    /// The ring has started or stopped running.
    fn ring_changed(&self, queue: usize, running: bool);
}

/// One vring.
#[derive(Clone)]
pub(super) struct Ring {
    inner: VringMutex<Memory>,
    side: Arc<Side>,
}

#[derive(Default)]
struct Side {
    /// Held by the thread working on the queue.
    turn: Mutex<()>,
    observer: OnceLock<(usize, Weak<dyn RingObserver>)>,
    /// A second handle on the kick: a read by the framework's handle may block.
    kick: Mutex<Option<File>>,
    call: Mutex<Option<Arc<Call>>>,
    broken: AtomicBool,
    generation: AtomicU32,
    /// Chains used by this device's own worker.
    used_chains: AtomicU64,
    /// Avail and used positions when the ring was stopped.
    stopped_at: Mutex<Option<(u16, u16)>>,
}

thread_local! {
    /// Rings made on this thread and not yet collected: the framework makes the rings and passes them only to
    /// workers.
    static MADE: std::cell::RefCell<Vec<Ring>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// The rings the framework made on this thread since the last call, in the order of queues.
pub(super) fn take_made() -> Vec<Ring> {
    MADE.with_borrow_mut(std::mem::take)
}

impl Ring {
    /// Sets the observer; once.
    pub(super) fn set_observer(&self, queue: usize, observer: Weak<dyn RingObserver>) {
        let _ = self.side.observer.set((queue, observer));
    }

    fn observer(&self) -> Option<(usize, Arc<dyn RingObserver>)> {
        let (queue, observer) = self.side.observer.get()?;
        Some((*queue, observer.upgrade()?))
    }

    /// Works on the queue if the ring runs; `None` if not.
    ///
    /// Stopping a ring waits for `work`, so `work` must neither block nor take long.
    pub(super) fn with_queue<R>(&self, work: impl FnOnce(&mut Queue) -> R) -> Option<R> {
        if self.side.broken.load(Ordering::Relaxed) {
            return None;
        }
        let _turn = lock(&self.side.turn);
        let mut state = self.inner.get_mut();
        if !state.is_enabled() || !state.get_queue().ready() {
            return None;
        }
        Some(work(state.get_queue_mut()))
    }

    /// Like [`Ring::with_queue`], for a thread of another device, without waiting: `None` if another thread
    /// works on the ring.
    pub(super) fn try_with_queue<R>(
        &self,
        work: impl FnOnce(&mut Queue) -> R,
    ) -> Option<Option<R>> {
        let _turn = self.side.turn.try_lock().ok()?;
        // Other threads hold this lock only for a few instructions of a request, for any outcome.
        let mut state = self.inner.get_mut();
        if self.side.broken.load(Ordering::Relaxed)
            || !state.is_enabled()
            || !state.get_queue().ready()
        {
            return Some(None);
        }
        Some(Some(work(state.get_queue_mut())))
    }

    /// Chains used by the device's own worker so far.
    pub(super) fn used_chains(&self) -> u64 {
        self.side.used_chains.load(Ordering::Relaxed)
    }

    /// Counts chains used by the device's own worker.
    pub(super) fn count_used(&self, chains: usize) {
        self.side.used_chains.fetch_add(chains as u64, Ordering::Relaxed);
    }

    /// Whether the ring is set up, enabled and not broken.
    pub(super) fn running(&self) -> bool {
        self.with_queue(|_| ()).is_some()
    }

    /// Stops using the ring until its next start.
    pub(super) fn set_broken(&self) {
        self.side.broken.store(true, Ordering::Relaxed);
    }

    /// Counts the starts other than resumptions. A reply belongs to the generation of its request.
    pub(super) fn generation(&self) -> u32 {
        self.side.generation.load(Ordering::Relaxed)
    }

    /// Makes the next start a new generation, even with the indices of a resumption.
    pub(super) fn mark_restarted(&self) {
        *lock(&self.side.stopped_at) = None;
        self.side.generation.fetch_add(1, Ordering::Relaxed);
    }

    /// Signals the driver for used elements. Only for the device's own threads, since the call may block.
    pub(super) fn signal(&self) {
        let call = lock(&self.side.call).clone();
        if let Some(call) = call {
            call.signal();
        }
    }

    /// Like [`Ring::signal`], for a thread of another device. `false`: the driver was not signalled.
    pub(super) fn signal_nonblocking(&self, kicker: &mut Kicker) -> bool {
        let call = lock(&self.side.call).clone();
        // Without a call descriptor the driver polls.
        call.is_none_or(|call| call.signal_nonblocking(kicker))
    }

    fn message(&self) {
        if let Some((_, observer)) = self.observer() {
            observer.message();
        }
    }

    fn changed(&self) {
        if let Some((queue, observer)) = self.observer() {
            observer.ring_changed(queue, self.running());
        }
    }

    /// Whether `file` is usable as kick.
    fn accepts_kick(&self, file: &File) -> bool {
        is_eventfd(file) && !is_semaphore(file) || self.refuse("kick")
    }

    /// The call descriptor, if `file` is usable as one.
    fn check_call(&self, file: File) -> Option<Arc<Call>> {
        let call = Call::new(file);
        if call.is_none() {
            self.refuse("call");
        }
        call.map(Arc::new)
    }

    fn refuse(&self, what: &'static str) -> bool {
        self.set_broken();
        if let Some((queue, observer)) = self.observer() {
            observer.bad_descriptor(queue, what);
        }
        false
    }
}

impl<'a> VringStateGuard<'a, Memory> for Ring {
    type G = MutexGuard<'a, VringState<Memory>>;
}

impl<'a> VringStateMutGuard<'a, Memory> for Ring {
    type G = MutexGuard<'a, VringState<Memory>>;
}

impl VringT<Memory> for Ring {
    fn new(mem: Memory, max_queue_size: u16) -> Result<Self, QueueError> {
        let inner = VringMutex::new(mem, max_queue_size)?;
        let ring = Ring { inner, side: Arc::default() };
        MADE.with_borrow_mut(|made| made.push(ring.clone()));
        Ok(ring)
    }

    fn get_ref(&self) -> MutexGuard<'_, VringState<Memory>> {
        self.inner.get_ref()
    }

    fn get_mut(&self) -> MutexGuard<'_, VringState<Memory>> {
        self.inner.get_mut()
    }

    fn add_used(&self, desc_index: u16, len: u32) -> Result<(), QueueError> {
        self.inner.add_used(desc_index, len)
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        self.signal();
        Ok(())
    }

    fn enable_notification(&self) -> Result<bool, QueueError> {
        self.inner.enable_notification()
    }

    fn disable_notification(&self) -> Result<(), QueueError> {
        self.inner.disable_notification()
    }

    fn needs_notification(&self) -> Result<bool, QueueError> {
        self.inner.needs_notification()
    }

    fn set_enabled(&self, enabled: bool) {
        self.message();
        self.inner.set_enabled(enabled);
        self.changed();
    }

    fn set_queue_info(
        &self,
        desc_table: u64,
        avail_ring: u64,
        used_ring: u64,
    ) -> Result<(), QueueError> {
        self.inner.set_queue_info(desc_table, avail_ring, used_ring)
    }

    fn queue_next_avail(&self) -> u16 {
        self.inner.queue_next_avail()
    }

    fn set_queue_next_avail(&self, base: u16) {
        self.message();
        self.inner.set_queue_next_avail(base);
    }

    fn set_queue_next_used(&self, idx: u16) {
        self.inner.set_queue_next_used(idx);
    }

    fn queue_used_idx(&self) -> Result<u16, QueueError> {
        self.inner.queue_used_idx()
    }

    fn set_queue_size(&self, num: u16) {
        self.message();
        self.inner.set_queue_size(num);
    }

    fn set_queue_event_idx(&self, enabled: bool) {
        self.inner.set_queue_event_idx(enabled);
    }

    fn set_queue_ready(&self, ready: bool) {
        self.message();
        let mut state = self.inner.get_mut();
        let queue = state.get_queue_mut();
        let position = (queue.next_avail(), queue.next_used());
        let mut stopped_at = lock(&self.side.stopped_at);
        if ready {
            // A resumed VM has its indices unchanged; a restarted driver has indices of 0. There is no other
            // difference between the two.
            if stopped_at.take() != Some(position) {
                self.side.generation.fetch_add(1, Ordering::Relaxed);
            }
            self.side.broken.store(false, Ordering::Relaxed);
        } else if queue.ready() {
            *stopped_at = Some(position);
        }
        queue.set_ready(ready);
        drop(stopped_at);
        drop(state);
        self.changed();
    }

    fn set_kick(&self, file: Option<File>) {
        self.message();
        let old = self.inner.get_ref().get_kick().as_ref().map(AsRawFd::as_raw_fd);
        if let Some(old) = old {
            // The front end keeps the eventfd open. So closing only the daemon's descriptor would leave the
            // eventfd in the epoll set for ever, readable at the front end's will.
            if let Some((_, observer)) = self.observer() {
                observer.kick_closing(old);
            }
            // A kick replaced on a live ring has to be registered; only a start registers a kick.
            let mut state = self.inner.get_mut();
            if file.is_some() && state.get_queue().ready() {
                let queue = state.get_queue_mut();
                *lock(&self.side.stopped_at) = Some((queue.next_avail(), queue.next_used()));
                queue.set_ready(false);
            }
        }
        let file = file.filter(|file| self.accepts_kick(file));
        *lock(&self.side.kick) = file.as_ref().and_then(|file| file.try_clone().ok());
        self.inner.set_kick(file);
    }

    fn read_kick(&self) -> io::Result<bool> {
        // An error or a wait here would end or stall the worker.
        if let Some(kick) = &*lock(&self.side.kick) {
            drain_eventfd(kick);
        }
        Ok(self.inner.get_ref().is_enabled())
    }

    fn set_call(&self, file: Option<File>) {
        self.message();
        let new = file.and_then(|file| self.check_call(file));
        let old = std::mem::replace(&mut *lock(&self.side.call), new);
        // The front end may read the old descriptor for the last time at the reply, so wait for a thread
        // signalling it at this moment; with a full eventfd, for a limited time.
        let end = Instant::now() + LONGEST_SIGNAL;
        while old.as_ref().is_some_and(|old| Arc::strong_count(old) > 1) && Instant::now() < end {
            std::thread::sleep(PAUSE);
        }
    }

    fn set_err(&self, _file: Option<File>) {
        self.message();
        // Never written: the log and the counters report a broken ring.
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::OwnedFd;
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct Log {
        refused: AtomicUsize,
        gone: AtomicUsize,
        running: AtomicBool,
    }

    impl RingObserver for Log {
        fn bad_descriptor(&self, _: usize, _: &'static str) {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        fn message(&self) {}
        fn kick_closing(&self, _: RawFd) {
            self.gone.fetch_add(1, Ordering::Relaxed);
        }
        fn ring_changed(&self, _: usize, running: bool) {
            self.running.store(running, Ordering::Relaxed);
        }
    }

    fn ring() -> (Ring, Arc<Log>) {
        let ring = Ring::new(Memory::new(GuestMemoryMmap::new()), 8).unwrap();
        assert_eq!(take_made().len(), 1);
        let log = Arc::new(Log::default());
        let observer: Arc<dyn RingObserver> = log.clone();
        ring.set_observer(0, Arc::downgrade(&observer));
        (ring, log)
    }

    fn event() -> Option<File> {
        Some(File::from(eventfd(0, EventfdFlags::empty()).unwrap()))
    }

    fn start(ring: &Ring, avail: u16, used: u16) {
        ring.set_queue_next_avail(avail);
        ring.set_queue_next_used(used);
        ring.set_queue_ready(true);
        ring.set_enabled(true);
    }

    #[test]
    fn runs_only_while_ready_enabled_and_whole() {
        let (ring, log) = ring();
        assert!(!ring.running());
        start(&ring, 0, 0);
        assert!(ring.running() && log.running.load(Ordering::Relaxed));
        ring.set_enabled(false);
        assert!(!ring.running() && !log.running.load(Ordering::Relaxed));
        ring.set_enabled(true);
        ring.set_broken();
        assert!(!ring.running());
        ring.set_queue_ready(false);
        ring.set_queue_ready(true);
        assert!(ring.running(), "a start mends it");
    }

    #[test]
    fn resuming_is_the_same_generation_and_restarting_is_not() {
        let (ring, _) = ring();
        start(&ring, 0, 0);
        let generation = ring.generation();
        ring.set_queue_next_avail(5);
        ring.set_queue_next_used(4);
        ring.set_queue_ready(false);
        start(&ring, 5, 4);
        assert_eq!(ring.generation(), generation);
        ring.set_queue_ready(false);
        start(&ring, 0, 0);
        assert_ne!(ring.generation(), generation);
        let generation = ring.generation();
        ring.set_queue_ready(false);
        ring.mark_restarted();
        start(&ring, 0, 0);
        assert_ne!(ring.generation(), generation);
    }

    #[test]
    fn a_pipe_is_neither_kick_nor_call() {
        let (ring, log) = ring();
        start(&ring, 0, 0);
        let (read, write) = std::io::pipe().unwrap();
        ring.set_kick(Some(File::from(OwnedFd::from(read))));
        ring.set_call(Some(File::from(OwnedFd::from(write))));
        assert_eq!(log.refused.load(Ordering::Relaxed), 2);
        assert!(!ring.running());
        assert!(ring.get_ref().get_kick().is_none());
        ring.signal(); // nowhere
    }

    #[test]
    fn a_semaphore_is_no_kick() {
        let (ring, log) = ring();
        start(&ring, 0, 0);
        ring.set_kick(Some(File::from(eventfd(9, EventfdFlags::SEMAPHORE).unwrap())));
        assert_eq!(log.refused.load(Ordering::Relaxed), 1);
        assert!(!ring.running());
    }

    #[test]
    fn a_replaced_kick_is_taken_out_of_epoll_and_the_ring_starts_again() {
        let (ring, log) = ring();
        ring.set_kick(event());
        start(&ring, 3, 3);
        let generation = ring.generation();
        ring.set_kick(event());
        assert_eq!(log.gone.load(Ordering::Relaxed), 1);
        assert!(!ring.running(), "so that the framework registers the new one");
        ring.set_queue_ready(true);
        assert_eq!(ring.generation(), generation);
    }

    #[test]
    fn a_call_that_is_replaced_is_signalled_by_nobody_afterwards() {
        let (ring, _) = ring();
        ring.set_call(event());
        let signalling = lock(&ring.side.call).clone().unwrap();
        let (replaced, is_replaced) = std::sync::mpsc::channel();
        std::thread::scope(|threads| {
            let ring = &ring;
            threads.spawn(move || {
                ring.set_call(event());
                replaced.send(()).unwrap();
            });
            assert!(is_replaced.recv_timeout(Duration::from_millis(100)).is_err());
            drop(signalling);
            is_replaced.recv().unwrap();
        });
    }

    #[test]
    fn reading_a_kick_never_blocks() {
        let (ring, _) = ring();
        ring.set_kick(event());
        assert!(!ring.read_kick().unwrap());
    }
}
