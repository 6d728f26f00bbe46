// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory shared by the daemon between two front ends: sealed files, their layout, and allocators.
//!
//! A [`SlabMemory`] is one sealed memfd: data, then a control tail (see [`virtio_ism_abi::slab`]). Its
//! descriptor goes to the front ends of one owner and one user. Both can write all bytes at any time, so the
//! daemon trusts nothing read from this memory. The daemon's own writes (moves, signal lines) go through
//! bounds-checked volatile slices of `vm-memory`, and through atomics for words read whole.
//!
//! A [`Buddy`] allocates ranges: of a slab's data to DMBs, of a front end's window to slabs. A buddy never
//! touches the memory.
//!
//! A [`Kicker`] signals eventfds of front ends without ever blocking. A [`BusErrorGuard`] protects the daemon
//! from pages taken away by a guest, and a [`TouchQuota`] bounds the daemon's allocations by touches of
//! absent memory. The module's own munmap(2) leaves no huge pages mapped. Only `bus_error`, `dump`,
//! `first_touch`, `page_waits` and `unmap` have `unsafe`; mapping is done by `vm-memory` and other system
//! calls by `rustix`.

mod buddy;
#[allow(unsafe_code, reason = "no crate handles SIGBUS by mapping memory in its place")]
mod bus_error;
#[allow(unsafe_code, reason = "advice about memory is unsafe in every crate")]
mod dump;
#[allow(unsafe_code, reason = "no crate wraps userfaultfd in a way that a signal handler may use")]
mod first_touch;
mod kick;
#[allow(unsafe_code, reason = "no crate here wraps getrusage")]
mod page_waits;
mod pair;
mod sealed;
mod slab;
#[allow(unsafe_code, reason = "vm-memory leaves mappings of huge pages behind")]
mod unmap;

pub use buddy::Buddy;
pub use bus_error::{BusErrorGuard, FaultCause, GuardError};
pub use first_touch::{TouchQuota, USERFAULT_REQUESTS, userfault};
pub use kick::Kicker;
pub use page_waits::PageWaits;
pub use pair::{PairMemory, PairRange};
pub use sealed::Sealed;
pub use slab::SlabMemory;

/// Why memory cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// The kernel refused to make the file.
    #[error("memfd of {len} bytes")]
    Create {
        /// Bytes asked for.
        len: u64,
        /// The kernel's reason.
        #[source]
        source: std::io::Error,
    },
    /// The daemon could not map the file.
    #[error("mapping of {len} bytes")]
    Map {
        /// Bytes asked for.
        len: u64,
        /// The mapping's reason.
        #[source]
        source: vm_memory::mmap::MmapRegionError,
    },
    /// A range could not be cleared.
    #[error("clearing {len} bytes at {offset}")]
    Zero {
        /// Start of the range, bytes.
        offset: u64,
        /// Length of the range, bytes.
        len: u64,
        /// The kernel's reason.
        #[source]
        source: std::io::Error,
    },
    /// The range does not lie in the memory.
    #[error("{len} bytes at {offset} lie outside of the memory")]
    Range {
        /// Start of the range, bytes.
        offset: u64,
        /// Length of the range, bytes.
        len: u64,
    },
}
