//! Programs of the distribution, as they are, in two guests that find each other by TCP option 254.

mod large;
mod sessions;

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;
use smc_tests::vm::unmodified::{self, WEB_ROOT, after, on, serve, smc_d, stat, web_server};
use smc_tests::vm::{Bed, Guest, Job, Run};

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

/// A server and what measures it.
struct Case<'a> {
    name: &'a str,
    /// Its command line, with `PORT` for the port.
    server: &'a str,
    /// A client's figure. It gets the port, and what runs a command line at the client's end.
    measure: &'a dyn Fn(u16, &Client<'_>) -> f64,
    kind: Kind,
}

/// How a server comes to SMC.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Its processes outlive their connections.
    Lasting,
    /// It has a process per session.
    Sessions,
    /// What it is written in makes system calls itself, and it stays on TCP.
    OwnSystemCalls,
}

/// Runs each in all combinations; prints the table's lines. A large program is slow where it is run for
/// the first time, because the emulator has to translate it: `warm` runs it once for nothing.
fn table(guests: [&Guest; 2], cases: &[Case<'_>], warm: bool) {
    let mut port = 6000;
    for case in cases {
        if warm {
            port += 1;
            figure(guests, case, [false, false], port);
        }
        let figures = COMBINATIONS.map(|on_smc| {
            port += 1;
            figure(guests, case, on_smc, port)
        });
        let [both, server, client, none] = figures;
        println!(
            "{:24} SMC {both:12.1}  TCP {none:12.1}  ratio {:5.2}   only server {:5.2}, only client {:5.2}",
            case.name,
            both / none,
            server / none,
            client / none
        );
    }
}

/// What the client says, after `smc stat` has said what carried it.
fn figure(
    [a, b]: [&Guest; 2],
    case: &Case<'_>,
    [on_server, on_client]: [bool; 2],
    port: u16,
) -> f64 {
    let run = |smc, program: &str| match case.kind {
        // A program that stays on TCP would be an error otherwise.
        Kind::OwnSystemCalls if smc => format!("smc run {program}"),
        _ => on(smc, program),
    };
    let job = serve(a, &run(on_server, case.server), port);
    let both = on_server && on_client;
    // Sessions have to be looked at while they last.
    let seen = (both && case.kind == Kind::Sessions).then(|| {
        let look = r#"until smc stat --json 2>/dev/null | grep -q '"SMC-D v2'; do sleep 0.1; done"#;
        a.spawn(Run::from(look).within(Duration::from_secs(300)))
    });
    let figure = (case.measure)(port, &|program| b.ok(run(on_client, program)));
    let name = case.name;
    match (seen, case.kind) {
        (Some(seen), _) => assert_eq!(seen.wait_within(Duration::from_secs(2)).code(), 0, "{name}"),
        (None, Kind::Sessions) => (),
        (None, kind) if on_server => {
            let smc = both && kind == Kind::Lasting;
            assert_eq!(smc_d(a) > 0, smc, "{name}: {:?}", stat(a));
        }
        (None, _) => (),
    }
    drop(job);
    figure
}

#[test]
fn unmodified_programs_meet_in_all_four_combinations() {
    let bed = Bed::new();
    let Some([a, b]) = guests(&bed, 1) else { return };

    let redis = "redis-server --port PORT --save '' --bind 10.0.0.1 --protected-mode no";
    let get = |port: u16, client: &Client<'_>, n: u32, pipeline: u32| {
        let text = client(&format!(
            "redis-benchmark -h 10.0.0.1 -p {port} -n {n} -c 10 -t get --csv -P {pipeline}"
        ));
        after(&text, "\"GET\",")
    };

    let nginx = web_server(&a, 1, 6001..=6040);
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

    let iperf = |port: u16, client: &Client<'_>| {
        let text = client(&format!("iperf3 -c 10.0.0.1 -p {port} -t 1 -f m"));
        let line = text.lines().find(|line| line.ends_with("receiver")).unwrap();
        after(line, "Bytes")
    };

    let memcaslap = |port: u16, client: &Client<'_>| {
        let text = client(&format!("memcaslap -s 10.0.0.1:{port} -t 1s -T 1 -c 8 -v 0.5"));
        for wrong in ["get_misses:", "verify_misses:", "verify_failed:"] {
            assert!(!text.contains(wrong) || after(&text, wrong) == 0.0, "{text}");
        }
        after(&text, "TPS:")
    };

    let kind = Kind::Lasting;
    let cases = [
        Case { name: "redis GET", server: redis, measure: &|p, c| get(p, c, 3000, 1), kind },
        Case {
            name: "redis GET, 16 at once",
            server: redis,
            measure: &|p, c| get(p, c, 10_000, 16),
            kind,
        },
        Case { name: "nginx, curl, MB/s", server: nginx, measure: &curl, kind },
        Case { name: "iperf3, Mbit/s", server: "iperf3 -s -p PORT", measure: &iperf, kind },
        Case {
            name: "memcached, memcaslap",
            server: "memcached -u root -l 10.0.0.1 -p PORT -U 0 -t 2 -m 100",
            measure: &memcaslap,
            kind,
        },
        Case {
            name: "ssh, files, MB/s",
            server: &sessions::ssh_server([&a, &b]),
            measure: &|port, client| sessions::copy(&b, port, client),
            kind: Kind::Sessions,
        },
    ];
    table([&a, &b], &cases, false);
    bed.assert_faultless();
}

/// A worker per device, and a device for each worker: isolation is the device's affair.
#[test]
fn processes_of_one_guest_take_a_device_each_and_outlive_the_daemon() {
    let bed = Bed::new();
    let Some([a, b]) = guests(&bed, 2) else { return };
    let server = "redis-server --port PORT --save '' --bind 10.0.0.1 --protected-mode no";
    let servers: Vec<Job> =
        [7001u16, 7002, 7003].map(|port| serve(&a, &on(true, server), port)).into();
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
