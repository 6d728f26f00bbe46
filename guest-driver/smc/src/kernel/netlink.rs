//! The enterprise ids of AF_SMC, by generic netlink (Linux: include/uapi/linux/smc.h), and its sockets,
//! by the kernel's tables of sockets.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send,
    socket_with,
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
const ADD_UEID: u8 = 10;
const REMOVE_UEID: u8 = 11;
const FLUSH_UEIDS: u8 = 12;
const DUMP_SEID: u8 = 13;
const ENABLE_SEID: u8 = 14;
const DISABLE_SEID: u8 = 15;
const EID: u16 = 1;
const SEID: u16 = 1;
const SEID_ENABLED: u16 = 2;
/// Bytes of an enterprise id, which spaces fill. Linux 7.3 takes no shorter one.
const EID_LENGTH: usize = 32;
/// SOCK_DIAG_BY_FAMILY
const BY_FAMILY: u16 = 20;

/// Bytes of headers: of a message, of generic netlink, of an attribute.
const MESSAGE: usize = 16;
const COMMAND: usize = 4;
const ATTRIBUTE: usize = 4;

/// The enterprise ids, without their padding. Any user may ask.
///
/// # Errors
/// The kernel has no AF_SMC, or refuses.
pub(crate) fn ueids() -> io::Result<Vec<String>> {
    let answers = Smc::open()?.ask(ALL, DUMP_UEIDS, &[])?;
    let eids = answers.iter().flat_map(|answer| attributes(answer));
    let eids = eids.filter(|(kind, _)| *kind == EID).map(|(_, eid)| text(eid));
    Ok(eids.collect())
}

/// What becomes of enterprise ids of AF_SMC. Takes root.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change<'a> {
    /// A user EID more.
    Add(&'a str),
    /// One less.
    Remove(&'a str),
    /// No user EID is left.
    Flush,
    /// The system EID is offered, or not.
    System(bool),
}

/// Changes enterprise ids.
///
/// # Errors
/// The kernel has no AF_SMC, or refuses.
pub(crate) fn change(change: Change<'_>) -> io::Result<()> {
    let eid = |eid: &str| attribute(EID, format!("{eid:<EID_LENGTH$}\0").as_bytes());
    let (command, attributes) = match change {
        Change::Add(name) => (ADD_UEID, eid(name)),
        Change::Remove(name) => (REMOVE_UEID, eid(name)),
        Change::Flush => (FLUSH_UEIDS, Vec::new()),
        Change::System(true) => (ENABLE_SEID, Vec::new()),
        Change::System(false) => (DISABLE_SEID, Vec::new()),
    };
    Smc::open()?.ask(ONE, command, &attributes).map(drop)
}

/// The system EID, and whether it is offered.
///
/// # Errors
/// The kernel has no AF_SMC, or refuses.
pub(crate) fn seid() -> io::Result<Option<(String, bool)>> {
    let answers = Smc::open()?.ask(ALL, DUMP_SEID, &[])?;
    let mut found = (None, false);
    for (kind, value) in answers.iter().flat_map(|answer| attributes(answer)) {
        match kind {
            SEID => found.0 = Some(text(value)),
            SEID_ENABLED => found.1 = value.first().is_some_and(|on| *on != 0),
            _ => {}
        }
    }
    Ok(found.0.map(|eid| (eid, found.1)))
}

/// The sockets of a family in this network namespace, with all extensions: a struct smc_diag_msg each,
/// and attributes. Any user may ask.
///
/// # Errors
/// The kernel has no table of such sockets (CONFIG_SMC_DIAG).
pub(super) fn sockets(family: u8) -> io::Result<Vec<Vec<u8>>> {
    let socket = open(netlink::SOCK_DIAG)?;
    // Family, extensions, and a socket's identity that is not looked at.
    let mut request = [0; 52];
    (request[0], request[3]) = (family, 0xff);
    exchange(&socket, BY_FAMILY, ALL, &request)
}

/// The family of generic netlink that AF_SMC has.
struct Smc {
    socket: OwnedFd,
    family: u16,
}

impl Smc {
    fn open() -> io::Result<Smc> {
        let socket = open(netlink::GENERIC)?;
        let name = attribute(FAMILY_NAME, b"SMC_GEN_NETLINK\0");
        let answers = exchange(&socket, CONTROLLER, ONE, &command(GET_FAMILY, &name))?;
        let answers = answers.iter().filter_map(|answer| answer.get(COMMAND..));
        let family = answers.flat_map(attributes).filter(|(kind, _)| *kind == FAMILY_ID);
        let family = family.filter_map(|(_, id)| number(id)).next();
        Ok(Smc { socket, family: family.ok_or(io::ErrorKind::NotFound)? })
    }

    /// Sends a request: the attributes of each answer.
    fn ask(&self, flags: u16, code: u8, attributes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        let request = command(code, attributes);
        let answers = exchange(&self.socket, self.family, flags, &request)?;
        let attributes = |answer: Vec<u8>| answer.get(COMMAND..).unwrap_or_default().to_vec();
        Ok(answers.into_iter().map(attributes).collect())
    }
}

fn open(protocol: Protocol) -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    Ok(socket_with(family, kind, SocketFlags::CLOEXEC, Some(protocol))?)
}

/// A command of generic netlink.
fn command(code: u8, attributes: &[u8]) -> Vec<u8> {
    [&[code, 1, 0, 0], attributes].concat()
}

/// Sends a request: the payload of each answer, in the kernel's byte order.
fn exchange(socket: &OwnedFd, kind: u16, flags: u16, payload: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let len = (MESSAGE + payload.len()) as u32;
    let mut request = len.to_ne_bytes().to_vec();
    request.extend(kind.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    // Number and port: one request is under way at a time, and the kernel knows who asks.
    request.extend([0; 8]);
    request.extend(payload);
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
                _ => answers.push(payload.to_vec()),
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
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
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
