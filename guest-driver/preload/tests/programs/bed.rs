// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A test bed: two network namespaces joined by a wire, a fabric with devices, `smc run` and `smc
//! stat`.

use std::cell::RefCell;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use smc_test_support::TestDir;
use vhost_device_ism::{Config, Daemon};

use crate::common::{Fabric, Running, library, listens};

/// Number of devices of a bed. As many processes can use SMC at a time.
const DEVICES: usize = 24;

/// Where a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Server,
    Client,
}

/// Two network namespaces, or none. Without them both ends use the loopback interface.
pub struct Net {
    name: Option<String>,
    /// `smc` and the library.
    tools: TestDir,
    /// Cases slower than allowed. The end of the test reports them.
    slow: RefCell<Vec<String>>,
}

impl Net {
    pub fn new() -> Net {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("smc-{}-{n}", std::process::id());
        let mut net = Net { name: Some(name), tools: tools(), slow: RefCell::default() };
        let [server, client] =
            [Side::Server, Side::Client].map(|side| net.namespace(side).unwrap());
        let commands = [
            format!("netns add {server}"),
            format!("netns add {client}"),
            format!("-n {server} link add wire type veth peer name wire netns {client}"),
            format!("-n {server} address add 10.77.0.1/24 dev wire"),
            format!("-n {client} address add 10.77.0.2/24 dev wire"),
            format!("-n {server} link set lo up"),
            format!("-n {client} link set lo up"),
            format!("-n {server} link set wire up"),
            format!("-n {client} link set wire up"),
            // Without this limit, ten thousands of connections would leave all ports in TIME_WAIT.
            format!("netns exec {client} sysctl -qw net.ipv4.tcp_max_tw_buckets=500"),
            format!("netns exec {server} sysctl -qw net.ipv4.tcp_max_tw_buckets=500"),
        ];
        if !commands.iter().all(|line| ip(line)) {
            println!("no network namespaces here (they take root): both ends on loopback");
            net.remove();
            net.name = None;
        }
        net
    }

    /// The name of a side's network namespace.
    pub fn namespace(&self, side: Side) -> Option<String> {
        let name = self.name.as_ref()?;
        Some(format!("{name}-{}", if side == Side::Server { "s" } else { "c" }))
    }

    /// Where the server listens.
    pub fn address(&self) -> &'static str {
        if self.name.is_some() { "10.77.0.1" } else { "127.0.0.1" }
    }
}

impl Net {
    /// Notes a case slower than allowed. The test fails after its other cases.
    pub fn note_slow(&self, case: String) {
        self.slow.borrow_mut().push(case);
    }

    fn remove(&self) {
        for side in [Side::Server, Side::Client] {
            if let Some(name) = self.namespace(side) {
                ip(&format!("netns del {name}"));
            }
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.remove();
        let slow = self.slow.take();
        assert!(std::thread::panicking() || slow.is_empty(), "too slow next to TCP: {slow:#?}");
    }
}

fn ip(line: &str) -> bool {
    let output = Command::new("ip").args(line.split_whitespace()).output();
    output.is_ok_and(|output| output.status.success())
}

/// The environment of a case.
pub struct Place {
    pub address: &'static str,
    pub port: u16,
    /// A directory of the bed's own.
    pub dir: PathBuf,
}

/// A program with its arguments.
#[derive(Clone, Debug)]
pub struct Program {
    words: Vec<String>,
    user: Option<&'static str>,
}

impl Program {
    /// A program from a line of words without spaces.
    pub fn new(line: impl AsRef<str>) -> Program {
        let words = line.as_ref().split_whitespace().map(str::to_owned).collect();
        Program { words, user: None }
    }

    /// Adds arguments, possibly with spaces.
    pub fn and(mut self, words: &[&str]) -> Program {
        self.words.extend(words.iter().map(|&word| word.to_owned()));
        self
    }

    /// The words of the program, all without spaces, as a line of a script.
    pub fn line(&self) -> String {
        self.words.join(" ")
    }

    /// Whether the program has the rights for TCP option 254.
    pub fn has_rights(&self) -> bool {
        is_root() && self.user.is_none()
    }

    /// Runs the program as this user, if the test runs as root.
    pub fn user(self, user: &'static str) -> Program {
        Program { user: Some(user), ..self }
    }
}

/// A daemon that ends each second, in order and at once in turn. A successor starts at once.
struct Restarts {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Restarts {
    fn begin(config: Config) -> Restarts {
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        let (ready, started) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            for turn in 0.. {
                let daemon = Daemon::start(config.clone()).unwrap();
                let _ = ready.send(());
                let end = Instant::now() + Duration::from_secs(1);
                while Instant::now() < end && !is_over.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(20));
                }
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                if turn % 2 == 0 {
                    daemon.leave(&Default::default());
                }
            }
        });
        started.recv().unwrap();
        Restarts { over, thread: Some(thread) }
    }
}

impl Drop for Restarts {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || !matches!(ended, Some(Err(_))), "a daemon failed");
    }
}

/// A fabric between the two ends.
pub struct Bed<'a> {
    /// With `SMC_PROGRAMS_RESTARTS`.
    _restarts: Option<Restarts>,
    net: &'a Net,
    fabric: Fabric,
    dir: PathBuf,
    /// Whether the programs report the carrier of each connection. A report costs a short
    /// connection some system calls, so a measured program does not report.
    reports: bool,
}

impl Bed<'_> {
    pub fn new(net: &Net) -> Bed<'_> {
        let mut fabric = Fabric::without_daemon();
        let mut config = fabric.config(DEVICES);
        // Servers without root have devices, too.
        config.guests.iter_mut().for_each(|guest| guest.mode = Some(0o666));
        let dir = fabric.file("");
        for part in ["", "devices", "status"] {
            let open = std::fs::Permissions::from_mode(0o777);
            let _ = std::fs::set_permissions(dir.join(part), open);
        }
        let restarts = match std::env::var_os("SMC_PROGRAMS_RESTARTS") {
            Some(_) => Some(Restarts::begin(config)),
            None => {
                fabric.start(config);
                None
            }
        };
        Bed { _restarts: restarts, net, fabric, dir, reports: true }
    }

    pub fn without_reports(self) -> Self {
        Bed { reports: false, ..self }
    }

    pub fn place(&self, port: u16) -> Place {
        Place { address: self.net.address(), port, dir: self.dir.clone() }
    }

    /// The program at one of the sides. `list_servers`: the settings list all servers as speakers
    /// of SMC.
    pub fn command(&self, side: Side, program: &Program, smc: bool, list_servers: bool) -> Command {
        let mut words: Vec<String> = Vec::new();
        if let Some(name) = self.net.namespace(side) {
            words.extend(["nsenter".into(), format!("--net=/run/netns/{name}")]);
        }
        let user = program.user.filter(|_| is_root());
        if let Some(user) = user {
            let to = [format!("--reuid={user}"), format!("--regid={user}")];
            words.extend(["setpriv".into()].into_iter().chain(to).chain(["--init-groups".into()]));
        }
        if smc {
            words.extend(self.smc_run().split(' ').map(str::to_owned));
            if list_servers {
                words.extend(["--peer".into(), "*".into()]);
            }
        }
        words.extend(program.words.iter().cloned());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).current_dir(&self.dir);
        command.env("XDG_RUNTIME_DIR", self.runtime(user.unwrap_or("root"))).env("SMC_GO", "true");
        // The test's settings hold, not the user's.
        command.env_remove("LD_PRELOAD").env("HOME", &self.dir).env("LC_ALL", "C");
        command
    }

    /// The words to put a program on SMC.
    pub fn smc_run(&self) -> String {
        let smc = self.net.tools.join("smc");
        let (smc, here) = (smc.display(), self.dir.display());
        // Short connections are here to be tested, not to be avoided.
        let always = if learns() { "" } else { " --always 0.0.0.0/0" };
        let status = match self.reports {
            true => format!(" --status {here}/status"),
            false => String::new(),
        };
        format!("{smc} run --device {here}/devices{status}{always}")
    }

    /// A directory for the statistics sockets of a user's processes.
    fn runtime(&self, user: &str) -> PathBuf {
        let dir = self.dir.join(format!("run-{user}"));
        if std::fs::create_dir(&dir).is_ok() && is_root() {
            let _ = Command::new("chown").arg(user).arg(&dir).status();
        }
        dir
    }

    /// Waits until the server listens.
    pub fn await_listener(&self, port: u16, server: &mut Running) {
        let pid = server.pid().to_string();
        let begun = Instant::now();
        while begun.elapsed() < server.timeout() {
            if listens(&pid, port) {
                return;
            }
            assert!(!server.has_ended(), "the server has ended: {}", server.said());
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("nobody listens on port {port}: {}", server.said());
    }

    /// The command, for the processes of a user.
    pub fn smc(&self, user: &str) -> Command {
        let mut smc = Command::new(self.net.tools.join("smc"));
        smc.env("XDG_RUNTIME_DIR", self.runtime(user));
        smc
    }

    /// Waits until `smc stat` shows a connection over SMC-D.
    pub fn await_smc_d(&self, user: &str, timeout: Duration) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let output = self.smc(user).args(["stat", "--json"]).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            if text.contains("\"SMC-D v2") {
                return Ok(());
            }
            if begun.elapsed() > timeout {
                let errors = String::from_utf8_lossy(&output.stderr);
                return Err(format!("smc stat shows no connection over SMC-D: {text}{errors}"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Number of ends of connections on SMC, and on TCP.
    pub fn decided(&self) -> (usize, usize) {
        self.fabric.decided()
    }

    /// The programs' reports of failed handshakes, except where the client has closed the
    /// connection meanwhile, as `wrk` does at its end.
    pub fn broken(&self) -> Vec<String> {
        let closed = ["of the awaited Confirm", "Connection reset by peer"];
        let mut broken = self.fabric.broken();
        broken.retain(|report| !closed.iter().any(|why| report.contains(why)));
        broken
    }
}

/// Whether short connections are left to TCP, as `smc run` does by itself.
pub fn learns() -> bool {
    std::env::var_os("SMC_PROGRAMS_LEARN").is_some()
}

/// Whether the test may use other users and namespaces.
pub fn is_root() -> bool {
    static ROOT: OnceLock<bool> = OnceLock::new();
    *ROOT.get_or_init(|| {
        let output = Command::new("id").arg("-u").output();
        output.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
    })
}

/// Makes a directory with `smc` and the library, where every user can read it.
fn tools() -> TestDir {
    let library = library();
    let built = library.parent().unwrap();
    let mut build = Command::new(env!("CARGO"));
    // With the features of the whole workspace, as `cargo test --workspace` has built it.
    build.args(["build", "--quiet", "--workspace", "--bin", "smc"]);
    build.arg("--target-dir").arg(built.parent().unwrap());
    if built.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success());
    let dir = TestDir::new();
    for name in ["smc", "libsmc_preload.so"] {
        let (from, to) = (built.join(name), dir.path(name));
        if std::fs::hard_link(&from, &to).is_err() {
            std::fs::copy(from, to).unwrap();
        }
    }
    dir
}

/// Whether the programs are installed. A missing program is printed, and is a failure where
/// `CI=true`.
pub fn are_installed(case: &str, programs: &[&str]) -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let mut missing = programs.iter().filter(|program| {
        !std::env::split_paths(&path).any(|dir| dir.join(program.trim_start_matches('/')).is_file())
            && !Path::new(program).is_file()
    });
    let Some(first) = missing.next() else { return true };
    let words = format!("SKIPPED: {case}: {first} is not installed");
    assert!(std::env::var("CI").map_or(true, |ci| ci != "true"), "{words}");
    // Past the capture of the test harness.
    let _ = writeln!(std::io::stderr(), "{words}");
    false
}
