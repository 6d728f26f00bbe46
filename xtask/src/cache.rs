// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Places of the results of `tests/vm/kernel.sh` and `qemu/build.sh`.
//!
//! Both scripts name the directory of a result by a hash of its sources. The same hash is formed here, to ask
//! for packages only before a build.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::tool::{ToolError, at};

/// A script with results to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Build {
    /// The guests' kernel, and the variant for version 1 of SMC-R.
    Kernel,
    /// QEMU with the patches and without.
    Qemu,
}

impl Build {
    pub(crate) const ALL: [Build; 2] = [Build::Kernel, Build::Qemu];

    pub(crate) fn script(self, root: &Path) -> PathBuf {
        root.join(match self {
            Build::Kernel => "tests/vm/kernel.sh",
            Build::Qemu => "qemu/build.sh",
        })
    }

    /// Variables with paths of existing results. The script is not run if both are set.
    pub(crate) fn variables(self) -> [&'static str; 2] {
        match self {
            Build::Kernel => ["KERNEL", "KERNEL_V1"],
            Build::Qemu => ["QEMU", "QEMU_STOCK"],
        }
    }

    /// The resulting files of the script, in the order of [`Build::variables`].
    ///
    /// # Errors
    /// A source file of the repository cannot be read.
    pub(crate) fn results(self, root: &Path) -> Result<[PathBuf; 2], ToolError> {
        let script = self.script(root);
        let text = read(&script)?;
        let version = version(&text);
        let archive = self.archive(root, &version);
        let size = fs::metadata(&archive).map(|file| file.len()).ok();
        let source = match (self, size) {
            (Build::Kernel, Some(size)) => format!("{version} slim {size}\n"),
            (Build::Qemu, Some(size)) => format!("{version} local {size}\n"),
            (_, None) => format!("{version} release\n"),
        };
        let cache = directory()?;
        Ok(match self {
            Build::Kernel => {
                let config = read(&root.join("tests/vm/kernel.config"))?;
                let patch = read(&root.join("tests/vm/smc-v1-over-rxe.patch"))?;
                let out =
                    cache.join(format!("kernel-{}", hash(&[&source, &config, &patch, &text])));
                [out.join("vmlinux"), out.join("vmlinux-v1")]
            }
            Build::Qemu => {
                let patches = root.join("qemu/patches");
                let series = read(&patches.join("series"))?;
                let names = series.lines().filter(|line| !line.starts_with('#'));
                let patched = names.map(|name| read(&patches.join(name)));
                let patched = patched.collect::<Result<String, _>>()?;
                let patched = format!("qemu-{}", hash(&[&source, &text, &patched]));
                let stock = format!("qemu-stock-{}", hash(&[&source, &text]));
                [patched, stock].map(|name| cache.join(name).join("qemu-system-x86_64"))
            }
        })
    }

    /// The source archive, if provided. Otherwise the script downloads the archive.
    fn archive(self, root: &Path, version: &str) -> PathBuf {
        let name = match self {
            Build::Kernel => format!("linux-{version}-slim.tar.xz"),
            Build::Qemu => format!("qemu-{version}.tar.xz"),
        };
        let sources = std::env::var_os("VM_SOURCES").filter(|path| !path.is_empty());
        sources.map_or_else(|| root.join("../shared/vm"), PathBuf::from).join(name)
    }

    /// Whether the script has to download the source archive.
    ///
    /// # Errors
    /// The script cannot be read.
    pub(crate) fn downloads(self, root: &Path) -> Result<bool, ToolError> {
        let version = version(&read(&self.script(root))?);
        Ok(!self.archive(root, &version).is_file())
    }
}

/// The directory for everything kept outside of the repository.
///
/// # Errors
/// Neither `XDG_CACHE_HOME` nor `HOME` is set.
pub(crate) fn directory() -> Result<PathBuf, ToolError> {
    let cache = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
        (_, Some(home)) => Path::new(&home).join(".cache"),
        (_, None) => return Err(ToolError::NoVariable("HOME")),
    };
    Ok(cache.join("vhost-device-ism"))
}

fn read(path: &Path) -> Result<String, ToolError> {
    fs::read_to_string(path).map_err(at(path))
}

/// The value of a script's line `version=VALUE`.
fn version(script: &str) -> String {
    let line = script.lines().find_map(|line| line.strip_prefix("version="));
    line.unwrap_or_default().to_owned()
}

/// The first 16 hexadecimal digits of SHA-256.
fn hash(texts: &[&str]) -> String {
    let mut hash = Sha256::new();
    texts.iter().for_each(|text| hash.update(text));
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
    }

    /// Runs a copy of a script up to the check for its result, and prints `print`.
    fn script_says(build: Build, print: &str) -> String {
        let script = build.script(&root());
        let text = read(&script).unwrap();
        let (head, _) = text.split_once("done_already()").unwrap();
        // BASH_SOURCE is the script's own path in there.
        let head = head.replace("${BASH_SOURCE[0]}", script.to_str().unwrap());
        let mut bash = Command::new("bash");
        bash.arg("-c").arg(format!("{head}\n{print}"));
        bash.env_remove("QEMU").env_remove("QEMU_STOCK");
        let output = bash.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn results_are_where_the_scripts_keep_them() {
        for (build, print) in [
            (Build::Kernel, "echo $out/vmlinux; echo $out/vmlinux-v1"),
            (Build::Qemu, "echo $patched; echo $stock"),
        ] {
            let expected = script_says(build, print);
            let results = build.results(&root()).unwrap();
            let results = results.map(|path| format!("{}\n", path.display())).concat();
            assert_eq!(results, expected, "{build:?}");
        }
    }
}
