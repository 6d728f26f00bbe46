// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The doorbells of a device's slabs, and the epoll set of the doorbells of own slabs.
//!
//! A thread waiting for the device waits for the set: for the interrupt of its event queue, and for the
//! doorbells rung by users of own slabs. All are edge-triggered, so no thread reads a counter, and no peer
//! can make a doorbell stay readable.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::epoll;
use rustix::process::{Resource, getrlimit};

use ism_sys::{Doorbell, ForkLocks, is_free, lock, out_of_the_way};

/// Doorbells in the set, at most.
const SLOTS: usize = 128;
/// The name of the event queue's interrupt in the set. Doorbells have the number of their slot.
const INTERRUPT: u64 = SLOTS as u64;

/// The doorbells handed to this process by the device.
#[derive(Debug)]
pub(crate) struct Doorbells {
    set: OwnedFd,
    /// Most doorbells taken by this process.
    room: usize,
    by_offset: Mutex<HashMap<u64, Entry>>,
    /// The slab of each slot.
    slabs: [AtomicU32; SLOTS],
    /// Slots whose doorbells were rung, a bit each.
    rung: [AtomicU64; SLOTS / 64],
}

#[derive(Debug)]
struct Entry {
    doorbell: Arc<Doorbell>,
    /// Slot in the set, for a doorbell in the set.
    slot: Option<usize>,
}

/// The slab of a doorbell, as named by the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slab {
    /// Its offset in the window, bytes.
    pub(crate) offset: u64,
    /// Its number, as in the device's records.
    pub(crate) number: u32,
    /// This process owns the slab, and waits for the doorbell; `false`: this process rings.
    pub(crate) is_own: bool,
}

impl ForkLocks for Doorbells {
    fn is_unlocked(&self) -> bool {
        is_free(&self.by_offset)
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let table = lock(&self.by_offset);
        let doorbells = table.values().map(|entry| entry.doorbell.as_fd().as_raw_fd());
        doorbells.chain([self.set.as_raw_fd()]).collect()
    }
}

impl Doorbells {
    /// A set with the interrupt of the event queue.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new(interrupt: BorrowedFd<'_>) -> io::Result<Doorbells> {
        let set = out_of_the_way(|| epoll::create(epoll::CreateFlags::CLOEXEC))?;
        add(&set, interrupt, INTERRUPT)?;
        // Most descriptors are for the program, whose limit may leave only a few to spare.
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let room = usize::try_from(limit / 512).unwrap_or(usize::MAX).clamp(2, 2 * SLOTS);
        Ok(Doorbells {
            set,
            room,
            by_offset: Mutex::default(),
            slabs: [const { AtomicU32::new(0) }; SLOTS],
            rung: [const { AtomicU64::new(0) }; SLOTS / 64],
        })
    }

    /// Takes the doorbell of a slab.
    ///
    /// # Errors
    /// There is no room, or epoll refuses the descriptor.
    pub(crate) fn add(&self, slab: Slab, fd: OwnedFd) -> io::Result<()> {
        let mut table = lock(&self.by_offset);
        let full = || io::Error::from_raw_os_error(libc::ENOSPC);
        if table.len() >= self.room || table.contains_key(&slab.offset) {
            return Err(full());
        }
        let doorbell = Arc::new(Doorbell::new(fd));
        let slot = if slab.is_own {
            let is_taken = |slot| table.values().any(|entry| entry.slot == Some(slot));
            let slot = (0..SLOTS).find(|slot| !is_taken(*slot)).ok_or_else(full)?;
            if let Some(number) = self.slabs.get(slot) {
                number.store(slab.number, Ordering::Relaxed);
            }
            add(&self.set, doorbell.as_fd(), slot as u64)?;
            Some(slot)
        } else {
            None
        };
        table.insert(slab.offset, Entry { doorbell, slot });
        Ok(())
    }

    /// Drops the doorbell of the slab at `offset`.
    pub(crate) fn remove(&self, offset: u64) {
        let Some(entry) = lock(&self.by_offset).remove(&offset) else { return };
        if entry.slot.is_some() {
            // The peer has the same open file, so closing the doorbell here removes nothing from the set.
            let _ = epoll::delete(&self.set, &*entry.doorbell);
        }
    }

    /// The doorbell of the slab at `offset`.
    pub(crate) fn get(&self, offset: u64) -> Option<Arc<Doorbell>> {
        lock(&self.by_offset).get(&offset).map(|entry| entry.doorbell.clone())
    }

    pub(crate) fn set(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    /// Notes a name reported by the set.
    pub(crate) fn note_reported(&self, name: u64) {
        if let Some(word) = usize::try_from(name / 64).ok().and_then(|at| self.rung.get(at)) {
            word.fetch_or(1 << (name % 64), Ordering::Release);
        }
    }

    /// Whether doorbells were rung and not taken.
    pub(crate) fn has_rung(&self) -> bool {
        self.rung.iter().any(|word| word.load(Ordering::Acquire) != 0)
    }

    /// Passes on the numbers of the slabs whose doorbells the set has reported.
    pub(crate) fn take_rung(&self, rung: &mut dyn FnMut(u32)) {
        for (word, slabs) in self.rung.iter().zip(self.slabs.chunks(64)) {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let bits = word.swap(0, Ordering::Acquire);
            for (_, slab) in slabs.iter().enumerate().filter(|(bit, _)| bits >> bit & 1 != 0) {
                rung(slab.load(Ordering::Relaxed));
            }
        }
    }
}

fn add(set: &OwnedFd, fd: BorrowedFd<'_>, name: u64) -> io::Result<()> {
    let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
    Ok(epoll::add(set, fd, epoll::EventData::new_u64(name), edge)?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use ism_sys::{EventFd, wait_in_set};

    fn own(number: u32) -> Slab {
        Slab { offset: u64::from(number) << 21, number, is_own: true }
    }

    fn fd(event: &EventFd) -> OwnedFd {
        event.as_fd().try_clone_to_owned().unwrap()
    }

    fn rung(doorbells: &Doorbells) -> Vec<u32> {
        let at_once = Some(Duration::ZERO);
        let names = wait_in_set(doorbells.set(), at_once, None).unwrap();
        names.for_each(|name| doorbells.note_reported(name));
        let mut slabs = Vec::new();
        doorbells.take_rung(&mut |slab| slabs.push(slab));
        slabs
    }

    #[test]
    fn each_ring_is_reported_once_under_the_slab_although_nobody_reads_the_counter() {
        let interrupt = EventFd::new().unwrap();
        let doorbells = Doorbells::new(interrupt.as_fd()).unwrap();
        let bells: Vec<_> = (0..2).map(|_| EventFd::new().unwrap()).collect();
        for (bell, number) in bells.iter().zip(1..) {
            doorbells.add(own(number), fd(bell)).unwrap();
        }
        for _ in 0..3 {
            assert_eq!(rung(&doorbells), [0; 0]);
            bells[0].signal();
            bells[1].signal();
            interrupt.signal();
            assert_eq!(rung(&doorbells), [1, 2]);
        }
    }

    #[test]
    fn a_peer_that_keeps_a_doorbell_cannot_ring_for_a_slab_that_is_gone() {
        let doorbells = Doorbells::new(EventFd::new().unwrap().as_fd()).unwrap();
        let bell = EventFd::new().unwrap();
        doorbells.add(own(5), fd(&bell)).unwrap();
        doorbells.remove(own(5).offset);
        bell.signal();
        assert_eq!(rung(&doorbells), [0; 0]);
        assert!(doorbells.get(own(5).offset).is_none());
        doorbells.add(own(6), fd(&EventFd::new().unwrap())).unwrap();
        bell.signal();
        assert_eq!(rung(&doorbells), [0; 0]);
    }

    #[test]
    fn a_peer_that_empties_or_fills_the_counter_or_says_nothing_keeps_no_thread_busy() {
        let doorbells = Doorbells::new(EventFd::new().unwrap().as_fd()).unwrap();
        let bell = EventFd::new().unwrap();
        doorbells.add(own(1), fd(&bell)).unwrap();
        bell.signal();
        assert!(bell.clear());
        assert_eq!(rung(&doorbells), [0; 0], "a ring that was taken back");
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert_eq!(rung(&doorbells), [1]);
        assert_eq!(rung(&doorbells), [0; 0]);
    }

    #[test]
    fn there_is_room_for_a_bounded_number() {
        let doorbells = Doorbells::new(EventFd::new().unwrap().as_fd()).unwrap();
        let bell = EventFd::new().unwrap();
        let taken = (1..1000).take_while(|n| doorbells.add(own(*n), fd(&bell)).is_ok()).count();
        assert!((2..=SLOTS).contains(&taken), "{taken}");
        let theirs = Slab { offset: 1 << 40, number: 1, is_own: false };
        doorbells.remove(own(1).offset);
        doorbells.add(theirs, fd(&bell)).unwrap();
        assert!(doorbells.add(theirs, fd(&bell)).is_err(), "twice");
    }
}
