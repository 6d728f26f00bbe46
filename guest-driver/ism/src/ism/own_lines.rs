// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lines of own slabs, by which the driver finds the DMBs with news without reading each DMB.
//!
//! A slab is *busy* or *idle*. Polling threads read the lines of busy slabs, and arm these lines before
//! sleeping. The line of an idle slab stays armed: its user wakes the device's owner, and the wake makes the
//! slab busy. So the cost of a poll or a sleep does not grow with the number of silent peers.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64};

use virtio_ism_abi::signal::SlabLine;
use virtio_ism_abi::slab::{LINE_ARMED, LINE_LEN, SLAB_LINE, SLAB_PEND, SLAB_WORDS};

use ism_sys::{ForkLocks, OutOfBounds, SharedSlice, is_free, lock};

/// A slab without news at this many ages in a row becomes idle.
const IDLE_AGE: u32 = 64;
/// So many slabs stay busy, because a look at them costs next to nothing.
const ALWAYS_BUSY: usize = 16;

/// The line of one slab.
#[derive(Clone, Debug)]
pub(super) struct SlabLineMemory(SharedSlice);

impl SlabLineMemory {
    /// The line in this control tail.
    pub(super) fn new(tail: &SharedSlice) -> Result<SlabLineMemory, OutOfBounds> {
        Ok(SlabLineMemory(tail.slice(SLAB_LINE, SLAB_PEND + 8 * SLAB_WORDS)?))
    }

    /// The line, with the word containing the bit of signal line `line`.
    #[inline]
    pub(super) fn of_line(&self, line: u16) -> Option<SlabLine<'_>> {
        self.word(usize::from(line / 64))
    }

    #[inline]
    fn word(&self, word: usize) -> Option<SlabLine<'_>> {
        // In bounds and aligned by construction.
        let armed: &AtomicU32 = self.0.atomic_u32(LINE_ARMED).ok()?;
        let pend: &AtomicU64 = self.0.atomic_u64(SLAB_PEND + 8 * word).ok()?;
        Some(SlabLine { armed, pend })
    }

    fn words(&self) -> impl Iterator<Item = SlabLine<'_>> {
        (0..SLAB_WORDS).filter_map(|word| self.word(word))
    }

    fn is_pending(&self) -> bool {
        self.words().any(|line| line.is_pending())
    }

    fn arm(&self) {
        self.words().take(1).for_each(|line| line.arm());
    }

    fn disarm(&self) {
        self.words().take(1).for_each(|line| line.disarm());
    }

    fn is_taken(&self) -> bool {
        self.words().take(1).all(|line| line.is_taken())
    }
}

const _: () = assert!(LINE_LEN == SLAB_PEND);

/// A signal line: the number of its slab, and its own.
pub type LineName = (u32, u16);

#[derive(Debug)]
struct OwnLine {
    slab: u32,
    memory: SlabLineMemory,
    /// Ages in a row without news.
    vain: u32,
}

impl OwnLine {
    /// Adds the lines raised by users.
    fn take(&mut self, raised: &mut Vec<LineName>) {
        for (word, line) in (0u16..).zip(self.memory.words()) {
            let mut bits = line.take();
            if bits != 0 {
                self.vain = 0;
            }
            while bits != 0 {
                raised.push((self.slab, word * 64 + bits.trailing_zeros() as u16));
                bits &= bits - 1;
            }
        }
    }
}

/// The lines of all own slabs.
#[derive(Debug, Default)]
pub(super) struct OwnLines(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    busy: Vec<OwnLine>,
    idle: HashMap<u32, OwnLine>,
    /// Threads asleep or about to sleep, having armed the busy slabs.
    sleepers: usize,
}

impl ForkLocks for OwnLines {
    fn is_unlocked(&self) -> bool {
        is_free(&self.0)
    }

    fn forget_threads(&self) {
        let mut lines = lock(&self.0);
        lines.sleepers = 0;
        lines.busy.iter().for_each(|line| line.memory.disarm());
    }
}

impl OwnLines {
    /// Adds a slab, unless it is known.
    pub(super) fn add(&self, slab: u32, memory: &SlabLineMemory) {
        let mut lines = lock(&self.0);
        if !lines.idle.contains_key(&slab) && lines.busy.iter().all(|line| line.slab != slab) {
            if lines.sleepers > 0 {
                // As for the slabs armed by the sleepers.
                memory.arm();
            }
            lines.busy.push(OwnLine { slab, memory: memory.clone(), vain: 0 });
        }
    }

    /// Removes a slab, before its memory is unmapped. Returns the line of a known slab.
    pub(super) fn remove(&self, slab: u32) -> Option<SlabLineMemory> {
        let mut lines = lock(&self.0);
        let at = lines.busy.iter().position(|line| line.slab == slab);
        let line = at.map(|at| lines.busy.swap_remove(at)).or_else(|| lines.idle.remove(&slab));
        line.map(|line| line.memory)
    }

    /// Adds the raised lines of busy slabs to `raised`.
    #[inline]
    pub(super) fn poll(&self, raised: &mut Vec<LineName>) {
        lock(&self.0).busy.iter_mut().for_each(|line| line.take(raised));
    }

    /// The user of a slab has woken the owner: adds the lines raised in the slab. `false`: the slab has no
    /// line.
    pub(super) fn take_slab(&self, slab: u32, raised: &mut Vec<LineName>) -> bool {
        let lines = &mut *lock(&self.0);
        if let Some(line) = lines.idle.remove(&slab) {
            lines.busy.push(line);
        }
        let Some(line) = lines.busy.iter_mut().find(|line| line.slab == slab) else { return false };
        line.vain = 0;
        if lines.sleepers > 0 {
            // The user has taken the armed word, and the raised lines may concern none of the sleepers.
            line.memory.arm();
        }
        line.take(raised);
        true
    }

    /// Arms the busy slabs for a thread about to sleep. `false`: there are news, so the thread must not
    /// sleep. [`OwnLines::disarm`] follows in any case.
    pub(super) fn arm(&self) -> bool {
        let mut lines = lock(&self.0);
        lines.sleepers += 1;
        lines.busy.iter().for_each(|line| line.memory.arm());
        !lines.busy.iter().any(|line| line.memory.is_pending())
    }

    /// Undoes one [`OwnLines::arm`].
    pub(super) fn disarm(&self) {
        let mut lines = lock(&self.0);
        lines.sleepers = lines.sleepers.saturating_sub(1);
        if lines.sleepers == 0 {
            lines.busy.iter().for_each(|line| line.memory.disarm());
        }
    }

    /// Makes slabs without news for long idle. A thread polling lines calls this now and then, less often
    /// than the poll.
    pub(super) fn age(&self) {
        let lines = &mut *lock(&self.0);
        let mut at = 0;
        while lines.busy.len() > ALWAYS_BUSY && at < lines.busy.len() {
            let Some(line) = lines.busy.get_mut(at) else { break };
            line.vain += 1;
            if line.vain < IDLE_AGE {
                at += 1;
                continue;
            }
            line.memory.arm();
            if line.memory.is_pending() {
                line.vain = 0;
                at += 1;
            } else {
                let line = lines.busy.swap_remove(at);
                lines.idle.insert(line.slab, line);
            }
        }
    }

    /// Makes idle slabs with a taken armed word busy: the user may have failed to wake the owner.
    pub(super) fn recheck(&self) {
        let lines = &mut *lock(&self.0);
        let taken = lines.idle.extract_if(|_, line| line.memory.is_taken());
        for (_, line) in taken {
            if lines.sleepers > 0 {
                line.memory.arm();
            }
            lines.busy.push(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use virtio_ism_abi::signal::{Line, Sleepers};
    use virtio_ism_abi::slab::CONTROL_LEN;

    use super::*;
    use ism_sys::{SharedMem, sealed_memfd};

    struct Slab(SlabLineMemory);

    impl Slab {
        fn new() -> Slab {
            let file = sealed_memfd("slab line", CONTROL_LEN as u64).unwrap();
            let tail = SharedMem::from_fd(&file, CONTROL_LEN).unwrap();
            Slab(SlabLineMemory::new(&tail.slice(0, CONTROL_LEN).unwrap()).unwrap())
        }

        /// Raises a line whose owner polls the slab's line.
        fn raise(&self, number: u16) -> bool {
            let (armed, pend) = (AtomicU32::new(Sleepers::SLAB.bits().to_le()), AtomicU64::new(0));
            let line = Line { armed: &armed, pend: &pend };
            line.raise_in(0, number, self.0.of_line(number).unwrap()) == Sleepers::KICK
        }
    }

    fn raised(lines: &OwnLines) -> Vec<LineName> {
        let mut raised = Vec::new();
        lines.poll(&mut raised);
        raised
    }

    #[test]
    fn lines_that_were_raised_are_found_and_a_sleeper_is_woken_once() {
        let (lines, slabs) = (OwnLines::default(), [Slab::new(), Slab::new()]);
        for (slab, number) in slabs.iter().zip([5, 6]) {
            lines.add(number, &slab.0);
            lines.add(number, &slab.0);
        }
        assert!(!slabs[0].raise(1019) && !slabs[1].raise(64), "awake");
        assert!(!lines.arm(), "news");
        lines.disarm();
        assert_eq!(raised(&lines), [(5, 1019), (6, 64)]);
        assert!(lines.arm() && lines.arm());
        lines.disarm();
        assert!(slabs[0].raise(3) && !slabs[0].raise(4), "another thread still sleeps");
        let mut found = Vec::new();
        assert!(lines.take_slab(5, &mut found));
        assert_eq!(found, [(5, 3), (5, 4)]);
        assert!(slabs[0].raise(3), "still");
        lines.disarm();
        assert!(!slabs[1].raise(3) && !slabs[0].raise(4));
        assert_eq!(raised(&lines), [(5, 3), (5, 4), (6, 3)]);
        assert!(lines.remove(5).is_some() && lines.remove(5).is_none());
        slabs[0].raise(1);
        assert_eq!(raised(&lines), []);
    }

    #[test]
    fn the_line_of_a_slab_without_news_stays_armed_and_nobody_looks_at_it() {
        let lines = OwnLines::default();
        let slabs: Vec<_> = (0..1000).map(|_| Slab::new()).collect();
        for (number, slab) in (0..).zip(&slabs) {
            lines.add(number, &slab.0);
        }
        for _ in 0..=IDLE_AGE {
            lines.age();
            slabs[700].raise(9);
            assert_eq!(raised(&lines), [(700, 9)]);
        }
        let busy = || lock(&lines.0).busy.len();
        assert_eq!(busy(), ALWAYS_BUSY);
        let idle: Vec<u32> = lock(&lines.0).idle.keys().copied().collect();
        let (first, second) = (idle[0], idle[1]);
        assert!(slabs[first as usize].raise(2), "its user wakes the owner");
        assert_eq!(raised(&lines), []);
        let mut found = Vec::new();
        assert!(lines.take_slab(first, &mut found));
        assert_eq!(found, [(first, 2)]);
        assert!(!lines.take_slab(5000, &mut found));
        // A user taking the word without waking the owner.
        slabs[second as usize].raise(3);
        lines.recheck();
        assert_eq!(raised(&lines), [(second, 3)]);
        assert_eq!(busy(), ALWAYS_BUSY + 2);
        slabs[first as usize].0.0.atomic_u32(0).unwrap().store(0, Ordering::Relaxed);
    }
}
