// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of an ISM device.

use std::time::Duration;

use crate::transport::{DeviceAddress, SetupOptions};

/// Which data path to use for DMBs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefer {
    /// The window if both sides can map it and it is as fast as memory; else moves.
    #[default]
    Auto,
    /// The window wherever both sides can map, without measuring it.
    Window,
    /// Moves by the device, even for DMBs in the window.
    Move,
}

/// Options for [`IsmDevice::open`](super::IsmDevice::open).
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The device.
    pub address: DeviceAddress,
    /// Move queues to use, at most what the device has; at least 1.
    pub move_queues: u16,
    /// Memory that the device can reach, bytes, rounded up to a power of two: guest-memory DMBs,
    /// bounce slots, rings. Pages are used when they are touched.
    pub guest_memory: u64,
    /// Which data path to use.
    pub prefer: Prefer,
    /// Most own DMBs, at most what the device allows.
    pub max_dmbs: u32,
    /// The owner leaves when the device asks for it: it takes `IsmEvent::Leave` and answers by
    /// [`IsmDevice::left`](super::IsmDevice::left). Otherwise the device does not ask.
    pub leaves: bool,
    /// How long to wait for a device behind a socket that another process uses.
    pub timeout: Duration,
}

impl OpenOptions {
    /// What the transport has to know.
    pub(super) fn setup(&self) -> SetupOptions {
        let OpenOptions { move_queues, guest_memory, leaves, .. } = *self;
        SetupOptions { move_queues, guest_memory, leaves }
    }

    /// The defaults (one move queue, 256 MiB of lazily used guest memory, 4,096 DMBs, ten seconds)
    /// for a device.
    pub fn new(address: impl Into<DeviceAddress>) -> OpenOptions {
        OpenOptions {
            address: address.into(),
            move_queues: 1,
            guest_memory: 256 << 20,
            prefer: Prefer::Auto,
            max_dmbs: 16_384,
            leaves: false,
            timeout: Duration::from_secs(10),
        }
    }
}
