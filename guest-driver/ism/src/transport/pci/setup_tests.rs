// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Negotiation with a pretended device.

use virtio_ism_abi::config::CONFIG_LEN;

use super::super::common::tests::{Mock, Space};
use super::*;

fn space() -> Space {
    Space::new([0; CONFIG_LEN])
}

#[test]
fn negotiation_goes_through_the_states_of_virtio_in_order() {
    let device = Mock::new(|inner| inner.status = 0x0f);
    let agreed = negotiate(&device, &space(), true, Features::LEAVE).unwrap();
    assert_eq!(agreed.features, Features::MOVE | Features::WINDOW);
    assert!(agreed.event_idx);
    assert_eq!(device.inner().history, [0, 1, 3, 11]);
    assert_eq!(device.inner().accepted, [1 << 29 | 3, 1]);
}

#[test]
fn a_device_without_a_region_is_not_asked_for_a_window() {
    let device = Mock::new(|inner| inner.features |= 1 << 50 | 1 << 4);
    let agreed = negotiate(&device, &space(), false, Features::LEAVE).unwrap();
    assert_eq!(agreed.features, Features::MOVE);
    assert_eq!(
        device.inner().accepted,
        [1 << 29 | 1, 1],
        "nothing unknown, and no wake-ups by words of another kernel"
    );
}

#[test]
fn a_device_is_asked_to_say_when_it_goes_if_the_owner_wants_to_know() {
    for (refused, accepted) in [(Features::empty(), 1 << 7 | 3), (Features::LEAVE, 3)] {
        let device = Mock::new(|inner| inner.features |= 1 << 7);
        let agreed = negotiate(&device, &space(), true, refused).unwrap();
        assert_eq!(agreed.features.bits(), accepted);
        assert_eq!(device.inner().accepted, [1 << 29 | accepted as u32, 1]);
    }
}

#[test]
fn a_front_end_that_hides_the_bits_of_the_type_hides_no_feature() {
    let device = || Mock::new(|inner| inner.features = 1 << 32 | 1 << 29);
    let mut bytes = [0; CONFIG_LEN];
    bytes[4..8].copy_from_slice(&0x3f_u32.to_le_bytes());
    let agreed = negotiate(&device(), &Space::new(bytes), true, Features::LEAVE).unwrap();
    assert_eq!(agreed.features, Features::UNNEGOTIATED);
    let agreed = negotiate(&device(), &Space::new(bytes), false, Features::LEAVE).unwrap();
    assert_eq!(agreed.features, Features::UNNEGOTIATED - Features::WINDOW);
    let silent = negotiate(&device(), &space(), false, Features::LEAVE).unwrap();
    assert!(silent.features.is_empty(), "a device that does not say");
}

#[test]
fn legacy_absent_and_broken_devices_are_refused() {
    let refusal = |change: fn(&mut super::super::common::tests::Inner)| {
        negotiate(&Mock::new(change), &space(), true, Features::empty()).map(drop).unwrap_err()
    };
    assert!(matches!(refusal(|inner| inner.features = 3), PciError::Features { .. }));
    assert!(matches!(refusal(|inner| inner.absent = true), PciError::Absent));
    assert!(matches!(refusal(|inner| inner.needs_reset = true), PciError::NeedsReset));
    assert!(matches!(refusal(|inner| inner.restless = true), PciError::Unstable));
}
