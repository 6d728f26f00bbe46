// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The places of system calls in the assembly of Go, and room for jumps out of them.

use super::obstacle::GoObstacle;
use super::table::FunctionTable;
use crate::kernel_calls::{self, Object};

/// A system call of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// The address of the instruction, before relocation.
    pub call: u64,
    /// The address of [`Site::JUMP`] unused bytes, in reach of a short jump at `call`.
    pub room: u64,
}

impl Site {
    /// Bytes of the instruction for a system call.
    pub const CALL: [u8; 2] = [0x0f, 0x05];
    /// Bytes of a jump to any place within two gigabytes.
    pub const JUMP: usize = 5;
    /// The byte between two functions.
    pub const PADDING: u8 = 0xcc;
}

/// The function behind most system calls, by its name in the versions of Go.
const MAIN: [&str; 3] = [
    // 1.19 to 1.22
    "runtime/internal/syscall.Syscall6",
    // 1.23 to 1.25
    "internal/runtime/syscall.Syscall6",
    // Since 1.26
    "internal/runtime/syscall/linux.Syscall6",
];

/// Other functions with system calls on descriptors, or with any number.
const OTHERS: [&str; 13] = [
    "syscall.rawVforkSyscall",
    "syscall.rawSyscallNoError",
    "runtime.closefd",
    "runtime.write1",
    "runtime.read",
    "runtime.epollcreate",
    "runtime.epollcreate1",
    "runtime.epollctl",
    "runtime.epollwait",
    "runtime.closeonexec",
    "runtime.exit",
    "golang.org/x/sys/unix.SyscallNoError",
    "golang.org/x/sys/unix.RawSyscallNoError",
];

/// Functions with system calls that make and end threads and set signal handlers, in a program whose
/// threads are not libc's. All of them must be there.
const OF_THREADS: [&str; 3] = ["runtime.clone", "runtime.exitThread", "runtime.rt_sigaction"];

/// The longest function with a search for system calls.
const LONGEST: u32 = 1 << 20;
/// Bytes at each side of a site with a search for room.
const REACH: u32 = 120;

fn is_known(name: &str, has_libc: bool) -> bool {
    // A package may have a copy of another one.
    let is_same = |known: &str| {
        let path = name.strip_suffix(known);
        path.is_some_and(|path| path.is_empty() || path.ends_with("vendor/"))
    };
    MAIN.contains(&name)
        || !has_libc && OF_THREADS.contains(&name)
        || OTHERS.iter().any(|known| is_same(known))
}

/// Finds all system calls. `text`: the address of the first function. `has_libc`: the threads are libc's.
pub(super) fn find(
    object: &Object<'_>,
    table: &FunctionTable<'_>,
    text: u64,
    has_libc: bool,
) -> Result<Vec<Site>, GoObstacle> {
    let mut rooms = Rooms::default();
    let (mut sites, mut has_main, mut of_threads) = (Vec::new(), false, OF_THREADS.to_vec());
    for function in table.in_assembly() {
        let function = function?;
        let name = String::from_utf8_lossy(function.name);
        let length = function.end - function.begin;
        if length > LONGEST {
            return Err(GoObstacle::Table("a function is too long"));
        }
        let code = object
            .read_at(text + u64::from(function.begin), length as usize)
            .ok_or(GoObstacle::Table("a function is outside of the file"))?;
        for at in calls(&code, is_known(&name, has_libc), &name)? {
            let call = function.begin + at;
            let room = rooms.take(object, table, text, call);
            let room = room.ok_or_else(|| GoObstacle::NoRoom(name.clone().into_owned()))?;
            has_main |= MAIN.contains(&&*name);
            of_threads.retain(|known| *known != name);
            sites.push(Site { call: text + u64::from(call), room });
        }
    }
    let has_threads = has_libc || of_threads.is_empty();
    if has_main && has_threads { Ok(sites) } else { Err(GoObstacle::NoFunction) }
}

/// The places of the system calls of a function to take over.
fn calls(code: &[u8], is_known: bool, name: &str) -> Result<Vec<u32>, GoObstacle> {
    let mut places = Vec::new();
    let unknown = || Err(GoObstacle::Function(name.into()));
    for at in kernel_calls::candidates(code) {
        let Some(head) = code.get(..at + Site::CALL.len()) else { continue };
        let is_call = head.ends_with(&Site::CALL);
        match (kernel_calls::number_of_last(head), is_known) {
            // Another instruction has these bytes.
            (None, false) => {}
            (Some(_), true) if is_call => places.push(at as u32),
            (Some(Some(number)), false) if !kernel_calls::is_of_sockets(number) => {}
            _ => return unknown(),
        }
    }
    Ok(places)
}

/// Unused bytes between functions.
#[derive(Default)]
struct Rooms {
    taken: Vec<u32>,
}

impl Rooms {
    /// Takes room near a call.
    fn take(
        &mut self,
        object: &Object<'_>,
        table: &FunctionTable<'_>,
        text: u64,
        call: u32,
    ) -> Option<u64> {
        /// The longest padding with a search.
        const PADDING: u32 = 64;
        let size = Site::JUMP as u32;
        for end in table.begins_near(call, REACH + PADDING) {
            let begin = end.saturating_sub(PADDING);
            let bytes = object.read_at(text + u64::from(begin), (end - begin) as usize)?;
            let padding = bytes.iter().rev().take_while(|byte| **byte == Site::PADDING).count();
            // The first byte may be the last one of a short jump backwards.
            let usable = (padding as u32).saturating_sub(1);
            let rooms = (1..=usable / size).map(|n| end - n * size);
            let mut near = rooms.filter(|room| room.abs_diff(call) <= REACH);
            if let Some(room) = near.find(|room| !self.taken.contains(room)) {
                self.taken.push(room);
                return Some(text + u64::from(room));
            }
        }
        None
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    const SYSCALL: [u8; 2] = Site::CALL;

    fn of(name: &str, code: &[&[u8]]) -> Result<Vec<u32>, GoObstacle> {
        calls(&code.concat(), is_known(name, true), name)
    }

    #[test]
    fn calls_of_known_functions_are_taken_over_and_calls_beside_sockets_are_left() {
        let load = [0x48, 0x8b, 0x44, 0x24, 8]; // mov rax, [rsp + 8]
        let futex = [0xb8, 0xca, 0, 0, 0]; // mov eax, 202
        let write = [0xb8, 1, 0, 0, 0]; // mov eax, 1
        let inside = [0xb8, 0x0f, 0x05, 0, 0]; // mov eax, 0x50f
        for name in ["internal/runtime/syscall.Syscall6", "syscall.rawVforkSyscall"] {
            assert_eq!(of(name, &[&load, &SYSCALL]), Ok(vec![5]));
        }
        let copy = "example.org/x/vendor/golang.org/x/sys/unix.RawSyscallNoError";
        assert_eq!(of(copy, &[&load, &SYSCALL, &SYSCALL]), Ok(vec![5, 7]));
        assert_eq!(of("runtime.write1", &[&write, &SYSCALL]), Ok(vec![5]));
        assert_eq!(of("runtime.futex", &[&futex, &SYSCALL]), Ok(vec![]));
        assert_eq!(of("crypto.sum", &[&inside]), Ok(vec![]));
    }

    #[test]
    fn calls_of_threads_are_taken_over_where_threads_are_not_libcs() {
        let clone = [0xb8, 0x38, 0, 0, 0]; // mov eax, 56
        let code = [&clone[..], &SYSCALL].concat();
        for (has_libc, places) in [(true, vec![]), (false, vec![5])] {
            let is_known = is_known("runtime.clone", has_libc);
            assert_eq!(calls(&code, is_known, "runtime.clone"), Ok(places));
        }
    }

    #[test]
    fn one_unknown_call_is_an_obstacle() {
        let load = [0x48, 0x8b, 0x44, 0x24, 8];
        let write = [0xb8, 1, 0, 0, 0];
        let inside = [0xb8, 0x0f, 0x05, 0, 0];
        let unknown = |name: &str| Err(GoObstacle::Function(name.into()));
        // Any number, a number of sockets, the old way of calls, and a place that is none.
        assert_eq!(of("rawfile.poll", &[&load, &SYSCALL]), unknown("rawfile.poll"));
        assert_eq!(of("runtime.write2", &[&write, &SYSCALL]), unknown("runtime.write2"));
        assert_eq!(of("runtime.read", &[&write, &[0xcd, 0x80]]), unknown("runtime.read"));
        assert_eq!(of("runtime.read", &[&inside]), unknown("runtime.read"));
        // A name is no end of another one.
        let name = "notgolang.org/x/sys/unix.SyscallNoError";
        assert_eq!(of(name, &[&load, &SYSCALL]), unknown(name));
    }
}
