// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One connection as links see it: the destination of its messages, and the words of its peer.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use smc_core::connection::{Outbound, Ring};
use smc_core::link_group::{LinkKey, PeerRmbId};
use smc_core::wire::Cursor;
use smc_core::wire::cdc::ConsumerWord;

use super::buffers::SendBuffer;
use super::link::{Link, NotPosted, Path};
use super::words::Words;
use ism_sys::{OnceBox, lock};
use smc_verbs::Mr;

/// Why an SMC-R delivery failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SmcrSendError {
    /// The connection or its last link is gone. Later deliveries fail, too.
    Failed,
    /// A piece does not lie in the peer's element; nothing was delivered.
    Range {
        /// Offset of the piece, bytes.
        offset: u32,
        /// Length of the piece, bytes.
        len: usize,
        /// Length of the element, bytes.
        element_len: u32,
    },
}

/// A link with little room for messages, after a connection has posted on it.
#[derive(Debug)]
pub(crate) enum Congestion {
    /// The messages were posted. Send completions should be polled.
    Short(Arc<Link>),
    /// There was no room for a message.
    Full(Arc<Link>),
}

/// The peer's element.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) rmb: PeerRmbId,
    /// Offset of the element in the RMB, bytes.
    pub(crate) offset: u64,
    pub(crate) ring: Ring,
    /// The peer's alert token.
    pub(crate) token: u32,
}

/// The sending side.
#[derive(Debug)]
struct Out {
    outbound: Outbound,
    target: Target,
    send_buffer: Arc<SendBuffer>,
    /// `None` between two links.
    path: Option<Path>,
    probe: ProbeBackoff,
}

/// The cause of a connection's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// No link is left.
    NoLink,
    /// The bytes or the element of the connection are damaged.
    Broken,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Endpoint {
    /// The own alert token.
    token: u32,
    /// Number of the group.
    group: u32,
    words: Words,
    out: Mutex<Option<Out>>,
    failed: AtomicBool,
    /// The cause of the failure, if relevant.
    fate: OnceBox<Fate>,
    /// The last words were sent, or are about to be.
    released: AtomicBool,
    failovers: AtomicU32,
}

impl Endpoint {
    /// A connection without a peer yet, in the group with this number. Its cursors start at `start`.
    pub(crate) fn new(token: u32, group: u32, start: Cursor) -> Arc<Endpoint> {
        Arc::new(Endpoint {
            token,
            group,
            words: Words::starting_at(start),
            out: Mutex::new(None),
            failed: AtomicBool::new(false),
            fate: OnceBox::new(),
            released: AtomicBool::new(false),
            failovers: AtomicU32::new(0),
        })
    }

    /// The alert token used by the peer.
    #[inline]
    pub(crate) fn token(&self) -> u32 {
        self.token
    }

    /// The number of the group in this process.
    #[inline]
    pub(crate) fn group(&self) -> u32 {
        self.group
    }

    /// The peer's words.
    #[inline]
    pub(crate) fn words(&self) -> &Words {
        &self.words
    }

    fn out(&self) -> MutexGuard<'_, Option<Out>> {
        lock(&self.out)
    }

    /// From now on the connection writes into the peer's element.
    pub(crate) fn open(&self, target: Target, send_buffer: Arc<SendBuffer>, path: Path) {
        let outbound = Outbound::new(target.ring, target.token);
        *self.out() = Some(Out {
            outbound,
            target,
            send_buffer,
            path: Some(path),
            probe: ProbeBackoff::default(),
        });
    }

    /// Fails the connection: no more sends.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    /// Fails the connection because no link is left. Its queue pairs are stopped, so neither bytes nor
    /// words of the peer arrive any more.
    pub(crate) fn lose_links(&self) {
        self.words.close();
        let _ = self.fate.set(Fate::NoLink);
        self.fail();
    }

    /// Fails the connection for good, on any carrier.
    pub(crate) fn break_off(&self) {
        let _ = self.fate.set(Fate::Broken);
        self.fail();
    }

    /// Whether the connection has failed because no link is left. Sent bytes may be lost then, but are
    /// still in the send buffer.
    pub(crate) fn has_lost_links(&self) -> bool {
        self.fate.get() == Some(&Fate::NoLink)
    }

    /// Copies sent bytes out of the send buffer, from an offset in the peer's element on. `false`: the
    /// range is not in the send buffer.
    pub(crate) fn copy_sent(&self, offset: u32, into: &mut [u8]) -> bool {
        let copied = |out: &Out| out.send_buffer.memory().copy_out(offset as usize, into).is_ok();
        self.out().as_ref().is_some_and(copied)
    }

    /// This end sends its last words now: afterwards the peer may give its element to another
    /// connection.
    pub(crate) fn release(&self) {
        self.released.store(true, Ordering::Release);
    }

    /// Fails the connection, and returns `true`, if it still writes into the element `target`, now
    /// given by the peer to another connection (RMB-23).
    pub(crate) fn fail_if_reused(&self, target: &Target) -> bool {
        let same = |out: &Out| out.target.rmb == target.rmb && out.target.offset == target.offset;
        // Under this lock, nothing is posted meanwhile.
        let out = self.out();
        let writes = !self.released.load(Ordering::Acquire) && !self.has_failed();
        let reused = writes && out.as_ref().is_some_and(same);
        if reused {
            self.fail();
        }
        reused
    }

    /// Detaches the connection from an ending link, and returns the link's registration of the send
    /// buffer.
    pub(crate) fn remove_link(&self, link: LinkKey) -> Option<Arc<Mr>> {
        let mut guard = self.out();
        let out = guard.as_mut()?;
        // The path of a connection already moved belongs to another link, and stays.
        out.path.take_if(|path| path.link.key() == link);
        out.send_buffer.remove_region(link)
    }

    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Copies the pieces into the send buffer and sends the words, now or as soon as there is room.
    /// Without `signal` only stores the words for the next message.
    ///
    /// The caller [makes room](super::shared::Shared::make_room) on a returned link.
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
            let element_len = out.target.ring.element_len();
            if u64::from(*offset) + bytes.len() as u64 > u64::from(element_len) {
                return Err(SmcrSendError::Range {
                    offset: *offset,
                    len: bytes.len(),
                    element_len,
                });
            }
            let memory = out.send_buffer.memory();
            memory.copy_in(*offset as usize, bytes).map_err(|_| SmcrSendError::Failed)?;
        }
        out.outbound.set_words(words);
        Ok(if signal { post(out) } else { None })
    }

    /// Asks the peer for its cursor (R) after a failover, in case the peer has stopped. The helper
    /// thread calls this every second. AF_SMC holds back less than half of its send buffer until its
    /// writes on the failed link complete, and soft-RoCE, as used by AF_SMC, never completes them. The
    /// request makes AF_SMC send. The caller makes room on a returned link.
    pub(crate) fn probe_peer(&self) -> Option<Congestion> {
        let peer = ConsumerWord::from_u64(self.words.load()[1]);
        let over = self.released.load(Ordering::Acquire) || !peer.state_flags.is_empty();
        if over || !self.has_moved() {
            return None;
        }
        let mut guard = self.out();
        let out = guard.as_mut().filter(|_| !self.has_failed())?;
        if !out.probe.is_due(self.words.last()) {
            return None;
        }
        out.outbound.request_update();
        post(out)
    }

    /// Sends pending messages. Returns the link, if there is little room or none.
    pub(crate) fn flush(&self) -> Option<Congestion> {
        let mut guard = self.out();
        post(guard.as_mut().filter(|_| !self.has_failed())?)
    }

    /// Like [`Endpoint::flush`]. Without room, the link keeps the token of this connection and returns
    /// the token when there may be some.
    pub(crate) fn flush_or_wait(&self) -> Option<Congestion> {
        let mut guard = self.out();
        let congestion = post(guard.as_mut().filter(|_| !self.has_failed())?);
        if let Some(Congestion::Full(link)) = &congestion {
            link.wait(self.token);
        }
        congestion
    }

    /// The link in use.
    pub(crate) fn link(&self) -> Option<Arc<Link>> {
        self.out().as_ref()?.path.as_ref().map(|path| path.link.clone())
    }

    /// The peer's RMB.
    pub(crate) fn target(&self) -> Option<(PeerRmbId, u32)> {
        self.out().as_ref().map(|out| (out.target.rmb, out.target.token))
    }

    /// Key of the peer's RMB on the link in use, for display.
    pub(crate) fn peer_rkey(&self) -> Option<u32> {
        self.out().as_ref()?.path.as_ref().map(|path| path.rkey.0)
    }

    /// Whether either end of the connection has moved to another link.
    pub(crate) fn has_moved(&self) -> bool {
        self.failovers() != 0 || self.words.has_moved()
    }

    /// Number of this end's moves to another link.
    pub(crate) fn failovers(&self) -> u32 {
        self.failovers.load(Ordering::Relaxed)
    }

    /// Whether the peer's adapter has acknowledged all messages.
    pub(crate) fn is_quiet(&self) -> bool {
        let guard = self.out();
        let Some(out) = guard.as_ref().filter(|_| !self.has_failed()) else { return true };
        let Some(path) = &out.path else { return false };
        out.outbound.next_post().is_none()
            && path.link.unacknowledged(out.target.token).next().is_none()
    }

    /// Waits for the end of messages being posted since before the link was [held](Link::hold).
    pub(crate) fn barrier(&self) {
        // Messages are posted under this lock.
        drop(self.out());
    }

    /// Detaches the connection from the link `from`: no posts until [`Endpoint::attach_path`]. `false`:
    /// the connection does not use that link, or needs no other one.
    pub(crate) fn detach_path(&self, from: LinkKey) -> bool {
        let mut guard = self.out();
        let Some(out) = guard.as_mut() else { return false };
        let Some(path) = out.path.take_if(|path| path.link.key() == from) else { return false };
        let unacknowledged = path.link.unacknowledged(out.target.token);
        let peer = ConsumerWord::from_u64(self.words.load()[1]);
        let over = self.released.load(Ordering::Acquire);
        let goes_on = out.outbound.fail_over(unacknowledged, peer, over);
        if !goes_on {
            // The peer has the last words or answers nothing any more, and its element may be another
            // connection's by now.
            self.fail();
        }
        goes_on
    }

    /// The peer's RMB and the send buffer, if the connection works and is between two links.
    pub(crate) fn between_links(&self) -> Option<(PeerRmbId, Arc<SendBuffer>)> {
        let guard = self.out();
        let out = guard.as_ref().filter(|out| out.path.is_none() && !self.has_failed())?;
        Some((out.target.rmb, out.send_buffer.clone()))
    }

    /// Attaches the connection to another link, with a validation and then every byte not confirmed by
    /// the peer. The caller [flushes](super::shared::Shared::flush) the connection.
    pub(crate) fn attach_path(&self, mut path: Path) {
        if let Some(out) = self.out().as_mut() {
            path.address = path.address.wrapping_add(out.target.offset);
            out.path = Some(path);
            self.failovers.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Ends the sending side and returns its send buffer.
    pub(crate) fn close(&self) -> Option<Arc<SendBuffer>> {
        self.out().take().map(|out| out.send_buffer)
    }
}

/// The schedule of requests for a silent peer's cursor.
#[derive(Debug, Default)]
struct ProbeBackoff {
    /// Sequence number of the peer's last message at the last check.
    last: u16,
    /// Checks since that message.
    checks: u32,
}

impl ProbeBackoff {
    /// Whether to ask the peer at this check: at the first one after a message, then after twice as
    /// many checks each time, and at every [`ProbeBackoff::LONGEST`]th check.
    fn is_due(&mut self, last: u16) -> bool {
        if last != self.last {
            *self = ProbeBackoff { last, checks: 0 };
        }
        self.checks = self.checks.saturating_add(1);
        self.checks.is_power_of_two() || self.checks.is_multiple_of(ProbeBackoff::LONGEST)
    }

    const LONGEST: u32 = 64;
}

/// Posts pending messages. Returns the link, if there is little room or none.
#[inline]
fn post(out: &mut Out) -> Option<Congestion> {
    // Without a path, and on a dead link, messages stay pending until the group has found another one.
    let path = out.path.as_ref()?;
    while let Some(post) = out.outbound.next_post() {
        match path.link.post(path, out.target.token, &post) {
            Ok(()) => out.outbound.on_posted(&post),
            Err(NotPosted::Dead) => return None,
            Err(NotPosted::NoRoom) => return Some(Congestion::Full(path.link.clone())),
        }
    }
    path.link.is_short().then(|| Congestion::Short(path.link.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::smcr::buffers::send_buffer;

    const LEN: u32 = 16 << 10;

    /// An element of the peer's only RMB.
    fn target(index: u32) -> Target {
        let (rmb, offset) = (PeerRmbId::default(), u64::from(index) * u64::from(LEN));
        Target { rmb, offset, ring: Ring::smcr_without_eye_catcher(LEN).unwrap(), token: 1 }
    }

    /// A connection with writes into `target`, between two links.
    fn connection(target: Target) -> Arc<Endpoint> {
        let outbound = Outbound::new(target.ring, target.token);
        let out = Out {
            outbound,
            target,
            send_buffer: send_buffer(LEN).unwrap(),
            path: None,
            probe: ProbeBackoff::default(),
        };
        Arc::new(Endpoint {
            token: 7,
            group: 0,
            words: Words::default(),
            out: Mutex::new(Some(out)),
            failed: AtomicBool::new(false),
            fate: OnceBox::new(),
            released: AtomicBool::new(false),
            failovers: AtomicU32::new(0),
        })
    }

    // Shows: CLC-37, RMB-23.
    #[test]
    fn an_element_that_is_offered_again_ends_the_connection_that_uses_it() {
        let old = connection(target(1));
        assert!(old.deliver(&[(0, b"data")], [0; 2], true).is_ok());
        assert!(old.fail_if_reused(&target(1)));
        assert!(matches!(old.deliver(&[(0, b"data")], [0; 2], true), Err(SmcrSendError::Failed)));
        // A third connection finds only the second one there.
        assert!(!old.fail_if_reused(&target(1)));
    }

    // Shows: CDC-24.
    #[test]
    fn a_silent_peer_is_asked_ever_more_seldom() {
        let mut probe = ProbeBackoff::default();
        let asked = |probe: &mut ProbeBackoff, last, checks: u32| {
            (1..=checks).filter(|_| probe.is_due(last)).count()
        };
        assert_eq!(asked(&mut probe, 7, 1), 1);
        assert_eq!(asked(&mut probe, 7, 15), 4);
        assert_eq!(asked(&mut probe, 7, 16 + 32), 2);
        assert_eq!(asked(&mut probe, 7, 60), 0);
        assert_eq!(asked(&mut probe, 7, 4), 1);
        assert_eq!(asked(&mut probe, 8, 2), 2);
    }

    // Shows: CLC-37, RMB-23.
    #[test]
    fn neighbours_are_other_elements() {
        let old = connection(target(1));
        assert!(!old.fail_if_reused(&target(0)));
        assert!(!old.fail_if_reused(&target(2)));
        assert!(old.deliver(&[(0, b"data")], [0; 2], true).is_ok());
    }

    // Shows: RMB-23.
    #[test]
    fn a_connection_that_has_sent_its_last_words_does_not_fail() {
        let old = connection(target(0));
        old.release();
        assert!(!old.fail_if_reused(&target(0)));
        // The last words may still be under way.
        assert!(!old.has_failed());
    }
}
