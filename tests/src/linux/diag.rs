//! AF_SMC's sockets, as the kernel lists them (sock_diag; include/uapi/linux/smc_diag.h).

use std::io;

use serde::{Deserialize, Serialize};

use super::netlink::{Netlink, SOCK_DIAG, attributes, text};

/// SOCK_DIAG_BY_FAMILY
const BY_FAMILY: u16 = 20;
/// AF_SMC
const FAMILY: u8 = 43;

/// What carries the connection of an AF_SMC socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// SMC-R. What does not carry anything says this too.
    SmcR,
    /// TCP.
    Tcp,
    /// SMC-D.
    SmcD,
}

/// An AF_SMC socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Socket {
    /// `SMC_ACTIVE` is 1, `SMC_LISTEN` 10.
    pub state: u8,
    /// What carries it.
    pub mode: Mode,
    /// Own TCP port.
    pub port: u16,
    /// The peer's TCP port.
    pub peer_port: u16,
    /// Why it is TCP (SMC_CLC_DECL_*), or 0.
    pub fallback: u32,
    /// What the peer said in its Decline, or 0.
    pub peer_diagnosis: u32,
    /// Sizes and cursors, once there is a connection.
    pub cursors: Option<Cursors>,
    /// The link of an SMC-R connection.
    pub link: Option<Link>,
}

/// Sizes, cursors (wrap, count) and flags of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cursors {
    /// Alert token.
    pub token: u32,
    /// Bytes of the send buffer.
    pub send_buffer: u32,
    /// Bytes of the own RMB element.
    pub element: u32,
    /// Bytes of the peer's.
    pub peer_element: u32,
    /// The peer's producer cursor in the own element.
    pub rx_produced: (u16, u32),
    /// The own consumer cursor.
    pub rx_consumed: (u16, u32),
    /// The own producer cursor in the peer's element.
    pub tx_produced: (u16, u32),
    /// The consumer cursor that was last sent.
    pub tx_consumed: (u16, u32),
    /// Producer flags and state flags: received, then sent.
    pub flags: [u8; 4],
}

/// The link of an SMC-R connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Number in the link group.
    pub number: u8,
    /// Name of the RDMA adapter.
    pub adapter: String,
    /// Own GID.
    pub gid: String,
    /// The peer's GID.
    pub peer_gid: String,
    /// Whether this end is the client of the link group.
    pub client: bool,
}

/// All AF_SMC sockets of this network namespace.
///
/// # Errors
/// The kernel has no SMC_DIAG.
pub fn sockets() -> io::Result<Vec<Socket>> {
    // Family, padding, all extensions, and a socket's identity that is not looked at.
    let mut request = [0; 52];
    (request[0], request[3]) = (FAMILY, 0xff);
    let answers = Netlink::open(SOCK_DIAG)?.dump(BY_FAMILY, &request)?;
    Ok(answers.iter().filter_map(|answer| socket(answer)).collect())
}

fn socket(answer: &[u8]) -> Option<Socket> {
    // struct smc_diag_msg: 4 bytes, struct inet_diag_sockid of 48, user id, inode.
    let (head, rest) = answer.split_at_checked(64)?;
    let port = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let mut socket = Socket {
        state: head[1],
        mode: match head[2] {
            0 => Mode::SmcR,
            2 => Mode::SmcD,
            _ => Mode::Tcp,
        },
        port: port(4),
        peer_port: port(6),
        fallback: 0,
        peer_diagnosis: 0,
        cursors: None,
        link: None,
    };
    for attribute in attributes(rest) {
        let value = attribute.value;
        match attribute.kind {
            1 => socket.cursors = cursors(value),
            2 => socket.link = link(value),
            5 => {
                socket.fallback = long(value, 0);
                socket.peer_diagnosis = long(value, 4);
            }
            _ => {}
        }
    }
    Some(socket)
}

fn cursors(value: &[u8]) -> Option<Cursors> {
    // Cursors are a reserved word, the wrap count and the offset.
    let cursor = |n: usize| {
        let at = 16 + 8 * n;
        ((long(value, at) >> 16) as u16, long(value, at + 4))
    };
    Some(Cursors {
        token: long(value, 0),
        send_buffer: long(value, 4),
        element: long(value, 8),
        peer_element: long(value, 12),
        rx_produced: cursor(0),
        rx_consumed: cursor(1),
        tx_produced: cursor(2),
        tx_consumed: cursor(3),
        flags: *value.get(48..)?.first_chunk()?,
    })
}

fn link(value: &[u8]) -> Option<Link> {
    let part = |at: usize, len: usize| value.get(at..at + len).map(text);
    Some(Link {
        number: *value.first()?,
        adapter: part(1, 64)?,
        gid: part(66, 40)?,
        peer_gid: part(106, 40)?,
        // SMC_CLNT is 0, SMC_SERV 1.
        client: *value.get(146)? == 0,
    })
}

fn long(value: &[u8], at: usize) -> u32 {
    let bytes = value.get(at..).and_then(|bytes| bytes.first_chunk());
    bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}
