// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds the library.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// File name of the library.
const NAME: &str = "libsmc_preload.so";

/// Values of $LIB in glibc, below /usr.
pub(crate) const LIB: [&str; 3] = [DEBIAN_LIB, "lib64", "lib"];
#[cfg(target_arch = "aarch64")]
const DEBIAN_LIB: &str = "lib/aarch64-linux-gnu";
#[cfg(not(target_arch = "aarch64"))]
const DEBIAN_LIB: &str = "lib/x86_64-linux-gnu";

/// The library is not there.
#[derive(Debug, Error)]
pub(super) enum NoLibrary {
    /// The machine has no port of the library.
    #[error("{NAME} is for x86_64 and aarch64, and not for {}", std::env::consts::ARCH)]
    NotForMachine,
    /// The file named by SMC_PRELOAD.
    #[error("SMC_PRELOAD names {0}, which does not exist")]
    Named(PathBuf),
    /// The dynamic linker separates libraries by such characters.
    #[error("the library is {0:?}, and a path with a blank or a colon cannot be loaded")]
    Separated(PathBuf),
    /// The library is in none of the directories.
    #[error(
        "{NAME} is in none of {}; \"cargo build --release -p smc-preload\" builds it into \
         target/release, and SMC_PRELOAD may name it", list(.0)
    )]
    Nowhere(Vec<PathBuf>),
}

fn list(directories: &[PathBuf]) -> String {
    directories.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// The absolute path of the library, valid in every working directory.
///
/// # Errors
/// The library is nowhere, or its path is unfit for the dynamic linker.
pub(super) fn find() -> Result<PathBuf, NoLibrary> {
    let found = find_file()?;
    // Without a slash, the dynamic linker would look for a name where libraries are.
    let found = std::path::absolute(&found).unwrap_or(found);
    let separates = |byte: &u8| byte.is_ascii_whitespace() || *byte == b':';
    match found.as_os_str().as_bytes().iter().any(separates) {
        true => Err(NoLibrary::Separated(found)),
        false => Ok(found),
    }
}

/// The library: named by SMC_PRELOAD, beside this program, in the library directory beside this
/// program's directory, or in a library directory of the system.
///
/// # Errors
/// The library is in none of these places.
fn find_file() -> Result<PathBuf, NoLibrary> {
    if !cfg!(any(target_arch = "aarch64", target_arch = "x86_64")) {
        return Err(NoLibrary::NotForMachine);
    }
    if let Some(named) = std::env::var_os("SMC_PRELOAD").filter(|named| !named.is_empty()) {
        let named = PathBuf::from(named);
        return if named.is_file() { Ok(named) } else { Err(NoLibrary::Named(named)) };
    }
    let mut directories = Vec::new();
    if let Ok(program) = std::env::current_exe()
        && let Some(dir) = program.parent()
    {
        directories.push(dir.to_owned());
        directories.push(dir.join("deps"));
        if let Some(parent) = dir.parent() {
            directories.extend(["lib", "lib/smc"].map(|name| parent.join(name)));
        }
    }
    let machine = std::env::consts::ARCH;
    directories.push(PathBuf::from(format!("/usr/lib/{machine}-linux-gnu")));
    directories.extend(["/usr/local/lib", "/usr/lib64", "/usr/lib"].map(PathBuf::from));
    match directories.iter().map(|directory| directory.join(NAME)).find(|path| path.is_file()) {
        Some(found) => Ok(found),
        None => Err(NoLibrary::Nowhere(directories)),
    }
}

/// LD_PRELOAD with the library before all others.
pub(super) fn preload(library: &Path) -> OsString {
    let mut preload = for_glibc(library, Path::new("/usr"));
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    preload
}

/// A path understood by glibc only. The program may start others, for another libc: the linker of
/// musl would end such a program because of a library it cannot link. With $LIB in the path, musl
/// finds no file, and continues without a message.
fn for_glibc(library: &Path, usr: &Path) -> OsString {
    if !library.is_absolute() || !LIB.iter().any(|lib| usr.join(lib).is_dir()) {
        return library.into();
    }
    // More levels than there are lead to the root.
    let mut path = OsString::from("/usr/$LIB/../../../../../..");
    path.push(library);
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_leads_through_a_directory_that_only_glibc_finds() {
        let library = Path::new("/opt/smc/libsmc_preload.so");
        let expected = "/usr/$LIB/../../../../../../opt/smc/libsmc_preload.so";
        assert_eq!(for_glibc(library, Path::new("/usr")), expected);
        for (library, usr) in [("/opt/x.so", "/nonexistent"), ("x.so", "/usr")] {
            assert_eq!(for_glibc(Path::new(library), Path::new(usr)), library);
        }
    }
}
