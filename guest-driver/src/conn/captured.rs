// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection's calls to the capture of the process, made only if there is a capture.

use std::io::{IoSlice, IoSliceMut};

use super::parts::Shared;
use crate::capture::{self, Direction};

/// The first `n` bytes of pieces.
fn first<'a>(pieces: impl Iterator<Item = &'a [u8]>, n: usize) -> impl Iterator<Item = &'a [u8]> {
    pieces.scan(n, |left, piece| {
        let taken = piece.get(..piece.len().min(*left))?;
        *left -= taken.len();
        Some(taken)
    })
}

impl Shared {
    pub(super) fn key(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// The program has sent the first `n` bytes of the slices.
    pub(super) fn capture_sent(&self, bufs: &[IoSlice<'_>], n: usize) {
        let pieces = first(bufs.iter().map(|buf| &**buf), n);
        capture::copy(self.key(), || self.addresses(), (Direction::Sent, false), pieces);
    }

    /// The program has received `n` bytes, or the end of data.
    pub(super) fn capture_received(&self, bufs: &[IoSliceMut<'_>], n: usize) {
        let is_last = n == 0 && bufs.iter().any(|buf| !buf.is_empty());
        let pieces = first(bufs.iter().map(|buf| &**buf), n);
        capture::copy(self.key(), || self.addresses(), (Direction::Received, is_last), pieces);
    }

    /// The program sends no more.
    pub(super) fn capture_end(&self) {
        let none = std::iter::empty();
        capture::copy(self.key(), || self.addresses(), (Direction::Sent, true), none);
    }

    /// The connection ends: its number may be reused.
    pub(super) fn capture_no_more(&self) {
        capture::forget(self.key());
    }
}
