// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! TCP and Unix stream sockets, as the kernel's defaults have them.

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::fd::OwnedFd;
use socket2::{Domain, Protocol, Socket, Type};

use super::{AsyncStream, Interest, Poll, Stream, Transport};

/// Listening address of servers for this machine only.
pub(crate) const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// TCP; servers listen on this address.
pub(crate) struct Tcp {
    bind: SocketAddr,
    /// The first write of a client goes with the SYN.
    fast_open: bool,
}

impl Tcp {
    /// Over the loopback interface.
    pub(crate) const LOOPBACK: Tcp = Tcp::on(LOOPBACK);

    pub(crate) const fn on(bind: SocketAddr) -> Tcp {
        Tcp { bind, fast_open: false }
    }

    /// With the first bytes in the SYN, where `net.ipv4.tcp_fastopen` has servers accept them.
    pub(crate) const fn with_fast_open(bind: SocketAddr) -> Tcp {
        Tcp { bind, fast_open: true }
    }
}

impl Transport for Tcp {
    type Listener = TcpListener;
    type Stream = TcpStream;
    type Poll = Epoll;

    fn listen(&self) -> io::Result<(TcpListener, String)> {
        let listener = TcpListener::bind(self.bind)?;
        let address = listener.local_addr()?.to_string();
        Ok((listener, address))
    }

    fn accept(&self, listener: &TcpListener) -> io::Result<TcpStream> {
        Ok(listener.accept()?.0)
    }

    fn connect(&self, address: &str) -> io::Result<TcpStream> {
        if !self.fast_open {
            return TcpStream::connect(address);
        }
        let address: SocketAddr = address.parse().map_err(io::Error::other)?;
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        ism_sys::set_fast_open_connect(&socket)?;
        socket.connect(&address.into())?;
        Ok(socket.into())
    }

    fn poll(&self) -> io::Result<Epoll> {
        Epoll::new()
    }
}

impl Stream for TcpStream {
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        TcpStream::set_nonblocking(self, nonblocking)
    }

    fn send_at_once(&self) -> io::Result<()> {
        self.set_nodelay(true)
    }

    fn finish(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }

    fn readiness_fd(&self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.as_fd())
    }

    fn into_tokio(self) -> io::Result<Box<dyn AsyncStream>> {
        self.set_nonblocking(true)?;
        Ok(Box::new(tokio::net::TcpStream::from_std(self)?))
    }
}

/// Unix stream sockets in a directory.
pub(crate) struct Unix {
    /// Where listening sockets are made.
    pub(crate) dir: PathBuf,
}

/// A listening Unix socket. Its path is removed with the socket.
pub(crate) struct PathListener {
    listener: UnixListener,
    path: PathBuf,
}

impl Drop for PathListener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Transport for Unix {
    type Listener = PathListener;
    type Stream = UnixStream;
    type Poll = Epoll;

    fn listen(&self) -> io::Result<(PathListener, String)> {
        let path = self.dir.join(format!("{}.sock", uuid::Uuid::new_v4().simple()));
        let listener = UnixListener::bind(&path)?;
        let address = path.display().to_string();
        Ok((PathListener { listener, path }, address))
    }

    fn accept(&self, listener: &PathListener) -> io::Result<UnixStream> {
        Ok(listener.listener.accept()?.0)
    }

    fn connect(&self, address: &str) -> io::Result<UnixStream> {
        UnixStream::connect(address)
    }

    fn poll(&self) -> io::Result<Epoll> {
        Epoll::new()
    }
}

impl Stream for UnixStream {
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        UnixStream::set_nonblocking(self, nonblocking)
    }

    fn send_at_once(&self) -> io::Result<()> {
        Ok(())
    }

    fn finish(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }

    fn readiness_fd(&self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.as_fd())
    }

    fn into_tokio(self) -> io::Result<Box<dyn AsyncStream>> {
        self.set_nonblocking(true)?;
        Ok(Box::new(tokio::net::UnixStream::from_std(self)?))
    }
}

/// epoll, level-triggered.
pub(crate) struct Epoll {
    set: OwnedFd,
    events: Vec<MaybeUninit<epoll::Event>>,
}

impl Epoll {
    /// An empty set.
    pub(crate) fn new() -> io::Result<Epoll> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Epoll { set, events: vec![MaybeUninit::uninit(); 256] })
    }
}

fn flags(interest: Interest) -> epoll::EventFlags {
    match interest {
        Interest::Read => epoll::EventFlags::IN,
        Interest::Write => epoll::EventFlags::OUT,
        Interest::Both => epoll::EventFlags::IN | epoll::EventFlags::OUT,
    }
}

impl<S: Stream> Poll<S> for Epoll {
    fn add(&mut self, stream: &S, key: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(
            &self.set,
            stream.readiness_fd()?,
            epoll::EventData::new_u64(key),
            flags(interest),
        )?)
    }

    fn modify(&mut self, stream: &S, key: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(
            &self.set,
            stream.readiness_fd()?,
            epoll::EventData::new_u64(key),
            flags(interest),
        )?)
    }

    fn remove(&mut self, stream: &S, _key: u64) -> io::Result<()> {
        Ok(epoll::delete(&self.set, stream.readiness_fd()?)?)
    }

    fn wait(&mut self, ready: &mut Vec<u64>, timeout: Duration) -> io::Result<()> {
        ready.clear();
        let timeout = Timespec {
            tv_sec: timeout.as_secs().min(3600) as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match epoll::wait(&self.set, &mut self.events[..], Some(&timeout)) {
            Ok((events, _)) => ready.extend(events.iter().map(|event| event.data.u64())),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}
