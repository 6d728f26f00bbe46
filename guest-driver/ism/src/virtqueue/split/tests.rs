// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use super::device::DeviceSide;
use super::*;
use ism_sys::SharedMem;

const N: usize = 8;
/// Where the bus sees the pool.
const BUS: u64 = 0x7_0000_0000;

fn pair() -> (SplitQueue<N>, DeviceSide, DmaSpan) {
    let mem = SharedMem::anonymous(64 << 10).unwrap();
    let pool = mem.slice(0, 64 << 10).unwrap();
    let rings = pool.slice(0, SplitQueue::<N>::MEMORY).unwrap();
    let ring = SplitQueue::new(pool.clone(), rings, BUS, true).unwrap();
    let (address, gpa) = (pool.address() + (32 << 10), BUS + (32 << 10));
    let span = DmaSpan { address, gpa, len: 64 };
    let device = DeviceSide::at_bus(pool, BUS, ring.addresses());
    (ring, device, span)
}

#[test]
fn chains_go_round_many_times() {
    let (mut ring, mut device, span) = pair();
    for i in 0..70_000u32 {
        ring.add(Some(span), Some(span), i).unwrap();
        let head = device.next().unwrap();
        device.put(head.into(), 12);
        assert!(!device.interrupts(), "suppressed");
        assert_eq!(ring.pop().unwrap(), Some(UsedChain { cookie: i, written: 12 }));
    }
    assert_eq!((ring.pop().unwrap(), ring.free()), (None, N));
}

#[test]
fn each_buffer_has_its_own_place_on_the_bus() {
    let (mut ring, mut device, span) = pair();
    let readable = DmaSpan { gpa: BUS + (40 << 10), ..span };
    let writable = DmaSpan { address: span.address + 64, gpa: BUS + (48 << 10), len: 8 };
    ring.add(Some(readable), Some(writable), 1).unwrap();
    let head = device.next().unwrap();
    assert_eq!(device.read(head).1.unwrap().gpa, writable.gpa);
    device.put(head.into(), 0);
    ring.pop().unwrap();
    ring.add(None, Some(readable), 2).unwrap();
    let head = device.next().unwrap();
    assert_eq!(device.read(head).1.unwrap().gpa, readable.gpa);
}

#[test]
fn a_full_ring_says_so_and_recovers() {
    let (mut ring, mut device, span) = pair();
    for i in 0..4 {
        ring.add(Some(span), Some(span), i).unwrap();
    }
    assert_eq!(ring.add(None, Some(span), 9), Err(SplitQueueError::Full));
    let head = device.next().unwrap();
    device.put(head.into(), 1000);
    assert_eq!(ring.pop().unwrap().unwrap().written, 64, "not more than there is room");
    ring.add(None, Some(span), 9).unwrap();
}

#[test]
fn kicks_follow_the_device_s_event_index_across_the_wrap() {
    let (mut ring, mut device, span) = pair();
    device.wants_kick_after(0);
    for i in 0..66_000u32 {
        ring.add(None, Some(span), i).unwrap();
        let expected = i.is_multiple_of(1000);
        assert_eq!(ring.must_kick(), expected, "chain {i}");
        assert!(!ring.must_kick(), "nothing new");
        device.wants_kick_after(((i + 1).next_multiple_of(1000)) as u16);
        let head = device.next().unwrap();
        device.put(head.into(), 0);
        ring.pop().unwrap();
    }
}

#[test]
fn arming_asks_for_one_interrupt_and_sees_what_came_before() {
    let (mut ring, mut device, span) = pair();
    for i in 0..3 {
        ring.add(None, Some(span), i).unwrap();
    }
    assert!(ring.arm());
    let head = device.next().unwrap();
    device.put(head.into(), 0);
    assert!(device.interrupts());
    let head = device.next().unwrap();
    device.put(head.into(), 0);
    assert!(!device.interrupts(), "one interrupt until armed again");
    assert!(!ring.arm(), "something is there");
    ring.pop().unwrap();
    ring.pop().unwrap();
    assert!(ring.arm());
    ring.suppress();
    let head = device.next().unwrap();
    device.put(head.into(), 0);
    assert!(!device.interrupts());
}

#[test]
fn a_completion_that_is_not_in_flight_breaks_the_ring_and_nothing_else() {
    for id in [0, 5, 8, 0xffff, 0x1_0003, u32::MAX] {
        let (mut ring, mut device, span) = pair();
        ring.add(None, Some(span), 1).unwrap();
        let head = device.next().unwrap();
        device.put(head.into(), 0);
        ring.pop().unwrap();
        device.put(id, 0);
        let error = ring.pop().unwrap_err();
        assert_eq!(error, SplitQueueError::BadCompletion { id });
        assert_eq!(ring.pop(), Err(error));
        assert_eq!(ring.add(None, Some(span), 1), Err(error));
        assert!(ring.can_pop(), "a thread that waits must see the error");
    }
}

#[test]
fn buffers_outside_the_pool_are_refused() {
    let (mut ring, _, span) = pair();
    for bad in [
        DmaSpan { len: 0, ..span },
        DmaSpan { len: (32 << 10) + 1, ..span },
        DmaSpan { address: span.address - (33 << 10), len: 8, ..span },
        DmaSpan { address: usize::MAX, len: 8, ..span },
    ] {
        assert_eq!(ring.add(Some(bad), None, 0), Err(SplitQueueError::Buffer(bad)));
    }
    assert_eq!(ring.add(None, None, 0), Err(SplitQueueError::Full), "an empty chain");
}
