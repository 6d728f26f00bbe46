// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Huge pages are unmapped as a whole.
//!
//! The framework maps memory passed by a front end before the daemon can check it. A mapping of huge pages
//! has whole pages, for any requested length, and munmap(2) refuses any other length. `vm-memory` unmaps the
//! requested length, and ignores the refusal. So each memory table could leave mappings in the daemon, until
//! the process reaches its limit of mappings and serves no guest.
//!
//! This is the program's `munmap`, replacing libc's: after a refusal by the kernel, it tries again with whole
//! huge pages.

use std::ffi::{c_int, c_void};

/// Lengths of huge pages on Linux's architectures, bytes.
const HUGE_PAGES: [usize; 6] = [64 << 10, 512 << 10, 2 << 20, 32 << 20, 512 << 20, 1 << 30];

/// Like munmap(2). Also unmaps the rest of a huge page begun by `len`.
///
/// # Safety
/// As for munmap(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn munmap(start: *mut c_void, len: usize) -> c_int {
    // SAFETY: by the caller's promise.
    let unmap = |len: usize| unsafe { libc::syscall(libc::SYS_munmap, start, len) };
    let mut done = unmap(len);
    for page in HUGE_PAGES {
        // The kernel refuses a length ending within a huge page with EINVAL. A length accepted here ends with
        // the huge page containing the end of `len`, so it covers nothing else. After any other error
        // (ENOMEM: too many mappings) a longer range would cover other mappings.
        let refused =
            done != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL);
        if refused
            && !len.is_multiple_of(page)
            && let Some(whole) = len.checked_next_multiple_of(page)
        {
            done = unmap(whole);
        }
    }
    done as c_int
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, memfd_create};
    use vm_memory::{FileOffset, MmapRegion};

    #[test]
    fn a_part_of_a_huge_page_leaves_no_mapping() {
        let Ok(file) = memfd_create("part-of-a-huge-page", MemfdFlags::HUGETLB).map(File::from)
        else {
            eprintln!("SKIPPED: this kernel has no huge pages");
            return;
        };
        file.set_len(8 << 20).unwrap();
        let mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|line| line.contains("part-of-a-huge-page")).count()
        };
        for len in [1, 4096, (2 << 20) - 1, 2 << 20, (2 << 20) + 4096] {
            let file = FileOffset::new(file.try_clone().unwrap(), 0);
            let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
            let region = MmapRegion::<()>::build(Some(file), len, libc::PROT_READ, flags).unwrap();
            assert_eq!(mapped(), 1);
            drop(region);
            assert_eq!(mapped(), 0, "{len}");
        }
    }
}
