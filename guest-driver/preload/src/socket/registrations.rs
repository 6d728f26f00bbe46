// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The registrations of a socket in epoll sets. Registrations follow the socket's state. At first
//! the kernel's set contains the TCP socket. During the handshake the entry has event bits of the
//! library, and the program's waits for the set go on with the handshake. After the handshake the
//! set contains the SMC connection or the TCP socket.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use crate::socket::epoll_set::{EpollSet, writable_only};
use crate::socket::owner_pipe;
use crate::socket::states::SocketEvent;
use crate::socket::stream::{EpollTarget, Registration, SocketState, StreamSocket};
use crate::socket::table::{DESCRIPTORS, DescriptorRef, epoll_set_of};
use crate::sys::raw::{self, Errno, SysResult};

/// Enters a registration in the set as the state of its socket requires.
pub(crate) fn insert(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    registration: &Registration,
    state: SocketState,
) -> EpollTarget {
    let Registration { set, fd, events, data, .. } = *registration;
    match state {
        SocketState::Undecided if socket.side.is_plain_if_silent() => {
            let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, events, data);
            EpollTarget::Native
        }
        SocketState::Undecided | SocketState::Deciding => {
            match epoll_set_of(set).as_ref().and_then(|found| found.set()) {
                Some(found) if found.add_undecided(set, descriptor, registration) => {
                    EpollTarget::Handshake
                }
                _ => insert_undecided(socket, registration),
            }
        }
        SocketState::Unconnected
        | SocketState::Tcp
        | SocketState::Failed
        | SocketState::Relayed => {
            let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, events, data);
            EpollTarget::Native
        }
        SocketState::Smc => match epoll_set_of(set).as_ref().and_then(|found| found.set()) {
            Some(found) => insert_smc(found, set, descriptor, socket, registration),
            None => insert_readiness_fd(set, socket, registration),
        },
    }
}

/// Enters a registration in a set that only the kernel waits for. The handshake goes on elsewhere.
fn insert_undecided(socket: &StreamSocket, registration: &Registration) -> EpollTarget {
    let Registration { set, fd, events, data, .. } = *registration;
    if !socket.is_writable_early() {
        return EpollTarget::Nothing;
    }
    let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, writable_only(events), data);
    EpollTarget::Writable
}

fn insert_smc(
    found: &EpollSet,
    set: c_int,
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    registration: &Registration,
) -> EpollTarget {
    match found.add(set, descriptor, registration) {
        true => EpollTarget::Polled,
        false => insert_readiness_fd(set, socket, registration),
    }
}

fn insert_readiness_fd(
    set: c_int,
    socket: &StreamSocket,
    registration: &Registration,
) -> EpollTarget {
    let Some(readiness_fd) = socket.smc().and_then(|stream| stream.pollable_exact().ok()) else {
        return EpollTarget::Nothing;
    };
    let readiness_fd = readiness_fd.as_raw_fd();
    let Registration { events, data, .. } = *registration;
    let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_ADD, readiness_fd, events, data);
    EpollTarget::ReadinessFd(readiness_fd)
}

/// Removes a registration from its place in the set. Returns the current mask, if kept by the
/// library.
pub(crate) fn remove(registration: &Registration) -> Option<u32> {
    match registration.target {
        EpollTarget::Nothing => {}
        EpollTarget::Handshake => {
            let _ = raw::epoll_ctl(registration.set, libc::EPOLL_CTL_DEL, registration.fd, 0, 0);
            return epoll_set_of(registration.set)?.set()?.remove(registration.fd);
        }
        EpollTarget::Native | EpollTarget::Writable => {
            let _ = raw::epoll_ctl(registration.set, libc::EPOLL_CTL_DEL, registration.fd, 0, 0);
        }
        EpollTarget::ReadinessFd(readiness_fd) => {
            let _ = raw::epoll_ctl(registration.set, libc::EPOLL_CTL_DEL, readiness_fd, 0, 0);
        }
        EpollTarget::Polled => {
            return epoll_set_of(registration.set)?.set()?.remove(registration.fd);
        }
    }
    None
}

/// Makes the registrations follow the socket into another state. Also stores the state
/// [`SocketState::Smc`]; the caller stores any other.
pub(crate) fn follow(descriptor: &DescriptorRef, socket: &StreamSocket, state: SocketState) {
    if state == SocketState::Tcp && socket.registrations().is_empty() {
        return;
    }
    let mut registrations = socket.registrations();
    for registration in registrations.iter_mut() {
        if state == SocketState::Tcp && registration.target == EpollTarget::Native {
            continue;
        }
        if registration.target == EpollTarget::Handshake {
            match state {
                SocketState::Undecided if socket.side.is_plain_if_silent() => {}
                SocketState::Undecided | SocketState::Deciding => continue,
                SocketState::Smc => {
                    let Registration { set, fd, .. } = *registration;
                    let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_DEL, fd, 0, 0);
                    continue;
                }
                _ => {}
            }
        }
        // An EPOLLONESHOT may have been used up.
        registration.events = remove(registration).unwrap_or(registration.events);
        registration.target = EpollTarget::Nothing;
        // For SMC the loop below enters the registrations: `StreamSocket::smc` returns the stream
        // only in the state `Smc`.
        registration.target = match state {
            SocketState::Smc => EpollTarget::Nothing,
            other => insert(descriptor, socket, registration, other),
        };
    }
    if state == SocketState::Smc {
        // The state must be `Smc` before `insert` asks for the stream. The lock on the
        // registrations keeps `epoll_ctl` out in between.
        socket.decision.store(SocketEvent::EndOnSmc);
        for registration in registrations.iter_mut() {
            let found = epoll_set_of(registration.set);
            let known = found.as_ref().and_then(|found| found.set());
            let target = registration.target;
            registration.target = match target {
                EpollTarget::Handshake if known.is_some_and(|known| known.decide(registration)) => {
                    EpollTarget::Polled
                }
                _ => insert(descriptor, socket, registration, SocketState::Smc),
            };
        }
    }
}

/// Whether the program's waits for a set go on with the handshake of a socket.
pub(crate) fn is_in_a_set(socket: &StreamSocket) -> bool {
    socket.registrations().iter().any(|r| r.target == EpollTarget::Handshake)
}

/// Has the sets report again the bytes already sent by the peer.
pub(crate) fn report_again(descriptor: &DescriptorRef, socket: &StreamSocket) {
    for r in socket.registrations().iter().filter(|r| r.target == EpollTarget::Handshake) {
        let _ = watch_handshake(libc::EPOLL_CTL_MOD, descriptor, r);
    }
}

/// [`EpollSet::watch_handshake`] in the set of a registration.
pub(crate) fn watch_handshake(
    op: c_int,
    descriptor: &DescriptorRef,
    of: &Registration,
) -> SysResult {
    let found = epoll_set_of(of.set);
    let set = found.as_ref().and_then(|found| found.set()).ok_or(Errno(libc::EBADF))?;
    set.watch_handshake(of.set, op, descriptor, of)
}

/// No wait for the sets of a socket has come through the library for some time: the program may wait
/// by instructions of its own. The handshake goes on without such waits.
pub(crate) fn leave_unseen_sets(socket: &StreamSocket) {
    for known in socket.registrations().iter_mut() {
        let found = epoll_set_of(known.set);
        let is_unseen = |found: &DescriptorRef| found.set().is_some_and(EpollSet::leave_unseen);
        if known.target == EpollTarget::Handshake && found.as_ref().is_some_and(is_unseen) {
            known.events = remove(known).unwrap_or(known.events);
            known.target = insert_undecided(socket, known);
        }
    }
}

/// Handles the first wait for a set through the library, which polls the connections from now on.
#[cold]
fn begin_polling(fd: c_int) {
    for number in 0..=DESCRIPTORS.highest() {
        let Some(descriptor) = DESCRIPTORS.get(number) else { continue };
        let Some(socket) = descriptor.stream() else { continue };
        let mut registrations = socket.registrations();
        for known in registrations.iter_mut().filter(|r| r.set == fd && r.fd == number) {
            match known.target {
                EpollTarget::Handshake => {
                    let _ = watch_handshake(libc::EPOLL_CTL_MOD, &descriptor, known);
                }
                EpollTarget::ReadinessFd(_) => {
                    remove(known);
                    known.target = insert(&descriptor, socket, known, SocketState::Smc);
                }
                _ => {}
            }
        }
    }
}

/// From now on no wait for a set goes on with the handshake of a socket.
pub(crate) fn leave_sets(socket: &StreamSocket) {
    let mut registrations = socket.registrations();
    for known in registrations.iter_mut().filter(|r| r.target == EpollTarget::Handshake) {
        known.events = remove(known).unwrap_or(known.events);
        known.target = insert_undecided(socket, known);
    }
}

/// Takes the connection's registrations out of the sets until its next state enters them again.
pub(crate) fn detach(socket: &StreamSocket) {
    for registration in socket.registrations().iter_mut() {
        registration.events = remove(registration).unwrap_or(registration.events);
        registration.target = EpollTarget::Nothing;
    }
}

/// Moves the connection's registrations into the kernel's sets. `replace` makes each of the numbers
/// the kernel's, and takes the connection's entry away. Meanwhile and afterwards no thread adds a
/// registration: `epoll_ctl` finds the entry gone, and the end of a handshake finds no
/// registration.
pub(crate) fn move_to_kernel(socket: &StreamSocket, fds: &[c_int], mut replace: impl FnMut(c_int)) {
    let mut registrations = socket.registrations();
    let mut members = std::mem::take(&mut *registrations);
    for member in &mut members {
        member.events = remove(member).unwrap_or(member.events);
    }
    for &fd in fds {
        replace(fd);
        for Registration { set, events, data, .. } in members.iter().filter(|r| r.fd == fd) {
            let _ = raw::epoll_ctl(*set, libc::EPOLL_CTL_ADD, fd, *events, *data);
        }
    }
}

/// The entries of a file with this inode in the epoll sets of this process, as listed by the
/// kernel: the kernel knows the used up EPOLLONESHOT.
pub(crate) fn of_kernel(inode: u64) -> Vec<Registration> {
    let sets = (0..=DESCRIPTORS.highest()).filter(|set| epoll_set_of(*set).is_some());
    let listed = sets.map(|set| (set, std::fs::read_to_string(format!("/proc/self/fdinfo/{set}"))));
    let mut found = Vec::new();
    for (set, text) in listed {
        let lines = text.unwrap_or_default();
        found.extend(lines.lines().filter_map(|line| member(set, line, inode)));
    }
    found
}

/// A line about a member of a set: `tfd: N events: X data: X pos:N ino:X sdev:X`.
fn member(set: c_int, line: &str, inode: u64) -> Option<Registration> {
    let mut words = line.split([' ', ':']).filter(|word| !word.is_empty());
    let mut value = |name| (words.next() == Some(name)).then(|| words.next()).flatten();
    let fd = value("tfd")?.parse().ok()?;
    let events = u32::from_str_radix(value("events")?, 16).ok()?;
    let data = u64::from_str_radix(value("data")?, 16).ok()?;
    value("pos")?;
    let is_it = u64::from_str_radix(value("ino")?, 16) == Ok(inode);
    is_it.then_some(Registration { set, fd, events, data, target: EpollTarget::Nothing })
}

/// Enters registrations of an SMC connection without others. From `show` on, calls of other threads
/// find the connection.
pub(crate) fn attach(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    members: Vec<Registration>,
    show: impl FnOnce(),
) {
    let mut registrations = socket.registrations();
    show();
    *registrations = members;
    for registration in registrations.iter_mut() {
        registration.target = insert(descriptor, socket, registration, SocketState::Smc);
    }
}

/// Removes the registrations of a socket whose last descriptor is being closed. The kernel would not
/// remove its own as long as a handshake has a duplicate of the socket.
pub(crate) fn close(socket: &StreamSocket) {
    for registration in std::mem::take(&mut *socket.registrations()) {
        remove(&registration);
    }
}

/// Has the sets poll a connection again whose readiness has changed by a call of the program.
#[cold]
pub(crate) fn recheck(socket: &StreamSocket) {
    for registration in socket.registrations().iter() {
        if registration.target == EpollTarget::Polled
            && let Some(found) = epoll_set_of(registration.set)
            && let Some(set) = found.set()
        {
            set.recheck(registration.fd);
        }
    }
}

/// Removes all registrations in a closed set: another set may get its number.
pub(crate) fn forget_set(set: c_int) {
    for fd in 0..=DESCRIPTORS.highest() {
        if let Some(descriptor) = DESCRIPTORS.get(fd)
            && let Some(socket) = descriptor.stream()
        {
            socket.registrations().retain(|r| r.set != set);
        }
    }
}

/// A child of a fork waits for a set shared with its parent. The child's relays of the connections
/// go into the kernel's set, like the sockets of connections on TCP.
#[cold]
fn adopt(fd: c_int, set: &EpollSet) {
    for (member, descriptor) in set.make_native().unwrap_or_default() {
        let Some(socket) = descriptor.stream() else { continue };
        let events = set.remove(member);
        owner_pipe::request(socket);
        let mut registrations = socket.registrations();
        let known = registrations.iter_mut().find(|r| r.set == fd && r.fd == member);
        if let Some(known) = known {
            known.events = events.unwrap_or(known.events);
            known.target = EpollTarget::Native;
            let _ = raw::epoll_ctl(fd, libc::EPOLL_CTL_ADD, member, known.events, known.data);
        }
    }
}

/// Prepares a set for a wait of this process. `false`: the kernel's set has everything.
pub(crate) fn may_poll(fd: c_int, set: &EpollSet) -> bool {
    if set.is_polled() && !set.is_inherited() {
        return true;
    }
    if set.is_inherited() {
        adopt(fd, set);
    } else if set.note_wait() {
        raw::without_signals(|| begin_polling(fd));
    }
    !set.is_native()
}

/// Moves all connections of a set into the kernel's set, because the program uses the set in a way
/// that only the kernel can carry out.
pub(crate) fn hand_to_kernel(fd: c_int) {
    let Some(found) = epoll_set_of(fd) else { return };
    let Some(set) = found.set() else { return };
    if set.is_inherited() {
        adopt(fd, set);
    }
    for (member, descriptor) in set.make_native().unwrap_or_default() {
        let Some(socket) = descriptor.stream() else { continue };
        let mut registrations = socket.registrations();
        let Some(known) = registrations.iter_mut().find(|r| r.set == fd && r.fd == member) else {
            continue;
        };
        // The current mask: an EPOLLONESHOT may have been used up.
        let was = known.target;
        known.events = remove(known).unwrap_or(known.events);
        known.target = match was {
            EpollTarget::Handshake => insert_undecided(socket, known),
            _ => insert_smc(set, fd, &descriptor, socket, known),
        };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_tells_a_member_of_a_set() {
        let line = "tfd:       12 events: 8000001d data: 700000000000000c  pos:0 ino:1a2b sdev:9";
        let found = member(5, line, 0x1a2b).unwrap();
        assert_eq!((found.set, found.fd), (5, 12));
        assert_eq!((found.events, found.data), (0x8000_001d, 0x7000_0000_0000_000c));
        assert!(member(5, line, 0x1a2c).is_none());
        for other in ["pos:\t0", "flags:\t02000002", "tfd: x events: 1", ""] {
            assert!(member(5, other, 0).is_none(), "{other}");
        }
    }
}
