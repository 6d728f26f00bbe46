// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver against a fabric in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use virtio_ism_abi::command::{HelloReply, HelloRequest, Op, hello_flags};
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::Event;
use virtio_ism_abi::signal::{Sleepers, sleeper_word};
use virtio_ism_abi::{Gid, Status, Token};

use super::{DeliverError, IsmDevice, IsmError, OpenOptions, OwnDmb, PeerDmb, Prefer, command};
use crate::transport::TransportError;
use crate::transport::fake::FakeFabric;
use crate::virtqueue::QueueError;
use ism_sys::{WordWait, sleep_on_words};
use zerocopy::{FromZeros, IntoBytes};

const LEN: u32 = 64 << 10;

struct Pair {
    fabric: Arc<FakeFabric>,
    a: Arc<IsmDevice>,
    b: Arc<IsmDevice>,
}

fn device(fabric: &Arc<FakeFabric>, prefer: Prefer) -> Arc<IsmDevice> {
    let options = OpenOptions { prefer, ..OpenOptions::new("unused") };
    IsmDevice::open_on(fabric.join(Features::all()), &options).unwrap()
}

fn pair(prefer: Prefer) -> Pair {
    let fabric = Arc::new(FakeFabric::default());
    let (a, b) = (device(&fabric, prefer), device(&fabric, prefer));
    Pair { fabric, a, b }
}

impl Pair {
    /// A DMB of a's, attached by b.
    fn dmb(&self) -> (OwnDmb, PeerDmb) {
        let own = self.a.register(self.b.gid(), LEN, 0).unwrap();
        let peer = self.b.attach(own.token(), LEN).unwrap();
        (own, peer)
    }
}

#[test]
fn a_peer_of_the_other_byte_order_is_refused_by_name() {
    let Pair { fabric, a, .. } = pair(Prefer::Window);
    let (other, mut reply) = (fabric.join(Features::all()), HelloReply::new_zeroed());
    let hello = HelloRequest {
        abi: 1.into(),
        flags: (hello_flags::NATIVE ^ hello_flags::BIG_ENDIAN).into(),
        driver_max_idx: 9.into(),
    };
    command(&other, Op::Hello, hello.as_bytes(), reply.as_mut_bytes()).unwrap();
    let refused = |error| matches!(error, IsmError::Refused { status: Status::Eorder, .. });
    assert!(refused(a.query_gid(reply.gid).unwrap_err()));
    assert!(refused(a.register(reply.gid, LEN, 0).unwrap_err()));
}

fn events(device: &IsmDevice) -> Vec<Event> {
    let mut events = Vec::new();
    device.poll_events(&mut |event| events.push(event)).unwrap();
    events
}

fn bytes_at(dmb: &OwnDmb, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    dmb.memory().copy_out(offset, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_delivery_is_the_same_on_both_paths() {
    for prefer in [Prefer::Window, Prefer::Move] {
        let pair = pair(prefer);
        let (own, peer) = pair.dmb();
        assert_eq!(peer.is_window(), prefer == Prefer::Window);
        assert_eq!(own.slab_id().is_some(), prefer == Prefer::Window);
        let long: Vec<u8> = (0..30_000u32).map(|i| i as u8).collect();
        peer.deliver(&[(100, &long), (50_000, b"end")], [11, 22], true).unwrap();
        assert_eq!(own.words(), [11, 22]);
        assert_eq!(bytes_at(&own, 100, long.len()), long);
        assert_eq!(bytes_at(&own, 50_000, 3), b"end");
        assert_eq!(bytes_at(&own, 0, 8), [0; 8], "only the two words of the control block");
        peer.deliver(&[], [12, 23], false).unwrap();
        assert_eq!(own.words(), [12, 23]);
    }
}

#[test]
fn a_writer_has_pages_mapped_before_its_bytes_come_there() {
    let pair = pair(Prefer::Window);
    let (_own, peer) = pair.dmb();
    let page = ism_sys::page_size() as u32;
    peer.deliver(&[(64, &[1; 1000])], [1000, 0], false).unwrap();
    assert_eq!(peer.pages_there(), [0], "a short connection needs no more");
    peer.deliver(&[(page - 8, &[2; 64])], [5000, 0], false).unwrap();
    let chunk = (0..65_536 / page as usize).collect::<Vec<_>>();
    assert_eq!(peer.pages_there(), chunk);
    peer.deliver(&[(1000, &[3; 64])], [6000, 0], false).unwrap();
    assert_eq!(peer.pages_there(), chunk);
}

#[test]
fn an_owner_in_the_window_is_kicked_only_while_it_sleeps() {
    let pair = pair(Prefer::Window);
    let (own, peer) = pair.dmb();
    let line = own.line().unwrap();
    peer.deliver(&[(64, b"x")], [1, 0], true).unwrap();
    assert!(events(&pair.a).is_empty(), "awake: no record");
    assert_eq!(line.take(), 1 << own.bit().unwrap());
    assert!(line.arm() && pair.a.arm_interrupts());
    peer.deliver(&[(64, b"y")], [2, 0], true).unwrap();
    assert!(pair.a.wait_events(smc_test_support::TIMEOUT).unwrap());
    let woken = events(&pair.a);
    assert!(
        matches!(&woken[..], [Event::SlabWake(wake)] if Some(wake.slabs[0].get()) == own.slab_id())
    );
    peer.deliver(&[(64, b"z")], [3, 0], true).unwrap();
    assert!(events(&pair.a).is_empty(), "disarmed by the first");
    assert_eq!(line.take(), 1 << own.bit().unwrap());
}

#[test]
fn a_thread_that_sleeps_on_the_word_is_woken_without_the_device() {
    let pair = pair(Prefer::Window);
    let (own, peer) = pair.dmb();
    let line = own.futex_line().unwrap();
    let (before, quiet) = line.arm_as(Sleepers::FUTEX);
    assert!(quiet);
    let count = AtomicU32::new(0);
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let word = (line.armed, sleeper_word(before, Sleepers::FUTEX));
            sleep_on_words((&count, 0), &[word], Some(smc_test_support::TIMEOUT))
        });
        thread::sleep(Duration::from_millis(20));
        peer.deliver(&[(64, b"x")], [1, 0], true).unwrap();
        let slept = sleeper.join().unwrap();
        assert!([WordWait::Woken(0), WordWait::NotAsleep].contains(&slept), "{slept:?}");
    });
    assert!(events(&pair.a).is_empty(), "no record");
    assert!(line.is_taken(Sleepers::all()));
    // One of each kind sleeps.
    line.take();
    assert!(line.arm_as(Sleepers::KICK | Sleepers::FUTEX).1);
    peer.deliver(&[(64, b"y")], [2, 0], true).unwrap();
    assert_eq!(events(&pair.a).len(), 1);
}

#[test]
fn who_cannot_wake_by_the_word_kicks() {
    let fabric = Arc::new(FakeFabric::default());
    let a = device(&fabric, Prefer::Window);
    let without = fabric.join(Features::all() - Features::PEER_FUTEX);
    let b = IsmDevice::open_on(without, &OpenOptions::new("unused")).unwrap();
    let pair = Pair { fabric, a, b };
    let (own, peer) = pair.dmb();
    assert!(own.futex_line().is_none());
    for how in [Sleepers::FUTEX, Sleepers::from_bits_retain(1 << 31)] {
        own.line().unwrap().take();
        assert!(own.line().unwrap().arm_as(how).1);
        peer.deliver(&[(64, b"x")], [1, 0], true).unwrap();
        assert_eq!(events(&pair.a).len(), 1, "{how:?}");
    }
}

#[test]
fn guest_memory_is_signalled_by_index() {
    let pair = pair(Prefer::Move);
    let (own, peer) = pair.dmb();
    assert!(own.line().is_none());
    peer.deliver(&[], [1, 0], true).unwrap();
    let signals = events(&pair.a);
    assert!(matches!(&signals[..], [Event::DmbSignal(s)] if s.entries[0].idx.get() == own.idx()));
}

#[test]
fn a_dmb_that_is_kept_has_its_bytes_and_hears_nothing_more_of_its_user() {
    for prefer in [Prefer::Window, Prefer::Move] {
        let pair = pair(prefer);
        let (own, peer) = pair.dmb();
        peer.deliver(&[(64, b"kept")], [4, 1], true).unwrap();
        own.keep().unwrap();
        assert!(own.is_kept() && own.has_memory() && own.memory_stays());
        peer.deliver(&[(64, b"lost")], [8, 2], true).unwrap();
        assert_eq!((own.words(), bytes_at(&own, 64, 4)), ([4, 1], b"kept".to_vec()));
        own.memory().copy_in(64, b"mine").unwrap();
        own.keep().unwrap();
        assert_eq!(bytes_at(&own, 64, 4), b"mine".to_vec());
    }
}

#[test]
fn stored_bytes_are_copied_while_their_slab_is_there() {
    let (_own, peer) = pair(Prefer::Window).dmb();
    peer.deliver(&[(64, b"stored")], [7, 0], true).unwrap();
    let copied = |peer: &PeerDmb| {
        let mut bytes = [0; 6];
        peer.copy_stored(64, &mut bytes).then_some(bytes)
    };
    assert_eq!(copied(&peer).as_ref(), Some(b"stored"));
    // Other pages in place of the slab may contain the word and no bytes.
    let mark = &peer.placed.as_ref().unwrap().mark;
    mark.at.copy_in(0, &[0; 8]).unwrap();
    assert_eq!(copied(&peer), None);
    let (_own, moved) = pair(Prefer::Move).dmb();
    moved.deliver(&[(64, b"stored")], [7, 0], true).unwrap();
    assert_eq!(copied(&moved), None, "moves have copies of their own");
}

#[test]
fn a_piece_beyond_the_dmb_delivers_nothing() {
    for prefer in [Prefer::Window, Prefer::Move] {
        let pair = pair(prefer);
        let (own, peer) = pair.dmb();
        let result = peer.deliver(&[(64, b"ok"), (LEN - 1, b"no")], [1, 1], true);
        assert!(matches!(result, Err(DeliverError::Range { offset, .. }) if offset == LEN - 1));
        assert!(peer.deliver(&[(u32::MAX, b"no")], [1, 1], true).is_err());
        assert_eq!((own.words(), bytes_at(&own, 64, 2)), ([0, 0], vec![0, 0]));
    }
}

#[test]
fn a_peer_that_vanishes_fails_what_was_attached() {
    let pair = pair(Prefer::Window);
    let (_own, peer) = pair.dmb();
    let (theirs, ours) = (pair.b.register(pair.a.gid(), LEN, 0).unwrap(), pair.a.gid());
    pair.fabric.kill(ours);
    assert!(pair.a.is_gone());
    assert!(matches!(pair.a.poll_events(&mut |_| ()), Err(IsmError::Queue(QueueError::Gone))));
    assert!(pair.a.wait_events(smc_test_support::TIMEOUT).unwrap(), "sleepers wake for good");
    let seen = events(&pair.b);
    assert!(matches!(seen[0], Event::DmbGone { owner, .. } if owner == ours));
    assert!(matches!(seen[1], Event::PeerDown { gid, failed: true } if gid == ours));
    assert!(peer.is_failed());
    assert!(matches!(peer.deliver(&[], [9, 9], true), Err(DeliverError::Failed)));
    assert_eq!(theirs.words(), [0, 0], "own memory stays readable");
}

#[test]
fn a_driver_whose_session_the_device_has_lost_takes_the_device_as_gone() {
    let moves = pair(Prefer::Move);
    let (_own, peer) = moves.dmb();
    moves.fabric.forget(moves.b.gid());
    let _ = peer.deliver(&[(64, b"late")], [4, 0], true);
    let _ = peer.deliver(&[(64, b"late")], [8, 0], true);
    assert!(moves.b.is_gone(), "a move");
    assert!(!moves.a.is_gone(), "its peer");
    let commands = pair(Prefer::Window);
    commands.fabric.forget(commands.b.gid());
    assert!(commands.b.register(commands.a.gid(), LEN, 0).is_err());
    assert!(!commands.b.is_gone(), "a device about to go refuses this, too");
    assert!(commands.b.query_gid(commands.a.gid()).is_err());
    assert!(commands.b.is_gone(), "a command");
}

#[test]
fn a_departed_peer_fails_its_dmbs_and_no_others() {
    let pair = pair(Prefer::Window);
    let third = device(&pair.fabric, Prefer::Window);
    let (_own, gone) = pair.dmb();
    let own = third.register(pair.b.gid(), LEN, 0).unwrap();
    let stays = pair.b.attach(own.token(), LEN).unwrap();
    pair.fabric.faults.no_dmb_gone.store(true, Ordering::Relaxed);
    pair.fabric.kill(pair.a.gid());
    assert_eq!(events(&pair.b).len(), 1);
    assert!(gone.is_failed() && !stays.is_failed());
}

#[test]
fn moves_of_any_length_keep_the_control_words_whole() {
    let pair = pair(Prefer::Move);
    let (own, peer) = pair.dmb();
    // The fabric takes 4,096 bytes per move, and checks.
    for len in (4070..4110).chain(8170..8200) {
        let message: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        let half = message.len() / 2;
        let (a, b) = message.split_at(half);
        peer.deliver(&[(64, a), (64 + half as u32, b)], [len, 1], true).unwrap();
        assert_eq!((own.words(), bytes_at(&own, 64, message.len())), ([len, 1], message));
    }
    let many: Vec<(u32, &[u8])> = (0..20).map(|i| (64 + i, &b"x"[..])).collect();
    peer.deliver(&many, [1, 1], true).unwrap();
    assert_eq!(bytes_at(&own, 64, 20), [b'x'; 20]);
}

#[test]
fn one_dmb_that_is_gone_fails_only_its_user_s_right() {
    let pair = pair(Prefer::Window);
    let (first, gone) = pair.dmb();
    let (_second, stays) = pair.dmb();
    let token = first.token();
    drop(first);
    assert!(matches!(events(&pair.b)[..], [Event::DmbGone { token: t, .. }] if t == token));
    assert!(gone.is_failed() && !stays.is_failed());
}

#[test]
fn a_refused_move_shows_as_failed() {
    let pair = pair(Prefer::Move);
    let (_own, peer) = pair.dmb();
    pair.fabric.faults.move_status.store(Status::Enoent.code(), Ordering::Relaxed);
    peer.deliver(&[(64, b"x")], [1, 1], true).unwrap();
    // The driver checks for the outcome of a move at a poll, or at the next posted move.
    assert!(events(&pair.b).is_empty());
    assert!(peer.is_failed());
    assert!(matches!(peer.deliver(&[], [2, 2], true), Err(DeliverError::Failed)));
}

#[test]
fn no_window_means_guest_memory() {
    let pair = pair(Prefer::Auto);
    pair.fabric.faults.no_window.store(true, Ordering::Relaxed);
    let (own, peer) = pair.dmb();
    assert!(own.slab_id().is_none() && !peer.is_window());
    peer.deliver(&[(64, b"x")], [1, 1], false).unwrap();
    assert_eq!(own.words(), [1, 1]);
}

#[test]
fn the_first_dmb_measures_a_window_of_unknown_speed() {
    let pair = pair(Prefer::Auto);
    assert_eq!(pair.a.window_rate(), None);
    let (own, _peer) = pair.dmb();
    assert!(pair.a.window_rate().unwrap() > 0);
    assert_eq!(own.words(), [0, 0]);
    assert!(bytes_at(&own, 0, LEN as usize).iter().all(|byte| *byte == 0));
}

#[test]
fn a_slab_with_another_nonce_is_refused() {
    let pair = pair(Prefer::Window);
    let own = pair.a.register(pair.b.gid(), LEN, 0).unwrap();
    pair.fabric.faults.wrong_nonce.store(true, Ordering::Relaxed);
    assert!(matches!(pair.b.attach(own.token(), LEN), Err(IsmError::Nonce { .. })));
    assert!(matches!(pair.a.register(pair.b.gid(), LEN, 0), Err(IsmError::Nonce { .. })));
}

#[test]
fn replies_that_place_a_dmb_elsewhere_are_refused() {
    for displace in [8, 8 << 20, u64::MAX / 2] {
        let pair = pair(Prefer::Window);
        let own = pair.a.register(pair.b.gid(), LEN, 0).unwrap();
        pair.fabric.faults.displace.store(displace, Ordering::Relaxed);
        let refused = pair.b.attach(own.token(), LEN);
        assert!(matches!(refused, Err(IsmError::Placement { what: "dmb_off", .. })), "{displace}");
        assert!(pair.a.register(pair.b.gid(), LEN, 0).is_err());
    }
}

#[test]
fn only_the_user_attaches_and_only_with_the_right_length() {
    let pair = pair(Prefer::Window);
    let third = device(&pair.fabric, Prefer::Window);
    let own = pair.a.register(pair.b.gid(), LEN, 0).unwrap();
    let refused = third.attach(own.token(), LEN);
    assert!(matches!(refused, Err(IsmError::Refused { status: Status::Enoent, .. })));
    assert!(pair.b.attach(Token(12345), LEN).is_err());
    let other = pair.b.attach(own.token(), 2 * LEN);
    assert!(matches!(other, Err(IsmError::PeerLength { got: LEN, .. })));
    pair.b.attach(own.token(), LEN).unwrap();
}

#[test]
fn lengths_peers_and_numbers_are_checked_before_memory_is_used() {
    let pair = pair(Prefer::Window);
    for len in [0, 1, 4096, LEN + 1, u32::MAX] {
        let refused = pair.a.register(pair.b.gid(), len, 0);
        assert!(matches!(refused, Err(IsmError::DmbLength { .. })), "{len}");
    }
    assert!(pair.a.register(Gid([9; 16]), LEN, 0).is_err());
    assert_eq!(pair.a.query_gid(Gid([9; 16])).unwrap(), None);
    assert!(pair.a.query_gid(pair.b.gid()).unwrap().unwrap().window);

    let options = OpenOptions { max_dmbs: 1, ..OpenOptions::new("unused") };
    let small = IsmDevice::open_on(pair.fabric.join(Features::all()), &options).unwrap();
    let first = small.register(pair.b.gid(), LEN, 0).unwrap();
    let second = small.register(pair.b.gid(), LEN, 0);
    assert!(matches!(second, Err(IsmError::NoIndex { max: 1 })));
    drop(first);
    small.register(pair.b.gid(), LEN, 0).unwrap();
}

#[test]
fn slabs_stay_until_asked_for_or_until_their_peer_is_gone() {
    let pair = pair(Prefer::Window);
    let (own, peer) = pair.dmb();
    let slab = own.slab_id();
    drop((own, peer));
    let (own, peer) = pair.dmb();
    assert_eq!(own.slab_id(), slab);
    assert_eq!(pair.a.release_idle_slabs().unwrap(), 0, "in use");
    drop((own, peer));
    assert_eq!(pair.a.release_idle_slabs().unwrap(), 1);

    let own = pair.a.register(pair.b.gid(), LEN, 0).unwrap();
    pair.fabric.kill(pair.b.gid());
    events(&pair.a);
    drop(own);
    assert_eq!(pair.a.release_idle_slabs().unwrap(), 0, "given back with its last DMB");
}

#[test]
fn a_slab_of_a_peer_that_left_before_it_was_noted_is_given_back() {
    let pair = pair(Prefer::Window);
    // The reply of a REGISTER and the end of the peer are noted by different threads.
    pair.a.slabs.peer_is_gone(pair.b.gid());
    drop(pair.a.register(pair.b.gid(), LEN, 0).unwrap());
    assert_eq!(pair.a.release_idle_slabs().unwrap(), 0, "given back with its DMB");
}

#[test]
fn an_idle_slab_of_a_peer_that_left_is_given_back_when_the_next_one_is_used() {
    let pair = pair(Prefer::Window);
    drop(pair.a.register(pair.b.gid(), LEN, 0).unwrap());
    pair.a.slabs.peer_is_gone(pair.b.gid());
    let other = pair.a.register(pair.a.gid(), LEN, 0).unwrap();
    assert_eq!(pair.a.release_idle_slabs().unwrap(), 0, "given back already");
    drop(other);
}

#[test]
fn an_end_that_is_heard_of_before_the_attachment_is_noted_is_not_missed() {
    // The reply of an ATTACH and notices of the device are taken by different threads.
    for owner_leaves in [false, true] {
        let pair = pair(Prefer::Window);
        let own = pair.a.register(pair.b.gid(), LEN, 0).unwrap();
        let (token, gid) = (own.token(), pair.a.gid());
        pair.b.note(&match owner_leaves {
            true => Event::PeerDown { gid, failed: true },
            false => Event::DmbGone { token, owner: gid },
        });
        assert!(pair.b.attach(token, LEN).unwrap().is_failed(), "{owner_leaves}");
    }
}

#[test]
fn a_slab_of_a_dmb_that_cannot_be_used_is_given_back() {
    let pair = pair(Prefer::Window);
    let own = pair.a.register(pair.b.gid(), LEN, 0).unwrap();
    pair.b.attach(own.token(), 2 * LEN).unwrap_err();
    drop(own);
    assert_eq!(pair.b.release_idle_slabs().unwrap(), 1, "it is known");
}

#[test]
fn software_events_arrive() {
    let pair = pair(Prefer::Auto);
    pair.a.signal_event(pair.b.gid(), 7, 8).unwrap();
    let seen = events(&pair.b);
    let from_a = |gid: &Gid| *gid == pair.a.gid();
    assert!(matches!(&seen[..], [Event::SwEvent { gid, code: 7, info: 8 }] if from_a(gid)));
    assert!(pair.a.signal_event(Gid([9; 16]), 7, 8).is_err());
}

#[test]
fn a_device_that_cannot_move_is_refused() {
    let fabric = Arc::new(FakeFabric::default());
    let opened = IsmDevice::open_on(fabric.join(Features::WINDOW), &OpenOptions::new("unused"));
    assert!(matches!(opened, Err(IsmError::Transport(TransportError::Missing("MOVE")))));
}

#[test]
fn a_busy_device_is_asked_again_for_a_while() {
    let pair = pair(Prefer::Window);
    pair.fabric.faults.busy.store(3, Ordering::Relaxed);
    let own = pair.a.register(pair.b.gid(), LEN, 0).unwrap();
    pair.fabric.faults.busy.store(2, Ordering::Relaxed);
    drop(own);
    assert_eq!(pair.a.release_idle_slabs().unwrap(), 1, "its end was not lost");
    pair.fabric.faults.busy.store(u64::MAX, Ordering::Relaxed);
    let refused = pair.a.query_gid(pair.b.gid());
    assert!(matches!(refused, Err(IsmError::Refused { status: Status::Eagain, .. })));
    pair.fabric.faults.busy.store(0, Ordering::Relaxed);
}
