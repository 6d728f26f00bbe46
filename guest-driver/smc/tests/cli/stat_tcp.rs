// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc stat connections`: TCP connections of programs under `smc run`, with the reason.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::support::{Dir, Fabric, Running, eventually, smc, text};

/// The variable that turns this program into a server: the file for the server's port.
const SERVER: &str = "SMC_STAT_TCP_SERVER";

/// Not a test, but the server of one: accepts a client, reads a byte, and stays.
#[test]
fn serves_if_asked_to() {
    let Some(file) = std::env::var_os(SERVER) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    std::fs::write(file, listener.local_addr().unwrap().port().to_string()).unwrap();
    let (mut client, _) = listener.accept().unwrap();
    client.read_exact(&mut [0]).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

/// A program connecting to a port and staying: bash, without any knowledge of SMC.
fn program(command: &mut Command, port: u16) -> Running {
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port}; read -u 3 line; exit 0");
    command.args(["bash", "-c", &script]);
    Running(command.stdin(Stdio::null()).spawn().unwrap())
}

/// The connections to or from a port, with the pid of the process.
fn connections(command: &mut Command, port: u16) -> Vec<(u64, Value)> {
    let output = command.args(["--json", "--port", &port.to_string()]).output().unwrap();
    // Without a process there is an error.
    let Ok(all) = serde_json::from_slice::<Value>(&output.stdout) else { return Vec::new() };
    let of = |process: &Value| {
        let pid = process["pid"].as_u64().unwrap();
        let list = process["connections"].as_array().unwrap().clone();
        list.into_iter().map(move |connection| (pid, connection)).collect::<Vec<_>>()
    };
    all["processes"].as_array().unwrap().iter().flat_map(of).collect()
}

/// The only connection of a port, once its reason contains `says`.
fn only(fabric: &Fabric, what: &str, port: u16, says: &str) -> (u64, Value) {
    let mut seen = Vec::new();
    eventually(&format!("{what}: a reason with {says:?}"), || {
        seen = connections(&mut fabric.smc(&["stat"]), port);
        seen.iter().any(|(_, one)| one["reason"]["says"].as_str().unwrap_or("").contains(says))
    });
    let [one] = &seen[..] else { panic!("{what}: {seen:?}") };
    one.clone()
}

#[test]
fn a_connection_that_a_program_makes_is_listed_with_its_reason() {
    let fabric = Fabric::start("stat-tcp");
    let place = Dir::new("stat-tcp-files");
    let policy = place.path("policy.toml");
    std::fs::write(&policy, "default = \"tcp\"\n").unwrap();
    let none = place.path("none.sock");
    let cases: [(&str, &[&str], &str); 4] = [
        ("a policy", &["--rendezvous", "off", "--peer", "*", "--policy", &policy], "policy"),
        ("no device", &["--rendezvous", "off", "--peer", "*", "--device", &none], "no virtio-ism"),
        ("no rule", &["--rendezvous", "off"], "no rule"),
        ("another peer", &["--rendezvous", "off", "--peer", "10.9.9.9"], "no rule"),
    ];
    for (what, options, says) in cases {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut command = fabric.smc(&["run"]);
        command.args(options).stderr(Stdio::null());
        let client = program(&mut command, port);
        let _accepted = listener.accept().unwrap();
        let (pid, connection) = only(&fabric, what, port, says);
        assert_eq!(pid, u64::from(client.0.id()), "{what}");
        let state = (&connection["kind"], &connection["state"]);
        assert_eq!(state, (&"TCP".into(), &"Established".into()), "{what}");
        assert!(connection["peer"] == format!("127.0.0.1:{port}"), "{what}: {connection}");

        let port = port.to_string();
        let table = fabric.smc(&["stat", "connections", "--port", &port]).output().unwrap();
        let table = text(&table.stdout);
        assert!(table.contains("bash") && table.contains(says), "{what}: {table}");
    }
}

/// A program's value in `smc stat metrics`, by the start of the line.
fn metric(fabric: &Fabric, start: &str) -> Option<u64> {
    let all = text(&fabric.smc(&["stat", "metrics"]).output().unwrap().stdout);
    let line = all.lines().find(|line| line.starts_with(start))?.to_owned();
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn connections_that_never_came_to_a_handshake_are_counted_when_they_are_over() {
    let place = Dir::new("stat-tcp-counts");
    let policy = place.path("policy.toml");
    std::fs::write(&policy, "default = \"tcp\"\n").unwrap();
    let cases: [(&str, &[&str], &str); 2] =
        [("rule", &[], "NORULE"), ("policy", &["--peer", "*", "--policy", &policy], "POLICY")];
    for (name, options, reason) in cases {
        let fabric = Fabric::start(&format!("stat-tcp-{name}"));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // Three are over, and one stays.
        let script = format!(
            "for i in 1 2 3; do exec 3<>/dev/tcp/127.0.0.1/{port}; exec 3>&-; done
             exec 3<>/dev/tcp/127.0.0.1/{port}; echo; read -u 3 line"
        );
        let mut command = fabric.smc(&["run", "--rendezvous", "off"]);
        command.args(options).args(["bash", "-c", &script]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut client = Running(command.spawn().unwrap());
        client.0.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let by_reason = format!("smc_tcp_total{{program=\"bash\",reason=\"{reason}\"");
        assert_eq!(metric(&fabric, &by_reason), Some(4), "{name}");
        let handshakes = "smc_handshakes_total{program=\"bash\",kind=\"TCP\"";
        assert_eq!(metric(&fabric, handshakes), Some(4), "{name}");
        let open = "smc_connections{program=\"bash\",kind=\"TCP\"";
        assert_eq!(metric(&fabric, open), Some(1), "{name}");
        let totals = text(&fabric.smc(&["stat", "totals"]).output().unwrap().stdout);
        assert!(totals.contains(reason), "{totals}");
        let stats = text(&fabric.smc_as("smcd").arg("stats").output().unwrap().stdout);
        let line = stats.lines().find(|line| line.contains("TCP fallback")).unwrap();
        assert!(line.ends_with(" 4"), "{stats}");
    }
}

#[test]
fn a_connection_that_a_program_accepts_is_listed_with_its_reason() {
    let fabric = Fabric::start("stat-tcp-server");
    let place = Dir::new("stat-tcp-server-files");
    let program = std::env::current_exe().unwrap();
    let port_of_clients = "--accept=*:1";
    for (what, option, says) in
        [("a plain client", None, "plain TCP"), ("no rule", Some(port_of_clients), "no rule")]
    {
        let file = place.path(&what.replace(' ', "-"));
        let mut command = fabric.smc(&["run", "--rendezvous", "off"]);
        command.args(option).arg(&program).args(["--exact", "stat_tcp::serves_if_asked_to"]);
        command.env(SERVER, &file).stdout(Stdio::null()).stderr(Stdio::null());
        let server = Running(command.spawn().unwrap());
        let mut port = 0;
        eventually("it listens", || {
            port = std::fs::read_to_string(&file).unwrap_or_default().parse().unwrap_or(0);
            port != 0
        });
        let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        client.write_all(b"x").unwrap();
        let (pid, connection) = only(&fabric, what, port, says);
        assert_eq!(pid, u64::from(server.0.id()), "{what}");
        assert!(connection["local"] == format!("127.0.0.1:{port}"), "{what}: {connection}");
    }
}

/// Root sees the programs of another user, without looking into the user's directory.
#[test]
fn root_sees_connections_of_others_and_others_do_not_see_those_of_root() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let fabric = Fabric::start("stat-root");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // The observer does not know the program's runtime directory.
    let mut command = fabric.smc(&["run", "--rendezvous", "off", "--peer", "10.9.9.9"]);
    let client = program(&mut command, port);
    let _accepted = listener.accept().unwrap();
    let elsewhere = Dir::new("stat-root-elsewhere");
    let as_root = |options: &[&str]| {
        let mut command = smc(&["stat"]);
        command.args(options).env("XDG_RUNTIME_DIR", &elsewhere.0);
        connections(&mut command, port)
    };
    eventually("root sees it", || {
        as_root(&["--all"]).iter().any(|(pid, _)| *pid == u64::from(client.0.id()))
    });
    assert!(as_root(&[]).is_empty(), "a runtime directory of its own");
    let mut other = Command::new("setpriv");
    other.args(["--reuid", "4243", "--regid", "4243", "--clear-groups"]);
    let program = elsewhere.path("smc");
    std::fs::copy(env!("CARGO_BIN_EXE_smc"), &program).unwrap();
    other.args([&program, "stat", "--all"]).env("XDG_RUNTIME_DIR", "/nonexistent");
    assert!(connections(&mut other, port).is_empty());
}

/// Like servers started by root: the program cannot write the directory of its starter.
#[test]
fn a_program_that_becomes_another_user_is_listed_with_its_reason() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let fabric = Fabric::start("stat-becomes");
    let none = fabric.directory().join("none.sock");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut command = fabric.smc(&["run", "--rendezvous", "off", "--peer", "*", "--device"]);
    command.arg(&none).args(["setpriv", "--reuid", "4243", "--regid", "4243", "--clear-groups"]);
    let client = program(command.stderr(Stdio::null()), port);
    let _accepted = listener.accept().unwrap();
    let (pid, _) = only(&fabric, "another user", port, "no virtio-ism");
    assert_eq!(pid, u64::from(client.0.id()));
}

/// A view on a terminal of 80 columns. Checks the length of the lines.
fn at_eighty_columns(fabric: &Fabric, view: &str) -> String {
    let program = env!("CARGO_BIN_EXE_smc");
    let mut command = Command::new("script");
    let shell = format!("stty cols 80 rows 24; '{program}' stat {view}");
    command.args(["-qec", &shell, "/dev/null"]).env("XDG_RUNTIME_DIR", fabric.directory());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let shown = text(&output.stdout);
    for line in shown.lines().map(str::trim_end) {
        assert!(line.chars().count() <= 80, "{line:?} in {shown}");
    }
    shown
}

/// A terminal of 80 columns shows a connection in one line, and no word is cut in any view.
#[test]
fn eighty_columns_are_enough() {
    let fabric = Fabric::start("stat-narrow");
    let (mut server, port, _log) = fabric.listen(&["--tcp-ok", "--eid", "HERE"]);
    let client = crate::stat::client(&fabric, port, &["--tcp-ok", "--eid", "THERE"]);
    server.0.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    let shown = at_eighty_columns(&fabric, "connections");
    let pid = client.0.id().to_string();
    let line = shown.lines().find(|line| line.contains(&pid)).unwrap_or_else(|| panic!("{shown}"));
    assert!(line.contains(&format!("127.0.0.1:{port}")) && line.contains("TCP "), "{shown}");

    let all = fabric.smc(&["stat", "--json"]).output().unwrap();
    let all: Value = serde_json::from_slice(&all.stdout).unwrap();
    let guests = all["fabrics"][0]["guests"].as_array().unwrap();
    let gids: Vec<_> = guests.iter().filter_map(|guest| guest["gid"].as_str()).collect();
    assert!(!gids.is_empty(), "{all}");
    let name = format!("smc {pid}");
    for (view, words) in
        [("fabric", &["guest", "GID", "commands"][..]), ("totals", &["process", "TCP"])]
    {
        let shown = at_eighty_columns(&fabric, view);
        let both = at_eighty_columns(&fabric, "");
        let of_view = if view == "fabric" { &gids[..] } else { &[name.as_str()] };
        for word in words.iter().chain(of_view) {
            assert!(shown.contains(word), "{word} in {shown}");
        }
        for word in of_view {
            assert!(both.contains(word), "{word} in {both}");
        }
    }
}
