// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel allocations failing on purpose (Linux: fault-injection/fault-injection.rst, `fail-nth`).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

const DEBUGFS: &str = "/sys/kernel/debug";

/// The calling thread's next allocation to fail: first number 1, then the following ones.
#[derive(Debug)]
pub struct Allocation {
    /// `fail-nth` of the opening thread: the number of the allocation to fail, counted from now; 0:
    /// none.
    nth: File,
    number: u32,
}

impl Allocation {
    /// The first slab allocation. Also prepares the kernel: by default fault injection spares
    /// allocations allowed to wait for memory, and so most.
    ///
    /// # Errors
    /// If the kernel has no fault injection, or debugfs is not mounted.
    pub fn first() -> io::Result<Allocation> {
        fs::write(format!("{DEBUGFS}/failslab/cache-filter"), "N")?;
        Allocation::new("0")
    }

    /// Like [`Allocation::first`], for allocations of two pages and more; slab allocations do not
    /// count. Single pages are left out: the allocator may take one for a slab at any time.
    ///
    /// # Errors
    /// Errors of [`Allocation::first`].
    pub fn first_of_pages() -> io::Result<Allocation> {
        // No slab is marked for failing allocations.
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

    /// The number of the last failed allocation, counted from 1.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Does `work` with this allocation failing, and moves on to the next allocation. Returns the
    /// result of `work`, and whether `work` took fewer allocations, so none has failed.
    ///
    /// # Errors
    /// If writing to `fail-nth` fails.
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

/// Writes `text` to `file` once for each of the write's first `n` allocations of pages, with the
/// allocation failing, and once more. After a successful write, writes `text` to `undo`. Returns the
/// number of failed writes.
///
/// # Errors
/// If a file cannot be written without a failing allocation.
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
