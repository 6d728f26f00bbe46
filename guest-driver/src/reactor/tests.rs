// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The reactor on a source with events made by the test.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::thread::{self, JoinHandle, ThreadId};

use super::*;

/// Upper limit for expected events on a loaded machine.
use smc_test_support::TIMEOUT;

/// A source that must be polled, or not.
struct Fake {
    fd: EventFd,
    polled: bool,
    events: Mutex<VecDeque<ReactorEvent>>,
    peers: AtomicBool,
    polls: Mutex<Vec<ThreadId>>,
    timers: AtomicU32,
    /// Another thread has armed the source and not polled since.
    armed: AtomicBool,
}

impl Fake {
    fn new(peers: bool) -> Arc<Fake> {
        Fake::with(peers, true)
    }

    fn with(peers: bool, polled: bool) -> Arc<Fake> {
        Arc::new(Fake {
            fd: EventFd::new().unwrap(),
            polled,
            events: Mutex::default(),
            peers: AtomicBool::new(peers),
            polls: Mutex::default(),
            timers: AtomicU32::new(0),
            armed: AtomicBool::new(false),
        })
    }

    fn post(&self, event: ReactorEvent) {
        lock(&self.events).push_back(event);
        self.fd.signal();
    }

    /// Polls since the last call, by threads other than this one.
    fn polls_of_others(&self) -> usize {
        let me = thread::current().id();
        std::mem::take(&mut *lock(&self.polls)).iter().filter(|id| **id != me).count()
    }
}

impl Source for Fake {
    fn event_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn clear_event_fd(&self) {
        self.fd.clear();
    }

    fn arm_interrupts(&self) -> bool {
        self.armed.load(Ordering::SeqCst) || lock(&self.events).is_empty()
    }

    fn suppress_interrupts(&self) {}

    fn poll_events(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool {
        lock(&self.polls).push(thread::current().id());
        let events = std::mem::take(&mut *lock(&self.events));
        events.into_iter().for_each(handle);
        false
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn event_set(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn on_reported(&self, _name: u64) {
        unreachable!("the source has no set");
    }
}

impl From<Arc<Fake>> for SourceParts {
    fn from(fake: Arc<Fake>) -> SourceParts {
        let polled = fake.polled.then(|| fake.clone() as Arc<dyn PolledSource>);
        SourceParts { source: fake, lines: None, polled }
    }
}

impl PolledSource for Fake {
    fn poll_arrivals(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool {
        self.poll_events(handle)
    }

    fn has_peers(&self) -> bool {
        self.peers.load(Ordering::SeqCst)
    }

    fn on_timer(&self, _now: Instant) -> Option<Instant> {
        self.timers.fetch_add(1, Ordering::SeqCst);
        None
    }
}

/// A connection that counts its calls.
#[derive(Default)]
struct Counting {
    /// Arrivals, and 100 for each delayed update.
    heard: AtomicU32,
    woken: AtomicU32,
    changed: AtomicBool,
    awaited: AtomicBool,
    sends: AtomicBool,
    rechecks: AtomicU32,
    lost: AtomicU32,
    waiter: Arc<Waiter>,
}

impl ConnectionHandler for Counting {
    fn on_wake(&self) {
        self.woken.fetch_add(1, Ordering::SeqCst);
    }

    fn take_change(&self) -> bool {
        self.changed.swap(false, Ordering::SeqCst)
    }

    fn has_waiters(&self) -> bool {
        self.awaited.load(Ordering::SeqCst)
    }

    fn on_arrival(&self) {
        self.heard.fetch_add(1, Ordering::SeqCst);
        self.waiter.wake();
    }

    fn on_tick(&self) {}

    fn on_recheck(&self) {
        self.rechecks.fetch_add(1, Ordering::SeqCst);
    }

    fn on_delayed_update(&self, _read_before: Option<u64>) -> DelayedUpdate {
        self.heard.fetch_add(100, Ordering::SeqCst);
        if self.sends.load(Ordering::SeqCst) { DelayedUpdate::Sent } else { DelayedUpdate::None }
    }

    fn on_lost(&self, key: u32) {
        self.lost.fetch_add(1 + 100 * key, Ordering::SeqCst);
    }

    fn on_leave(&self) {}

    fn on_taken(&self, _key: u32) {}
}

/// The registration of a connection in no group.
fn key(key: u32) -> Registration {
    Registration { key, group: None, line: None, tags: None }
}

/// A reactor with its background thread and one connection, whose key is 7.
struct Bed {
    source: Arc<Fake>,
    reactor: Arc<Reactor<Counting>>,
    member: Arc<Counting>,
    background: Option<JoinHandle<()>>,
}

impl Bed {
    fn new(peers: bool) -> Bed {
        Bed::on(Fake::new(peers))
    }

    fn on(source: Arc<Fake>) -> Bed {
        let reactor = Reactor::new(source.clone()).unwrap();
        let member = Arc::new(Counting::default());
        reactor.register(key(7), Arc::downgrade(&member));
        let running = reactor.clone();
        let background = Some(thread::spawn(move || running.run(|| None)));
        Bed { source, reactor, member, background }
    }

    fn heard(&self) -> u32 {
        self.member.heard.load(Ordering::SeqCst)
    }

    #[track_caller]
    fn eventually(&self, what: impl Fn(&Bed) -> bool) {
        smc_test_support::eventually("it happens", || what(self));
    }

    fn leads(&self, who: u32) -> bool {
        self.reactor.lead.load(Ordering::SeqCst) == who
    }

    /// A thread asleep until the connection hears of something more; `true`: an event came.
    fn sleeping_caller(&self) -> JoinHandle<bool> {
        let (reactor, member) = (self.reactor.clone(), self.member.clone());
        let before = self.heard();
        thread::spawn(move || {
            let end = Instant::now() + TIMEOUT;
            let heard = || member.heard.load(Ordering::SeqCst) > before;
            // A wake-up may also ask this thread to lead.
            while !heard() && Instant::now() < end {
                let count = member.waiter.wake_count();
                let now = Instant::now();
                let limit = Some((now, end.saturating_duration_since(now)));
                reactor.sleep(&member.waiter, count, limit, None);
            }
            heard() && Instant::now() < end
        })
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.reactor.stop();
        self.background.take().unwrap().join().unwrap();
    }
}

/// Connections with keys from 0 on, registered in these groups with these tags.
fn connections<const N: usize>(
    reactor: &Reactor<Counting>,
    registrations: [(Option<u32>, Option<Tags>); N],
) -> [Arc<Counting>; N] {
    let mut at = 0;
    registrations.map(|(group, tags)| {
        let member = Arc::new(Counting::default());
        reactor
            .register(Registration { key: at, group, line: None, tags }, Arc::downgrade(&member));
        at += 1;
        member
    })
}

#[test]
fn of_the_connections_of_a_wake_group_those_with_new_words_and_waiters_are_woken() {
    let reactor = Reactor::new(Fake::new(false)).unwrap();
    let members = connections(&reactor, [5, 5, 5, 6].map(|group| (Some(group), None)));
    for (at, member) in members.iter().enumerate() {
        member.awaited.store(at != 2, Ordering::SeqCst);
    }
    let wake = |changed: [bool; 3]| {
        for (member, changed) in members.iter().zip(changed.into_iter().chain([true])) {
            member.changed.store(changed, Ordering::SeqCst);
        }
        reactor.handle(ReactorEvent::WakeGroup(5));
        members.each_ref().map(|member| member.woken.swap(0, Ordering::SeqCst))
    };
    assert_eq!(wake([true, false, false]), [1, 0, 0, 0]);
    assert_eq!(wake([true, true, true]), [1, 1, 0, 0], "the third has no waiters");
    assert_eq!(wake([false, false, false]), [0, 0, 0, 0]);
    reactor.remove(0, Arc::as_ptr(&members[0]));
    assert_eq!(wake([true, true, true]), [0, 1, 0, 0]);
    reactor.handle(ReactorEvent::WakeGroup(7));
}

#[test]
fn a_signal_to_a_key_wakes_that_connection_if_it_has_waiters() {
    let reactor = Reactor::new(Fake::new(false)).unwrap();
    let members = connections(&reactor, [(None, None); 2]);
    let signal = |event| {
        reactor.handle(event);
        members.each_ref().map(|member| {
            (member.woken.swap(0, Ordering::SeqCst), member.heard.swap(0, Ordering::SeqCst))
        })
    };
    assert_eq!(signal(ReactorEvent::Wake(1)), [(0, 0), (0, 0)]);
    assert_eq!(signal(ReactorEvent::Arrived(1)), [(0, 0), (0, 1)]);
    members[1].awaited.store(true, Ordering::SeqCst);
    assert_eq!(signal(ReactorEvent::Wake(1)), [(0, 0), (1, 0)]);
    assert_eq!(signal(ReactorEvent::Arrived(1)), [(0, 0), (1, 0)]);
    assert_eq!(signal(ReactorEvent::Wake(9)), [(0, 0), (0, 0)]);
}

#[test]
fn a_tag_that_is_lost_is_reported_with_the_keys_that_have_it() {
    let reactor = Reactor::new(Fake::new(false)).unwrap();
    let tags = [Some((1, 10)), Some((1, 11)), Some((2, 10)), None];
    let tags = tags.map(|tags| (None, tags.map(|(peer, buffer)| Tags { peer, buffer })));
    let members = connections(&reactor, tags);
    let lost = |event| {
        reactor.handle(event);
        members.each_ref().map(|member| member.lost.swap(0, Ordering::SeqCst))
    };
    assert_eq!(lost(ReactorEvent::PeerLost(1)), [1, 101, 0, 0]);
    assert_eq!(lost(ReactorEvent::BufferLost(10)), [1, 0, 201, 0]);
    assert_eq!(lost(ReactorEvent::PeerLost(10)), [0, 0, 0, 0]);
    assert_eq!(lost(ReactorEvent::Lost(3)), [0, 0, 0, 301]);
}

#[test]
fn the_background_leads_while_no_caller_does() {
    let bed = Bed::new(true);
    bed.eventually(|bed| bed.leads(BACKGROUND));
    for n in 1..=3 {
        bed.source.post(ReactorEvent::Arrived(7));
        bed.eventually(|bed| bed.heard() == n);
    }
}

#[test]
fn without_peers_nothing_is_polled_until_there_are_some() {
    let bed = Bed::new(false);
    bed.eventually(|bed| bed.source.polls_of_others() > 0);
    thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    bed.source.polls_of_others();
    thread::sleep(Duration::from_millis(200));
    let polls = bed.source.polls_of_others() as u64;
    // A recheck polls once.
    assert!(polls <= 1 + start.elapsed().as_secs(), "idle but busy: {polls} polls");
    assert!(!bed.leads(BACKGROUND));
    bed.source.peers.store(true, Ordering::SeqCst);
    bed.reactor.on_peer_added();
    bed.eventually(|bed| bed.leads(BACKGROUND));
}

#[test]
fn a_caller_that_sleeps_gets_the_lead_and_the_background_takes_it_back() {
    let bed = Bed::new(true);
    bed.eventually(|bed| bed.leads(BACKGROUND));
    let caller = bed.sleeping_caller();
    bed.eventually(|bed| bed.leads(CALLER));
    // Long enough for the background thread to find the same leader several times, and to park.
    thread::sleep(Duration::from_millis(150));
    assert!(bed.leads(CALLER));
    bed.source.post(ReactorEvent::Arrived(7));
    assert!(caller.join().unwrap(), "woken by its own event");
    bed.eventually(|bed| bed.leads(BACKGROUND));
}

#[test]
fn the_background_leads_for_sleepers_whom_the_source_does_not_wake() {
    let bed = Bed::on(Fake::with(false, false));
    thread::sleep(Duration::from_millis(20));
    assert!(!bed.leads(BACKGROUND), "nobody sleeps");
    bed.reactor.add_unwatched();
    bed.eventually(|bed| bed.leads(BACKGROUND));
    bed.source.post(ReactorEvent::Arrived(7));
    bed.eventually(|bed| bed.heard() == 1);
    let caller = bed.sleeping_caller();
    bed.eventually(|bed| bed.leads(CALLER));
    bed.source.post(ReactorEvent::Arrived(7));
    assert!(caller.join().unwrap(), "woken by its own event");
    bed.eventually(|bed| bed.leads(BACKGROUND));
    // The background thread notices within a second the end of the last such sleep.
    bed.reactor.remove_unwatched();
    thread::sleep(2 * wait::RECHECK_INTERVAL);
    bed.eventually(|bed| bed.leads(FREE));
}

#[test]
fn an_event_before_a_sleep_ends_it_at_once() {
    let bed = Bed::new(false);
    let count = bed.member.waiter.wake_count();
    bed.source.post(ReactorEvent::Arrived(7));
    let start = Instant::now();
    bed.reactor.sleep(&bed.member.waiter, count, Some((start, TIMEOUT)), None);
    assert!(start.elapsed() < TIMEOUT / 2);
    assert_eq!(bed.heard(), 1);
}

#[test]
fn a_sleep_without_end_is_ended_by_a_recheck() {
    let start = Instant::now();
    let bed = Bed::new(true);
    bed.member.awaited.store(true, Ordering::SeqCst);
    let waiter = Arc::new(Waiter::default());
    thread::scope(|scope| {
        scope.spawn(|| {
            bed.eventually(|bed| bed.member.rechecks.load(Ordering::SeqCst) > 1);
            bed.reactor.wake(&waiter);
        });
        bed.reactor.sleep(&waiter, waiter.wake_count(), None, None);
    });
    assert!(start.elapsed() > wait::RECHECK_INTERVAL, "{:?}", start.elapsed());
}

#[test]
fn an_event_before_another_thread_armed_the_source_is_seen_before_the_sleep() {
    let (source, member) = (Fake::new(true), Arc::new(Counting::default()));
    let reactor = Reactor::new(source.clone()).unwrap();
    reactor.register(key(7), Arc::downgrade(&member));
    source.armed.store(true, Ordering::SeqCst);
    lock(&source.events).push_back(ReactorEvent::Arrived(7));
    let start = Instant::now();
    reactor.sleep(&member.waiter, member.waiter.wake_count(), Some((start, TIMEOUT)), None);
    assert!(start.elapsed() < TIMEOUT / 2);
    assert_eq!(member.heard.load(Ordering::SeqCst), 1);
}

#[test]
fn a_sleep_that_is_disturbed_ends_at_its_limit() {
    // Without a background thread, whose end of the lead would wake this one.
    let reactor = Reactor::<Counting>::new(Fake::new(false)).unwrap();
    let waiter = Arc::new(Waiter::default());
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                reactor.interrupt.signal();
                thread::sleep(Duration::from_millis(20));
            }
        });
        let (start, limit) = (Instant::now(), Duration::from_millis(200));
        reactor.sleep(&waiter, waiter.wake_count(), Some((start, limit)), None);
        let took = start.elapsed();
        over.store(true, Ordering::SeqCst);
        assert!(took >= limit && took < TIMEOUT, "{took:?}");
    });
}

#[test]
fn callers_that_poll_are_left_alone() {
    let source = Fake::new(true);
    let reactor = Reactor::<Counting>::new(source.clone()).unwrap();
    let mut callers = background::Activity::unknown();
    // The background thread's action after a pause with or without a poll by a caller.
    let mut stand_by = |polled| {
        if polled {
            reactor.poll();
        }
        lock(&source.polls).clear();
        let due = background::Schedule::starting(Instant::now());
        reactor.stand_by(&mut callers, reactor.background.wake_count(), &due);
        (lock(&source.polls).is_empty(), callers.takeover.as_millis())
    };
    assert_eq!(stand_by(false), (false, 5), "it leads while nobody polls");
    let left_alone = [(); 6].map(|()| stand_by(true));
    assert_eq!(left_alone, [10, 20, 40, 80, 100, 100].map(|takeover| (true, takeover)));
    assert_eq!(stand_by(false), (false, 5));
}

#[test]
fn a_caller_that_polls_gets_events_from_a_background_that_leads() {
    let bed = Bed::new(true);
    bed.eventually(|bed| bed.leads(BACKGROUND));
    bed.source.post(ReactorEvent::Arrived(7));
    bed.eventually(|bed| {
        bed.reactor.poll();
        bed.heard() == 1
    });
}

#[test]
fn timers_and_updates_wake_the_background_thread_while_it_leads() {
    let bed = Bed::new(true);
    bed.eventually(|bed| bed.leads(BACKGROUND));
    thread::sleep(Duration::from_millis(20));
    let before = bed.source.timers.load(Ordering::SeqCst);
    bed.source.post(ReactorEvent::Timers);
    bed.eventually(|bed| bed.source.timers.load(Ordering::SeqCst) > before);
    // A thread not woken sends the update at its next recheck, and after it. A woken thread does so
    // before, unless without a processor for that long.
    let rechecks = || bed.member.rechecks.load(Ordering::SeqCst);
    let woken = (0..5).any(|_| {
        thread::sleep(Duration::from_millis(20));
        let (heard, seen) = (bed.heard(), rechecks());
        bed.reactor.schedule_update(7);
        bed.eventually(|bed| bed.heard() > heard);
        let woken = rechecks() == seen;
        bed.eventually(|bed| bed.reactor.work.would_wake(Work::UPDATES));
        woken
    });
    assert!(woken);
}

#[test]
fn updates_are_delayed_for_longer_where_applications_send_them_in_time() {
    let reactor = Reactor::new(Fake::new(false)).unwrap();
    let connection = Arc::new(Counting::default());
    reactor.register(key(7), Arc::downgrade(&connection));
    let mut now = Instant::now();
    let mut schedule = background::Schedule::starting(now);
    let mut delay_after = |sends, passed| {
        connection.sends.store(sends, Ordering::SeqCst);
        reactor.schedule_update(7);
        now += passed;
        reactor.flush_updates(&mut schedule, now);
        schedule.update_delay.as_millis()
    };
    let soon = Duration::from_millis(1);
    let in_time = [(); 5].map(|()| delay_after(false, soon));
    assert_eq!(in_time, [30, 60, 120, 120, 120]);
    // The application did not send an update in time.
    assert_eq!(delay_after(true, soon), 15);
    assert_eq!([(); 2].map(|()| delay_after(false, soon)), [30, 60]);
    assert_eq!(connection.heard.load(Ordering::SeqCst), 800);
    // No read for a long time.
    for (passed, delay) in [(background::LINGER / 2, 60), (background::LINGER / 2, 15)] {
        now += passed;
        reactor.flush_updates(&mut schedule, now);
        assert_eq!(schedule.update_delay.as_millis(), delay);
    }
}
