// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Values of `/proc/PID/status`.

use crate::error::CliError;

/// A value of `/proc/PID/status` in kB, converted to bytes.
pub(super) fn memory_of(pid: u32, key: &str) -> Result<u64, CliError> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).map_err(CliError::io(path.clone()))?;
    parse_status(&text, key).ok_or_else(|| CliError::Usage(format!("{path} has no {key}")))
}

/// A number of `/proc/PID/status`.
pub(super) fn status_number(pid: u32, key: &str) -> Result<u64, CliError> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).map_err(CliError::io(path.clone()))?;
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|number| number.trim().parse().ok())
        .ok_or_else(|| CliError::Usage(format!("{path} has no {key}")))
}

fn parse_status(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_status_file() {
        let text = "Name:\tx\nVmRSS:\t    1234 kB\nRssAnon:\t       5 kB\n";
        assert_eq!(parse_status(text, "VmRSS:"), Some(1234 * 1024));
        assert_eq!(parse_status(text, "RssAnon:"), Some(5120));
        assert_eq!(parse_status(text, "VmSwap:"), None);
    }
}
