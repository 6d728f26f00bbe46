// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Doorbells: eventfds of other processes, signalled without ever blocking.
//!
//! Another holder of an eventfd can fill the counter and clear O_NONBLOCK, a flag of the shared file
//! description. A `write` of this process would then block. A doorbell rings by asynchronous IO instead
//! ([`eventfd_aio`]).
//!
//! A process with a context of asynchronous IO takes about 30 ms longer to end, because the kernel waits
//! for RCU grace periods. So a process makes its context only after some wake-ups.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use eventfd_aio::Context;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use super::OnceBox;
use super::ring_cost::RingCost;
use super::{move_out_of_the_way, out_of_the_way};

/// Number of rings before the process makes its context.
const UNTIL_CONTEXT: u32 = 256;
/// Requests of a context. A host has 65,536 (`fs.aio-max-nr`).
const ROOM: u32 = 16;
/// Number of requests before a thread takes the completed ones out.
const COLLECT_AFTER: u32 = 8;

/// An eventfd to wake a thread of another process.
#[derive(Debug)]
pub struct Doorbell {
    eventfd: OwnedFd,
    cost: RingCost,
}

impl Doorbell {
    /// A doorbell on this eventfd.
    pub fn new(eventfd: OwnedFd) -> Doorbell {
        Doorbell { eventfd: move_out_of_the_way(eventfd), cost: RingCost::default() }
    }

    /// Makes the context of this process now, instead of after some rings in vain. `false`: impossible.
    pub fn prepare() -> bool {
        let before = RINGS.fetch_max(UNTIL_CONTEXT + 1, Ordering::Relaxed);
        if before <= UNTIL_CONTEXT { Ringer::make().is_ok() } else { Ringer::existing().is_some() }
    }

    /// Signals the eventfd. `false`: this process cannot, or not yet, or the peer has made rings slow.
    #[must_use = "false means: nobody was woken"]
    pub fn ring(&self) -> bool {
        let Some(ringer) = Ringer::of_process() else { return false };
        let Some(begin) = self.cost.begin() else { return false };
        let rung = self.ring_by(ringer);
        self.cost.end(begin);
        rung
    }

    fn ring_by(&self, ringer: Ringer) -> bool {
        if COMPLETED.fetch_add(1, Ordering::Relaxed) + 1 >= COLLECT_AFTER {
            ringer.collect();
        }
        ringer.signal(self.eventfd.as_fd()) || {
            ringer.collect();
            ringer.signal(self.eventfd.as_fd())
        }
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

/// Rings so far, while there is no context.
static RINGS: AtomicU32 = AtomicU32::new(0);
/// The context of this process, in a page of zeros in the child of a fork: a context belongs to one address
/// space, and its number may mean another context elsewhere.
static CONTEXT: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// The file read by requests.
static FILE: OnceBox<OwnedFd> = OnceBox::new();
/// Requests not taken out.
static COMPLETED: AtomicU32 = AtomicU32::new(0);

/// The context of asynchronous IO for this process's rings, for the life of the process.
#[derive(Clone, Copy)]
struct Ringer(Context);

impl Ringer {
    fn of_process() -> Option<Ringer> {
        if CONTEXT.load(Ordering::Relaxed).is_null() {
            // One thread makes the context. If this never succeeds, for want of resources or because of a
            // fork, the process goes on without.
            return match RINGS.fetch_add(1, Ordering::Relaxed) {
                UNTIL_CONTEXT => Ringer::make().ok(),
                _ => None,
            };
        }
        Ringer::existing()
    }

    fn existing() -> Option<Ringer> {
        let page = CONTEXT.load(Ordering::Acquire);
        if page.is_null() {
            return None;
        }
        // SAFETY: the page was mapped before its address was stored, and nothing unmaps it.
        let number = unsafe { &*page }.load(Ordering::Relaxed);
        (number != 0).then_some(Ringer(Context::with_number(number)))
    }

    /// Makes the context of this process.
    fn make() -> std::io::Result<Ringer> {
        let file = out_of_the_way(|| memfd_create("doorbell", MemfdFlags::CLOEXEC))?;
        let len = crate::page_size();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice. The mapping stays as long as the
        // process.
        let page = unsafe { mmap_anonymous(ptr::null_mut(), len, access, MapFlags::PRIVATE)? };
        // SAFETY: the whole of the mapping above, still unused.
        unsafe { madvise(page, len, Advice::LinuxWipeOnFork)? };
        let context = Context::new(ROOM)?;
        let _ = FILE.set(file);
        let page = page.cast::<AtomicU64>();
        // SAFETY: a page is zeroed memory, aligned for and longer than the word, and still unknown to other
        // code.
        unsafe { &*page }.store(context.number(), Ordering::Relaxed);
        CONTEXT.store(page, Ordering::Release);
        Ok(Ringer(context))
    }

    /// `false`: there is no room for another request, or the kernel refuses.
    fn signal(self, eventfd: BorrowedFd<'_>) -> bool {
        FILE.get().is_some_and(|file| self.0.signal(file.as_fd(), eventfd).is_ok())
    }

    /// Takes completed requests out.
    fn collect(self) {
        let collected = self.0.collect().unwrap_or(0);
        let minus = |count: u32| Some(count.saturating_sub(collected));
        let _ = COMPLETED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, minus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn doorbell() -> (Doorbell, OwnedFd) {
        // Blocking on purpose: a write to a full counter would hang.
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        (Doorbell::new(fd.try_clone().unwrap()), fd)
    }

    /// Makes the context of this process.
    fn until_it_rings(doorbell: &Doorbell) {
        // Another test of this process may be about to make the context.
        Doorbell::prepare();
        while !doorbell.ring() {
            std::thread::yield_now();
        }
    }

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn every_ring_counts_whichever_threads_ring() {
        let (doorbell, fd) = doorbell();
        until_it_rings(&doorbell);
        count(&fd);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| assert!(doorbell.ring())));
            }
        });
        assert_eq!(count(&fd), 4000);
    }

    #[test]
    fn a_full_counter_does_not_block() {
        let (doorbell, fd) = doorbell();
        until_it_rings(&doorbell);
        rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
        count(&fd);
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!((0..3).all(|_| doorbell.ring()));
        assert_eq!(count(&fd), u64::MAX);
    }

    #[test]
    fn a_doorbell_with_thousands_of_watchers_is_left_alone_for_a_while() {
        use rustix::event::epoll;
        let (watched, fd) = doorbell();
        let (other, _fd) = doorbell();
        until_it_rings(&other);
        // An epoll set takes a file description once for each of its descriptors.
        let numbers: Vec<_> = (0..150).map(|_| fd.try_clone().unwrap()).collect();
        let sets: Vec<_> = (0..150)
            .map(|_| {
                let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
                for number in &numbers {
                    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
                    epoll::add(&set, number, epoll::EventData::new_u64(0), flags).unwrap();
                }
                set
            })
            .collect();
        let rung = (0..1000).filter(|_| watched.ring()).count();
        assert!((1..900).contains(&rung), "{rung} of 1000");
        drop(sets);
        // The other doorbell is as before, and the watched one is again, after the pause.
        assert!(other.ring());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !watched.ring() {
            assert!(std::time::Instant::now() < deadline, "it stays away");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    #[test]
    fn what_is_no_eventfd_rings_nobody_and_harms_nothing() {
        let (good, fd) = doorbell();
        until_it_rings(&good);
        let other = Doorbell::new(memfd_create("other", MemfdFlags::CLOEXEC).unwrap());
        assert!(!other.ring());
        count(&fd);
        assert!(good.ring());
        assert_eq!(count(&fd), 1);
    }
}
