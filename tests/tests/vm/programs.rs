// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmodified programs of the distribution, in two guests finding each other by TCP option 254.

mod cases;
mod large;
mod sessions;

use std::collections::BTreeMap;

use serde_json::Value;
use smc_tests::vm::unmodified::{WEB_ROOT, after, on, serve, stat, web_server};
use smc_tests::vm::{Bed, Job};

use cases::{Case, Client, Kind, guests, table};

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
            kind: Kind::StandardDescriptors,
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
        // The third server works all the same, and its process reports why the server is not on SMC.
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
    // The resources of an ended process are free.
    let devices: Value = serde_json::from_str(&a.ok("sleep 1; smc devices --json")).unwrap();
    let taken = devices.as_array().map(|all| all.iter().filter(|d| d["in_use"] == true).count());
    assert_eq!(taken, Some(0), "{devices}");
}
