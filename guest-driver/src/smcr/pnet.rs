// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Physical networks: the RNIC for a connection over an interface other than the RNIC's own.
//!
//! Without a map, a connection uses the RNIC of its own interface. A map lists interfaces and RNICs on
//! the same network (RFC 7609 section 3.2 leaves the source of this knowledge to the operator; Linux
//! calls the ids PNET ids).

use super::port::Port;

/// The network of a port or interface with one of these names.
pub(super) fn network<'a>(map: &'a [(String, String)], names: &[&str]) -> Option<&'a str> {
    let listed = map.iter().find(|(name, _)| names.contains(&name.as_str()));
    listed.map(|(_, id)| id.as_str())
}

/// The network of a port, if the map has the port, its RNIC or its interface.
pub(super) fn network_of<'a>(map: &'a [(String, String)], port: &Port) -> Option<&'a str> {
    let device = port.device().name();
    let numbered = format!("{device}/{}", port.number());
    let view = port.view();
    let interface = view.gids.iter().find_map(|entry| entry.net_device.as_ref());
    let interface = interface.map(|interface| interface.name.as_str());
    network(map, &[&numbered])
        .or_else(|| network(map, &[device]))
        .or_else(|| network(map, &[interface?]))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: CLC-22.
    #[test]
    fn things_are_on_the_network_that_is_listed_first_for_any_of_their_names() {
        let map = [("eth0", "NET1"), ("mlx5_0/1", "NET1"), ("mlx5_0", "NET2"), ("eth0", "NET3")];
        let map = map.map(|(name, id)| (name.to_owned(), id.to_owned()));
        assert_eq!(network(&map, &["eth0"]), Some("NET1"));
        assert_eq!(network(&map, &["mlx5_0/2", "mlx5_0"]), Some("NET2"));
        assert_eq!(network(&map, &["mlx5_0/1"]), Some("NET1"));
        assert_eq!(network(&map, &["eth1"]), None);
        assert_eq!(network(&[], &["eth0"]), None);
    }
}
