// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets of this project, of AF_SMC, or of TCP, as one type.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use guest_driver::{Config, Rnics, SmcListener, SmcStream, Stack};
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};
use smc_rendezvous::Mode;

use super::report::Carrier;
use crate::linux;

/// The kind of sockets.
#[derive(Clone, Debug)]
pub enum Net {
    /// This project's, on a stack.
    Rust(Arc<Stack>),
    /// AF_SMC's.
    Linux,
    /// The kernel's TCP.
    Tcp,
}

/// A listener.
#[derive(Debug)]
pub enum Door {
    /// Of this project.
    Rust(SmcListener),
    /// Of AF_SMC.
    Linux(TcpListener),
    /// Of TCP.
    Tcp(TcpListener),
}

/// A connection.
#[derive(Debug)]
pub enum Line {
    /// Of this project.
    Rust(SmcStream),
    /// Of AF_SMC.
    Linux(TcpStream),
    /// Of TCP.
    Tcp(TcpStream),
}

impl Net {
    /// `tcp`, `linux`, or `rust` with options after a colon, separated by commas:
    ///
    /// ```text
    /// v1          only version 1; otherwise only version 2
    /// v2.0        only release 2.0
    /// links=N     links of a link group at most
    /// idle=MS     how long a link group outlives its last connection
    /// test=MS     how long a silent link waits for its test
    /// eyes        elements begin with an eye catcher
    /// buffer=N    bytes of receive buffers
    /// rnic=NAME   only this RNIC; may be repeated
    /// device=PATH the virtio-ism device behind a socket of the daemon
    /// pnet=NAME:ID  the network of an adapter or interface; may be repeated
    /// no-option   SMC is proposed to every peer, and peers are not known by TCP option 254
    /// ```
    ///
    /// # Panics
    /// On an unknown option, or if no stack opens.
    pub fn new(who: &str) -> Net {
        let (who, options) = who.split_once(':').unwrap_or((who, ""));
        match who {
            "tcp" => return Net::Tcp,
            "linux" => return Net::Linux,
            "rust" => {}
            _ => panic!("{who:?} is none of tcp, linux, rust"),
        }
        let mut config = Config { outlive_device: false, ..Config::default() };
        config.smcr.v1 = false;
        // Emulated guests are slow, and slower where the host is busy.
        config.clc_timeout = Duration::from_secs(30);
        // AF_SMC knows its peers by TCP option 254 and by nothing else.
        config.rendezvous = Mode::Required;
        for option in options.split(',').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, "0"));
            let number: u64 = value.parse().unwrap_or_default();
            match name {
                "v1" => (config.smcr.v1, config.smcr.v2) = (true, false),
                "no-option" => config.rendezvous = Mode::Off,
                "eyes" => config.smcr.eye_catcher = true,
                "v2.0" => config.testing.release_2_0 = true,
                "links" => config.smcr.max_links = number as u8,
                "idle" => config.smcr.idle_group = Duration::from_millis(number),
                "test" => config.smcr.test_link = Duration::from_millis(number),
                "buffer" => config.recv_buffer = number as usize,
                "device" => config.devices = vec![value.into()],
                "pnet" => {
                    let (name, id) = value.split_once(':').unwrap();
                    config.smcr.pnet.push((name.to_owned(), id.to_owned()));
                }
                "rnic" => match &mut config.rnics {
                    Rnics::Names(names) => names.push(value.to_owned()),
                    rnics => *rnics = Rnics::Names(vec![value.to_owned()]),
                },
                _ => panic!("unknown option {option:?}"),
            }
        }
        Net::Rust(Stack::open(config).unwrap())
    }

    /// Listens.
    ///
    /// # Errors
    /// Errors of the sockets.
    pub fn listen(&self, addr: SocketAddr) -> io::Result<Door> {
        Ok(match self {
            Net::Rust(stack) => Door::Rust(SmcListener::bind(stack, addr)?),
            Net::Linux => Door::Linux(linux::listener(&addr)?),
            Net::Tcp => Door::Tcp(TcpListener::bind(addr)?),
        })
    }

    /// Connects.
    ///
    /// # Errors
    /// Errors of the sockets.
    pub fn connect(&self, addr: SocketAddr) -> io::Result<Line> {
        Ok(match self {
            Net::Rust(stack) => Line::Rust(SmcStream::connect(stack, addr)?),
            Net::Linux => Line::Linux(linux::stream(&addr)?),
            Net::Tcp => Line::Tcp(TcpStream::connect(addr)?),
        })
    }
}

impl Door {
    /// Takes the next connection.
    ///
    /// # Errors
    /// Errors of the sockets.
    pub fn accept(&self) -> io::Result<Line> {
        Ok(match self {
            Door::Rust(listener) => Line::Rust(listener.accept()?.0),
            Door::Linux(listener) => Line::Linux(listener.accept()?.0),
            Door::Tcp(listener) => Line::Tcp(listener.accept()?.0),
        })
    }
}

/// See the calls of the same names of [`SmcStream`] and [`TcpStream`] for errors.
#[allow(clippy::missing_errors_doc, reason = "they are those of the sockets")]
impl Line {
    /// Receives some bytes; none at the end.
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Line::Rust(stream) => stream.recv(buf),
            Line::Linux(stream) | Line::Tcp(stream) => (&mut &*stream).read(buf),
        }
    }

    /// Sends some bytes.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Line::Rust(stream) => stream.send(bytes),
            Line::Linux(stream) | Line::Tcp(stream) => (&mut &*stream).write(bytes),
        }
    }

    /// Takes the stored error of the socket, if there is one.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        match self {
            Line::Rust(stream) => stream.take_error(),
            Line::Linux(stream) | Line::Tcp(stream) => stream.take_error(),
        }
    }

    /// Sends an urgent byte.
    pub fn send_urgent(&self, byte: u8) -> io::Result<()> {
        match self {
            Line::Rust(stream) => stream.send_urgent(byte),
            Line::Linux(stream) | Line::Tcp(stream) => {
                Ok(send(stream, &[byte], SendFlags::OOB).map(drop)?)
            }
        }
    }

    /// Takes the urgent byte, if present.
    pub fn recv_urgent(&self) -> io::Result<Option<u8>> {
        match self {
            Line::Rust(stream) if !stream.has_urgent()? => Ok(None),
            Line::Rust(stream) => stream.recv_urgent().map(Some),
            Line::Linux(stream) | Line::Tcp(stream) => {
                let mut byte = [0];
                match recv(stream, &mut byte[..], RecvFlags::OOB) {
                    Ok((1, _)) => Ok(Some(byte[0])),
                    // None yet.
                    Ok(_) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::AGAIN) => Ok(None),
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    /// Ends one direction or both.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Line::Rust(stream) => stream.shutdown(how),
            Line::Linux(stream) | Line::Tcp(stream) => stream.shutdown(how),
        }
    }

    /// How long calls may take.
    pub fn set_timeouts(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Line::Rust(stream) => {
                stream.set_read_timeout(limit)?;
                stream.set_write_timeout(limit)
            }
            Line::Linux(stream) | Line::Tcp(stream) => {
                stream.set_read_timeout(limit)?;
                stream.set_write_timeout(limit)
            }
        }
    }

    /// Whether calls return instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match self {
            Line::Rust(stream) => stream.set_nonblocking(nonblocking),
            Line::Linux(stream) | Line::Tcp(stream) => stream.set_nonblocking(nonblocking),
        }
    }

    /// Makes writes wait for room in the peer's buffer, as over AF_SMC.
    pub fn hold_nothing_back(&self) {
        if let Line::Rust(stream) = self {
            stream.set_send_buffer(0);
        }
    }

    /// Sends every write at once.
    pub fn set_nodelay(&self) -> io::Result<()> {
        match self {
            Line::Rust(stream) => stream.set_nodelay(true),
            Line::Linux(stream) | Line::Tcp(stream) => Ok(sockopt::set_tcp_nodelay(stream, true)?),
        }
    }

    /// The carrier of the connection.
    pub fn carrier(&self) -> Carrier {
        match self {
            Line::Rust(stream) => Carrier::of_connection(&stream.info()),
            Line::Tcp(_) => Carrier { kind: "tcp".into(), ..Carrier::default() },
            Line::Linux(stream) => match (stream.local_addr(), stream.peer_addr()) {
                (Ok(here), Ok(there)) => Carrier::of_kernel(here.port(), there.port()),
                _ => Carrier { kind: "unknown".into(), ..Carrier::default() },
            },
        }
    }
}
