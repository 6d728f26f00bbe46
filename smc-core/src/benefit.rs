// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Decides whether SMC pays for the connections of one endpoint: a server seen from its clients, or
//! a listener. Input: ended connections. Output: a choice for the next one.
//!
//! SMC costs more than TCP when a connection begins, and less for each byte and each round trip. A
//! [`CostModel`] has the three numbers. The gain of a connection is a sum, so the mean gain shows
//! whether all connections together gain more than their set-up costs. An [`Estimate`] keeps the
//! mean as a moving average, in units of the set-up cost: above 1 SMC pays.
//!
//! - The first connections are on SMC, and after [`LEARNED`] of them the estimate may say TCP.
//! - Of [`SAMPLE_INTERVAL`] connections left to TCP, one is a sample: its traffic is observed, on
//!   TCP, too. The sample's gain, as computed for SMC, replaces the estimate.
//! - A process without a device leaves connections to TCP, too, until their gains add up to the cost of
//!   opening a device ([`GainsOnSmc`]). So a process pays at most twice as much as with knowledge of
//!   its later connections.
//! - A single sample below [`RETURN`] does not change the choice, so the choice does not swing when
//!   SMC and TCP are about equal.
//!
//! An estimate is one word, so processes can share an estimate without a lock. Every word is valid,
//! because any of the processes may have stored any number.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

/// Number of ended connections after which an estimate may say TCP.
pub const LEARNED: u32 = 8;
/// One of so many connections on TCP is observed.
pub const SAMPLE_INTERVAL: u32 = 64;
/// A connection of this lifetime always pays: the extra cost of its set-up is less than a ten
/// thousandth of its life.
pub const LONG_LIVED: Duration = Duration::from_secs(10);
/// How many times the set-up cost a single connection must gain for a return to SMC.
pub const RETURN: u32 = 2;

/// How many times the set-up cost of a connection a process pays to open a device.
pub const OPENING: u32 = 12;
/// Where connections last longer on average, a process opens its device for the first: the wait is less
/// than a hundredth of the connection's life.
pub const WORTH_A_WAIT: Duration = Duration::from_millis(300);

/// Binary digits of a gain behind the point.
const FRACTION: u32 = 16;
/// The gain equal to the cost of a set-up.
const ONE: u32 = 1 << FRACTION;
/// Maximum gain of a connection, so a single large one is forgotten after about twenty small ones.
const MAX_GAIN: u32 = 16 * ONE;

/// Traffic and lifetime of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Bytes of both directions.
    pub bytes: u64,
    /// How often both ends have written in turn, at most.
    pub round_trips: u64,
    /// From the end of the handshake to the close.
    pub lifetime: Duration,
}

/// Costs and gains of SMC compared with TCP, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostModel {
    /// Cost of the set-up and the end of a connection.
    pub setup: u64,
    /// Gain of a round trip.
    pub round_trip: u64,
    /// Gain of 1,024 bytes.
    pub kibibyte: u64,
}

/// The gain of a connection, in units of its set-up cost: a fixed-point number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gain(u32);

/// The gains of SMC that a process without a device has left to TCP so far.
#[derive(Debug, Default)]
pub struct GainsOnSmc(AtomicU32);

impl GainsOnSmc {
    /// A process without connections so far.
    pub const fn new() -> GainsOnSmc {
        GainsOnSmc(AtomicU32::new(0))
    }

    /// Adds the next connection. `true`: the gains are worth a device.
    fn add(&self, gain: Gain) -> bool {
        let with = |sum: u32| sum.saturating_add(gain.0);
        // Relaxed: a sum of guesses, which orders nothing.
        let before =
            self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |sum| Some(with(sum)));
        with(before.unwrap_or(0)) >= Gain::times(OPENING).0
    }
}

/// The carrier of the next connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// SMC, if the peer agrees.
    Smc,
    /// TCP.
    Tcp,
    /// TCP, with the connection's traffic to be observed.
    Sample,
}

/// The knowledge about the connections of one endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Moving average of gains.
    mean: Gain,
    /// Ended connections, [`LEARNED`] at most.
    ended: u32,
    /// Whether connections stay on TCP.
    on_tcp: bool,
    /// Connections that stayed on TCP since the last sample.
    skipped: u32,
}

impl CostModel {
    /// Two processes of one host, under `smc run`. The sources of the numbers are in
    /// docs/performance.md.
    pub const HOST: CostModel = CostModel { setup: 180_000, round_trip: 8_000, kibibyte: 410 };
    /// Two virtual machines, whose round trips take longer.
    pub const GUEST: CostModel = CostModel { setup: 600_000, round_trip: 285_000, kibibyte: 6_000 };

    /// The gain of a connection.
    pub fn gain(&self, seen: &Observation) -> Gain {
        let of_bytes = u128::from(seen.bytes) * u128::from(self.kibibyte) / 1024;
        let of_trips = u128::from(seen.round_trips) * u128::from(self.round_trip);
        // 64 bits are more than five hundred years, and leave room for the fraction.
        let nanoseconds = of_bytes.saturating_add(of_trips).min(u128::from(u64::MAX));
        let gain = (nanoseconds << FRACTION) / u128::from(self.setup.max(1));
        let gain = Gain(u32::try_from(gain).unwrap_or(MAX_GAIN).min(MAX_GAIN));
        match seen.lifetime >= LONG_LIVED {
            true => gain.max(Gain::times(RETURN)),
            false => gain,
        }
    }
}

impl Gain {
    /// So many times the set-up cost.
    fn times(n: u32) -> Gain {
        Gain(n * ONE)
    }

    /// Converts to thousandths of the set-up cost.
    pub fn thousandths(self) -> u32 {
        (u64::from(self.0) * 1000 / u64::from(ONE)) as u32
    }

    /// The average after another value with a weight of one in `weight`.
    fn averaged(self, next: Gain, weight: u32) -> Gain {
        let weight = weight.max(1);
        Gain(match next.0 >= self.0 {
            true => self.0 + (next.0 - self.0) / weight,
            false => self.0 - (self.0 - next.0) / weight,
        })
    }
}

impl Estimate {
    /// Bits of the fields of a word.
    const MEAN_BITS: u32 = 21;
    const ENDED_BITS: u32 = 4;
    const SKIPPED_BITS: u32 = 6;

    /// The estimate in a word.
    pub fn from_bits(word: u64) -> Estimate {
        let field = |at: u32, bits: u32| ((word >> at) as u32) & ((1 << bits) - 1);
        let mean = field(0, Estimate::MEAN_BITS);
        let ended = field(Estimate::MEAN_BITS, Estimate::ENDED_BITS);
        let at = Estimate::MEAN_BITS + Estimate::ENDED_BITS;
        let on_tcp = field(at, 1) == 1;
        Estimate {
            mean: Gain(mean.min(MAX_GAIN)),
            ended: if on_tcp { LEARNED } else { ended.min(LEARNED) },
            on_tcp,
            skipped: field(at + 1, Estimate::SKIPPED_BITS),
        }
    }

    /// The estimate as a word. A word of 0 knows nothing.
    pub fn to_bits(self) -> u64 {
        let at = Estimate::MEAN_BITS + Estimate::ENDED_BITS;
        u64::from(self.mean.0)
            | u64::from(self.ended) << Estimate::MEAN_BITS
            | u64::from(self.on_tcp) << at
            | u64::from(self.skipped) << (at + 1)
    }

    /// Whether a process without a device leaves the next connection to TCP. `lifetime`: the mean of the
    /// connections so far.
    pub fn is_below_opening(&self, lifetime: Duration, missed: &GainsOnSmc) -> bool {
        self.has_learned() && lifetime < WORTH_A_WAIT && !missed.add(self.mean)
    }

    /// The carrier of the next connection, and the new estimate. `without_device`: the connection stays
    /// on TCP in any case.
    #[must_use = "the estimate counts the connection"]
    pub fn choose(self, without_device: bool) -> (Choice, Estimate) {
        if !self.on_tcp && !without_device {
            return (Choice::Smc, self);
        }
        match self.skipped + 1 {
            SAMPLE_INTERVAL => (Choice::Sample, Estimate { skipped: 0, ..self }),
            skipped => (Choice::Tcp, Estimate { skipped, ..self }),
        }
    }

    /// The estimate after the end of a connection on SMC, or of a sample.
    #[must_use = "the old estimate does not know of the connection"]
    pub fn ended(self, gain: Gain) -> Estimate {
        if self.on_tcp {
            let on_tcp = gain < Gain::times(RETURN);
            return Estimate { mean: gain, on_tcp, ..self };
        }
        let ended = (self.ended + 1).min(LEARNED);
        let mean = self.mean.averaged(gain, ended);
        let on_tcp = ended == LEARNED && mean.0 < ONE;
        Estimate { mean, ended, on_tcp, skipped: 0 }
    }

    /// Whether connections stay on TCP.
    pub fn is_on_tcp(&self) -> bool {
        self.on_tcp
    }

    /// Whether enough connections have ended for a choice.
    pub fn has_learned(&self) -> bool {
        self.ended >= LEARNED
    }

    /// Moving average of the gains of connections.
    pub fn mean(&self) -> Gain {
        self.mean
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHORT: Gain = Gain(ONE / 50);

    fn seen(bytes: u64, round_trips: u64, millis: u64) -> Observation {
        Observation { bytes, round_trips, lifetime: Duration::from_millis(millis) }
    }

    fn after(start: Estimate, gains: impl IntoIterator<Item = Gain>) -> Estimate {
        gains.into_iter().fold(start, Estimate::ended)
    }

    fn on_tcp() -> Estimate {
        after(Estimate::default(), [SHORT; LEARNED as usize])
    }

    /// Traffic patterns, with their gains in thousandths of the set-up cost between processes and
    /// between machines.
    #[test]
    fn programs_and_whether_smc_pays_for_them() {
        let table = [
            ("nothing", seen(0, 0, 1), 0, 0),
            ("a web page, a connection each", seen(1 << 10, 1, 1), 46, 485),
            ("a file of 64 KiB", seen(64 << 10, 1, 1), 190, 1_115),
            ("a query", seen(600, 3, 5), 134, 1_430),
            ("22 requests without content", seen(0, 22, 3), 977, 10_450),
            ("23 requests without content", seen(0, 23, 3), 1_022, 10_925),
            ("74 requests", seen(74 << 10, 74, 9), 3_457, 16_000),
            ("a file of 256 KiB", seen(256 << 10, 1, 1), 627, 3_035),
            ("a file of 512 KiB", seen(512 << 10, 1, 1), 1_210, 5_595),
            ("a file of 40 MB", seen(40 << 20, 3, 50), 16_000, 16_000),
            ("a pool's connection that idles", seen(200, 2, 9_999), 89, 951),
            ("the same for longer", seen(200, 2, 10_000), 2_000, 2_000),
        ];
        for (what, seen, host, guest) in table {
            let all = [CostModel::HOST, CostModel::GUEST].map(|model| model.gain(&seen));
            // To a thousandth, because of the fractions.
            let near = |gain: Gain, wanted: u32| gain.thousandths().abs_diff(wanted) <= 1;
            assert!(near(all[0], host) && near(all[1], guest), "{what}: {all:?} {seen:?}");
        }
    }

    /// An estimate, a sequence of gains, and whether connections then stay on TCP.
    #[test]
    fn choices_after_ended_connections() {
        let [none, some, much, back] = [0, ONE / 2, 3 * ONE, 2 * ONE].map(Gain);
        let table: [(&str, Estimate, &[Gain], bool); 12] = [
            ("nothing is known", Estimate::default(), &[], false),
            ("seven short ones", Estimate::default(), &[none; 7], false),
            ("eight short ones", Estimate::default(), &[none; 8], true),
            ("eight of half the cost", Estimate::default(), &[some; 8], true),
            ("eight that just pay", Estimate::default(), &[Gain(ONE); 8], false),
            ("eight large ones", Estimate::default(), &[much; 8], false),
            (
                "three of eight pay",
                Estimate::default(),
                &[none, much, none, none, much, none, none, much],
                false,
            ),
            ("a sample that is short", on_tcp(), &[none], true),
            ("a sample that gains a little", on_tcp(), &[Gain(2 * ONE - 1)], true),
            ("a sample that pays", on_tcp(), &[back], false),
            (
                "a sample that pays and five short ones",
                on_tcp(),
                &[back, none, none, none, none, none],
                false,
            ),
            (
                "a sample that pays and six short ones",
                on_tcp(),
                &[back, none, none, none, none, none, none],
                true,
            ),
        ];
        for (what, start, gains, expected) in table {
            let estimate = after(start, gains.iter().copied());
            assert_eq!(estimate.is_on_tcp(), expected, "{what}: {estimate:?}");
        }
    }

    #[test]
    fn one_of_64_that_stay_on_tcp_is_a_sample() {
        let mut estimate = on_tcp();
        for n in 1..=10 * SAMPLE_INTERVAL {
            let (choice, next) = estimate.choose(false);
            let expected = if n % SAMPLE_INTERVAL == 0 { Choice::Sample } else { Choice::Tcp };
            assert_eq!(choice, expected, "{n}");
            estimate = next;
            if choice == Choice::Sample {
                estimate = estimate.ended(SHORT);
            }
        }
    }

    /// Mean gain and lifetime of learned connections, and how many of them stay on TCP before the process
    /// opens its device.
    #[test]
    fn a_process_opens_a_device_when_connections_have_paid_for_it() {
        let millis = Duration::from_millis;
        for (gain, lifetime, expected) in [
            (Gain::times(1), millis(1), 11),
            (Gain::times(5), millis(1), 2),
            (Gain::times(11), millis(299), 1),
            (Gain::times(12), millis(1), 0),
            (Gain(MAX_GAIN), millis(1), 0),
            (Gain::times(2), WORTH_A_WAIT, 0),
        ] {
            let known = after(Estimate::default(), [gain; LEARNED as usize]);
            let missed = GainsOnSmc::new();
            let on_tcp = (0..100).take_while(|_| known.is_below_opening(lifetime, &missed)).count();
            assert_eq!(on_tcp, expected, "{gain:?} {lifetime:?}");
            assert!(!known.is_below_opening(lifetime, &missed), "the device is wanted from now on");
        }
        let learning = after(Estimate::default(), [Gain::times(1); LEARNED as usize - 1]);
        assert!(!learning.is_below_opening(millis(1), &GainsOnSmc::new()));
    }

    #[test]
    fn a_single_large_connection_is_forgotten_after_about_twenty_small_ones() {
        let mut estimate = after(Estimate::default(), [Gain(MAX_GAIN); 8]);
        let mut n = 0;
        while !estimate.is_on_tcp() {
            estimate = estimate.ended(Gain(0));
            n += 1;
        }
        assert_eq!(n, 21);
    }

    /// The largest numbers, and a model without costs.
    #[test]
    fn hostile_numbers_overflow_nothing() {
        let all = [0, 1, u64::MAX / 2, u64::MAX];
        for setup in all {
            for round_trip in all {
                for kibibyte in all {
                    let model = CostModel { setup, round_trip, kibibyte };
                    for n in all {
                        let lifetime = Duration::from_micros(n);
                        let gain = model.gain(&Observation { bytes: n, round_trips: n, lifetime });
                        assert!(gain <= Gain(MAX_GAIN));
                    }
                }
            }
        }
    }

    fn any_estimate() -> impl Strategy<Value = Estimate> {
        any::<u64>().prop_map(Estimate::from_bits)
    }

    fn any_gain() -> impl Strategy<Value = Gain> {
        (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(bytes, round_trips, micros)| {
            let lifetime = Duration::from_micros(micros);
            CostModel::HOST.gain(&Observation { bytes, round_trips, lifetime })
        })
    }

    proptest! {
        #[test]
        fn a_word_keeps_an_estimate(word in any::<u64>(), gain in any_gain()) {
            for estimate in [Estimate::from_bits(word), Estimate::from_bits(word).ended(gain)] {
                prop_assert_eq!(Estimate::from_bits(estimate.to_bits()), estimate);
                prop_assert_eq!(estimate.to_bits() >> 32, 0);
            }
        }

        /// Whatever the state is: of any 64 choices in a row, one or more are observed.
        #[test]
        fn no_64_choices_in_a_row_are_blind(
            start in any_estimate(),
            gains in proptest::collection::vec(proptest::option::of(any_gain()), 300),
            without_device in any::<bool>(),
        ) {
            let (mut estimate, mut in_a_row) = (start, 0);
            for gain in gains {
                let (choice, next) = estimate.choose(without_device);
                estimate = next;
                in_a_row = if choice == Choice::Tcp { in_a_row + 1 } else { 0 };
                prop_assert!(in_a_row < SAMPLE_INTERVAL);
                if let Some(gain) = gain.filter(|_| choice != Choice::Tcp) {
                    estimate = estimate.ended(gain);
                }
            }
        }

        /// After a return to SMC at least five more connections end before the next change.
        #[test]
        fn a_choice_that_has_changed_stays_for_a_while(
            start in any_estimate(),
            gains in proptest::collection::vec(any_gain(), 5),
            back in any_gain(),
        ) {
            let returned = start.ended(back);
            prop_assume!(start.is_on_tcp() && !returned.is_on_tcp());
            prop_assert!(!after(returned, gains).is_on_tcp());
        }

        /// A mean lies between the least and the largest value.
        #[test]
        fn a_mean_stays_between_what_was_observed(
            gains in proptest::collection::vec(any_gain(), 1..40),
        ) {
            let mean = after(Estimate::default(), gains.iter().copied()).mean();
            prop_assert!(gains.iter().any(|gain| *gain <= mean));
            // Each step rounds towards the old mean.
            prop_assert!(gains.iter().any(|gain| *gain >= mean));
        }
    }
}
