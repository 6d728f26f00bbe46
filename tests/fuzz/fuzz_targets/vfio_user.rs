// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vfio-user client sends arbitrary messages, with or without memory and eventfds, to a function
//! with a checking back end. A running queue has its rings in memory of the back end, regions never
//! overlap, unmapped ranges are gone, and without a queue no region is left. The features are a subset
//! of the offered ones. An interrupt is pending or delivered. Every request with a reply gets one
//! until the stream is invalid.
#![no_main]

use std::collections::BTreeMap;
use std::io::Read;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use vfio_user_virtio::{
    BackEnd, BackEndError, Event, Identity, MemoryRegion, QueueLayout, SharedMemory, serve,
};

#[path = "../../../backend/vfio-user/tests/client/mod.rs"]
mod client;
use client::{
    Client, DMA_MAP, DMA_UNMAP, REGION_READ, REGION_WRITE, RESET, SET_IRQS, longs, words,
};

/// Most messages of one input: the messages and their replies fit into a socket's buffers.
const MOST: usize = 64;
const OFFERED: u64 = 1 << 32 | 1 << 29 | 5;

#[derive(Arbitrary, Debug)]
enum Act {
    Any { command: u8, size: Option<u32>, flags: u8, body: Vec<u8>, fds: u8 },
    Map { start: u8, pages: u8, offset: u8, has_file: bool, flags: u8 },
    Unmap { start: u8, pages: u8, flags: u8 },
    Irqs { start: u8, count: u8, has_fds: bool },
    Store { at: u8, width: u8, value: u64 },
    Config { at: u8, width: u8, value: u32 },
    Kick { queue: u8 },
    Load { region: u8, at: u16, len: u8 },
    Features { high: bool },
    Queue { queue: u8, size: u8, page: u8 },
    Status { status: u8 },
    Reset,
}

/// Begin and end of each region of the back end, shared with the client's side of the test.
type Regions = Arc<Mutex<Vec<(u64, u64)>>>;

/// A back end checking every call. Every second served kick raises an interrupt.
#[derive(Default)]
struct Doubting {
    memory: Regions,
    running: BTreeMap<u16, (QueueLayout, Option<OwnedFd>)>,
    accepted: Option<u64>,
    kicks: usize,
}

impl Doubting {
    fn has(&self, layout: &QueueLayout) -> bool {
        let size = u64::from(layout.size);
        let rings = [
            (layout.descriptors, 16 * size),
            (layout.available, 6 + 2 * size),
            (layout.used, 6 + 8 * size),
        ];
        let memory = self.memory.lock().unwrap();
        let lies_in = |(start, len)| {
            memory.iter().any(|(from, to): &(u64, u64)| *from <= start && start + len <= *to)
        };
        rings.into_iter().all(lies_in)
    }
}

fn copy(call: Option<BorrowedFd<'_>>) -> Option<OwnedFd> {
    call.map(|fd| fd.try_clone_to_owned().unwrap())
}

type Done = Result<(), BackEndError>;

impl BackEnd for Doubting {
    fn link(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn features(&mut self) -> Result<u64, BackEndError> {
        Ok(OFFERED)
    }
    fn set_features(&mut self, features: u64) -> Done {
        assert_eq!(features & !OFFERED, 0);
        self.accepted = Some(features);
        Ok(())
    }
    fn config(&mut self, len: u16) -> Result<Vec<u8>, BackEndError> {
        Ok(vec![0; len.into()])
    }
    fn set_memory(&mut self, regions: &[MemoryRegion<'_>]) -> Done {
        assert!(regions.len() <= 32);
        let new: Vec<_> = regions.iter().map(|r| (r.address, r.address + r.size)).collect();
        assert!(new.windows(2).all(|two| two[0].1 <= two[1].0), "{new:?}");
        assert!(regions.iter().all(|region| region.size > 0));
        *self.memory.lock().unwrap() = new;
        assert!(self.running.values().all(|(layout, _)| self.has(layout)));
        Ok(())
    }
    fn start_queue(
        &mut self,
        queue: u16,
        layout: &QueueLayout,
        _: BorrowedFd<'_>,
        call: Option<BorrowedFd<'_>>,
    ) -> Done {
        assert!(self.accepted.is_some() && queue < 4);
        assert!(layout.size.is_power_of_two() && layout.size <= 256 && self.has(layout));
        assert!(self.running.insert(queue, (*layout, copy(call))).is_none());
        Ok(())
    }
    fn kick(&mut self, queue: u16) -> bool {
        let (_, call) = &self.running[&queue];
        self.kicks += 1;
        if let (Some(call), 0) = (call, self.kicks % 2) {
            rustix::io::write(call, &1u64.to_ne_bytes()).unwrap();
        }
        self.kicks % 3 != 0
    }
    fn set_call(&mut self, queue: u16, call: Option<BorrowedFd<'_>>) -> Done {
        self.running.get_mut(&queue).unwrap().1 = copy(call);
        Ok(())
    }
    fn stop_queue(&mut self, queue: u16) -> Done {
        assert!(self.running.remove(&queue).is_some());
        Ok(())
    }
    fn reset(&mut self) -> Done {
        assert!(self.running.is_empty());
        self.accepted = None;
        Ok(())
    }
}

fuzz_target!(|acts: Vec<Act>| {
    let (near, far) = UnixStream::pair().unwrap();
    let mut client = Client::new(near);
    let identity = Identity { device_id: 44, class: 0, config_len: 72, queues: 4, queue_size: 256 };
    let memory = Regions::default();
    let shown = memory.clone();
    let server = std::thread::spawn(move || {
        let mut report = |event: Event<'_>| drop(format!("{event:?}"));
        let mut connect = || {
            shown.lock().unwrap().clear();
            Ok(Doubting { memory: shown.clone(), ..Doubting::default() })
        };
        let share = |areas| {
            let file = || memfd_create("area", MemfdFlags::CLOEXEC).unwrap();
            let files = (0..areas).map(|_| file()).collect();
            Some(SharedMemory { id: 1, area_len: 4096, files })
        };
        match serve(far, identity, share, &mut connect, &mut report) {
            Err(end) => end.to_string(),
        }
    });
    // One input in two has shared memory.
    match acts.len() % 2 {
        0 => client.version(),
        _ => client.version_as("{\"capabilities\":{\"max_msg_fds\":2,\"sparse_mmap_fds\":true}}"),
    };
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    let events = [(); 18].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap());
    let events: Vec<BorrowedFd<'_>> = events.iter().map(|fd| fd.as_fd()).collect();
    for act in acts.iter().take(MOST) {
        if send(&mut client, act, file.as_fd(), &events, &memory).is_err() {
            break;
        }
    }
    let _ = client.stream.shutdown(Shutdown::Write);
    let mut rest = Vec::new();
    let _ = client.stream.read_to_end(&mut rest);
    server.join().unwrap();
});

fn send(
    client: &mut Client,
    act: &Act,
    file: BorrowedFd<'_>,
    events: &[BorrowedFd<'_>],
    memory: &Regions,
) -> std::io::Result<()> {
    let page = |n: u8| u64::from(n) << 12;
    let mut ask = |command: u16, body: &[u8], fds: &[BorrowedFd<'_>]| {
        client.try_request(command, body, fds).map(drop)
    };
    let mut store = |region: u32, at: u64, data: &[u8]| {
        let mut body = longs(&[at]);
        body.extend(words(&[region, data.len() as u32]));
        body.extend(data);
        ask(REGION_WRITE, &body, &[])
    };
    match act {
        Act::Any { command, size, flags, body, fds } => {
            let body = &body[..body.len().min(512)];
            let fds = &events[..usize::from(*fds).min(events.len())];
            let size = size.unwrap_or(16 + body.len() as u32);
            // No reply is awaited: the stream may be invalid by now.
            client.send_raw([(*command).into(), 0], [size, (*flags).into()], body, fds)?;
            if size as usize != 16 + body.len() || flags & 0x10 == 0 {
                return Err(std::io::ErrorKind::Other.into());
            }
            Ok(())
        }
        Act::Map { start, pages, offset, has_file, flags } => {
            let mut body = words(&[32, (*flags).into()]);
            body.extend(longs(&[page(*offset), page(*start), page(*pages)]));
            ask(DMA_MAP, &body, has_file.then_some(file).as_slice())
        }
        Act::Unmap { start, pages, flags } => {
            let mut body = words(&[24, (*flags).into()]);
            body.extend(longs(&[page(*start), page(*pages)]));
            if client.try_request(DMA_UNMAP, &body, &[])?.is_ok() {
                let all = flags & 2 != 0;
                let gone = (page(*start), page(*start) + page(*pages));
                let memory = memory.lock().unwrap();
                assert!(!memory.iter().any(|(from, to)| all || *from < gone.1 && gone.0 < *to));
            }
            Ok(())
        }
        Act::Irqs { start, count, has_fds } => {
            let body = words(&[20, 0x24, 2, (*start).into(), (*count).into()]);
            let count = usize::from(*count).min(16);
            ask(SET_IRQS, &body, if *has_fds { &events[..count] } else { &[] })
        }
        Act::Store { at, width, value } => {
            let data = value.to_le_bytes();
            store(0, u64::from(*at % 64), &data[..usize::from(width % 8) + 1])
        }
        Act::Config { at, width, value } => {
            let data = value.to_le_bytes();
            store(7, u64::from(*at % 252), &data[..usize::from(width % 4) + 1])
        }
        Act::Kick { queue } => store(0, 0x3000 + 4 * u64::from(*queue), &[0, 0]),
        Act::Load { region, at, len } => {
            let mut body = longs(&[(*at).into()]);
            body.extend(words(&[(*region).into(), (*len).into()]));
            ask(REGION_READ, &body, &[])
        }
        Act::Features { high } => {
            for select in [0u32, 1].into_iter().take(1 + usize::from(*high)) {
                store(0, 8, &select.to_le_bytes())?;
                store(0, 12, &((OFFERED >> (32 * select)) as u32).to_le_bytes())?;
            }
            Ok(())
        }
        Act::Queue { queue, size, page: at } => {
            store(0, 22, &u16::from(*queue % 5).to_le_bytes())?;
            store(0, 24, &(1u16 << (size % 9)).to_le_bytes())?;
            for (register, n) in [(32, 0), (40, 1), (48, 2)] {
                store(0, register, &page(at.wrapping_add(n)).to_le_bytes())?;
            }
            store(0, 28, &[1, 0])
        }
        Act::Status { status } => store(0, 20, &[*status]),
        Act::Reset => ask(RESET, &[], &[]),
    }
}
