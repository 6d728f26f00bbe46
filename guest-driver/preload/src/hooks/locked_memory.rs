// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `mlockall`: locks the memory of the program without the memory of the library.
//!
//! The kernel's call would count the library's memory against RLIMIT_MEMLOCK, including the window of a
//! device (64 GiB), and read all of the window into memory. So the hook locks the program's mappings
//! one by one, and answers like the kernel in a process with these mappings only. For MCL_FUTURE the
//! hook makes the kernel's call, without an effect on present mappings; `ism_sys::own_memory` describes
//! the library's mappings from then on.

use std::ffi::c_int;
use std::ops::Range;

use ism_sys::mappings::{self, Mapping};
use ism_sys::own_memory::{is_future_locked, own_ranges, set_future_locked, unlock_own_memory};

use super::rebinding;
use crate::hooks::libc_symbols::call_libc;
use crate::hooks::within::within;
use crate::sys::fork_lock::ForkLock;
use crate::sys::heap;
use crate::sys::raw::{self, Errno, SysResult};
use crate::sys::user_memory::libc_result;
use crate::{config, fork};

/// One thread at a time locks memory.
static ONE_AT_A_TIME: ForkLock = ForkLock::new();

/// Number of attempts to lock the program's mappings, while other threads change them.
const ROUNDS: usize = 3;

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn mlockall(flags: c_int) -> c_int {
    if config::get().is_none() || fork::shares_memory() {
        return call_libc!(mlockall, libc::SYS_mlockall, (flags: c_int) -> c_int);
    }
    libc_result(within(|| raw::without_signals(|| lock_all(flags)))) as c_int
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn munlockall() -> c_int {
    if config::get().is_none() || fork::shares_memory() {
        return call_libc!(munlockall, libc::SYS_munlockall, () -> c_int);
    }
    libc_result(within(|| {
        let _one_at_a_time = ONE_AT_A_TIME.lock();
        unlock_all()
    })) as c_int
}

fn unlock_all() -> SysResult {
    // SAFETY: the call has no arguments.
    let unlocked = unsafe { raw::call(libc::SYS_munlockall, [0; 6]) };
    if unlocked.is_ok() {
        set_future_locked(false);
    }
    unlocked
}

/// The kernel's call.
fn lock_by_kernel(flags: c_int) -> SysResult {
    // SAFETY: a number.
    unsafe { raw::call(libc::SYS_mlockall, [flags as usize, 0, 0, 0, 0, 0]) }
}

fn lock_all(flags: c_int) -> SysResult {
    let known = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
    if flags & !known != 0 || flags & (libc::MCL_CURRENT | libc::MCL_FUTURE) == 0 {
        // Invalid flags: the kernel returns the error.
        return lock_by_kernel(flags);
    }
    let _one_at_a_time = ONE_AT_A_TIME.lock();
    if flags & libc::MCL_CURRENT != 0 {
        let Some(memory) = Memory::now() else { return lock_by_kernel(flags) };
        may_lock(&memory)?;
        if flags & libc::MCL_FUTURE == 0 && is_future_locked() {
            // The kernel's call would end MCL_FUTURE.
            unlock_all()?;
        }
        lock_present(memory, flags & libc::MCL_ONFAULT != 0)?;
    }
    if flags & libc::MCL_FUTURE == 0 {
        return Ok(0);
    }
    let was_locked = is_future_locked();
    // Before the call, so the library already expects locked mappings from other threads.
    set_future_locked(true);
    lock_by_kernel(flags & !libc::MCL_CURRENT).inspect_err(|_| set_future_locked(was_locked))
}

struct Memory {
    /// The program's mappings, in the order of the addresses.
    programs: Vec<Range<usize>>,
    /// The library's mappings.
    own: Vec<Range<usize>>,
}

impl Memory {
    /// `None`: without `/proc`.
    fn now() -> Option<Memory> {
        // The heap may grow and shrink while the list is made.
        let mut own = heap::ranges();
        let mappings = mappings::of_this_process().ok()?;
        own.extend(heap::ranges());
        own.extend(own_ranges(&mappings));
        if raw::threads_of_program() == 1 {
            own.extend(heaps_of_threads(&mappings));
        }
        own.extend(rebinding::this_library().map(|library| library.addresses()));
        let own = merged(own);
        let programs = mappings.iter().flat_map(|mapping| without(mapping, &own)).collect();
        Some(Memory { programs, own })
    }
}

/// Heaps made by libc for other threads than the first: malloc in a thread of the library reserves 64
/// MiB. A program with one thread has no such heap.
fn heaps_of_threads(mappings: &[Mapping]) -> impl Iterator<Item = Range<usize>> + '_ {
    const SIZE: usize = 64 << 20;
    let is_heap = |pair: &&[Mapping]| {
        let [used, reserved] = pair else { return false };
        let start = used.range.start;
        start.is_multiple_of(SIZE)
            && used.is_writable
            && !reserved.is_accessible
            && used.range.end == reserved.range.start
            && reserved.range.end >= start + SIZE
    };
    let pairs = mappings.windows(2).filter(is_heap).filter_map(<[Mapping]>::first);
    pairs.map(|used| used.range.start..used.range.start + SIZE)
}

/// The same addresses in disjoint ranges, in their order.
fn merged(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// The parts of a mapping outside of these ranges, sorted.
fn without(mapping: &Mapping, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let Range { mut start, end } = mapping.range;
    let mut parts = Vec::new();
    let from = ranges.partition_point(|range| range.end <= start);
    for range in ranges.get(from..).unwrap_or_default().iter().take_while(|range| range.start < end)
    {
        if range.start > start {
            parts.push(start..range.start);
        }
        start = start.max(range.end);
    }
    if start < end {
        parts.push(start..end);
    }
    parts
}

/// Whether the process may lock the program's memory.
fn may_lock(memory: &Memory) -> Result<(), Errno> {
    // The kernel checks the right to lock before the range. So the range is empty.
    lock(&(0..0), 0)?;
    let page = ism_sys::page_size() as u64;
    let limit =
        ism_sys::resource_limit(libc::RLIMIT_MEMLOCK).map_or(u64::MAX, |limit| limit / page * page);
    let size: usize = memory.programs.iter().map(Range::len).sum();
    match size as u64 <= limit || may_exceed_limit() {
        true => Ok(()),
        false => Err(Errno(libc::ENOMEM)),
    }
}

/// Whether this thread may exceed the limit.
fn may_exceed_limit() -> bool {
    /// The initial user namespace: rights in others do not count here.
    const OF_MACHINE: u64 = 0xefff_fffd;
    const VERSION: u32 = 0x2008_0522;
    const CAP_IPC_LOCK: u32 = 14;
    let head = [VERSION, 0];
    // Three words for each half of the capabilities. The first word has the effective ones.
    let mut sets = [0u32; 6];
    let (at, room) = (head.as_ptr() as usize, sets.as_mut_ptr() as usize);
    // SAFETY: both are as long as this version has them, and valid until the call returns.
    let told = unsafe { raw::call(libc::SYS_capget, [at, room, 0, 0, 0, 0]) }.is_ok();
    told && sets[0] >> CAP_IPC_LOCK & 1 != 0
        && rustix::fs::stat(c"/proc/self/ns/user").is_ok_and(|stat| stat.st_ino == OF_MACHINE)
}

/// One `mlock2`.
fn lock(range: &Range<usize>, flags: u32) -> SysResult {
    let args = [range.start, range.len(), flags as usize, 0, 0, 0];
    // SAFETY: the call changes no byte, and the kernel checks the addresses.
    unsafe { raw::call(libc::SYS_mlock2, args) }
}

/// Locks the program's memory.
fn lock_present(mut memory: Memory, on_fault: bool) -> Result<(), Errno> {
    for round in 1.. {
        // The kernel may have locked the library's memory, and would count the memory.
        unlock_own_memory(&memory.own);
        // At first without reading pages: an error is then an error of the lock.
        let locked = |range: &Range<usize>| lock(range, libc::MLOCK_ONFAULT).map(drop);
        let all = memory.programs.iter().try_for_each(locked);
        if all.is_ok() || round == ROUNDS {
            all?;
            break;
        }
        // Another thread has unmapped a range.
        memory = Memory::now().ok_or(Errno(libc::ENOMEM))?;
    }
    if !on_fault {
        // Some pages cannot be read, as behind the end of a file. The kernel's call skips such pages.
        for range in &memory.programs {
            let _ = lock(range, 0);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(ranges: Vec<Range<usize>>) -> Vec<(usize, usize)> {
        ranges.into_iter().map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn ranges_are_merged() {
        let some = vec![5..6, 1..4, 2..3, 4..5, 8..9];
        assert_eq!(ends(merged(some)), [(1, 6), (8, 9)]);
    }

    #[test]
    fn a_mapping_is_divided_at_ranges_of_the_library() {
        let parts = |range| {
            let mapping = Mapping { range, is_accessible: true, is_writable: true };
            ends(without(&mapping, &[2..3, 3..4, 6..9]))
        };
        assert_eq!(parts(1..2), [(1, 2)]);
        assert_eq!(parts(1..7), [(1, 2), (4, 6)]);
        assert_eq!(parts(8..10), [(9, 10)]);
        assert_eq!(parts(2..4), []);
        assert_eq!(parts(7..8), []);
    }

    #[test]
    fn libcs_heaps_of_other_threads_are_found() {
        const MIB: usize = 1 << 20;
        let mapping =
            |range, is_accessible| Mapping { range, is_accessible, is_writable: is_accessible };
        let heap = [mapping(64 * MIB..65 * MIB, true), mapping(65 * MIB..128 * MIB, false)];
        assert_eq!(ends(heaps_of_threads(&heap).collect()), [(64 * MIB, 128 * MIB)]);
        let stack = [mapping(64 * MIB..65 * MIB, true), mapping(65 * MIB..66 * MIB, false)];
        assert_eq!(heaps_of_threads(&stack).count(), 0);
    }
}
