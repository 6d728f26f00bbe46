//! Programs of the distribution that guests run as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image::{self, files_below};
use crate::parts::installed;
use crate::tool::{self, ToolError, at};

/// What an image gets.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// By the name in `/bin`, or the path.
    pub(crate) programs: Vec<(String, PathBuf)>,
    /// Other files by the path.
    pub(crate) files: Vec<(String, PathBuf)>,
}

/// Those that are quick to install, and their Debian packages.
const USUAL: [(&str, &str); 12] = [
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

/// Finds those that are quick to install.
///
/// # Errors
/// One is not installed.
pub(crate) fn usual(may_install: bool) -> Result<Found, ToolError> {
    let mut found = Found::default();
    for (name, package) in USUAL {
        let path = installed(|| image::program(name, package), may_install)?;
        found.programs.push((name.to_owned(), path));
    }
    Ok(found)
}

/// Finds all: also PostgreSQL, Node.js, and a web server in Go, which is built into `dir`.
///
/// # Errors
/// One is not installed, or does not build.
pub(crate) fn all(root: &Path, dir: &Path, may_install: bool) -> Result<Found, ToolError> {
    let mut found = usual(may_install)?;
    for (name, package) in [("setpriv", "util-linux"), ("node", "nodejs")] {
        let path = installed(|| image::program(name, package), may_install)?;
        found.programs.push((name.to_owned(), path));
    }
    let code = root.join("guest-driver/preload/tests/programs/code");
    found.files.push(("lib/web.js".to_owned(), code.join("web.js")));
    let go = installed(|| image::program("go", "golang-go"), may_install)?;
    for (name, cgo) in [("web-go-static", "0"), ("web-go-dynamic", "1")] {
        let program = dir.join(name);
        fs::create_dir_all(dir).map_err(at(dir))?;
        let mut build = Command::new(&go);
        build.args(["build", "-o"]).arg(&program).arg(code.join("web.go")).current_dir(dir);
        build.env("CGO_ENABLED", cgo).env("GOCACHE", dir.join("go")).env("GO111MODULE", "off");
        tool::output(build)?;
        found.programs.push((name.to_owned(), program));
    }
    postgresql(installed(newest_postgresql, may_install)?, &mut found)?;
    Ok(found)
}

/// Where the newest version of PostgreSQL has its programs and libraries.
fn newest_postgresql() -> Result<PathBuf, ToolError> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let versions = versions.map(|version| version.path());
    let newest = versions.filter(|path| path.join("bin/initdb").is_file()).max();
    newest.ok_or(ToolError::Missing("postgresql"))
}

/// PostgreSQL finds what it needs by the path it was built for.
fn postgresql(version: PathBuf, found: &mut Found) -> Result<(), ToolError> {
    let whole = |path: &Path| path.to_string_lossy().into_owned();
    for name in ["initdb", "postgres", "pgbench", "pg_isready"] {
        let path = version.join("bin").join(name);
        found.programs.push((whole(&path), path));
    }
    // Two of its modules are part of every database. A compiler for queries is not, and is large.
    for name in ["dict_snowball.so", "plpgsql.so"] {
        let path = version.join("lib").join(name);
        found.programs.push((whole(&path), path));
    }
    let share = Path::new("/usr/share/postgresql").join(version.file_name().unwrap_or_default());
    found.files.extend(files_below(&share)?.into_iter().map(|path| (whole(&path), path)));
    Ok(())
}
