// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes that the program has not read when a new ring takes the place of the one that they are in, or
//! when a record waits behind others for which the ring has no room. They are read first.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};

use super::{Conn, Rx};

/// No more bytes of a ring are kept if so many are: more than TCP's buffers of both ends hold, as they
/// are when a connection begins to use them.
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
    /// Reads bytes that were kept, of which there are some, and behind them those of the ring. With
    /// `peek` they stay. Fewer bytes than there is room for say that there are no more, as on TCP:
    /// programs wait then, or look again only when more have come.
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
                // There may be room for what TCP has.
                self.serve_tcp(rx);
            }
            if rx.readable() == 0 {
                self.note_empty(rx);
            }
        }
        Ok(done)
    }

    /// Takes what the program has not read out of the ring, and keeps it. Returns how many bytes that
    /// were.
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

    /// Makes room in a ring to which TCP brings more, because the record that this end waits for is
    /// behind that. `false`: there is none.
    pub(super) fn make_room(&self, rx: &mut Rx) -> bool {
        rx.kept() < MOST && self.keep_unread(rx).is_ok_and(|n| n > 0)
    }
}
