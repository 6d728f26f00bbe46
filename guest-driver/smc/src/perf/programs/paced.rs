// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One connection, messages to and fro at a given rate, on an absolute schedule.
//!
//! The due time of a message does not depend on earlier answers. If the thread still waits for an
//! answer at the due time, the message counts from the due time, and not from the time of sending.
//! Otherwise a stalling stack would get fewer messages (coordinated omission). If the thread was
//! asleep, the message counts from the wake-up by the timer: the timer is not under test.

use std::io::{self, Read as _, Write as _};
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use super::round_trip::LatencyHistogram;
use super::{Schedule, end, measured};
use crate::perf::job::{EndReport, Job};
use crate::perf::usage::Meter;
use crate::transport::{Stream, Transport};

/// When messages are due.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    first: Instant,
    per_second: f64,
}

impl Pace {
    pub(super) fn from(first: Instant, per_second: u32) -> Pace {
        Pace { first, per_second: f64::from(per_second.max(1)) }
    }

    /// The time of the message with this number.
    fn due(&self, number: u64) -> Instant {
        self.first + Duration::from_secs_f64(number as f64 / self.per_second)
    }

    /// How many messages are due at a time.
    pub(super) fn due_at(&self, now: Instant) -> u64 {
        (now.saturating_duration_since(self.first).as_secs_f64() * self.per_second) as u64
    }
}

/// The start time of a message due at `due`: the thread is free at `now`, and `wait` sleeps and
/// returns the time of the wake-up.
fn counts_from(due: Instant, now: Instant, wait: impl FnOnce(Duration) -> Instant) -> Instant {
    match due.checked_duration_since(now) {
        Some(left) if !left.is_zero() => wait(left),
        _ => due,
    }
}

pub(super) fn drive<T: Transport>(transport: &T, job: &Job) -> io::Result<EndReport> {
    // Timers are exact to a microsecond and not to fifty.
    rustix::thread::set_current_timer_slack(NonZeroU64::new(1000))?;
    let mut stream = transport.connect(&job.address)?;
    stream.send_at_once()?;
    let mut message = vec![0x5a; job.size];
    let mut times = LatencyHistogram::new()?;
    let schedule = Schedule::from_now(job);
    let pace = Pace::from(Instant::now(), job.rate);
    let mut meter = None;
    for number in 0.. {
        let due = pace.due(number);
        if due >= schedule.start && times.is_empty() && meter.is_none() {
            meter = Meter::start(job.others);
        }
        let start = counts_from(due, Instant::now(), |left| {
            std::thread::sleep(left);
            Instant::now()
        });
        stream.write_all(&message)?;
        stream.read_exact(&mut message)?;
        if due >= schedule.start {
            times.record(start.elapsed());
        }
        if due >= schedule.end {
            break;
        }
    }
    let usage = meter.and_then(|meter| meter.stop(times.len()));
    end(stream);
    Ok(measured(times.outcome(), usage))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_due_at_times_that_do_not_depend_on_the_past() {
        let first = Instant::now();
        let pace = Pace::from(first, 1000);
        assert_eq!(pace.due(0), first);
        assert_eq!(pace.due(250), first + Duration::from_millis(250));
        assert_eq!(pace.due_at(first + Duration::from_micros(250_500)), 250);
        assert_eq!(pace.due_at(first), 0);
    }

    #[test]
    fn a_late_message_counts_from_when_it_was_due_and_a_late_timer_is_forgiven() {
        let due = Instant::now();
        let ms = Duration::from_millis;
        // The answer before came 7 ms after this message was due.
        assert_eq!(counts_from(due, due + ms(7), |_| unreachable!()), due);
        assert_eq!(counts_from(due, due, |_| unreachable!()), due);
        // The timer of 3 ms came 2 ms late.
        let before = due.checked_sub(ms(3)).unwrap();
        let woke = counts_from(due, before, |left| {
            assert_eq!(left, ms(3));
            due + ms(2)
        });
        assert_eq!(woke, due + ms(2));
    }
}
