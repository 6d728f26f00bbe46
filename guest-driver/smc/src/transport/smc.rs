// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMC-D, and nothing else: a connection that falls back to TCP is an error here.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use guest_driver::socket::tokio::AsyncSmcStream;
use guest_driver::socket::{self, PollEvent, Poller};
use guest_driver::{ConnectionInfo, SmcListener, SmcStream, SmcdInfo, Stack};
use virtio_ism_abi::command::stat;

use super::{AsyncStream, Counters, Interest, Poll, SmcPath, Stream, Transport};

/// The required path of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// Stores into the peer's DMB.
    Window,
    /// The device copies.
    Move,
    /// Either.
    Any,
}

/// SMC-D over a stack.
pub(crate) struct Smc {
    stack: Arc<Stack>,
    path: Path,
    bind: SocketAddr,
    /// Of the first connection.
    info: OnceLock<SmcdInfo>,
}

impl Smc {
    /// Connections must be as `path` says; servers listen on the loopback interface.
    pub(crate) fn new(stack: Arc<Stack>, path: Path) -> Smc {
        Smc::bound(stack, path, super::sockets::LOOPBACK)
    }

    /// Like [`Smc::new`], for servers with another address.
    pub(crate) fn bound(stack: Arc<Stack>, path: Path, bind: SocketAddr) -> Smc {
        Smc { stack, path, bind, info: OnceLock::new() }
    }

    fn check(&self, stream: SmcStream) -> io::Result<SmcStream> {
        let problem = match (stream.info(), self.path) {
            (ConnectionInfo::Tcp(why), _) => format!("the connection fell back to TCP: {why}"),
            (ConnectionInfo::Smcd(info), Path::Window) if !info.window => {
                "the connection uses moves instead of the window".into()
            }
            (ConnectionInfo::Smcd(info), Path::Move) if info.window => {
                "the connection uses the window instead of moves".into()
            }
            (ConnectionInfo::Smcr(info), Path::Window | Path::Move) => {
                format!("the connection uses an RNIC instead of a device: {info}")
            }
            (ConnectionInfo::Smcr(_), Path::Any) => return Ok(stream),
            (ConnectionInfo::Smcd(info), _) => {
                self.info.get_or_init(|| info.clone());
                return Ok(stream);
            }
        };
        Err(io::Error::other(problem))
    }
}

impl Transport for Smc {
    type Listener = SmcListener;
    type Stream = SmcStream;
    type Poll = SmcPoll;

    fn listen(&self) -> io::Result<(SmcListener, String)> {
        let listener = SmcListener::bind(&self.stack, self.bind)?;
        let address = listener.local_addr()?.to_string();
        Ok((listener, address))
    }

    fn accept(&self, listener: &SmcListener) -> io::Result<SmcStream> {
        self.check(listener.accept()?.0)
    }

    fn connect(&self, address: &str) -> io::Result<SmcStream> {
        self.check(SmcStream::connect(&self.stack, address)?)
    }

    fn poll(&self) -> io::Result<SmcPoll> {
        let poller = Poller::new(self.stack.config().spin)?;
        Ok(SmcPoll { poller, events: Vec::new() })
    }

    fn smc_path(&self) -> Option<SmcPath> {
        self.info.get().map(|info| SmcPath {
            window: info.window,
            chid: info.chid.to_string(),
            gid: info.local_gid.to_string(),
            peer: info.peer_gid.to_string(),
        })
    }

    fn counters(&self) -> Option<Counters> {
        let counts = self.stack.device_stats(self.info.get()?.local_gid);
        let counts = counts.inspect_err(|error| tracing::debug!(%error, "device counters")).ok()?;
        Some(Counters {
            moves: *counts.get(stat::MOVES)?,
            wakes: *counts.get(stat::WAKES)?,
            commands: *counts.get(stat::COMMANDS)?,
        })
    }
}

impl Stream for SmcStream {
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        SmcStream::set_nonblocking(self, nonblocking)
    }

    fn send_at_once(&self) -> io::Result<()> {
        self.set_nodelay(true)
    }

    fn finish(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }

    fn readiness_fd(&self) -> io::Result<BorrowedFd<'_>> {
        // The same descriptor as "smc run" adds to a program's epoll set.
        self.pollable_exact()
    }

    fn into_tokio(self) -> io::Result<Box<dyn AsyncStream>> {
        Ok(Box::new(AsyncSmcStream::new(self)?))
    }
}

/// The library's poller.
pub(crate) struct SmcPoll {
    poller: Poller,
    events: Vec<PollEvent>,
}

fn interest(interest: Interest) -> socket::Interest {
    match interest {
        Interest::Read => socket::Interest::READ,
        Interest::Write => socket::Interest::WRITE,
        Interest::Both => socket::Interest::BOTH,
    }
}

impl Poll<SmcStream> for SmcPoll {
    fn add(&mut self, stream: &SmcStream, key: u64, asked: Interest) -> io::Result<()> {
        self.poller.add(stream, key, interest(asked))
    }

    fn modify(&mut self, _: &SmcStream, key: u64, asked: Interest) -> io::Result<()> {
        self.poller.modify(key, interest(asked))
    }

    fn remove(&mut self, _: &SmcStream, key: u64) -> io::Result<()> {
        self.poller.remove(key)
    }

    fn wait(&mut self, ready: &mut Vec<u64>, timeout: Duration) -> io::Result<()> {
        self.poller.wait(&mut self.events, 256, Some(timeout))?;
        ready.clear();
        ready.extend(self.events.iter().map(|event| event.key));
        Ok(())
    }
}
