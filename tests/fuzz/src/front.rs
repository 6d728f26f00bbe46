// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices with a front end recording maps in a book instead of mapping.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ism_device::{
    Clock, Delivery, Device, DeviceConfig, EventNotifier, Fabric, FabricConfig, Limits, MapJob,
    Outcome, UnmapJob,
};
use virtio_ism_abi::command::{Op, ReplyHeader, RequestHeader};
use virtio_ism_abi::{Chid, Status};
use vm_memory::{GuestAddress, GuestMemoryAtomic, GuestMemoryMmap};
use zerocopy::{FromBytes, IntoBytes};

/// Window of every front end here, bytes.
pub const WINDOW: u64 = 64 << 20;

/// Most bytes of a reply buffer; more than any reply has.
const ROOM: usize = 4096;

/// A clock advancing by a second on each reading, so rate limits never take effect.
#[derive(Debug, Default)]
struct Fast(AtomicU64);

impl Clock for Fast {
    fn now_ns(&self) -> u64 {
        self.0.fetch_add(1_000_000_000, Ordering::Relaxed)
    }
}

struct Deaf;

impl EventNotifier for Deaf {
    fn notify(&self, _: Delivery) {}
}

/// Limits small enough for one input.
pub fn small_limits() -> Limits {
    Limits {
        max_dmbs: 6,
        dmb_bytes: 8 << 20,
        slab_bytes: 16 << 20,
        attached_slab_bytes: 16 << 20,
        max_attach: 5,
        max_peers: 4,
        max_maps: 5,
        max_sg: 4,
        max_segs: 4,
        ..Limits::default()
    }
}

/// A fabric for one input.
///
/// # Panics
/// Never, as the CHID and the limits are legal.
pub fn fabric(loopback: bool) -> Arc<Fabric> {
    let chid = if loopback { Chid::LOOPBACK } else { Chid(0xff00) };
    let config = FabricConfig {
        limits: small_limits(),
        clock: Arc::new(Fast::default()),
        ..FabricConfig::new(chid)
    };
    Fabric::new(config).expect("legal")
}

/// A job waiting for the front end.
#[derive(Debug)]
pub enum Job {
    /// A REGISTER or ATTACH.
    Map(MapJob),
    /// A RELEASE_SLAB.
    Unmap(UnmapJob),
}

/// A device and its front end.
pub struct Front {
    /// The device.
    pub device: Arc<Device>,
    /// Jobs in the order of arrival.
    pub jobs: VecDeque<Job>,
    /// Ranges possibly mapped: start and length.
    pub maps: BTreeMap<u64, u64>,
}

impl Front {
    /// A joined device able to map.
    ///
    /// # Panics
    /// If joining fails, for which there is no reason.
    pub fn join(fabric: &Arc<Fabric>) -> Front {
        let device = fabric.join(DeviceConfig::default(), Arc::new(Deaf)).expect("joins");
        device.set_window(WINDOW);
        Front { device, jobs: VecDeque::new(), maps: BTreeMap::new() }
    }

    /// Sends a command with a fitting header; returns the reply if the device answers at once.
    pub fn call(&mut self, op: Op, body: &[u8]) -> Option<Answer> {
        let header = RequestHeader { op: (op as u16).into(), tag: 7.into(), ..Default::default() };
        let request = [header.as_bytes(), body].concat();
        self.raw(&request, ROOM)
    }

    /// Any bytes as a command.
    pub fn raw(&mut self, request: &[u8], room: usize) -> Option<Answer> {
        match self.device.command(request, room) {
            Outcome::Reply(reply) => {
                assert!(reply.len() <= room);
                Answer::of(&reply)
            }
            Outcome::Map(job) => {
                self.jobs.push_back(Job::Map(job));
                None
            }
            Outcome::Unmap(job) => {
                self.jobs.push_back(Job::Unmap(job));
                None
            }
        }
    }

    /// The front end does the next job, refuses the job, or loses the answer.
    pub fn complete(&mut self, how: Completion) -> Option<Answer> {
        match self.jobs.pop_front()? {
            Job::Map(job) => {
                let Some(range) = job.request().map(|r| (r.window_offset, r.len)) else {
                    return match how {
                        // The front end is not asked for this one.
                        Completion::Done | Completion::Refused => {
                            Answer::of(&self.device.mapped(job, true))
                        }
                        Completion::Lost { .. } => None,
                    };
                };
                if matches!(how, Completion::Done | Completion::Lost { landed: true }) {
                    self.map(range.0, range.1);
                }
                match how {
                    Completion::Done => Answer::of(&self.device.mapped(job, true)),
                    Completion::Refused => Answer::of(&self.device.mapped(job, false)),
                    Completion::Lost { .. } => None,
                }
            }
            Job::Unmap(job) => {
                let (start, len) = (job.window_offset(), job.len());
                assert_eq!(self.maps.get(&start), Some(&len), "unmaps what is not mapped");
                if matches!(how, Completion::Done | Completion::Lost { landed: true }) {
                    self.maps.remove(&start);
                }
                match how {
                    Completion::Done => Answer::of(&self.device.unmapped(job, true)),
                    Completion::Refused => Answer::of(&self.device.unmapped(job, false)),
                    Completion::Lost { .. } => None,
                }
            }
        }
    }

    fn map(&mut self, start: u64, len: u64) {
        assert!(start.is_multiple_of(2 << 20) && len.is_multiple_of(64 << 10) && len > 0);
        assert!(start + len <= WINDOW, "beyond the window");
        for (&other, &other_len) in &self.maps {
            let apart = start + len <= other || other + other_len <= start;
            assert!(apart, "{start:#x}+{len:#x} overlaps {other:#x}+{other_len:#x}");
        }
        self.maps.insert(start, len);
    }

    /// The front end unmaps leftovers of past lives.
    pub fn settle_stale(&mut self) {
        while let Some(stale) = self.device.stale_map() {
            self.maps.remove(&stale.window_offset());
            self.device.stale_unmapped(stale);
        }
    }
}

/// How a job ends.
#[derive(arbitrary::Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// Done as asked.
    Done,
    /// The front end says no.
    Refused,
    /// No answer; the front end may have acted all the same.
    Lost {
        /// Whether the front end has acted.
        landed: bool,
    },
}

/// Status and body of a reply.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status.
    pub status: Status,
    /// The body; empty unless the status is OK.
    pub body: Vec<u8>,
}

impl Answer {
    /// `None` if the reply was cut to less than a header.
    pub fn of(reply: &[u8]) -> Option<Answer> {
        let (header, body) = ReplyHeader::read_from_prefix(reply).ok()?;
        let status = Status::from_code(header.status.get()).expect("a known status");
        if status != Status::Ok {
            assert!(body.is_empty(), "a refusal has no body");
        }
        Some(Answer { status, body: body.to_vec() })
    }

    /// The body of a success.
    pub fn get<T: FromBytes>(&self) -> Option<T> {
        (self.status == Status::Ok).then(|| T::read_from_bytes(&self.body).expect("its size"))
    }
}

/// Guest memory of a driver: `len` bytes at 1 MiB, or nothing.
///
/// # Panics
/// If there is no memory.
pub fn guest_memory(len: usize) -> GuestMemoryAtomic<GuestMemoryMmap> {
    let ranges: &[(GuestAddress, usize)] = &[(GuestAddress(1 << 20), len)];
    GuestMemoryAtomic::new(GuestMemoryMmap::from_ranges(ranges).expect("memory"))
}
