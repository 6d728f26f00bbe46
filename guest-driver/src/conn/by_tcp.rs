// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The send side after the end of the ring: records on TCP.
//!
//! A write reports bytes as sent only if TCP has taken a part of their record, or an earlier record has
//! announced more. Otherwise the end of this process would look like the end of its stream, although
//! bytes of the stream were lost.

use std::io::{self, IoSlice};
use std::sync::MutexGuard;

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use smc_core::carrier::Input;
use smc_core::wire::cdc::StateFlags;
use smc_core::wire::record::{HEADER_LEN, MAX_DATA, Record};

use super::send_queue::queues_are_held;
use super::{Conn, Deadline, Tx};

/// The most slices of one record, with its header.
const SLICES: usize = 64;

impl Conn {
    /// Continues a write with `done` bytes sent, after the end of the ring.
    #[cold]
    pub(super) fn send_left<'a>(
        &'a self,
        mut tx: MutexGuard<'a, Tx>,
        bufs: &[IoSlice<'_>],
        mut done: usize,
        deadline: &Deadline,
    ) -> io::Result<usize> {
        let wanted = bufs.iter().fold(0usize, |sum, buf| sum.saturating_add(buf.len()));
        loop {
            if !self.end.has_left_ring() {
                return self.send_from(tx, bufs, done, deadline);
            }
            match self.may_write(&tx) {
                Ok(()) if done < wanted => {}
                Err(error) if done == 0 => return Err(error),
                _ => return Ok(done),
            }
            self.flush_held(&mut tx);
            let n = match tx.queue.is_empty() {
                true => self.put_on_tcp(&mut tx, bufs, done, 0),
                false => 0,
            };
            let n = if n > 0 { n } else { self.hold(&mut tx, bufs, done, false) };
            if n > 0 {
                done += n;
                continue;
            }
            // The attempt may have found the connection over.
            if let Err(error) = self.may_write(&tx) {
                return if done > 0 { Ok(done) } else { Err(error) };
            }
            if self.options.is_nonblocking() {
                self.waiting.set_write_blocked(true);
                drop(tx);
                self.sync_readiness();
                return if done > 0 { Ok(done) } else { Err(io::ErrorKind::WouldBlock.into()) };
            }
            drop(tx);
            let waited = self.await_turn_on_tcp(deadline, Tx::has_room_on_tcp);
            tx = self.tx();
            if let Err(error) = waited {
                return if done > 0 { Ok(done) } else { Err(error) };
            }
        }
    }

    /// Continues with an urgent byte, after the end of the ring.
    #[cold]
    pub(super) fn send_urgent_left<'a>(
        &'a self,
        mut tx: MutexGuard<'a, Tx>,
        byte: u8,
        deadline: &Deadline,
    ) -> io::Result<()> {
        loop {
            if !self.end.has_left_ring() {
                drop(tx);
                return self.send_urgent_byte(byte, deadline);
            }
            self.may_write(&tx)?;
            self.flush_held(&mut tx);
            if tx.queue.is_empty() && self.put_urgent_on_tcp(&mut tx, byte) {
                return Ok(());
            }
            self.may_write(&tx)?;
            if self.hold(&mut tx, &[IoSlice::new(&[byte])], 0, true) > 0 {
                return Ok(());
            }
            drop(tx);
            if self.options.is_nonblocking() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            self.await_turn_on_tcp(deadline, |tx| {
                let may_send = tx.change.as_ref().is_some_and(|change| change.may_send_urgent());
                tx.queue.is_empty() && may_send
            })?;
            tx = self.tx();
        }
    }

    /// Waits until a record may be sent, or this end writes no more.
    fn await_turn_on_tcp(
        &self,
        deadline: &Deadline,
        may_send: impl Fn(&Tx) -> bool,
    ) -> io::Result<()> {
        self.wait_as(deadline, true, || {
            let ends = self.end.is_write_shut() || !self.end.has_left_ring();
            ends || may_send(&self.tx())
        })
    }

    /// Sends bytes of the slices from byte `skip` on as one record. Of these, `promised` bytes were
    /// already reported to the program as sent. Returns the number of bytes; 0: there is no room.
    pub(super) fn put_on_tcp(
        &self,
        tx: &mut Tx,
        bufs: &[IoSlice<'_>],
        mut skip: usize,
        promised: usize,
    ) -> usize {
        if !tx.change.as_ref().is_some_and(|change| change.may_send()) {
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
        let header = Record::Data { at: tx.total, len: len as u32, more }.header();
        let mut out: Vec<IoSlice<'_>> = vec![IoSlice::new(&header)];
        out.extend(slices.iter().map(|bytes| IoSlice::new(bytes)));
        let taken = self.write_tcp(&out, SendFlags::empty());
        let Some(change) = &mut tx.change else { return 0 };
        match taken {
            Ok(0) => {
                change.sending.blocked = true;
                0
            }
            Ok(mut taken) => {
                for slice in &out {
                    let rest = slice.get(taken.min(slice.len())..).unwrap_or_default();
                    taken -= taken.min(slice.len());
                    change.sending.out.push(rest);
                }
                tx.total += len as u64;
                tx.deliveries += 1;
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
        if !tx.change.as_ref().is_some_and(|change| change.may_send_urgent()) {
            return false;
        }
        let mark = Record::Urgent { at: tx.total + 1 }.header();
        let data = Record::Data { at: tx.total, len: 1, more: false }.header();
        let mut bytes = [0; 2 * HEADER_LEN + 1];
        for (to, from) in bytes.iter_mut().zip(mark.into_iter().chain(data).chain([byte])) {
            *to = from;
        }
        let taken = self.write_tcp(&[IoSlice::new(&bytes)], SendFlags::empty());
        let Some(change) = &mut tx.change else { return false };
        match taken {
            // A mark alone says nothing of a following byte.
            Ok(0) => {
                change.sending.blocked = true;
                false
            }
            Ok(taken) => {
                change.way_back.note_mark();
                change.sending.out.push(bytes.get(taken..).unwrap_or_default());
                tx.total += 1;
                tx.deliveries += 1;
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
        let ends = tx.ends_tcp_first();
        let more = if ends { SendFlags::MORE } else { SendFlags::empty() };
        loop {
            let Some(change) = &mut tx.change else { return };
            if change.sending.broken {
                return change.sending.out.discard();
            }
            if change.sending.out.is_empty() {
                if has_waited {
                    // A writer may have found no room behind these records.
                    self.waiting.note_room_on_tcp();
                }
                if std::mem::take(&mut change.sending.closing) {
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
            let (first, second) = change.sending.out.slices();
            match self.write_tcp(&[IoSlice::new(first), IoSlice::new(second)], more) {
                Ok(0) => {
                    change.sending.blocked = true;
                    return;
                }
                Ok(taken) => change.sending.out.take(taken),
                Err(_) => return self.break_writes(tx),
            }
        }
    }

    /// TCP was reset, as found by a write. As on TCP, earlier arrivals can still be read before the
    /// reset. After a close by the program, there is no reader.
    #[cold]
    fn break_writes(&self, tx: &mut Tx) {
        let is_closed = (tx.close.flags() | tx.close.pending()).contains(StateFlags::CLOSED);
        let Some(change) = &mut tx.change else { return };
        change.sending.out.discard();
        if is_closed {
            change.sending.closing = false;
            self.change(tx, Input::TcpReset, 0);
            return;
        }
        change.sending.broken = true;
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
