// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device breaking the rules of docs/virtio-ism.md: the guest's kernel survives, connections are
//! right or end, and a device keeping the rules makes all well again.

use std::time::Duration;

use smc_tests::vm::{Bed, Uml};
use smc_tests::{Rng, eventually};
use virtio_ism_abi::command::Op;
use virtio_ism_abi::config::Config;
use virtio_ism_abi::event::{
    DmbSignal, DmbSignalEntry, EVENT_LEN, EventType, Notice, PEER_DOWN_FAILED,
};
use virtio_ism_abi::{Gid, Status};

use crate::backend::{Answer, Asked, Backend, record_bytes};
use crate::ends::{End, PORT, begin, connection, connection_on, give_eid, pair};

const LOAD: &str = "insmod /lib/modules/virtio_ism.ko";
const UNLOAD: &str = "rmmod virtio_ism";

/// A guest whose device is the test's own. The driver is not loaded.
#[track_caller]
fn guest(bed: &Bed) -> (Backend, Uml) {
    let socket = bed.path("device");
    let backend = Backend::listen(&socket);
    let guest = bed.boot_uml_on("a", &socket, "ism.module=no");
    give_eid(&guest);
    (backend, guest)
}

/// Both ends in the guest, whose one device is the device of both.
#[track_caller]
fn ends(guest: &Uml) -> (End, End) {
    (End::serve(guest, "linux"), End::talk(guest, "linux", &guest.ip()))
}

#[track_caller]
fn assert_usable(guest: &Uml) {
    let (mut server, mut client) = ends(guest);
    connection_on("smc-d", &mut server, &mut client, "bulk 300000 1");
    server.kill();
    client.kill();
}

/// Ends both ends, and loads the driver again.
#[track_caller]
fn reload(guest: &Uml, server: End, client: End) {
    server.kill();
    client.kill();
    guest.ok(UNLOAD);
    guest.ok(LOAD);
}

/// Waits until the kernel has said this so often.
#[track_caller]
fn wait_for_log(guest: &Uml, what: &str, text: &str, times: usize) {
    eventually(&format!("{what}: the kernel says {text:?}"), || {
        guest.console().matches(text).count() >= times
    });
}

/// The record of a lost peer.
fn peer_down(gid: Gid) -> Notice {
    let mut notice = Notice { gid, ..Notice::default() };
    notice.kind.set(EventType::PeerDown as u16);
    notice.subtype.set(PEER_DOWN_FAILED);
    notice
}

/// Waits until the driver has begun another session, and given AF_SMC its device.
#[track_caller]
fn wait_for_session_after(guest: &Uml, backend: &Backend, gid: Gid) {
    eventually("a new session", || {
        let now = backend.gid();
        now != gid && guest.run("cat /sys/class/dibs/*/gid").out.trim() == now.to_string()
    });
}

/// A way to spoil a configuration.
type Spoil = fn(&mut Config);

#[test]
fn a_configuration_that_makes_no_sense_is_refused() {
    let refused: [(&str, Spoil); 17] = [
        ("all zero", |config| *config = zerocopy::FromZeros::new_zeroed()),
        ("revision 0", |config| config.revision.set(0)),
        ("revision 2", |config| config.revision.set(2)),
        ("CHID of a real ISM device", |config| config.chid.set(0xfeff)),
        ("no move queue", |config| config.num_move_queues.set(0)),
        ("no DMB", |config| config.max_dmbs.set(0)),
        ("dmb_min 0", |config| config.dmb_min.set(0)),
        ("dmb_min no power of two", |config| config.dmb_min.set(0x5000)),
        ("dmb_max 0", |config| config.dmb_max.set(0)),
        ("dmb_max no power of two", |config| config.dmb_max.set(u32::MAX)),
        ("dmb_min above dmb_max", |config| config.dmb_max.set(0x2000)),
        ("dmb_align 0", |config| config.dmb_align.set(0)),
        ("dmb_align no power of two", |config| config.dmb_align.set(0x1800)),
        ("dmb_align above dmb_min", |config| config.dmb_align.set(0x8000)),
        ("no scatter-gather entry", |config| config.max_sg.set(0)),
        ("no segment", |config| config.max_segs.set(0)),
        ("no byte of a move", |config| config.max_move.set(0)),
    ];
    let bed = Bed::new();
    let (backend, guest) = guest(&bed);
    for (what, spoil) in refused {
        backend.configure(spoil);
        guest.ok(LOAD);
        assert_eq!(guest.ok("ls /sys/class/dibs"), "", "{what}");
        guest.ok(UNLOAD);
    }
    let accepted: [(&str, Spoil); 5] = [
        ("more of everything than there can be", |config| {
            config.num_move_queues.set(u16::MAX);
            config.max_dmbs.set(u32::MAX);
            config.dmb_max.set(1 << 31);
            config.max_sg.set(u16::MAX);
            config.max_segs.set(u16::MAX);
            config.max_move.set(u32::MAX);
        }),
        ("moves of 8 bytes", |config| config.max_move.set(8)),
        ("one DMB", |config| config.max_dmbs.set(1)),
        ("DMBs of one size only", |config| config.dmb_max.set(config.dmb_min.get())),
        ("no feature", |config| config.features.set(0)),
    ];
    for (what, change) in accepted {
        backend.configure(change);
        guest.ok(LOAD);
        assert_eq!(guest.ok("ls /sys/class/dibs").lines().count(), 1, "{what}");
        let (mut server, mut client) = ends(&guest);
        connection(&mut server, &mut client, "ping 20000 1");
        guest.ok(UNLOAD);
        server.kill();
        client.kill();
    }
    guest.finish();
}

/// A way to spoil an answer.
type Change = fn(&mut Answer);

/// The status of a reply.
fn set_status(answer: &mut Answer, status: u16) {
    answer.bytes[..2].copy_from_slice(&status.to_le_bytes());
    answer.bytes.truncate(8);
    answer.len = answer.bytes.len() as u32;
}

#[test]
fn replies_that_make_no_sense_end_the_session() {
    const LENGTH: &str = "device failed: reply of a wrong length";
    const BROKEN: &str = "device failed: control queue broken";
    let spoils: [(&str, Op, Change, &str); 19] = [
        ("no GID", Op::Hello, |a| a.bytes[8..24].fill(0), "device failed: no GID"),
        ("HELLO is refused", Op::Hello, |a| set_status(a, 1), "no session"),
        ("half a HELLO", Op::Hello, |a| a.len = 16, LENGTH),
        ("a chain nobody made", Op::Hello, |a| a.id = 255, BROKEN),
        ("a chain out of range", Op::Hello, |a| a.id = 256, BROKEN),
        ("the largest chain", Op::Hello, |a| a.id = u32::MAX, BROKEN),
        ("no byte", Op::Register, |a| a.len = 0, LENGTH),
        ("part of a header", Op::Register, |a| a.len = 7, LENGTH),
        ("a header only", Op::Register, |a| a.len = 8, LENGTH),
        ("a byte too much", Op::Register, |a| a.len += 1, LENGTH),
        ("as many bytes as can be said", Op::Register, |a| a.len = u32::MAX, LENGTH),
        (
            "a wrong tag",
            Op::Register,
            |a| a.bytes[4] ^= 1,
            "device failed: reply to another command",
        ),
        ("no token", Op::Register, |a| a.bytes[8..16].fill(0), "device failed: a token of zero"),
        ("replied twice", Op::Register, |a| a.times = 2, BROKEN),
        ("the index runs away", Op::Register, |a| a.skip = 300, BROKEN),
        ("the index goes back", Op::Register, |a| a.skip = u16::MAX - 1, BROKEN),
        ("a wrong tag", Op::QueryGid, |a| a.bytes[7] ^= 0x80, "reply to another command"),
        ("a wrong tag", Op::Unregister, |a| a.bytes[5] ^= 1, "reply to another command"),
        ("no byte", Op::Stats, |a| a.len = 0, LENGTH),
    ];
    let bed = Bed::new();
    let (backend, guest) = guest(&bed);
    for (what, op, change, says) in spoils {
        let what = format!("{what} ({op:?})");
        let before = guest.console().matches(says).count();
        backend.spoil(move |asked, answer| {
            if asked == Asked::Command(op) {
                change(answer);
            }
        });
        guest.ok(LOAD);
        if op != Op::Hello {
            let (mut server, mut client) = ends(&guest);
            connection(&mut server, &mut client, "ping 10000 1");
            guest.ok("cat /sys/kernel/debug/virtio_ism/*/counters");
            guest.ok(UNLOAD);
            server.kill();
            client.kill();
        } else {
            guest.ok(UNLOAD);
        }
        wait_for_log(&guest, &what, says, before + 1);
        backend.behave();
    }
    guest.ok(LOAD);
    assert_usable(&guest);
    guest.finish();
}

#[test]
fn a_status_that_nobody_knows_is_an_error_of_that_command() {
    let bed = Bed::new();
    let (backend, guest) = guest(&bed);
    guest.ok(LOAD);
    for op in [Op::QueryGid, Op::Register, Op::Stats] {
        for status in [Status::Eio.code(), 12, u16::MAX] {
            backend.spoil(move |asked, answer| {
                if asked == Asked::Command(op) {
                    set_status(answer, status);
                }
            });
            let (mut server, mut client) = ends(&guest);
            let kind = if op == Op::Stats { "smc-d" } else { "tcp" };
            connection_on(kind, &mut server, &mut client, "ping 10000 1");
            assert_eq!(guest.counter("usable"), 1, "{op:?}: status {status}");
            // No DMB of an earlier connection is used again.
            reload(&guest, server, client);
        }
    }
    backend.behave();
    assert_usable(&guest);
    assert!(!guest.console().contains("device failed"), "the device has not failed");
    guest.finish();
}

#[test]
fn a_device_that_answers_late_or_never_is_reset_and_used_again() {
    let bed = Bed::new();
    let (backend, guest) = guest(&bed);
    guest.ok(LOAD);
    let answers: [(&str, Change); 2] = [
        ("never", |answer| answer.times = 0),
        // After the driver has given up, and before its reset of the device.
        ("late", |answer| answer.after = Duration::from_millis(15_500)),
    ];
    for (n, (what, change)) in answers.into_iter().enumerate() {
        let gid = backend.gid();
        backend.spoil(move |asked, answer| {
            if asked == Asked::Command(Op::Stats) {
                change(answer);
            }
        });
        guest.ok("cat /sys/kernel/debug/virtio_ism/*/counters");
        wait_for_log(&guest, what, "device failed: no reply to a command", n + 1);
        backend.behave();
        wait_for_session_after(&guest, &backend, gid);
        assert_usable(&guest);
    }
    guest.finish();
}

#[test]
fn records_that_make_no_sense_disturb_no_connection() {
    let bed = Bed::new();
    let (backend, guest) = guest(&bed);
    guest.ok(LOAD);
    let (mut server, mut client) = ends(&guest);
    begin(&mut server, &mut client, "flood 0 1");
    let mut rng = Rng::new(24);
    for n in 0..2000_u32 {
        let mut record = [0_u8; EVENT_LEN];
        record.iter_mut().for_each(|byte| *byte = rng.bits() as u8);
        // Every kind, with counts and indices at their borders, and otherwise at random.
        record[..2].copy_from_slice(&(n as u16 % 8).to_le_bytes());
        let count = [0, 1, 7, 8, u32::MAX][n as usize % 5];
        record[4..8].copy_from_slice(&count.to_le_bytes());
        if n % 3 == 0 {
            let idx = [4095, 4096, u32::MAX][n as usize % 9 / 3];
            record[8..12].copy_from_slice(&idx.to_le_bytes());
        }
        let change: Change = match n % 7 {
            0 => |answer| answer.len = 0,
            1 => |answer| answer.len = 63,
            2 => |answer| answer.len = 65,
            3 => |answer| answer.len = u32::MAX,
            _ => |_| {},
        };
        backend.send(&record, change);
    }
    // The earlier connection still stands, and a new one is right.
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 2");
    // Signals of DMBs in use change nothing.
    let mut record = DmbSignal::default();
    record.kind.set(EventType::DmbSignal as u16);
    record.n.set(7);
    for first in (0..1024).step_by(7) {
        for (n, entry) in record.entries.iter_mut().enumerate() {
            *entry = DmbSignalEntry {
                idx: (first + n as u32).into(),
                mask: u16::MAX.into(),
                ..Default::default()
            };
        }
        backend.send(&record, |_| {});
    }
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 3");
    // The device reports the loss of the peer, here the guest itself.
    backend.send(&peer_down(backend.gid()), |_| {});
    assert_ne!(client.report().error, "", "the flood has ended");
    assert_ne!(server.report().error, "", "at the other end, too");
    // A GID never comes back, so there is none to connect to.
    connection_on("tcp", &mut server, &mut client, "bulk 1000000 4");
    reload(&guest, server, client);
    assert_usable(&guest);
    guest.finish();
}

#[test]
fn a_broken_event_queue_ends_the_session_and_another_begins() {
    let bed = Bed::new();
    let (backend, guest) = guest(&bed);
    let changes: [(&str, Change); 2] = [
        ("out of range", |answer| answer.id = u32::MAX),
        ("nobody's chain", |answer| answer.id = 200),
    ];
    guest.ok(LOAD);
    for (n, (what, change)) in changes.into_iter().enumerate() {
        let (mut server, mut client) = ends(&guest);
        begin(&mut server, &mut client, "flood 0 1");
        let gid = backend.gid();
        backend.send(&[0xff_u8; EVENT_LEN], change);
        wait_for_log(&guest, what, "device failed: event queue broken", n + 1);
        assert_ne!(client.report().error, "", "{what}");
        server.kill();
        client.kill();
        wait_for_session_after(&guest, &backend, gid);
        assert_usable(&guest);
    }
    // The driver cannot tell these from records: all its buffers are there to be written.
    let changes: [(&str, Change); 2] = [
        ("twice", |answer| answer.times = 2),
        ("the index runs away", |answer| answer.skip = 1000),
    ];
    for (what, change) in changes {
        let (mut server, mut client) = ends(&guest);
        begin(&mut server, &mut client, "flood 0 1");
        backend.send(&[0xff_u8; EVENT_LEN], change);
        eventually(what, || guest.counter("events_unknown") > 0);
        reload(&guest, server, client);
        assert_usable(&guest);
    }
    guest.finish();
}

#[test]
fn a_session_that_cannot_begin_is_tried_again() {
    let bed = Bed::new();
    let (backend, guest) = guest(&bed);
    guest.ok(LOAD);
    let gid = backend.gid();
    backend.configure(|config| config.max_move.set(0));
    backend.send(&[0xff_u8; EVENT_LEN], |answer| answer.id = u32::MAX);
    wait_for_log(&guest, "a bad configuration", "cannot restart the device", 1);
    eventually("the device has gone", || guest.ok("ls /sys/class/dibs").is_empty());
    backend.configure(|_| {});
    backend.spoil(|asked, answer| {
        if asked == Asked::Command(Op::Hello) {
            set_status(answer, Status::Enomem.code());
        }
    });
    wait_for_log(&guest, "HELLO is refused", "cannot restart the device", 2);
    backend.behave();
    wait_for_session_after(&guest, &backend, gid);
    assert_usable(&guest);
    guest.finish();
}

#[test]
fn moves_that_are_refused_or_kept_harm_only_connections() {
    const BROKEN: &str = "device failed: move queue broken";
    let refuse: Change = |answer| answer.bytes.copy_from_slice(&1_u32.to_le_bytes());
    // With as many connections as needed to use up every slot.
    let cases: [(&str, Change, usize, &str); 7] = [
        ("refused", refuse, 1, "moves_refused"),
        ("an unknown status", |answer| answer.bytes.fill(0xff), 1, "moves_refused"),
        ("no status", |answer| answer.len = 0, 1, "moves_refused"),
        ("kept", |answer| answer.times = 0, 40, "moves_dropped"),
        ("out of range", |answer| answer.id = 0x1_0000, 1, ""),
        ("twice", |answer| answer.times = 2, 1, ""),
        ("the index runs away", |answer| answer.skip = 500, 1, ""),
    ];
    let bed = Bed::new();
    let (backend, guest) = guest(&bed);
    for (what, change, connections, counter) in cases {
        guest.ok(LOAD);
        let before = guest.console().matches(BROKEN).count();
        let (mut server, mut client) = ends(&guest);
        for _ in 0..connections {
            begin(&mut server, &mut client, "flood 0 1");
        }
        backend.spoil(move |asked, answer| {
            if asked == Asked::Move {
                change(answer);
            }
        });
        if counter.is_empty() {
            wait_for_log(&guest, what, BROKEN, before + 1);
        } else {
            eventually(what, || guest.counter(counter) > 0);
        }
        // The ends may wait for each other: the kernel tells neither.
        server.kill();
        client.kill();
        backend.behave();
        guest.ok(UNLOAD);
    }
    guest.ok(LOAD);
    assert_usable(&guest);
    guest.finish();
}

#[test]
fn a_peer_that_goes_while_a_dmb_for_it_is_registered_ends_its_connections() {
    for nth in 1..=2 {
        let bed = Bed::new();
        let (backend, mut guest) = guest(&bed);
        // A first contact fails in an ended group, and its worker may wait for itself
        // (docs/linux.md). So the guest is killed, without removing the module.
        guest.forgive("possible recursive locking");
        guest.ok(LOAD);
        // Of both ends one after the other.
        let (mut registered, gone) = (0, record_bytes(&peer_down(backend.gid())));
        backend.spoil(move |asked, answer| {
            if asked == Asked::Command(Op::Register) {
                registered += 1;
                answer.record = (registered == nth).then_some(gone);
            }
        });
        let (mut server, mut client) = ends(&guest);
        // The client sends nothing; the server only waits for the client's end.
        client.order("stay 0 1 &");
        let opened = client.report();
        if opened.carrier.kind == "smc-d" {
            server.report();
        }
        assert_eq!(guest.counter("events_peer_down"), 1, "{nth}");
    }
}

#[test]
fn the_end_of_a_peer_is_told_again_to_a_kernel_that_had_no_memory_to_hear_it() {
    const FAILING: &str = "/sys/kernel/debug/failslab";
    let bed = Bed::new();
    let (backend, guest) = guest(&bed);
    guest.ok(LOAD);
    let (mut server, mut client) = ends(&guest);
    begin(&mut server, &mut client, "stay 0 1");
    // Every non-waiting allocation of these sizes fails.
    let script = format!(
        "cd {FAILING} && echo Y > cache-filter && echo Y > ignore-gfp-wait && echo -1 > times \
         && echo 0 > verbose && echo 100 > probability \
         && for cache in 96 128 192 256; do echo 1 > /sys/kernel/slab/kmalloc-$cache/failslab; done"
    );
    guest.ok(["sh", "-c", &script]);
    backend.send(&peer_down(backend.gid()), |_| {});
    eventually("the driver has heard it", || guest.counter("events_peer_down") == 1);
    guest.ok(format!("echo 0 > {FAILING}/probability"));
    // Without the second notice the server would wait for ever.
    server.report();
    reload(&guest, server, client);
    assert_usable(&guest);
    guest.finish();
}

#[test]
fn a_peer_that_lies_about_what_it_has_read_harms_only_its_connections() {
    const CONNECTIONS: usize = 10;
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    begin(&mut server, &mut client, "flood 0 1");
    let (device, address) = (bed.port("liar"), format!("{}:{PORT}", a.ip()));
    let device = device.display().to_string();
    let mut liar = bed.rogue(&["lie", &device, &address, &CONNECTIONS.to_string()]);
    println!("{}", liar.line());
    for _ in 0..CONNECTIONS {
        assert_ne!(server.report().error, "");
    }
    // Not before: AF_SMC keeps unaccepted connections for ever (docs/linux.md).
    liar.kill();
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 2");
    drop((server, client));
    Uml::finish_all([a, b]);
}
