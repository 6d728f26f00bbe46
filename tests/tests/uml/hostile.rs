//! A device that breaks the rules of docs/virtio-ism.md: the guest's kernel survives, connections are
//! right or end, and with a device that keeps the rules all is well again.
//!
//! No test makes the driver reset its device: user-mode Linux would forget a feature bit of its back end,
//! and never enable a queue again.

use smc_tests::Rng;
use smc_tests::vm::{Bed, Uml};
use virtio_ism_abi::Status;
use virtio_ism_abi::command::Op;
use virtio_ism_abi::config::Config;
use virtio_ism_abi::event::{
    DmbSignal, DmbSignalEntry, EVENT_LEN, EventType, Notice, PEER_DOWN_FAILED,
};

use crate::backend::{Answer, Asked, Backend};
use crate::ends::{End, connection, connection_on, give_eid};

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

/// What a configuration is spoiled by.
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

/// What an answer is spoiled by.
type Change = fn(&mut Answer);

/// The status of a reply.
fn set_status(answer: &mut Answer, status: u16) {
    answer.bytes[..2].copy_from_slice(&status.to_le_bytes());
    answer.bytes.truncate(8);
    answer.len = answer.bytes.len() as u32;
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
            server.kill();
            client.kill();
            // No DMB of an earlier connection is used again.
            guest.ok(UNLOAD);
            guest.ok(LOAD);
        }
    }
    backend.behave();
    assert_usable(&guest);
    assert!(!guest.console().contains("device failed"), "the device has not failed");
    guest.finish();
}

#[test]
fn records_that_make_no_sense_disturb_no_connection() {
    let bed = Bed::new();
    let (backend, guest) = guest(&bed);
    guest.ok(LOAD);
    let (mut server, mut client) = ends(&guest);
    client.order("flood 0 1 &");
    assert_eq!(client.report().carrier.kind, "smc-d");
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
    // The connection that was there before still is, and a new one is right.
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 2");
    // Signals of DMBs that are in use are no news to anybody.
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
    // Their peer, which is the guest itself, has gone, it says.
    let mut notice = Notice { gid: backend.gid(), ..Notice::default() };
    notice.kind.set(EventType::PeerDown as u16);
    notice.subtype.set(PEER_DOWN_FAILED);
    backend.send(&notice, |_| {});
    assert_ne!(client.report().error, "", "the flood has ended");
    assert_ne!(server.report().error, "", "at the other end, too");
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 4");
    drop((server, client));
    guest.finish();
}
