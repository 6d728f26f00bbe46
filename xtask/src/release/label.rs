// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Version and date of a release.

use std::process::Command;

use crate::package;
use crate::tool::{self, ToolError};

/// The version of the release.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The time of the commit, in the format of RFC 3339.
pub(super) fn date() -> Result<String, ToolError> {
    let mut date = Command::new("date");
    date.args(["--utc", "+%Y-%m-%dT%H:%M:%SZ"]).arg(format!("--date=@{}", package::epoch()));
    Ok(tool::output(date)?.trim().to_owned())
}
