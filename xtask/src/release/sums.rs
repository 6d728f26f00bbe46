// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The checksums of a release, in the format of sha256sum, and their signature.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::tool::{self, ToolError, at, wrong};

const SUMS: &str = "SHA256SUMS";

/// The SHA-256 of a file, in hex, and the number of its bytes.
///
/// # Errors
/// The file cannot be read.
pub(super) fn hash(path: &Path) -> Result<(String, u64), ToolError> {
    let mut file = File::open(path).map_err(at(path))?;
    let mut hash = Sha256::new();
    let (mut buffer, mut len) = (vec![0; 1 << 16], 0);
    loop {
        let got = file.read(&mut buffer).map_err(at(path))?;
        if got == 0 {
            break;
        }
        hash.update(&buffer[..got]);
        len += got as u64;
    }
    let mut text = String::new();
    for byte in hash.finalize() {
        let _ = write!(text, "{byte:02x}");
    }
    Ok((text, len))
}

/// The files of a directory and of its directories, by path.
///
/// # Errors
/// A directory cannot be read.
pub(super) fn files(place: &Path) -> Result<Vec<PathBuf>, ToolError> {
    let mut found = Vec::new();
    let mut left = vec![place.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).map_err(at(&directory))? {
            let path = entry.map_err(at(&directory))?.path();
            if path.is_dir() { left.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    Ok(found)
}

/// Whether a key is a file, so one of SSH; any other is an id for GnuPG.
pub(super) fn is_file(key: &str) -> bool {
    Path::new(key).is_file()
}

/// Checks that a key is there.
///
/// # Errors
/// There is neither a file of this name, nor a private key of GnuPG.
pub(super) fn check_key(key: &str) -> Result<(), ToolError> {
    if is_file(key) {
        return Ok(());
    }
    if key.contains('/') {
        return Err(wrong("--key", format!("there is no file {key:?}")));
    }
    let mut gpg = Command::new("gpg");
    gpg.args(["--batch", "--list-secret-keys", "--", key]);
    tool::output(gpg).map(drop).map_err(|error| wrong("--key", format!("{key:?}: {error}")))
}

/// Writes the checksums of all files of a directory beside the files, and signs them.
///
/// # Errors
/// A file cannot be read or written, or the key cannot sign.
pub(super) fn write(place: &Path, key: Option<&str>) -> Result<(), ToolError> {
    let mut text = String::new();
    for path in files(place)? {
        let name = path.strip_prefix(place).unwrap_or(&path).display();
        let _ = writeln!(text, "{}  {name}", hash(&path)?.0);
    }
    let sums = place.join(SUMS);
    fs::write(&sums, text).map_err(at(&sums))?;
    let Some(key) = key else {
        eprintln!("NOT SIGNED: --key names no key");
        return Ok(());
    };
    let mut sign = if is_file(key) {
        let mut sign = Command::new("ssh-keygen");
        sign.args(["-q", "-Y", "sign", "-n", "file", "-f", key]);
        sign
    } else {
        let mut sign = Command::new("gpg");
        sign.args(["--batch", "--yes", "--armor", "--detach-sign", "--local-user", key]);
        sign
    };
    tool::succeed(sign.arg(&sums))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn succeeds(command: &str, place: &Path) -> bool {
        let output = Command::new("sh").args(["-ec", command]).current_dir(place).output();
        output.unwrap().status.success()
    }

    fn release() -> smc_test_support::TestDir {
        let place = smc_test_support::TestDir::new();
        fs::create_dir(place.path("crates")).unwrap();
        fs::write(place.path("crates/b"), "b").unwrap();
        fs::write(place.path("a"), "a").unwrap();
        place
    }

    #[test]
    fn sha256sum_finds_a_changed_file() {
        let place = release();
        write(&place, None).unwrap();
        let text = fs::read_to_string(place.path(SUMS)).unwrap();
        let names: Vec<&str> = text.lines().filter_map(|line| line.split("  ").nth(1)).collect();
        assert_eq!(names, ["a", "crates/b"]);
        assert!(succeeds("sha256sum --check --quiet SHA256SUMS", &place));
        fs::write(place.path("crates/b"), "c").unwrap();
        assert!(!succeeds("sha256sum --check --quiet SHA256SUMS", &place));
    }

    #[test]
    fn a_signature_is_of_the_checksums_and_of_the_key() {
        if !succeeds("command -v ssh-keygen", Path::new("/")) {
            smc_test_support::leave_out("there is no ssh-keygen");
            return;
        }
        let (place, keys) = (release(), smc_test_support::TestDir::new());
        for name in ["own", "other"] {
            let key = keys.path(name).display().to_string();
            assert!(succeeds(&format!("ssh-keygen -q -t ed25519 -N '' -f {key}"), &place));
            let list = "awk '{ print \"signer\", $1, $2 }'";
            assert!(succeeds(&format!("{list} {key}.pub >{key}.list"), &place));
        }
        let key = keys.path("own").display().to_string();
        check_key(&key).unwrap();
        write(&place, Some(&key)).unwrap();
        let verify = |name: &str| {
            let list = keys.path(name).display().to_string();
            let verify = "ssh-keygen -Y verify -I signer -n file -s SHA256SUMS.sig";
            succeeds(&format!("{verify} -f {list}.list <SHA256SUMS"), &place)
        };
        assert!(verify("own") && !verify("other"));
        fs::write(place.path(SUMS), "0  a\n").unwrap();
        assert!(!verify("own"));
    }

    #[test]
    fn a_missing_file_of_a_key_is_named() {
        let refused = check_key("/nowhere/key").unwrap_err();
        assert_eq!(refused.to_string(), "--key: there is no file \"/nowhere/key\"");
    }
}
