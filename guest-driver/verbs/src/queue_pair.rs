// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reliable connected queue pairs with their state in their type.
//!
//! A queue pair without a peer cannot send:
//!
//! ```compile_fail,E0599
//! # use smc_verbs::{Init, Qp};
//! fn too_early(qp: &Qp<Init>) {
//!     let _ = qp.post_send(&[]);
//! }
//! ```
//!
//! A queue pair without a port cannot receive, and no queue pair can enter a state twice:
//!
//! ```compile_fail,E0599
//! # use smc_verbs::{Qp, Reset};
//! fn too_early(qp: &Qp<Reset>) {
//!     let _ = qp.post_recv(&[]);
//! }
//! ```
//!
//! ```compile_fail,E0382
//! # use smc_verbs::{Qp, Reset};
//! fn twice(qp: Qp<Reset>) {
//!     let first = qp.init(1);
//!     let second = qp.init(1);
//! }
//! ```

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use smc_core::wire::ids::{Gid, Mtu, Psn, Qpn};

use super::work::{check_inline, post_receives, post_sends};
use super::{Cq, Pd, PostError, Recv, VerbsError, Work, ffi};

/// Bytes of an LLC message (LLC-1), and of a CDC message (CDC-1): a smaller inline limit is of no
/// use.
const MESSAGE: u32 = 44;

// Linux uses these values for its queue pairs. A peer may rely on them.
/// Time after which the device repeats an unacknowledged packet: code of 134 ms.
const TIMEOUT: u8 = 15;
/// Number of repetitions of an unacknowledged packet.
const RETRIES: u8 = 7;
/// Number of repetitions of a packet without a receive at the peer: unlimited.
const RNR_RETRIES: u8 = 7;
/// Waiting time of a peer without a receive here: code of 80 us.
const MIN_RNR_TIMER: u8 = 5;
/// RDMA reads in flight. There are none, but devices require one at least.
const READS: u8 = 1;

/// The queue pair is new.
#[derive(Debug)]
pub enum Reset {}
/// The queue pair has a port, and takes receives.
#[derive(Debug)]
pub enum Init {}
/// The queue pair has a peer, and receives.
#[derive(Debug)]
pub enum ReadyToReceive {}
/// The queue pair receives and sends.
#[derive(Debug)]
pub enum ReadyToSend {}

/// States in which receives can be posted.
pub trait Receives: sealed::State {}
impl Receives for Init {}
impl Receives for ReadyToReceive {}
impl Receives for ReadyToSend {}

mod sealed {
    pub trait State {}
    impl State for super::Reset {}
    impl State for super::Init {}
    impl State for super::ReadyToReceive {}
    impl State for super::ReadyToSend {}
}

/// The state of a queue pair in the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// The state of the type, or an earlier one.
    Alive,
    /// The device flushes every request.
    Error,
}

/// The number of a queue pair, in 24 bits.
pub type QpNumber = Qpn;

/// The capacity of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpCaps {
    /// Send requests, unsignaled requests included.
    pub send_requests: u32,
    /// Receive requests.
    pub receive_requests: u32,
    /// Bytes available for inline sends. A device may grant more. If the device refuses the number,
    /// `Qp::new` tries 44 bytes, then none.
    pub inline: u32,
}

/// The distance of the peer. For RoCEv2, Linux uses the hop limit of its own route to the peer
/// instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hops {
    /// The peer is on the same subnet: hop limit 1.
    Direct,
    /// The peer is behind routers (SMC-Rv2): hop limit 64.
    Routed,
}

impl Hops {
    fn limit(self) -> u8 {
        match self {
            Hops::Direct => 1,
            Hops::Routed => 64,
        }
    }
}

/// The peer's parameters for receiving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteEnd {
    /// GID of the peer, an IP address in version 2 (LG-55). The kernel resolves it to an Ethernet
    /// address, within about a second. The kernel accepts no Ethernet address from a process, so
    /// the MAC of the peer's messages is compared and not used (CLCV2-55, LLCV2-23).
    pub gid: Gid,
    /// Queue pair of the peer.
    pub qp_num: Qpn,
    /// First packet sequence number of the peer (CLC-31).
    pub psn: Psn,
    /// The smaller of both ends' MTUs.
    pub mtu: Mtu,
    /// Index of the local GID in the GID table.
    pub sgid_index: u8,
    /// The distance of the peer.
    pub hops: Hops,
}

/// A reliable connected queue pair in the state `S`, or in the error state. The device may enter
/// the error state by itself (see [`state`](Qp::state)).
///
/// Posting allocates nothing, and makes at most one system call per batch: none on devices with a
/// mapped doorbell.
pub struct Qp<S> {
    inner: Inner,
    port: u8,
    state: PhantomData<fn() -> S>,
}

struct Inner {
    raw: NonNull<ffi::Qp>,
    post_send: ffi::PostSend,
    post_recv: ffi::PostRecv,
    qp_num: Qpn,
    caps: QpCaps,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    pd: Arc<Pd>,
}

// SAFETY: the library allows calls with one queue pair from all threads.
unsafe impl Send for Inner {}
// SAFETY: as for `Send`.
unsafe impl Sync for Inner {}

impl Qp<Reset> {
    /// A new queue pair. Its requests complete in `send_cq`, its receives in `recv_cq`.
    ///
    /// # Errors
    /// Errors of `ibv_create_qp` (more capacity than the device has).
    pub fn new(
        pd: &Arc<Pd>,
        send_cq: &Arc<Cq>,
        recv_cq: &Arc<Cq>,
        caps: QpCaps,
    ) -> Result<Qp<Reset>, VerbsError> {
        let same = |cq: &Arc<Cq>| Arc::ptr_eq(cq.context(), pd.context());
        if !same(send_cq) || !same(recv_cq) {
            return Err(VerbsError::call("ibv_create_qp", libc::EINVAL));
        }
        let mut wanted = caps;
        let inner = loop {
            match Inner::new(pd, send_cq, recv_cq, wanted) {
                Err(VerbsError::Call { source, .. })
                    if wanted.inline != 0 && is_about_capacity(&source) =>
                {
                    tracing::debug!(inline = wanted.inline, %source, "a queue pair was refused");
                    wanted.inline = if wanted.inline > MESSAGE { MESSAGE } else { 0 };
                }
                other => break other?,
            }
        };
        Ok(Qp { inner, port: 0, state: PhantomData })
    }

    /// Assigns a port, and gives the peer write access.
    ///
    /// # Errors
    /// Errors of `ibv_modify_qp`; the queue pair is then destroyed.
    pub fn init(mut self, port: u8) -> Result<Qp<Init>, VerbsError> {
        let mut attr = ffi::QpAttr {
            qp_state: ffi::QPS_INIT,
            pkey_index: 0,
            port_num: port,
            qp_access_flags: (ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE).cast_unsigned(),
            ..ffi::QpAttr::default()
        };
        let mask = ffi::QP_PKEY_INDEX | ffi::QP_PORT | ffi::QP_ACCESS_FLAGS;
        self.inner.modify(&mut attr, mask)?;
        self.port = port;
        Ok(self.into_state())
    }
}

impl Qp<Init> {
    /// Connects the queue pair to its peer. Post receives before.
    ///
    /// The call can take up to about a second, until the kernel knows the Ethernet address of the
    /// peer.
    ///
    /// # Errors
    /// [`VerbsError::Mtu`], or errors of `ibv_modify_qp` (no route to the peer); the queue pair is
    /// then destroyed.
    pub fn ready_to_receive(self, remote: &RemoteEnd) -> Result<Qp<ReadyToReceive>, VerbsError> {
        if remote.mtu.bytes().is_err() {
            return Err(VerbsError::Mtu(remote.mtu));
        }
        let mut attr = rtr_attributes(remote, self.port);
        let mask = ffi::QP_AV
            | ffi::QP_PATH_MTU
            | ffi::QP_DEST_QPN
            | ffi::QP_RQ_PSN
            | ffi::QP_MAX_DEST_RD_ATOMIC
            | ffi::QP_MIN_RNR_TIMER;
        self.inner.modify(&mut attr, mask)?;
        Ok(self.into_state())
    }
}

/// Whether a device may have refused because the capacity was too large.
fn is_about_capacity(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOMEM | libc::EOPNOTSUPP))
}

fn rtr_attributes(remote: &RemoteEnd, port: u8) -> ffi::QpAttr {
    let mut attr = ffi::QpAttr {
        qp_state: ffi::QPS_RTR,
        path_mtu: u32::from(remote.mtu.code()),
        dest_qp_num: remote.qp_num.get(),
        rq_psn: remote.psn.get(),
        max_dest_rd_atomic: READS,
        min_rnr_timer: MIN_RNR_TIMER,
        ..ffi::QpAttr::default()
    };
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = port;
    attr.ah_attr.grh = ffi::GlobalRoute {
        dgid: ffi::GidBytes(remote.gid.0),
        flow_label: 0,
        sgid_index: remote.sgid_index,
        hop_limit: remote.hops.limit(),
        traffic_class: 0,
    };
    attr
}

impl Qp<ReadyToReceive> {
    /// Lets the queue pair send, starting with packet `psn`, as the peer expects.
    ///
    /// # Errors
    /// Errors of `ibv_modify_qp`; the queue pair is then destroyed.
    pub fn ready_to_send(self, psn: Psn) -> Result<Qp<ReadyToSend>, VerbsError> {
        let mut attr = ffi::QpAttr {
            qp_state: ffi::QPS_RTS,
            sq_psn: psn.get(),
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RNR_RETRIES,
            max_rd_atomic: READS,
            ..ffi::QpAttr::default()
        };
        let mask = ffi::QP_SQ_PSN
            | ffi::QP_TIMEOUT
            | ffi::QP_RETRY_CNT
            | ffi::QP_RNR_RETRY
            | ffi::QP_MAX_QP_RD_ATOMIC;
        self.inner.modify(&mut attr, mask)?;
        Ok(self.into_state())
    }
}

impl Qp<ReadyToSend> {
    /// Posts a batch, in order, with one doorbell per [`MAX_BATCH`](super::MAX_BATCH) requests.
    ///
    /// In the error state, the queue pair takes requests and completes them as flushed.
    ///
    /// # Errors
    /// See [`PostError`] for the number of posted requests.
    #[inline]
    pub fn post_send(&self, batch: &[Work<'_>]) -> Result<(), PostError> {
        check_inline(batch, self.max_inline())?;
        let inner = &self.inner;
        post_sends(batch, |first, bad| {
            // SAFETY: the queue pair lives. The requests, lists and inline bytes of the chain
            // `first` outlive the call and are copied by the call. Uncopied memory is named by
            // keys, so the memory is registered or the device refuses it.
            unsafe { (inner.post_send)(inner.raw.as_ptr(), first, bad) }
        })
    }
}

impl<S: Receives> Qp<S> {
    /// Posts buffers for messages of the peer, in order.
    ///
    /// # Errors
    /// See [`PostError`] for the number of posted requests.
    pub fn post_recv(&self, batch: &[Recv]) -> Result<(), PostError> {
        let inner = &self.inner;
        post_receives(batch, |first, bad| {
            // SAFETY: the queue pair lives. The chain `first` outlives the call and is copied by
            // the call. Keys name the buffers, so the buffers are registered or the device refuses
            // them.
            unsafe { (inner.post_recv)(inner.raw.as_ptr(), first, bad) }
        })
    }
}

impl<S: sealed::State> Qp<S> {
    fn into_state<T>(self) -> Qp<T> {
        Qp { inner: self.inner, port: self.port, state: PhantomData }
    }

    /// The number of the queue pair, for the peer.
    pub fn qp_num(&self) -> Qpn {
        self.inner.qp_num
    }

    /// The capacity granted by the device.
    pub fn caps(&self) -> QpCaps {
        self.inner.caps
    }

    /// Bytes available for inline sends.
    #[inline]
    pub fn max_inline(&self) -> usize {
        self.inner.caps.inline as usize
    }

    /// The completion queue of sends.
    pub fn send_cq(&self) -> &Arc<Cq> {
        &self.inner.send_cq
    }

    /// The completion queue of receives.
    pub fn recv_cq(&self) -> &Arc<Cq> {
        &self.inner.recv_cq
    }

    /// The protection domain of the pair's memory.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.inner.pd
    }

    /// Moves the queue pair to the error state: all requests, posted before or later, complete as
    /// flushed.
    ///
    /// # Errors
    /// Errors of `ibv_modify_qp`.
    pub fn fail(&self) -> Result<(), VerbsError> {
        let mut attr = ffi::QpAttr { qp_state: ffi::QPS_ERR, ..ffi::QpAttr::default() };
        self.inner.modify(&mut attr, 0)
    }

    /// Whether the queue pair is in the error state. Makes a system call.
    ///
    /// # Errors
    /// Errors of `ibv_query_qp`.
    pub fn state(&self) -> Result<QpState, VerbsError> {
        let mut attr = ffi::QpAttr::default();
        let mut init = Inner::no_attributes();
        // SAFETY: the queue pair lives; the library writes the answer to the two structures.
        let code = unsafe {
            (self.inner.pd.context().functions().ibv_query_qp)(
                self.inner.raw.as_ptr(),
                &raw mut attr,
                ffi::QP_STATE,
                &raw mut init,
            )
        };
        match (code, attr.qp_state) {
            // 5 is SQE: a send has failed, and the queue pair sends no more.
            (0, ffi::QPS_ERR | 5) => Ok(QpState::Error),
            (0, _) => Ok(QpState::Alive),
            (code, _) => Err(VerbsError::call("ibv_query_qp", code)),
        }
    }
}

impl Inner {
    fn no_attributes() -> ffi::QpInitAttr {
        ffi::QpInitAttr {
            qp_context: std::ptr::null_mut(),
            send_cq: std::ptr::null_mut(),
            recv_cq: std::ptr::null_mut(),
            srq: std::ptr::null_mut(),
            cap: ffi::QpCap::default(),
            qp_type: ffi::QPT_RC,
            sq_sig_all: 0,
        }
    }

    fn new(
        pd: &Arc<Pd>,
        send_cq: &Arc<Cq>,
        recv_cq: &Arc<Cq>,
        caps: QpCaps,
    ) -> Result<Inner, VerbsError> {
        let functions = pd.context().functions();
        let mut init = ffi::QpInitAttr {
            send_cq: send_cq.raw(),
            recv_cq: recv_cq.raw(),
            cap: ffi::QpCap {
                max_send_wr: caps.send_requests,
                max_recv_wr: caps.receive_requests,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: caps.inline,
            },
            ..Self::no_attributes()
        };
        // SAFETY: domain and queues live, and are of one device.
        let raw = unsafe { (functions.ibv_create_qp)(pd.raw(), &raw mut init) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_create_qp"))?;
        // SAFETY: the library made both, and filled the table when opening the device.
        let (ops, qp_num) = unsafe { (&(*raw.as_ref().context).ops, raw.as_ref().qp_num) };
        let (Some(post_send), Some(post_recv)) = (ops.post_send, ops.post_recv) else {
            // SAFETY: made above, and destroyed once.
            unsafe { (functions.ibv_destroy_qp)(raw.as_ptr()) };
            return Err(VerbsError::call("ibv_create_qp", libc::EOPNOTSUPP));
        };
        Ok(Inner {
            raw,
            post_send,
            post_recv,
            qp_num: Qpn::new(qp_num),
            caps: QpCaps {
                send_requests: init.cap.max_send_wr,
                receive_requests: init.cap.max_recv_wr,
                inline: init.cap.max_inline_data,
            },
            send_cq: Arc::clone(send_cq),
            recv_cq: Arc::clone(recv_cq),
            pd: Arc::clone(pd),
        })
    }

    fn modify(&self, attr: &mut ffi::QpAttr, mask: i32) -> Result<(), VerbsError> {
        let functions = self.pd.context().functions();
        // SAFETY: the queue pair lives; `attr` has the attributes named by the mask.
        let code =
            unsafe { (functions.ibv_modify_qp)(self.raw.as_ptr(), attr, mask | ffi::QP_STATE) };
        if code == 0 { Ok(()) } else { Err(VerbsError::call("ibv_modify_qp", code)) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the library made the queue pair, and `drop` destroys the pair once. The pair's
        // dependencies are dropped afterwards.
        let code = unsafe { (self.pd.context().functions().ibv_destroy_qp)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::debug!(code, "a queue pair was not destroyed");
        }
    }
}

impl<S> fmt::Debug for Qp<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Qp");
        out.field("qp_num", &self.inner.qp_num).field("caps", &self.inner.caps);
        out.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_can_be_used_from_all_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Qp<Reset>>();
        shared::<Qp<ReadyToSend>>();
    }

    // Shows: CLC-31.
    #[test]
    fn the_peer_is_described_as_linux_describes_it() {
        let remote = RemoteEnd {
            gid: Gid::from_ipv4([10, 0, 0, 2]),
            qp_num: Qpn::new(0x1234),
            psn: Psn::new(0xff_0000),
            mtu: Mtu::B4096,
            sgid_index: 3,
            hops: Hops::Direct,
        };
        let attr = rtr_attributes(&remote, 2);
        assert_eq!((attr.path_mtu, attr.dest_qp_num, attr.rq_psn), (5, 0x1234, 0xff_0000));
        assert_eq!((attr.max_dest_rd_atomic, attr.min_rnr_timer), (1, 5));
        assert_eq!((attr.ah_attr.is_global, attr.ah_attr.port_num), (1, 2));
        let route = attr.ah_attr.grh;
        assert_eq!((route.dgid.0, route.sgid_index), (remote.gid.0, 3));
        assert_eq!((route.hop_limit, route.flow_label, route.traffic_class), (1, 0, 0));
        let routed = rtr_attributes(&RemoteEnd { hops: Hops::Routed, ..remote }, 2);
        assert_eq!(routed.ah_attr.grh.hop_limit, 64);
    }
}
