// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds the program to run, and the obstacles to loading the library.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use guest_driver::go_program::{self, Door, NoDoor};
use guest_driver::program_file::{self, Obstacle};

use crate::error::NoProgram;

/// Finds the program like the shell.
///
/// # Errors
/// [`NoProgram`]; the first of several files with the name counts.
pub(crate) fn find(name: &OsStr) -> Result<PathBuf, NoProgram> {
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

/// Why the library cannot be loaded into a program with this [`door`], or would miss its calls. An
/// unreadable file is no obstacle: the watcher reports whether the library was loaded. `go`: system calls
/// of programs in Go are taken over.
pub(super) fn obstacle(door: Option<Result<Door, NoDoor>>, go: bool) -> Option<NoDoor> {
    match door? {
        Ok(Door::SystemCalls | Door::LoadedSystemCalls) if !go => Some(NoDoor::Unwanted),
        Ok(Door::Dispatch) if !go => Some(NoDoor::UnwantedStatic),
        Ok(Door::DispatchOfMusl) if !go => Some(NoDoor::UnwantedMusl),
        door => door.err(),
    }
}

/// The door of a program to the library, by the program's file.
pub(crate) fn door(program: &Path) -> Option<Result<Door, NoDoor>> {
    go_program::door(program, |name| find(name).ok())
}

/// Why the library cannot replace the program's calls of libc.
pub(super) fn obstacle_for_libc(program: &Path) -> Option<Obstacle> {
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
