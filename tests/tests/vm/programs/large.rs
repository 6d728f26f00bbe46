//! Programs whose packages are large: `cargo xtask vm programs`.

use smc_tests::vm::Bed;
use smc_tests::vm::unmodified::after;

use super::{Case, Client, Kind, guests, sessions, table};

/// Asks a web server again and again; requests per second.
fn requests(command: &str, client: &Client<'_>) -> f64 {
    after(&client(command), "requests:")
}

#[test]
#[ignore = "PostgreSQL, Node.js and Go are large: cargo xtask vm programs"]
fn large_programs_meet_in_all_four_combinations() {
    let bed = Bed::new();
    // A session of the database is a process, and has a device.
    let Some([a, b]) = guests(&bed, 4) else { return };
    let go = |program: &str| format!("{program} serve 10.0.0.1:PORT");
    let ask = |program: &str, port: u16, client: &Client<'_>| {
        requests(&format!("{program} ask 10.0.0.1:{port} - 4"), client)
    };
    let database = sessions::database(&a);
    let cases = [
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
    table([&a, &b], &cases);
    bed.assert_faultless();
}
