// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One connection: the device of one front end, as the vhost-user framework drives it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use vhost::vhost_user::Backend;
use vhost::vhost_user::message::{
    VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserVirtioFeatures,
};
use vhost_user_backend::{VhostUserBackend, VhostUserDaemon, VringEpollHandler};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};
use virtio_ism_abi::config::Features;
use virtio_ism_abi::{CONTROL_QUEUE, EVENT_QUEUE, FIRST_MOVE_QUEUE, WINDOW_SHMID};
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventNotifier};
use zerocopy::IntoBytes;

use super::chain::{MAX_DESCRIPTORS, PendingReply, Scratch};
use super::counted_threads::CountedThreads;
use super::faults::{Fault, Faults};
use super::guest_memory;
use super::mapper::{Job, MapObserver, Mapper, Overdue};
use super::memory_table::MemoryTable;
use super::notifier::Notifier;
use super::phase::ConnectionPhase;
use super::processor_account::{IDLE_KICK, ProcessorAccount};
use super::ring::{self, Memory, Ring, RingObserver};
use super::stopped_rings::{Stopped, StoppedRings};
use super::timers::Timers;
use super::wake_cost::WakeCost;
use super::workers::Workers;
use ism_device::shm::{BusErrorGuard, FaultCause, TouchQuota};
use ism_device::sync::lock;
use ism_device::{CloseReason, Device, Reply};

mod observers;

/// Options of a connection, from its guest and the daemon.
#[derive(Clone)]
pub(super) struct Options {
    pub(super) name: String,
    pub(super) window_size: u64,
    pub(super) move_queues: u16,
    pub(super) allow_any_file: bool,
    pub(super) stopped_grace: Option<Duration>,
    pub(super) ack_timeout: Duration,
}

/// State shared by all connections of a guest.
#[derive(Clone)]
pub(super) struct GuestState {
    pub(super) faults: Arc<Faults>,
    /// Threads a front end can keep from ending.
    pub(super) threads: CountedThreads,
    pub(super) timers: Timers,
    /// Bytes the daemon may allocate in the guest's memory.
    pub(super) touches: Arc<TouchQuota>,
    /// Processor time of the daemon's threads for this guest.
    pub(super) account: Arc<ProcessorAccount>,
}

/// The framework's object for one connection.
pub(super) type Framework = VhostUserDaemon<Arc<Connection>>;

/// One connection.
pub(super) struct Connection {
    pub(super) options: Options,
    pub(super) device: Arc<Device>,
    pub(super) guest: GuestState,
    pub(super) memory: MemoryTable,
    workers: Workers,
    pub(super) mapper: Arc<Mapper>,
    pub(super) replies: PendingReplies,
    pub(super) wakes: DriverWakes,
    framework: FrameworkParts,
    pub(super) phase: ConnectionPhase,
    stopped: StoppedRings,
    this: Weak<Connection>,
}

/// Commands of the driver without an answer in the ring.
#[derive(Default)]
pub(super) struct PendingReplies {
    /// Replies for worker 0 to write.
    pub(super) ready: Mutex<VecDeque<(PendingReply, Reply)>>,
    pub(super) has_ready: AtomicBool,
    /// Commands waiting for the front end, or with unwritten replies.
    pub(super) backlog: AtomicUsize,
}

/// Events on their way to the driver.
#[derive(Default)]
pub(super) struct DriverWakes {
    /// Records were published, but the driver is not yet signalled.
    pub(super) call_pending: AtomicBool,
    /// Cost of this connection's wakes for other devices.
    pub(super) cost: WakeCost,
    timer: OnceLock<OwnedFd>,
}

/// The framework's objects of a connection.
#[derive(Default)]
struct FrameworkParts {
    rings: OnceLock<Vec<Ring>>,
    workers: Mutex<Vec<Arc<VringEpollHandler<Arc<Connection>>>>>,
}

impl Connection {
    /// A connection for `device`, woken by `notifier`, and the framework's object driving the connection.
    pub(super) fn new(
        options: Options,
        device: Arc<Device>,
        notifier: Arc<Notifier>,
        guest: GuestState,
    ) -> io::Result<(Arc<Connection>, Framework)> {
        let workers = Workers::new(notifier, &device.config())?;
        let connection = Arc::new_cyclic(|this| Connection {
            options,
            device,
            guest,
            memory: MemoryTable::new(),
            workers,
            mapper: Arc::default(),
            replies: PendingReplies::default(),
            wakes: DriverWakes::default(),
            framework: FrameworkParts::default(),
            phase: ConnectionPhase::default(),
            stopped: StoppedRings::default(),
            this: this.clone(),
        });
        connection.device.set_memory(connection.memory.handle().clone());

        let _ = ring::take_made();
        let framework = VhostUserDaemon::new(
            connection.options.name.clone(),
            connection.clone(),
            Memory::new(GuestMemoryMmap::new()),
        )
        .map_err(|error| {
            connection.end();
            io::Error::other(error.to_string())
        })?;
        let rings = ring::take_made();
        let observer: Weak<dyn RingObserver> = connection.this.clone();
        for (queue, ring) in rings.iter().enumerate() {
            ring.set_observer(queue, observer.clone());
        }
        let _ = connection.framework.rings.set(rings);
        let workers = framework.get_epoll_handlers();
        for (handler, notifier) in workers.iter().zip(connection.workers.notifier_fds()) {
            handler.register_listener(
                notifier,
                EventSet::IN | EventSet::EDGE_TRIGGERED,
                connection.notifier_event(),
            )?;
        }
        *lock(&connection.framework.workers) = workers;
        Ok((connection, framework))
    }

    /// Epoll data of the notifiers. The framework uses values up to the number of queues.
    fn notifier_event(&self) -> u64 {
        self.num_queues() as u64 + 1
    }

    /// Epoll data of the timer for delayed wakes.
    fn timer_event(&self) -> u64 {
        self.num_queues() as u64 + 2
    }

    /// The ring of a queue.
    pub(super) fn ring(&self, queue: u16) -> Option<&Ring> {
        self.framework.rings.get()?.get(usize::from(queue))
    }

    /// Cuts the connection. Its port notices and ends the connection.
    pub(super) fn close(&self) {
        self.phase.close();
    }

    /// Counts and logs a fault of the front end or the driver.
    pub(super) fn fault(&self, fault: Fault, detail: std::fmt::Arguments<'_>) {
        self.guest.faults.record(&self.options.name, fault, detail);
    }

    /// The daemon touched a missing page of guest memory.
    fn on_memory_fault(&self, cause: FaultCause) {
        match cause {
            FaultCause::Lost => self.fault(
                Fault::LostMemory,
                format_args!("a page of guest memory is gone; closing the connection"),
            ),
            FaultCause::OverQuota => self.fault(
                Fault::SparseMemory,
                format_args!(
                    "guest memory was not there, beyond max-touched-bytes; closing the connection"
                ),
            ),
        }
        self.close();
    }

    /// A peer had to wait for a page of the guest's memory.
    pub(super) fn on_slow_memory(&self) {
        self.fault(Fault::SlowMemory, format_args!("a peer had to wait for guest memory"));
        if !self.guest.faults.forgive_wait(Instant::now()) {
            self.close();
        }
    }

    /// Takes the device out of its fabric and ends the workers. Waits only for already posted moves.
    pub(super) fn end(&self) {
        self.workers.finish_moves(self.options.move_queues, || self.phase.is_closing());
        self.device.leave();
        self.phase.exit();
        self.mapper.close();
        self.workers.notify();
        // The workers and the connection hold references to each other.
        lock(&self.framework.workers).clear();
        self.phase.release_link();
    }

    /// Makes a worker serve a queue again, after a turn of the other queues.
    pub(super) fn reschedule(&self, worker: usize, queue: u16) {
        self.workers.reschedule(worker, queue);
    }

    /// Gives a job to the map thread.
    pub(super) fn ask_front_end(&self, job: Job) {
        let observer: Weak<dyn MapObserver> = self.this.clone();
        if let Err(error) = self.mapper.push(job, observer, &self.guest.threads) {
            tracing::error!(guest = self.options.name, %error, "cannot start the map thread");
            self.close();
        }
    }

    /// Makes worker 0 serve the event queue again after `delay`, when a wake held back by the rate limit is
    /// due.
    pub(super) fn wake_later(&self, delay: Duration) {
        let timer = match self.wakes.timer.get() {
            Some(timer) => timer,
            None => match self.make_wake_timer() {
                Ok(timer) => self.wakes.timer.get_or_init(|| timer),
                Err(error) => {
                    // Late is better than never.
                    tracing::error!(guest = self.options.name, %error, "no timer");
                    return self.reschedule(0, EVENT_QUEUE);
                }
            },
        };
        let at = rustix::time::Timespec {
            tv_sec: i64::try_from(delay.as_secs()).unwrap_or(i64::MAX),
            // Zero would disarm the timer.
            tv_nsec: i64::from(delay.subsec_nanos().max(1)),
        };
        let once = rustix::time::Itimerspec {
            it_interval: rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: at,
        };
        let flags = rustix::time::TimerfdTimerFlags::empty();
        let _ = rustix::time::timerfd_settime(timer, flags, &once);
    }

    fn make_wake_timer(&self) -> io::Result<OwnedFd> {
        use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        if let Some(worker) = lock(&self.framework.workers).first() {
            worker.register_listener(timer.as_raw_fd(), edge, self.timer_event())?;
        }
        Ok(timer)
    }

    /// Opens the window once a front end has asked for its size and given a channel for requests.
    ///
    /// Whether the front end acknowledges requests is unknown here. Without acknowledgements every mapping
    /// seems complete at once, and the driver finds out by the nonce.
    fn update_window(&self, is_wanted: bool) {
        if is_wanted {
            self.device.set_window(self.options.window_size);
        }
    }

    /// Does overdue work and returns the nearest deadline.
    fn check_deadlines(&self) -> Option<Instant> {
        let ack = match self.mapper.overdue(self.options.ack_timeout) {
            Overdue::No => None,
            Overdue::At(at) => Some(at),
            Overdue::Yes => {
                self.fault(
                    Fault::NoAck,
                    format_args!("a mapping was not acknowledged in time; closing the connection"),
                );
                self.close();
                return None;
            }
        };
        let stopped = self.options.stopped_grace.and_then(|grace| {
            match self.stopped.check(grace) {
                Stopped::No => return None,
                Stopped::Until(end) => return Some(end),
                Stopped::TooLong => {}
            }
            self.fault(
                Fault::StoppedTooLong,
                format_args!("all rings were stopped for {} s; ending the device", grace.as_secs()),
            );
            // The end of a session waits for running moves; the event loop must not.
            let device = self.device.clone();
            let end = move || device.close_session(CloseReason::Failed);
            if let Err(error) = self.guest.threads.spawn("stopped", end) {
                tracing::error!(guest = self.options.name, %error, "cannot start a thread");
                self.close();
            }
            None
        });
        ack.into_iter().chain(stopped).min()
    }

    /// Sets a deadline, unless a nearer deadline is set.
    fn arm(&self, at: Instant) {
        if !self.stopped.arm(at) {
            return;
        }
        let connection = self.this.clone();
        self.guest.timers.call_at(at, move || {
            if let Some(connection) = connection.upgrade() {
                connection.on_deadline();
            }
        });
    }

    /// Does overdue work and sets the next deadline.
    fn on_deadline(&self) {
        self.stopped.disarm();
        if let Some(next) = self.check_deadlines() {
            self.arm(next);
        }
    }

    fn on_queue(&self, worker: usize, queue: u16) {
        let Some(scratch) = self.workers.scratch(worker) else { return };
        self.serve_queue(queue, &mut lock(scratch));
    }

    fn serve_queue(&self, queue: u16, scratch: &mut Scratch) {
        match queue {
            CONTROL_QUEUE => {
                self.publish_replies();
                self.serve_control(scratch);
            }
            EVENT_QUEUE => self.serve_events(scratch),
            queue => self.serve_moves(queue, scratch),
        }
    }

    /// Serves a queue after a kick, by `serve`. Charges a kick without work.
    fn on_kick(&self, queue: u16, serve: impl FnOnce()) {
        let used = || self.ring(queue).map_or(0, Ring::used_chains);
        let before = used();
        serve();
        if used() == before {
            self.guest.account.charge(Instant::now(), IDLE_KICK);
        }
    }

    /// Serves a queue after a kick on the calling thread, a thread of the same front end. `false`: the caller
    /// has to kick the worker, because the worker is busy or the queue has commands (possibly long).
    pub(super) fn serve_kick(&self, queue: u16) -> bool {
        let worker = usize::from(queue >= FIRST_MOVE_QUEUE);
        let scratch = self.workers.scratch(worker).filter(|_| queue != CONTROL_QUEUE);
        let Some(mut scratch) = scratch.and_then(|scratch| scratch.try_lock().ok()) else {
            return false;
        };
        self.on_kick(queue, || self.serve_queue(queue, &mut scratch));
        true
    }

    /// Waits while the front end has used more than one processor. Only for threads working for this front
    /// end, and only without a lock another device's thread may want.
    fn charge_and_wait(&self) {
        let ended = || self.phase.is_closing() || self.phase.is_exiting();
        self.guest.account.charge_and_wait(ended);
    }

    fn on_notified(&self, worker: usize) -> io::Result<()> {
        self.workers.take_notice(worker);
        if self.phase.is_exiting() {
            // The only way to end a worker without leaking the framework's exit descriptor.
            return Err(io::Error::other("the connection ended"));
        }
        if worker == 0 {
            if self.wakes.call_pending.swap(false, Ordering::AcqRel)
                && let Some(ring) = self.ring(EVENT_QUEUE)
            {
                self.guest.account.signal(|| ring.signal());
            }
            self.on_queue(0, EVENT_QUEUE);
        }
        self.workers.serve_rescheduled(worker, |queue| self.on_queue(worker, queue));
        Ok(())
    }
}

impl VhostUserBackend for Connection {
    type Bitmap = ();
    type Vring = Ring;

    fn num_queues(&self) -> usize {
        usize::from(FIRST_MOVE_QUEUE + self.options.move_queues)
    }

    fn max_queue_size(&self) -> usize {
        MAX_DESCRIPTORS
    }

    fn features(&self) -> u64 {
        self.charge_and_wait();
        1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
            | Features::all().bits()
    }

    fn acked_features(&self, features: u64) {
        self.device.set_features(Features::in_use(features));
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        self.charge_and_wait();
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::SHMEM
            | VhostUserProtocolFeatures::RESET_DEVICE
    }

    fn reset_device(&self) {
        self.device.close_session(CloseReason::Orderly);
        for ring in self.framework.rings.get().into_iter().flatten() {
            ring.mark_restarted();
        }
    }

    fn set_event_idx(&self, _enabled: bool) {
        // The queues store the flag.
    }

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        self.charge_and_wait();
        let config = self.device.config();
        let tail = config.as_bytes().get(offset as usize..).unwrap_or_default();
        let mut bytes: Vec<u8> = tail.iter().copied().take(size as usize).collect();
        bytes.resize(size as usize, 0);
        bytes
    }

    fn set_config(&self, _offset: u32, _buf: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn update_memory(&self, memory: Memory) -> io::Result<()> {
        self.charge_and_wait();
        // The framework's own table: valid for the framework's threads as long as the framework holds the
        // table.
        let table = memory.memory().into_inner();
        let max = self.device.max_guest_memory();
        let refuse = |error: &dyn std::fmt::Display| {
            self.fault(Fault::RefusedMemory, format_args!("{error}"));
            io::Error::other(error.to_string())
        };
        guest_memory::check(&table, max, self.options.allow_any_file).map_err(|e| refuse(&e))?;
        guest_memory::check_fresh(&table, &self.memory.handle().memory()).map_err(|e| {
            self.close();
            refuse(&e)
        })?;
        let this = self.this.clone();
        let on_fault = move |cause| {
            if let Some(connection) = this.upgrade() {
                connection.on_memory_fault(cause);
            }
        };
        let contained = BusErrorGuard::new(table.clone(), &self.guest.touches, on_fault)
            .map_err(|e| refuse(&e))?;
        self.memory.replace(table, contained);
        Ok(())
    }

    fn set_backend_req_fd(&self, backend: Backend) {
        self.update_window(self.mapper.set_channel(backend));
    }

    fn get_shmem_config(&self) -> io::Result<VhostUserShMemConfig> {
        self.update_window(self.mapper.note_size_asked());
        let mut sizes = [0; WINDOW_SHMID as usize + 1];
        sizes[WINDOW_SHMID as usize] = self.options.window_size;
        Ok(VhostUserShMemConfig::new(1, &sizes))
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        let moves = (1 << self.options.move_queues) - 1;
        vec![0b11, moves << FIRST_MOVE_QUEUE]
    }

    fn exit_event(&self, _: usize) -> Option<(EventConsumer, EventNotifier)> {
        // The framework never closes this descriptor. Workers end by `on_notified` instead, after `end`; the
        // framework object must live until then.
        None
    }

    fn handle_event(
        &self,
        event: u16,
        _set: EventSet,
        _vrings: &[Ring],
        worker: usize,
    ) -> io::Result<()> {
        self.charge_and_wait();
        let event = u64::from(event);
        if event == self.notifier_event() {
            return self.on_notified(worker);
        }
        if event == self.timer_event() {
            self.on_queue(worker, EVENT_QUEUE);
        } else if worker == 0 {
            self.on_kick(event as u16, || self.on_queue(worker, event as u16));
        } else {
            // Queues are numbered within their worker here.
            let queue = event as u16 + FIRST_MOVE_QUEUE;
            self.on_kick(queue, || self.on_queue(worker, queue));
        }
        Ok(())
    }
}
