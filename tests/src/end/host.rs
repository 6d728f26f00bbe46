// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stacks and listeners, here or elsewhere.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use guest_driver::{SmcListener, SmcStream, Stack, Totals};
use virtio_ism_abi::{Chid, Gid};

use super::End;
use crate::agent::far::Far;
use crate::agent::wire::{Call, How};
use crate::watch::note;

/// A stack. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Host(Arc<Kind>);

#[derive(Debug)]
enum Kind {
    Here { stack: Arc<Stack>, ip: IpAddr },
    There(Remote),
}

#[derive(Debug)]
struct Remote {
    far: Arc<Far>,
    object: u64,
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.far.release(self.object);
    }
}

/// See the calls of the same names of [`Stack`] and [`SmcStream`] for errors.
#[allow(clippy::missing_errors_doc, reason = "they are those of Stack and SmcStream")]
impl Host {
    pub(super) fn here(stack: Arc<Stack>, ip: IpAddr) -> Host {
        Host(Arc::new(Kind::Here { stack, ip }))
    }

    /// A stack of this process, for others on this machine.
    pub fn of(stack: Arc<Stack>) -> Host {
        Host::here(stack, Ipv4Addr::LOCALHOST.into())
    }

    pub(super) fn there(far: &Arc<Far>, object: u64) -> Host {
        Host(Arc::new(Kind::There(Remote { far: far.clone(), object })))
    }

    /// The host's address for the other hosts.
    pub fn ip(&self) -> IpAddr {
        match &*self.0 {
            Kind::Here { ip, .. } => *ip,
            Kind::There(remote) => remote.far.there(),
        }
    }

    /// Listens on the host's address for others, on any port.
    #[track_caller]
    pub fn listen(&self) -> Listener {
        self.listen_at((self.ip(), 0).into()).unwrap()
    }

    /// Listens on an address.
    #[track_caller]
    pub fn listen_at(&self, addr: SocketAddr) -> io::Result<Listener> {
        match &*self.0 {
            Kind::Here { stack, .. } => {
                Ok(Listener { kind: Door::Here(SmcListener::bind(stack, addr)?) })
            }
            Kind::There(Remote { far, object }) => {
                let call = Call::Listen { stack: *object, addr };
                let ((object, addr), _) = far.call(&call, &[])?;
                Ok(Listener { kind: Door::There(Remote { far: far.clone(), object }, addr) })
            }
        }
    }

    /// Connects by SMC.
    #[track_caller]
    pub fn connect(&self, addr: SocketAddr) -> io::Result<End> {
        self.connect_how(addr, How::Smc)
    }

    /// The same with a time limit.
    #[track_caller]
    pub fn connect_timeout(&self, addr: SocketAddr, limit: Duration) -> io::Result<End> {
        self.connect_how(addr, How::Within(limit))
    }

    /// Connects in any way.
    #[track_caller]
    pub fn connect_how(&self, addr: SocketAddr, how: How) -> io::Result<End> {
        match &*self.0 {
            Kind::Here { stack, .. } => Ok(End::here(match how {
                How::Smc => SmcStream::connect(stack, addr)?,
                How::Within(limit) => SmcStream::connect_timeout(stack, &addr, limit)?,
                How::Tcp => SmcStream::connect_tcp(stack, addr)?,
                How::Upgrade => SmcStream::upgrade(stack, TcpStream::connect(addr)?, None)?,
            })),
            Kind::There(Remote { far, object }) => {
                let call = Call::Connect { stack: *object, addr, how };
                Ok(End::there(far, far.call(&call, &[])?.0))
            }
        }
    }

    /// Totals since its start.
    #[track_caller]
    pub fn totals(&self) -> Totals {
        match &*self.0 {
            Kind::Here { stack, .. } => stack.totals(),
            Kind::There(Remote { far, object }) => {
                far.call::<Totals>(&Call::Totals { stack: *object }, &[]).unwrap().0
            }
        }
    }

    /// CHIDs and GIDs of its devices.
    #[track_caller]
    pub fn devices(&self) -> Vec<(Chid, Gid)> {
        match &*self.0 {
            Kind::Here { stack, .. } => stack.devices(),
            Kind::There(Remote { far, object }) => {
                let call = Call::Devices { stack: *object };
                let (devices, _) = far.call::<Vec<(u16, [u8; 16])>>(&call, &[]).unwrap();
                devices.into_iter().map(|(chid, gid)| (Chid(chid), Gid(gid))).collect()
            }
        }
    }
}

/// A listener.
#[derive(Debug)]
pub struct Listener {
    kind: Door,
}

#[derive(Debug)]
enum Door {
    Here(SmcListener),
    There(Remote, SocketAddr),
}

/// See the calls of the same names of [`SmcListener`] for errors.
#[allow(clippy::missing_errors_doc, reason = "they are those of SmcListener")]
impl Listener {
    /// The listener itself, for tests in need of a descriptor. Panics for a listener elsewhere.
    #[track_caller]
    pub fn listener(&self) -> &SmcListener {
        match &self.kind {
            Door::Here(listener) => listener,
            Door::There(..) => panic!("a test that polls the far end's descriptors"),
        }
    }

    /// The listener's address.
    pub fn addr(&self) -> SocketAddr {
        match &self.kind {
            Door::Here(listener) => listener.local_addr().unwrap(),
            Door::There(_, addr) => *addr,
        }
    }

    /// Takes the next connection.
    #[track_caller]
    pub fn accept(&self) -> io::Result<(End, SocketAddr)> {
        match &self.kind {
            Door::Here(listener) => {
                let (stream, from) = listener.accept()?;
                Ok((End::here(stream), from))
            }
            Door::There(Remote { far, object }, _) => {
                let call = Call::Accept { listener: *object };
                let ((stream, from), _) = far.call(&call, &[])?;
                Ok((End::there(far, stream), from))
            }
        }
    }

    /// Whether [`Listener::accept`] returns `WouldBlock` instead of waiting.
    #[track_caller]
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match &self.kind {
            Door::Here(listener) => listener.set_nonblocking(nonblocking),
            Door::There(Remote { far, object }, _) => {
                let call = Call::ListenerNonblocking { listener: *object, nonblocking };
                far.call::<()>(&call, &[]).map(drop)
            }
        }
    }
}

/// A server with a listener, and a client.
#[derive(Debug)]
pub struct Pair {
    /// The server's stack.
    pub server: Host,
    /// The client's stack.
    pub client: Host,
    /// The server's listener.
    pub listener: Listener,
    /// Whether connections are expected to be SMC.
    pub smc: bool,
}

impl Pair {
    /// A pair of two stacks; connections are expected to be SMC if `smc`.
    #[track_caller]
    pub fn new(server: Host, client: Host, smc: bool) -> Pair {
        let listener = server.listen();
        Pair { server, client, listener, smc }
    }

    /// The server's address.
    pub fn addr(&self) -> SocketAddr {
        self.listener.addr()
    }

    /// A new connection: the client's end and the server's.
    #[track_caller]
    pub fn connect(&self) -> (End, End) {
        self.connect_from(&self.client)
    }

    /// A new connection from another stack.
    #[track_caller]
    pub fn connect_from(&self, client: &Host) -> (End, End) {
        note("connects");
        let (here, there) = thread::scope(|scope| {
            let accepting = scope.spawn(|| self.listener.accept().unwrap().0);
            let here = client.connect(self.addr());
            if here.is_err() {
                // No client comes: a plain client lets `accept` end, and the test report the cause.
                let _ = TcpStream::connect(self.addr());
            }
            (here.unwrap(), accepting.join().unwrap())
        });
        for (who, end) in [("client", &here), ("server", &there)] {
            let nature = end.nature();
            assert_eq!(nature.is_smc(), self.smc, "{who}: {}", nature.text);
        }
        (here, there)
    }
}
