// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes as a CLC message: parsing never panics, and a parsed message can be written and parsed again.
//! (Not every byte survives: a version 1 Decline of 44 bytes is taken and sent as 28.)
#![no_main]

use libfuzzer_sys::fuzz_target;
use smc_core::wire::clc::{self, Message};

fuzz_target!(|bytes: &[u8]| {
    let _ = clc::peek_header(bytes);
    let _ = clc::looks_like_clc(bytes);
    let Ok(message) = Message::parse(bytes) else { return };
    let written = message.emit();
    match Message::parse(&written) {
        Ok(again) => assert_eq!(again.emit(), written, "{message:?}"),
        Err(error) => panic!("{message:?} became {written:02x?}: {error}"),
    }
});
