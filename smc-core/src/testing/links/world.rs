// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Time, events, and the course of a run.

use core::fmt;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::super::rng::Rng;
use super::conn::Conn;
use super::ends::End;
use super::plan::{Faults, Plan};
use super::qp::Qp;
use super::types::{Check, EndId, Event};
use crate::time::Tick;

/// Maximum number of live groups.
const MOST_SESSIONS: usize = 2;
/// Time limit for the end of everything once the faults have stopped, microseconds: dead peers are
/// noticed after half a minute, connections give up after one.
const QUIET: u64 = 400_000_000;

#[derive(Debug)]
pub(super) struct Session {
    pub(super) ends: [End; 2],
    pub(super) conns: Vec<Conn>,
    /// LLC was doubled.
    pub(super) doubled: bool,
    /// LLC was corrupted: the ends lie to each other.
    pub(super) lied: bool,
    /// Opens no more connections.
    pub(super) closing: bool,
}

/// One run of the simulation.
#[derive(Debug)]
pub struct Simulation {
    seed: u64,
    pub(super) rng: Rng,
    pub(super) plan: Plan,
    pub(super) now: u64,
    order: u64,
    queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    pub(super) qps: Vec<Qp>,
    pub(super) qpns: [[u32; 2]; 2],
    pub(super) ports: [[bool; 2]; 2],
    pub(super) cuts: [[bool; 2]; 2],
    pub(super) stalled: [u64; 2],
    pub(super) sessions: Vec<Session>,
    pub(super) dirty: Vec<EndId>,
    /// Copies of LLC on their way.
    pub(super) copies: Vec<Vec<u8>>,
    pub(super) calm: bool,
    steps: u64,
    pub(super) report: Report,
    trace: bool,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// Events.
    pub steps: u64,
    /// Simulated microseconds.
    pub time: u64,
    /// Link groups, counted once for both ends.
    pub groups: u64,
    /// Links that became usable at an end.
    pub links: u64,
    /// Connections that were opened.
    pub connections: u64,
    /// Connections ended in order at both ends with every byte.
    pub completed: u64,
    /// Connections reset or aborted.
    pub reset: u64,
    /// Moves of one half of a connection to another link.
    pub failovers: u64,
    /// Bytes read by applications.
    pub bytes: u64,
    /// LLC messages received by groups.
    pub messages: u64,
    /// Odd ones among them.
    pub anomalies: u64,
}

/// A run with a broken rule.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed of the run.
    pub seed: u64,
    /// Number of steps with faults, needed along with the seed.
    pub limit: u64,
    /// The step of the failure.
    pub step: u64,
    /// The broken rule.
    pub what: String,
    plan: Plan,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { seed, limit, step, what, plan } = self;
        write!(
            f,
            "step {step}: {what}\n{plan:?}\n\
             SMC_SIM_SEED={seed:#x} SMC_SIM_STEPS={limit} cargo test -p smc-core --test link_simulation"
        )
    }
}

impl Simulation {
    /// The simulation with this seed.
    pub fn new(seed: u64) -> Simulation {
        let mut rng = Rng::new(seed);
        let plan = Plan::draw(&mut rng);
        Simulation {
            seed,
            rng,
            plan,
            now: 0,
            order: 0,
            queue: BinaryHeap::new(),
            qps: Vec::new(),
            qpns: [[0; 2]; 2],
            ports: [[true; 2]; 2],
            cuts: [[false; 2]; 2],
            stalled: [0; 2],
            sessions: Vec::new(),
            dirty: Vec::new(),
            copies: Vec::new(),
            calm: false,
            steps: 0,
            report: Report::default(),
            trace: std::env::var_os("SMC_SIM_TRACE").is_some(),
        }
    }

    /// The faults with this seed.
    pub fn faults(&self) -> Faults {
        self.plan.faults
    }

    /// Lets things go wrong for `limit` steps, then lets all come to its end.
    ///
    /// # Errors
    /// A rule was broken.
    pub fn run(mut self, limit: u64) -> Result<Report, Failure> {
        let result = self.course(limit);
        match result {
            Ok(()) => Ok(Report { steps: self.steps, time: self.now, ..self.report }),
            Err(what) => {
                let (seed, step, plan) = (self.seed, self.steps, self.plan);
                Err(Failure { seed, limit, step, what, plan })
            }
        }
    }

    fn course(&mut self, limit: u64) -> Check {
        self.new_session();
        self.at(self.plan.fault_every, Event::Fault);
        while self.steps < limit {
            self.step()?;
        }
        self.calm_down()?;
        let end = self.now + QUIET;
        while self.now < end && !self.is_quiet() {
            self.step()?;
        }
        self.check_quiet()?;
        self.run_until(self.now + 150_000_000)?;
        self.check_agreement()?;
        self.end_groups()?;
        self.run_until(self.now + 100_000_000)?;
        self.check_over()
    }

    fn run_until(&mut self, end: u64) -> Check {
        while self.queue.peek().is_some_and(|Reverse((at, ..))| *at <= end) {
            self.step()?;
        }
        self.now = end;
        Ok(())
    }

    fn step(&mut self) -> Check {
        let Some(Reverse((at, _, event))) = self.queue.pop() else {
            self.now += 1_000_000;
            return Ok(());
        };
        self.now = self.now.max(at);
        self.steps += 1;
        if self.trace {
            eprintln!("{:>6} {:>12} {event:?}", self.steps, self.now);
        }
        match event {
            Event::Deliver(q) => self.deliver(q)?,
            Event::Ack(q) => self.ack(q),
            Event::Poll(q) => self.poll(q)?,
            Event::Broken(q) => self.on_broken(q)?,
            Event::Prepare(end, link) => self.on_prepare(end, link)?,
            Event::Timer(end) => self.on_timer(end)?,
            Event::LastWrites(end, link) => self.on_last_writes(end, link)?,
            Event::App(half) => self.on_app(half)?,
            Event::ConnTimer(half) => self.on_conn_timer(half)?,
            Event::Tcp(half) => self.on_tcp(half)?,
            Event::LateLlc(q, n) => self.on_late_llc(q, n)?,
            Event::Open(session) => self.on_open(session)?,
            Event::Fault => self.on_fault()?,
            Event::PortNotice(host, n, session) => self.on_port_notice(host, n, session)?,
            Event::PortUp(host, n) => self.on_port_up(host, n),
            Event::CutEnds(a, b) => self.cuts[a][b] = false,
            Event::NewSession => self.on_new_session(),
        }
        self.drain_dirty()
    }

    pub(super) fn trace(&self, what: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{:>20} {}", "", what());
        }
    }

    pub(super) fn at(&mut self, at: u64, event: Event) {
        self.order += 1;
        self.queue.push(Reverse((at, self.order, event)));
    }

    /// A time up to `most`, short ones more often.
    pub(super) fn time(&mut self, most: u64) -> u64 {
        let bits = 64 - most.leading_zeros();
        let most = most >> self.rng.below(bits.max(1));
        1 + u64::from(self.rng.below(u32::try_from(most).unwrap_or(u32::MAX)))
    }

    pub(super) fn instant(&self) -> Tick {
        Tick(self.now)
    }

    pub(super) fn live_sessions(&self) -> impl Iterator<Item = usize> + '_ {
        let lives = |session: &Session| session.ends.iter().any(End::lives);
        let sessions = self.sessions.iter().enumerate();
        sessions.filter(move |(_, session)| lives(session)).map(|(n, _)| n)
    }

    fn on_new_session(&mut self) {
        let again = self.plan.open_every * 8 + self.time(2_000_000);
        if !self.calm {
            if self.live_sessions().count() < MOST_SESSIONS {
                self.new_session();
            }
            self.at(self.now + again, Event::NewSession);
        }
    }

    fn new_session(&mut self) {
        let session = self.sessions.len();
        self.open_session();
        if session == 0 {
            self.at(self.now + self.plan.open_every * 8, Event::NewSession);
        }
    }
}
