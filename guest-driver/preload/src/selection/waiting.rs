// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Handshakes waiting for their peers. One thread waits for all of them: a peer without a message,
//! or with a part of one, costs an entry in a list.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::selection::running::{self, RUNNING_LOCK};
use crate::selection::transitions::carry_out;
use crate::socket::pair::high;
use crate::socket::registrations;
use crate::socket::states::SocketEvent;
use crate::socket::stream::{SocketRole, SocketState};
use crate::socket::table::DescriptorRef;
use crate::sys::fork_lock::ForkMutex;
use crate::sys::own_stack::OwnStack;
use crate::sys::{STACK, epoll_wait, own_copies, owned, raw};

mod entry;
mod lock;

pub(super) use entry::PendingHandshake;
use entry::{Waiting, unwatch};
pub(super) use lock::pending;
use lock::{Counted, ListGuard};

/// The descriptors of the sleeping thread.
struct Sets {
    epoll: OwnedFd,
    /// Makes the thread check the list.
    wake: OwnedFd,
}

/// The list, and the data of the thread.
struct WaitingList {
    sets: Option<Sets>,
    list: BTreeMap<u64, Waiting>,
    /// Handshakes not in the set when they came into the list.
    unwatched: Vec<u64>,
    /// Handshakes left to the program's waits for epoll sets, and since when.
    in_sets: Vec<(u64, Instant)>,
    /// Handshakes with new bytes of their peers, seen by one thread while another thread was at
    /// work on them.
    missed: Vec<u64>,
    next: u64,
    has_thread: bool,
    /// Number of [`WaitingPlace`]s.
    places: usize,
}

/// Locked only under [`RUNNING_LOCK`], so no other thread has the lock while the process forks.
static WAITING: ForkMutex<WaitingList> = ForkMutex::new(WaitingList::new());

impl Counted for WaitingList {
    fn count(&self) -> usize {
        self.list.len() + self.places
    }
}

fn lock_list() -> ListGuard<WaitingList> {
    lock::lock(&WAITING)
}

/// Whether [`WaitingList::unwatched`] has any.
static ANY_UNWATCHED: AtomicBool = AtomicBool::new(false);

/// The number of the eventfd in the set.
const WAKE: u64 = 0;
/// How often the thread checks whether a program wants to write first, or a deadline has passed.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// How long a handshake is left to the program's waits for epoll sets.
const SET_TIME: Duration = Duration::from_millis(50);
/// The thread ends after so many checks in a row without any handshake to wait for.
const IDLE_CHECKS: u32 = 40;
/// Number of events taken at a time.
const EVENTS: usize = 32;

impl Default for WaitingList {
    fn default() -> WaitingList {
        WaitingList::new()
    }
}

impl WaitingList {
    const fn new() -> WaitingList {
        WaitingList {
            sets: None,
            list: BTreeMap::new(),
            unwatched: Vec::new(),
            in_sets: Vec::new(),
            missed: Vec::new(),
            next: 1,
            has_thread: false,
            places: 0,
        }
    }

    /// Prepares the set and the thread. `false`: there are no descriptors or threads left.
    fn begin(&mut self) -> bool {
        if self.sets.is_none() {
            self.sets = sets();
        }
        if self.sets.is_some() && !self.has_thread {
            let start = || ism_sys::start_thread("smc-handshake", STACK, wait_for_all);
            self.has_thread = raw::without_signals(start).is_ok();
        }
        self.has_thread
    }

    /// Puts a handshake into the list, and its descriptors into the set.
    fn insert(&mut self, number: u64, mut waiting: Waiting) {
        let Some(sets) = &self.sets else { return };
        if waiting.watched.is_empty() {
            waiting.watched =
                waiting.pending.fds().iter().flatten().map(AsRawFd::as_raw_fd).collect();
            // Edges only: a part of a message must not wake the thread again and again.
            let wanted = match waiting.pending.awaits_room() {
                true => libc::EPOLLOUT,
                false => libc::EPOLLIN | libc::EPOLLRDHUP,
            };
            let events = (wanted | libc::EPOLLET) as u32;
            for fd in &waiting.watched {
                let set = sets.epoll.as_raw_fd();
                let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_ADD, *fd, events, number);
            }
        }
        self.list.insert(number, waiting);
    }

    /// Puts the descriptors of all unwatched handshakes into the set, except for handshakes left to
    /// the program's waits.
    fn watch_all(&mut self) {
        ANY_UNWATCHED.store(false, Ordering::Relaxed);
        for number in std::mem::take(&mut self.unwatched) {
            if let Some(one) = self.list.remove(&number) {
                self.put(number, one);
            }
        }
    }

    /// Puts a handshake into the list. Either the program's waits for epoll sets go on with the
    /// handshake, or the thread.
    fn put(&mut self, number: u64, one: Waiting) {
        if one.is_in_a_set() {
            self.list.insert(number, one);
            self.in_sets.push((number, Instant::now()));
        } else {
            self.insert(number, one);
        }
    }

    /// Has the thread go on with the handshakes without a wait of the program.
    fn take_over(&mut self, now: Instant) {
        for (number, since) in std::mem::take(&mut self.in_sets) {
            let Some(one) = self.list.get(&number) else { continue };
            let is_late = now.saturating_duration_since(since) >= SET_TIME;
            if is_late {
                one.descriptor.stream().into_iter().for_each(registrations::leave_unseen_sets);
            }
            if one.is_in_a_set() && !is_late {
                self.in_sets.push((number, since));
            } else if let Some(one) = self.list.remove(&number) {
                self.insert(number, one);
            }
        }
    }

    /// Takes a handshake out of the list. The caller goes on with it, and then calls [`put_back`] or
    /// [`forget_missed`], and [`running::end`].
    fn take(&mut self, number: u64) -> Option<Waiting> {
        let one = self.list.remove(&number)?;
        running::begin(&one.descriptor);
        Some(one)
    }
}

/// Puts a handshake back into the list. Returns the handshake after a message of its peer in the
/// meantime: the caller goes on.
fn put_back(number: u64, one: Waiting) -> Option<Waiting> {
    let _running = RUNNING_LOCK.lock();
    let mut waiting = lock_list();
    if let Some(at) = waiting.missed.iter().position(|missed| *missed == number) {
        waiting.missed.swap_remove(at);
        return Some(one);
    }
    waiting.put(number, one);
    None
}

/// A handshake is complete.
fn forget_missed(number: u64) {
    let _running = RUNNING_LOCK.lock();
    lock_list().missed.retain(|missed| *missed != number);
}

/// Goes on with a handshake as far as its peer's bytes allow.
fn advance(number: u64, mut one: Waiting, set: c_int) {
    while let Some(rest) = one.advance(set) {
        match put_back(number, rest) {
            Some(again) => one = again,
            None => return,
        }
    }
    forget_missed(number);
}

/// Goes on with a handshake as far as its peer's bytes allow, without waiting. The caller has blocked
/// the program's signals.
pub(crate) fn go_on(descriptor: &DescriptorRef) {
    let Some(number) = descriptor.stream().map(|socket| socket.undecided.pending()) else { return };
    let Some(mut stack) = OwnStack::take() else { return watch(descriptor) };
    let (set, one) = {
        let _running = RUNNING_LOCK.lock();
        let mut waiting = lock_list();
        let Some(set) = waiting.sets.as_ref().map(|sets| sets.epoll.as_raw_fd()) else { return };
        let Some(one) = waiting.take(number) else {
            // The thread now advancing the handshake may have read before these bytes arrived.
            if running::any(|other| other.is(descriptor)) {
                waiting.missed.push(number);
            }
            return;
        };
        (set, one)
    };
    stack.run(|| advance(number, one, set));
    running::end(descriptor.clone());
}

/// Has the thread go on with a handshake, because the program waits for its end by something other
/// than an epoll set.
pub(crate) fn watch(descriptor: &DescriptorRef) {
    let Some(number) = descriptor.stream().map(|socket| socket.undecided.pending()) else { return };
    let _running = RUNNING_LOCK.lock();
    let mut waiting = lock_list();
    if let Some(one) = waiting.list.remove(&number) {
        waiting.insert(number, one);
    }
}

fn sets() -> Option<Sets> {
    use rustix::event::{EventfdFlags, eventfd};
    let epoll = high(owned(raw::epoll_create1(libc::EPOLL_CLOEXEC).ok()? as c_int));
    let wake = high(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?);
    let (set, fd) = (epoll.as_raw_fd(), wake.as_raw_fd());
    raw::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN as u32, WAKE).ok()?;
    Some(Sets { epoll, wake })
}

/// The thread or call that goes on with a handshake after a message of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watcher {
    /// The thread.
    Thread,
    /// The program's next call, since one nearly always follows at once: [`help`] for the
    /// connection, or [`watch_all`] before a sleep for others. Without such a call, the thread.
    NextCall,
}

/// A place in the list for a handshake that may have to wait for its peer. The thread does not end
/// while a place is taken. So the sender of the first message of a handshake takes a place before:
/// the peer's program may answer much later, and no call of this program waits so long.
pub(super) struct WaitingPlace(());

impl WaitingPlace {
    /// `None`: there are no descriptors or threads left.
    pub(super) fn take() -> Option<WaitingPlace> {
        let _running = RUNNING_LOCK.lock();
        let mut waiting = lock_list();
        if !waiting.begin() {
            return None;
        }
        waiting.places += 1;
        Some(WaitingPlace(()))
    }
}

impl Drop for WaitingPlace {
    fn drop(&mut self) {
        let _running = RUNNING_LOCK.lock();
        lock_list().places -= 1;
    }
}

/// Waits for a peer.
pub(super) fn add(
    _: &WaitingPlace,
    descriptor: &DescriptorRef,
    fd: c_int,
    pending: Box<dyn PendingHandshake>,
    watcher: Watcher,
) {
    let _running = RUNNING_LOCK.lock();
    let mut waiting = lock_list();
    if let Some(socket) = descriptor.stream()
        && socket.role() == SocketRole::Server
    {
        // The next bytes belong to the handshake.
        registrations::follow(descriptor, socket, SocketState::Deciding);
    } else if let Some(socket) = descriptor.stream() {
        // The server may have answered meanwhile.
        registrations::report_again(descriptor, socket);
    }
    let number = waiting.next;
    waiting.next += 1;
    let new = Waiting { descriptor: descriptor.clone(), fd, pending, watched: Vec::new() };
    match watcher {
        // The thread sleeps on the set, and checks all time limits soon enough without a wake-up.
        Watcher::Thread => waiting.insert(number, new),
        Watcher::NextCall => {
            waiting.list.insert(number, new);
            waiting.unwatched.push(number);
            ANY_UNWATCHED.store(true, Ordering::Relaxed);
        }
    }
    if let Some(socket) = descriptor.stream() {
        socket.undecided.set_pending(number);
    }
}

/// Has the thread watch the handshakes left to the program's next call: the next call sleeps for
/// others.
#[inline]
pub(crate) fn watch_all() {
    if ANY_UNWATCHED.load(Ordering::Relaxed) {
        let _running = RUNNING_LOCK.lock();
        lock_list().watch_all();
    }
}

/// Goes on with a handshake in a call of the program, for `timeout` at most, to save another
/// thread's wake-up. `None`: nothing waits for the peer's next message, or another thread goes on.
/// `Some(true)`: a signal has ended the wait.
pub(super) fn help(descriptor: &DescriptorRef, timeout: Duration) -> Option<bool> {
    let number = descriptor.stream()?.undecided.pending();
    let stack = OwnStack::take();
    let (set, mut one) = {
        let _running = RUNNING_LOCK.lock();
        let mut waiting = lock_list();
        let set = waiting.sets.as_ref()?.epoll.as_raw_fd();
        let found = waiting.list.get(&number)?;
        if found.pending.is_untouched() || stack.is_none() {
            if found.watched.is_empty() {
                let one = waiting.list.remove(&number)?;
                waiting.insert(number, one);
            }
            return None;
        }
        (set, waiting.take(number)?)
    };
    let mut stack = stack?;
    unwatch(set, &one.watched);
    one.watched.clear();
    let go_on = |mask| {
        let (rest, interrupted) = one.advance_here(set, timeout, mask);
        match rest {
            Some(rest) => {
                if let Some(again) = put_back(number, rest) {
                    advance(number, again, set);
                }
            }
            None => forget_missed(number),
        }
        interrupted
    };
    let interrupted = raw::blocking_signals(|mask| stack.run(|| go_on(mask)));
    running::end(descriptor.clone());
    Some(interrupted)
}

/// Makes the thread check all connections: the program has closed one of them.
pub(super) fn check() {
    let _running = RUNNING_LOCK.lock();
    wake(&lock_list());
}

fn wake(waiting: &WaitingList) {
    if let Some(sets) = &waiting.sets {
        let _ = raw::write(sets.wake.as_raw_fd(), &1u64.to_ne_bytes());
    }
}

/// The thread.
fn wait_for_all() {
    let (mut checked, mut idle) = (Instant::now(), 0);
    loop {
        let (set, empty) = {
            let _running = RUNNING_LOCK.lock();
            let waiting = lock_list();
            let Some(sets) = &waiting.sets else { return };
            (sets.epoll.as_raw_fd(), waiting.list.is_empty())
        };
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        let n = epoll_wait(set, &mut events, Some(CHECK_INTERVAL), None).unwrap_or(0);
        idle = if empty && n == 0 { idle + 1 } else { 0 };
        let woken = events.iter().take(n).any(|event| event.u64 == WAKE);
        let mut ready: Vec<u64> = events.iter().take(n).map(|event| event.u64).collect();
        let all = woken || checked.elapsed() >= CHECK_INTERVAL;
        let taken: Vec<(u64, Waiting)> = {
            let _running = RUNNING_LOCK.lock();
            let mut waiting = lock_list();
            if woken && let Some(sets) = &waiting.sets {
                let _ = raw::read(sets.wake.as_raw_fd(), &mut [0; 8]);
            }
            if all {
                checked = Instant::now();
                waiting.watch_all();
                waiting.take_over(checked);
                let over =
                    waiting.list.iter().filter(|(_, one)| one.pending.is_over(&one.descriptor));
                ready.extend(over.map(|(number, _)| *number));
            }
            let take = |number: u64| Some((number, waiting.take(number)?));
            let taken: Vec<_> = ready.into_iter().filter_map(take).collect();
            // If numbers are short, the program needs the numbers of the sets.
            let ends = idle >= IDLE_CHECKS || own_copies::are_short();
            // A call going on with a handshake may put the handshake back into the list, and uses
            // the set.
            let is_used = waiting.places > 0 || running::any(|_| true);
            if ends && waiting.list.is_empty() && !is_used {
                waiting.has_thread = false;
                waiting.sets = None;
                return;
            }
            taken
        };
        for (number, one) in taken {
            let descriptor = one.descriptor.clone();
            advance(number, one, set);
            running::end(descriptor);
        }
    }
}

/// Keeps the lists of handshakes as they are while the process forks. Gives up waiting for the
/// first bytes of clients: the first process to use such a connection does the handshake.
pub(crate) fn before_fork() {
    running::before_fork();
    let mut waiting = lock_list();
    let is_used =
        |waiting: &Waiting| waiting.pending.is_untouched() && waiting.descriptor.handles() > 0;
    let used: Vec<u64> =
        waiting.list.iter().filter(|(_, one)| is_used(one)).map(|(number, _)| *number).collect();
    let set = waiting.sets.as_ref().map_or(-1, |sets| sets.epoll.as_raw_fd());
    for one in used.iter().filter_map(|number| waiting.list.remove(number)) {
        unwatch(set, &one.watched);
        postpone(&one.descriptor, one.fd);
    }
    // The child shares the program's sets, and none of these handshakes.
    let leave = |descriptor: &DescriptorRef| {
        descriptor.stream().into_iter().for_each(registrations::leave_sets);
    };
    running::for_each(leave);
    for number in waiting.list.keys().copied().collect::<Vec<_>>() {
        if let Some(one) = waiting.list.remove(&number) {
            leave(&one.descriptor);
            waiting.insert(number, one);
        }
    }
    waiting.unwatched.clear();
    waiting.in_sets.clear();
    ANY_UNWATCHED.store(false, Ordering::Relaxed);
}

/// Leaves the handshake to the next call on the connection. The kernel reports the client's bytes
/// until then.
pub(super) fn postpone(descriptor: &DescriptorRef, fd: c_int) {
    if let Some(socket) = descriptor.stream() {
        if let Some(server) = socket.side.server() {
            server.set_postponed();
        }
        carry_out(descriptor, fd, SocketEvent::Postpone);
    }
}

/// Undoes [`before_fork`], in the parent.
pub(crate) fn in_parent() {
    RUNNING_LOCK.release_after_fork();
}

/// Undoes [`before_fork`], in the child without any of the threads.
pub(crate) fn in_child() {
    in_untold_child();
    RUNNING_LOCK.release_after_fork();
}

/// The descriptors of this process's waits for peers of handshakes.
pub(crate) fn descriptors() -> Vec<c_int> {
    let _running = RUNNING_LOCK.lock();
    let waiting = lock_list();
    let sets = waiting.sets.iter().flat_map(|sets| [&sets.epoll, &sets.wake]);
    let tcp = waiting.list.values().flat_map(|one| one.pending.fds()).flatten();
    sets.map(AsRawFd::as_raw_fd).chain(tcp.map(|fd| fd.as_raw_fd())).collect()
}

/// Whether a fork need not wait for the lists for longer than `limit`.
pub(crate) fn comes_free(limit: Duration) -> bool {
    RUNNING_LOCK.comes_free(limit)
}

/// Like [`in_child`], for a child not prepared by [`before_fork`].
pub(crate) fn in_untold_child() {
    guest_driver::SmcStream::forget_unsent_bytes();
    running::forget();
    forget();
}

/// Forgets the parent's handshakes.
fn forget() {
    let mut waiting = lock_list();
    let list = std::mem::take(&mut waiting.list);
    waiting.unwatched.clear();
    waiting.in_sets.clear();
    waiting.missed.clear();
    waiting.has_thread = false;
    waiting.places = 0;
    // The parent's set watches the parent's descriptors.
    drop(waiting.sets.take());
    // This process must not end the parent's connections, and the duplicates of TCP sockets would
    // keep the connections open.
    for (_, one) in list {
        for fd in one.pending.fds().iter().flatten() {
            let _ = raw::close(fd.as_raw_fd());
        }
        std::mem::forget(one);
    }
}

/// How long an ending process waits for handshakes of connections with written bytes: longer than a
/// client waits for its server.
const WRITTEN_TIMEOUT: Duration = Duration::from_secs(35);
/// How long an ending process waits for other handshakes that must come to their end.
const ANNOUNCED_TIMEOUT: Duration = Duration::from_secs(2);

/// How long an ending process waits for handshakes before another process takes them over.
const BEFORE_TAKEOVER: Duration = Duration::from_millis(20);

/// Whether the client of a handshake has written, and the program has closed the connection.
fn is_written(descriptor: &DescriptorRef) -> bool {
    descriptor.handles() == 0
        && descriptor.stream().is_some_and(|socket| {
            socket.role() == SocketRole::Client
                && socket.must_finish()
                && socket.undecided.has_early()
                && !socket.undecided.has_offers()
        })
}

/// Clients' handshakes still waiting for their servers, on connections that the program has written
/// on and closed: each with a duplicate of the TCP socket. Waits a moment for handshakes about to
/// end.
pub(crate) fn written_clients() -> Vec<(DescriptorRef, OwnedFd)> {
    let begun = Instant::now();
    while begun.elapsed() < BEFORE_TAKEOVER && any(is_written) {
        std::thread::sleep(Duration::from_millis(1));
    }
    loop {
        let mut found = Vec::new();
        let _running = RUNNING_LOCK.lock();
        // A thread going on with such a handshake soon puts it back, or ends it.
        if !running::any(is_written) || begun.elapsed() > ANNOUNCED_TIMEOUT {
            for one in lock_list().list.values().filter(|one| is_written(&one.descriptor)) {
                // A handshake in the list has its TCP socket.
                if let [Some(tcp), _] = one.pending.fds()
                    && let Ok(copy) = tcp.try_clone_to_owned()
                {
                    found.push((one.descriptor.clone(), high(copy)));
                }
            }
            return found;
        }
        drop(_running);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether any handshake under way fulfils a condition.
fn any(condition: impl Fn(&DescriptorRef) -> bool) -> bool {
    let _running = RUNNING_LOCK.lock();
    running::any(&condition) || lock_list().list.values().any(|one| condition(&one.descriptor))
}

/// Waits for handshakes of connections closed by the program, when the process ends. `relayed`:
/// also for handshakes with relays waiting.
pub(crate) fn finish(relayed: bool) {
    let begun = Instant::now();
    let must_finish = |found: &DescriptorRef| {
        found.stream().is_some_and(|socket| {
            let most =
                if socket.undecided.has_early() { WRITTEN_TIMEOUT } else { ANNOUNCED_TIMEOUT };
            socket.must_finish()
                && (relayed || !socket.undecided.has_offers())
                && begun.elapsed() < most
        })
    };
    while any(must_finish) {
        std::thread::sleep(Duration::from_millis(1));
    }
}
