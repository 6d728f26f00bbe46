//! Programs of the distribution, with and without the library, and how fast they are. Not run by
//! default: `cargo test --release -p smc-preload --test programs -- --ignored --nocapture`. Programs
//! that are not installed are left out.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::path::Path;
use std::process::Command;

use common::{Fabric, Running, await_listener, free_port};

/// A program's own figure, in all four combinations; the last one is TCP.
fn measure(
    name: &str,
    server: &dyn Fn(&mut Command, u16),
    client: &dyn Fn(&mut Command, u16),
    programs: [&str; 2],
    figure: &dyn Fn(&str) -> f64,
) {
    if programs.iter().any(|program| Command::new(program).arg("--version").output().is_err()) {
        println!("{name:24} not installed");
        return;
    }
    let mut figures = Vec::new();
    for (on_server, on_client) in [(true, true), (true, false), (false, true), (false, false)] {
        let fabric = Fabric::new(8);
        let port = free_port();
        let mut command = fabric.on(on_server, Path::new(programs[0]));
        server(&mut command, port);
        let running = Running::start(&mut command);
        await_listener(port);
        let mut command = fabric.on(on_client, Path::new(programs[1]));
        if !on_server {
            command.env("SMC_RUN_CONNECT", "");
        }
        client(&mut command, port);
        let text = Running::start(&mut command).finish();
        running.stop();
        let smc = fabric.decided().0;
        assert_eq!(smc > 0, on_server && on_client, "{name}: {smc} ends on SMC");
        figures.push(figure(&text));
    }
    let [both, server, client, none] = figures[..] else { unreachable!() };
    println!(
        "{name:24} SMC {both:12.1}  TCP {none:12.1}  ratio {:5.2}   only server {:5.2}, only client \
         {:5.2}",
        both / none,
        server / none,
        client / none
    );
}

/// The number before a word, or the one after it.
fn after(text: &str, word: &str) -> f64 {
    let rest = text.split(word).nth(1).unwrap_or_default();
    let number = rest.split(|c: char| !c.is_ascii_digit() && c != '.').find(|n| !n.is_empty());
    number.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no {word:?} in {text}"))
}

#[test]
#[ignore = "takes long, and needs programs that are not everywhere"]
fn real_programs() {
    let redis = |command: &mut Command, port: u16| {
        command.args(["--port", &port.to_string(), "--save", "", "--bind", "127.0.0.1"]);
    };
    for (name, pipeline) in [("redis GET", "1"), ("redis GET, pipelined", "16")] {
        let bench = |command: &mut Command, port: u16| {
            let port = port.to_string();
            let n = if pipeline == "1" { "200000" } else { "1000000" };
            command.args(["-p", &port, "-n", n, "-c", "50", "-t", "get", "--csv", "-P", pipeline]);
        };
        measure(name, &redis, &bench, ["redis-server", "redis-benchmark"], &|text| {
            after(text, "\"GET\",")
        });
    }
    let dir = std::env::temp_dir().join(format!("smc-programs-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("small"), vec![b'x'; 612]).unwrap();
    let nginx = |command: &mut Command, port: u16| {
        let here = dir.display();
        let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {here}/{name};"))
            .concat();
        let text = format!(
            "user root; daemon off; worker_processes 2; pid {here}/pid; error_log {here}/log;\n\
             events {{}}\nhttp {{ access_log off; keepalive_requests 10000000; {paths}\n\
             server {{ listen 127.0.0.1:{port}; root {here}; }} }}\n"
        );
        let file = dir.join(format!("{port}.conf"));
        std::fs::write(&file, text).unwrap();
        command.arg("-c").arg(file);
    };
    let wrk = |command: &mut Command, port: u16| {
        let url = format!("http://127.0.0.1:{port}/small");
        command.args(["-t", "1", "-c", "20", "-d", "4", &url]);
    };
    measure("nginx, wrk keep-alive", &nginx, &wrk, ["nginx", "wrk"], &|text| {
        assert!(!text.contains("Socket errors"), "{text}");
        after(text, "Requests/sec:")
    });
    let iperf_server = |command: &mut Command, port: u16| {
        command.args(["-s", "-1", "-p", &port.to_string()]);
    };
    let iperf = |command: &mut Command, port: u16| {
        command.args(["-c", "127.0.0.1", "-p", &port.to_string(), "-t", "4", "-f", "m"]);
    };
    measure("iperf3, Mbit/s", &iperf_server, &iperf, ["iperf3", "iperf3"], &|text| {
        let line = text.lines().find(|line| line.ends_with("receiver")).unwrap();
        after(line, "Bytes")
    });
    let _ = std::fs::remove_dir_all(&dir);
}
