// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The window: a part of a BAR for slabs mapped by the device.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use super::PciError;
use super::caps::Place;
use super::function::Function;
use ism_sys::{MapError, Reservation, SharedMem, SharedSlice, lock};

/// Size of a part in a window mapped part by part, bytes: the alignment of slabs.
const PART: u64 = 2 << 20;

pub(super) enum BarWindow {
    /// Mapped as a whole. The kernel makes page tables when a page is touched.
    Whole { mem: Arc<SharedMem>, offset: usize, len: usize },
    /// Mapped part by part as slabs come, since the kernel makes the page tables of a mapping at
    /// once.
    Parts { parts: Reservation, file: Mutex<Option<File>>, offset: u64 },
}

impl BarWindow {
    pub(super) fn map(function: &Function, place: Place) -> Result<BarWindow, PciError> {
        let Ok(len) = usize::try_from(place.len) else {
            return Err(PciError::NotMappable { bar: place.bar });
        };
        if function.maps_eagerly() {
            let parts = Reservation::new(place.len).map_err(|source| PciError::System {
                what: "address space for the window".into(),
                source,
            })?;
            let file = Mutex::new(Some(function.bar_file(place.bar)?));
            return Ok(BarWindow::Parts { parts, file, offset: place.offset });
        }
        let (mem, offset) = function.map(place)?;
        Ok(BarWindow::Whole { mem, offset, len })
    }

    pub(super) fn size(&self) -> u64 {
        match self {
            BarWindow::Whole { len, .. } => *len as u64,
            BarWindow::Parts { parts, .. } => parts.size(),
        }
    }

    /// A view of a part.
    pub(super) fn slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        let end = offset.checked_add(len).filter(|end| *end <= self.size())?;
        match self {
            BarWindow::Whole { mem, offset: start, .. } => {
                mem.slice(start.checked_add(offset as usize)?, len as usize).ok()
            }
            BarWindow::Parts { parts, file, offset: start } => {
                let file = lock(file);
                let file = file.as_ref()?;
                let first = offset / PART;
                let last = end.div_ceil(PART);
                for part in first..last {
                    let at = part * PART;
                    let size = PART.min(parts.size() - at);
                    match parts.map_device(at, size, file.as_fd(), start + at) {
                        // An overlap means: this part is already mapped.
                        Ok(()) | Err(MapError::Overlap { .. }) => {}
                        Err(error) => {
                            tracing::warn!(%error, "a part of the window cannot be mapped");
                            return None;
                        }
                    }
                }
                parts.slice_across(offset, len)
            }
        }
    }

    /// Unmaps the BAR. Views of the window read zeros from now on.
    pub(super) fn revoke(&self) {
        let result = match self {
            BarWindow::Whole { mem, .. } => mem.revoke(),
            BarWindow::Parts { parts, file, .. } => {
                *lock(file) = None;
                parts.revoke()
            }
        };
        if let Err(error) = result {
            tracing::error!(%error, "the window cannot be unmapped");
        }
    }
}
