// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The commands of "Switch it off in one second" (docs/rollout.md), with an open connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use crate::pages::commands;
use crate::support::{Dir, Fabric, Running, text};

/// Runs the commands of the page whose text has a word, against the test's own files and daemon.
fn run_commands(fabric: &Fabric, etc: &Dir, word: &str) {
    let smc = env!("CARGO_BIN_EXE_smc");
    let management = fabric.directory().join("smc/management.sock");
    let ctl = format!("{smc} fabric ctl --management {}", management.display());
    let chosen: Vec<_> =
        commands("rollout.md").into_iter().filter(|(_, line)| line.contains(word)).collect();
    assert!(!chosen.is_empty(), "{word}");
    for (line, command) in chosen {
        let command = command.replace("vhost-device-ism ctl", &ctl);
        let command = command.replace("/etc/smc", &etc.path(""));
        let output = Command::new("bash").args(["-c", &command]).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.success(), "rollout.md:{line}: {command}: {said}");
    }
}

/// The end of a connection over the pool, before its input has ended.
fn end(fabric: &Fabric, args: &[&str]) -> Running {
    let pool = fabric.directory().join("smc/any.sock").display().to_string();
    let mut command = fabric.smc(&[args[0], "-v", "--tcp-ok", "--device", &pool]);
    command.args(&args[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Running(command.spawn().unwrap())
}

/// A new connection: its server, its client, and the client's word for its carrier.
fn connection(fabric: &Fabric) -> (Running, Running, String) {
    let mut server = end(fabric, &["listen", "127.0.0.1:0"]);
    let mut log = BufReader::new(server.0.stderr.take().unwrap());
    let mut line = String::new();
    log.read_line(&mut line).unwrap();
    std::thread::spawn(move || log.read_to_string(&mut String::new()));
    let port = line.trim().rsplit(':').next().unwrap().to_owned();
    let mut client = end(fabric, &["connect", "127.0.0.1", &port]);
    let mut log = BufReader::new(client.0.stderr.take().unwrap());
    let mut said = String::new();
    log.read_line(&mut said).unwrap();
    std::thread::spawn(move || log.read_to_string(&mut String::new()));
    (server, client, said)
}

fn exchange((server, client, _): &mut (Running, Running, String), word: &[u8]) {
    client.0.stdin.as_mut().unwrap().write_all(word).unwrap();
    let mut back = vec![0; word.len()];
    server.0.stdout.as_mut().unwrap().read_exact(&mut back).unwrap();
    assert_eq!(back, word);
}

#[test]
fn a_drained_pool_leaves_open_connections_alone_and_gives_new_processes_tcp() {
    let (fabric, etc) = (Fabric::start("rollout"), Dir::new("rollout-etc"));
    let mut open = connection(&fabric);
    assert!(open.2.contains("SMC-D"), "{}", open.2);
    exchange(&mut open, b"before");

    run_commands(&fabric, &etc, "ctl drain");
    exchange(&mut open, b"drained");
    // Processes with a device from before are tested with the library of `smc run`.
    let mut new = connection(&fabric);
    assert!(new.2.contains("TCP (") && new.2.contains("takes on no new connections"), "{}", new.2);
    exchange(&mut new, b"later");

    run_commands(&fabric, &etc, "ctl undrain");
    exchange(&mut open, b"again");
    let new = connection(&fabric);
    assert!(new.2.contains("SMC-D"), "{}", new.2);
    // The rest of the section writes the policy, last back to SMC.
    run_commands(&fabric, &etc, "policy.toml");
    let policy = std::fs::read_to_string(etc.path("policy.toml")).unwrap();
    assert_eq!(policy, "default = \"smc\"\n");
}

#[test]
fn the_doctor_shows_shares_and_mistakes_of_the_policy() {
    let (fabric, etc) = (Fabric::start("rollout-doctor"), Dir::new("rollout-doctor-etc"));
    let doctor = || {
        let mut command = fabric.smc(&["doctor"]);
        command.env("SMC_CONFIG", etc.path("smc.toml")).env_remove("SMC_POLICY");
        text(&command.output().unwrap().stdout)
    };
    std::fs::write(etc.path("smc.toml"), "").unwrap();
    assert!(!doctor().contains("policy.toml"), "{}", doctor());
    let rule = "[[rule]]\nuse = 'smc'\nwhen = 'connect'\nshare = '2.5%'\n";
    std::fs::write(etc.path("policy.toml"), rule).unwrap();
    let words = doctor().split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("1 rule; shares of connections: 2.50%"), "{words}");
    for (wrong, says) in [
        ("default = 'off'", "unknown variant `off`"),
        ("[[rule]]\nuse = 'smc'\nhosts = ['a']", "rule 1: the key \"hosts\" is unknown"),
    ] {
        std::fs::write(etc.path("policy.toml"), wrong).unwrap();
        let words = doctor().split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("broken policy") && words.contains(says), "{words}");
    }
}
