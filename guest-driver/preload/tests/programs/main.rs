// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs of the distribution, each end with and without `smc run`, in two network namespaces:
//! they must work in all four combinations, on SMC if both ends have the library, and `smc stat`
//! must show so.
//!
//! `tests/programs.sh` installs the programs and runs this. With `SMC_PROGRAMS_ROUNDS=N` SMC and
//! TCP take turns N times and a line per program compares them; `SMC_PROGRAMS_SECONDS` is the time
//! of each.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(unreachable_pub, reason = "a program of tests has no public")]

mod bed;
mod captured;
mod case;
#[path = "../common/mod.rs"]
mod common;
mod databases;
mod echo;
mod files;
mod handed_on;
mod languages;
mod limits;
mod messages;
mod proxies;
mod room;
mod script;
mod sessions;
#[cfg(target_arch = "x86_64")]
mod static_programs;
mod streams;
mod web;

use bed::{Net, Place, Program};
use case::{Carried, Case, after, seconds};

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn redis() {
    let net = Net::new();
    // As often as possible: a forked child saves the memory, and inherits the connections.
    let saving = "--save 1 1";
    for (name, what, pipeline, save, wanted) in [
        ("redis GET", "GET", 1, "", 1.35),
        ("redis GET, pipelined", "GET", 16, "", 0.9),
        ("redis SET while saving", "SET", 1, saving, 0.9),
    ] {
        let server = |place: &Place| {
            let Place { address, port, dir } = place;
            let there = format!("--port {port} --bind {address} --dir {}", dir.display());
            Program::new(format!("redis-server {there} --protected-mode no {save}"))
                .and(if save.is_empty() { &["--save", ""] } else { &[] })
        };
        let client = |place: &Place| {
            let Place { address, port, .. } = place;
            let n = if pipeline == 1 { 60_000 } else { 400_000 } * seconds();
            let what = what.to_lowercase();
            Program::new(format!(
                "redis-benchmark -h {address} -p {port} -n {n} -c 50 -t {what} --csv -P {pipeline}"
            ))
        };
        Case {
            name,
            needs: &["redis-server", "redis-benchmark"],
            server: &server,
            client: &client,
            figure: &|text| after(text, &format!("\"{what}\",")),
            seen_by: Some("root"),
            carried: Carried::Both,
            wanted,
        }
        .run(&net);
    }
}

/// nginx with workers; the served files are in the same directory.
fn nginx(place: &Place) -> Program {
    nginx_with(place, "", "")
}

/// Like [`nginx`], with TLS and a certificate of its own, which is in the directory as well.
fn nginx_with_tls(place: &Place) -> Program {
    let Place { address, dir, .. } = place;
    let [key, certificate] = ["key.pem", "certificate.pem"].map(|file| dir.join(file));
    let mut openssl = std::process::Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]);
    openssl.args(["-nodes", "-days", "2", "-subj", "/CN=smc", "-addext"]);
    openssl.arg(format!("subjectAltName=IP:{address}"));
    let output = openssl.arg("-keyout").arg(&key).arg("-out").arg(&certificate).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let (key, certificate) = (key.display(), certificate.display());
    nginx_with(place, "ssl", &format!("ssl_certificate {certificate}; ssl_certificate_key {key};"))
}

fn nginx_with(place: &Place, listen: &str, more: &str) -> Program {
    let Place { address, port, dir } = place;
    let here = dir.display();
    std::fs::write(dir.join("small"), vec![b'x'; 612]).unwrap();
    std::fs::write(dir.join("large"), common::pattern(40_000_000)).unwrap();
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {here}/{name};"))
        .concat();
    let user = if bed::is_root() { "user root;" } else { "" };
    let text = format!(
        "{user} daemon off; worker_processes 3; pid {here}/pid; error_log {here}/log;\n\
         events {{}}\nhttp {{ access_log off; keepalive_requests 10000000; {paths} sendfile on;\n\
         server {{ listen {address}:{port} {listen}; root {here}; {more} }} }}\n"
    );
    let file = dir.join("nginx.conf");
    std::fs::write(&file, text).unwrap();
    Program::new(format!("nginx -e {here}/log -c {}", file.display()))
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn nginx_and_wrk() {
    let net = Net::new();
    let client = |place: &Place| {
        let Place { address, port, .. } = place;
        let time = seconds();
        Program::new(format!("wrk -t 1 -c 20 -d {time} http://{address}:{port}/small"))
    };
    Case {
        name: "nginx, wrk keep-alive",
        needs: &["nginx", "wrk"],
        server: &nginx,
        client: &client,
        figure: &|text| {
            assert!(!text.contains("Socket errors") && !text.contains("Non-2xx"), "{text}");
            after(text, "Requests/sec:")
        },
        seen_by: Some("root"),
        carried: Carried::Both,
        wanted: 1.34,
    }
    .run(&net);
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn nginx_and_curl() {
    fetch("nginx, curl 40 MB", &["nginx", "curl"], &nginx, "http");
}

/// TLS runs above the socket, on SMC as on TCP (SEC-5).
// Shows: SEC-5.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn nginx_and_curl_with_tls() {
    let needs = &["nginx", "curl", "openssl"];
    fetch("nginx, curl 40 MB by TLS", needs, &nginx_with_tls, "https");
}

fn fetch(name: &str, needs: &[&str], server: &dyn Fn(&Place) -> Program, scheme: &str) {
    let net = Net::new();
    let client = |place: &Place| {
        let Place { address, port, dir } = place;
        // Five times over one connection, and the bytes are compared below.
        let url = format!("{scheme}://{address}:{port}/large");
        let to = dir.join("got");
        let line: String = (0..5).map(|n| format!("{url} -o {}{n} ", to.display())).collect();
        let file = dir.join("fetch.sh");
        let trust = match scheme {
            "https" => format!("--cacert {}/certificate.pem", dir.display()),
            _ => String::new(),
        };
        let text = format!(
            "set -e\ncurl -sS --fail {trust} -w '%{{speed_download}}\\n' {line}\n\
             for n in 0 1 2 3 4; do cmp {0}$n {1}/large; rm {0}$n; done\n",
            to.display(),
            dir.display()
        );
        std::fs::write(&file, text).unwrap();
        Program::new(format!("sh {}", file.display()))
    };
    Case {
        name,
        needs,
        server,
        client: &client,
        figure: &|text| {
            let speeds: Vec<f64> = text.lines().map(|line| line.parse().unwrap()).collect();
            assert_eq!(speeds.len(), 5, "{text}");
            speeds.iter().sum::<f64>() / 5e6
        },
        seen_by: None,
        carried: Carried::Both,
        wanted: 0.9,
    }
    .run(&net);
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn iperf3() {
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, .. } = place;
        Program::new(format!("iperf3 -s -p {port} -B {address}"))
    };
    for (name, options, wanted) in [
        ("iperf3, Mbit/s", "", 2.5),
        ("iperf3 reverse, Mbit/s", "-R", 2.5),
        ("iperf3 4 streams, Mbit/s", "-P 4", 0.9),
    ] {
        let client = |place: &Place| {
            let Place { address, port, .. } = place;
            let time = seconds();
            Program::new(format!("iperf3 -c {address} -p {port} -t {time} -f m {options}"))
        };
        Case {
            name,
            needs: &["iperf3"],
            server: &server,
            client: &client,
            figure: &|text| {
                let line = text.lines().rfind(|line| line.ends_with("receiver")).unwrap();
                after(line, "Bytes")
            },
            seen_by: Some("root"),
            carried: Carried::Both,
            wanted,
        }
        .run(&net);
    }
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn memcached() {
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, .. } = place;
        let user = if bed::is_root() { "-u root" } else { "" };
        Program::new(format!("memcached {user} -l {address} -p {port} -U 0 -t 4 -m 2000"))
    };
    let client = |place: &Place| {
        let Place { address, port, .. } = place;
        let time = seconds();
        Program::new(format!("memcaslap -s {address}:{port} -t {time}s -T 1 -c 16 -v 0.5"))
    };
    Case {
        name: "memcached, memcaslap",
        needs: &["memcached", "memcaslap"],
        server: &server,
        client: &client,
        figure: &|text| {
            for wrong in ["get_misses:", "verify_misses:", "verify_failed:"] {
                assert!(!text.contains(wrong) || after(text, wrong) == 0.0, "{text}");
            }
            after(text, "TPS:")
        },
        seen_by: Some("root"),
        carried: Carried::Both,
        wanted: 0.9,
    }
    .run(&net);
}
