// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The send side after the end of the ring: records on TCP.
//!
//! A write reports bytes as sent only if TCP has taken a part of their record, or an earlier record has
//! announced more. Otherwise the end of this process would look like the end of its stream, although
//! bytes of the stream were lost.

use std::io::{self, IoSlice};

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use smc_core::carrier::Input;
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::record::{HEADER_LEN, MAX_DATA, Record};

use super::send_queue::queues_are_held;
use super::{Conn, Tx};

/// The most slices of one record, with its header.
const SLICES: usize = 64;

impl Conn {
    /// Sends bytes of the slices from byte `skip` on as one record. Of these, `promised` bytes were
    /// already reported to the program as sent. Returns the number of bytes; 0: there is no room.
    pub(super) fn put_on_tcp(
        &self,
        tx: &mut Tx,
        bufs: &[IoSlice<'_>],
        mut skip: usize,
        promised: usize,
    ) -> usize {
        if !tx.may_send_record() {
            return 0;
        }
        let mut slices: Vec<&[u8]> = Vec::with_capacity(bufs.len().min(SLICES));
        let mut len = 0usize;
        for buf in bufs {
            let bytes = buf.get(skip.min(buf.len())..).unwrap_or_default();
            skip -= skip.min(buf.len());
            let room = MAX_DATA as usize - len;
            let bytes = bytes.get(..room.min(bytes.len())).unwrap_or_default();
            if slices.len() + 1 == SLICES || room == 0 {
                break;
            }
            if !bytes.is_empty() {
                slices.push(bytes);
                len += bytes.len();
            }
        }
        let more = promised > len;
        let header = Record::Data { at: tx.half.total(), len: len as u32, more }.header();
        let mut out: Vec<IoSlice<'_>> = vec![IoSlice::new(&header)];
        out.extend(slices.iter().map(|bytes| IoSlice::new(bytes)));
        let taken = self.write_tcp(&out, SendFlags::empty());
        match taken {
            Ok(0) => {
                tx.half.records.blocked = true;
                0
            }
            Ok(mut taken) => {
                for slice in &out {
                    let rest = slice.get(taken.min(slice.len())..).unwrap_or_default();
                    taken -= taken.min(slice.len());
                    tx.records.out.push(rest);
                }
                tx.half.count(len as u32);
                len
            }
            Err(_) => {
                self.break_writes(tx);
                0
            }
        }
    }

    /// Sends an urgent byte: the mark, and a record with the byte. `false`: there is no room.
    pub(super) fn put_urgent_on_tcp(&self, tx: &mut Tx, byte: u8) -> bool {
        if !tx.may_send_urgent_record() {
            return false;
        }
        let mark = Record::Urgent { at: tx.half.total() + 1 }.header();
        let data = Record::Data { at: tx.half.total(), len: 1, more: false }.header();
        let mut bytes = [0; 2 * HEADER_LEN + 1];
        for (to, from) in bytes.iter_mut().zip(mark.into_iter().chain(data).chain([byte])) {
            *to = from;
        }
        let taken = self.write_tcp(&[IoSlice::new(&bytes)], SendFlags::empty());
        match taken {
            // A mark alone says nothing of a following byte.
            Ok(0) => {
                tx.half.records.blocked = true;
                false
            }
            Ok(taken) => {
                tx.way_back.note_mark();
                tx.records.out.push(bytes.get(taken..).unwrap_or_default());
                tx.half.count(1);
                true
            }
            Err(_) => {
                self.break_writes(tx);
                false
            }
        }
    }

    /// Sends the records not yet taken by TCP.
    pub(super) fn pump_out(&self, tx: &mut Tx) {
        let mut has_waited = false;
        // The FIN is in the packet of the last record: the peer's FIN must not come first.
        let ends = tx.half.ends_tcp_first();
        let more = if ends { SendFlags::MORE } else { SendFlags::empty() };
        loop {
            if tx.half.records.broken {
                return tx.records.out.discard();
            }
            if tx.records.out.is_empty() {
                if has_waited {
                    // A writer may have found no room behind these records.
                    self.waiting.note_room_on_tcp();
                }
                if std::mem::take(&mut tx.half.records.closing) {
                    drop(self.tcp.take());
                } else if ends && has_waited {
                    let fin = rustix::net::Shutdown::Write;
                    let _ = self.tcp.with(|tcp| Ok(rustix::net::shutdown(tcp, fin)?));
                }
                return;
            }
            if queues_are_held() {
                return;
            }
            has_waited = true;
            let (first, second) = tx.records.out.slices();
            match self.write_tcp(&[IoSlice::new(first), IoSlice::new(second)], more) {
                Ok(0) => {
                    tx.half.records.blocked = true;
                    return;
                }
                Ok(taken) => tx.records.out.take(taken),
                Err(_) => return self.break_writes(tx),
            }
        }
    }

    /// TCP was reset, as found by a write. As on TCP, earlier arrivals can still be read before the
    /// reset. After a close by the program, there is no reader.
    #[cold]
    fn break_writes(&self, tx: &mut Tx) {
        let is_closed = tx.half.own_flags().contains(StateFlags::CLOSED);
        tx.records.out.discard();
        if is_closed {
            tx.half.records.closing = false;
            self.change(tx, Input::TcpReset, 0);
            return;
        }
        tx.half.records.broken = true;
        self.end.shut_write();
        self.wake_all();
        self.tcp.watch_room();
    }

    /// Writes to TCP without waiting; 0: TCP has no room.
    fn write_tcp(&self, slices: &[IoSlice<'_>], more: SendFlags) -> io::Result<usize> {
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
}
