// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Settings of the machine, and where programs look for a fabric.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::support::{Dir, Fabric, run, smc, text};

/// `smc config --json` of a command with more environment.
fn config(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn setting<'a>(all: &'a Value, key: &str) -> (&'a str, &'a str) {
    let list = all["settings"].as_array().unwrap();
    let found = list.iter().find(|setting| setting["key"] == key).unwrap();
    (found["value"].as_str().unwrap(), found["from"].as_str().unwrap())
}

#[test]
fn settings_of_the_machine_hold_for_every_command_that_names_nothing_else() {
    let fabric = Fabric::start("settings");
    let place = Dir::new("settings-file");
    let (file, there) = (place.path("smc.toml"), fabric.directory().join("smc"));
    let written = format!(
        "device = \"{0}/any.sock\"\nmanagement = \"{0}/management.sock\"\neids = [\"ONE\", \"TWO\"]\n",
        there.display()
    );
    std::fs::write(&file, written).unwrap();
    // Without XDG_RUNTIME_DIR nothing but the file leads to the fabric.
    let with = |args: &[&str]| {
        let mut command = smc(args);
        command.env("SMC_CONFIG", &file).env("TMPDIR", &place.0).stdin(Stdio::null());
        command
    };
    let all = config(&mut with(&["config", "--json"]));
    let of_file = |key| setting(&all, key);
    let any = there.join("any.sock").display().to_string();
    assert_eq!(of_file("device"), (any.as_str(), file.as_str()));
    assert_eq!(of_file("eids"), ("ONE, TWO", file.as_str()));
    assert_eq!(of_file("spin-us"), ("50", "default"));
    let mut other = with(&["config", "--json"]);
    let all = config(other.env("SMC_DEVICE", "pci"));
    assert_eq!(setting(&all, "device"), ("pci", "$SMC_DEVICE"));

    for args in [&["stat", "fabric"][..], &["fabric", "ctl", "list"], &["run", "--strict", "true"]]
    {
        let output = with(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    }
    let (mut server, port, _log) = fabric.listen(&["--eid", "TWO"]);
    drop(server.0.stdin.take());
    let output = with(&["connect", "-v", "127.0.0.1", &port.to_string()]).output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("SMC-D") && said.contains("TWO"), "{said}");
}

#[test]
fn a_file_with_a_mistake_is_an_error_and_says_where() {
    let place = Dir::new("settings-wrong");
    let file = place.path("smc.toml");
    for (written, says) in [
        ("\nspin = 7\n", "unknown field `spin`"),
        ("peers = [\"typo.example\"]", "peers: `typo.example` is not"),
        ("eids = [\"a b\"]", "eids: \"a b\""),
        ("device = \"any.sock/\"", "is not an absolute path"),
    ] {
        std::fs::write(&file, written).unwrap();
        for args in [&["stat"][..], &["run", "true"], &["connect", "localhost:1"], &["config"]] {
            let output = smc(args).env("SMC_CONFIG", &file).output().unwrap();
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
            assert!(said.contains(&file) && said.contains(says), "{args:?}: {said}");
        }
        // A command without need for the settings goes on.
        let output = smc(&["completions", "bash"]).env("SMC_CONFIG", &file).output().unwrap();
        assert!(output.status.success());
    }
    let output = smc(&["stat"]).env("SMC_CONFIG", place.path("none.toml")).output().unwrap();
    assert!(text(&output.stderr).contains("none.toml: No such file"), "{output:?}");
}

/// Runs a script in a mount namespace with an empty /run. The script is stopped by its first failure.
/// `None`, said aloud: this user may have no namespace.
pub(crate) fn in_empty_run(script: &str) -> Option<Output> {
    let mut command = smc_test_support::unshare(&["--mount", "--pid", "--fork", "--kill-child"])?;
    let whole = format!("set -eu\nmount -t tmpfs none /run\n{script}");
    command.args(["bash", "-c", &whole]);
    for name in ["SMC_DEVICE", "SMC_MANAGEMENT", "SMC_CONFIG", "XDG_RUNTIME_DIR", "RUST_LOG"] {
        command.env_remove(name);
    }
    Some(command.env("SMC", env!("CARGO_BIN_EXE_smc")).stdin(Stdio::null()).output().unwrap())
}

/// A daemon at the paths of the packaged service.
pub(crate) const SERVICE: &str = r#"
service=/run/vhost-device-ism
mkdir -m 750 $service && mkdir -m 755 $service/any
"$SMC" fabric --socket-path $service/any/any.sock,devices=16,mode=666 \
    --management $service/management.sock --socket-mode 660 2>/run/log &
for n in $(seq 2400); do [ -S $service/any/any.sock ] && break || sleep 0.05; done
export TMPDIR=/run/tmp; mkdir -m 1777 $TMPDIR
"#;

#[test]
fn every_program_finds_the_service_without_an_option() {
    let Some(output) = in_empty_run(&format!(
        r#"{SERVICE}
        "$SMC" doctor | grep '^ok  *fabric  */run/vhost-device-ism/any/any.sock'
        "$SMC" config | grep -- '-> /run/vhost-device-ism/any: the service'
        "$SMC" run --strict true
        "$SMC" stat fabric | grep 'fabric ff00'
        "$SMC" fabric ctl list | grep any
        "$SMC" listen -v 127.0.0.1:0 </dev/null >/run/copy 2>/run/listening &
        for n in $(seq 2400); do grep -q listening /run/listening && break || sleep 0.05; done
        port=$(sed -n 's/.*127.0.0.1:\([0-9]*\).*/\1/p' /run/listening | head -1)
        echo bytes | "$SMC" connect -v 127.0.0.1:$port 2>&1 | grep SMC-D
        # In a container the directory of the pool is somewhere else, and goes before all others.
        mkdir -p /run/smc/pool
        mount --bind $service/any /run/smc/pool
        "$SMC" config | grep -- '-> /run/smc/pool: the pool of this container'
        umount /run/smc/pool
        # The user's own fabric counts if there is no service.
        rm -r $service
        "$SMC" fabric 2>/run/own &
        for n in $(seq 2400); do "$SMC" stat fabric >/dev/null 2>&1 && break || sleep 0.05; done
        "$SMC" config | grep -- "-> $TMPDIR/smc-0: "
        "$SMC" run --strict true"#
    )) else {
        return;
    };
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn users_outside_of_the_group_are_told_so_and_containers_are_not_shut_out() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let Some(output) = in_empty_run(&format!(
        r#"{SERVICE}
        install -m 755 "$SMC" /run/smc-program
        directory=$(dirname "$SMC")
        for library in $directory/libsmc_preload.so $directory/deps/libsmc_preload.so; do
            [ ! -e $library ] || install -m 755 $library /run/libsmc_preload.so
        done
        export SMC_PRELOAD=/run/libsmc_preload.so
        chgrp 4242 $service
        as() {{ setpriv --reuid 4243 --regid 4243 "$@"; }}
        as --clear-groups /run/smc-program doctor >/run/says || true
        grep "directory $service is closed to you: user root, group 4242, mode 750" /run/says
        grep '> usermod -aG 4242 4243 ' /run/says
        if grep setfacl /run/says; then exit 1; fi
        if as --clear-groups /run/smc-program run --strict true 2>/run/says; then exit 1; fi
        grep 'Permission denied' /run/says || {{ cat /run/says; exit 1; }}
        as --groups 4242 /run/smc-program run --strict true
        # A container has only the directory of the pool, and any user.
        mkdir -p /run/smc/pool
        mount --bind $service/any /run/smc/pool
        as --clear-groups /run/smc-program run --strict true"#
    )) else {
        return;
    };
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn nobody_is_told_to_open_a_file_that_is_no_socket() {
    let output = run(&["connect", "--device", "/etc/passwd", "127.0.0.1:9"]);
    let said = text(&output.stderr);
    assert!(!said.contains("setfacl") && said.contains("it is no socket"), "{said}");
}
