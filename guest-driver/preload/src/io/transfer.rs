// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls to read and to write.

use std::ffi::c_int;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use guest_driver::SmcStream;
use ism_sys::interrupt;

use crate::selection::resolve::resolve;
use crate::selection::{Selected, Wait, handshake, inherited_options, own_calls};
use crate::socket::registrations;
use crate::socket::states::SocketStage;
use crate::socket::stream::{SocketRole, SocketState, StreamSocket};
use crate::socket::table::DescriptorRef;
use crate::sys::raw::{self, Errno, RESTART, SysResult};

/// Carrier of a call to read or to write.
pub(crate) enum Dispatch<'a> {
    /// The kernel, on the TCP socket.
    Kernel,
    /// The SMC connection.
    Smc(&'a StreamSocket, &'a SmcStream),
    /// Not decided yet: the library keeps the bytes of a write until the connection is decided.
    Keep(&'a StreamSocket),
    /// No carrier: the call fails.
    Fail(Errno),
}

/// The carrier of a read. `dont_wait`: the call must not wait for the handshake.
#[inline]
pub(crate) fn dispatch_read(
    descriptor: &DescriptorRef,
    fd: c_int,
    dont_wait: bool,
) -> Dispatch<'_> {
    let Some(socket) = descriptor.stream() else { return Dispatch::Kernel };
    if let Some(stream) = socket.smc() {
        return Dispatch::Smc(socket, stream);
    }
    undecided(descriptor, socket, fd, (dont_wait, libc::SO_RCVTIMEO))
}

/// Called before a read with these flags: checks the client of a connection without an announcement.
/// Costs one call, since an error of the socket can be the result of the read itself.
///
/// # Errors
/// The result of the read.
#[inline]
pub(crate) fn look_at_silent(
    descriptor: &DescriptorRef,
    fd: c_int,
    flags: c_int,
) -> Result<(), Errno> {
    match descriptor.stream() {
        Some(socket) if socket.stage() == SocketStage::Undecided && socket.side.may_be_plain() => {
            let dont_wait = flags & libc::MSG_DONTWAIT != 0 || socket.options.is_nonblocking();
            handshake::look_before_read(descriptor, fd, dont_wait)
        }
        _ => Ok(()),
    }
}

/// The carrier of a write. `dont_wait`: the call must not wait for the handshake.
#[inline]
pub(crate) fn dispatch_write(
    descriptor: &DescriptorRef,
    fd: c_int,
    dont_wait: bool,
) -> Dispatch<'_> {
    let Some(socket) = descriptor.stream() else { return Dispatch::Kernel };
    if let Some(stream) = socket.smc() {
        return Dispatch::Smc(socket, stream);
    }
    socket.undecided.note_write();
    // TCP sends a client's bytes even if the server's program does not use the connection.
    let is_client = socket.role() == SocketRole::Client;
    let may_wait = !dont_wait && !socket.options.is_nonblocking();
    match undecided(descriptor, socket, fd, (dont_wait || is_client, libc::SO_SNDTIMEO)) {
        Dispatch::Fail(Errno(libc::EAGAIN)) if socket.state() == SocketState::Deciding => {
            let is_connected = socket.stage() == SocketStage::Proposing;
            if is_client && !is_connected && !crate::sys::is_writable(fd) {
                // TCP is still connecting.
                return match may_wait {
                    true => undecided(descriptor, socket, fd, (false, libc::SO_SNDTIMEO)),
                    false => Dispatch::Fail(Errno(libc::EAGAIN)),
                };
            }
            Dispatch::Keep(socket)
        }
        // Another thread has decided the connection meanwhile, or a client's handshake has not begun. A
        // call allowed to wait never fails with EAGAIN in this case, and any other call finds the
        // decision.
        Dispatch::Fail(Errno(libc::EAGAIN))
            if is_client && may_wait || socket.state() != SocketState::Undecided =>
        {
            undecided(descriptor, socket, fd, (dont_wait, libc::SO_SNDTIMEO))
        }
        Dispatch::Kernel
            if socket.state() == SocketState::Failed && socket.end.begin_write_after_close() =>
        {
            Dispatch::Keep(socket)
        }
        dispatch => dispatch,
    }
}

/// Variant of [`dispatch_write`] for bytes from a pipe. The library cannot keep such bytes, so the call
/// waits for the decision.
pub(crate) fn dispatch_transfer(
    descriptor: &DescriptorRef,
    fd: c_int,
    dont_wait: bool,
) -> Dispatch<'_> {
    match dispatch_write(descriptor, fd, dont_wait) {
        Dispatch::Keep(socket) => undecided(descriptor, socket, fd, (dont_wait, libc::SO_SNDTIMEO)),
        dispatch => dispatch,
    }
}

/// Maximum number of kept bytes of an undecided connection, unless the program has set SO_SNDBUF: less
/// than TCP takes while the peer does not read.
const MAX_KEPT: usize = 7 << 19;

/// Keeps the bytes of a write on an undecided connection. `None`: the connection is decided now.
pub(crate) fn keep(
    descriptor: &DescriptorRef,
    socket: &StreamSocket,
    fd: c_int,
    bufs: &[IoSlice<'_>],
    flags: c_int,
) -> Option<SysResult> {
    let may_wait = flags & libc::MSG_DONTWAIT == 0 && !socket.options.is_nonblocking();
    let urgent = flags & libc::MSG_OOB != 0;
    let limit = || inherited_options::send_buffer(fd).unwrap_or(MAX_KEPT);
    match socket.keep_early(bufs, (may_wait, urgent), limit) {
        Some(0) if bufs.iter().all(|buf| buf.is_empty()) => Some(Ok(0)),
        Some(0) if may_wait => {
            let wait = time_limit(fd, libc::SO_SNDTIMEO);
            match resolve(descriptor, fd, wait) {
                Selected::Pending => match socket.keep_early(bufs, (false, urgent), limit) {
                    Some(n @ 1..) if wait.is_over() => Some(Ok(n)),
                    _ => Some(Err(ended_by(wait))),
                },
                _ => None,
            }
        }
        Some(0) => {
            // The kernel must not report room while there is none. A decision needs this lock, so the
            // state cannot change meanwhile.
            let _early = socket.undecided.early();
            if socket.state() == SocketState::Deciding {
                registrations::follow(descriptor, socket, SocketState::Deciding);
            }
            Some(Err(Errno(libc::EAGAIN)))
        }
        Some(n) => Some(Ok(n)),
        None => None,
    }
}

/// Time limit of a call from its socket option.
fn time_limit(fd: c_int, option: c_int) -> Wait {
    if !inherited_options::may_be_set() {
        return Wait::Block;
    }
    match raw::timeout_of(fd, option) {
        0 => Wait::Block,
        micros => Wait::Until(Instant::now() + Duration::from_micros(micros)),
    }
}

/// The error of a call after a wait in vain: a signal has interrupted the wait, or the time is over.
fn ended_by(wait: Wait) -> Errno {
    match matches!(wait, Wait::Short | Wait::Now) || wait.is_over() {
        true => Errno(libc::EAGAIN),
        false if wait == Wait::Block && interrupt::is_deferred() => RESTART,
        false => Errno(libc::EINTR),
    }
}

#[cold]
fn undecided<'a>(
    descriptor: &'a DescriptorRef,
    socket: &'a StreamSocket,
    fd: c_int,
    (dont_wait, option): (bool, c_int),
) -> Dispatch<'a> {
    let patient = !dont_wait && !socket.options.is_nonblocking();
    // The library keeps a client's bytes, while waits for an epoll set continue the handshake.
    let is_kept = || option == libc::SO_SNDTIMEO && registrations::is_in_a_set(socket);
    let wait = match patient {
        true => time_limit(fd, option),
        false if is_kept() => Wait::Now,
        false => Wait::Short,
    };
    match resolve(descriptor, fd, wait) {
        Selected::Tcp => Dispatch::Kernel,
        Selected::Pending => Dispatch::Fail(ended_by(wait)),
        Selected::Failed => match socket.end.take_error() {
            0 => Dispatch::Kernel,
            error => Dispatch::Fail(Errno(error)),
        },
        Selected::Smc => match socket.smc() {
            Some(stream) => Dispatch::Smc(socket, stream),
            // The connection belongs to an ancestor.
            None => Dispatch::Fail(Errno(libc::ECONNABORTED)),
        },
    }
}

/// The error of a call interrupted by a signal. `None`: the call goes on.
fn interrupted(deadline: Option<Instant>) -> Option<Errno> {
    // The handler runs after the call, and decides about the restart.
    if deadline.is_none() && interrupt::is_deferred() {
        return Some(RESTART);
    }
    // The kernel never restarts a call with a time limit (signal(7)).
    (deadline.is_some() || raw::signals_interrupt()).then_some(Errno(libc::EINTR))
}

/// Waits until the stream has changed since `token`. Returns the error of the call, if there is one.
fn wait(
    stream: &SmcStream,
    token: guest_driver::ChangeToken,
    write: bool,
    deadline: Option<Instant>,
) -> Result<(), Errno> {
    match stream.wait_for_change(token, write, deadline) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::Interrupted => match interrupted(deadline) {
            Some(error) => Err(error),
            None => Ok(()),
        },
        Err(error) => Err(error.into()),
    }
}

/// Reads into the buffers, with the flags of `recv`.
pub(crate) fn recv(
    (socket, stream): (&StreamSocket, &SmcStream),
    bufs: &mut [IoSliceMut<'_>],
    flags: c_int,
) -> SysResult {
    if flags & libc::MSG_OOB != 0 {
        return recv_urgent(stream, bufs, flags);
    }
    if flags & libc::MSG_ERRQUEUE != 0 {
        return Err(Errno(libc::EAGAIN));
    }
    if bufs.iter().all(|buf| buf.is_empty()) {
        return recv_nothing((socket, stream), flags);
    }
    let dont_wait = flags & libc::MSG_DONTWAIT != 0 || socket.options.is_nonblocking();
    let peek = flags & libc::MSG_PEEK != 0;
    if flags & libc::MSG_TRUNC != 0 {
        return discard((socket, stream), bufs.iter().map(|b| b.len()).sum(), flags);
    }
    let mut deadline = None;
    let all = flags & libc::MSG_WAITALL != 0;
    let wanted = match (all, socket.options.low_water()) {
        (false, 0) => 0,
        (all, low_water) => {
            let room: usize = bufs.iter().map(|buf| buf.len()).sum();
            if all { room } else { room.min(low_water) }
        }
    };
    let mut done = 0usize;
    loop {
        let token = stream.change_token();
        let result = if peek {
            done = 0;
            stream.peek_vectored(bufs)
        } else if done == 0 {
            (&mut &*stream).read_vectored(bufs)
        } else {
            read_rest(stream, bufs, done)
        };
        match result {
            Ok(0) => return Ok(done),
            Ok(n) => {
                done += n;
                if done >= wanted || peek && (dont_wait || has_ended(stream)) {
                    return Ok(done);
                }
                if peek {
                    // The bytes stay, so the next check finds them again.
                    if wait(stream, token, false, deadline).is_err() {
                        return Ok(done);
                    }
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if dont_wait {
                    return if done > 0 { Ok(done) } else { Err(Errno(libc::EAGAIN)) };
                }
                if deadline.is_none() {
                    deadline =
                        socket.options.timeout(false).map(|timeout| Instant::now() + timeout);
                }
                if let Err(error) = wait(stream, token, false, deadline) {
                    return if done > 0 { Ok(done) } else { Err(error) };
                }
            }
            Err(_) if done > 0 => return Ok(done),
            Err(error) => return socket.end.read_failed(stream, error.into()),
        }
    }
}

/// Carries out a receive of no bytes: waits for bytes, as TCP does.
#[cold]
fn recv_nothing(from: (&StreamSocket, &SmcStream), flags: c_int) -> SysResult {
    let mut byte = [0u8];
    let flags = flags & !(libc::MSG_WAITALL | libc::MSG_TRUNC) | libc::MSG_PEEK;
    let mut look = |flags| recv(from, &mut [IoSliceMut::new(&mut byte)], flags).map(|_| 0);
    match look(flags | libc::MSG_DONTWAIT) {
        Err(Errno(libc::EAGAIN))
            if flags & libc::MSG_DONTWAIT == 0 && !from.0.options.is_nonblocking() =>
        {
            // Any end of the wait is a success.
            let _ = look(flags);
            Ok(0)
        }
        result => result,
    }
}

fn has_ended(stream: &SmcStream) -> bool {
    stream.readiness(false).read_closed
}

/// Reads into the buffers, after their first `done` bytes.
fn read_rest(
    stream: &SmcStream,
    bufs: &mut [IoSliceMut<'_>],
    mut done: usize,
) -> std::io::Result<usize> {
    for buf in bufs {
        if done >= buf.len() {
            done -= buf.len();
            continue;
        }
        return stream.recv(buf.get_mut(done..).unwrap_or_default());
    }
    Ok(0)
}

/// MSG_TRUNC: reads bytes and discards them, as TCP does. With MSG_PEEK only counts the bytes.
pub(crate) fn discard(
    (socket, stream): (&StreamSocket, &SmcStream),
    wanted: usize,
    flags: c_int,
) -> SysResult {
    let mut flags = flags & !libc::MSG_TRUNC;
    if flags & libc::MSG_PEEK != 0 {
        let n = wanted.min(stream.readable().unwrap_or(0).max(1));
        return recv((socket, stream), &mut [IoSliceMut::new(&mut vec![0u8; n])], flags);
    }
    let mut sink = vec![0u8; wanted.min(TURN)];
    let mut done = 0;
    while done < wanted {
        let n = sink.len().min(wanted - done);
        let room = sink.get_mut(..n).unwrap_or_default();
        match recv((socket, stream), &mut [IoSliceMut::new(room)], flags) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
        if flags & libc::MSG_WAITALL == 0 {
            flags |= libc::MSG_DONTWAIT;
        }
    }
    Ok(done)
}

fn recv_urgent(stream: &SmcStream, bufs: &mut [IoSliceMut<'_>], flags: c_int) -> SysResult {
    let byte = match flags & libc::MSG_PEEK {
        0 => stream.recv_urgent(),
        _ => stream.peek_urgent(),
    }?;
    let first = bufs.iter_mut().find_map(|buf| buf.first_mut());
    Ok(first.map_or(0, |place| {
        *place = byte;
        1
    }))
}

/// Writes the buffers, with the flags of `send`.
pub(crate) fn send(
    (socket, stream): (&StreamSocket, &SmcStream),
    bufs: &[IoSlice<'_>],
    flags: c_int,
) -> SysResult {
    if flags & libc::MSG_FASTOPEN != 0 {
        return Err(Errno(libc::EISCONN));
    }
    let sent = if flags & libc::MSG_OOB != 0 {
        send_urgent((socket, stream), bufs, flags)
    } else {
        send_all((socket, stream), bufs, flags)
    };
    let sent = match sent {
        Err(Errno(libc::EPIPE)) => write_to_closed(socket, bufs),
        Err(error) => Err(socket.end.write_failed(stream, error)),
        sent => sent,
    };
    if sent == Err(Errno(libc::EPIPE)) && flags & libc::MSG_NOSIGNAL == 0 {
        raw::raise_sigpipe();
    }
    sent
}

/// A write to a closed peer. TCP takes the first write, and learns from the peer's answer about the
/// missing reader.
#[cold]
fn write_to_closed(socket: &StreamSocket, bufs: &[IoSlice<'_>]) -> SysResult {
    let n: usize = bufs.iter().map(|buf| buf.len()).sum();
    if n == 0 && socket.end.may_write_after_close() {
        return Ok(0);
    }
    if socket.end.begin_write_after_close() {
        registrations::recheck(socket);
        return Ok(n);
    }
    socket.end.take_epipe();
    Err(Errno(libc::EPIPE))
}

fn send_all(
    (socket, stream): (&StreamSocket, &SmcStream),
    bufs: &[IoSlice<'_>],
    flags: c_int,
) -> SysResult {
    let dont_wait = flags & libc::MSG_DONTWAIT != 0 || socket.options.is_nonblocking();
    let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
    let mut deadline = None;
    let mut done = 0usize;
    let mut looked = false;
    loop {
        let token = stream.change_token();
        let result = match done {
            0 => (&mut &*stream).write_vectored(bufs),
            _ => write_rest(stream, bufs, done),
        };
        match result {
            Ok(n) => {
                done += n;
                if done >= wanted {
                    return Ok(done);
                }
                if n > 0 && !dont_wait {
                    continue;
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) if done > 0 => return Ok(done),
            Err(error) => return Err(error.into()),
        }
        if dont_wait {
            let finds_room = || gets_room_soon(stream, token) || stream.look_for_room();
            if !std::mem::replace(&mut looked, true) && finds_room() {
                continue;
            }
            socket.write_blocked.store(true, Ordering::Relaxed);
            return if done > 0 { Ok(done) } else { Err(Errno(libc::EAGAIN)) };
        }
        if deadline.is_none() {
            deadline = socket.options.timeout(true).map(|timeout| Instant::now() + timeout);
        }
        if let Err(error) = wait(stream, token, true, deadline) {
            return if done > 0 { Ok(done) } else { Err(error) };
        }
    }
}

/// How long a thread of Go waits for room. Its scheduler gives the thread's work to other threads
/// meanwhile, as in other system calls.
const ROOM_TIME: Duration = Duration::from_micros(500);

/// In a program written in Go, waits for a moment for reads of the peer after `token`. Without the wait,
/// the bytes would go into the queue, from where another thread sends them with a wake-up for each read.
fn gets_room_soon(stream: &SmcStream, token: guest_driver::ChangeToken) -> bool {
    own_calls::is_in_go() && {
        let end = Instant::now() + ROOM_TIME;
        wait(stream, token, true, Some(end)).is_ok()
    }
}

/// Writes the buffers, without their first `done` bytes.
fn write_rest(stream: &SmcStream, bufs: &[IoSlice<'_>], mut done: usize) -> std::io::Result<usize> {
    for buf in bufs {
        if done >= buf.len() {
            done -= buf.len();
            continue;
        }
        return stream.send(buf.get(done..).unwrap_or_default());
    }
    Ok(0)
}

/// Writes all bytes except the last as usual, and the last byte as urgent.
fn send_urgent(
    (socket, stream): (&StreamSocket, &SmcStream),
    bufs: &[IoSlice<'_>],
    flags: c_int,
) -> SysResult {
    let all: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
    let Some((urgent, before)) = all.split_last() else { return Ok(0) };
    if !before.is_empty() {
        let sent = send_all((socket, stream), &[IoSlice::new(before)], flags & !libc::MSG_OOB)?;
        if sent < before.len() {
            return Ok(sent);
        }
    }
    let mut looked = false;
    loop {
        let token = stream.change_token();
        match stream.send_urgent(*urgent) {
            Ok(()) => return Ok(all.len()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if flags & libc::MSG_DONTWAIT != 0 || socket.options.is_nonblocking() {
                    if !std::mem::replace(&mut looked, true) && stream.look_for_room() {
                        continue;
                    }
                    return if before.is_empty() {
                        Err(Errno(libc::EAGAIN))
                    } else {
                        Ok(before.len())
                    };
                }
                wait(stream, token, true, None)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Bytes copied at a time by `sendfile` or `splice`.
const TURN: usize = 64 << 10;

/// `sendfile` into a connection on SMC, or an undecided one: alternates reads with writes by `send`.
pub(crate) fn sendfile(
    mut send: impl FnMut(&[IoSlice<'_>]) -> SysResult,
    file: c_int,
    mut offset: Option<&mut i64>,
    count: usize,
) -> SysResult {
    if !crate::sys::can_be_sent(file)? {
        return Err(Errno(libc::EINVAL));
    }
    let begin = match &offset {
        Some(offset) => **offset,
        None => crate::sys::position(file)?,
    };
    let mut buf = vec![0u8; TURN.min(count)];
    let mut done = 0usize;
    let end = loop {
        let room = (count - done).min(buf.len());
        let piece = buf.get_mut(..room).unwrap_or_default();
        let n = match raw::pread(file, piece, begin + done as i64) {
            Ok(0) => break Ok(()),
            Ok(n) => n,
            Err(error) => break Err(error),
        };
        match send(&[IoSlice::new(piece.get(..n).unwrap_or_default())]) {
            Ok(sent) => {
                done += sent;
                if sent < n || done >= count {
                    break Ok(());
                }
            }
            Err(error) => break Err(error),
        }
    };
    if done == 0 {
        return end.map(|()| 0);
    }
    // The file position does not pass bytes refused by the connection.
    let at = begin + done as i64;
    match &mut offset {
        Some(offset) => **offset = at,
        None => crate::sys::set_position(file, at)?,
    }
    Ok(done)
}

/// `splice` from an SMC connection into a pipe. Bytes refused by the pipe stay in the connection.
/// `dont_wait` (SPLICE_F_NONBLOCK) is about the pipe; the connection has O_NONBLOCK.
pub(crate) fn splice_out(
    (socket, stream): (&StreamSocket, &SmcStream),
    pipe: c_int,
    len: usize,
    dont_wait: bool,
) -> SysResult {
    let size = raw::pipe_size(pipe)?;
    if len == 0 {
        return Ok(0);
    }
    let room = pipe_room(pipe, size, dont_wait || is_nonblocking(pipe))?;
    let mut buf = vec![0u8; TURN.min(len).min(room)];
    let n = recv((socket, stream), &mut [IoSliceMut::new(&mut buf)], libc::MSG_PEEK)?;
    if n == 0 {
        return Ok(0);
    }
    let written = raw::write(pipe, buf.get(..n).unwrap_or_default())?;
    let taken = buf.get_mut(..written).unwrap_or_default();
    recv((socket, stream), &mut [IoSliceMut::new(taken)], libc::MSG_DONTWAIT)
}

fn is_nonblocking(fd: c_int) -> bool {
    raw::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|flags| flags as c_int & libc::O_NONBLOCK != 0)
}

/// Whether a descriptor has one of the events. Waits for one, unless `dont_wait`.
fn await_events(fd: c_int, events: i16, dont_wait: bool) -> Result<bool, Errno> {
    let mut list = [libc::pollfd { fd, events, revents: 0 }];
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    match raw::ppoll(&mut list, dont_wait.then_some(&now), None) {
        Err(Errno(libc::EINTR)) if interrupt::is_deferred() => Err(RESTART),
        result => Ok(result? > 0),
    }
}

/// Number of bytes written to a pipe of this size without blocking, even without O_NONBLOCK: the size
/// of an empty pipe, otherwise a page (PIPE_BUF). Waits for a full pipe, unless `dont_wait`.
fn pipe_room(pipe: c_int, size: usize, dont_wait: bool) -> Result<usize, Errno> {
    if !await_events(pipe, libc::POLLOUT, dont_wait)? {
        return Err(Errno(libc::EAGAIN));
    }
    match raw::queued_bytes(pipe) {
        Ok(0) => Ok(size),
        _ => Ok(libc::PIPE_BUF),
    }
}

/// Waits until a write would not block. EAGAIN on a non-blocking socket without room.
fn await_room((socket, stream): (&StreamSocket, &SmcStream)) -> Result<(), Errno> {
    let has_room = || stream.readiness(false).writable;
    if socket.options.is_nonblocking() {
        if has_room() || (stream.look_for_room() && has_room()) {
            return Ok(());
        }
        socket.write_blocked.store(true, Ordering::Relaxed);
        return Err(Errno(libc::EAGAIN));
    }
    let end = socket.options.timeout(true).map(|timeout| Instant::now() + timeout);
    loop {
        let token = stream.change_token();
        if has_room() {
            return Ok(());
        }
        wait(stream, token, true, end)?;
    }
}

/// `splice` from a pipe into an SMC connection.
pub(crate) fn splice_in(
    to: (&StreamSocket, &SmcStream),
    pipe: c_int,
    len: usize,
    dont_wait: bool,
) -> SysResult {
    raw::pipe_size(pipe)?;
    if len == 0 {
        return Ok(0);
    }
    if !await_events(pipe, libc::POLLIN, dont_wait || is_nonblocking(pipe))? {
        return Err(Errno(libc::EAGAIN));
    }
    await_room(to)?;
    let mut buf = vec![0u8; TURN.min(len).min(to.1.room().max(1))];
    let n = raw::read(pipe, &mut buf)?;
    // The pipe no longer has the bytes, so the call must send all of them, even if another thread has
    // taken the room.
    let piece = buf.get(..n).unwrap_or_default();
    let mut done = 0;
    while done < n {
        let rest = [IoSlice::new(piece.get(done..).unwrap_or_default())];
        let token = to.1.change_token();
        match send(to, &rest, libc::MSG_DONTWAIT) {
            Ok(sent) => done += sent,
            Err(Errno(libc::EAGAIN)) => {
                let _ = interrupt::deaf(|| to.1.wait_for_change(token, true, None));
            }
            Err(error) => return if done > 0 { Ok(done) } else { Err(error) },
        }
    }
    Ok(n)
}
