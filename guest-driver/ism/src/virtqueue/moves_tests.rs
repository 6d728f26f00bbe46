// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The move queue, with a test in the part of the device.

use super::*;
use crate::virtqueue::{DeviceSide, Health};
use ism_sys::EventFd;

const TOKEN: Token = Token(0x1122_3344_5566_7788);
const OK: [u8; 4] = [0; 4];

fn queue() -> (Arc<MoveQueue>, DeviceSide, Arc<EventFd>, Arc<Health>) {
    let (pool, _) = GuestPool::new(16 << 20).unwrap();
    let health = Health::new();
    let call = Arc::new(EventFd::new().unwrap());
    health.wake_with(&call);
    let wiring = Wiring {
        kick: Box::new(Arc::new(EventFd::new().unwrap())),
        call: call.clone(),
        health: health.clone(),
        event_idx: true,
    };
    let queue = MoveQueue::new(&pool, 1 << 20, wiring).unwrap();
    let device = DeviceSide::new(pool.whole().clone(), queue.addresses());
    (Arc::new(queue), device, call, health)
}

#[test]
fn a_move_has_the_bytes_of_the_chapter() {
    let (queue, mut device, ..) = queue();
    let path = queue.open_path(TOKEN, 0).unwrap();
    queue.post(&path, &[(100, b"abc"), (8, b"01234567")], true, true).unwrap();
    let head = device.next().unwrap();
    let (bytes, status) = device.read(head);
    let expected = [
        &0x1122_3344_5566_7788u64.to_le_bytes()[..],
        &[2, 0, 1, 0, 1, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0],
        &[100, 0, 0, 0, 3, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0, 0],
        b"abc01234567",
    ];
    assert_eq!(bytes, expected.concat());
    assert_eq!(status.unwrap().len, 4);
}

#[test]
fn moves_keep_their_order_and_slots_come_back() {
    let (queue, mut device, ..) = queue();
    let path = queue.open_path(TOKEN, 0).unwrap();
    for i in 0..1000u32 {
        queue.post(&path, &[(i, &i.to_le_bytes())], false, true).unwrap();
        if i % 20 == 19 {
            for expected in i - 19..=i {
                let head = device.next().unwrap();
                assert_eq!(device.read(head).0[32..], expected.to_le_bytes());
                device.answer(head, &OK);
            }
        }
    }
    assert!(!path.is_failed());
}

#[test]
fn a_refusal_is_noted_in_its_path_only() {
    let (queue, mut device, ..) = queue();
    let good = queue.open_path(TOKEN, 0).unwrap();
    let bad = queue.open_path(Token(2), 0).unwrap();
    queue.post(&good, &[(0, b"x")], false, true).unwrap();
    queue.post(&bad, &[(0, b"x")], false, true).unwrap();
    let heads = [device.next().unwrap(), device.next().unwrap()];
    device.answer(heads[0], &OK);
    device.answer(heads[1], &[2, 0, 0, 0]);
    queue.reap();
    assert!(!good.is_failed());
    assert_eq!(bad.refusal(), Some(Status::Enoent));
}

#[test]
fn what_was_not_executed_is_known_in_its_order() {
    let (queue, mut device, _, health) = queue();
    let path = queue.open_path(TOKEN, 0).unwrap();
    let other = queue.open_path(Token(2), 0).unwrap();
    queue.post(&path, &[(40, b"a"), (8, b"w")], false, true).unwrap();
    queue.post(&other, &[(40, b"x")], false, true).unwrap();
    queue.post(&path, &[(41, b"bc"), (8, b"v")], false, true).unwrap();
    queue.post(&path, &[(43, b"")], false, true).unwrap();
    let piece = |at: u32, bytes: &[u8]| (at, bytes.to_vec());
    let second = [piece(41, b"bc"), piece(8, b"v"), piece(43, b"")];
    let all = [&[piece(40, b"a"), piece(8, b"w")], &second[..]].concat();
    assert_eq!(queue.unconfirmed(&path), Some(all.clone()));
    let head = device.next().unwrap();
    device.answer(head, &OK);
    assert_eq!(queue.unconfirmed(&path), Some(second.to_vec()));
    let _other = device.next().unwrap();
    // A refused move was not executed either.
    let head = device.next().unwrap();
    device.answer(head, &[2, 0, 0, 0]);
    assert_eq!(queue.unconfirmed(&path), Some(second.to_vec()));
    health.fail("the test says so");
    assert_eq!(queue.unconfirmed(&path), Some(second.to_vec()));
    assert_eq!(queue.unconfirmed(&other), Some(vec![piece(40, b"x")]));
    // A move executed behind a refused move leaves a hole.
    let head = device.next().unwrap();
    device.answer(head, &OK);
    assert_eq!(queue.unconfirmed(&path), None);
}

// The words come last: without the words the reader does not know of the bytes.
#[test]
fn a_delivery_is_unconfirmed_until_its_last_move_is_executed() {
    let (queue, mut device, ..) = queue();
    let path = queue.open_path(TOKEN, 0).unwrap();
    let parts = [(40, &b"a"[..]), (41, b"b"), (8, b"w")];
    let all = parts.map(|(at, bytes)| (at, bytes.to_vec())).to_vec();
    let post = |n: usize| queue.post(&path, &parts[n..n + 1], false, n == 2).unwrap();
    for refused in [false, true] {
        (0..3).for_each(post);
        for _ in 0..2 {
            let head = device.next().unwrap();
            device.answer(head, &OK);
            assert_eq!(queue.unconfirmed(&path), Some(all.clone()));
        }
        let head = device.next().unwrap();
        device.answer(head, if refused { &[2, 0, 0, 0] } else { &OK });
        let mut left = queue.unconfirmed(&path).unwrap();
        // Refused moves come first.
        left.sort();
        assert_eq!(left.len(), if refused { 3 } else { 0 });
        assert!(left.iter().all(|part| all.contains(part)), "{left:?}");
    }
}

#[test]
fn a_missing_or_odd_status_is_a_refusal() {
    for status in [&[][..], &[0, 0, 0], &[0, 0, 1, 0], &[99, 0, 0, 0]] {
        let (queue, mut device, ..) = queue();
        let path = queue.open_path(TOKEN, 0).unwrap();
        queue.post(&path, &[(0, b"x")], false, true).unwrap();
        let head = device.next().unwrap();
        device.answer(head, status);
        queue.reap();
        assert!(path.is_failed(), "{status:?}");
    }
}

#[test]
fn kicks_coalesce_while_one_is_under_way() {
    let (queue, mut device, ..) = queue();
    let path = queue.open_path(TOKEN, 0).unwrap();
    queue.kick(&path).unwrap();
    queue.kick(&path).unwrap();
    let head = device.next().unwrap();
    assert!(device.next().is_none());
    let (bytes, _) = device.read(head);
    assert_eq!(bytes[..16], [&TOKEN.0.to_le_bytes()[..], &[0, 0, 1, 0, 1, 0, 0, 0]].concat());
    assert_eq!(bytes[16..], [0; 8]);
    device.answer(head, &OK);
    queue.kick(&path).unwrap();
    assert!(device.next().is_some(), "the previous kick is done: the next change needs another");
}

#[test]
fn a_busy_peer_s_queue_fails_a_move_but_not_a_kick() {
    let (queue, mut device, ..) = queue();
    let path = queue.open_path(TOKEN, 0).unwrap();
    let again = [Status::Eagain.code() as u8, 0, 0, 0];
    queue.kick(&path).unwrap();
    let head = device.next().unwrap();
    device.answer(head, &again);
    queue.reap();
    assert!(!path.is_failed());
    queue.post(&path, &[(0, b"x")], false, true).unwrap();
    let head = device.next().unwrap();
    device.answer(head, &again);
    queue.reap();
    assert_eq!(path.refusal(), Some(Status::Eagain));
}

#[test]
fn a_full_queue_waits_for_the_device() {
    let (queue, mut device, call, _) = queue();
    let path = queue.open_path(TOKEN, 0).unwrap();
    let poster = {
        let (queue, path) = (queue.clone(), path.clone());
        std::thread::spawn(move || {
            for _ in 0..2 * SLOTS {
                queue.post(&path, &[(0, b"x")], false, true).unwrap();
            }
        })
    };
    let mut done = 0;
    while done < 2 * SLOTS {
        // Slowly at first, to let the poster use up the slots.
        if done == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some(head) = device.next() {
            device.answer(head, &OK);
            call.signal();
            done += 1;
        }
    }
    poster.join().unwrap();
}

#[test]
fn kicks_of_many_paths_find_room_or_say_busy() {
    let (queue, _device, ..) = queue();
    let paths: Vec<_> = (0..200).map(|i| queue.open_path(Token(i), 0).unwrap()).collect();
    let posted = paths.iter().take_while(|path| queue.kick(path).is_ok()).count();
    assert_eq!(posted, ENTRIES / 2);
    assert!(matches!(queue.kick(&paths[199]), Err(QueueError::Busy)));
}

#[test]
fn a_closed_path_is_reused_only_when_nothing_is_under_way() {
    let (queue, mut device, ..) = queue();
    let path = queue.open_path(TOKEN, 0).unwrap();
    queue.post(&path, &[(0, b"x")], false, true).unwrap();
    queue.kick(&path).unwrap();
    queue.close_path(&path);
    let next = queue.open_path(Token(9), 0).unwrap();
    assert_ne!(next.slot(), path.slot());
    // The move comes back, the kick is still under way.
    let head = device.next().unwrap();
    device.answer(head, &[2, 0, 0, 0]);
    queue.reap();
    let third = queue.open_path(Token(10), 0).unwrap();
    assert_ne!(third.slot(), path.slot());
    let head = device.next().unwrap();
    device.answer(head, &[2, 0, 0, 0]);
    queue.reap();
    assert!(!next.is_failed() && !third.is_failed());
    assert_eq!(queue.open_path(Token(11), 0).unwrap().slot(), path.slot());
}

#[test]
fn a_lie_of_the_device_fails_it() {
    let (queue, mut device, _, health) = queue();
    let path = queue.open_path(TOKEN, 0).unwrap();
    queue.post(&path, &[(0, b"x")], false, true).unwrap();
    device.put(77, 4);
    queue.reap();
    assert!(health.is_gone());
    assert!(matches!(queue.post(&path, &[], true, true), Err(QueueError::Gone)));
    assert!(matches!(queue.kick(&path), Err(QueueError::Gone)));
}

#[test]
fn too_much_for_one_move_is_refused() {
    let (queue, ..) = queue();
    let path = queue.open_path(TOKEN, 0).unwrap();
    let long = vec![0; queue.max_payload() + 1];
    let result = queue.post(&path, &[(0, &long)], false, true);
    assert!(matches!(result, Err(QueueError::Length { what: "payload", .. })));
    let many = [(0u32, &b"x"[..]); MAX_PIECES + 1];
    assert!(queue.post(&path, &many, false, true).is_err());
    queue.post(&path, &[(0, &long[1..])], false, true).unwrap();
}
