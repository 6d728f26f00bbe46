// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc demo`.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::support::{Dir, Running, eventually, is_alive, run, smc, text};

#[test]
fn the_demo_explains_its_steps_and_leaves_nothing() {
    let dir = Dir::new("demo");
    let file = dir.path("file");
    let data: Vec<u8> = (0..200_001u32).map(|i| (i * 31 % 253) as u8).collect();
    std::fs::write(&file, &data).unwrap();
    let output = run(&["demo", &file]);
    let story = text(&output.stdout);
    assert!(output.status.success(), "{story}\n{}", text(&output.stderr));
    for words in [
        "fabric ff00",
        "Proposal, ",
        "I speak SMC v2.1",
        "Accept, ",
        "First contact",
        "Confirm, ",
        "connected by SMC-D",
        "200001 bytes",
        "SHA-256 of what came back: the same",
        "the handshake, and nothing since",
        "round trip, 64 B",
        "was killed, and the connection went on",
        "in shared memory again",
    ] {
        assert!(story.contains(words), "{words:?} is not in\n{story}");
    }
    assert!(story.lines().count() < 60, "{story}");
    let socket = story.lines().find(|line| line.ends_with("server.sock")).unwrap();
    assert!(!std::path::Path::new(socket.trim()).parent().unwrap().exists(), "{socket}");
}

#[test]
fn a_killed_demo_takes_its_processes_and_sockets_with_it() {
    let mut command = smc(&["demo", "--size", "100G"]);
    let mut demo = Running(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut story = String::new();
    let mut out = BufReader::new(demo.0.stdout.take().unwrap());
    while !story.contains("3. The handshake") {
        assert_ne!(out.read_line(&mut story).unwrap(), 0, "{story}");
    }
    demo.0.kill().unwrap();
    demo.0.wait().unwrap();
    let socket = story.lines().find(|line| line.ends_with("server.sock")).unwrap();
    let dir = std::path::Path::new(socket.trim()).parent().unwrap().to_owned();
    eventually("the sockets are removed", || !dir.exists());
    let pids: Vec<_> =
        story.lines().filter_map(|line| line.split("process ").nth(1)?.split(',').next()).collect();
    assert_eq!(pids.len(), 3, "{story}");
    eventually("the processes end", || !pids.iter().any(|pid| is_alive(pid)));
}

#[test]
fn a_file_that_is_not_there_is_said_before_anything_starts() {
    let output = run(&["demo", "/nowhere/file"]);
    assert!(!output.status.success());
    assert!(output.stdout.is_empty());
    assert!(text(&output.stderr).contains("cannot open /nowhere/file"));
}
