// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The declarations of `<infiniband/verbs.h>` used by this crate, for 64-bit Linux.
//!
//! These are the structures and numbers of the stable interface of `libibverbs.so.1` (symbol
//! version IBVERBS_1.1 and later), written by hand: a generator would bring a C compiler's parser
//! into the build, and ten times the lines. The tests below compare every size and offset with a C
//! compiler's output for the header of rdma-core 44. To repeat the check, or to add a structure,
//! install libibverbs-dev and print `sizeof` and `offsetof`:
//!
//! ```c
//! #include <infiniband/verbs.h>
//! #include <stddef.h>
//! #include <stdio.h>
//! int main(void) { printf("%zu %zu\n", sizeof(struct ibv_wc), offsetof(struct ibv_wc, qp_num)); }
//! ```
//!
//! Values chosen by the library are integers here and never Rust enums: an unknown number must be
//! representable.

use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;

/// `int`-sized C enum.
pub(super) type Enum = u32;

/// A part of a structure for the library's own use.
type Opaque = PhantomData<*mut u8>;

#[repr(C)]
pub(super) struct Device {
    ops: [*mut c_void; 2],
    pub(super) node_type: c_int,
    pub(super) transport_type: c_int,
    pub(super) name: [c_char; 64],
    pub(super) dev_name: [c_char; 64],
    dev_path: [c_char; 256],
    ibdev_path: [c_char; 256],
}

pub(super) type PollCq = unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int;
pub(super) type ReqNotifyCq = unsafe extern "C" fn(*mut Cq, c_int) -> c_int;
pub(super) type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int;
pub(super) type PostRecv = unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int;

/// The operations of the device's own library, called by the header's inline functions. Entries are
/// `None` for operations unknown to the device.
#[repr(C)]
pub(super) struct ContextOps {
    before_poll: [*mut c_void; 11],
    pub(super) poll_cq: Option<PollCq>,
    pub(super) req_notify_cq: Option<ReqNotifyCq>,
    between: [*mut c_void; 12],
    pub(super) post_send: Option<PostSend>,
    pub(super) post_recv: Option<PostRecv>,
    after_post: [*mut c_void; 5],
}

/// The beginning of `struct ibv_context`.
#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut Device,
    pub(super) ops: ContextOps,
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
    pub(super) num_comp_vectors: c_int,
    rest: Opaque,
}

#[repr(C)]
pub(super) struct Pd {
    context: *mut Context,
    rest: Opaque,
}

#[repr(C)]
pub(super) struct Mr {
    context: *mut Context,
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

#[repr(C)]
pub(super) struct CompChannel {
    context: *mut Context,
    pub(super) fd: c_int,
    pub(super) refcnt: c_int,
}

/// The beginning of `struct ibv_cq`.
#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
    channel: *mut CompChannel,
    pub(super) cq_context: *mut c_void,
    pub(super) handle: u32,
    pub(super) cqe: c_int,
    rest: Opaque,
}

/// `struct ib_uverbs_cmd_hdr` and `struct ib_uverbs_req_notify_cq` of `<rdma/ib_user_verbs.h>`: the
/// command, its length in words, no answer; the queue, and whether only solicited completions
/// count.
#[inline]
pub(super) fn req_notify(cq_handle: u32, solicited_only: bool) -> [[u8; 4]; 4] {
    const IB_USER_VERBS_CMD_REQ_NOTIFY_CQ: u32 = 23;
    let [low, high] = 4u16.to_ne_bytes();
    let command = IB_USER_VERBS_CMD_REQ_NOTIFY_CQ.to_ne_bytes();
    let solicited_only = u32::from(solicited_only).to_ne_bytes();
    [command, [low, high, 0, 0], cq_handle.to_ne_bytes(), solicited_only]
}

/// The beginning of `struct ibv_qp`.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut Pd,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
    srq: *mut c_void,
    pub(super) handle: u32,
    pub(super) qp_num: u32,
    pub(super) state: Enum,
    pub(super) qp_type: Enum,
    rest: Opaque,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// `struct ibv_send_wr` with the one arm of its unions used by RC writes and sends.
#[repr(C)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: Enum,
    pub(super) send_flags: u32,
    pub(super) imm_data: u32,
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    pub(super) rest_of_wr: [u32; 5],
    pub(super) qp_type: u64,
    pub(super) bind_mw: [u64; 6],
}

impl SendWr {
    /// A request without any operation.
    pub(super) const EMPTY: SendWr = SendWr {
        wr_id: 0,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
        opcode: 0,
        send_flags: 0,
        imm_data: 0,
        remote_addr: 0,
        rkey: 0,
        rest_of_wr: [0; 5],
        qp_type: 0,
        bind_mw: [0; 6],
    };
}

#[repr(C)]
pub(super) struct RecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut RecvWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: Enum,
    pub(super) opcode: Enum,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    pub(super) imm_data: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) wc_flags: u32,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut c_void,
    pub(super) cap: QpCap,
    pub(super) qp_type: Enum,
    pub(super) sq_sig_all: c_int,
}

/// `union ibv_gid`, with two 8-byte numbers.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(super) struct GidBytes(pub(super) [u8; 16]);

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct GlobalRoute {
    pub(super) dgid: GidBytes,
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct AhAttr {
    pub(super) grh: GlobalRoute,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpAttr {
    pub(super) qp_state: Enum,
    pub(super) cur_qp_state: Enum,
    pub(super) path_mtu: Enum,
    pub(super) path_mig_state: Enum,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: u32,
    pub(super) cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct GidEntry {
    pub(super) gid: GidBytes,
    pub(super) gid_index: u32,
    pub(super) port_num: u32,
    pub(super) gid_type: u32,
    pub(super) ndev_ifindex: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct PortAttr {
    pub(super) state: Enum,
    pub(super) max_mtu: Enum,
    pub(super) active_mtu: Enum,
    pub(super) gid_tbl_len: c_int,
    pub(super) port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    pub(super) bad_pkey_cntr: u32,
    pub(super) qkey_viol_cntr: u32,
    pub(super) pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    pub(super) lmc: u8,
    pub(super) max_vl_num: u8,
    pub(super) sm_sl: u8,
    pub(super) subnet_timeout: u8,
    pub(super) init_type_reply: u8,
    pub(super) active_width: u8,
    pub(super) active_speed: u8,
    pub(super) phys_state: u8,
    pub(super) link_layer: u8,
    pub(super) flags: u8,
    port_cap_flags2: u16,
    /// Not a part of the structure: room for a library with a longer structure.
    spare: [u8; 12],
}

#[repr(C)]
pub(super) struct DeviceAttr {
    pub(super) fw_ver: [u64; 8],
    pub(super) node_guid: u64,
    pub(super) sys_image_guid: u64,
    pub(super) max_mr_size: u64,
    pub(super) page_size_cap: u64,
    pub(super) vendor: [u32; 3],
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    pub(super) device_cap_flags: u32,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    pub(super) max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    between: [c_int; 21],
    pub(super) max_pkeys: u16,
    pub(super) local_ca_ack_delay: u8,
    pub(super) phys_port_cnt: u8,
    /// Not a part of the structure: room for a library with a longer structure.
    pub(super) spare: [u64; 8],
}

impl DeviceAttr {
    pub(super) const EMPTY: DeviceAttr = DeviceAttr {
        fw_ver: [0; 8],
        node_guid: 0,
        sys_image_guid: 0,
        max_mr_size: 0,
        page_size_cap: 0,
        vendor: [0; 3],
        max_qp: 0,
        max_qp_wr: 0,
        device_cap_flags: 0,
        max_sge: 0,
        max_sge_rd: 0,
        max_cq: 0,
        max_cqe: 0,
        max_mr: 0,
        between: [0; 21],
        max_pkeys: 0,
        local_ca_ack_delay: 0,
        phys_port_cnt: 0,
        spare: [0; 8],
    };
}

/// The subject of an asynchronous event: an object, or a port by its number.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union Element {
    pub(super) cq: *mut Cq,
    pub(super) qp: *mut Qp,
    pub(super) port_num: c_int,
}

#[repr(C)]
pub(super) struct AsyncEvent {
    pub(super) element: Element,
    pub(super) event_type: Enum,
}

pub(super) const NODE_CA: c_int = 1;
pub(super) const TRANSPORT_IB: c_int = 0;
pub(super) const LINK_LAYER_ETHERNET: u8 = 2;
pub(super) const GID_TYPE_ROCE_V1: u32 = 1;
pub(super) const GID_TYPE_ROCE_V2: u32 = 2;

pub(super) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(super) const ACCESS_REMOTE_WRITE: c_int = 1 << 1;

pub(super) const QPT_RC: Enum = 2;
pub(super) const QPS_INIT: Enum = 1;
pub(super) const QPS_RTR: Enum = 2;
pub(super) const QPS_RTS: Enum = 3;
pub(super) const QPS_ERR: Enum = 6;

pub(super) const QP_STATE: c_int = 1;
pub(super) const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(super) const QP_PKEY_INDEX: c_int = 1 << 4;
pub(super) const QP_PORT: c_int = 1 << 5;
pub(super) const QP_AV: c_int = 1 << 7;
pub(super) const QP_PATH_MTU: c_int = 1 << 8;
pub(super) const QP_TIMEOUT: c_int = 1 << 9;
pub(super) const QP_RETRY_CNT: c_int = 1 << 10;
pub(super) const QP_RNR_RETRY: c_int = 1 << 11;
pub(super) const QP_RQ_PSN: c_int = 1 << 12;
pub(super) const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(super) const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(super) const QP_SQ_PSN: c_int = 1 << 16;
pub(super) const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(super) const QP_DEST_QPN: c_int = 1 << 20;

pub(super) const WR_RDMA_WRITE: Enum = 0;
pub(super) const WR_SEND: Enum = 2;
pub(super) const SEND_SIGNALED: u32 = 1 << 1;
pub(super) const SEND_SOLICITED: u32 = 1 << 2;
pub(super) const SEND_INLINE: u32 = 1 << 3;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, offset_of, size_of};

    #[test]
    fn structures_are_laid_out_as_by_a_c_compiler() {
        assert_eq!(size_of::<Device>(), 664);
        assert_eq!(offset_of!(Device, node_type), 16);
        assert_eq!(offset_of!(Device, transport_type), 20);
        assert_eq!(offset_of!(Device, name), 24);
        assert_eq!(offset_of!(Device, dev_name), 88);
        assert_eq!(offset_of!(Device, ibdev_path), 408);

        assert_eq!(size_of::<ContextOps>(), 256);
        assert_eq!(offset_of!(ContextOps, poll_cq), 88);
        assert_eq!(offset_of!(ContextOps, req_notify_cq), 96);
        assert_eq!(offset_of!(ContextOps, post_send), 200);
        assert_eq!(offset_of!(ContextOps, post_recv), 208);
        assert_eq!(offset_of!(Context, ops), 8);
        assert_eq!(offset_of!(Context, cmd_fd), 264);
        assert_eq!(offset_of!(Context, async_fd), 268);

        assert_eq!(size_of::<Mr>(), 48);
        assert_eq!(offset_of!(Mr, addr), 16);
        assert_eq!(offset_of!(Mr, length), 24);
        assert_eq!(offset_of!(Mr, lkey), 36);
        assert_eq!(offset_of!(Mr, rkey), 40);
        assert_eq!(size_of::<CompChannel>(), 16);
        assert_eq!(offset_of!(CompChannel, fd), 8);
        assert_eq!(offset_of!(Cq, cq_context), 16);
        assert_eq!((offset_of!(Cq, handle), offset_of!(Cq, cqe)), (24, 28));
        assert_eq!(offset_of!(Qp, qp_num), 52);
        assert_eq!(offset_of!(Qp, state), 56);
    }

    #[test]
    fn work_requests_and_completions_are_laid_out_as_by_a_c_compiler() {
        assert_eq!((size_of::<Sge>(), align_of::<Sge>()), (16, 8));
        assert_eq!((offset_of!(Sge, length), offset_of!(Sge, lkey)), (8, 12));
        assert_eq!((size_of::<SendWr>(), align_of::<SendWr>()), (128, 8));
        assert_eq!(offset_of!(SendWr, next), 8);
        assert_eq!(offset_of!(SendWr, sg_list), 16);
        assert_eq!(offset_of!(SendWr, num_sge), 24);
        assert_eq!(offset_of!(SendWr, opcode), 28);
        assert_eq!(offset_of!(SendWr, send_flags), 32);
        assert_eq!(offset_of!(SendWr, imm_data), 36);
        assert_eq!(offset_of!(SendWr, remote_addr), 40);
        assert_eq!(offset_of!(SendWr, rkey), 48);
        assert_eq!(size_of::<RecvWr>(), 32);
        assert_eq!((offset_of!(RecvWr, sg_list), offset_of!(RecvWr, num_sge)), (16, 24));
        assert_eq!((size_of::<Wc>(), align_of::<Wc>()), (48, 8));
        assert_eq!((offset_of!(Wc, status), offset_of!(Wc, opcode)), (8, 12));
        assert_eq!((offset_of!(Wc, vendor_err), offset_of!(Wc, byte_len)), (16, 20));
        assert_eq!((offset_of!(Wc, qp_num), offset_of!(Wc, wc_flags)), (28, 36));
        assert_eq!(offset_of!(Wc, pkey_index), 40);
    }

    #[test]
    fn attributes_are_laid_out_as_by_a_c_compiler() {
        assert_eq!(size_of::<QpCap>(), 20);
        assert_eq!(size_of::<QpInitAttr>(), 64);
        assert_eq!(offset_of!(QpInitAttr, cap), 32);
        assert_eq!(offset_of!(QpInitAttr, qp_type), 52);
        assert_eq!(offset_of!(QpInitAttr, sq_sig_all), 56);
        assert_eq!((size_of::<GlobalRoute>(), offset_of!(GlobalRoute, flow_label)), (24, 16));
        assert_eq!(offset_of!(GlobalRoute, sgid_index), 20);
        assert_eq!(offset_of!(GlobalRoute, hop_limit), 21);
        assert_eq!((size_of::<AhAttr>(), offset_of!(AhAttr, dlid)), (32, 24));
        assert_eq!((offset_of!(AhAttr, is_global), offset_of!(AhAttr, port_num)), (29, 30));
        assert_eq!((size_of::<QpAttr>(), align_of::<QpAttr>()), (144, 8));
        assert_eq!((offset_of!(QpAttr, path_mtu), offset_of!(QpAttr, rq_psn)), (8, 20));
        assert_eq!((offset_of!(QpAttr, qp_access_flags), offset_of!(QpAttr, cap)), (32, 36));
        assert_eq!((offset_of!(QpAttr, ah_attr), offset_of!(QpAttr, alt_ah_attr)), (56, 88));
        assert_eq!((offset_of!(QpAttr, pkey_index), offset_of!(QpAttr, max_rd_atomic)), (120, 126));
        assert_eq!((offset_of!(QpAttr, port_num), offset_of!(QpAttr, rnr_retry)), (129, 132));
        assert_eq!(offset_of!(QpAttr, rate_limit), 136);
        assert_eq!((size_of::<GidEntry>(), align_of::<GidEntry>()), (32, 8));
        assert_eq!((offset_of!(GidEntry, gid_index), offset_of!(GidEntry, gid_type)), (16, 24));
        assert_eq!(offset_of!(GidEntry, ndev_ifindex), 28);
        assert_eq!(offset_of!(PortAttr, spare), 52 - 2);
        assert_eq!((offset_of!(PortAttr, active_mtu), offset_of!(PortAttr, gid_tbl_len)), (8, 12));
        assert_eq!((offset_of!(PortAttr, max_msg_sz), offset_of!(PortAttr, link_layer)), (20, 46));
        assert_eq!(offset_of!(PortAttr, port_cap_flags2), 48);
        assert!(size_of::<PortAttr>() >= 52);
        assert_eq!(offset_of!(DeviceAttr, spare), 232);
        assert_eq!(
            (offset_of!(DeviceAttr, max_mr_size), offset_of!(DeviceAttr, max_qp)),
            (80, 108)
        );
        assert_eq!(
            (offset_of!(DeviceAttr, max_qp_wr), offset_of!(DeviceAttr, max_sge)),
            (112, 120)
        );
        assert_eq!((offset_of!(DeviceAttr, max_cqe), offset_of!(DeviceAttr, max_mr)), (132, 136));
        assert_eq!(offset_of!(DeviceAttr, phys_port_cnt), 227);
        assert_eq!((size_of::<AsyncEvent>(), offset_of!(AsyncEvent, event_type)), (16, 8));
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn a_request_for_a_notice_is_what_the_kernel_reads() {
        let bytes = [23, 0, 0, 0, 4, 0, 0, 0, 0x34, 0x12, 0, 0, 1, 0, 0, 0];
        assert_eq!(req_notify(0x1234, true).as_flattened(), bytes);
    }
}
