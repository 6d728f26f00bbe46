// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Any bytes explained: never a panic, every byte in exactly one field, and an error exactly where
//! the strict parser has one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use smc_core::wire::clc::Message;
use smc_core::wire::llc::{Dialect, Llc};
use smc_core::wire::view::{self, View};

fn check(view: &View, bytes: &[u8]) {
    let mut at = 0;
    for field in &view.fields {
        assert_eq!(field.offset, at, "{view}");
        if !field.is_area {
            at += field.len;
        }
    }
    assert_eq!(at, bytes.len(), "{view}");
    // For people to read: as text as well.
    assert!(!view.to_string().is_empty());
}

fuzz_target!(|bytes: &[u8]| {
    check(&view::any(bytes), bytes);
    check(&view::cdc(bytes), bytes);
    check(&view::control_block(bytes), bytes);
    let clc = view::clc(bytes);
    check(&clc, bytes);
    assert_eq!(clc.error, Message::parse(bytes).err());
    for dialect in [Dialect::SPEC, Dialect::LINUX] {
        let llc = view::llc(bytes, &dialect);
        check(&llc, bytes);
        assert_eq!(llc.error, Llc::parse(bytes, &dialect).err());
    }
});
