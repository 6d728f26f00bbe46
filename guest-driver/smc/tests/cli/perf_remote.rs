// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc perf --serve` and `smc perf --to`: two ends started by different processes.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Child, Output, Stdio};

use serde_json::{Value, json};

use crate::support::{Fabric, Running, eventually, is_alive, text};

const KEYS: [&str; 9] =
    ["measure", "unit", "runs", "path", "smc", "tcp", "vsock", "ratio", "vsock_ratio"];

/// A server on the fabric's first device, and its address.
fn serve(fabric: &Fabric) -> (Running, String) {
    serve_on(fabric, "127.0.0.1:0")
}

fn serve_on(fabric: &Fabric, address: &str) -> (Running, String) {
    let smc = fabric.smc(&["perf", "--serve", address]);
    // A shell in the background makes its programs ignore Ctrl-C, including the server.
    let mut command = std::process::Command::new("env");
    command.arg("--default-signal=INT").arg(smc.get_program()).args(smc.get_args());
    for (name, value) in smc.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut server = Running(command.spawn().unwrap());
    let mut log = BufReader::new(server.0.stderr.take().unwrap());
    let mut line = String::new();
    log.read_line(&mut line).unwrap();
    let port = line.split(',').next().and_then(|start| start.rsplit(':').next());
    let port: u16 = port.and_then(|port| port.parse().ok()).unwrap_or_else(|| panic!("{line}"));
    // Read the rest, so the server does not end by a closed pipe.
    std::thread::spawn(move || log.lines().for_each(drop));
    (server, format!("127.0.0.1:{port}"))
}

/// A measurement on the second device.
fn measure(fabric: &Fabric, address: &str, args: &[&str]) -> Output {
    let mut command = fabric.smc(&["perf", "--to", address, "--runs", "1", "--seconds", "0.02"]);
    command.args(args).stdin(Stdio::null()).output().unwrap()
}

/// The control connection, by hand.
struct Control {
    lines: BufReader<TcpStream>,
}

impl Control {
    /// Connected, and greeted.
    fn open(address: &str) -> Control {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(smc_test_support::TIMEOUT)).unwrap();
        let mut control = Control { lines: BufReader::new(stream) };
        assert_eq!(control.receive()["hello"]["version"], 4);
        control
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
    }

    fn ask(&mut self, request: &str) -> Value {
        writeln!(self.lines.get_mut(), "{request}").unwrap();
        self.receive()
    }
}

/// A long throughput measurement over TCP, with some things otherwise.
fn request(other: &Value) -> String {
    let mut request = json!({
        "program": "stream", "transport": "tcp", "size": 65536, "seconds": 60.0, "buffer": 65536,
        "spin_us": 50, "connections": 1, "threads": 1, "rate": 0,
    });
    for (key, value) in other.as_object().unwrap() {
        request[key] = value.clone();
    }
    request.to_string()
}

/// Process ids of the children of `parent`.
fn children(parent: &Child) -> Vec<String> {
    let pid = parent.id();
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    list.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn two_ends_measure_the_suite_and_tell_what_carried_it() {
    let fabric = Fabric::start("remote-suite");
    let (_server, address) = serve(&fabric);
    for (option, path) in [("auto", "window"), ("move", "move")] {
        let output = measure(&fabric, &address, &["--suite", "--json", "--path", option]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let rows: Vec<Value> =
            text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let names: Vec<_> = rows.iter().map(|row| row["measure"].as_str().unwrap()).collect();
        let counted = |name: &str| {
            let counts = ["kicks", "wakes", "commands"].map(|count| format!("{name}_{count}"));
            std::iter::once(name.to_owned()).chain(counts).collect::<Vec<_>>()
        };
        let [bulk, spin, sleep, short] =
            ["bulk", "rtt_spin", "rtt_sleep", "short_conn"].map(counted);
        let expected = [bulk, spin, sleep, vec!["rate_100b".to_owned()], short].concat();
        assert_eq!(names, expected);
        for row in &rows {
            assert_eq!(row.as_object().unwrap().len(), KEYS.len(), "{row}");
            assert!(KEYS.iter().all(|key| row.get(key).is_some()), "{row}");
            assert_eq!((&row["path"], &row["runs"]), (&path.into(), &1.into()), "{row}");
            let counts =
                row["measure"].as_str().unwrap().split_once('_').is_some_and(|(_, last)| {
                    ["kicks", "wakes", "commands"].iter().any(|count| last.ends_with(count))
                });
            assert!(row["smc"].as_f64().unwrap() >= 0.0, "{row}");
            for key in ["tcp", "ratio"] {
                assert_eq!(row[key].as_f64().is_some_and(|value| value > 0.0), !counts, "{row}");
            }
            assert!(row["vsock"].is_null() && row["vsock_ratio"].is_null(), "{row}");
        }
        // Each move is a kick, and carries at most 64 KiB.
        assert_eq!(rows[1]["smc"].as_f64().unwrap() >= 16.0, path == "move", "{}", rows[1]);
    }
}

#[test]
fn a_table_names_fabric_and_gids_and_a_plot_is_drawn() {
    let fabric = Fabric::start("remote-table");
    // On every address, of IPv6 too.
    let (_server, address) = serve_on(&fabric, "0");
    let plot = fabric.directory().join("far.svg");
    let file = plot.display().to_string();
    let output = measure(&fabric, &address, &["bulk", "rtt", "--plot", &file]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for words in ["window", "against TCP", "kicks/MiB", "over fabric ff00", "GID", "p99.9"] {
        assert!(table.contains(words), "{words:?} is not in\n{table}");
    }
    assert!(std::fs::read_to_string(&plot).unwrap().starts_with("<svg"));
}

#[test]
fn a_run_that_falls_back_to_tcp_fails() {
    let fabric = Fabric::start("remote-fallback");
    let (_server, address) = serve(&fabric);
    let output = measure(&fabric, &address, &["bulk", "--eid", "SOMETHING-ELSE"]);
    assert!(!output.status.success());
    let error = text(&output.stderr);
    assert!(error.contains("fell back to TCP") && error.contains("no common EID"), "{error}");
    // The server is as good as before.
    assert!(measure(&fabric, &address, &["bulk"]).status.success());
}

#[test]
fn a_server_refuses_nonsense_and_goes_on() {
    let fabric = Fabric::start("remote-refused");
    let (server, address) = serve(&fabric);
    let mut control = Control::open(&address);
    for (other, problem) in [
        (json!({"size": 1u64 << 40}), "a message of 1099511627776 bytes"),
        (json!({"seconds": 1e9}), "a run of 1000000000 s"),
        (json!({"buffer": 0}), "a receive buffer of 0 bytes"),
        (json!({"spin_us": u64::MAX}), "us of spinning"),
        (json!({"connections": 1_000_000}), "1000000 connections"),
        (json!({"transport": "unix"}), "does not reach another machine"),
    ] {
        let answer = control.ask(&request(&other));
        assert!(answer["error"].as_str().unwrap().contains(problem), "{answer}");
    }
    assert_eq!(children(&server.0), Vec::<String>::new(), "nothing was started for them");
    let answer = control.ask("{\"device\":\"/etc/passwd\"}");
    assert!(answer["error"].as_str().unwrap().contains("not a request"), "{answer}");
    drop(control);
    Control::open(&address);
}

#[test]
fn a_client_that_leaves_in_mid_run_holds_up_nobody() {
    let fabric = Fabric::start("remote-leaves");
    let (server, address) = serve(&fabric);
    let mut control = Control::open(&address);
    assert!(control.ask(&request(&json!({})))["listening"]["port"].is_u64());
    let helpers = children(&server.0);
    assert_eq!(helpers.len(), 1);
    drop(control);
    Control::open(&address);
    assert!(!is_alive(&helpers[0]), "the run's process is gone before the next client is greeted");
}

#[test]
fn the_server_ends_on_ctrl_c_with_what_it_started() {
    let fabric = Fabric::start("remote-ctrl-c");
    let (mut server, address) = serve(&fabric);
    let mut control = Control::open(&address);
    assert!(control.ask(&request(&json!({})))["listening"]["port"].is_u64());
    let helpers = children(&server.0);
    let pid = rustix::process::Pid::from_child(&server.0);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert!(!server.0.wait().unwrap().success());
    eventually("the run's process ends", || !is_alive(&helpers[0]));
}

#[test]
fn options_that_make_no_sense_together_are_refused() {
    for (args, expected) in [
        (&["--device", "x", "bulk"][..], "--serve"),
        (&["--serve", "7000", "bulk"], "cannot be used with"),
        (&["--serve", "7000", "--to", "x:1"], "cannot be used with"),
        (&["--serve", "7000", "--vsock", "3"], "cannot be used with"),
        (&["--to", "x:1", "--vsock", "4294967295"], "invalid value"),
        (&["--to", "127.0.0.1:1", "bulk_move"], "--path says"),
        (&["--to", "127.0.0.1:1", "bulk", "--size", "17M"], "a message of 17825792 bytes"),
    ] {
        let output = crate::support::run(&[&["perf"], args].concat());
        assert!(!output.status.success(), "{args:?}");
        let error = text(&output.stderr);
        assert!(error.contains(expected), "{args:?}: {error}");
    }
}
