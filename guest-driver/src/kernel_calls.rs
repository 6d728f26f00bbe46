// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Detection of system calls on sockets by a program's or library's own instructions, unseen by a
//! library in place of libc.
//!
//! Finds each instruction calling the kernel, with the call's number as far as the instructions before
//! it tell. Many files have some without relation to sockets, such as libgomp for its futexes. So only
//! instructions with a number of sockets and waits, or an unknown number, count.

#[cfg(target_arch = "aarch64")]
#[path = "kernel_calls/aarch64.rs"]
mod machine;
#[cfg(target_arch = "x86_64")]
#[path = "kernel_calls/x86_64.rs"]
mod machine;
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
#[path = "kernel_calls/other.rs"]
mod machine;

use std::ffi::c_long;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::program_file;

/// Calls on sockets, and waits for them.
const OF_SOCKETS: &[c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_connect,
    #[cfg(not(target_arch = "s390x"))]
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_listen,
    libc::SYS_shutdown,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_select,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
];

/// Text of files exempt from the check: files with the standard library of Rust, since the crate rustix
/// calls the kernel for files (its messages name the place of compilation); and files with a sanitizer,
/// with kernel calls of its own.
const OTHERS: [&[u8]; 2] = [b"/rustc/", b"Sanitizer: "];
const LONGEST_TEXT: usize = 11;

/// Whether a file has an instruction for such a call, or is written in Go. `false` also for an
/// unreadable file, and for one with Rust or a sanitizer in it.
pub fn makes_socket_calls(file: &Path) -> bool {
    let Ok(file) = File::open(file) else { return false };
    program_file::is_go(&file)
        || Object::read(&file).and_then(|object| object.makes_socket_calls_outside(None))
            == Some(true)
}

/// Bytes of a file read at a time.
const PIECE: usize = 1 << 18;
/// The most program headers.
const MOST: u64 = 256;
/// Instructions are checked from the beginning of the function around the call, or, without a known
/// beginning, from this many bytes before the call.
const BEFORE: u64 = 512;

/// The places of the bytes of instructions calling the kernel.
pub(crate) fn candidates(code: &[u8]) -> impl Iterator<Item = usize> {
    machine::candidates(code)
}

/// The number of the kernel call by the last instruction: `Some(None)` if unknown. `None`: the last
/// bytes are in the middle of another instruction.
pub(crate) fn number_of_last(code: &[u8]) -> Option<Option<c_long>> {
    machine::number_of_last(code)
}

/// Whether a call is one on sockets, or a wait.
pub(crate) fn is_of_sockets(number: c_long) -> bool {
    OF_SOCKETS.contains(&number)
}

const PT_LOAD: u64 = 1;
const PT_GNU_EH_FRAME: u64 = 0x6474_e550;
const EXECUTED: u64 = 1;

/// A mapped part of the file.
#[derive(Clone, Copy)]
pub(crate) struct Segment {
    kind: u64,
    flags: u64,
    offset: u64,
    pub(crate) address: u64,
    pub(crate) size: u64,
}

impl Segment {
    fn contains(&self, address: u64) -> bool {
        address.checked_sub(self.address).is_some_and(|inside| inside < self.size)
    }
}

/// An ELF file.
pub(crate) struct Object<'a> {
    file: &'a File,
    segments: Vec<Segment>,
    /// Place of the program headers.
    headers: u64,
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let part = bytes.get(at..at.checked_add(N)?)?;
    Some(part.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

/// The places of a byte.
fn places(bytes: &[u8], wanted: u8) -> impl Iterator<Item = usize> {
    const ONES: u64 = u64::from_le_bytes([1; 8]);
    let mask = u64::from(wanted) * ONES;
    let words = bytes.chunks(8).enumerate();
    // Most words lack the byte, as the sum shows.
    let may_have = move |word: &[u8]| match word.try_into() {
        Ok(eight) => {
            let differs = u64::from_le_bytes(eight) ^ mask;
            differs.wrapping_sub(ONES) & !differs & (ONES << 7) != 0
        }
        Err(_) => true,
    };
    let found = words.filter(move |(_, word)| may_have(word));
    found.flat_map(move |(at, word)| {
        let inside = word.iter().enumerate().filter(move |(_, byte)| **byte == wanted);
        inside.map(move |(place, _)| at * 8 + place)
    })
}

impl<'a> Object<'a> {
    pub(crate) fn read(file: &'a File) -> Option<Object<'a>> {
        let mut header = [0u8; 64];
        file.read_exact_at(&mut header, 0).ok()?;
        if !header.starts_with(b"\x7fELF\x02\x01") {
            return None;
        }
        let (start, n) = (word::<8>(&header, 32)?, word::<2>(&header, 56)?);
        let mut segments = Vec::new();
        for i in 0..n.min(MOST) {
            let mut entry = [0u8; 56];
            file.read_exact_at(&mut entry, start.checked_add(i * 56)?).ok()?;
            segments.push(Segment {
                kind: word::<4>(&entry, 0)?,
                flags: word::<4>(&entry, 4)?,
                offset: word::<8>(&entry, 8)?,
                address: word::<8>(&entry, 16)?,
                size: word::<8>(&entry, 32)?,
            });
        }
        Some(Object { file, segments, headers: start })
    }

    /// Whether there is such a call, except at the given addresses.
    pub(crate) fn makes_socket_calls_outside(&self, except: Option<&Range<u64>>) -> Option<bool> {
        let executed = |s: &&Segment| s.kind == PT_LOAD && s.flags & EXECUTED != 0;
        for segment in self.segments.iter().filter(executed) {
            let found = self.find(segment, machine::LENGTH, |piece| {
                machine::candidates(piece).map(|at| at as u64).collect()
            });
            let counts = |at: &u64| {
                let is_excepted = except.is_some_and(|all| all.contains(&(segment.address + at)));
                !is_excepted && self.is_socket_call(segment, *at) == Some(true)
            };
            if found.into_iter().flatten().any(|at| counts(&at)) {
                return Some(!self.is_other());
            }
        }
        Some(false)
    }

    /// Whether the file has one of [`OTHERS`].
    fn is_other(&self) -> bool {
        let read = |s: &&Segment| s.kind == PT_LOAD && s.flags & EXECUTED == 0;
        let has = |piece: &[u8], text: &[u8]| {
            let first = text.first().copied().unwrap_or(0);
            places(piece, first)
                .any(|at| piece.get(at..).is_some_and(|rest| rest.starts_with(text)))
        };
        self.segments.iter().filter(read).any(|segment| {
            let found = |piece: &[u8]| match OTHERS.iter().any(|text| has(piece, text)) {
                true => vec![0],
                false => Vec::new(),
            };
            self.find(segment, LONGEST_TEXT, found).flatten().next().is_some()
        })
    }

    /// The results of `look` for each piece of a segment, as places in the segment. Pieces overlap by
    /// the length of the searched bytes.
    fn find<'b>(
        &'b self,
        segment: &'b Segment,
        length: usize,
        look: impl Fn(&[u8]) -> Vec<u64> + 'b,
    ) -> impl Iterator<Item = Vec<u64>> + 'b {
        // Each page of a piece costs a page fault, and most programs are small.
        let mut piece = vec![0u8; PIECE.min(segment.size as usize)];
        (0..segment.size).step_by(PIECE - length + 1).map(move |begin| {
            let n = PIECE.min((segment.size - begin) as usize);
            let Some(part) = piece.get_mut(..n) else { return Vec::new() };
            match self.file.read_exact_at(part, segment.offset + begin) {
                Ok(()) => look(part).into_iter().map(|at| begin + at).collect(),
                Err(_) => Vec::new(),
            }
        })
    }

    /// Whether there is an instruction calling the kernel, for a counted call.
    fn is_socket_call(&self, segment: &Segment, at: u64) -> Option<bool> {
        let function = self.function_of(segment.address + at);
        let known = function.and_then(|address| address.checked_sub(segment.address));
        let begin = known.unwrap_or(at.saturating_sub(BEFORE));
        let mut code = vec![0u8; usize::try_from(at - begin).ok()? + machine::LENGTH];
        self.file.read_exact_at(&mut code, segment.offset + begin).ok()?;
        let number = machine::number_of_last(&code)?;
        // Bytes outside of any function may be data.
        Some(number.map_or(known.is_some(), |number| OF_SOCKETS.contains(&number)))
    }

    /// The bytes at an address.
    pub(crate) fn bytes_at<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, self.offset_of(address)?.0).ok()?;
        Some(bytes)
    }

    /// Bytes of one segment.
    pub(crate) fn read_at(&self, address: u64, len: usize) -> Option<Vec<u8>> {
        let (offset, left) = self.offset_of(address)?;
        if len as u64 > left || left > self.file.metadata().ok()?.len() {
            return None;
        }
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, offset).ok()?;
        Some(bytes)
    }

    /// The place of an address in the file, and the number of bytes from there on.
    fn offset_of(&self, address: u64) -> Option<(u64, u64)> {
        let segment = self.loaded().find(|segment| segment.contains(address))?;
        let inside = address - segment.address;
        Some((segment.offset.checked_add(inside)?, segment.size - inside))
    }

    fn loaded(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(|segment| segment.kind == PT_LOAD)
    }

    /// The first segment of a kind.
    pub(crate) fn segment(&self, kind: u64) -> Option<&Segment> {
        self.segments.iter().find(|segment| segment.kind == kind)
    }

    /// The lowest address.
    pub(crate) fn lowest(&self) -> Option<u64> {
        self.loaded().map(|segment| segment.address).min()
    }

    /// The address of the program headers.
    pub(crate) fn headers(&self) -> Option<u64> {
        let inside = |segment: &Segment| self.headers.checked_sub(segment.offset);
        self.loaded().find_map(|segment| {
            let inside = inside(segment).filter(|inside| *inside < segment.size)?;
            segment.address.checked_add(inside)
        })
    }

    /// Whether instructions are at an address.
    pub(crate) fn is_executed(&self, address: u64) -> bool {
        self.loaded().any(|segment| segment.flags & EXECUTED != 0 && segment.contains(address))
    }

    /// The beginning of the function at an address, by the table of the unwinder.
    fn function_of(&self, address: u64) -> Option<u64> {
        /// Offsets in four bytes: of the frames from their field, of functions from the table.
        const KINDS: [u8; 4] = [1, 0x1b, 0x03, 0x3b];
        let table = self.segments.iter().find(|s| s.kind == PT_GNU_EH_FRAME)?;
        let head: [u8; 12] = self.bytes_at(table.address)?;
        if head.get(..4)? != KINDS {
            return None;
        }
        let begins = |at: u64| {
            let entry: [u8; 4] = self.bytes_at(table.address + 12 + 8 * at)?;
            Some(table.address.wrapping_add_signed(i32::from_le_bytes(entry).into()))
        };
        let (mut low, mut high) = (0, word::<4>(&head, 8)?);
        while low + 1 < high {
            let middle = (low + high) / 2;
            if begins(middle)? <= address { low = middle } else { high = middle }
        }
        let begin = begins(low).filter(|begin| *begin <= address)?;
        let frame: [u8; 4] = self.bytes_at(table.address + 16 + 8 * low)?;
        let frame = table.address.wrapping_add_signed(i32::from_le_bytes(frame).into());
        // Behind its length, its common part, and the beginning of the function, four bytes each.
        let length: [u8; 4] = self.bytes_at(frame + 12)?;
        (address - begin < u64::from(u32::from_le_bytes(length))).then_some(begin)
    }
}

#[cfg(test)]
mod tests;
