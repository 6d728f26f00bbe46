//! Registrations of sockets in epoll sets, and how they move as a socket goes on its way: from the
//! TCP socket to nothing while it is undecided, and to the SMC connection or back.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use crate::selection::handshake::{Patience, Verdict, settle};
use crate::socket::epoll_set::{Set, set_of};
use crate::socket::stream::{Registration, Socket, State, Target};
use crate::sys::raw::{self, Errno, Sys};
use crate::sys::table::Ref;

/// Puts a registration where the state of its socket wants it.
fn place(sock: &Ref, socket: &Socket, registration: &Registration, state: State) -> Target {
    let Registration { set, fd, events, data, .. } = *registration;
    match state {
        State::Undecided | State::Deciding => Target::Nothing,
        State::Fresh | State::Tcp | State::Broken | State::Relayed => {
            let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, events, data);
            Target::Native
        }
        State::Smc => match set_of(set).as_ref().and_then(|found| found.set()) {
            Some(found) => put(found, set, sock, socket, registration),
            None => put_object(set, socket, registration),
        },
    }
}

pub(crate) fn put(
    found: &Set,
    set: c_int,
    sock: &Ref,
    socket: &Socket,
    registration: &Registration,
) -> Target {
    match found.add(set, sock, registration) {
        true => Target::Shared,
        false => put_object(set, socket, registration),
    }
}

fn put_object(set: c_int, socket: &Socket, registration: &Registration) -> Target {
    let Some(object) = socket.smc().and_then(|stream| stream.pollable().ok()) else {
        return Target::Nothing;
    };
    let object = object.as_raw_fd();
    let Registration { events, data, .. } = *registration;
    let _ = raw::epoll_ctl(set, libc::EPOLL_CTL_ADD, object, events, data);
    Target::Object(object)
}

/// Takes a registration from where it is.
fn displace(registration: &Registration) {
    match registration.target {
        Target::Nothing => {}
        Target::Native => {
            let _ = raw::epoll_ctl(registration.set, libc::EPOLL_CTL_DEL, registration.fd, 0, 0);
        }
        Target::Object(object) => {
            let _ = raw::epoll_ctl(registration.set, libc::EPOLL_CTL_DEL, object, 0, 0);
        }
        Target::Shared => {
            if let Some(found) = set_of(registration.set)
                && let Some(set) = found.set()
            {
                set.remove(registration.fd);
            }
        }
    }
}

/// The socket goes on in another state: its registrations follow.
pub(crate) fn moved(sock: &Ref, socket: &Socket, state: State) {
    if state == State::Tcp && socket.registrations().is_empty() {
        return;
    }
    let mut registrations = socket.registrations();
    for registration in registrations.iter_mut() {
        displace(registration);
        registration.target = Target::Nothing;
        // `smc()` asks for the state, which is told last: the stream is there already.
        registration.target = match state {
            State::Smc => Target::Nothing,
            other => place(sock, socket, registration, other),
        };
    }
    if state == State::Smc {
        // Told before they are looked up, and under the lock, so that no call comes in between.
        socket.decide(State::Smc);
        for registration in registrations.iter_mut() {
            registration.target = place(sock, socket, registration, State::Smc);
        }
    }
}

/// The connection's registrations leave the sets, for [`enter`].
pub(crate) fn leave(socket: &Socket) {
    for registration in socket.registrations().iter_mut() {
        displace(registration);
        registration.target = Target::Nothing;
    }
}

/// The registrations of `old` are from now on those of the descriptors as the kernel knows them.
pub(crate) fn enter(old: &Socket, fd: c_int) {
    for r in socket_of(old, fd) {
        let _ = raw::epoll_ctl(r.set, libc::EPOLL_CTL_ADD, r.fd, r.events, r.data);
    }
}

/// The registrations of one descriptor.
fn socket_of(socket: &Socket, fd: c_int) -> Vec<Registration> {
    socket.registrations().iter().filter(|r| r.fd == fd).copied().collect()
}

/// The last descriptor is being closed: the kernel forgets registrations then, and so do we.
pub(crate) fn forget(socket: &Socket) {
    let registrations = std::mem::take(&mut *socket.registrations());
    for registration in registrations.iter().filter(|r| r.target != Target::Native) {
        displace(registration);
    }
}

/// `epoll_ctl` on a socket of ours.
pub(crate) fn control(
    set: c_int,
    op: c_int,
    fd: c_int,
    sock: &Ref,
    socket: &Socket,
    (events, data): (u32, u64),
) -> Sys {
    if op != libc::EPOLL_CTL_DEL && events & libc::EPOLLOUT as u32 != 0 {
        socket.speak();
    }
    if op == libc::EPOLL_CTL_ADD && socket.state() != State::Fresh {
        // Most are decided here and now.
        let verdict = settle(sock, fd, Patience::Moment);
        if matches!(verdict, Verdict::Tcp | Verdict::Broken) {
            return raw::epoll_ctl(set, op, fd, events, data);
        }
    }
    let mut registrations = socket.registrations();
    let at = registrations.iter().position(|r| r.set == set && r.fd == fd);
    let state = socket.state();
    match (op, at) {
        (libc::EPOLL_CTL_ADD, None) => {
            let mut new = Registration { set, fd, events, data, target: Target::Nothing };
            if matches!(state, State::Fresh | State::Tcp | State::Broken) {
                raw::epoll_ctl(set, op, fd, events, data)?;
                new.target = Target::Native;
            } else {
                new.target = place(sock, socket, &new, state);
            }
            registrations.push(new);
            Ok(0)
        }
        (libc::EPOLL_CTL_ADD, Some(_)) => Err(Errno(libc::EEXIST)),
        (_, None) => raw::epoll_ctl(set, op, fd, events, data),
        (libc::EPOLL_CTL_MOD, Some(at)) => {
            let Some(known) = registrations.get_mut(at) else { return Err(Errno(libc::ENOENT)) };
            (known.events, known.data) = (events, data);
            match known.target {
                Target::Nothing => Ok(0),
                Target::Native => raw::epoll_ctl(set, op, fd, events, data),
                Target::Object(object) => raw::epoll_ctl(set, op, object, events, data),
                Target::Shared => {
                    if let Some(found) = set_of(set)
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
            displace(&known);
            Ok(0)
        }
        _ => Err(Errno(libc::EINVAL)),
    }
}
