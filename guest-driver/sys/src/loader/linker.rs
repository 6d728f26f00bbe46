// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file of glibc's dynamic linker.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

pub(super) const PAGE: u64 = 4096;
/// The most segments of the linker.
const MOST_SEGMENTS: u16 = 16;

/// A segment of the linker: where, how long in the file and in memory, from where, and access.
#[derive(Clone, Copy)]
pub(super) struct Segment {
    pub(super) address: u64,
    pub(super) in_file: u64,
    pub(super) in_memory: u64,
    pub(super) offset: u64,
    pub(super) access: u64,
}

/// The dynamic linker, as its file tells.
pub(super) struct Linker {
    pub(super) segments: Vec<Segment>,
    pub(super) entry: u64,
    pub(super) headers: u64,
    pub(super) count: u64,
}

impl Linker {
    pub(super) fn read(path: &CStr) -> io::Result<Linker> {
        let file = File::open(path.to_string_lossy().as_ref())?;
        let mut head = [0u8; 64];
        file.read_exact_at(&mut head, 0)?;
        let mut segments = Vec::new();
        let (entry, headers, count) = (word(&head, 24), word(&head, 32), half(&head, 56));
        if !head.starts_with(b"\x7fELF\x02\x01") || half(&head, 18) != 62 || count > MOST_SEGMENTS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        for n in 0..u64::from(count) {
            let mut header = [0u8; 56];
            file.read_exact_at(&mut header, headers.saturating_add(n * 56))?;
            // PT_LOAD
            if word(&header, 0) & 0xffff_ffff != 1 {
                continue;
            }
            let flags = word(&header, 0) >> 32;
            let access = [(4, libc::PROT_READ), (2, libc::PROT_WRITE), (1, libc::PROT_EXEC)];
            let access =
                access.iter().filter(|(flag, _)| flags & flag != 0).map(|(_, access)| access);
            let [offset, address] = [8, 16].map(|at| word(&header, at));
            let [in_file, in_memory] = [32, 40].map(|at| word(&header, at));
            if [offset, address, in_file, in_memory].iter().any(|word| *word > 1 << 30)
                || in_file > in_memory
            {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let access = access.fold(0, |sum, access| sum | access) as u64;
            segments.push(Segment { address, in_file, in_memory, offset, access });
        }
        if segments.is_empty() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Linker { segments, entry, headers, count: count.into() })
    }

    pub(super) fn end(&self) -> u64 {
        let ends = self.segments.iter().map(|segment| segment.address + segment.in_memory);
        up(ends.max().unwrap_or(0))
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let part = bytes.get(at..at + 8).and_then(|part| part.try_into().ok());
    part.map_or(0, u64::from_le_bytes)
}

fn half(bytes: &[u8], at: usize) -> u16 {
    word(bytes, at) as u16
}

pub(super) fn up(address: u64) -> u64 {
    address.next_multiple_of(PAGE)
}

pub(super) fn down(address: u64) -> u64 {
    address & !(PAGE - 1)
}
