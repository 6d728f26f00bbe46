//! Where the library is.

use std::path::PathBuf;

/// Its file name.
const NAME: &str = "libsmc_preload.so";

/// The library: named by SMC_PRELOAD, beside this program, in the library directory beside that, or
/// where the system has libraries.
pub(super) fn find() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("SMC_PRELOAD").filter(|named| !named.is_empty()) {
        return Some(PathBuf::from(named)).filter(|named| named.is_file());
    }
    let mut places = Vec::new();
    if let Ok(program) = std::env::current_exe()
        && let Some(dir) = program.parent()
    {
        places.push(dir.to_owned());
        places.push(dir.join("deps"));
        places.push(dir.join("../lib"));
        places.push(dir.join("../lib/smc"));
    }
    let machine = std::env::consts::ARCH;
    places.push(PathBuf::from(format!("/usr/lib/{machine}-linux-gnu")));
    places.extend(["/usr/local/lib", "/usr/lib64", "/usr/lib"].map(PathBuf::from));
    places.into_iter().map(|place| place.join(NAME)).find(|path| path.is_file())
}
