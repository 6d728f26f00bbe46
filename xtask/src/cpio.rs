// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The archive format of an initramfs: cpio "newc"
//! (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::tool::{ToolError, at};

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// Files of a system to be, by path without a leading slash.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    entries: BTreeMap<String, (u32, Vec<u8>)>,
}

impl Tree {
    /// Adds a directory, and its parents.
    pub(crate) fn directory(&mut self, path: &str) {
        let path = path.trim_matches('/');
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            if end > 0 {
                let entry = self.entries.entry(path[..end].to_owned());
                entry.or_insert((DIRECTORY, Vec::new()));
            }
        }
    }

    /// Adds an executable file.
    pub(crate) fn file(&mut self, path: &str, bytes: Vec<u8>) {
        self.add(path, PROGRAM, bytes);
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.add(path, LINK, target.as_bytes().to_vec());
    }

    /// Adds a file, a link, or a directory with all of its files. Sockets and devices are left out.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn copy(&mut self, from: &Path, path: &str) -> Result<(), ToolError> {
        let kind = fs::symlink_metadata(from).map_err(at(from))?.file_type();
        if kind.is_symlink() {
            let target = fs::read_link(from).map_err(at(from))?;
            self.link(path, &target.to_string_lossy());
        } else if kind.is_file() {
            self.file(path, fs::read(from).map_err(at(from))?);
        } else if kind.is_dir() {
            self.directory(path);
            for entry in fs::read_dir(from).map_err(at(from))? {
                let entry = entry.map_err(at(from))?;
                self.copy(&entry.path(), &format!("{path}/{}", entry.file_name().display()))?;
            }
        }
        Ok(())
    }

    fn add(&mut self, path: &str, mode: u32, bytes: Vec<u8>) {
        let path = path.trim_matches('/');
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent);
        }
        self.entries.insert(path.to_owned(), (mode, bytes));
    }

    /// Whether the archive has an entry of this path.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.entries.contains_key(path.trim_matches('/'))
    }

    /// The archive. The same tree gives the same bytes.
    pub(crate) fn archive(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (number, (path, (mode, bytes))) in (1..).zip(&self.entries) {
            entry(&mut out, number, path, *mode, bytes);
        }
        entry(&mut out, 0, "TRAILER!!!", 0, &[]);
        out
    }
}

fn entry(out: &mut Vec<u8>, number: usize, path: &str, mode: u32, bytes: &[u8]) {
    let links = if mode == DIRECTORY { 2 } else { 1 };
    let (size, name_size) = (bytes.len(), path.len() + 1);
    out.extend_from_slice(b"070701");
    // inode, mode, uid, gid, links, mtime, size, device and rdevice (major, minor), name, checksum
    for field in [number, mode as usize, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0] {
        out.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    out.extend_from_slice(path.as_bytes());
    out.push(0);
    pad(out);
    out.extend_from_slice(bytes);
    pad(out);
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_a_header_a_name_and_its_bytes() {
        let mut tree = Tree::default();
        tree.file("/init", b"hello".to_vec());
        let archive = tree.archive();
        let field = |n: usize| std::str::from_utf8(&archive[6 + 8 * n..14 + 8 * n]).unwrap();
        assert_eq!(&archive[..6], b"070701");
        let fields = [(0, "00000001"), (1, "000081ed"), (4, "00000001"), (6, "00000005")];
        for (n, value) in fields.into_iter().chain([(11, "00000005"), (12, "00000000")]) {
            assert_eq!(field(n), value, "field {n}");
        }
        // 110 bytes of header; the name with its end makes 115, padded to 116.
        assert_eq!(&archive[110..124], b"init\0\0hello\0\0\0");
        assert!(archive[124..].starts_with(b"070701") && archive.ends_with(b"TRAILER!!!\0\0\0\0"));
        assert_eq!(archive.len() % 4, 0);
    }

    #[test]
    fn parents_come_before_their_children() {
        let mut tree = Tree::default();
        tree.link("bin/sh", "busybox");
        tree.file("/lib/x/y/libc.so", Vec::new());
        tree.directory("/proc/");
        let paths: Vec<&str> = tree.entries.keys().map(String::as_str).collect();
        assert_eq!(paths, ["bin", "bin/sh", "lib", "lib/x", "lib/x/y", "lib/x/y/libc.so", "proc"]);
        assert!(tree.has("/lib/x") && !tree.has("/lib/z"));
    }

    #[test]
    fn a_copied_directory_has_its_files_and_links() {
        let place = smc_test_support::TestDir::new();
        fs::create_dir_all(place.path("usr/lib")).unwrap();
        fs::write(place.path("usr/lib/libc.so.6"), "libc").unwrap();
        std::os::unix::fs::symlink("/usr/lib", place.path("lib")).unwrap();
        let mut tree = Tree::default();
        for name in ["usr", "lib"] {
            tree.copy(&place.path(name), name).unwrap();
        }
        let of = |path: &str| tree.entries[path].clone();
        assert_eq!(of("usr/lib/libc.so.6"), (PROGRAM, b"libc".to_vec()));
        assert_eq!(of("lib"), (LINK, b"/usr/lib".to_vec()));
        assert_eq!(tree.entries.len(), 4);
        assert!(tree.copy(&place.path("none"), "none").is_err());
    }
}
