// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The send side after the end of the ring: records on TCP.
//!
//! A write reports bytes as sent only if TCP has taken a part of their record, or an earlier record has
//! announced more. Otherwise the end of this process would look like the end of its stream, although
//! bytes of the stream were lost.

use std::io::IoSlice;

use rustix::net::SendFlags;
use smc_core::carrier::Input;
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::record::{HEADER_LEN, MAX_DATA, Record};

use super::parts::{Shared, Tx};
use crate::byte_queue::send_queue::queues_are_held;

/// The most slices of one record, with its header.
const SLICES: usize = 64;

impl Tx {
    /// Sends bytes of the slices from byte `skip` on as one record. Of these, `promised` bytes were
    /// already reported to the program as sent. Returns the number of bytes; 0: there is no room.
    pub(super) fn send_record(
        &mut self,
        shared: &Shared,
        bufs: &[IoSlice<'_>],
        mut skip: usize,
        promised: usize,
    ) -> usize {
        if !self.may_send_record() {
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
        let header = Record::Data { at: self.half.total(), len: len as u32, more }.header();
        let mut out: Vec<IoSlice<'_>> = vec![IoSlice::new(&header)];
        out.extend(slices.iter().map(|bytes| IoSlice::new(bytes)));
        let taken = shared.write_tcp(&out, SendFlags::empty());
        match taken {
            Ok(0) => {
                self.half.records.blocked = true;
                0
            }
            Ok(mut taken) => {
                for slice in &out {
                    let rest = slice.get(taken.min(slice.len())..).unwrap_or_default();
                    taken -= taken.min(slice.len());
                    self.records.out.push(rest);
                }
                self.half.count(len as u32);
                len
            }
            Err(_) => {
                self.break_writes(shared);
                0
            }
        }
    }

    /// Sends an urgent byte: the mark, and a record with the byte. `false`: there is no room.
    pub(super) fn send_urgent_record(&mut self, shared: &Shared, byte: u8) -> bool {
        if !self.may_send_urgent_record() {
            return false;
        }
        let mark = Record::Urgent { at: self.half.total() + 1 }.header();
        let data = Record::Data { at: self.half.total(), len: 1, more: false }.header();
        let mut bytes = [0; 2 * HEADER_LEN + 1];
        for (to, from) in bytes.iter_mut().zip(mark.into_iter().chain(data).chain([byte])) {
            *to = from;
        }
        let taken = shared.write_tcp(&[IoSlice::new(&bytes)], SendFlags::empty());
        match taken {
            // A mark alone says nothing of a following byte.
            Ok(0) => {
                self.half.records.blocked = true;
                false
            }
            Ok(taken) => {
                self.ring_return.note_mark();
                self.records.out.push(bytes.get(taken..).unwrap_or_default());
                self.half.count(1);
                true
            }
            Err(_) => {
                self.break_writes(shared);
                false
            }
        }
    }

    /// Sends the records not yet taken by TCP.
    pub(super) fn flush_records(&mut self, shared: &Shared) {
        let mut has_waited = false;
        // The FIN is in the packet of the last record: the peer's FIN must not come first.
        let ends = self.half.ends_tcp_first();
        let more = if ends { SendFlags::MORE } else { SendFlags::empty() };
        loop {
            if self.half.records.broken {
                return self.records.out.discard();
            }
            if self.records.out.is_empty() {
                if has_waited {
                    // A writer may have found no room behind these records.
                    shared.waiting.note_room_on_tcp();
                }
                if std::mem::take(&mut self.half.records.closing) {
                    drop(shared.tcp.take());
                } else if ends && has_waited {
                    let fin = rustix::net::Shutdown::Write;
                    let _ = shared.tcp.with(|tcp| Ok(rustix::net::shutdown(tcp, fin)?));
                }
                return;
            }
            if queues_are_held() {
                return;
            }
            has_waited = true;
            let (first, second) = self.records.out.slices();
            match shared.write_tcp(&[IoSlice::new(first), IoSlice::new(second)], more) {
                Ok(0) => {
                    self.half.records.blocked = true;
                    return;
                }
                Ok(taken) => self.records.out.take(taken),
                Err(_) => return self.break_writes(shared),
            }
        }
    }

    /// TCP was reset, as found by a write. As on TCP, earlier arrivals can still be read before the
    /// reset. After a close by the program, there is no reader.
    #[cold]
    fn break_writes(&mut self, shared: &Shared) {
        let is_closed = self.half.own_flags().contains(StateFlags::CLOSED);
        self.records.out.discard();
        if is_closed {
            self.half.records.closing = false;
            self.switch(shared, Input::TcpReset, 0);
            return;
        }
        self.half.records.broken = true;
        shared.end.shut_write();
        shared.wake_all();
        shared.tcp.watch_room();
    }
}
