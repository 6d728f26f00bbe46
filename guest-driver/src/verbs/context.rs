//! An open RNIC: its limits, its ports, and what it tells without being asked.

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

/// Entries of a GID table that are read; devices have up to a few thousand.
const GID_TABLE_LIMIT: usize = 4096;

/// An open RNIC. Its descriptor (`AsFd`) is readable when [`next_async_event`] has something.
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

/// What a device can have at most.
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
    /// Packets go through.
    Active,
    /// Anything else: down, or on its way up; the number that verbs have for it.
    Down(u32),
}

/// A port as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// Whether it can be used.
    pub state: PortState,
    /// Largest payload of a packet, as negotiated with the network.
    pub active_mtu: Mtu,
    /// Largest message (one WRITE or SEND), bytes.
    pub max_message: u32,
    /// Whether it is an Ethernet port, as RoCE needs.
    pub ethernet: bool,
    /// Places in the GID table.
    pub gid_table_len: u32,
}

impl PortInfo {
    /// Whether packets go through.
    pub fn is_active(&self) -> bool {
        self.state == PortState::Active
    }
}

/// What a device tells without being asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The port came up.
    PortActive(u8),
    /// The port went down.
    PortDown(u8),
    /// The port's GID table has changed.
    GidChange(u8),
    /// Something else of the port has changed (LID, P_Key, subnet manager, reregistration).
    PortChange(u8),
    /// The device is of no use any more.
    DeviceFatal,
    /// The queue pair is in the error state because of the device.
    QpFatal(Qpn),
    /// The queue pair is in the error state because of a request it got: malformed.
    QpRequest(Qpn),
    /// The queue pair is in the error state because of a request it got: not allowed.
    QpAccess(Qpn),
    /// Something of the queue pair that needs no answer; the number that verbs have for it.
    QpNotice(Qpn, u32),
    /// The completion queue has overrun, or cannot be written: its queue pairs are of no use.
    CqError(CqId),
    /// Something this room has no word for; the number that verbs have for it.
    Other(u32),
}

impl Context {
    /// Opens a device.
    ///
    /// # Errors
    /// The device is gone, or may not be used.
    pub fn open(info: &DeviceInfo) -> Result<Arc<Context>, VerbsError> {
        let (functions, raw) = device::open(info)?;
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::Gone(info.name().to_owned()))?;
        let context = Arc::new(Context { raw, functions, info: info.clone() });
        set_nonblocking(context.as_fd())
            .map_err(|source| VerbsError::Call { call: "fcntl", source })?;
        Ok(context)
    }

    /// Which device it is.
    pub fn device(&self) -> &DeviceInfo {
        &self.info
    }

    /// What the device can have at most.
    ///
    /// # Errors
    /// What the library says.
    pub fn limits(&self) -> Result<DeviceLimits, VerbsError> {
        let mut attr = ffi::DeviceAttr::EMPTY;
        // SAFETY: the context is open, `attr` is where the answer is put.
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

    /// A port, from 1, as it is now.
    ///
    /// # Errors
    /// What the library says (there is no such port).
    pub fn port(&self, port: u8) -> Result<PortInfo, VerbsError> {
        let mut attr = ffi::PortAttr::default();
        // SAFETY: the context is open, `attr` is where the answer is put.
        let code = unsafe { (self.functions.ibv_query_port)(self.raw(), port, &raw mut attr) };
        if code != 0 {
            return Err(VerbsError::call("ibv_query_port", code));
        }
        // 4 is ACTIVE, and 5 is ACTIVE_DEFER: links are kept, though packets wait a little.
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

    /// The RoCE GIDs of a port that a queue pair can use (index up to 255), by index.
    ///
    /// # Errors
    /// What the library says, or what reading sysfs says where the library is too old.
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>, VerbsError> {
        let Some(query) = self.functions._ibv_query_gid_table else {
            return Ok(gid::sysfs_table(&gid::port_dir(self.info.name(), port)));
        };
        let mut entries = vec![ffi::GidEntry::default(); self.gid_table_len()?];
        // SAFETY: the context is open, and there is room for `len` entries of the size that is said.
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

    /// Room for the tables of all ports: the library fills in the entries of all of them at once.
    fn gid_table_len(&self) -> Result<usize, VerbsError> {
        let mut len = 0;
        for port in 1..=self.limits()?.ports {
            len += self.port(port)?.gid_table_len as usize;
        }
        Ok(len.clamp(1, GID_TABLE_LIMIT))
    }

    /// The next thing the device has to tell, already acknowledged; `None` if there is nothing
    /// now. Never blocks.
    pub fn next_async_event(&self) -> Option<AsyncEvent> {
        let mut event = MaybeUninit::<ffi::AsyncEvent>::uninit();
        // SAFETY: the context is open, `event` is where the answer is put.
        let code = unsafe { (self.functions.ibv_get_async_event)(self.raw(), event.as_mut_ptr()) };
        if code != 0 {
            return None;
        }
        // SAFETY: success means that it was filled in.
        let mut event = unsafe { event.assume_init() };
        // SAFETY: the element is the arm that belongs to the type, and the object it points to
        // exists until the event is acknowledged (destroying it waits for that).
        let seen = unsafe { interpret(&event) };
        // SAFETY: the event was got from the library just now, and is acknowledged once.
        unsafe { (self.functions.ibv_ack_async_event)(&raw mut event) };
        Some(seen)
    }

    pub(super) fn raw(&self) -> *mut ffi::Context {
        self.raw.as_ptr()
    }

    /// Where the kernel takes commands.
    #[inline]
    pub(super) fn command_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context owns the descriptor, which stays open as long.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).cmd_fd) }
    }

    /// Whether the device library leaves it to the kernel to arm completion queues, as that of
    /// soft-RoCE does. Others ring the device, and keep count of notices for that.
    pub(super) fn kernel_arms(&self) -> bool {
        // SAFETY: the context is open, and the library filled its table when it was opened.
        let arm = unsafe { (*self.raw.as_ptr()).ops.req_notify_cq };
        match (arm, self.functions.ibv_cmd_req_notify_cq) {
            (Some(arm), Some(ask_kernel)) => std::ptr::fn_addr_eq(arm, ask_kernel),
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
    // SAFETY: for the types that ask for it, the element is this arm (see the caller).
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
        // SAFETY: the context owns the descriptor, which stays open as long.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).async_fd) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was opened by the library and is closed once; everything that was made with
        // it holds an `Arc` of it, and is gone.
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
