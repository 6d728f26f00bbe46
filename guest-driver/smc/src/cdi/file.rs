// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files for an engine: written atomically, and readable whatever the umask.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Writes a file readable for everybody, and makes its directory. A concurrent reader sees the old
/// file or the new one. A FIFO or a device is written directly.
///
/// # Errors
/// The file cannot be written: the old one is unchanged.
pub(super) fn write(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let is_special = |found: fs::Metadata| !found.is_file();
    if fs::metadata(file).is_ok_and(is_special) {
        // Opening a FIFO without a reader fails instead of blocking.
        let mut options = File::options();
        return options.write(true).custom_flags(libc::O_NONBLOCK).open(file)?.write_all(bytes);
    }
    // The target of a link.
    let file = &fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let directory = match file.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    make_directory(directory)?;
    let name = file.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    // Engines read names ending in .json or .yaml, so the temporary name has another ending.
    let new = directory.join(format!(".{name}.{}.new", std::process::id()));
    let written = write_new(&new, bytes).and_then(|()| fs::rename(&new, file));
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).open(path)?;
    file.set_permissions(Permissions::from_mode(0o644))?;
    file.write_all(bytes)?;
    // A full disk is reported here at the latest.
    file.sync_all()
}

/// Makes a directory and its missing parents, readable for everybody.
fn make_directory(directory: &Path) -> io::Result<()> {
    let missing: Vec<PathBuf> = directory
        .ancestors()
        .take_while(|path| *path != Path::new("") && !path.exists())
        .map(Path::to_owned)
        .collect();
    for path in missing.iter().rev() {
        fs::create_dir(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o755))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else() {
        let own = smc_test_support::TestDir::new();
        let place = own.path("cdi");
        let file = place.join("a/b.json");
        write(&file, b"old").unwrap();
        for path in [&file, &place, &place.join("a")] {
            let mode = fs::metadata(path).unwrap().permissions().mode();
            let wanted = if path == &file { 0o100644 } else { 0o40755 };
            assert_eq!(mode, wanted, "{path:?}");
        }
        assert!(write(&file.join("c"), b"new").is_err());
        assert!(write(Path::new("/dev/full"), b"new").is_err());
        assert_eq!(fs::read(&file).unwrap(), b"old");
        write(&file, b"new").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(fs::read_dir(place.join("a")).unwrap().count(), 1);
    }
}
