// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Redis, nginx, HAProxy and gunicorn under a mixed load with killed clients. No answer may be lost
//! or wrong, and the resources of the programs and of the daemon must not grow: no count of
//! descriptors, mappings, threads, memory, DMBs, sockets, processes or files in /dev/shm, by the
//! median slope of all pairs of idle moments. `SMC_SOAK_SEED` repeats a run.
//! `SMC_SOAK_SECONDS=1800 cargo test --release -p smc-preload --test soak -- --ignored --nocapture`
//! runs for so long, and prints 60 lines, but at most one per minute.
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
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Fabric, Running, await_listener, eventually, free_port, my_role, role};
use held::Held;
use vhost_device_ism::config::GuestSpec;
use vhost_device_ism::management::Client;
use vhost_device_ism::{Config, Daemon};

/// Devices of the fabric. Servers have some, and clients take the others in turn.
const DEVICES: usize = 14;

/// The observed processes, over time.
#[derive(Default)]
struct Record {
    servers: Vec<(&'static str, u32)>,
    moments: Vec<f64>,
    held: Vec<Vec<Held>>,
    dmbs: Vec<f64>,
    left: Vec<Left>,
}

/// Resources outside the single processes of the test.
#[derive(Clone, Copy, Debug)]
struct Left {
    /// TCP sockets at the servers' ports, without sockets kept by the kernel for late segments.
    sockets: usize,
    /// The descendants of the test.
    processes: usize,
    /// Files in /dev/shm.
    files: usize,
}

impl Left {
    fn now(fabric: &Fabric, ports: &[u16]) -> Left {
        let table = fs::read_to_string("/proc/net/tcp").unwrap_or_default();
        let at =
            |address: &str| ports.iter().any(|port| address.ends_with(&format!(":{port:04X}")));
        let is_ours = |line: &&str| {
            let words: Vec<&str> = line.split_whitespace().take(4).collect();
            matches!(words[..], [_, local, peer, state] if (at(local) || at(peer)) && state != "06")
        };
        let name = fabric.file("").display().to_string();
        let is_named =
            |environment: Vec<u8>| environment.windows(name.len()).any(|w| w == name.as_bytes());
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let has_ours =
            |entry: &fs::DirEntry| fs::read(entry.path().join("environ")).is_ok_and(is_named);
        let files = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        // Other tests have directories there, too.
        let is_file = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
        Left {
            sockets: table.lines().filter(is_ours).count(),
            processes: processes.filter(has_ours).count(),
            files: files.filter(is_file).count(),
        }
    }
}

impl Record {
    /// One resource, counted at every moment.
    fn series(&self, of: impl Fn(usize) -> f64) -> Vec<(f64, f64)> {
        self.moments.iter().enumerate().map(|(at, moment)| (*moment, of(at))).collect()
    }

    /// A description of any growth; empty: none.
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
            check(&format!("{name} {pid} fds"), 4.0, &of(|held| held.descriptors as f64));
            check(&format!("{name} {pid} maps"), 4.0, &of(|held| held.mappings as f64));
            check(&format!("{name} {pid} threads"), 1.0, &of(|held| held.threads as f64));
            let memory = of(|held| held.memory as f64);
            let allowed = memory.first().map_or(0.0, |first| first.1 / 20.0).max(1024.0);
            check(&format!("{name} {pid} KiB"), allowed, &memory);
        }
        check("DMBs", 4.0, &self.series(|at| self.dmbs[at]));
        check("sockets", 4.0, &self.series(|at| self.left[at].sockets as f64));
        check("processes", 0.0, &self.series(|at| self.left[at].processes as f64));
        check("files in /dev/shm", 0.0, &self.series(|at| self.left[at].files as f64));
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

fn haproxy(file: &Path, port: u16, behind: u16) {
    let text = format!(
        "global\n  nbthread 1\ndefaults\n  mode http\n  option splice-response\n\
         \x20 option http-server-close\n\
         \x20 timeout connect 10s\n  timeout client 200s\n  timeout server 200s\n\
         frontend front\n  bind 127.0.0.1:{port}\n  default_backend back\n\
         backend back\n  server one 127.0.0.1:{behind}\n"
    );
    fs::write(file, text).unwrap();
}

/// The answers to the clients. A killed client does not count.
#[derive(Default)]
struct Answers {
    right: u64,
    /// The client got no answer, or an error, or hung.
    lost: u64,
    /// The client got other bytes.
    broken: u64,
    /// The first few lost or broken answers.
    details: Vec<String>,
}

impl Answers {
    fn note(&mut self, command: &Command, count: u64, outcome: Result<bool, String>) {
        let text = match outcome {
            Ok(true) => {
                self.right += count;
                return;
            }
            Ok(false) => {
                self.broken += 1;
                "other bytes".to_owned()
            }
            Err(why) => {
                self.lost += 1;
                why
            }
        };
        let text = format!("{:?}: {text}", command.get_args());
        println!("{text}");
        if self.details.len() < 10 {
            self.details.push(text);
        }
    }
}

/// Runs a client to its end, and returns its output.
fn output(command: &mut Command) -> Result<Vec<u8>, String> {
    // Beside other load and at a lower priority this takes long.
    const TIMEOUT: Duration = Duration::from_secs(240);
    let client = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let client = client.spawn().unwrap();
    let pid = client.id();
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = done.send(client.wait_with_output());
    });
    let Ok(output) = ended.recv_timeout(TIMEOUT) else {
        let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
        return Err(format!("hangs after {TIMEOUT:?}"));
    };
    let output = output.unwrap();
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{}: {said}", output.status));
    }
    Ok(output.stdout)
}

/// Kills a client in the middle of its work.
fn abort(mut child: Child, after: Duration) {
    sleep(after);
    let _ = child.kill();
    let _ = child.wait();
}

/// Runs the daemon in a process of its own, for the test to count its resources.
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

/// The programs under load, and their ports.
struct Bed {
    fabric: Fabric,
    management: PathBuf,
    www: PathBuf,
    /// Ports of redis, nginx, HAProxy and gunicorn.
    ports: [u16; 4],
    /// In the order of their stop.
    running: Vec<Running>,
    /// The observed processes.
    servers: Vec<(&'static str, u32)>,
    /// Stopped last.
    _daemon: Running,
}

impl Bed {
    fn start() -> Bed {
        let fabric = Fabric::without_daemon();
        let management = fabric.file("management");
        let mut command = Command::new(std::env::current_exe().unwrap());
        let daemon =
            role(command.env("SOAK_MANAGEMENT", &management), "nothing_grows", "daemon", 0);
        eventually(|| Client::connect(&management).is_ok());
        let ports = [0; 4].map(|_| free_port());
        let [redis_port, nginx_port, haproxy_port, gunicorn_port] = ports;
        let mut command = fabric.smc("redis-server");
        command.args(["--port", &redis_port.to_string(), "--save", "", "--bind", "127.0.0.1"]);
        let redis = Running::start(&mut command);
        await_listener(redis_port);
        let www = fabric.file("www");
        let web = Running::start(fabric.smc("nginx").args(nginx(&www, nginx_port)));
        await_listener(nginx_port);
        haproxy(&fabric.file("haproxy.cfg"), haproxy_port, nginx_port);
        let mut command = fabric.smc("haproxy");
        let proxy = Running::start(command.arg("-db").arg("-f").arg(fabric.file("haproxy.cfg")));
        await_listener(haproxy_port);
        let mut command = fabric.smc("gunicorn");
        // With more threads, gunicorn would start each one the first time all others are busy.
        command.args(["-w", "2", "-k", "gthread", "--threads", "1", "--timeout", "300"]);
        command.args(["-b", &format!("127.0.0.1:{gunicorn_port}"), "--log-level", "error"]);
        let code = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/code");
        command.args(["--pythonpath", code, "--chdir"]).arg(&www).arg("app:wsgi");
        let python = Running::start(&mut command);
        await_listener(gunicorn_port);
        eventually(|| children(python.pid()).len() == 2);
        let mut servers = vec![("daemon", daemon.pid()), ("redis", redis.pid())];
        servers.extend(children(web.pid()).into_iter().map(|pid| ("nginx", pid)));
        servers.push(("haproxy", proxy.pid()));
        servers.extend(children(python.pid()).into_iter().map(|pid| ("gunicorn", pid)));
        let running = vec![proxy, python, web, redis];
        Bed { fabric, management, www, ports, running, servers, _daemon: daemon }
    }

    /// The devices in use, and their DMBs.
    fn devices(&self) -> (usize, u64) {
        let list = Client::connect(&self.management).unwrap().list().unwrap();
        (list.iter().filter(|port| port.connected).count(), list.iter().map(|port| port.dmbs).sum())
    }

    fn content(&self, file: &str) -> Vec<u8> {
        fs::read(self.www.join(file)).unwrap()
    }

    /// `batches`: requests sent together, `pipeline` at a time. redis-benchmark takes further answers
    /// than it asked for (a last batch in part) for a loss of its only client now and then.
    fn bench(&self, clients: u64, batches: u64, pipeline: u64) -> Command {
        let mut command = self.fabric.smc("redis-benchmark");
        command.args(["-p", &self.ports[0].to_string(), "-t", "set,get", "-q"]);
        command.args(["-c", &clients.to_string(), "-n", &(batches * pipeline).to_string()]);
        command.args(["-P", &pipeline.to_string()]);
        command
    }

    fn get(&self, port: u16, file: &str, times: u64) -> Command {
        let url = format!("http://127.0.0.1:{port}/{file}");
        let mut command = self.fabric.smc("curl");
        command.args(["-sS", "--fail", "--max-time", "200"]);
        command.args((0..times).map(|_| url.as_str()));
        command
    }

    fn send(&self, times: u64) -> Command {
        let mut command = self.get(self.ports[3], "hash", times);
        command.arg("--data-binary").arg(format!("@{}", self.www.join("large").display()));
        command
    }
}

/// The clients so far, and their answers.
struct Load<'a> {
    bed: &'a Bed,
    dice: Dice,
    small: Vec<u8>,
    large: Vec<u8>,
    /// The answer to a request with the large file.
    hash: Vec<u8>,
    answers: Answers,
    increments: u64,
    rounds: u64,
    aborts: u64,
}

impl<'a> Load<'a> {
    fn new(bed: &'a Bed, seed: u64) -> Load<'a> {
        let hash = output(Command::new("sha256sum").arg(bed.www.join("large"))).unwrap();
        Load {
            bed,
            dice: Dice(seed),
            small: bed.content("small"),
            large: bed.content("large"),
            hash: hash.get(..64).unwrap().to_vec(),
            answers: Answers::default(),
            increments: 0,
            rounds: 0,
            aborts: 0,
        }
    }

    fn expect(&mut self, mut command: Command, count: u64, all: &[u8]) {
        let outcome = output(&mut command).map(|got| got == all);
        self.answers.note(&command, count, outcome);
    }

    /// Runs one client, or kills one.
    fn turn(&mut self) {
        self.rounds += 1;
        let [_, web_ports @ ..] = self.bed.ports;
        let port = web_ports[self.dice.below(3) as usize];
        match self.dice.below(9) {
            kind @ (0 | 1) => {
                let (clients, pipeline) = (1 + self.dice.below(20), 1 + kind * self.dice.below(32));
                let batches = (3000 + 17_000 * kind) / pipeline;
                let mut command = self.bed.bench(clients, batches, pipeline);
                let outcome = output(&mut command).map(|_| true);
                self.answers.note(&command, 2 * batches * pipeline, outcome);
            }
            2 => {
                let count = 1 + self.dice.below(50);
                let mut command = self.bed.fabric.smc("redis-cli");
                command.args(["-p", &self.bed.ports[0].to_string(), "-r", &count.to_string()]);
                command.args(["incr", "counter"]);
                let before = self.increments;
                let all = (1..=count).map(|n| format!("{}\n", before + n)).collect::<String>();
                self.increments += count;
                self.expect(command, count, all.as_bytes());
            }
            3 => {
                let count = 1 + self.dice.below(20);
                let all = self.small.repeat(count as usize);
                self.expect(self.bed.get(port, "small", count), count, &all);
            }
            4 => {
                let count = 1 + self.dice.below(3);
                let all = self.large.repeat(count as usize);
                self.expect(self.bed.get(port, "large", count), count, &all);
            }
            5 => {
                let count = 1 + self.dice.below(3);
                let all = self.hash.repeat(count as usize);
                self.expect(self.bed.send(count), count, &all);
            }
            victim => self.kill_one(victim, port),
        }
    }

    fn kill_one(&mut self, victim: u64, port: u16) {
        self.aborts += 1;
        let mut command = match victim {
            6 => self.bed.bench(1 + self.dice.below(20), 1_000_000, 1 + self.dice.below(16)),
            7 => self.bed.get(port, "large", 100),
            _ => self.bed.send(100),
        };
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let client = command.spawn().unwrap();
        abort(client, Duration::from_millis(20 + self.dice.below(300)));
    }

    /// Counts the resources of the processes, after the end of the clients. `record`: gets the
    /// counts.
    fn look(&self, seconds: f64, record: Option<&mut Record>) {
        let Bed { fabric, servers, ports, .. } = self.bed;
        // Everything left behind by the clients must be released.
        eventually(|| self.bed.devices().0 < servers.len());
        sleep(Duration::from_millis(300));
        let held: Vec<Held> = servers.iter().map(|(_, pid)| Held::by(*pid)).collect();
        let dmbs: u64 = self.bed.devices().1;
        let left = Left::now(fabric, ports);
        let (smc, tcp) = fabric.decided();
        let (rounds, aborts) = (self.rounds, self.aborts);
        print!("{seconds:5.0} s  {rounds} rounds {aborts} aborts {smc} smc {tcp} tcp {dmbs} dmbs");
        servers.iter().zip(&held).for_each(|((name, _), held)| print!("  {name}: {held}"));
        let Answers { right, lost, broken, .. } = self.answers;
        println!("  {left:?} {right} right {lost} lost {broken} broken");
        let Some(record) = record else { return };
        // A process opens a device at the first need, late on a busy machine. Earlier counts say
        // nothing of growth. The device opens once per process.
        let opens = |(before, now): (&Held, &Held)| before.mappings == 0 && now.mappings > 0;
        if record.held.last().is_some_and(|before| before.iter().zip(&held).any(opens)) {
            *record = Record { servers: servers.clone(), ..Record::default() };
        }
        record.moments.push(seconds);
        record.held.push(held);
        record.dmbs.push(dmbs as f64);
        record.left.push(left);
    }
}

fn has_all_programs() -> bool {
    let programs =
        ["redis-server", "redis-benchmark", "redis-cli", "nginx", "haproxy", "gunicorn", "curl"];
    programs.into_iter().all(has)
}

#[test]
#[ignore = "tests/programs.sh --quick installs the programs and runs it"]
fn nothing_grows() {
    if my_role().is_some() {
        run_daemon();
    }
    if !has_all_programs() {
        let why = "redis, nginx, haproxy, gunicorn and curl are not all installed";
        // Past the capture of the test harness.
        let _ = writeln!(std::io::stderr(), "SKIPPED, nothing was tested: {why}");
        return;
    }
    let seconds = std::env::var("SMC_SOAK_SECONDS").ok().and_then(|text| text.parse().ok());
    let length = Duration::from_secs(seconds.unwrap_or(20));
    let seed = std::env::var("SMC_SOAK_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) | 1);
    println!("seed {seed}");
    let mut bed = Bed::start();
    let mut load = Load::new(&bed, seed);
    let started = Instant::now();
    let lines = (length / 60).clamp(Duration::from_secs(2), Duration::from_secs(60));
    let mut next = lines;
    // By then every part has been used once.
    let warm = (length / 2).min(Duration::from_secs(180));
    let mut record = Record { servers: bed.servers.clone(), ..Record::default() };
    while started.elapsed() < length {
        load.turn();
        if started.elapsed() < next {
            continue;
        }
        next = started.elapsed() + lines;
        let counts = started.elapsed() >= warm;
        load.look(started.elapsed().as_secs_f64(), counts.then_some(&mut record));
    }
    let Load { answers, rounds, aborts, .. } = load;
    let grown = record.grown();
    for (name, pid) in bed.servers.iter().filter(|_| !grown.is_empty()) {
        println!("{name} {pid}:\n{}", held::kinds(*pid));
    }
    // First, to leave no process behind.
    std::mem::take(&mut bed.running).into_iter().for_each(Running::stop);
    let Answers { right, lost, broken, details } = answers;
    println!("{right} answers are right, {lost} clients lost answers, {broken} got wrong ones");
    assert!(lost == 0 && broken == 0, "{details:#?} (seed {seed})");
    assert!(grown.is_empty(), "{grown}(seed {seed})");
    let fabric = &bed.fabric;
    let (smc, tcp) = fabric.decided();
    assert!(smc > 0 && fabric.broken().len() as u64 <= aborts * 50, "{:?}", fabric.broken());
    println!("{rounds} rounds, {aborts} aborts; {smc} ends on SMC, {tcp} on TCP");
    // Killed clients leave their lock files. The next process to lock the device takes the file
    // over.
    assert_eq!(fabric.left_behind(), Vec::<String>::new());
}
