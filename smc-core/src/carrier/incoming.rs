// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The receiving direction of an end.

use super::action::{Action, Violation};
use crate::wire::cdc::StateFlags;
use crate::wire::record::{Kind, MAX_DATA, Record};

/// Where the bytes of the peer's direction come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reading {
    /// From the own ring.
    Ring,
    /// From the own ring, up to this position: the peer has left the ring.
    Until(u64),
    /// From DATA on TCP; the next at this position.
    Tcp(u64),
}

/// The peer's direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incoming {
    reading: Reading,
    /// The ring, or the ring under negotiation, is gone: bytes up to here were saved.
    gone: Option<u64>,
    /// Bytes counted as sent by the peer.
    owed: u64,
    /// Writes of the peer's program have succeeded for more bytes than counted.
    more: bool,
    /// The flags of the peer's END, and the end of its direction.
    end: Option<(u64, StateFlags)>,
    /// The last urgent mark on TCP; 0: none.
    mark: u64,
}

impl Incoming {
    pub(super) const fn new(reading: Reading) -> Incoming {
        Incoming { reading, gone: None, owed: 0, more: false, end: None, mark: 0 }
    }

    /// Where the bytes come from.
    pub const fn reading(&self) -> Reading {
        self.reading
    }

    /// The flags of the peer's END records.
    pub const fn said(&self) -> StateFlags {
        match self.end {
            Some((_, flags)) => flags,
            None => StateFlags::empty(),
        }
    }

    /// Whether nothing is missing, should the stream of records end here.
    pub(super) const fn is_complete(&self) -> bool {
        let Reading::Tcp(at) = self.reading else { return false };
        at >= self.owed && at >= self.mark && !self.more
    }

    /// Bytes received by way of TCP, for errors.
    pub(super) const fn reached(&self) -> u64 {
        match self.reading {
            Reading::Tcp(at) => at,
            Reading::Until(_) | Reading::Ring => match self.gone {
                Some(at) => at,
                None => 0,
            },
        }
    }

    /// A new ring begins its life.
    pub(super) fn begin(&mut self) {
        self.gone = None;
    }

    /// The own ring is gone; bytes up to `saved` are in permanent memory.
    pub(super) fn ring_gone(&mut self, saved: u64) {
        self.gone.get_or_insert(saved);
    }

    /// Sends RECEIVED once the ring has its last byte.
    pub(super) fn settle(
        &mut self,
        arrived: u64,
        actions: &mut Vec<Action>,
    ) -> Result<bool, Violation> {
        let Reading::Until(left) = self.reading else { return Ok(false) };
        let arrived = self.gone.unwrap_or(arrived);
        if arrived > left {
            return Err(Violation::RingBeyondLeave { arrived, left });
        }
        if arrived < left && self.gone.is_none() {
            return Ok(false);
        }
        self.reading = Reading::Tcp(arrived);
        let received = Record::Received { at: arrived };
        actions.extend([Action::ReadTcp { from: arrived }, Action::Write(received)]);
        Ok(true)
    }

    /// LEAVE: the peer writes the ring no more.
    pub(super) fn left(&mut self, at: u64, more: bool) -> Result<(), Violation> {
        if self.reading != Reading::Ring {
            return Err(Violation::OutOfTurn(Kind::Leave));
        }
        self.check_end(Kind::Leave, at)?;
        // A ring never takes bytes back.
        if at < self.owed {
            return Err(Violation::Position { kind: Kind::Leave, got: at, expected: self.owed });
        }
        self.reading = Reading::Until(at);
        self.owed = at;
        self.more = more;
        Ok(())
    }

    /// CHANGE: later bytes are in the new ring.
    pub(super) fn changed(&mut self, at: u64, actions: &mut Vec<Action>) -> Result<(), Violation> {
        self.on_tcp(Kind::Change, at)?;
        self.settled(Kind::Change, at)?;
        self.reading = Reading::Ring;
        self.owed = at;
        self.gone = self.gone.map(|_| at);
        actions.push(Action::ReadRing { from: at });
        Ok(())
    }

    /// The header of DATA.
    pub(super) fn data(&mut self, at: u64, len: u32, more: bool) -> Result<(), Violation> {
        self.on_tcp(Kind::Data, at)?;
        let to = at + u64::from(len);
        self.check_end(Kind::Data, to)?;
        self.reading = Reading::Tcp(to);
        self.more = more;
        Ok(())
    }

    /// END: the peer's direction is complete.
    pub(super) fn ended(
        &mut self,
        at: u64,
        flags: StateFlags,
        actions: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        self.on_tcp(Kind::End, at)?;
        self.settled(Kind::End, at)?;
        self.check_end(Kind::End, at)?;
        if self.more {
            return Err(Violation::OutOfTurn(Kind::End));
        }
        let all = self.said() | flags;
        if all != self.said() {
            actions.push(Action::PeerSaid(all));
        }
        self.end = Some((at, all));
        Ok(())
    }

    /// URGENT: the byte before `at`.
    pub(super) fn marked(&mut self, at: u64, actions: &mut Vec<Action>) -> Result<(), Violation> {
        let max = match self.reading {
            Reading::Ring => return Err(Violation::OutOfTurn(Kind::Urgent)),
            Reading::Until(left) => left,
            Reading::Tcp(reached) => reached.max(self.owed).saturating_add(u64::from(MAX_DATA)),
        };
        let min = self.mark.max(1);
        if !(min..=max).contains(&at) {
            return Err(Violation::Mark { got: at, min, max });
        }
        self.check_end(Kind::Urgent, at)?;
        self.mark = at;
        actions.push(Action::Mark(at));
        Ok(())
    }

    /// Checks that the record is at the position reached by DATA.
    fn on_tcp(&self, kind: Kind, got: u64) -> Result<(), Violation> {
        match self.reading {
            Reading::Tcp(expected) if got == expected => Ok(()),
            Reading::Tcp(expected) => Err(Violation::Position { kind, got, expected }),
            _ => Err(Violation::OutOfTurn(kind)),
        }
    }

    fn settled(&self, kind: Kind, at: u64) -> Result<(), Violation> {
        let owed = self.owed;
        if at < owed { Err(Violation::StillOwed { kind, at, owed }) } else { Ok(()) }
    }

    fn check_end(&self, kind: Kind, at: u64) -> Result<(), Violation> {
        match self.end {
            Some((end, _)) if at > end => Err(Violation::BehindEnd { kind, at, end }),
            _ => Ok(()),
        }
    }
}
