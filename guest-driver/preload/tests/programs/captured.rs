// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc capture` of redis, of the workers of nginx, and of a server's forked children, as decoded
//! by tshark.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::bed::{Bed, Net, Program, Side, are_installed};
use crate::common::{self, Running, eventually};

/// A server with a forked child for each connection, which echoes in capitals.
const FORKS: &str = "
import socketserver, sys
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(4096):
            self.request.sendall(data.upper())
class Server(socketserver.ForkingTCPServer):
    allow_reuse_address = True
Server((sys.argv[1], int(sys.argv[2])), Echo).serve_forever()
";

/// A running capture, with tshark's view of its file.
struct Capture {
    _running: Running,
    file: PathBuf,
}

impl Capture {
    fn tshark(&self, options: &[&str]) -> String {
        let mut tshark = Command::new("tshark");
        // tshark reads the file while it grows.
        tshark.arg("-r").arg(&self.file).args(options).stdin(Stdio::null());
        // The tables of ports of the user are not the test's.
        tshark.env("HOME", self.file.parent().unwrap());
        String::from_utf8_lossy(&tshark.output().unwrap().stdout).into_owned()
    }
}

fn server(bed: &Bed<'_>, port: u16, program: &Program) -> Running {
    let mut server = Running::start(&mut bed.command(Side::Server, program, true, false));
    bed.await_listener(port, &mut server);
    server
}

fn client(bed: &Bed<'_>, program: &Program) -> String {
    Running::start(&mut bed.command(Side::Client, program, true, false)).finish()
}

fn redis(bed: &Bed<'_>, capture: &Capture) {
    let place = bed.place(6410);
    let (address, port) = (place.address, place.port);
    let there = format!("--port {port} --bind {address} --dir {}", place.dir.display());
    let program = Program::new(format!("redis-server {there} --protected-mode no"));
    let _server = server(bed, port, &program.and(&["--save", ""]));
    let cli =
        |line: &str| client(bed, &Program::new(format!("redis-cli -h {address} -p {port} {line}")));
    let as_redis = format!("tcp.port=={port},resp");
    let mut seen = String::new();
    let mut turn = 0;
    // The capture of a process begins soon after its first connection.
    eventually(|| {
        turn += 1;
        assert!(cli(&format!("set key{turn} value{turn}")).contains("OK"));
        seen = capture.tshark(&["-d", &as_redis, "-Y", "resp", "-V"]);
        let has = |text: &str| seen.contains(&format!("{text}{}", turn - 1));
        turn > 1 && has("key") && has("value") && seen.contains("OK")
    });
    assert!(seen.contains("Bulk String"), "{seen}");
}

/// The objects found by tshark in the responses are the served ones.
fn nginx(bed: &Bed<'_>, capture: &Capture) {
    let place = bed.place(6411);
    let (address, port) = (place.address, place.port);
    let program = crate::nginx(&place);
    let mut wanted = Vec::new();
    for n in 0..8_usize {
        let bytes = common::pattern(150_000 + n);
        std::fs::write(place.dir.join(format!("object-{n}")), &bytes).unwrap();
        wanted.push(bytes);
    }
    let _server = server(bed, port, &program);
    let out = place.dir.join("objects");
    let as_http = format!("tcp.port=={port},http");
    let export = format!("http,{}", out.display());
    let found = |n: usize| {
        let path = out.join(format!("object-{n}"));
        std::fs::read(path).is_ok_and(|bytes| bytes == wanted[n])
    };
    eventually(|| {
        // Each worker in turn, with keep-alive and without.
        for (n, wanted) in wanted.iter().enumerate() {
            let url = format!("http://{address}:{port}/object-{n}");
            let both = format!("{url} -o {0}/got-{n} {url} -o {0}/again-{n}", place.dir.display());
            let close = if n % 2 == 0 { "-H Connection:close" } else { "" };
            client(bed, &Program::new(format!("curl -sS {close} {both}")));
            assert!(std::fs::read(place.dir.join(format!("again-{n}"))).unwrap() == *wanted);
        }
        let _ = std::fs::remove_dir_all(&out);
        capture.tshark(&["-q", "-d", &as_http, "--export-objects", &export]);
        (0..wanted.len()).all(found)
    });
    // Workers are interfaces of their own.
    let names = capture.tshark(&[
        "-Y",
        &format!("tcp.port=={port}"),
        "-T",
        "fields",
        "-e",
        "frame.interface_name",
    ]);
    assert!(names.contains("nginx "), "{names}");
}

/// A child has the connection of its parent.
fn forks(bed: &Bed<'_>, capture: &Capture) {
    let place = bed.place(6412);
    let (address, port) = (place.address, place.port);
    let script = place.dir.join("forks.py");
    std::fs::write(&script, FORKS).unwrap();
    let python = format!("/usr/bin/python3 {} {address} {port}", script.display());
    let _server = server(bed, port, &Program::new(python));
    let of_port = format!("tcp.port=={port}");
    let mut turn = 0;
    eventually(|| {
        turn += 1;
        // The second word is sent when the capture of the child has begun.
        let line = format!(
            "exec 3<>/dev/tcp/{address}/{port}
             for word in word{turn} more{turn}; do
                 echo $word >&3; read -u 3 back; echo $back; sleep 0.8
             done"
        );
        let said = client(bed, &Program::new("bash -c").and(&[line.as_str()]));
        assert!(
            said.contains(&format!("WORD{turn}")) && said.contains(&format!("MORE{turn}")),
            "{said}"
        );
        let data = capture.tshark(&["-Y", &of_port, "-T", "fields", "-e", "tcp.payload"]);
        let hex = |text: &str| text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
        data.contains(&hex(&format!("more{turn}"))) && data.contains(&hex(&format!("MORE{turn}")))
    });
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn redis_and_nginx_and_forked_children_are_captured() {
    let needed = ["redis-server", "redis-cli", "nginx", "curl", "/usr/bin/python3", "tshark"];
    if !are_installed("captures", &needed) {
        return;
    }
    let net = Net::new();
    let bed = Bed::new(&net);
    let file = bed.place(0).dir.join("a.pcapng");
    let mut command = bed.smc("root");
    command.args(["capture", "--write"]).arg(&file);
    let capture = Capture { _running: Running::start(&mut command), file };
    eventually(|| Path::new(&capture.file).exists());
    redis(&bed, &capture);
    nginx(&bed, &capture);
    forks(&bed, &capture);
    // The captured packets are whole, with right checksums.
    let faults = capture.tshark(&[
        "-o",
        "tcp.check_checksum:TRUE",
        "-o",
        "ip.check_checksum:TRUE",
        "-Y",
        "tcp.checksum.status==0 || ip.checksum.status==0 || tcp.analysis.retransmission",
    ]);
    assert_eq!(faults, "");
}
