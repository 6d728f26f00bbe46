// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hostile processes of another user beside root's looks: each look is bounded in time and memory,
//! shows nothing false, and shows the honest processes.

mod lies;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::settings::{SERVICE, in_empty_run};
use crate::support::{Running, eventually, text};
use lies::{CLAIMED, LIES, TRUTH, Victim};

/// Variables to turn this program into the judge, or into a hostile process.
const JUDGE: &str = "SMC_TEST_JUDGE";
const LIE: &str = "SMC_TEST_LIE";
/// Users of the hostile and of the honest processes.
const HOSTILE: &str = "4001";
const HONEST: &str = "4002";
/// Memory of a look at most, KiB.
const MEMORY: u64 = 64 << 10;
/// Maximum processor time of a look. The elapsed time depends on the look's own limit, and on other
/// work of the machine.
const PROCESSOR: Duration = Duration::from_secs(5);
const CLOCK: Duration = Duration::from_secs(15);
/// Where both are, since other users cannot enter the directory of the build.
const SMC: &str = "/run/bin/smc";
const TEST: &str = "/run/bin/test";

#[test]
fn no_lie_of_another_user_holds_up_or_misleads_root() {
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIPPED, nothing was tested: it needs root");
        return;
    }
    let test = std::env::current_exe().unwrap();
    let Some(output) = in_empty_run(&format!(
        r#"{SERVICE}
        mount -t proc proc /proc
        chmod 755 $service
        mkdir -p /run/bin /run/smc /run/tmp
        mkdir -m 1777 /run/smc/statistics /run/lies
        install -m 755 "$SMC" {SMC}
        install -m 755 '{}' {TEST}
        {JUDGE}=1 {TEST} --exact hostile::judges_if_asked_to --nocapture
        echo judged"#,
        test.display()
    )) else {
        return;
    };
    let said = (text(&output.stdout), String::from_utf8_lossy(&output.stderr).into_owned());
    assert!(said.0.ends_with("judged\n"), "{}\n{}", said.0, said.1);
}

/// No test, but a hostile process.
#[test]
fn lies_if_asked_to() {
    let Ok(lie) = std::env::var(LIE) else { return };
    let mut words = lie.split('|');
    let mut next = || words.next().unwrap().to_owned();
    let (lie, directory, pid) = (next(), PathBuf::from(next()), next().parse().unwrap());
    let ends: [SocketAddr; 2] = [next().parse().unwrap(), next().parse().unwrap()];
    let victim = Victim { pid, ends: (ends[0], ends[1]), directory: STATISTICS.into() };
    lies::tell(&lie, &directory, &victim);
}

const STATISTICS: &str = "/run/smc/statistics";

fn as_user(user: &str, program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", user, "--regid", user, "--clear-groups", program]);
    command.env("TMPDIR", "/run/tmp").env_remove(JUDGE).env_remove("XDG_RUNTIME_DIR");
    command
}

/// An honest server and client on SMC.
struct Honest {
    server: Running,
    client: Running,
    ends: (SocketAddr, SocketAddr),
}

impl Honest {
    fn start() -> Honest {
        let mut server = as_user(HONEST, SMC);
        server.args(["listen", "-v", "127.0.0.1:0"]).stdin(Stdio::piped());
        let log = "/run/honest.log";
        server.stdout(Stdio::piped()).stderr(std::fs::File::create(log).unwrap());
        let server = Running(server.spawn().unwrap());
        let mut port = String::new();
        eventually("it listens", || {
            let said = std::fs::read_to_string(log).unwrap();
            let line = said.lines().find(|line| line.contains("127.0.0.1:"));
            port = line.map_or("", |line| line.trim().rsplit(':').next().unwrap()).to_owned();
            !port.is_empty()
        });
        let mut client = as_user(HONEST, SMC);
        client.args(["connect", "127.0.0.1", &port]).stdin(Stdio::piped());
        let client = Running(client.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        let mut honest = Honest {
            server,
            client,
            ends: ("0.0.0.0:0".parse().unwrap(), "0.0.0.0:0".parse().unwrap()),
        };
        honest.send();
        let shown = json(&look(&["stat", "--json", "--all"]));
        let row = rows(&shown, honest.client.0.id()).pop().unwrap_or_else(|| panic!("{shown}"));
        let end = |name: &str| row[name].as_str().unwrap().parse().unwrap();
        honest.ends = (end("local"), end("peer"));
        honest
    }

    fn send(&mut self) {
        self.client.0.stdin.as_mut().unwrap().write_all(b"truth").unwrap();
        self.server.0.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    }

    fn pids(&self) -> [u32; 2] {
        [self.server.0.id(), self.client.0.id()]
    }

    /// A hostile process, ready.
    fn liar(&self, lie: &str, directory: &Path) -> Running {
        let ends = self.ends;
        let mut command = as_user(HOSTILE, TEST);
        command.args(["--exact", "hostile::lies_if_asked_to", "--nocapture"]);
        let pid = self.server.0.id();
        command.env(LIE, format!("{lie}|{}|{pid}|{}|{}", directory.display(), ends.0, ends.1));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut liar = Running(command.spawn().unwrap());
        let mut lines = BufReader::new(liar.0.stdout.take().unwrap()).lines();
        let is_ready = lines.any(|line| line.is_ok_and(|line| line.contains("ready")));
        assert!(is_ready, "{lie}");
        liar
    }
}

/// A look, with its cost.
struct Look {
    stdout: Vec<u8>,
    took: Duration,
    processor: Duration,
    peak: u64,
}

fn look(args: &[&str]) -> Look {
    let path = format!("/run/look-{}", std::process::id());
    let mut command = Command::new(SMC);
    command.args(args).env_remove("XDG_RUNTIME_DIR").env_remove(JUDGE).env("TMPDIR", "/run/tmp");
    command.stdin(Stdio::null()).stdout(std::fs::File::create(&path).unwrap());
    let begin = smc_test_support::Stopwatch::start();
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let (mut peak, mut processor) = (0, Duration::ZERO);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(begin.elapsed() < CLOCK, "{args:?} {}", give_up(&mut child));
        peak = peak.max(memory(child.id()));
        processor = processor.max(processor_time(child.id()));
        std::thread::sleep(Duration::from_millis(2));
    };
    assert!(status.success(), "{args:?}: {status}");
    Look { stdout: std::fs::read(&path).unwrap(), took: begin.elapsed(), processor, peak }
}

fn give_up(child: &mut Child) -> &'static str {
    child.kill().unwrap();
    child.wait().unwrap();
    "does not end"
}

/// The peak memory of a process so far, KiB.
fn memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse().unwrap())
}

fn processor_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap().split_whitespace().skip(11).take(2);
    let ticks: u64 = fields.map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(10 * ticks)
}

impl Look {
    /// Checks common to each look, whatever the lie.
    fn check(&self, what: &str) {
        let Look { took, processor, peak, .. } = self;
        let figures = format!("{what}: {took:?}, processor {processor:?}, {peak} KiB");
        assert!(*took < CLOCK && *processor < PROCESSOR && *peak < MEMORY, "{figures}");
        let shown = std::str::from_utf8(&self.stdout).unwrap();
        let harmful = |c: char| {
            c.is_control() && c != '\n'
                || ('\u{202a}'..='\u{202e}').contains(&c)
                || ('\u{2066}'..='\u{2069}').contains(&c)
        };
        assert!(!shown.contains(harmful), "{what}: {shown:?}");
        assert!(!shown.contains(CLAIMED), "{what}: {shown}");
    }
}

fn json(look: &Look) -> Value {
    serde_json::from_slice(&look.stdout).unwrap()
}

/// The connections shown for a process.
fn rows(all: &Value, pid: u32) -> Vec<Value> {
    let processes = all["processes"].as_array().unwrap().iter();
    let of = processes.filter(|process| process["pid"] == pid);
    of.flat_map(|process| process["connections"].as_array().unwrap().clone()).collect()
}

/// The honest rows are there, and no other process has one of them.
fn check_rows(all: &Value, honest: &Honest, what: &str) {
    for pid in honest.pids() {
        let rows = rows(all, pid);
        let [row] = &rows[..] else { panic!("{what}: {rows:?}") };
        assert_eq!(row["kind"], "SMC-D v2.1", "{what}");
    }
    let ends = [honest.ends.0, honest.ends.1].map(|end| Value::from(end.to_string()));
    for process in all["processes"].as_array().unwrap() {
        let pid = process["pid"].as_u64().unwrap() as u32;
        let list = process["connections"].as_array().unwrap();
        assert!(process["devices"].as_array().unwrap().len() <= 64, "{what}");
        assert!(process["totals"]["reasons"].as_array().unwrap().len() <= 64, "{what}");
        if honest.pids().contains(&pid) {
            continue;
        }
        let others = |row: &&Value| ends.contains(&row["local"]);
        assert_eq!(list.iter().find(others), None, "{what}");
        // Of its two sockets one is a connection; the other is its other end.
        assert!(list.len() <= 2, "{what}: {} connections", list.len());
    }
}

/// Not a test by itself, but the judge of the looks, run as root in namespaces of its own.
#[test]
fn judges_if_asked_to() {
    if std::env::var_os(JUDGE).is_none() {
        return;
    }
    let mut honest = Honest::start();
    let directory = Path::new("/run/lies");
    let told = honest.liar(TRUTH, directory);
    let shown = look(&["stat", "--json", "--all"]);
    shown.check(TRUTH);
    let rows = rows(&json(&shown), told.0.id());
    assert_eq!(rows.iter().filter(|row| row["kind"] == "SMC-D v2.1").count(), 1, "{rows:?}");
    drop(told);
    for lie in LIES {
        let _liar = honest.liar(lie, directory);
        // The queue of a stopped process fills up with the looks.
        let looks = if lie.contains("is stopped") { 3 } else { 1 };
        for _ in 0..looks {
            let shown = look(&["stat", "--json", "--all"]);
            shown.check(lie);
            check_rows(&json(&shown), &honest, lie);
        }
        let _ = writeln!(std::io::stdout(), "{lie}");
    }
    // Every lie at once, in a container's directory, writable for all users.
    let all: Vec<_> = LIES.iter().map(|lie| honest.liar(lie, Path::new(STATISTICS))).collect();
    for view in ["metrics", "connections", "overview", "totals", "endpoints"] {
        let shown = look(&["stat", view, "--all"]);
        shown.check(view);
        let series = text(&shown.stdout).lines().count();
        assert!(series < 2000, "{view}: {series} lines");
    }
    let shown = look(&["stat", "--json", "--all"]);
    shown.check("all lies");
    check_rows(&json(&shown), &honest, "all lies");
    honest.send();
    drop(all);
    eventually("the sockets are gone", || look(&["stat", "--json", "--all"]).stdout.len() > 2);
}
