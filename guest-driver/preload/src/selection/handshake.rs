//! The handshake of one connection, in a thread of its own if it takes long.

use std::ffi::c_int;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use guest_driver::{ConnectionInfo, Fallback, FirstBytes, Incoming, SmcStream};
use smc_core::handshake::{DeclineCode, FallbackReason};

use crate::selection::first_bytes::{SILENCE_TIMEOUT, await_first_bytes, peek};
use crate::selection::session::PlannedProposal;
use crate::selection::transitions::{ActionInput, carry_out};
use crate::selection::{Wait, declined_servers, listening_ports, option, session};
use crate::socket::registrations;
use crate::socket::states::SocketEvent;
use crate::socket::stream::{SocketRole, SocketState, StreamSocket};
use crate::socket::table::DescriptorRef;
use crate::status;
use crate::sys::fork_lock::ForkLock;
use crate::sys::raw::{self, Errno};
use crate::sys::{STACK, borrowed, lock, wait_readable};

/// Lowest numbers for the library's own descriptors, out of the program's way. The first one that
/// the limit of the process allows holds.
const HIGH_FDS: [c_int; 3] = [60_000, 4_000, 700];

/// Makes a second descriptor of the TCP connection, out of the program's way.
fn duplicate(fd: c_int) -> Result<OwnedFd, Errno> {
    let tried =
        HIGH_FDS.iter().find_map(|&floor| raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, floor).ok());
    let copy = match tried {
        Some(copy) => copy,
        None => raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3)?,
    };
    Ok(crate::sys::owned(copy as c_int))
}

/// Begins the handshake, if the state of the socket allows it after this event.
pub(super) fn begin(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    fd: c_int,
    (event, wait): (SocketEvent, Wait),
) {
    let start = || start(descriptor, socket, fd, wait);
    carry_out(descriptor, fd, event, ActionInput::Start(&start));
}

/// Begins the handshake. The socket is in [`SocketState::Deciding`].
fn start(descriptor: &DescriptorRef, socket: &StreamSocket, fd: c_int, wait: Wait) {
    let Ok(tcp) = duplicate(fd) else {
        // Without a descriptor the library could not even decline a client's Proposal.
        return complete(descriptor, fd, Err(io::Error::from_raw_os_error(libc::EMFILE)));
    };
    let tcp = TcpStream::from(tcp);
    if socket.role() == SocketRole::Client {
        if is_connected(&tcp)
            && let Some(Err(why)) =
                lock(&socket.request).map(|request| option::after_connect(request, &tcp))
        {
            status::client_stays_on_tcp(&tcp, why);
            return complete_with_tcp(descriptor, fd, |early| send_early(&tcp, early));
        }
        return spawn(descriptor, fd, move |descriptor, fd| propose(descriptor, fd, tcp));
    }
    match wait {
        Wait::Block => {
            let limit = Some(raw::timeout_of(fd, libc::SO_RCVTIMEO)).filter(|limit| *limit > 0);
            let limit = limit.map_or(SILENCE_TIMEOUT, Duration::from_micros);
            let first_bytes = await_first_bytes(descriptor, socket, &tcp, limit);
            serve(descriptor, fd, tcp, first_bytes, true);
        }
        // Peek first: often the client's message is there already.
        Wait::Short => match peek(&tcp) {
            FirstBytes::Incomplete if socket.is_plain_if_silent() && socket.wants_to_write() => {
                serve(descriptor, fd, tcp, FirstBytes::Incomplete, false);
            }
            FirstBytes::Incomplete => spawn(descriptor, fd, move |descriptor, fd| {
                let Some(socket) = descriptor.stream() else { return };
                let first_bytes = await_first_bytes(descriptor, socket, &tcp, SILENCE_TIMEOUT);
                serve(descriptor, fd, tcp, first_bytes, true);
            }),
            first_bytes => serve(descriptor, fd, tcp, first_bytes, false),
        },
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

/// Does the server's half, after the client's first bytes.
fn serve(
    descriptor: &DescriptorRef,
    fd: c_int,
    tcp: TcpStream,
    first_bytes: FirstBytes,
    may_wait: bool,
) {
    if !first_bytes.is_smc() {
        status::server_stays_on_tcp(&tcp);
        return complete_with_tcp(descriptor, fd, |early| send_early(&tcp, early));
    }
    let may_be_smc = descriptor.stream().is_some_and(StreamSocket::begin_proposal);
    let session = if may_be_smc { session::for_client() } else { session::declining() };
    let Some(session) = session else {
        return complete_with_tcp(descriptor, fd, |early| send_early(&tcp, early));
    };
    let mut incoming = session.incoming(tcp, first_bytes);
    let result =
        if may_wait { finish_incoming(&mut incoming).map(Some) } else { incoming.advance_soon() };
    match result {
        Ok(Some(stream)) => complete(descriptor, fd, Ok(stream)),
        Err(error) => complete(descriptor, fd, Err(error)),
        Ok(None) => {
            if let Some(socket) = descriptor.stream() {
                // The bytes that come next are those of the handshake.
                registrations::follow(descriptor, socket, SocketState::Deciding);
            }
            spawn(descriptor, fd, move |descriptor, fd| {
                let result = finish_incoming(&mut incoming);
                complete(descriptor, fd, result);
            })
        }
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
        lock(&RUNNING).push(descriptor.clone());
    }
    let made = std::thread::Builder::new().name("smc-handshake".into()).stack_size(STACK).spawn(
        move || {
            job(&theirs, fd);
            end(theirs);
        },
    );
    if let Err(error) = made {
        complete(descriptor, fd, Err(error));
        end(descriptor.clone());
    }
}

/// Held by those who use [`RUNNING`], and by a process while it forks.
static RUNNING_LOCK: ForkLock = ForkLock::new();
/// The connections whose handshakes run in threads of their own.
static RUNNING: Mutex<Vec<DescriptorRef>> = Mutex::new(Vec::new());

/// Keeps the list of handshakes as it is while the process forks.
pub(crate) fn before_fork() {
    RUNNING_LOCK.acquire_before_fork();
}

/// Undoes [`before_fork`], in the parent.
pub(crate) fn in_parent() {
    RUNNING_LOCK.release_after_fork();
}

/// Undoes [`before_fork`], in the child, which has none of the threads.
pub(crate) fn in_child() {
    let parents = std::mem::take(&mut *lock(&RUNNING));
    // The child's copies of the threads' stacks hold references as well, for ever.
    std::mem::forget(parents);
    RUNNING_LOCK.release_after_fork();
}

fn end(descriptor: DescriptorRef) {
    let other = {
        let _running = RUNNING_LOCK.lock();
        let mut running = lock(&RUNNING);
        let at = running.iter().position(|other| other.is(&descriptor));
        at.map(|at| running.swap_remove(at))
    };
    // The last references close a connection whose descriptors the program has closed.
    drop((other, descriptor));
}

/// How long a process that ends waits for handshakes of connections on which it has written: longer
/// than a client waits for its server.
const WRITTEN_TIMEOUT: Duration = Duration::from_secs(35);
/// How long it waits for other handshakes that must come to their end.
const ANNOUNCED_TIMEOUT: Duration = Duration::from_secs(2);

/// Waits for handshakes of connections that the program has closed, when the process ends.
pub(crate) fn finish() {
    let begun = Instant::now();
    let must_finish = |found: &DescriptorRef| {
        found.stream().is_some_and(|socket| {
            let most = if socket.has_early() { WRITTEN_TIMEOUT } else { ANNOUNCED_TIMEOUT };
            socket.must_finish() && begun.elapsed() < most
        })
    };
    let any = || {
        let _running = RUNNING_LOCK.lock();
        lock(&RUNNING).iter().any(must_finish)
    };
    while any() {
        std::thread::sleep(Duration::from_millis(1));
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
    let request = descriptor.stream().and_then(|socket| *lock(&socket.request));
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
    complete(descriptor, fd, session.propose(tcp, proposal));
}

/// Whether the server is this process. The thread that connects could then not accept.
fn connects_to_itself(tcp: &TcpStream) -> bool {
    let (Ok(local), Ok(peer)) = (tcp.local_addr(), tcp.peer_addr()) else { return true };
    local.ip() == peer.ip() && listening_ports::listens_on(peer.port())
}

/// Waits for the client's messages until the handshake is complete.
fn finish_incoming(incoming: &mut Incoming) -> io::Result<SmcStream> {
    if let Some(stream) = incoming.advance_soon()? {
        return Ok(stream);
    }
    loop {
        if let Some(stream) = incoming.advance()? {
            return Ok(stream);
        }
        let left = incoming.deadline().map(|end| end.saturating_duration_since(Instant::now()));
        wait_readable(&incoming.fds(), left.unwrap_or_default() + Duration::from_millis(1));
    }
}

/// Completes the handshake: TCP carries the connection. `send` sends what the program has written by
/// now.
fn complete_with_tcp(descriptor: &DescriptorRef, fd: c_int, send: impl Fn(&[u8])) {
    carry_out(descriptor, fd, SocketEvent::EndOnTcp, ActionInput::Send(&send));
}

/// Sends what the program wrote during the handshake. An error comes again with the program's next
/// call.
fn send_early(tcp: &TcpStream, mut early: &[u8]) {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let timeout = Timespec { tv_sec: 10, tv_nsec: 0 };
    while !early.is_empty() {
        match rustix::net::send(tcp, early, rustix::net::SendFlags::NOSIGNAL) {
            Ok(n) => early = early.get(n..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let mut fds = [PollFd::new(tcp, PollFlags::OUT)];
                if rustix::event::poll(&mut fds, Some(&timeout)) == Ok(0) {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

/// Records how a server has answered a Proposal.
fn record_answer(socket: impl AsFd, info: &ConnectionInfo) {
    let server = rustix::net::getpeername(socket).ok().flatten();
    let Some(server) = server.and_then(|name| SocketAddr::try_from(name).ok()) else { return };
    match info {
        ConnectionInfo::Tcp(Fallback::Handshake(FallbackReason::DeclinedByPeer(peer)))
            if peer.code == DeclineCode::NoIsm2Support =>
        {
            declined_servers::declined(&server);
        }
        ConnectionInfo::Tcp(_) => {}
        _ => declined_servers::accepted(&server),
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
            if socket.role() == SocketRole::Client {
                record_answer(borrowed(fd), &info);
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
            socket.set_stream(stream);
            // The peer's buffer is empty, and takes more than this.
            let send = |early: &[u8]| {
                if let Some(mut stream) = socket.stream() {
                    let _ = stream.write_all(early);
                }
            };
            carry_out(descriptor, fd, SocketEvent::EndOnSmc, ActionInput::Send(&send));
        }
        Err(error) if role == "client" && is_end_of_tcp(&error) => {
            // The server has closed the connection without an answer. TCP tells the program that.
            status::connection_failed(role, &error);
            complete_with_tcp(descriptor, fd, |_| {});
        }
        Err(error) => {
            status::connection_failed(role, &error);
            let error = ActionInput::Error(Errno::from(error));
            carry_out(descriptor, fd, SocketEvent::Break, error);
        }
    }
}

fn is_end_of_tcp(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}
