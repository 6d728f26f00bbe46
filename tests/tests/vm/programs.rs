//! Programs of the distribution, as they are, in two guests that find each other by TCP option 254.

use std::collections::BTreeMap;

use serde_json::Value;
use smc_tests::vm::unmodified::{self, WEB_ROOT, after, on, serve, smc_d, stat, web_server};
use smc_tests::vm::{Bed, Guest, Job};

/// Which ends are put on SMC, server first.
const COMBINATIONS: [[bool; 2]; 4] = [[true, true], [true, false], [false, true], [false, false]];

/// Guests with the programs, `devices` of them each; none, aloud, where they are not installed.
fn guests(bed: &Bed, devices: usize) -> Option<[Guest; 2]> {
    let guests = unmodified::guests(bed, devices);
    if guests.is_none() {
        assert!(std::env::var("CI").map_or(true, |ci| ci != "true"), "no programs to be run");
        eprintln!("SKIPPED, nothing was tested: `cargo xtask vm` found no programs to be run");
    }
    guests
}

/// Runs a client's command and gives its output.
type Client<'a> = dyn Fn(&str) -> String + 'a;

/// A program's own figure in each combination; the table's line. `measure` gets the port and what goes
/// before the client's command.
fn row(
    [a, b]: [&Guest; 2],
    name: &str,
    server: &str,
    measure: &dyn Fn(u16, &Client<'_>) -> f64,
    next_port: &mut u16,
) {
    let mut figures = Vec::new();
    for [on_server, on_client] in COMBINATIONS {
        *next_port += 1;
        let port = *next_port;
        let job = serve(a, on_server, server, port);
        let client = |program: &str| b.ok(on(on_client, program));
        figures.push(measure(port, &client));
        let smc = on_server && on_client;
        if on_server {
            assert_eq!(smc_d(a) > 0, smc, "{name}: {:?}", stat(a));
        }
        drop(job);
    }
    let [both, server, client, none] = figures[..] else { unreachable!() };
    println!(
        "{name:24} SMC {both:12.1}  TCP {none:12.1}  ratio {:5.2}   only server {:5.2}, only client {:5.2}",
        both / none,
        server / none,
        client / none
    );
}

#[test]
fn unmodified_programs_meet_in_all_four_combinations() {
    let bed = Bed::new();
    let Some([a, b]) = guests(&bed, 1) else { return };
    let (guests, mut port) = ([&a, &b], 6000);

    let redis = "redis-server --port PORT --save '' --bind 10.0.0.1 --protected-mode no";
    for (name, pipeline, n) in [("redis GET", 1, 3000), ("redis GET, pipelined", 16, 20_000)] {
        let bench = |port: u16, client: &Client<'_>| {
            let text = client(&format!(
                "redis-benchmark -h 10.0.0.1 -p {port} -n {n} -c 10 -t get --csv -P {pipeline}"
            ));
            after(&text, "\"GET\",")
        };
        row(guests, name, redis, &bench, &mut port);
    }

    let nginx = web_server(&a, 6001..=6020);
    a.ok(format!("dd if=/dev/urandom of={WEB_ROOT}/file bs=64k count=64 2>/dev/null"));
    let sum = a.ok(format!("sha256sum < {WEB_ROOT}/file"));
    let curl = |port: u16, client: &Client<'_>| {
        let url = format!("http://10.0.0.1:{port}/file");
        let text = client(&format!(
            "curl -sS {url} -o /tmp/got {url} -o /tmp/got2 -w '%{{speed_download}}\\n'"
        ));
        for file in ["got", "got2"] {
            assert_eq!(b.ok(format!("sha256sum < /tmp/{file}; rm /tmp/{file}")), sum);
        }
        text.lines().filter_map(|line| line.parse::<f64>().ok()).sum::<f64>() / 2e6
    };
    row(guests, "nginx, curl, MB/s", nginx, &curl, &mut port);

    let iperf = |port: u16, client: &Client<'_>| {
        let text = client(&format!("iperf3 -c 10.0.0.1 -p {port} -t 2 -f m"));
        let line = text.lines().find(|line| line.ends_with("receiver")).unwrap();
        after(line, "Bytes")
    };
    row(guests, "iperf3, Mbit/s", "iperf3 -s -p PORT", &iperf, &mut port);
    bed.assert_faultless();
}

/// A worker per device, and a device for each worker: isolation is the device's affair.
#[test]
fn processes_of_one_guest_take_a_device_each_and_outlive_the_daemon() {
    let bed = Bed::new();
    let Some([a, b]) = guests(&bed, 2) else { return };
    let server = "redis-server --port PORT --save '' --bind 10.0.0.1 --protected-mode no";
    let servers: Vec<Job> = [7001u16, 7002, 7003].map(|port| serve(&a, true, server, port)).into();
    let bench = |port: u16| {
        let text = b.ok(on(
            true,
            &format!("redis-benchmark -h 10.0.0.1 -p {port} -n 500 -c 3 -t set,get --csv"),
        ));
        assert!(text.contains("\"GET\""), "{text}");
    };
    for round in 0..2 {
        for port in [7001, 7002, 7003] {
            bench(port);
        }
        let processes = stat(&a);
        let by_device: BTreeMap<String, u64> = processes
            .iter()
            .filter_map(|process| {
                let path = process["devices"][0]["gid"].as_str()?;
                Some((path.to_owned(), process["totals"]["smc_d"].as_u64()?))
            })
            .collect();
        assert_eq!(by_device.len(), 2, "round {round}: {processes:?}");
        assert!(by_device.values().all(|n| *n > 0), "round {round}: {processes:?}");
        // The third one is served all the same, and its process says why it is not on SMC.
        let without = processes.iter().filter(|process| process["devices"][0].is_null()).count();
        assert_eq!(without, 1, "round {round}: {processes:?}");
        let devices: Value = serde_json::from_str(&a.ok("smc devices --json")).unwrap();
        let taken =
            devices.as_array().map(|all| all.iter().filter(|d| d["in_use"] == true).count());
        assert_eq!(taken, Some(2), "{devices}");
        if round == 0 {
            bed.restart_daemon();
            // Devices are asked for again after a second.
            a.ok("sleep 2");
        }
    }
    drop(servers);
    // What a process had is free when it is gone.
    let devices: Value = serde_json::from_str(&a.ok("sleep 1; smc devices --json")).unwrap();
    let taken = devices.as_array().map(|all| all.iter().filter(|d| d["in_use"] == true).count());
    assert_eq!(taken, Some(0), "{devices}");
}
