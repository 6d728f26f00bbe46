//! RDMA verbs: what `libibverbs.so.1` offers, as safe types.
//!
//! The library is opened when it is first asked for, so that a program runs where there is none:
//! "no RDMA here" is an ordinary answer ([`NoRdma`]) of [`devices`].
//!
//! From the ground up: [`Context`] is an open RNIC with its ports, GIDs and asynchronous events,
//! [`Pd`] a protection domain, [`Memory`] and [`Mr`] are memory and its registration, [`Channel`]
//! and [`Cq`] tell what is complete, [`Qp`] is a reliable connected queue pair whose state is part
//! of its type. Each holds what it needs to exist, so they can be dropped in any order.
//!
//! What is not here on purpose: keys for all memory (a key is always that of one [`Memory`]),
//! RDMA reads and atomics, and writes with immediate data, which make a Linux peer parse a receive
//! buffer it has already seen.
//!
//! Everything can be used from several threads at once; the library locks where it must.
//!
//! ```no_run
//! use guest_driver::verbs::{Context, Cq, Payload, Pd, Qp, QpCaps, RemoteEnd, Work, devices};
//! # fn exchange(own: guest_driver::verbs::QpNumber) -> RemoteEnd { unimplemented!() }
//! # use smc_core::wire::ids::Psn;
//!
//! let context = Context::open(&devices()?[0])?;
//! let (pd, cq) = (Pd::new(&context)?, Cq::new(&context, 64, None)?);
//! let caps = QpCaps { send_requests: 32, receive_requests: 32, inline: 44 };
//! let qp = Qp::new(&pd, &cq, &cq, caps)?.init(1)?;
//! let remote = exchange(qp.qp_num());
//! let qp = qp.ready_to_receive(&remote)?.ready_to_send(Psn::new(7))?;
//! qp.post_send(&[Work::send(1, Payload::Inline(b"hello")).signaled()])?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! After a fork the child must not use any of these objects, nor look at registered memory, which
//! it shares with the parent or does not have (kernels before 5.12); starting another program is
//! fine (the descriptors are close-on-exec). The parent is not disturbed by a fork: registered
//! memory is shared memory, whose pages do not move away from under the device, and on old kernels
//! the library is told to keep its own queues in place too.

mod completion;
mod context;
mod cq_id;
mod device;
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

/// Why there is no RDMA here. None of these is a fault.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NoRdma {
    /// The library is not installed, or too old; what the loader says.
    #[error("no RDMA library: {0}")]
    Library(String),
    /// The library is there, an RNIC is not.
    #[error("no RDMA device")]
    Device,
    /// There are RNICs, and this process may use none of them; the device file of the first.
    #[error("no permission to use {}", .0.display())]
    Permission(PathBuf),
}

/// What went wrong with a call.
#[derive(Debug, Error)]
pub enum VerbsError {
    /// There is no RDMA here (any more).
    #[error(transparent)]
    NoRdma(#[from] NoRdma),
    /// The device of this name is gone.
    #[error("RDMA device {0} is gone")]
    Gone(String),
    /// A call failed.
    #[error("{call}: {source}")]
    Call {
        /// The function of the library.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// Memory could not be pinned: RLIMIT_MEMLOCK counts it, or the machine is out of memory.
    #[error("{len} bytes cannot be registered (see RLIMIT_MEMLOCK): {source}")]
    Pin {
        /// Bytes to be registered.
        len: usize,
        /// What the library said.
        source: io::Error,
    },
    /// Memory of this length cannot be made.
    #[error("{len} bytes of memory: {source}")]
    Memory {
        /// Bytes wanted.
        len: usize,
        /// What the kernel said.
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
