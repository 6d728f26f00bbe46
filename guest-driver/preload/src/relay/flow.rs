//! One relay: the bytes on their way between the owner's end of a pair and a connection. No call
//! here waits.

use std::io::Read;
use std::net::Shutdown;
use std::os::fd::OwnedFd;

use guest_driver::{ChangeToken, PendingDecline, SmcStream};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::socket::stream::{SocketState, StreamSocket};
use crate::socket::table::DescriptorRef;

/// Turns of one relay before others have theirs.
const TURNS: usize = 8;

/// What carries the bytes to the peer.
#[derive(Debug)]
pub(super) enum RelayCarrier {
    /// A handshake that is under way. TCP carries them if SMC does not.
    Undecided(OwnedFd),
    /// A handshake that the maker of this process has begun. It ends on TCP.
    Declining(Box<PendingDecline>),
    /// SMC.
    Smc,
    /// TCP.
    Tcp(OwnedFd),
}

/// One direction.
#[derive(Debug, Default)]
struct Flow {
    /// Bytes that the receiver has not taken yet, from `at` on.
    rest: Vec<u8>,
    at: usize,
    /// No bytes will follow.
    ended: bool,
    /// The receiver knows that no bytes will follow.
    shut: bool,
}

impl Flow {
    fn is_empty(&self) -> bool {
        self.at == self.rest.len()
    }

    /// Keeps what the receiver has not taken.
    fn keep(&mut self, bytes: &[u8]) {
        self.rest.clear();
        self.rest.extend_from_slice(bytes);
        self.at = 0;
    }

    fn advance(&mut self, n: usize) {
        self.at += n;
        if self.is_empty() {
            // A relay without traffic takes no memory.
            (self.rest, self.at) = (Vec::new(), 0);
        }
    }

    /// Nobody takes the bytes.
    fn give_up(&mut self) {
        (self.rest, self.at, self.ended) = (Vec::new(), 0, true);
    }
}

/// A connection and the owner's end of the pair in its place.
pub(super) struct Relay {
    /// Distinguishes the relays of a process.
    pub(super) id: u64,
    pub(super) descriptor: DescriptorRef,
    pub(super) owner_end: OwnedFd,
    pub(super) carrier: RelayCarrier,
    to_peer: Flow,
    to_program: Flow,
    /// The state of the connection when the last turn began.
    token: ChangeToken,
    /// There may be something to do.
    pub(super) is_due: bool,
    /// The thread that runs the relays waits for it.
    pub(super) is_watched: bool,
}

impl Relay {
    pub(super) fn new(
        id: u64,
        descriptor: DescriptorRef,
        owner_end: OwnedFd,
        carrier: RelayCarrier,
    ) -> Relay {
        let (to_peer, to_program) = Default::default();
        let token = ChangeToken::default();
        let (is_due, is_watched) = (true, false);
        Relay { id, descriptor, owner_end, carrier, to_peer, to_program, token, is_due, is_watched }
    }

    /// The SMC connection, if SMC carries it.
    pub(super) fn stream(&self) -> Option<&SmcStream> {
        match self.carrier {
            RelayCarrier::Smc => self.descriptor.stream().and_then(StreamSocket::smc),
            _ => None,
        }
    }

    /// Whether the connection has changed since the last turn.
    pub(super) fn has_changed(&self) -> bool {
        self.stream().is_some_and(|stream| stream.changed_since(self.token))
    }

    /// Moves what can be moved without waiting. Returns whether any bytes or ends moved.
    pub(super) fn run(&mut self, room: &mut [u8]) -> bool {
        let mut any = false;
        if let Some(stream) = self.stream() {
            self.token = stream.change_token();
        }
        for _ in 0..TURNS {
            let moved = self.run_to_peer(room) | self.run_to_program(room);
            any |= moved;
            if !moved {
                self.is_due = false;
                break;
            }
        }
        any
    }

    fn run_to_peer(&mut self, room: &mut [u8]) -> bool {
        let mut moved = false;
        if self.to_peer.is_empty() && !self.to_peer.ended {
            match recv(&self.owner_end, &mut *room, RecvFlags::DONTWAIT) {
                Ok((n @ 1.., _)) => {
                    self.to_peer.keep(room.get(..n).unwrap_or_default());
                    moved = true;
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Ok(_) | Err(_) => {
                    self.to_peer.ended = true;
                    moved = true;
                }
            }
        }
        if !self.to_peer.is_empty() {
            match self.send_to_peer() {
                Ok(n) => {
                    self.to_peer.advance(n);
                    moved |= n > 0;
                }
                Err(()) => {
                    // The program's writes fail from now on.
                    let _ = rustix::net::shutdown(&self.owner_end, rustix::net::Shutdown::Read);
                    self.to_peer.give_up();
                    moved = true;
                }
            }
        }
        if self.to_peer.ended && self.to_peer.is_empty() && !self.to_peer.shut {
            self.to_peer.shut = true;
            moved = true;
            match (&self.carrier, self.stream()) {
                (RelayCarrier::Tcp(tcp), _) => {
                    let _ = rustix::net::shutdown(tcp, rustix::net::Shutdown::Write);
                }
                (_, Some(stream)) => {
                    let _ = stream.shutdown(Shutdown::Write);
                }
                _ => {}
            }
        }
        moved
    }

    fn send_to_peer(&self) -> Result<usize, ()> {
        let bytes = self.to_peer.rest.get(self.to_peer.at..).unwrap_or_default();
        let mut done = 0;
        while done < bytes.len() {
            let rest = bytes.get(done..).unwrap_or_default();
            let sent = match (&self.carrier, self.stream()) {
                (RelayCarrier::Tcp(tcp), _) => send_now(tcp, rest)?,
                (_, Some(stream)) => match stream.send(rest) {
                    Ok(n) => n,
                    Err(error) if would_block(&error) => 0,
                    Err(_) => return Err(()),
                },
                _ => return Err(()),
            };
            if sent == 0 {
                break;
            }
            done += sent;
        }
        Ok(done)
    }

    /// Forwards an urgent byte, if the reader has come to one. The kernel sends SIGURG for it.
    fn pass_urgent_byte(&self) -> bool {
        let Some(stream) = self.stream() else { return false };
        if !stream.has_urgent().unwrap_or(false) || stream.at_mark().ok().flatten() != Some(true) {
            return false;
        }
        let Ok(byte) = stream.recv_urgent() else { return false };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if send(&self.owner_end, &[byte], flags | SendFlags::OOB).is_err() {
            // The kernel has no urgent data on Unix sockets: the program gets it in line.
            let _ = send(&self.owner_end, &[byte], flags);
        }
        true
    }

    fn run_to_program(&mut self, room: &mut [u8]) -> bool {
        let mut moved = false;
        if self.to_program.is_empty() && !self.to_program.ended {
            let read = match (&self.carrier, self.stream()) {
                (RelayCarrier::Tcp(tcp), _) => match recv(tcp, &mut *room, RecvFlags::DONTWAIT) {
                    Ok((n, _)) => Some(n),
                    Err(Errno::AGAIN | Errno::INTR) => None,
                    Err(_) => Some(0),
                },
                (_, Some(mut stream)) => match stream.read(room) {
                    Ok(n) => Some(n),
                    Err(error) if would_block(&error) => None,
                    Err(_) => Some(0),
                },
                _ => Some(0),
            };
            moved = read.is_some();
            match read {
                Some(0) => self.to_program.ended = true,
                Some(n) => self.to_program.keep(room.get(..n).unwrap_or_default()),
                None => {}
            }
        }
        if !self.to_program.is_empty() {
            let rest = self.to_program.rest.get(self.to_program.at..).unwrap_or_default();
            match send_now(&self.owner_end, rest) {
                Ok(n) => {
                    self.to_program.advance(n);
                    moved |= n > 0;
                }
                Err(()) => {
                    // The program has closed its end.
                    self.to_program.give_up();
                    self.to_program.shut = true;
                    moved = true;
                }
            }
        }
        if self.to_program.is_empty() && !self.to_program.ended {
            moved |= self.pass_urgent_byte();
        }
        if self.to_program.ended && self.to_program.is_empty() && !self.to_program.shut {
            self.to_program.shut = true;
            moved = true;
            let _ = rustix::net::shutdown(&self.owner_end, rustix::net::Shutdown::Write);
        }
        moved
    }

    /// Takes the result of a handshake that was under way. `false`: it still is.
    pub(super) fn decide(&mut self) -> bool {
        let state = self.descriptor.stream().map(StreamSocket::state);
        if matches!(state, Some(SocketState::Undecided | SocketState::Deciding)) {
            return false;
        }
        let RelayCarrier::Undecided(_) = self.carrier else { return true };
        let was = std::mem::replace(&mut self.carrier, RelayCarrier::Smc);
        if let (Some(SocketState::Tcp), RelayCarrier::Undecided(tcp)) = (state, was) {
            self.carrier = RelayCarrier::Tcp(tcp);
        }
        (self.is_due, self.is_watched) = (true, false);
        true
    }

    /// Goes on with the handshake of a client that another process has begun: SMC is declined.
    pub(super) fn decline(&mut self) {
        self.is_due = false;
        let RelayCarrier::Declining(decliner) = &mut self.carrier else { return };
        let done = match decliner.advance() {
            Ok(false) => return,
            Ok(true) => true,
            Err(_) => false,
        };
        let RelayCarrier::Declining(decliner) =
            std::mem::replace(&mut self.carrier, RelayCarrier::Smc)
        else {
            return;
        };
        self.carrier = RelayCarrier::Tcp(decliner.into_tcp().into());
        (self.is_due, self.is_watched) = (true, false);
        match self.descriptor.stream() {
            // What the program wrote first goes first.
            Some(socket) if done => self.to_peer.keep(&std::mem::take(&mut *socket.early())),
            _ => self.fail(),
        }
    }

    /// The connection has failed: the program reads an end of data, and its writes fail.
    pub(super) fn fail(&mut self) {
        let _ = rustix::net::shutdown(&self.owner_end, rustix::net::Shutdown::Read);
        self.to_peer.give_up();
        self.to_peer.shut = true;
        self.to_program.ended = true;
    }

    /// Whether the relay is over: the program wants no more, and the peer has all it wrote.
    pub(super) fn is_over(&self) -> bool {
        match self.carrier {
            RelayCarrier::Undecided(_) | RelayCarrier::Declining(_) => false,
            _ if !self.to_peer.shut => false,
            _ => self.to_program.shut && self.to_program.ended || self.is_closed(),
        }
    }

    /// Whether no process has the program's end any more, or both directions have ended.
    pub(super) fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(&self.owner_end, PollFlags::empty())];
        let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&zero)).is_ok()
            && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Ends the connection. A peer that has closed already does not notice.
    pub(super) fn end(&self) {
        if let Some(stream) = self.stream() {
            // What the program wrote is in the peer's memory, so there is nothing to wait for.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Sends without waiting. Returns how many bytes there was room for.
fn send_now(to: &OwnedFd, bytes: &[u8]) -> Result<usize, ()> {
    match send(to, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(n) => Ok(n),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(_) => Err(()),
    }
}

fn would_block(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
}
