// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes into `Device::command`, before and after HELLO: every answer fits, and no command panics. The
//! first byte of each command is its length, the second the space for the reply.
#![no_main]

use libfuzzer_sys::fuzz_target;
use smc_fuzz::front::{Completion, Front, fabric, guest_memory};

fuzz_target!(|bytes: &[u8]| {
    let fabric = fabric(false);
    let mut front = Front::join(&fabric);
    front.device.set_memory(guest_memory(1 << 20));
    let mut rest = bytes;
    while let [len, room, tail @ ..] = rest {
        let len = usize::from(*len).min(tail.len());
        let (request, tail) = tail.split_at(len);
        front.raw(request, usize::from(*room));
        let how = if room % 5 == 0 { Completion::Refused } else { Completion::Done };
        front.complete(how);
        rest = tail;
    }
});
