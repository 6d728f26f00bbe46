// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Netlink: requests made of attributes, and the answers of the kernel.
//!
//! All numbers are in the byte order of the host (Linux, Documentation/userspace-api/netlink/intro.rst).

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;

use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, Protocol, RawProtocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv,
    send, socket_with,
};

/// Sockets of all families (NETLINK_SOCK_DIAG).
pub const SOCK_DIAG: RawProtocol = RawProtocol::new(4).unwrap();
/// Families with a name (NETLINK_GENERIC).
pub const GENERIC: RawProtocol = RawProtocol::new(16).unwrap();
/// RDMA devices (NETLINK_RDMA).
pub const RDMA: RawProtocol = RawProtocol::new(20).unwrap();

const REQUEST: u16 = 1;
const ACK: u16 = 4;
const DUMP: u16 = 0x300;

const ERROR: u16 = 2;
const DONE: u16 = 3;

/// Length of a message's header.
const HEADER: usize = 16;
/// Largest answer to one read: the kernel fills the given buffer up to 32 KiB.
const ANSWER: usize = 64 << 10;

/// A socket to the kernel.
#[derive(Debug)]
pub struct Netlink(OwnedFd);

/// The answers to one request: the payload of each message.
pub type Answers = Vec<Vec<u8>>;

impl Netlink {
    /// A socket to the family `family` of netlink.
    ///
    /// # Errors
    /// The kernel has no such family.
    pub fn open(family: RawProtocol) -> io::Result<Netlink> {
        let protocol = Protocol::from_raw(family);
        let raw = SocketType::RAW;
        Ok(Netlink(socket_with(AddressFamily::NETLINK, raw, SocketFlags::CLOEXEC, Some(protocol))?))
    }

    /// Sends a request answered by success or failure only.
    ///
    /// # Errors
    /// As the kernel.
    pub fn order(&self, kind: u16, payload: &[u8]) -> io::Result<()> {
        self.exchange(kind, ACK, payload, |_| ())
    }

    /// Sends a request for one thing.
    ///
    /// # Errors
    /// The kernel's.
    pub fn ask(&self, kind: u16, payload: &[u8]) -> io::Result<Answers> {
        self.collected(kind, ACK, payload)
    }

    /// Sends a request for a list.
    ///
    /// # Errors
    /// The kernel's.
    pub fn dump(&self, kind: u16, payload: &[u8]) -> io::Result<Answers> {
        self.collected(kind, DUMP, payload)
    }

    /// Sends a request for a list, and passes the payload of each message to `each`. Only as much of the
    /// list is in memory as the kernel sends at once.
    ///
    /// # Errors
    /// The kernel's.
    pub fn dump_each(&self, kind: u16, payload: &[u8], each: impl FnMut(&[u8])) -> io::Result<()> {
        self.exchange(kind, DUMP, payload, each)
    }

    fn collected(&self, kind: u16, flags: u16, payload: &[u8]) -> io::Result<Answers> {
        let mut answers = Answers::new();
        self.exchange(kind, flags, payload, |answer| answers.push(answer.to_vec()))?;
        Ok(answers)
    }

    fn exchange(
        &self,
        kind: u16,
        flags: u16,
        payload: &[u8],
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let mut request = Vec::with_capacity(HEADER + payload.len());
        request.extend_from_slice(&((HEADER + payload.len()) as u32).to_ne_bytes());
        request.extend_from_slice(&kind.to_ne_bytes());
        request.extend_from_slice(&(REQUEST | flags).to_ne_bytes());
        // Number and port: one request at a time, and the kernel knows the sender.
        request.extend_from_slice(&[0; 8]);
        request.extend_from_slice(payload);
        send(&self.0, &request, SendFlags::empty())?;

        let mut buf = vec![0; ANSWER];
        loop {
            let (len, _) = retry_on_intr(|| recv(&self.0, buf.as_mut_slice(), RecvFlags::empty()))?;
            let mut rest = &buf[..len];
            while let Some((kind, payload, after)) = message(rest) {
                rest = after;
                match kind {
                    DONE => return Ok(()),
                    ERROR => match number(payload) {
                        0 => return Ok(()),
                        errno => return Err(io::Error::from_raw_os_error(errno.saturating_neg())),
                    },
                    _ => each(payload),
                }
            }
        }
    }
}

/// The first message of an answer: its type, its payload, and the remaining bytes.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    let payload = bytes.get(HEADER..length)?;
    Some((kind, payload, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

fn number(payload: &[u8]) -> i32 {
    payload.first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes))
}

/// Attributes of a request.
#[derive(Clone, Debug, Default)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    /// Adds an attribute.
    #[must_use]
    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Attributes {
        self.0.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Adds a string with its zero byte.
    #[must_use]
    pub fn text(self, kind: u16, value: &str) -> Attributes {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// The attributes as a request has them.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }
}

/// An attribute of an answer.
#[derive(Clone, Copy)]
pub struct Attribute<'a> {
    /// The type, without the two flags.
    pub kind: u16,
    /// The value, without padding.
    pub value: &'a [u8],
}

impl<'a> Attribute<'a> {
    /// An integer of 1, 2, 4 or 8 bytes; 0 if the value has another length.
    #[must_use]
    pub fn number(&self) -> u64 {
        match *self.value {
            [byte] => byte.into(),
            [a, b] => u16::from_ne_bytes([a, b]).into(),
            [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]).into(),
            _ => self.value.try_into().map_or(0, u64::from_ne_bytes),
        }
    }

    /// A string up to its zero byte.
    #[must_use]
    pub fn text(&self) -> String {
        text(self.value)
    }

    /// The attributes in this one.
    pub fn nested(&self) -> impl Iterator<Item = Attribute<'a>> + use<'a> {
        attributes(self.value)
    }
}

impl fmt::Debug for Attribute<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] {:02x?}", self.kind, self.value)
    }
}

/// A string up to its zero byte.
pub(crate) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// The attributes in the payload of an answer, from behind the header of its family. A truncated list ends
/// before the truncated attribute.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = Attribute<'_>> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        // The two highest bits say "nested" and "network byte order".
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?) & 0x3fff;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Attribute { kind, value })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_to_four_bytes_and_found_again() {
        let made = Attributes::default().text(1, "abcd").bytes(0x8002, &7_u32.to_ne_bytes());
        assert_eq!(made.as_slice().len(), 12 + 8);
        let found: Vec<_> = attributes(made.as_slice()).collect();
        assert_eq!((found[0].kind, found[0].text().as_str()), (1, "abcd"));
        assert_eq!((found[1].kind, found[1].number()), (2, 7));
        assert_eq!(found.len(), 2);
        let number = |value: &[u8]| Attribute { kind: 1, value }.number();
        assert_eq!([number(&[9]), number(&513_u16.to_ne_bytes())], [9, 513]);
        assert_eq!(
            [number(&u64::MAX.to_ne_bytes()), number(&[1; 3]), number(&[])],
            [u64::MAX, 0, 0]
        );
    }

    #[test]
    fn what_is_cut_off_ends_the_list() {
        let made = Attributes::default().bytes(1, &[1; 8]).bytes(2, &[2; 8]);
        for len in 0..made.as_slice().len() {
            assert!(attributes(&made.as_slice()[..len]).count() < 2, "{len}");
        }
        assert!(message(&[0; 15]).is_none());
        assert!(attributes(&[0; 8]).next().is_none());
    }

    #[test]
    fn the_kernel_knows_its_own_families() {
        let netlink = Netlink::open(GENERIC).unwrap();
        // CTRL_CMD_GETFAMILY of "nlctrl", present in every kernel.
        let request = Attributes::default().text(2, "nlctrl");
        let answers = netlink.ask(16, &[&[3, 1, 0, 0], request.as_slice()].concat()).unwrap();
        let id = attributes(&answers[0][4..]).find(|attribute| attribute.kind == 1).unwrap();
        assert_eq!(id.number(), 16);
        let request = Attributes::default().text(2, "no such family");
        let error = netlink.ask(16, &[&[3, 1, 0, 0], request.as_slice()].concat()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::NOENT.raw_os_error()));
    }
}
