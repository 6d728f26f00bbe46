// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The changes to a container, independent of the engine.

use std::path::{Path, PathBuf};

use super::{CdiArgs, Format, file};
use crate::error::CliError;
use crate::paths::{self, CONTAINER as PLACE};
use crate::run::{LIB, Rule, find_library};

/// The list of libraries loaded into every program by the dynamic linker of glibc, in a container.
const PRELOAD_LIST: &str = "/etc/ld.so.preload";

/// Files of the host visible in containers.
pub(super) struct HostFiles {
    /// libsmc_preload.so.
    pub(super) library: PathBuf,
    /// A file with the contents of [`PRELOAD_LIST`].
    pub(super) preload_list: PathBuf,
    /// This program.
    pub(super) program: PathBuf,
}

impl HostFiles {
    /// Finds them. The list lies beside the library.
    ///
    /// # Errors
    /// There is no library.
    pub(super) fn find(library: Option<&Path>) -> Result<HostFiles, CliError> {
        let library = match library {
            Some(file) => file.to_owned(),
            None => find_library().map_err(CliError::Cdi)?,
        };
        let whole = |path: &Path| {
            std::fs::canonicalize(path)
                .map_err(|error| CliError::Cdi(format!("{}: {error}", path.display())))
        };
        let program = std::env::current_exe().map_err(CliError::io("cannot find this program"))?;
        let (library, program) = (whole(&library)?, whole(&program)?);
        let preload_list = library.with_file_name("ld.so.preload");
        Ok(HostFiles { library, preload_list, program })
    }

    /// Writes the list, unless present already.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write_list(&self) -> Result<(), CliError> {
        // musl reads no such list: with LD_PRELOAD instead, its linker would end every program.
        // $LIB is for machines with library directories of two kinds in one container.
        let list = format!("{PLACE}/preload/$LIB/libsmc_preload.so\n");
        if std::fs::read(&self.preload_list).ok().as_deref() == Some(list.as_bytes()) {
            return Ok(());
        }
        file::write(&self.preload_list, list.as_bytes())
            .map_err(CliError::io(format!("cannot write {}", self.preload_list.display())))
    }
}

/// A mount of a container.
pub(super) enum Mount {
    /// A file or directory of the host, read-only.
    Bind {
        /// The path on the host.
        host: String,
        /// The path in the container.
        container: String,
    },
    /// An empty directory in memory, of a size in bytes.
    Memory {
        /// The path in the container.
        container: &'static str,
        /// Bytes.
        size: u64,
        /// Mode of the directory.
        mode: u32,
    },
}

/// The changes for one device.
pub(super) struct Edits {
    /// Name of the device.
    pub(super) name: String,
    /// In this order.
    pub(super) mounts: Vec<Mount>,
    /// Variables and values.
    pub(super) environment: Vec<(&'static str, String)>,
    /// The program of the hook.
    pub(super) hook: Option<String>,
}

impl Edits {
    /// The changes for the device of a pool.
    ///
    /// # Errors
    /// The pool has no name valid for an engine, or a path is not UTF-8.
    pub(super) fn of(args: &CdiArgs, pool: &Path, files: &HostFiles) -> Result<Edits, CliError> {
        let wrong = |what: &str| CliError::Cdi(format!("--pool {}: {what}", pool.display()));
        let pool = std::path::absolute(pool).map_err(|error| wrong(&error.to_string()))?;
        let text =
            |path: &Path| path.to_str().map(str::to_owned).ok_or_else(|| wrong("is not UTF-8"));
        let (Some(stem), Some(file), Some(directory)) =
            (pool.file_stem(), pool.file_name(), pool.parent())
        else {
            return Err(wrong("has no file name"));
        };
        let name = text(stem.as_ref())?;
        if !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
            return Err(wrong("a CDI device has letters, digits, -, _ and . in its name"));
        }
        let bind = |host: &Path, container: String| -> Result<Mount, CliError> {
            Ok(Mount::Bind { host: text(host)?, container })
        };
        let mut mounts = vec![
            // Mount points below are new with each start. Runtimes such as runc 1.1 copy the mode
            // of an existing mount point: the directory of statistics would belong to root from
            // then on.
            Mount::Memory { container: PLACE, size: 1 << 20, mode: 0o755 },
            // The directory, not the socket: the next daemon makes another socket.
            bind(directory, format!("{PLACE}/pool"))?,
            bind(&files.program, "/usr/local/bin/smc".into())?,
            bind(&files.preload_list, PRELOAD_LIST.into())?,
            Mount::Memory { container: paths::CONTAINER_STATISTICS, size: 1 << 20, mode: 0o1777 },
        ];
        for lib in LIB {
            let there = format!("{PLACE}/preload/{lib}/libsmc_preload.so");
            mounts.push(bind(&files.library, there)?);
        }
        let socket = format!("{PLACE}/pool/{}", text(file.as_ref())?);
        let mut environment = vec![
            ("SMC_DEVICE", socket.clone()),
            ("SMC_RUN_DEVICES", socket),
            ("SMC_RUN_ACCEPT", rules(&args.accept)),
            ("SMC_RUN_RENDEZVOUS", if args.no_hook { "off" } else { "auto" }.into()),
            ("SMC_RUN_STATISTICS", paths::CONTAINER_STATISTICS.into()),
        ];
        if !args.peer.is_empty() {
            environment.push(("SMC_RUN_CONNECT", rules(&args.peer)));
        }
        if !args.no_hook {
            environment.push(("SMC_RUN_OPTION", "granted".into()));
        }
        let has_hook = args.format == Format::Cdi && !args.no_hook;
        let hook = has_hook.then(|| text(&files.program)).transpose()?;
        Ok(Edits { name, mounts, environment, hook })
    }
}

/// The rules as one text, with "any" for `*`, which shells would expand.
fn rules(rules: &[Rule]) -> String {
    let word = |rule: &Rule| rule.as_str().replace(":*", "").replace('*', "any");
    rules.iter().map(word).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::cdi) fn args(pool: &str) -> CdiArgs {
        CdiArgs {
            pool: vec![pool.into()],
            later: true,
            peer: vec!["10.0.0.0/8:80".parse().unwrap(), "*:90".parse().unwrap()],
            accept: vec!["*".parse().unwrap()],
            no_hook: false,
            library: None,
            format: Format::Cdi,
            output: None,
        }
    }

    pub(in crate::cdi) fn made_of(args: &CdiArgs) -> Result<Edits, CliError> {
        let files = HostFiles {
            library: "/l/libsmc_preload.so".into(),
            preload_list: "/l/ld.so.preload".into(),
            program: "/b/smc".into(),
        };
        Edits::of(args, &args.pool[0], &files)
    }

    #[test]
    fn a_device_is_named_after_its_pool_and_leaves_preloaded_libraries_alone() {
        let edits = made_of(&args("/run/ism/web/web.sock")).unwrap();
        assert_eq!(edits.name, "web");
        let has = |variable, value: &str| edits.environment.contains(&(variable, value.into()));
        assert!(has("SMC_RUN_DEVICES", "/run/smc/pool/web.sock"));
        assert!(has("SMC_RUN_CONNECT", "10.0.0.0/8:80,any:90"));
        assert!(has("SMC_RUN_ACCEPT", "any"));
        assert!(edits.environment.iter().all(|(variable, _)| *variable != "LD_PRELOAD"));
        assert!(matches!(&edits.mounts[1], Mount::Bind { host, .. } if host == "/run/ism/web"));
    }

    #[test]
    fn the_option_is_for_engines_that_are_not_told_otherwise_and_the_hook_for_cdi() {
        let made = |format, no_hook| {
            let edits = made_of(&CdiArgs { format, no_hook, ..args("/run/ism/web/web.sock") });
            let edits = edits.unwrap();
            let granted = edits.environment.contains(&("SMC_RUN_OPTION", "granted".into()));
            (granted, edits.hook)
        };
        assert_eq!(made(Format::Cdi, false), (true, Some("/b/smc".into())));
        assert_eq!(made(Format::Cdi, true), (false, None));
        assert_eq!(made(Format::Options, false), (true, None));
        assert_eq!(made(Format::Compose, true), (false, None));
    }

    #[test]
    fn names_that_cdi_does_not_know_are_refused() {
        for pool in ["/run/ism/a b.sock", "/run/ism/a=b.sock", "/"] {
            assert!(matches!(made_of(&args(pool)), Err(CliError::Cdi(_))), "{pool}");
        }
    }
}
