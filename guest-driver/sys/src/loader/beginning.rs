// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The beginning of a program whose dynamic linker came by a loader.

use std::ffi::CStr;

/// The types of entries in the linker's auxiliary vector, with the program's stack pointer, and with the
/// address of the first instruction: the program's, or its own dynamic linker's.
pub(super) const BEGINNING: u64 = 0x736d_6300;
pub(super) const ENTRY: u64 = BEGINNING + 1;

/// The beginning of a program, in a process whose dynamic linker came by a loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beginning {
    stack: usize,
    entry: usize,
    /// The address of the program headers.
    pub headers: usize,
    /// Whether the program has a dynamic linker of its own.
    pub has_linker: bool,
}

impl Beginning {
    /// `None`: the kernel has loaded the dynamic linker, or there is none.
    pub fn of_this_process() -> Option<Beginning> {
        // SAFETY: reads a table of the process.
        let [stack, entry] = [BEGINNING, ENTRY].map(|of| unsafe { libc::getauxval(of) } as usize);
        if stack == 0 {
            return None;
        }
        let mut begin = Beginning { stack, entry, headers: 0, has_linker: false };
        // SAFETY: the kernel's stack for a program: count, arguments, 0, environment, 0, and the
        // auxiliary vector. The loader has found all of this there.
        unsafe {
            let mut at = stack as *const usize;
            at = at.add(*at + 2);
            while *at != 0 {
                at = at.add(1);
            }
            at = at.add(1);
            while *at != libc::AT_NULL as usize {
                match *at as u64 {
                    libc::AT_PHDR => begin.headers = *at.add(1),
                    // The loader of an older `smc run` names no first instruction.
                    libc::AT_ENTRY if begin.entry == 0 => begin.entry = *at.add(1),
                    libc::AT_BASE => begin.has_linker = *at.add(1) != 0,
                    _ => {}
                }
                at = at.add(2);
            }
        }
        Some(begin)
    }

    /// Withholds a variable of the environment from the program. `name`: with `=` at the end.
    pub fn withhold(&self, name: &CStr) {
        // SAFETY: as above. The stack is the program's, which has not begun. The place of the variable
        // gets another variable a second time; an only variable stays.
        unsafe {
            let first =
                (self.stack as *mut *const libc::c_char).add(*(self.stack as *const usize) + 2);
            let is_named = |text| libc::strncmp(text, name.as_ptr(), name.count_bytes()) == 0;
            let mut at = first;
            while !(*at).is_null() {
                if is_named(*at) {
                    let other = if at == first { at.add(1) } else { first };
                    if !(*other).is_null() {
                        *at = *other;
                    }
                }
                at = at.add(1);
            }
        }
    }

    /// Begins the program on the calling thread.
    ///
    /// # Safety
    /// The calling thread is the only one of the program, and no code is waiting for its return.
    pub unsafe fn run(self) -> ! {
        // SAFETY: the state of registers of a new program, as the kernel makes it.
        unsafe {
            std::arch::asm!(
                "mov rsp, rdi",
                "xor edx, edx",
                "xor ebp, ebp",
                "xor edi, edi",
                "jmp rsi",
                in("rdi") self.stack,
                in("rsi") self.entry,
                options(noreturn)
            )
        }
    }
}
