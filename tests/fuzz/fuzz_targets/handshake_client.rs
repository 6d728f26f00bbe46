//! A client whose server answers anything: it uses no device that it did not offer.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use smc_core::handshake::{
    AfterDecline, AwaitProposal, ClientStep, Instant, ServerStep, Terms, late_decline, start,
};
use smc_core::wire::clc::Message;
use smc_core::wire::ids::{Features, LinkId, Release};
use smc_fuzz::{Bytes, Host, dmbe, read};

#[derive(Arbitrary, Debug)]
struct Input {
    client: Host,
    server: Host,
    /// What server and client remember of each other.
    server_knows: bool,
    client_knows: bool,
    accept: Bytes,
    piece: u8,
    late: Vec<u8>,
}

fuzz_target!(|input: Input| {
    let now = Instant(0);
    let (client, server) = (input.client.config(1), input.server.config(2));
    let Ok((step, proposal)) = start(client.clone(), now) else { return };
    assert!(matches!(Message::parse(&proposal), Ok(Message::Proposal(_))));
    let terms = Terms { release: Release::V2_1, features: Features::EMULATED_ISM };
    let honest = match AwaitProposal::new(server, now).handle(&proposal) {
        ServerStep::Eligible(selection) => {
            let candidate = selection.candidates()[0];
            let known = input.server_knows.then_some(terms);
            selection.accept(candidate, known, dmbe(22), LinkId([1; 4]), now).1
        }
        ServerStep::Decline(decline) => decline.message,
        other => panic!("our own Proposal led to {other:?}"),
    };
    let Ok(accept) = read(step.reader(), &input.accept.apply(honest), input.piece) else { return };
    let _ = late_decline(&input.late);
    match step.handle(&accept, |_, _| input.client_knows.then_some(terms)) {
        ClientStep::Offered(accepted) => {
            let devices = accepted.devices();
            let ours = |d: &&_| {
                let smc_core::handshake::IsmDevice { chid, gid } = **d;
                chid == devices.chid && gid == devices.local
            };
            assert!(client.devices.iter().find(ours).is_some(), "{devices:?} was not offered");
            assert!(client.ueids.contains(&accepted.eid()) || client.seid == Some(accepted.eid()));
            let (established, confirm) = accepted.confirm(dmbe(11), LinkId([2; 4]));
            assert_eq!(established.devices, devices);
            assert!(matches!(Message::parse(&confirm), Ok(Message::ConfirmD2(_))));
        }
        ClientStep::Decline(decline) => {
            assert_eq!(decline.then, AfterDecline::FallBack);
            assert!(matches!(Message::parse(&decline.message), Ok(Message::Decline(_))));
        }
        ClientStep::OfferedR(_) => panic!("SMC-R was not offered"),
        ClientStep::PeerDeclined(_) | ClientStep::Fail(_) => {}
    }
});
