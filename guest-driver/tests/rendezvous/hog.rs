// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An eBPF program of another owner, using up the room for options.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

/// The segment without room: the value of its TCP flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    Syn = 2,
    SynAck = 18,
}

/// Takes the 20 bytes left free by Linux, as long as the descriptor is open.
pub(crate) fn attach(cgroup: &Path, on: On) -> io::Result<OwnedFd> {
    // code, destination and source register, offset, constant
    let program: [(u8, u8, u8, i16, i32); 35] = [
        (0xbf, 6, 1, 0, 0),   // r6 = r1
        (0x61, 2, 6, 0, 0),   // r2 = op
        (0x15, 2, 0, 5, 3),   // connect: go to A
        (0x15, 2, 0, 4, 11),  // listen: go to A
        (0x15, 2, 0, 8, 14),  // length: go to B
        (0x15, 2, 0, 14, 15), // write: go to C
        (0xb7, 0, 0, 0, 1),   // out: return 1
        (0x95, 0, 0, 0, 0),
        (0x61, 2, 6, 84, 0), // A: ask to be called back for options
        (0x47, 2, 0, 0, 64),
        (0xbf, 1, 6, 0, 0),
        (0x85, 0, 0, 0, 59),
        (0x05, 0, 0, -7, 0),
        (0x61, 2, 6, 212, 0), // B: reserve 20 bytes
        (0x55, 2, 0, -9, on as i32),
        (0xbf, 1, 6, 0, 0),
        (0xb7, 2, 0, 0, 20),
        (0xb7, 3, 0, 0, 0),
        (0x85, 0, 0, 0, 144),
        (0x05, 0, 0, -14, 0),
        (0x61, 2, 6, 212, 0), // C: an experiment of 20 bytes
        (0x55, 2, 0, -16, on as i32),
        (0x18, 1, 0, 0, i32::from_le_bytes([253, 20, 1, 2])),
        (0, 0, 0, 0, 0),
        (0x7b, 10, 1, -24, 0),
        (0xb7, 1, 0, 0, 0),
        (0x7b, 10, 1, -16, 0),
        (0x7b, 10, 1, -8, 0),
        (0xbf, 1, 6, 0, 0),
        (0xbf, 2, 10, 0, 0),
        (0x07, 2, 0, 0, -24),
        (0xb7, 3, 0, 0, 20),
        (0xb7, 4, 0, 0, 0),
        (0x85, 0, 0, 0, 143),
        (0x05, 0, 0, -29, 0),
    ];
    let code: Vec<u8> = program
        .iter()
        .flat_map(|(code, dst, src, offset, value)| {
            let registers =
                if cfg!(target_endian = "little") { dst | src << 4 } else { dst << 4 | src };
            let mut bytes = vec![*code, registers];
            bytes.extend(offset.to_ne_bytes());
            bytes.extend(value.to_ne_bytes());
            bytes
        })
        .collect();
    let words = |low: u32, high: u32| {
        u64::from_ne_bytes([low.to_ne_bytes(), high.to_ne_bytes()].concat().try_into().unwrap())
    };
    let mut load = [0u64; 9];
    load[0] = words(13, code.len() as u32 / 8);
    load[1] = code.as_ptr() as u64;
    load[2] = c"GPL".as_ptr() as u64;
    load[8] = words(0, 3);
    let program = bpf(5, &mut load)?;
    let cgroup = File::open(cgroup)?;
    let mut link = [words(program.as_raw_fd() as u32, cgroup.as_raw_fd() as u32), words(3, 0)];
    bpf(28, &mut link)
}

fn bpf(command: i32, attributes: &mut [u64]) -> io::Result<OwnedFd> {
    // SAFETY: the memory behind the attributes lives until the call is over.
    let fd = unsafe {
        libc::syscall(libc::SYS_bpf, command, attributes.as_mut_ptr(), size_of_val(attributes))
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
