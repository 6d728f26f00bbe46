// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Addresses, buffers, completions and errors of a virtqueue.

use thiserror::Error;

/// Bus addresses of the parts of a virtqueue.
#[derive(Clone, Copy, Debug)]
pub struct QueueAddresses {
    /// Entries of each part.
    pub size: u16,
    /// The descriptor table.
    pub descriptors: u64,
    /// The available ring (driver area).
    pub available: u64,
    /// The used ring (device area).
    pub used: u64,
}

/// A buffer in memory that the device can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaSpan {
    /// Address of the first byte in this process.
    pub address: usize,
    /// Bus address of the first byte; the bytes are contiguous on the bus, too.
    pub gpa: u64,
    /// Length in bytes, not 0.
    pub len: u32,
}

/// A chain that the device has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsedChain {
    /// The number with which the driver added the chain.
    pub cookie: u32,
    /// Bytes that the device has written by its own account, at most the length of the writable
    /// part.
    pub written: u32,
}

/// What can be wrong with a virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SplitQueueError {
    /// The memory for the ring is too small, not aligned to a page, or not part of the pool.
    #[error("{len} bytes at {address:#x} cannot hold a ring")]
    Memory {
        /// Address of the memory.
        address: usize,
        /// Its length, bytes.
        len: usize,
    },
    /// A buffer is empty or not in memory that the device can reach.
    #[error("a buffer of {} bytes at {:#x} is not in the shared pool", .0.len, .0.address)]
    Buffer(DmaSpan),
    /// No descriptor is left for now.
    #[error("the ring is full")]
    Full,
    /// The device returned a chain that was not in flight, or changed a used element after it had
    /// published it. The queue can no longer be used.
    #[error("the device returned chain {id}, which is not in flight")]
    BadCompletion {
        /// The id that the device returned.
        id: u16,
    },
}
