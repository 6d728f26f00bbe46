// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Control commands: admission, dispatch, and the commands about peers.

use std::sync::Arc;

use virtio_ism_abi::command::{HelloReply, QueryGidReply, StatsReply, peer_flags, stat};
use virtio_ism_abi::{Gid, Status};
use zerocopy::IntoBytes;

use super::accounts::QuotaAccount;
use super::counters::CounterSnapshot;
use super::dmb::Dmb;
use super::request::{self, CheckedRequest, CheckedSignalEvent};
use super::sync::lock;
use super::{Device, Outcome, Reply};

impl Device {
    /// Carries out a control command. `request` is a private copy of all readable bytes, `reply_room` the
    /// number of writable bytes. Without room for a header the reply is truncated; the status is E2SMALL.
    pub fn command(&self, request: &[u8], reply_room: usize) -> Outcome {
        let tag = request::tag(request);
        let outcome = self
            .admit(request, reply_room)
            .and_then(|request| self.execute(tag, request))
            .unwrap_or_else(|status| Outcome::Reply(Reply::refusal(tag, status)));
        match outcome {
            Outcome::Reply(reply) => Outcome::Reply(self.account(reply).cut(reply_room)),
            waits => waits,
        }
    }

    /// Checks independent of existing objects.
    fn admit(&self, request: &[u8], reply_room: usize) -> Result<CheckedRequest, Status> {
        // A malformed command uses up as much of the rate as a correct one.
        let now = self.fabric.clock.now_ns();
        if !self.limits.command_rate().take(&mut lock(&self.state).commands_full_at, now) {
            return Err(Status::Eagain);
        }
        CheckedRequest::parse(request, reply_room, self.handle.features(), &self.limits)
    }

    /// Carries out the request: the operations of an ISM device (EISM-31), and virtio-ism's own.
    fn execute(&self, tag: u32, request: CheckedRequest) -> Result<Outcome, Status> {
        match request {
            CheckedRequest::Hello { driver_max_idx, big_endian } => {
                self.hello(tag, driver_max_idx, big_endian)
            }
            CheckedRequest::Left(number) => self.left(tag, number),
            CheckedRequest::QueryGid(gid) => self.query_gid(tag, gid),
            CheckedRequest::Register(request) => self.register(tag, request),
            CheckedRequest::Unregister(token) => self.unregister(tag, token),
            CheckedRequest::Attach(token) => self.attach(tag, token),
            CheckedRequest::Detach(token) => self.detach(tag, token),
            CheckedRequest::ReleaseSlab(slab_id) => self.release_slab(tag, slab_id),
            CheckedRequest::SignalEvent(request) => self.signal_event(tag, request),
            CheckedRequest::Stats => self.stats(tag),
        }
    }

    fn hello(&self, tag: u32, driver_max_idx: u32, big_endian: bool) -> Result<Outcome, Status> {
        let session = self.begin(driver_max_idx, big_endian)?;
        let body =
            HelloReply { gid: session.gid, session: session.number.into(), reserved: 0.into() };
        Ok(done(tag, body.as_bytes()))
    }

    fn query_gid(&self, tag: u32, gid: Gid) -> Result<Outcome, Status> {
        let peers = self.fabric.find(gid);
        let mut state = lock(&self.state);
        let state = &mut *state;
        let account = state.account.as_mut().ok_or(Status::Estate)?;
        let now = self.fabric.clock.now_ns();
        if !self.limits.query_rate().take(&mut state.queries_full_at, now) {
            return Err(Status::Eagain);
        }
        let peer = account.session.first_of_same_order(&peers)?;
        if !account.has_room_for(gid, self.limits.max_peers) {
            return Err(Status::Enospc);
        }
        if !account.relate(peer) {
            return Err(Status::Enodev);
        }
        let both_map =
            self.handle.has_window() && peers.iter().all(|peer| peer.handle.has_window());
        let window = if both_map { peer_flags::WINDOW } else { 0 };
        let body =
            QueryGidReply { flags: (peer_flags::REACHABLE | window).into(), ..Default::default() };
        Ok(done(tag, body.as_bytes()))
    }

    fn signal_event(&self, tag: u32, request: CheckedSignalEvent) -> Result<Outcome, Status> {
        let to = self.fabric.find(request.to);
        let from = lock(&self.state).account.as_ref().ok_or(Status::Estate)?.session.clone();
        if to.is_empty() {
            return Err(Status::Enodev);
        }
        // On loopback all devices share the GID; the sender is not its own peer there.
        let shared = self.fabric.shared_gid.is_some();
        let mut others =
            to.iter().filter(|session| !shared || !Arc::ptr_eq(session, &from)).peekable();
        let nobody = others.peek().is_none();
        let receivers = others.filter(|session| session.push_sw_event(&from, request)).count();
        if receivers == 0 && !nobody {
            return Err(Status::Eagain);
        }
        Ok(done(tag, &[]))
    }

    fn stats(&self, tag: u32) -> Result<Outcome, Status> {
        let state = lock(&self.state);
        let account = state.account.as_ref().ok_or(Status::Estate)?;
        let mut body = StatsReply::default();
        let levels = [
            (stat::DMBS, account.dmbs.len() as u64),
            (stat::DMB_BYTES, account.dmb_bytes),
            (stat::ATTACHED, account.attached.len() as u64),
            (stat::SLABS, account.maps.len() as u64),
            (stat::SLAB_BYTES, account.slab_bytes),
            (stat::PEERS, account.related_peers()),
        ];
        let counts = CounterSnapshot::of(&self.handle.counters).since(account.at_start);
        for (index, value) in levels.into_iter().chain((stat::COMMANDS..).zip(counts)) {
            if let Some(counter) = body.counters.get_mut(index) {
                *counter = value.into();
            }
        }
        Ok(done(tag, body.as_bytes()))
    }
}

/// The outcome of a command without work for the front end.
pub(super) fn done(tag: u32, body: &[u8]) -> Outcome {
    Outcome::Reply(Reply::ok(tag, body))
}

/// Whether the quota allows binding an account to one more peer.
pub(super) fn check_peer(account: &QuotaAccount, gid: Gid, max_peers: u32) -> Result<(), Status> {
    if account.has_room_for(gid, max_peers) { Ok(()) } else { Err(Status::Enospc) }
}

/// A DMB to drop after the command has released the device's lock: dropping the last `Arc` clears the memory,
/// a possibly long operation. Declared before the lock is taken.
pub(super) type DeferredDrop = Option<Arc<Dmb>>;
