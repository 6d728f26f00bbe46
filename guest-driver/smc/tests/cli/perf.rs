// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc perf`.

use serde_json::Value;

use crate::support::{Dir, run, text};

const KEYS: [&str; 17] = [
    "samples",
    "measure",
    "unit",
    "runs",
    "smc",
    "tcp",
    "unix",
    "limit",
    "ratio",
    "ratio_low",
    "ratio_high",
    "cpu_unit",
    "cpu_smc",
    "cpu_tcp",
    "cpu_unix",
    "cpu_ratio",
    "others",
];

fn rows(args: &[&str]) -> Vec<Value> {
    let output = run(args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_suite_prints_an_object_per_measure() {
    let rows = rows(&["perf", "--suite", "--json", "--runs", "1", "--seconds", "0.02"]);
    let names: Vec<_> = rows.iter().map(|row| row["measure"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "latency_1k",
            "latency_1k_p99",
            "latency_10k",
            "latency_10k_p99",
            "rr_threads",
            "echo_epoll",
            "short_conn",
            "short_conn_1",
            "cpu_1g",
            "bulk_window",
            "bulk_move",
            "rtt_spin",
            "rtt_sleep",
            "rate_100b",
            "echo_200",
        ]
    );
    for row in &rows {
        let keys: Vec<_> = row.as_object().unwrap().keys().collect();
        assert_eq!(keys.len(), KEYS.len(), "{row}");
        assert!(KEYS.iter().all(|key| row.get(key).is_some()), "{row}");
        assert_eq!(row["runs"], 1);
        for key in ["smc", "tcp", "unix", "ratio", "ratio_low", "ratio_high"] {
            assert!(row[key].as_f64().unwrap() > 0.0, "{key} of {row}");
        }
        // In 20 ms the kernel may not have charged anything yet.
        let p99 = row["measure"].as_str().unwrap().ends_with("_p99");
        for key in ["cpu_smc", "cpu_tcp", "cpu_unix", "others"] {
            assert_eq!(row[key].as_f64().is_some_and(|time| time >= 0.0), !p99, "{key} of {row}");
        }
        let has_limit = matches!(
            row["measure"].as_str(),
            Some("bulk_window" | "bulk_move" | "rtt_spin" | "rate_100b")
        );
        assert_eq!(row["limit"].is_number(), has_limit, "{row}");
        let value = |key: &str| row[key].as_f64().unwrap();
        let ratio = match row["unit"].as_str() {
            Some("us" | "s/GB") => value("tcp") / value("smc"),
            _ => value("smc") / value("tcp"),
        };
        assert!((value("ratio") / ratio - 1.0).abs() < 0.001, "{row}");
    }
}

#[test]
fn one_measure_is_a_table_and_a_plot() {
    let dir = Dir::new("plot");
    let plot = dir.path("plot.svg");
    let args = ["perf", "rtt", "--size", "1K", "--runs", "1", "--seconds", "0.02", "--plot", &plot];
    let output = run(&args);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for words in ["round trip, 1 KiB", "SMC-D", "p99.9", "raw shared memory"] {
        assert!(table.contains(words), "{words:?} is not in\n{table}");
    }
    assert!(std::fs::read_to_string(&plot).unwrap().starts_with("<svg"));
}

#[test]
fn connections_bound_to_their_device_are_measured_beside_others() {
    let arguments = ["--json", "--bound", "--runs", "1", "--seconds", "0.02"];
    let rows = rows(&[&["perf", "bulk", "memory", "--connections", "20"], &arguments[..]].concat());
    let value = |name: &str, key: &str| {
        let row = rows.iter().find(|row| row["measure"] == name);
        row.unwrap_or_else(|| panic!("{rows:?}"))[key].as_f64()
    };
    let ratio = value("bulk_window", "bound_ratio").unwrap();
    let expected = value("bulk_window", "smc").unwrap() / value("bulk_window", "bound").unwrap();
    assert!((expected / ratio - 1.0).abs() < 0.001, "{rows:?}");
    assert_eq!(value("bulk_move", "bound"), None, "the window is measured, not moves");
    assert!(value("memory_bound_connection_server", "smc").unwrap() < 1e6, "{rows:?}");
}

#[test]
fn memory_is_measured_with_a_hundred_devices() {
    let rows = rows(&["perf", "memory", "--json", "--connections", "20"]);
    let value = |name: &str| {
        let row = rows.iter().find(|row| row["measure"] == name);
        row.unwrap_or_else(|| panic!("{rows:?}"))["smc"].as_f64().unwrap()
    };
    assert!((1.0..1000.0).contains(&value("memory_daemon_100_devices")), "{rows:?}");
    assert!(value("memory_connection_server") < 1e6, "{rows:?}");
    assert!(value("memory_connection_slabs") >= 65536.0, "two rings: {rows:?}");
    assert!(value("descriptors_connection_client") >= 1.0, "{rows:?}");
}

/// `smc perf` in namespaces by these options of unshare(1), with the peers that need root.
fn beside(options: &[&str]) -> Option<std::process::Output> {
    let mut command = smc_test_support::unshare(options)?;
    command.args(["sh", "-c", "ip link set lo up; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_smc")]);
    command.args(["perf", "short_conn", "rtt_sleep", "--beside", "veth", "--beside", "fast-open"]);
    command.args(["--json", "--runs", "1", "--seconds", "0.02"]);
    Some(command.output().unwrap())
}

#[test]
fn peers_with_a_network_of_their_own_are_measured_beside_others() {
    let Some(output) = beside(&["--net"]) else { return };
    assert!(output.status.success(), "{}", text(&output.stderr));
    let rows: Vec<Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let value = |row: usize, peer: &str, key: &str| rows[row]["beside"][peer][key].as_f64();
    for (row, peer) in [(0, "veth"), (0, "fast-open"), (1, "veth")] {
        for key in ["value", "ratio"] {
            assert!(value(row, peer, key).unwrap() > 0.0, "{key} of {peer} in {rows:?}");
        }
        assert!(value(row, peer, "cpu").unwrap() >= 0.0, "{rows:?}");
    }
    assert_eq!(value(1, "fast-open", "value"), None, "no connection is made in the measurement");
    let ratio = value(1, "veth", "value").unwrap() / rows[1]["smc"].as_f64().unwrap();
    assert!((value(1, "veth", "ratio").unwrap() / ratio - 1.0).abs() < 0.001, "{rows:?}");
}

#[test]
fn peers_without_rights_are_refused_by_name_and_the_others_measured() {
    // Without a mapping the user is no root in the namespace.
    let mut command = std::process::Command::new("unshare");
    command.args(["--user", env!("CARGO_BIN_EXE_smc"), "perf", "rtt_sleep", "--beside", "veth"]);
    command.args(["--beside", "sockmap", "--json", "--runs", "1", "--seconds", "0.02"]);
    let output = command.output().unwrap();
    let error = text(&output.stderr);
    if error.contains("unshare: ") {
        return smc_test_support::leave_out("no user namespaces");
    }
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("TCP by veth: a network namespace needs root"), "{error}");
    assert!(error.contains("TCP by sockmap: a map of sockets: "), "{error}");
    let row: Value = serde_json::from_str(text(&output.stdout).trim()).unwrap();
    assert!(row["ratio"].is_number() && row.get("beside").is_none(), "{row}");
}

#[test]
fn a_map_of_sockets_is_measured_beside_others_and_leaves_no_cgroup() {
    if !rustix::process::geteuid().is_root() {
        return smc_test_support::leave_out("a map of sockets takes root");
    }
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_smc"));
    command.args(["perf", "bulk_window", "short_conn", "--beside", "sockmap"]);
    command.args(["--json", "--runs", "1", "--seconds", "0.02"]);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let smc = command.spawn().unwrap();
    let name = format!("smc-perf-{}", smc.id());
    let output = smc.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    for line in text(&output.stdout).lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        assert!(row["beside"]["sockmap"]["value"].as_f64().unwrap() > 0.0, "{row}");
    }
    let membership = std::fs::read_to_string("/proc/self/cgroup").unwrap();
    let own = membership.lines().find_map(|line| line.strip_prefix("0::/")).unwrap();
    let mounted = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(std::path::Path::new);
    let left = mounted.iter().find(|mount| mount.join(own).join(&name).exists());
    assert_eq!(left, None, "{name}");
}
