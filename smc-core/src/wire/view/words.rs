// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Values in words.

use crate::wire::clc::{CarrierFeatures, CarrierOptions, SmcTypes, VendorOffer, Version};
use crate::wire::ids::{Chid, Eid, Features, Gid, Hostname, Mtu, OsType, Release, SizeCode};

/// Hexadecimal digits in groups of four bytes; long stretches are cut.
pub(super) fn hex(bytes: &[u8]) -> String {
    const SHOWN: usize = 64;
    let mut text = String::new();
    for (i, byte) in bytes.iter().take(SHOWN).enumerate() {
        if i > 0 && i % 4 == 0 {
            text.push(' ');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    if bytes.len() > SHOWN {
        text.push_str(&format!(" ... ({} bytes)", bytes.len()));
    }
    text
}

pub(super) fn reserved(bytes: &[u8]) -> String {
    match bytes.iter().all(|byte| *byte == 0) {
        true => String::new(),
        false => format!("{} (ignored)", hex(bytes)),
    }
}

pub(super) fn eye_catcher(bytes: [u8; 4]) -> String {
    match bytes {
        [0xe2, 0xd4, 0xc3, 0xd9] => "SMCR".into(),
        [0xe2, 0xd4, 0xc3, 0xc4] => "SMCD".into(),
        other => hex(&other),
    }
}

pub(super) fn is_eye_catcher(bytes: [u8; 4]) -> bool {
    matches!(bytes, [0xe2, 0xd4, 0xc3, 0xd9 | 0xc4])
}

pub(super) fn types(types: Option<SmcTypes>) -> &'static str {
    match types {
        Some(SmcTypes::R) => "SMC-R",
        Some(SmcTypes::D) => "SMC-D",
        Some(SmcTypes::Both) => "SMC-R and SMC-D",
        None => "none",
    }
}

pub(super) fn version(version: Version) -> &'static str {
    match version {
        Version::V1 => "version 1",
        Version::V2 => "version 2",
    }
}

pub(super) fn chid(value: u16) -> String {
    let chid = Chid(value);
    let kind = match value {
        0 => "none",
        _ if chid.is_loopback() => "loopback",
        _ if chid.is_emulated() => "emulated ISM",
        _ => "platform ISM",
    };
    format!("{chid} ({kind})")
}

/// A GID, perhaps an IP address.
pub(super) fn gid(bytes: [u8; 16]) -> String {
    let gid = Gid(bytes);
    if gid.is_none() {
        return "none".into();
    }
    let text = core::net::Ipv6Addr::from(bytes);
    match gid.to_ipv4() {
        Some(address) => format!("{text} ({})", core::net::Ipv4Addr::from(address)),
        None => text.to_string(),
    }
}

pub(super) fn eid(bytes: [u8; 32]) -> String {
    if bytes == [0; 32] {
        return "none".into();
    }
    format!("\"{}\"", Eid::from_wire(bytes))
}

/// Whether an EID of the wire is a valid one for a configuration.
pub(super) fn eid_is_valid(bytes: &[u8; 32]) -> bool {
    core::str::from_utf8(bytes).is_ok_and(|name| Eid::new(name.trim_end_matches(' ')).is_ok())
}

pub(super) fn hostname(bytes: [u8; 32]) -> String {
    format!("\"{}\"", Hostname::from_wire(bytes))
}

pub(super) fn size(code: u8) -> String {
    match SizeCode::new(code) {
        Some(size) => format!("code {code}: {} KiB", size.bytes() / 1024),
        None => format!("code {code}"),
    }
}

pub(super) fn mtu(code: u8) -> String {
    match Mtu::from_code(code).bytes() {
        Ok(bytes) => format!("MTU code {code}: {bytes} bytes"),
        Err(_) => format!("MTU code {code}: reserved"),
    }
}

pub(super) fn os(code: u8) -> String {
    OsType::from_code(code).to_string()
}

pub(super) fn release(code: u8) -> String {
    Release::from_code(code).to_string()
}

pub(super) fn features(bits: u16) -> String {
    let known = Features::from_bits_truncate(bits);
    let name = if known.contains(Features::EMULATED_ISM) { " (emulated ISM)" } else { "" };
    format!("{bits:04x}{name}")
}

/// The vendor of experimental options.
pub(super) fn vendor(oui: [u8; 3]) -> String {
    match oui {
        [0, 0, 0] => "none".into(),
        CarrierOptions::OUI => format!("{} (records on TCP)", hex(&oui)),
        _ => hex(&oui),
    }
}

/// The options of a Proposal.
pub(super) fn vendor_options(oui: Option<[u8; 3]>, options: [u8; 5]) -> String {
    let text = hex(&options);
    let Some(offer) = oui.and_then(|oui| VendorOffer::new(oui, options).ok()) else { return text };
    match CarrierOptions::from_offer(&offer) {
        Ok(Some(offered)) => {
            let claim = match CarrierOptions::claim_in(&offer) {
                Some(number) => format!(", claim {number}"),
                None => String::new(),
            };
            format!("{text} ({}{claim})", carriers(offered.version(), offered.features()))
        }
        Ok(None) => text,
        Err(error) => format!("{text} (ignored: {error})"),
    }
}

/// The options of Accept and Confirm, sent without their vendor's OUI.
pub(super) fn vendor_answer(options: [u8; 4]) -> String {
    let [version, reserved, high, low] = options;
    let bits = u16::from_be_bytes([high, low]);
    let text = hex(&options);
    match CarrierFeatures::from_bits(bits) {
        Some(features) if reserved == 0 && (1..=CarrierOptions::VERSION).contains(&version) => {
            format!("{text} (if records on TCP were offered: {})", carriers(version, features))
        }
        _ => text,
    }
}

fn carriers(version: u8, features: CarrierFeatures) -> String {
    let returns = features.contains(CarrierFeatures::RETURN);
    format!("version {version}{}", if returns { ", comes back" } else { "" })
}

/// Names of set bits, in the order given.
pub(super) fn flags(byte: u8, names: &[(u8, &str)]) -> String {
    let mut text = format!("{byte:02x}");
    for (bit, name) in names {
        if byte & bit != 0 {
            text.push_str(", ");
            text.push_str(name);
        }
    }
    text
}

/// Linux's meaning of a diagnosis; other systems have codes of their own (CLC-49).
pub(super) fn diagnosis(code: u32) -> String {
    let words = match code {
        0 => return "none".into(),
        0x0101_0000 => "no memory",
        0x0201_0000 => "no Confirm Link in time",
        0x0202_0000 => "no Add Link in time",
        0x0300_0000 => "configuration",
        0x0301_0000 => "peer does not speak SMC, or nothing offered",
        0x0302_0000 => "IPsec",
        0x0303_0000 => "no SMC device",
        0x0303_0001 => "no SMC-D device or no common EID",
        0x0303_0002 => "no SMC-R device",
        0x0303_0003 => "no ISMv2 support",
        0x0303_0004 => "no V2 extension",
        0x0303_0005 => "no SMC-Dv2 extension",
        0x0303_0006 => "no system EID",
        0x0303_0007 => "no common SMC-Dv2 device",
        0x0303_0008 => "no user EID",
        0x0303_0009 => "release differs",
        0x0303_000a => "max connections",
        0x0303_000b => "max links",
        0x0304_0000 => "mode not supported",
        0x0305_0000 => "eye catchers in elements",
        0x0306_0000 => "option not supported",
        0x0307_0000 => "subnets differ",
        0x0308_0000 | 0x0309_0000 => "VLAN",
        0x030a_0000 => "no active link",
        0x030b_0000 => "server's link not known",
        0x030c_0000 => "version mismatch",
        0x030d_0000 => "no more DMBs",
        0x030e_0000 => "no route",
        0x030f_0000 => "link is not direct",
        0x0400_0000 => "out of sync",
        0x0999_0000 => "internal error",
        0x0999_0001 => "table of remote keys",
        0x0999_0002 => "link not ready",
        0x0999_0003 => "buffer registration",
        _ => return format!("{code:08x}"),
    };
    format!("{code:08x} (Linux: {words})")
}
