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
    /// Zero.
    pub reserved: U32,
    /// GID at start; the one in HELLO's reply is authoritative.
    pub gid: Gid,
    /// CHID of the fabric.
    pub chid: U16,
    /// Number of move queues; a driver uses the minimum of it and what the transport has.
    pub num_move_queues: U16,
    /// `idx` of a DMB must be below.
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

/// Bytes of configuration space that carry a meaning; reads beyond return zeros up to
/// [`CONFIG_SPACE`].
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
