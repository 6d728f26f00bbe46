// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One link: a queue pair, its receive buffers, and its queue of LLC messages.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use smc_core::connection::{Post, Span};
use smc_core::link_group::{Cause, LinkKey, RemoteEnd};
use smc_core::time::Tick;
use smc_core::wire::cdc::{CDC_LEN, CDC_TYPE, Cdc};
use smc_core::wire::clc::Version;
use smc_core::wire::ids::{Gid, Psn, Qpn, Rkey};
use smc_core::wire::llc::LLC_MAX_LEN;

use super::inbox::{Inbox, Input};
use super::llc::LlcQueue;
use super::port::Port;
use super::slots::{CDC_SLOTS, LLC_SLOTS, RECEIVES, REQUESTS_PER_SLOT, SLOTS, Slots};
use super::tokens::random_psn;
use ism_sys::{OnceBox, lock};
use smc_verbs::{
    self, Access, Completed, Completion, Hops, Init, Memory, Mr, Payload, Pd, Qp, QpCaps,
    ReadyToSend, Recv, VerbsError, WcStatus, Work,
};

/// The number of receives posted together.
const POSTED_AT_ONCE: usize = 8;
/// Distance of small messages in memory, bytes.
const STRIDE: usize = 64;
/// Inline data requested, bytes: for a CDC or LLC message, and short writes. The device need not fetch
/// inline data from memory.
const INLINE: usize = 256;

/// A connection's way to its peer's element over a link.
#[derive(Clone, Debug)]
pub(crate) struct Path {
    pub(crate) link: Arc<Link>,
    /// The send buffer on this link.
    pub(crate) send_buffer: Arc<Mr>,
    /// Address of the peer's element.
    pub(crate) address: u64,
    /// Key of the peer's RMB.
    pub(crate) rkey: Rkey,
}

/// The reason for not posting a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotPosted {
    /// No slot is free.
    NoRoom,
    /// The link has failed, or is not connected yet.
    Dead,
}

/// A link.
pub(crate) struct Link {
    key: LinkKey,
    /// Number of the group.
    group: u32,
    /// Inputs of the group.
    inputs: Arc<Inbox>,
    local: LocalEnd,
    // The queue pair is dropped before the memory named in its requests.
    qp: QueuePair,
    buffers: Buffers,
    slots: Slots,
    llc: Mutex<LlcQueue>,
    waiting: Waiting,
    state: LinkUse,
    peer: Mutex<Option<RemoteEnd>>,
}

/// The own end of a link.
struct LocalEnd {
    port: Arc<Port>,
    gid_index: u8,
    gid: Gid,
    qpn: Qpn,
    psn: Psn,
}

/// The queue pair, in its present state.
struct QueuePair {
    ready: OnceBox<Qp<ReadyToSend>>,
    init: Mutex<Option<Qp<Init>>>,
}

/// Registered memory of a link.
struct Buffers {
    pd: Arc<Pd>,
    inbox: Arc<Mr>,
    stride: usize,
    /// Receive buffers with a taken message, to be posted again.
    reposts: Mutex<Vec<Recv>>,
    outbox: Arc<Mr>,
    /// Registrations to end after the queue pair.
    deferred: Mutex<Vec<Arc<Mr>>>,
    /// The most bytes of an inline send.
    inline: usize,
}

/// Connections with something to send, but without room.
#[derive(Default)]
struct Waiting {
    tokens: Mutex<Vec<u32>>,
    /// SeqCst: set before the send queue is armed; read behind a poll of its completions.
    any: AtomicBool,
}

/// The use of a link by connections.
#[derive(Default)]
struct LinkUse {
    dead: AtomicBool,
    /// Messages of connections wait, until the messages under way have arrived.
    held: AtomicBool,
    /// Time of the last CDC message since [`Link::take_last_receipt`], in microseconds on the clock
    /// of [`Shared`](super::shared::Shared); 0: none.
    last_receipt: AtomicU64,
    connections: AtomicU32,
}

impl Link {
    /// A queue pair ready for receives, without a known peer yet.
    ///
    /// # Errors
    /// An error of the verbs.
    pub(crate) fn new(
        key: LinkKey,
        (group, inputs): (u32, &Arc<Inbox>),
        port: &Arc<Port>,
        (gid_index, gid): (u8, Gid),
        version: Version,
    ) -> Result<Arc<Link>, VerbsError> {
        let device = port.device();
        let pd = Pd::new(device.context())?;
        // A message of version 2 may be long, and may come into any of the buffers (LLCV2-7).
        let stride = if version == Version::V2 { LLC_MAX_LEN } else { STRIDE };
        let memory = |len| Mr::register(&pd, &Memory::new(len)?, Access::Local).map(Arc::new);
        let inbox = memory(stride * RECEIVES as usize)?;
        let outbox = memory(STRIDE * CDC_SLOTS as usize + stride * LLC_SLOTS as usize)?;
        let caps = QpCaps {
            send_requests: SLOTS * REQUESTS_PER_SLOT,
            receive_requests: RECEIVES,
            inline: INLINE as u32,
        };
        let qp = Qp::new(&pd, device.send_cq(), device.recv_cq(), caps)?.init(port.number())?;
        let psn = random_psn().map_err(|source| VerbsError::Call { call: "getrandom", source })?;
        let link = Arc::new(Link {
            key,
            group,
            inputs: Arc::clone(inputs),
            local: LocalEnd {
                port: port.clone(),
                gid_index,
                gid,
                qpn: qp.qp_num(),
                psn: Psn::new(psn),
            },
            buffers: Buffers {
                pd,
                inbox,
                stride,
                reposts: Mutex::new(Vec::with_capacity(POSTED_AT_ONCE)),
                outbox,
                deferred: Mutex::default(),
                inline: qp.max_inline().min(INLINE),
            },
            qp: QueuePair { ready: OnceBox::new(), init: Mutex::new(Some(qp)) },
            slots: Slots::default(),
            llc: Mutex::default(),
            waiting: Waiting::default(),
            state: LinkUse::default(),
            peer: Mutex::new(None),
        });
        link.post_receives()?;
        Ok(link)
    }

    fn recv(&self, slot: u32) -> Option<Recv> {
        let buffer = self
            .buffers
            .inbox
            .sge(slot as usize * self.buffers.stride, self.buffers.stride)
            .ok()?;
        Some(Recv { id: u64::from(slot), buffer })
    }

    fn post_receives(&self) -> Result<(), VerbsError> {
        let all: Vec<_> = (0..RECEIVES).filter_map(|slot| self.recv(slot)).collect();
        let refused = |error: smc_verbs::PostError| VerbsError::Call {
            call: "ibv_post_recv",
            source: std::io::Error::other(error),
        };
        lock(&self.qp.init).as_ref().map_or(Ok(()), |qp| qp.post_recv(&all).map_err(refused))
    }

    /// Connects the queue pair and lets it send. May wait for the network (see
    /// [`Qp::ready_to_receive`]).
    ///
    /// # Errors
    /// An error of the verbs; the link is of no use then.
    pub(crate) fn connect(&self, remote: RemoteEnd, direct: bool) -> Result<(), VerbsError> {
        let Some(qp) = lock(&self.qp.init).take() else { return Ok(()) };
        let end = smc_verbs::RemoteEnd {
            gid: remote.gid,
            qp_num: remote.qpn,
            psn: remote.psn,
            mtu: remote.mtu,
            sgid_index: self.local.gid_index,
            hops: if direct { Hops::Direct } else { Hops::Routed },
        };
        let qp = qp.ready_to_receive(&end)?.ready_to_send(self.local.psn)?;
        *lock(&self.peer) = Some(remote);
        // The queue pair was taken out of `init` above, so this is the first.
        let _ = self.qp.ready.set(qp);
        if self.is_dead() {
            // The link was stopped meanwhile.
            self.stop();
        }
        Ok(())
    }

    /// The key in the group.
    pub(crate) fn key(&self) -> LinkKey {
        self.key
    }

    /// The number of the group in this process.
    #[inline]
    pub(crate) fn group(&self) -> u32 {
        self.group
    }

    pub(crate) fn inputs(&self) -> &Inbox {
        &self.inputs
    }

    pub(crate) fn port(&self) -> &Arc<Port> {
        &self.local.port
    }

    /// The local GID.
    pub(crate) fn gid(&self) -> Gid {
        self.local.gid
    }

    /// The number of the queue pair.
    pub(crate) fn qpn(&self) -> Qpn {
        self.local.qpn
    }

    /// The first packet number sent by this end (CLC-31).
    pub(crate) fn psn(&self) -> Psn {
        self.local.psn
    }

    /// The link's own protection domain: only its peer reaches memory registered there (LG-51, SEC-6).
    pub(crate) fn pd(&self) -> &Arc<Pd> {
        &self.buffers.pd
    }

    /// The peer's end, once connected.
    pub(crate) fn peer(&self) -> Option<RemoteEnd> {
        *lock(&self.peer)
    }

    /// Number of connections on the link, for display.
    pub(crate) fn connections(&self) -> &AtomicU32 {
        &self.state.connections
    }

    /// Messages allowed before one has to be acknowledged.
    pub(crate) fn credits(&self) -> u32 {
        SLOTS - self.slots.used()
    }

    /// Time of the last CDC message, if one was received since the last call.
    pub(crate) fn take_last_receipt(&self) -> Option<Tick> {
        match self.state.last_receipt.swap(0, Ordering::Relaxed) {
            0 => None,
            last_receipt => Some(Tick(last_receipt)),
        }
    }

    /// Whether the link has failed or was stopped.
    #[inline]
    pub(crate) fn is_dead(&self) -> bool {
        self.state.dead.load(Ordering::Acquire)
    }

    /// Fails the link, and reports the failure to the inbox of its group once (LG-58).
    #[cold]
    pub(crate) fn fail(&self) {
        if !self.state.dead.swap(true, Ordering::AcqRel) {
            self.inputs.put(Input::Failed(self.key, Cause::QueuePair));
        }
    }

    /// Logs a failed request. The device merely flushes the requests after the first failed one.
    #[cold]
    fn log_failure(&self, what: &str, status: WcStatus) {
        if !self.is_dead() || status != WcStatus::Flushed {
            let (link, qpn) = (self.key.get(), self.local.qpn.get());
            tracing::debug!(link, qpn, what, %status, "link failed");
        }
    }

    /// Closes the link. [`Shared::close_link`](super::shared::Shared::close_link) also drops its later
    /// completions.
    pub(crate) fn close(&self) {
        // Outstanding requests name memory about to be freed.
        self.stop();
        lock(&self.waiting.tokens).clear();
        self.stop_waiting();
        if lock(&self.llc).close() {
            self.local.port.device().end_await_sends();
        }
    }

    /// Keeps these registrations until the end of the queue pair. The peer's adapter may be writing to
    /// their memory, and an earlier deregistration would wait for the write.
    pub(crate) fn keep(&self, registrations: Vec<Arc<Mr>>) {
        lock(&self.buffers.deferred).extend(registrations);
    }

    /// Stops the queue pair: messages under way do not arrive any more.
    pub(crate) fn stop(&self) {
        self.state.dead.store(true, Ordering::Release);
        if let Some(qp) = self.qp.ready.get()
            && let Err(error) = qp.fail()
        {
            tracing::debug!(%error, "a queue pair was not stopped");
        }
    }

    /// Holds messages of connections back, or stops holding them. A message being posted right now by
    /// another thread is not held back: `Endpoint::barrier` waits for such posts.
    pub(crate) fn hold(&self, held: bool) {
        self.state.held.store(held, Ordering::Release);
    }

    /// Whether messages of connections are under way.
    pub(crate) fn has_unacknowledged(&self) -> bool {
        self.slots.used_by_cdc() != 0
    }

    /// Posts a connection's pending sends: the writes, and behind them the message announcing them
    /// (CDC-1, CDC-2).
    #[inline]
    pub(crate) fn post(&self, path: &Path, token: u32, post: &Post) -> Result<(), NotPosted> {
        let Some(qp) = self.qp.ready.get().filter(|_| !self.is_dead()) else {
            return Err(NotPosted::Dead);
        };
        if self.state.held.load(Ordering::Acquire) {
            return Err(NotPosted::NoRoom);
        }
        let slot = self.slots.take_cdc(token, post.sequence).ok_or(NotPosted::NoRoom)?;
        let write = |Span { offset, len }: Span, short| {
            let payload = self.span_payload(path, offset as usize, len as usize, short)?;
            let address = path.address.wrapping_add(u64::from(offset));
            Some(Work::write(u64::from(slot), payload, address, path.rkey))
        };
        let mut short = [0; INLINE];
        let Some(payload) = self.payload(slot, &post.cdc) else { return Err(NotPosted::Dead) };
        let send = Work::send(u64::from(slot), payload).signaled();
        let posted = match post.spans {
            [Span { len: 0, .. }, Span { len: 0, .. }] => qp.post_send(&[send]),
            [one, Span { len: 0, .. }] | [Span { len: 0, .. }, one] => match write(one, &mut short)
            {
                Some(write) => qp.post_send(&[write, send]),
                None => return Err(NotPosted::Dead),
            },
            [one, two] => match (write(one, &mut short), write(two, &mut [])) {
                (Some(one), Some(two)) => qp.post_send(&[one, two, send]),
                _ => return Err(NotPosted::Dead),
            },
        };
        if let Err(error) = posted {
            tracing::debug!(%error, "a message was not posted");
            self.fail();
            return Err(NotPosted::Dead);
        }
        Ok(())
    }

    /// The payload for bytes of the send buffer: a copy in `short` if small enough, and else the
    /// registered memory.
    #[inline]
    fn span_payload<'a>(
        &self,
        path: &Path,
        offset: usize,
        len: usize,
        short: &'a mut [u8],
    ) -> Option<Payload<'a>> {
        match short.get_mut(..len).filter(|_| len <= self.buffers.inline) {
            Some(short) => {
                path.send_buffer.memory().copy_out(offset, short).ok()?;
                Some(Payload::Inline(short))
            }
            None => path.send_buffer.sge(offset, len).ok().map(Payload::Registered),
        }
    }

    /// The payload for a message in a slot: inline, or a copy in registered memory.
    #[inline]
    fn payload<'a>(&self, slot: u32, bytes: &'a [u8]) -> Option<Payload<'a>> {
        if bytes.len() <= self.buffers.inline.min(CDC_LEN) {
            return Some(Payload::Inline(bytes));
        }
        let offset = match slot.checked_sub(CDC_SLOTS) {
            None => slot as usize * STRIDE,
            Some(llc) => STRIDE * CDC_SLOTS as usize + self.buffers.stride * llc as usize,
        };
        self.buffers.outbox.memory().copy_in(offset, bytes).ok()?;
        self.buffers.outbox.sge(offset, bytes.len()).ok().map(Payload::Registered)
    }

    /// Sends an LLC message over this link (LLC-2) as soon as there is room.
    pub(crate) fn post_llc(&self, bytes: Vec<u8>, receipt: Option<smc_core::link_group::Receipt>) {
        let has_room = lock(&self.llc).push(bytes, receipt);
        if !has_room {
            tracing::debug!(link = self.key.get(), "too many LLC messages wait");
            return self.fail();
        }
        self.send_llc();
    }

    /// Sends the waiting LLC messages, as far as there is room.
    pub(crate) fn send_llc(&self) {
        let mut llc = lock(&self.llc);
        let Some(qp) = self.qp.ready.get().filter(|_| !self.is_dead()) else { return };
        while let Some(slot) = llc.next(|| self.slots.take_llc()) {
            let Some(bytes) = llc.bytes(slot) else { return };
            let posted = self.payload(slot, bytes).is_some_and(|payload| {
                qp.post_send(&[Work::send(u64::from(slot), payload).signaled()]).is_ok()
            });
            if !posted {
                drop(llc);
                return self.fail();
            }
        }
        // Receipts, and messages waiting for room, depend on completions.
        if llc.starts_awaiting() {
            self.local.port.device().await_sends();
        }
    }

    /// Handles the completion of a send request.
    pub(crate) fn on_sent(&self, completion: &Completion) {
        if let Err(status) = completion.result() {
            if !self.is_dead() {
                tracing::debug!(link = self.key.get(), qp = self.local.qpn.get(), %status, "link failed");
            }
            // The slot stays in use: its message may not have arrived (LG-39, ERR-13).
            return self.fail();
        }
        let Ok(slot) = u32::try_from(completion.id()) else { return };
        if slot >= CDC_SLOTS {
            let (receipt, over) = lock(&self.llc).sent(slot);
            if let Some(receipt) = receipt {
                self.inputs.put(Input::Sent(receipt));
            }
            if over {
                self.local.port.device().end_await_sends();
            }
        }
        self.slots.release(slot);
    }

    /// Whether send completions should be polled.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        self.slots.is_short()
    }

    /// Numbers of the unacknowledged messages of a connection, in any order.
    pub(crate) fn unacknowledged(&self, token: u32) -> impl Iterator<Item = u16> + '_ {
        self.slots.unacknowledged(token)
    }

    /// The connection with this token waits for room. [`Link::take_waiting`] returns the token after a
    /// poll of completions.
    pub(crate) fn wait(&self, token: u32) {
        lock(&self.waiting.tokens).push(token);
        if !self.waiting.any.swap(true, Ordering::SeqCst) {
            self.local.port.device().await_sends();
        }
    }

    fn stop_waiting(&self) {
        if self.waiting.any.swap(false, Ordering::SeqCst) {
            self.local.port.device().end_await_sends();
        }
    }

    /// Takes the tokens of connections without room. The caller has them send.
    #[inline]
    pub(crate) fn take_waiting(&self) -> Vec<u32> {
        if !self.waiting.any.load(Ordering::SeqCst) {
            return Vec::new();
        }
        // Before the tokens are taken: a later token counts as the first one, and is announced.
        self.stop_waiting();
        std::mem::take(&mut *lock(&self.waiting.tokens))
    }

    /// Sends LLC messages left without room.
    pub(crate) fn flush_llc(&self) {
        if lock(&self.llc).is_waiting() {
            self.send_llc();
        }
    }

    /// Takes a received message at `now`, or notes a failed receive. An LLC message goes to the inputs
    /// of the group. A CDC message (LLC-9) is returned: its connection is not known here.
    #[inline]
    pub(crate) fn on_receive(&self, completion: &Completion, now: Tick) -> Option<Cdc> {
        let len = match completion.result() {
            Ok(Completed::Receive { len }) => len,
            Ok(_) => return None,
            Err(status) => {
                self.log_failure("receive", status);
                self.fail();
                return None;
            }
        };
        let slot = u32::try_from(completion.id()).ok()?;
        let at = slot as usize * self.buffers.stride;
        let mut short = [0u8; CDC_LEN];
        let short = short.get_mut(..len.min(CDC_LEN)).unwrap_or_default();
        self.buffers.inbox.memory().copy_out(at, short).ok()?;
        let cdc = if short.first() == Some(&CDC_TYPE) {
            self.state.last_receipt.store(now.0, Ordering::Relaxed);
            let cdc = Cdc::parse(short).ok().filter(|_| len == CDC_LEN);
            if cdc.is_none() {
                self.count_malformed();
            }
            cdc
        } else {
            self.on_llc(at, len);
            None
        };
        self.post_again(slot);
        cdc
    }

    /// Counts a malformed message (SEC-16).
    #[cold]
    fn count_malformed(&self) {
        self.local.port.device().counters().malformed.fetch_add(1, Ordering::Relaxed);
    }

    /// Posts receive buffers again, several at once: there are more than a peer needs.
    #[inline]
    fn post_again(&self, slot: u32) {
        let mut reposts = lock(&self.buffers.reposts);
        reposts.extend(self.recv(slot));
        let Some(qp) = self.qp.ready.get().filter(|_| reposts.len() >= POSTED_AT_ONCE) else {
            return;
        };
        let posted = qp.post_recv(&reposts);
        reposts.clear();
        drop(reposts);
        if posted.is_err() {
            self.fail();
        }
    }

    #[cold]
    fn on_llc(&self, at: usize, len: usize) {
        let mut bytes = vec![0u8; len.min(self.buffers.stride)];
        if self.buffers.inbox.memory().copy_out(at, &mut bytes).is_err() {
            return self.count_malformed();
        }
        // The group checks the length, too (ERR-43).
        self.inputs.put(Input::Message(self.key, bytes));
    }
}

/// A thread of its own destroys the queue pair: destruction waits for the last packet to leave. An
/// interface in state down keeps packets not sent, and soft-RoCE waits 50 s for them.
impl Drop for Link {
    fn drop(&mut self) {
        let queue_pair = (self.qp.ready.take(), lock(&self.qp.init).take());
        let deferred_regions = std::mem::take(&mut *lock(&self.buffers.deferred));
        let memory = (self.buffers.inbox.clone(), self.buffers.outbox.clone(), deferred_regions);
        let end = move || {
            drop(queue_pair);
            drop(memory);
        };
        if let Err(error) = ism_sys::start_thread("smc-link-end", ism_sys::USUAL_STACK, end) {
            // The closure was dropped, and with it the queue pair.
            tracing::debug!(%error, "no thread");
        }
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("key", &self.key)
            .field("qpn", &self.local.qpn)
            .finish_non_exhaustive()
    }
}
