// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Resources of a process and of a daemon, counted before and after.

use std::fs;

use vhost_device_ism::Daemon;

/// Resources of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Open descriptors.
    pub descriptors: usize,
    /// Mapped bytes of memory files (slabs, guest memory). The number of mappings is no measure: the
    /// kernel joins neighbours.
    pub mapped: usize,
    /// Threads.
    pub threads: usize,
}

impl Process {
    /// Now. Only means something while no other test runs in this process.
    pub fn now() -> Process {
        let entries = |dir| fs::read_dir(dir).map_or(0, |entries| entries.count());
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Process {
            // One more descriptor reads the directory, each time.
            descriptors: entries("/proc/self/fd"),
            mapped: maps.lines().filter(|line| line.contains("memfd:")).map(len).sum(),
            threads: entries("/proc/self/task"),
        }
    }
}

/// The length of a mapping, from its line in `/proc/self/maps`.
fn len(line: &str) -> usize {
    let range = line.split(' ').next().and_then(|range| range.split_once('-'));
    let address = |text| usize::from_str_radix(text, 16).unwrap();
    range.map_or(0, |(start, end)| address(end) - address(start))
}

/// Resources of a daemon's devices, by the daemon's own listing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// Devices whose front end is connected.
    pub connected: usize,
    /// DMBs registered.
    pub dmbs: u64,
    /// DMBs attached.
    pub attached: u64,
    /// Slabs mapped.
    pub slabs: u64,
    /// Commands done; grows.
    pub commands: u64,
}

impl Devices {
    /// Now, over all ports of the daemon.
    pub fn of(daemon: &Daemon) -> Devices {
        daemon.list().iter().filter_map(|port| port.device.as_ref()).fold(
            Devices::default(),
            |sum, device| Devices {
                connected: sum.connected + 1,
                dmbs: sum.dmbs + device.dmbs,
                attached: sum.attached + device.attached,
                slabs: sum.slabs + device.slabs,
                commands: sum.commands + device.counts.commands,
            },
        )
    }

    /// The levels, without counters.
    pub fn levels(self) -> Devices {
        Devices { commands: 0, ..self }
    }
}
