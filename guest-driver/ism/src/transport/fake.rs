// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A fabric in memory, for tests of the driver.
//!
//! A [`FakeFabric`] serves the virtqueues of its members without a thread: the devices of `ism_device` carry
//! out a command or a move within the driver's kick. [`Faults`] makes the devices break the rules.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use ism_device::{
    CloseReason, Delivery, Device, DeviceConfig, EventNotifier, Fabric, FabricConfig, Outcome,
};
use ism_sys::{EventFd, Reservation, SharedSlice, lock};
use virtio_ism_abi::command::*;
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::{EVENT_LEN, EventType};
use virtio_ism_abi::mv::{MoveHeader, Segment};
use virtio_ism_abi::{Chid, Gid, Status};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryAtomic, GuestMemoryMmap, GuestRegionMmap, MmapRegion,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::{RunningDevice, Window};
use crate::virtqueue::{DeviceSide, GuestPool, Health, MAX_PIECES, Notify, Queues, Wiring};

const WINDOW: u64 = 1 << 30;
/// Most payload of one move: so little that ordinary deliveries need several moves.
const MAX_PAYLOAD: u32 = 4096;

/// Ways to misbehave.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Replies carry another nonce than the slab.
    pub(crate) wrong_nonce: AtomicBool,
    /// Replies place DMBs this far off.
    pub(crate) displace: AtomicU64,
    /// Every REGISTER in the window is refused.
    pub(crate) no_window: AtomicBool,
    /// This status answers every move and kick.
    pub(crate) move_status: AtomicU16,
    /// Posts only PEER_DOWN for a vanished member.
    pub(crate) no_dmb_gone: AtomicBool,
    /// So many commands are answered with EAGAIN.
    pub(crate) busy: AtomicU64,
}

/// One CHID.
pub(crate) struct FakeFabric {
    fabric: Arc<Fabric>,
    members: Mutex<HashMap<Gid, Weak<Member>>>,
    serial: AtomicU64,
    pub(crate) faults: Faults,
}

impl Default for FakeFabric {
    fn default() -> FakeFabric {
        let fabric = Fabric::new(FabricConfig::new(Chid::VIRTIO_FIRST)).unwrap();
        let (members, serial) = (Mutex::default(), AtomicU64::new(0));
        FakeFabric { fabric, members, serial, faults: Faults::default() }
    }
}

impl FakeFabric {
    /// Adds a member with a running device to the fabric.
    pub(crate) fn join(self: &Arc<Self>, features: Features) -> Arc<RunningDevice> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed) + 1;
        let gid = Gid((u128::from(serial) << 64 | u128::from(serial)).to_be_bytes());
        let config = DeviceConfig { pinned_gid: Some(gid), ..DeviceConfig::default() };
        let device = self.fabric.join(config, Arc::new(ServedByKicks)).unwrap();
        let (pool, file) = GuestPool::new(64 << 20).unwrap();
        device.set_window(WINDOW);
        device.set_features(features - Features::DOORBELL);
        device.set_memory(memory_of(&pool, file));
        let mut config = device.config();
        config.max_segs = (MAX_PIECES as u16).into();
        config.max_move = MAX_PAYLOAD.into();
        let member = Arc::new(Member {
            gid,
            device,
            rings: OnceLock::new(),
            health: Health::new(),
            window: Reservation::new(WINDOW).unwrap(),
        });
        lock(&self.members).insert(gid, Arc::downgrade(&member));
        let served = Served { fabric: Arc::clone(self), member };
        let (queues, health) = (served.queues(&pool), Arc::clone(&served.member.health));
        let window = Box::new(FakeWindow(served));
        Arc::new(RunningDevice::new(config, features, queues, pool, health, window))
    }

    /// Ends the session of the member without a word to its driver, as in a machine restored elsewhere.
    pub(crate) fn forget(&self, gid: Gid) {
        let member = lock(&self.members).get(&gid).and_then(Weak::upgrade);
        member.expect("a member has this GID").device.close_session(CloseReason::Failed);
    }

    /// Removes the member; its own driver sees the device gone.
    pub(crate) fn kill(&self, gid: Gid) {
        let Some(gone) = lock(&self.members).remove(&gid) else { return };
        if let Some(gone) = gone.upgrade() {
            self.end(&gone);
        }
    }

    fn end(&self, member: &Member) {
        member.device.close_session(CloseReason::Failed);
        member.device.leave();
        self.deliver_events();
        member.health.fail("killed by the test");
    }

    /// Delivers pending events to every member.
    fn deliver_events(&self) {
        let members: Vec<_> = lock(&self.members).values().filter_map(Weak::upgrade).collect();
        for member in members {
            member.deliver_events(&self.faults);
        }
    }
}

/// Events wait until the kick that caused them is served.
struct ServedByKicks;

impl EventNotifier for ServedByKicks {
    fn notify(&self, _: Delivery) {}
}

/// The pool, as mapped by the device: bus addresses are addresses of this process.
fn memory_of(pool: &GuestPool, file: OwnedFd) -> GuestMemoryAtomic<GuestMemoryMmap> {
    let (start, len) = (pool.whole().address() as u64, pool.whole().len());
    let map = MmapRegion::from_file(FileOffset::new(file.into(), 0), len).unwrap();
    let region = GuestRegionMmap::new(map, GuestAddress(start)).unwrap();
    GuestMemoryAtomic::new(GuestMemoryMmap::from_regions(vec![region]).unwrap())
}

/// The number of a queue of a member.
const CONTROL: usize = 0;
const EVENTS: usize = 1;
/// Control queue, event queue, one move queue.
const QUEUES: usize = 3;

/// The device side of a member's virtqueues.
struct Rings {
    rings: [DeviceSide; QUEUES],
    calls: [Arc<EventFd>; QUEUES],
    /// A chain of the event queue, ready for a record.
    spare: Option<u16>,
}

impl Rings {
    /// The next available chain: its head and its readable bytes.
    fn next(&mut self, queue: usize) -> Option<(u16, Vec<u8>)> {
        let ring = &mut self.rings[queue];
        let head = ring.next_or_ask_for_kick()?;
        Some((head, ring.read(head).0))
    }

    fn answer(&mut self, queue: usize, head: u16, reply: &[u8]) {
        self.rings[queue].answer(head, reply);
        if self.rings[queue].interrupts() {
            self.calls[queue].signal();
        }
    }
}

struct Member {
    gid: Gid,
    device: Arc<Device>,
    rings: OnceLock<Mutex<Rings>>,
    health: Arc<Health>,
    window: Reservation,
}

impl Member {
    fn rings(&self) -> &Mutex<Rings> {
        self.rings.get().expect("a device is not kicked before it has its queues")
    }

    fn deliver_events(&self, faults: &Faults) {
        let Some(rings) = self.rings.get() else { return };
        let mut rings = lock(rings);
        loop {
            let spare = rings.spare.take().or_else(|| rings.next(EVENTS).map(|(head, _)| head));
            let Some(head) = spare else { return };
            let Some(record) = self.next_event(faults) else {
                rings.spare = Some(head);
                return;
            };
            rings.answer(EVENTS, head, &record);
        }
    }

    fn next_event(&self, faults: &Faults) -> Option<[u8; EVENT_LEN]> {
        let withheld = faults.no_dmb_gone.load(Ordering::Relaxed);
        let is_withheld = |record: &[u8; EVENT_LEN]| {
            withheld && record.starts_with(&(EventType::DmbGone as u16).to_le_bytes())
        };
        std::iter::from_fn(|| self.device.next_event()).find(|record| !is_withheld(record))
    }

    /// Maps or unmaps the window as needed by a command; returns the command's reply.
    fn complete(&self, outcome: Outcome) -> Vec<u8> {
        match outcome {
            Outcome::Reply(reply) => reply.to_vec(),
            Outcome::Map(job) => {
                if let Some(asked) = job.request() {
                    let (at, len) = (asked.window_offset, asked.len);
                    self.window.map(at, len, asked.fd, asked.fd_offset).unwrap();
                }
                self.device.mapped(job, true).to_vec()
            }
            Outcome::Unmap(job) => {
                self.window.unmap(job.window_offset(), job.len()).unwrap();
                self.device.unmapped(job, true).to_vec()
            }
        }
    }
}

/// A member, from the view of its queues.
#[derive(Clone)]
struct Served {
    fabric: Arc<FakeFabric>,
    member: Arc<Member>,
}

/// The window of a member. The member leaves the fabric when this is dropped.
struct FakeWindow(Served);

impl Drop for FakeWindow {
    fn drop(&mut self) {
        self.0.fabric.kill(self.0.member.gid);
    }
}

/// The notification of one queue.
struct Kick {
    served: Served,
    queue: usize,
}

impl Notify for Kick {
    fn notify(&self) {
        self.served.serve(self.queue);
    }
}

impl Served {
    /// Makes the queues of the driver, and keeps their device side.
    fn queues(&self, pool: &Arc<GuestPool>) -> Queues {
        let calls: [Arc<EventFd>; QUEUES] =
            std::array::from_fn(|_| Arc::new(EventFd::new().unwrap()));
        let health = &self.member.health;
        let mut wirings = calls.iter().enumerate().map(|(queue, call)| {
            health.wake_with(call);
            Wiring {
                kick: Box::new(Kick { served: self.clone(), queue }),
                call: Arc::clone(call),
                health: Arc::clone(health),
                event_idx: true,
            }
        });
        let (control, events) = (wirings.next().unwrap(), wirings.next().unwrap());
        let queues = Queues::new(pool, MAX_PAYLOAD as usize, control, events, wirings).unwrap();
        let rings = queues
            .addresses()
            .iter()
            .map(|addresses| DeviceSide::new(pool.whole().clone(), *addresses))
            .collect::<Vec<_>>();
        let rings = rings.try_into().unwrap_or_else(|_| panic!("a ring for each queue"));
        let rings = Rings { rings, calls: calls.clone(), spare: None };
        assert!(self.member.rings.set(Mutex::new(rings)).is_ok(), "set once");
        queues.events.start().unwrap();
        queues
    }

    /// Serves a queue after a kick of the driver.
    fn serve(&self, queue: usize) {
        if self.member.health.is_gone() {
            return;
        }
        // The event queue has nothing to carry out: its chains are room for records.
        while let Some((head, request)) = self.next_request(queue) {
            let reply = match queue {
                CONTROL => self.reply(&request),
                _ => u32::from(self.move_status(&request)).to_le_bytes().to_vec(),
            };
            self.fabric.deliver_events();
            lock(self.member.rings()).answer(queue, head, &reply);
        }
        self.fabric.deliver_events();
    }

    fn next_request(&self, queue: usize) -> Option<(u16, Vec<u8>)> {
        if queue == EVENTS { None } else { lock(self.member.rings()).next(queue) }
    }

    /// Carries out a command; the bytes of its reply, false if a fault says so.
    fn reply(&self, request: &[u8]) -> Vec<u8> {
        let (header, body) = RequestHeader::read_from_prefix(request).unwrap();
        let refusal = |status: Status| {
            let mut reply = ReplyHeader::new_zeroed();
            (reply.status, reply.tag) = (status.code().into(), header.tag);
            reply.as_bytes().to_vec()
        };
        let faults = &self.fabric.faults;
        if faults.busy.load(Ordering::Relaxed) > 0 {
            faults.busy.fetch_sub(1, Ordering::Relaxed);
            return refusal(Status::Eagain);
        }
        let op = Op::from_code(header.op.get()).unwrap();
        if op == Op::Register && faults.no_window.load(Ordering::Relaxed) {
            let (asked, _) = RegisterRequest::read_from_prefix(body).unwrap();
            if asked.backing.get() != BACKING_GUEST {
                return refusal(Status::Enotsup);
            }
        }
        let device = &self.member.device;
        let mut reply = self.member.complete(device.command(request, usize::MAX));
        let (_, body) = reply.split_at_mut(size_of::<ReplyHeader>());
        let displace = faults.displace.load(Ordering::Relaxed);
        let wrong = u64::from(faults.wrong_nonce.load(Ordering::Relaxed));
        // A refusal has no body.
        match op {
            Op::Register => {
                if let Ok(placed) = RegisterReply::mut_from_bytes(body) {
                    placed.dmb_off += displace;
                    placed.nonce = (placed.nonce.get() ^ wrong).into();
                }
            }
            Op::Attach => {
                if let Ok(placed) = AttachReply::mut_from_bytes(body) {
                    placed.dmb_off += displace;
                    placed.nonce = (placed.nonce.get() ^ wrong).into();
                }
            }
            _ => {}
        }
        reply
    }

    /// Checks the form of a MOVE and executes the MOVE; returns the status.
    fn move_status(&self, request: &[u8]) -> u16 {
        let (header, rest) = MoveHeader::read_from_prefix(request).unwrap();
        let nseg = usize::from(header.nseg.get());
        assert!(nseg <= MAX_PIECES, "{nseg} pieces");
        assert!(header.total.get() <= MAX_PAYLOAD);
        let (segments, mut payload) = rest.split_at(nseg * size_of::<Segment>());
        let sum = segments.chunks(size_of::<Segment>()).fold(0, |sum, segment| {
            let segment = Segment::read_from_bytes(segment).unwrap();
            let (at, len) = (segment.offset.get(), segment.len.get());
            assert!(at >= 24 || (at, len) == (8, 16), "the control words are one segment");
            sum + len as usize
        });
        assert_eq!(payload.len(), sum, "the segments are the whole payload");
        let forced = self.fabric.faults.move_status.load(Ordering::Relaxed);
        if forced != 0 {
            return forced;
        }
        let (head, len) = (&request[..request.len() - payload.len()], payload.len() as u64);
        let moved = self.member.device.transfer(head, &mut payload, len);
        if let Some(wake) = moved.wake {
            wake.deliver(Delivery::Inline);
        }
        moved.status.code()
    }
}

impl Window for FakeWindow {
    fn size(&self) -> u64 {
        WINDOW
    }

    fn slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        self.0.member.window.slice(offset, len)
    }

    fn is_cached(&self) -> bool {
        false
    }

    fn outlives_device(&self) -> bool {
        true
    }
}
