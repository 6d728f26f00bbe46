// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Drivers and front ends for tests: a driver exchanges bytes with its device, its front end really maps
//! slabs and refuses overlaps, like a VMM.
#![allow(dead_code, unreachable_pub, reason = "shared by several test crates")]

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use virtio_ism_abi::command::{
    AttachReply, BACKING_GUEST, BACKING_WINDOW, HelloReply, HelloRequest, LeftRequest, Op,
    QueryGidReply, QueryGidRequest, RegisterReply, RegisterRequest, ReleaseSlabRequest,
    ReplyHeader, RequestHeader, SgEntry, SignalEventRequest, StatsReply, TokenRequest, hello_flags,
};
use virtio_ism_abi::event::Event;
use virtio_ism_abi::mv::{MoveHeader, Segment, move_flags};
use virtio_ism_abi::signal::Line;
use virtio_ism_abi::slab::{CONTROL_LEN, line_offset};
use virtio_ism_abi::{Chid, Gid, Status};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryAtomic, GuestMemoryMmap, MmapRegion, VolatileMemory,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::ism::{
    Clock, CloseReason, Delivery, Device, DeviceConfig, EventNotifier, Fabric, FabricConfig,
    Limits, MapJob, Moved, Outcome,
};

/// A clock advanced only by the test.
#[derive(Debug)]
pub struct ManualClock(AtomicU64, AtomicBool);

impl ManualClock {
    pub fn advance(&self, ns: u64) {
        self.0.fetch_add(ns, Ordering::SeqCst);
    }

    /// From now on each reading of the coarse time waits, and advances the time by 60 ms.
    pub fn make_slow(&self, slow: bool) {
        self.1.store(slow, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn coarse_ns(&self) -> u64 {
        if self.1.load(Ordering::SeqCst) {
            std::thread::sleep(std::time::Duration::from_millis(1));
            self.advance(60_000_000);
        }
        self.now_ns()
    }
}

#[derive(Debug, Default)]
pub struct CountingNotifier(AtomicUsize, AtomicUsize);

impl CountingNotifier {
    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Number of waits of others for the device's memory.
    pub fn slow_memory(&self) -> usize {
        self.1.load(Ordering::SeqCst)
    }
}

impl EventNotifier for CountingNotifier {
    fn notify(&self, _: Delivery) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn memory_was_slow(&self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

pub const WINDOW: u64 = 1 << 30;

/// A fabric and its clock.
pub struct World {
    pub fabric: Arc<Fabric>,
    pub clock: Arc<ManualClock>,
}

impl World {
    pub fn new() -> World {
        World::with(Chid(0xff00), Limits::default())
    }

    pub fn loopback() -> World {
        World::with(Chid::LOOPBACK, Limits::default())
    }

    pub fn with(chid: Chid, limits: Limits) -> World {
        let clock =
            Arc::new(ManualClock(AtomicU64::new(1_000_000_000_000), AtomicBool::new(false)));
        let config = FabricConfig { limits, clock: clock.clone(), ..FabricConfig::new(chid) };
        World { fabric: Fabric::new(config).unwrap(), clock }
    }

    /// A device that can map, before HELLO.
    pub fn join(&self, name: &str) -> Driver {
        self.join_with(DeviceConfig { name: name.into(), ..DeviceConfig::default() })
    }

    pub fn join_with(&self, port: DeviceConfig) -> Driver {
        let notifier = Arc::new(CountingNotifier::default());
        let device = self.fabric.join(port, notifier.clone()).unwrap();
        device.set_window(WINDOW);
        let (gid, front) = (Gid::NONE, FrontEnd::default());
        Driver { device, notifier, gid, tag: 0, front, memory: None }
    }

    /// A device that can map, after HELLO.
    pub fn driver(&self, name: &str) -> Driver {
        let mut driver = self.join(name);
        driver.hello();
        driver
    }

    /// A device with a front end that maps its areas at the start only, after HELLO.
    pub fn fixed(&self, name: &str, areas: usize) -> Driver {
        let window = self.fabric.fixed_window(WINDOW, areas).unwrap().unwrap();
        let fixed_window = Some(window.clone());
        let name = name.into();
        let mut driver =
            self.join_with(DeviceConfig { name, fixed_window, ..DeviceConfig::default() });
        let len = window.area_len();
        for (area, file) in (0..).zip(window.files()) {
            let file = FileOffset::new(File::from(file.try_clone_to_owned().unwrap()), 0);
            let map = MmapRegion::from_file(file, len as usize).unwrap();
            driver.front.maps.insert(area * len, map);
        }
        driver.front.refuses = true;
        driver.hello();
        driver
    }

    /// A device without a window, after HELLO.
    pub fn mover(&self, name: &str) -> Driver {
        let mut driver = self.join(name);
        driver.device.set_window(0);
        driver.hello();
        driver
    }
}

/// Mappings of a front end.
#[derive(Debug, Default)]
pub struct FrontEnd {
    pub maps: BTreeMap<u64, MmapRegion>,
    /// Refuse every request.
    pub refuses: bool,
    pub refuses_doorbells: bool,
    /// Doorbells received: `true`: to ring.
    pub doorbells: Vec<bool>,
    pub asked: usize,
}

impl FrontEnd {
    /// Maps the request; `false` on an overlap.
    pub fn map(&mut self, job: &MapJob) -> bool {
        let Some(request) = job.request() else { return true };
        self.asked += 1;
        if self.refuses {
            return false;
        }
        let (start, len) = (request.window_offset, request.len);
        assert!(len.is_multiple_of(64 << 10) && start.is_multiple_of(2 << 20));
        assert!(start + len <= WINDOW, "beyond the window");
        for (other, map) in &self.maps {
            let apart = start + len <= *other || other + map.size() as u64 <= start;
            assert!(apart, "{start:#x}+{len:#x} overlaps the mapping at {other:#x}");
        }
        let file = File::from(request.fd.try_clone_to_owned().unwrap());
        let file = FileOffset::new(file, request.fd_offset);
        self.maps.insert(start, MmapRegion::from_file(file, len as usize).unwrap());
        true
    }

    pub fn unmap(&mut self, start: u64) -> bool {
        !self.refuses && self.maps.remove(&start).is_some()
    }

    fn at(&self, offset: u64, len: u64) -> vm_memory::VolatileSlice<'_> {
        let (start, map) = self.maps.range(..=offset).next_back().expect("nothing mapped there");
        map.get_slice((offset - start) as usize, len as usize).expect("beyond the mapping")
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.at(offset, bytes.len() as u64).write_slice(bytes, 0).unwrap();
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.at(offset, len as u64).read_slice(&mut bytes, 0).unwrap();
        bytes
    }

    /// The line of a DMB in a slab.
    pub fn line(&self, slab_off: u64, slab_len: u32, line: u16) -> Line<'_> {
        let map = &self.maps[&slab_off];
        let start = slab_len as usize - CONTROL_LEN + line_offset(line).unwrap();
        let armed = map.get_atomic_ref(start).unwrap();
        let pend = map.get_atomic_ref(start + 8).unwrap();
        Line { armed, pend }
    }

    /// The file's inode of the memory mapped at `slab_off`.
    pub fn inode(&self, slab_off: u64) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.maps[&slab_off].file_offset().unwrap().file().metadata().unwrap().ino()
    }

    /// The nonce in a slab's control tail.
    pub fn nonce(&self, slab_off: u64, slab_len: u32) -> u64 {
        let bytes = self.read(slab_off + u64::from(slab_len) - CONTROL_LEN as u64, 8);
        u64::from_le_bytes(bytes.try_into().unwrap())
    }
}

/// A driver and its front end.
pub struct Driver {
    pub device: Arc<Device>,
    pub notifier: Arc<CountingNotifier>,
    pub gid: Gid,
    pub tag: u32,
    pub front: FrontEnd,
    pub memory: Option<GuestMemoryAtomic<GuestMemoryMmap>>,
}

pub fn request<T: IntoBytes + Immutable>(op: Op, tag: u32, body: &T) -> Vec<u8> {
    let header = RequestHeader { op: (op as u16).into(), tag: tag.into(), ..Default::default() };
    [header.as_bytes(), body.as_bytes()].concat()
}

impl Driver {
    /// A second driver of the same device.
    pub fn of(other: &Driver) -> Driver {
        Driver {
            device: other.device.clone(),
            notifier: other.notifier.clone(),
            gid: other.gid,
            tag: 0,
            front: FrontEnd::default(),
            memory: other.memory.clone(),
        }
    }

    pub fn command(&mut self, op: Op, body: &[u8]) -> Outcome {
        self.tag += 1;
        let bytes = [request(op, self.tag, &[0u8; 0]).as_slice(), body].concat();
        self.device.command(&bytes, 4096)
    }

    /// Makes the front end complete a command.
    pub fn complete(&mut self, outcome: Outcome) -> Vec<u8> {
        match outcome {
            Outcome::Reply(reply) => reply.to_vec(),
            Outcome::Map(job) => {
                let ok = self.front.map(&job);
                if let Some(doorbell) = job.doorbell().filter(|_| ok) {
                    self.front.doorbells.push(doorbell.rings);
                    job.doorbell_answered(!self.front.refuses_doorbells);
                }
                self.device.mapped(job, ok).to_vec()
            }
            Outcome::Unmap(job) => {
                let ok = self.front.unmap(job.window_offset());
                self.device.unmapped(job, ok).to_vec()
            }
        }
    }

    /// Completes a command. Returns the body of the reply.
    pub fn call(&mut self, op: Op, body: &[u8]) -> Result<Vec<u8>, Status> {
        let outcome = self.command(op, body);
        let tag = self.tag;
        parse(op, tag, &self.complete(outcome))
    }

    fn typed<T: FromBytes>(&mut self, op: Op, body: &[u8]) -> Result<T, Status> {
        self.call(op, body).map(|body| T::read_from_bytes(&body).unwrap())
    }

    pub fn hello(&mut self) -> HelloReply {
        let body = HelloRequest { abi: 1.into(), flags: 0.into(), driver_max_idx: u32::MAX.into() };
        let reply: HelloReply = self.typed(Op::Hello, body.as_bytes()).unwrap();
        self.gid = reply.gid;
        while let Some(stale) = self.device.stale_map() {
            self.front.unmap(stale.window_offset());
            self.device.stale_unmapped(stale);
        }
        reply
    }

    /// HELLO of a driver on a machine of the other byte order than that of [`hello`](Self::hello).
    pub fn hello_of_other_order(mut self) -> Driver {
        let flags = hello_flags::BIG_ENDIAN.into();
        let body = HelloRequest { abi: 1.into(), flags, driver_max_idx: u32::MAX.into() };
        self.gid = self.typed::<HelloReply>(Op::Hello, body.as_bytes()).unwrap().gid;
        self
    }

    /// HELLO, possibly refused.
    pub fn try_hello(&mut self) -> Result<HelloReply, Status> {
        let body = HelloRequest { abi: 1.into(), flags: 0.into(), driver_max_idx: u32::MAX.into() };
        self.typed(Op::Hello, body.as_bytes())
    }

    /// LEFT, in answer to this request.
    pub fn left(&mut self, number: u32) -> Result<(), Status> {
        let body = LeftRequest { number: number.into(), ..Default::default() };
        self.call(Op::Left, body.as_bytes()).map(drop)
    }

    pub fn query(&mut self, gid: Gid) -> Result<u32, Status> {
        let body = QueryGidRequest { gid, ..Default::default() };
        let reply: QueryGidReply = self.typed(Op::QueryGid, body.as_bytes())?;
        Ok(reply.flags.get())
    }

    pub fn register_in(
        &mut self,
        user: Gid,
        idx: u32,
        len: u32,
        wait_group: u16,
    ) -> Result<RegisterReply, Status> {
        let body = RegisterRequest {
            user_gid: user,
            idx: idx.into(),
            len: len.into(),
            backing: BACKING_WINDOW.into(),
            wait_group: wait_group.into(),
            ..Default::default()
        };
        self.typed(Op::Register, body.as_bytes())
    }

    pub fn register(&mut self, user: Gid, idx: u32, len: u32) -> Result<RegisterReply, Status> {
        self.register_in(user, idx, len, 0)
    }

    pub fn register_guest(
        &mut self,
        user: Gid,
        idx: u32,
        sg: &[(u64, u32)],
    ) -> Result<RegisterReply, Status> {
        let len = sg.iter().map(|(_, len)| len).sum::<u32>();
        self.typed(Op::Register, &guest_body(user, idx, len, sg))
    }

    pub fn unregister(&mut self, token: u64) -> Result<(), Status> {
        self.token_op(Op::Unregister, token)
    }

    pub fn detach(&mut self, token: u64) -> Result<(), Status> {
        self.token_op(Op::Detach, token)
    }

    pub fn attach(&mut self, token: u64) -> Result<AttachReply, Status> {
        self.typed(Op::Attach, TokenRequest { token: token.into() }.as_bytes())
    }

    fn token_op(&mut self, op: Op, token: u64) -> Result<(), Status> {
        self.call(op, TokenRequest { token: token.into() }.as_bytes()).map(drop)
    }

    pub fn release(&mut self, slab_id: u32) -> Result<(), Status> {
        let body = ReleaseSlabRequest { slab_id: slab_id.into(), ..Default::default() };
        self.call(Op::ReleaseSlab, body.as_bytes()).map(drop)
    }

    pub fn signal_event(&mut self, gid: Gid, code: u32, info: u64) -> Result<(), Status> {
        let body = SignalEventRequest {
            gid,
            trigger: 1.into(),
            code: code.into(),
            info: info.into(),
            ..Default::default()
        };
        self.call(Op::SignalEvent, body.as_bytes()).map(drop)
    }

    pub fn stats(&mut self) -> [u64; 16] {
        let reply: StatsReply = self.typed(Op::Stats, &[]).unwrap();
        reply.counters.map(|counter| counter.get())
    }

    /// Moves segments and delivers the wake, like the virtio side.
    pub fn mv(&self, token: u64, segments: &[(u32, &[u8])], signal: bool) -> Status {
        let (head, payload) = chain(token, segments, signal, 1);
        let moved = self.transfer(&head, &payload);
        if let Some(wake) = moved.wake {
            wake.deliver(Delivery::Inline);
        }
        moved.status
    }

    pub fn kick(&self, token: u64) -> Status {
        self.mv(token, &[], true)
    }

    pub fn transfer(&self, head: &[u8], payload: &[u8]) -> Moved {
        let mut source = payload;
        self.device.transfer(head, &mut source, payload.len() as u64)
    }

    pub fn event(&self) -> Option<Event> {
        self.device.next_event().map(|record| Event::parse(&record).unwrap())
    }

    pub fn events(&self) -> Vec<Event> {
        std::iter::from_fn(|| self.event()).collect()
    }

    /// Gives the device guest memory at these addresses.
    pub fn set_memory(&mut self, ranges: &[(u64, usize)]) {
        let memory = guest_memory(ranges);
        match &self.memory {
            Some(handle) => handle.lock().unwrap().replace(memory),
            None => {
                let handle = GuestMemoryAtomic::new(memory);
                self.device.set_memory(handle.clone());
                self.memory = Some(handle);
            }
        }
    }

    pub fn peek(&self, gpa: u64, len: usize) -> Vec<u8> {
        use vm_memory::GuestAddressSpace;
        let mut bytes = vec![0; len];
        let memory = self.memory.as_ref().unwrap().memory();
        memory.read_slice(&mut bytes, GuestAddress(gpa)).unwrap();
        bytes
    }

    pub fn poke(&self, gpa: u64, bytes: &[u8]) {
        use vm_memory::GuestAddressSpace;
        let memory = self.memory.as_ref().unwrap().memory();
        memory.write_slice(bytes, GuestAddress(gpa)).unwrap();
    }

    pub fn end(&self) {
        self.device.close_session(CloseReason::Failed);
    }
}

pub fn guest_memory(ranges: &[(u64, usize)]) -> GuestMemoryMmap {
    let ranges: Vec<_> = ranges.iter().map(|&(gpa, len)| (GuestAddress(gpa), len)).collect();
    GuestMemoryMmap::from_ranges(&ranges).unwrap()
}

pub fn guest_body(user: Gid, idx: u32, len: u32, sg: &[(u64, u32)]) -> Vec<u8> {
    let body = RegisterRequest {
        user_gid: user,
        idx: idx.into(),
        len: len.into(),
        backing: BACKING_GUEST.into(),
        nsg: (sg.len() as u32).into(),
        ..Default::default()
    };
    let mut bytes = body.as_bytes().to_vec();
    for (gpa, len) in sg {
        let entry = SgEntry { gpa: (*gpa).into(), len: (*len).into(), ..Default::default() };
        bytes.extend_from_slice(entry.as_bytes());
    }
    bytes
}

/// Head and payload of a MOVE.
pub fn chain(token: u64, segments: &[(u32, &[u8])], signal: bool, mask: u16) -> (Vec<u8>, Vec<u8>) {
    let payload: Vec<u8> = segments.iter().flat_map(|(_, bytes)| bytes.iter().copied()).collect();
    let header = MoveHeader {
        token: token.into(),
        nseg: (segments.len() as u16).into(),
        flags: if signal { move_flags::SIGNAL } else { 0 }.into(),
        mask: mask.into(),
        total: (payload.len() as u32).into(),
        ..Default::default()
    };
    let mut head = header.as_bytes().to_vec();
    for (offset, bytes) in segments {
        let segment = Segment { offset: (*offset).into(), len: (bytes.len() as u32).into() };
        head.extend_from_slice(segment.as_bytes());
    }
    (head, payload)
}

/// Status and body of a reply; checks tag and length.
pub fn parse(op: Op, tag: u32, reply: &[u8]) -> Result<Vec<u8>, Status> {
    let (header, body) = ReplyHeader::read_from_prefix(reply).unwrap();
    assert_eq!(header.tag.get(), tag);
    match Status::from_code(header.status.get()).unwrap() {
        Status::Ok => {
            assert_eq!(body.len(), op.reply_body_len());
            Ok(body.to_vec())
        }
        status => {
            assert!(body.is_empty(), "a refusal has no body");
            Err(status)
        }
    }
}
