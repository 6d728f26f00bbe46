// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configuration space and feature bits (docs/virtio-ism.md, "Device configuration layout").

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Gid;

/// Device configuration, 72 bytes. Read only and constant from FEATURES_OK to reset.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Config {
    /// Device revision, 1.
    pub revision: U32,
    /// The device's [`Features`], independent of the front end's feature bits.
    pub features: U32,
    /// GID at start; HELLO's reply is authoritative.
    pub gid: Gid,
    /// CHID of the fabric.
    pub chid: U16,
    /// Number of move queues; a driver uses the minimum of this and the transport's number.
    pub num_move_queues: U16,
    /// Exclusive upper bound of a DMB's `idx`.
    pub max_dmbs: U32,
    /// Smallest DMB in bytes, a power of two.
    pub dmb_min: U32,
    /// Largest DMB in bytes, a power of two.
    pub dmb_max: U32,
    /// Alignment of scatter-gather entries of REGISTER, in bytes.
    pub dmb_align: U32,
    /// Largest number of scatter-gather entries of one REGISTER.
    pub max_sg: U16,
    /// Largest number of segments of one MOVE.
    pub max_segs: U16,
    /// Largest payload of one MOVE in bytes.
    pub max_move: U32,
    /// Largest number of attached DMBs.
    pub max_attach: U32,
    /// Largest number of peers this device may relate to.
    pub max_peers: U32,
    /// Alignment of slabs in the window, in bytes.
    pub slab_align: U32,
    /// Size of the window in bytes; 0: this front end cannot map, whatever F_WINDOW says.
    pub window_size: U64,
}

/// Meaningful bytes of configuration space; reads beyond return zeros up to [`CONFIG_SPACE`].
pub const CONFIG_LEN: usize = 72;
/// Bytes of configuration space a front end may ask for.
pub const CONFIG_SPACE: usize = 256;

const _: () = assert!(size_of::<Config>() == CONFIG_LEN);

bitflags! {
    /// Device feature bits. Bits 24 and up belong to virtio and vhost-user.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// The device copies ("move").
        const MOVE = 1 << 0;
        /// DMBs can lie in slabs of the shared-memory window.
        const WINDOW = 1 << 1;
        /// SIGNAL_EVENT and SW_EVENT.
        const SW_EVENT = 1 << 2;
        /// The STATS command.
        const STATS = 1 << 3;
        /// Drivers on one kernel wake each other's threads through the armed words of signal lines.
        const PEER_FUTEX = 1 << 4;
        /// Drivers on one kernel wake each other by doorbells instead of kicks.
        const DOORBELL = 1 << 5;
        /// Drivers raise the line of a slab for each other.
        const SLAB_LINE = 1 << 6;
        /// The device asks the driver to leave before its own end, and waits for a while: LEAVE, LEFT.
        const LEAVE = 1 << 7;
    }
}

/// Feature bits of a device's type (virtio 1.3, 2.2): bits 0 to 23.
const TYPE_BITS: u64 = 0xff_ffff;

impl Features {
    /// Features usable without negotiation, for a driver behind a front end hiding the bits of the device's
    /// type. Two of the other features are for drivers being their own front ends, where nothing is hidden. A
    /// driver without SLAB_LINE would leave the owners of DMBs asleep, and the device would wait in vain for
    /// a driver without LEAVE.
    pub const UNNEGOTIATED: Features =
        Features::MOVE.union(Features::WINDOW).union(Features::SW_EVENT).union(Features::STATS);

    /// The features usable by a driver: the `offered` bits or, without any bit of the device's type, the
    /// features of the configuration without need for negotiation.
    pub fn usable(offered: u64, config: &Config) -> Features {
        if offered & TYPE_BITS != 0 {
            Features::from_bits_truncate(offered)
        } else {
            Features::from_bits_truncate(config.features.get().into()) & Features::UNNEGOTIATED
        }
    }

    /// The features used by a driver with the `accepted` bits. A driver accepts MOVE or WINDOW if offered. So
    /// a driver with no accepted bit of the device's type was offered none, and uses the features without
    /// need for negotiation.
    pub fn in_use(accepted: u64) -> Features {
        if accepted & TYPE_BITS != 0 {
            Features::from_bits_truncate(accepted)
        } else {
            Features::UNNEGOTIATED
        }
    }
}

/// Smallest DMB, bytes.
pub const DMB_MIN: u32 = 16 << 10;
/// Largest DMB this revision allows, bytes.
pub const DMB_MAX: u32 = 32 << 20;
/// Largest payload of one move, bytes.
pub const MAX_MOVE: u32 = 1 << 20;
/// Alignment of slabs in the window, bytes.
pub const SLAB_ALIGN: u32 = 2 << 20;

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    /// VIRTIO_F_VERSION_1, VIRTIO_F_EVENT_IDX.
    const GENERIC: u64 = 1 << 32 | 1 << 29;

    #[test]
    fn a_driver_that_sees_no_type_bits_reads_them_in_the_configuration() {
        let features = u32::MAX.into();
        let config = Config { features, ..Config::new_zeroed() };
        assert_eq!(Features::usable(GENERIC, &config), Features::UNNEGOTIATED);
        assert_eq!(Features::usable(GENERIC | 3, &config), Features::MOVE | Features::WINDOW);
        assert!(Features::usable(GENERIC, &Config::new_zeroed()).is_empty());
    }

    #[test]
    fn a_driver_that_accepts_no_type_bit_uses_what_needs_no_negotiation() {
        assert_eq!(Features::in_use(GENERIC), Features::UNNEGOTIATED);
        assert_eq!(Features::in_use(GENERIC | 1), Features::MOVE);
        let all = Features::all();
        assert_eq!(Features::in_use(GENERIC | all.bits()), all);
        let kernel_bound = Features::PEER_FUTEX | Features::DOORBELL;
        assert!(!Features::UNNEGOTIATED.intersects(kernel_bound));
    }
}
