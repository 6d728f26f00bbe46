// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory of a hostile front end: files of every kind, changing during their use. This process
//! never maps the files, so no change can hurt the process itself.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};

use super::descriptor::Descriptor;
use crate::bytes::Rng;

/// Guest memory begins here, so address 0 is outside.
pub(super) const BASE: u64 = 0x10_0000;
/// Bytes of guest memory.
pub(super) const LEN: u64 = 4 << 20;
/// Bytes of a page.
pub(super) const PAGE: u64 = 4096;

/// The kind of the memory's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Every page present; cannot shrink.
    Sealed,
    /// Every page present; can shrink.
    Unsealed,
    /// No page is there.
    Sparse,
    /// Huge pages, of a pool usually empty.
    Huge,
    /// In a file system on a disk, or whatever /tmp is.
    Disk,
    /// Not memory.
    Wrong(Descriptor),
}

impl Kind {
    /// Draws a kind; mostly a working one.
    pub(super) fn any(rng: &mut Rng) -> Kind {
        match rng.below(32) {
            0..12 => Kind::Sealed,
            12..24 => Kind::Unsealed,
            24..28 => Kind::Sparse,
            28..30 => Kind::Huge,
            30 => Kind::Disk,
            _ => Kind::Wrong(Descriptor::any(rng)),
        }
    }

    fn make(self) -> Option<OwnedFd> {
        let memory = |flags: MemfdFlags| memfd_create("soak", flags | MemfdFlags::CLOEXEC).ok();
        match self {
            Kind::Sealed | Kind::Unsealed | Kind::Sparse => {
                let fd = memory(MemfdFlags::ALLOW_SEALING)?;
                ftruncate(&fd, LEN).ok()?;
                if self != Kind::Sparse {
                    fallocate(&fd, FallocateFlags::empty(), 0, LEN).ok()?;
                }
                if self == Kind::Sealed {
                    fcntl_add_seals(&fd, SealFlags::SHRINK).ok()?;
                }
                Some(fd)
            }
            Kind::Huge => {
                let fd = memory(MemfdFlags::HUGETLB)?;
                ftruncate(&fd, LEN).ok()?;
                Some(fd)
            }
            Kind::Disk => {
                let file = tempfile()?;
                file.set_len(LEN).ok()?;
                Some(file.into())
            }
            Kind::Wrong(descriptor) => descriptor.make(),
        }
    }
}

/// A file without a name.
fn tempfile() -> Option<File> {
    let own = smc_test_support::TestDir::new();
    File::create_new(own.path("disk")).ok()
}

/// The memory of one front end.
#[derive(Debug)]
pub(super) struct Memory {
    file: File,
}

impl Memory {
    /// Memory of this kind; if the kind is unavailable, working memory.
    pub(super) fn new(kind: Kind) -> Option<Memory> {
        let fd = kind.make().or_else(|| Kind::Sealed.make())?;
        Some(Memory { file: fd.into() })
    }

    /// The descriptor to pass.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Writes at a guest address; ignores failures. A write to a shortened file makes the file grow.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        if let Some(offset) = at.checked_sub(BASE) {
            let _ = self.file.write_all_at(bytes, offset);
        }
    }

    /// Reads from a guest address; zeroes on failure.
    pub(super) fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        if let Some(offset) = at.checked_sub(BASE) {
            let _ = self.file.read_exact_at(&mut bytes, offset);
        }
        bytes
    }

    /// Lets some pages vanish.
    pub(super) fn punch(&self, rng: &mut Rng) {
        let pages = (LEN / PAGE) as u32;
        let first = rng.below(pages);
        let most = if rng.one_in(8) { pages } else { 4 };
        let count = 1 + rng.below(most);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = fallocate(&self.file, flags, u64::from(first) * PAGE, u64::from(count) * PAGE);
    }

    /// Shortens the file.
    pub(super) fn cut(&self, rng: &mut Rng) {
        let len = if rng.one_in(2) { 0 } else { u64::from(rng.below((LEN / PAGE) as u32)) * PAGE };
        let _ = ftruncate(&self.file, len);
    }

    /// Gives the file its length back, with holes.
    pub(super) fn restore(&self) {
        let _ = ftruncate(&self.file, LEN);
    }

    /// Adds a seal at a bad moment.
    pub(super) fn seal(&self, rng: &mut Rng) {
        let seals = [SealFlags::WRITE, SealFlags::GROW, SealFlags::SHRINK, SealFlags::FUTURE_WRITE];
        let _ = fcntl_add_seals(&self.file, seals[rng.below(4) as usize]);
    }
}
