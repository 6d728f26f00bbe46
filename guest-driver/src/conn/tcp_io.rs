// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes of the TCP connection of the handshake.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use super::parts::Shared;
use ism_sys::{has_fin, poll_readable, unacknowledged};

/// The result of a read from TCP.
pub(super) enum TcpInput {
    Bytes,
    Nothing,
    End,
    Reset,
}

impl Shared {
    /// Writes to TCP without waiting; 0: TCP has no room.
    pub(super) fn write_tcp(&self, slices: &[IoSlice<'_>], more: SendFlags) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL | more;
        loop {
            let sent = self
                .tcp
                .with(|tcp| Ok(sendmsg(tcp, slices, &mut SendAncillaryBuffer::default(), flags)?));
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => return sent,
            }
        }
    }

    /// Appends bytes from TCP, as many as there is room for.
    pub(super) fn read_tcp(&self, bytes: &mut Vec<u8>) -> TcpInput {
        let guard = self.tcp.stream();
        let Some(tcp) = &*guard else { return TcpInput::Nothing };
        loop {
            return match recv(tcp, spare_capacity(bytes), RecvFlags::DONTWAIT) {
                // The kernel also returns 0 on a reset connection, once the error was taken.
                Ok((0, _)) => match has_fin(tcp) {
                    true => TcpInput::End,
                    false => TcpInput::Reset,
                },
                Ok(_) => TcpInput::Bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => TcpInput::Nothing,
                Err(_) => TcpInput::Reset,
            };
        }
    }

    /// Whether the peer's TCP has sent a FIN, and no RST; `None`: neither. The device may report the
    /// end of a process a moment before the kernel has closed the process's sockets.
    pub(super) fn tcp_has_ended(&self) -> Option<bool> {
        let tcp = self.tcp.stream();
        let Some(tcp) = &*tcp else { return Some(false) };
        let mut byte = [0u8; 1];
        loop {
            match peek(tcp, &mut byte) {
                // The kernel also returns 0 on a reset connection, once the error was taken.
                Ok(0) => {
                    return Some(has_fin(tcp));
                }
                Ok(_) => return Some(false),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !await_fin(tcp) {
                        return None;
                    }
                }
                Err(_) => return Some(false),
            }
        }
    }

    /// Whether the peer's kernel has yet to acknowledge bytes taken by TCP.
    pub(super) fn has_unacknowledged(&self) -> bool {
        self.tcp.with(unacknowledged).is_ok_and(|bytes| bytes > 0)
    }
}

/// The longest sleep for FINs of lost peers, of the process's connections together in one second.
const FIN_BUDGET: Duration = Duration::from_millis(50);

/// Waits a moment for the peer's FIN. `false`: the time budget is used up.
fn await_fin(tcp: impl AsFd) -> bool {
    /// The second of the clock, times 2^20, plus the spent part of its budget, microseconds. No lock: a
    /// thread could hold it while the process forks.
    static SPENT: AtomicU64 = AtomicU64::new(0);
    let clock = ism_sys::read_clock(rustix::time::ClockId::Monotonic);
    let second = (clock.tv_sec as u64) << 20;
    let last = SPENT.load(Ordering::Relaxed);
    let spent = last.saturating_sub(second);
    let budget = FIN_BUDGET.saturating_sub(Duration::from_micros(spent));
    let begun = Instant::now();
    let _ = poll_readable([Some(tcp.as_fd()), None, None], &[], Some(budget), None);
    let took = begun.elapsed();
    SPENT.store(second + (spent + took.as_micros() as u64).min(0xf_ffff), Ordering::Relaxed);
    took < budget
}

/// Peeks without blocking, in any mode of the stream.
pub(super) fn peek(tcp: impl AsFd, byte: &mut [u8; 1]) -> io::Result<usize> {
    use rustix::net::RecvFlags;
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (n, _) = rustix::net::recv(tcp, &mut byte[..], flags)?;
    Ok(n)
}
