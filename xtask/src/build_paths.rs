// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Keeps the directories of whoever builds the packages out of the programs: messages of panics and
//! debug information have paths of source files.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tool::{self, ToolError};

/// The variable with the flags of rustc, one behind the other.
pub(crate) const VARIABLE: &str = "CARGO_ENCODED_RUSTFLAGS";
/// What is between two of them.
const BETWEEN: &str = "\u{1f}";

/// The value of [`VARIABLE`] for a build of the checkout `root` in the directory `target`: the flags that
/// this process was given, and the other names of directories.
///
/// # Errors
/// There is no rustc.
pub(crate) fn flags(root: &Path, target: &Path) -> Result<OsString, ToolError> {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
    rustc.current_dir(root).args(["--print", "sysroot"]);
    let library = Path::new(tool::output(rustc)?.trim()).join("lib/rustlib/src/rust");
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("HOME")?;
        Some(Path::new(&home).join(".cargo"))
    });
    let given = std::env::var(VARIABLE).unwrap_or_else(|_| {
        let words = std::env::var("RUSTFLAGS").unwrap_or_default();
        words.split_whitespace().collect::<Vec<_>>().join(BETWEEN)
    });
    let sources = format!("/usr/src/vhost-device-ism-{}", env!("CARGO_PKG_VERSION"));
    let places = home.iter().map(|home| (home.as_path(), "/usr/share/cargo".to_owned())).chain([
        (library.as_path(), "/usr/src/rust".to_owned()),
        (target, format!("{sources}/target")),
        // Of names that fit, the last one counts: the target directory may be in the checkout.
        (root, sources),
    ]);
    Ok(renamed(&given, places))
}

/// Flags, with those that give other names to directories.
fn renamed<'a>(given: &str, places: impl Iterator<Item = (&'a Path, String)>) -> OsString {
    let mut flags = OsString::from(given);
    for (from, to) in places {
        if !flags.is_empty() {
            flags.push(BETWEEN);
        }
        for part in
            [OsStr::new("--remap-path-prefix="), from.as_os_str(), "=".as_ref(), to.as_ref()]
        {
            flags.push(part);
        }
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_were_given_come_first() {
        let places = || [(Path::new("/home/a b/x"), "/usr/src".to_owned())].into_iter();
        let own = "--remap-path-prefix=/home/a b/x=/usr/src";
        assert_eq!(renamed("", places()), own);
        assert_eq!(renamed("-C\u{1f}lto", places()), format!("-C\u{1f}lto\u{1f}{own}").as_str());
    }
}
