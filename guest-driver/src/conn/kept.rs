// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unread bytes of a ring that a new one replaces, or that is full while the awaited record is behind
//! other records. These bytes are read first.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};

use super::{Conn, Rx};

/// With this many bytes kept, no more are added: more than the initial size of TCP's buffers of both
/// ends.
const MOST: usize = 8 << 20;

impl Rx {
    fn kept(&self) -> usize {
        self.kept.as_ref().map_or(0, VecDeque::len)
    }

    /// Bytes that reads return before they have to wait, or up to an urgent mark.
    pub(super) fn readable(&self) -> usize {
        self.kept() + self.receiver.readable() as usize
    }
}

impl Conn {
    /// Reads kept bytes (at least one), and behind them bytes of the ring. With `peek` the bytes stay.
    /// Fewer bytes than room mean no more bytes, as on TCP: programs wait then, or check again only
    /// after new arrivals.
    #[cold]
    pub(super) fn recv_kept(
        &self,
        rx: &mut Rx,
        bufs: &mut [IoSliceMut<'_>],
        peek: bool,
    ) -> io::Result<usize> {
        let Some(kept) = &mut rx.kept else { return Ok(0) };
        let (mut done, mut rest) = (0, Vec::new());
        for buf in bufs {
            let end = kept.len().min(done + buf.len());
            let (now, later) = buf.split_at_mut(end - done);
            now.iter_mut().zip(kept.range(done..end)).for_each(|(to, from)| *to = *from);
            done = end;
            if !later.is_empty() {
                rest.push(IoSliceMut::new(later));
            }
        }
        if !peek {
            kept.drain(..done);
            if kept.is_empty() {
                rx.kept = None;
            }
        }
        // A failure shows at the next read, and so does the end.
        if !rest.is_empty() && self.refresh_rx(rx).is_ok() && !rx.receiver.at_mark() {
            let n = self.copy_out(rx, &mut rest)?;
            done += n as usize;
            if !peek && n > 0 {
                self.consume(rx, n)?;
            }
        }
        if !peek {
            if self.end.reads_tcp() {
                // There may be room for more bytes of TCP.
                self.serve_tcp(rx);
            }
            if rx.readable() == 0 {
                self.note_empty(rx);
            }
        }
        Ok(done)
    }

    /// Takes unread bytes out of the ring, and keeps them. Returns their number.
    pub(super) fn keep_unread(&self, rx: &mut Rx) -> io::Result<usize> {
        self.refresh_rx(rx)?;
        let mut bytes = vec![0; rx.receiver.readable() as usize];
        let n = self.copy_out(rx, &mut [IoSliceMut::new(&mut bytes)])?;
        if n > 0 {
            self.consume(rx, n)?;
            bytes.truncate(n as usize);
            rx.kept.get_or_insert_default().extend(bytes);
        }
        Ok(n as usize)
    }

    /// Makes room in a ring for more bytes of TCP, because the awaited record is behind them. `false`:
    /// there is no room, and the program has to read.
    pub(super) fn make_room(&self, rx: &mut Rx) -> bool {
        rx.kept() < MOST && self.keep_unread(rx).is_ok_and(|n| n > 0)
    }
}
