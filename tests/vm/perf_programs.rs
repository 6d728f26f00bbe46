// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask vm perf --programs`: unmodified programs of the distribution in two guests finding
//! each other by TCP option 254, on SMC-D and on the TCP of the same guests. The two take turns,
//! several times; the medians are compared. Arguments: how often, and "kernel" for the kernel's AF_SMC
//! by its driver instead of this project's stack.
#![allow(clippy::unwrap_used, reason = "it ends at its first surprise")]

use smc_tests::vm::ends::give_eid;
use smc_tests::vm::unmodified::{WEB_ROOT, after, guests, on, serve, smc_d, web_server};
use smc_tests::vm::{Bed, Guest, Vm};

/// The owner of the SMC-D stack.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stack {
    Process,
    Kernel,
}

impl Stack {
    /// Two guests with the programs. `None`: the programs are not there.
    fn guests(self, bed: &Bed) -> Option<[Guest; 2]> {
        if self == Stack::Process {
            return guests(bed, 1);
        }
        let vm = |name| Vm::named(name).programs().mem("1G").append("ism.bind=no");
        let guests = Vm::has_programs().then(|| bed.boot(["a", "b"].map(vm)))?;
        for guest in &guests {
            guest.ok("insmod /lib/modules/virtio_ism.ko");
            give_eid(guest);
        }
        Some(guests)
    }

    /// The command line of a program, on SMC-D if `smc`.
    fn on(self, smc: bool, program: &str) -> String {
        match self {
            Stack::Kernel if smc => format!("smc run --stack kernel --strict {program}"),
            _ => on(smc, program),
        }
    }

    /// A counter growing with SMC-D traffic of a guest.
    fn carried(self, guest: &Guest) -> u64 {
        match self {
            Stack::Process => smc_d(guest),
            Stack::Kernel => guest.counter("store_bytes") + guest.counter("move_bytes"),
        }
    }
}

/// A program's own figure; more is better.
struct Measure {
    name: &'static str,
    unit: &'static str,
    server: &'static str,
    /// With `PORT` for the server's port.
    client: &'static str,
    /// Finds the figure in the client's output.
    figure: fn(&str) -> f64,
}

const REDIS: &str = "redis-server --port PORT --save '' --bind 10.0.0.1 --protected-mode no";
const NGINX: &str = "nginx -c /tmp/nginx.PORT";
const IPERF: &str = "iperf3 -s -p PORT";
/// The ports of servers.
const PORTS: std::ops::RangeInclusive<u16> = 6001..=6040;

const MEASURES: [Measure; 7] = [
    Measure {
        name: "redis GET",
        unit: "per second",
        server: REDIS,
        client: "redis-benchmark -h 10.0.0.1 -p PORT -n 6000 -c 10 -t get --csv",
        figure: |text| after(text, "\"GET\","),
    },
    Measure {
        name: "redis SET",
        unit: "per second",
        server: REDIS,
        client: "redis-benchmark -h 10.0.0.1 -p PORT -n 6000 -c 10 -t set --csv",
        figure: |text| after(text, "\"SET\","),
    },
    Measure {
        name: "redis GET, 16 at once",
        unit: "per second",
        server: REDIS,
        client: "redis-benchmark -h 10.0.0.1 -p PORT -n 40000 -c 10 -P 16 -t get --csv",
        figure: |text| after(text, "\"GET\","),
    },
    Measure {
        name: "nginx, wrk, keep-alive",
        unit: "requests/s",
        server: NGINX,
        client: "wrk -t 1 -c 10 -d 2 http://10.0.0.1:PORT/small",
        figure: |text| after(text, "Requests/sec:"),
    },
    Measure {
        name: "nginx, curl, 8 MiB",
        unit: "MB/s",
        server: NGINX,
        client: "curl -sS http://10.0.0.1:PORT/large -o /dev/null -w 'speed %{speed_download}\\n'",
        figure: |text| after(text, "speed ") / 1e6,
    },
    Measure {
        name: "iperf3, 1 stream",
        unit: "Mbit/s",
        server: IPERF,
        client: "iperf3 -c 10.0.0.1 -p PORT -t 2 -f m",
        figure: received,
    },
    Measure {
        name: "iperf3, 4 streams",
        unit: "Mbit/s",
        server: IPERF,
        client: "iperf3 -c 10.0.0.1 -p PORT -t 2 -f m -P 4",
        figure: received,
    },
];

/// The receiver's last line is the sum over every stream.
fn received(text: &str) -> f64 {
    let mut lines = text.lines().rev();
    after(lines.find(|line| line.ends_with("receiver")).unwrap(), "Bytes")
}

fn main() {
    let runs: usize = std::env::args().nth(1).map_or(3, |text| text.parse().unwrap());
    let bed = Bed::new();
    let kernel = std::env::args().nth(2).is_some_and(|text| text == "kernel");
    let stack = if kernel { Stack::Kernel } else { Stack::Process };
    let Some([a, b]) = stack.guests(&bed) else {
        eprintln!("vm-perf-programs: the programs are not installed, see above");
        std::process::exit(1);
    };
    web_server(&a, 1, PORTS);
    a.ok(format!("head -c 612 /dev/urandom > {WEB_ROOT}/small"));
    a.ok(format!("head -c 8388608 /dev/urandom > {WEB_ROOT}/large"));
    println!("Medians of {runs} runs; in brackets the least and the most");
    let title = ["", "", "SMC-D", "TCP"];
    println!("{:22}  {:10}  {:>27}  {:>27}  ratio", title[0], title[1], title[2], title[3]);
    let mut ports = PORTS;
    for measure in &MEASURES {
        let ports = [(); 2].map(|()| ports.next().unwrap());
        let [smc, tcp] = compare(stack, measure, [&a, &b], ports, runs);
        let ratio = median(&smc) / median(&tcp);
        let Measure { name, unit, .. } = measure;
        println!("{name:22}  {unit:10}  {:>27}  {:>27}  {ratio:5.2}", cell(&smc), cell(&tcp));
    }
}

/// Figures on SMC and on TCP, sorted.
fn compare(
    stack: Stack,
    measure: &Measure,
    [a, b]: [&Guest; 2],
    ports: [u16; 2],
    runs: usize,
) -> [Vec<f64>; 2] {
    let ends = [true, false];
    let servers = [0, 1].map(|end| serve(a, &stack.on(ends[end], measure.server), ports[end]));
    let mut figures = [Vec::new(), Vec::new()];
    // One uncounted run warms both up.
    for run in 0..=runs {
        for (end, smc) in ends.into_iter().enumerate() {
            let before = stack.carried(a);
            let client = stack.on(smc, &measure.client.replace("PORT", &ports[end].to_string()));
            let figure = (measure.figure)(&b.ok(client.as_str()));
            assert_eq!(stack.carried(a) > before, smc, "{client}: what carried it?");
            if run > 0 {
                figures[end].push(figure);
            }
        }
    }
    drop(servers);
    for figures in &mut figures {
        figures.sort_by(f64::total_cmp);
    }
    figures
}

fn median(sorted: &[f64]) -> f64 {
    sorted[sorted.len() / 2]
}

fn cell(sorted: &[f64]) -> String {
    format!("{:.1} [{:.1} .. {:.1}]", median(sorted), sorted[0], sorted[sorted.len() - 1])
}
