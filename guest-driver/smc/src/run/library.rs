//! Finds the library.

use std::path::PathBuf;

/// Its file name.
const NAME: &str = "libsmc_preload.so";

/// The library: named by SMC_PRELOAD, beside this program, in the library directory beside that, or
/// where the system has libraries.
pub(super) fn find() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("SMC_PRELOAD").filter(|named| !named.is_empty()) {
        return Some(PathBuf::from(named)).filter(|named| named.is_file());
    }
    let mut directories = Vec::new();
    if let Ok(program) = std::env::current_exe()
        && let Some(dir) = program.parent()
    {
        directories.push(dir.to_owned());
        directories.push(dir.join("deps"));
        directories.push(dir.join("../lib"));
        directories.push(dir.join("../lib/smc"));
    }
    let machine = std::env::consts::ARCH;
    directories.push(PathBuf::from(format!("/usr/lib/{machine}-linux-gnu")));
    directories.extend(["/usr/local/lib", "/usr/lib64", "/usr/lib"].map(PathBuf::from));
    directories.into_iter().map(|directory| directory.join(NAME)).find(|path| path.is_file())
}
