// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The type of SMC that a pair of hosts agrees on: every combination of both hosts' resources,
//! against a model of a few lines.

use std::sync::Arc;

use smc_core::handshake::{
    AwaitProposal, Choice, ClientStep, Config, ConfirmStep, ConfirmStepR, DeclineReason, Kinds,
    KnownLink, Route, ServerStep, SmcKind, start_on,
};
use smc_core::wire::clc::{Message, Version};
use smc_core::wire::ids::{Features, Release};

use crate::smcr_support::*;
use crate::support::*;

/// The common properties of the two hosts, and each host's own.
#[derive(Clone, Copy, Debug)]
struct Case {
    client: Kinds,
    server: Kinds,
    common_eid: bool,
    common_subnet: bool,
    client_release: Release,
    server_release: Release,
    ipv6: bool,
}

impl Case {
    fn hosts(&self) -> (Config, Config) {
        let make = |n, kinds, release| {
            let mut config = host_r(n, kinds);
            // Platform devices are of any release.
            config.devices = vec![platform(7, n)];
            config.release = release;
            config
        };
        let client = make(CLIENT, self.client, self.client_release);
        let mut server = make(SERVER, self.server, self.server_release);
        if !self.common_eid {
            server.ueids = vec![eid("OTHER")];
        }
        (client, server)
    }

    fn routes(&self) -> (Route, Route) {
        let make = |n| {
            let route = if self.ipv6 { route_v6(n) } else { route_v4(n) };
            Route { ism: Some(platform(5, n)), ..route }
        };
        let mut server = make(SERVER);
        if !self.common_subnet {
            server.subnets = vec![subnet_v4(1), subnet_v6(10)];
        }
        (make(CLIENT), server)
    }

    /// The server's reason against an offered type, if any.
    fn refusal(&self, kind: SmcKind) -> Option<DeclineReason> {
        if !self.server.has(kind) {
            return Some(DeclineReason::NotConfigured(kind));
        }
        match kind {
            SmcKind::SmcdV2 if !self.common_eid => Some(DeclineReason::NoCommonEid),
            SmcKind::SmcrV2 if !self.common_eid => Some(DeclineReason::NoCommonUeid),
            SmcKind::SmcdV1 | SmcKind::SmcrV1 if !self.common_subnet => {
                Some(DeclineReason::DifferentSubnet)
            }
            _ => None,
        }
    }

    /// Linux's choice: one type after the other, the first working one.
    fn winner(&self) -> Option<SmcKind> {
        SmcKind::PREFERENCE
            .into_iter()
            .find(|kind| self.client.has(*kind) && self.refusal(*kind).is_none())
    }

    fn release(&self) -> Release {
        self.client_release.min(self.server_release)
    }
}

/// The type agreed by the hosts, after a check of equal results at both ends; `None` if the server
/// declines.
fn shake(case: &Case) -> Option<SmcKind> {
    let (client, server) = case.hosts();
    let (client_route, server_route) = case.routes();
    let Ok((awaits, proposal)) = start_on(Arc::new(client), client_route.clone(), NOW) else {
        assert!(case.client.is_empty());
        return None;
    };
    assert!(matches!(Message::parse(&proposal), Ok(Message::Proposal(_))));
    let listener = AwaitProposal::new(Arc::new(server), NOW);
    let selection = match listener.handle_on(&proposal, || server_route.clone()) {
        ServerStep::Eligible(selection) => selection,
        ServerStep::Decline(sent) => {
            declined(case, &sent.message);
            let step = awaits.handle(&sent.message, |_, _| None);
            assert!(matches!(step, ClientStep::PeerDeclined(_)));
            return None;
        }
        other => panic!("{case:?}: {other:?}"),
    };
    let possible: Vec<SmcKind> = SmcKind::PREFERENCE
        .into_iter()
        .filter(|kind| case.client.has(*kind) && case.refusal(*kind).is_none())
        .collect();
    let choices: Vec<Choice> = selection.choices().collect();
    let kinds: Vec<SmcKind> = choices.iter().map(Choice::kind).collect();
    assert_eq!(kinds, possible, "{case:?}");
    for kind in SmcKind::PREFERENCE.into_iter().filter(|kind| case.client.has(*kind)) {
        assert_eq!(selection.rejected().of(kind), case.refusal(kind), "{case:?}");
    }
    match choices[0] {
        Choice::D(version, devices) => {
            let (confirming, accept) =
                selection.accept(devices, None, server_dmbe(), SERVER_LINK, NOW);
            let ClientStep::Offered(accepted) = awaits.handle(&accept, |_, _| None) else {
                panic!("{case:?}")
            };
            let (here, confirm) = accepted.confirm(client_dmbe(), CLIENT_LINK);
            let ConfirmStep::Established(there) = confirming.handle(&confirm) else { panic!() };
            assert_eq!((here.version, there.version), (version, version));
            assert_eq!((here.terms, here.eid), (there.terms, there.eid));
            if version == Version::V2 {
                assert_eq!(here.terms.release, case.release());
            }
        }
        Choice::R(rnic) => {
            let version = rnic.version();
            let own = end(SERVER, version, &server_route);
            let (confirming, accept) = selection.accept_r(version, None, own, NOW).unwrap();
            let ClientStep::OfferedR(accepted) =
                awaits.handle_with(&accept, |_, _| None, |_| KnownLink::NoGroup)
            else {
                panic!("{case:?}")
            };
            let own = end(CLIENT, version, &client_route);
            let (here, confirm) = accepted.confirm(own, &[]);
            let step = confirming.handle(&confirm, |_| false);
            let ConfirmStepR::Established(there) = step else { panic!("{case:?}: {step:?}") };
            assert_eq!((here.terms, here.eid), (there.terms, there.eid));
            assert_eq!(here.terms.version, version);
            if version == Version::V2 {
                assert_eq!(here.terms.release, case.release());
                let both = case.release() == Release::V2_1;
                assert_eq!(here.terms.features.contains(Features::EMULATED_ISM), both);
            }
        }
    }
    Some(kinds[0])
}

/// Checks for a reason for each offered type, and none for others (CLCV2-79, CLCV2-80).
fn declined(case: &Case, message: &[u8]) {
    let Ok(Message::Decline(decline)) = Message::parse(message) else { panic!() };
    let code = |kind| {
        let reason = case.refusal(kind).filter(|_| case.client.has(kind));
        reason.map_or(0, |reason| reason.code().value())
    };
    let best = SmcKind::PREFERENCE.into_iter().find(|kind| case.client.has(*kind)).unwrap();
    assert_eq!(decline.diagnosis.0, code(best), "{case:?}");
    if decline.version == Version::V2 {
        let reasons = decline.reasons;
        assert_eq!(reasons.smcd_v2.0, code(SmcKind::SmcdV2));
        assert_eq!(reasons.smcd_v1.0, code(SmcKind::SmcdV1));
        assert_eq!(reasons.smcr_v2.0, code(SmcKind::SmcrV2));
        assert_eq!(reasons.smcr_v1.0, code(SmcKind::SmcrV1));
    }
    let v2 = case.client.intersects(Kinds::SMCD_V2 | Kinds::SMCR_V2);
    assert_eq!((message.len(), message[7]), if v2 { (44, 0x20) } else { (28, 0x10) });
}

// Shows: CLCV2-4, CLCV2-32, CLCV2-33, CLCV2-34, CLCV2-79, CLCV2-80, CLCV2-88.
#[test]
fn the_best_type_that_both_ends_can_use_is_chosen() {
    let mut wins = [0_u32; 5];
    for (client, server) in (0..16).flat_map(|c| (0..16).map(move |s| (c, s))) {
        for bits in 0..32_u8 {
            let release = |bit| if bits & bit == 0 { Release::V2_1 } else { Release::V2_0 };
            let case = Case {
                client: Kinds::from_bits_truncate(client),
                server: Kinds::from_bits_truncate(server),
                common_eid: bits & 1 != 0,
                common_subnet: bits & 2 != 0,
                client_release: release(4),
                server_release: release(8),
                ipv6: bits & 16 != 0,
            };
            let winner = case.winner();
            assert_eq!(shake(&case), winner, "{case:?}");
            let place = SmcKind::PREFERENCE.into_iter().position(|kind| Some(kind) == winner);
            wins[place.unwrap_or(4)] += 1;
        }
    }
    assert!(wins.iter().all(|count| *count > 100), "every end is reached: {wins:?}");
}

#[test]
fn a_choice_that_comes_to_nothing_gives_way_to_the_next() {
    let all = Case {
        client: Kinds::all(),
        server: Kinds::all(),
        common_eid: true,
        common_subnet: true,
        client_release: Release::V2_1,
        server_release: Release::V2_1,
        ipv6: false,
    };
    let ((client, server), (client_route, server_route)) = (all.hosts(), all.routes());
    let (_, proposal) = propose_on(&client, &client_route);
    let mut selection = eligible_on(&server, &server_route, &proposal);
    selection.refuse(SmcKind::SmcdV2, DeclineReason::Unreachable);
    selection.refuse(SmcKind::SmcdV1, DeclineReason::NoDmb);
    let gone = selection.decline(DeclineReason::NoMemory);
    let Ok(Message::Decline(decline)) = Message::parse(&gone.message) else { panic!() };
    assert_eq!(gone.reason, DeclineReason::Unreachable, "of the best type");
    let reasons = decline.reasons;
    let codes = [reasons.smcd_v2, reasons.smcd_v1, reasons.smcr_v2, reasons.smcr_v1];
    assert_eq!(codes.map(|code| code.0), [0x0303_0007, 0x030d_0000, 0x0101_0000, 0x0101_0000]);
}

/// The lookup of the route is work, avoided for a Proposal of SMC-Dv2.
// Shows: CLCV2-35.
#[test]
fn the_route_is_asked_for_only_if_it_matters() {
    let asked = |client: Kinds, server: Kinds| {
        let (_, proposal) = propose_on(&all_of(CLIENT, client), &both_routes(CLIENT));
        let mut asked = false;
        AwaitProposal::new(Arc::new(all_of(SERVER, server)), NOW).handle_on(&proposal, || {
            asked = true;
            both_routes(SERVER)
        });
        asked
    };
    assert!(!asked(Kinds::SMCD_V2, Kinds::all()));
    assert!(!asked(Kinds::all(), Kinds::SMCD_V2));
    assert!(!asked(Kinds::SMCR_V2 | Kinds::SMCD_V2, Kinds::SMCR_V1 | Kinds::SMCD_V2));
    for kind in [Kinds::SMCD_V1, Kinds::SMCR_V2, Kinds::SMCR_V1] {
        assert!(asked(Kinds::all(), kind));
        assert!(asked(kind, Kinds::all()));
    }
}

fn all_of(n: u8, kinds: Kinds) -> Config {
    let mut config = host_r(n, kinds);
    config.devices = vec![platform(7, n)];
    config
}

fn both_routes(n: u8) -> Route {
    Route { ism: Some(platform(5, n)), ..route_v4(n) }
}

/// A Proposal lacks types without the client's resources (CLCV2-2, CLCV2-5).
// Shows: CLC-7, CLC-10, CLC-59, CLCV2-2, CLCV2-12, CLCV2-26, CLCV2-88.
#[test]
fn client_offers_what_it_has() {
    let full = both_routes(CLIENT);
    let mut no_rnic = full.clone();
    no_rnic.rnic = None;
    let mut only_v2 = full.clone();
    only_v2.rnic.as_mut().unwrap().gid_v1 = None;
    let mut only_v1 = full.clone();
    only_v1.rnic.as_mut().unwrap().gid_v2 = None;
    let mut other_family = full.clone();
    other_family.rnic.as_mut().unwrap().gid_v2 = Some(gid_v6(CLIENT));
    let mut no_subnet = full.clone();
    no_subnet.subnets = vec![subnet_v6(9)];
    // Byte 7: version, types of version 2, types of version 1; 0 is R, 1 is D, 2 none, 3 both.
    for (route, byte) in [
        (full, 0x2f),
        (no_rnic, 0x25),
        (only_v2, 0x2d),
        (only_v1, 0x27),
        (other_family, 0x27),
        (no_subnet, 0x2e),
        (Route::default(), 0x26),
    ] {
        let (_, proposal) = propose_on(&all_of(CLIENT, Kinds::all()), &route);
        assert_eq!(proposal[7], byte, "{route:?}");
        // Without SMC-R the MAC has no meaning; with SMC-R the MAC is present (CLCV2-12).
        let r = byte & 3 != 1 && byte & 3 != 2 || byte >> 2 & 3 != 1;
        assert_eq!(proposal[32..38] == mac(CLIENT).0, r, "{byte:#x}");
    }
    let mut nameless = all_of(CLIENT, Kinds::all());
    nameless.ueids.clear();
    assert_eq!(propose_on(&nameless, &both_routes(CLIENT)).1[7], 0x2b, "version 1 needs no EID");
    nameless.seid = Some(eid("SYSTEM"));
    let (_, proposal) = propose_on(&nameless, &both_routes(CLIENT));
    assert_eq!(proposal[7], 0x27, "a system EID is of no use to SMC-R");
    let mut anonymous = all_of(CLIENT, Kinds::all());
    anonymous.peer_id = Default::default();
    assert_eq!(propose_on(&anonymous, &both_routes(CLIENT)).1[7], 0x2d, "SMC-Rv1 needs a peer id");
}

/// Linux reads the number of prefixes from this field, even without prefixes.
// Shows: CLCV2-5.
#[test]
fn base_gid_is_zero_without_a_type_of_version_1() {
    let mut config = all_of(CLIENT, Kinds::SMCD_V2 | Kinds::SMCR_V2);
    config.devices.push(platform(5, CLIENT));
    let (_, proposal) = propose_on(&config, &both_routes(CLIENT));
    assert_eq!(proposal[38..50], [0; 12]);
}
