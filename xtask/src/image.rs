// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guests' initramfs: busybox, this repository's programs, and their libraries.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use crate::cpio::Tree;
use crate::tool::{self, ToolError, at};

/// The contents of an image.
#[derive(Debug)]
pub(crate) struct Contents {
    /// The first word of the image's file name.
    pub(crate) kind: &'static str,
    /// A statically linked busybox.
    pub(crate) busybox: PathBuf,
    /// The script for the guest's first process.
    pub(crate) init: PathBuf,
    /// Programs by their name in `/bin`, or by their path in the guest.
    pub(crate) programs: Vec<(String, PathBuf)>,
    /// Other files by their path in the guest.
    pub(crate) files: Vec<(String, PathBuf)>,
}

/// libibverbs's directory with a file per provider.
const PROVIDERS: &str = "/etc/libibverbs.d";

/// Finds libibverbs and its provider for soft-RoCE, with the libraries of both. Each file is a path in the
/// guest and a path here. Programs open the files at run time, so `ldd` does not list them.
///
/// # Errors
/// The libraries are not installed.
pub(crate) fn verbs() -> Result<Vec<(String, PathBuf)>, ToolError> {
    let mut ldconfig = Command::new("/sbin/ldconfig");
    ldconfig.arg("-p");
    let known = tool::output(ldconfig)?;
    let paths = known.lines().filter(|line| line.trim_start().starts_with("libibverbs.so.1 "));
    let mut library = paths.filter_map(|line| line.split_once(" => ")).map(|(_, path)| path.trim());
    let library = library.next_back().ok_or_else(|| missing("libibverbs1"))?;
    let real = fs::canonicalize(library).map_err(at(Path::new(library)))?;
    let directory = real.parent().unwrap_or(Path::new("/")).join("libibverbs");
    let providers = fs::read_dir(&directory).into_iter().flatten().flatten();
    let mut providers = providers.map(|entry| entry.path());
    let rxe = |path: &PathBuf| file_name(path).starts_with("librxe-");
    let provider = providers.find(rxe).ok_or_else(|| missing("ibverbs-providers"))?;
    let provider = provider.to_string_lossy().into_owned();
    let setting = format!("{PROVIDERS}/rxe.driver");
    if !Path::new(&setting).is_file() {
        return Err(missing("ibverbs-providers"));
    }
    let mut paths = vec![library.to_owned(), provider.clone(), setting];
    for needs in [library, &provider] {
        paths.extend(libraries(Path::new(needs))?);
    }
    Ok(paths.into_iter().map(|path| (path.clone(), path.into())).collect())
}

/// Finds a program in `PATH` or where programs of the administrator are.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut files = std::env::split_paths(&path).chain(sbin).map(|dir| dir.join(name));
    files.find(|path| path.is_file())
}

/// Finds a program of a Debian package.
///
/// # Errors
/// The package is not installed.
pub(crate) fn program_of(name: &str, package: &str) -> Result<PathBuf, ToolError> {
    program(name).ok_or_else(|| missing(package))
}

fn missing(package: &str) -> ToolError {
    ToolError::Packages(vec![package.to_owned()])
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Finds a busybox without shared libraries.
///
/// # Errors
/// There is none.
pub(crate) fn busybox() -> Result<PathBuf, ToolError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut files = std::env::split_paths(&path).map(|dir| dir.join("busybox"));
    files
        .find(|path| path.is_file() && libraries(path).is_ok_and(|needed| needed.is_empty()))
        .ok_or_else(|| missing("busybox-static"))
}

/// Lists the files in a directory and below it.
///
/// # Errors
/// A directory cannot be read.
pub(crate) fn files_below(dir: &Path) -> Result<Vec<PathBuf>, ToolError> {
    let mut files = Vec::new();
    let mut left = vec![dir.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).map_err(at(&dir))? {
            let path = entry.map_err(at(&dir))?.path();
            if path.is_dir() { left.push(path) } else { files.push(path) }
        }
    }
    Ok(files)
}

/// Writes the image into `dir`, unless already present, and returns its path. Removes images of the same kind
/// with other contents.
///
/// # Errors
/// A file cannot be read, or the image cannot be written.
pub(crate) fn write(contents: &Contents, dir: &Path) -> Result<PathBuf, ToolError> {
    let mut hash = Sha256::new();
    // The image also depends on the code of this writer.
    hash.update(include_bytes!("image.rs"));
    hash.update(include_bytes!("cpio.rs"));
    let programs = contents.programs.iter().map(|(_, path)| path);
    let files = contents.files.iter().map(|(_, path)| path);
    for path in [&contents.busybox, &contents.init].into_iter().chain(programs).chain(files) {
        hash.update(Sha256::digest(fs::read(path).map_err(at(path))?));
    }
    let hash: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let kind = contents.kind;
    let image = dir.join(format!("{kind}-{hash}.cpio"));
    fs::create_dir_all(dir).map_err(at(dir))?;
    // Two tasks write the same files.
    let lock = dir.join("lock");
    let locked = fs::File::create(&lock).and_then(|file| file.lock().map(|()| file));
    let _locked = locked.map_err(at(&lock))?;
    if image.is_file() {
        return Ok(image);
    }
    eprintln!("xtask: writes {}", image.display());
    for old in fs::read_dir(dir).map_err(at(dir))?.flatten() {
        if old.file_name().to_string_lossy().starts_with(&format!("{kind}-")) {
            let _ = fs::remove_file(old.path());
        }
    }
    let new = image.with_extension("new");
    fs::write(&new, tree(contents)?.archive()).map_err(at(&new))?;
    fs::rename(&new, &image).map_err(at(&image))?;
    Ok(image)
}

fn tree(contents: &Contents) -> Result<Tree, ToolError> {
    let mut tree = Tree::default();
    for directory in ["dev", "etc", "proc", "run", "sys", "tmp"] {
        tree.directory(directory);
    }
    let read = |path: &Path| fs::read(path).map_err(at(path));
    tree.file("init", read(&contents.init)?);
    tree.file("bin/busybox", read(&contents.busybox)?);
    let mut list = Command::new(&contents.busybox);
    list.arg("--list");
    for applet in tool::output(list)?.lines().filter(|name| *name != "busybox") {
        tree.link(&format!("bin/{applet}"), "busybox");
    }
    for (name, program) in &contents.programs {
        for library in libraries(program)? {
            if !tree.has(&library) {
                tree.file(&library, read(Path::new(&library))?);
            }
        }
        let path = if name.contains('/') { name.clone() } else { format!("bin/{name}") };
        tree.file(&path, stripped(program)?);
    }
    for (path, file) in &contents.files {
        if !tree.has(path) {
            let library = path.ends_with(".so");
            tree.file(path, if library { stripped(file)? } else { read(file)? });
        }
    }
    // PostgreSQL refuses to run as root. sshd has a user for connections before their login.
    let users = b"root:x:0:0:root:/tmp:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n\
        postgres:x:100:100::/tmp:/bin/sh\nsshd:x:101:65534::/run/sshd:/bin/false\n";
    tree.file("etc/passwd", users.to_vec());
    tree.file("etc/group", b"root:x:0:\npostgres:x:100:\nnogroup:x:65534:\n".to_vec());
    let mut hosts = "127.0.0.1 localhost\n".to_owned();
    for (number, letter) in (1..).zip('a'..='z') {
        hosts += &format!("10.0.0.{number} {letter}\n");
    }
    tree.file("etc/hosts", hosts.into_bytes());
    Ok(tree)
}

/// Lists the paths of a program's shared libraries and interpreter.
fn libraries(program: &Path) -> Result<Vec<String>, ToolError> {
    let mut ldd = Command::new("ldd");
    let output = ldd.arg(program).stdin(Stdio::null()).output();
    let output = output.map_err(|source| ToolError::Start { program: "ldd".to_owned(), source })?;
    // ldd fails for a statically linked program. Here this is no error.
    let text = String::from_utf8_lossy(&output.stdout);
    let words = text.lines().flat_map(|line| line.split_whitespace().find(|w| w.starts_with('/')));
    Ok(words.map(ToOwned::to_owned).collect())
}

/// Reads a program without its symbols: each guest holds the whole image in its memory.
fn stripped(program: &Path) -> Result<Vec<u8>, ToolError> {
    let copy = std::env::temp_dir().join(format!("xtask-strip-{}", std::process::id()));
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&copy).arg(program);
    let bytes = match tool::status(strip) {
        Ok(status) if status.success() => fs::read(&copy).map_err(at(&copy)),
        _ => fs::read(program).map_err(at(program)),
    };
    let _ = fs::remove_file(&copy);
    bytes
}
