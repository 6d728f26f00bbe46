// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Relays: one thread forwards the bytes between pairs of Unix sockets and connections.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use guest_driver::interpose::StackUpkeep;

use super::flow::{Relay, RelayCarrier};
use super::keeper_limit::KeeperLimit;
use super::list::{self, has_unsent_bytes, lock, note_progress, own_sleeper, wake};
use super::take_back;
use super::temporary::RunningTemporary;
use crate::fork;
use crate::socket::pair::SocketPair;
use crate::socket::registrations;
use crate::socket::sleeper::Sleeper;
use crate::socket::stream::{RelayState, SocketRole, StreamSocket, TemporaryRelay};
use crate::socket::table::{DESCRIPTORS, Descriptor, DescriptorRef};
use crate::sys::{STACK, own_copies, raw};

/// Bytes moved at a time.
const CHUNK: usize = 256 << 10;
/// Longest sleep of the thread.
const LONGEST: Duration = Duration::from_secs(1);
/// Longest sleep of a keeper while send queues have bytes.
const SEND_PAUSE: Duration = Duration::from_millis(2);
/// Longest sleep of the thread while a relay waits for calls of other threads.
const HELD_UP_PAUSE: Duration = Duration::from_millis(1);
/// Edge-triggered: a dead daemon would be reported again and again otherwise.
const DEVICE_EVENTS: u32 = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
/// The sleeper's data for events of the devices' own descriptors.
const DEVICES: u64 = u64::MAX;

/// Replaces descriptors of a connection by an end of a pair, and makes their entries in the table. The
/// caller holds the lock of the numbers.
pub(super) fn replace(
    descriptor: &DescriptorRef,
    fds: &[c_int],
    program_end: &OwnedFd,
    temporary: Option<&Arc<TemporaryRelay>>,
) {
    let Some(socket) = descriptor.stream() else { return };
    if let Some(stream) = socket.own_stream()
        && let Some(fd) = stream.lent_number()
    {
        stream.own_tcp(own_copies::duplicate(fd).ok());
    }
    give_options(socket, fds.first().copied(), program_end);
    registrations::move_to_kernel(socket, fds, |fd| {
        put_pair(fd, program_end, |tcp_fd| {
            install_relayed(fd, socket.role(), RelayState::served(tcp_fd, temporary.cloned()));
        });
    });
}

/// Copies options with an effect on calls from a connection to the program's end of a pair. `fd`: one
/// of the connection's descriptors, still the TCP socket.
pub(super) fn give_options(socket: &StreamSocket, fd: Option<c_int>, program_end: &OwnedFd) {
    use rustix::net::sockopt::{self, Timeout};
    for (write, which) in [(false, Timeout::Recv), (true, Timeout::Send)] {
        if let Some(limit) = socket.options.timeout(write) {
            let _ = sockopt::set_socket_timeout(program_end, which, Some(limit));
        }
    }
    let number = |name| raw::socket_option(fd?, libc::SOL_SOCKET, name).ok();
    if socket.options.low_water() > 0 {
        let bytes = i32::try_from(socket.options.low_water()).unwrap_or(i32::MAX);
        raw::set_socket_option(program_end.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes);
    }
    if number(libc::SO_OOBINLINE).is_some_and(|on| on != 0) {
        let _ = sockopt::set_socket_oobinline(program_end, true);
    }
}

/// Makes the entry of a descriptor on an end of a pair. The new entry replaces the old one in one step:
/// without an entry a call would go to the kernel, although the number may change meanwhile.
pub(super) fn install_relayed(fd: c_int, role: SocketRole, relayed: RelayState) {
    drop(DESCRIPTORS.install(fd, Descriptor::Stream(StreamSocket::relayed(role, relayed))));
}

/// Puts an end of a pair in the place of a TCP socket. `keep_tcp` gets a duplicate of the TCP socket,
/// still in use for names and options; -1: there is none.
pub(super) fn put_pair(fd: c_int, program_end: &OwnedFd, keep_tcp: impl FnOnce(c_int)) {
    let flags = raw::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) as c_int;
    let cloexec = raw::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) as c_int;
    let tcp_fd = raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, crate::socket::pair::HIGH_FDS);
    let flag = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
    let _ = raw::dup3(program_end.as_raw_fd(), fd, flag);
    let _ = raw::fcntl(fd, libc::F_SETFL, flags);
    keep_tcp(tcp_fd.map_or(-1, |fd| fd as c_int));
}

/// Starts to forward the bytes of a connection. The relay keeps the connection.
pub(super) fn start(
    descriptor: DescriptorRef,
    pair: SocketPair,
    temporary: Option<Arc<TemporaryRelay>>,
) {
    let _ = add(descriptor, pair, RelayCarrier::Smc, temporary);
}

/// Variant of [`start`] for a connection with a handshake under way: the pair keeps the program's bytes
/// until the decision. `tcp` carries the bytes if SMC does not. `false`: no thread can be started.
pub(super) fn start_undecided(descriptor: DescriptorRef, pair: SocketPair, tcp: OwnedFd) -> bool {
    add(descriptor, pair, RelayCarrier::Undecided(tcp), None)
}

fn add(
    descriptor: DescriptorRef,
    pair: SocketPair,
    carrier: RelayCarrier,
    temporary: Option<Arc<TemporaryRelay>>,
) -> bool {
    // 0 is the sleeper's own eventfd.
    static NEXT: AtomicU64 = AtomicU64::new(1);
    drop(pair.program_end);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut relays = lock();
    let mut relay = Relay::new(id, descriptor, pair.owner_end, carrier);
    relay.temporary = temporary.map(RunningTemporary::new);
    relays.list.push(relay);
    if relays.runs == Some(fork::generation()) {
        wake();
        return true;
    }
    let start = || ism_sys::start_thread("smc-relay", STACK, || run(None));
    if own_sleeper().is_some() && raw::without_signals(start).is_ok() {
        relays.runs = Some(fork::generation());
        return true;
    }
    if let Some(mut relay) = relays.list.pop() {
        drop(relays);
        relay.fail();
        relay.end();
    }
    false
}

/// Runs the relays until there are none. With `upkeep` also does the work of the stack's threads, and
/// goes on until the send queues are empty.
pub(super) fn run(mut upkeep: Option<StackUpkeep>) {
    if upkeep.is_some() {
        list::forget_sleeper();
    }
    let Some(sleeper) = own_sleeper() else { return };
    for fd in upkeep.iter().flat_map(StackUpkeep::waits_for) {
        let _ = sleeper.add_with(fd, DEVICE_EVENTS, DEVICES);
    }
    let mut room = vec![0u8; CHUNK];
    let mut limit = KeeperLimit::new();
    loop {
        if let Some(upkeep) = &upkeep {
            limit.look(upkeep);
        }
        let mut pause = upkeep.as_mut().map_or(LONGEST, StackUpkeep::turn).min(LONGEST);
        let is_sending = || upkeep.is_some() && has_unsent_bytes();
        if is_sending() {
            // Only relays' connections wake this thread at once.
            pause = pause.min(SEND_PAUSE);
        }
        let count = sleeper.watch.count();
        let mut relays = lock();
        let mut moved = false;
        for relay in &mut relays.list {
            watch(relay, sleeper);
            match relay.carrier {
                RelayCarrier::Undecided(_) => relay.is_due = false,
                // The server's time limit passes without an event.
                RelayCarrier::Declining(_) => relay.decline(),
                _ if relay.is_due || relay.is_held_up() => moved |= relay.run(&mut room),
                _ => {}
            }
            if relay.is_held_up() {
                pause = pause.min(HELD_UP_PAUSE);
            }
        }
        let (over, list) = std::mem::take(&mut relays.list).into_iter().partition(Relay::is_over);
        relays.list = list;
        let over: Vec<Relay> = over;
        // The peers see the end before the relays are off the list.
        over.iter().for_each(|relay| unwatch(relay, sleeper));
        // This turn may have put the last bytes into a send queue.
        let is_last = relays.list.is_empty() && !is_sending();
        if is_last {
            relays.runs = None;
        }
        let any_due = relays.list.iter().any(|relay| relay.is_due);
        drop(relays);
        // Outside of the lock, because the drop of a connection takes other locks.
        let any_over = !over.is_empty();
        drop(over);
        if moved || any_over {
            note_progress();
        }
        if is_last {
            return;
        }
        if upkeep.is_none() {
            // Also while a stream leaves no time to sleep: the stream would keep its relay for ever.
            pause = take_back::look(pause);
        }
        if any_due {
            continue;
        }
        let begun = Instant::now();
        if sleeper.watch.spin_until(|| lock().list.iter_mut().any(find_change)) {
            continue;
        }
        sleep(sleeper, count, pause, upkeep.as_mut());
        sleeper.watch.slept(begun.elapsed());
    }
}

fn find_change(relay: &mut Relay) -> bool {
    relay.is_due |= relay.has_changed();
    relay.is_due
}

/// Registers a relay with the sleeper.
fn watch(relay: &mut Relay, sleeper: &Sleeper) {
    const EDGES: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
    if relay.is_watched
        && matches!(relay.carrier, RelayCarrier::Undecided(_))
        && relay.decide()
        && let Some(socket) = relay.descriptor.stream()
    {
        // The decision was watched below.
        socket.decision.release_fd();
    }
    if relay.is_watched {
        return;
    }
    relay.is_watched = true;
    let _ = sleeper.add_with(relay.owner_end.as_raw_fd(), EDGES, relay.id);
    match &relay.carrier {
        RelayCarrier::Undecided(_) => {
            let socket = relay.descriptor.stream();
            if let Some(fd) = socket.and_then(|socket| socket.decision.readable_fd(-1)) {
                let _ = sleeper.add_with(fd, (libc::EPOLLIN | libc::EPOLLET) as u32, relay.id);
            }
        }
        RelayCarrier::Declining(decliner) => {
            let _ = sleeper.add_with(decliner.tcp().as_raw_fd(), EDGES, relay.id);
        }
        RelayCarrier::Tcp(tcp) => {
            let _ = sleeper.add_with(tcp.as_raw_fd(), EDGES, relay.id);
        }
        RelayCarrier::Smc => {
            if let Some(stream) = relay.stream() {
                stream.watch(&sleeper.watch);
            }
        }
    }
}

/// Ends a relay, and takes [`watch`] back.
fn unwatch(relay: &Relay, sleeper: &Sleeper) {
    relay.end();
    sleeper.remove(relay.owner_end.as_raw_fd());
    if let RelayCarrier::Tcp(tcp) = &relay.carrier {
        sleeper.remove(tcp.as_raw_fd());
    }
    if let Some(stream) = relay.stream() {
        stream.unwatch(&sleeper.watch);
        // The thread does not wait for a slow peer: the bytes are in the peer's memory already.
        let _ = stream.set_linger(None);
    }
}

/// Sleeps until a relay may have work. `count`: the sleeper's count of wake-ups before the last turn.
fn sleep(sleeper: &Sleeper, count: u32, pause: Duration, mut upkeep: Option<&mut StackUpkeep>) {
    let any = {
        let mut relays = lock();
        let armed = relays.list.iter().filter_map(Relay::stream).all(|stream| stream.arm());
        if !armed || relays.list.iter_mut().any(find_change) {
            relays.list.iter_mut().for_each(|relay| {
                if let Some(stream) = relay.stream() {
                    stream.disarm();
                    relay.is_due = true;
                }
            });
            return;
        }
        // A reference of the call keeps the stream while the lock is not held.
        relays.list.iter().find(|relay| relay.stream().is_some()).map(|r| r.descriptor.clone())
    };
    let stream = any.as_ref().and_then(|found| found.stream()).and_then(StreamSocket::smc);
    let _ = sleeper.watch.sleep(stream, count, pause, sleeper.outer.as_fd());
    sleeper.watch.clear_notifier();
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
    let zero = Some(Duration::ZERO);
    let set = sleeper.outer.as_raw_fd();
    let mut relays = lock();
    for relay in &mut relays.list {
        if let Some(stream) = relay.stream() {
            stream.disarm();
        }
        find_change(relay);
    }
    while let Ok(n @ 1..) = crate::sys::epoll_wait(set, &mut events, zero, None) {
        for event in events.get(..n).unwrap_or_default() {
            let id = event.u64;
            if id == DEVICES
                && let Some(upkeep) = &mut upkeep
            {
                upkeep.serve();
            }
            relays.list.iter_mut().filter(|relay| relay.id == id).for_each(|r| r.is_due = true);
        }
        if n < events.len() {
            break;
        }
    }
}
