//! Redis and nginx under a mixed load with clients that are killed. The resources of the programs
//! and of the daemon must not grow. `SMC_SOAK_SECONDS=1800 cargo test --release -p smc-preload
//! --test soak -- --ignored --nocapture` runs it for that long, and prints 60 lines, but at most
//! one per minute.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;
#[path = "common/held.rs"]
mod held;
#[path = "common/trend.rs"]
mod trend;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Fabric, Running, await_listener, eventually, free_port, my_role, role};
use held::Held;
use vhost_device_ism::config::GuestSpec;
use vhost_device_ism::management::Client;
use vhost_device_ism::{Config, Daemon};

/// Devices of the fabric. Servers have some, and clients take the others in turn.
const DEVICES: usize = 8;

/// The processes that the test observes, over time.
#[derive(Default)]
struct Record {
    servers: Vec<(&'static str, u32)>,
    moments: Vec<f64>,
    held: Vec<Vec<Held>>,
    dmbs: Vec<f64>,
}

impl Record {
    /// One resource, counted at every moment.
    fn series(&self, of: impl Fn(usize) -> f64) -> Vec<(f64, f64)> {
        self.moments.iter().enumerate().map(|(at, moment)| (*moment, of(at))).collect()
    }

    /// A description of what grows; empty: nothing.
    fn grown(&self) -> String {
        let mut text = String::new();
        let mut check = |name: &str, allowed: f64, series: &[(f64, f64)]| {
            let growth = trend::growth(series);
            println!("{name}: {growth:+.1} ({allowed:.0} allowed)");
            if growth > allowed {
                text += &format!("{name} grows by {growth:.1}\n");
            }
        };
        for (who, (name, pid)) in self.servers.iter().enumerate() {
            let of = |f: fn(&Held) -> f64| self.series(|at| self.held[at].get(who).map_or(0.0, f));
            check(&format!("{name} {pid} fds"), 2.0, &of(|held| held.descriptors as f64));
            check(&format!("{name} {pid} maps"), 2.0, &of(|held| held.mappings as f64));
            check(&format!("{name} {pid} threads"), 1.0, &of(|held| held.threads as f64));
            let memory = of(|held| held.memory as f64);
            let allowed = memory.first().map_or(0.0, |first| first.1 / 20.0).max(1024.0);
            check(&format!("{name} {pid} KiB"), allowed, &memory);
        }
        check("DMBs", 2.0, &self.series(|at| self.dmbs[at]));
        text
    }
}

/// Pseudo-random numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % n
    }
}

fn has(program: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok();
    assert!(there || std::env::var("CI").map_or(true, |ci| ci != "true"), "no {program}");
    there
}

/// The children of a process: nginx's workers.
fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

fn nginx(dir: &Path, port: u16) -> Vec<String> {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("small"), vec![b'x'; 612]).unwrap();
    fs::write(dir.join("large"), vec![b'y'; 3 << 20]).unwrap();
    let here = dir.display();
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {here}/{name};"))
        .concat();
    let text = format!(
        "user root; daemon off; worker_processes 2; pid {here}/pid; error_log {here}/log;\n\
         events {{}}\nhttp {{ access_log off; {paths}\n\
         server {{ listen 127.0.0.1:{port}; root {here}; }} }}\n"
    );
    fs::write(dir.join("conf"), text).unwrap();
    vec!["-c".into(), format!("{here}/conf")]
}

/// Kills a client in the middle of what it does.
fn abort(mut child: Child, after: Duration) {
    std::thread::sleep(after);
    let _ = child.kill();
    let _ = child.wait();
}

/// Runs the daemon in a process of its own, so that the test can count its resources.
fn run_daemon() -> ! {
    let management = PathBuf::from(std::env::var_os("SOAK_MANAGEMENT").unwrap());
    let dir = management.parent().unwrap().join("devices");
    let port = |n| GuestSpec::new(dir.join(format!("{n}.sock")));
    let guests = (0..DEVICES).map(port).collect();
    let config = Config { guests, management: Some(management), ..Config::default() };
    let _daemon = Daemon::start(config).unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
#[ignore = "needs programs that are not everywhere: see tests/programs.sh"]
fn nothing_grows() {
    if my_role().is_some() {
        run_daemon();
    }
    if !["redis-server", "redis-benchmark", "nginx", "curl"].into_iter().all(has) {
        let why = "redis, nginx and curl are not all installed";
        // Past what the test harness keeps to itself.
        let _ = writeln!(std::io::stderr(), "SKIPPED, nothing was tested: {why}");
        return;
    }
    let seconds = std::env::var("SMC_SOAK_SECONDS").ok().and_then(|text| text.parse().ok());
    let length = Duration::from_secs(seconds.unwrap_or(20));
    let seed = std::env::var("SMC_SOAK_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) | 1);
    println!("seed {seed}");
    let mut dice = Dice(seed);

    let fabric = Fabric::without_daemon();
    let management = fabric.file("management");
    let mut command = Command::new(std::env::current_exe().unwrap());
    let daemon = role(command.env("SOAK_MANAGEMENT", &management), "nothing_grows", "daemon", 0);
    eventually(|| Client::connect(&management).is_ok());
    let devices = || {
        let list = Client::connect(&management).unwrap().list().unwrap();
        (list.iter().filter(|port| port.connected).count(), list.iter().map(|port| port.dmbs).sum())
    };
    let (redis_port, http_port) = (free_port(), free_port());
    let mut command = fabric.smc("redis-server");
    command.args(["--port", &redis_port.to_string(), "--save", "", "--bind", "127.0.0.1"]);
    let redis = Running::start(&mut command);
    await_listener(redis_port);
    let web = Running::start(fabric.smc("nginx").args(nginx(&fabric.file("www"), http_port)));
    await_listener(http_port);
    let mut servers = vec![("daemon", daemon.pid()), ("redis", redis.pid())];
    servers.extend(children(web.pid()).into_iter().map(|pid| ("nginx worker", pid)));

    let quiet = |command: &mut Command| {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let bench = |clients: u64, n: u64, pipeline: u64| {
        let mut command = fabric.smc("redis-benchmark");
        command.args(["-p", &redis_port.to_string(), "-t", "set,get", "-q"]);
        command.args(["-c", &clients.to_string(), "-n", &n.to_string()]);
        command.args(["-P", &pipeline.to_string()]);
        command
    };
    let get = |file: &str, times: u64| {
        let url = format!("http://127.0.0.1:{http_port}/{file}");
        let mut command = fabric.smc("curl");
        command.args(["-sS", "--fail", "--max-time", "200"]);
        for _ in 0..times {
            command.args([&url, "-o", "/dev/null"]);
        }
        command
    };
    // Beside other load and at a lower priority this takes long.
    let done = |command: &mut Command| {
        Running::start(command).within(Duration::from_secs(240)).finish();
    };
    let started = Instant::now();
    let lines = (length / 60).clamp(Duration::from_secs(2), Duration::from_secs(60));
    let (mut rounds, mut aborts, mut next) = (0u64, 0u64, lines);
    // By then every part has been used once.
    let warm = (length / 3).min(Duration::from_secs(180));
    let mut record = Record { servers: servers.clone(), ..Record::default() };
    while started.elapsed() < length {
        rounds += 1;
        match dice.below(6) {
            0 => done(&mut bench(1 + dice.below(20), 3000, 1)),
            1 => done(&mut bench(10, 20_000, 1 + dice.below(32))),
            2 => done(&mut get("small", 1 + dice.below(20))),
            3 => done(&mut get("large", 1 + dice.below(3))),
            victim => {
                aborts += 1;
                let mut command = match victim {
                    4 => bench(1 + dice.below(20), 1_000_000, 1 + dice.below(16)),
                    _ => get("large", 100),
                };
                abort(quiet(&mut command), Duration::from_millis(20 + dice.below(300)));
            }
        }
        if started.elapsed() < next {
            continue;
        }
        next = started.elapsed() + lines;
        // The clients have ended. What they left behind must be released.
        eventually(|| devices().0 < servers.len());
        std::thread::sleep(Duration::from_millis(300));
        let held: Vec<Held> = servers.iter().map(|(_, pid)| Held::by(*pid)).collect();
        let dmbs: u64 = devices().1;
        let (smc, tcp) = fabric.decided();
        print!(
            "{:5} s  {rounds} rounds {aborts} aborts {smc} smc {tcp} tcp {dmbs} dmbs",
            started.elapsed().as_secs()
        );
        servers.iter().zip(&held).for_each(|((name, _), held)| print!("  {name}: {held}"));
        println!();
        if started.elapsed() < warm {
            continue;
        }
        record.moments.push(started.elapsed().as_secs_f64());
        record.held.push(held);
        record.dmbs.push(dmbs as f64);
    }
    let grown = record.grown();
    for (name, pid) in servers.iter().filter(|_| !grown.is_empty()) {
        println!("{name} {pid}:\n{}", held::kinds(*pid));
    }
    // First, so that no process stays behind.
    web.stop();
    redis.stop();
    assert!(grown.is_empty(), "{grown}(seed {seed})");
    let (smc, tcp) = fabric.decided();
    assert!(smc > 0 && fabric.broken().len() as u64 <= aborts * 50, "{:?}", fabric.broken());
    println!("{rounds} rounds, {aborts} aborts; {smc} ends on SMC, {tcp} on TCP");
    // Killed clients leave their lock files. The next process that locks the device takes the file
    // over.
    assert_eq!(fabric.left_behind(), Vec::<String>::new());
}
