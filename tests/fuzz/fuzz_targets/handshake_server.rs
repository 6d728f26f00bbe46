//! A server between a client that sends anything: what it accepts is its own and was offered, and
//! what it sends can be read.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use smc_core::handshake::{
    AfterDecline, AwaitProposal, ClientStep, ConfirmStep, Instant, ServerStep, start,
};
use smc_core::wire::clc::Message;
use smc_core::wire::ids::LinkId;
use smc_fuzz::{Bytes, Host, dmbe, read};

#[derive(Arbitrary, Debug)]
struct Input {
    server: Host,
    client: Host,
    proposal: Bytes,
    /// Which of the devices that fit.
    candidate: u8,
    /// The client is known: subsequent contact.
    known: bool,
    confirm: Bytes,
    piece: u8,
}

fuzz_target!(|input: Input| {
    let now = Instant(0);
    let (server, client) = (input.server.config(2), input.client.config(1));
    let (honest_client, proposal) = match start(client, now) {
        Ok((client, proposal)) => (Some(client), proposal),
        Err(decline) => (None, decline.message),
    };
    let step = AwaitProposal::new(server.clone(), now);
    let Ok(proposal) = read(step.reader(), &input.proposal.apply(proposal), input.piece) else {
        return;
    };
    let selection = match step.handle(&proposal) {
        ServerStep::Eligible(selection) => selection,
        ServerStep::Decline(decline) => {
            assert_eq!(decline.then, AfterDecline::FallBack);
            assert!(matches!(Message::parse(&decline.message), Ok(Message::Decline(_))));
            return;
        }
        ServerStep::PeerDeclined(_) | ServerStep::Fail(_) => return,
    };
    let candidates = selection.candidates();
    assert!(!candidates.is_empty());
    for candidate in candidates {
        let ours = |d: &&_| {
            let smc_core::handshake::IsmDevice { chid, gid } = **d;
            chid == candidate.chid && gid == candidate.local
        };
        assert!(server.devices.iter().find(ours).is_some(), "{candidate:?} is not ours");
    }
    let candidate = candidates[usize::from(input.candidate) % candidates.len()];
    let known = input.known.then(|| selection.terms());
    let eid = selection.eid();
    assert!(server.ueids.contains(&eid) || server.seid == Some(eid));
    let (step, accept) = selection.accept(candidate, known, dmbe(22), LinkId([1; 4]), now);
    assert!(matches!(Message::parse(&accept), Ok(Message::AcceptD2(_))));

    // The honest client may not see its own Proposal in the answer; then there is no honest Confirm.
    let offered = honest_client.map(|client| client.handle(&accept, |_, _| known));
    let confirm = match offered {
        Some(ClientStep::Offered(accepted)) => accepted.confirm(dmbe(11), LinkId([2; 4])).1,
        _ => Vec::new(),
    };
    let Ok(confirm) = read(step.reader(), &input.confirm.apply(confirm), input.piece) else {
        return;
    };
    match step.handle(&confirm) {
        ConfirmStep::Established(established) => {
            assert_eq!(established.devices, candidate);
            assert_eq!(established.own, dmbe(22));
            assert_eq!(established.first_contact, known.is_none());
        }
        ConfirmStep::Decline(decline) => assert_eq!(decline.then, AfterDecline::Break),
        ConfirmStep::PeerDeclined(_) | ConfirmStep::Fail(_) => {}
    }
});
