// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A fabric, and programs running on the fabric with and without the library, under a time limit.
#![allow(unreachable_pub, reason = "each test is a crate of its own")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(dead_code, reason = "not every test uses all of it")]

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use guest_driver::go_program;
use ism_device::DeviceInfo;
use smc_test_support::TestDir;
use vhost_device_ism::config::{FabricSpec, GuestSpec, Quotas};
use vhost_device_ism::{Config, Daemon};
use virtio_ism_abi::Chid;

/// A program running for longer is taken for a hanging one.
pub use smc_test_support::{TIMEOUT, free_port, listens};

/// Devices, and a directory for the programs' reports.
pub struct Fabric {
    dir: TestDir,
    /// Each process makes a file there. On a disk this would take longer than the times measured by
    /// some tests.
    status: TestDir,
    daemon: Option<Daemon>,
    quotas: Quotas,
}

impl Fabric {
    /// A fabric with a number of devices.
    pub fn new(devices: usize) -> Fabric {
        Fabric::with(devices, |_| {})
    }

    /// A fabric with quotas of its own.
    pub fn with(devices: usize, tune: impl FnOnce(&mut Quotas)) -> Fabric {
        let mut fabric = Fabric::without_daemon();
        tune(&mut fabric.quotas);
        fabric.start_daemon(devices);
        fabric
    }

    /// The directories only; the caller starts a daemon later, or another process has a daemon.
    pub fn without_daemon() -> Fabric {
        let (dir, status) = (TestDir::new(), TestDir::in_memory());
        std::fs::create_dir(dir.path("devices")).unwrap();
        std::os::unix::fs::symlink(&*status, dir.path("status")).unwrap();
        Fabric { dir, status, daemon: None, quotas: Quotas::default() }
    }

    /// Starts the daemon with a number of devices.
    pub fn start_daemon(&mut self, devices: usize) {
        self.start(self.config(devices));
    }

    /// Starts the daemon.
    pub fn start(&mut self, config: Config) {
        self.daemon = Some(Daemon::start(config).unwrap());
    }

    /// The configuration of a daemon with a number of devices.
    pub fn config(&self, devices: usize) -> Config {
        let chid = Chid(0xff00);
        let port = |n| {
            let socket = self.dir.join(format!("devices/{n:02}.sock"));
            GuestSpec { chid, ..GuestSpec::new(socket) }
        };
        let mut fabric = FabricSpec::new(chid);
        fabric.quotas = self.quotas;
        let guests = (0..devices).map(port).collect();
        Config { fabrics: vec![fabric], guests, ..Config::default() }
    }

    /// A daemon with one device pool, at the path where the directory of devices is otherwise.
    pub fn with_pool(devices: u32) -> Fabric {
        let mut fabric = Fabric::without_daemon();
        std::fs::remove_dir(fabric.dir.join("devices")).unwrap();
        let mut pool = GuestSpec::new(fabric.dir.join("devices"));
        pool.devices = Some(devices);
        let config = Config { guests: vec![pool], ..Config::default() };
        fabric.daemon = Some(Daemon::start(config).unwrap());
        fabric
    }

    /// The running daemon.
    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }

    /// Ends the daemon.
    pub fn kill_daemon(&mut self) {
        drop(self.daemon.take());
    }

    /// Has all drivers leave their devices, and ends the daemon.
    pub fn end_daemon_in_order(&mut self) {
        let daemon = self.daemon.take().unwrap();
        daemon.leave(&Default::default());
    }

    /// Has the daemon give one device up, by the name of its socket.
    pub fn remove_device(&self, name: &str) {
        self.daemon().remove_guest(name).unwrap();
    }

    /// A file of the test's own.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A program, on SMC if possible.
    pub fn smc(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command
            .env("LD_PRELOAD", library())
            .env("SMC_RUN_DEVICES", self.dir.join("devices"))
            .env("SMC_RUN_CONNECT", "*")
            .env("SMC_RUN_ACCEPT", "*")
            .env("SMC_RUN_STATUS", self.dir.join("status"));
        if cfg!(target_feature = "crt-static") {
            // The tests are programs of theirs. Other programs may execute them.
            command.env("SMC_RUN_GO", "true");
            load_into(&mut command, program.as_ref());
        }
        command
    }

    /// A program, on SMC or not.
    pub fn on(&self, smc: bool, program: impl AsRef<Path>) -> Command {
        if smc { self.smc(program) } else { Command::new(program.as_ref()) }
    }

    /// Number of connections so far on SMC, and on TCP. Each end with the library counts.
    pub fn decided(&self) -> (usize, usize) {
        let mut all = (0, 0);
        for text in self.reports() {
            all.0 += text.matches("\"smc\":true").count();
            all.1 += text.matches("\"smc\":false").count();
        }
        all
    }

    /// The daemon's information on each device opened by a program.
    pub fn open_devices(&self) -> Vec<DeviceInfo> {
        let daemon = self.daemon.iter();
        daemon.flat_map(Daemon::list).filter_map(|port| port.device).collect()
    }

    /// The directory of the devices' sockets.
    pub fn devices(&self) -> PathBuf {
        self.dir.join("devices")
    }

    /// Files left by processes beside the devices.
    pub fn left_behind(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.join("devices")).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| !name.ends_with(".sock")).collect()
    }

    /// How often a word is in the programs' reports.
    pub fn said(&self, word: &str) -> usize {
        self.reports().map(|text| text.matches(word).count()).sum()
    }

    /// The texts of the programs' reports.
    fn reports(&self) -> impl Iterator<Item = String> {
        let files = std::fs::read_dir(&self.status).unwrap().flatten();
        files.map(|entry| std::fs::read_to_string(entry.path()).unwrap())
    }

    /// The programs' reports of failed handshakes.
    pub fn broken(&self) -> Vec<String> {
        let lines =
            self.reports().flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>());
        lines.filter(|line| line.contains("\"broken\"")).collect()
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.reports().for_each(|text| eprintln!("reported: {text}"));
        }
        drop(self.daemon.take());
    }
}

/// The library under test. Cargo builds no library of this kind for tests by itself.
pub fn library() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let dir = test.parent().and_then(Path::parent).unwrap();
        let mut build = Command::new(env!("CARGO"));
        // With the features of the whole workspace, as `cargo test --workspace` has built it.
        build.args(["build", "--quiet", "--workspace", "--lib"]);
        build.arg("--target-dir").arg(dir.parent().unwrap());
        if dir.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
        dir.join("libsmc_preload.so")
    });
    built.clone()
}

/// Has the library loaded as by `smc run --system-calls`, if the program needs a loader.
pub fn load_into(command: &mut Command, program: &Path) {
    let door = go_program::door(program, |_| None);
    if !door.is_some_and(|door| door.is_ok_and(go_program::Door::needs_loader)) {
        return;
    }
    let load = || {
        // The loader waits for the program.
        ism_sys::Loader::start().map(std::mem::forget).map_err(std::io::Error::other)
    };
    // SAFETY: the child has one thread, and its copy of the allocator is usable.
    unsafe { command.env("SMC_RUN_GO", "true").pre_exec(load) };
}

/// Waits until a condition holds.
#[track_caller]
pub fn eventually(so: impl FnMut() -> bool) {
    smc_test_support::eventually("the condition holds", so);
}

/// Waits until a process listens on the port. The kernel's list tells, because some servers fail on
/// one more connection.
pub fn await_listener(port: u16) {
    smc_test_support::eventually(&format!("a process listens on port {port}"), || {
        listens("thread-self", port)
    });
}

/// A running program. Dropping the value kills it.
pub struct Running {
    name: String,
    child: Child,
    timeout: Duration,
    out: Said,
    err: Said,
}

/// The output of a program so far.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<Vec<u8>>>);

impl Said {
    /// Collects the output, so the program never waits for a full pipe.
    fn collect(mut from: impl Read + Send + 'static) -> Said {
        let said = Said::default();
        let all = said.0.clone();
        std::thread::spawn(move || {
            let mut room = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut room) {
                all.lock().unwrap().extend_from_slice(&room[..n]);
            }
        });
        said
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl Running {
    /// Starts a program and collects its output.
    pub fn start(command: &mut Command) -> Running {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let name = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        // The test does not wait for these threads: a program may leave processes with the pipes
        // still open.
        let out = Said::collect(child.stdout.take().unwrap());
        let err = Said::collect(child.stderr.take().unwrap());
        Running { name, child, timeout: TIMEOUT, out, err }
    }

    /// Sets another time limit.
    pub fn within(mut self, timeout: Duration) -> Running {
        self.timeout = timeout;
        self
    }

    /// The time limit.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether the program has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// The program's output so far, standard error last.
    pub fn said(&self) -> String {
        format!("{}\n{}", self.out.text(), self.err.text())
    }

    /// Waits for the program's end and returns its output. For a hanging program, the test prints
    /// the stacks.
    pub fn finish(self) -> String {
        self.finish_beside(&[])
    }

    /// Like [`Running::finish`], for a program whose hang or failure may come from other programs.
    pub fn finish_beside(mut self, others: &[&Running]) -> String {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if begun.elapsed() > self.timeout {
                let mut where_they_are = stacks(self.pid());
                for other in others {
                    where_they_are += &format!("\n{}:\n{}", other.name, stacks(other.pid()));
                }
                let _ = self.child.kill();
                panic!("{} hangs:\n{where_they_are}\n{}", self.name, self.said());
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        // Its last output may still be in the pipe.
        self.await_readers();
        let text = self.out.text();
        if !status.success() {
            let mut said = format!("{}: {status}\n{text}\n{}", self.name, self.err.text());
            // The program with the cause of the failure may end a moment later.
            std::thread::sleep(Duration::from_millis(100));
            for other in others {
                said += &format!("\n{}: {}", other.name, other.said());
            }
            panic!("{said}");
        }
        text
    }

    /// Waits until the output of an ended program is complete. A child of the program may hold the pipe.
    fn await_readers(&self) {
        let begun = Instant::now();
        // The other reference is the reader's.
        let reads = |said: &Said| Arc::strong_count(&said.0) > 1;
        while (reads(&self.out) || reads(&self.err)) && begun.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Asks the program to end, and waits for its end.
    pub fn stop(mut self) {
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let begun = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if begun.elapsed() > self.timeout {
                let stacks = stacks(self.child.id());
                let _ = self.child.kill();
                panic!("{} does not end:\n{stacks}\n{}", self.name, self.said());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let below = descendants(self.child.id());
        let _ = self.child.kill();
        let _ = self.child.wait();
        // The workers of a server go on without the server.
        if !below.is_empty() {
            let pids = below.iter().map(u32::to_string);
            let _ = Command::new("kill").arg("-KILL").args(pids).stderr(Stdio::null()).status();
        }
    }
}

/// The descendants of a process.
fn descendants(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = tasks.flat_map(|task| {
        let text = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()
    });
    children.flat_map(|child| std::iter::once(child).chain(descendants(child))).collect()
}

/// Where in the kernel the threads of a process and of its descendants are.
fn stacks(pid: u32) -> String {
    std::iter::once(pid).chain(descendants(pid)).map(stacks_of).collect()
}

fn stacks_of(pid: u32) -> String {
    let gdb = Command::new("gdb")
        .args(["-p", &pid.to_string(), "-batch", "-ex", "thread apply all bt 12"])
        .stderr(Stdio::null())
        .output();
    let mut text = match gdb {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(_) => String::new(),
    };
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let at = std::fs::read_to_string(task.path().join("wchan")).unwrap_or_default();
        text += &format!("{} in {at}\n", task.path().display());
    }
    text
}

/// Runs one of the test's programs: this executable, with the role in its environment.
pub fn role(command: &mut Command, test: &str, role: &str, port: u16) -> Running {
    command.args([test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"]);
    command.env("PRELOAD_TEST_ROLE", role).env("PRELOAD_TEST_PORT", port.to_string());
    Running::start(command)
}

/// The test with a function or closure in its body, by the path of its type.
pub fn test_of<T>() -> Option<&'static str> {
    let path = std::any::type_name::<T>().split_once("::")?.1;
    path.rsplit_once("::").map(|(test, _)| test)
}

/// The role of this process, if started by [`role`].
pub fn my_role() -> Option<(String, u16)> {
    let role = std::env::var("PRELOAD_TEST_ROLE").ok()?;
    Some((role, std::env::var("PRELOAD_TEST_PORT").unwrap().parse().unwrap()))
}

/// A program of `tests/contract`, compiled with these options. The program of a static test is static.
pub fn compiled(name: &str, options: &[&str]) -> PathBuf {
    let linked: &[&str] = if cfg!(target_feature = "crt-static") { &["-static"] } else { &[] };
    compiled_of("contract", name, &[&["-g", "-pthread"], linked, options].concat())
}

/// A program or library of a folder of `tests`. The file is in Cargo's directory for tests.
pub fn compiled_of(folder: &str, name: &str, options: &[&str]) -> PathBuf {
    let tag = options.concat().replace(['=', '-', '/'], "");
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{tag}"));
    let source = format!("{}/tests/{folder}/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let changed = |path: &Path| path.metadata().and_then(|of| of.modified());
    if !changed(&file).is_ok_and(|built| built > changed(source.as_ref()).unwrap()) {
        // Another test may compile the same program.
        let own = TestDir::for_programs();
        let mut cc = Command::new("cc");
        cc.env_remove("LD_PRELOAD").args(["-O1", "-o"]).arg(own.path(name)).arg(source);
        assert!(cc.args(options).status().unwrap().success());
        std::fs::rename(own.path(name), &file).unwrap();
    }
    file
}

/// Runs both ends of a program with the output "all bytes". `command`: of a mode, `server` or
/// `client`, and a port.
#[track_caller]
pub fn run_ends(command: impl Fn(&str, &str) -> Command) {
    let port = free_port();
    let start = |mode: &str| {
        Running::start(&mut command(mode, &port.to_string())).within(Duration::from_secs(120))
    };
    let server = start("server");
    await_listener(port);
    let client = start("client").finish_beside(&[&server]);
    assert_eq!(client, "all bytes\n");
    assert_eq!(server.finish(), "all bytes\n");
}

/// Bytes whose values show their position. The pattern begins again after 251 * 256.
pub fn pattern(n: usize) -> Vec<u8> {
    let once: Vec<u8> = (0..251 * 256).map(|i: usize| (i / 251 + i * 7) as u8).collect();
    let mut all = once.repeat(n / once.len() + 1);
    all.truncate(n);
    all
}
