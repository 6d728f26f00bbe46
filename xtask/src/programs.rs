// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmodified programs of the distribution for guests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image::{self, files_below};
use crate::tool::{self, ToolError, at};

#[derive(Debug, Default)]
pub(crate) struct Files {
    /// Programs by their name in `/bin`, or by their path.
    pub(crate) programs: Vec<(String, PathBuf)>,
    /// Other files by their path.
    pub(crate) files: Vec<(String, PathBuf)>,
}

/// Quickly installed programs, and their Debian packages.
const SMALL: [(&str, &str); 12] = [
    ("iperf3", "iperf3"),
    ("redis-server", "redis-server"),
    ("redis-benchmark", "redis-tools"),
    ("nginx", "nginx-light"),
    ("curl", "curl"),
    ("wrk", "wrk"),
    ("memcached", "memcached"),
    ("memcaslap", "libmemcached-tools"),
    ("sshd", "openssh-server"),
    ("ssh", "openssh-client"),
    ("scp", "openssh-client"),
    ("ssh-keygen", "openssh-client"),
];

/// Programs whose packages are large. PostgreSQL is not in `PATH`, see [`newest_postgresql`].
const LARGE: [(&str, &str); 3] =
    [("setpriv", "util-linux"), ("node", "nodejs"), ("go", "golang-go")];

/// Names of programs and their packages; with `large` also programs with large packages.
pub(crate) fn packages(large: bool) -> impl Iterator<Item = (&'static str, &'static str)> {
    SMALL.into_iter().chain(LARGE.into_iter().filter(move |_| large))
}

/// Finds the quickly installed programs.
///
/// # Errors
/// A program is not installed.
pub(crate) fn small() -> Result<Files, ToolError> {
    let mut found = Files::default();
    for (name, package) in SMALL {
        found.programs.push((name.to_owned(), image::program_of(name, package)?));
    }
    Ok(found)
}

/// Finds all programs: also PostgreSQL, Node.js, and a web server in Go, built into `dir`.
///
/// # Errors
/// A program is not installed, or its build fails.
pub(crate) fn all(root: &Path, dir: &Path) -> Result<Files, ToolError> {
    let mut found = small()?;
    let [setpriv, node, go] = LARGE;
    for (name, package) in [setpriv, node] {
        found.programs.push((name.to_owned(), image::program_of(name, package)?));
    }
    let code = root.join("guest-driver/preload/tests/programs/code");
    found.files.push(("lib/web.js".to_owned(), code.join("web.js")));
    let go = image::program_of(go.0, go.1)?;
    for (name, cgo) in [("web-go-static", "0"), ("web-go-dynamic", "1")] {
        let program = dir.join(name);
        fs::create_dir_all(dir).map_err(at(dir))?;
        let mut build = Command::new(&go);
        build.args(["build", "-o"]).arg(&program).arg(code.join("web.go")).current_dir(dir);
        build.env("CGO_ENABLED", cgo).env("GOCACHE", dir.join("go")).env("GO111MODULE", "off");
        tool::output(build)?;
        found.programs.push((name.to_owned(), program));
    }
    let postgresql = newest_postgresql();
    add_postgresql(
        &postgresql.ok_or_else(|| ToolError::Packages(vec!["postgresql".to_owned()]))?,
        &mut found,
    )?;
    Ok(found)
}

/// The directory of the newest PostgreSQL.
pub(crate) fn newest_postgresql() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let versions = versions.map(|version| version.path());
    versions.filter(|path| path.join("bin/initdb").is_file()).max()
}

/// Adds PostgreSQL, at the path of its build: PostgreSQL finds its files by this path.
fn add_postgresql(version: &Path, found: &mut Files) -> Result<(), ToolError> {
    let whole = |path: &Path| path.to_string_lossy().into_owned();
    for name in ["initdb", "postgres", "pgbench", "pg_isready"] {
        let path = version.join("bin").join(name);
        found.programs.push((whole(&path), path));
    }
    // Two of its modules are needed in every database. Its compiler for queries is not, and is large.
    for name in ["dict_snowball.so", "plpgsql.so"] {
        let path = version.join("lib").join(name);
        found.programs.push((whole(&path), path));
    }
    let share = Path::new("/usr/share/postgresql").join(version.file_name().unwrap_or_default());
    found.files.extend(files_below(&share)?.into_iter().map(|path| (whole(&path), path)));
    Ok(())
}
