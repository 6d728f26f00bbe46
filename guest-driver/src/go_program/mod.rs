// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs written in Go: the places of their system calls, and the door of a program to the library.
//!
//! Go calls the kernel by a few functions of its own, written in assembly. The functions are found by
//! the table of functions, and must all be known: one unknown function with a system call on sockets
//! is an obstacle.

mod obstacle;
mod sites;
mod table;

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::kernel_calls::Object;
use crate::program_file::{self, Obstacle};

pub use obstacle::GoObstacle;
pub use sites::Site;

/// The way of a program's calls into the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// The program calls functions of libc.
    Libc,
    /// The program is written in Go, and makes system calls by functions of its own.
    SystemCalls,
    /// Variant of [`Door::SystemCalls`] for a program without a dynamic linker.
    LoadedSystemCalls,
    /// The program is static, not written in Go, and its system calls are refused by the kernel for the
    /// library.
    Dispatch,
    /// Variant of [`Door::Dispatch`] for a program whose dynamic linker is musl's.
    DispatchOfMusl,
}

impl Door {
    /// Whether the library comes by a loader.
    pub fn needs_loader(self) -> bool {
        matches!(self, Door::LoadedSystemCalls | Door::Dispatch | Door::DispatchOfMusl)
    }
}

/// Why a program has no door.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NoDoor {
    /// The headers of the file forbid a library.
    #[error(transparent)]
    File(Obstacle),
    /// The program is written in Go.
    #[error("it is written in Go, and {0}")]
    Go(GoObstacle),
    /// The user does not want the system calls to be taken over.
    #[error("it is written in Go (--go puts it on SMC)")]
    Unwanted,
    /// Variant of [`NoDoor::Unwanted`] for another static program.
    #[error("it is a static program (--system-calls puts it on SMC)")]
    UnwantedStatic,
    /// Variant of [`NoDoor::Unwanted`] for a program linked with musl.
    #[error("it is linked with musl (--system-calls puts it on SMC)")]
    UnwantedMusl,
}

/// The door of a program. `None`: the file does not tell, as for [`program_file::obstacle`], whose
/// argument `find` is.
pub fn door(
    program: &Path,
    find: impl Fn(&OsStr) -> Option<PathBuf>,
) -> Option<Result<Door, NoDoor>> {
    match program_file::obstacle(program, &find)? {
        Ok(()) => Some(Ok(Door::Libc)),
        Err(Obstacle::Go) => {
            let (file, _) = program_file::file_of(program, find)?;
            let read = GoProgram::read(&file);
            let door = |program: GoProgram| match program.is_static {
                true => Door::LoadedSystemCalls,
                false => Door::SystemCalls,
            };
            Some(read.map(door).map_err(NoDoor::Go))
        }
        Err(Obstacle::Static) if cfg!(target_arch = "x86_64") => Some(Ok(Door::Dispatch)),
        Err(Obstacle::OtherLibc(linker)) if program_file::is_of_musl(&linker) => {
            Some(Ok(Door::DispatchOfMusl))
        }
        Err(obstacle) => Some(Err(NoDoor::File(obstacle))),
    }
}

/// The known versions of Go: 1.x. In each of them the functions for system calls have known names.
const VERSIONS: std::ops::RangeInclusive<u32> = 19..=27;

/// A program written in Go whose system calls are all at known places.
#[derive(Debug)]
pub struct GoProgram {
    /// The places of system calls.
    pub sites: Vec<Site>,
    /// Whether the threads of the program are libc's, as with cgo.
    pub has_libc: bool,
    /// Whether the program has no dynamic linker.
    pub is_static: bool,
    /// The lowest address of the file, before relocation.
    pub lowest: u64,
    /// The address of the program headers, before relocation.
    pub headers: u64,
}

impl GoProgram {
    /// Reads the file of a program written in Go. `None`: the file is something else.
    ///
    /// # Errors
    /// [`GoObstacle`]: not all places are known.
    pub fn of_file(file: &File) -> Option<Result<GoProgram, GoObstacle>> {
        program_file::is_go(file).then(|| GoProgram::read(file))
    }

    fn read(file: &File) -> Result<GoProgram, GoObstacle> {
        if !cfg!(target_arch = "x86_64") {
            return Err(GoObstacle::Machine);
        }
        let unreadable = || GoObstacle::Table("the file cannot be read");
        let object = Object::read(file).ok_or_else(unreadable)?;
        let linker = linker(&object);
        if let Some(linker) = linker.as_ref().filter(|linker| !program_file::is_of_glibc(linker)) {
            return Err(GoObstacle::OtherLinker(linker.clone()));
        }
        let has_libc = needs_libc(&object);
        let version = version(file, &object).unwrap_or_default();
        if !minor(&version).is_some_and(|minor| VERSIONS.contains(&minor)) {
            return Err(GoObstacle::Version(version));
        }
        let bytes = table_of(file).ok_or(GoObstacle::Table("it was not found"))?;
        let at = bytes.at;
        let bytes = bytes.bytes.get(bytes.skipped..).unwrap_or_default();
        let table = table::FunctionTable::new(bytes)?;
        let text =
            text_start(file, &object, bytes, at).ok_or(GoObstacle::Table("it has no address"))?;
        let sites = sites::find(&object, &table, text, has_libc)?;
        let own = text..text.saturating_add(u64::from(table.end()));
        if object.makes_socket_calls_outside(Some(&own)) != Some(false) {
            return Err(GoObstacle::OwnCalls);
        }
        let lowest = object.lowest().ok_or_else(unreadable)?;
        let headers = object.headers().ok_or_else(unreadable)?;
        Ok(GoProgram { sites, has_libc, is_static: linker.is_none(), lowest, headers })
    }
}

const PT_DYNAMIC: u64 = 2;
const PT_INTERP: u64 = 3;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
/// The most entries of a dynamic section.
const MOST: u64 = 512;

/// The entries of the dynamic section: kinds and values.
fn dynamic(object: &Object<'_>) -> Vec<(u64, u64)> {
    let Some(segment) = object.segment(PT_DYNAMIC) else { return Vec::new() };
    let entry = |at: u64| {
        let bytes: [u8; 16] = object.bytes_at(segment.address.checked_add(at * 16)?)?;
        let (kind, value) = bytes.split_first_chunk::<8>()?;
        let kind = u64::from_le_bytes(*kind);
        (kind != 0).then(|| (kind, u64::from_le_bytes(value.try_into().unwrap_or_default())))
    };
    (0..MOST.min(segment.size / 16)).map_while(entry).collect()
}

fn value(dynamic: &[(u64, u64)], kind: u64) -> Option<u64> {
    dynamic.iter().find(|entry| entry.0 == kind).map(|entry| entry.1)
}

/// The path of the dynamic linker.
fn linker(object: &Object<'_>) -> Option<String> {
    let segment = object.segment(PT_INTERP)?;
    let path = object.read_at(segment.address, segment.size.min(256) as usize).unwrap_or_default();
    let path = path.split(|byte| *byte == 0).next().unwrap_or_default();
    Some(String::from_utf8_lossy(path).into_owned())
}

/// Whether the dynamic linker loads glibc for the program. Such a program has cgo, or libraries in
/// place of cgo, and its threads are libc's.
fn needs_libc(object: &Object<'_>) -> bool {
    let dynamic = dynamic(object);
    let Some(names) = value(&dynamic, DT_STRTAB) else { return false };
    let mut needed = dynamic.iter().filter(|entry| entry.0 == DT_NEEDED);
    needed.any(|(_, at)| {
        names.checked_add(*at).and_then(|at| object.bytes_at(at)) == Some(*b"libc.so.6\0")
    })
}

/// The version of Go, as the program's information about its build has it.
fn version(file: &File, object: &Object<'_>) -> Option<String> {
    /// The head, without the flags: the version follows as text.
    const HEAD: &[u8] = b"\xff Go buildinf:";
    const INLINE: u8 = 2;
    let section = program_file::section(file, b".go.buildinfo")?;
    let bytes: [u8; 34] = object.bytes_at(section.address)?;
    if !bytes.starts_with(HEAD) || bytes.get(15)? & INLINE == 0 {
        return None;
    }
    // A version has less than 128 bytes, so its length is one byte.
    let len = usize::from(*bytes.get(32)?).min(127);
    let text = object.read_at(section.address.checked_add(33)?, len)?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// The second number of a version such as `go1.24.4`.
fn minor(version: &str) -> Option<u32> {
    let rest = version.strip_prefix("go1.")?;
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

/// Bytes of the file with the table of functions.
struct TableBytes {
    bytes: Vec<u8>,
    skipped: usize,
    /// The address of the table.
    at: u64,
}

fn table_of(file: &File) -> Option<TableBytes> {
    // With an external linker the table is among other data.
    const PLACES: [&[u8]; 3] = [b".gopclntab", b".data.rel.ro.gopclntab", b".data.rel.ro"];
    PLACES.iter().find_map(|name| {
        let section = program_file::section(file, name)?;
        let bytes = section.read(file)?;
        let skipped = table::find(&bytes)?;
        Some(TableBytes { bytes, skipped, at: section.address.checked_add(skipped as u64)? })
    })
}

/// The address of the first function: in the table, or, since Go 1.26, in the data about the module.
fn text_start(file: &File, object: &Object<'_>, table: &[u8], at: u64) -> Option<u64> {
    /// The address of the first function in the data about a module, whose first word is the address of
    /// the table.
    const IN_MODULE: u64 = 22 * 8;
    let field = table.get(table::TEXT_START..table::TEXT_START + 8)?;
    let text = match u64::from_le_bytes(field.try_into().ok()?) {
        0 => relocated(object, at + table::TEXT_START as u64).or_else(|| {
            let module = program_file::section(file, b".go.module")?.address;
            let is_of_table = address_at(object, module)? == at;
            is_of_table.then(|| address_at(object, module.checked_add(IN_MODULE)?)).flatten()
        })?,
        stored => stored,
    };
    object.is_executed(text).then_some(text)
}

/// An address in the data. The linker stores a position-independent address in a relocation.
fn address_at(object: &Object<'_>, at: u64) -> Option<u64> {
    relocated(object, at).or_else(|| Some(u64::from_le_bytes(object.bytes_at(at)?)))
}

/// The value of a relative relocation.
fn relocated(object: &Object<'_>, at: u64) -> Option<u64> {
    const RELATIVE: u64 = 8;
    let dynamic = dynamic(object);
    let (start, size) = (value(&dynamic, DT_RELA)?, value(&dynamic, DT_RELASZ)?);
    let all = object.read_at(start, usize::try_from(size).ok()?)?;
    all.as_chunks::<24>().0.iter().find_map(|entry| {
        let word = |at: usize| entry.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        (word(0)? == at && word(8)? == RELATIVE).then(|| word(16)).flatten()
    })
}

#[cfg(test)]
mod tests;
