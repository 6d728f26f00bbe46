// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Identifiers as text in JSON, in the same form as in logs and tables.

use std::net::Ipv6Addr;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};
use smc_core::wire::ids::Eid;

use super::show_gid;

fn parsed<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse(&text).ok_or_else(|| Error::custom(format!("{text:?} is no such identifier")))
}

fn bytes_of_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits: Vec<u8> =
        text.chars().map(|c| Some(c.to_digit(16)? as u8)).collect::<Option<_>>()?;
    if digits.len() != 2 * N {
        return None;
    }
    let bytes: Vec<u8> = digits
        .chunks_exact(2)
        .map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit))
        .collect();
    bytes.try_into().ok()
}

fn gid_of_text(text: &str) -> Option<[u8; 16]> {
    let address: std::net::IpAddr = text.parse().ok()?;
    Some(match address {
        std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(v6) => v6.octets(),
    })
}

/// A CHID: four hexadecimal digits.
pub(super) mod chid {
    use virtio_ism_abi::Chid;

    use super::{Deserializer, Serializer, parsed};

    pub(crate) fn serialize<S: Serializer>(chid: &Chid, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(chid)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Chid, D::Error> {
        parsed(from, |text| u16::from_str_radix(text, 16).ok().map(Chid))
    }
}

/// An extended GID of SMC-D: a UUID.
pub(super) mod smcd_gid {
    use virtio_ism_abi::Gid;

    use super::{Deserializer, Serializer, bytes_of_hex, parsed};

    pub(crate) fn serialize<S: Serializer>(gid: &Gid, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(gid)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Gid, D::Error> {
        parsed(from, |text| bytes_of_hex(&text.replace('-', "")).map(Gid))
    }
}

/// Whether stores go through the window: "window" or "move".
pub(super) mod path {
    use super::{Deserializer, Serializer, parsed};

    pub(crate) fn serialize<S: Serializer>(
        window: &bool,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(if *window { "window" } else { "move" })
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
        parsed(from, |text| match text {
            "window" => Some(true),
            "move" => Some(false),
            _ => None,
        })
    }
}

/// An EID as its name.
pub(super) mod eid {
    use super::{Deserializer, Eid, Serializer, parsed};

    pub(crate) fn serialize<S: Serializer>(eid: &Eid, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(eid)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Eid, D::Error> {
        parsed(from, |text| Eid::new(text).ok())
    }
}

/// An EID as its name, if there is one.
pub(super) mod optional_eid {
    use super::{Deserialize, Deserializer, Eid, Error, Serializer};

    pub(crate) fn serialize<S: Serializer>(
        eid: &Option<Eid>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match eid {
            Some(eid) => serializer.collect_str(eid),
            None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Eid>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| Eid::new(&text).map_err(Error::custom)).transpose()
    }
}

/// The instance id of an SMC-R peer: 16 hexadecimal digits.
pub(super) mod peer_id {
    use super::{Deserializer, Serializer, bytes_of_hex, parsed};

    pub(crate) fn serialize<S: Serializer>(id: &[u8; 8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:016x}", u64::from_be_bytes(*id)))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<[u8; 8], D::Error> {
        parsed(from, bytes_of_hex)
    }
}

/// A RoCE GID: an IP address.
pub(super) mod roce_gid {
    use super::{Deserializer, Serializer, gid_of_text, parsed, show_gid};

    pub(crate) fn serialize<S: Serializer>(
        gid: &[u8; 16],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&show_gid(*gid))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<[u8; 16], D::Error> {
        parsed(from, gid_of_text)
    }
}

/// RoCE GIDs: IP addresses.
pub(super) mod roce_gids {
    use super::{Deserialize, Deserializer, Error, Serializer, gid_of_text, show_gid};

    pub(crate) fn serialize<S: Serializer>(
        gids: &[[u8; 16]],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(gids.iter().map(|gid| show_gid(*gid)))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<[u8; 16]>, D::Error> {
        let list = Vec::<String>::deserialize(from)?;
        let parsed: Option<_> = list.iter().map(|text| gid_of_text(text)).collect();
        parsed.ok_or_else(|| Error::custom("a GID is no IP address"))
    }
}

/// A RoCE GID in its usual form: the embedded IPv4 address, or an IPv6 address.
pub fn roce_gid_text(gid: [u8; 16]) -> String {
    let address = Ipv6Addr::from(gid);
    match address.to_ipv4_mapped() {
        Some(v4) => v4.to_string(),
        None => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use virtio_ism_abi::{Chid, Gid};

    use super::*;
    use crate::{LinkInfo, RnicInfo, SmcdInfo, SmcrInfo};

    #[test]
    fn gids_of_ipv4_routes_are_written_as_such() {
        let v4 = "::ffff:192.0.2.7".parse::<Ipv6Addr>().unwrap();
        assert_eq!(show_gid(v4.octets()), "192.0.2.7");
        let v6 = "fe80::1".parse::<Ipv6Addr>().unwrap();
        assert_eq!(show_gid(v6.octets()), "fe80::1");
    }

    #[test]
    fn identifiers_come_back_from_json_as_they_were() {
        let smcd = SmcdInfo {
            chid: Chid(0xff01),
            local_gid: Gid(std::array::from_fn(|at| at as u8)),
            peer_gid: Gid([0xfe; 16]),
            eid: Eid::new("VIRTIO-ISM").unwrap(),
            release: 1,
            first_contact: true,
            local_buffer: 1 << 20,
            peer_buffer: 64 << 10,
            window: false,
            peer_host: Some("a".into()),
        };
        let json = serde_json::to_value(&smcd).unwrap();
        assert_eq!((&json["chid"], &json["path"]), (&"ff01".into(), &"move".into()));
        assert_eq!(json["local_gid"], "00010203-0405-0607-0809-0a0b0c0d0e0f");
        assert_eq!(serde_json::from_value::<SmcdInfo>(json).unwrap(), smcd);

        let v4 = "::ffff:192.0.2.7".parse::<Ipv6Addr>().unwrap().octets();
        let link = LinkInfo { local_gid: v4, peer_gid: [0x20; 16], ..LinkInfo::default() };
        for eid in [None, Eid::new("E").ok()] {
            let peer_id = [0xfe, 1, 2, 3, 4, 5, 6, 7];
            let smcr = SmcrInfo { eid, peer_id, link: link.clone(), ..SmcrInfo::default() };
            let json = serde_json::to_value(&smcr).unwrap();
            assert_eq!(json["peer_id"], "fe01020304050607");
            assert_eq!(json["link"]["local_gid"], "192.0.2.7");
            assert_eq!(serde_json::from_value::<SmcrInfo>(json).unwrap(), smcr);
        }
        let rnic = RnicInfo { gids: vec![v4, [1; 16]], ..RnicInfo::default() };
        let json = serde_json::to_value(&rnic).unwrap();
        assert_eq!(serde_json::from_value::<RnicInfo>(json).unwrap(), rnic);
    }

    #[test]
    fn other_text_is_no_identifier() {
        for (key, bad) in [("chid", "ff0g"), ("local_gid", "00"), ("path", "x"), ("eid", "a b")] {
            let good = serde_json::json!({
                "chid": "ff00", "local_gid": "00000000-0000-0000-0000-000000000000",
                "peer_gid": "00000000-0000-0000-0000-000000000000", "eid": "E", "release": 1,
                "first_contact": true, "local_buffer": 1, "peer_buffer": 1, "path": "window",
                "peer_host": null,
            });
            serde_json::from_value::<SmcdInfo>(good.clone()).unwrap();
            let mut wrong = good;
            wrong[key] = bad.into();
            assert!(serde_json::from_value::<SmcdInfo>(wrong).is_err(), "{key}");
        }
    }
}
