// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory table of a connection, and the tables that threads still use.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ism_device::shm::BusErrorGuard;
use ism_device::sync::lock;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};

use super::ring::Memory;

/// How long a new memory table waits for threads still using the old table.
const LONGEST_USE: Duration = Duration::from_secs(1);
/// Interval between two checks for such threads.
const PAUSE: Duration = Duration::from_micros(50);

/// The checked memory table. The framework's own handle may show a refused table.
pub(super) struct MemoryTable {
    checked: Memory,
    /// Guards of the tables in use: a lost page ends the connection, not the daemon.
    contained: Mutex<Vec<BusErrorGuard>>,
}

impl MemoryTable {
    /// An empty table.
    pub(super) fn new() -> MemoryTable {
        MemoryTable { checked: Memory::new(GuestMemoryMmap::new()), contained: Mutex::default() }
    }

    /// The handle of the present table.
    pub(super) fn handle(&self) -> &Memory {
        &self.checked
    }

    /// Replaces the table. Waits for threads using an old table: memory missing from the new table
    /// belongs to the front end again. A thread blocked by a front end keeps its table until the next
    /// table comes.
    pub(super) fn replace(&self, table: Arc<GuestMemoryMmap>, mut contained: BusErrorGuard) {
        if let Ok(checked) = self.checked.lock() {
            checked.replace(GuestMemoryMmap::clone(&table));
        }
        contained.keep(self.checked.memory().into_inner());
        drop(table);
        let mut all = lock(&self.contained);
        let end = Instant::now() + LONGEST_USE;
        while all.iter().any(BusErrorGuard::is_in_use) && Instant::now() < end {
            std::thread::sleep(PAUSE);
        }
        all.push(contained);
        all.retain(BusErrorGuard::is_in_use);
    }
}
