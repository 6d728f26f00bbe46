// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sockets of an epoll set polled by the library: which sockets may have events, and the
//! events.
//!
//! The library looks at an idle connection only once a second. An announcement of the peer by the
//! line of a slab (`guest_driver::interpose::Watch`), or an action of this process on the
//! connection, makes the connection a candidate.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use guest_driver::interpose::{Watch, WatchedStream};
use guest_driver::{ChangeToken, Readiness, SmcStream};

use crate::fork;
use crate::socket::stream::{Registration, StreamSocket};
use crate::socket::table::DescriptorRef;

/// How long the library polls the connections of a busy set without asking the kernel.
const KERNEL_PAUSE: Duration = Duration::from_micros(200);
/// How often the library looks at the TCP connections underneath.
const TCP_PAUSE: Duration = Duration::from_secs(1);

const IN: u32 = libc::EPOLLIN as u32 | libc::EPOLLRDNORM as u32;
pub(super) const OUT: u32 = libc::EPOLLOUT as u32 | libc::EPOLLWRNORM as u32;
const PRI: u32 = libc::EPOLLPRI as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const EDGE: u32 = libc::EPOLLET as u32;
const ONCE: u32 = libc::EPOLLONESHOT as u32;

/// The SMC connections of a set, polled by the library.
#[derive(Debug, Default)]
pub(crate) struct EpollMembers {
    /// The sockets, each at its number.
    list: Vec<Option<EpollMember>>,
    /// Numbers without a socket.
    free: Vec<u32>,
    /// The numbers of each descriptor. A descriptor has several if it was closed, and a copy keeps
    /// the registration.
    by_fd: HashMap<c_int, Vec<u32>>,
    /// Sockets whose handshakes are not complete.
    undecided: Vec<u32>,
    /// Sockets with possible events, each once, the longest waiting one first.
    candidates: VecDeque<u32>,
    /// Connections whose changes the watch does not report completely.
    scanned: Vec<u32>,
    /// Time of the next look at all connections.
    look_at_all: Option<Instant>,
    ask_kernel: Option<Instant>,
    ask_tcp: Option<Instant>,
}

/// An SMC connection in a set. The reference keeps the connection as long as the registration,
/// which ends with the last descriptor.
pub(super) struct EpollMember {
    pub(super) fd: c_int,
    pub(super) descriptor: DescriptorRef,
    pub(super) events: u32,
    pub(super) data: u64,
    /// The watch reports changes of the connection.
    watched: Option<WatchedMember>,
    /// The member is among the candidates.
    is_candidate: bool,
    /// The state at the last poll, if only a change can bring something to report.
    idle: Option<ChangeToken>,
    /// The state at the last reported event.
    reported: Option<ChangeToken>,
    /// The handshake is not complete. The kernel's set has the socket.
    pub(super) undecided: bool,
    /// TCP takes bytes, by the kernel's report during the handshake.
    pub(super) has_room: bool,
    /// `has_room` was reported to the program.
    room_reported: bool,
}

/// A watched connection, until this process drops it.
struct WatchedMember {
    /// `None` during the drop only.
    stream: Option<WatchedStream>,
    /// The generation of the watching process (see `fork`).
    generation: u32,
}

impl WatchedMember {
    fn new(stream: WatchedStream) -> WatchedMember {
        WatchedMember { stream: Some(stream), generation: fork::generation() }
    }

    fn begin(&self) {
        if let Some(stream) = &self.stream {
            stream.begin();
        }
    }
}

impl Drop for WatchedMember {
    fn drop(&mut self) {
        // A child of a fork closes its copy of a set. The signal lines are shared with the parent,
        // and the parent watches on. So the child must not touch the lines.
        if self.generation != fork::generation() {
            std::mem::forget(self.stream.take());
        }
    }
}

impl std::fmt::Debug for EpollMember {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EpollMember").field("fd", &self.fd).finish_non_exhaustive()
    }
}

impl EpollMember {
    pub(super) fn new(
        descriptor: &DescriptorRef,
        registration: &Registration,
        undecided: bool,
    ) -> Self {
        EpollMember {
            fd: registration.fd,
            descriptor: descriptor.clone(),
            events: registration.events,
            data: registration.data,
            watched: None,
            is_candidate: false,
            idle: None,
            reported: None,
            undecided,
            has_room: false,
            room_reported: false,
        }
    }

    fn stream(&self) -> Option<(&StreamSocket, &SmcStream)> {
        let socket = self.descriptor.stream()?;
        Some((socket, socket.smc()?))
    }

    /// Whether to report that the program may write, although the handshake is not complete.
    fn is_writable_early(&self) -> bool {
        self.has_room
            && self.events & OUT != 0
            && !(self.room_reported && self.events & EDGE != 0)
            && self.descriptor.stream().is_some_and(StreamSocket::is_writable_early)
    }

    /// The events to report during the handshake; 0: none.
    pub(super) fn poll_undecided(&mut self) -> u32 {
        if !self.is_writable_early() {
            return 0;
        }
        let found = self.events & OUT;
        self.room_reported = true;
        if self.events & ONCE != 0 {
            self.events &= EDGE | ONCE;
        }
        found
    }

    /// The events to report now; 0: none.
    fn poll(&mut self) -> u32 {
        if self.undecided {
            return self.poll_undecided();
        }
        let (socket, stream) = match self.descriptor.stream().and_then(|s| Some((s, s.smc()?))) {
            Some(found) => found,
            None => return 0,
        };
        if self.idle.is_some_and(|token| !stream.changed_since(token)) {
            return 0;
        }
        let token = stream.change_token();
        if self.events & !(EDGE | ONCE) == 0 && self.events & ONCE != 0 {
            self.idle = Some(token);
            return 0;
        }
        let readiness = socket.readiness(stream, self.events & PRI != 0);
        let found = epoll_events(readiness) & (self.events | ALWAYS);
        if found == 0 {
            self.idle = Some(token);
            return 0;
        }
        if self.events & EDGE != 0 {
            let arrived = self.reported.is_none_or(|reported| !token.same_for_reader(reported));
            let room = found & OUT != 0 && socket.write_blocked.swap(false, Ordering::Relaxed);
            self.idle = Some(token);
            // An event reported during the handshake is not reported again.
            let is_known = self.room_reported && self.reported.is_none() && found & !OUT == 0;
            if is_known && !room {
                self.reported = Some(token);
            }
            if (!arrived || is_known) && !room {
                return 0;
            }
            self.reported = Some(token);
        } else {
            self.idle = None;
        }
        if self.events & ONCE != 0 {
            self.events &= EDGE | ONCE;
            self.idle = Some(token);
        }
        found
    }

    fn has_changed(&self) -> bool {
        if self.undecided {
            return self.is_writable_early();
        }
        let Some((_, stream)) = self.stream() else { return false };
        self.idle.is_none_or(|token| stream.changed_since(token))
    }
}

/// Readiness as epoll and poll encode it.
pub(crate) fn epoll_events(readiness: Readiness) -> u32 {
    let mut events = 0;
    let mut set = |on, event: u32| events |= if on { event } else { 0 };
    set(readiness.readable, IN);
    set(readiness.writable, OUT);
    set(readiness.urgent, PRI);
    set(readiness.read_closed, RDHUP);
    set(readiness.hang_up, libc::EPOLLHUP as u32);
    set(readiness.failed, libc::EPOLLERR as u32);
    events
}

impl EpollMembers {
    /// Adds a socket. Returns its number.
    pub(super) fn add(&mut self, member: EpollMember) -> u32 {
        let (fd, undecided) = (member.fd, member.undecided);
        let number = match self.free.pop() {
            Some(number) => {
                if let Some(place) = self.list.get_mut(number as usize) {
                    *place = Some(member);
                }
                number
            }
            None => {
                self.list.push(Some(member));
                self.list.len() as u32 - 1
            }
        };
        self.by_fd.entry(fd).or_default().push(number);
        if undecided {
            self.undecided.push(number);
        }
        number
    }

    /// Has the watch report changes of a connection. `false`: the connection is not SMC.
    pub(super) fn watch(&mut self, number: u32, watch: &Watch) -> bool {
        let Some(member) = self.member(number) else { return false };
        let watched = member.stream().and_then(|(_, stream)| watch.add(stream, number));
        let is_announced = watched.as_ref().is_some_and(WatchedStream::is_announced);
        let is_smc = watched.is_some();
        member.watched = watched.map(WatchedMember::new);
        if is_smc && !is_announced {
            self.scanned.push(number);
        }
        self.add_candidate(number);
        is_smc
    }

    /// The handshake of a socket has ended with SMC. `false`: there is no such socket.
    pub(super) fn decide(&mut self, fd: c_int, watch: &Watch) -> bool {
        let numbers = self.by_fd.get(&fd).into_iter().flatten().copied();
        let is_undecided = |number: &u32| self.undecided.contains(number);
        let Some(number) = numbers.into_iter().find(is_undecided) else { return false };
        self.undecided.retain(|other| *other != number);
        if let Some(member) = self.member(number) {
            member.undecided = false;
        }
        self.watch(number, watch);
        true
    }

    /// The socket of this descriptor whose handshake is not complete.
    pub(super) fn undecided(&mut self, fd: c_int) -> Option<&mut EpollMember> {
        let numbers = self.by_fd.get(&fd)?;
        let number = *numbers.iter().find(|number| self.undecided.contains(number))?;
        self.member(number)
    }

    /// The descriptors of sockets with this data and an incomplete handshake.
    pub(super) fn undecided_with(&self, data: u64) -> impl Iterator<Item = c_int> {
        let member = |number: &u32| self.list.get(*number as usize)?.as_ref();
        let members = self.undecided.iter().filter_map(member);
        members.filter(move |member| member.data == data).map(|member| member.fd)
    }

    /// Changes the mask and the data of a socket, and polls it again.
    pub(super) fn modify(&mut self, fd: c_int, events: u32, data: u64) {
        let Some(number) = self.first_of(fd) else { return };
        if let Some(member) = self.member(number) {
            (member.events, member.data) = (events, data);
            member.room_reported = false;
        }
        self.poll_again(number);
    }

    /// Polls a socket again.
    pub(super) fn recheck(&mut self, fd: c_int) {
        if let Some(number) = self.first_of(fd) {
            self.poll_again(number);
        }
    }

    fn poll_again(&mut self, number: u32) {
        if let Some(member) = self.member(number) {
            (member.idle, member.reported) = (None, None);
        }
        self.add_candidate(number);
    }

    /// Removes a socket.
    pub(super) fn remove(&mut self, fd: c_int) -> Option<EpollMember> {
        let number = self.first_of(fd)?;
        if let Some(numbers) = self.by_fd.get_mut(&fd) {
            numbers.retain(|other| *other != number);
            if numbers.is_empty() {
                self.by_fd.remove(&fd);
            }
        }
        self.undecided.retain(|other| *other != number);
        self.scanned.retain(|other| *other != number);
        let member = self.list.get_mut(number as usize)?.take()?;
        if member.is_candidate {
            self.candidates.retain(|other| *other != number);
        }
        self.free.push(number);
        Some(member)
    }

    /// Iterates over the sockets.
    pub(super) fn iter(&self) -> impl Iterator<Item = &EpollMember> {
        self.list.iter().flatten()
    }

    fn first_of(&self, fd: c_int) -> Option<u32> {
        self.by_fd.get(&fd)?.first().copied()
    }

    fn member(&mut self, number: u32) -> Option<&mut EpollMember> {
        self.list.get_mut(number as usize)?.as_mut()
    }

    fn add_candidate(&mut self, number: u32) {
        let Some(member) = self.member(number).filter(|member| !member.undecided) else { return };
        if !std::mem::replace(&mut member.is_candidate, true) {
            self.candidates.push_back(number);
        }
    }

    /// Polls the sockets whose handshakes are not complete. Returns how many events were written to
    /// `out`.
    pub(crate) fn poll_undecided(&mut self, out: &mut [libc::epoll_event]) -> usize {
        let mut reported = 0;
        for at in 0..self.undecided.len() {
            let Some(place) = out.get_mut(reported) else { break };
            let Some(member) = self.undecided.get(at).copied().and_then(|n| self.member(n)) else {
                continue;
            };
            let events = member.poll_undecided();
            if events != 0 {
                *place = libc::epoll_event { events, u64: member.data };
                reported += 1;
            }
        }
        reported
    }

    /// Polls the candidates, beginning behind the connection of the last events. Returns the number
    /// of events written to `out`.
    pub(crate) fn poll(&mut self, watch: &Watch, out: &mut [libc::epoll_event]) -> usize {
        self.find_candidates(watch);
        let mut reported = self.poll_undecided(out);
        for _ in 0..self.candidates.len() {
            let Some(place) = out.get_mut(reported) else { break };
            let Some(number) = self.candidates.pop_front() else { break };
            let Some(member) = self.member(number) else { continue };
            let events = member.poll();
            if events != 0 {
                *place = libc::epoll_event { events, u64: member.data };
                reported += 1;
            }
            // Level-triggered: the connection is polled again, changed or not.
            member.is_candidate = member.has_changed();
            if member.is_candidate {
                self.candidates.push_back(number);
            }
        }
        reported
    }

    fn find_candidates(&mut self, watch: &Watch) {
        if watch.has_changes() {
            for number in watch.take_changes() {
                if let Some(watched) = self.member(number).and_then(|m| m.watched.as_ref()) {
                    watched.begin();
                }
                self.add_candidate(number);
            }
        }
        for at in 0..self.scanned.len() {
            let Some(number) = self.scanned.get(at).copied() else { break };
            if self.member(number).is_some_and(|member| member.has_changed()) {
                self.add_candidate(number);
            }
        }
        let now = Instant::now();
        if self.look_at_all.is_none_or(|at| now >= at) {
            // A peer can suppress its wake-ups, so they must not be the only ones.
            self.look_at_all = Some(now + TCP_PAUSE);
            watch.recheck_lines();
            for number in 0..self.list.len() as u32 {
                if self.member(number).is_some_and(|member| member.has_changed()) {
                    self.add_candidate(number);
                }
            }
        }
    }

    /// Whether a connection may have events not reported by the last poll.
    pub(crate) fn have_changed(&self, watch: &Watch) -> bool {
        let any = |numbers: &[u32]| {
            let changed = |number: &u32| {
                let member = self.list.get(*number as usize).and_then(Option::as_ref);
                member.is_some_and(EpollMember::has_changed)
            };
            numbers.iter().any(changed)
        };
        !self.candidates.is_empty()
            || watch.has_changes()
            || any(&self.scanned)
            || any(&self.undecided)
    }

    /// Number of sockets.
    pub(crate) fn len(&self) -> usize {
        self.list.len() - self.free.len()
    }

    /// Like [`EpollMembers::have_changed`], with a look at each connection.
    pub(crate) fn has_any_changed(&self) -> bool {
        self.iter().any(EpollMember::has_changed)
    }

    /// The connections.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &SmcStream> {
        self.iter().filter_map(|member| Some(member.stream()?.1))
    }

    /// The connections whose changes the watch does not report completely.
    pub(crate) fn scanned_streams(&self) -> impl Iterator<Item = &SmcStream> {
        let member = |number: &u32| self.list.get(*number as usize)?.as_ref();
        self.scanned.iter().filter_map(move |number| Some(member(number)?.stream()?.1))
    }

    /// A reference of the caller's own to the first SMC connection.
    pub(crate) fn first_descriptor(&self) -> Option<DescriptorRef> {
        let first = self.iter().find(|member| member.stream().is_some());
        first.map(|member| member.descriptor.clone())
    }

    /// Whether the kernel was not asked for [`KERNEL_PAUSE`].
    pub(crate) fn kernel_is_due(&mut self, now: Instant) -> bool {
        self.ask_kernel.is_none_or(|at| now >= at)
    }

    /// Notes that the kernel is being asked.
    pub(crate) fn kernel_asked(&mut self, now: Instant) {
        self.ask_kernel = Some(now + KERNEL_PAUSE);
    }

    /// Whether it is time to look at the TCP connections underneath. If so, the next pause begins.
    pub(crate) fn tcp_is_due(&mut self) -> bool {
        let now = Instant::now();
        let due = self.ask_tcp.is_none_or(|at| now >= at);
        if due {
            self.ask_tcp = Some(now + TCP_PAUSE);
        }
        due
    }
}
