// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The double's functions, with the signatures of the library's.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};

use super::{
    ACTIVE, DOWN, Notice, Payload, Queue, QueuePair, Request, is_installed, number_of, world,
};
use crate::ffi;
use crate::library::Functions;

/// An object whose visible fields are zero.
///
/// # Safety
/// Zero is a value of the type.
unsafe fn object<T>(fill: impl FnOnce(&mut T)) -> *mut T {
    // SAFETY: the caller says so.
    let mut object: Box<T> = Box::new(unsafe { std::mem::zeroed() });
    fill(&mut object);
    Box::into_raw(object)
}

/// # Safety
/// The object was made by [`object`], and has no user any more.
unsafe fn release<T>(object: *mut T) -> c_int {
    // SAFETY: the caller says so.
    drop(unsafe { Box::from_raw(object) });
    0
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ffi::Device {
    let entries: Vec<usize> = world().adapters.iter().map(|adapter| adapter.entry).collect();
    // SAFETY: the caller passes a place for the number.
    unsafe { *count = entries.len() as c_int };
    let pointers = entries.into_iter().map(std::ptr::with_exposed_provenance_mut::<ffi::Device>);
    let list: Box<Vec<*mut ffi::Device>> =
        Box::new(pointers.chain([std::ptr::null_mut()]).collect());
    // The list is small, and is never freed: its length is not known then.
    Vec::leak(*list).as_mut_ptr()
}

unsafe extern "C" fn free_device_list(_: *mut *mut ffi::Device) {}

unsafe extern "C" fn open_device(device: *mut ffi::Device) -> *mut ffi::Context {
    let mut world = world();
    let entry = number_of(device);
    let Some(at) = world.adapters.iter().position(|adapter| adapter.entry == entry) else {
        return std::ptr::null_mut();
    };
    let notice = Notice::new();
    // SAFETY: zero is no function, no pointer or a number in each field.
    let context = unsafe {
        object(|context: &mut ffi::Context| {
            (context.device, context.async_fd, context.cmd_fd) = (device, notice.0, -1);
            context.ops.poll_cq = Some(poll_cq);
            context.ops.req_notify_cq = Some(req_notify_cq);
            context.ops.post_send = Some(post_send);
            context.ops.post_recv = Some(post_recv);
        })
    };
    world.contexts.insert(number_of(context), (at, notice, VecDeque::new()));
    context
}

unsafe extern "C" fn close_device(context: *mut ffi::Context) -> c_int {
    world().contexts.remove(&number_of(context));
    // SAFETY: the caller closes the context once.
    unsafe { release(context) }
}

unsafe extern "C" fn query_device(_: *mut ffi::Context, attr: *mut ffi::DeviceAttr) -> c_int {
    let mut found = ffi::DeviceAttr::EMPTY;
    (found.max_qp, found.max_qp_wr, found.max_cq) = (1 << 16, 1 << 14, 1 << 16);
    (found.max_cqe, found.max_mr, found.max_mr_size) = (1 << 20, 1 << 20, 1 << 40);
    found.phys_port_cnt = 1;
    // SAFETY: the caller passes a place for the answer.
    unsafe { attr.write(found) };
    0
}

unsafe extern "C" fn query_port(
    context: *mut ffi::Context,
    _: u8,
    attr: *mut ffi::PortAttr,
) -> c_int {
    let world = world();
    let adapter =
        world.contexts.get(&number_of(context)).and_then(|(at, ..)| world.adapters.get(*at));
    let state = if adapter.is_some_and(|adapter| !adapter.down) { ACTIVE } else { DOWN };
    let mut found = ffi::PortAttr::default();
    (found.state, found.active_mtu, found.gid_tbl_len) = (state, 5, 1);
    (found.max_msg_sz, found.link_layer) = (1 << 30, ffi::LINK_LAYER_ETHERNET);
    // SAFETY: the caller passes a place for the answer.
    unsafe { attr.write(found) };
    0
}

unsafe extern "C" fn query_gid_table(
    context: *mut ffi::Context,
    entries: *mut ffi::GidEntry,
    room: usize,
    _: u32,
    _: usize,
) -> isize {
    let world = world();
    let adapter =
        world.contexts.get(&number_of(context)).and_then(|(at, ..)| world.adapters.get(*at));
    let Some(adapter) = adapter.filter(|_| room > 0) else { return 0 };
    // SAFETY: the name is a C string.
    let ndev_ifindex = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
    let (gid, gid_type) = (ffi::GidBytes(adapter.gid.0), ffi::GID_TYPE_ROCE_V2);
    let entry = ffi::GidEntry { gid, gid_index: 0, port_num: 1, gid_type, ndev_ifindex };
    // SAFETY: the caller has room for one entry at least.
    unsafe { entries.write(entry) };
    1
}

unsafe extern "C" fn get_async_event(
    context: *mut ffi::Context,
    event: *mut ffi::AsyncEvent,
) -> c_int {
    let mut world = world();
    let Some((_, notice, events)) = world.contexts.get_mut(&number_of(context)) else { return -1 };
    let Some(event_type) = events.pop_front() else {
        notice.clear();
        return -1;
    };
    let element = ffi::Element { port_num: 1 };
    // SAFETY: the caller passes a place for the event.
    unsafe { event.write(ffi::AsyncEvent { element, event_type }) };
    0
}

unsafe extern "C" fn ack_async_event(_: *mut ffi::AsyncEvent) {}

unsafe extern "C" fn alloc_pd(context: *mut ffi::Context) -> *mut ffi::Pd {
    // SAFETY: zero is a null pointer in each field.
    let pd = unsafe { object(|_: &mut ffi::Pd| {}) };
    world().pds.insert(number_of(pd), number_of(context));
    pd
}

unsafe extern "C" fn dealloc_pd(pd: *mut ffi::Pd) -> c_int {
    world().pds.remove(&number_of(pd));
    // SAFETY: the caller frees the domain once.
    unsafe { release(pd) }
}

unsafe extern "C" fn reg_mr(
    _: *mut ffi::Pd,
    at: *mut c_void,
    len: usize,
    _: c_int,
) -> *mut ffi::Mr {
    let mut world = world();
    let key = world.next();
    world.regions.insert(key, (number_of(at) as u64, len));
    // SAFETY: zero is a null pointer or a number in each field.
    unsafe { object(|mr: &mut ffi::Mr| (mr.handle, mr.lkey, mr.rkey) = (key, key, key)) }
}

unsafe extern "C" fn dereg_mr(mr: *mut ffi::Mr) -> c_int {
    // SAFETY: the caller passes a live registration, and does not use the registration any more.
    unsafe {
        world().regions.remove(&(*mr).handle);
        release(mr)
    }
}

unsafe extern "C" fn create_comp_channel(_: *mut ffi::Context) -> *mut ffi::CompChannel {
    let notice = Notice::new();
    // SAFETY: zero is a null pointer or a number in each field.
    let channel = unsafe { object(|channel: &mut ffi::CompChannel| channel.fd = notice.0) };
    world().channels.insert(number_of(channel), (notice, VecDeque::new()));
    channel
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut ffi::CompChannel) -> c_int {
    world().channels.remove(&number_of(channel));
    // SAFETY: the caller destroys the channel once.
    unsafe { release(channel) }
}

unsafe extern "C" fn create_cq(
    context: *mut ffi::Context,
    entries: c_int,
    mark: *mut c_void,
    channel: *mut ffi::CompChannel,
    _: c_int,
) -> *mut ffi::Cq {
    // SAFETY: zero is a null pointer or a number in each field.
    let cq = unsafe {
        object(|cq: &mut ffi::Cq| (cq.context, cq.cq_context, cq.cqe) = (context, mark, entries))
    };
    let queue = Queue { channel: number_of(channel), armed: false, done: VecDeque::new() };
    world().queues.insert(number_of(cq), queue);
    cq
}

unsafe extern "C" fn destroy_cq(cq: *mut ffi::Cq) -> c_int {
    world().queues.remove(&number_of(cq));
    // SAFETY: the caller destroys the queue once.
    unsafe { release(cq) }
}

unsafe extern "C" fn get_cq_event(
    channel: *mut ffi::CompChannel,
    cq: *mut *mut ffi::Cq,
    mark: *mut *mut c_void,
) -> c_int {
    let mut world = world();
    let Some((notice, events)) = world.channels.get_mut(&number_of(channel)) else { return -1 };
    let Some(queue) = events.pop_front() else {
        notice.clear();
        return -1;
    };
    let queue: *mut ffi::Cq = std::ptr::with_exposed_provenance_mut(queue);
    // SAFETY: the caller passes places for both, and the queue lives: the driver keeps the queue as
    // long as the channel.
    unsafe { (*cq, *mark) = (queue, (*queue).cq_context) };
    0
}

unsafe extern "C" fn ack_cq_events(_: *mut ffi::Cq, _: u32) {}

unsafe extern "C" fn poll_cq(cq: *mut ffi::Cq, room: c_int, into: *mut ffi::Wc) -> c_int {
    let mut world = world();
    let Some(queue) = world.queues.get_mut(&number_of(cq)) else { return -1 };
    let n = queue.done.len().min(usize::try_from(room).unwrap_or(0));
    for (at, completion) in queue.done.drain(..n).enumerate() {
        // SAFETY: the caller has room for so many.
        unsafe { into.add(at).write(completion) };
    }
    n as c_int
}

unsafe extern "C" fn req_notify_cq(cq: *mut ffi::Cq, _: c_int) -> c_int {
    let mut world = world();
    world.queues.get_mut(&number_of(cq)).into_iter().for_each(|queue| queue.armed = true);
    0
}

unsafe extern "C" fn create_qp(pd: *mut ffi::Pd, attr: *mut ffi::QpInitAttr) -> *mut ffi::Qp {
    let mut world = world();
    let Some(context) = world.pds.get(&number_of(pd)).copied() else { return std::ptr::null_mut() };
    let qp_num = world.next();
    // SAFETY: the caller passes live attributes.
    let (send_cq, recv_cq) = unsafe { (number_of((*attr).send_cq), number_of((*attr).recv_cq)) };
    let (wire, receives) = (VecDeque::new(), VecDeque::new());
    let pair = QueuePair { context, send_cq, recv_cq, state: 0, peer: 0, wire, receives };
    world.pairs.insert(qp_num, pair);
    // SAFETY: zero is a null pointer or a number in each field.
    unsafe {
        object(|qp: &mut ffi::Qp| {
            qp.context = std::ptr::with_exposed_provenance_mut(context);
            qp.qp_num = qp_num;
        })
    }
}

unsafe extern "C" fn modify_qp(qp: *mut ffi::Qp, attr: *mut ffi::QpAttr, mask: c_int) -> c_int {
    // SAFETY: the caller passes a live queue pair, and attributes.
    let (number, attr) = unsafe { ((*qp).qp_num, &*attr) };
    let mut world = world();
    let Some(pair) = world.pairs.get_mut(&number) else { return libc::EINVAL };
    if mask & ffi::QP_DEST_QPN != 0 {
        pair.peer = attr.dest_qp_num;
    }
    if mask & ffi::QP_STATE != 0 && pair.state != ffi::QPS_ERR {
        pair.state = attr.qp_state;
    }
    world.run_all();
    0
}

unsafe extern "C" fn query_qp(
    qp: *mut ffi::Qp,
    attr: *mut ffi::QpAttr,
    _: c_int,
    _: *mut ffi::QpInitAttr,
) -> c_int {
    // SAFETY: the caller passes a live queue pair, and a place for the answer.
    unsafe { (*attr).qp_state = world().pairs.get(&(*qp).qp_num).map_or(0, |pair| pair.state) };
    0
}

unsafe extern "C" fn destroy_qp(qp: *mut ffi::Qp) -> c_int {
    let mut world = world();
    // SAFETY: the caller passes a live queue pair, and does not use the pair any more.
    unsafe { world.pairs.remove(&(*qp).qp_num) };
    world.run_all();
    drop(world);
    // SAFETY: as above.
    unsafe { release(qp) }
}

unsafe extern "C" fn post_send(
    qp: *mut ffi::Qp,
    mut next: *mut ffi::SendWr,
    _: *mut *mut ffi::SendWr,
) -> c_int {
    let mut world = world();
    // SAFETY: the caller passes a live queue pair.
    let number = unsafe { (*qp).qp_num };
    // SAFETY: the caller passes a null-terminated chain of requests.
    while let Some(wr) = unsafe { next.as_ref() } {
        // SAFETY: a request without pieces has no list.
        let piece = unsafe { wr.sg_list.as_ref() }.copied().unwrap_or_default();
        let len = piece.length as usize;
        let payload = match wr.send_flags & ffi::SEND_INLINE {
            0 => Payload::Memory(piece.addr, len),
            _ if len == 0 => Payload::Inline(Vec::new()),
            _ => {
                let bytes = std::ptr::with_exposed_provenance::<u8>(piece.addr as usize);
                // SAFETY: inline bytes live until the call returns.
                Payload::Inline(unsafe { std::slice::from_raw_parts(bytes, len) }.to_vec())
            }
        };
        let request = Request {
            id: wr.wr_id,
            opcode: wr.opcode,
            signaled: wr.send_flags & ffi::SEND_SIGNALED != 0,
            remote: wr.remote_addr,
            key: wr.rkey,
            payload,
        };
        if let Some(pair) = world.pairs.get_mut(&number) {
            pair.wire.push_back(request);
        }
        next = wr.next;
    }
    world.run(number);
    0
}

unsafe extern "C" fn post_recv(
    qp: *mut ffi::Qp,
    mut next: *mut ffi::RecvWr,
    _: *mut *mut ffi::RecvWr,
) -> c_int {
    let mut world = world();
    // SAFETY: the caller passes a live queue pair.
    let number = unsafe { (*qp).qp_num };
    let Some(pair) = world.pairs.get_mut(&number) else { return libc::EINVAL };
    // SAFETY: the caller passes a null-terminated chain of requests with one piece each.
    while let Some(wr) = unsafe { next.as_ref() } {
        // SAFETY: as above.
        let piece = unsafe { *wr.sg_list };
        pair.receives.push_back((wr.wr_id, piece.addr, piece.length as usize));
        next = wr.next;
    }
    let peer = pair.peer;
    world.run(number);
    world.run(peer);
    0
}

unsafe extern "C" fn fork_init() -> c_int {
    0
}

/// The double's functions, if the double has an RNIC.
pub(crate) fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: Functions = Functions {
        ibv_get_device_list: get_device_list,
        ibv_free_device_list: free_device_list,
        ibv_open_device: open_device,
        ibv_close_device: close_device,
        ibv_query_device: query_device,
        ibv_query_port: query_port,
        ibv_get_async_event: get_async_event,
        ibv_ack_async_event: ack_async_event,
        ibv_alloc_pd: alloc_pd,
        ibv_dealloc_pd: dealloc_pd,
        ibv_reg_mr: reg_mr,
        ibv_dereg_mr: dereg_mr,
        ibv_create_comp_channel: create_comp_channel,
        ibv_destroy_comp_channel: destroy_comp_channel,
        ibv_create_cq: create_cq,
        ibv_destroy_cq: destroy_cq,
        ibv_get_cq_event: get_cq_event,
        ibv_ack_cq_events: ack_cq_events,
        ibv_create_qp: create_qp,
        ibv_modify_qp: modify_qp,
        ibv_query_qp: query_qp,
        ibv_destroy_qp: destroy_qp,
        ibv_fork_init: fork_init,
        ibv_is_fork_initialized: None,
        ibv_reg_mr_iova: None,
        ibv_cmd_req_notify_cq: None,
        _ibv_query_gid_table: Some(query_gid_table),
    };
    is_installed().then_some(&FUNCTIONS)
}
