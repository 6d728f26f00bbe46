// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests of user-mode Linux, with AF_SMC over the device: the kernel's driver of
//! `guest-driver/kernel` under a kernel checking for mistakes.
//!
//! The kernel is a process, booting in a second or two. Its network is a pair of the network namespace
//! given to the tests by `cargo xtask uml`. When a guest ends, its console must not name a mistake.

use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

use vhost_device_ism::management::AddGuest;

use super::channel::Channel;
use super::child::Program;
use super::driver;
use super::host::Host;
use super::job::Job;
use super::paths::Built;
use super::run::{Output, Run};

/// How long a guest may take to boot.
const BOOT: Duration = Duration::from_secs(60);
/// Age of lost memory before a report: kmemleak judges no memory younger than five seconds.
const LEAK_AGE: Duration = Duration::from_secs(6);
/// Number of the next network of this process.
static NETWORKS: AtomicU8 = AtomicU8::new(1);

/// A running guest, killed on drop unless ended before.
pub struct Uml {
    name: String,
    net: String,
    program: Program,
    channel: Arc<Channel>,
    /// Known mistakes outside this project, provoked by a test.
    known: Vec<&'static str>,
    host: Arc<Host>,
}

impl Uml {
    /// Starts a guest with a device on a port of its own.
    #[track_caller]
    pub(super) fn start(host: &Arc<Host>, name: &str, words: &str) -> Uml {
        let port = AddGuest { name: Some(name.to_owned()), ..AddGuest::default() };
        Uml::start_on(host, name, &host.add_port(port), words)
    }

    /// Starts a guest with the device of a backend at `socket`.
    #[track_caller]
    pub(super) fn start_on(host: &Arc<Host>, name: &str, socket: &Path, words: &str) -> Uml {
        let net = format!("10.7.{}", NETWORKS.fetch_add(1, Ordering::Relaxed));
        let number = net.rsplit('.').next().unwrap_or_default();
        let (near, far) = (format!("host{number}"), format!("guest{number}"));
        let (here, there) = UnixStream::pair().unwrap();
        let kernel = Built::Uml.path();
        let initrd = Built::UmlInitrd.path();
        ip(&format!("link add {near} type veth peer name {far}"));
        ip(&format!("addr add {net}.1/24 dev {near}"));
        ip(&format!("link set {near} up"));
        ip(&format!("link set {far} up"));
        let args = [
            kernel.display().to_string(),
            "mem=256M".into(),
            format!("initrd={}", initrd.display()),
            // Not by a tap: the driver takes locks of queues missing in a tap.
            format!("vec0:transport=raw,ifname={far},depth=64,gro=1"),
            format!("virtio_uml.device={}:44", socket.display()),
            // Its messages go to standard error; the control channel is standard input.
            "con=null con0=null,fd:2 con1=fd:0,fd:0".into(),
            format!("umid={}-{name}-{}", near, std::process::id()),
            format!("ism.name={name} ism.net={net} {words}"),
        ];
        let args: Vec<&str> = args.iter().flat_map(|arg| arg.split(' ')).collect();
        let log = host.logs.open(&format!("{name}.console.log"));
        let stdin = Stdio::from(OwnedFd::from(there));
        let program = Program::start_with_input(name, &args, &[], &log, stdin);
        let transcript = host.logs.open(&format!("{name}.control.log"));
        let channel = Channel::new(name, here, transcript);
        let host = Arc::clone(host);
        Uml { name: name.to_owned(), net, program, channel, known: vec!["virtio_pcidev.c"], host }
    }

    /// Waits until the guest takes commands.
    #[track_caller]
    pub(super) fn wait_ready(&self) {
        if !self.channel.wait_boots(1, BOOT) {
            panic!("{} has not booted within {BOOT:?}:\n{}", self.name, self.console());
        }
    }

    /// The guest's address.
    pub fn ip(&self) -> String {
        format!("{}.2", self.net)
    }

    /// The host's address on its network.
    pub fn host_ip(&self) -> String {
        format!("{}.1", self.net)
    }

    /// Starts a command.
    pub fn spawn(&self, run: impl Into<Run>) -> Job {
        Job::start(&self.channel, run.into())
    }

    /// Runs a command and waits for its end.
    #[track_caller]
    pub fn run(&self, run: impl Into<Run>) -> Output {
        self.spawn(run).wait()
    }

    /// Runs a command and returns its standard output; panics on failure.
    #[track_caller]
    pub fn ok(&self, run: impl Into<Run>) -> String {
        self.run(run).ok()
    }

    /// The kernel's messages.
    pub fn console(&self) -> String {
        let path = self.host.logs.path(&format!("{}.console.log", self.name));
        String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
    }

    /// A counter of the driver (`counters` in debugfs).
    #[track_caller]
    pub fn counter(&self, name: &str) -> u64 {
        driver::counter(&self.ok(format!("cat {}", driver::COUNTERS)), name)
    }

    /// Ignores lines with this text: the test provokes a mistake outside this project.
    pub fn forgive(&mut self, text: &'static str) {
        self.known.push(text);
    }

    /// Sends SIGKILL.
    pub fn kill(&self) {
        self.program.kill();
    }

    /// Checks for lost memory, powers the guest off, and checks its console for mistakes.
    #[track_caller]
    pub fn finish(self) {
        Uml::finish_all([self]);
    }

    /// Like [`Uml::finish`], for several guests.
    #[track_caller]
    pub fn finish_all(guests: impl IntoIterator<Item = Uml>) {
        thread::sleep(LEAK_AGE);
        guests.into_iter().for_each(Uml::finish_now);
    }

    #[track_caller]
    fn finish_now(self) {
        let leaks = self
            .ok("cd /sys/kernel/debug; for n in 1 2; do echo scan > kmemleak; done; cat kmemleak");
        assert!(leaks.is_empty(), "{} has lost memory:\n{leaks}", self.name);
        // Not by closing the control channel: user-mode Linux then frees its interrupt in a wrong
        // context.
        let off = self.spawn("poweroff -f");
        self.program.wait(BOOT);
        drop(off);
        self.assert_no_splats();
    }

    #[track_caller]
    fn assert_no_splats(&self) {
        driver::assert_no_splats(&self.name, &self.console(), &self.known);
    }
}

impl Drop for Uml {
    fn drop(&mut self) {
        self.kill();
        if !thread::panicking() {
            self.assert_no_splats();
        }
    }
}

impl fmt::Debug for Uml {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "user-mode Linux {}", self.name)
    }
}

/// Runs `ip` with these words.
#[track_caller]
fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status().expect("ip(8)");
    assert!(status.success(), "ip {words}");
}
