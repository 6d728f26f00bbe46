//! One connection as links see it: where its messages go, and what was heard of the peer.
//!
//! Rules kept here: LG-29, RMB-23, CDC-24.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use smc_core::link_group::{LinkKey, PeerRmbId};
use smc_core::wire::Cursor;
use smc_core::wire::cdc::{ConsumerWord, StateFlags};

use super::buffers::Mirror;
use super::link::{Link, NotPosted, Path};
use super::outbound::Outbound;
use super::spans::Shape;
use super::words::Words;
use crate::sys::lock;
use crate::verbs::Mr;

/// Why an SMC-R delivery failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SmcrSendError {
    /// The connection or its last link is gone. Later deliveries fail, too.
    Failed,
    /// A piece does not lie in the peer's element; nothing was delivered.
    Range {
        /// Offset of the piece, bytes.
        offset: u32,
        /// Its length, bytes.
        len: usize,
        /// Length of the element, bytes.
        element_len: u32,
    },
}

/// A link that has little room for messages, after a connection has posted on it.
#[derive(Debug)]
pub(crate) enum Congestion {
    /// The messages were posted. It is time to poll send completions.
    Short(Arc<Link>),
    /// There was no room for a message.
    Full(Arc<Link>),
}

/// The peer's element.
#[derive(Debug)]
pub(crate) struct Target {
    /// Its RMB.
    pub(crate) rmb: PeerRmbId,
    /// Where the element begins in the RMB, bytes.
    pub(crate) offset: u64,
    /// Its form.
    pub(crate) shape: Shape,
    /// The peer's alert token.
    pub(crate) token: u32,
}

/// The sending side.
#[derive(Debug)]
struct Out {
    outbound: Outbound,
    target: Target,
    mirror: Arc<Mirror>,
    /// `None` between two links.
    path: Option<Path>,
    hush: Hush,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Endpoint {
    /// The own alert token.
    token: u32,
    /// Number of its group.
    group: u32,
    words: Words,
    out: Mutex<Option<Out>>,
    failed: AtomicBool,
    /// The last words were told, or are about to be.
    released: AtomicBool,
    failovers: AtomicU32,
}

impl Endpoint {
    /// A connection that has no peer yet.
    /// Cursors start at `start`.
    pub(crate) fn new(token: u32, group: u32, start: Cursor) -> Arc<Endpoint> {
        Arc::new(Endpoint {
            token,
            group,
            words: Words::starting_at(start),
            out: Mutex::new(None),
            failed: AtomicBool::new(false),
            released: AtomicBool::new(false),
            failovers: AtomicU32::new(0),
        })
    }

    /// What the peer calls it.
    #[inline]
    pub(crate) fn token(&self) -> u32 {
        self.token
    }

    /// The number of its group in this process.
    #[inline]
    pub(crate) fn group(&self) -> u32 {
        self.group
    }

    /// What the peer says.
    #[inline]
    pub(crate) fn words(&self) -> &Words {
        &self.words
    }

    fn out(&self) -> MutexGuard<'_, Option<Out>> {
        lock(&self.out)
    }

    /// From now on it writes into the peer's element.
    pub(crate) fn open(&self, target: Target, mirror: Arc<Mirror>, path: Path) {
        let outbound = Outbound::new(target.shape, target.token);
        *self.out() =
            Some(Out { outbound, target, mirror, path: Some(path), hush: Hush::default() });
    }

    /// It works no more, and nothing is sent for it.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    /// The last words are told now: the peer may give its element to another connection.
    pub(crate) fn release(&self) {
        self.released.store(true, Ordering::Release);
    }

    /// Leaves this element to another connection: if it wrote into it until now (`true`), it works
    /// no more.
    pub(crate) fn yields(&self, target: &Target) -> bool {
        let same = |out: &Out| out.target.rmb == target.rmb && out.target.offset == target.offset;
        // Under this lock, nothing is posted meanwhile.
        let out = self.out();
        let writes = !self.released.load(Ordering::Acquire) && !self.has_failed();
        let yields = writes && out.as_ref().is_some_and(same);
        if yields {
            self.fail();
        }
        yields
    }

    /// A link is about to be no more. Returns the registration of the send element with it.
    pub(crate) fn forget_link(&self, link: LinkKey) -> Option<Arc<Mr>> {
        let mut guard = self.out();
        let out = guard.as_mut()?;
        // One that did not find another link.
        out.path.take_if(|path| path.link.key() == link);
        out.mirror.forget(link)
    }

    /// Whether it works no more.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Copies the pieces into the send element and tells the words, now or as soon as there is
    /// room. Without `signal` the words wait for those that follow.
    ///
    /// The caller [makes room](super::shared::Shared::make_room) on a link that is returned.
    #[inline]
    pub(crate) fn deliver(
        &self,
        pieces: &[(u32, &[u8])],
        words: [u64; 2],
        signal: bool,
    ) -> Result<Option<Congestion>, SmcrSendError> {
        let mut guard = self.out();
        let Some(out) = guard.as_mut().filter(|_| !self.has_failed()) else {
            return Err(SmcrSendError::Failed);
        };
        for (offset, bytes) in pieces {
            let element_len = out.target.shape.len();
            if u64::from(*offset) + bytes.len() as u64 > u64::from(element_len) {
                return Err(SmcrSendError::Range {
                    offset: *offset,
                    len: bytes.len(),
                    element_len,
                });
            }
            let memory = out.mirror.memory();
            memory.copy_in(*offset as usize, bytes).map_err(|_| SmcrSendError::Failed)?;
        }
        out.outbound.tell(words);
        Ok(if signal { post(out) } else { None })
    }

    /// Called every second. After a failover the peer may hold bytes back until what it sent on the
    /// link that was lost completes, which takes a while, or for ever: AF_SMC does so with less than
    /// half of its send buffer, and soft-RoCE as it is used there never gives up. Asked for its cursor
    /// (R), it lets go of them.
    /// The caller makes room on a link that is returned.
    pub(crate) fn coax(&self) -> Option<Congestion> {
        let peer = ConsumerWord::from_u64(self.words.load()[1]);
        let over = self.released.load(Ordering::Acquire) || !peer.state_flags.is_empty();
        if over || !self.has_moved() {
            return None;
        }
        let mut guard = self.out();
        let out = guard.as_mut().filter(|_| !self.has_failed())?;
        if !out.hush.is_time(self.words.last()) {
            return None;
        }
        out.outbound.ask();
        post(out)
    }

    /// Sends what is due. The link, if it has little room or none.
    pub(crate) fn flush(&self) -> Option<Congestion> {
        let mut guard = self.out();
        post(guard.as_mut().filter(|_| !self.has_failed())?)
    }

    /// As [`Endpoint::flush`]. If there is no room, the link has the token of this connection from
    /// now on and returns it when there may be some.
    pub(crate) fn flush_or_wait(&self) -> Option<Congestion> {
        let mut guard = self.out();
        let congestion = post(guard.as_mut().filter(|_| !self.has_failed())?);
        if let Some(Congestion::Full(link)) = &congestion {
            link.wait(self.token);
        }
        congestion
    }

    /// The link that it uses.
    pub(crate) fn link(&self) -> Option<Arc<Link>> {
        self.out().as_ref()?.path.as_ref().map(|path| path.link.clone())
    }

    /// The peer's RMB.
    pub(crate) fn target(&self) -> Option<(PeerRmbId, u32)> {
        self.out().as_ref().map(|out| (out.target.rmb, out.target.token))
    }

    /// Keys of the peer's RMB, for people: on the link in use.
    pub(crate) fn peer_rkey(&self) -> Option<u32> {
        self.out().as_ref()?.path.as_ref().map(|path| path.rkey.0)
    }

    /// Whether either end of it has gone over to another link.
    pub(crate) fn has_moved(&self) -> bool {
        self.failovers() != 0 || self.words.has_moved()
    }

    /// How often it went over to another link.
    pub(crate) fn failovers(&self) -> u32 {
        self.failovers.load(Ordering::Relaxed)
    }

    /// Whether everything that was told is with the peer's adapter.
    pub(crate) fn is_quiet(&self) -> bool {
        let guard = self.out();
        let Some(out) = guard.as_ref().filter(|_| !self.has_failed()) else { return true };
        let Some(path) = &out.path else { return false };
        let last = out.outbound.last();
        out.outbound.plan().is_none() && path.link.unacknowledged(out.target.token, last).is_none()
    }

    /// Comes back when no message is being posted that did not see the link [held](Link::hold).
    pub(crate) fn settle(&self) {
        // Messages are posted under this lock.
        drop(self.out());
    }

    /// Leaves the link `from`, if it uses that: nothing is posted until [`Endpoint::arrive`].
    /// `false`: it does not use it, or has no use for another one.
    pub(crate) fn depart(&self, from: LinkKey) -> bool {
        let mut guard = self.out();
        let Some(out) = guard.as_mut() else { return false };
        let Some(path) = out.path.take_if(|path| path.link.key() == from) else { return false };
        let last = out.outbound.last();
        let oldest = path.link.unacknowledged(out.target.token, last);
        if self.released.load(Ordering::Acquire) && oldest.is_none() && !out.outbound.is_due() {
            // The peer has the last words; its element may be another connection's by now.
            self.fail();
            return false;
        }
        let peer = ConsumerWord::from_u64(self.words.load()[1]);
        if peer.state_flags.contains(StateFlags::ABORT) {
            // It answers nothing any more, and its element may be another connection's.
            self.fail();
            return false;
        }
        let arrived = oldest.map_or(last, |oldest| oldest.wrapping_sub(1));
        // Who has closed reads nothing any more: no byte is written anew.
        let closed = peer.state_flags.contains(StateFlags::CLOSED);
        let confirmed = if closed { out.outbound.produced() } else { peer.cursor };
        out.outbound.move_on(arrived, confirmed);
        true
    }

    /// The peer's RMB and the send element, which the next link needs to know, of one that is
    /// between two links and works.
    pub(crate) fn between_links(&self) -> Option<(PeerRmbId, Arc<Mirror>)> {
        let guard = self.out();
        let out = guard.as_ref().filter(|out| out.path.is_none() && !self.has_failed())?;
        Some((out.target.rmb, out.mirror.clone()))
    }

    /// Goes on over another link: a validation, then what the peer has not confirmed.
    /// The caller [flushes](super::shared::Shared::flush) it.
    pub(crate) fn arrive(&self, mut path: Path) {
        if let Some(out) = self.out().as_mut() {
            path.address = path.address.wrapping_add(out.target.offset);
            out.path = Some(path);
            self.failovers.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The send element is not needed any more.
    pub(crate) fn close(&self) -> Option<Arc<Mirror>> {
        self.out().take().map(|out| out.mirror)
    }
}

/// For how long a peer has said nothing.
#[derive(Debug, Default)]
struct Hush {
    /// Number of the last message at the last look.
    last: u16,
    /// Looks since it came.
    looks: u32,
}

impl Hush {
    /// Whether this is a look at which the peer is asked: the first after a message, and then after
    /// twice the time each, but once in [`Hush::LONGEST`] looks.
    fn is_time(&mut self, last: u16) -> bool {
        if last != self.last {
            *self = Hush { last, looks: 0 };
        }
        self.looks = self.looks.saturating_add(1);
        self.looks.is_power_of_two() || self.looks.is_multiple_of(Hush::LONGEST)
    }

    const LONGEST: u32 = 64;
}

/// Posts what is due. The link, if it has little room or none.
#[inline]
fn post(out: &mut Out) -> Option<Congestion> {
    // Without a path, and on a dead link, it is due until the group has found another one.
    let path = out.path.as_ref()?;
    while let Some(plan) = out.outbound.plan() {
        match path.link.post(path, out.target.token, &plan) {
            Ok(()) => out.outbound.posted(&plan),
            Err(NotPosted::Dead) => return None,
            Err(NotPosted::NoRoom) => return Some(Congestion::Full(path.link.clone())),
        }
    }
    path.link.is_short().then(|| Congestion::Short(path.link.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::smcr::buffers::mirror;

    const LEN: u32 = 16 << 10;

    /// An element of the peer's only RMB.
    fn target(index: u32) -> Target {
        let (rmb, offset) = (PeerRmbId::default(), u64::from(index) * u64::from(LEN));
        Target { rmb, offset, shape: Shape::new(LEN, false), token: 1 }
    }

    /// A connection that writes into `target`, between two links.
    fn connection(target: Target) -> Arc<Endpoint> {
        let outbound = Outbound::new(target.shape, target.token);
        let out = Out {
            outbound,
            target,
            mirror: mirror(LEN).unwrap(),
            path: None,
            hush: Hush::default(),
        };
        Arc::new(Endpoint {
            token: 7,
            group: 0,
            words: Words::default(),
            out: Mutex::new(Some(out)),
            failed: AtomicBool::new(false),
            released: AtomicBool::new(false),
            failovers: AtomicU32::new(0),
        })
    }

    // Shows: CLC-37, RMB-23.
    #[test]
    fn an_element_that_is_offered_again_ends_the_connection_that_uses_it() {
        let old = connection(target(1));
        assert!(old.deliver(&[(0, b"data")], [0; 2], true).is_ok());
        assert!(old.yields(&target(1)));
        assert!(matches!(old.deliver(&[(0, b"data")], [0; 2], true), Err(SmcrSendError::Failed)));
        // A third connection finds nobody there but the second one.
        assert!(!old.yields(&target(1)));
    }

    // Shows: CDC-24.
    #[test]
    fn a_silent_peer_is_asked_ever_more_seldom() {
        let mut hush = Hush::default();
        let asked =
            |hush: &mut Hush, last, looks: u32| (1..=looks).filter(|_| hush.is_time(last)).count();
        assert_eq!(asked(&mut hush, 7, 1), 1);
        assert_eq!(asked(&mut hush, 7, 15), 4);
        assert_eq!(asked(&mut hush, 7, 16 + 32), 2);
        assert_eq!(asked(&mut hush, 7, 60), 0);
        assert_eq!(asked(&mut hush, 7, 4), 1);
        assert_eq!(asked(&mut hush, 8, 2), 2);
    }

    // Shows: CLC-37, RMB-23.
    #[test]
    fn neighbours_are_other_elements() {
        let old = connection(target(1));
        assert!(!old.yields(&target(0)));
        assert!(!old.yields(&target(2)));
        assert!(old.deliver(&[(0, b"data")], [0; 2], true).is_ok());
    }

    // Shows: RMB-23.
    #[test]
    fn a_connection_that_has_told_its_end_yields_nothing() {
        let old = connection(target(0));
        old.release();
        assert!(!old.yields(&target(0)));
        // Its last words may still be on the way.
        assert!(!old.has_failed());
    }
}
