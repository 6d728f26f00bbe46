// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The MSI-X vectors and the eventfds that the client gives them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use thiserror::Error;

use crate::wire::Fields;

/// Kinds of interrupts that vfio-pci has; all but MSI-X have none here.
pub(crate) const KINDS: u32 = 5;
/// MSI-X.
pub(crate) const MSIX: u32 = 2;

/// Flags of SET_IRQS.
const NO_DATA: u32 = 1;
const EVENTFD: u32 = 1 << 2;
const TRIGGER: u32 = 1 << 5;

/// A SET_IRQS that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IrqError {
    /// A kind of interrupt that the function does not have.
    #[error("interrupts of kind {0}")]
    Kind(u32),
    /// Vectors that the function does not have.
    #[error("{count} vectors from {start}; there are {vectors}")]
    Vectors {
        /// The first.
        start: u32,
        /// How many.
        count: u32,
        /// How many there are.
        vectors: u32,
    },
    /// Flags that are not served: only eventfds, and none.
    #[error("interrupt flags {0:#x}")]
    Flags(u32),
    /// Neither one eventfd for each vector, nor none.
    #[error("{fds} eventfds for {count} vectors")]
    Eventfds {
        /// Descriptors that came.
        fds: usize,
        /// Vectors.
        count: u32,
    },
}

/// The vectors.
#[derive(Debug)]
pub(crate) struct Vectors(Vec<Option<OwnedFd>>);

impl Vectors {
    pub(crate) fn new(count: u16) -> Vectors {
        Vectors((0..count).map(|_| None).collect())
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u32 {
        self.0.len() as u32
    }

    /// How many interrupts of a kind there are.
    pub(crate) fn count_of(&self, kind: u32) -> u32 {
        if kind == MSIX { self.count() } else { 0 }
    }

    /// Carries a SET_IRQS out: vectors get eventfds, or lose them. Returns the vectors that changed.
    pub(crate) fn set(
        &mut self,
        fields: &Fields<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<std::ops::Range<u16>, IrqError> {
        let (flags, kind) = (fields.u32(4), fields.u32(8));
        let (start, count) = (fields.u32(12), fields.u32(16));
        if kind >= KINDS {
            return Err(IrqError::Kind(kind));
        }
        let vectors = self.count_of(kind);
        let end = start.checked_add(count).filter(|end| *end <= vectors);
        let end = end.ok_or(IrqError::Vectors { start, count, vectors })?;
        let is_disabled = flags == NO_DATA | TRIGGER && count == 0;
        if flags != EVENTFD | TRIGGER && !is_disabled {
            return Err(IrqError::Flags(flags));
        }
        if !fds.is_empty() && fds.len() != count as usize {
            return Err(IrqError::Eventfds { fds: fds.len(), count });
        }
        let changed = if is_disabled { 0..self.0.len() } else { start as usize..end as usize };
        let mut fds = fds.into_iter();
        for vector in self.0.get_mut(changed.clone()).unwrap_or_default() {
            *vector = fds.next();
        }
        // There are no more than the table has entries.
        Ok(changed.start as u16..changed.end as u16)
    }

    /// The eventfd of a vector, if the client gave it one.
    pub(crate) fn eventfd(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        self.0.get(usize::from(vector))?.as_ref().map(AsFd::as_fd)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::wire::put;

    fn set(
        vectors: &mut Vectors,
        flags: u32,
        kind: u32,
        [start, count]: [u32; 2],
        fds: usize,
    ) -> Result<std::ops::Range<u16>, IrqError> {
        let mut body = [0; 20];
        for (at, value) in [(4, flags), (8, kind), (12, start), (16, count)] {
            put(&mut body, at, &value.to_ne_bytes());
        }
        let fds = (0..fds).map(|_| eventfd(0, EventfdFlags::empty()).unwrap()).collect();
        vectors.set(&Fields(&body), fds)
    }

    const EVENTS: u32 = EVENTFD | TRIGGER;

    #[test]
    fn vectors_get_eventfds_and_lose_them() {
        let mut vectors = Vectors::new(5);
        assert_eq!(set(&mut vectors, EVENTS, MSIX, [1, 2], 2), Ok(1..3));
        let given = |vectors: &Vectors| (0..6).filter(|n| vectors.eventfd(*n).is_some()).count();
        assert_eq!(given(&vectors), 2);
        assert_eq!(set(&mut vectors, EVENTS, MSIX, [2, 1], 0), Ok(2..3));
        assert_eq!(given(&vectors), 1);
        assert_eq!(set(&mut vectors, NO_DATA | TRIGGER, MSIX, [0, 0], 0), Ok(0..5));
        assert_eq!(given(&vectors), 0);
    }

    #[test]
    fn vectors_that_there_are_not_are_refused() {
        let mut vectors = Vectors::new(5);
        for [start, count] in [[0, 6], [5, 1], [u32::MAX, 1], [1, u32::MAX]] {
            let refused = Err(IrqError::Vectors { start, count, vectors: 5 });
            assert_eq!(set(&mut vectors, EVENTS, MSIX, [start, count], 0), refused);
        }
        for kind in [5, u32::MAX] {
            assert_eq!(set(&mut vectors, EVENTS, kind, [0, 1], 0), Err(IrqError::Kind(kind)));
        }
        let none = Err(IrqError::Vectors { start: 0, count: 1, vectors: 0 });
        assert_eq!(set(&mut vectors, EVENTS, 0, [0, 1], 1), none);
    }

    #[test]
    fn flags_and_numbers_of_eventfds_are_checked() {
        let mut vectors = Vectors::new(5);
        for flags in [0, EVENTFD, TRIGGER, EVENTS | 8, 1 << 3 | NO_DATA, u32::MAX] {
            assert_eq!(set(&mut vectors, flags, MSIX, [0, 1], 0), Err(IrqError::Flags(flags)));
        }
        for fds in [1, 3] {
            let refused = Err(IrqError::Eventfds { fds, count: 2 });
            assert_eq!(set(&mut vectors, EVENTS, MSIX, [0, 2], fds), refused);
        }
        let refused = Err(IrqError::Eventfds { fds: 1, count: 0 });
        assert_eq!(set(&mut vectors, NO_DATA | TRIGGER, MSIX, [0, 0], 1), refused);
    }
}
