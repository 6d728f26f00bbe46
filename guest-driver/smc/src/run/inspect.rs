// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds the program to run, and the obstacles to loading the library.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use guest_driver::program_file::{self, Obstacle};

use crate::error::NoProgram;

/// Finds the program like the shell.
///
/// # Errors
/// [`NoProgram`]; the first of several files with the name counts.
pub(super) fn find(name: &OsStr) -> Result<PathBuf, NoProgram> {
    let judge = |path: PathBuf| match path.metadata() {
        Err(_) => Err(NoProgram::NotFound),
        Ok(data) if data.is_dir() => Err(NoProgram::Directory),
        Ok(data) if data.permissions().mode() & 0o111 == 0 => Err(NoProgram::NotExecutable),
        Ok(_) => Ok(path),
    };
    if name.as_encoded_bytes().contains(&b'/') {
        return judge(name.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let mut why = NoProgram::NotFound;
    for directory in std::env::split_paths(&path) {
        match judge(directory.join(name)) {
            Ok(path) => return Ok(path),
            // The shell, too, looks for a program behind a directory of its name.
            Err(NoProgram::NotFound | NoProgram::Directory) => {}
            Err(found) => why = found,
        }
    }
    Err(why)
}

/// Why the library cannot be loaded into a program. An unreadable file is no obstacle: the watcher
/// reports whether the library was loaded.
pub(super) fn obstacle(program: &Path) -> Option<Obstacle> {
    program_file::obstacle(program, |name| find(name).ok()).and_then(Result::err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_not_found() {
        assert_eq!(find(OsStr::new("no-such-program")), Err(NoProgram::NotFound));
        assert_eq!(find(OsStr::new("/etc/passwd")), Err(NoProgram::NotExecutable));
        assert_eq!(find(OsStr::new("/etc")), Err(NoProgram::Directory));
    }
}
