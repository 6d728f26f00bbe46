// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The tables of `carrier_table.md`: an end's actions for every input in every state.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::fmt::Write;

use smc_core::carrier::{Action, End, Input, Outgoing, Positions, Reading, Renewal, Role};
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::clc;
use smc_core::wire::record::{Reason, Record};

const BEGIN: &str = "<!-- states: begin -->\n";
const END: &str = "<!-- states: end -->\n";

/// 10 bytes were sent, and copies begin at 8; of the peer's, 8 have arrived.
const AT: Positions = Positions {
    sent: 10,
    kept: 8,
    unsent: false,
    urgent: None,
    said: StateFlags::empty(),
    arrived: 8,
};

fn leave(at: u64) -> Input {
    Input::Record(Record::Leave { at, reason: Reason::Answer, more: false })
}

fn inputs() -> Vec<(&'static str, Input)> {
    let record = Input::Record;
    let done = StateFlags::SENDING_DONE;
    vec![
        ("the device is about to go", Input::Leave(Reason::DeviceLeaves)),
        ("the ring is gone", Input::RingGone(Reason::DeviceGone)),
        ("bytes up to 9 arrive", Input::Arrived),
        ("LEAVE at 8", leave(8)),
        ("LEAVE at 9", leave(9)),
        ("RECEIVED at 10", record(Record::Received { at: 10 })),
        ("RECEIVED at 8", record(Record::Received { at: 8 })),
        ("RECEIVED at 7", record(Record::Received { at: 7 })),
        ("CHANGE at 8", record(Record::Change { at: 8 })),
        ("DATA at 8", record(Record::Data { at: 8, len: 1, more: false })),
        ("DATA at 7", record(Record::Data { at: 7, len: 1, more: false })),
        ("END at 8", record(Record::End { at: 8, flags: done })),
        ("URGENT at 8", record(Record::Urgent { at: 8 })),
        ("Proposal", Input::Message(clc::Kind::Proposal)),
        ("Accept", Input::Message(clc::Kind::Accept)),
        ("Confirm", Input::Message(clc::Kind::Confirm)),
        ("Decline", Input::Message(clc::Kind::Decline)),
        ("prepared", Input::Prepared(true)),
        ("not prepared", Input::Prepared(false)),
        ("time to come back", Input::Return),
        ("the program ends its direction", Input::Said),
        ("FIN", Input::TcpEnded { whole: true }),
        ("FIN within a record", Input::TcpEnded { whole: false }),
        ("TCP is reset", Input::TcpReset),
    ]
}

/// Each state, by the shortest sequence of inputs.
fn states() -> Vec<(&'static str, End)> {
    let walk = |role, inputs: &[Input]| {
        let mut end = End::on_ring(role, true);
        for input in inputs {
            end.on(*input, &AT);
            assert!(!end.is_over(), "{inputs:?}");
        }
        end
    };
    let goes = Input::Leave(Reason::DeviceLeaves);
    let received = Input::Record(Record::Received { at: 10 });
    let on_tcp = [goes, received, leave(8)];
    let message = Input::Message;
    let (yes, change) = (Input::Prepared(true), Input::Record(Record::Change { at: 8 }));
    let client = |more: &[Input]| walk(Role::Client, &[&on_tcp[..], more].concat());
    let server = |more: &[Input]| walk(Role::Server, &[&on_tcp[..], more].concat());
    let (propose, accept) = (message(clc::Kind::Proposal), message(clc::Kind::Accept));
    let confirm = message(clc::Kind::Confirm);
    let states = vec![
        ("On the ring", walk(Role::Client, &[])),
        ("Leaving", walk(Role::Client, &[goes])),
        ("Leaving, and the peer leaves", walk(Role::Client, &[leave(9)])),
        ("Leaving, and the peer has left", walk(Role::Client, &[leave(8)])),
        ("Left", walk(Role::Client, &[goes, received])),
        ("Left, and the peer leaves", walk(Role::Client, &[leave(9), received])),
        ("On TCP, client", client(&[])),
        ("On TCP, server", server(&[])),
        ("Proposed", client(&[Input::Return])),
        ("Confirming", client(&[Input::Return, accept])),
        ("Confirmed", client(&[Input::Return, accept, yes])),
        ("Accepting", server(&[propose])),
        ("Accepted", server(&[propose, yes])),
        ("Attaching", server(&[propose, yes, confirm])),
        ("Changed", server(&[propose, yes, confirm, yes])),
    ];
    let back = client(&[Input::Return, accept, yes, change]);
    assert!(back.is_on_ring() && back.renewal() == Renewal::None);
    states
}

fn table() -> String {
    let mut out = String::new();
    for (name, end) in states() {
        let _ = write!(out, "\n### {name}\n\n{}.\n", about(&end));
        out.push_str("\n| input | next | actions |\n|---|---|---|\n");
        let (mut nothing, mut resets) = (Vec::new(), Vec::new());
        for (input_name, input) in inputs() {
            let mut at = AT;
            match input {
                Input::Arrived => at.arrived = 9,
                Input::Said => at.said = StateFlags::SENDING_DONE,
                _ => {}
            }
            let (next, actions) = end.step(input, &at);
            match actions.as_slice() {
                [Action::Reset(_)] => resets.push(input_name),
                [] if next == end => nothing.push(input_name),
                actions => {
                    let same = about(&next) == about(&end);
                    let to = if same { "same".to_owned() } else { about(&next) };
                    let list: Vec<_> = actions.iter().map(words).collect();
                    let _ = writeln!(out, "| {input_name} | {to} | {} |", list.join("; "));
                }
            }
        }
        let _ = write!(out, "\nWithout effect: {}.\n", nothing.join(", "));
        let _ = writeln!(out, "Reset: {}.", resets.join(", "));
    }
    wrapped(&out)
}

/// Lines of at most 100 characters, apart from tables.
fn wrapped(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let mut length = 0;
        for word in line.split(' ') {
            if length > 0 && length + word.len() > 98 && !line.starts_with('|') {
                out.push('\n');
                length = 0;
            } else if length > 0 {
                out.push(' ');
            }
            out.push_str(word);
            length += word.len() + 1;
        }
        out.push('\n');
    }
    out
}

fn about(end: &End) -> String {
    let own = match end.outgoing() {
        Outgoing::Ring => "ring".to_owned(),
        Outgoing::Leaving { at, .. } => format!("left at {at}"),
        Outgoing::Tcp => "TCP".to_owned(),
    };
    let peers = match end.incoming().reading() {
        Reading::Ring => "ring".to_owned(),
        Reading::Until(at) => format!("ring until {at}"),
        Reading::Tcp(at) => format!("TCP at {at}"),
    };
    let renewal = match end.renewal() {
        Renewal::None => String::new(),
        Renewal::Confirmed { leave: Some(_) } => "; Confirmed, to be left at once".to_owned(),
        Renewal::Confirmed { leave: None } => "; Confirmed".to_owned(),
        other => format!("; {other:?}"),
    };
    format!("Own: {own}; peer's: {peers}{renewal}")
}

fn words(action: &Action) -> String {
    match action {
        Action::Write(record) => format!("{} at {}", record.kind().name(), record.at()),
        Action::StopRing => "stop the ring".into(),
        Action::Repeat { from, to } => format!("repeat {from} to {to}"),
        Action::SendTcp => "send by TCP".into(),
        Action::SendRing => "send by the ring".into(),
        Action::Await { to } => format!("await {to}"),
        Action::ReadTcp { from } => format!("read TCP from {from}"),
        Action::ReadRing { from } => format!("read the ring from {from}"),
        Action::ReleaseRing => "release the ring".into(),
        Action::PeerSaid(_) => "the peer is done".into(),
        Action::PeerEnded => "the peer has ended".into(),
        Action::Mark(at) => format!("mark {at}"),
        Action::DropRing => "drop the new ring".into(),
        other => format!("{other:?}").to_lowercase(),
    }
}

#[test]
fn the_table_of_the_document_is_that_of_the_code() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/carrier_table.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (head, rest) = page.split_once(BEGIN).unwrap();
    let (stored, tail) = rest.split_once(END).unwrap();
    let table = table();
    if std::env::var_os("UPDATE_TABLES").is_some() {
        std::fs::write(path, format!("{head}{BEGIN}{table}{END}{tail}")).unwrap();
    } else {
        assert!(
            stored == table,
            "tests/carrier_table.md differs from the code; UPDATE_TABLES=1 cargo test writes it anew"
        );
    }
}

#[test]
fn every_state_but_a_reset_takes_the_end_of_tcp() {
    for (name, end) in states() {
        assert!(end.step(Input::TcpReset, &AT).0.is_over(), "{name}");
        assert!(end.step(Input::TcpEnded { whole: false }, &AT).0.is_over(), "{name}");
    }
}
