// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Any bytes into `smc decode`, above all captures: no panic, and every output line is valid JSON.
#![no_main]

use clap::Parser;
use libfuzzer_sys::fuzz_target;

#[path = "../../../guest-driver/smc/src/decode/mod.rs"]
#[allow(dead_code, reason = "the entry of the program is not used here")]
mod decode;

/// Replaces the command's output on a terminal.
mod output {
    pub(crate) fn note(_line: &str) {}
}

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: decode::DecodeArgs,
}

fuzz_target!(|bytes: &[u8]| {
    let text = Command::parse_from(["decode"]);
    let _ = decode::run_to(text.args, bytes, std::io::sink());
    let json = Command::parse_from(["decode", "--json"]);
    let mut out = Vec::new();
    let _ = decode::run_to(json.args, bytes, &mut out);
    for line in out.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        assert!(serde_json::from_slice::<serde_json::Value>(line).is_ok());
    }
});
