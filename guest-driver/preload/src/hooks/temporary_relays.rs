// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls of the kernel on known descriptors. If such a descriptor is a temporary relay
//! (`relay::take_back`), the number keeps its meaning until the call returns, or the relay is taken
//! back before the call.

use std::ffi::c_int;

use crate::hooks::within::within;
use crate::relay::take_back;
use crate::socket::table::Descriptor;
use crate::sys::table::LeakedTableRef;
use crate::sys::user_memory::{errno, set_errno};

/// Carrier of a call left to the kernel.
#[derive(Clone, Copy)]
enum Carrier {
    /// The kernel.
    Kernel,
    /// The kernel, on the end of a pair.
    TemporaryRelay(LeakedTableRef<Descriptor>),
    /// SMC: the relay has been taken back.
    Smc,
}

/// Carries a call out by `native`, or by `again` if the connection is on SMC again. If the call does
/// not return, the relay is never taken back.
#[cold]
pub(super) fn by_kernel<T>(fd: c_int, again: impl FnOnce() -> T, native: impl FnOnce() -> T) -> T {
    match within(|| carrier(fd)) {
        Carrier::Kernel => native(),
        Carrier::Smc => again(),
        Carrier::TemporaryRelay(held) => {
            let result = native();
            let error = errno();
            // SAFETY: the leaked reference comes back only here.
            within(|| drop(unsafe { held.take() }));
            set_errno(error);
            result
        }
    }
}

fn carrier(fd: c_int) -> Carrier {
    let Some(descriptor) = take_back::hold(fd) else { return Carrier::Kernel };
    match descriptor.stream() {
        Some(socket) if socket.smc().is_some() => Carrier::Smc,
        Some(socket) if socket.temporary_relay().is_some() => {
            Carrier::TemporaryRelay(descriptor.leak())
        }
        _ => Carrier::Kernel,
    }
}
