// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use std::cell::{Cell, RefCell};
use std::rc::Rc;

use rustix::fs::{MemfdFlags, memfd_create};

use virtio_ism_abi::virtio_pci::VERSION_1;

use super::*;
use crate::dma::MemoryRegion;

/// Requests to the back end.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Asked {
    Features(u64),
    Memory(Vec<(u64, u64)>),
    Start(u16, QueueLayout, bool),
    Call(u16, bool),
    Stop(u16),
    Reset,
    Kick(u16),
}

/// A back end recording its requests.
#[derive(Clone, Default)]
struct Noted {
    asked: Rc<RefCell<Vec<Asked>>>,
    config: Rc<Cell<u8>>,
    kicks: Rc<RefCell<Vec<OwnedFd>>>,
    /// The interrupt eventfd of the queue.
    call: Rc<RefCell<Option<OwnedFd>>>,
    /// Serves kicks itself.
    serves: Rc<Cell<bool>>,
    /// Has memory.
    has_memory: Rc<Cell<bool>>,
    /// Has ended.
    is_gone: Rc<Cell<bool>>,
    connections: Rc<Cell<usize>>,
}

impl Noted {
    fn note(&self, asked: Asked) -> Result<(), BackEndError> {
        if self.is_gone.get() {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        }
        self.asked.borrow_mut().push(asked);
        Ok(())
    }

    fn taken(&self) -> Vec<Asked> {
        self.asked.take()
    }
}

const OFFERED: u64 = VERSION_1 | 1 << 29 | 5;
/// Requests of a stop.
const STOPPED: [Asked; 3] = [Asked::Stop(0), Asked::Reset, Asked::Memory(Vec::new())];

impl BackEnd for Noted {
    fn link(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn features(&mut self) -> Result<u64, BackEndError> {
        Ok(OFFERED)
    }
    fn set_features(&mut self, features: u64) -> Result<(), BackEndError> {
        self.note(Asked::Features(features))
    }
    fn config(&mut self, len: u16) -> Result<Vec<u8>, BackEndError> {
        Ok(vec![self.config.get(); len.into()])
    }
    fn set_memory(&mut self, regions: &[MemoryRegion<'_>]) -> Result<(), BackEndError> {
        if !self.has_memory.replace(!regions.is_empty()) && regions.is_empty() {
            return Ok(());
        }
        self.note(Asked::Memory(regions.iter().map(|r| (r.address, r.size)).collect()))
    }
    fn start_queue(
        &mut self,
        queue: u16,
        layout: &QueueLayout,
        kick: BorrowedFd<'_>,
        call: Option<BorrowedFd<'_>>,
    ) -> Result<(), BackEndError> {
        self.kicks.borrow_mut().push(kick.try_clone_to_owned().unwrap());
        *self.call.borrow_mut() = call.map(|fd| fd.try_clone_to_owned().unwrap());
        self.note(Asked::Start(queue, *layout, call.is_some()))
    }
    fn kick(&mut self, queue: u16) -> bool {
        self.serves.get() && self.note(Asked::Kick(queue)).is_ok()
    }
    fn set_call(&mut self, queue: u16, call: Option<BorrowedFd<'_>>) -> Result<(), BackEndError> {
        *self.call.borrow_mut() = call.map(|fd| fd.try_clone_to_owned().unwrap());
        self.note(Asked::Call(queue, call.is_some()))
    }
    fn stop_queue(&mut self, queue: u16) -> Result<(), BackEndError> {
        self.note(Asked::Stop(queue))
    }
    fn reset(&mut self) -> Result<(), BackEndError> {
        self.note(Asked::Reset)
    }
}

const IDENTITY: Identity =
    Identity { device_id: 44, class: 0x07_8000, config_len: 72, queues: 4, queue_size: 256 };

/// Memory of a guest, from address 0.
const MEMORY: u64 = 0x10_0000;
const LAYOUT: QueueLayout =
    QueueLayout { size: 64, descriptors: 0x1000, available: 0x2000, used: 0x3000 };

/// Runs a test on a device without memory.
fn with_device(back_end: &Noted, test: impl FnOnce(&mut Device<'_, Noted>)) {
    let mut connect = || {
        if back_end.is_gone.get() {
            return Err(BackEndError::Missing("life"));
        }
        back_end.connections.set(back_end.connections.get() + 1);
        Ok(back_end.clone())
    };
    let mut report = |_: Event<'_>| ();
    let mut device = Device::new(IDENTITY, None, &mut connect, &mut report).unwrap();
    test(&mut device);
}

impl Device<'_, Noted> {
    fn store<const N: usize>(&mut self, at: usize, value: [u8; N]) {
        self.write(STRUCTURES_BAR, at as u64, &value).unwrap();
    }

    fn load<const N: usize>(&mut self, at: usize) -> [u8; N] {
        let mut data = [0; N];
        self.read(STRUCTURES_BAR, at as u64, &mut data);
        data
    }

    fn status(&mut self) -> u8 {
        self.load::<1>(STATUS)[0]
    }

    fn map_memory(&mut self, start: u64, size: u64) {
        let mut body = [0; 32];
        put(&mut body, 4, &3u32.to_ne_bytes());
        put(&mut body, 16, &start.to_ne_bytes());
        put(&mut body, 24, &size.to_ne_bytes());
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        self.map(&Fields(&body), Some(file)).unwrap();
    }

    fn unmap_all(&mut self) {
        let mut body = [0; 24];
        put(&mut body, 4, &2u32.to_ne_bytes());
        self.unmap(&Fields(&body)).unwrap();
    }

    fn give_eventfd(&mut self, vector: u32) -> OwnedFd {
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let mut body = [0; 20];
        for (at, value) in [(4, 0x24u32), (8, 2), (12, vector), (16, 1)] {
            put(&mut body, at, &value.to_ne_bytes());
        }
        self.set_irqs(&Fields(&body), vec![fd.try_clone().unwrap()]).unwrap();
        fd
    }

    fn accept(&mut self, features: u64) {
        self.store(STATUS, [0]);
        self.store(STATUS, [1]);
        self.store(STATUS, [3]);
        for select in [0u32, 1] {
            self.store(DRIVER_FEATURE_SELECT, select.to_le_bytes());
            let half = (features >> (32 * select)) as u32;
            self.store(DRIVER_FEATURE, half.to_le_bytes());
        }
        self.store(STATUS, [11]);
    }

    fn set_queue(&mut self, queue: u16, layout: &QueueLayout) {
        self.store(QUEUE_SELECT, queue.to_le_bytes());
        self.store(QUEUE_SIZE, layout.size.to_le_bytes());
        self.store(QUEUE_VECTOR, (queue + 1).to_le_bytes());
        self.store(QUEUE_DESC, layout.descriptors.to_le_bytes());
        self.store(QUEUE_DRIVER, (layout.available as u32).to_le_bytes());
        self.store(QUEUE_DRIVER + 4, ((layout.available >> 32) as u32).to_le_bytes());
        self.store(QUEUE_DEVICE, layout.used.to_le_bytes());
        self.store(QUEUE_ENABLE, 1u16.to_le_bytes());
    }

    fn bring_up(&mut self) {
        self.map_memory(0, MEMORY);
        self.accept(OFFERED);
        self.set_queue(0, &LAYOUT);
        self.store(STATUS, [15]);
        assert_eq!(self.status(), 15);
    }
}

#[test]
fn a_driver_brings_a_queue_up_and_kicks_it() {
    let back_end = Noted::default();
    with_device(&back_end, |device| {
        device.give_eventfd(1);
        device.bring_up();
        let memory = Asked::Memory(vec![(0, MEMORY)]);
        let expected = [Asked::Features(OFFERED), memory, Asked::Start(0, LAYOUT, true)];
        assert_eq!(back_end.taken(), expected);
        let kicked = || rustix::io::read(&back_end.kicks.borrow()[0], &mut [0; 8]).is_ok();
        assert!(!kicked());
        device.store(NOTIFY.offset as usize, [0, 0]);
        assert!(kicked());
        device.store(NOTIFY.offset as usize + 4, [1, 0]);
        device.store(NOTIFY.offset as usize + 0xffe, [1, 0]);
        assert!(!kicked(), "a queue that does not run, and one that there is not");
        device.store(STATUS, [0]);
        assert_eq!(back_end.taken(), STOPPED);
        assert_eq!((device.status(), device.load::<2>(QUEUE_ENABLE)), (0, [0, 0]));
    });
}

#[test]
fn features_that_were_not_offered_are_not_accepted() {
    let back_end = Noted::default();
    with_device(&back_end, |device| {
        for features in [OFFERED | 2, OFFERED & !VERSION_1, 0, u64::MAX] {
            device.accept(features);
            assert_eq!(device.status() & FEATURES_OK, 0, "{features:#x}");
        }
        assert_eq!(back_end.taken(), []);
        device.accept(VERSION_1);
        assert_eq!(back_end.taken(), [Asked::Features(VERSION_1)]);
        device.store(DRIVER_FEATURE, [0; 4]);
        assert_eq!(device.load::<4>(DRIVER_FEATURE), 1u32.to_le_bytes(), "it is too late");
    });
}

#[test]
fn rings_that_do_not_lie_in_memory_do_not_reach_the_back_end() {
    let back_end = Noted::default();
    with_device(&back_end, |device| {
        device.map_memory(0, MEMORY);
        device.map_memory(MEMORY, 0x1000);
        let end = MEMORY + 0x1000;
        for wrong in [
            QueueLayout { descriptors: 0x1008, ..LAYOUT },
            QueueLayout { available: 0x2001, ..LAYOUT },
            QueueLayout { used: 0x3002, ..LAYOUT },
            QueueLayout { descriptors: end - 64 * 16 + 16, ..LAYOUT },
            QueueLayout { available: end, ..LAYOUT },
            QueueLayout { used: u64::MAX - 3, ..LAYOUT },
            QueueLayout { descriptors: u64::MAX - 15, ..LAYOUT },
            // Across two files.
            QueueLayout { used: MEMORY - 4, ..LAYOUT },
        ] {
            device.accept(OFFERED);
            device.set_queue(0, &wrong);
            device.store(STATUS, [15]);
            assert_ne!(device.status() & NEEDS_RESET, 0, "{wrong:?}");
        }
        let asked = back_end.taken();
        assert!(!asked.iter().any(|asked| matches!(asked, Asked::Start(..))), "{asked:?}");
    });
}

#[test]
fn sizes_that_no_queue_has_are_left_out() {
    with_device(&Noted::default(), |device| {
        for size in [0u16, 3, 512, u16::MAX] {
            device.store(QUEUE_SIZE, size.to_le_bytes());
            assert_eq!(device.load::<2>(QUEUE_SIZE), 256u16.to_le_bytes());
        }
        device.store(QUEUE_SELECT, 4u16.to_le_bytes());
        assert_eq!(device.load::<2>(QUEUE_SIZE), [0, 0], "there is no such queue");
        device.store(QUEUE_VECTOR, [1, 0]);
        device.store(QUEUE_ENABLE, [1, 0]);
        device.store(CONFIG_VECTOR, 5u16.to_le_bytes());
        assert_eq!(device.load::<2>(CONFIG_VECTOR), [0xff, 0xff], "there is no such vector");
    });
}

#[test]
fn memory_that_comes_and_goes_is_the_back_ends_at_once() {
    let back_end = Noted::default();
    with_device(&back_end, |device| {
        device.bring_up();
        back_end.taken();
        device.map_memory(1 << 30, 0x1000);
        let both = vec![(0, MEMORY), (1 << 30, 0x1000)];
        assert_eq!(back_end.taken(), [Asked::Memory(both)]);
        device.unmap_all();
        assert_eq!(back_end.taken(), STOPPED);
        assert_ne!(device.status() & NEEDS_RESET, 0, "its rings have gone");
        device.bring_up();
    });
}

#[test]
fn a_vector_that_changes_is_the_back_ends_at_once() {
    let back_end = Noted::default();
    with_device(&back_end, |device| {
        device.bring_up();
        back_end.taken();
        device.give_eventfd(1);
        device.give_eventfd(2);
        assert_eq!(back_end.taken(), [Asked::Call(0, true)]);
        device.store(QUEUE_VECTOR, NO_VECTOR.to_le_bytes());
        assert_eq!(back_end.taken(), [Asked::Call(0, false)]);
    });
}

#[test]
fn a_back_end_without_queues_that_run_has_no_memory() {
    let back_end = Noted::default();
    with_device(&back_end, |device| {
        for end in 0..4 {
            device.bring_up();
            assert!(back_end.has_memory.get());
            match end {
                0 => device.store(STATUS, [0]),
                1 => device.reset().unwrap(),
                2 => {
                    device.write(CONFIG, 4, &[6, 0]).unwrap();
                    device.write(CONFIG, 4, &[2, 0]).unwrap();
                }
                _ => device.unmap_all(),
            }
            assert!(!back_end.has_memory.get(), "end {end}");
            device.unmap_all();
            device.map_memory(1 << 30, 0x1000);
            device.unmap_all();
            assert!(!back_end.has_memory.get(), "nobody asked for memory");
        }
    });
}

#[test]
fn an_interrupt_waits_for_the_vectors_eventfd() {
    let back_end = Noted::default();
    with_device(&back_end, |device| {
        device.bring_up();
        let interrupt = |back_end: &Noted| {
            rustix::io::write(back_end.call.borrow().as_ref().unwrap(), &[1, 0, 0, 0, 0, 0, 0, 0])
        };
        let pending = |device: &mut Device<'_, Noted>| {
            let mut data = [0xff; 4];
            device.read(MSIX_BAR, PENDING_BITS.offset - 1, &mut data);
            data
        };
        assert_eq!(pending(device), [0xff, 0, 0, 0]);
        interrupt(&back_end).unwrap();
        assert_eq!(pending(device), [0xff, 2, 0, 0]);
        let eventfd = device.give_eventfd(1);
        assert!(rustix::io::read(&eventfd, &mut [0; 8]).is_ok(), "it is delivered");
        assert_eq!(pending(device), [0xff, 0, 0, 0]);
        interrupt(&back_end).unwrap();
        assert!(rustix::io::read(&eventfd, &mut [0; 8]).is_ok(), "the back end has this one now");
        // The function's own interrupts wait as well, and a reset forgets them.
        device.store(CONFIG_VECTOR, [0, 0]);
        device.unmap_all();
        assert_eq!(pending(device), [0xff, 1, 0, 0]);
        device.store(STATUS, [0]);
        assert_eq!(pending(device), [0xff, 0, 0, 0]);
    });
}

#[test]
fn a_back_end_that_serves_kicks_itself_gets_no_eventfd_for_them() {
    let back_end = Noted::default();
    with_device(&back_end, |device| {
        device.bring_up();
        let kicked = || rustix::io::read(&back_end.kicks.borrow()[0], &mut [0; 8]).is_ok();
        back_end.serves.set(true);
        device.store(NOTIFY.offset as usize, [0, 0]);
        assert!(!kicked());
        assert_eq!(back_end.taken().pop(), Some(Asked::Kick(0)));
        device.store(NOTIFY.offset as usize + 4, [1, 0]);
        assert_eq!(back_end.taken(), [], "a queue that does not run");
        back_end.serves.set(false);
        device.store(NOTIFY.offset as usize, [0, 0]);
        assert!(kicked());
    });
}

#[test]
fn a_back_end_that_ends_needs_a_reset_and_comes_back_by_it() {
    let back_end = Noted::default();
    with_device(&back_end, |device| {
        device.bring_up();
        let interrupt = device.give_eventfd(0);
        device.store(CONFIG_VECTOR, [0, 0]);
        device.lose_back_end(&BackEndError::Missing("life"));
        assert_ne!(device.status() & NEEDS_RESET, 0);
        assert!(rustix::io::read(&interrupt, &mut [0; 8]).is_ok(), "the driver hears of it");
        device.store(NOTIFY.offset as usize, [0, 0]);
        device.map_memory(1 << 30, 0x1000);
        assert_eq!(back_end.connections.get(), 1);
        device.bring_up_again();
        assert_eq!(back_end.connections.get(), 2);
        back_end.is_gone.set(true);
        // The back end refuses the stop, and no other is available.
        assert!(device.write(STRUCTURES_BAR, STATUS as u64, &[0]).is_err());
    });
}

impl Device<'_, Noted> {
    fn bring_up_again(&mut self) {
        self.accept(OFFERED);
        self.set_queue(0, &LAYOUT);
        self.store(STATUS, [15]);
        assert_eq!(self.status(), 15);
    }
}

#[test]
fn a_function_that_is_reset_or_no_bus_master_stops() {
    let back_end = Noted::default();
    with_device(&back_end, |device| {
        device.bring_up();
        device.write(CONFIG, 4, &[6, 0]).unwrap();
        back_end.taken();
        device.write(CONFIG, 4, &[2, 0]).unwrap();
        assert_eq!(back_end.taken(), STOPPED);
        assert_eq!(device.status() & DRIVER_OK, 0);
        device.bring_up_again();
        back_end.taken();
        device.reset().unwrap();
        assert_eq!(back_end.taken(), STOPPED);
        assert_eq!(device.status(), 0);
    });
}

#[test]
fn a_configuration_that_changes_has_another_generation() {
    let back_end = Noted::default();
    with_device(&back_end, |device| {
        let generation = device.load::<1>(GENERATION);
        assert_eq!(device.load::<1>(DEVICE.offset as usize), [0]);
        back_end.config.set(7);
        assert_eq!(device.load::<1>(DEVICE.offset as usize), [0], "one state between two reads");
        assert_ne!(device.load::<1>(GENERATION), generation);
        assert_eq!(device.load::<2>(DEVICE.offset as usize + 71), [7, 0], "and zeros behind it");
    });
}

#[test]
fn registers_can_be_reached_by_the_configuration_space() {
    with_device(&Noted::default(), |device| {
        let access = 0x98;
        device.write(CONFIG, access + 8, &(STATUS as u32).to_le_bytes()).unwrap();
        device.write(CONFIG, access + 12, &1u32.to_le_bytes()).unwrap();
        device.write(CONFIG, access + 16, &[1]).unwrap();
        assert_eq!(device.status(), 1);
        let mut data = [0];
        device.read(CONFIG, access + 16, &mut data);
        assert_eq!(data, [1]);
        // An absent BAR, the configuration space itself, and offsets beyond the end.
        for (bar, offset) in [(5u8, 0u32), (7, 0), (0, u32::MAX - 3), (255, 0)] {
            device.write(CONFIG, access + 4, &[bar]).unwrap();
            device.write(CONFIG, access + 8, &offset.to_le_bytes()).unwrap();
            device.write(CONFIG, access + 12, &4u32.to_le_bytes()).unwrap();
            device.write(CONFIG, access + 16, &[0; 4]).unwrap();
            device.read(CONFIG, access + 16, &mut [0; 4]);
        }
    });
}
