// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! RNIC ports and addresses for further links of a link group.

use smc_core::link_group::Rnic;
use smc_core::wire::clc::Version;
use smc_core::wire::ids::Gid;

use super::link::Link;
use super::pnet::network_of;
use super::port::Port;
use super::shared::Shared;

/// A port for further links of a group with this first link, if on the same physical network. The path
/// between the two hosts is taken to be the same for the whole network (`direct`).
pub(crate) fn alternate(
    shared: &Shared,
    port: &Port,
    first: &Link,
    version: Version,
    direct: bool,
) -> Option<Rnic> {
    let map = &shared.options.pnet;
    let near = network_of(map, port) == network_of(map, first.port());
    near.then(|| port.alternate(first.gid(), version == Version::V1, direct)).flatten()
}

/// Ports for further links. Ports other than the first link's come first.
pub(crate) fn alternates(
    shared: &Shared,
    first: &Link,
    version: Version,
    direct: bool,
) -> Vec<Rnic> {
    let ports = shared.ports().iter();
    let mut rnics: Vec<_> =
        ports.filter_map(|port| alternate(shared, port, first, version, direct)).collect();
    rnics.sort_by_key(|rnic| (rnic.id == first.port().id(), rnic.id));
    rnics
}

/// The own addresses for further links.
pub(crate) fn alternate_gids(shared: &Shared, first: &Link, version: Version) -> Vec<Gid> {
    alternates(shared, first, version, true).iter().map(|rnic| rnic.gid).collect()
}
