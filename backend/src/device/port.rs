//! A device as its front end sees it.

use std::time::Duration;

use virtio_ism_abi::Status;
use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::event::EVENT_LEN;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap, ReadVolatile};
use zerocopy::FromZeros;

use super::{DeviceInfo, MapJob, Outcome, Reply, StaleMap, UnmapJob};

/// How a device learns that it has something to take.
pub trait Doorbell: Send + Sync {
    /// Events wait for this device. Called from any thread; must not block, and must not call into
    /// the device.
    fn ring(&self);
}

/// How a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// The driver reset the device or said HELLO anew.
    Orderly,
    /// The front end vanished or broke a rule.
    Failed,
}

/// What became of a MOVE chain.
#[derive(Debug)]
#[must_use = "publish the status, then deliver the wake"]
pub struct Moved {
    /// To be written as le32 into the chain's writable part.
    pub status: Status,
    /// To be delivered after the used element was published.
    pub wake: Option<Wake>,
}

/// A wake of another device, owed.
#[derive(Debug)]
pub struct Wake {}

impl Wake {
    /// Wakes the owner. Call it after the chain's used element was published: a driver that sees
    /// its kick outstanding skips the next one.
    pub fn deliver(self) {}
}

/// A front end's place on a fabric.
#[derive(Debug)]
pub struct Device {}

impl Device {
    /// The configuration space.
    pub fn config(&self) -> Config {
        Config::new_zeroed()
    }

    /// The features the driver accepted. Ops of others get EINVAL. All, until told.
    pub fn set_features(&self, _features: Features) {}

    /// Size of the window in bytes, a power of two; 0 (as at first) if the front end cannot map or
    /// does not acknowledge that it has. Ignored while a life has mappings.
    pub fn set_window(&self, _bytes: u64) {}

    /// The driver's memory. Called again after the handle changed; its content may change at any
    /// time.
    pub fn set_memory(&self, _memory: GuestMemoryAtomic<GuestMemoryMmap>) {}

    /// Carries out a control command. `request` is a private copy of all readable bytes,
    /// `reply_room` the number of writable bytes. An empty reply means there is no room even for
    /// the header.
    pub fn command(&self, _request: &[u8], _reply_room: usize) -> Outcome {
        Outcome::Reply(Reply { bytes: [0; Reply::MAX], len: 0 })
    }

    /// Ends a job: the front end acknowledged (`ok`) or refused.
    pub fn mapped(&self, _job: MapJob, _ok: bool) -> Reply {
        Reply { bytes: [0; Reply::MAX], len: 0 }
    }

    /// Ends a job: the front end acknowledged (`ok`) or refused.
    pub fn unmapped(&self, _job: UnmapJob, _ok: bool) -> Reply {
        Reply { bytes: [0; Reply::MAX], len: 0 }
    }

    /// A range that a past life left mapped, if there is one: after HELLO was answered, ask the
    /// front end to unmap it and call [`stale_unmapped`](Self::stale_unmapped).
    pub fn stale_map(&self) -> Option<StaleMap> {
        None
    }

    /// The front end answered, one way or the other: a refusal means that nothing is mapped there.
    pub fn stale_unmapped(&self, _stale: StaleMap) {}

    /// Carries out one MOVE chain. `head` is a private copy of header and segments (so `24 + 8 *
    /// nseg` bytes), `payload` reads the rest, of which there are `payload_len` bytes.
    pub fn transfer<R: ReadVolatile>(
        &self,
        _head: &[u8],
        _payload: &mut R,
        _payload_len: u64,
    ) -> Moved {
        Moved { status: Status::Estate, wake: None }
    }

    /// Whether [`next_event`](Self::next_event) would give a record now.
    pub fn has_events(&self) -> bool {
        false
    }

    /// The next record. To be called only with a buffer in hand: what it gives is forgotten here.
    pub fn next_event(&self) -> Option<[u8; EVENT_LEN]> {
        None
    }

    /// Time until a wake that is delayed by its rate limit can be taken; `None` if there is none.
    pub fn next_event_in(&self) -> Option<Duration> {
        None
    }

    /// Ends the life, if there is one: reset or loss of the front end.
    pub fn end(&self, _how: Departure) {}

    /// The device as it is now.
    pub fn info(&self) -> DeviceInfo {
        DeviceInfo::default()
    }
}
