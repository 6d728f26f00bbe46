// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of the queues of a device.

use std::io;
use std::time::Duration;

use thiserror::Error;

use super::SplitQueueError;
use ism_sys::OutOfBounds;

/// Why a queue of a device, or the memory for its queues, failed.
#[derive(Debug, Error)]
pub enum QueueError {
    /// The device is gone or failed.
    #[error("the device is gone")]
    Gone,
    /// The device did not answer in time, and counts as failed from now on.
    #[error("no answer to {what} for {after:?}")]
    Timeout {
        /// The request without an answer.
        what: &'static str,
        /// How long the driver waited.
        after: Duration,
    },
    /// A request or reply does not fit its buffers, or the reply has another length than expected.
    #[error("{what} of {len} bytes instead of {expected}")]
    Length {
        /// Name of the request or reply.
        what: &'static str,
        /// Length of the request or reply, bytes.
        len: usize,
        /// The fitting or expected length, bytes.
        expected: usize,
    },
    /// The reply carries another command's tag.
    #[error("reply with tag {got} to a command with tag {expected}")]
    Tag {
        /// The tag in the reply.
        got: u32,
        /// The tag of the request.
        expected: u32,
    },
    /// No memory for the device is left.
    #[error("no {wanted} bytes left of {size} bytes of guest memory")]
    OutOfMemory {
        /// Bytes wanted.
        wanted: usize,
        /// Bytes of the whole pool.
        size: usize,
    },
    /// No slot or descriptor is free for now. Nothing was posted.
    #[error("the queue is full")]
    Busy,
    /// The device has no move queue of this number.
    #[error("the device has no move queue {0}")]
    NoMoveQueue(usize),
    /// A virtqueue is broken.
    #[error("virtqueue: {0}")]
    SplitQueue(#[from] SplitQueueError),
    /// A computed range lies outside the shared memory.
    #[error(transparent)]
    Bounds(#[from] OutOfBounds),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The call.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}
