//! Control commands: admission, dispatch, and the commands about peers.

use std::sync::Arc;

use virtio_ism_abi::command::{HelloReply, QueryGidReply, StatsReply, peer_flags, stat};
use virtio_ism_abi::{Gid, Status};
use zerocopy::IntoBytes;

use super::claimed::{self, Claim, SignalClaim};
use super::counters::Tally;
use super::dmb::Dmb;
use super::session::Session;
use super::sync::lock;
use super::{Device, Outcome, Reply};

impl Device {
    /// Carries out a control command. `request` is a private copy of all readable bytes,
    /// `reply_room` the number of writable bytes. With room for less than a header the reply is cut
    /// to it, as the status is E2SMALL then.
    pub fn command(&self, request: &[u8], reply_room: usize) -> Outcome {
        let tag = claimed::tag(request);
        let outcome = self
            .admit(request, reply_room)
            .and_then(|claim| self.execute(tag, claim))
            .unwrap_or_else(|status| Outcome::Reply(Reply::refusal(tag, status)));
        match outcome {
            Outcome::Reply(reply) => Outcome::Reply(self.account(reply).cut(reply_room)),
            waits => waits,
        }
    }

    /// What can be said without looking at what exists.
    fn admit(&self, request: &[u8], reply_room: usize) -> Result<Claim, Status> {
        // Flawed commands cost as much of the rate as good ones.
        let now = self.fabric.clock.now_ns();
        if !self.limits.command_rate().take(&mut lock(&self.state).commands_full_at, now) {
            return Err(Status::Eagain);
        }
        Claim::parse(request, reply_room, self.contact.features(), &self.limits)
    }

    fn execute(&self, tag: u32, claim: Claim) -> Result<Outcome, Status> {
        match claim {
            Claim::Hello { driver_max_idx } => self.hello(tag, driver_max_idx),
            Claim::QueryGid(gid) => self.query_gid(tag, gid),
            Claim::Register(claim) => self.register(tag, claim),
            Claim::Unregister(token) => self.unregister(tag, token),
            Claim::Attach(token) => self.attach(tag, token),
            Claim::Detach(token) => self.detach(tag, token),
            Claim::ReleaseSlab(slab_id) => self.release_slab(tag, slab_id),
            Claim::SignalEvent(claim) => self.signal_event(tag, claim),
            Claim::Stats => self.stats(tag),
        }
    }

    fn hello(&self, tag: u32, driver_max_idx: u32) -> Result<Outcome, Status> {
        let life = self.begin(driver_max_idx)?;
        let body = HelloReply { gid: life.gid, session: life.session.into(), reserved: 0.into() };
        Ok(done(tag, body.as_bytes()))
    }

    fn query_gid(&self, tag: u32, gid: Gid) -> Result<Outcome, Status> {
        let peers = self.fabric.find(gid);
        let mut state = lock(&self.state);
        let state = &mut *state;
        let session = state.session.as_mut().ok_or(Status::Estate)?;
        let now = self.fabric.clock.now_ns();
        if !self.limits.query_rate().take(&mut state.queries_full_at, now) {
            return Err(Status::Eagain);
        }
        let peer = peers.first().ok_or(Status::Enodev)?;
        if !session.has_room_for(gid, self.limits.max_peers) {
            return Err(Status::Enospc);
        }
        if !session.relate(peer) {
            return Err(Status::Enodev);
        }
        let both_map =
            self.contact.has_window() && peers.iter().all(|peer| peer.contact.has_window());
        let window = if both_map { peer_flags::WINDOW } else { 0 };
        let body =
            QueryGidReply { flags: (peer_flags::REACHABLE | window).into(), ..Default::default() };
        Ok(done(tag, body.as_bytes()))
    }

    fn signal_event(&self, tag: u32, claim: SignalClaim) -> Result<Outcome, Status> {
        let to = self.fabric.find(claim.to);
        let from = lock(&self.state).session.as_ref().ok_or(Status::Estate)?.life.clone();
        if to.is_empty() {
            return Err(Status::Enodev);
        }
        // On loopback the others share the GID; the sender is not its own peer there.
        let shared = self.fabric.shared_gid.is_some();
        let mut others = to.iter().filter(|life| !shared || !Arc::ptr_eq(life, &from)).peekable();
        let nobody = others.peek().is_none();
        let told = others.filter(|life| life.tell_sw_event(&from, claim)).count();
        if told == 0 && !nobody {
            return Err(Status::Eagain);
        }
        Ok(done(tag, &[]))
    }

    fn stats(&self, tag: u32) -> Result<Outcome, Status> {
        let state = lock(&self.state);
        let session = state.session.as_ref().ok_or(Status::Estate)?;
        let mut body = StatsReply::default();
        let levels = [
            (stat::DMBS, session.dmbs.len() as u64),
            (stat::DMB_BYTES, session.dmb_bytes),
            (stat::ATTACHED, session.attached.len() as u64),
            (stat::SLABS, session.maps.len() as u64),
            (stat::SLAB_BYTES, session.slab_bytes),
            (stat::PEERS, session.related_peers()),
        ];
        let counts = Tally::of(&self.contact.counters).since(session.tally);
        for (index, value) in levels.into_iter().chain((stat::COMMANDS..).zip(counts)) {
            if let Some(counter) = body.counters.get_mut(index) {
                *counter = value.into();
            }
        }
        Ok(done(tag, body.as_bytes()))
    }
}

/// A command that needs no front end.
pub(super) fn done(tag: u32, body: &[u8]) -> Outcome {
    Outcome::Reply(Reply::ok(tag, body))
}

/// Whether binding a session to one more peer is allowed by its quota.
pub(super) fn check_peer(session: &Session, gid: Gid, max_peers: u32) -> Result<(), Status> {
    if session.has_room_for(gid, max_peers) { Ok(()) } else { Err(Status::Enospc) }
}

/// Where a command puts a DMB that it lets go of, declared before the device's lock is taken: the
/// last one to let go clears the memory, which can take a while.
pub(super) type LetGo = Option<Arc<Dmb>>;
