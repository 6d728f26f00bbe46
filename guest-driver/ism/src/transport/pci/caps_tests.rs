// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Capability lists as devices make them, and as no device should.

use proptest::prelude::*;

use super::*;

/// A configuration space under construction.
struct Space {
    bytes: [u8; CONFIG_SPACE],
    // Offsets of the pointer to the next entry, and of the next entry.
    link: usize,
    next: usize,
}

impl Space {
    fn new() -> Space {
        let mut bytes = [0; CONFIG_SPACE];
        bytes[6] = HAS_LIST;
        Space { bytes, link: 0x34, next: 0x40 }
    }

    /// Adds an entry of `len` bytes and returns where.
    fn entry(&mut self, id: u8, body: &[u8]) -> usize {
        let at = self.next;
        self.bytes[self.link] = at as u8;
        self.bytes[at] = id;
        self.bytes[at + 2..at + 2 + body.len()].copy_from_slice(body);
        (self.link, self.next) = (at + 1, (at + 2 + body.len()).next_multiple_of(4));
        at
    }

    fn cap(&mut self, len: u8, kind: u8, bar: u8, id: u8, range: (u32, u32), rest: &[u8]) -> usize {
        let (offset, size) = (range.0.to_le_bytes(), range.1.to_le_bytes());
        let body = [&[len, kind, bar, id, 0, 0][..], &offset, &size, rest].concat();
        self.entry(CAPABILITY, &body)
    }

    /// The structures of a device with this many bytes of window.
    fn device(window: u64) -> Space {
        let mut space = Space::new();
        space.entry(0x11, &[3, 0, 1, 0, 0, 0, 1, 8, 0, 0]);
        space.cap(16, COMMON, 2, 0, (0, 0x1000), &[]);
        space.cap(16, ISR, 2, 0, (0x1000, 0x1000), &[]);
        space.cap(16, DEVICE, 2, 0, (0x2000, 0x1000), &[]);
        space.cap(20, NOTIFY, 2, 0, (0x3000, 0x1000), &4u32.to_le_bytes());
        space.cap(20, 5, 0, 0, (0, 0), &[0; 4]);
        space.window(0, window);
        space
    }

    fn window(&mut self, offset: u64, len: u64) -> usize {
        let high = [(offset >> 32) as u32, (len >> 32) as u32].map(u32::to_le_bytes).concat();
        self.cap(CAP64, SHARED_MEMORY, 4, WINDOW_SHMID, (offset as u32, len as u32), &high)
    }

    fn read(&self) -> Result<Layout, CapError> {
        read_layout(&self.bytes, bars)
    }
}

fn bars(bar: u8) -> u64 {
    match bar {
        1 => 0x1000,
        2 => 0x4000,
        4 => 64 << 30,
        _ => 0,
    }
}

#[test]
fn a_device_s_structures_are_found() {
    let layout = Space::device(64 << 30).read().unwrap();
    assert_eq!(layout.common, Place { bar: 2, offset: 0, len: 0x1000 });
    assert_eq!(layout.notify.offset, 0x3000);
    assert_eq!(layout.notify_multiplier, 4);
    assert_eq!((layout.isr.offset, layout.device.offset), (0x1000, 0x2000));
    assert_eq!(layout.window, Some(Place { bar: 4, offset: 0, len: 64 << 30 }));
}

#[test]
fn the_window_s_offset_and_length_have_64_bits() {
    let mut space = Space::device(4096);
    let at = space.bytes.iter().rposition(|byte| *byte == SHARED_MEMORY).unwrap() - 3;
    space.bytes[at + 16] = 7;
    space.bytes[at + 20] = 1;
    let window = space.read().unwrap().window.unwrap();
    assert_eq!(window, Place { bar: 4, offset: 7 << 32, len: (1 << 32) + 4096 });
}

#[test]
fn other_shared_memory_and_later_types_are_passed_over() {
    let mut space = Space::device(1 << 30);
    space.cap(CAP64, SHARED_MEMORY, 4, 2, (0, 1 << 20), &[0; 8]);
    space.cap(16, 77, 9, 0, (0, u32::MAX), &[]);
    assert_eq!(space.read().unwrap().window.unwrap().len, 1 << 30);
}

#[test]
fn the_first_of_several_structures_counts() {
    let mut space = Space::device(1 << 30);
    space.cap(16, COMMON, 2, 0, (0x3000, u32::MAX), &[]);
    assert_eq!(space.read().unwrap().common.offset, 0);
}

#[test]
fn two_windows_are_refused() {
    let mut space = Space::device(1 << 30);
    space.window(1 << 30, 1 << 30);
    assert_eq!(space.read(), Err(CapError::TwoWindows));
}

#[test]
fn a_list_that_never_ends_is_refused() {
    let mut space = Space::new();
    space.cap(16, COMMON, 2, 0, (0, 0x1000), &[]);
    let at = space.entry(0x10, &[0; 2]);
    space.bytes[at + 1] = at as u8;
    assert_eq!(space.read(), Err(CapError::Loop));
    space.bytes[at + 1] = 0x40;
    assert_eq!(space.read(), Err(CapError::Loop));
}

#[test]
fn entries_in_the_header_or_askew_are_refused() {
    for pointer in [0x04, 0x3c, 0x41, 0x42, 0xff] {
        let mut space = Space::device(1 << 30);
        space.bytes[0x34] = pointer;
        assert_eq!(space.read(), Err(CapError::Pointer(pointer)));
    }
}

#[test]
fn entries_that_are_too_short_or_end_beyond_the_space_are_refused() {
    for (len, kind) in [(15, COMMON), (0, ISR), (19, NOTIFY), (23, SHARED_MEMORY)] {
        let mut space = Space::new();
        space.cap(len, kind, 2, WINDOW_SHMID, (0, 0x1000), &[0; 8]);
        let error = space.read().unwrap_err();
        assert!(matches!(error, CapError::Length { at: 0x40, .. }), "{error}");
    }
    let mut space = Space::new();
    space.bytes[0x34] = 0xfc;
    space.bytes[0xfc..].copy_from_slice(&[CAPABILITY, 0, 16, COMMON]);
    assert!(matches!(space.read(), Err(CapError::Length { at: 0xfc, .. })));
}

#[test]
fn structures_beyond_their_bar_are_refused() {
    for (range, bar) in [((0x3001, 0x1000), 2), ((u32::MAX, u32::MAX), 2), ((0, 1), 3)] {
        for kind in [COMMON, ISR, DEVICE, NOTIFY] {
            let mut space = Space::new();
            space.cap(20, kind, bar, 0, range, &[0; 4]);
            let error = space.read().unwrap_err();
            assert!(matches!(error, CapError::Beyond { .. }), "{error}");
        }
    }
    for (offset, len) in [(0, (64 << 30) + 4096), (4096, 64 << 30), (u64::MAX - 4095, 8192)] {
        let mut space = Space::new();
        space.window(offset, len);
        let error = space.read().unwrap_err();
        assert!(matches!(error, CapError::Beyond { .. }), "{error}");
    }
}

#[test]
fn structures_that_are_too_small_or_not_aligned_are_refused() {
    for (kind, range) in [(COMMON, (0, 55)), (DEVICE, (0, 71)), (NOTIFY, (0, 1)), (ISR, (0, 0))] {
        let mut space = Space::new();
        space.cap(20, kind, 2, 0, range, &[0; 4]);
        assert!(matches!(space.read(), Err(CapError::TooSmall { .. })), "{kind}");
    }
    for (kind, offset) in [(COMMON, 2), (DEVICE, 1), (NOTIFY, 1)] {
        let mut space = Space::new();
        space.cap(20, kind, 2, 0, (offset, 0x1000), &[0; 4]);
        assert!(matches!(space.read(), Err(CapError::Alignment { .. })), "{kind}");
    }
    let mut space = Space::new();
    space.window(2048, 1 << 20);
    assert!(matches!(space.read(), Err(CapError::Alignment { .. })));
    let mut space = Space::new();
    space.window(0, 0);
    assert!(matches!(space.read(), Err(CapError::TooSmall { .. })));
}

#[test]
fn a_bar_that_no_function_has_is_refused_for_the_window_and_passed_over_for_others() {
    let mut space = Space::new();
    space.cap(CAP64, SHARED_MEMORY, 6, WINDOW_SHMID, (0, 4096), &[0; 8]);
    assert_eq!(space.read(), Err(CapError::Bar { kind: SHARED_MEMORY, bar: 6 }));
    let mut space = Space::new();
    space.cap(16, COMMON, 200, 0, (0, 4096), &[]);
    assert!(matches!(space.read(), Err(CapError::Missing(_))));
}

#[test]
fn what_is_missing_is_named() {
    assert_eq!(read_layout(&[0; CONFIG_SPACE], bars), Err(CapError::NoList));
    assert!(matches!(Space::new().read(), Err(CapError::Missing(_))));
    let mut space = Space::device(1 << 30);
    let at = space.bytes.windows(4).position(|w| w[0] == CAPABILITY && w[3] == ISR).unwrap();
    space.bytes[at + 3] = 99;
    assert_eq!(space.read(), Err(CapError::Missing("interrupt status")));
}

proptest! {
    #[test]
    fn whatever_the_bytes_are_every_range_lies_in_its_bar(
        noise in prop::collection::vec((0usize..CONFIG_SPACE, any::<u8>()), 0..24),
    ) {
        let mut space = Space::device(64 << 30);
        for (at, byte) in noise {
            space.bytes[at] = byte;
        }
        if let Ok(layout) = space.read() {
            let all = [layout.common, layout.notify, layout.isr, layout.device];
            for place in all.into_iter().chain(layout.window) {
                prop_assert!(place.offset.checked_add(place.len).unwrap() <= bars(place.bar));
            }
        }
    }
}
