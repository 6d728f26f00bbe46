// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Records as packets of TCP, in a file of pcapng.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use guest_driver::statistics::{Direction, Record};

use super::owners::Users;
use super::packets::{self, FIN_ACK, PUSH_ACK, packet};
use crate::output::printable_line;
use crate::proc_files::program;

/// Sequence number of the first byte.
const FIRST: u32 = 1;

/// How long to keep an idle connection that is over or unconfirmed by the kernel.
const KEPT: Duration = Duration::from_secs(10);
/// Limit of the remembered connections.
const MAX_FLOWS: usize = 100_000;
/// Limits, in bytes, of the data kept to recognize repetitions: per direction, as much as may wait
/// for the kernel's answer, and in total.
const MAX_WRITTEN: usize = super::owners::MAX_HELD;
const MAX_ALL_WRITTEN: usize = 16 << 20;
/// The first bytes of a direction, kept to tell a late report from a new connection.
const FIRST_BYTES: usize = 32;

/// Writes a capture.
pub(super) struct Writer<W> {
    out: W,
    /// Interfaces so far.
    count: u32,
    /// Numbers of interfaces, by process.
    interfaces: HashMap<u32, u32>,
    users: Users,
    /// By the ends of a connection.
    flows: HashMap<[SocketAddr; 2], Flow>,
    /// Bytes kept in the flows since the last clearing.
    kept: usize,
    next_sweep: Instant,
}

/// A connection, and the processes reporting the connection. If both ends are captured, each end
/// reports the same bytes, perhaps after the end of the other process.
struct Flow {
    /// The process whose records are written.
    owner: u32,
    /// The kernel has confirmed the owner.
    is_own: bool,
    /// The next sequence numbers: the owner's, and its peer's.
    next: [u32; 2],
    /// The owner has ended the connection.
    has_ended: bool,
    /// When the last record came.
    at: Instant,
    /// The other process, and the directions reported from their beginning.
    other: Option<(u32, [bool; 2])>,
    /// The directions, by their senders.
    written: [Written; 2],
}

/// The bytes of a direction in the file.
#[derive(Default)]
struct Written {
    /// The first bytes of the connection.
    first: Vec<u8>,
    /// Place of the first byte of `bytes`.
    begin: u64,
    /// The last bytes, until the kernel confirms an owner.
    bytes: Vec<u8>,
    has_ended: bool,
}

impl Written {
    /// How many bytes of a record are in the file already; `None`: all, and the end, too.
    fn known(&self, record: &Record) -> Option<usize> {
        let at = usize::try_from(record.place.wrapping_sub(self.begin)).unwrap_or(usize::MAX);
        let Some(known) = self.bytes.get(at..) else { return Some(0) };
        let n = known.len().min(record.bytes.len());
        if known.get(..n) != record.bytes.get(..n) {
            return Some(0);
        }
        let has_all = n == record.bytes.len() && (self.has_ended || !record.is_last);
        (!has_all).then_some(n)
    }

    /// Whether a record of the connection's first bytes has other bytes.
    fn begins_otherwise(&self, record: &Record) -> bool {
        let n = self.first.len().min(record.bytes.len());
        n == 0 || self.first.get(..n) != record.bytes.get(..n)
    }

    /// Notes a record whose first bytes are in the file already.
    fn add(&mut self, record: &Record, known: usize) {
        let place = record.place.wrapping_add(known as u64);
        let bytes = record.bytes.get(known..).unwrap_or_default();
        if place != self.begin.wrapping_add(self.bytes.len() as u64) {
            (self.begin, self.bytes) = (place, Vec::new());
        }
        self.bytes.extend(bytes);
        let old = self.bytes.len().saturating_sub(MAX_WRITTEN);
        self.bytes.drain(..old);
        self.begin = self.begin.wrapping_add(old as u64);
        self.has_ended |= record.is_last;
    }

    fn note_first(&mut self, record: &Record) {
        if record.place == self.first.len() as u64 {
            let room = FIRST_BYTES.saturating_sub(self.first.len());
            self.first.extend(record.bytes.iter().take(room));
        }
    }

    fn forget_last(&mut self) {
        (self.begin, self.bytes, self.has_ended) = Default::default();
    }
}

/// The end sending the bytes of a record: the same number at both ends.
fn sender(record: &Record) -> usize {
    usize::from((record.local < record.peer) == (record.direction == Direction::Received))
}

impl Flow {
    /// The flow of the first process to report a connection.
    fn first(owner: u32, is_own: bool) -> Flow {
        let (next, at, written) = ([FIRST; 2], Instant::now(), Default::default());
        Flow { owner, is_own, next, has_ended: false, at, other: None, written }
    }

    /// How many bytes of a record are in the file already; `None`: nothing is to be written. `hides`:
    /// the owner and the process are of one user.
    fn known(&mut self, (pid, is_own): (u32, bool), record: &Record, hides: bool) -> Option<usize> {
        self.at = Instant::now();
        if pid != self.owner && self.is_another_connection(pid, record) {
            *self = Flow::first(pid, is_own);
        }
        let known = self.way(record).known(record)?;
        if pid != self.owner {
            // An owner confirmed by the kernel hides the records of others. Without confirmation,
            // the owner hides unconfirmed records of the same user.
            if self.is_own || hides && !is_own {
                return None;
            }
            let written = std::mem::take(&mut self.written);
            *self = Flow { written, ..Flow::first(pid, is_own) };
        }
        self.is_own |= is_own;
        self.has_ended |= record.is_last;
        self.way(record).note_first(record);
        match self.is_own {
            true => self.written.iter_mut().for_each(Written::forget_last),
            false => self.way(record).add(record, known),
        }
        Some(known)
    }

    fn way(&mut self, record: &Record) -> &mut Written {
        let [first, second] = &mut self.written;
        if sender(record) == 0 { first } else { second }
    }

    /// Whether the other process reports a new connection with the same ports.
    fn is_another_connection(&mut self, pid: u32, record: &Record) -> bool {
        if record.place != 0 || record.is_last {
            return false;
        }
        let (_, told) = self.other.filter(|(other, _)| *other == pid).unwrap_or((pid, [false; 2]));
        let way = usize::from(record.direction == Direction::Received);
        // A process reports each beginning once. The first report of another process may be a late
        // one: of the same bytes, or from the middle of the connection.
        let is_first = told == [false; 2] && record.direction == Direction::Sent;
        let has_begun = told.get(way) == Some(&true);
        if self.has_ended && (has_begun || is_first && self.way(record).begins_otherwise(record)) {
            return true;
        }
        let mut told = told;
        told.iter_mut().skip(way).take(1).for_each(|told| *told = true);
        self.other = Some((pid, told));
        false
    }
}

impl<W: Write> Writer<W> {
    /// Begins the file.
    ///
    /// # Errors
    /// Errors of `out`.
    pub(super) fn new(mut out: W) -> io::Result<Writer<W>> {
        packets::begin(&mut out)?;
        let (interfaces, users, flows) = Default::default();
        let next_sweep = Instant::now() + KEPT;
        Ok(Writer { out, count: 0, interfaces, users, flows, kept: 0, next_sweep })
    }

    /// # Errors
    /// Errors of `out`.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn interface(&mut self, pid: u32) -> io::Result<u32> {
        if let Some(number) = self.interfaces.get(&pid) {
            return Ok(*number);
        }
        let number = self.count;
        self.count += 1;
        let name = format!("{} {pid}", printable_line(&program(pid)));
        packets::interface(&mut self.out, &name)?;
        self.interfaces.insert(pid, number);
        Ok(number)
    }

    /// Forgets a process after its last record.
    pub(super) fn forget(&mut self, pid: u32) {
        self.interfaces.remove(&pid);
        self.users.forget(pid);
        // The other end may still report the same bytes.
        for flow in self.flows.values_mut().filter(|flow| flow.owner == pid) {
            flow.has_ended = true;
        }
    }

    /// Forgets connections that are over or unconfirmed.
    fn sweep(&mut self) {
        let is_full = self.flows.len() >= MAX_FLOWS;
        if !is_full && Instant::now() < self.next_sweep {
            return;
        }
        self.next_sweep = Instant::now() + KEPT;
        self.flows.retain(|_, flow| {
            let is_idle = flow.at.elapsed() >= KEPT;
            flow.is_own && !flow.has_ended || !is_idle && !is_full
        });
        if self.flows.len() >= MAX_FLOWS {
            self.flows.clear();
        }
    }

    /// How many bytes of a record are in the file already; `None`: nothing is to be written. By default
    /// the records of the first reporting process are written.
    fn known(&mut self, (pid, is_own): (u32, bool), record: &Record) -> Option<usize> {
        self.sweep();
        let mut ends = [record.local, record.peer];
        ends.sort();
        self.kept += record.bytes.len();
        if self.kept > MAX_ALL_WRITTEN {
            for flow in self.flows.values_mut() {
                flow.written.iter_mut().for_each(Written::forget_last);
            }
            self.kept = 0;
        }
        let flow = self.flows.entry(ends).or_insert_with(|| Flow::first(pid, is_own));
        let hides = pid != flow.owner && self.users.is_same(pid, flow.owner);
        flow.known((pid, is_own), record, hides)
    }

    /// Writes a record of a process. `is_own`: the kernel has confirmed the connection of the
    /// process.
    ///
    /// # Errors
    /// Errors of `out`.
    pub(super) fn record(&mut self, pid: u32, is_own: bool, record: &Record) -> io::Result<()> {
        let Some(known) = self.known((pid, is_own), record) else { return Ok(()) };
        let bytes = record.bytes.get(known..).unwrap_or_default();
        let interface = self.interface(pid)?;
        let mut key = [record.local, record.peer];
        key.sort();
        let Some(Flow { next, .. }) = self.flows.get_mut(&key) else { return Ok(()) };
        let way = usize::from(record.direction == Direction::Received);
        // Sequence numbers are counted round and round.
        let sequence = FIRST.wrapping_add(record.place as u32).wrapping_add(known as u32);
        let after = sequence.wrapping_add(bytes.len() as u32);
        let [own, peers] = *next;
        *next = if way == 0 { [after, peers] } else { [own, after] };
        let acknowledged = if way == 0 { peers } else { own };
        let ends = match record.direction {
            Direction::Sent => (record.local, record.peer),
            Direction::Received => (record.peer, record.local),
        };
        let flags = if record.is_last { FIN_ACK } else { PUSH_ACK };
        let Some(packet) = packet(ends, (sequence, acknowledged), flags, bytes) else {
            return Ok(());
        };
        packets::write(&mut self.out, interface, record.time, &packet)
    }
}

#[cfg(test)]
mod tests {
    use super::Direction::{Received, Sent};
    use super::*;

    fn is_for(writer: &mut Writer<Vec<u8>>, process: (u32, bool), record: &Record) -> bool {
        writer.known(process, record).is_some()
    }

    const SERVER: u32 = u32::MAX - 1;
    const CLIENT: u32 = u32::MAX;

    /// A record of the server or of a client. Empty text: the end of data.
    fn record(pid: u32, direction: Direction, place: u64, text: &str) -> Record {
        let [a, b] = ["192.0.2.1:80", "192.0.2.2:81"].map(|end| end.parse().unwrap());
        let (local, peer) = if pid == SERVER { (a, b) } else { (b, a) };
        let (is_last, bytes) = (text.is_empty(), text.as_bytes().to_vec());
        Record { direction, is_last, local, peer, time: 10, place, bytes }
    }

    /// Writes records, each with the number of its bytes in the file already; `None`: hidden.
    fn expect(is_own: bool, records: &[(u32, Direction, u64, &str, Option<usize>)]) {
        let mut writer = Writer::new(Vec::new()).unwrap();
        for (n, &(pid, direction, place, text, known)) in records.iter().enumerate() {
            let record = record(pid, direction, place, text);
            assert_eq!(writer.known((pid, is_own), &record), known, "{n}: {record:?}");
        }
    }

    #[test]
    fn a_connection_whose_ends_are_both_captured_is_written_once() {
        expect(
            true,
            &[
                (SERVER, Received, 0, "GET", Some(0)),
                (CLIENT, Sent, 0, "GET", None),
                (SERVER, Sent, 0, "200 OK", Some(0)),
                (SERVER, Sent, 6, "", Some(0)),
                // The end comes later here.
                (CLIENT, Received, 0, "200 OK", None),
                (CLIENT, Sent, 3, "", None),
                // The ports are used again.
                (CLIENT, Sent, 0, "GET", Some(0)),
                (SERVER, Received, 0, "GET", None),
            ],
        );
    }

    #[test]
    fn a_connection_that_has_ended_at_one_end_is_not_written_again_for_the_other() {
        let ended = [
            (SERVER, Received, 0, "GET", Some(0)),
            (SERVER, Sent, 0, "200 OK", Some(0)),
            (SERVER, Sent, 6, "", Some(0)),
        ];
        let late = [
            (CLIENT, Sent, 0, "GET", None),
            (CLIENT, Received, 0, "200", None),
            (CLIENT, Received, 3, " OK", None),
            (CLIENT, Received, 6, "", None),
            (CLIENT, Sent, 0, "PUT", Some(0)),
        ];
        expect(true, &[&ended[..], &late].concat());
        // The capture of the client begins with the answer, or in its middle.
        for (place, text) in [(0, "200 OK"), (0, "OK")] {
            expect(true, &[&ended[..], &[(CLIENT, Received, place, text, None)]].concat());
        }
        // Another client with the same port.
        expect(true, &[&ended[..], &[(CLIENT - 2, Sent, 0, "PUT", Some(0))]].concat());
    }

    #[test]
    fn records_that_end_elsewhere_than_those_of_the_other_end_repeat_no_byte() {
        expect(
            false,
            &[
                (CLIENT, Sent, 0, "GET", Some(0)),
                (CLIENT, Received, 0, "20", Some(0)),
                (SERVER, Received, 0, "GET", None),
                (SERVER, Sent, 0, "200 ", Some(2)),
                (CLIENT, Received, 2, "0 OK", Some(2)),
                (SERVER, Sent, 4, "OK", None),
                (SERVER, Sent, 6, "", Some(0)),
                (CLIENT, Received, 6, "", None),
            ],
        );
    }

    #[test]
    fn who_tells_first_hides_nothing_of_one_that_has_the_connection() {
        let [a, b] = ["192.0.2.1:80", "192.0.2.2:81"].map(|end| end.parse().unwrap());
        let record = |n| Record {
            direction: Direction::Sent,
            is_last: false,
            local: a,
            peer: b,
            time: n,
            place: n,
            bytes: Vec::new(),
        };
        // No process has these ids, so the two are not of one user.
        let (liar, other) = (u32::MAX - 1, u32::MAX);
        let mut writer = Writer::new(Vec::new()).unwrap();
        assert!(is_for(&mut writer, (liar, false), &record(1)));
        assert!(is_for(&mut writer, (other, true), &record(2)));
        assert!(!is_for(&mut writer, (liar, false), &record(3)), "the kernel has said who has it");
        assert!(is_for(&mut writer, (other, true), &record(4)));
    }

    #[test]
    fn a_connection_that_was_over_at_once_is_written_once_whichever_user_its_ends_belong_to() {
        expect(
            false,
            &[
                (SERVER, Received, 0, "GET", Some(0)),
                (SERVER, Sent, 0, "200 ", Some(0)),
                (SERVER, Sent, 4, "OK", Some(0)),
                (SERVER, Sent, 6, "", Some(0)),
                (CLIENT, Sent, 0, "GET", None),
                // The ends have other records of the same bytes.
                (CLIENT, Received, 0, "20", None),
                (CLIENT, Received, 2, "0 OK", None),
                (CLIENT, Received, 6, "", None),
                // The server did not say so.
                (CLIENT, Sent, 3, "", Some(0)),
            ],
        );
        // Different bytes of a process hide nothing.
        expect(false, &[(SERVER, Received, 0, "PUT", Some(0)), (CLIENT, Sent, 0, "GET", Some(0))]);
    }

    #[test]
    fn connections_that_nobody_has_are_forgotten() {
        let mut writer = Writer::new(Vec::new()).unwrap();
        for n in 0..2 * MAX_FLOWS as u32 {
            let local = SocketAddr::new(n.to_be_bytes().into(), 7);
            let (direction, bytes) = (Direction::Sent, vec![0]);
            let record =
                Record { direction, is_last: false, local, peer: local, time: 1, place: 0, bytes };
            assert!(is_for(&mut writer, (7, n == 0), &record));
        }
        assert!(writer.flows.len() <= MAX_FLOWS);
        assert!(writer.flows.values().any(|flow| flow.is_own), "an open one is kept");
    }
}
