// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The time for a connection to stay on TCP before the return to a ring.

use core::time::Duration;

use crate::time::Tick;

/// The earliest time for a client's proposal of a new ring: a second after leaving a ring, then two,
/// then four, up to 64. A ring lasting as long as the last wait resets the wait to a second. So a
/// flapping device costs its connections less and less. Refusals have pauses of their own, growing in
/// the same way. Such a pause ends when there is a reason to try again ([`BackOff::retry`]); the wait
/// after leaving does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackOff {
    /// The last wait after leaving a ring.
    wait: Duration,
    /// End of this wait.
    until: Tick,
    /// When the ring came into use.
    ring_since: Option<Tick>,
    /// The last refusal since leaving, or the last reason to try again.
    refused: Option<Tick>,
    /// The pause after the refusal.
    pause: Duration,
}

impl BackOff {
    /// Shortest wait.
    pub const SHORTEST: Duration = Duration::from_secs(1);
    /// Longest wait.
    pub const LONGEST: Duration = Duration::from_secs(64);

    /// A connection put on a ring by its handshake at `now`.
    pub const fn new(now: Tick) -> BackOff {
        BackOff {
            wait: Duration::ZERO,
            until: now,
            ring_since: Some(now),
            refused: None,
            pause: Duration::ZERO,
        }
    }

    /// The connection has left its ring, or a new one was refused. Returns when the wait ends.
    pub fn on_tcp(&mut self, now: Tick) -> Tick {
        let grown = |last: Duration| (last * 2).clamp(BackOff::SHORTEST, BackOff::LONGEST);
        match self.ring_since.take() {
            Some(since) => {
                let lasted = since.after(self.wait) <= now;
                self.wait = if lasted { BackOff::SHORTEST } else { grown(self.wait) };
                self.until = now.after(self.wait);
                (self.refused, self.pause) = (None, Duration::ZERO);
            }
            None => (self.refused, self.pause) = (Some(now), grown(self.pause)),
        }
        self.end()
    }

    /// When the wait after leaving and the pause after a refusal have both ended.
    fn end(&self) -> Tick {
        self.refused.map_or(self.until, |refused| refused.after(self.pause).max(self.until))
    }

    /// Ends a pause after a refusal: the own device has been opened anew, perhaps on another
    /// machine, or the peer may have a device again.
    pub fn retry(&mut self, now: Tick) {
        if self.refused.is_some() {
            (self.refused, self.pause) = (Some(now), Duration::ZERO);
        }
    }

    /// The connection is on a ring again.
    pub fn on_ring(&mut self, now: Tick) {
        self.ring_since = Some(now);
        self.refused = None;
    }

    /// When the ring came into use; `None`: the connection is on TCP.
    pub const fn ring_since(&self) -> Option<Tick> {
        self.ring_since
    }

    /// The beginning of a pause after a refusal, or the time of [`BackOff::retry`].
    pub fn refused_at(&self) -> Option<Tick> {
        self.refused
    }

    /// Whether a ring may be proposed.
    pub fn may_return(&self, now: Tick) -> bool {
        self.ring_since.is_none() && self.end().has_passed(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(n: u64) -> Tick {
        Tick(n * 1_000_000)
    }

    #[test]
    fn waits_double_while_the_device_flaps() {
        let mut back_off = BackOff::new(second(0));
        assert!(!back_off.may_return(second(9)), "on a ring");
        let mut now = 10;
        for wait in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert_eq!(back_off.on_tcp(second(now)), second(now + wait));
            assert!(!back_off.may_return(Tick(second(now + wait).0 - 1)));
            now += wait;
            assert!(back_off.may_return(second(now)));
            back_off.on_ring(second(now));
        }
    }

    #[test]
    fn a_ring_that_lasted_starts_anew() {
        let mut back_off = BackOff::new(second(0));
        back_off.on_tcp(second(1));
        assert_eq!(back_off.on_tcp(second(3)), second(4), "refused");
        back_off.on_ring(second(4));
        assert_eq!(back_off.on_tcp(second(6)), second(7), "lasted two seconds");
        back_off.on_ring(second(7));
        assert_eq!(back_off.on_tcp(second(7)), second(9), "did not last one");
    }

    #[test]
    fn a_reason_to_try_again_ends_the_wait_after_a_refusal_and_no_other() {
        let mut back_off = BackOff::new(second(0));
        back_off.on_tcp(second(5));
        back_off.retry(second(5));
        assert_eq!((back_off.ring_since(), back_off.refused_at()), (None, None));
        assert!(!back_off.may_return(second(5)), "it has left a device a moment ago");
        for now in [6, 8, 12] {
            back_off.on_tcp(second(now));
        }
        assert!(!back_off.may_return(second(14)));
        assert_eq!(back_off.refused_at(), Some(second(12)));
        back_off.retry(second(14));
        assert_eq!(back_off.refused_at(), Some(second(14)));
        assert!(back_off.may_return(second(14)));
        assert_eq!(back_off.on_tcp(second(14)), second(15), "refused");
        assert_eq!(back_off.on_tcp(second(15)), second(17), "refused again");
        back_off.on_ring(second(17));
        assert_eq!((back_off.ring_since(), back_off.refused_at()), (Some(second(17)), None));
    }

    #[test]
    fn reasons_to_try_again_do_not_shorten_the_waits_of_a_flapping_device() {
        let (mut back_off, mut now) = (BackOff::new(second(0)), 10);
        for wait in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert_eq!(back_off.on_tcp(second(now)), second(now + wait));
            // Each daemon in between is a reason to try again, and ends before the ring begins.
            for _ in 0..5 {
                assert!(!back_off.may_return(Tick(second(now + wait).0 - 1)));
                back_off.on_tcp(second(now));
                back_off.retry(second(now));
            }
            now += wait;
            assert!(back_off.may_return(second(now)));
            back_off.on_ring(second(now));
        }
    }
}
