// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! RDMA verbs: safe types over `libibverbs.so.1`.
//!
//! The first call opens the library, so a program also runs on a machine without the library. A
//! machine without RDMA is an ordinary result of [`devices`]: [`VerbsUnavailable`].
//!
//! [`Context`] is an open RNIC with its ports, GIDs and asynchronous events. [`Pd`] is a protection
//! domain. [`Memory`] and [`Mr`] are memory and its registration. [`Channel`] and [`Cq`] deliver
//! completions. [`Qp`] is a reliable connected queue pair with its state in its type. Each object
//! holds its dependencies, so a program can drop them in any order.
//!
//! The crate leaves out keys for all memory (a key always belongs to one [`Memory`]), RDMA reads
//! and atomics. Writes with immediate data are left out too, because they make a Linux peer parse a
//! receive buffer twice.
//!
//! Several threads may use any object at once; the library takes the necessary locks.
//!
//! ```no_run
//! use smc_verbs::{Context, Cq, Payload, Pd, Qp, QpCaps, QpNumber, RemoteEnd, Work, devices};
//! # use smc_core::wire::ids::Psn;
//! # fn example(exchange: impl Fn(QpNumber) -> RemoteEnd) -> Result<(), Box<dyn std::error::Error>> {
//!
//! let context = Context::open(&devices()?[0])?;
//! let (pd, cq) = (Pd::new(&context)?, Cq::new(&context, 64, None)?);
//! let caps = QpCaps { send_requests: 32, receive_requests: 32, inline: 44 };
//! let qp = Qp::new(&pd, &cq, &cq, caps)?.init(1)?;
//! let remote = exchange(qp.qp_num());
//! let qp = qp.ready_to_receive(&remote)?.ready_to_send(Psn::new(7))?;
//! qp.post_send(&[Work::send(1, Payload::Inline(b"hello")).signaled()])?;
//! # Ok(())
//! # }
//! ```
//!
//! After a fork, the child must not use any of these objects. The child must not access registered
//! memory: the memory is shared with the parent or, on kernels before 5.12, missing. The child may
//! execute another program, because the descriptors are close-on-exec. A fork does not disturb the
//! parent: registered memory is shared memory, and its pages stay in place for the device. On old
//! kernels `ibv_fork_init` makes the library keep its own queues in place, too.

mod completion;
mod context;
mod cq_id;
mod device;
#[cfg(feature = "double")]
pub mod double;
mod ffi;
mod gid;
mod library;
mod memory;
mod queue_pair;
mod work;

pub use completion::{Channel, Completed, Completion, Cq, WcStatus};
pub use context::{AsyncEvent, Context, DeviceLimits, PortInfo, PortState};
pub use cq_id::CqId;
pub use device::{DeviceInfo, devices};
pub use gid::{GidEntry, GidKind, NetDevice};
pub use memory::{Access, Memory, Mr, Pd, Sge};
pub use queue_pair::{
    Hops, Init, Qp, QpCaps, QpNumber, QpState, ReadyToReceive, ReadyToSend, Receives, RemoteEnd,
    Reset,
};
pub use work::{MAX_BATCH, Payload, PostError, Recv, Work};

use std::io;
use std::path::PathBuf;

use smc_core::wire::ids::Mtu;
use thiserror::Error;

/// Why this process cannot use RDMA. None of these is a fault.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum VerbsUnavailable {
    /// The library is not installed, or too old. The text comes from the loader.
    #[error("no RDMA library: {0}")]
    Library(String),
    /// The library is installed, but the machine has no RNIC.
    #[error("no RDMA device")]
    Device,
    /// The machine has RNICs, but this process may open none of them. The path is the device file
    /// of the first.
    #[error("no permission to use {}", .0.display())]
    Permission(PathBuf),
}

/// Why a call failed.
#[derive(Debug, Error)]
pub enum VerbsError {
    /// This process cannot use RDMA, or no longer can.
    #[error(transparent)]
    Unavailable(#[from] VerbsUnavailable),
    /// The device of this name is gone.
    #[error("RDMA device {0} is gone")]
    Gone(String),
    /// A call failed.
    #[error("{call}: {source}")]
    Call {
        /// The function of the library.
        call: &'static str,
        /// The error of the call.
        source: io::Error,
    },
    /// Memory could not be pinned: RLIMIT_MEMLOCK counts it, or the machine is out of memory.
    #[error("{len} bytes cannot be registered (see RLIMIT_MEMLOCK): {source}")]
    Pin {
        /// Bytes to be registered.
        len: usize,
        /// The error of the library.
        source: io::Error,
    },
    /// Memory of this length cannot be allocated.
    #[error("{len} bytes of memory: {source}")]
    Memory {
        /// Bytes wanted.
        len: usize,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The MTU has a reserved code (CLC-29).
    #[error("MTU code {}", .0.code())]
    Mtu(Mtu),
}

impl VerbsError {
    fn call(call: &'static str, code: std::ffi::c_int) -> VerbsError {
        VerbsError::Call { call, source: library::error_of(code) }
    }

    fn last(call: &'static str) -> VerbsError {
        VerbsError::Call { call, source: io::Error::last_os_error() }
    }
}
