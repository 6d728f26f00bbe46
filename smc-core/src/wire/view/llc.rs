// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! LLC messages.

use super::walk::Walk;
use super::{View, clc, words};
use crate::wire::clc::Version;
use crate::wire::ids::Mac;
use crate::wire::llc::{AddLinkLayout, Dialect, Kind, LLC_LEN, Llc};

pub(super) fn view(bytes: &[u8], dialect: &Dialect) -> View {
    let mut walk = Walk::new(bytes);
    let error = Llc::parse(bytes, dialect).err();
    let Some(byte) = walk.u8("type", type_name) else {
        return walk.finish("LLC message".into(), error);
    };
    let (version, kind) = match Kind::from_type_byte(byte) {
        Ok(known) => known,
        Err(reason) => {
            walk.problem(reason.to_string());
            return walk.finish("LLC message of unknown type".into(), error);
        }
    };
    let flags = header(&mut walk, version, kind, bytes.len());
    let title = match flags & 0x80 {
        0 => format!("LLC {}, {}", kind.name(), words::version(version)),
        _ => format!("LLC {} reply, {}", kind.name(), words::version(version)),
    };
    body(&mut walk, version, kind, flags, dialect);
    // Messages are padded with zeros to 44 bytes.
    let padding = bytes.get(walk.at()..bytes.len().min(LLC_LEN)).unwrap_or(&[]);
    if padding.iter().all(|byte| *byte == 0) {
        walk.raw_until("reserved", LLC_LEN);
    }
    walk.finish(title, error)
}

fn type_name(byte: u8) -> String {
    match Kind::from_type_byte(byte) {
        Ok((version, kind)) => format!("{byte:02x} ({}, {})", kind.name(), words::version(version)),
        Err(_) => format!("{byte:02x}"),
    }
}

/// Walks length and flags, and returns the flags.
fn header(walk: &mut Walk<'_>, version: Version, kind: Kind, have: usize) -> u8 {
    match version {
        Version::V1 => {
            if walk.u8("length", |length| length.to_string()).is_some_and(|length| length != 44) {
                walk.problem("must be 44");
            }
            match kind {
                Kind::AddLink => {
                    walk.u8("reject reason", |byte| reject_reason(byte & 0x0f));
                }
                _ => walk.reserved::<1>(),
            }
        }
        Version::V2 => {
            let swapped = |length: u16| usize::from(length.swap_bytes()) == have;
            let length = walk.u16("length", |length| match usize::from(length) == have {
                false if swapped(length) => format!("{have} (little-endian, as from Linux)"),
                _ => length.to_string(),
            });
            if length.is_some_and(|length| usize::from(length) != have && !swapped(length)) {
                walk.problem(format!("{have} bytes are here"));
            }
        }
    }
    walk.u8("flags", |byte| flag_names(version, kind, byte)).unwrap_or(0)
}

fn flag_names(version: Version, kind: Kind, byte: u8) -> String {
    let reply = (0x80, "reply");
    match kind {
        Kind::ConfirmLink => match byte & 0x0f {
            0 => words::flags(byte, &[reply]),
            low => format!(
                "{}, cache size code {low} (Linux: no eye catchers)",
                words::flags(byte, &[reply])
            ),
        },
        Kind::AddLink | Kind::RequestAddLink => {
            let text = words::flags(byte, &[reply, (0x40, "rejected")]);
            match version {
                Version::V2 if byte & 0x40 != 0 => {
                    format!("{text}, reason {}", reject_reason(byte & 0x0f))
                }
                _ => text,
            }
        }
        Kind::DeleteLink => words::flags(byte, &[reply, (0x40, "all links"), (0x20, "orderly")]),
        Kind::ConfirmRkey => words::flags(byte, &[reply, (0x20, "negative"), (0x10, "retry")]),
        Kind::ConfirmRkeyCont | Kind::DeleteRkey => {
            words::flags(byte, &[reply, (0x20, "negative")])
        }
        Kind::TestLink | Kind::AddLinkCont => words::flags(byte, &[reply]),
    }
}

fn reject_reason(code: u8) -> String {
    match code {
        0 => "none".into(),
        1 => "1 (no alternate path)".into(),
        2 => "2 (invalid MTU)".into(),
        other => other.to_string(),
    }
}

fn delete_reason(code: u32) -> String {
    let words = match code {
        0 => return "none".into(),
        0x0001_0000 => "lost path",
        0x0002_0000 => "operator",
        0x0003_0000 => "program",
        0x0004_0000 => "protocol violation",
        0x0005_0000 => "asymmetric link not needed",
        0x0010_0000 => "unknown link",
        _ => return format!("{code:08x}"),
    };
    format!("{code:08x} ({words})")
}

fn decimal(walk: &mut Walk<'_>, name: &'static str) -> Option<u8> {
    walk.u8(name, |value| value.to_string())
}

fn body(walk: &mut Walk<'_>, version: Version, kind: Kind, flags: u8, dialect: &Dialect) {
    match kind {
        Kind::ConfirmLink => {
            walk.take("MAC", |mac| Mac(mac).to_string());
            walk.take("GID", words::gid);
            walk.hex::<3>("QPN");
            decimal(walk, "link number");
            walk.hex::<4>("link user id");
            decimal(walk, "max links");
            if version == Version::V2 {
                decimal(walk, "max connections");
            }
        }
        Kind::AddLink => {
            walk.take("MAC", |mac| Mac(mac).to_string());
            if version == Version::V2 || dialect.add_link == AddLinkLayout::Padded {
                walk.reserved::<2>();
            }
            walk.take("GID", words::gid);
            walk.hex::<3>("QPN");
            decimal(walk, "link number");
            walk.u8("MTU", |byte| words::mtu(byte & 0x0f));
            walk.hex::<3>("PSN");
            if version == Version::V2 {
                walk.reserved::<8>();
                if walk.left() > 0 {
                    add_link_v2(walk);
                }
            }
        }
        Kind::AddLinkCont => {
            decimal(walk, "link number");
            let left = decimal(walk, "RTokens left").unwrap_or(0);
            walk.reserved::<2>();
            for _ in 0..left.min(2) {
                rkey_pair(walk);
            }
        }
        Kind::DeleteLink => {
            decimal(walk, "link number");
            walk.u32("reason", delete_reason);
        }
        Kind::RequestAddLink => {
            walk.reserved::<20>();
            if flags & 0x80 == 0 {
                clc::gid_list(walk);
            }
        }
        Kind::ConfirmRkey => {
            let others = decimal(walk, "other links").unwrap_or(0);
            walk.hex::<4>("RKey");
            walk.hex::<8>("address");
            link_rkeys(walk, others.min(2));
        }
        Kind::ConfirmRkeyCont => {
            let left = decimal(walk, "entries left").unwrap_or(0);
            link_rkeys(walk, left.min(3));
        }
        Kind::TestLink => {
            walk.hex::<16>("user data");
        }
        Kind::DeleteRkey => delete_rkey(walk, version, flags),
    }
}

fn add_link_v2(walk: &mut Walk<'_>) {
    walk.u8("link type", |byte| if byte & 0x80 != 0 { "direct" } else { "indirect" }.into());
    walk.reserved::<1>();
    walk.take("client target GID", words::gid);
    walk.reserved::<8>();
    let fitting = walk.left().saturating_sub(2) / 16;
    let count = walk.take("RKey count", |bytes| count_value(bytes, fitting));
    if count.is_some_and(|bytes| count_order(bytes, fitting).is_none()) {
        walk.problem(format!("{fitting} entries follow"));
    }
    for _ in 0..fitting {
        rkey_pair(walk);
    }
}

/// The byte order of `bytes` as an encoding of `count`; `None` if the two bytes encode another
/// number.
fn count_order(bytes: [u8; 2], count: usize) -> Option<&'static str> {
    match bytes {
        _ if usize::from(u16::from_be_bytes(bytes)) == count => Some(""),
        _ if usize::from(u16::from_le_bytes(bytes)) == count => Some(" (little-endian)"),
        [high, low] if high == low && usize::from(low) == count => Some(" (in either byte)"),
        _ => None,
    }
}

fn count_value(bytes: [u8; 2], fitting: usize) -> String {
    match count_order(bytes, fitting) {
        Some(order) => format!("{fitting}{order}"),
        None => u16::from_be_bytes(bytes).to_string(),
    }
}

fn rkey_pair(walk: &mut Walk<'_>) {
    walk.area("RMB", |walk| {
        walk.hex::<4>("RKey on this link");
        walk.hex::<4>("RKey on the new link");
        walk.hex::<8>("address on the new link");
    });
}

fn link_rkeys(walk: &mut Walk<'_>, count: u8) {
    for _ in 0..count {
        walk.area("other link", |walk| {
            decimal(walk, "link number");
            walk.hex::<4>("RKey");
            walk.hex::<8>("address");
        });
    }
}

fn delete_rkey(walk: &mut Walk<'_>, version: Version, flags: u8) {
    let count = decimal(walk, "RKey count").unwrap_or(0);
    let v2_reply = version == Version::V2 && flags & 0x80 != 0;
    if count == 0 && !v2_reply {
        walk.problem("at least 1");
    }
    let listed = if v2_reply {
        decimal(walk, "RKeys not deleted").unwrap_or(0).min(8)
    } else {
        walk.u8("error mask", |mask| format!("{mask:08b}"));
        match version {
            Version::V1 if count > 8 => {
                walk.problem("at most 8 RKeys");
                8
            }
            _ => count,
        }
    };
    walk.reserved::<2>();
    for _ in 0..listed {
        walk.hex::<4>("RKey");
    }
}
