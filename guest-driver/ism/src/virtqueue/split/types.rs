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

/// A buffer in memory reachable by the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaSpan {
    /// Address of the first byte in this process.
    pub address: usize,
    /// Bus address of the first byte; the bytes are contiguous on the bus, too.
    pub gpa: u64,
    /// Length in bytes, not 0.
    pub len: u32,
}

/// A chain used by the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsedChain {
    /// The driver's number of the chain.
    pub cookie: u32,
    /// Written bytes according to the device, at most the length of the writable part.
    pub written: u32,
}

/// Errors of a virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SplitQueueError {
    /// The memory for the ring is too small, or not aligned to 16 bytes.
    #[error("{len} bytes at {address:#x} cannot hold a ring")]
    Memory {
        /// Address of the memory.
        address: usize,
        /// Length of the memory, bytes.
        len: usize,
    },
    /// A buffer is empty or not in memory reachable by the device.
    #[error("a buffer of {} bytes at {:#x} is not in the shared pool", .0.len, .0.address)]
    Buffer(DmaSpan),
    /// No descriptor is left for now.
    #[error("the ring is full")]
    Full,
    /// The device returned a chain not in flight. The queue can no longer be used.
    #[error("the device returned chain {id}, which is not in flight")]
    BadCompletion {
        /// The id returned by the device.
        id: u32,
    },
}
