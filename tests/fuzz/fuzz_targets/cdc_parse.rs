// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes as a CDC message and as a control block.
#![no_main]

use libfuzzer_sys::fuzz_target;
use smc_core::wire::cdc::{Cdc, ControlBlock};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(cdc) = Cdc::parse(bytes) {
        assert_eq!(Cdc::parse(&cdc.emit()), Ok(cdc));
    }
    if let Some(block) = bytes.first_chunk() {
        let block = ControlBlock::from_bytes(block);
        assert_eq!(ControlBlock::from_bytes(&block.to_bytes()), block);
    }
});
