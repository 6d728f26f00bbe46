// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random histories of several drivers, checked against a model of their rights.
//!
//! The model has no slabs, lines, token tables or locks. The model stores owners, users, attachments,
//! relations, and the expected contents of each DMB. After every step:
//!
//! - the device answers as the model does;
//! - DMBs contain only the bytes written by their users;
//! - no two DMBs still held by a driver overlap, in a window or in a slab;
//! - a slab's memory is only ever in the windows of its one owner and its one user;
//! - tokens are unique.
//!
//! In the end nothing is left: no token, no slab, no descriptor, no device.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ism_device as ism;
use proptest::prelude::*;
use virtio_ism_abi::command::{
    AttachReply, BACKING_WINDOW, HelloReply, Op, QueryGidRequest, RegisterReply, RegisterRequest,
    ReleaseSlabRequest, SignalEventRequest, TokenRequest,
};
use virtio_ism_abi::event::Event;
use virtio_ism_abi::{Chid, Gid, Status};
use zerocopy::{FromBytes, IntoBytes};

#[path = "../src/tests/harness.rs"]
mod harness;
#[path = "model_registry/steps.rs"]
mod steps;

use harness::{Driver, World, guest_body, parse};
use ism::{Limits, Outcome};
use steps::{LENS, Mode, Step, pick, step};

const DRIVERS: usize = 4;
/// Guest memory of each driver, cut into DMBs of the smallest length by `idx`.
const GUEST: usize = 16 * (16 << 10);

/// A DMB, independent of the viewer.
struct Dmb {
    owner: usize,
    owner_gid: Gid,
    user_gid: Gid,
    idx: u32,
    registered: bool,
    content: Vec<u8>,
    place: Place,
}

#[derive(Clone, Copy)]
enum Place {
    Guest(u64),
    /// In the owner's window; `inode` names the memory, `offset` the place there.
    Window {
        dmb_off: u64,
        slab_id: u32,
        inode: u64,
        offset: u64,
    },
}

/// State of a driver in one life.
#[derive(Default)]
struct Life {
    gid: Option<Gid>,
    /// By token: offset in the window and number of the slab; `None`: moves only.
    attached: BTreeMap<u64, Option<(u64, u32)>>,
    related: BTreeSet<Gid>,
    gone: BTreeSet<u64>,
    downs: BTreeSet<Gid>,
    /// Senders of waiting software events, and the number of lost ones.
    sw_events: Vec<Gid>,
    lost: u32,
    wakes: BTreeSet<u32>,
    signals: BTreeSet<u32>,
    /// Slabs in the window; for own slabs, with the GID at the other end.
    slabs: BTreeMap<u32, Option<Gid>>,
}

struct Model {
    world: World,
    drivers: Vec<Driver>,
    modes: Vec<Mode>,
    lives: Vec<Life>,
    dmbs: BTreeMap<u64, Dmb>,
    tokens: Vec<u64>,
    gids: Vec<Gid>,
    /// GIDs of each front end, from all its lives.
    names: Vec<Vec<Gid>>,
    /// Owner and user of each slab's memory.
    pairs: HashMap<u64, (Gid, Gid)>,
}

type Answer = Option<Result<Vec<u8>, Status>>;

impl Model {
    fn new() -> Model {
        let limits = Limits { max_dmbs: 16, ..Limits::default() };
        let world = World::with(Chid(0xff00), limits);
        let mut drivers: Vec<_> =
            (0..DRIVERS).map(|i| world.join(["a", "b", "c", "d"][i])).collect();
        for driver in &mut drivers {
            driver.set_memory(&[(0, GUEST)]);
        }
        // The last driver cannot map.
        drivers[DRIVERS - 1].device.set_window(0);
        Model {
            world,
            drivers,
            modes: vec![Mode::Serves; DRIVERS],
            lives: (0..DRIVERS).map(|_| Life::default()).collect(),
            dmbs: BTreeMap::new(),
            tokens: vec![0, 0x1234_5678_9abc_def0],
            gids: vec![Gid([0xee; 16])],
            names: vec![Vec::new(); DRIVERS],
            pairs: HashMap::new(),
        }
    }

    fn maps(&self, who: usize) -> bool {
        who != DRIVERS - 1
    }

    fn holder(&self, gid: Gid) -> Option<usize> {
        self.lives.iter().position(|life| life.gid == Some(gid))
    }

    /// `None`: the job was lost, so there is no answer.
    fn call(&mut self, who: usize, op: Op, body: &[u8]) -> Answer {
        let driver = &mut self.drivers[who];
        driver.front.refuses = self.modes[who] == Mode::Refuses;
        let outcome = driver.command(op, body);
        let tag = driver.tag;
        match outcome {
            Outcome::Map(_) | Outcome::Unmap(_) if self.modes[who] == Mode::Loses => None,
            outcome => Some(parse(op, tag, &driver.complete(outcome))),
        }
    }

    /// Compares an answer with the model's: an error, or success unless a required front end did not serve.
    /// Returns the body of a success.
    fn check(&self, who: usize, answer: Answer, refusal: Option<Status>) -> Option<Vec<u8>> {
        match (answer, refusal) {
            (Some(Err(status)), Some(expected)) => {
                assert_eq!(status, expected);
                None
            }
            (Some(Ok(_)), Some(expected)) => panic!("succeeded, expected {expected:?}"),
            (Some(Ok(body)), None) => Some(body),
            (Some(Err(Status::Eio)), None) if self.modes[who] == Mode::Refuses => None,
            (None, None) if self.modes[who] == Mode::Loses => None,
            (answer, None) => panic!("unexpected answer {answer:?}"),
            (None, Some(expected)) => panic!("front end asked, expected {expected:?}"),
        }
    }

    fn step(&mut self, who: usize, step: Step) {
        self.world.clock.advance(1_000_000);
        match step {
            Step::Hello => self.hello(who),
            Step::End => {
                self.drivers[who].end();
                self.life_ends(who);
            }
            Step::Query { gid } => self.query(who, self.pick_gid(gid)),
            Step::Register { user, idx, len, wait_group } => {
                self.register(who, self.pick_gid(user), idx, LENS[len], wait_group);
            }
            Step::RegisterGuest { user, idx } => {
                self.register_guest(who, self.pick_gid(user), idx);
            }
            Step::Unregister { token } => {
                let own = self.tokens_of(|dmb| Some(dmb.owner_gid) == self.lives[who].gid);
                self.unregister(who, self.pick_token(token, &own));
            }
            Step::Attach { token } => self.attach(who, self.pick_granted(who, token)),
            Step::Detach { token } => self.detach(who, self.pick_attached(who, token)),
            Step::Release { slab } => {
                let slabs: Vec<u32> = self.lives[who].slabs.keys().copied().collect();
                self.release(who, pick(slab, &slabs).unwrap_or(slab as u32));
            }
            Step::Move { token, offset, len, signal } => {
                self.mv(who, self.pick_granted(who, token), offset, len, signal);
            }
            Step::Kick { token } => self.kick(who, self.pick_granted(who, token)),
            Step::Store { token, offset } => {
                self.store(who, self.pick_attached(who, token), offset);
            }
            Step::SwEvent { gid } => self.sw_event(who, self.pick_gid(gid)),
            Step::TakeEvents => self.take_events(who),
            Step::Malformed { op, change } => self.malformed(who, Op::ALL[op], change),
            Step::FrontEnd(mode) => self.modes[who] = mode,
        }
        self.invariants();
    }

    /// Mostly a living GID.
    fn pick_gid(&self, which: usize) -> Gid {
        let alive: Vec<Gid> = self.lives.iter().filter_map(|life| life.gid).collect();
        pick(which, &alive).unwrap_or(self.gids[which % self.gids.len()])
    }

    /// Mostly one of `likely`.
    fn pick_token(&self, which: usize, likely: &[u64]) -> u64 {
        pick(which, likely).unwrap_or(self.tokens[which % self.tokens.len()])
    }

    fn pick_granted(&self, who: usize, which: usize) -> u64 {
        let granted = self.tokens_of(|dmb| Some(dmb.user_gid) == self.lives[who].gid);
        self.pick_token(which, &granted)
    }

    fn pick_attached(&self, who: usize, which: usize) -> u64 {
        let attached: Vec<u64> = self.lives[who].attached.keys().copied().collect();
        self.pick_token(which, &attached)
    }

    fn tokens_of(&self, which: impl Fn(&Dmb) -> bool) -> Vec<u64> {
        let wanted = self.dmbs.iter().filter(|(_, dmb)| dmb.registered && which(dmb));
        wanted.map(|(token, _)| *token).collect()
    }

    fn hello(&mut self, who: usize) {
        self.life_ends(who);
        let answer = self.call(who, Op::Hello, &[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
        let reply = HelloReply::read_from_bytes(&answer.unwrap().unwrap()).unwrap();
        assert!(!self.gids.contains(&reply.gid), "a GID came back");
        self.gids.push(reply.gid);
        self.names[who].push(reply.gid);
        self.lives[who].gid = Some(reply.gid);
        let driver = &mut self.drivers[who];
        driver.front.refuses = false;
        while let Some(stale) = driver.device.stale_map() {
            driver.front.unmap(stale.window_offset());
            driver.device.stale_unmapped(stale);
        }
    }

    fn life_ends(&mut self, who: usize) {
        let life = std::mem::take(&mut self.lives[who]);
        let Some(gid) = life.gid else { return };
        let own: Vec<u64> = self
            .dmbs
            .iter()
            .filter(|(_, dmb)| dmb.registered && dmb.owner_gid == gid)
            .map(|(token, _)| *token)
            .collect();
        for token in own {
            self.dmb_ends(token);
        }
        for other in &mut self.lives {
            if other.related.remove(&gid) {
                other.downs.insert(gid);
                let before = other.sw_events.len();
                other.sw_events.retain(|sender| *sender != gid);
                other.lost += (before - other.sw_events.len()) as u32;
                other.wakes.retain(|slab| other.slabs.get(slab) != Some(&Some(gid)));
                let dmbs = &self.dmbs;
                let own_gid = other.gid;
                other.signals.retain(|idx| {
                    !dmbs.values().any(|dmb| {
                        dmb.registered
                            && Some(dmb.owner_gid) == own_gid
                            && dmb.idx == *idx
                            && dmb.user_gid == gid
                    })
                });
            }
        }
    }

    fn dmb_ends(&mut self, token: u64) {
        self.dmbs.get_mut(&token).unwrap().registered = false;
        for life in &mut self.lives {
            if life.attached.contains_key(&token) {
                life.gone.insert(token);
            }
        }
    }

    fn query(&mut self, who: usize, gid: Gid) {
        let body = QueryGidRequest { gid, ..Default::default() };
        let answer = self.call(who, Op::QueryGid, body.as_bytes());
        let refusal = self.cannot_reach(who, gid);
        if self.check(who, answer, refusal).is_some() {
            self.relate(who, gid);
        }
    }

    fn cannot_reach(&self, who: usize, gid: Gid) -> Option<Status> {
        if self.lives[who].gid.is_none() {
            Some(Status::Estate)
        } else if self.holder(gid).is_none() {
            Some(Status::Enodev)
        } else {
            None
        }
    }

    fn relate(&mut self, who: usize, gid: Gid) {
        self.lives[who].related.insert(gid);
    }

    fn idx_in_use(&self, who: usize, idx: u32) -> bool {
        self.dmbs.values().any(|dmb| dmb.registered && dmb.owner == who && dmb.idx == idx)
    }

    fn register(&mut self, who: usize, user: Gid, idx: u32, len: u32, wait_group: u16) {
        let body = RegisterRequest {
            user_gid: user,
            idx: idx.into(),
            len: len.into(),
            backing: BACKING_WINDOW.into(),
            wait_group: wait_group.into(),
            ..Default::default()
        };
        let answer = self.call(who, Op::Register, body.as_bytes());
        let refusal = self
            .cannot_reach(who, user)
            .or_else(|| self.idx_in_use(who, idx).then_some(Status::Ebusy))
            .or_else(|| (!self.maps(who)).then_some(Status::Enotsup));
        let Some(body) = self.check(who, answer, refusal) else { return };
        self.relate(who, user);
        let reply = RegisterReply::read_from_bytes(&body).unwrap();
        let (dmb_off, slab_off) = (reply.dmb_off.get(), reply.slab_off.get());
        let front = &self.drivers[who].front;
        assert_eq!(front.nonce(slab_off, reply.slab_len.get()), reply.nonce.get());
        let inode = front.inode(slab_off);
        let slab_id = reply.slab_id.get();
        self.lives[who].slabs.insert(slab_id, Some(user));
        let owner_gid = self.lives[who].gid.unwrap();
        self.pair(inode, owner_gid, user);
        let place = Place::Window { dmb_off, slab_id, inode, offset: dmb_off - slab_off };
        self.add(reply.token.get(), who, user, idx, len, place);
    }

    fn register_guest(&mut self, who: usize, user: Gid, idx: u32) {
        let gpa = u64::from(idx) * u64::from(LENS[0]);
        let body = guest_body(user, idx, LENS[0], &[(gpa, 8 << 10), (gpa + (8 << 10), 8 << 10)]);
        let answer = self.call(who, Op::Register, &body);
        let refusal = self
            .cannot_reach(who, user)
            .or_else(|| self.idx_in_use(who, idx).then_some(Status::Ebusy));
        let Some(body) = self.check(who, answer, refusal) else { return };
        self.relate(who, user);
        let reply = RegisterReply::read_from_bytes(&body).unwrap();
        // The owner starts with a clean buffer, like a driver.
        self.drivers[who].poke(gpa, &vec![0; LENS[0] as usize]);
        self.add(reply.token.get(), who, user, idx, LENS[0], Place::Guest(gpa));
    }

    fn add(&mut self, token: u64, owner: usize, user_gid: Gid, idx: u32, len: u32, place: Place) {
        assert!(!self.tokens.contains(&token), "a token came back");
        self.tokens.push(token);
        let owner_gid = self.lives[owner].gid.unwrap();
        let content = vec![0; len as usize];
        let dmb = Dmb { owner, owner_gid, user_gid, idx, registered: true, content, place };
        self.dmbs.insert(token, dmb);
    }

    fn pair(&mut self, inode: u64, owner: Gid, user: Gid) {
        let pair = self.pairs.entry(inode).or_insert((owner, user));
        assert_eq!(*pair, (owner, user), "memory of another pair");
    }

    fn unregister(&mut self, who: usize, token: u64) {
        let answer =
            self.call(who, Op::Unregister, TokenRequest { token: token.into() }.as_bytes());
        let own = self
            .dmbs
            .get(&token)
            .is_some_and(|d| d.registered && Some(d.owner_gid) == self.lives[who].gid);
        let refusal = match (self.lives[who].gid, own) {
            (None, _) => Some(Status::Estate),
            (_, false) => Some(Status::Enoent),
            (_, true) => None,
        };
        if self.check(who, answer, refusal).is_some() {
            self.dmb_ends(token);
            let dmb = &self.dmbs[&token];
            if matches!(dmb.place, Place::Guest(_)) {
                self.lives[who].signals.remove(&dmb.idx);
            }
        }
    }

    /// The refusal for a driver without the grant.
    fn no_grant(&self, who: usize, token: u64) -> Option<Status> {
        let gid = self.lives[who].gid;
        let granted =
            self.dmbs.get(&token).is_some_and(|d| d.registered && Some(d.user_gid) == gid);
        match (gid, granted) {
            (None, _) => Some(Status::Estate),
            (_, false) => Some(Status::Enoent),
            (_, true) => None,
        }
    }

    fn attach(&mut self, who: usize, token: u64) {
        let answer = self.call(who, Op::Attach, TokenRequest { token: token.into() }.as_bytes());
        let again = self.lives[who].attached.contains_key(&token);
        let refusal = self.no_grant(who, token).or_else(|| again.then_some(Status::Ebusy));
        let Some(body) = self.check(who, answer, refusal) else { return };
        let owner_gid = self.dmbs[&token].owner_gid;
        self.relate(who, owner_gid);
        let reply = AttachReply::read_from_bytes(&body).unwrap();
        let dmb = &self.dmbs[&token];
        assert_eq!(reply.owner_gid, owner_gid);
        assert_eq!(reply.dmb_len.get() as usize, dmb.content.len());
        let user_gid = dmb.user_gid;
        let at = match dmb.place {
            Place::Window { inode, offset, .. } if self.maps(who) => {
                let (dmb_off, slab_off) = (reply.dmb_off.get(), reply.slab_off.get());
                assert_eq!(dmb_off - slab_off, offset);
                assert_eq!(self.drivers[who].front.inode(slab_off), inode);
                self.pair(inode, owner_gid, user_gid);
                let slab_id = reply.slab_id.get();
                self.lives[who].slabs.entry(slab_id).or_insert(None);
                Some((dmb_off, slab_id))
            }
            _ => {
                assert_eq!((reply.flags, reply.slab_len.get(), reply.nonce.get()), (1, 0, 0));
                None
            }
        };
        self.lives[who].attached.insert(token, at);
    }

    fn detach(&mut self, who: usize, token: u64) {
        let answer = self.call(who, Op::Detach, TokenRequest { token: token.into() }.as_bytes());
        let life = &self.lives[who];
        let refusal = match (life.gid, life.attached.contains_key(&token)) {
            (None, _) => Some(Status::Estate),
            (_, false) => Some(Status::Enoent),
            (_, true) => None,
        };
        if self.check(who, answer, refusal).is_some() {
            self.lives[who].attached.remove(&token);
            self.lives[who].gone.remove(&token);
        }
    }

    fn release(&mut self, who: usize, slab_id: u32) {
        let body = ReleaseSlabRequest { slab_id: slab_id.into(), ..Default::default() };
        let answer = self.call(who, Op::ReleaseSlab, body.as_bytes());
        let life = &self.lives[who];
        let owns = self.dmbs.values().any(|dmb| {
            dmb.registered
                && Some(dmb.owner_gid) == life.gid
                && matches!(dmb.place, Place::Window { slab_id: id, .. } if id == slab_id)
        });
        let uses = life.attached.values().flatten().any(|(_, id)| *id == slab_id);
        let refusal = match life.gid {
            None => Some(Status::Estate),
            Some(_) if !life.slabs.contains_key(&slab_id) => Some(Status::Enoent),
            Some(_) if owns || uses => Some(Status::Ebusy),
            Some(_) => None,
        };
        if self.check(who, answer, refusal).is_some() {
            self.lives[who].slabs.remove(&slab_id);
            self.lives[who].wakes.remove(&slab_id);
        }
    }

    fn mv(&mut self, who: usize, token: u64, offset: u32, len: u32, signal: bool) {
        let fill = (offset as u8) | 1;
        let bytes = vec![fill; len as usize];
        let status = self.drivers[who].mv(token, &[(offset, &bytes)], signal);
        let expected = self.no_grant(who, token).unwrap_or_else(|| {
            let dmb_len = self.dmbs[&token].content.len() as u64;
            let fits = u64::from(offset) + u64::from(len) <= dmb_len;
            if fits { Status::Ok } else { Status::Einval }
        });
        assert_eq!(status, expected);
        if status == Status::Ok {
            let dmb = self.dmbs.get_mut(&token).unwrap();
            dmb.content[offset as usize..][..len as usize].fill(fill);
            // No driver arms lines here: in the window only a kick wakes.
            if signal && matches!(dmb.place, Place::Guest(_)) {
                self.lives[dmb.owner].signals.insert(dmb.idx);
            }
        }
    }

    fn kick(&mut self, who: usize, token: u64) {
        let status = self.drivers[who].kick(token);
        assert_eq!(status, self.no_grant(who, token).unwrap_or(Status::Ok));
        if status == Status::Ok {
            let dmb = &self.dmbs[&token];
            let owner = &mut self.lives[dmb.owner];
            match dmb.place {
                Place::Guest(_) => owner.signals.insert(dmb.idx),
                Place::Window { slab_id, .. } => owner.wakes.insert(slab_id),
            };
        }
    }

    /// A user stores into an attached DMB, whether or not the owner has ended the DMB.
    fn store(&mut self, who: usize, token: u64, offset: u32) {
        let Some(Some((dmb_off, _))) = self.lives[who].attached.get(&token) else { return };
        let fill = (offset as u8) | 1;
        self.drivers[who].front.write(dmb_off + u64::from(offset), &[fill; 100]);
        let content = &mut self.dmbs.get_mut(&token).unwrap().content;
        content[offset as usize..][..100].fill(fill);
    }

    fn sw_event(&mut self, who: usize, gid: Gid) {
        let body = SignalEventRequest { gid, ..Default::default() };
        let answer = self.call(who, Op::SignalEvent, body.as_bytes());
        let sender = self.lives[who].gid;
        let refusal = self.cannot_reach(who, gid).or_else(|| {
            let waiting = &self.lives[self.holder(gid)?].sw_events;
            // Events of a past life of the sender count, too.
            let own = waiting.iter().filter(|from| self.names[who].contains(from)).count();
            (own >= 8).then_some(Status::Eagain)
        });
        if self.check(who, answer, refusal).is_some() {
            let to = self.holder(gid).unwrap();
            self.lives[to].sw_events.push(sender.unwrap());
        }
    }

    fn take_events(&mut self, who: usize) {
        let events = self.drivers[who].events();
        let life = &mut self.lives[who];
        let (mut gone, mut downs) = (BTreeSet::new(), BTreeSet::new());
        let (mut sw_events, mut lost) = (Vec::new(), 0);
        let (mut wakes, mut signals) = (BTreeSet::new(), BTreeSet::new());
        for event in events {
            match event {
                Event::DmbGone { token, .. } => {
                    assert!(downs.is_empty() && sw_events.is_empty());
                    assert!(gone.insert(token.0));
                }
                Event::PeerDown { gid, .. } => {
                    assert!(sw_events.is_empty() && wakes.is_empty() && signals.is_empty());
                    assert!(downs.insert(gid));
                }
                Event::Lost { n } => lost += n,
                Event::Leave { .. } | Event::Stay { .. } => panic!("nobody was asked to leave"),
                Event::SwEvent { gid, .. } => {
                    assert!(wakes.is_empty() && signals.is_empty());
                    sw_events.push(gid);
                }
                Event::SlabWake(wake) => {
                    for slab in wake.slabs.iter().take(wake.n.get() as usize) {
                        assert!(wakes.insert(slab.get()), "told twice");
                    }
                }
                Event::DmbSignal(signal) => {
                    for entry in signal.entries.iter().take(signal.n.get() as usize) {
                        assert!(signals.insert(entry.idx.get()), "told twice");
                    }
                }
            }
        }
        assert_eq!(gone, std::mem::take(&mut life.gone));
        assert_eq!(downs, std::mem::take(&mut life.downs));
        assert_eq!(sw_events, std::mem::take(&mut life.sw_events));
        assert_eq!(lost, std::mem::take(&mut life.lost));
        assert_eq!(wakes, std::mem::take(&mut life.wakes));
        assert_eq!(signals, std::mem::take(&mut life.signals));
    }

    fn malformed(&mut self, who: usize, op: Op, change: i8) {
        let size =
            [8, 8, 24, 40, 8, 8, 8, 8, 40, 0][Op::ALL.iter().position(|o| *o == op).unwrap()];
        let len = (size + i32::from(change)).max(0);
        if len == size {
            return;
        }
        let answer = self.call(who, op, &vec![0; len as usize]);
        self.check(who, answer, Some(Status::Einval));
    }

    fn invariants(&self) {
        let registered = self.dmbs.values().filter(|dmb| dmb.registered).count();
        assert_eq!(self.world.fabric.snapshot().tokens, registered as u64);
        for (who, life) in self.lives.iter().enumerate() {
            let info = self.drivers[who].device.info();
            let own = self.dmbs.values().filter(|d| d.registered && d.owner == who);
            assert_eq!(info.gid, life.gid);
            assert_eq!(info.dmbs, own.count() as u64);
            assert_eq!(info.attached, life.attached.len() as u64);
            assert_eq!(info.peers, life.related.len() as u64);
        }
        self.nothing_overlaps();
        for dmb in self.dmbs.values().filter(|dmb| dmb.registered) {
            let driver = &self.drivers[dmb.owner];
            // Moves and stores go to the start; for large DMBs, checking start and end is enough.
            let start = 0..dmb.content.len().min(64 << 10);
            let end = dmb.content.len() - 4096..dmb.content.len();
            for range in [start, end] {
                let (at, expected) = (range.start as u64, &dmb.content[range]);
                let seen = match dmb.place {
                    Place::Guest(gpa) => driver.peek(gpa + at, expected.len()),
                    Place::Window { dmb_off, .. } => {
                        driver.front.read(dmb_off + at, expected.len())
                    }
                };
                assert!(seen == *expected, "content of idx {} of {}", dmb.idx, dmb.owner);
            }
        }
    }

    fn nothing_overlaps(&self) {
        let mut ranges: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
        for (token, dmb) in &self.dmbs {
            let held = dmb.registered || self.lives.iter().any(|l| l.attached.contains_key(token));
            if let (Place::Window { inode, offset, .. }, true) = (dmb.place, held) {
                let end = offset + dmb.content.len() as u64;
                let others = ranges.entry(inode).or_default();
                assert!(others.iter().all(|&(s, e)| end <= s || e <= offset), "DMBs overlap");
                others.push((offset, end));
            }
        }
    }
}

fn slab_descriptors() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    links
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|target| target.to_string_lossy().contains("memfd:ism-slab"))
        .count()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn drivers_get_what_is_theirs_and_nothing_else(
        steps in prop::collection::vec((0..DRIVERS, step()), 1..300)
    ) {
        let mut model = Model::new();
        for who in 0..DRIVERS {
            model.hello(who);
        }
        for (who, step) in steps {
            model.step(who, step);
        }
        let fabric = model.world.fabric.clone();
        for who in 0..DRIVERS {
            model.take_events(who);
        }
        drop(model);
        let left = fabric.snapshot();
        prop_assert_eq!((left.tokens, left.slabs, left.slab_bytes), (0, 0, 0));
        prop_assert!(left.devices.is_empty());
        prop_assert_eq!(slab_descriptors(), 0);
    }
}
