// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs in large packages, and programs with several devices: `cargo xtask vm programs`.

use smc_tests::vm::Bed;
use smc_tests::vm::unmodified::{WEB_ROOT, after, web_server};

use super::cases::{Case, Client, Kind, guests, table};
use super::sessions;

/// Asks a web server again and again; requests per second.
fn requests(command: &str, client: &Client<'_>) -> f64 {
    after(&client(command), "requests:")
}

#[test]
#[ignore = "PostgreSQL, Node.js and Go are large: cargo xtask vm programs"]
fn large_programs_meet_in_all_four_combinations() {
    let bed = Bed::new();
    // A worker of a server, and a session of a database, is a process and has a device.
    let Some([a, b]) = guests(&bed, 4) else { return };
    let nginx = web_server(&a, 3, 6001..=6060);
    a.ok(format!("head -c 612 /dev/zero > {WEB_ROOT}/small"));
    let wrk = |port: u16, client: &Client<'_>| {
        let text = client(&format!("wrk -t 1 -c 12 -d 4 http://10.0.0.1:{port}/small"));
        assert!(!text.contains("Socket errors") && !text.contains("Non-2xx"), "{text}");
        after(&text, "Requests/sec:")
    };
    let go = |program: &str| format!("{program} serve 10.0.0.1:PORT");
    let ask = |program: &str, port: u16, client: &Client<'_>| {
        requests(&format!("{program} ask 10.0.0.1:{port} - 4"), client)
    };
    let database = sessions::database(&a);
    let cases = [
        Case { name: "nginx, 3 workers, wrk", server: nginx, measure: &wrk, kind: Kind::Lasting },
        Case {
            name: "PostgreSQL, pgbench",
            server: &database,
            measure: &|port, client| sessions::transactions(&b, port, "", client),
            kind: Kind::Sessions,
        },
        Case {
            name: "PostgreSQL, pgbench -S",
            server: &database,
            measure: &|port, client| sessions::transactions(&b, port, "-S", client),
            kind: Kind::Sessions,
        },
        Case {
            name: "Node.js, HTTP",
            server: "node /lib/web.js serve 10.0.0.1 PORT",
            measure: &|port, client| {
                requests(&format!("node /lib/web.js ask 10.0.0.1 {port} 4"), client)
            },
            kind: Kind::Lasting,
        },
        Case {
            name: "Go, HTTP, static",
            server: &go("web-go-static"),
            measure: &|port, client| ask("web-go-static", port, client),
            kind: Kind::OwnSystemCalls,
        },
        Case {
            name: "Go, HTTP, dynamic",
            server: &go("web-go-dynamic"),
            measure: &|port, client| ask("web-go-dynamic", port, client),
            kind: Kind::OwnSystemCalls,
        },
    ];
    table([&a, &b], &cases, true);
    bed.assert_faultless();
}
