// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The options of a socket, as needed by calls on an SMC connection.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The options of a socket, as the program has set them.
#[derive(Debug)]
pub(crate) struct SocketOptions {
    nonblocking: AtomicBool,
    /// SO_RCVTIMEO, microseconds; 0: none.
    read_timeout: AtomicU64,
    /// SO_SNDTIMEO, microseconds; 0: none.
    write_timeout: AtomicU64,
    /// SO_LINGER when the connection was decided or closed, microseconds; `u64::MAX`: none.
    linger: AtomicU64,
    /// SO_RCVLOWAT, if it is more than a byte.
    low_water: AtomicU32,
    /// TCP_INQ.
    queue_size_wanted: AtomicBool,
}

impl SocketOptions {
    /// The options of a new socket.
    pub(super) const fn new(nonblocking: bool) -> SocketOptions {
        SocketOptions {
            nonblocking: AtomicBool::new(nonblocking),
            read_timeout: AtomicU64::new(0),
            write_timeout: AtomicU64::new(0),
            linger: AtomicU64::new(u64::MAX),
            low_water: AtomicU32::new(0),
            queue_size_wanted: AtomicBool::new(false),
        }
    }

    /// Whether calls return EAGAIN instead of waiting (O_NONBLOCK).
    #[inline]
    pub(crate) fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Stores whether O_NONBLOCK is set.
    pub(crate) fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Ordering::Relaxed);
    }

    /// How long a call may wait; `None`: for ever.
    pub(crate) fn timeout(&self, write: bool) -> Option<Duration> {
        let word = if write { &self.write_timeout } else { &self.read_timeout };
        match word.load(Ordering::Relaxed) {
            0 => None,
            micros => Some(Duration::from_micros(micros)),
        }
    }

    /// Stores SO_RCVTIMEO and SO_SNDTIMEO, microseconds; 0: none. `None` leaves a value as it is.
    pub(crate) fn set_timeouts(&self, read: Option<u64>, write: Option<u64>) {
        if let Some(read) = read {
            self.read_timeout.store(read, Ordering::Relaxed);
        }
        if let Some(write) = write {
            self.write_timeout.store(write, Ordering::Relaxed);
        }
    }

    /// SO_LINGER, if it is on.
    pub(crate) fn linger(&self) -> Option<Duration> {
        match self.linger.load(Ordering::Relaxed) {
            u64::MAX => None,
            micros => Some(Duration::from_micros(micros)),
        }
    }

    /// Stores SO_LINGER.
    pub(crate) fn set_linger(&self, linger: Option<Duration>) {
        let micros = linger.and_then(|linger| u64::try_from(linger.as_micros()).ok());
        self.linger.store(micros.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// SO_RCVLOWAT; 0: not more than a byte.
    #[inline]
    pub(crate) fn low_water(&self) -> usize {
        self.low_water.load(Ordering::Relaxed) as usize
    }

    /// Stores SO_RCVLOWAT.
    pub(crate) fn set_low_water(&self, bytes: u32) {
        self.low_water.store(if bytes > 1 { bytes } else { 0 }, Ordering::Relaxed);
    }

    /// Whether the program wants to know how much is queued (TCP_INQ).
    pub(crate) fn is_queue_size_wanted(&self) -> bool {
        self.queue_size_wanted.load(Ordering::Relaxed)
    }

    /// Stores TCP_INQ.
    pub(crate) fn set_queue_size_wanted(&self, on: bool) {
        self.queue_size_wanted.store(on, Ordering::Relaxed);
    }
}
