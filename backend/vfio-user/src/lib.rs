// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod back_end;
mod device;
mod dma;
mod irq;
mod pci;
mod region;
mod server;
mod stream;
mod wire;

pub use back_end::{BackEnd, BackEndError, QueueLayout, VhostUser};
pub use dma::{DmaError, MemoryRegion};
pub use irq::IrqError;
pub use region::{AccessError, SharedMemory};
pub use server::{EndError, serve};
pub use stream::StreamError;
pub use wire::{BodyError, HeaderError};

/// An event of a served client.
#[derive(Debug)]
pub enum Event<'a> {
    /// A request has come. The server carries the request out once the caller's function returns; the
    /// function may wait.
    Request,
    /// A request was refused. The client is still served.
    Refused(&'a dyn std::error::Error),
    /// The back end has ended. The function needs a reset by its driver, to make another connection.
    BackEndLost(&'a BackEndError),
}

/// Most queues of a function: each has a vector, and one vector is for changes of the configuration.
pub const MAX_QUEUES: u16 = region::MAX_VECTORS - 1;

/// Identity of a function, apart from its back end's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Virtio device id.
    pub device_id: u16,
    /// PCI class code: class, subclass and interface, in the lower three bytes.
    pub class: u32,
    /// Bytes of the device's configuration, at most 256.
    pub config_len: u16,
    /// Queues, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Most entries of a queue: a power of two.
    pub queue_size: u16,
}
