// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of an ISM device.

use std::time::Duration;

use crate::transport::{DeviceAddress, SetupOptions};

/// The data path for DMBs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefer {
    /// The window if both sides can map the window and its speed is as high as memory's; else moves.
    #[default]
    Auto,
    /// The window wherever both sides can map, without a measurement of its speed.
    Window,
    /// Moves by the device, even for DMBs in the window.
    Move,
}

/// Options for [`IsmDevice::open`](super::IsmDevice::open).
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Address of the device.
    pub address: DeviceAddress,
    /// Move queues to use, at most the device's number; at least 1.
    pub move_queues: u16,
    /// Memory reachable by the device, bytes, rounded up to a power of two: guest-memory DMBs, bounce slots,
    /// rings. A page is allocated at the first touch.
    pub guest_memory: u64,
    /// The data path for DMBs.
    pub prefer: Prefer,
    /// Most own DMBs, at most the device's limit.
    pub max_dmbs: u32,
    /// The owner leaves at the device's request: takes `IsmEvent::Leave` and answers by
    /// [`IsmDevice::left`](super::IsmDevice::left). Otherwise the device does not ask.
    pub leaves: bool,
    /// The only user besides root whose daemon may have the device; `None`: any user's daemon may.
    pub owner: Option<u32>,
    /// Longest wait for a device behind a socket in use by another process.
    pub timeout: Duration,
}

impl OpenOptions {
    /// The part of the options for the transport.
    pub(super) fn setup(&self) -> SetupOptions {
        let OpenOptions { move_queues, guest_memory, leaves, owner, .. } = *self;
        SetupOptions { move_queues, guest_memory, leaves, owner }
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
            owner: None,
            timeout: Duration::from_secs(10),
        }
    }
}
