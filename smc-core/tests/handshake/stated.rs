// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Values stated or requested by an end although its peer could do without: a peer that looks only
//! at messages does not notice an error here.

use std::sync::Arc;

use smc_core::handshake::{
    AwaitProposal, ClientStep, Config, DeclineReason, Kinds, KnownLink, Route, ServerStep, SmcKind,
};
use smc_core::wire::clc::Version;
use smc_core::wire::ids::{Features, LinkLimits, PeerId};

use crate::smcr_support::*;
use crate::support::*;

/// Limits and features in Accept and Confirm of SMC-R.
const LIMITS: std::ops::Range<usize> = 140..142;
const FEATURES: std::ops::Range<usize> = 142..144;

/// Whether a server asks for the route of the connection.
fn asks(server: &Config, proposal: &[u8]) -> bool {
    let mut asked = false;
    let step = AwaitProposal::new(Arc::new(server.clone()), NOW).handle_on(proposal, || {
        asked = true;
        Route::default()
    });
    assert!(matches!(step, ServerStep::Eligible(_)), "{step:?}");
    asked
}

fn all_kinds(mut host: Config) -> Config {
    host.kinds = Kinds::all();
    host
}

// Shows: CLCV2-22, CLCV2-23.
#[test]
fn a_host_without_settings_has_the_most_connections_and_links() {
    let most = LinkLimits { max_conns: 255, max_links: 2 };
    assert_eq!(Config::new(PeerId([1; 8])).limits, most);
}

// Shows: CLCV2-23, CLCV2-58.
#[test]
fn more_links_than_a_group_may_have_are_never_stated() {
    let mut pair = Pair::new(Version::V2);
    for (config, route) in
        [(&mut pair.client, &mut pair.client_route), (&mut pair.server, &mut pair.server_route)]
    {
        config.limits.max_links = 9;
        route.rnic.as_mut().unwrap().max_links = 9;
    }
    let run = pair.run(None);
    assert_eq!(run.accept[LIMITS], [255, 2]);
    assert_eq!(run.confirm[LIMITS], [255, 2]);
    // Version 1 states no limits: each end has its own.
    for (kinds, version) in [(Kinds::SMCR_V1, Version::V1), (Kinds::SMCR_V2, Version::V2)] {
        (pair.client.kinds, pair.server.kinds, pair.version) = (kinds, kinds, version);
        let (client, server) = pair.run_unequal_limits();
        assert_eq!((client.limits.max_links, server.limits.max_links), (2, 2), "{version:?}");
    }
}

// Shows: CLCV2-61, EISM-23.
#[test]
fn a_server_of_smc_r_states_its_own_features_and_the_client_the_common_ones() {
    let mut pair = Pair::new(Version::V2);
    pair.client.features = Features::empty();
    let run = pair.run(None);
    assert_eq!(run.accept[FEATURES], Features::EMULATED_ISM.bits().to_be_bytes());
    assert_eq!(run.confirm[FEATURES], [0, 0]);
    assert_eq!(run.server.terms.features, Features::empty());
}

#[test]
fn a_route_is_asked_for_if_a_type_that_needs_it_is_offered_and_in_use() {
    let (only_d, with_r) = (client_host(), all_kinds(client_host()));
    let proposal_of = |client: &Config| propose_on(client, &route_v4(CLIENT)).1;
    let (only_d, with_r) = (proposal_of(&only_d), proposal_of(&with_r));
    for (server, proposal, expected) in [
        (server_host(), &only_d, false),
        (all_kinds(server_host()), &only_d, false),
        (server_host(), &with_r, false),
        (all_kinds(server_host()), &with_r, true),
    ] {
        assert_eq!(asks(&server, proposal), expected, "{:?}", server.kinds);
    }
}

// Shows: CLCV2-1, CLCV2-89.
#[test]
fn an_accept_that_nobody_asked_for_is_declined_in_its_own_version() {
    for (version, kind, head) in
        [(Version::V1, SmcKind::SmcrV1, (28, 0x10)), (Version::V2, SmcKind::SmcrV2, (44, 0x20))]
    {
        let accept = Pair::new(version).run(None).accept;
        let (client, _) = propose(&client_host());
        let step = client.handle_with(&accept, |_, _| None, |_| KnownLink::NoGroup);
        let ClientStep::Decline(sent) = step else { panic!("{step:?}") };
        assert_eq!(sent.reason, DeclineReason::NotOffered(kind));
        assert_eq!((sent.message.len(), sent.message[7]), head);
    }
}
