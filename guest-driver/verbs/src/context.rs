// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An open RNIC: its limits, its ports, and its asynchronous events.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use smc_core::wire::ids::{Mtu, Qpn};

use super::library::Functions;
use super::{CqId, DeviceInfo, GidEntry, VerbsError, device, ffi, gid};

/// Maximum number of entries read from GID tables. Devices have up to a few thousand.
const GID_TABLE_LIMIT: usize = 4096;

/// An open RNIC. Its descriptor (`AsFd`) is readable when [`next_async_event`] has an event.
///
/// [`next_async_event`]: Context::next_async_event
pub struct Context {
    raw: NonNull<ffi::Context>,
    functions: &'static Functions,
    info: DeviceInfo,
}

// SAFETY: the library allows calls with one context from all threads.
unsafe impl Send for Context {}
// SAFETY: as for `Send`.
unsafe impl Sync for Context {}

/// Limits of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Work requests per queue of a queue pair.
    pub work_requests: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Entries per completion queue.
    pub cq_entries: u32,
    /// Registrations of memory.
    pub mrs: u32,
    /// Bytes per registration.
    pub mr_bytes: u64,
    /// Ports, numbered from 1.
    pub ports: u8,
}

/// Whether a port can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// The port carries packets.
    Active,
    /// The port is down, or on its way up; its number in `enum ibv_port_state`.
    Down(u32),
}

/// The present properties of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// Whether the port can be used.
    pub state: PortState,
    /// Largest payload of a packet, as negotiated with the network.
    pub active_mtu: Mtu,
    /// Largest message (one WRITE or SEND), bytes.
    pub max_message: u32,
    /// Whether the port is an Ethernet port, as RoCE needs.
    pub ethernet: bool,
    /// Number of entries of the GID table.
    pub gid_table_len: u32,
}

impl PortInfo {
    /// Whether the port carries packets.
    pub fn is_active(&self) -> bool {
        self.state == PortState::Active
    }
}

/// An asynchronous event of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The port came up.
    PortActive(u8),
    /// The port went down.
    PortDown(u8),
    /// The port's GID table has changed.
    GidChange(u8),
    /// Another property of the port has changed (LID, P_Key, subnet manager, reregistration).
    PortChange(u8),
    /// The device can no longer be used.
    DeviceFatal,
    /// The queue pair is in the error state because the device failed.
    QpFatal(Qpn),
    /// The queue pair is in the error state because it received a malformed request.
    QpRequest(Qpn),
    /// The queue pair is in the error state because it received a forbidden request.
    QpAccess(Qpn),
    /// An event of the queue pair without need of a reaction; its number in `enum ibv_event_type`.
    QpNotice(Qpn, u32),
    /// The completion queue has overrun, or cannot be written. Its queue pairs can no longer be
    /// used.
    CqError(CqId),
    /// Another event; its number in `enum ibv_event_type`.
    Other(u32),
}

impl Context {
    /// Opens a device.
    ///
    /// # Errors
    /// The device is gone, or this process may not open it.
    pub fn open(info: &DeviceInfo) -> Result<Arc<Context>, VerbsError> {
        let (functions, raw) = device::open(info)?;
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::Gone(info.name().to_owned()))?;
        let context = Arc::new(Context { raw, functions, info: info.clone() });
        set_nonblocking(context.as_fd())
            .map_err(|source| VerbsError::Call { call: "fcntl", source })?;
        Ok(context)
    }

    /// The device.
    pub fn device(&self) -> &DeviceInfo {
        &self.info
    }

    /// The limits of the device.
    ///
    /// # Errors
    /// Errors of `ibv_query_device`.
    pub fn limits(&self) -> Result<DeviceLimits, VerbsError> {
        let mut attr = ffi::DeviceAttr::EMPTY;
        // SAFETY: the context is open, the library writes the answer to `attr`.
        let code = unsafe { (self.functions.ibv_query_device)(self.raw(), &raw mut attr) };
        if code != 0 {
            return Err(VerbsError::call("ibv_query_device", code));
        }
        let count = |number: i32| u32::try_from(number).unwrap_or(0);
        Ok(DeviceLimits {
            queue_pairs: count(attr.max_qp),
            work_requests: count(attr.max_qp_wr),
            cqs: count(attr.max_cq),
            cq_entries: count(attr.max_cqe),
            mrs: count(attr.max_mr),
            mr_bytes: attr.max_mr_size,
            ports: attr.phys_port_cnt,
        })
    }

    /// The present properties of a port; ports count from 1.
    ///
    /// # Errors
    /// Errors of `ibv_query_port` (no such port).
    pub fn port(&self, port: u8) -> Result<PortInfo, VerbsError> {
        let mut attr = ffi::PortAttr::default();
        // SAFETY: the context is open, the library writes the answer to `attr`.
        let code = unsafe { (self.functions.ibv_query_port)(self.raw(), port, &raw mut attr) };
        if code != 0 {
            return Err(VerbsError::call("ibv_query_port", code));
        }
        // 4 is ACTIVE. 5 is ACTIVE_DEFER: the port keeps its connections, but packets wait a
        // little.
        let state = match attr.state {
            4 | 5 => PortState::Active,
            other => PortState::Down(other),
        };
        Ok(PortInfo {
            state,
            active_mtu: Mtu::from_code(u8::try_from(attr.active_mtu).unwrap_or(0)),
            max_message: attr.max_msg_sz,
            ethernet: attr.link_layer == ffi::LINK_LAYER_ETHERNET,
            gid_table_len: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
        })
    }

    /// The RoCE GIDs of a port for use by queue pairs (index up to 255), by index.
    ///
    /// # Errors
    /// Errors of `ibv_query_gid_table`. An old library lacks the function: the entries then come
    /// from sysfs.
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>, VerbsError> {
        let Some(query) = self.functions._ibv_query_gid_table else {
            return Ok(gid::sysfs_table(&gid::port_dir(self.info.name(), port)));
        };
        let mut entries = vec![ffi::GidEntry::default(); self.gid_table_len()?];
        // SAFETY: the context is open, and `entries` has room for `len` entries of the stated size.
        let count = unsafe {
            query(self.raw(), entries.as_mut_ptr(), entries.len(), 0, size_of::<ffi::GidEntry>())
        };
        let Ok(count) = usize::try_from(count) else {
            let code = i32::try_from(count).unwrap_or(-1);
            return Err(VerbsError::call("ibv_query_gid_table", code));
        };
        let entries = entries.iter().take(count).filter(|entry| entry.port_num == u32::from(port));
        Ok(entries.filter_map(gid::entry_of).collect())
    }

    /// The number of entries of the tables of all ports, for one call of the library.
    fn gid_table_len(&self) -> Result<usize, VerbsError> {
        let mut len = 0;
        for port in 1..=self.limits()?.ports {
            len += self.port(port)?.gid_table_len as usize;
        }
        Ok(len.clamp(1, GID_TABLE_LIMIT))
    }

    /// Takes and acknowledges the next asynchronous event; `None` if there is none now. Never
    /// blocks.
    pub fn next_async_event(&self) -> Option<AsyncEvent> {
        let mut event = MaybeUninit::<ffi::AsyncEvent>::uninit();
        // SAFETY: the context is open, the library writes the answer to `event`.
        let code = unsafe { (self.functions.ibv_get_async_event)(self.raw(), event.as_mut_ptr()) };
        if code != 0 {
            return None;
        }
        // SAFETY: the library has filled in the event and returned success.
        let mut event = unsafe { event.assume_init() };
        // SAFETY: the element is the arm for the type. The event's object exists until the event is
        // acknowledged, since destruction waits for the acknowledgement.
        let seen = unsafe { interpret(&event) };
        // SAFETY: the library has just returned the event, and the call acknowledges the event
        // once.
        unsafe { (self.functions.ibv_ack_async_event)(&raw mut event) };
        Some(seen)
    }

    pub(super) fn raw(&self) -> *mut ffi::Context {
        self.raw.as_ptr()
    }

    /// The descriptor for commands to the kernel.
    #[inline]
    pub(super) fn command_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context owns the descriptor, open as long as the context lives.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).cmd_fd) }
    }

    /// Whether the device library leaves the arming of completion queues to the kernel, as
    /// soft-RoCE does. Other libraries write a doorbell of the device, and count completion events
    /// for the doorbell.
    pub(super) fn kernel_arms(&self) -> bool {
        // SAFETY: the context is open, and the library filled the table when opening the device.
        let arm = unsafe { (*self.raw.as_ptr()).ops.req_notify_cq };
        match (arm, self.functions.ibv_cmd_req_notify_cq) {
            (Some(arm), Some(by_kernel)) => std::ptr::fn_addr_eq(arm, by_kernel),
            _ => false,
        }
    }

    pub(super) fn functions(&self) -> &'static Functions {
        self.functions
    }
}

/// # Safety
/// `event` came from the library and is not acknowledged yet.
unsafe fn interpret(event: &ffi::AsyncEvent) -> AsyncEvent {
    // SAFETY: this arm is read only for its own types (see the caller).
    let port = || u8::try_from(unsafe { event.element.port_num }).unwrap_or(0);
    // SAFETY: as above, and the object exists.
    let qp = || Qpn::new(unsafe { event.element.qp.as_ref().map_or(0, |qp| qp.qp_num) });
    // SAFETY: as above, and the object exists.
    let cq = || unsafe { event.element.cq.as_ref().map_or(0, |cq| cq.cq_context.addr()) };
    match event.event_type {
        0 => AsyncEvent::CqError(CqId::from_number(cq())),
        1 => AsyncEvent::QpFatal(qp()),
        2 => AsyncEvent::QpRequest(qp()),
        3 => AsyncEvent::QpAccess(qp()),
        kind @ (4..=7 | 16) => AsyncEvent::QpNotice(qp(), kind),
        8 => AsyncEvent::DeviceFatal,
        9 => AsyncEvent::PortActive(port()),
        10 => AsyncEvent::PortDown(port()),
        11..=13 | 17 => AsyncEvent::PortChange(port()),
        18 => AsyncEvent::GidChange(port()),
        other => AsyncEvent::Other(other),
    }
}

pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
    Ok(())
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context owns the descriptor, open as long as the context lives.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).async_fd) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the library opened the device, and `drop` closes the device once. All objects
        // made with an `Arc` of the context are gone.
        let code = unsafe { (self.functions.ibv_close_device)(self.raw()) };
        if code != 0 {
            tracing::debug!(device = self.info.name(), code, "closing an RDMA device failed");
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.info.name()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_ports_and_the_device_are_told_apart() {
        let seen = |event_type| {
            let event = ffi::AsyncEvent { element: ffi::Element { port_num: 1 }, event_type };
            // SAFETY: only types whose element is a port, or nothing.
            unsafe { interpret(&event) }
        };
        assert_eq!(seen(8), AsyncEvent::DeviceFatal);
        assert_eq!(seen(9), AsyncEvent::PortActive(1));
        assert_eq!(seen(10), AsyncEvent::PortDown(1));
        for change in [11, 12, 13, 17] {
            assert_eq!(seen(change), AsyncEvent::PortChange(1));
        }
        assert_eq!(seen(18), AsyncEvent::GidChange(1));
        for other in [14, 15, 19, 20, u32::MAX] {
            assert_eq!(seen(other), AsyncEvent::Other(other));
        }
    }
}
