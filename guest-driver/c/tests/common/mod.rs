// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The built library in a directory of its own, and a daemon.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(dead_code, reason = "not every test uses all of it")]
#![allow(unreachable_pub, reason = "each test is a crate of its own")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use smc_test_support::TestDir;
use vhost_device_ism::Daemon;
use vhost_device_ism::config::GuestSpec;

/// The library name requested by programs.
pub const SONAME: &str = "libsmc.so.0";
/// Compiler options for C and C++.
pub const STRICT: [&str; 5] = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-O1"];

pub fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The directory of the built libraries. Cargo builds none of this kind for tests by itself.
pub fn libraries() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let dir = test.parent().and_then(Path::parent).unwrap();
        let mut build = Command::new(env!("CARGO"));
        // With the features of the whole workspace, as `cargo test --workspace` has built it.
        build.args(["build", "--quiet", "--workspace", "--lib"]);
        build.arg("--target-dir").arg(dir.parent().unwrap());
        if dir.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
        dir.to_owned()
    });
    built.clone()
}

/// Runs a command to success, and returns its output.
#[track_caller]
pub fn output(command: &mut Command) -> String {
    let Output { status, stdout, stderr } =
        command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{command:?}: {status}: {stderr}");
    String::from_utf8(stdout).unwrap()
}

/// A directory with an installed library, a daemon, and programs.
pub struct Bed {
    pub dir: TestDir,
    daemon: Option<Daemon>,
}

impl Bed {
    pub fn new() -> Bed {
        let dir = TestDir::for_programs();
        for sub in ["lib/pkgconfig", "include"] {
            std::fs::create_dir_all(dir.join(sub)).unwrap();
        }
        let link = |from: PathBuf, to: &str| {
            std::os::unix::fs::symlink(from, dir.join(to)).unwrap();
        };
        link(libraries().join("libsmc.so"), &format!("lib/{SONAME}"));
        link(SONAME.into(), "lib/libsmc.so");
        link(here("include/smc.h"), "include/smc.h");
        let text = std::fs::read_to_string(here("smc.pc.in")).unwrap();
        let text = text
            .replace("@prefix@", dir.to_str().unwrap())
            .replace("@libdir@", "${prefix}/lib")
            .replace("@version@", env!("CARGO_PKG_VERSION"));
        assert!(!text.contains('@'), "{text}");
        std::fs::write(dir.join("lib/pkgconfig/smc.pc"), text).unwrap();

        let daemon = Daemon::start(vhost_device_ism::Config::default()).unwrap();
        let mut pool = GuestSpec::new(dir.join("any.sock"));
        pool.devices = Some(8);
        daemon.add_guest(pool).unwrap();
        daemon.add_guest(GuestSpec::new(dir.join("a.sock"))).unwrap();
        Bed { dir, daemon: Some(daemon) }
    }

    /// Ends the daemon.
    pub fn stop_daemon(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.stop();
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Compiles a program, with the options of pkg-config, if present.
    pub fn compile(&self, compiler: &[&str], source: &str) -> PathBuf {
        let program = self.path("program");
        let (name, options) = compiler.split_first().unwrap();
        let mut cc = Command::new(name);
        cc.args(options).args(STRICT).arg(here(source)).args(["-x", "none"]);
        cc.arg("-o").arg(&program);
        match self.pkg_config(&["--cflags", "--libs"]) {
            Some(options) => cc.args(options.split_whitespace()),
            None => {
                cc.arg("-I").arg(self.path("include")).arg("-L").arg(self.path("lib")).arg("-lsmc")
            }
        };
        output(cc.arg("-pthread"));
        program
    }

    pub fn pkg_config(&self, args: &[&str]) -> Option<String> {
        let mut pkg_config = Command::new("pkg-config");
        pkg_config.env("PKG_CONFIG_LIBDIR", self.path("lib/pkgconfig")).args(args).arg("smc");
        if pkg_config.output().is_err() {
            eprintln!("there is no pkg-config: smc.pc is NOT TESTED");
            return None;
        }
        Some(output(&mut pkg_config))
    }

    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", self.path("lib")).env_remove("SMC_DEVICE");
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.stop_daemon();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
