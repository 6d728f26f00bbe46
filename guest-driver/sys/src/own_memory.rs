// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory of this project in the process of a program that locks its memory (mlockall(2)).
//!
//! The program's lock is for the program's memory. So this module records the mappings of this project
//! ([`OwnMemory`], [`own_ranges`]), to be left out of the program's lock. After MCL_FUTURE the kernel locks
//! each new mapping and counts the mapping against RLIMIT_MEMLOCK. A mapping grown by mremap(2) keeps its
//! state, however. So this module maps one page, unlocks the page, and makes the page grow
//! ([`set_future_locked`]).

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use libc::c_void;
use rustix::mm::{
    MapFlags, MprotectFlags, MremapFlags, ProtFlags, mmap, mmap_anonymous, mprotect, mremap,
    mremap_fixed, munlock, munmap,
};

use crate::mappings::Mapping;

/// Ranges of addresses, in static memory.
///
/// Several threads may add and remove ranges at the same time, but no two threads the same range. A range
/// without a free place is not recorded.
#[derive(Debug)]
pub struct OwnMemory<const N: usize>([Place; N]);

/// A range; the length is 0 while the place is unused or changes.
#[derive(Debug)]
struct Place {
    start: AtomicUsize,
    len: AtomicUsize,
}

impl Place {
    const fn empty() -> Place {
        Place { start: AtomicUsize::new(0), len: AtomicUsize::new(0) }
    }

    fn range(&self) -> Option<Range<usize>> {
        let (start, len) = (self.start.load(Ordering::Acquire), self.len.load(Ordering::Acquire));
        let is_same = self.start.load(Ordering::Acquire) == start;
        (len != 0 && is_same).then(|| start..start + len)
    }

    fn set(&self, range: &Range<usize>) {
        self.len.store(0, Ordering::Release);
        self.start.store(range.start, Ordering::Release);
        self.len.store(range.len(), Ordering::Release);
    }

    fn clear(&self) {
        self.len.store(0, Ordering::Release);
        self.start.store(0, Ordering::Release);
    }

    /// Takes the place if unused.
    fn take(&self, range: &Range<usize>) -> bool {
        let (order, start) = (Ordering::AcqRel, range.start);
        if self.start.compare_exchange(0, start, order, Ordering::Relaxed).is_err() {
            return false;
        }
        self.len.store(range.len(), Ordering::Release);
        true
    }
}

impl<const N: usize> OwnMemory<N> {
    /// No ranges.
    pub const fn new() -> OwnMemory<N> {
        OwnMemory([const { Place::empty() }; N])
    }

    /// Adds a range of memory.
    pub fn add(&self, range: Range<usize>) {
        let _ = self.0.iter().any(|place| place.take(&range));
    }

    /// Variant of [`OwnMemory::add`]: an adjacent range becomes longer instead. No other thread changes the
    /// ranges meanwhile.
    pub fn add_beside(&self, range: Range<usize>) {
        for place in &self.0 {
            match place.range() {
                Some(known) if known.end == range.start => {
                    return place.set(&(known.start..range.end));
                }
                Some(known) if range.end == known.start => {
                    return place.set(&(range.start..known.end));
                }
                _ => {}
            }
        }
        self.add(range);
    }

    /// Removes the intersection with `range` from the ranges.
    pub fn remove(&self, range: Range<usize>) {
        for place in &self.0 {
            let Some(known) = place.range() else { continue };
            if known.end <= range.start || range.end <= known.start {
                continue;
            }
            let (before, behind) = (known.start..range.start, range.end..known.end);
            match (before.is_empty(), behind.is_empty()) {
                (true, true) => place.clear(),
                (false, true) => place.set(&before),
                (true, false) => place.set(&behind),
                (false, false) => {
                    place.set(&before);
                    self.add(behind);
                }
            }
        }
    }

    /// The ranges.
    pub fn iter(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.0.iter().filter_map(Place::range)
    }
}

impl<const N: usize> Default for OwnMemory<N> {
    fn default() -> Self {
        Self::new()
    }
}

/// The ranges of [`note_own_memory`].
static MAPPED: OwnMemory<1024> = OwnMemory::new();

/// An address in the stack of each thread of this project, and the size of the stack. libc keeps the stacks
/// of ended threads, for later ones.
static STACKS: OwnMemory<128> = OwnMemory::new();

/// Notes that the calling thread is this project's, with a stack of `size` bytes.
pub fn note_own_stack(size: usize) {
    let local = 0u8;
    let here = (&raw const local) as usize;
    let is_near = |known: &Range<usize>| known.start.abs_diff(here) < size / 2;
    if !STACKS.iter().any(|known| known.len() == size && is_near(&known)) {
        STACKS.add(here..here + size);
    }
    if is_future_locked() {
        unlock_own_memory(&own_ranges(&crate::mappings::of_this_process().unwrap_or_default()));
    }
}

/// The ranges of [`note_own_memory`], and the stacks of this project's threads, in any order. `mappings`:
/// every mapping of the process.
pub fn own_ranges(mappings: &[Mapping]) -> Vec<Range<usize>> {
    let page = crate::page_size();
    let mut ranges: Vec<_> = MAPPED.iter().collect();
    let seed = SEED.load(Ordering::Acquire);
    ranges.extend((seed != 0).then(|| seed..seed + page));
    for stack in STACKS.iter() {
        let at = mappings.partition_point(|mapping| mapping.range.end <= stack.start);
        let (Some(above), Some(below)) =
            (mappings.get(at), at.checked_sub(1).and_then(|at| mappings.get(at)))
        else {
            continue;
        };
        let start = above.range.start;
        // The page below a stack is inaccessible.
        let is_stack = above.is_writable
            && start <= stack.start
            && below.range.end == start
            && !below.is_accessible;
        if is_stack {
            ranges.push(start - page..(start + stack.len()).min(above.range.end));
        }
    }
    ranges
}

/// Makes the kernel unlock these ranges.
pub fn unlock_own_memory(ranges: &[Range<usize>]) {
    for range in ranges {
        // SAFETY: munlock changes no byte; the kernel checks the addresses.
        let _ = unsafe { munlock(range.start as *mut c_void, range.len()) };
    }
}

/// Whether the kernel locks all memory mapped by the process from now on (MCL_FUTURE).
static FUTURE_LOCKED: AtomicBool = AtomicBool::new(false);

/// An unlocked page, the origin of other memory. 0: a thread is using the page, or there is none.
static SEED: AtomicUsize = AtomicUsize::new(0);

/// Prepares for the program's MCL_FUTURE, before the kernel locks all later mappings, or notes its end.
pub fn set_future_locked(locked: bool) {
    if locked && SEED.load(Ordering::Acquire) == 0 {
        let (flags, page) = (MapFlags::PRIVATE | MapFlags::NORESERVE, crate::page_size());
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing. Unlocking
        // changes no byte.
        let seed = unsafe {
            mmap_anonymous(null_mut(), page, ProtFlags::empty(), flags).inspect(|seed| {
                let _ = munlock(*seed, page);
            })
        };
        if let Ok(seed) = seed {
            let is_first =
                SEED.compare_exchange(0, seed as usize, Ordering::AcqRel, Ordering::Relaxed);
            if is_first.is_err() {
                // SAFETY: the page is this function's.
                let _ = unsafe { munmap(seed, page) };
            }
        }
    }
    FUTURE_LOCKED.store(locked, Ordering::SeqCst);
}

/// The last argument of [`set_future_locked`].
pub fn is_future_locked() -> bool {
    FUTURE_LOCKED.load(Ordering::Relaxed)
}

/// Content of a mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MappingKind<'a> {
    /// Private zero pages.
    Memory,
    /// The same, without reserved memory for all pages.
    Zeros,
    /// A file, shared, from an offset on.
    File(BorrowedFd<'a>, u64),
}

/// Maps memory at an address of the kernel's choice.
pub(crate) fn map(
    len: usize,
    prot: ProtFlags,
    content: MappingKind<'_>,
) -> io::Result<*mut c_void> {
    let start = if is_future_locked() {
        map_unlocked(len, prot, content)?
    } else {
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        unsafe { map_plainly(null_mut(), len, prot, content, MapFlags::empty()) }?
    };
    Ok(start)
}

/// Variant of [`map`] at this address, in place of the old mapping.
///
/// # Safety
/// The caller owns the range, and no code relies on the old content.
pub(crate) unsafe fn map_at(
    at: *mut c_void,
    len: usize,
    prot: ProtFlags,
    content: MappingKind<'_>,
) -> io::Result<()> {
    if !is_future_locked() {
        // SAFETY: the caller's promise.
        return unsafe { map_plainly(at, len, prot, content, MapFlags::FIXED) }.map(drop);
    }
    let start = map_unlocked(len, prot, content)?;
    // SAFETY: the caller's promise, and the moved mapping is this function's.
    unsafe { mremap_fixed(start, len, len, MremapFlags::MAYMOVE, at) }
        .map(drop)
        .inspect_err(|_| unmap(start, len))
        .map_err(io::Error::from)
}

/// # Safety
/// With FIXED the promise of [`map_at`].
unsafe fn map_plainly(
    at: *mut c_void,
    len: usize,
    prot: ProtFlags,
    content: MappingKind<'_>,
    flags: MapFlags,
) -> io::Result<*mut c_void> {
    let (private, unsure) = (flags | MapFlags::PRIVATE, MapFlags::NORESERVE);
    // SAFETY: the caller's promise.
    let mapped = unsafe {
        match content {
            MappingKind::Memory => mmap_anonymous(at, len, prot, private),
            MappingKind::Zeros => mmap_anonymous(at, len, prot, private | unsure),
            MappingKind::File(fd, offset) => {
                mmap(at, len, prot, flags | MapFlags::SHARED, fd, offset)
            }
        }
    };
    Ok(mapped?)
}

/// Variant of [`map`] after MCL_FUTURE.
fn map_unlocked(len: usize, prot: ProtFlags, content: MappingKind<'_>) -> io::Result<*mut c_void> {
    let page = crate::page_size();
    let len = len.next_multiple_of(page);
    if !matches!(content, MappingKind::File(..)) {
        return grow_seed(len, prot);
    }
    // SAFETY: a new, unlocked mapping, unknown to other code.
    unsafe {
        let first = map_plainly(null_mut(), page, prot, content, MapFlags::empty())?;
        let _ = munlock(first, page);
        let grown = mremap(first, page, len, MremapFlags::MAYMOVE);
        Ok(grown.inspect_err(|_| unmap(first, page))?)
    }
}

/// Takes unlocked zero pages from the kept page.
fn grow_seed(len: usize, prot: ProtFlags) -> io::Result<*mut c_void> {
    /// Another thread needs the page for a moment only.
    const LOOKS: usize = 10_000;
    let page = crate::page_size();
    let looks = || {
        let seed = SEED.swap(0, Ordering::AcqRel);
        if seed == 0 {
            std::thread::yield_now();
        }
        (seed != 0).then_some(seed)
    };
    let Some(seed) = std::iter::repeat_with(looks).take(LOOKS).flatten().next() else {
        // SAFETY: a new mapping, a locked one.
        return unsafe {
            map_plainly(null_mut(), len, prot, MappingKind::Zeros, MapFlags::empty())
        };
    };
    // SAFETY: the page is this function's alone, and has no bytes. mremap puts the grown mapping's last
    // page in place of the kept page.
    unsafe {
        // The program may have locked the page with its own memory, while another thread was using the
        // page.
        let _ = munlock(seed as *mut c_void, page);
        let grown = mremap(seed as *mut c_void, page, len + page, MremapFlags::MAYMOVE);
        let left = grown.map_or(seed, |grown| grown as usize + len);
        SEED.store(left, Ordering::Release);
        let grown = grown?;
        let access = MprotectFlags::from_bits_retain(prot.bits());
        mprotect(grown, len, access).inspect_err(|_| unmap(grown, len))?;
        Ok(grown)
    }
}

fn unmap(start: *mut c_void, len: usize) {
    // SAFETY: all callers own the mapping, without further use.
    let _ = unsafe { munmap(start, len) };
}

/// Zero pages for a stack, not locked for the program. Most of them will never be used, so the kernel need
/// not reserve memory.
///
/// # Errors
/// The errors of mmap(2).
pub fn map_stack(len: usize) -> io::Result<*mut c_void> {
    map(len, ProtFlags::READ | ProtFlags::WRITE, MappingKind::Zeros)
}

/// Zero pages for a heap, not locked for the program.
///
/// # Errors
/// The errors of mmap(2).
pub fn map_memory(len: usize) -> io::Result<*mut c_void> {
    map(len, ProtFlags::READ | ProtFlags::WRITE, MappingKind::Memory)
}

/// Whole pages.
fn pages_of(start: usize, len: usize) -> Range<usize> {
    start..start + len.next_multiple_of(crate::page_size())
}

/// Records memory mapped for this project.
pub fn note_own_memory(start: usize, len: usize) {
    MAPPED.add(pages_of(start, len));
}

/// Removes memory of [`note_own_memory`] before an unmap.
pub fn forget_own_memory(start: usize, len: usize) {
    let range = pages_of(start, len);
    if let Some(place) = MAPPED.0.iter().find(|place| place.range().as_ref() == Some(&range)) {
        place.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_and_are_cut() {
        let ranges: OwnMemory<4> = OwnMemory::new();
        let all = |ranges: &OwnMemory<4>| ranges.iter().collect::<Vec<_>>();
        ranges.add_beside(0x1000..0x2000);
        ranges.add_beside(0x2000..0x5000);
        ranges.add_beside(0x9000..0xa000);
        ranges.add_beside(0x8000..0x9000);
        assert_eq!(all(&ranges), [0x1000..0x5000, 0x8000..0xa000]);
        ranges.remove(0x2000..0x3000);
        assert_eq!(all(&ranges), [0x1000..0x2000, 0x8000..0xa000, 0x3000..0x5000]);
        ranges.remove(0x4000..0x9000);
        assert_eq!(all(&ranges), [0x1000..0x2000, 0x9000..0xa000, 0x3000..0x4000]);
        ranges.remove(0..0x10000);
        assert_eq!(all(&ranges), []);
        (1..8).for_each(|n| ranges.add(n * 0x2000..n * 0x2000 + 0x1000));
        assert_eq!(all(&ranges).len(), 4, "there is no more room");
    }
}
