//! The handshake of one connection. A client's runs in a thread of its own if it takes long, a
//! server's waits in `waiting`.

use std::cell::Cell;
use std::ffi::c_int;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use guest_driver::traffic::Endpoint;
use guest_driver::{
    ConnectionInfo, Fallback, FirstBytes, Incoming, ProposalObserver, SignalMask, SmcStream,
};
use smc_core::handshake::{DeclineCode, FallbackReason, HandshakeError};

use crate::selection::first_bytes::{self, FirstBytesWait, peek};
use crate::selection::running::{self, RUNNING_LOCK};
use crate::selection::session::PlannedProposal;
use crate::selection::transitions::{ActionInput, carry_out};
use crate::selection::waiting::{self, PendingHandshake};
use crate::selection::{Wait, declined_servers, listening_ports, option, session, worthwhile};
use crate::socket::states::SocketEvent;
use crate::socket::stream::{SocketRole, SocketState, StreamSocket};
use crate::socket::table::{DESCRIPTORS, DescriptorRef};
use crate::status;
use crate::sys::raw::{self, Errno, SysResult};
use crate::sys::{STACK, borrowed, lent_stream, timespec, wait_readable};

/// Lowest numbers for the library's own descriptors, out of the program's way. The first one that
/// the limit of the process allows holds.
const HIGH_FDS: [c_int; 3] = [60_000, 4_000, 700];

/// Makes a second descriptor of the TCP connection, out of the program's way.
pub(super) fn duplicate(fd: c_int) -> Result<OwnedFd, Errno> {
    let tried =
        HIGH_FDS.iter().find_map(|&floor| raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, floor).ok());
    let copy = match tried {
        Some(copy) => copy,
        None => raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3)?,
    };
    if let Some(descriptor) = DESCRIPTORS.get(fd)
        && let Some(socket) = descriptor.stream()
    {
        socket.set_copy(copy as c_int);
    }
    Ok(crate::sys::owned(copy as c_int))
}

/// Begins the handshake, if the state of the socket allows it after this event. `true`: a signal
/// interrupts the call of the program.
pub(super) fn begin(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    fd: c_int,
    (event, wait): (SocketEvent, Wait),
) -> bool {
    let interrupted = Cell::new(false);
    let start = || {
        let start = |mask| start(descriptor, socket, fd, (wait, mask));
        interrupted.set(raw::blocking_signals(start));
    };
    carry_out(descriptor, fd, event, ActionInput::Start(&start));
    interrupted.get()
}

/// Begins the handshake. The socket is in [`SocketState::Deciding`], and the signals of the program
/// are blocked; `mask`: those that it has blocked itself. `true`: a signal has interrupted the call
/// of the program.
fn start(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    fd: c_int,
    (wait, mask): (Wait, SignalMask),
) -> bool {
    socket.adopt();
    match (socket.role(), wait) {
        (SocketRole::Client, _) => start_client(descriptor, socket, fd),
        (SocketRole::Server, Wait::Short) => start_server(descriptor, socket, fd),
        (SocketRole::Server, Wait::Block | Wait::Until(_)) => {
            // A signal that came meanwhile must interrupt the call that now goes on.
            return wait_here(descriptor, socket, fd, (wait, mask)) || raw::is_interrupted(mask);
        }
    }
    false
}

fn start_client(descriptor: &DescriptorRef, socket: &StreamSocket, fd: c_int) {
    // The caller made sure that there was a descriptor, and another thread has taken it.
    let Ok(tcp) = duplicate(fd).map(TcpStream::from) else {
        return complete_with_tcp(descriptor, fd, |early| send_early(borrowed(fd), early));
    };
    if is_connected(&tcp)
        && let Some(Err(why)) =
            socket.request.lock().map(|request| option::after_connect(request, &tcp))
    {
        status::client_stays_on_tcp(&tcp, why);
        return complete_with_tcp(descriptor, fd, |early| send_early(&tcp, early));
    }
    spawn(descriptor, fd, move |descriptor, fd| propose(descriptor, fd, tcp));
}

/// The server's half, for a call that must not wait. Often the client's message is there already.
fn start_server(descriptor: &DescriptorRef, socket: &StreamSocket, fd: c_int) {
    let wait = FirstBytesWait::new(None);
    let pending: Result<Box<dyn PendingHandshake>, Errno> = match peek(borrowed(fd)) {
        FirstBytes::Incomplete if !wait.left(socket).is_zero() => {
            duplicate(fd).map(|tcp| Box::new(AwaitFirstBytes { tcp: tcp.into(), wait }) as Box<_>)
        }
        found if !found.is_smc() => return stay_on_tcp(descriptor, fd),
        found => match duplicate(fd) {
            Ok(tcp) => match serve(descriptor, fd, tcp.into(), found) {
                Some(incoming) => Ok(Box::new(AwaitMessage(incoming))),
                None => return,
            },
            Err(_) => return decline_here(descriptor, fd, found),
        },
    };
    match pending.map(|pending| waiting::add(descriptor, fd, pending)) {
        Ok(Ok(())) => {}
        Ok(Err(back)) if !back.is_untouched() => {
            // There are no threads left, so this one waits.
            let mut pending = Some(back);
            while let Some(now) = pending {
                wait_readable(&now.fds(), CHECK_INTERVAL);
                pending = now.advance(descriptor, fd);
            }
        }
        Ok(Err(_)) | Err(_) => waiting::postpone(descriptor, fd),
    }
}

/// A server that waits for its client's first bytes.
struct AwaitFirstBytes {
    tcp: TcpStream,
    wait: FirstBytesWait,
}

impl PendingHandshake for AwaitFirstBytes {
    fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [Some(self.tcp.as_fd()), None]
    }

    fn is_over(&self, descriptor: &DescriptorRef) -> bool {
        self.wait.is_over(descriptor)
    }

    fn is_untouched(&self) -> bool {
        true
    }

    fn is_ready(&mut self, descriptor: &DescriptorRef) -> bool {
        if self.is_over(descriptor) || peek(&self.tcp) != FirstBytes::Incomplete {
            return true;
        }
        if rustix::io::ioctl_fionread(&self.tcp).unwrap_or(0) > 0
            && let Some(socket) = descriptor.stream()
        {
            self.wait.note_part(socket);
        }
        false
    }

    fn advance(
        self: Box<Self>,
        descriptor: &DescriptorRef,
        fd: c_int,
    ) -> Option<Box<dyn PendingHandshake>> {
        let found = peek(&self.tcp);
        let incoming = serve(descriptor, fd, self.tcp, found)?;
        Some(Box::new(AwaitMessage(incoming)))
    }
}

/// A server that waits for the next message of a client that has proposed SMC.
struct AwaitMessage(Incoming);

impl PendingHandshake for AwaitMessage {
    fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.0.fds()
    }

    fn is_over(&self, _: &DescriptorRef) -> bool {
        self.0.deadline().is_none_or(|end| Instant::now() >= end)
    }

    fn is_untouched(&self) -> bool {
        false
    }

    fn is_ready(&mut self, _: &DescriptorRef) -> bool {
        true
    }

    fn advance(
        mut self: Box<Self>,
        descriptor: &DescriptorRef,
        fd: c_int,
    ) -> Option<Box<dyn PendingHandshake>> {
        go_on(descriptor, fd, &mut self.0).then_some(self as Box<_>)
    }
}

/// How long a call waits before it looks at a part of a message again.
const PART_INTERVAL: Duration = Duration::from_millis(5);
/// How much longer than a call with a time limit the wait for a client's first bytes would be.
const CALL_MARGIN: Duration = Duration::from_secs(1);
/// How often it checks whether the program has closed the connection.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The server's half, for a call that waits. `true`: a signal interrupts the call, or its time has
/// passed.
fn wait_here(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    fd: c_int,
    (call, mask): (Wait, SignalMask),
) -> bool {
    // The call ends before the wait does.
    let limit = match call {
        Wait::Until(end) => Some(end.saturating_duration_since(Instant::now()) + CALL_MARGIN),
        Wait::Block | Wait::Short => None,
    };
    let mut wait = FirstBytesWait::new(limit);
    // The kernel never restarts a call with a time limit (signal(7)).
    let is_interrupted = |result| {
        result == Err(Errno(libc::EINTR)) && (limit.is_some() || raw::signals_interrupt())
            || call.is_over()
    };
    let copy = duplicate(fd).map(TcpStream::from);
    let tcp = copy.as_ref().map_or(borrowed(fd), AsFd::as_fd);
    let found = loop {
        let found = peek(tcp);
        if found != FirstBytes::Incomplete || wait.is_over(descriptor) {
            break found;
        }
        let left = call.left(wait.left(socket).min(CHECK_INTERVAL));
        let mut result = ppoll(tcp, left, mask);
        let is_part = result == Ok(1) && peek(tcp) == FirstBytes::Incomplete;
        if is_part {
            wait.note_part(socket);
        }
        // A process that may have no descriptors may not poll any.
        if is_part || result == Err(Errno(libc::EINVAL)) {
            result = raw::ppoll(&mut [], Some(&timespec(left.min(PART_INTERVAL))), Some(mask));
        }
        if is_interrupted(result) {
            if socket.wants_to_write()
                && let Ok(tcp) = copy
                && waiting::add(descriptor, fd, Box::new(AwaitFirstBytes { tcp, wait })).is_ok()
            {
                // What the program writes is kept, as TCP keeps it.
                return true;
            }
            waiting::postpone(descriptor, fd);
            return true;
        }
    };
    let incoming = match copy {
        _ if !found.is_smc() => {
            stay_on_tcp(descriptor, fd);
            None
        }
        Ok(copy) => serve(descriptor, fd, copy, found),
        Err(_) => {
            decline_here(descriptor, fd, found);
            None
        }
    };
    let mut pending: Option<Box<dyn PendingHandshake>> =
        incoming.map(|incoming| Box::new(AwaitMessage(incoming)) as Box<_>);
    while let Some(now) = pending {
        let [Some(tcp), other] = now.fds() else { return false };
        let most = call.left(if other.is_some() { PART_INTERVAL } else { CHECK_INTERVAL });
        if is_interrupted(ppoll(tcp, most, mask)) {
            match waiting::add(descriptor, fd, now) {
                Ok(()) => return true,
                // There are no threads left, so the call waits all the same.
                Err(back) => pending = Some(back),
            }
            continue;
        }
        pending = now.advance(descriptor, fd);
    }
    false
}

/// Waits until a socket is readable, with the program's signals.
fn ppoll(tcp: BorrowedFd<'_>, timeout: Duration, mask: SignalMask) -> SysResult {
    let mut list = [libc::pollfd { fd: tcp.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    raw::ppoll(&mut list, Some(&timespec(timeout)), Some(mask))
}

/// The client has not proposed SMC.
fn stay_on_tcp(descriptor: &DescriptorRef, fd: c_int) {
    if let Some(local) = descriptor.stream().and_then(StreamSocket::listener) {
        worthwhile::count_tcp(local);
    }
    status::server_stays_on_tcp(borrowed(fd));
    complete_with_tcp(descriptor, fd, |early| send_early(borrowed(fd), early));
}

/// Declines a Proposal on the program's own descriptor: there are none left.
fn decline_here(descriptor: &DescriptorRef, fd: c_int, first_bytes: FirstBytes) {
    let Some(session) = session::declining() else { return stay_on_tcp(descriptor, fd) };
    match session.decline(&lent_stream(fd), first_bytes) {
        Ok(()) => complete_with_tcp(descriptor, fd, |early| send_early(borrowed(fd), early)),
        Err(error) => complete(descriptor, fd, Err(error)),
    }
}

/// Whether TCP's handshake is over.
fn is_connected(tcp: &TcpStream) -> bool {
    use rustix::event::{PollFd, PollFlags};
    let mut fds = [PollFd::new(tcp, PollFlags::OUT)];
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&zero)).is_ok()
        && fds[0].revents().contains(PollFlags::OUT)
        && !fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}

/// Does the server's half, after the client's first bytes. Returns the handshake if it has to wait
/// for the client's next message.
pub(super) fn serve(
    descriptor: &DescriptorRef,
    fd: c_int,
    tcp: TcpStream,
    first_bytes: FirstBytes,
) -> Option<Incoming> {
    let may_be_smc =
        first_bytes.is_smc() && descriptor.stream().is_some_and(StreamSocket::begin_proposal);
    let session = match first_bytes.is_smc() {
        true if may_be_smc => session::for_client(),
        true => session::declining(),
        false => None,
    };
    let Some(session) = session else {
        status::server_stays_on_tcp(&tcp);
        complete_with_tcp(descriptor, fd, |early| send_early(&tcp, early));
        return None;
    };
    if first_bytes::is_reset(&tcp)
        && let Some(socket) = descriptor.stream()
    {
        // The program gets the error of the handshake only if TCP had one before.
        socket.set_error(libc::ECONNRESET);
    }
    let mut incoming = session.incoming(tcp, first_bytes);
    match incoming.advance_soon().transpose() {
        Some(result) => {
            complete(descriptor, fd, result);
            None
        }
        None => Some(incoming),
    }
}

/// Goes on with the server's half as far as the client's bytes allow. `false`: it is complete.
pub(super) fn go_on(descriptor: &DescriptorRef, fd: c_int, incoming: &mut Incoming) -> bool {
    match incoming.advance().transpose() {
        Some(result) => {
            complete(descriptor, fd, result);
            false
        }
        None => true,
    }
}

/// Goes on with a handshake in a thread of its own.
fn spawn(
    descriptor: &DescriptorRef,
    fd: c_int,
    job: impl FnOnce(&DescriptorRef, c_int) + Send + 'static,
) {
    let theirs = descriptor.clone();
    {
        let _running = RUNNING_LOCK.lock();
        running::begin(descriptor);
    }
    let made = std::thread::Builder::new().name("smc-handshake".into()).stack_size(STACK).spawn(
        move || {
            job(&theirs, fd);
            running::end(theirs);
        },
    );
    if made.is_err() {
        // No byte was sent yet.
        complete_with_tcp(descriptor, fd, |early| send_early(borrowed(fd), early));
        running::end(descriptor.clone());
    }
}

/// The program closes the last descriptor of a connection that is not decided. A client that has
/// proposed SMC gets an answer in any case: TCP would reset the connection for its unread message.
/// A child process that has the descriptor, too, may do the handshake itself.
pub(crate) fn before_close(descriptor: &DescriptorRef, fd: c_int) {
    let Some(socket) = descriptor.stream() else { return };
    if socket.state() == SocketState::Undecided
        && !socket.may_be_shared()
        && socket.role() == SocketRole::Server
        && (socket.is_announced() || peek(borrowed(fd)).is_smc())
    {
        begin(descriptor, socket, fd, (SocketEvent::Close, Wait::Short));
    }
    if socket.state() == SocketState::Deciding {
        note_linger(descriptor, socket, fd);
        waiting::check();
    }
}

/// Stores SO_LINGER, as long as the program has the descriptor: the connection may be decided later.
fn note_linger(descriptor: &DescriptorRef, socket: &StreamSocket, fd: c_int) {
    if DESCRIPTORS.get(fd).is_some_and(|now| now.is(descriptor))
        && let Ok(linger) = rustix::net::sockopt::socket_linger(borrowed(fd))
    {
        socket.set_linger(linger);
    }
}

/// Does the client's half. If TCP is still connecting, waits for that first.
fn propose(descriptor: &DescriptorRef, fd: c_int, tcp: TcpStream) {
    use rustix::event::{PollFd, PollFlags};
    loop {
        let mut fds = [PollFd::new(&tcp, PollFlags::OUT)];
        match rustix::event::poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(_) if !fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) => break,
            // The kernel reports the error to the program.
            _ => return complete_with_tcp(descriptor, fd, |early| send_early(&tcp, early)),
        }
    }
    if connects_to_itself(&tcp) {
        return complete_with_tcp(descriptor, fd, |early| send_early(&tcp, early));
    }
    let request = descriptor.stream().and_then(|socket| *socket.request.lock());
    let proposal = match request.map(|request| option::after_connect(request, &tcp)) {
        Some(Ok(proposal)) => proposal,
        Some(Err(why)) => {
            status::client_stays_on_tcp(&tcp, why);
            return complete_with_tcp(descriptor, fd, |early| send_early(&tcp, early));
        }
        None => PlannedProposal { awaited: false },
    };
    if !descriptor.stream().is_some_and(StreamSocket::begin_proposal) {
        return complete_with_tcp(descriptor, fd, |early| send_early(&tcp, early));
    }
    let Some(session) = session::current() else {
        return complete_with_tcp(descriptor, fd, |early| send_early(&tcp, early));
    };
    if proposal.awaited
        && let Some(socket) = descriptor.stream()
    {
        socket.set_announced();
    }
    complete(descriptor, fd, session.propose(tcp, proposal, &Progress(descriptor)));
}

/// Lets a keeper go on with the handshake while its thread only waits.
struct Progress<'a>(&'a DescriptorRef);

impl ProposalObserver for Progress<'_> {
    fn sent(&self) {
        if let Some(socket) = self.0.stream() {
            socket.answer.is_awaited_from_now();
        }
    }

    fn answered(&self) {
        if let Some(socket) = self.0.stream() {
            socket.answer.take();
        }
    }
}

/// Whether the server is this process. The thread that connects could then not accept.
fn connects_to_itself(tcp: &TcpStream) -> bool {
    let (Ok(local), Ok(peer)) = (tcp.local_addr(), tcp.peer_addr()) else { return true };
    local.ip() == peer.ip() && listening_ports::listens_on(peer.port())
}

/// Completes the handshake: TCP carries the connection. `send` sends what the program has written by
/// now.
fn complete_with_tcp(descriptor: &DescriptorRef, fd: c_int, send: impl Fn(&[u8])) {
    carry_out(descriptor, fd, SocketEvent::EndOnTcp, ActionInput::Send(&send));
}

/// Sends what the program wrote during the handshake. An error comes again with the program's next
/// call.
fn send_early(tcp: impl AsFd, mut early: &[u8]) {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let timeout = Timespec { tv_sec: 10, tv_nsec: 0 };
    while !early.is_empty() {
        match rustix::net::send(&tcp, early, rustix::net::SendFlags::NOSIGNAL) {
            Ok(n) => early = early.get(n..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let mut fds = [PollFd::new(&tcp, PollFlags::OUT)];
                if rustix::event::poll(&mut fds, Some(&timeout)) == Ok(0) {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

/// The server, or the listener, that a connection belongs to.
fn endpoint_of(socket: &StreamSocket, fd: c_int) -> Option<Endpoint> {
    match socket.role() {
        SocketRole::Client => {
            let server = rustix::net::getpeername(borrowed(fd)).ok().flatten()?;
            SocketAddr::try_from(server).ok().map(Endpoint::Server)
        }
        SocketRole::Server => socket.listener().copied().map(Endpoint::Listener),
    }
}

/// Records how a server has answered a Proposal.
fn record_answer(server: &SocketAddr, info: &ConnectionInfo) {
    match info {
        ConnectionInfo::Tcp(Fallback::Handshake(FallbackReason::DeclinedByPeer(peer)))
            if peer.code == DeclineCode::NoIsm2Support =>
        {
            declined_servers::declined(server);
        }
        ConnectionInfo::Tcp(_) => {}
        _ => declined_servers::accepted(server),
    }
}

/// Completes the handshake with its result.
fn complete(descriptor: &DescriptorRef, fd: c_int, result: io::Result<SmcStream>) {
    let Some(socket) = descriptor.stream() else { return };
    let role = match socket.role() {
        SocketRole::Client => "client",
        SocketRole::Server => "server",
    };
    match result {
        Ok(stream) => {
            let info = stream.info();
            status::connection_decided(borrowed(fd), role, &info);
            let endpoint = endpoint_of(socket, fd);
            if let Some(Endpoint::Server(server)) = &endpoint {
                record_answer(server, &info);
            }
            // A server that the option does not tell of its clients looks at each one's first bytes.
            // It would wait for those of a client on TCP.
            if let Some(endpoint) = endpoint.filter(|_| socket.is_announced()) {
                worthwhile::observe(&stream, &info, endpoint);
            }
            if matches!(info, ConnectionInfo::Tcp(_)) {
                // An error comes again with the program's next call.
                return complete_with_tcp(descriptor, fd, |early| {
                    let _ = (&stream).write_all(early);
                });
            }
            // The library waits by itself; see `io/transfer.rs`.
            let _ = stream.set_nonblocking(true);
            socket.set_timeouts(
                Some(raw::timeout_of(fd, libc::SO_RCVTIMEO)),
                Some(raw::timeout_of(fd, libc::SO_SNDTIMEO)),
            );
            if raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_OOBINLINE).is_ok_and(|on| on != 0)
            {
                let _ = stream.set_oob_inline(true);
            }
            note_linger(descriptor, socket, fd);
            if let Some(linger) = socket.linger() {
                let _ = stream.set_linger(Some(linger));
            }
            socket.set_stream(stream);
            // The peer's buffer is empty, and takes more than this.
            let send = |early: &[u8]| {
                if let Some(mut stream) = socket.stream() {
                    let _ = stream.write_all(early);
                }
            };
            carry_out(descriptor, fd, SocketEvent::EndOnSmc, ActionInput::Send(&send));
        }
        // The peer has ended TCP without an answer, and TCP tells the program that.
        Err(error) if is_end(&error) => {
            status::connection_failed(role, &error);
            complete_with_tcp(descriptor, fd, |_| {});
        }
        Err(error) if is_reset(&error) => {
            status::connection_failed(role, &error);
            // A client that was killed has ended its data in order, as far as TCP would say.
            let error = match socket.role() {
                SocketRole::Client => libc::ECONNRESET,
                SocketRole::Server => socket.take_error(),
            };
            let error = ActionInput::Error(Errno(error));
            carry_out(descriptor, fd, SocketEvent::Reset, error);
        }
        Err(error) => {
            status::connection_failed(role, &error);
            let error = ActionInput::Error(Errno::from(error));
            carry_out(descriptor, fd, SocketEvent::Break, error);
        }
    }
}

/// Whether the peer has ended its direction of TCP.
fn is_end(error: &io::Error) -> bool {
    let broken = error.get_ref().and_then(|inner| inner.downcast_ref::<HandshakeError>());
    matches!(broken, Some(HandshakeError::Closed { received: 0, .. }))
        || error.kind() == io::ErrorKind::UnexpectedEof
}

/// Whether the peer has reset TCP.
fn is_reset(error: &io::Error) -> bool {
    let by_tcp = matches!(error.raw_os_error(), Some(libc::ECONNRESET | libc::EPIPE));
    by_tcp || error.kind() == io::ErrorKind::BrokenPipe
}
