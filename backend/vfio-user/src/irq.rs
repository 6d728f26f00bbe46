// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The MSI-X vectors, the client's eventfds for them, and interrupts waiting for an eventfd.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use thiserror::Error;

use crate::wire::Fields;

/// Kinds of interrupts in vfio-pci; only MSI-X has any here.
pub(crate) const KINDS: u32 = 5;
/// MSI-X.
pub(crate) const MSIX: u32 = 2;

/// Flags of SET_IRQS.
const NO_DATA: u32 = 1;
const EVENTFD: u32 = 1 << 2;
const TRIGGER: u32 = 1 << 5;

/// Why a SET_IRQS is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IrqError {
    /// An unknown kind of interrupt.
    #[error("interrupts of kind {0}")]
    Kind(u32),
    /// Vectors out of range.
    #[error("{count} vectors from {start}; there are {vectors}")]
    Vectors {
        /// The first vector.
        start: u32,
        /// Number of vectors.
        count: u32,
        /// Number of the function's vectors.
        vectors: u32,
    },
    /// Unsupported flags: only eventfds are supported.
    #[error("interrupt flags {0:#x}")]
    Flags(u32),
    /// The number of eventfds is neither 0 nor the number of vectors.
    #[error("{fds} eventfds for {count} vectors")]
    Eventfds {
        /// Number of descriptors.
        fds: usize,
        /// Number of vectors.
        count: u32,
    },
}

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

#[derive(Debug)]
struct Vector {
    /// The client's eventfd.
    given: Option<OwnedFd>,
    /// The pending bit: signalled while the client has given no eventfd.
    pending: OwnedFd,
}

impl Vector {
    /// The descriptor signalled by an interrupt.
    fn target(&self) -> BorrowedFd<'_> {
        self.given.as_ref().unwrap_or(&self.pending).as_fd()
    }

    fn is_pending(&self) -> bool {
        let mut ready = [PollFd::new(&self.pending, PollFlags::IN)];
        poll(&mut ready, Some(&AT_ONCE)) == Ok(1)
    }

    /// Clears the pending bit; `true` if it was set.
    fn take_pending(&self) -> bool {
        rustix::io::read(&self.pending, &mut [0; 8]).is_ok()
    }

    /// Interrupts. A full eventfd of the client is left unchanged: it interrupts already.
    fn signal(&self) {
        let target = self.target();
        let mut ready = [PollFd::new(&target, PollFlags::OUT)];
        if poll(&mut ready, Some(&AT_ONCE)) == Ok(1) {
            let _ = rustix::io::write(target, &1u64.to_ne_bytes());
        }
    }
}

/// The vectors.
#[derive(Debug)]
pub(crate) struct Vectors(Vec<Vector>);

impl Vectors {
    pub(crate) fn new(count: u16) -> io::Result<Vectors> {
        let vector = |_| {
            let pending = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            Ok(Vector { given: None, pending })
        };
        (0..count).map(vector).collect::<io::Result<_>>().map(Vectors)
    }

    /// Number of vectors.
    pub(crate) fn count(&self) -> u32 {
        self.0.len() as u32
    }

    /// Number of interrupts of a kind.
    pub(crate) fn count_of(&self, kind: u32) -> u32 {
        if kind == MSIX { self.count() } else { 0 }
    }

    /// Carries out a SET_IRQS: vectors gain or lose eventfds. Returns the changed vectors.
    pub(crate) fn set(
        &mut self,
        fields: &Fields<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<Range<u16>, IrqError> {
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
            vector.given = fds.next();
        }
        // The table has no more entries.
        Ok(changed.start as u16..changed.end as u16)
    }

    /// The descriptor signalled for a vector: the client's eventfd, or the pending bit; `None`: out of range.
    pub(crate) fn eventfd(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        self.0.get(usize::from(vector)).map(Vector::target)
    }

    /// Interrupts by a vector, if in range.
    pub(crate) fn signal(&self, vector: u16) {
        if let Some(vector) = self.0.get(usize::from(vector)) {
            vector.signal();
        }
    }

    /// Interrupts by the pending ones of `vectors` with an eventfd now. The pending bits must no longer be
    /// signalled by others.
    pub(crate) fn deliver(&self, vectors: Range<u16>) {
        let vectors = usize::from(vectors.start)..usize::from(vectors.end);
        let vectors = self.0.get(vectors).unwrap_or_default();
        for vector in vectors.iter().filter(|vector| vector.given.is_some()) {
            if vector.take_pending() {
                vector.signal();
            }
        }
    }

    /// Clears all pending bits.
    pub(crate) fn clear_pending(&self) {
        for vector in &self.0 {
            vector.take_pending();
        }
    }

    /// Pending bits of the eight vectors of this byte of the PBA.
    pub(crate) fn pending_byte(&self, at: usize) -> u8 {
        let vectors = self.0.iter().skip(8 * at).take(8);
        (0..)
            .zip(vectors)
            .fold(0, |bits, (bit, vector)| bits | u8::from(vector.is_pending()) << bit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::put;

    fn set(
        vectors: &mut Vectors,
        flags: u32,
        kind: u32,
        [start, count]: [u32; 2],
        fds: usize,
    ) -> Result<Range<u16>, IrqError> {
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
        let mut vectors = Vectors::new(5).unwrap();
        assert_eq!(set(&mut vectors, EVENTS, MSIX, [1, 2], 2), Ok(1..3));
        let given = |vectors: &Vectors| vectors.0.iter().filter(|v| v.given.is_some()).count();
        assert_eq!(given(&vectors), 2);
        assert_eq!(set(&mut vectors, EVENTS, MSIX, [2, 1], 0), Ok(2..3));
        assert_eq!(given(&vectors), 1);
        assert_eq!(set(&mut vectors, NO_DATA | TRIGGER, MSIX, [0, 0], 0), Ok(0..5));
        assert_eq!(given(&vectors), 0);
    }

    fn give(vectors: &mut Vectors, vector: u32) -> OwnedFd {
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let mut body = [0; 20];
        for (at, value) in [(4, EVENTS), (8, MSIX), (12, vector), (16, 1)] {
            put(&mut body, at, &value.to_ne_bytes());
        }
        let changed = vectors.set(&Fields(&body), vec![fd.try_clone().unwrap()]).unwrap();
        vectors.deliver(changed);
        fd
    }

    #[test]
    fn an_interrupt_without_an_eventfd_is_pending_until_there_is_one() {
        let mut vectors = Vectors::new(11).unwrap();
        let is_signalled = |fd: &OwnedFd| rustix::io::read(fd, &mut [0; 8]).is_ok();
        vectors.signal(3);
        vectors.signal(9);
        vectors.signal(9);
        vectors.signal(11);
        assert_eq!([0, 1, 2].map(|at| vectors.pending_byte(at)), [8, 2, 0]);
        let (third, fourth) = (give(&mut vectors, 3), give(&mut vectors, 4));
        assert!(is_signalled(&third) && !is_signalled(&fourth));
        assert_eq!([0, 1].map(|at| vectors.pending_byte(at)), [0, 2]);
        vectors.signal(3);
        assert!(is_signalled(&third));
        // Remove and return the eventfd: each interrupt is seen once.
        set(&mut vectors, NO_DATA | TRIGGER, MSIX, [0, 0], 0).unwrap();
        vectors.signal(3);
        assert!(!is_signalled(&third));
        let again = give(&mut vectors, 3);
        assert!(is_signalled(&again) && !is_signalled(&give(&mut vectors, 3)));
        vectors.clear_pending();
        assert!(!is_signalled(&give(&mut vectors, 9)));
    }

    #[test]
    fn a_full_eventfd_of_the_client_stops_nobody() {
        let mut vectors = Vectors::new(2).unwrap();
        vectors.signal(1);
        let full = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        vectors.0[1].given = Some(full);
        vectors.deliver(1..2);
        vectors.signal(1);
        assert_eq!(vectors.pending_byte(0), 0);
    }

    #[test]
    fn vectors_that_there_are_not_are_refused() {
        let mut vectors = Vectors::new(5).unwrap();
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
        let mut vectors = Vectors::new(5).unwrap();
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
