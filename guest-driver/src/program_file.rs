// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether a library can be loaded into a program by LD_PRELOAD, by the headers of its file.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a library cannot be loaded into a program, or would miss its calls.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Obstacle {
    /// The program has no dynamic linker.
    #[error("it is a static program, into which no library can be loaded")]
    Static,
    /// The program is written in Go.
    #[error("it is written in Go, whose programs make system calls without libc")]
    Go,
    /// The program is made for another libc.
    #[error("it is made for another libc (its dynamic linker is {0})")]
    OtherLibc(String),
    /// The program is made for another machine.
    #[error("it is a program for another kind of machine")]
    OtherMachine,
    /// The dynamic linker ignores LD_PRELOAD.
    #[error(
        "it has more rights than its user (setuid, or file capabilities), so the dynamic \
             linker loads nothing into it"
    )]
    Privileged,
}

/// The most scripts leading to scripts.
const DEPTH: usize = 4;

/// The obstacle to a library in a program. `None`: the file does not tell: it cannot be read or is
/// neither a program nor a script with a `#!`. `find`: the search of a shell for a program named by
/// `env` in a script.
pub fn obstacle(
    program: &Path,
    find: impl Fn(&OsStr) -> Option<PathBuf>,
) -> Option<Result<(), Obstacle>> {
    let (file, program) = file_of(program, find)?;
    if is_privileged(&file, &program) {
        return Some(Err(Obstacle::Privileged));
    }
    elf(&file)
}

/// Whether a program is for another kind of machine than this library, such as a 32-bit one. `false`
/// also if the file does not tell. `find`: as for [`obstacle`].
pub fn is_for_other_machine(program: &Path, find: impl Fn(&OsStr) -> Option<PathBuf>) -> bool {
    let header = file_of(program, find).and_then(|(file, _)| bytes::<64>(&file, 0));
    header.is_some_and(|header| header.starts_with(MAGIC) && !is_for_this_machine(&header))
}

/// The file of a program, or of the interpreter if it is a script.
pub(crate) fn file_of(
    program: &Path,
    find: impl Fn(&OsStr) -> Option<PathBuf>,
) -> Option<(File, PathBuf)> {
    let mut program = program.to_owned();
    for _ in 0..DEPTH {
        let mut file = File::open(&program).ok()?;
        let mut start = [0u8; 256];
        let n = file.read(&mut start).ok()?;
        let start = start.get(..n)?;
        if let Some(line) = start.strip_prefix(b"#!") {
            let line = line.split(|byte| *byte == b'\n').next()?;
            let line = String::from_utf8_lossy(line);
            let mut words = line.split_whitespace();
            let interpreter = PathBuf::from(words.next()?);
            program = match interpreter.file_name() == Some(OsStr::new("env")) {
                true => find(OsStr::new(words.find(|word| !word.starts_with('-'))?))?,
                false => interpreter,
            };
            continue;
        }
        return Some((file, program));
    }
    None
}

fn is_privileged(file: &File, path: &Path) -> bool {
    let Ok(data) = file.metadata() else { return false };
    let user = ism_sys::effective_user();
    let group = ism_sys::effective_group();
    let by_mode = data.mode() & 0o4000 != 0 && data.uid() != user
        || data.mode() & 0o2000 != 0 && data.gid() != group;
    let mut capability = [0u8; 64];
    let by_capability =
        user != 0 && rustix::fs::getxattr(path, "security.capability", &mut capability).is_ok();
    by_mode || by_capability
}

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const MACHINE: u16 = 0;

/// The beginning of an ELF file.
const MAGIC: &[u8] = b"\x7fELF";

fn is_for_this_machine(header: &[u8; 64]) -> bool {
    header.get(4..6) == Some(&[2, 1]) && word::<2>(header, 18) == Some(u64::from(MACHINE))
}

/// The most program headers and sections.
const MOST: u64 = 4096;

fn bytes<const N: usize>(file: &File, at: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    file.read_exact_at(&mut bytes, at).ok().map(|()| bytes)
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let part = bytes.get(at..at + N)?;
    Some(part.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

/// Reads the headers of a 64-bit little-endian ELF file.
fn elf(file: &File) -> Option<Result<(), Obstacle>> {
    let header: [u8; 64] = bytes(file, 0)?;
    if !header.starts_with(MAGIC) {
        return None;
    }
    if !is_for_this_machine(&header) {
        return Some(Err(Obstacle::OtherMachine));
    }
    if is_go(file) {
        return Some(Err(Obstacle::Go));
    }
    let (start, size, n) =
        (word::<8>(&header, 32)?, word::<2>(&header, 54)?, word::<2>(&header, 56)?);
    for i in 0..n.min(MOST) {
        let entry: [u8; 56] = bytes(file, start.checked_add(i * size)?)?;
        // PT_INTERP: the path of the dynamic linker.
        if word::<4>(&entry, 0)? == 3 {
            let len = word::<8>(&entry, 32)?.min(256) as usize;
            let mut path = vec![0u8; len];
            file.read_exact_at(&mut path, word::<8>(&entry, 8)?).ok()?;
            let path = String::from_utf8_lossy(path.split(|byte| *byte == 0).next()?).into_owned();
            return Some(if is_of_glibc(&path) { Ok(()) } else { Err(Obstacle::OtherLibc(path)) });
        }
    }
    Some(Err(Obstacle::Static))
}

/// Whether a dynamic linker is glibc's.
pub(crate) fn is_of_glibc(linker: &str) -> bool {
    linker.rsplit('/').next().is_some_and(|name| name.starts_with("ld-linux"))
}

/// Whether a dynamic linker is musl's, for x86-64.
pub(crate) fn is_of_musl(linker: &str) -> bool {
    linker.ends_with("/ld-musl-x86_64.so.1")
}

/// Whether a program or library is written in Go.
pub(crate) fn is_go(file: &File) -> bool {
    section(file, b".go.buildinfo").is_some()
}

/// Bytes of the header of a section.
const HEADER: u64 = 64;

/// A section of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Section {
    pub(crate) address: u64,
    offset: u64,
    size: u64,
}

impl Section {
    pub(crate) fn read(self, file: &File) -> Option<Vec<u8>> {
        let end = self.offset.checked_add(self.size)?;
        if end > file.metadata().ok()?.len() {
            return None;
        }
        let mut bytes = vec![0u8; usize::try_from(self.size).ok()?];
        file.read_exact_at(&mut bytes, self.offset).ok()?;
        Some(bytes)
    }
}

/// The section with a name.
pub(crate) fn section(file: &File, name: &[u8]) -> Option<Section> {
    let header: [u8; 64] = bytes(file, 0).filter(|header: &[u8; 64]| header.starts_with(MAGIC))?;
    let (start, size) = (word::<8>(&header, 40)?, word::<2>(&header, 58)?);
    let (n, names) = (word::<2>(&header, 60)?, word::<2>(&header, 62)?);
    if size != HEADER {
        return None;
    }
    let table: [u8; HEADER as usize] = bytes(file, start.checked_add(names * size)?)?;
    let (at, len) = (word::<8>(&table, 24)?, word::<8>(&table, 32)?.min(1 << 20));
    let mut text = vec![0u8; len as usize];
    file.read_exact_at(&mut text, at).ok()?;
    // One read for the headers: checking a program delays its start.
    let mut sections = vec![0u8; (n.min(MOST) * size) as usize];
    file.read_exact_at(&mut sections, start).ok()?;
    for section in sections.chunks_exact(HEADER as usize) {
        let from = word::<4>(section, 0)? as usize;
        if text.get(from..).is_some_and(|rest| {
            rest.strip_prefix(name).is_some_and(|rest| rest.first() == Some(&0))
        }) {
            return Some(Section {
                address: word::<8>(section, 16)?,
                offset: word::<8>(section, 24)?,
                size: word::<8>(section, 32)?,
            });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(name: &OsStr) -> Option<PathBuf> {
        Some(Path::new("/bin").join(name))
    }

    fn of(program: &Path) -> Option<Result<(), Obstacle>> {
        obstacle(program, find)
    }

    #[test]
    fn an_ordinary_program_has_no_obstacle() {
        assert_eq!(of(&std::env::current_exe().unwrap()), Some(Ok(())));
        assert_eq!(of(Path::new("/bin/sh")), Some(Ok(())));
    }

    #[test]
    fn sections_are_found_by_few_reads() {
        let file = File::open(std::env::current_exe().unwrap()).unwrap();
        let reads = || {
            let text = std::fs::read_to_string("/proc/thread-self/io").ok()?;
            let line = text.lines().find_map(|line| line.strip_prefix("syscr: "))?;
            line.parse::<u64>().ok()
        };
        let before = reads();
        assert!(section(&file, b".go.buildinfo").is_none());
        let after = reads();
        assert!(section(&file, b".text").is_some());
        // A kernel may count no reads. The count itself takes few reads.
        if let (Some(before), Some(after)) = (before, after) {
            assert!(after - before < 10, "{before} to {after}");
        }
    }

    #[test]
    fn a_script_is_what_its_interpreter_is() {
        let dir = smc_test_support::TestDir::new();
        let script = dir.join("script");
        std::fs::write(&script, "#!/usr/bin/env sh\n").unwrap();
        assert_eq!(of(&script), Some(Ok(())));
        let linked = dir.join("static");
        // A header without program headers, so without a dynamic linker.
        let mut header = vec![0u8; 64];
        header[..6].copy_from_slice(b"\x7fELF\x02\x01");
        header[18..20].copy_from_slice(&MACHINE.to_le_bytes());
        std::fs::write(&linked, &header).unwrap();
        std::fs::write(&script, format!("#!{}\n", linked.display())).unwrap();
        assert_eq!(of(&script), Some(Err(Obstacle::Static)));
        header[18] ^= 1;
        std::fs::write(&linked, &header).unwrap();
        assert_eq!(of(&linked), Some(Err(Obstacle::OtherMachine)));
        assert!(is_for_other_machine(&script, find), "by its interpreter");
        assert!(!is_for_other_machine(Path::new("/bin/sh"), find));
        header.truncate(30);
        std::fs::write(&linked, &header).unwrap();
        assert_eq!(of(&linked), None);
    }
}
