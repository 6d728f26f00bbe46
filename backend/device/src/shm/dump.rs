// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory left out of core dumps.

/// Leaves `[start, start + len)`, a mapping of the process, out of core dumps.
pub(super) fn leave_out(start: usize, len: usize) {
    let start = std::ptr::without_provenance_mut(start);
    // SAFETY: the advice changes neither the memory nor the mapping. A failure, as for an address without a
    // mapping, is harmless.
    unsafe { libc::madvise(start, len, libc::MADV_DONTDUMP) };
}
