// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cgroup of this process.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::Unavailable;

/// Opens the cgroup of this process, or the named cgroup.
pub(super) fn open(named: Option<&Path>) -> Result<(File, PathBuf), Unavailable> {
    let path = match named {
        Some(path) => path.to_owned(),
        None => own()?,
    };
    match File::open(&path) {
        Ok(file) => Ok((file, path)),
        Err(error) => Err(Unavailable::Cgroup { path, error }),
    }
}

/// Opens a named cgroup, unless it is the root.
pub(super) fn open_below_root(cgroup: &Path) -> Result<(File, PathBuf), Unavailable> {
    let (directory, path) = open(Some(cgroup))?;
    // Every cgroup but the root has this file.
    if !path.join("cgroup.type").exists() {
        return Err(Unavailable::NotGrantable { path });
    }
    Ok((directory, path))
}

/// A cgroup for some programs, below the cgroup of this process. Dropping the value removes the cgroup, if
/// no process is left in there.
#[derive(Debug)]
pub(super) struct Temporary(PathBuf);

impl Temporary {
    /// Makes a cgroup with this name.
    pub(super) fn make(name: &str) -> Result<Temporary, Unavailable> {
        let path = own()?.join(name);
        // A killed process left its cgroup behind. Only an empty one goes.
        let _ = fs::remove_dir(&path);
        match fs::create_dir(&path) {
            Ok(()) => Ok(Temporary(path)),
            Err(error) => Err(Unavailable::Cgroup { path, error }),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Opens the directory.
    pub(super) fn open(&self) -> Result<File, Unavailable> {
        open(Some(&self.0)).map(|(directory, _)| directory)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "a cgroup stays");
        }
    }
}

fn own() -> Result<PathBuf, Unavailable> {
    let membership = fs::read("/proc/self/cgroup").unwrap_or_default();
    find(&mounts(), &membership).ok_or(Unavailable::NoCgroup)
}

/// The directory of the cgroup of another process.
pub(super) fn of_process(process: u32) -> Result<PathBuf, Unavailable> {
    let path = PathBuf::from(format!("/proc/{process}/cgroup"));
    let membership = fs::read(&path).map_err(|error| Unavailable::Cgroup { path, error })?;
    find(&mounts(), &membership).ok_or(Unavailable::NoCgroup)
}

fn mounts() -> Vec<u8> {
    fs::read("/proc/self/mountinfo").unwrap_or_default()
}

/// The directory of the process's cgroup: the path of `membership` below a mount of cgroup v2.
fn find(mounts: &[u8], membership: &[u8]) -> Option<PathBuf> {
    let own = lines(membership).find_map(|line| line.strip_prefix(b"0::"))?;
    let own = PathBuf::from(OsString::from_vec(own.to_vec()));
    lines(mounts).find_map(|line| {
        let fields: Vec<_> = line.split(|byte| *byte == b' ').collect();
        // id, parent, device, root, mount point, options, any number of tags, "-", type
        let kind = fields.iter().position(|field| field == b"-")? + 1;
        if *fields.get(kind)? != b"cgroup2" {
            return None;
        }
        let root = PathBuf::from(unescape(fields.get(3)?));
        let mount_point = PathBuf::from(unescape(fields.get(4)?));
        // A mount may show a part of the tree only.
        Some(mount_point.join(own.strip_prefix(root).ok()?))
    })
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|byte| *byte == b'\n')
}

/// Spaces and the like are written as three octal digits.
fn unescape(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let digits = (*first == b'\\').then(|| tail.get(..3)).flatten();
        let byte = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match byte {
            Some(byte) => {
                out.push(byte);
                rest = tail.get(3..).unwrap_or_default();
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_cgroup_of_a_service() {
        let mounts = b"24 30 0:22 / /proc rw shared:5 - proc proc rw\n\
            35 34 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        let found = find(mounts, b"0::/system.slice/redis.service\n");
        assert_eq!(found, Some("/sys/fs/cgroup/system.slice/redis.service".into()));
    }

    #[test]
    fn finds_version_2_beside_version_1() {
        let mounts = b"35 34 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            36 34 0:31 / /sys/fs/cgroup/uni\\040fied rw - cgroup2 cgroup2 rw\n";
        let found = find(mounts, b"4:memory:/elsewhere\n0::/\n");
        assert_eq!(found, Some("/sys/fs/cgroup/uni fied/".into()));
    }

    #[test]
    fn a_mount_of_a_part_counts_from_there() {
        let mounts = b"36 34 0:31 /lxc/one /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(find(mounts, b"0::/lxc/one/app\n"), Some("/sys/fs/cgroup/app".into()));
        assert_eq!(find(mounts, b"0::/lxc/two\n"), None);
    }

    #[test]
    fn without_version_2_there_is_none() {
        let mounts = b"35 34 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        assert_eq!(find(mounts, b"4:memory:/\n0::/\n"), None);
        assert_eq!(find(b"", b""), None);
    }
}
