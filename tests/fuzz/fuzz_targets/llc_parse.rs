// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes as an LLC message, as specified and as Linux writes them: parsing never panics, and a parsed
//! message can be written and parsed again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use smc_core::wire::llc::{AddLinkLayout, Dialect, Llc};

fuzz_target!(|bytes: &[u8]| {
    let figure = Dialect { add_link: AddLinkLayout::Figure32, ..Dialect::SPEC };
    for dialect in [Dialect::SPEC, Dialect::LINUX, figure] {
        let Ok(message) = Llc::parse(bytes, &dialect) else { continue };
        let written = message.emit(&dialect);
        match Llc::parse(&written, &dialect) {
            Ok(again) => assert_eq!(again.emit(&dialect), written, "{message:?}"),
            Err(error) => panic!("{message:?} became {written:02x?}: {error}"),
        }
    }
});
