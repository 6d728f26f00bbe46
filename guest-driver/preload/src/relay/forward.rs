//! Relays: threads that forward the bytes between a pair of Unix sockets and a connection.

use std::ffi::c_int;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use guest_driver::{ChangeToken, SmcStream};
use rustix::event::{PollFd, PollFlags};
use rustix::thread::futex;

use crate::socket::pair::SocketPair;
use crate::socket::registrations;
use crate::socket::stream::{SocketState, StreamSocket};
use crate::socket::table::{DESCRIPTORS, Descriptor, DescriptorRef, NUMBERS};
use crate::sys::{STACK, lock, raw};

/// How long a process that ends waits for a peer that takes nothing.
const FINISH_TIMEOUT: futex::Timespec = futex::Timespec { tv_sec: 60, tv_nsec: 0 };

/// The owner's ends of the relays of this process. Whoever takes the lock holds [`NUMBERS`], so no
/// other thread has it while the process forks.
static RELAYS: Mutex<Vec<Arc<OwnedFd>>> = Mutex::new(Vec::new());
/// Changes when a relay has forwarded bytes, or has ended.
static PROGRESS: AtomicU32 = AtomicU32::new(0);

fn note_progress() {
    PROGRESS.fetch_add(1, Ordering::SeqCst);
    let _ = futex::wake(&PROGRESS, futex::Flags::PRIVATE, i32::MAX as u32);
}

/// Replaces descriptors of a connection by an end of a pair, and makes their entries in the table.
/// The caller holds the lock of the numbers.
pub(super) fn replace(descriptor: &DescriptorRef, fds: &[c_int], program_end: &OwnedFd) {
    let Some(socket) = descriptor.stream() else { return };
    let numbers = |fd: &&c_int| DESCRIPTORS.get(**fd).is_some_and(|now| now.is(descriptor));
    registrations::detach(socket);
    for &fd in fds.iter().filter(numbers) {
        put_pair(fd, program_end, |tcp_fd| {
            let relayed = StreamSocket::new(SocketState::Relayed, socket.role(), false);
            relayed.set_relayed(tcp_fd);
            relayed.request_owner_once();
            drop(DESCRIPTORS.remove(fd));
            drop(DESCRIPTORS.install(fd, Descriptor::Stream(relayed)));
        });
        registrations::attach_to_kernel(socket, fd);
    }
}

/// Puts an end of a pair in the place of a TCP socket. `keep_tcp` gets a duplicate of that, which
/// goes on to provide names and options; -1: there is none.
pub(super) fn put_pair(fd: c_int, program_end: &OwnedFd, keep_tcp: impl FnOnce(c_int)) {
    let flags = raw::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) as c_int;
    let cloexec = raw::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) as c_int;
    let tcp_fd = raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, crate::socket::pair::HIGH_FDS);
    let flag = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
    let _ = raw::dup3(program_end.as_raw_fd(), fd, flag);
    let _ = raw::fcntl(fd, libc::F_SETFL, flags);
    keep_tcp(tcp_fd.map_or(-1, |fd| fd as c_int));
}

/// Starts the thread that forwards the bytes of a connection. The relay keeps the connection. The
/// caller holds [`NUMBERS`].
pub(super) fn start(descriptor: DescriptorRef, pair: SocketPair) {
    run(pair, move |owner_end| {
        if let Some(stream) = descriptor.stream().and_then(StreamSocket::smc) {
            forward(&descriptor, stream, owner_end);
        }
    });
}

/// As [`start`], for a connection whose handshake is still under way: the pair keeps what the program
/// writes until the connection is decided. `tcp` carries it if SMC does not.
pub(super) fn start_undecided(descriptor: DescriptorRef, pair: SocketPair, tcp: OwnedFd) {
    run(pair, move |owner_end| {
        let Some(socket) = descriptor.stream() else { return };
        while matches!(socket.state(), SocketState::Undecided | SocketState::Deciding) {
            let _ = socket.await_decision(Duration::from_secs(1));
        }
        match (socket.state(), socket.smc()) {
            (SocketState::Smc, Some(stream)) => forward(&descriptor, stream, owner_end),
            (SocketState::Tcp, _) => forward_on_tcp(&tcp, owner_end),
            _ => {}
        }
    });
}

/// Runs a relay in a thread of its own. What `body` owns ends before the relay is off the list: the
/// peer learns of the end there.
fn run(pair: SocketPair, body: impl FnOnce(&OwnedFd) + Send + 'static) {
    drop(pair.program_end);
    let owner_end = Arc::new(pair.owner_end);
    lock(&RELAYS).push(owner_end.clone());
    let ours = owner_end.clone();
    let thread = std::thread::Builder::new().name("smc-relay".into()).stack_size(STACK);
    let run = move || {
        body(&ours);
        let _numbers = NUMBERS.lock();
        remove(&ours);
    };
    if raw::without_signals(|| thread.spawn(run)).is_err() {
        // Both ends are closed now: the program reads an end of data, and its writes fail.
        remove(&owner_end);
    }
}

/// Forwards bytes both ways between the pair and a TCP socket.
fn forward_on_tcp(tcp: &OwnedFd, owner_end: &OwnedFd) {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK);
        let _ = thread.spawn_scoped(scope, || copy(tcp, owner_end));
        copy(owner_end, tcp);
    });
}

/// Copies bytes from one socket to another until an end of data, which it passes on. The sockets may
/// be non-blocking.
fn copy(from: &OwnedFd, to: &OwnedFd) {
    use rustix::net::{RecvFlags, SendFlags, Shutdown};
    let wait = |fd: &OwnedFd, flags| {
        let mut fds = [PollFd::new(fd, flags)];
        let _ = rustix::event::poll(&mut fds, None);
    };
    let mut bytes = vec![0u8; CHUNK];
    'all: loop {
        let mut rest = match rustix::net::recv(from, &mut bytes[..], RecvFlags::empty()) {
            Ok((n @ 1.., _)) => bytes.get(..n).unwrap_or_default(),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                wait(from, PollFlags::IN);
                continue;
            }
            Ok(_) | Err(_) => break,
        };
        while !rest.is_empty() {
            match rustix::net::send(to, rest, SendFlags::NOSIGNAL) {
                Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => wait(to, PollFlags::OUT),
                Err(_) => break 'all,
            }
        }
        note_progress();
    }
    let _ = rustix::net::shutdown(to, Shutdown::Write);
}

fn remove(owner_end: &Arc<OwnedFd>) {
    lock(&RELAYS).retain(|other| !Arc::ptr_eq(other, owner_end));
    note_progress();
}

/// Closes the owner's ends of the parent's relays, in the child of a fork: who has the other end
/// must learn of the relay's end although this process lives on. The caller holds [`NUMBERS`].
pub(crate) fn in_child() {
    for owner_end in std::mem::take(&mut *lock(&RELAYS)) {
        let _ = raw::close(owner_end.as_raw_fd());
        // The number is closed. The other references are on stacks of threads that this process
        // does not have.
        std::mem::forget(owner_end);
    }
}

/// Waits until the peers have taken what the program wrote, when the process ends. A relay whose
/// other end another process has ends with this process.
pub(crate) fn finish() {
    loop {
        let before = PROGRESS.load(Ordering::SeqCst);
        let waiting = {
            let _numbers = NUMBERS.lock();
            lock(&RELAYS).iter().filter(|owner_end| is_closed(owner_end)).count()
        };
        if waiting == 0 {
            return;
        }
        let flags = futex::Flags::PRIVATE;
        if let Err(rustix::io::Errno::TIMEDOUT) =
            futex::wait(&PROGRESS, flags, before, Some(&FINISH_TIMEOUT))
        {
            return;
        }
    }
}

/// Whether no process has the program's end any more.
fn is_closed(owner_end: &Arc<OwnedFd>) -> bool {
    let mut fds = [PollFd::new(owner_end, PollFlags::empty())];
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&zero)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

/// Bytes that a thread forwards at a time.
const CHUNK: usize = 256 << 10;

/// Forwards bytes both ways until both have ended. Each direction has a thread. A thread that
/// blocks in the kernel makes one system call per chunk, which leaves the processor to the program.
fn forward(descriptor: &DescriptorRef, stream: &SmcStream, owner_end: &OwnedFd) {
    let (descriptor, inner) = (descriptor.clone(), owner_end.try_clone());
    let made = inner.and_then(|inner| {
        let thread = std::thread::Builder::new().name("smc-relay-in".into()).stack_size(STACK);
        thread.spawn(move || {
            if let Some(stream) = descriptor.stream().and_then(StreamSocket::smc) {
                forward_to_program(stream, &inner);
            }
        })
    });
    if made.is_ok() {
        forward_to_peer(stream, owner_end);
    }
    // Threads that wait for the peer would wait for ever now. A peer that has closed already does
    // not notice.
    let _ = stream.shutdown(std::net::Shutdown::Both);
}

/// Forwards from the program to the peer.
fn forward_to_peer(stream: &SmcStream, owner_end: &OwnedFd) {
    use rustix::net::{RecvFlags, Shutdown};
    let mut bytes = vec![0u8; CHUNK];
    loop {
        let n = match rustix::net::recv(owner_end, &mut bytes[..], RecvFlags::empty()) {
            Ok((n @ 1.., _)) => n,
            Err(rustix::io::Errno::INTR) => continue,
            Ok(_) | Err(_) => break,
        };
        if send_all(stream, bytes.get(..n).unwrap_or_default()).is_err() {
            // The program's writes fail from now on.
            let _ = rustix::net::shutdown(owner_end, Shutdown::Read);
            break;
        }
        note_progress();
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    await_hang_up(owner_end);
}

fn send_all(stream: &SmcStream, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let token = stream.change_token();
        match stream.send(bytes) {
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(error) if would_block(&error) => wait(stream, token, true)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Forwards from the peer to the program.
fn forward_to_program(stream: &SmcStream, owner_end: &OwnedFd) {
    use rustix::net::{SendFlags, Shutdown};
    let mut bytes = vec![0u8; CHUNK];
    loop {
        let token = stream.change_token();
        let mut rest = match (&mut &*stream).read(&mut bytes) {
            Ok(n @ 1..) => bytes.get(..n).unwrap_or_default(),
            Err(error) if would_block(&error) => match wait(stream, token, false) {
                Ok(()) => continue,
                Err(_) => break,
            },
            Ok(_) | Err(_) => break,
        };
        while !rest.is_empty() {
            match rustix::net::send(owner_end, rest, SendFlags::NOSIGNAL) {
                Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                Err(rustix::io::Errno::INTR) => {}
                // The program has closed its end.
                Err(_) => return,
            }
        }
    }
    let _ = rustix::net::shutdown(owner_end, Shutdown::Write);
}

/// Waits until the stream has changed since `token`.
fn wait(stream: &SmcStream, token: ChangeToken, write: bool) -> std::io::Result<()> {
    match stream.wait_for_change(token, write, None) {
        Err(error) if !would_block(&error) => Err(error),
        _ => Ok(()),
    }
}

fn would_block(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
}

/// Waits until both directions of the pair are shut down.
fn await_hang_up(owner_end: &OwnedFd) {
    let mut fds = [PollFd::new(owner_end, PollFlags::empty())];
    while rustix::event::poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
}
