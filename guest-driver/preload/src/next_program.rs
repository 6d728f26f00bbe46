// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether a program about to be executed by this process will have the library.
//!
//! The answer decides about inherited connections and listeners. In doubt about the file or the
//! environment, the answer is no.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use guest_driver::go_program::{self, Door};
use guest_driver::{kernel_calls, program_file};
use rustix::fs::StatVfsMountFlags;

use crate::config;
use crate::sys::raw;

/// The dynamic linker's variable for the library.
const PRELOAD: &str = "LD_PRELOAD";
/// The dynamic linker's file of libraries for all programs: in containers.
const PRELOAD_LIST: &str = "/etc/ld.so.preload";

/// The program about to be executed.
pub(crate) struct TargetProgram<'a> {
    /// The file; a name without a slash is searched in PATH, if `in_path` is set.
    pub(crate) file: &'a Path,
    /// Whether the file is found by a shell's search for programs.
    pub(crate) in_path: bool,
    /// The program's environment, each entry with name and value.
    pub(crate) environment: Vec<&'a OsStr>,
    /// Whether a static program gets a dynamic linker ([`TargetProgram::needs_linker`]).
    pub(crate) gets_linker: bool,
}

impl TargetProgram<'_> {
    /// Whether the program will have this library, with the settings of this process. `true` also
    /// without an executable file: this process then goes on. `library`: the file of this library.
    pub(crate) fn has_library(&self, library: &Path) -> bool {
        let Some(file) = self.found().filter(|file| is_executable(file)) else { return true };
        (self.gets_linker || has_door(&file)) && self.has_same_settings(&file, library)
    }

    /// Whether the program has this library if, and only if, glibc's dynamic linker is loaded into it. For
    /// processes that take system calls over.
    pub(crate) fn needs_linker(&self, library: &Path) -> bool {
        self.found().is_some_and(|file| {
            is_executable(&file) && door_by_loader(&file) && self.has_same_settings(&file, library)
        })
    }

    fn found(&self) -> Option<PathBuf> {
        if self.in_path { find(self.file.as_os_str()) } else { Some(self.file.to_owned()) }
    }

    fn has_same_settings(&self, file: &Path, library: &Path) -> bool {
        self.loads(library) && config::get().is_some_and(|config| config.has_rules_of(file))
    }

    /// LD_PRELOAD without this library, if the program is for another kind of machine: its dynamic
    /// linker cannot load the library, and would say so on standard error. Returns the place of the
    /// entry in the environment, and the new one. `library`: the file of this library.
    pub(crate) fn preload_without(&self, library: &Path) -> Option<(usize, Vec<u8>)> {
        let (at, list) = self.environment.iter().enumerate().find_map(|(at, entry)| {
            let list = entry.as_bytes().strip_prefix(PRELOAD.as_bytes())?.strip_prefix(b"=")?;
            Some((at, list))
        })?;
        let separates = |byte: &u8| byte.is_ascii_whitespace() || *byte == b':';
        let all: Vec<_> = list.split(separates).filter(|entry| !entry.is_empty()).collect();
        let others = all.iter().copied().filter(|entry| !is_entry_of(entry, library));
        let others: Vec<_> = others.collect();
        if others.len() == all.len() {
            return None;
        }
        let file = self.found()?;
        program_file::is_for_other_machine(&file, find)
            .then(|| (at, [PRELOAD.as_bytes(), b"=", &others.join(&b':')].concat()))
    }

    /// Whether the environment, or the list for all programs, has the dynamic linker load the library.
    fn loads(&self, library: &Path) -> bool {
        let is_in = |list: &[u8]| {
            let mut entries = list.split(|byte| byte.is_ascii_whitespace() || *byte == b':');
            entries.any(|entry| is_entry_of(entry, library))
        };
        // With other rights than the user's, the dynamic linker loads nothing.
        let by_user = ism_sys::has_own_rights();
        let is_listed = || std::fs::read(PRELOAD_LIST).is_ok_and(|list| is_in(&list));
        by_user
            && (self.value(PRELOAD).is_some_and(|list| is_in(list.as_bytes())) || is_listed())
            && is_loadable(library)
            && !changes_domain()
            && config::is_same_for(|name| self.value(name))
    }

    /// Whether the environment has the settings of this process, and no entry of LD_PRELOAD.
    pub(crate) fn lacks_preload(&self) -> bool {
        self.value(PRELOAD).is_none() && config::is_same_for(|name| self.value(name))
    }

    /// The value of a variable in the program's environment.
    fn value(&self, name: &str) -> Option<&OsStr> {
        let mut values = self
            .environment
            .iter()
            .filter_map(|entry| entry.as_bytes().strip_prefix(name.as_bytes())?.strip_prefix(b"="));
        values.next().map(OsStr::from_bytes)
    }
}

/// Whether the library would see all calls of a program.
fn has_door(file: &Path) -> bool {
    match go_program::door(file, find) {
        Some(Ok(Door::Libc)) => !kernel_calls::makes_socket_calls(file),
        Some(Ok(Door::SystemCalls)) => takes_calls_over(),
        _ => false,
    }
}

/// Whether a program has a door by a loader.
fn door_by_loader(file: &Path) -> bool {
    match go_program::door(file, find) {
        Some(Ok(Door::LoadedSystemCalls)) => takes_calls_over(),
        Some(Ok(door)) => door.needs_loader(),
        _ => false,
    }
}

/// Whether the system calls of the next program may be replaced.
fn takes_calls_over() -> bool {
    // The next program inherits the prohibition.
    config::get().is_some_and(|config| config.go) && raw::may_change_instructions()
}

fn is_executable(file: &Path) -> bool {
    let found = file.metadata();
    found.is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// Whether the dynamic linker of a process with this process's user and mounts can map a library.
fn is_loadable(library: &Path) -> bool {
    let flags = File::open(library).and_then(|file| Ok(rustix::fs::fstatvfs(&file)?.f_flag));
    flags.is_ok_and(|flags| !flags.contains(StatVfsMountFlags::NOEXEC))
}

/// Whether this thread has asked a security module for another domain at exec, as `setexeccon` and
/// `aa_change_onexec` do. In the other domain the kernel may deny the library, or make the dynamic
/// linker load none.
fn changes_domain() -> bool {
    std::fs::read("/proc/thread-self/attr/exec").is_ok_and(|domain| !domain.is_empty())
}

/// Whether an entry of a list of libraries is this library. The dynamic linker replaces `$LIB` by a
/// directory. The path of this library in this process has the replacement already.
fn is_entry_of(entry: &[u8], library: &Path) -> bool {
    let path = Path::new(OsStr::from_bytes(entry));
    let ends = entry.windows(4).position(|word| word == b"$LIB").and_then(|at| {
        let (start, end) = (entry.get(..at)?, entry.get(at + 4..)?);
        let text = library.as_os_str().as_bytes();
        Some(text.starts_with(start) && text.ends_with(end))
    });
    path == library || ends == Some(true) || is_same_file(path, library)
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let (Ok(one), Ok(other)) = (one.metadata(), other.metadata()) else { return false };
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// A program found in the same way as by `execvp`.
fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(name.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|file| is_executable(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_with_a_directory_that_the_linker_chooses_is_the_library() {
        let library = Path::new("/run/smc/preload/lib/x86_64-linux-gnu/libsmc_preload.so");
        for (entry, is_ours) in [
            ("/run/smc/preload/$LIB/libsmc_preload.so", true),
            ("/run/smc/preload/lib/x86_64-linux-gnu/libsmc_preload.so", true),
            ("/usr/$LIB/libsmc_preload.so", false),
            ("/run/smc/preload/$LIB/libjemalloc.so.2", false),
            ("libsmc_preload.so", false),
            ("", false),
        ] {
            assert_eq!(is_entry_of(entry.as_bytes(), library), is_ours, "{entry}");
        }
    }
}
