//! Finds the library.

use std::path::PathBuf;

use thiserror::Error;

/// Its file name.
const NAME: &str = "libsmc_preload.so";

/// The library is not there.
#[derive(Debug, Error)]
pub(super) enum NoLibrary {
    /// The file that SMC_PRELOAD names.
    #[error("SMC_PRELOAD names {0}, which does not exist")]
    Named(PathBuf),
    /// None of the directories has it.
    #[error(
        "{NAME} is in none of {}; \"cargo build --release -p smc-preload\" builds it into \
         target/release, and SMC_PRELOAD may name it", list(.0)
    )]
    Nowhere(Vec<PathBuf>),
}

fn list(directories: &[PathBuf]) -> String {
    directories.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// The library: named by SMC_PRELOAD, beside this program, in the library directory beside that, or
/// where the system has libraries.
///
/// # Errors
/// It is in none of these places.
pub(super) fn find() -> Result<PathBuf, NoLibrary> {
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
