// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The messages of a control connection: a call with bytes, an answer with bytes.
//!
//! A frame is two big-endian lengths, a JSON header and the unchanged bytes of a read or a write.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use guest_driver::socket::TestOptions;
use guest_driver::{Config, ConnectionInfo, DataPath, DeviceAddress, Rnics, SmcdInfo, SmcrOptions};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use smc_core::handshake::DeclineCode;
use smc_core::wire::ids::Eid;

/// More than any test sends in one call, bytes.
const MAX_FRAME: u32 = 256 << 20;

/// A call for the far end. Objects have numbers, answered by [`Call::Open`] and the like.
#[derive(Debug, Serialize, Deserialize)]
pub enum Call {
    /// The first call of a test's first control connection: the test lasts as long as this
    /// connection does.
    Begin {
        /// The test's unique number.
        test: u64,
    },
    /// The first call of every other control connection.
    Join {
        /// The number of a running test.
        test: u64,
    },
    /// The test is over: the far end drops every object of the test.
    End,
    /// Opens a stack. Answers its number.
    Open(Box<Settings>),
    /// Binds a listener. Answers its number and address.
    Listen {
        /// The stack.
        stack: u64,
        /// The address to listen on.
        addr: SocketAddr,
    },
    /// Connects. Answers the stream's number.
    Connect {
        /// The stack.
        stack: u64,
        /// The server's address.
        addr: SocketAddr,
        /// The method of connecting.
        how: How,
    },
    /// Accepts. Answers the stream's number and the client's address.
    Accept {
        /// The listener.
        listener: u64,
    },
    /// Makes a listener's calls wait or not.
    ListenerNonblocking {
        /// The listener.
        listener: u64,
        /// Whether calls fail instead of waiting.
        nonblocking: bool,
    },
    /// [`guest_driver::Stack::totals`].
    Totals {
        /// The stack.
        stack: u64,
    },
    /// [`guest_driver::Stack::devices`].
    Devices {
        /// The stack.
        stack: u64,
    },
    /// Something with a stream.
    Stream {
        /// The stream's number.
        stream: u64,
        /// The operation.
        op: Op,
    },
    /// Drops an object, however long the drop takes.
    Drop {
        /// The object's number.
        object: u64,
    },
}

/// Ways to connect.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum How {
    /// [`guest_driver::SmcStream::connect`].
    Smc,
    /// [`guest_driver::SmcStream::connect_timeout`].
    Within(Duration),
    /// [`guest_driver::SmcStream::connect_tcp`].
    Tcp,
    /// TCP first, then [`guest_driver::SmcStream::upgrade`].
    Upgrade,
}

/// Calls of [`guest_driver::SmcStream`] by their names. Bytes travel behind the header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "they are the stream's own")]
pub enum Op {
    Recv(usize),
    Send,
    WriteAll,
    Peek(usize),
    /// Lengths of the slices.
    ReadVectored(Vec<usize>),
    /// Lengths of the slices.
    WriteVectored(Vec<usize>),
    SendUrgent(u8),
    RecvUrgent,
    HasUrgent,
    AtMark,
    SetOobInline(bool),
    Readable,
    UnreadByPeer,
    Shutdown {
        read: bool,
        write: bool,
    },
    SetNonblocking(bool),
    SetReadTimeout(Option<Duration>),
    SetWriteTimeout(Option<Duration>),
    ReadTimeout,
    WriteTimeout,
    SetLinger(Option<Duration>),
    SetNodelay(bool),
    Nodelay,
    SetTtl(u32),
    Ttl,
    TakeError,
    LocalAddr,
    PeerAddr,
    Clone,
    ConnectionInfo,
}

impl Op {
    /// The halves ended by a shutdown.
    pub fn shutdown(how: Shutdown) -> Op {
        Op::Shutdown { read: how != Shutdown::Write, write: how != Shutdown::Read }
    }

    /// The same back; `None`: neither half.
    pub(super) fn how(read: bool, write: bool) -> Option<Shutdown> {
        match (read, write) {
            (true, true) => Some(Shutdown::Both),
            (true, false) => Some(Shutdown::Read),
            (false, true) => Some(Shutdown::Write),
            (false, false) => None,
        }
    }
}

/// The device of a stack at the far end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Device {
    /// None: everything is TCP.
    None,
    /// The far end's own device, named at its start.
    Own,
    /// The named devices.
    Named(Vec<String>),
}

/// A [`Config`] on the wire.
#[derive(Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "they are the configuration's own")]
pub struct Settings {
    pub device: Device,
    /// RNICs by name; `None`: all.
    pub rnics: Option<Vec<String>>,
    pub v1: bool,
    pub v2: bool,
    pub eids: Vec<String>,
    pub seid: Option<String>,
    pub recv_buffer: usize,
    pub spin: Duration,
    pub window: Option<bool>,
    pub guest_memory: usize,
    pub clc_timeout: Duration,
    pub detect_timeout: Duration,
    pub close_timeout: Duration,
    pub idle_peer_timeout: Duration,
    pub release_2_0: bool,
}

impl Settings {
    /// Everything but the devices.
    pub fn of(config: &Config, device: Device) -> Settings {
        let name = |eid: &Eid| eid.to_string().trim_end().to_owned();
        Settings {
            device,
            rnics: match &config.rnics {
                Rnics::None => Some(Vec::new()),
                Rnics::Auto => None,
                Rnics::Names(names) => Some(names.clone()),
            },
            v1: config.smcr.v1,
            v2: config.smcr.v2,
            eids: config.eids.iter().map(name).collect(),
            seid: config.testing.seid.as_ref().map(name),
            recv_buffer: config.recv_buffer,
            spin: config.spin,
            window: match config.path {
                DataPath::Auto => None,
                DataPath::Window => Some(true),
                DataPath::Move => Some(false),
            },
            guest_memory: config.guest_memory,
            clc_timeout: config.clc_timeout,
            detect_timeout: config.detect_timeout,
            close_timeout: config.testing.close_timeout,
            idle_peer_timeout: config.testing.idle_peer_timeout,
            release_2_0: config.testing.release_2_0,
        }
    }

    /// The configuration, for a program with `own` as its device.
    ///
    /// # Errors
    /// `InvalidInput` for an invalid EID.
    pub fn config(&self, own: &DeviceAddress) -> io::Result<Config> {
        let eid = |name: &String| {
            Eid::new(name).map_err(|error| io::Error::new(ErrorKind::InvalidInput, error))
        };
        Ok(Config {
            devices: match &self.device {
                Device::None => Vec::new(),
                Device::Own => vec![own.clone()],
                Device::Named(names) => names.iter().map(DeviceAddress::from).collect(),
            },
            rnics: match &self.rnics {
                None => Rnics::Auto,
                Some(names) if names.is_empty() => Rnics::None,
                Some(names) => Rnics::Names(names.clone()),
            },
            smcr: SmcrOptions { v1: self.v1, v2: self.v2, ..SmcrOptions::default() },
            eids: self.eids.iter().map(eid).collect::<io::Result<_>>()?,
            recv_buffer: self.recv_buffer,
            spin: self.spin,
            path: match self.window {
                None => DataPath::Auto,
                Some(true) => DataPath::Window,
                Some(false) => DataPath::Move,
            },
            guest_memory: self.guest_memory,
            clc_timeout: self.clc_timeout,
            detect_timeout: self.detect_timeout,
            outlive_device: false,
            testing: TestOptions {
                seid: self.seid.as_ref().map(eid).transpose()?,
                close_timeout: self.close_timeout,
                idle_peer_timeout: self.idle_peer_timeout,
                release_2_0: self.release_2_0,
                ..TestOptions::default()
            },
            // No TCP option: each end is configured to expect SMC.
            ..Config::default()
        })
    }
}

/// How one end is carried: the info of SMC-D, or the reason for TCP. Both are `None` for SMC-R.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Nature {
    /// SMC-D's info.
    pub smc: Option<SmcdInfo>,
    /// The reason for TCP.
    #[serde(with = "decline_code")]
    pub decline: Option<DeclineCode>,
    /// The info or the reason, as text.
    pub text: String,
}

/// A [`DeclineCode`] as its number.
mod decline_code {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use smc_core::handshake::DeclineCode;

    pub(super) fn serialize<S: Serializer>(
        code: &Option<DeclineCode>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        code.map(DeclineCode::value).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<DeclineCode>, D::Error> {
        Ok(Option::<u32>::deserialize(from)?.map(DeclineCode::from))
    }
}

impl Nature {
    /// Whether the carrier is SMC.
    pub fn is_smc(&self) -> bool {
        self.decline.is_none()
    }
}

impl From<ConnectionInfo> for Nature {
    fn from(info: ConnectionInfo) -> Nature {
        let text = info.to_string();
        match info {
            ConnectionInfo::Smcd(info) => Nature { smc: Some(info), decline: None, text },
            ConnectionInfo::Smcr(_) => Nature { smc: None, decline: None, text },
            ConnectionInfo::Tcp(why) => Nature { smc: None, decline: Some(why.code()), text },
        }
    }
}

/// An [`io::Error`] on the wire.
#[derive(Debug, Serialize, Deserialize)]
pub struct Failure {
    raw: Option<i32>,
    kind: String,
    text: String,
}

impl From<&io::Error> for Failure {
    fn from(error: &io::Error) -> Failure {
        Failure {
            raw: error.raw_os_error(),
            kind: format!("{:?}", error.kind()),
            text: error.to_string(),
        }
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> io::Error {
        if let Some(raw) = failure.raw {
            return io::Error::from_raw_os_error(raw);
        }
        let kind = KINDS.iter().find(|kind| format!("{kind:?}") == failure.kind);
        io::Error::new(kind.copied().unwrap_or(ErrorKind::Other), failure.text)
    }
}

/// Kinds of errors with a number on the wire; any other becomes `Other`.
const KINDS: [ErrorKind; 17] = [
    ErrorKind::NotFound,
    ErrorKind::PermissionDenied,
    ErrorKind::ConnectionRefused,
    ErrorKind::ConnectionReset,
    ErrorKind::ConnectionAborted,
    ErrorKind::NotConnected,
    ErrorKind::AddrInUse,
    ErrorKind::AddrNotAvailable,
    ErrorKind::BrokenPipe,
    ErrorKind::AlreadyExists,
    ErrorKind::WouldBlock,
    ErrorKind::InvalidInput,
    ErrorKind::InvalidData,
    ErrorKind::TimedOut,
    ErrorKind::WriteZero,
    ErrorKind::Interrupted,
    ErrorKind::UnexpectedEof,
];

/// The answer to a call.
pub type Answer = Result<Value, Failure>;

/// Sends a header and bytes.
///
/// # Errors
/// Errors of the connection.
pub fn send(mut to: impl Write, header: &impl Serialize, bytes: &[u8]) -> io::Result<()> {
    let header = serde_json::to_vec(header)?;
    let too_long = |_| io::Error::from(ErrorKind::InvalidInput);
    let mut frame = Vec::with_capacity(8 + header.len() + bytes.len().min(64 << 10));
    frame.extend(u32::try_from(header.len()).map_err(too_long)?.to_be_bytes());
    frame.extend(u32::try_from(bytes.len()).map_err(too_long)?.to_be_bytes());
    frame.extend(header);
    // One packet for small messages, no copy of large ones.
    if bytes.len() <= 64 << 10 {
        frame.extend(bytes);
        return to.write_all(&frame);
    }
    to.write_all(&frame)?;
    to.write_all(bytes)
}

/// Receives a header and bytes. `None`: the other side has hung up.
///
/// # Errors
/// Errors of the connection; `InvalidData` for a malformed frame.
pub fn receive<T: for<'de> Deserialize<'de>>(
    mut from: impl Read,
) -> io::Result<Option<(T, Vec<u8>)>> {
    let mut lengths = [0; 8];
    let first = loop {
        match from.read(&mut lengths[..1]) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => break result?,
        }
    };
    if first == 0 {
        return Ok(None);
    }
    from.read_exact(&mut lengths[1..])?;
    let [a, b, c, d, e, f, g, h] = lengths;
    let mut part = |len| {
        let len = u32::from_be_bytes(len);
        if len > MAX_FRAME {
            return Err(io::Error::new(ErrorKind::InvalidData, format!("a frame of {len} bytes")));
        }
        let mut bytes = vec![0; len as usize];
        from.read_exact(&mut bytes)?;
        Ok(bytes)
    };
    let header = part([a, b, c, d])?;
    let bytes = part([e, f, g, h])?;
    Ok(Some((serde_json::from_slice(&header)?, bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_their_kind_and_number() {
        for raw in [104, 32, 11, 110, 22] {
            let error = io::Error::from_raw_os_error(raw);
            let back = io::Error::from(Failure::from(&error));
            assert_eq!((back.raw_os_error(), back.kind()), (Some(raw), error.kind()));
        }
        for kind in KINDS {
            let back = io::Error::from(Failure::from(&io::Error::new(kind, "why")));
            assert_eq!((back.raw_os_error(), back.kind()), (None, kind));
            assert!(back.to_string().contains("why"));
        }
    }

    #[test]
    fn frames_come_back_as_they_went() {
        for len in [0, 1, 64 << 10, (64 << 10) + 1] {
            let bytes = vec![7; len];
            let mut wire = Vec::new();
            send(&mut wire, &Op::ReadVectored(vec![1, 2]), &bytes).unwrap();
            send(&mut wire, &Op::SetLinger(Some(Duration::from_millis(5))), &[]).unwrap();
            let mut wire = wire.as_slice();
            let (op, back) = receive::<Op>(&mut wire).unwrap().unwrap();
            assert_eq!((op, back), (Op::ReadVectored(vec![1, 2]), bytes));
            let (op, _) = receive::<Op>(&mut wire).unwrap().unwrap();
            assert_eq!(op, Op::SetLinger(Some(Duration::from_millis(5))));
            assert!(receive::<Op>(&mut wire).unwrap().is_none());
        }
        assert!(receive::<Op>(&[0xff; 20][..]).is_err());
    }

    #[test]
    fn a_configuration_comes_back_as_it_went() {
        let own = DeviceAddress::from("/own");
        let mut config = Config::new("/own").eid(crate::eid("A")).eid(crate::eid("B-2"));
        config.outlive_device = false;
        config.testing.seid = Some(crate::eid("SYSTEM"));
        config.path = DataPath::Move;
        config.testing.idle_peer_timeout = Duration::from_millis(300);
        let settings = serde_json::to_vec(&Settings::of(&config, Device::Own)).unwrap();
        let settings: Settings = serde_json::from_slice(&settings).unwrap();
        let back = settings.config(&own).unwrap();
        assert_eq!(format!("{config:?}"), format!("{back:?}"));
    }
}
