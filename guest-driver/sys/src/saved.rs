// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Private copies of the window, like a saved and restored machine's, for tests.

use std::fs;
use std::io;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed};

/// Replaces memory shared with other processes by private copies, in all mappings of files with `name` in
/// their names. Returns the number of mappings.
///
/// The copy is in ascending order, like a monitor's: bytes lie behind their announcing word. Concurrent
/// stores by threads of this process may be lost.
///
/// # Errors
/// The errors of mmap(2), mremap(2), and of reading `/proc/self/maps`.
pub fn keep_private_copies(name: &str) -> io::Result<usize> {
    let mut copied = 0;
    let making = crate::making();
    let maps = fs::read_to_string("/proc/self/maps")?;
    drop(making);
    for line in maps.lines() {
        let shared = line.split(' ').nth(1).is_some_and(|access| access == "rw-s");
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16).map_err(io::Error::other);
        let Some((start, end)) = range.filter(|_| shared && line.contains(name)) else { continue };
        let (start, end) = (number(start)?, number(end)?);
        copy(start, end - start)?;
        copied += 1;
    }
    Ok(copied)
}

fn copy(start: usize, len: usize) -> io::Result<()> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let at = with_exposed_provenance_mut::<u8>(start);
    // SAFETY: `/proc/self/maps` has shown a readable and writable mapping there. The copy is a new mapping,
    // and replaces the old one as a whole; holders of views may read and write as before. Concurrent loads
    // and stores of other threads are the same as on a file changed by other processes, too.
    unsafe {
        let copy = mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE)?;
        for word in 0..len / size_of::<u64>() {
            let loaded = (*at.cast::<AtomicU64>().add(word)).load(Ordering::Acquire);
            copy.cast::<u64>().add(word).write(loaded);
        }
        mremap_fixed(copy, len, len, MremapFlags::MAYMOVE, at.cast())?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]
mod tests {
    use super::*;
    use crate::{SharedMem, sealed_memfd};

    #[test]
    fn a_copy_has_the_bytes_and_shares_no_later_ones() {
        let fd = sealed_memfd("to-be-saved", 8192).unwrap();
        let [one, other] = [(); 2].map(|()| SharedMem::from_fd(&fd, 8192).unwrap());
        let [one, other] = [one, other].map(|mem| mem.slice(0, 8192).unwrap());
        one.copy_in(5000, b"before").unwrap();
        assert_eq!(keep_private_copies("to-be-saved").unwrap(), 2);
        one.copy_in(5000, b"behind").unwrap();
        let mut bytes = [0; 6];
        other.copy_out(5000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"before");
        assert_eq!(keep_private_copies("to-be-saved").unwrap(), 0);
    }
}
