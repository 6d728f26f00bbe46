// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! DMBs and their tokens.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hint::black_box;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard};

use virtio_ism_abi::{Gid, Token};

use super::session::DeviceSession;
use super::slab::SlabRange;
use super::sync::{lock, read, write};
use super::wake_slot::DmbSignalSlot;

/// A DMB: memory of one owner, writable by one user.
#[derive(Debug)]
pub(super) struct Dmb {
    pub(super) token: Token,
    pub(super) owner: Arc<DeviceSession>,
    pub(super) user: Gid,
    /// The owner's number for the DMB.
    pub(super) idx: u32,
    /// Bytes.
    pub(super) len: u32,
    pub(super) backing: Backing,
    /// Whether the DMB is registered. Moves hold the read side while copying; unregistering takes the write
    /// side, and so waits for running moves. No other code may take the write side: a guest can delay a copy
    /// into its memory.
    registered: RwLock<bool>,
    /// The sessions with this DMB attached; `None` once their DMB_GONE is queued.
    attached: Mutex<Option<Vec<Arc<DeviceSession>>>>,
    /// Window: users with the DMB in their own window, able to raise its line themselves.
    pub(super) mapped_users: AtomicU32,
}

/// Location of a DMB's bytes.
#[derive(Debug)]
pub(super) enum Backing {
    /// Memory of the owner's guest, in order. Looked up again on every move.
    Guest {
        ranges: Vec<GuestRange>,
        /// Signal state shared with the owner's pending events.
        signal: Arc<DmbSignalSlot>,
    },
    /// A slab.
    Window(SlabRange),
}

/// A piece of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GuestRange {
    /// Start within the DMB, bytes.
    pub(super) start: u32,
    /// Bytes.
    pub(super) len: u32,
    /// Guest-physical address.
    pub(super) gpa: u64,
}

impl Dmb {
    pub(super) fn new(
        token: Token,
        owner: Arc<DeviceSession>,
        user: Gid,
        idx: u32,
        len: u32,
        backing: Backing,
    ) -> Arc<Dmb> {
        Arc::new(Dmb {
            token,
            owner,
            user,
            idx,
            len,
            backing,
            registered: RwLock::new(true),
            attached: Mutex::new(Some(Vec::new())),
            mapped_users: AtomicU32::new(0),
        })
    }

    /// The range in a slab, if any.
    pub(super) fn place(&self) -> Option<&SlabRange> {
        match &self.backing {
            Backing::Window(place) => Some(place),
            Backing::Guest { .. } => None,
        }
    }

    /// Keeps the DMB registered until the guard is dropped; `None` if no longer registered.
    pub(super) fn enter(&self) -> Option<RwLockReadGuard<'_, bool>> {
        Some(read(&self.registered)).filter(|registered| **registered)
    }

    /// Adds a user to be told of the DMB's end; `false` if the DMB has ended. Waits for no move.
    pub(super) fn attach_session(&self, user: &Arc<DeviceSession>) -> bool {
        let mut attached = lock(&self.attached);
        if let Some(sessions) = &mut *attached {
            sessions.push(user.clone());
        }
        attached.is_some()
    }

    /// Removes a user. Waits for no move.
    pub(super) fn detach_session(&self, user: &Arc<DeviceSession>) {
        if let Some(sessions) = &mut *lock(&self.attached) {
            sessions.retain(|session| !Arc::ptr_eq(session, user));
        }
    }

    /// Closes the DMB: waits for running moves, admits no further move, and queues DMB_GONE for its users.
    /// With `notify_owner` also for the owner, for an end not requested by the owner.
    ///
    /// The caller holds no lock another device's thread may want: the owner of the memory can delay the
    /// awaited moves for any time.
    pub(super) fn close(&self, tokens: &Tokens, notify_owner: bool) {
        tokens.remove(self.token);
        *write(&self.registered) = false;
        let mut attached = lock(&self.attached);
        let Some(sessions) = attached.take() else { return };
        if let Backing::Guest { signal, .. } = &self.backing {
            signal.close();
        }
        // Queued with the lock held: a detaching user finds the event in its queue, not on the way there.
        for session in sessions {
            session.push_dmb_gone(self.token, self.owner.gid);
        }
        if notify_owner {
            self.owner.push_dmb_gone(self.token, self.owner.gid);
        }
    }
}

const SHARDS: usize = 16;

/// The tokens of a fabric: random numbers of 64 bits, each for one user (EISM-27). Read mostly, hence sharded
/// read-write locks.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    shards: [RwLock<HashMap<u64, Arc<Dmb>>>; SHARDS],
}

impl Tokens {
    /// Makes a token valid; `false` if already in use.
    pub(super) fn insert(&self, dmb: &Arc<Dmb>) -> bool {
        let mut shard = write(self.shard(dmb.token));
        match shard.entry(dmb.token.0) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(dmb.clone());
                true
            }
        }
    }

    pub(super) fn remove(&self, token: Token) {
        write(self.shard(token)).remove(&token.0);
    }

    /// The DMB with this token, usable by `caller` as its only user (RMB-33, EISM-28, SEC-7).
    ///
    /// An unknown number and the token of another user's DMB take the same steps: a probe, then a comparison
    /// of all bits of number and GID. On loopback, where all drivers have one GID, a DMB whose owner has the
    /// other byte order is no DMB of the caller either.
    pub(super) fn find(&self, claimed: u64, caller: &DeviceSession) -> Option<Arc<Dmb>> {
        let found = read(self.shard(Token(claimed))).get(&claimed).cloned();
        let (token, user) =
            found.as_ref().map_or((!claimed, Gid::NONE), |dmb| (dmb.token.0, dmb.user));
        let same_token = equal(&token.to_ne_bytes(), &claimed.to_ne_bytes());
        let same_user = equal(&user.0, &caller.gid.0);
        found.filter(|dmb| same_token & same_user & dmb.owner.has_order_of(caller))
    }

    pub(super) fn len(&self) -> u64 {
        self.shards.iter().map(|shard| read(shard).len() as u64).sum()
    }

    fn shard(&self, token: Token) -> &RwLock<HashMap<u64, Arc<Dmb>>> {
        // Tokens are random: any bits do.
        let [first, ..] = &self.shards;
        self.shards.get((token.0 % SHARDS as u64) as usize).unwrap_or(first)
    }
}

/// Compares without stopping at the first difference.
fn equal<const N: usize>(a: &[u8; N], b: &[u8; N]) -> bool {
    let differences = a.iter().zip(b).fold(0, |all, (x, y)| all | (x ^ y));
    black_box(differences) == 0
}

/// Cuts scatter-gather entries into ranges with their start in the DMB.
pub(super) fn ranges(entries: impl Iterator<Item = (u64, u32)>) -> Vec<GuestRange> {
    let mut start = 0;
    entries
        .map(|(gpa, len)| {
            let piece = GuestRange { start, len, gpa };
            start = start.saturating_add(len);
            piece
        })
        .collect()
}

/// The guest memory behind `[offset, offset + len)` of a DMB: addresses and lengths, in order.
pub(super) fn resolve(
    ranges: &[GuestRange],
    offset: u32,
    len: u32,
) -> impl Iterator<Item = (u64, u32)> + '_ {
    let first = ranges.partition_point(|piece| piece.start <= offset).saturating_sub(1);
    let end = offset.saturating_add(len);
    ranges
        .get(first..)
        .unwrap_or_default()
        .iter()
        .take_while(move |piece| piece.start < end)
        .filter_map(move |piece| {
            let from = piece.start.max(offset);
            let to = piece.start.saturating_add(piece.len).min(end);
            let gpa = piece.gpa.checked_add(u64::from(from - piece.start))?;
            (to > from).then(|| (gpa, to - from))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_at_the_borders_of_pieces() {
        let ranges = ranges([(0x9000, 0x1000), (0x4000, 0x2000), (0x1_0000, 0x1000)].into_iter());
        let at = |offset, len| resolve(&ranges, offset, len).collect::<Vec<_>>();
        assert_eq!(at(0, 0x1000), [(0x9000, 0x1000)]);
        assert_eq!(at(0xfff, 2), [(0x9fff, 1), (0x4000, 1)]);
        assert_eq!(at(0x1000, 8), [(0x4000, 8)]);
        assert_eq!(at(0x800, 0x3000), [(0x9800, 0x800), (0x4000, 0x2000), (0x1_0000, 0x800)]);
        assert_eq!(at(0x3fff, 1), [(0x1_0fff, 1)]);
        assert_eq!(at(0x1000, 0), []);
    }

    #[test]
    fn comparison_sees_every_byte() {
        for i in 0..16 {
            let mut other = [7; 16];
            other[i] ^= 1;
            assert!(!equal(&[7; 16], &other));
        }
        assert!(equal(&[7; 16], &[7; 16]));
    }
}
