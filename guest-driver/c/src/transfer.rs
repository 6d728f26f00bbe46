// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sending and receiving.
//!
//! Streams of SMC are non-blocking here: a waiting call tries the stream, waits for a change of the
//! connection since, and tries again. On TCP the kernel carries out the call.

use std::ffi::c_int;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::time::Instant;

use guest_driver::{ChangeToken, SmcStream};
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg,
};

use crate::error::Error;
use crate::socket::Socket;

const RECV_FLAGS: c_int =
    libc::MSG_DONTWAIT | libc::MSG_PEEK | libc::MSG_WAITALL | libc::MSG_OOB | libc::MSG_NOSIGNAL;
const SEND_FLAGS: c_int = libc::MSG_DONTWAIT | libc::MSG_OOB | libc::MSG_NOSIGNAL | libc::MSG_MORE;

fn check_flags(flags: c_int, known: c_int) -> Result<(), Error> {
    match flags & !known {
        0 => Ok(()),
        others => Err(Error::new(libc::EOPNOTSUPP, format!("the flags {others:#x}"))),
    }
}

fn would_block() -> Error {
    Error::of_code(libc::EAGAIN)
}

/// Waits until the stream has changed since `token`.
///
/// # Errors
/// EAGAIN at the deadline, EINTR.
fn wait(
    stream: &SmcStream,
    token: ChangeToken,
    write: bool,
    deadline: Option<Instant>,
) -> Result<(), Error> {
    Ok(stream.wait_for_change(token, write, deadline)?)
}

/// Receives into the pieces.
///
/// # Errors
/// As `smc_recv`.
pub(crate) fn recv(
    socket: &Socket,
    bufs: &mut [IoSliceMut<'_>],
    flags: c_int,
) -> Result<usize, Error> {
    let stream = socket.stream()?;
    check_flags(flags, RECV_FLAGS)?;
    let room: usize = bufs.iter().map(|buf| buf.len()).sum();
    if room == 0 {
        return Ok(0);
    }
    let dont_wait = flags & libc::MSG_DONTWAIT != 0 || socket.is_nonblocking();
    if !stream.is_smc() {
        return recv_tcp(stream, bufs, flags, dont_wait);
    }
    if flags & libc::MSG_OOB != 0 {
        return recv_urgent(stream, bufs, flags);
    }
    let is_peek = flags & libc::MSG_PEEK != 0;
    let wanted = if flags & libc::MSG_WAITALL != 0 { room } else { 1 };
    let mut deadline = None;
    let mut done = 0;
    loop {
        let token = stream.change_token();
        let result = match is_peek {
            // The bytes stay, so another look finds them again.
            true => {
                done = 0;
                stream.peek_vectored(bufs)
            }
            false => read_rest(stream, bufs, done),
        };
        match result {
            Ok(0) => return Ok(done),
            Ok(n) => {
                done += n;
                let is_last = is_peek && stream.readiness(false).read_closed;
                if done >= wanted || dont_wait || is_last {
                    return Ok(done);
                }
                if !is_peek {
                    continue;
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if dont_wait {
                    return if done > 0 { Ok(done) } else { Err(would_block()) };
                }
            }
            Err(_) if done > 0 => return Ok(done),
            Err(error) => return Err(error.into()),
        }
        if deadline.is_none() {
            deadline = stream.read_timeout()?.map(|timeout| Instant::now() + timeout);
        }
        if let Err(error) = wait(stream, token, false, deadline) {
            return if done > 0 { Ok(done) } else { Err(error) };
        }
    }
}

/// Reads into the pieces, behind their first `done` bytes.
fn read_rest(
    mut stream: &SmcStream,
    bufs: &mut [IoSliceMut<'_>],
    mut done: usize,
) -> std::io::Result<usize> {
    if done == 0 {
        return stream.read_vectored(bufs);
    }
    for buf in bufs {
        if done < buf.len() {
            return stream.recv(buf.get_mut(done..).unwrap_or_default());
        }
        done -= buf.len();
    }
    Ok(0)
}

fn recv_urgent(
    stream: &SmcStream,
    bufs: &mut [IoSliceMut<'_>],
    flags: c_int,
) -> Result<usize, Error> {
    let byte = match flags & libc::MSG_PEEK {
        0 => stream.recv_urgent(),
        _ => stream.peek_urgent(),
    }?;
    let place = bufs.iter_mut().find_map(|buf| buf.first_mut());
    Ok(place.map_or(0, |place| {
        *place = byte;
        1
    }))
}

fn recv_tcp(
    stream: &SmcStream,
    bufs: &mut [IoSliceMut<'_>],
    flags: c_int,
    dont_wait: bool,
) -> Result<usize, Error> {
    let mut flags = RecvFlags::from_bits_retain(flags as u32);
    flags.set(RecvFlags::DONTWAIT, dont_wait);
    let mut control = RecvAncillaryBuffer::default();
    Ok(recvmsg(stream.pollable()?, bufs, &mut control, flags)?.bytes)
}

/// Sends the pieces.
///
/// # Errors
/// As `smc_send`.
pub(crate) fn send(socket: &Socket, bufs: &[IoSlice<'_>], flags: c_int) -> Result<usize, Error> {
    let stream = socket.stream()?;
    check_flags(flags, SEND_FLAGS)?;
    let dont_wait = flags & libc::MSG_DONTWAIT != 0 || socket.is_nonblocking();
    if !stream.is_smc() {
        let mut flags = SendFlags::from_bits_retain(flags as u32) | SendFlags::NOSIGNAL;
        flags.set(SendFlags::DONTWAIT, dont_wait);
        let mut control = SendAncillaryBuffer::default();
        return Ok(sendmsg(stream.pollable()?, bufs, &mut control, flags)?);
    }
    match flags & libc::MSG_OOB {
        0 => send_all(stream, bufs, dont_wait),
        _ => send_urgent(stream, bufs, dont_wait),
    }
}

fn send_all(stream: &SmcStream, bufs: &[IoSlice<'_>], dont_wait: bool) -> Result<usize, Error> {
    let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
    let mut deadline = None;
    let mut done = 0;
    loop {
        let token = stream.change_token();
        match write_rest(stream, bufs, done) {
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
            return if done > 0 { Ok(done) } else { Err(would_block()) };
        }
        if deadline.is_none() {
            deadline = stream.write_timeout()?.map(|timeout| Instant::now() + timeout);
        }
        if let Err(error) = wait(stream, token, true, deadline) {
            return if done > 0 { Ok(done) } else { Err(error) };
        }
    }
}

/// Writes the pieces, without their first `done` bytes.
fn write_rest(
    mut stream: &SmcStream,
    bufs: &[IoSlice<'_>],
    mut done: usize,
) -> std::io::Result<usize> {
    if done == 0 {
        return stream.write_vectored(bufs);
    }
    for buf in bufs {
        if done < buf.len() {
            return stream.send(buf.get(done..).unwrap_or_default());
        }
        done -= buf.len();
    }
    Ok(0)
}

/// Sends all bytes but the last as usual, and the last one as urgent.
fn send_urgent(stream: &SmcStream, bufs: &[IoSlice<'_>], dont_wait: bool) -> Result<usize, Error> {
    let all: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
    let Some((urgent, before)) = all.split_last() else { return Ok(0) };
    if !before.is_empty() {
        let sent = send_all(stream, &[IoSlice::new(before)], dont_wait)?;
        if sent < before.len() {
            return Ok(sent);
        }
    }
    let deadline = stream.write_timeout()?.map(|timeout| Instant::now() + timeout);
    loop {
        let token = stream.change_token();
        let error = match stream.send_urgent(*urgent) {
            Ok(()) => return Ok(all.len()),
            Err(error) if error.kind() != ErrorKind::WouldBlock => error.into(),
            Err(_) if dont_wait => would_block(),
            Err(_) => match wait(stream, token, true, deadline) {
                Ok(()) => continue,
                Err(error) => error,
            },
        };
        return if before.is_empty() { Err(error) } else { Ok(before.len()) };
    }
}
