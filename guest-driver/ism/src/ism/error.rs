// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of an ISM device.

use std::time::Duration;

use thiserror::Error;
use virtio_ism_abi::command::Op;
use virtio_ism_abi::{Gid, Status};

use crate::transport::TransportError;
use crate::transport::pci::{NoPciDevice, PciError};
use crate::virtqueue::QueueError;
use ism_sys::OutOfBounds;

/// Why a call of the driver failed.
#[derive(Debug, Error)]
pub enum IsmError {
    /// The device cannot be reached or set up, or lacks a feature needed by the driver.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The device is gone or broken, or its guest memory is used up.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The device refused a command.
    #[error("{op:?}: {status}")]
    Refused {
        /// The refused command.
        op: Op,
        /// Status in the reply.
        status: Status,
    },
    /// The device answered with a status of a later revision.
    #[error("{op:?}: status {code}")]
    UnknownStatus {
        /// The command of the reply.
        op: Op,
        /// The unknown code.
        code: u16,
    },
    /// HELLO came back without a GID.
    #[error("the device has no GID")]
    NoGid,
    /// The device does not accept this length of a DMB.
    #[error("a DMB of {len} bytes: not a power of two from {min} to {max}")]
    DmbLength {
        /// Requested length, bytes.
        len: u32,
        /// Smallest DMB, bytes.
        min: u32,
        /// Largest DMB, bytes.
        max: u32,
    },
    /// A DMB in guest memory has more contiguous pieces than one REGISTER can name.
    #[error("a DMB of {len} bytes lies in {pieces} pieces of guest memory, more than {max}")]
    Pieces {
        /// Requested length, bytes.
        len: u32,
        /// Pieces that are contiguous for the device.
        pieces: usize,
        /// Most pieces.
        max: usize,
    },
    /// No number for another DMB is free.
    #[error("all {max} DMBs are in use")]
    NoIndex {
        /// Numbers in total.
        max: u32,
    },
    /// A reply places a DMB or its signal line at an impossible position.
    #[error("{op:?}: {what} is {value:#x}")]
    Placement {
        /// The command of the reply.
        op: Op,
        /// The field of the reply.
        what: &'static str,
        /// Value of the field.
        value: u64,
    },
    /// The slab does not carry the nonce of the reply: the window maps something else there.
    #[error("the slab carries nonce {found:#x} instead of {expected:#x} after {after:?}")]
    Nonce {
        /// Nonce of the reply.
        expected: u64,
        /// The last value in the slab's control tail.
        found: u64,
        /// Waiting time of the driver.
        after: Duration,
    },
    /// The peer's DMB has another length than the peer announced.
    #[error("the DMB has {got} bytes instead of {expected}")]
    PeerLength {
        /// The length according to the device, bytes.
        got: u32,
        /// Expected length, bytes.
        expected: u32,
    },
    /// The peer's DMB belongs to another peer.
    #[error("the DMB belongs to {got} instead of {expected}")]
    PeerOwner {
        /// The owner according to the device.
        got: Gid,
        /// Expected owner.
        expected: Gid,
    },
    /// A computed range lies outside the shared memory.
    #[error(transparent)]
    Bounds(#[from] OutOfBounds),
}

impl IsmError {
    /// Whether the device cannot be opened because another process uses it.
    pub fn is_in_use(&self) -> bool {
        matches!(
            self,
            IsmError::Transport(
                TransportError::InUse
                    | TransportError::AllInUse
                    | TransportError::ShareInUse
                    | TransportError::Pci { source: PciError::InUse, .. }
            )
        )
    }
}

impl IsmError {
    /// Whether a PCI function cannot be opened now, and another attempt may succeed soon.
    pub fn is_temporary(&self) -> bool {
        match self {
            IsmError::Transport(TransportError::Pci { source, .. }) => source.is_temporary(),
            IsmError::Transport(TransportError::NoPciDevice(NoPciDevice::Unusable {
                is_temporary,
                ..
            })) => *is_temporary,
            _ => false,
        }
    }

    /// Whether the memory that this driver shares with the device is used up.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, IsmError::Queue(QueueError::OutOfMemory { .. }))
    }
}

/// Reason of a failed delivery.
#[derive(Debug, Error)]
pub enum DeliverError {
    /// The DMB or its owner is gone. Nothing was delivered, and later deliveries fail, too.
    #[error("the peer's DMB is gone")]
    Failed,
    /// A piece does not lie in the DMB; nothing was delivered.
    #[error("{len} bytes at {offset} of a DMB of {dmb_len} bytes")]
    Range {
        /// Offset of the piece, bytes.
        offset: u32,
        /// Length of the piece, bytes.
        len: usize,
        /// Length of the DMB, bytes.
        dmb_len: u32,
    },
    /// The device is gone or broken.
    #[error(transparent)]
    Queue(#[from] QueueError),
}
