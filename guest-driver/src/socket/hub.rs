//! Who listens to a device's events, and who is told.
//!
//! The event queue of a device has one interrupt. One thread at a time, the *leader*, listens to
//! it. A blocked caller makes itself leader if nobody leads, so that a wake-up travels from the
//! device straight to the thread that wants it; other blocked callers sleep on their futex until
//! the leader wakes them or leaves. Where readiness must be passed on to the kernel (pollable
//! descriptors), the device's background thread leads instead.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;
use virtio_ism_abi::event::Event;
use virtio_ism_abi::{Gid, Token};

use super::wait::{NAP, Waiter};
use crate::ism::IsmDevice;

/// A connection as the hub sees it.
pub(crate) trait Member: Send + Sync {
    /// The DMB may have news: wake whoever waits for them.
    fn on_wake(&self);
    /// Whether anybody waits at all; asked before `on_wake`.
    fn is_awaited(&self) -> bool;
    /// Called now and then, whether anybody waits or not: answer a peer that waits for an answer.
    fn on_glance(&self);
    /// The GID of the peer.
    fn peer_gid(&self) -> Gid;
    /// The peer's DMB that this connection writes.
    fn peer_token(&self) -> Token;
    /// The peer, its DMB or the device is gone: nothing can be sent or received any more.
    fn on_lost(&self);
}

/// What the layer above does with events that concern no single connection.
pub(crate) trait Watcher: Send + Sync {
    /// The peer left the fabric.
    fn on_peer_down(&self, gid: Gid);
    /// A peer's DMB is gone.
    fn on_dmb_gone(&self, token: Token);
    /// A software event arrived.
    fn on_sw_event(&self, gid: Gid, code: u32, info: u64);
}

/// Nobody leads.
const FREE: u32 = 0;
/// A blocked caller leads.
const CALLER: u32 = 1;
/// The background thread leads.
const BACKGROUND: u32 = 2;

#[derive(Default)]
struct Table {
    by_idx: HashMap<u32, (Option<u32>, Weak<dyn Member>)>,
    by_slab: HashMap<u32, Vec<u32>>,
}

/// The meeting point of one device's threads.
pub(crate) struct Hub {
    device: Arc<IsmDevice>,
    watcher: Weak<dyn Watcher>,
    lead: AtomicU32,
    followers: Mutex<Vec<Arc<Waiter>>>,
    table: Mutex<Table>,
    /// Wakes a leader for a reason of this process's own.
    interrupt: OwnedFd,
    /// Members whose readiness the kernel must know at once.
    pollables: AtomicUsize,
    lost: AtomicBool,
    stop: AtomicBool,
    chores_due: AtomicBool,
    background: Arc<Waiter>,
    epoch: Instant,
    /// Microseconds since `epoch` of the last look at the events by `glance`.
    glanced: AtomicU32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data is valid after every statement, so a panic elsewhere changes nothing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    /// A hub for `device`. The caller starts [`Hub::run`] on a thread of its own.
    pub(crate) fn new(
        device: Arc<IsmDevice>,
        watcher: Weak<dyn Watcher>,
    ) -> std::io::Result<Arc<Hub>> {
        Ok(Arc::new(Hub {
            device,
            watcher,
            lead: AtomicU32::new(FREE),
            followers: Mutex::default(),
            table: Mutex::default(),
            interrupt: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            pollables: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            chores_due: AtomicBool::new(true),
            background: Arc::default(),
            epoch: Instant::now(),
            glanced: AtomicU32::new(0),
        }))
    }

    /// The device.
    pub(crate) fn device(&self) -> &Arc<IsmDevice> {
        &self.device
    }

    /// Whether the device is gone; every member was told.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Adds a connection, found by its own DMB's number and slab (`None`: guest memory).
    pub(crate) fn join(&self, idx: u32, slab: Option<u32>, member: Weak<dyn Member>) {
        let mut table = lock(&self.table);
        if let Some(slab) = slab {
            table.by_slab.entry(slab).or_default().push(idx);
        }
        table.by_idx.insert(idx, (slab, member));
        drop(table);
        if self.is_lost() {
            self.lose();
        }
    }

    /// Removes a connection.
    pub(crate) fn leave(&self, idx: u32) {
        let mut table = lock(&self.table);
        let Some((slab, _)) = table.by_idx.remove(&idx) else { return };
        if let Some(slab) = slab
            && let Some(list) = table.by_slab.get_mut(&slab)
        {
            list.retain(|member| *member != idx);
            if list.is_empty() {
                table.by_slab.remove(&slab);
            }
        }
    }

    /// Wakes a thread that sleeps in [`Hub::sleep`].
    pub(crate) fn wake(&self, waiter: &Waiter) {
        if waiter.wake() {
            self.interrupt();
        }
    }

    fn interrupt(&self) {
        // Full (EAGAIN) means that an interrupt is pending already.
        let _ = rustix::io::write(&self.interrupt, &1u64.to_ne_bytes());
    }

    /// A member's readiness must from now on be passed to the kernel at once.
    pub(crate) fn add_pollable(&self) {
        if self.pollables.fetch_add(1, Ordering::SeqCst) == 0 {
            // A leading caller steps back; the background thread takes over.
            self.interrupt();
            self.background.wake();
        }
    }

    /// Undoes one [`Hub::add_pollable`].
    pub(crate) fn remove_pollable(&self) {
        if self.pollables.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.interrupt();
        }
    }

    /// Looks at the events without sleeping, if nobody leads: for callers that only ever try.
    pub(crate) fn glance(&self) {
        // Once in 100 us is enough, and keeps the cost of an empty try at a clock read.
        let now = self.epoch.elapsed().as_micros() as u32;
        let last = self.glanced.load(Ordering::Relaxed);
        if now.wrapping_sub(last) < 100 || self.lead.load(Ordering::Relaxed) != FREE {
            return;
        }
        self.glanced.store(now, Ordering::Relaxed);
        if self.try_lead(CALLER) {
            self.dispatch();
            self.stop_leading();
        }
    }

    fn try_lead(&self, who: u32) -> bool {
        if who == CALLER && self.pollables.load(Ordering::SeqCst) > 0 {
            return false;
        }
        self.lead.compare_exchange(FREE, who, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn stop_leading(&self) {
        self.lead.store(FREE, Ordering::SeqCst);
        // Somebody else may be waiting for events: let it lead.
        let next = lock(&self.followers).pop();
        if let Some(next) = next {
            self.wake(&next);
        }
    }

    /// Sleeps until the waiter is woken after `seen`, or for `timeout`. With `extra`, also until that
    /// descriptor is readable; the waiter's bell must be part of it.
    pub(crate) fn sleep(
        &self,
        waiter: &Arc<Waiter>,
        seen: u32,
        timeout: Duration,
        extra: Option<rustix::fd::BorrowedFd<'_>>,
    ) {
        if self.try_lead(CALLER) {
            self.lead_until(waiter, seen, timeout, extra);
            return;
        }
        lock(&self.followers).push(waiter.clone());
        // The leader may have left between the two lines above, before it could see us.
        if self.try_lead(CALLER) {
            self.unfollow(waiter);
            self.lead_until(waiter, seen, timeout, extra);
            return;
        }
        match extra {
            None => waiter.sleep(seen, timeout),
            // A waiter with other descriptors has its bell among them.
            Some(extra) => {
                let mut fds = [PollFd::from_borrowed_fd(extra, PollFlags::IN)];
                waiter.polling(true);
                if !waiter.woken(seen) {
                    poll_for(&mut fds, timeout);
                }
                waiter.polling(false);
            }
        }
        self.unfollow(waiter);
    }

    fn unfollow(&self, waiter: &Arc<Waiter>) {
        lock(&self.followers).retain(|other| !Arc::ptr_eq(other, waiter));
    }

    fn lead_until(
        &self,
        waiter: &Waiter,
        seen: u32,
        timeout: Duration,
        extra: Option<rustix::fd::BorrowedFd<'_>>,
    ) {
        let end = Instant::now() + timeout;
        loop {
            self.dispatch();
            if waiter.woken(seen) || self.pollables.load(Ordering::SeqCst) > 0 {
                break;
            }
            if !self.device.arm_interrupts() {
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            waiter.polling(true);
            let other = !waiter.woken(seen) && self.poll_once(left, extra);
            waiter.polling(false);
            if other {
                break;
            }
        }
        self.device.suppress_interrupts();
        self.stop_leading();
    }

    /// Waits for the device or the interrupt. `true`: `extra` is readable.
    fn poll_once(&self, timeout: Duration, extra: Option<rustix::fd::BorrowedFd<'_>>) -> bool {
        let device = self.device.event_fd();
        let interrupt = self.interrupt.as_fd();
        let mut fds = [
            PollFd::from_borrowed_fd(device, PollFlags::IN),
            PollFd::from_borrowed_fd(interrupt, PollFlags::IN),
            PollFd::from_borrowed_fd(extra.unwrap_or(interrupt), PollFlags::IN),
        ];
        let count = if extra.is_some() { 3 } else { 2 };
        if !poll_for(&mut fds[..count], timeout) {
            return false;
        }
        let [by_device, by_interrupt, by_extra] = [0, 1, 2].map(|i| !fds[i].revents().is_empty());
        if by_device {
            self.device.clear_event_fd();
        }
        if by_interrupt {
            let _ = rustix::io::read(interrupt, &mut [0u8; 8]);
        }
        extra.is_some() && by_extra
    }

    /// Takes all events and tells whom they concern. Only the leader calls this.
    fn dispatch(&self) {
        let mut again = true;
        while again {
            // An error means that the device is gone, which is asked below.
            again = self.device.poll_events(&mut |event| self.tell(event)).is_ok_and(|n| n > 0);
        }
        if self.device.is_gone() && !self.is_lost() {
            self.lose();
        }
    }

    fn tell(&self, event: Event) {
        match event {
            Event::SlabWake(wake) => {
                for slab in wake.slabs.iter().take(wake.n.get() as usize) {
                    self.each_of_slab(slab.get(), |member| {
                        if member.is_awaited() {
                            member.on_wake();
                        }
                    });
                }
            }
            Event::DmbSignal(signal) => {
                for entry in signal.entries.iter().take(signal.n.get() as usize) {
                    if let Some(member) = self.member(entry.idx.get())
                        && member.is_awaited()
                    {
                        member.on_wake();
                    }
                }
            }
            Event::PeerDown { gid, .. } => {
                self.each(|member| member.peer_gid() == gid, |member| member.on_lost());
                if let Some(watcher) = self.watcher.upgrade() {
                    watcher.on_peer_down(gid);
                }
            }
            Event::DmbGone { token, .. } => {
                self.each(|member| member.peer_token() == token, |member| member.on_lost());
                if let Some(watcher) = self.watcher.upgrade() {
                    watcher.on_dmb_gone(token);
                }
            }
            Event::SwEvent { gid, code, info } => {
                if let Some(watcher) = self.watcher.upgrade() {
                    watcher.on_sw_event(gid, code, info);
                }
            }
            Event::Lost { n } => tracing::warn!(n, "software events were lost"),
        }
    }

    fn member(&self, idx: u32) -> Option<Arc<dyn Member>> {
        lock(&self.table).by_idx.get(&idx).and_then(|(_, member)| member.upgrade())
    }

    // Members are called outside the table's lock: they may join, leave or wake.
    fn each_of_slab(&self, slab: u32, mut f: impl FnMut(&dyn Member)) {
        let members: Vec<_> = {
            let table = lock(&self.table);
            let Some(list) = table.by_slab.get(&slab) else { return };
            list.iter().filter_map(|idx| table.by_idx.get(idx)?.1.upgrade()).collect()
        };
        for member in members {
            f(&*member);
        }
    }

    fn each(&self, which: impl Fn(&dyn Member) -> bool, f: impl Fn(&dyn Member)) {
        let members: Vec<_> =
            lock(&self.table).by_idx.values().filter_map(|(_, member)| member.upgrade()).collect();
        for member in members.iter().filter(|member| which(&***member)) {
            f(&**member);
        }
    }

    fn lose(&self) {
        self.lost.store(true, Ordering::Release);
        self.each(|_| true, |member| member.on_lost());
        for waiter in std::mem::take(&mut *lock(&self.followers)) {
            self.wake(&waiter);
        }
    }

    /// Ends [`Hub::run`].
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.background.wake();
        self.interrupt();
    }

    /// The background thread. `chores` is called now and then while it returns how soon it wants
    /// to be called again; `None`: there is nothing to do until somebody wakes the thread.
    pub(crate) fn run(&self, mut chores: impl FnMut() -> Option<Duration>) {
        let mut due = Instant::now();
        while !self.stop.load(Ordering::Acquire) && !self.is_lost() {
            let seen = self.background.seen();
            if self.chores_due.swap(false, Ordering::AcqRel) || Instant::now() >= due {
                due = Instant::now() + chores().unwrap_or(NO_CHORES);
            }
            // A peer may be blocked until it hears what an application has read that is busy with
            // other things now (CDC-20).
            self.each(|_| true, |member| member.on_glance());
            let pause = due.saturating_duration_since(Instant::now()).min(NAP);
            if self.pollables.load(Ordering::SeqCst) > 0 {
                // A caller that leads was interrupted and leaves at once.
                if self.try_lead(BACKGROUND) {
                    self.lead_for_pollables(pause);
                } else {
                    self.background.sleep(seen, Duration::from_millis(1));
                }
                continue;
            }
            // Peers and devices go without anybody waiting for them.
            if self.try_lead(CALLER) {
                self.dispatch();
                self.stop_leading();
            }
            self.background.sleep(seen, pause);
        }
    }

    /// Makes the background thread do its chores soon.
    pub(crate) fn wake_background(&self) {
        self.chores_due.store(true, Ordering::Release);
        self.background.wake();
        if self.lead.load(Ordering::SeqCst) == BACKGROUND {
            self.interrupt();
        }
    }

    fn lead_for_pollables(&self, pause: Duration) {
        let end = Instant::now() + pause;
        while self.pollables.load(Ordering::SeqCst) > 0
            && !self.stop.load(Ordering::Acquire)
            && !self.is_lost()
        {
            self.dispatch();
            if !self.device.arm_interrupts() {
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.poll_once(left, None);
            // An interrupt may mean chores; the loop above decides.
            break;
        }
        self.device.suppress_interrupts();
        self.stop_leading();
    }
}

/// How long the background thread sleeps when it has nothing to do.
const NO_CHORES: Duration = Duration::from_secs(3600);

/// `poll` that knows only "something" and "nothing in time".
fn poll_for(fds: &mut [PollFd<'_>], timeout: Duration) -> bool {
    let timeout = rustix::event::Timespec {
        tv_sec: timeout.as_secs().min(3600) as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    matches!(poll(fds, Some(&timeout)), Ok(n) if n > 0)
}
