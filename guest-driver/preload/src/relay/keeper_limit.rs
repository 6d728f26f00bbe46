// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The time for which a keeper waits for the peers, and its end.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use guest_driver::interpose::StackUpkeep;

use super::flow::Relay;
use super::list;
use crate::sys::{raw, watchdog};
use crate::{config, status};

/// Limit of a turn of the keeper's thread; the keeper ends after the limit. No turn waits for a peer.
const TURN: Duration = Duration::from_secs(60);
/// Interval of the checks for progress of the peers.
const LOOK: Duration = Duration::from_secs(1);

/// Limit for a keeper to wait for peers without progress.
fn limit() -> Duration {
    config::get().map_or(TURN, |config| config.keeper)
}

/// Limit of one turn.
pub(super) fn turn() -> Duration {
    limit().clamp(LOOK * 2, TURN)
}

/// Progress of the peers with the keeper's bytes. TCP gives a closed connection up if the peer reads
/// nothing; likewise a keeper ends if none of its peers makes progress.
pub(super) struct KeeperLimit {
    /// Connections and bytes left at the last check, and the counter of the relays' progress.
    seen: (usize, u64, u32),
    /// Duration without progress.
    idle: Duration,
    last: Instant,
}

impl KeeperLimit {
    pub(super) fn new() -> KeeperLimit {
        KeeperLimit { seen: Default::default(), idle: Duration::ZERO, last: Instant::now() }
    }

    /// Checks once a second, and ends the process after too long a wait.
    pub(super) fn look(&mut self, upkeep: &StackUpkeep) {
        let passed = self.last.elapsed();
        if passed < LOOK {
            return;
        }
        self.last = Instant::now();
        // The process may have been stopped for longer, unable to send.
        self.idle += passed.min(2 * LOOK);
        watchdog::restart(turn());
        let relays = list::lock();
        let is_used = relays.list.iter().any(|relay| !relay.is_closed());
        let relayed: u64 = relays.list.iter().map(Relay::unsent).sum();
        drop(relays);
        let (connections, bytes) = upkeep.undelivered();
        let seen = (connections, bytes + relayed, list::progress());
        if is_used || seen != self.seen {
            (self.seen, self.idle) = (seen, Duration::ZERO);
        }
        if self.idle < limit() {
            return;
        }
        status::keeper_gives_up(connections, bytes + relayed, self.idle);
        for relay in &mut list::lock().list {
            relay.fail();
            relay.end();
        }
        upkeep.reset_undelivered();
        end(1);
    }
}

/// Ends the keeper.
pub(super) fn end(status: c_int) -> ! {
    loop {
        let _ = raw::exit_group(status);
    }
}
