// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The handle of a device for other devices, usable without the device's lock.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use virtio_ism_abi::config::Features;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use super::copy_watch::CopyWatch;
use super::counters::Counters;
use super::fixed_window::FixedWindow;
use super::limits::Clock;
use super::rate::Rate;
use super::sync::{read, write};

/// Notifies a device of events to deliver.
pub trait EventNotifier: Send + Sync {
    /// Events wait for this device. Called from any thread; must not block. May call into a device only with
    /// [`Delivery::Inline`].
    fn notify(&self, delivery: Delivery);

    /// Another device's thread had to wait for a page of this device's memory. Called from any
    /// thread; must not block.
    fn memory_was_slow(&self) {}
}

/// The thread allowed to deliver the events of a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Another thread has to deliver: the caller may hold locks of a device needed again for delivery.
    Deferred,
    /// The calling thread may deliver, because it holds no lock of any device.
    Inline,
}

/// The part of a device shared by its sessions, used by other devices without the device's lock.
pub(super) struct DeviceHandle {
    /// Unique on the fabric.
    pub(super) member: u64,
    pub(super) notifier: Arc<dyn EventNotifier>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) counters: Counters,
    pub(super) wake_rate: Rate,
    /// Copies into the device's memory.
    pub(super) copies: CopyWatch,
    /// Doorbells of own slabs with descriptors held by the daemon.
    pub(super) doorbells: AtomicU32,
    /// The window of a front end that maps at its start only.
    pub(super) fixed_window: Option<Arc<FixedWindow>>,
    memory: RwLock<Option<GuestMemoryAtomic<GuestMemoryMmap>>>,
    window: AtomicU64,
    features: AtomicU64,
}

impl std::fmt::Debug for DeviceHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceHandle").field("member", &self.member).finish_non_exhaustive()
    }
}

impl DeviceHandle {
    pub(super) fn new(
        member: u64,
        notifier: Arc<dyn EventNotifier>,
        clock: Arc<dyn Clock>,
        wake_rate: Rate,
        fixed_window: Option<Arc<FixedWindow>>,
    ) -> DeviceHandle {
        let window = fixed_window.as_ref().map_or(0, |window| window.size());
        DeviceHandle {
            member,
            notifier,
            clock,
            counters: Counters::default(),
            wake_rate,
            copies: CopyWatch::default(),
            doorbells: AtomicU32::new(0),
            fixed_window,
            memory: RwLock::new(None),
            window: AtomicU64::new(window),
            features: AtomicU64::new(Features::all().bits()),
        }
    }

    pub(super) fn set_memory(&self, memory: GuestMemoryAtomic<GuestMemoryMmap>) {
        *write(&self.memory) = Some(memory);
    }

    pub(super) fn memory(&self) -> Option<GuestMemoryAtomic<GuestMemoryMmap>> {
        read(&self.memory).clone()
    }

    pub(super) fn set_window(&self, bytes: u64) {
        self.window.store(bytes, Ordering::Relaxed);
    }

    /// Bytes the front end can map.
    pub(super) fn window(&self) -> u64 {
        self.window.load(Ordering::Relaxed)
    }

    pub(super) fn set_features(&self, features: Features) {
        self.features.store(features.bits(), Ordering::Relaxed);
    }

    pub(super) fn features(&self) -> Features {
        Features::from_bits_truncate(self.features.load(Ordering::Relaxed))
    }

    /// Identification of the front end on the fabric, beyond the connections of its function.
    pub(super) fn front_end(&self) -> u64 {
        self.fixed_window.as_ref().map_or(self.member, |window| window.id())
    }

    /// Whether the driver reaches armed words, and has agreed to wake threads sleeping on them.
    pub(super) fn knows_futex(&self) -> bool {
        self.has_window() && self.features().contains(Features::PEER_FUTEX)
    }

    /// Whether the driver reaches the lines of slabs, and has agreed to raise them.
    pub(super) fn knows_slab_line(&self) -> bool {
        self.has_window() && self.features().contains(Features::SLAB_LINE)
    }

    /// Whether the driver is its own front end, and has agreed to take and ring doorbells.
    pub(super) fn knows_doorbell(&self) -> bool {
        self.has_window() && self.features().contains(Features::DOORBELL)
    }

    /// Whether the front end can map and the driver has agreed to use mappings.
    pub(super) fn has_window(&self) -> bool {
        self.window() > 0 && self.features().contains(Features::WINDOW)
    }
}
