// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A process's memory of its servers: whether they answer TCP option 254, and whether they decline
//! Proposals.
//!
//! A server without an answer the last time is plain: its clients do nothing that pays only for
//! SMC. They ask again, but do not delay TCP's acknowledgements. After many missing answers in a
//! row the clients ask only now and then, since each question takes two system calls.
//!
//! A server forking a short-lived process for each client declines nearly all Proposals
//! (`short_lived`). A server with more processes than devices always declines some. Each Decline
//! costs the client a round trip. So after several in a row the client stops proposing to that
//! server for a while.
//!
//! [`worthwhile`](super::worthwhile) remembers, in memory shared by processes, the gain of SMC and
//! the servers that answered a Proposal by anything but the handshake.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::selection::circuit_breaker::CircuitBreaker;

/// After so many missing answers in a row clients ask only now and then.
const IN_A_ROW: u32 = 16;
/// Minimum time between two such questions, in microseconds. A server beginning to answer is found
/// so much later.
const PAUSE: u64 = 100_000;

/// The answers of one server. The words are independent of each other: all are only a guess whether
/// SMC is worthwhile. There is no lock that a forked child could find held.
struct ServerEntry {
    /// A hash of the server's address, never 0. An entry with 0 is unused.
    hash: AtomicU64,
    /// Number of missing answers since the last answer.
    unanswered: AtomicU32,
    /// Time of the last question without an answer, on the monotonic clock in microseconds.
    asked: AtomicU64,
    /// The server's Declines for lack of a device.
    declines: CircuitBreaker,
}

impl ServerEntry {
    const fn unused() -> ServerEntry {
        ServerEntry {
            hash: AtomicU64::new(0),
            unanswered: AtomicU32::new(0),
            asked: AtomicU64::new(0),
            declines: CircuitBreaker::new(),
        }
    }
}

/// A table without chains. Two servers with the same entry overwrite each other, at the cost of a
/// few microseconds or a Decline for the next client of either.
static SERVERS: [ServerEntry; 64] = [const { ServerEntry::unused() }; 64];

/// Whether any server has ever declined.
static ANY_DECLINED: AtomicBool = AtomicBool::new(false);

/// Whether any server has ever declined.
pub(super) fn has_any_declined() -> bool {
    ANY_DECLINED.load(Ordering::Relaxed)
}

/// A server, and where its answers are kept. All times are on the monotonic clock in microseconds.
#[derive(Clone, Copy)]
pub(super) struct ServerRecord {
    entry: &'static ServerEntry,
    hash: u64,
}

/// The record of a server.
pub(super) fn record(server: &SocketAddr) -> ServerRecord {
    let mut hasher = DefaultHasher::new();
    server.hash(&mut hasher);
    let hash = hasher.finish() | 1;
    ServerRecord { entry: &SERVERS[(hash >> 32) as usize % SERVERS.len()], hash }
}

impl ServerRecord {
    /// Whether the entry is this server's.
    fn is_known(self) -> bool {
        self.entry.hash.load(Ordering::Relaxed) == self.hash
    }

    /// Makes the entry this server's.
    fn claim(self) {
        if self.entry.hash.swap(self.hash, Ordering::Relaxed) != self.hash {
            self.entry.unanswered.store(0, Ordering::Relaxed);
            self.entry.declines.succeeded();
        }
    }

    /// Whether the server did not answer the last time.
    pub(super) fn is_plain(self) -> bool {
        self.is_known() && self.entry.unanswered.load(Ordering::Relaxed) > 0
    }

    /// Whether a client had better not ask the server at the time of `now`, because an answer is
    /// unlikely.
    pub(super) fn is_paused(self, now: impl FnOnce() -> u64) -> bool {
        self.is_known()
            && self.entry.unanswered.load(Ordering::Relaxed) >= IN_A_ROW
            && now().saturating_sub(self.entry.asked.load(Ordering::Relaxed)) < PAUSE
    }

    /// Stores whether the server has answered an asking client.
    pub(super) fn note_answer(self, answers: bool, now: impl FnOnce() -> u64) {
        if !answers {
            self.entry.asked.store(now(), Ordering::Relaxed);
            self.claim();
            // Does not wrap: above the threshold the next question is a pause away.
            self.entry.unanswered.fetch_add(1, Ordering::Relaxed);
        } else if self.is_known() {
            self.entry.unanswered.store(0, Ordering::Relaxed);
        }
    }

    /// Whether the server would probably decline a Proposal at the time of `now`.
    pub(super) fn is_declining(self, now: impl FnOnce() -> u64) -> bool {
        self.is_known() && !self.entry.declines.allows(now())
    }

    /// Stores a Decline of the server for lack of a device.
    pub(super) fn note_decline(self, now: u64) {
        ANY_DECLINED.store(true, Ordering::Relaxed);
        self.claim();
        self.entry.declines.failed(now);
    }

    /// Stores an accepted Proposal.
    pub(super) fn note_accept(self) {
        if self.is_known() {
            self.entry.declines.succeeded();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An event at a server.
    #[derive(Clone, Copy)]
    enum Event {
        Answer,
        NoAnswer(u32),
        Decline(u32),
        Accept,
        /// Microseconds pass.
        Pause(u64),
        /// Another server takes the entry, by a Decline or for want of an answer.
        Other(bool),
    }

    /// The choices of a client by the record: plain, paused, declining.
    type State = (bool, bool, bool);

    const NEW: State = (false, false, false);
    const PLAIN: State = (true, false, false);
    const PAUSED: State = (true, true, false);
    const DECLINES: State = (false, false, true);
    const BOTH: State = (true, true, true);

    /// A server in an entry of this test only, and another one in the same entry.
    fn servers() -> [ServerRecord; 2] {
        let entry = Box::leak(Box::new(ServerEntry::unused()));
        [7, 9].map(|hash| ServerRecord { entry, hash })
    }

    fn after(events: &[Event]) -> State {
        let [server, other] = servers();
        let mut now = 5_000_000;
        for event in events {
            match *event {
                Event::Answer => server.note_answer(true, || now),
                Event::NoAnswer(times) => {
                    (0..times).for_each(|_| server.note_answer(false, || now));
                }
                Event::Decline(times) => (0..times).for_each(|_| server.note_decline(now)),
                Event::Accept => server.note_accept(),
                Event::Pause(micros) => now += micros,
                Event::Other(declines) if declines => other.note_decline(now),
                Event::Other(_) => other.note_answer(false, || now),
            }
        }
        (server.is_plain(), server.is_paused(|| now), server.is_declining(|| now))
    }

    #[test]
    fn each_event_makes_the_listed_state_of_each_state() {
        use Event::{Accept, Answer, Decline, NoAnswer, Other, Pause};
        // A little more than a second ends the memory of Declines, and the pause as well.
        let (pause, second) = (Pause(PAUSE), Pause(1_000_001));
        let ways: [(&[Event], State); 5] = [
            (&[], NEW),
            (&[NoAnswer(1)], PLAIN),
            (&[NoAnswer(IN_A_ROW)], PAUSED),
            (&[Decline(4)], DECLINES),
            (&[NoAnswer(IN_A_ROW), Decline(4)], BOTH),
        ];
        let events = [
            Answer,
            NoAnswer(1),
            Decline(1),
            Accept,
            Pause(PAUSE - 1),
            pause,
            second,
            Other(true),
            Other(false),
        ];
        let table: [[State; 9]; 5] = [
            [NEW, PLAIN, NEW, NEW, NEW, NEW, NEW, NEW, NEW],
            [NEW, PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, NEW, NEW],
            [NEW, PAUSED, PAUSED, PAUSED, PAUSED, PLAIN, PLAIN, NEW, NEW],
            [DECLINES, (true, false, true), DECLINES, NEW, DECLINES, DECLINES, NEW, NEW, NEW],
            [DECLINES, BOTH, BOTH, PAUSED, BOTH, (true, false, true), PLAIN, NEW, NEW],
        ];
        for ((way, state), row) in ways.iter().zip(table) {
            assert_eq!(after(way), *state);
            for (at, (event, expected)) in events.iter().zip(row).enumerate() {
                let found = after(&[way, &[*event][..]].concat());
                assert_eq!(found, expected, "of {state:?} by event {at}");
            }
        }
    }

    #[test]
    fn fewer_events_than_the_thresholds_change_nothing_of_the_choice() {
        assert_eq!(after(&[Event::NoAnswer(IN_A_ROW - 1)]), PLAIN);
        assert_eq!(after(&[Event::Decline(3)]), NEW);
        assert_eq!(after(&[Event::Decline(3), Event::Accept, Event::Decline(3)]), NEW);
        let again = [Event::NoAnswer(IN_A_ROW), Event::Pause(PAUSE), Event::NoAnswer(1)];
        assert_eq!(after(&again), PAUSED, "a server that never answers is asked once in a pause");
    }

    #[test]
    fn servers_are_told_apart_by_address_and_port() {
        let [one, port, host] = ["192.0.2.1:5", "192.0.2.1:6", "192.0.2.2:5"]
            .map(|text| text.parse::<SocketAddr>().map(|server| record(&server)).unwrap());
        (0..4).for_each(|_| one.note_decline(1));
        assert!(one.is_declining(|| 2) && has_any_declined());
        assert!(!port.is_declining(|| 2) && !host.is_declining(|| 2));
        one.note_accept();
        assert!(!one.is_declining(|| 2));
    }
}
