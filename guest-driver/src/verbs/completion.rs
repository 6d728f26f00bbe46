//! What is complete: completion queues, and the channel that wakes who waits for them.

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

/// A descriptor (`AsFd`) that is readable when a completion queue that was armed has something.
pub struct Channel {
    raw: NonNull<ffi::CompChannel>,
    context: Arc<Context>,
}

// SAFETY: the library allows calls with one channel from all threads.
unsafe impl Send for Channel {}
// SAFETY: as for `Send`.
unsafe impl Sync for Channel {}

impl Channel {
    /// A new channel; reads of it never block.
    ///
    /// # Errors
    /// What the library says.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Channel>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.functions().ibv_create_comp_channel)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_create_comp_channel"))?;
        let channel = Arc::new(Channel { raw, context: Arc::clone(context) });
        set_nonblocking(channel.as_fd())
            .map_err(|source| VerbsError::Call { call: "fcntl", source })?;
        Ok(channel)
    }

    /// Takes up to `limit` notices (each of one arming), acknowledged, and tells whose they were;
    /// how many there were. What is left keeps the descriptor readable. A system call per notice and
    /// one more, but where the kernel does the arming one for many.
    pub fn drain(&self, limit: usize, mut seen: impl FnMut(CqId)) -> usize {
        let mut row =
            Row { functions: self.context.functions(), cq: std::ptr::null_mut(), count: 0 };
        let mut taken = 0;
        while taken < limit {
            let wanted = limit - taken;
            let got = match self.context.kernel_arms() {
                true => self.read_many(wanted, &mut row, &mut seen),
                false => self.read_one(&mut row, &mut seen),
            };
            if got == 0 {
                break;
            }
            taken += got;
        }
        taken
    }

    fn read_one(&self, row: &mut Row, seen: &mut impl FnMut(CqId)) -> usize {
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel lives; the two are where the answer is put.
        let code = unsafe {
            (row.functions.ibv_get_cq_event)(self.raw.as_ptr(), &raw mut cq, &raw mut context)
        };
        if code != 0 {
            return 0;
        }
        row.note(cq);
        seen(CqId::from_number(context.addr()));
        1
    }

    /// As `ibv_get_cq_event`, which reads one `struct ib_uverbs_comp_event_desc` and lets the device
    /// library know, which where the kernel arms does not want to.
    fn read_many(&self, wanted: usize, row: &mut Row, seen: &mut impl FnMut(CqId)) -> usize {
        const AT_ONCE: usize = 32;
        let mut notices = [[0; 8]; AT_ONCE];
        // The kernel puts one into each buffer.
        let mut buffers = notices.each_mut().map(|notice| IoSliceMut::new(notice));
        let buffers = buffers.get_mut(..wanted.min(AT_ONCE)).unwrap_or_default();
        let got = rustix::io::readv(self, buffers).unwrap_or(0) / size_of::<u64>();
        for notice in notices.iter().take(got) {
            // The library names a queue to the kernel by where it lies.
            let name = u64::from_ne_bytes(*notice);
            let cq: *mut ffi::Cq = std::ptr::with_exposed_provenance_mut(name as usize);
            row.note(cq);
            // SAFETY: a queue exists until its notices are acknowledged.
            seen(CqId::from_number(unsafe { (*cq).cq_context }.addr()));
        }
        got
    }
}

/// Notices that were taken and have to be acknowledged. Those of one queue come in a row mostly:
/// they are acknowledged at once.
struct Row {
    functions: &'static Functions,
    cq: *mut ffi::Cq,
    count: u32,
}

impl Row {
    fn note(&mut self, cq: *mut ffi::Cq) {
        if cq != self.cq {
            self.acknowledge();
            self.cq = cq;
        }
        self.count += 1;
    }

    fn acknowledge(&mut self) {
        if self.count != 0 {
            // SAFETY: `count` notices of this queue were got and not acknowledged, so it exists:
            // destroying it waits for them.
            unsafe { (self.functions.ibv_ack_cq_events)(self.cq, self.count) };
            self.count = 0;
        }
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        self.acknowledge();
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel owns the descriptor, which stays open as long.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the library made it, it goes once, and its queues held an `Arc` of it.
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
/// It must have room for a completion of every signaled request and every receive of its queue
/// pairs: one that overruns is of no use any more.
pub struct Cq {
    raw: NonNull<ffi::Cq>,
    poll: ffi::PollCq,
    arm: ffi::ReqNotifyCq,
    /// The kernel's name of it, if the device library leaves arming to the kernel.
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
    /// A queue with room for `entries` completions at least; with a channel of the same device if
    /// it is to be waited for.
    ///
    /// # Errors
    /// What the library says (more entries than the device can have).
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
        // SAFETY: the context is open, the channel is one of it or null; the mark is a number
        // that the library hands back and does not follow.
        let raw =
            unsafe { (context.functions().ibv_create_cq)(context.raw(), wanted, mark, notices, 0) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_create_cq"))?;
        // SAFETY: the library made both; it filled the table when the device was opened.
        let (ops, cqe, handle) =
            unsafe { (&(*raw.as_ref().context).ops, raw.as_ref().cqe, raw.as_ref().handle) };
        let (Some(poll), Some(arm)) = (ops.poll_cq, ops.req_notify_cq) else {
            // SAFETY: made above, and goes once.
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

    /// What a notice or an asynchronous event calls it.
    pub fn id(&self) -> CqId {
        self.id
    }

    /// Completions it has room for.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// The channel that it was made with.
    pub fn channel(&self) -> Option<&Arc<Channel>> {
        self.channel.as_ref()
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Takes completions, oldest first, into the start of `into`; how many there were. No system
    /// call. Fewer than `into` has room for means that the queue was empty.
    ///
    /// # Errors
    /// The queue is of no use any more (it has overrun).
    #[inline]
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let room = i32::try_from(into.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue lives, and `into` has room for as many; `Completion` is laid out as
        // the structure that the library fills in.
        let count = unsafe { (self.poll)(self.raw.as_ptr(), room, into.as_mut_ptr().cast()) };
        usize::try_from(count).map_err(|_| VerbsError::call("ibv_poll_cq", libc::EIO))
    }

    /// Asks for one notice on the channel at the next completion (with `solicited_only`: of a
    /// receive whose sender asked for it). Poll once more afterwards: what came before the arming
    /// gives no notice.
    ///
    /// A failure should wake who waits for solicited messages too, but a software RNIC (rxe) does
    /// not do so for flushed requests: do without `solicited_only` where that matters.
    ///
    /// # Errors
    /// What the library says.
    #[inline]
    pub fn arm(&self, solicited_only: bool) -> Result<(), VerbsError> {
        if self.kernel.is_some_and(|handle| self.ask_kernel(handle, solicited_only)) {
            return Ok(());
        }
        // SAFETY: the queue lives.
        match unsafe { (self.arm)(self.raw.as_ptr(), i32::from(solicited_only)) } {
            0 => Ok(()),
            code => Err(VerbsError::call("ibv_req_notify_cq", code)),
        }
    }

    /// What `ibv_cmd_req_notify_cq` asks for, in the way in which soft-RoCE's own library tells the
    /// kernel of requests: the library's goes through a general ioctl, which takes longer, and who
    /// sleeps for each message asks each time. `false`: the kernel does not want to be asked so.
    #[inline]
    fn ask_kernel(&self, handle: u32, solicited_only: bool) -> bool {
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
        // SAFETY: the library made it, it goes once, and its queue pairs held an `Arc` of it. It
        // waits for notices that another thread has taken and not acknowledged yet, which are
        // the few that a `drain` has in hand.
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

/// What was completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completed {
    /// A SEND.
    Send,
    /// An RDMA WRITE.
    Write,
    /// A receive, of as many bytes.
    Receive {
        /// Bytes that came.
        len: usize,
    },
    /// Something that was never asked for; the number that verbs have for it.
    Other(u32),
}

/// Why a work request failed. Its queue pair is in the error state then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum WcStatus {
    /// Longer than the receive buffer, or than a message can be.
    #[error("local length error")]
    LocalLength,
    /// The device does not do what was asked for.
    #[error("local operation error")]
    LocalOperation,
    /// Own memory is not registered, or not in this domain.
    #[error("local protection error")]
    LocalProtection,
    /// Not done because the queue pair is in the error state.
    #[error("flushed")]
    Flushed,
    /// The peer's answer makes no sense.
    #[error("bad response")]
    BadResponse,
    /// Own memory may not be written.
    #[error("local access error")]
    LocalAccess,
    /// The peer has no room as large, or does not do such requests.
    #[error("remote invalid request")]
    RemoteInvalidRequest,
    /// The peer's memory is not registered under this key, or may not be written there.
    #[error("remote access error")]
    RemoteAccess,
    /// The peer could not do it.
    #[error("remote operation error")]
    RemoteOperation,
    /// The peer does not answer.
    #[error("transport retry counter exceeded")]
    RetriesExceeded,
    /// The peer has no receive posted.
    #[error("receiver-not-ready retry counter exceeded")]
    RnrRetriesExceeded,
    /// The device is of no use any more.
    #[error("fatal error")]
    Fatal,
    /// Any other; the number that verbs have for it.
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

    /// The queue pair.
    #[inline]
    pub fn qp_num(&self) -> Qpn {
        Qpn::new(self.0.qp_num)
    }

    /// What was done.
    ///
    /// # Errors
    /// Why it was not; what it would have been is not known then (but by its number).
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

    /// What the device's maker says about a failure.
    pub fn vendor_error(&self) -> u32 {
        self.0.vendor_err
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
