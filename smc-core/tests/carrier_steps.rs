// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sequences of `docs/ends.md`, one end at a time.

use smc_core::carrier::{
    Action, End, Input, Outgoing, Positions, Reading, Renewal, Role, Violation,
};
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::clc;
use smc_core::wire::record::{Kind, Reason, Record};

fn at(sent: u64, arrived: u64) -> Positions {
    Positions { sent, kept: sent, arrived, ..Positions::default() }
}

fn leave(at: u64, reason: Reason) -> Record {
    Record::Leave { at, reason, more: false }
}

const GOES: Reason = Reason::DeviceLeaves;

#[test]
fn leaving_in_order_takes_one_exchange_per_direction() {
    let mut a = End::on_ring(Role::Client, true);
    let mut b = End::on_ring(Role::Server, true);
    let actions = a.on(Input::Leave(GOES), &at(10, 3));
    assert_eq!(actions, [Action::StopRing, Action::Write(leave(10, GOES))]);
    // B has not got every byte yet.
    let actions = b.on(Input::Record(leave(10, GOES)), &at(4, 8));
    let answer = leave(4, Reason::Answer);
    let expected = [Action::StopRing, Action::Write(answer), Action::Await { to: 10 }];
    assert_eq!(actions, expected);
    let actions = a.on(Input::Record(answer), &at(10, 4));
    let received = Record::Received { at: 4 };
    assert_eq!(actions, [Action::ReadTcp { from: 4 }, Action::Write(received)]);
    assert_eq!(b.on(Input::Record(received), &at(4, 8)), [Action::SendTcp]);
    let actions = b.on(Input::Arrived, &at(4, 10));
    let received = Record::Received { at: 10 };
    let expected = [Action::ReadTcp { from: 10 }, Action::Write(received), Action::ReleaseRing];
    assert_eq!(actions, expected);
    let actions = a.on(Input::Record(received), &at(10, 4));
    assert_eq!(actions, [Action::SendTcp, Action::ReleaseRing]);
    assert!(a.is_on_tcp() && b.is_on_tcp());
}

#[test]
fn what_the_ring_lost_is_repeated_from_copies_or_resets() {
    let mut a = End::on_ring(Role::Client, true);
    a.on(Input::Leave(Reason::LinksGone), &Positions { kept: 6, ..at(10, 0) });
    let said = |got| Input::Record(Record::Received { at: got });
    let (_, actions) = a.step(said(7), &at(10, 0));
    assert_eq!(actions, [Action::Repeat { from: 7, to: 10 }, Action::SendTcp]);
    let (over, actions) = a.step(said(5), &at(10, 0));
    assert_eq!(actions, [Action::Reset(Violation::NoCopy { from: 5, kept: 6 })]);
    assert!(over.is_over());
    let (_, actions) = a.step(said(11), &at(10, 0));
    assert_eq!(actions, [Action::Reset(Violation::ReceivedBeyondSent { got: 11, sent: 10 })]);
}

#[test]
fn coming_back_begins_with_the_servers_change() {
    let mut client = End::on_tcp(Role::Client);
    let mut server = End::on_tcp(Role::Server);
    let none = Positions::default();
    assert_eq!(client.on(Input::Return, &none), [Action::Propose]);
    assert_eq!(server.on(Input::Message(clc::Kind::Proposal), &none), [Action::Prepare]);
    assert_eq!(server.on(Input::Prepared(true), &none), [Action::Accept]);
    assert_eq!(client.on(Input::Message(clc::Kind::Accept), &none), [Action::Prepare]);
    assert_eq!(client.on(Input::Prepared(true), &none), [Action::Confirm]);
    assert_eq!(server.on(Input::Message(clc::Kind::Confirm), &none), [Action::Prepare]);
    let change = Record::Change { at: 5 };
    let actions = server.on(Input::Prepared(true), &at(5, 0));
    assert_eq!(actions, [Action::Write(change), Action::SendRing]);
    let data = Record::Data { at: 0, len: 5, more: false };
    assert_eq!(client.on(Input::Record(data), &none), []);
    let actions = client.on(Input::Record(change), &at(2, 0));
    let back = Record::Change { at: 2 };
    assert_eq!(actions, [Action::ReadRing { from: 5 }, Action::Write(back), Action::SendRing]);
    server.on(Input::Record(Record::Data { at: 0, len: 2, more: false }), &none);
    assert_eq!(server.on(Input::Record(back), &none), [Action::ReadRing { from: 2 }]);
    for end in [client, server] {
        assert!(end.is_on_ring() && end.renewal() == Renewal::None);
    }
}

#[test]
fn an_end_that_was_said_on_the_ring_is_said_again() {
    let mut a = End::on_ring(Role::Client, true);
    let said = Positions { said: StateFlags::SENDING_DONE, ..at(3, 0) };
    assert_eq!(a.on(Input::Said, &said), [], "the words say it");
    a.on(Input::Leave(GOES), &said);
    let end = Record::End { at: 3, flags: StateFlags::SENDING_DONE };
    let actions = a.on(Input::Record(Record::Received { at: 3 }), &said);
    assert_eq!(actions, [Action::SendTcp, Action::Write(end)]);
    assert_eq!(a.outgoing(), Outgoing::Tcp);
    assert_eq!(a.incoming().reading(), Reading::Ring);
}

#[test]
fn nothing_follows_a_reset() {
    let mut a = End::on_ring(Role::Client, true);
    let data = Input::Record(Record::Data { at: 0, len: 1, more: false });
    let reset = Action::Reset(Violation::OutOfTurn(Kind::Data));
    assert_eq!(a.on(data, &at(0, 0)), [reset]);
    for input in [data, Input::Leave(GOES), Input::TcpReset] {
        assert_eq!(a.on(input, &at(0, 0)), []);
    }
}

/// A FIN between two records is an end of data, but not after the announcement of an urgent byte
/// still to come: the byte is missing for certain.
#[test]
fn a_fin_before_an_announced_urgent_byte_is_a_reset() {
    let fin = Input::TcpEnded { whole: true };
    for (len, ends) in [(4, false), (5, true)] {
        let mut a = End::on_tcp(Role::Server);
        assert_eq!(a.on(Input::Record(Record::Urgent { at: 5 }), &at(0, 0)), [Action::Mark(5)]);
        assert_eq!(a.on(Input::Record(Record::Data { at: 0, len, more: false }), &at(0, 0)), []);
        let expected = match ends {
            true => Action::PeerEnded,
            false => Action::Reset(Violation::Cut { at: 4 }),
        };
        assert_eq!(a.on(fin, &at(0, 0)), [expected]);
    }
}
