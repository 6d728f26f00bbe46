// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Jumps in place of the program's system calls. All calls become jumps, or none.

use guest_driver::go_program::{GoProgram, Site};

use crate::sys::raw;

const PAGE: usize = 4096;
/// Bytes of a thunk.
const THUNK: usize = 48;
/// Bytes between the beginning of a thunk and its tail.
const TAIL: usize = 13;
/// Bytes below the program's file where the thunks may be, and the step of the search.
const NEAR: usize = 1 << 30;
const STEP: usize = 1 << 16;
/// Not below this address: the kernel maps nothing there.
const LOWEST: usize = 1 << 16;

/// A jump of five bytes from one address to another one. `None`: too far.
fn jump(from: usize, to: usize) -> Option<[u8; Site::JUMP]> {
    let distance = i32::try_from(to.wrapping_sub(from + Site::JUMP) as isize).ok()?;
    let mut code = [0xe9; Site::JUMP];
    code.get_mut(1..)?.copy_from_slice(&distance.to_le_bytes());
    Some(code)
}

/// A jump of two bytes.
fn short_jump(from: usize, to: usize) -> Option<[u8; 2]> {
    let distance = i8::try_from(to.wrapping_sub(from + 2) as isize).ok()?;
    Some([0xeb, distance as u8])
}

/// An entry: its address, and the mark of a busy thread.
pub(super) struct Entry {
    pub(super) address: usize,
    /// The prefix for the segment with the mark, and the place of the mark there.
    pub(super) prefix: u8,
    pub(super) busy: i32,
}

/// The instructions of a thunk at an address. `slot`: the place with the address of the entry.
/// `back`: behind the program's system call.
fn thunk(at: usize, slot: usize, entry: &Entry, back: usize) -> Option<[u8; THUNK]> {
    let distance = |from: usize, to: usize| i32::try_from(to.wrapping_sub(from) as isize).ok();
    let mut code = Vec::with_capacity(THUNK);
    // lea rcx, [rip + tail]
    code.extend([0x48, 0x8d, 0x0d]);
    code.extend((TAIL as i32 - 7).to_le_bytes());
    // jmp [rip + slot]
    code.extend([0xff, 0x25]);
    code.extend(distance(at + TAIL, slot)?.to_le_bytes());
    // The tail: syscall; mov byte ptr fs:[busy], 0; jmp back
    code.extend(Site::CALL);
    code.extend([entry.prefix, 0xc6, 0x04, 0x25]);
    code.extend(entry.busy.to_le_bytes());
    code.push(0);
    code.extend(jump(at + code.len(), back)?);
    // The other tail: syscall; jmp back
    code.extend(Site::CALL);
    code.extend(jump(at + code.len(), back)?);
    code.resize(THUNK, Site::PADDING);
    code.try_into().ok()
}

/// The change of a system call: addresses and bytes.
struct Change {
    call: (usize, [u8; 2]),
    room: (usize, [u8; Site::JUMP]),
}

/// Replaces the system calls of a program by jumps to an entry. `headers`: of the program in memory. No other thread runs the program's
/// instructions.
///
/// # Errors
/// The reason why nothing was changed.
pub(super) fn apply(program: &GoProgram, headers: usize, entry: &Entry) -> Result<(), String> {
    let moved = headers.wrapping_sub(program.headers as usize);
    let size = (8 + program.sites.len() * THUNK).next_multiple_of(PAGE);
    let base = program.lowest as usize + moved;
    let area = Area::near(base, size).ok_or("there is no memory near the program for jumps")?;
    let mut code = entry.address.to_le_bytes().to_vec();
    let mut changes = Vec::new();
    for site in &program.sites {
        let at = area.at + code.len();
        let [call, room] = [site.call, site.room].map(|at| (at as usize).wrapping_add(moved));
        let made = || {
            let thunk = thunk(at, area.at, entry, call + 2)?;
            let change =
                Change { call: (call, short_jump(call, room)?), room: (room, jump(room, at)?) };
            Some((thunk, change))
        };
        let (thunk, change) = made().ok_or("the program is too large for jumps")?;
        code.extend(thunk);
        changes.push(change);
    }
    area.fill(&code)?;
    write_all(&changes)?;
    // The jumps lead there for ever.
    std::mem::forget(area);
    Ok(())
}

/// Memory for the thunks, unmapped when dropped.
struct Area {
    at: usize,
    size: usize,
}

impl Area {
    /// Memory below an address.
    fn near(base: usize, size: usize) -> Option<Area> {
        let highest = base.checked_sub(size)? & !(STEP - 1);
        let lowest = base.saturating_sub(NEAR).max(LOWEST);
        let mut places = (lowest..=highest).rev().step_by(STEP);
        places.find_map(|at| {
            let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            let args = [at, size, access, kind as usize, usize::MAX, 0];
            // SAFETY: the kernel maps unused addresses only.
            let mapped = unsafe { raw::call(libc::SYS_mmap, args) }.ok()?;
            let area = Area { at: mapped, size };
            // A kernel without the flag maps another place.
            (mapped == at).then_some(area)
        })
    }

    /// Writes the instructions, and makes them executable.
    fn fill(&self, code: &[u8]) -> Result<(), String> {
        // SAFETY: the memory is this value's, writable, and long enough for all thunks.
        unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), self.at as *mut u8, code.len()) };
        protect(self.at, self.size, libc::PROT_READ | libc::PROT_EXEC)
            .then_some(())
            .ok_or_else(|| FORBIDDEN.into())
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nothing leads there.
        let _ = unsafe { raw::call(libc::SYS_munmap, [self.at, self.size, 0, 0, 0, 0]) };
    }
}

const FORBIDDEN: &str =
    "the kernel lets no program change its instructions here (PR_SET_MDWE, SELinux)";

fn protect(at: usize, len: usize, access: i32) -> bool {
    let args = [at, len, access as usize, 0, 0, 0];
    // SAFETY: the callers give own memory, or instructions of the program with access for execution.
    unsafe { raw::call(libc::SYS_mprotect, args) }.is_ok()
}

/// The pages of the changes.
fn pages(changes: &[Change]) -> Vec<usize> {
    let ends = |at: usize, len: usize| [at, at + len - 1];
    let all = changes.iter().flat_map(|change| {
        ends(change.call.0, 2).into_iter().chain(ends(change.room.0, Site::JUMP))
    });
    let mut pages: Vec<_> = all.map(|at| at & !(PAGE - 1)).collect();
    pages.sort_unstable();
    pages.dedup();
    pages
}

fn write_all(changes: &[Change]) -> Result<(), String> {
    let pages = pages(changes);
    let protect_all = |access| pages.iter().all(|page| protect(*page, PAGE, access));
    // The kernel refuses this where it would refuse the way back.
    let is_writable = protect_all(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
    let is_as_in_file = || {
        changes.iter().all(|change| {
            // SAFETY: addresses of the program's instructions, on pages that are there.
            let bytes =
                |at: usize, len: usize| unsafe { std::slice::from_raw_parts(at as *const u8, len) };
            bytes(change.call.0, 2) == Site::CALL
                && bytes(change.room.0, Site::JUMP) == [Site::PADDING; Site::JUMP]
        })
    };
    let why = match is_writable {
        false => Some(FORBIDDEN),
        true if !is_as_in_file() => Some("its instructions are not those of its file"),
        true => None,
    };
    if why.is_none() {
        for Change { call, room } in changes {
            // SAFETY: bytes of the program's instructions, writable, and run by no thread now. The
            // first ones are unused.
            unsafe {
                std::ptr::copy_nonoverlapping(room.1.as_ptr(), room.0 as *mut u8, room.1.len());
                std::ptr::copy_nonoverlapping(call.1.as_ptr(), call.0 as *mut u8, call.1.len());
            }
        }
    }
    for page in &pages {
        protect(*page, PAGE, libc::PROT_READ | libc::PROT_EXEC);
    }
    why.map_or(Ok(()), |why| Err(why.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_reach_as_far_as_their_distance() {
        assert_eq!(jump(0x1000, 0x1005), Some([0xe9, 0, 0, 0, 0]));
        assert_eq!(jump(0x1000, 0x1000), Some([0xe9, 0xfb, 0xff, 0xff, 0xff]));
        assert_eq!(jump(0, (1 << 31) + 5), None);
        assert_eq!(jump(1 << 40, 0), None);
        assert_eq!(short_jump(0x1000, 0x1002 + 127), Some([0xeb, 127]));
        assert_eq!(short_jump(0x1000, 0x1002 + 128), None);
        assert_eq!(short_jump(0x1000, 0x1002 - 128), Some([0xeb, 0x80]));
        assert_eq!(short_jump(0x1000, 0x1002 - 129), None);
    }

    #[test]
    fn the_ways_out_of_a_thunk_are_where_the_entry_expects_them() {
        let (at, back) = (0x50_0000, 0x40_1002);
        let entry = Entry { address: 0, prefix: 0x64, busy: -64 };
        let code = thunk(at, 0x4f_fff8, &entry, back).unwrap();
        // lea rcx, [rip + 6]: the tail is behind the jump to the entry.
        assert_eq!(code[..7], [0x48, 0x8d, 0x0d, 6, 0, 0, 0]);
        assert_eq!(code[7..9], [0xff, 0x25]);
        let slot = at + TAIL - 0x4f_fff8;
        assert_eq!(code[9..TAIL], (-(slot as i32)).to_le_bytes());
        assert_eq!(code[TAIL..TAIL + 2], Site::CALL);
        // The way back of an answered call: mov byte ptr fs:[-64], 0
        assert_eq!(code[TAIL + 2..TAIL + 11], [0x64, 0xc6, 0x04, 0x25, 0xc0, 0xff, 0xff, 0xff, 0]);
        assert_eq!(code[TAIL + 11..TAIL + 16], jump(at + TAIL + 11, back).unwrap());
        // The other tail.
        assert_eq!(code[TAIL + 16..TAIL + 18], Site::CALL);
        assert_eq!(code[TAIL + 18..TAIL + 23], jump(at + TAIL + 18, back).unwrap());
        assert_eq!(thunk(1 << 40, 1 << 40, &entry, 0), None);
    }

    /// Pages with a system call in the middle of padding, in place of a program.
    struct Pages(usize);

    impl Pages {
        const SIZE: usize = 2 * PAGE;

        fn new() -> Pages {
            let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
            let kind = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
            let args = [0, Self::SIZE, access, kind, usize::MAX, 0];
            // SAFETY: new memory.
            let at = unsafe { raw::call(libc::SYS_mmap, args) }.unwrap();
            // SAFETY: the memory is new and writable.
            unsafe { std::ptr::write_bytes(at as *mut u8, Site::PADDING, Self::SIZE) };
            let pages = Pages(at);
            pages.put(PAGE - 1, &Site::CALL);
            assert!(protect(at, Self::SIZE, libc::PROT_READ | libc::PROT_EXEC));
            pages
        }

        fn put(&self, at: usize, bytes: &[u8]) {
            assert!(at + bytes.len() <= Self::SIZE);
            assert!(protect(self.0, Self::SIZE, libc::PROT_READ | libc::PROT_WRITE));
            // SAFETY: within the pages, which are writable now.
            unsafe { std::ptr::copy(bytes.as_ptr(), (self.0 + at) as *mut u8, bytes.len()) };
        }

        fn bytes(&self, at: usize, len: usize) -> &[u8] {
            // SAFETY: within the pages.
            unsafe { std::slice::from_raw_parts((self.0 + at) as *const u8, len) }
        }

        /// Two calls: the first on both pages, the second at another place.
        fn changes(&self, second: usize) -> Vec<Change> {
            let change = |call: usize, room: usize| Change {
                call: (self.0 + call, short_jump(call, room).unwrap()),
                room: (self.0 + room, jump(room, 0).unwrap()),
            };
            vec![change(PAGE - 1, PAGE + 20), change(second, PAGE + 40)]
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: the mapping is this value's.
            let _ = unsafe { raw::call(libc::SYS_munmap, [self.0, Self::SIZE, 0, 0, 0, 0]) };
        }
    }

    #[test]
    fn a_changed_call_leads_to_its_room() {
        let pages = Pages::new();
        pages.put(PAGE + 30, &Site::CALL);
        write_all(&pages.changes(PAGE + 30)).unwrap();
        assert_eq!(pages.bytes(PAGE - 1, 2), [0xeb, 19]);
        assert_eq!(pages.bytes(PAGE + 20, 5), jump(PAGE + 20, 0).unwrap());
        assert_eq!(pages.bytes(PAGE + 30, 2), [0xeb, 8]);
    }

    #[test]
    fn other_instructions_than_the_files_stay_as_they_are() {
        let pages = Pages::new();
        let before = pages.bytes(0, Pages::SIZE).to_vec();
        let error = write_all(&pages.changes(PAGE + 30)).unwrap_err();
        assert_eq!(error, "its instructions are not those of its file");
        assert!(pages.bytes(0, Pages::SIZE) == before, "one of two calls was changed");
    }
}
