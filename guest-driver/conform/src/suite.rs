// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A run of the suite: learns facts about the target, plays the cases, and keeps the results.

use std::net::{SocketAddr, TcpListener};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::case::{Case, Cases, Level, Role};
use crate::dialogue::{CaseContext, CaseRun, DataPath, Verdict, play};
use crate::fabric::Fabric;
use crate::facts::Facts;
use crate::link::{Passed, Sender};
use crate::peer::{Announce, Peer};
use crate::rdma::RdmaDevice;
use crate::value::Scope;

/// The layer of the cases for facts about the target.
const FACTS: &str = "facts";
/// How often a case of a fact is played, and how long the suite waits in between.
const FACT_TRIES: u32 = 3;
const FACT_PAUSE: Duration = Duration::from_millis(500);
/// Limit of the cases to play again: a target silent in more cases is not just slow.
const MOST_AGAIN: usize = 16;
/// Unassigned addresses for documentation, as GIDs: 192.0.2.1 and 2001:db8::1.
const DOCUMENTED_V4: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1];
const DOCUMENTED_V6: [u8; 16] = [0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
/// The fact of a target answering TCP option 254.
const OPTION: &str = "option";

/// The implementation under test.
pub enum Target {
    /// A server at this address.
    Server(SocketAddr),
    /// A client connecting to this listener; or a command line of the shell, run by the suite once
    /// per connection with `{port}` replaced.
    Client {
        /// The address for a client without a program.
        listener: TcpListener,
        /// The command line.
        program: Option<String>,
    },
}

impl Target {
    /// Role of the target.
    pub fn role(&self) -> Role {
        match self {
            Target::Server(_) => Role::Server,
            Target::Client { .. } => Role::Client,
        }
    }
}

/// Parameters of a run.
pub struct Options<'a> {
    /// The implementation under test.
    pub target: Target,
    /// Whether the target sends back data received over TCP.
    pub echo: bool,
    /// Whether to play cases with possible trouble for other users of the target.
    pub aggressive: bool,
    /// Connections at a time, at least 1.
    pub connections: usize,
    /// How long to wait for a client to connect.
    pub wait: Duration,
    /// A failed case, if a busy machine may be the reason, is played again, alone, with the
    /// target's time for answers multiplied. 1: no case is played again.
    pub time_factor: u32,
    /// Only cases whose id contains one of these, or is one of these without a `=` before it.
    pub only: Vec<String>,
    /// Layers to play.
    pub layers: Vec<String>,
    /// A device of the suite.
    pub fabric: Option<&'a dyn Fabric>,
    /// An RNIC of the suite for SMC-R.
    pub rdma: Option<&'a dyn RdmaDevice>,
    /// Connects with TCP option 254.
    pub announce: Option<&'a dyn Announce>,
    /// EIDs, GIDs, addresses.
    pub names: Names,
}

/// Values of cases specific to the target.
#[derive(Clone, Debug)]
pub struct Names {
    /// An EID of the target.
    pub eid: String,
    /// System EID of the target, if known.
    pub seid: Option<String>,
    /// CHID of a fabric of the target.
    pub chid: u16,
    /// GID of the suite on the fabric of `chid`.
    pub gid: [u8; 16],
    /// MAC address of the suite, for SMC-R.
    pub mac: [u8; 6],
    /// Address of the suite as a RoCE GID.
    pub roce_gid: [u8; 16],
    /// IPv4 subnet of the TCP connection, and its number of bits.
    pub subnet: ([u8; 4], u8),
    /// A prefix of IPv6 of the target, and its number of bits.
    pub prefix: Option<([u8; 16], u8)>,
}

impl Names {
    fn scope(&self) -> Scope {
        let mut scope = Scope::default();
        let padded = |text: &str| {
            let mut bytes = text.as_bytes().to_vec();
            bytes.resize(32, b' ');
            bytes
        };
        scope.set("eid", padded(&self.eid));
        scope.set("foreign_eid", padded("CONFORMANCE-FOREIGN-EID"));
        scope.set("seid", padded(self.seid.as_deref().unwrap_or_default()));
        scope.set("chid", self.chid.to_be_bytes());
        let (first, second) = self.gid.split_at(8);
        scope.set("gid1", first);
        scope.set("gid2", second);
        // A GID in the form of a UUID of version 4, unused by any device.
        scope.set("foreign1", [0xf0, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0x46, 0xf7]);
        scope.set("foreign2", [0x88, 0xf9, 0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff]);
        scope.set("peer_id", [&[0x43, 0x46][..], &self.mac].concat());
        scope.set("mac", self.mac);
        // A second link is between other RNICs than the first one.
        let [a, b, c, d, e, last] = self.mac;
        scope.set("second_mac", [a, b, c, d, e, last ^ 1]);
        scope.set("roce_gid", self.roce_gid);
        // Of the range for documentation, in the family of the connection and in the other one.
        let families = [DOCUMENTED_V4, DOCUMENTED_V6];
        let is_v4 = self.roce_gid.starts_with(&DOCUMENTED_V4[..12]);
        let [own, other] = if is_v4 { families } else { [DOCUMENTED_V6, DOCUMENTED_V4] };
        scope.set("other_gid", own);
        scope.set("other_family", other);
        let (prefix, bits) = self.prefix.unwrap_or_default();
        scope.set("prefix", prefix);
        scope.set("prefix_bits", [bits]);
        let (network, bits) = self.subnet;
        scope.set("network", network);
        scope.set("mask_bits", [bits]);
        scope.set("token", [0x43, 0x4f, 0x4e, 0x46, 0x4f, 0x52, 0x4d, 0x21]);
        scope.set("link_id", [0x43, 0x46, 0, 1]);
        scope.set("size", [2]);
        scope.set("qpn", [0, 0x43, 0x46]);
        scope.set("psn", [0, 0x43, 0x46]);
        scope.set("rkey", [0, 0, 0x43, 0x46]);
        scope.set("address", [0, 0, 0x43, 0x46, 0, 0, 0, 0]);
        scope
    }
}

/// Whether the target has answered by a message of CLC, readable or not. A Proposal from a server
/// does not count: such a server echoes all data.
fn answers_clc(passed: &[Vec<Passed>], role: Role) -> bool {
    let kinds = if role == Role::Server { 2..=4 } else { 1..=4 };
    passed.iter().any(|connection| {
        let of_target = connection.iter().filter(|passed| passed.from == Sender::Target);
        let bytes: Vec<u8> = of_target.flat_map(|passed| &passed.bytes).copied().collect();
        let [a, b, c, d, kind, ref rest @ ..] = bytes[..] else { return false };
        let is_eye = [a == 0xe2, b == 0xd4, c == 0xc3, d == 0xd9 || d == 0xc4];
        match is_eye.into_iter().filter(|is_right| *is_right).count() {
            _ if !kinds.contains(&kind) => false,
            4 => true,
            // An eye catcher with an error, in front of a message of the stated length.
            2 | 3 => matches!(rest, [high, low, ..]
                if usize::from(u16::from_be_bytes([*high, *low])) == bytes.len()),
            _ => false,
        }
    })
}

/// The result of one case.
pub struct CaseResult {
    /// The case.
    pub case: Case,
    /// The verdict.
    pub verdict: Verdict,
    /// The reason.
    pub says: String,
    /// The first failure, if the case was played again.
    pub first: Option<String>,
    /// Duration of the case.
    pub took: Duration,
    /// Everything sent and received, per connection.
    pub passed: Vec<Vec<Passed>>,
}

impl CaseResult {
    /// Whether a requirement of this level failed.
    pub fn is_failed_must(&self) -> bool {
        self.verdict == Verdict::Fail && self.case.level == Level::Must
    }
}

/// The results of a run.
pub struct Results {
    /// Role of the target.
    pub role: Role,
    /// Known facts about the target.
    pub facts: Facts,
    /// In the order of the files.
    pub results: Vec<CaseResult>,
    /// How long the run took.
    pub took: Duration,
}

impl Results {
    /// The number of cases with this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.results.iter().filter(|result| result.verdict == verdict).count()
    }

    /// How many MUSTs failed.
    pub fn failed_musts(&self) -> usize {
        self.results.iter().filter(|result| result.is_failed_must()).count()
    }
}

/// Why there are no results.
#[derive(Debug, Error)]
pub enum SuiteError {
    /// A file of cases is wrong.
    #[error("cases: {0}")]
    Cases(String),
    /// A listener cannot be made.
    #[error("cannot listen: {0}")]
    Listen(#[from] std::io::Error),
    /// There is no connection with the target, so nothing is known about the target.
    #[error("{0}")]
    NoConnection(String),
    /// The target does not answer the first message as an implementation of SMC does.
    #[error("the target does not speak SMC, and nothing more was sent to it: {0}")]
    NotSmc(String),
}

/// How far a run is.
pub struct RunStatus<'a> {
    /// Finished cases.
    pub done: usize,
    /// Total number of cases to play.
    pub of: usize,
    /// The case finished last.
    pub last: &'a CaseResult,
}

/// Plays the cases against the target.
///
/// # Errors
/// [`SuiteError`]. A failed case is no error.
pub fn run(
    cases: &Cases,
    options: &Options<'_>,
    progress: &(dyn Fn(RunStatus<'_>) + Sync),
) -> Result<Results, SuiteError> {
    let began = Instant::now();
    let role = options.target.role();
    let mut scope = options.names.scope();
    scope.set("second_gid", options.rdma.and_then(RdmaDevice::second_gid).unwrap_or_default());
    let run = Run { cases, options, scope };
    let facts = run.find_facts()?;
    let of_target = |case: &&Case| case.role == role && case.layer != FACTS;
    let wanted = |case: &&Case| {
        let named = |part: &String| match part.strip_prefix('=') {
            Some(id) => case.id == id,
            None => case.id.contains(part.as_str()),
        };
        options.layers.contains(&case.layer)
            && (options.only.is_empty() || options.only.iter().any(named))
    };
    let all: Vec<&Case> = cases.cases.iter().filter(of_target).filter(wanted).collect();
    let results: Mutex<Vec<Option<CaseResult>>> = Mutex::new(all.iter().map(|_| None).collect());
    let done = AtomicUsize::new(0);
    let finish = |at: usize, result: CaseResult| {
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        progress(RunStatus { done, of: all.len(), last: &result });
        let mut results = results.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(slot) = results.get_mut(at) {
            *slot = Some(result);
        }
    };
    let (alone, together): (Vec<usize>, Vec<usize>) =
        (0..all.len()).partition(|at| all.get(*at).is_some_and(|case| case.alone));
    let of_load: Mutex<Vec<(usize, CaseResult)>> = Mutex::default();
    for (indices, at_a_time) in [(together, options.connections.max(1)), (alone, 1)] {
        let next = AtomicUsize::new(0);
        let work = || -> Result<(), SuiteError> {
            let own = run.own_listener()?;
            while let Some(at) = indices.get(next.fetch_add(1, Ordering::Relaxed)) {
                let Some(case) = all.get(*at) else { continue };
                match run.one(case, &facts, own.as_ref(), 1) {
                    (result, true) if options.time_factor > 1 => {
                        let mut of_load = of_load.lock().unwrap_or_else(|lost| lost.into_inner());
                        of_load.push((*at, result));
                    }
                    (result, _) => finish(*at, result),
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..run.workers(at_a_time)).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| worker.join().unwrap_or(Ok(())))
        })?;
    }
    let of_load = of_load.into_inner().unwrap_or_else(|lost| lost.into_inner());
    run.again(of_load, &facts, finish)?;
    let results = results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    let results = results.into_iter().flatten().collect();
    Ok(Results { role, facts, results, took: began.elapsed() })
}

struct Run<'a> {
    cases: &'a Cases,
    options: &'a Options<'a>,
    scope: Scope,
}

impl Run<'_> {
    /// Clients connecting on their own share one listener, so one client at a time is served.
    fn workers(&self, at_a_time: usize) -> usize {
        match &self.options.target {
            Target::Client { program: None, .. } => 1,
            _ => at_a_time,
        }
    }

    /// A listener for one worker, if the suite tells the client the port.
    fn own_listener(&self) -> Result<Option<TcpListener>, SuiteError> {
        match &self.options.target {
            Target::Client { listener, program: Some(_) } => {
                let at = (listener.local_addr()?.ip(), 0);
                Ok(Some(TcpListener::bind(at)?))
            }
            _ => Ok(None),
        }
    }

    fn context<'b>(
        &'b self,
        case: &Case,
        facts: &Facts,
        own: Option<&'b TcpListener>,
        time_factor: u32,
    ) -> CaseContext<'b> {
        // After one answer to the option, a server expects every SMC client to send the option.
        let asks = case.needs.iter().any(|fact| fact == OPTION);
        let announced = asks || facts.has(OPTION);
        let (peer, program) = match &self.options.target {
            Target::Server(address) => {
                let announce = self.options.announce.filter(|_| announced);
                (Peer::Server { address: *address, announce }, false)
            }
            Target::Client { listener, program } => {
                let (listener, wait) = (own.unwrap_or(listener), self.options.wait);
                (Peer::Client { listener, program: program.as_deref(), wait }, program.is_some())
            }
        };
        let data = match (self.options.echo, program) {
            (true, _) => DataPath::Echo,
            (false, true) => DataPath::Program,
            (false, false) => DataPath::Unseen,
        };
        CaseContext {
            cases: self.cases,
            scope: &self.scope,
            peer,
            fabric: self.options.fabric,
            rdma: self.options.rdma,
            data,
            time_factor,
        }
    }

    /// Plays a case. Also returns whether a busy machine explains a failure.
    fn one(
        &self,
        case: &Case,
        facts: &Facts,
        own: Option<&TcpListener>,
        time_factor: u32,
    ) -> (CaseResult, bool) {
        let began = Instant::now();
        let not = |verdict, says: String| CaseRun {
            verdict,
            says,
            is_of_load: false,
            passed: Vec::new(),
        };
        let played = match (&case.aggressive, facts.missing(&case.needs)) {
            (_, Some((fact, true))) => {
                not(Verdict::NotObservable, format!("the suite needs {}", in_words(fact)))
            }
            (_, Some((fact, false))) => {
                let says = match fact.strip_prefix('!') {
                    Some(fact) => format!("the target is known for {}", in_words(fact)),
                    None => format!("the target is not known for {}", in_words(fact)),
                };
                not(Verdict::NotApplicable, says)
            }
            (Some(why), None) if !self.options.aggressive => {
                not(Verdict::NotObservable, format!("only with --aggressive: {why}"))
            }
            _ => play(case, &self.context(case, facts, own, time_factor)),
        };
        let CaseRun { verdict, says, is_of_load, passed } = played;
        let (case, took) = (case.clone(), began.elapsed());
        (CaseResult { case, verdict, says, first: None, took, passed }, is_of_load)
    }

    /// Plays cases again, one at a time and with more time for each answer, where a busy machine
    /// may explain the failure. Many such cases mean a silent target: the failures then stand.
    fn again(
        &self,
        of_load: Vec<(usize, CaseResult)>,
        facts: &Facts,
        finish: impl Fn(usize, CaseResult),
    ) -> Result<(), SuiteError> {
        let own = self.own_listener()?;
        let is_silent = of_load.len() > MOST_AGAIN;
        for (at, first) in of_load {
            if is_silent {
                finish(at, first);
                continue;
            }
            let (mut second, _) =
                self.one(&first.case, facts, own.as_ref(), self.options.time_factor);
            second.first = Some(first.says);
            finish(at, second);
        }
        Ok(())
    }

    /// Plays a case for a fact about the target. A failed case that builds on other facts is
    /// repeated: Linux ends connections of a link group whose first contact was given up.
    fn play_fact(&self, case: &Case, facts: &Facts, own: Option<&TcpListener>) -> CaseRun {
        // A target without SMC gets one message only, and all the time at once.
        let is_first = case.needs.is_empty();
        let time_factor = if is_first { self.options.time_factor } else { 1 };
        let mut played = play(case, &self.context(case, facts, own, time_factor));
        for _ in 1..FACT_TRIES {
            if played.verdict != Verdict::Fail || is_first {
                break;
            }
            std::thread::sleep(FACT_PAUSE);
            let time_factor = if played.is_of_load { self.options.time_factor } else { 1 };
            played = play(case, &self.context(case, facts, own, time_factor));
        }
        played
    }

    /// Plays the cases for facts about the target. The last part of an id is the fact.
    fn find_facts(&self) -> Result<Facts, SuiteError> {
        let mut facts = Facts::default();
        if self.options.fabric.is_some() {
            facts.add("device");
        }
        if self.options.rdma.is_some() {
            facts.add("rnic");
        }
        if self.options.rdma.is_some_and(|rdma| rdma.second_gid().is_some()) {
            facts.add("second-rnic");
        }
        if self.options.echo {
            facts.add("echo");
        }
        if self.options.names.seid.is_some() {
            facts.add("seid");
        }
        if self.options.names.prefix.is_some() {
            facts.add("prefix");
        }
        if self.options.echo
            || matches!(&self.options.target, Target::Client { program: Some(_), .. })
        {
            facts.add("data");
        }
        let own = self.own_listener()?;
        let role = self.options.target.role();
        let of_target = |case: &&Case| case.role == role && case.layer == FACTS;
        let mut is_smc = false;
        for case in self.cases.cases.iter().filter(of_target) {
            if case.needs.iter().any(|fact| fact == OPTION) && self.options.announce.is_none() {
                continue;
            }
            let needs: Vec<String> =
                case.needs.iter().filter(|fact| *fact != OPTION).cloned().collect();
            if facts.missing(&needs).is_some() {
                continue;
            }
            let played = self.play_fact(case, &facts, own.as_ref());
            let fact = case.id.split_once('-').map_or("", |(_, fact)| fact);
            match played.verdict {
                Verdict::Pass => facts.add(fact),
                // The target speaks SMC, though with errors: the cases show the errors.
                _ if fact == "smc" && answers_clc(&played.passed, role) => facts.add(fact),
                // The first one shows whether there is SMC at all.
                _ if fact == "smc" && played.passed.is_empty() => {
                    return Err(SuiteError::NoConnection(played.says));
                }
                _ if fact == "smc" => return Err(SuiteError::NotSmc(played.says)),
                _ => {}
            }
            is_smc |= fact == "smc";
        }
        if !is_smc {
            return Err(SuiteError::Cases(
                "no case finds out whether the target speaks SMC".into(),
            ));
        }
        Ok(facts)
    }
}

/// A fact as the object of a sentence.
fn in_words(fact: &str) -> String {
    match fact {
        "data" => "to see data over TCP: --echo, or --run for a client".into(),
        "echo" => "a target that sends data back: --echo".into(),
        "device" => "a device on a fabric of the target: --device".into(),
        "rnic" => "an RNIC for SMC-R on a network of the target: --rnic".into(),
        "second-rnic" => "a second RNIC, which only its tests have".into(),
        "link-r2" => "links of SMC-R version 2 with the suite".into(),
        "two-links" => "two links of SMC-R with the suite".into(),
        "link-r1" => "links of SMC-R version 1 with the suite".into(),
        "option" => "TCP option 254 at both ends".into(),
        "seid" => "the system EID of the target: --seid".into(),
        "prefix" => "a prefix of IPv6 of the target: --prefix".into(),
        "prefix-r1" => "SMC-R version 1 by a prefix of IPv6".into(),
        "prefix-d1" => "SMC-D version 1 by a prefix of IPv6".into(),
        "records" | "offers-records" => "vendor options for records on TCP".into(),
        "remembers" => "a second contact".into(),
        "takes-second" => "a second link of SMC-R with the suite".into(),
        "lists-gids" => "more addresses than one".into(),
        "d2" => "SMC-D version 2 with the suite".into(),
        "d1" => "SMC-D version 1 with the suite".into(),
        "r2" => "SMC-R version 2 with the suite".into(),
        "r1" => "SMC-R version 1 with the suite".into(),
        "confirm" => "SMC connections with the suite".into(),
        "release-2.1" => "release 2.1".into(),
        other => other.replace('-', " "),
    }
}
