// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's side of tests of the virtual machine monitor: a driver initialising vhost-user devices
//! with a shared memory region and reading the region, without any knowledge of ISM.
//!
//! `smc-test-peer probe PCI-ID` takes the functions of this device id (`0x106c`) in the order of their
//! addresses, and an order per line of standard input; each order has a line of answer:
//!
//! ```text
//! start N         resets and initialises function N      status S
//! reset N         resets function N                      took T us
//! status N        reads its status                       status S
//! peek N OFFSET   8 bytes of its region                  word W
//! spin N MS       starts it again and again, for MS ms   resets COUNT
//! race LAST       see below                              missed M, latest T us
//! ```
//!
//! For each number from 1 to LAST, `race` waits for the number in the first word of function 0's region,
//! at once checks the number's [`slot`] for its [`mark`], and acknowledges with the number in the second
//! word.

use std::fs::{self, File, OpenOptions};
use std::io::stdin;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ism_sys::{DmaMemory, Registers, SharedMem, SharedSlice};

/// Bytes of a slot of the region.
pub const SLOT: u64 = 64 << 10;

/// Bytes of the region mapped by the guest.
const MAPPED: usize = 64 << 20;

/// Offset of a slot in the region, bytes. The first MiB belongs to the tests' own protocol.
pub fn slot(n: u64) -> u64 {
    (1 << 20) + n * SLOT
}

/// The word at the start of a mapped slot.
pub fn mark(n: u64) -> u64 {
    0x6d61_726b_0000_0000 | n
}

/// `virtio_pci_common_cfg` (virtio 1.3, 4.1.4.3), at the start of BAR 2.
mod common {
    pub(super) const DRIVER_FEATURE_SELECT: usize = 8;
    pub(super) const DRIVER_FEATURE: usize = 12;
    pub(super) const STATUS: usize = 20;
    pub(super) const QUEUE_SELECT: usize = 22;
    pub(super) const QUEUE_SIZE: usize = 24;
    pub(super) const QUEUE_ENABLE: usize = 28;
    pub(super) const QUEUE_DESC: usize = 32;
    pub(super) const QUEUE_DRIVER: usize = 40;
    pub(super) const QUEUE_DEVICE: usize = 48;
}

const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
/// VIRTIO_F_VERSION_1 is bit 0 of the second 32 features.
const VERSION_1: u32 = 1;

const QUEUES: u16 = 4;
const QUEUE_ENTRIES: u16 = 16;
/// Bytes of a queue's memory: a page for each of its three parts, and one to spare.
const QUEUE_BYTES: usize = 16 << 10;

struct Function {
    registers: Registers,
    region: Arc<SharedMem>,
    queues: SharedSlice,
    physical: u64,
}

impl Function {
    fn open(dir: &Path, queues: SharedSlice, physical: u64) -> Function {
        let config = open(&dir.join("config"));
        let mut command = [0; 2];
        config.read_exact_at(&mut command, 4).unwrap();
        // Memory space and bus mastering.
        command[0] |= 6;
        config.write_all_at(&command, 4).unwrap();
        let registers = SharedMem::from_fd(open(&dir.join("resource2")), 4096).unwrap();
        let registers = Registers::new(&registers, 0, 4096).unwrap();
        let region = SharedMem::from_fd(open(&dir.join("resource4")), MAPPED).unwrap();
        Function { registers, region, queues, physical }
    }

    fn status(&self) -> u8 {
        self.registers.read_u8(common::STATUS).unwrap()
    }

    fn set_status(&self, status: u8) {
        self.registers.write_u8(common::STATUS, status).unwrap();
    }

    fn reset(&self) -> Duration {
        let start = Instant::now();
        self.set_status(0);
        while self.status() != 0 {}
        start.elapsed()
    }

    fn start(&self) {
        let registers = &self.registers;
        self.reset();
        self.set_status(ACKNOWLEDGE);
        self.set_status(ACKNOWLEDGE | DRIVER);
        for (select, features) in [(0, 0), (1, VERSION_1)] {
            registers.write_u32(common::DRIVER_FEATURE_SELECT, select).unwrap();
            registers.write_u32(common::DRIVER_FEATURE, features).unwrap();
        }
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        self.queues.zero(0, self.queues.len()).unwrap();
        for queue in 0..QUEUES {
            registers.write_u16(common::QUEUE_SELECT, queue).unwrap();
            registers.write_u16(common::QUEUE_SIZE, QUEUE_ENTRIES).unwrap();
            let at = self.physical + u64::from(queue) * QUEUE_BYTES as u64;
            let parts = [common::QUEUE_DESC, common::QUEUE_DRIVER, common::QUEUE_DEVICE];
            for (register, address) in parts.into_iter().zip([at, at + 4096, at + 8192]) {
                registers.write_u32(register, address as u32).unwrap();
                registers.write_u32(register + 4, (address >> 32) as u32).unwrap();
            }
            registers.write_u16(common::QUEUE_ENABLE, 1).unwrap();
        }
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }

    fn slice(&self) -> SharedSlice {
        self.region.slice(0, MAPPED).unwrap()
    }

    fn peek(&self, offset: usize) -> u64 {
        self.slice().atomic_u64(offset).unwrap().load(Ordering::Acquire)
    }
}

fn open(path: &Path) -> File {
    let file = OpenOptions::new().read(true).write(true).open(path);
    file.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn functions(id: &str) -> Vec<PathBuf> {
    let dirs = fs::read_dir("/sys/bus/pci/devices").unwrap();
    let mut dirs: Vec<PathBuf> = dirs.map(|entry| entry.unwrap().path()).collect();
    dirs.sort();
    let is = |dir: &Path, file, text| fs::read_to_string(dir.join(file)).unwrap().trim() == text;
    dirs.retain(|dir| is(dir, "vendor", "0x1af4") && is(dir, "device", id));
    dirs
}

fn race(function: &Function, last: u64) -> String {
    let region = function.slice();
    let (mut missed, mut latest) = (0, Duration::ZERO);
    let number = region.atomic_u64(0).unwrap();
    let answer = region.atomic_u64(8).unwrap();
    for look in 1..=last {
        let word = region.atomic_u64(slot(look) as usize).unwrap();
        while number.load(Ordering::Acquire) != look {
            std::hint::spin_loop();
        }
        let start = Instant::now();
        if word.load(Ordering::Acquire) != mark(look) {
            missed += 1;
            while word.load(Ordering::Acquire) != mark(look) {
                assert!(start.elapsed() < Duration::from_secs(5), "slot {look} never appears");
            }
            latest = latest.max(start.elapsed());
        }
        answer.store(look, Ordering::Release);
    }
    format!("missed {missed}, latest {} us", latest.as_micros())
}

/// Carries out the orders on standard input.
///
/// # Panics
/// On unknown orders, or unusable functions.
pub fn run(id: &str, say: fn(&str)) {
    let (memory, pieces) = DmaMemory::allocate(2 << 20, 2 << 20).unwrap().into_parts();
    let bytes = usize::from(QUEUES) * QUEUE_BYTES;
    let of = |(n, dir): (usize, PathBuf)| {
        let at = n * bytes;
        Function::open(&dir, memory.slice(at, bytes).unwrap(), pieces[0] + at as u64)
    };
    let functions: Vec<Function> = functions(id).into_iter().enumerate().map(of).collect();
    say(&format!("functions {}", functions.len()));
    for line in stdin().lines() {
        let line = line.unwrap();
        let mut words = line.split_whitespace();
        let order = words.next().unwrap_or_default();
        let numbers: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
        let answer = match (order, &numbers[..]) {
            ("start", &[n]) => {
                let function = &functions[n as usize];
                function.start();
                format!("status {:#x}", function.status())
            }
            ("reset", &[n]) => format!("took {} us", functions[n as usize].reset().as_micros()),
            ("status", &[n]) => format!("status {:#x}", functions[n as usize].status()),
            ("peek", &[n, at]) => {
                format!("word {:#x}", functions[n as usize].peek(at as usize))
            }
            ("spin", &[n, ms]) => {
                let (start, mut count) = (Instant::now(), 0);
                while start.elapsed() < Duration::from_millis(ms) {
                    functions[n as usize].start();
                    count += 1;
                }
                format!("resets {count}")
            }
            ("race", &[last]) => race(&functions[0], last),
            _ => panic!("unknown order: {line}"),
        };
        say(&answer);
    }
}
