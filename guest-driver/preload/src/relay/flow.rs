// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One relay: the bytes on their way between the owner's end of a pair and a connection. No call here
//! waits.

use std::io::Read;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use guest_driver::interpose::PendingDecline;
use guest_driver::{ChangeToken, SmcStream};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::offers;
use super::owner_end::{OwnerEnd, Received};
use super::temporary::RunningTemporary;
use crate::socket::stream::{SocketState, StreamSocket};
use crate::socket::table::DescriptorRef;
use crate::sys::raw;

/// Rounds of one relay before the next relay's turn.
const TURNS: usize = 8;

/// Carrier of the bytes to the peer.
#[derive(Debug)]
pub(super) enum RelayCarrier {
    /// A handshake under way. If SMC is not selected, this TCP socket carries the bytes.
    Undecided(OwnedFd),
    /// A handshake begun by the maker of this process. The handshake ends on TCP.
    Declining(Box<PendingDecline>),
    /// SMC.
    Smc,
    /// TCP.
    Tcp(OwnedFd),
}

/// One direction.
#[derive(Debug, Default)]
struct Flow {
    /// Bytes not yet taken by the receiver, from `at` on.
    rest: Vec<u8>,
    at: usize,
    /// The rest is one byte of urgent data.
    urgent: bool,
    /// No bytes will follow.
    ended: bool,
    /// The receiver knows that no bytes will follow.
    shut: bool,
}

impl Flow {
    fn is_empty(&self) -> bool {
        self.at == self.rest.len()
    }

    /// Keeps bytes not taken by the receiver.
    fn keep(&mut self, bytes: &[u8], urgent: bool) {
        self.rest.clear();
        self.rest.extend_from_slice(bytes);
        (self.at, self.urgent) = (0, urgent);
    }

    /// Keeps the bytes received into `room`. Returns whether there was anything, including an end.
    fn take(&mut self, received: Received, room: &[u8]) -> bool {
        match received {
            Received::Nothing => return false,
            Received::End | Received::Reset => self.ended = true,
            Received::Bytes(n) => self.keep(room.get(..n).unwrap_or_default(), false),
            Received::Urgent(byte) => self.keep(&[byte], true),
        }
        true
    }

    fn advance(&mut self, n: usize) {
        self.at += n;
        if self.is_empty() {
            // A relay without traffic takes no memory.
            (self.rest, self.at) = (Vec::new(), 0);
        }
    }

    /// Discards the bytes: there is no receiver.
    fn give_up(&mut self) {
        (self.rest, self.at, self.ended) = (Vec::new(), 0, true);
    }
}

/// Receives from a TCP socket with SO_OOBINLINE, without waiting: an urgent byte alone, or bytes before
/// the urgent byte.
fn receive_now(from: &OwnedFd, room: &mut [u8]) -> Received {
    loop {
        // Once a byte is queued, the head of the stream is fixed.
        let has_bytes = raw::queued_bytes(from.as_raw_fd()).is_ok_and(|n| n > 0);
        if has_bytes && raw::is_at_mark(from.as_raw_fd()) {
            let mut byte = [0u8];
            match recv(from, &mut byte, RecvFlags::DONTWAIT) {
                Ok((1.., _)) => return Received::Urgent(byte[0]),
                Err(Errno::AGAIN | Errno::INTR) => return Received::Nothing,
                Ok(_) => return Received::End,
                Err(_) => return Received::Reset,
            }
        }
        let peek = if has_bytes { RecvFlags::empty() } else { RecvFlags::PEEK };
        match recv(from, &mut *room, RecvFlags::DONTWAIT | peek) {
            Ok((1.., _)) if !has_bytes => {}
            Ok((n @ 1.., _)) => return Received::Bytes(n),
            Err(Errno::AGAIN | Errno::INTR) => return Received::Nothing,
            Ok(_) => return Received::End,
            Err(_) => return Received::Reset,
        }
    }
}

/// Keeps urgent bytes of a TCP connection in line, as expected by [`receive_now`].
fn keep_in_line(carrier: &RelayCarrier) {
    if let RelayCarrier::Tcp(tcp) = carrier {
        let _ = rustix::net::sockopt::set_socket_oobinline(tcp, true);
    }
}

/// A connection and the owner's end of the pair in its place.
pub(super) struct Relay {
    /// Distinguishes the relays of a process.
    pub(super) id: u64,
    pub(super) descriptor: DescriptorRef,
    pub(super) owner_end: OwnerEnd,
    pub(super) carrier: RelayCarrier,
    to_peer: Flow,
    to_program: Flow,
    /// Reset the connection for both the program and the peer.
    is_reset: bool,
    /// The state of the connection at the beginning of the last turn.
    token: ChangeToken,
    /// There may be work.
    pub(super) is_due: bool,
    /// The thread of the relays waits for events of this relay.
    pub(super) is_watched: bool,
    /// For a relay to be taken back when no other process needs the relay.
    pub(super) temporary: Option<RunningTemporary>,
    /// No thread of the program is still in a call begun before the relay.
    is_alone: bool,
}

impl Relay {
    /// The descriptors of the relay.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let carrier = match &self.carrier {
            RelayCarrier::Tcp(tcp) | RelayCarrier::Undecided(tcp) => Some(tcp.as_raw_fd()),
            RelayCarrier::Declining(decliner) => Some(decliner.tcp().as_raw_fd()),
            RelayCarrier::Smc => None,
        };
        [self.owner_end.as_raw_fd()].into_iter().chain(carrier)
    }

    pub(super) fn new(
        id: u64,
        descriptor: DescriptorRef,
        owner_end: OwnedFd,
        carrier: RelayCarrier,
    ) -> Relay {
        let (to_peer, to_program) = Default::default();
        let token = ChangeToken::default();
        let owner_end = OwnerEnd::new(owner_end);
        Relay {
            id,
            descriptor,
            owner_end,
            carrier,
            to_peer,
            to_program,
            is_reset: false,
            token,
            is_due: true,
            is_watched: false,
            temporary: None,
            is_alone: false,
        }
    }

    /// The SMC connection, for a relay on SMC.
    pub(super) fn stream(&self) -> Option<&SmcStream> {
        match self.carrier {
            RelayCarrier::Smc => self.descriptor.stream().and_then(StreamSocket::smc),
            _ => None,
        }
    }

    /// Bytes of the program in the relay, not yet taken by the connection.
    pub(super) fn unsent(&self) -> u64 {
        (self.to_peer.rest.len() - self.to_peer.at) as u64
    }

    /// Whether the connection has changed since the last turn.
    pub(super) fn has_changed(&self) -> bool {
        self.stream().is_some_and(|stream| stream.changed_since(self.token))
    }

    /// Moves bytes without waiting. Returns whether any bytes or ends moved.
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
            let received = self.owner_end.receive(room);
            if matches!(received, Received::Reset) {
                // The program has closed with unread bytes.
                self.fail();
                return true;
            }
            moved = self.to_peer.take(received, room);
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
            let urgent = self.to_peer.urgent;
            let sent = match (&self.carrier, self.stream()) {
                (RelayCarrier::Tcp(tcp), _) => send_now(tcp, rest, urgent)?,
                (_, Some(stream)) => match send_by_smc(stream, rest, urgent) {
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

    /// Receives from the peer, without waiting. An urgent byte at the read position goes first: a read
    /// would skip it.
    fn receive_from_peer(&self, room: &mut [u8]) -> Received {
        let mut stream = match (&self.carrier, self.stream()) {
            (RelayCarrier::Tcp(tcp), _) => return receive_now(tcp, room),
            (_, Some(stream)) => stream,
            _ => return Received::Reset,
        };
        if stream.at_mark().ok().flatten() == Some(true)
            && let Ok(byte) = stream.recv_urgent()
        {
            return Received::Urgent(byte);
        }
        match stream.read(room) {
            Ok(n @ 1..) => Received::Bytes(n),
            Err(error) if would_block(&error) => Received::Nothing,
            Ok(_) => Received::End,
            Err(_) => Received::Reset,
        }
    }

    /// Sends the program's bytes. Returns whether no bytes are left on their way, and neither direction
    /// has ended: then the connection does not need the relay any more.
    pub(super) fn settles(&mut self, room: &mut [u8]) -> bool {
        let is_sent = (0..TURNS).any(|_| !self.run_to_peer(room));
        let is_idle = |flow: &Flow| flow.is_empty() && !flow.ended && !flow.shut;
        is_sent && self.stream().is_some() && is_idle(&self.to_peer) && is_idle(&self.to_program)
    }

    /// Sends the program's last bytes, when no process has the program's end any more. Returns whether
    /// all of them are sent.
    pub(super) fn send_rest(&mut self, room: &mut [u8]) -> bool {
        loop {
            match self.owner_end.receive(room) {
                Received::End => return true,
                Received::Nothing | Received::Reset => return false,
                received => self.to_peer.take(received, room),
            };
            match self.send_to_peer() {
                Ok(n) => self.to_peer.advance(n),
                Err(()) => return false,
            }
            if !self.to_peer.is_empty() {
                return false;
            }
        }
    }

    /// Whether the relay may take bytes of the peer. Another thread's call begun before the relay goes
    /// first: otherwise the call's bytes would come after the bytes read by the relay.
    fn may_receive(&mut self) -> bool {
        if !self.is_alone {
            // Counted before the offers: an offer ended meanwhile has no reference left.
            let refs = self.descriptor.refs() as usize;
            let known = 1 + offers::offers_of(&self.descriptor);
            self.is_alone = self.stream().is_none() || refs <= known;
        }
        self.is_alone
    }

    /// Continues in a process with only the thread of the relays.
    pub(super) fn go_on_alone(&mut self) {
        (self.is_due, self.is_watched, self.is_alone) = (true, false, true);
    }

    /// Whether bytes are left to a call begun before the relay.
    pub(super) fn is_held_up(&self) -> bool {
        let is_ready = |stream: &SmcStream| {
            let readiness = stream.readiness(false);
            readiness.readable || readiness.read_closed
        };
        !self.is_alone && !self.to_program.ended && self.stream().is_some_and(is_ready)
    }

    /// Whether the relay waits for the program's read before the relay is taken back.
    fn is_withheld(&self) -> bool {
        self.temporary.as_ref().is_some_and(RunningTemporary::is_alone)
            && self.owner_end.has_unread()
    }

    fn run_to_program(&mut self, room: &mut [u8]) -> bool {
        let mut moved = false;
        if self.to_program.is_empty()
            && !self.to_program.ended
            && !self.is_withheld()
            && self.may_receive()
        {
            let received = self.receive_from_peer(room);
            if matches!(received, Received::Reset) {
                self.fail();
                return true;
            }
            moved = self.to_program.take(received, room);
        }
        if !self.to_program.is_empty() {
            let rest = self.to_program.rest.get(self.to_program.at..).unwrap_or_default();
            // The kernel sends SIGURG for an urgent byte.
            match send_now(&self.owner_end, rest, self.to_program.urgent) {
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
        if self.to_program.ended && self.to_program.is_empty() && !self.to_program.shut {
            self.to_program.shut = true;
            moved = true;
            let _ = rustix::net::shutdown(&self.owner_end, rustix::net::Shutdown::Write);
        }
        moved
    }

    /// Takes the result of a handshake. `false`: the handshake is still under way.
    pub(super) fn decide(&mut self) -> bool {
        let state = self.descriptor.stream().map(StreamSocket::state);
        if matches!(state, Some(SocketState::Undecided | SocketState::Deciding)) {
            return false;
        }
        let RelayCarrier::Undecided(_) = self.carrier else { return true };
        let was = std::mem::replace(&mut self.carrier, RelayCarrier::Smc);
        if let (Some(SocketState::Tcp), RelayCarrier::Undecided(tcp)) = (state, was) {
            self.carrier = RelayCarrier::Tcp(tcp);
            keep_in_line(&self.carrier);
        }
        (self.is_due, self.is_watched) = (true, false);
        true
    }

    /// Continues a client's handshake begun by another process: SMC is declined.
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
        keep_in_line(&self.carrier);
        (self.is_due, self.is_watched) = (true, false);
        match self.descriptor.stream() {
            // The program's early bytes go first.
            Some(socket) if done => {
                let early = std::mem::take(&mut *socket.undecided.early());
                self.to_peer.keep(&early.into_bytes(), false);
            }
            _ => self.fail(),
        }
    }

    /// Marks the connection as failed: the calls of the program and of the peer fail when the relay
    /// ends. The program can still read the remaining bytes.
    pub(super) fn fail(&mut self) {
        self.is_reset = true;
        for flow in [&mut self.to_peer, &mut self.to_program] {
            flow.give_up();
            flow.shut = true;
        }
    }

    /// Whether the relay is over: the program needs no more bytes, and the peer has all of the
    /// program's.
    pub(super) fn is_over(&self) -> bool {
        match self.carrier {
            RelayCarrier::Undecided(_) | RelayCarrier::Declining(_) => false,
            _ if !self.to_peer.shut => false,
            _ => self.to_program.shut && self.to_program.ended || self.is_closed(),
        }
    }

    /// Whether no process has the program's end any more, or both directions have ended.
    pub(super) fn is_closed(&self) -> bool {
        self.owner_end.is_left(0)
    }

    /// Ends the connection. Has no effect on a closed peer.
    pub(super) fn end(&self) {
        match (&self.carrier, self.stream()) {
            _ if !self.is_reset => self.owner_end.take_kept_byte(),
            (_, Some(stream)) => stream.reset(),
            (RelayCarrier::Tcp(tcp), _) => {
                let _ = rustix::net::sockopt::set_socket_linger(tcp, Some(Duration::ZERO));
            }
            _ => {}
        }
        if let Some(stream) = self.stream() {
            // The program's bytes are in the peer's memory, so there is nothing to wait for.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Sends without waiting. Returns the number of bytes taken by the receiver.
fn send_now(to: &impl AsFd, bytes: &[u8], urgent: bool) -> Result<usize, ()> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match send(to, bytes, if urgent { flags | SendFlags::OOB } else { flags }) {
        Ok(n) => Ok(n),
        // The kernel has no urgent data on Unix sockets: the program gets the byte in line.
        Err(Errno::OPNOTSUPP) if urgent => send_now(to, bytes, false),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(_) => Err(()),
    }
}

/// Variant of [`send_now`] for SMC.
fn send_by_smc(stream: &SmcStream, bytes: &[u8], urgent: bool) -> std::io::Result<usize> {
    match bytes {
        [byte] if urgent => stream.send_urgent(*byte).map(|()| 1),
        _ => stream.send(bytes),
    }
}

fn would_block(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
}
