// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Plays a case: its steps one after the other on one connection, or on several.

mod case_end;
mod contact;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use toml::Value;

use crate::case::{Case, Cases, Split, Step};
use crate::fabric::{Buffer, Fabric};
use crate::link::{Event, Link, Passed};
use crate::message::{Kind, Message};
use crate::outcome::{
    Match, compare, describe, describe_all, falls_back, is_of_link, is_open, of_words,
};
use crate::peer::{Connection, Peer, Program};
use crate::rdma::RdmaDevice;
use crate::stream::{Pair, Stream};
use crate::value::{Scope, as_number, bytes_of, to_hex};
use case_end::{CaseEnd, fail_at};

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// One of the allowed outcomes.
    Pass,
    /// Another outcome.
    Fail,
    /// Another outcome, but a known deviation of Linux.
    DeviatesAsLinux,
    /// The target lacks the feature under test.
    NotApplicable,
    /// The suite cannot see the outcome here.
    NotObservable,
}

impl Verdict {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Pass => "PASS",
            Verdict::Fail => "FAIL",
            Verdict::DeviatesAsLinux => "DEVIATES-AS-LINUX",
            Verdict::NotApplicable => "NOT-APPLICABLE",
            Verdict::NotObservable => "NOT-OBSERVABLE",
        }
    }
}

/// How the suite observes data over TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPath {
    /// Not observable.
    Unseen,
    /// The target sends received data back.
    Echo,
    /// Through standard input and output of the program started by the suite.
    Program,
}

/// The part common to all dialogues.
pub(crate) struct CaseContext<'a> {
    pub(crate) cases: &'a Cases,
    pub(crate) scope: &'a Scope,
    pub(crate) peer: Peer<'a>,
    pub(crate) fabric: Option<&'a dyn Fabric>,
    pub(crate) rdma: Option<&'a dyn RdmaDevice>,
    pub(crate) data: DataPath,
    /// Factor on the usual time for an answer of the target.
    pub(crate) time_factor: u32,
}

/// The result of playing a case.
pub(crate) struct CaseRun {
    pub(crate) verdict: Verdict,
    /// The reason, as a sentence; or the outcome not seen.
    pub(crate) says: String,
    /// Whether a busy machine explains the failure.
    pub(crate) is_of_load: bool,
    /// Everything sent and received, per connection.
    pub(crate) passed: Vec<Vec<Passed>>,
}

/// How long the suite waits for an answer or an end.
const ANSWER: u64 = 8000;
/// How long a connection has to stay open to pass.
const OPEN: u64 = 400;
/// How long the suite waits for TCP between two looks at the control block.
const LOOK: Duration = Duration::from_millis(5);
/// How long the last words may take to come behind the end of TCP.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long data may take to come back.
const DATA: Duration = Duration::from_secs(8);

/// Plays a case.
pub(crate) fn play(case: &Case, context: &CaseContext<'_>) -> CaseRun {
    let mut dialogue = Dialogue {
        context,
        scope: context.scope.clone(),
        link: None,
        program: None,
        buffers: Vec::new(),
        stream: None,
        queue_pairs: Vec::new(),
        is_linked: false,
        carries_smc: false,
        user: None,
        expected: Vec::new(),
        unseen: false,
        passed: Vec::new(),
    };
    let played = dialogue.play(case);
    let errors = dialogue.program.as_ref().map_or(String::new(), Program::errors);
    dialogue.hang_up();
    let ended = played.err().unwrap_or_else(|| {
        let unseen = "data over TCP was not looked at: the target sends nothing back";
        let says = if dialogue.unseen { unseen } else { "" };
        (Verdict::Pass, says.to_owned()).into()
    });
    let CaseEnd { verdict, mut says, is_of_load } = ended;
    if verdict == Verdict::Fail && !errors.is_empty() {
        says = format!("{says}; the client wrote: {errors}");
    }
    let is_of_load = is_of_load && verdict == Verdict::Fail;
    CaseRun { verdict, says, is_of_load, passed: dialogue.passed }
}

type Judged<T> = Result<T, CaseEnd>;

/// A fact missing in the target or in its messages, or a mistake of the case's author.
fn lacks(why: String) -> (Verdict, String) {
    (Verdict::NotApplicable, why)
}

struct Dialogue<'a> {
    context: &'a CaseContext<'a>,
    scope: Scope,
    link: Option<Link>,
    program: Option<Program>,
    /// DMBs of the suite, kept until the end of the case.
    buffers: Vec<Box<dyn Buffer>>,
    /// The data path, once used by a step.
    stream: Option<Stream>,
    /// The suite's queue pairs, first link first.
    queue_pairs: Vec<Rc<RefCell<Pair>>>,
    /// Whether the link is connected, and not ended by the target.
    is_linked: bool,
    /// Whether a Confirm has passed, and the target has not ended the connection.
    carries_smc: bool,
    /// GID of the target.
    user: Option<[u8; 16]>,
    /// Data for the target to send back.
    expected: Vec<u8>,
    /// Whether a step asked for data that the suite could not observe.
    unseen: bool,
    passed: Vec<Vec<Passed>>,
}

impl Dialogue<'_> {
    fn hang_up(&mut self) {
        // SMC does not end with TCP: without an abort the target would keep its end for ever.
        // The last word on a link of SMC-R, without data, ends the link and so the connection.
        let has_last_word = self.stream.is_some() || self.queue_pairs.is_empty();
        if std::mem::take(&mut self.carries_smc)
            && has_last_word
            && let Ok(stream) = self.stream()
        {
            stream.abort();
        }
        self.stream = None;
        self.end_link();
        self.queue_pairs.clear();
        if let Some(link) = self.link.take() {
            self.passed.push(link.passed);
        }
        self.program = None;
        self.expected.clear();
    }

    fn connect(&mut self) -> Judged<()> {
        self.hang_up();
        let is_server = matches!(self.context.peer, Peer::Server { .. });
        let verdict = if is_server { Verdict::Fail } else { Verdict::NotObservable };
        let Connection { tcp, program } = self.context.peer.connect().map_err(|w| (verdict, w))?;
        self.link = Some(Link::new(tcp).map_err(|error| (verdict, error.to_string()))?);
        self.program = program;
        // Another peer id each time, so each connection makes a link group.
        let [first, second, ..] = self.nonce();
        let own = self.scope.get("peer_id").unwrap_or_default();
        let fresh = [&[first, second][..], own.get(2..).unwrap_or_default()].concat();
        self.scope.set("fresh_peer_id", fresh);
        Ok(())
    }

    fn link(&mut self) -> Judged<&mut Link> {
        if self.link.is_none() {
            self.connect()?;
        }
        let none = (Verdict::NotObservable, "there is no connection".to_owned());
        self.link.as_mut().ok_or_else(|| none.into())
    }

    fn play(&mut self, case: &Case) -> Judged<()> {
        self.connect()?;
        for step in &case.say {
            if self.step(step)? == Progress::Over {
                break;
            }
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Judged<Progress> {
        if step.reconnect {
            self.connect()?;
        }
        if let Some(base) = &step.send {
            self.send(base, step)?;
        }
        if let Some(bytes) = &step.bytes {
            let bytes = bytes_of(bytes, None, &self.scope).map_err(lacks)?;
            self.expected.extend(&bytes);
            self.write(&bytes, step)?;
        }
        if let Some(words) = &step.stream {
            let stream = self.stream()?;
            stream.has_room(words).map_err(lacks)?;
            let stepped = stream.steps(words);
            self.note_data();
            stepped?;
        }
        if let Some(pause) = step.pause {
            std::thread::sleep(Duration::from_millis(pause));
        }
        if step.finish {
            self.link()?.finish();
        }
        if step.reset {
            self.link()?.reset();
            self.hang_up();
            return Ok(Progress::On);
        }
        if step.data.is_some()
            && let Err(ended) = self.check_data()
        {
            return self.known_of_linux(step, ended);
        }
        if !step.expect.is_empty() {
            return self.expect(step);
        }
        Ok(Progress::On)
    }

    fn send(&mut self, base: &str, step: &Step) -> Judged<()> {
        let cases = self.context.cases;
        let base = &self.answer_to_accept(base);
        if cases.names_token(base) {
            self.make_buffer()?;
        }
        if let Some(which) = cases.queue_pair_of(base) {
            self.make_queue_pair(which)?;
        }
        let mut message = cases.message(base, &step.fields, &self.scope).map_err(lacks)?;
        if message.kind == Kind::Confirm {
            self.carries_smc = true;
            self.connect_queue_pair(0, "accept")?;
        }
        // Later checks compare with the intended fields, so publish before the edits.
        message.publish(&mut self.scope);
        for edit in &step.edits {
            edit.apply(&mut message, &self.scope).map_err(lacks)?;
        }
        let mut bytes = message.bytes;
        if matches!(message.kind, Kind::Llc(_)) {
            let on = step.link.unwrap_or(1).saturating_sub(1);
            return (0..step.repeat.unwrap_or(1)).try_for_each(|_| self.write_llc(on, &bytes));
        }
        if let Some(then) = &step.then {
            let then = bytes_of(then, None, &self.scope).map_err(lacks)?;
            self.expected.extend(&then);
            bytes.extend(then);
        }
        for _ in 0..step.repeat.unwrap_or(1) {
            self.write(&bytes, step)?;
        }
        Ok(())
    }

    /// `confirm*` stands for the Confirm fitting the preceding Accept.
    fn answer_to_accept(&self, base: &str) -> String {
        let Some(start) = base.strip_suffix('*') else { return base.to_owned() };
        let of_accept = |field: &str| self.scope.get(&format!("accept.{field}")).map(as_number);
        let end = match (of_accept("first_contact"), of_accept("release")) {
            (Some(0), _) => "-known",
            (_, Some(0)) => "-20",
            _ => "",
        };
        format!("{start}{end}")
    }

    /// A DMB for the target, once its GID is known; otherwise the placeholder token stays.
    fn make_buffer(&mut self) -> Judged<()> {
        let Some(fabric) = self.context.fabric else { return Ok(()) };
        let Some(user) = self.user.take() else { return Ok(()) };
        let buffer = fabric.register(user).map_err(|why| (Verdict::NotObservable, why))?;
        self.scope.set("token", buffer.token());
        self.scope.set("size", [buffer.size_code()]);
        self.buffers.push(buffer);
        Ok(())
    }

    fn write(&mut self, bytes: &[u8], step: &Step) -> Judged<()> {
        let mut cuts: Vec<usize> = match &step.split {
            None => Vec::new(),
            Some(Split::At(places)) => places.clone(),
            Some(Split::Every(len)) => {
                (1..bytes.len()).filter(|at| at % (*len).max(1) == 0).collect()
            }
        };
        cuts.retain(|at| *at < bytes.len());
        cuts.push(bytes.len());
        let mut from = 0;
        let mut segments = Vec::new();
        for to in cuts {
            segments.push(bytes.get(from..to).unwrap_or_default());
            from = to;
        }
        if step.reorder {
            segments.reverse();
        }
        for (i, segment) in segments.into_iter().enumerate() {
            if i > 0 && step.gap > 0 {
                std::thread::sleep(Duration::from_millis(step.gap));
            }
            self.link()?.write(segment);
        }
        Ok(())
    }

    fn expect(&mut self, step: &Step) -> Judged<Progress> {
        let within = self.limit_of(step);
        if step.expect.iter().any(|outcome| of_words(outcome).is_some()) {
            return self.expect_words(step, Duration::from_millis(within));
        }
        let is_watched = self.is_linked && step.expect.iter().any(is_open);
        if is_watched || step.expect.iter().any(is_of_link) {
            return self.expect_llc(step);
        }
        let event = self.link()?.next(Duration::from_millis(within));
        match &event {
            Event::Message(message) => {
                self.learn(message);
                if message.kind == Kind::Confirm {
                    self.connect_queue_pair(0, "confirm")?;
                }
            }
            Event::End | Event::Reset => self.carries_smc = false,
            _ => {}
        }
        let (known, why) = self.find(&step.expect, &event)?;
        if let Some(outcome) = known {
            if falls_back(outcome) {
                self.check_data()?;
            }
            let over = matches!(event, Event::End | Event::Reset);
            return Ok(if over { Progress::Over } else { Progress::On });
        }
        let mut says =
            format!("expected {}; came {}", describe_all(&step.expect), describe(&event, within));
        if let Some(why) = why {
            says = format!("{says}; {why}");
        }
        match self.find(&step.linux, &event)?.0 {
            Some(_) => Err((Verdict::DeviatesAsLinux, says).into()),
            None => fail_at(&event, says),
        }
    }

    /// Milliseconds for a step to wait. A required silence is not prolonged by the time factor.
    fn limit_of(&self, step: &Step) -> u64 {
        match step.expect.iter().any(is_open) {
            true => step.within.unwrap_or(OPEN),
            false => step.within.unwrap_or(ANSWER) * u64::from(self.context.time_factor),
        }
    }

    /// Ends the case after data has not come through. The verdict changes if the next event is a
    /// known outcome of Linux.
    fn known_of_linux(&mut self, step: &Step, ended: CaseEnd) -> Judged<Progress> {
        if step.linux.is_empty() {
            return Err(ended);
        }
        let event = self.link()?.next(Duration::from_millis(OPEN));
        let verdict = match self.find(&step.linux, &event)?.0 {
            Some(_) => Verdict::DeviatesAsLinux,
            None => ended.verdict,
        };
        Err(CaseEnd { verdict, ..ended })
    }

    /// The data path of the connection, with the DMBs named in the messages.
    fn stream(&mut self) -> Judged<&mut Stream> {
        if self.stream.is_none() && self.is_linked {
            self.stream = Some(self.stream_over_link()?);
        } else if self.stream.is_none() {
            let fabric = self.context.fabric.ok_or_else(|| lacks("there is no device".into()))?;
            let own = self.buffers.pop().ok_or_else(|| lacks("no DMB was named".into()))?;
            let is_server = matches!(self.context.peer, Peer::Server { .. });
            let kind = if is_server { "accept" } else { "confirm" };
            let field = |name: &str| self.scope.get(&format!("{kind}.{name}")).map(<[u8]>::to_vec);
            let token = field("token").unwrap_or_default();
            let size = field("size").and_then(|size| size.first().copied()).unwrap_or(0);
            let time_factor = self.context.time_factor;
            self.stream = Some(Stream::over_dmbs(fabric, own, (&token, size), time_factor)?);
        }
        let none = (Verdict::NotObservable, "there is no data path".to_owned());
        self.stream.as_mut().ok_or_else(|| none.into())
    }

    /// Waits for words of the target's control block, or for an end of TCP.
    fn expect_words(&mut self, step: &Step, limit: Duration) -> Judged<Progress> {
        let mut end = Instant::now() + limit;
        let mut was_over = false;
        loop {
            let event = self.link()?.next(LOOK);
            let is_over = matches!(event, Event::End | Event::Reset);
            if is_over && !was_over {
                // SMC does not end with TCP: the last words may come a moment later.
                was_over = true;
                end = end.min(Instant::now() + LAST_WORDS * self.context.time_factor);
            } else if is_over {
                std::thread::sleep(LOOK);
            }
            if !matches!(event, Event::Nothing) && self.find(&step.expect, &event)?.0.is_some() {
                return Ok(if is_over { Progress::Over } else { Progress::On });
            }
            if self.shows(&step.expect)? {
                return Ok(Progress::On);
            }
            if Instant::now() > end {
                let came = describe(&event, self.limit_of(step));
                let words = self.stream()?.describe();
                self.note_data();
                let expected = describe_all(&step.expect);
                let says = format!("expected {expected}; TCP: {came}; SMC: {words}");
                let is_known = self.find(&step.linux, &event)?.0.is_some();
                return match is_known || self.shows(&step.linux)? {
                    true => Err((Verdict::DeviatesAsLinux, says).into()),
                    // Missing words count as silence, whatever became of TCP.
                    false => fail_at(&Event::Nothing, says),
                };
            }
        }
    }

    /// Whether the target's control block is as one of the outcomes says.
    fn shows(&mut self, outcomes: &[Value]) -> Judged<bool> {
        self.stream()?;
        let Some(stream) = &mut self.stream else { return Ok(false) };
        let words = outcomes.iter().filter_map(of_words);
        words
            .map(|checks| stream.is(checks, &self.scope).map_err(lacks))
            .try_fold(false, |found, shown| Ok(found || shown?))
    }

    /// The outcome matching an event, or else the mismatch.
    fn find<'v>(
        &self,
        outcomes: &'v [Value],
        event: &Event,
    ) -> Judged<(Option<&'v Value>, Option<String>)> {
        let mut wrong = None;
        for outcome in outcomes {
            match compare(event, outcome, &self.scope).map_err(lacks)? {
                Match::Yes => return Ok((Some(outcome), None)),
                Match::Wrong(why) => wrong = Some(why),
                Match::No => {}
            }
        }
        Ok((None, wrong))
    }

    /// Keeps the values of the target's message for later messages.
    fn learn(&mut self, message: &Message) {
        message.publish(&mut self.scope);
        let half = |name: &str| message.value(name).unwrap_or_else(|| vec![0; 8]);
        match message.kind {
            Kind::Proposal => {
                let own = self.context.fabric.map(|fabric| u64::from(fabric.chid()));
                let mut entries = (0..8).map(|i| (i, message.number(&format!("entry[{i}].chid"))));
                let entry = match own {
                    Some(own) => entries.find(|(_, chid)| *chid == own),
                    None => entries.find(|(_, chid)| *chid != 0),
                };
                if let Some((i, chid)) = entry {
                    let chid = u16::try_from(chid).unwrap_or(0);
                    self.scope.set("chid", chid.to_be_bytes());
                    let second = half(&format!("entry[{}].gid", i + 1));
                    self.user = gid_of(&half(&format!("entry[{i}].gid")), &second);
                }
                // Answer with the suite's EID if the client offers several.
                let own = self.scope.get("eid").unwrap_or_default().to_vec();
                let eids: Vec<_> =
                    self.scope.beginning("proposal.eid[").map(<[u8]>::to_vec).collect();
                let eid = eids.iter().find(|eid| **eid == own).or(eids.first()).cloned();
                if let Some(eid) = eid.or_else(|| message.value("seid")) {
                    self.scope.set("eid", eid);
                }
            }
            Kind::Accept => self.user = gid_of(&half("gid"), &half("extended_gid")),
            Kind::Confirm => self.carries_smc = true,
            Kind::Decline => self.carries_smc = false,
            Kind::Llc(_) => {}
        }
    }

    /// Sends data, and checks the arrival.
    fn check_data(&mut self) -> Judged<()> {
        let limit = DATA * self.context.time_factor;
        let pattern = format!("conformance {:08x}\n", as_number(&self.nonce()));
        match (self.context.data, self.program.is_some()) {
            (DataPath::Echo, _) => {
                let mut expected = std::mem::take(&mut self.expected);
                expected.extend(pattern.as_bytes());
                self.link()?.write(pattern.as_bytes());
                let got = self.link()?.data(expected.len(), limit);
                same("came back over TCP", &got, &expected)
            }
            (DataPath::Program, true) => {
                let mut expected = std::mem::take(&mut self.expected);
                expected.extend(pattern.as_bytes());
                self.link()?.write(pattern.as_bytes());
                let program = self.program.as_mut();
                let got = program.map(|program| program.read(expected.len(), limit));
                same("came out of the client", &got.unwrap_or_default(), &expected)?;
                if let Some(program) = &mut self.program {
                    program.write(pattern.as_bytes());
                }
                let got = self.link()?.data(pattern.len(), limit);
                same("came from the client over TCP", &got, pattern.as_bytes())
            }
            _ => {
                self.unseen = true;
                let event = self.link()?.next(Duration::from_millis(OPEN));
                match event {
                    Event::Nothing | Event::Data(_) => Ok(()),
                    event => {
                        let came = describe(&event, OPEN);
                        fail_at(
                            &event,
                            format!("expected that TCP stays open for data; came {came}"),
                        )
                    }
                }
            }
        }
    }

    /// A fresh number, to tell the data of connections apart.
    fn nonce(&self) -> [u8; 4] {
        use std::hash::{BuildHasher, Hasher};
        let hash = std::collections::hash_map::RandomState::new().build_hasher().finish();
        (hash as u32).to_be_bytes()
    }
}

fn gid_of(first: &[u8], second: &[u8]) -> Option<[u8; 16]> {
    <[u8; 16]>::try_from([first, second].concat()).ok()
}

fn same(what: &str, got: &[u8], expected: &[u8]) -> Judged<()> {
    if got == expected {
        return Ok(());
    }
    let show = |bytes: &[u8]| to_hex(bytes.get(..64).unwrap_or(bytes));
    let says = format!(
        "{} bytes {what} instead of {}: {} instead of {}",
        got.len(),
        expected.len(),
        show(got),
        show(expected)
    );
    // The received part is right: the rest may be late.
    let is_of_load = expected.starts_with(got);
    Err(CaseEnd { verdict: Verdict::Fail, says, is_of_load })
}

/// Whether a dialogue goes on.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    On,
    Over,
}
