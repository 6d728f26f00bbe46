//! The enterprise ids of AF_SMC, by generic netlink (Linux: include/uapi/linux/smc.h).

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// Flags of a request that asks for one thing, and for all there is.
const ONE: u16 = 0x005;
const ALL: u16 = 0x301;
/// Types of messages.
const ERROR: u16 = 2;
const DONE: u16 = 3;
const CONTROLLER: u16 = 16;
/// Commands, and attributes of their answers.
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
const DUMP_UEIDS: u8 = 9;
const EID: u16 = 1;

/// Bytes of headers: of a message, of generic netlink, of an attribute.
const MESSAGE: usize = 16;
const COMMAND: usize = 4;
const ATTRIBUTE: usize = 4;

/// The enterprise ids, without their padding. Any user may ask.
///
/// # Errors
/// The kernel has no AF_SMC, or refuses.
pub(crate) fn ueids() -> io::Result<Vec<String>> {
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, Some(netlink::GENERIC))?;
    let name = attribute(FAMILY_NAME, b"SMC_GEN_NETLINK\0");
    let answers = exchange(&socket, CONTROLLER, ONE, GET_FAMILY, &name)?;
    let family = answers.iter().flat_map(|answer| attributes(answer));
    let family = family.filter(|(kind, _)| *kind == FAMILY_ID).find_map(|(_, id)| number(id));
    let family = family.ok_or(io::ErrorKind::NotFound)?;
    let answers = exchange(&socket, family, ALL, DUMP_UEIDS, &[])?;
    let eids = answers.iter().flat_map(|answer| attributes(answer));
    let eids = eids.filter(|(kind, _)| *kind == EID).map(|(_, eid)| text(eid));
    Ok(eids.collect())
}

/// Sends a request: the attributes of each answer, in the kernel's byte order.
fn exchange(
    socket: &OwnedFd,
    family: u16,
    flags: u16,
    command: u8,
    attributes: &[u8],
) -> io::Result<Vec<Vec<u8>>> {
    let len = (MESSAGE + COMMAND + attributes.len()) as u32;
    let mut request = len.to_ne_bytes().to_vec();
    request.extend(family.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    // Number and port: one request is under way at a time, and the kernel knows who asks.
    request.extend([0; 8]);
    request.extend([command, 1, 0, 0]);
    request.extend(attributes);
    send(socket, &request, SendFlags::empty())?;
    let mut answers = Vec::new();
    let mut room = vec![0; 64 << 10];
    loop {
        let (len, _) = recv(socket, room.as_mut_slice(), RecvFlags::empty())?;
        let mut rest = &room[..len];
        while let Some((kind, payload, after)) = message(rest) {
            rest = after;
            match kind {
                DONE => return Ok(answers),
                ERROR => {
                    let errno = payload.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                    return match errno {
                        0 => Ok(answers),
                        _ => Err(io::Error::from_raw_os_error(errno.saturating_neg())),
                    };
                }
                _ => answers.push(payload.get(COMMAND..).unwrap_or_default().to_vec()),
            }
        }
    }
}

/// The first message: its type, its payload, and what follows.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let len = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = number(bytes.get(4..)?)?;
    let payload = bytes.get(MESSAGE..len)?;
    Some((kind, payload, bytes.get(len.next_multiple_of(4)..).unwrap_or_default()))
}

/// Types and values of attributes.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(number(bytes)?);
        let kind = number(bytes.get(2..)?)?;
        let value = bytes.get(ATTRIBUTE..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = ((ATTRIBUTE + value.len()) as u16).to_ne_bytes();
    let mut bytes = [&len, &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn number(bytes: &[u8]) -> Option<u16> {
    bytes.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

/// A string up to its zero byte, without blanks at its end.
fn text(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_found_again() {
        let made = [attribute(1, b"VIRTIO-ISM  \0"), attribute(2, &[7, 0])].concat();
        let found: Vec<_> = attributes(&made).collect();
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].0, text(found[0].1).as_str()), (1, "VIRTIO-ISM"));
        assert_eq!((found[1].0, number(found[1].1)), (2, Some(7)));
    }

    #[test]
    fn what_is_cut_off_ends_the_list() {
        let made = [attribute(1, &[1; 8]), attribute(2, &[2; 8])].concat();
        for len in 0..made.len() {
            assert!(attributes(&made[..len]).count() < 2, "{len}");
        }
        assert!(message(&[0; 15]).is_none());
        assert!(message(&[0; 16]).is_none());
    }
}
