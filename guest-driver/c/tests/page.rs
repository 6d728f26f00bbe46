// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The commands of docs/embedding.md work as described on the page.
//!
//! The commands run in the order of the page, from the root of the sources. Builds by cargo are done before,
//! ports and paths in /tmp are replaced by the test's own, and waits of a second become waits for the event.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use smc_test_support::{eventually, free_port, listens};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::{Bed, here, output};

/// A process, killed at the end of the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The commands: lines after "$ " in blocks of kind "console".
fn commands() -> Vec<String> {
    let page = std::fs::read_to_string(here("../../docs/embedding.md")).unwrap();
    let mut in_console = false;
    let mut found = Vec::new();
    for line in page.lines() {
        match line {
            "```console" => in_console = true,
            "```" => in_console = false,
            _ => {}
        }
        if let Some(command) = line.strip_prefix("$ ").filter(|_| in_console) {
            found.push(command.to_owned());
        }
    }
    found
}

/// The directory of the built programs. The builds of the page are already there.
fn programs() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let dir = test.parent().and_then(Path::parent).unwrap().to_owned();
    for what in [&["--examples"][..], &["--bin", "smc"]] {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--workspace"]).args(what);
        build.arg("--target-dir").arg(dir.parent().unwrap());
        if dir.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
    }
    dir
}

#[test]
fn commands_of_the_page_echo_by_smc_d_in_rust_and_c() {
    let bed = Bed::new();
    let programs = programs();
    let port = free_port();
    let pool = bed.path("page.sock");
    let shell = |command: &str, device: Option<&Path>| {
        let mut shell = Command::new("bash");
        shell.args(["-c", command]).current_dir(here("../.."));
        let path = std::env::var("PATH").unwrap();
        shell.env("PATH", format!("{0}:{0}/examples:{path}", programs.display()));
        // As with installed packages.
        shell.env("PKG_CONFIG_LIBDIR", bed.path("lib/pkgconfig"));
        shell.env("LD_LIBRARY_PATH", bed.path("lib")).env_remove("SMC_DEVICE");
        shell.envs(device.map(|device| ("SMC_DEVICE", device)));
        shell.stdin(Stdio::null());
        shell
    };
    let mut running = Vec::new();
    let (mut device, mut clients) = (None, 0);
    for command in commands() {
        let words = command
            .replace("5000", &port.to_string())
            .replace("/tmp/any.sock", pool.to_str().unwrap())
            .replace("/tmp/echo", bed.path("echo").to_str().unwrap());
        if words.contains("pkg-config") && bed.pkg_config(&["--modversion"]).is_none() {
            assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "there is no pkg-config");
            break;
        }
        if words.starts_with("cargo build --release ") {
            continue;
        } else if let Some(variables) = words.strip_prefix("export PATH=") {
            device = variables.split_once(" SMC_DEVICE=").map(|(_, path)| PathBuf::from(path));
        } else if let Some(words) = words.strip_suffix(" & sleep 1") {
            let mut server = shell(&format!("exec {words}"), device.as_deref());
            let server = server.stdout(Stdio::null()).process_group(0).spawn().unwrap();
            let mut server = Running(server);
            eventually(&command, || {
                assert_eq!(server.0.try_wait().unwrap(), None, "{command}: it has ended");
                match words.starts_with("smc fabric") {
                    true => pool.exists(),
                    false => listens("self", port),
                }
            });
            running.push(server);
        } else {
            let said = output(&mut shell(&words, device.as_deref()));
            if words.contains(" client ") {
                clients += 1;
                assert!(said.starts_with("SMC-D v2.1 over fabric"), "{command}: {said}");
                assert!(said.ends_with(" bytes came back\n"), "{command}: {said}");
            }
        }
    }
    assert_eq!((running.len(), clients), (2, 4), "commands of the page");
}
