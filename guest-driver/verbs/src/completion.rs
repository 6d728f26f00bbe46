// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Completion queues, and the channel to wake threads waiting for completions.

use std::fmt;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use smc_core::wire::ids::Qpn;
use thiserror::Error;

use super::context::set_nonblocking;
use super::library::Functions;
use super::{Context, CqId, VerbsError, ffi};

/// A completion channel. Its descriptor (`AsFd`) becomes readable when an armed completion queue
/// gets a completion.
pub struct Channel {
    raw: NonNull<ffi::CompChannel>,
    context: Arc<Context>,
}

// SAFETY: the library allows calls with one channel from all threads.
unsafe impl Send for Channel {}
// SAFETY: as for `Send`.
unsafe impl Sync for Channel {}

impl Channel {
    /// A new channel with non-blocking reads.
    ///
    /// # Errors
    /// Errors of `ibv_create_comp_channel`.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Channel>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.functions().ibv_create_comp_channel)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_create_comp_channel"))?;
        let channel = Arc::new(Channel { raw, context: Arc::clone(context) });
        set_nonblocking(channel.as_fd())
            .map_err(|source| VerbsError::Call { call: "fcntl", source })?;
        Ok(channel)
    }

    /// Takes and acknowledges up to `limit` completion events, and calls `seen` with the queue of
    /// each. Returns the number of events. Remaining events keep the descriptor readable.
    ///
    /// Each `Cq::arm` causes one event at most. A call takes one system call per event and one
    /// more, or one for many events if the kernel arms the queues (soft-RoCE).
    pub fn drain(&self, limit: usize, mut seen: impl FnMut(CqId)) -> usize {
        let mut unacknowledged = Unacknowledged {
            functions: self.context.functions(),
            cq: std::ptr::null_mut(),
            count: 0,
        };
        let mut taken = 0;
        while taken < limit {
            let wanted = limit - taken;
            let got = match self.context.kernel_arms() {
                true => self.read_many(wanted, &mut unacknowledged, &mut seen),
                false => self.read_one(&mut unacknowledged, &mut seen),
            };
            if got == 0 {
                break;
            }
            taken += got;
        }
        taken
    }

    fn read_one(&self, unacknowledged: &mut Unacknowledged, seen: &mut impl FnMut(CqId)) -> usize {
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel lives; the two are where the answer is put.
        let code = unsafe {
            (unacknowledged.functions.ibv_get_cq_event)(
                self.raw.as_ptr(),
                &raw mut cq,
                &raw mut context,
            )
        };
        if code != 0 {
            return 0;
        }
        unacknowledged.add(cq);
        seen(CqId::from_number(context.addr()));
        1
    }

    /// Reads many events at once. `ibv_get_cq_event` reads one `struct ib_uverbs_comp_event_desc`
    /// and then calls the device library; where the kernel arms the queues, the device library has
    /// no function to be called.
    fn read_many(
        &self,
        wanted: usize,
        unacknowledged: &mut Unacknowledged,
        seen: &mut impl FnMut(CqId),
    ) -> usize {
        const AT_ONCE: usize = 32;
        let mut events = [[0; 8]; AT_ONCE];
        // The kernel fills each buffer with one event.
        let mut buffers = events.each_mut().map(|event| IoSliceMut::new(event));
        let buffers = buffers.get_mut(..wanted.min(AT_ONCE)).unwrap_or_default();
        let got = rustix::io::readv(self, buffers).unwrap_or(0) / size_of::<u64>();
        for event in events.iter().take(got) {
            // An event names a queue by the address passed to the kernel by the library.
            let name = u64::from_ne_bytes(*event);
            let cq: *mut ffi::Cq = std::ptr::with_exposed_provenance_mut(name as usize);
            unacknowledged.add(cq);
            // SAFETY: a queue exists until its events are acknowledged.
            seen(CqId::from_number(unsafe { (*cq).cq_context }.addr()));
        }
        got
    }
}

/// Taken, unacknowledged events of one queue. Most events of one queue follow each other, so one
/// call acknowledges several.
struct Unacknowledged {
    functions: &'static Functions,
    cq: *mut ffi::Cq,
    count: u32,
}

impl Unacknowledged {
    fn add(&mut self, cq: *mut ffi::Cq) {
        if cq != self.cq {
            self.acknowledge();
            self.cq = cq;
        }
        self.count += 1;
    }

    fn acknowledge(&mut self) {
        if self.count != 0 {
            // SAFETY: `count` events of this queue were taken and not acknowledged, so the queue
            // exists: its destruction waits for them.
            unsafe { (self.functions.ibv_ack_cq_events)(self.cq, self.count) };
            self.count = 0;
        }
    }
}

impl Drop for Unacknowledged {
    fn drop(&mut self) {
        self.acknowledge();
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel owns the descriptor, open as long as the channel lives.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the library made the channel, `drop` destroys the channel once, and all queues
        // with an `Arc` of the channel are gone.
        let code =
            unsafe { (self.context.functions().ibv_destroy_comp_channel)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::debug!(code, "a completion channel was not destroyed");
        }
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("context", &self.context).finish_non_exhaustive()
    }
}

/// A completion queue.
///
/// The queue must have room for a completion of every signaled request and every receive of its
/// queue pairs. A queue after an overrun can no longer be used.
pub struct Cq {
    raw: NonNull<ffi::Cq>,
    poll: ffi::PollCq,
    arm: ffi::ReqNotifyCq,
    /// The kernel's handle of the queue, if the device library leaves arming to the kernel.
    kernel: Option<u32>,
    id: CqId,
    entries: u32,
    channel: Option<Arc<Channel>>,
    context: Arc<Context>,
}

// SAFETY: the library allows calls with one queue from all threads.
unsafe impl Send for Cq {}
// SAFETY: as for `Send`.
unsafe impl Sync for Cq {}

impl Cq {
    /// A queue with room for `entries` completions at least. A channel lets threads wait for
    /// completions; queue and channel must belong to the same device.
    ///
    /// # Errors
    /// Errors of `ibv_create_cq` (more entries than the device can have).
    pub fn new(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<&Arc<Channel>>,
    ) -> Result<Arc<Cq>, VerbsError> {
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let refuse = || VerbsError::call("ibv_create_cq", libc::EINVAL);
        let same = channel.is_none_or(|channel| Arc::ptr_eq(&channel.context, context));
        let wanted = i32::try_from(entries).ok().filter(|_| same).ok_or_else(refuse)?;
        let id = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        let notices = channel.map_or(std::ptr::null_mut(), |channel| channel.raw.as_ptr());
        let mark = std::ptr::without_provenance_mut(id);
        // SAFETY: the context is open, and the channel belongs to the context or is null. The
        // library returns the mark, a number, and does not dereference the mark.
        let raw =
            unsafe { (context.functions().ibv_create_cq)(context.raw(), wanted, mark, notices, 0) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_create_cq"))?;
        // SAFETY: the library made both, and filled the table when opening the device.
        let (ops, cqe, handle) =
            unsafe { (&(*raw.as_ref().context).ops, raw.as_ref().cqe, raw.as_ref().handle) };
        let (Some(poll), Some(arm)) = (ops.poll_cq, ops.req_notify_cq) else {
            // SAFETY: made above, and destroyed once.
            unsafe { (context.functions().ibv_destroy_cq)(raw.as_ptr()) };
            return Err(VerbsError::call("ibv_create_cq", libc::EOPNOTSUPP));
        };
        Ok(Arc::new(Cq {
            raw,
            poll,
            arm,
            kernel: context.kernel_arms().then_some(handle),
            id: CqId::from_number(id),
            entries: u32::try_from(cqe).unwrap_or(entries),
            channel: channel.cloned(),
            context: Arc::clone(context),
        }))
    }

    /// The queue's number in completion events and asynchronous events.
    pub fn id(&self) -> CqId {
        self.id
    }

    /// The capacity of the queue, completions.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// The channel, if the queue has one.
    pub fn channel(&self) -> Option<&Arc<Channel>> {
        self.channel.as_ref()
    }

    /// The device of the queue.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Takes completions, oldest first, into the start of `into`, and returns their number. Makes
    /// no system call. If the call returns fewer completions than `into` has room for, the queue is
    /// empty.
    ///
    /// # Errors
    /// The queue has overrun and can no longer be used.
    #[inline]
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let room = i32::try_from(into.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue lives, and `into` has room for `room` completions. `Completion` has the
        // layout of the library's structure.
        let count = unsafe { (self.poll)(self.raw.as_ptr(), room, into.as_mut_ptr().cast()) };
        usize::try_from(count).map_err(|_| VerbsError::call("ibv_poll_cq", libc::EIO))
    }

    /// Arms the queue: the next completion causes one event on the channel. With `solicited_only`
    /// only a solicited receive causes an event. Poll once more afterwards, because a completion
    /// before the arming causes no event.
    ///
    /// By the specification, a failed request causes an event with `solicited_only`, too. The
    /// software RNIC (rxe) causes none for flushed requests. Do not use `solicited_only` if flushed
    /// requests matter.
    ///
    /// # Errors
    /// Errors of `ibv_req_notify_cq`.
    #[inline]
    pub fn arm(&self, solicited_only: bool) -> Result<(), VerbsError> {
        if self.kernel.is_some_and(|handle| self.arm_in_kernel(handle, solicited_only)) {
            return Ok(());
        }
        // SAFETY: the queue lives.
        match unsafe { (self.arm)(self.raw.as_ptr(), i32::from(solicited_only)) } {
            0 => Ok(()),
            code => Err(VerbsError::call("ibv_req_notify_cq", code)),
        }
    }

    /// Arms the queue like `ibv_cmd_req_notify_cq`, but by a write to the command descriptor, as
    /// soft-RoCE's device library posts requests. The library's function uses a general ioctl,
    /// which takes longer, and a thread sleeping for each message arms for each message. `false`:
    /// the kernel does not accept this write.
    #[inline]
    fn arm_in_kernel(&self, handle: u32, solicited_only: bool) -> bool {
        let command = ffi::req_notify(handle, solicited_only);
        let command = command.as_flattened();
        rustix::io::write(self.context.command_fd(), command) == Ok(command.len())
    }

    pub(super) fn raw(&self) -> *mut ffi::Cq {
        self.raw.as_ptr()
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: the library made the queue, `drop` destroys the queue once, and all queue pairs
        // with an `Arc` of the queue are gone. The call waits for events taken and not yet
        // acknowledged by a `drain` of another thread.
        let code = unsafe { (self.context.functions().ibv_destroy_cq)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::debug!(code, "a completion queue was not destroyed");
        }
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("id", &self.id).field("entries", &self.entries).finish()
    }
}

/// The kind of a completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completed {
    /// A SEND.
    Send,
    /// An RDMA WRITE.
    Write,
    /// A receive.
    Receive {
        /// Length of the message, bytes.
        len: usize,
    },
    /// A request never posted by this program; its number in `enum ibv_wc_opcode`.
    Other(u32),
}

/// Why a work request failed. Its queue pair is then in the error state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum WcStatus {
    /// The message is longer than the receive buffer, or than a message can be.
    #[error("local length error")]
    LocalLength,
    /// The device does not support the request.
    #[error("local operation error")]
    LocalOperation,
    /// Local memory is not registered, or not in this protection domain.
    #[error("local protection error")]
    LocalProtection,
    /// The device did not execute the request, because the queue pair is in the error state.
    #[error("flushed")]
    Flushed,
    /// The peer's response is invalid.
    #[error("bad response")]
    BadResponse,
    /// Local memory may not be written.
    #[error("local access error")]
    LocalAccess,
    /// The peer's receive buffer is too small, or the peer does not support the request.
    #[error("remote invalid request")]
    RemoteInvalidRequest,
    /// The peer's memory is not registered under this key, or may not be written at this place.
    #[error("remote access error")]
    RemoteAccess,
    /// The peer failed to execute the request.
    #[error("remote operation error")]
    RemoteOperation,
    /// The peer does not acknowledge.
    #[error("transport retry counter exceeded")]
    RetriesExceeded,
    /// The peer has no receive posted.
    #[error("receiver-not-ready retry counter exceeded")]
    RnrRetriesExceeded,
    /// The device can no longer be used.
    #[error("fatal error")]
    Fatal,
    /// Another status; its number in `enum ibv_wc_status`.
    #[error("completion status {0}")]
    Other(u32),
}

/// A completion.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct Completion(ffi::Wc);

impl Completion {
    /// The number of the work request.
    #[inline]
    pub fn id(&self) -> u64 {
        self.0.wr_id
    }

    /// The number of its queue pair.
    #[inline]
    pub fn qp_num(&self) -> Qpn {
        Qpn::new(self.0.qp_num)
    }

    /// The kind of the completed request.
    ///
    /// # Errors
    /// Why the request failed. The device then reports the request's number, but not its kind.
    #[inline]
    pub fn result(&self) -> Result<Completed, WcStatus> {
        match self.0.status {
            0 => Ok(match self.0.opcode {
                0 => Completed::Send,
                1 => Completed::Write,
                0x80 => Completed::Receive { len: self.0.byte_len as usize },
                other => Completed::Other(other),
            }),
            status => Err(status_of(status)),
        }
    }
}

fn status_of(status: u32) -> WcStatus {
    match status {
        1 => WcStatus::LocalLength,
        2 => WcStatus::LocalOperation,
        4 => WcStatus::LocalProtection,
        5 => WcStatus::Flushed,
        7 => WcStatus::BadResponse,
        8 => WcStatus::LocalAccess,
        9 => WcStatus::RemoteInvalidRequest,
        10 => WcStatus::RemoteAccess,
        11 => WcStatus::RemoteOperation,
        12 => WcStatus::RetriesExceeded,
        13 => WcStatus::RnrRetriesExceeded,
        19 => WcStatus::Fatal,
        other => WcStatus::Other(other),
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Completion");
        out.field("id", &self.id()).field("qp_num", &self.qp_num()).field("result", &self.result());
        out.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wc(status: u32, opcode: u32) -> Completion {
        Completion(ffi::Wc { status, opcode, byte_len: 44, ..ffi::Wc::default() })
    }

    #[test]
    fn completions_are_typed() {
        assert_eq!(wc(0, 0).result(), Ok(Completed::Send));
        assert_eq!(wc(0, 1).result(), Ok(Completed::Write));
        assert_eq!(wc(0, 128).result(), Ok(Completed::Receive { len: 44 }));
        assert_eq!(wc(0, 129).result(), Ok(Completed::Other(129)), "with immediate data");
        assert_eq!(wc(5, 129).result(), Err(WcStatus::Flushed), "the opcode means nothing then");
        assert_eq!(wc(10, 0).result(), Err(WcStatus::RemoteAccess));
        assert_eq!(wc(12, 0).result(), Err(WcStatus::RetriesExceeded));
        assert_eq!(wc(99, 0).result(), Err(WcStatus::Other(99)));
    }

    #[test]
    fn every_failure_is_a_failure() {
        for status in 1..=30 {
            assert!(wc(status, 0).result().is_err(), "{status}");
        }
    }

    #[test]
    fn a_completion_is_what_the_library_fills_in() {
        assert_eq!(size_of::<Completion>(), 48);
        assert_eq!(align_of::<Completion>(), align_of::<ffi::Wc>());
    }
}
