// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The configuration space of the function: a virtio device without a legacy interface, MSI-X only.

use virtio_ism_abi::virtio_pci::{CAPABILITY, FIRST_DEVICE, VENDOR, common, structure};

use crate::Identity;
use crate::region::{
    COMMON, CONFIG_LEN, DEVICE, ISR, MSIX_BAR, NOTIFY, NOTIFY_MULTIPLIER, PENDING, Place,
    SHARED_BAR, STRUCTURES_BAR, SharedMemory,
};
use crate::wire::{Fields, put};

/// QEMU's subsystem id for virtio functions.
const SUBSYSTEM: u16 = 0x1100;

// Registers of the header.
const COMMAND: usize = 0x04;
const INTERRUPT_LINE: usize = 0x3c;
/// Writable bits of the command register: memory, bus master, parity, SERR, no INTx.
const COMMAND_BITS: u16 = 0x0002 | BUS_MASTER | 0x0040 | 0x0100 | 0x0400;
const BUS_MASTER: u16 = 0x0004;

// Places of the capabilities.
const MSIX: u8 = 0x40;
const FEATURES: u8 = 0x4c;
const COMMON_CAP: u8 = 0x54;
const ISR_CAP: u8 = 0x64;
const DEVICE_CAP: u8 = 0x74;
const NOTIFY_CAP: u8 = 0x84;
const ACCESS_CAP: u8 = 0x98;
const SHARED_CAP: u8 = 0xac;

/// Control byte of the advanced features: its bit 0 resets the function.
const RESET_REGISTER: usize = FEATURES as usize + 4;
/// High byte of the MSI-X control: enable, mask all.
const MSIX_CONTROL: usize = MSIX as usize + 3;
/// BAR, offset, length and data of the access capability.
const ACCESS: usize = ACCESS_CAP as usize;

/// Effect of a write to the configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing more.
    Stored,
    /// The function is to be reset.
    Reset,
    /// The function may no longer reach memory.
    BusMasterOff,
    /// The data register of the access capability was written.
    Access,
}

/// An access to a BAR by the configuration space (virtio 1.3, 4.1.4.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) bar: u32,
    pub(crate) offset: u64,
    pub(crate) len: usize,
}

/// The registers.
#[derive(Debug)]
pub(crate) struct ConfigSpace {
    bytes: [u8; CONFIG_LEN],
    fresh: [u8; CONFIG_LEN],
}

impl ConfigSpace {
    pub(crate) fn new(
        identity: &Identity,
        vectors: u16,
        shared: Option<&SharedMemory>,
    ) -> ConfigSpace {
        let mut bytes = registers(identity, vectors);
        if let Some(shared) = shared {
            add_shared_memory(&mut bytes, shared);
        }
        ConfigSpace { bytes, fresh: bytes }
    }

    /// Restores the initial values of all registers.
    pub(crate) fn reset(&mut self) {
        self.bytes = self.fresh;
    }

    /// Copies registers out; the range is checked.
    pub(crate) fn read(&self, at: usize, data: &mut [u8]) {
        let place = self.bytes.get(at..).unwrap_or_default();
        for (byte, register) in data.iter_mut().zip(place) {
            *byte = *register;
        }
    }

    /// The access described by the access capability, if the range touches its data register.
    pub(crate) fn access(&self, at: usize, len: usize) -> Option<Access> {
        let data = ACCESS + 16;
        if at >= data + 4 || at + len <= data {
            return None;
        }
        let fields = Fields(&self.bytes);
        let len = u32::from_le(fields.u32(ACCESS + 12)) as usize;
        let bar = u32::from(self.bytes.get(ACCESS + 4).copied().unwrap_or(u8::MAX));
        let offset = u64::from(u32::from_le(fields.u32(ACCESS + 8)));
        let is_aligned = matches!(len, 1 | 2 | 4) && offset.is_multiple_of(len as u64);
        is_aligned.then_some(Access { bar, offset, len })
    }

    /// Stores the data read by an access.
    pub(crate) fn set_access_data(&mut self, data: &[u8]) {
        put(&mut self.bytes, ACCESS + 16, data);
    }

    /// The data of a write access.
    pub(crate) fn access_data(&self) -> [u8; 4] {
        Fields(&self.bytes).u32(ACCESS + 16).to_ne_bytes()
    }

    /// Writes registers, byte by byte: only writable bits change.
    pub(crate) fn write(&mut self, at: usize, data: &[u8]) -> Effect {
        let had_master = self.command() & BUS_MASTER != 0;
        let mut is_reset = false;
        for (at, value) in (at..).zip(data) {
            let Some(register) = self.bytes.get_mut(at) else { break };
            let mask = writable(at);
            *register = *register & !mask | value & mask;
            is_reset |= at == RESET_REGISTER && value & 1 != 0;
        }
        let touches_data = at < ACCESS + 20 && at + data.len() > ACCESS + 16;
        match () {
            () if is_reset => Effect::Reset,
            () if had_master && self.command() & BUS_MASTER == 0 => Effect::BusMasterOff,
            () if touches_data => Effect::Access,
            () => Effect::Stored,
        }
    }

    fn command(&self) -> u16 {
        u16::from_le(Fields(&self.bytes).u16(COMMAND))
    }
}

/// Writable bits of a byte.
fn writable(at: usize) -> u8 {
    const COMMAND_HIGH: usize = COMMAND + 1;
    const MSIX_BITS: u8 = 0xc0;
    match at {
        COMMAND => COMMAND_BITS as u8,
        COMMAND_HIGH => (COMMAND_BITS >> 8) as u8,
        INTERRUPT_LINE => u8::MAX,
        MSIX_CONTROL => MSIX_BITS,
        _ if at == ACCESS + 4 || (ACCESS + 8..ACCESS + 20).contains(&at) => u8::MAX,
        _ => 0,
    }
}

fn registers(identity: &Identity, vectors: u16) -> [u8; CONFIG_LEN] {
    /// A list of capabilities.
    const HAS_LIST: u16 = 0x10;
    /// A memory BAR of 64 bits.
    const BAR64: u32 = 4;
    let mut bytes = [0; CONFIG_LEN];
    let mut set = |at: usize, value: &[u8]| put(&mut bytes, at, value);
    set(0x00, &VENDOR.to_le_bytes());
    set(0x02, &(FIRST_DEVICE + identity.device_id).to_le_bytes());
    set(0x06, &HAS_LIST.to_le_bytes());
    // The revision of devices without a legacy interface.
    set(0x08, &[1]);
    set(0x09, &identity.class.to_le_bytes()[..3]);
    set(0x10 + 4 * STRUCTURES_BAR as usize, &BAR64.to_le_bytes());
    set(0x10 + 4 * MSIX_BAR as usize, &BAR64.to_le_bytes());
    set(0x2c, &VENDOR.to_le_bytes());
    set(0x2e, &SUBSYSTEM.to_le_bytes());
    set(0x34, &[MSIX]);

    let msix = usize::from(MSIX);
    set(msix, &[0x11, FEATURES]);
    set(msix + 2, &(vectors - 1).to_le_bytes());
    set(msix + 4, &MSIX_BAR.to_le_bytes());
    set(msix + 8, &(PENDING | MSIX_BAR).to_le_bytes());
    // Advanced features of a conventional function: supports a reset, and reports its end.
    set(usize::from(FEATURES), &[0x13, COMMON_CAP, 6, 3]);

    let notify_len = u64::from(identity.queues) * u64::from(NOTIFY_MULTIPLIER);
    let notify = Place { len: notify_len, ..NOTIFY };
    let device = Place { len: u64::from(identity.config_len), ..DEVICE };
    let common_place = Place { len: common::LEN as u64, ..COMMON };
    for (at, next, len, kind, place) in [
        (COMMON_CAP, ISR_CAP, 16, structure::COMMON, common_place),
        (ISR_CAP, DEVICE_CAP, 16, structure::ISR, Place { len: 4, ..ISR }),
        (DEVICE_CAP, NOTIFY_CAP, 16, structure::DEVICE, device),
        (NOTIFY_CAP, ACCESS_CAP, 20, structure::NOTIFY, notify),
        (ACCESS_CAP, 0, 20, structure::ACCESS, Place { offset: 0, len: 0 }),
    ] {
        let at = usize::from(at);
        set(at, &[CAPABILITY, next, len, kind, STRUCTURES_BAR as u8]);
        set(at + 8, &(place.offset as u32).to_le_bytes());
        set(at + 12, &(place.len as u32).to_le_bytes());
    }
    set(usize::from(NOTIFY_CAP) + 16, &NOTIFY_MULTIPLIER.to_le_bytes());
    bytes
}

/// Adds the BAR of the shared memory, and the capability for it at the end of the list.
fn add_shared_memory(bytes: &mut [u8], shared: &SharedMemory) {
    /// A memory BAR of 64 bits, prefetchable.
    const BAR: u32 = 0xc;
    const LEN: u8 = 24;
    let at = usize::from(SHARED_CAP);
    put(bytes, usize::from(ACCESS_CAP) + 1, &[SHARED_CAP]);
    put(bytes, 0x10 + 4 * SHARED_BAR as usize, &BAR.to_le_bytes());
    let kind = structure::SHARED_MEMORY;
    put(bytes, at, &[CAPABILITY, 0, LEN, kind, SHARED_BAR as u8, shared.id]);
    // The higher half of the length has a place of its own; the offset is 0.
    let [low, high] = [shared.len() as u32, (shared.len() >> 32) as u32];
    put(bytes, at + 12, &low.to_le_bytes());
    put(bytes, at + 20, &high.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: Identity =
        Identity { device_id: 44, class: 0x07_8000, config_len: 72, queues: 4, queue_size: 256 };

    fn byte(space: &ConfigSpace, at: usize) -> u8 {
        let mut byte = [0];
        space.read(at, &mut byte);
        byte[0]
    }

    #[test]
    fn the_list_of_capabilities_is_what_drivers_look_for() {
        let files = vec![std::fs::File::open("/dev/null").unwrap().into()];
        let shared = SharedMemory { id: 1, area_len: 8 << 30, files };
        let space = ConfigSpace::new(&IDENTITY, 5, Some(&shared));
        assert_eq!(space.bytes[..4], [0xf4, 0x1a, 0x6c, 0x10]);
        let (mut at, mut seen) = (usize::from(byte(&space, 0x34)), Vec::new());
        while at != 0 {
            let (kind, next) = (byte(&space, at), usize::from(byte(&space, at + 1)));
            let structure = if kind == 9 { byte(&space, at + 3) } else { 0 };
            assert!(next == 0 || next >= at + usize::from(byte(&space, at + 2)) || kind == 0x11);
            seen.push((kind, structure));
            at = next;
        }
        assert_eq!(seen, [(0x11, 0), (0x13, 0), (9, 1), (9, 3), (9, 4), (9, 2), (9, 5), (9, 8)]);
        let fields = Fields(&space.bytes);
        assert_eq!((fields.u32(0x20), byte(&space, 0xac + 5)), (0xc, 1));
        assert_eq!([fields.u32(0xac + 12), fields.u32(0xac + 20)], [0, 2], "8 GiB");
        assert_eq!(byte(&space, usize::from(MSIX) + 2), 4, "one less than the vectors");
    }

    #[test]
    fn only_what_a_driver_may_write_changes() {
        let mut space = ConfigSpace::new(&IDENTITY, 5, None);
        let before = space.bytes;
        assert_eq!(space.write(0, &[0xff; 4]), Effect::Stored);
        assert_eq!(space.write(0x10, &[0xff; 0x24]), Effect::Stored);
        assert_eq!(space.bytes, before);
        space.write(COMMAND, &[0xff, 0xff]);
        assert_eq!(space.command(), COMMAND_BITS);
        assert_eq!(space.write(COMMAND, &[2, 0]), Effect::BusMasterOff);
        assert_eq!(space.write(COMMAND, &[2, 0]), Effect::Stored);
        assert_eq!(space.write(RESET_REGISTER, &[1]), Effect::Reset);
        assert_eq!(byte(&space, RESET_REGISTER), 0);
        space.reset();
        assert_eq!(space.bytes, before);
    }

    #[test]
    fn a_bar_can_be_reached_by_the_configuration_space() {
        let mut space = ConfigSpace::new(&IDENTITY, 5, None);
        assert_eq!(space.access(ACCESS + 16, 4), None, "no length yet");
        assert_eq!(space.write(ACCESS + 8, &20u32.to_le_bytes()), Effect::Stored);
        space.write(ACCESS + 12, &1u32.to_le_bytes());
        let expected = Access { bar: 0, offset: 20, len: 1 };
        assert_eq!(space.access(ACCESS + 16, 1), Some(expected));
        assert_eq!(space.access(ACCESS + 12, 4), None);
        assert_eq!(space.write(ACCESS + 16, &[1]), Effect::Access);
        for (offset, len) in [(20u32, 3u32), (20, u32::MAX), (21, 2)] {
            space.write(ACCESS + 8, &offset.to_le_bytes());
            space.write(ACCESS + 12, &len.to_le_bytes());
            assert_eq!(space.access(ACCESS + 16, 4), None, "{len} bytes at {offset}");
        }
    }
}
