// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The part of a dialogue over a link of SMC-R.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::case_end::fail_at;
use super::{Dialogue, Judged, LOOK, Progress, Verdict, lacks};
use crate::case::Step;
use crate::link::{Event, Sender};
use crate::llc::Llc;
use crate::message::{Kind, Message, parse_llc};
use crate::outcome::{describe, describe_all, is_open};
use crate::peer::Peer;
use crate::rdma::LinkEnd;
use crate::stream::{Element, Pair, Rmbs, Stream};
use crate::value::as_number;

/// How long the last word to a target may take.
const LAST_WORD: Duration = Duration::from_millis(50);

impl Dialogue<'_> {
    /// A queue pair for a message with the suite's queue pair in a field. Without an RNIC the
    /// number is a placeholder.
    pub(super) fn make_queue_pair(&mut self, which: usize) -> Judged<()> {
        let is_next = self.queue_pairs.len() == which;
        let Some(rdma) = self.context.rdma.filter(|_| is_next) else { return Ok(()) };
        let made = rdma.queue_pair().map_err(|why| (Verdict::NotObservable, why))?;
        let three = |number: u32| number.to_be_bytes().get(1..).unwrap_or_default().to_vec();
        let start = if which == 0 { "" } else { "second_" };
        self.scope.set(format!("{start}qpn"), three(made.qpn()));
        self.scope.set(format!("{start}psn"), three(made.psn()));
        self.scope.set(format!("{start}rkey"), made.rkey().to_be_bytes());
        self.scope.set(format!("{start}address"), made.address().to_be_bytes());
        self.queue_pairs.push(Rc::new(RefCell::new(Pair::new(made))));
        // The server's Add Link precedes the client's need for a queue pair.
        match (which, &self.context.peer) {
            (1, Peer::Server { .. }) => self.connect_queue_pair(1, "llc-add-link"),
            _ => Ok(()),
        }
    }

    /// Connects a queue pair with the queue pair in the target's message.
    pub(super) fn connect_queue_pair(&mut self, which: usize, message: &str) -> Judged<()> {
        let field = |name: &str| self.scope.get(&format!("{message}.{name}"));
        let number = |name: &str| field(name).map_or(0, as_number);
        let gid = field("gid").and_then(|gid| <[u8; 16]>::try_from(gid).ok());
        let (Some(queue_pair), Some(gid)) = (self.queue_pairs.get(which), gid) else {
            return Ok(());
        };
        let peer = LinkEnd {
            gid,
            qpn: u32::try_from(number("qpn")).unwrap_or(0),
            psn: u32::try_from(number("psn")).unwrap_or(0),
            mtu: u8::try_from(number("mtu")).unwrap_or(0),
        };
        if which == 0 {
            let version = number("version").max(1);
            self.scope.set("llc_version", [u8::try_from(version).unwrap_or(1)]);
        }
        queue_pair.borrow_mut().connect(&peer).map_err(|why| (Verdict::NotObservable, why))?;
        self.is_linked = true;
        Ok(())
    }

    /// Sends a message of LLC. The end of the link is no error: the following steps show the end.
    pub(super) fn write_llc(&mut self, on: usize, bytes: &[u8]) -> Judged<()> {
        let Some(queue_pair) = self.queue_pairs.get(on) else {
            return Err((Verdict::NotObservable, "there is no link".to_owned()).into());
        };
        let sent = queue_pair.borrow_mut().send(bytes);
        let event = sent.err().map_or(String::new(), |why| format!("not sent: {why}"));
        self.link()?.note_llc(Sender::Suite, bytes, &event);
        Ok(())
    }

    /// The data path over the first link, with the elements named in the messages.
    pub(super) fn stream_over_link(&self) -> Judged<Stream> {
        let [own, theirs] = match self.context.peer {
            Peer::Server { .. } => ["confirm", "accept"],
            Peer::Client { .. } => ["accept", "confirm"],
        };
        let number =
            |kind: &str, name: &str| self.scope.get(&format!("{kind}.{name}")).map_or(0, as_number);
        let len = |kind: &str| match number(kind, "size") {
            size @ 0..=15 => Ok(16384_u32 << size),
            size => Err(lacks(format!("{size} is no size of an element"))),
        };
        let word = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let before = number(theirs, "index").saturating_sub(1) * u64::from(len(theirs)?);
        let element = Element {
            rkey: word(number(theirs, "rkey")),
            address: number(theirs, "address").wrapping_add(before),
            len: len(theirs)?,
            token: word(number(theirs, "token")),
        };
        let token = word(number(own, "token")).to_be_bytes();
        let pair = self.queue_pairs.first().ok_or_else(|| lacks("there is no link".into()))?;
        let rmbs = Rmbs::new(Rc::clone(pair), (len(own)?, token), element);
        Ok(Stream::over_link(rmbs, self.context.time_factor))
    }

    /// Records the messages of data since the last call.
    pub(super) fn note_data(&mut self) {
        let Some(link) = &mut self.link else { return };
        for pair in &self.queue_pairs {
            pair.borrow_mut().take_recorded().into_iter().for_each(|one| link.note_cdc(one));
        }
    }

    /// Tells the target to end all links: a client's request and a server's command in one message.
    pub(super) fn end_link(&mut self) {
        if !std::mem::take(&mut self.is_linked) {
            return;
        }
        let is_v2 = self.scope.get("llc_version").is_some_and(|version| version == [2]);
        let head = if is_v2 { [0x24, 0, 44, 0x40] } else { [4, 44, 0, 0x40] };
        let mut word = [0; 44];
        for (to, from) in word.iter_mut().zip(head.into_iter().chain([0, 0, 3, 0, 0])) {
            *to = from;
        }
        if self.write_llc(0, &word).is_ok()
            && let Some(queue_pair) = self.queue_pairs.first()
        {
            // The queue pair has to live until the message is away.
            let _ = queue_pair.borrow_mut().receive(LAST_WORD);
        }
    }

    /// The next event on a link or on TCP, with the index of the link.
    fn next_of_link(&mut self, until: Instant) -> Judged<(usize, Event)> {
        loop {
            let event = self.link()?.next(Duration::from_millis(1));
            if !matches!(event, Event::Nothing) {
                return Ok((0, event));
            }
            if self.queue_pairs.is_empty() {
                return Err((Verdict::NotObservable, "there is no link".to_owned()).into());
            }
            for on in 0..self.queue_pairs.len() {
                let pair = self.queue_pairs.get(on);
                let received = pair.map(|pair| pair.borrow_mut().receive(LOOK));
                self.note_data();
                match received.unwrap_or(Ok(None)) {
                    Ok(Some(bytes)) => {
                        self.link()?.note_llc(Sender::Target, &bytes, "");
                        let read = parse_llc(&bytes);
                        return Ok((on, read.map_or_else(Event::Unreadable, Event::Message)));
                    }
                    Ok(None) => {}
                    Err(why) => {
                        self.link()?.note_llc(Sender::Target, &[], &why);
                        return Ok((on, Event::LinkDown(why)));
                    }
                }
            }
            if Instant::now() >= until {
                return Ok((0, Event::Nothing));
            }
        }
    }

    /// Waits for an outcome on the link. Answers Test Link meanwhile, and skips messages unrelated
    /// to the outcomes.
    pub(super) fn expect_llc(&mut self, step: &Step) -> Judged<Progress> {
        let is_silent = step.expect.iter().any(is_open);
        let within = self.limit_of(step);
        let until = Instant::now() + Duration::from_millis(within);
        let mut others = Vec::new();
        loop {
            let (on, event) = self.next_of_link(until)?;
            if let Event::Message(message) = &event {
                self.learn(message);
                self.answer_test(on, message)?;
                if accepts_link(message) && matches!(self.context.peer, Peer::Client { .. }) {
                    self.connect_queue_pair(1, "llc-add-link")?;
                }
            }
            let is_over = matches!(event, Event::End | Event::Reset | Event::LinkDown(_));
            if is_over {
                (self.is_linked, self.carries_smc) = (false, false);
            }
            let is_only = self.queue_pairs.len() == 1;
            let event = if is_only && ends_link(&event) && wants_down(step) {
                Event::LinkDown("the target deletes it".into())
            } else {
                event
            };
            let (known, wrong) = self.find(&step.expect, &event)?;
            if known.is_some() {
                return Ok(if is_over { Progress::Over } else { Progress::On });
            }
            let breaks_silence = is_silent && !may_come_any_time(&event);
            let is_last =
                matches!(event, Event::Nothing) || is_over || wrong.is_some() || breaks_silence;
            others.push(describe(&event, within));
            if !is_last {
                continue;
            }
            let came = others.join(", ");
            let why = wrong.map_or(String::new(), |why| format!("; {why}"));
            let says = format!("expected {}; came {came}{why}", describe_all(&step.expect));
            return match self.find(&step.linux, &event)?.0 {
                Some(_) => Err((Verdict::DeviatesAsLinux, says).into()),
                None => fail_at(&event, says),
            };
        }
    }

    /// Sends the target's Test Link back.
    fn answer_test(&mut self, on: usize, message: &Message) -> Judged<()> {
        if message.kind != Kind::Llc(Llc::TestLink) || message.number("reply") == 1 {
            return Ok(());
        }
        let mut answer = message.bytes.clone();
        if let Some(flags) = answer.get_mut(3) {
            *flags |= 0x80;
        }
        self.write_llc(on, &answer)
    }
}

/// Whether a target sends such a message on its own, without a preceding request.
fn may_come_any_time(event: &Event) -> bool {
    let Event::Message(message) = event else { return false };
    let kinds = [Kind::Llc(Llc::TestLink), Kind::Llc(Llc::ConfirmRkey)];
    kinds.contains(&message.kind) && message.number("reply") == 0
}

/// Whether a client agrees to another link.
fn accepts_link(message: &Message) -> bool {
    let is_answer = message.kind == Kind::Llc(Llc::AddLink) && message.number("reply") == 1;
    is_answer && message.number("rejected") == 0
}

/// Whether a message ends the only link.
fn ends_link(event: &Event) -> bool {
    let Event::Message(message) = event else { return false };
    message.kind == Kind::Llc(Llc::DeleteLink) && message.number("reply") == 0
}

/// Whether an end of the link is among the outcomes.
fn wants_down(step: &Step) -> bool {
    step.expect.iter().any(|outcome| outcome.as_str() == Some("down"))
}
