// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Allocations of the kernel that fail on purpose (Linux: fault-injection/fault-injection.rst,
//! `fail-nth`).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

const DEBUGFS: &str = "/sys/kernel/debug";

/// An allocation of the calling thread that is to fail: the first one, then the next one.
#[derive(Debug)]
pub struct Allocation {
    /// How many allocations from now on one fails; 0: none. Of the thread that has opened it.
    nth: File,
    number: u32,
}

impl Allocation {
    /// The first one. Prepares the kernel, too: by default it spares the allocations that may wait for
    /// memory, which are most.
    ///
    /// # Errors
    /// The kernel has no fault injection, or debugfs is not mounted.
    pub fn first() -> io::Result<Allocation> {
        fs::write(format!("{DEBUGFS}/failslab/cache-filter"), "N")?;
        Allocation::new("0")
    }

    /// As [`Allocation::first`] of those of two pages and more; those of slabs do not count. Single pages
    /// may be a slab's, and when it takes one is chance.
    ///
    /// # Errors
    /// As [`Allocation::first`].
    pub fn first_of_pages() -> io::Result<Allocation> {
        // No slab is marked as one of which allocations fail.
        fs::write(format!("{DEBUGFS}/failslab/cache-filter"), "Y")?;
        Allocation::new("1")
    }

    fn new(min_order: &str) -> io::Result<Allocation> {
        for name in ["failslab", "fail_page_alloc"] {
            fs::write(format!("{DEBUGFS}/{name}/ignore-gfp-wait"), "N")?;
            fs::write(format!("{DEBUGFS}/{name}/verbose"), "0")?;
        }
        fs::write(format!("{DEBUGFS}/fail_page_alloc/min-order"), min_order)?;
        let nth = OpenOptions::new().read(true).write(true).open("/proc/thread-self/fail-nth")?;
        Ok(Allocation { nth, number: 0 })
    }

    /// Which one was the last to fail, counted from 1.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Does `work`, in which this allocation fails; then it is the next one's turn. Returns what `work`
    /// does, and whether it took fewer allocations, so that none has failed.
    ///
    /// # Errors
    /// The kernel cannot be told.
    pub fn fail<T>(&mut self, work: impl FnOnce() -> T) -> io::Result<(T, bool)> {
        self.number += 1;
        self.nth.write_all_at(self.number.to_string().as_bytes(), 0)?;
        let result = work();
        let mut text = [0; 16];
        let len = self.nth.read_at(&mut text, 0);
        self.nth.write_all_at(b"0", 0)?;
        let left = String::from_utf8_lossy(&text[..len?]).trim().to_owned();
        Ok((result, left != "0"))
    }
}

/// Writes `text` to `file` once for each of the first `n` allocations of pages that this takes, which
/// fails, and once more. Where that succeeds, writes it to `undo`. How many writes failed.
///
/// # Errors
/// A file cannot be written when no allocation fails.
pub(super) fn fail_writes(file: &str, text: &str, undo: &str, n: u32) -> io::Result<u32> {
    let open = |path| OpenOptions::new().write(true).open(path);
    let (file, undo) = (open(file)?, open(undo)?);
    let mut allocation = Allocation::first_of_pages()?;
    let mut failed = 0;
    while allocation.number() < n {
        let (result, was_last) = allocation.fail(|| file.write_all_at(text.as_bytes(), 0))?;
        match result {
            Ok(()) => undo.write_all_at(text.as_bytes(), 0)?,
            Err(error) if was_last => return Err(error),
            Err(_) => failed += 1,
        }
    }
    file.write_all_at(text.as_bytes(), 0)?;
    undo.write_all_at(text.as_bytes(), 0)?;
    Ok(failed)
}
