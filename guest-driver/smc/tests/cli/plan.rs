// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc plan`, with connections of real processes.

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

use serde_json::Value;
use smc_test_support::eventually;

use crate::support::{Dir, Running, run, text};

/// A server and its clients, as one program with this body.
const ECHO: &str = "
import socket, sys, time
def pair(server):
    client = socket.create_connection(server.getsockname())
    return client, server.accept()[0]
server = socket.create_server(('127.0.0.1', 0))
idle = pair(server)
";

/// Starts a program in Python. Returns the program and its port.
fn program(body: &str) -> (Running, u16) {
    let mut command = Command::new("python3");
    command.args(["-uc", &format!("{ECHO}{body}")]).stdout(Stdio::piped());
    let mut running = Running(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(running.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let port = line.trim().parse().unwrap();
    (running, port)
}

fn plan() -> Value {
    let output = run(&["plan", "--json", "--seconds", "1"]);
    serde_json::from_slice(&output.stdout).unwrap()
}

fn line(plan: &Value, port: u16) -> Value {
    let lines = plan["connections"].as_array().unwrap();
    lines.iter().find(|line| line["port"] == port).unwrap_or_else(|| panic!("{plan:#}")).clone()
}

#[test]
fn a_plan_tells_busy_idle_and_short_connections_apart() {
    let (_busy, busy) = program(
        "
client, served = pair(server)
print(server.getsockname()[1])
while True:
    client.sendall(bytes(16384)); served.recv(16384, socket.MSG_WAITALL)
    served.sendall(bytes(16384)); client.recv(16384, socket.MSG_WAITALL)
",
    );
    let (_idle, idle) = program("print(server.getsockname()[1]); time.sleep(600)");
    // The client closes first, and leaves a socket in TIME_WAIT.
    let (_short, short) = program(
        "
idle[0].close(); idle[1].close()
for n in range(400):
    client, served = pair(server)
    client.sendall(b'x'); served.recv(1); client.close(); served.close()
print(server.getsockname()[1])
time.sleep(600)
",
    );
    let plan = plan();
    let [busy, idle, short] = [busy, idle, short].map(|port| line(&plan, port));
    assert_eq!(busy["verdict"], "gains", "{busy:#}");
    assert_eq!((&busy["connections"], &busy["possible"]), (&2.into(), &true.into()), "{busy:#}");
    assert!(busy["saved"].as_f64().unwrap() > 0.0 && busy["lifetime"].is_null(), "{busy:#}");
    let both = [&busy["client"], &busy["server"]];
    assert!(both.iter().all(|end| end["program"].as_str().unwrap().starts_with("python3")));
    assert_eq!((&idle["verdict"], &idle["connections"]), (&"little".into(), &1.into()));
    assert_eq!((&short["verdict"], &short["client"]), (&"short".into(), &Value::Null));
    assert!(short["ended_per_second"].as_f64().unwrap() > 3.0, "{short:#}");
}

/// The server is this program, because limits of Python would concern other tests.
#[test]
fn a_plan_names_the_obstacles_of_a_service() {
    const FILE: &str = "SMC_TEST_PORT_FILE";
    if let Some(file) = std::env::var_os(FILE) {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let _ends = (TcpStream::connect(address).unwrap(), server.accept().unwrap());
        std::fs::write(file, address.port().to_string()).unwrap();
        loop {
            std::thread::park();
        }
    }
    let dir = Dir::new("plan");
    let mut command = Command::new("bash");
    let test = "plan::a_plan_names_the_obstacles_of_a_service";
    command.args(["-c", "ulimit -n 40 && exec \"$0\" --exact \"$1\""]);
    command.arg(std::env::current_exe().unwrap()).arg(test).env(FILE, dir.path("port"));
    let _limited = Running(command.stdout(Stdio::null()).spawn().unwrap());
    let mut port = None;
    eventually("the port", || {
        port = std::fs::read_to_string(dir.path("port")).ok().and_then(|port| port.parse().ok());
        port.is_some()
    });
    let port = port.unwrap();
    let found = line(&plan(), port);
    assert_eq!(found["possible"], false, "{found:#}");
    let said = text(&run(&["plan", "--seconds", "1"]).stdout);
    assert!(said.contains("the limit of descriptors is 40: SMC needs 256"), "{said}");
    assert!(!said.contains("-0.0 %"), "{said}");
    assert!(said.lines().any(|line| line.contains(&format!(":{port}")) && line.contains("TCP")));
}
