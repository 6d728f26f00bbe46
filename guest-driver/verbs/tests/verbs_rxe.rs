// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Verbs over a software RNIC: behaviour invisible on a host without RDMA.
//!
//! Run as root in a guest with an otherwise idle software RNIC (`rdma link add rxe0 type rxe netdev
//! eth0`): `verbs_rxe --ignored --test-threads=1`. Two queue pairs of the one RNIC are connected
//! with each other.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ism_sys::{PollInterest, wait};
use smc_core::wire::ids::{Gid, Mtu, Psn, Qpn, Rkey};
use smc_verbs::{
    Access, AsyncEvent, Channel, Completed, Completion, Context, Cq, GidEntry, GidKind, Hops,
    Memory, Mr, Payload, Pd, PostError, Qp, QpCaps, QpState, ReadyToSend, Recv, RemoteEnd,
    VerbsError, WcStatus, Work, devices,
};

const TIMEOUT: Duration = Duration::from_secs(10);
const MESSAGE: usize = 44;
const RECEIVES: u64 = 48;

struct Rnic {
    context: Arc<Context>,
    gid: GidEntry,
    mtu: Mtu,
}

impl Rnic {
    fn open() -> Rnic {
        let list = devices().expect("this test wants an RNIC");
        let context = Context::open(&list[0]).unwrap();
        let port = context.port(1).unwrap();
        assert!(port.is_active() && port.ethernet, "{port:?}");
        assert!(port.active_mtu.bytes().unwrap() >= 256);
        let gids = context.gids(1).unwrap();
        let gid = gids.iter().find(|entry| entry.gid.to_ipv4().is_some()).cloned();
        let gid = gid.unwrap_or_else(|| panic!("no GID of an IPv4 address in {gids:?}"));
        Rnic { context, gid, mtu: port.active_mtu }
    }
}

/// One end: a queue pair, a ring written by the other end, and buffers for messages.
struct End {
    qp: Qp<ReadyToSend>,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    channel: Arc<Channel>,
    ring: Mr,
    buffers: Mr,
}

impl End {
    fn receive(&self, id: u64) {
        let buffer = self.buffers.sge(id as usize * 64, 64).unwrap();
        self.qp.post_recv(&[Recv { id, buffer }]).unwrap();
    }

    fn message(&self, id: u64) -> [u8; MESSAGE] {
        let mut bytes = [0; MESSAGE];
        self.buffers.memory().copy_out(id as usize * 64, &mut bytes).unwrap();
        bytes
    }
}

fn pair(rnic: &Rnic) -> [End; 2] {
    let psns = [Psn::new(0x12_3456), Psn::new(0xff_fffe)];
    let ends = [(); 2].map(|()| {
        let context = &rnic.context;
        let pd = Pd::new(context).unwrap();
        let channel = Channel::new(context).unwrap();
        let send_cq = Cq::new(context, 256, None).unwrap();
        let recv_cq = Cq::new(context, 256, Some(&channel)).unwrap();
        let caps = QpCaps { send_requests: 128, receive_requests: 64, inline: MESSAGE as u32 };
        let qp = Qp::new(&pd, &send_cq, &recv_cq, caps).unwrap();
        assert!(qp.max_inline() >= MESSAGE, "{:?}", qp.caps());
        let qp = qp.init(1).unwrap();
        let memory = |len| Memory::new(len).unwrap();
        let ring = Mr::register(&pd, &memory(65_536), Access::RemoteWrite).unwrap();
        let buffers = Mr::register(&pd, &memory(4096), Access::Local).unwrap();
        let receives: Vec<_> = (0..RECEIVES)
            .map(|id| Recv { id, buffer: buffers.sge(id as usize * 64, 64).unwrap() })
            .collect();
        qp.post_recv(&receives).unwrap();
        (qp, send_cq, recv_cq, channel, ring, buffers)
    });
    let numbers = ends.each_ref().map(|(qp, ..)| qp.qp_num());
    let mut other = 1;
    ends.map(|(qp, send_cq, recv_cq, channel, ring, buffers)| {
        let remote = RemoteEnd {
            gid: rnic.gid.gid,
            qp_num: numbers[other],
            psn: psns[other],
            mtu: rnic.mtu,
            sgid_index: rnic.gid.index,
            hops: Hops::Direct,
        };
        let own = 1 - other;
        other = own;
        let qp = qp.ready_to_receive(&remote).unwrap();
        let qp = qp.ready_to_send(psns[own]).unwrap();
        End { qp, send_cq, recv_cq, channel, ring, buffers }
    })
}

fn poll_one(cq: &Cq) -> Completion {
    let end = Instant::now() + TIMEOUT;
    let mut one = [Completion::default()];
    while cq.poll(&mut one).unwrap() == 0 {
        assert!(Instant::now() < end, "nothing completes");
        std::thread::yield_now();
    }
    one[0]
}

fn readable(fd: impl AsFd, timeout: Duration) -> bool {
    let [state] = wait([(fd.as_fd(), PollInterest::Read)], Some(timeout)).unwrap();
    state.readable
}

/// Waits for this event of the RNIC and ignores other events.
fn expect(context: &Context, wanted: AsyncEvent) {
    let end = Instant::now() + TIMEOUT;
    let mut seen = Vec::new();
    while !seen.contains(&wanted) {
        assert!(Instant::now() < end, "only {seen:?}");
        readable(context, Duration::from_millis(100));
        seen.extend(std::iter::from_fn(|| context.next_async_event()));
    }
    println!("{seen:?}");
}

#[test]
fn whether_there_is_an_rnic_is_an_ordinary_answer() {
    match devices() {
        Ok(list) => println!("{list:?}"),
        Err(reason) => println!("{reason}"),
    }
}

#[test]
#[ignore = "needs a software RNIC"]
fn an_rnic_tells_what_it_is() {
    let rnic = Rnic::open();
    let info = rnic.context.device();
    let net = rnic.gid.net_device.clone().unwrap();
    assert_eq!(rnic.gid.kind, GidKind::RoceV2);
    assert!(info.net_devices().contains(&net), "{:?}", info.net_devices());
    assert!(net.mac().is_some_and(|mac| mac.0 != [0; 6]));
    let limits = rnic.context.limits().unwrap();
    assert_eq!(limits.ports, 1);
    assert!(limits.queue_pairs > 16 && limits.work_requests >= 128, "{limits:?}");
    assert!(limits.cq_entries >= 256 && limits.mrs > 16, "{limits:?}");
    assert!(rnic.context.port(9).is_err());
    let gids = rnic.context.gids(1).unwrap();
    println!("{} at {net:?}: {:?} {limits:?} {gids:?}", info.name(), rnic.context.port(1).unwrap());
    let [end, _] = pair(&rnic);
    println!("granted: {:?}, cq {}", end.qp.caps(), end.recv_cq.entries());
}

// Shows: RMB-29, CDC-2.
#[test]
#[ignore = "needs a software RNIC"]
fn a_write_is_there_when_the_send_after_it_arrives() {
    let rnic = Rnic::open();
    let [a, b] = pair(&rnic);
    let source = Mr::register(a.qp.pd(), &Memory::new(65_536).unwrap(), Access::Local).unwrap();
    for round in 0..20u8 {
        let data = vec![round + 1; 30_000];
        source.memory().copy_in(100, &data).unwrap();
        b.recv_cq.arm(true).unwrap();
        assert!(!readable(&b.channel, Duration::ZERO));
        let message = [round; MESSAGE];
        let piece = Payload::Registered(source.sge(100, data.len()).unwrap());
        a.qp.post_send(&[
            Work::write(1, piece, b.ring.address() + 7, b.ring.rkey()),
            Work::write(2, Payload::Inline(&[0xee; 8]), b.ring.address(), b.ring.rkey()),
            Work::send(3, Payload::Inline(&message)).signaled(),
        ])
        .unwrap();

        assert!(readable(&b.channel, TIMEOUT));
        let mut seen = Vec::new();
        assert_eq!(b.channel.drain(8, |cq| seen.push(cq)), 1);
        assert_eq!(seen, [b.recv_cq.id()]);
        let received = poll_one(&b.recv_cq);
        assert_eq!(received.result(), Ok(Completed::Receive { len: MESSAGE }));
        assert_eq!(received.qp_num(), b.qp.qp_num());
        assert_eq!(b.message(received.id()), message);
        let mut bytes = vec![0; data.len()];
        b.ring.memory().copy_out(7, &mut bytes).unwrap();
        assert!(bytes[1..] == data[1..], "all of the write is there");
        b.ring.memory().copy_out(0, &mut bytes[..8]).unwrap();
        assert_eq!(bytes[..8], [0xee; 8]);
        b.receive(received.id());

        let sent = poll_one(&a.send_cq);
        assert_eq!((sent.id(), sent.result()), (3, Ok(Completed::Send)));
        assert_eq!(a.send_cq.poll(&mut [Completion::default()]).unwrap(), 0, "unsignaled");
    }
}

// Shows: LG-51, SEC-6.
#[test]
#[ignore = "needs a software RNIC"]
fn a_wrong_key_ends_both_queue_pairs_with_a_typed_error() {
    let rnic = Rnic::open();
    for wrong in ["key", "range", "read-only", "own memory"] {
        let [a, b] = pair(&rnic);
        let own = if wrong == "own memory" { &b.buffers } else { &a.buffers };
        let (address, rkey, status) = match wrong {
            "key" => (b.ring.address(), Rkey(b.ring.rkey().0 ^ 0xff00), WcStatus::RemoteAccess),
            "range" => (b.ring.address() + 65_535, b.ring.rkey(), WcStatus::RemoteAccess),
            "read-only" => (b.buffers.address(), b.buffers.rkey(), WcStatus::RemoteAccess),
            _ => (b.ring.address(), b.ring.rkey(), WcStatus::LocalProtection),
        };
        let piece = Payload::Registered(own.sge(0, 16).unwrap());
        let write = Work::write(5, piece, address, rkey);
        a.qp.post_send(&[write, Work::send(6, Payload::Inline(b"late")).signaled()]).unwrap();
        let failed = poll_one(&a.send_cq);
        assert_eq!(failed.id(), 5);
        // A software RNIC reports its own memory's faults as no more than the end of the queue.
        let flushed =
            status == WcStatus::LocalProtection && failed.result() == Err(WcStatus::Flushed);
        assert!(failed.result() == Err(status) || flushed, "{wrong}: {failed:?}");
        let late = poll_one(&a.send_cq);
        assert_eq!((late.id(), late.result()), (6, Err(WcStatus::Flushed)), "{wrong}");
        assert_eq!(a.qp.state().unwrap(), QpState::Error);
        // Requests and receives posted from now on are flushed.
        a.qp.post_send(&[Work::send(7, Payload::Inline(b"later")).signaled()]).unwrap();
        assert_eq!(poll_one(&a.send_cq).result(), Err(WcStatus::Flushed));
        assert_eq!(poll_one(&a.recv_cq).result(), Err(WcStatus::Flushed));
        let peer = b.qp.state().unwrap();
        println!("{wrong}: the other end is {peer:?}, event {:?}", rnic.context.next_async_event());
    }
    while let Some(event) = rnic.context.next_async_event() {
        println!("event {event:?}");
    }
}

#[test]
#[ignore = "needs a software RNIC"]
fn a_queue_pair_can_be_failed_and_its_requests_are_flushed() {
    let rnic = Rnic::open();
    let [a, _b] = pair(&rnic);
    assert_eq!(a.qp.state().unwrap(), QpState::Alive);
    a.recv_cq.arm(false).unwrap();
    a.qp.fail().unwrap();
    assert_eq!(a.qp.state().unwrap(), QpState::Error);
    for _ in 0..RECEIVES {
        assert_eq!(poll_one(&a.recv_cq).result(), Err(WcStatus::Flushed));
    }
    assert!(readable(&a.channel, TIMEOUT), "flushed requests wake who waits");
}

#[test]
#[ignore = "needs a software RNIC"]
fn a_full_queue_and_a_long_inline_payload_are_refused_and_harm_nothing() {
    let rnic = Rnic::open();
    let [a, b] = pair(&rnic);
    let long = vec![0; a.qp.max_inline() + 1];
    let refused = a.qp.post_send(&[
        Work::send(1, Payload::Inline(b"not sent")),
        Work::send(2, Payload::Inline(&long)),
    ]);
    assert!(matches!(refused, Err(PostError::InlineTooLong { .. })), "{refused:?}");
    // More requests than places in the queue, for a peer with 48 receives.
    let many = vec![Work::send(3, Payload::Inline(b"many")).signaled(); 4096];
    let Err(PostError::Full { posted }) = a.qp.post_send(&many) else { panic!("no end") };
    assert!(posted >= 128, "{posted}");
    for id in 0..RECEIVES {
        let received = poll_one(&b.recv_cq);
        assert_eq!((received.id(), received.result()), (id, Ok(Completed::Receive { len: 4 })));
    }
    println!("a queue of {} took {posted} before it was full", a.qp.caps().send_requests);
}

#[test]
#[ignore = "needs a software RNIC"]
fn everything_can_go_in_any_order_and_while_in_use() {
    let rnic = Rnic::open();
    for round in 0..24 {
        let [a, b] = pair(&rnic);
        a.recv_cq.arm(false).unwrap();
        b.qp.post_send(&[Work::send(1, Payload::Inline(b"on its way"))]).unwrap();
        let End { qp, send_cq, recv_cq, channel, ring, buffers } = a;
        let mut parts: Vec<Option<Box<dyn std::any::Any>>> = vec![
            Some(Box::new(qp)),
            Some(Box::new(send_cq)),
            Some(Box::new(recv_cq)),
            Some(Box::new(channel)),
            Some(Box::new((ring, buffers))),
        ];
        for step in 0..parts.len() {
            // 2 and 3 have no factor in common with 5: every part, each time in another order.
            let at = (step * (1 + round % 4) + round) % parts.len();
            assert!(parts[at].take().is_some());
        }
    }
    let Rnic { context, .. } = rnic;
    let pd = Pd::new(&context).unwrap();
    let mr = Mr::register(&pd, &Memory::new(1).unwrap(), Access::Local).unwrap();
    drop(context);
    drop(pd);
    assert!(mr.sge(4095, 1).is_ok() && mr.sge(mr.memory().len(), 1).is_err());
}

#[test]
#[ignore = "needs a software RNIC"]
fn a_completion_queue_can_go_while_another_thread_takes_its_notices() {
    let rnic = Rnic::open();
    let channel = Channel::new(&rnic.context).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let drain = || {
            let mut taken = 0;
            while !stop.load(Ordering::Relaxed) {
                taken += channel.drain(4, |_| ());
                std::thread::yield_now();
            }
            taken
        };
        let drains = [scope.spawn(drain), scope.spawn(drain)];
        for _ in 0..200 {
            let pd = Pd::new(&rnic.context).unwrap();
            let cq = Cq::new(&rnic.context, 8, Some(&channel)).unwrap();
            cq.arm(false).unwrap();
            let caps = QpCaps { send_requests: 4, receive_requests: 4, inline: 0 };
            let qp = Qp::new(&pd, &cq, &cq, caps).unwrap().init(1).unwrap();
            let mr = Mr::register(&pd, &Memory::new(64).unwrap(), Access::Local).unwrap();
            qp.post_recv(&[Recv { id: 1, buffer: mr.sge(0, 64).unwrap() }]).unwrap();
            // A flushed receive is an event. The event is taken or vanishes with its queue.
            qp.fail().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        let taken: usize = drains.into_iter().map(|drain| drain.join().unwrap()).sum();
        println!("{taken} notices of 200 queues were taken");
    });
}

#[test]
#[ignore = "needs a software RNIC"]
fn a_fork_disturbs_nobody() {
    let rnic = Rnic::open();
    let [a, b] = pair(&rnic);
    let before = Mr::register(a.qp.pd(), &Memory::new(4096).unwrap(), Access::Local).unwrap();
    let mut child = Command::new("sleep").arg("1").spawn().unwrap();
    before.memory().copy_in(0, b"after the fork").unwrap();
    b.ring.memory().copy_in(0, &[1; 4096]).unwrap();
    let piece = Payload::Registered(before.sge(0, 14).unwrap());
    a.qp.post_send(&[
        Work::write(1, piece, b.ring.address(), b.ring.rkey()),
        Work::send(2, Payload::Inline(b"done")),
    ])
    .unwrap();
    assert_eq!(poll_one(&b.recv_cq).result(), Ok(Completed::Receive { len: 4 }));
    let mut bytes = [0; 14];
    b.ring.memory().copy_out(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"after the fork");
    child.wait().unwrap();
}

#[test]
#[ignore = "needs a software RNIC"]
fn a_peer_that_cannot_be_named_is_refused() {
    let rnic = Rnic::open();
    let pd = Pd::new(&rnic.context).unwrap();
    let cq = Cq::new(&rnic.context, 16, None).unwrap();
    let caps = QpCaps { send_requests: 4, receive_requests: 4, inline: 0 };
    let remote = |mtu, sgid_index| RemoteEnd {
        gid: rnic.gid.gid,
        qp_num: Qpn::new(17),
        psn: Psn::new(0),
        mtu,
        sgid_index,
        hops: Hops::Routed,
    };
    let init = || Qp::new(&pd, &cq, &cq, caps).unwrap().init(1).unwrap();
    let refused = init().ready_to_receive(&remote(Mtu::from_code(7), rnic.gid.index));
    assert!(matches!(refused, Err(VerbsError::Mtu(_))));
    let refused = init().ready_to_receive(&remote(rnic.mtu, 250));
    assert!(matches!(refused, Err(VerbsError::Call { call: "ibv_modify_qp", .. })));
    assert!(Qp::new(&pd, &cq, &cq, caps).unwrap().init(9).is_err());
}

#[test]
#[ignore = "needs a software RNIC"]
fn a_port_that_goes_down_and_comes_back_is_told() {
    let rnic = Rnic::open();
    let net = rnic.gid.net_device.clone().unwrap().name;
    let set = |state| {
        let status = Command::new("ip").args(["link", "set", &net, state]).status().unwrap();
        assert!(status.success());
    };
    set("down");
    expect(&rnic.context, AsyncEvent::PortDown(1));
    assert!(!rnic.context.port(1).unwrap().is_active());
    set("up");
    expect(&rnic.context, AsyncEvent::PortActive(1));
    assert!(rnic.context.port(1).unwrap().is_active());
}

#[test]
#[ignore = "needs a software RNIC"]
fn an_address_that_comes_and_goes_is_told() {
    let rnic = Rnic::open();
    let net = rnic.gid.net_device.clone().unwrap().name;
    let gid = Gid::from_ipv4([10, 99, 98, 97]);
    let has = || rnic.context.gids(1).unwrap().iter().any(|entry| entry.gid == gid);
    assert!(!has());
    for (action, there) in [("add", true), ("del", false)] {
        let arguments = ["addr", action, "10.99.98.97/24", "dev", &net];
        assert!(Command::new("ip").args(arguments).status().unwrap().success());
        expect(&rnic.context, AsyncEvent::GidChange(1));
        assert_eq!(has(), there);
    }
}

#[test]
#[ignore = "needs a software RNIC"]
fn a_completion_queue_that_overruns_is_told_by_its_id() {
    let rnic = Rnic::open();
    let pd = Pd::new(&rnic.context).unwrap();
    let _other = Cq::new(&rnic.context, 1, None).unwrap();
    let cq = Cq::new(&rnic.context, 1, None).unwrap();
    let caps = QpCaps { send_requests: 1, receive_requests: 64, inline: 0 };
    let qp = Qp::new(&pd, &cq, &cq, caps).unwrap().init(1).unwrap();
    let mr = Mr::register(&pd, &Memory::new(64).unwrap(), Access::Local).unwrap();
    let recv = Recv { id: 1, buffer: mr.sge(0, 64).unwrap() };
    qp.post_recv(&vec![recv; 64]).unwrap();
    qp.fail().unwrap();
    expect(&rnic.context, AsyncEvent::CqError(cq.id()));
}

/// Costs of operations, one number per line. Asserts nothing about the numbers.
#[test]
#[ignore = "needs a software RNIC"]
fn cost() {
    let rnic = Rnic::open();
    let [a, b] = pair(&rnic);
    let rounds: u32 = std::env::var("ROUNDS").map_or(2000, |text| text.parse().unwrap());
    let ends = [&a, &b];
    let sources = ends.map(|end| {
        Mr::register(end.qp.pd(), &Memory::new(65_536).unwrap(), Access::Local).unwrap()
    });
    for len in [0, 8, 1024, 16_384] {
        let mut posting = Duration::ZERO;
        let start = Instant::now();
        for round in 0..rounds {
            for side in 0..2 {
                let (from, to) = (ends[side], ends[1 - side]);
                let piece = Payload::Registered(sources[side].sge(0, len).unwrap());
                let write = Work::write(1, piece, to.ring.address(), to.ring.rkey());
                let mut send = Work::send(2, Payload::Inline(&[7; MESSAGE]));
                if round % 16 == 0 {
                    send = send.signaled();
                }
                let both = [write, send];
                let before = Instant::now();
                from.qp.post_send(&both[usize::from(len == 0)..]).unwrap();
                posting += before.elapsed();
                let received = poll_one(&to.recv_cq);
                to.receive(received.id());
                if round % 16 == 0 {
                    poll_one(&from.send_cq).result().unwrap();
                }
            }
        }
        let per = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(2 * rounds);
        println!(
            "cost: {} of {len} + SEND of 44 inline: post {:.1} us, until received {:.1} us",
            if len == 0 { "nothing" } else { "WRITE" },
            per(posting),
            per(start.elapsed())
        );
    }
    let time = |what: &str, run: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..rounds).for_each(|_| run());
        println!("cost: {what}: {:.2} us", start.elapsed().as_secs_f64() * 1e6 / f64::from(rounds));
    };
    time("poll of an empty queue", &mut || {
        assert_eq!(a.recv_cq.poll(&mut [Completion::default(); 8]).unwrap(), 0);
    });
    time("arm", &mut || a.recv_cq.arm(true).unwrap());
    time("drain of an empty channel", &mut || assert_eq!(b.channel.drain(1, |_| ()), 0));
    let memory = Memory::new(65_536).unwrap();
    time("register 64 KiB and end it", &mut || {
        Mr::register(a.qp.pd(), &memory, Access::RemoteWrite).unwrap();
    });
    let cq = &a.recv_cq;
    let caps = QpCaps { send_requests: 48, receive_requests: 48, inline: MESSAGE as u32 };
    time("make, connect and end a queue pair", &mut || {
        let qp = Qp::new(a.qp.pd(), cq, cq, caps).unwrap().init(1).unwrap();
        let remote = RemoteEnd {
            gid: rnic.gid.gid,
            qp_num: b.qp.qp_num(),
            psn: Psn::new(1),
            mtu: rnic.mtu,
            sgid_index: rnic.gid.index,
            hops: Hops::Direct,
        };
        qp.ready_to_receive(&remote).unwrap().ready_to_send(Psn::new(1)).unwrap();
    });
    time("wake through the channel", &mut || {
        b.recv_cq.arm(true).unwrap();
        a.qp.post_send(&[Work::send(1, Payload::Inline(&[7; MESSAGE])).signaled()]).unwrap();
        assert!(readable(&b.channel, TIMEOUT));
        assert_eq!(b.channel.drain(1, |_| ()), 1);
        let received = poll_one(&b.recv_cq);
        b.receive(received.id());
        poll_one(&a.send_cq).result().unwrap();
    });
}
