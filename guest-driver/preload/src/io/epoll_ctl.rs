// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `epoll_ctl` on a TCP socket or an SMC connection.

use std::ffi::c_int;

use crate::selection::resolve::resolve;
use crate::selection::{Selected, Wait};
use crate::socket::epoll_set::{EpollSet, writable_only};
use crate::socket::registrations::{insert, remove, watch_handshake};
use crate::socket::stream::{EpollTarget, Registration, SocketState, StreamSocket};
use crate::socket::table::{DESCRIPTORS, DescriptorRef, NUMBERS, epoll_set_of};
use crate::sys::raw::{self, Errno, SysResult};

/// `epoll_ctl` on a known socket.
pub(crate) fn control(
    set: c_int,
    op: c_int,
    fd: c_int,
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    (events, data): (u32, u64),
) -> SysResult {
    if op != libc::EPOLL_CTL_DEL && events & libc::EPOLLOUT as u32 != 0 {
        socket.undecided.note_write();
    }
    let is_lazy = socket.state() == SocketState::Undecided && socket.side.is_plain_if_silent();
    if op == libc::EPOLL_CTL_ADD && socket.state() != SocketState::Unconnected && !is_lazy {
        // The program's waits for the set continue the handshake. For a set of the kernel alone the
        // call waits shortly: the handshake is usually complete by then.
        let goes_on = epoll_set_of(set)
            .is_some_and(|found| found.set().is_some_and(EpollSet::can_go_on_with_handshakes));
        let selected = resolve(descriptor, fd, if goes_on { Wait::Now } else { Wait::Short });
        if matches!(selected, Selected::Tcp | Selected::Failed) {
            return raw::epoll_ctl(set, op, fd, events, data);
        }
    }
    check(set, op, fd, events)?;
    let mut registrations = socket.registrations();
    if !DESCRIPTORS.get(fd).is_some_and(|now| now.is(descriptor)) {
        // The connection has got a relay meanwhile. The relay's end is in the kernel's set.
        drop(registrations);
        drop(NUMBERS.lock());
        return raw::epoll_ctl(set, op, fd, events, data);
    }
    let at = registrations.iter().position(|r| r.set == set && r.fd == fd);
    let state = socket.state();
    match (op, at) {
        (libc::EPOLL_CTL_ADD, None) => {
            let mut new = Registration { set, fd, events, data, target: EpollTarget::Nothing };
            if matches!(state, SocketState::Unconnected | SocketState::Tcp | SocketState::Failed) {
                raw::epoll_ctl(set, op, fd, events, data)?;
                new.target = EpollTarget::Native;
            } else {
                new.target = insert(descriptor, socket, &new, state);
            }
            registrations.push(new);
            Ok(0)
        }
        (libc::EPOLL_CTL_ADD, Some(_)) => Err(Errno(libc::EEXIST)),
        (_, None) => raw::epoll_ctl(set, op, fd, events, data),
        (libc::EPOLL_CTL_MOD, Some(at))
            if (events | registrations.get(at).map_or(0, |known| known.events)) & EXCLUSIVE
                != 0 =>
        {
            Err(Errno(libc::EINVAL))
        }
        (libc::EPOLL_CTL_MOD, Some(at)) => {
            let Some(known) = registrations.get_mut(at) else { return Err(Errno(libc::ENOENT)) };
            (known.events, known.data) = (events, data);
            match known.target {
                EpollTarget::Nothing => Ok(0),
                EpollTarget::Handshake => {
                    if let Some(found) = epoll_set_of(set)
                        && let Some(set) = found.set()
                    {
                        set.modify(fd, events, data);
                    }
                    // Also for threads waiting for the kernel's set.
                    let _ = watch_handshake(op, descriptor, known);
                    Ok(0)
                }
                EpollTarget::Native => raw::epoll_ctl(set, op, fd, events, data),
                EpollTarget::Writable => raw::epoll_ctl(set, op, fd, writable_only(events), data),
                EpollTarget::ReadinessFd(readiness_fd) => {
                    raw::epoll_ctl(set, op, readiness_fd, events, data)
                }
                EpollTarget::Polled => {
                    if let Some(found) = epoll_set_of(set)
                        && let Some(set) = found.set()
                    {
                        set.modify(fd, events, data);
                    }
                    Ok(0)
                }
            }
        }
        (libc::EPOLL_CTL_DEL, Some(at)) => {
            let known = registrations.swap_remove(at);
            remove(&known);
            Ok(0)
        }
        _ => Err(Errno(libc::EINVAL)),
    }
}

const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// The kernel's errors for a call carried out by the library.
fn check(set: c_int, op: c_int, fd: c_int, events: u32) -> Result<(), Errno> {
    if set == fd {
        return Err(Errno(libc::EINVAL));
    }
    if epoll_set_of(set).is_none() {
        // The set is another process's, or no set.
        match raw::epoll_ctl(set, libc::EPOLL_CTL_DEL, set, 0, 0) {
            Err(Errno(libc::EINVAL)) if crate::sys::is_epoll_set(set) => {}
            Err(error) => return Err(error),
            Ok(_) => {}
        }
    }
    let allowed = (libc::EPOLLIN
        | libc::EPOLLOUT
        | libc::EPOLLERR
        | libc::EPOLLHUP
        | libc::EPOLLWAKEUP
        | libc::EPOLLET
        | libc::EPOLLEXCLUSIVE) as u32;
    if op == libc::EPOLL_CTL_ADD && events & EXCLUSIVE != 0 && events & !allowed != 0 {
        return Err(Errno(libc::EINVAL));
    }
    Ok(())
}
