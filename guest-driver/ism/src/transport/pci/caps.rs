// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Places of the device's structures, from its list of virtio capabilities (virtio 1.3, 4.1.4).
//!
//! The parser walks the list in a private copy of the configuration space, in a bounded number of steps.
//! Offsets, lengths and BAR numbers come from the device, so each is checked against the BAR.

use thiserror::Error;
use virtio_ism_abi::WINDOW_SHMID;
use virtio_ism_abi::virtio_pci::structure::{COMMON, DEVICE, ISR, NOTIFY, SHARED_MEMORY};
use virtio_ism_abi::virtio_pci::{CAPABILITY, common};

/// Bytes of configuration space for capabilities.
pub(super) const CONFIG_SPACE: usize = 256;
/// The list starts beyond the header.
const FIRST: u8 = 0x40;
/// Most entries, 4 bytes each: a longer list is a loop.
const MOST: usize = (CONFIG_SPACE - FIRST as usize) / 4;
/// Status bit: there is a list.
const HAS_LIST: u8 = 1 << 4;

/// Bytes of a virtio capability; longer for notification and shared memory.
const CAP: u8 = 16;
const NOTIFY_CAP: u8 = 20;
const CAP64: u8 = 24;

/// Bytes of the common configuration used by the driver.
pub(super) const COMMON_LEN: u64 = common::LEN as u64;

/// Errors in the capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CapError {
    /// The function announces no capabilities.
    #[error("the function has none")]
    NoList,
    /// An entry lies in the header, or is not aligned.
    #[error("an entry at {0:#x}")]
    Pointer(u8),
    /// More entries than the space can hold.
    #[error("more than {MOST} entries: a loop")]
    Loop,
    /// An entry is too short for its type, or ends beyond the configuration space.
    #[error("the entry at {at:#x} of type {kind} has {len} bytes instead of {needed}")]
    Length {
        /// Offset of the capability.
        at: u8,
        /// `cfg_type`.
        kind: u8,
        /// `cap_len`.
        len: u8,
        /// Needed bytes.
        needed: u8,
    },
    /// A BAR number beyond the BARs of a function.
    #[error("the structure of type {kind} lies in BAR {bar}")]
    Bar {
        /// `cfg_type`.
        kind: u8,
        /// The BAR.
        bar: u8,
    },
    /// A structure ends beyond its BAR.
    #[error(
        "the structure of type {kind} has {len:#x} bytes at {offset:#x} of BAR {bar} of {size:#x} \
         bytes"
    )]
    Beyond {
        /// `cfg_type`.
        kind: u8,
        /// The BAR.
        bar: u8,
        /// Offset in the BAR, bytes.
        offset: u64,
        /// Length, bytes.
        len: u64,
        /// Size of the BAR, bytes.
        size: u64,
    },
    /// A structure is too small for its contents.
    #[error("the structure of type {kind} has {len:#x} bytes instead of {needed:#x}")]
    TooSmall {
        /// `cfg_type`.
        kind: u8,
        /// Length, bytes.
        len: u64,
        /// Needed bytes.
        needed: u64,
    },
    /// The offset of a structure is not aligned to the width of its registers.
    #[error("the structure of type {kind} is at {offset:#x}, which is not aligned")]
    Alignment {
        /// `cfg_type`.
        kind: u8,
        /// Offset in the BAR, bytes.
        offset: u64,
    },
    /// Two shared-memory regions have the window's id.
    #[error("two shared-memory regions with id {WINDOW_SHMID}")]
    TwoWindows,
    /// A structure is missing.
    #[error("there is no {0}")]
    Missing(&'static str),
}

/// A range of a BAR, within the BAR's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) bar: u8,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// The places of all structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) common: Place,
    pub(super) notify: Place,
    /// Bytes between the notification registers of `queue_notify_off` 0 and 1.
    pub(super) notify_multiplier: u32,
    pub(super) isr: Place,
    pub(super) device: Place,
    pub(super) window: Option<Place>,
}

/// Reads the capabilities in a copy of the configuration space. `bar_size` returns the size of a
/// BAR in bytes, 0 if there is none.
///
/// Of several structures of one type the first counts: the device lists them in the order of its
/// preference.
pub(super) fn read_layout(
    config: &[u8; CONFIG_SPACE],
    bar_size: impl Fn(u8) -> u64,
) -> Result<Layout, CapError> {
    let byte = |at: usize| config.get(at).copied().unwrap_or(0);
    let word = |at: usize| u32::from_le_bytes([byte(at), byte(at + 1), byte(at + 2), byte(at + 3)]);
    if byte(6) & HAS_LIST == 0 {
        return Err(CapError::NoList);
    }
    let (mut common, mut notify, mut isr, mut device, mut window) = (None, None, None, None, None);
    let mut next = byte(0x34);
    let mut steps = 0;
    while next != 0 {
        if next < FIRST || !next.is_multiple_of(4) {
            return Err(CapError::Pointer(next));
        }
        steps += 1;
        if steps > MOST {
            return Err(CapError::Loop);
        }
        let (cap, at) = (next, usize::from(next));
        next = byte(at + 1);
        if byte(at) != CAPABILITY {
            continue;
        }
        let (len, kind, bar, id) = (byte(at + 2), byte(at + 3), byte(at + 4), byte(at + 5));
        let needed = match kind {
            COMMON | ISR | DEVICE => CAP,
            NOTIFY => NOTIFY_CAP,
            SHARED_MEMORY => CAP64,
            // PCI configuration access, vendor data, and types of later revisions.
            _ => continue,
        };
        if len < needed || at + usize::from(len) > CONFIG_SPACE {
            return Err(CapError::Length { at: cap, kind, len, needed });
        }
        let (mut offset, mut size) = (u64::from(word(at + 8)), u64::from(word(at + 12)));
        if kind == SHARED_MEMORY {
            if id != WINDOW_SHMID {
                continue;
            }
            offset |= u64::from(word(at + 16)) << 32;
            size |= u64::from(word(at + 20)) << 32;
        }
        // virtio reserves higher values: a driver ignores such structures.
        if bar > 5 {
            if kind == SHARED_MEMORY {
                return Err(CapError::Bar { kind, bar });
            }
            continue;
        }
        let place = Place { bar, offset, len: size };
        let checked = check(kind, place, bar_size(bar));
        match kind {
            COMMON if common.is_none() => common = Some(checked?),
            NOTIFY if notify.is_none() => notify = Some((checked?, word(at + 16))),
            ISR if isr.is_none() => isr = Some(checked?),
            DEVICE if device.is_none() => device = Some(checked?),
            SHARED_MEMORY if window.is_some() => return Err(CapError::TwoWindows),
            SHARED_MEMORY => window = Some(checked?),
            // A second structure of the type.
            _ => {}
        }
    }
    let (notify, notify_multiplier) = notify.ok_or(CapError::Missing("notification structure"))?;
    Ok(Layout {
        common: common.ok_or(CapError::Missing("common configuration"))?,
        notify,
        notify_multiplier,
        isr: isr.ok_or(CapError::Missing("interrupt status"))?,
        device: device.ok_or(CapError::Missing("device configuration"))?,
        window,
    })
}

fn check(kind: u8, place: Place, size: u64) -> Result<Place, CapError> {
    let Place { bar, offset, len } = place;
    if offset.checked_add(len).is_none_or(|end| end > size) {
        return Err(CapError::Beyond { kind, bar, offset, len, size });
    }
    let (needed, align) = match kind {
        COMMON => (COMMON_LEN, 4),
        NOTIFY => (2, 2),
        DEVICE => (virtio_ism_abi::config::CONFIG_LEN as u64, 4),
        // A smaller region cannot be mapped on its own.
        SHARED_MEMORY => (4096, 4096),
        _ => (1, 1),
    };
    if len < needed {
        return Err(CapError::TooSmall { kind, len, needed });
    }
    if !offset.is_multiple_of(align) {
        return Err(CapError::Alignment { kind, offset });
    }
    Ok(place)
}

#[cfg(test)]
#[path = "caps_tests.rs"]
mod tests;
