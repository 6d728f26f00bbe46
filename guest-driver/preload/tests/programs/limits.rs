// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Servers at their limits of descriptors, with as many clients as on TCP.

use crate::bed::{Net, Place, Program};
use crate::case::{Carried, times};
use crate::nginx_with;
use crate::script::{SERVE, Script, code};

/// `clients` clients of `code/many.py`, with requests of this kind.
fn run(
    name: &str,
    needs: &[&str],
    server: &dyn Fn(&Place) -> Program,
    (kind, clients): (&str, u32),
    carried: Carried,
) {
    let many = code("many.py");
    let client = format!(
        r#"
        for i in $(seq $N); do
            /usr/bin/python3 {many} {kind} $A $P {clients} || fail "turn $i"
        done
        rate $N
        "#
    );
    Script { name, needs, server, client: &client, count: times(1, 3), carried }.run(&Net::new());
}

/// A program with this limit, as soft and hard limit.
fn limited(limit: u32, program: &Program) -> Program {
    Program::new(format!("prlimit --nofile={limit}:{limit} {}", program.line()))
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn nginx_at_its_limit() {
    let server = |place: &Place| {
        let nginx = nginx_with(place, "", "");
        let file = place.dir.join("nginx.conf");
        let text = std::fs::read_to_string(&file).unwrap();
        let text = text.replace("worker_processes 3", "worker_processes 1");
        let text = text.replace("events {}", "events { worker_connections 1000; }");
        std::fs::write(&file, text).unwrap();
        limited(1024, &nginx)
    };
    run("nginx, 800 clients at 1,024", &["nginx"], &server, ("http", 800), Carried::Both);
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn redis_at_its_limit() {
    let server = |place: &Place| {
        let Place { address, port, dir } = place;
        let there = format!("--port {port} --bind {address} --dir {}", dir.display());
        let redis = Program::new(format!("redis-server {there} --protected-mode no --save ''"));
        limited(1100, &redis)
    };
    run(
        "redis, 1,000 clients at 1,100",
        &["redis-server"],
        &server,
        ("redis", 1000),
        Carried::Both,
    );
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn haproxy_at_its_limit() {
    let server = |place: &Place| {
        let Place { address, port, .. } = place;
        let text = format!(
            r"
            cat >$D/haproxy.cfg <<END
global
    maxconn 500
defaults
    mode tcp
    timeout connect 30s
    timeout client 60s
    timeout server 60s
frontend front
    bind {address}:{port}
    default_backend back
backend back
    server one {address}:$((P + 1))
END
            run /usr/bin/python3 -c '{ECHO}' $A $((P + 1))
            ulimit -n 1024
            run haproxy -f $D/haproxy.cfg
            "
        );
        place.script("server", &(text + SERVE))
    };
    run("haproxy, 400 clients at 1,024", &["haproxy"], &server, ("echo", 400), Carried::Server);
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn asyncio_at_its_limit() {
    let server = |place: &Place| {
        // The driver's numbers are beyond a soft limit.
        let text = format!("ulimit -Sn 1024\nrun /usr/bin/python3 -c '{ECHO}' $A $P\n");
        place.script("server", &(text + SERVE))
    };
    run("asyncio, 1,000 clients at 1,024", &["python3"], &server, ("echo", 1000), Carried::Both);
}

/// An echo server of asyncio.
const ECHO: &str = r"
import asyncio, sys
async def serve(reader, writer):
    while data := await reader.read(1 << 14):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(serve, sys.argv[1], int(sys.argv[2]), backlog=1024)
    await server.serve_forever()
asyncio.run(main())
";
