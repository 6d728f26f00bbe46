// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The run: two ends, two lanes, one step after the other.

use core::fmt;

use super::end::{End, Released, Truth};
use super::memory::{Lane, Store};
use super::rng::Rng;
use super::{Kind, Options};
use crate::connection::close::{Event, State};
use crate::connection::{Ring, RingError, SMCD_CONTROL_LEN};

/// Maximum number of steps of a run after its applications have closed: both timers one after the
/// other at both ends, and time for slow lanes.
const END_STEPS: u64 = 40_000;

/// Two ends of one connection.
#[derive(Debug)]
pub struct Fabric {
    seed: u64,
    options: Options,
    rng: Rng,
    now: u64,
    ends: [End; 2],
    /// Lane `i` carries the stores of end `i`.
    lanes: [Lane; 2],
    honest: bool,
}

/// The result of a run.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Steps taken.
    pub steps: u64,
    /// Bytes received by the other application, per receiving end.
    pub read: [u64; 2],
    /// Whether the applications saw an error.
    pub failed: [bool; 2],
}

/// A run with a broken rule.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed of the run.
    pub seed: u64,
    /// The options of the run, needed along with the seed to repeat the run.
    pub options: Options,
    /// The step of the failure.
    pub step: u64,
    /// The broken rule.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { seed, options, step, what } = self;
        write!(f, "seed {seed:#x}, step {step}: {what}; {options:?}")
    }
}

impl Fabric {
    /// A fresh connection.
    ///
    /// # Errors
    /// The ring lengths give no rings.
    pub fn new(seed: u64, options: Options) -> Result<Fabric, RingError> {
        let head = match options.kind {
            Kind::SmcD => SMCD_CONTROL_LEN,
            Kind::SmcR => crate::connection::EYE_CATCHER_LEN,
            Kind::SmcRWithoutEyeCatcher => 0,
        };
        let ring = |len: u32| match options.kind {
            Kind::SmcD => Ring::smcd(len.saturating_add(head)),
            Kind::SmcR => Ring::smcr(len.saturating_add(head)),
            Kind::SmcRWithoutEyeCatcher => Ring::smcr_without_eye_catcher(len),
        };
        let rings = [ring(options.rings[0])?, ring(options.rings[1])?];
        let ends = [
            End::new(0, &options, rings[0], rings[1], head),
            End::new(1, &options, rings[1], rings[0], head),
        ];
        let lanes = [Lane::default(), Lane::default()];
        Ok(Fabric { seed, options, rng: Rng::new(seed), now: 0, ends, lanes, honest: true })
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// A rule was broken.
    pub fn run(mut self) -> Result<Report, Failure> {
        match self.steps() {
            Ok(report) => Ok(report),
            Err(what) => {
                Err(Failure { seed: self.seed, options: self.options, step: self.now, what })
            }
        }
    }

    fn steps(&mut self) -> Result<Report, String> {
        let limit = u64::from(self.options.steps);
        while !self.is_over() {
            self.now += 1;
            if self.now > limit + END_STEPS {
                let states = [self.ends[0].state(), self.ends[1].state()];
                return Err(format!("no end in sight: {states:?}"));
            }
            self.step(self.now > limit)?;
        }
        for lane in [0, 1] {
            while self.deliver(lane)? {}
        }
        self.ends[0].element.check_canaries()?;
        self.ends[1].element.check_canaries()?;
        Ok(Report {
            steps: self.now,
            read: [self.ends[0].position(), self.ends[1].position()],
            failed: [self.ends[0].failed, self.ends[1].failed],
        })
    }

    fn is_over(&self) -> bool {
        self.ends.iter().all(|end| end.dead || end.state() == State::Closed)
    }

    fn step(&mut self, late: bool) -> Result<(), String> {
        for _ in 0..self.rng.below(4) {
            let lane = self.rng.below(2) as usize;
            self.deliver(lane)?;
        }
        let id = self.rng.below(2) as usize;
        self.ends[id].tick(&mut self.lanes[id], self.now)?;
        self.faults(id)?;
        if !self.ends[id].dead && self.ends[id].state() != State::Closed {
            self.act(id, late)?;
        }
        if self.ends[id].tcp_reset && self.rng.one_in(20) {
            self.ends[id].tcp_reset = false;
            let other = &mut self.ends[1 - id];
            other.event(&mut self.lanes[1 - id], Event::TcpReset, self.now)?;
        }
        Ok(())
    }

    fn faults(&mut self, id: usize) -> Result<(), String> {
        let faults = self.options.faults;
        let [first, second] = &mut self.ends;
        let (end, other) = if id == 0 { (first, second) } else { (second, first) };
        let lane = &mut self.lanes[id];
        if end.dead {
            return Ok(());
        }
        if self.rng.one_in(faults.stall) {
            end.dead = true;
        }
        if self.rng.one_in(faults.lie) && end.state() != State::Closed {
            self.honest = false;
            other.element.limit = None;
            end.element.limit = None;
            end.lie(lane, &mut self.rng);
        }
        if self.rng.one_in(faults.abort) {
            end.event(lane, Event::Abort, self.now)?;
        }
        if self.rng.one_in(faults.tcp_reset) {
            end.event(lane, Event::TcpReset, self.now)?;
            end.tcp_reset = true;
        }
        if self.rng.one_in(faults.close) && !end.closed {
            end.close(lane, self.now)?;
        }
        Ok(())
    }

    /// One random action of end `id`.
    fn act(&mut self, id: usize, late: bool) -> Result<(), String> {
        let Fabric { ends, lanes, rng, now, honest, options, .. } = self;
        let now = *now;
        let [first, second] = ends;
        let (end, peer) = if id == 0 { (first, second) } else { (second, first) };
        let [lane0, lane1] = lanes;
        let (out, inward) = if id == 0 { (lane0, lane1) } else { (lane1, lane0) };
        let (placed, honest) = (peer.placed, *honest);
        let truth = Truth { id: 1 - id, placed, marks: &peer.marks, honest };
        let ring = options.rings[1 - id];
        match rng.below(12) {
            // The stack polls after a wake-up, and sometimes without one.
            0..=2 if end.element.signalled || rng.one_in(4) => {
                end.poll(out, inward, rng, &truth, now)?;
            }
            3 => end.poll_for_space(out, now)?,
            4 | 5 => {
                let len = match rng.below(8) {
                    0 => ring * 3,
                    1 => ring,
                    _ => 1 + rng.below(ring),
                };
                let urgent = rng.one_in(options.urgent);
                end.write(out, len, urgent)?;
            }
            6..=8 => {
                let n = if rng.one_in(2) { u32::MAX } else { 1 + rng.below(8) };
                end.read(out, n, &truth)?;
            }
            9 if options.urgent != 0 => end.take_urgent(&truth)?,
            10 if options.urgent != 0 && rng.one_in(50) => {
                let inline = rng.one_in(2);
                end.set_inline(out, inline)?;
            }
            11 => {
                end.end_of_data(out, inward, rng, &truth, now)?;
                if end.wants_shutdown() || (late && rng.one_in(100)) {
                    end.shutdown_write(out, now)?;
                }
                if !end.closed && (end.wants_close() || end.failed || (late && rng.one_in(200))) {
                    end.close(out, now)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The next store of end `from` arrives.
    fn deliver(&mut self, from: usize) -> Result<bool, String> {
        let Some(store) = self.lanes[from].pop(&mut self.rng) else { return Ok(false) };
        let to = &mut self.ends[1 - from];
        // A wake-up may come late and wakes the next user for nothing; an SMC-R message names its
        // connection by the alert token.
        let harmless = matches!(store, Store::Message(_) | Store::Signal);
        if self.honest && to.released == Released::Reuse && !harmless {
            return Err(format!("{store:?} arrives in an element that serves again"));
        }
        to.element.take(store, from)?;
        Ok(!self.lanes[from].is_empty())
    }
}
