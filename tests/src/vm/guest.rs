// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A running guest.

use std::fmt;
use std::process::ExitStatus;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use super::driver;
use super::host::Host;
use super::job::Job;
use super::machine::{Machine, Vm};
use super::run::{Output, Run};

/// A guest. Killed when dropped.
pub struct Guest {
    pub(super) vm: Vm,
    pub(super) machine: Machine,
    // The daemon, the directory and the logs stay as long as the guest.
    pub(super) host: Arc<Host>,
}

impl Guest {
    #[track_caller]
    pub(super) fn start(host: &Arc<Host>, vm: Vm) -> Guest {
        let machine = host.start(&vm);
        Guest { vm, machine, host: Arc::clone(host) }
    }

    /// Waits until the guest takes commands.
    #[track_caller]
    pub(super) fn wait_ready(&self) {
        self.machine.wait_boots(1);
    }

    /// The guest's name.
    pub fn name(&self) -> &str {
        &self.vm.name
    }

    /// The address on the network of the guests.
    pub fn ip(&self) -> String {
        self.vm.ip(0)
    }

    /// The IPv4 address on the network of an interface: 1 is `eth1`.
    pub fn ip_on(&self, nic: u32) -> String {
        self.vm.ip(nic)
    }

    /// The IPv6 address on the network of an interface.
    pub fn ip6_on(&self, nic: u32) -> String {
        self.vm.ip6(nic)
    }

    /// How long the guest has waited for processors of the host, see [`Program::run_delay`]. A time
    /// limit meant for a guest on an idle host is longer by this time on a busy host.
    ///
    /// [`Program::run_delay`]: super::Program::run_delay
    pub fn run_delay(&self) -> Duration {
        self.machine.program.run_delay()
    }

    /// Plugs the cable of a network interface in or out.
    #[track_caller]
    pub fn set_cable(&self, nic: u32, plugged: bool) {
        let id = if nic == 0 { "net".to_owned() } else { format!("net{nic}") };
        self.qmp_with("set_link", &json!({ "name": id, "up": plugged }));
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

    /// Starts a command.
    pub fn spawn(&self, run: impl Into<Run>) -> Job {
        Job::start(&self.machine.channel, run.into())
    }

    /// The guest's console output in its present QEMU.
    pub fn console(&self) -> String {
        let log = std::fs::read(&self.machine.console).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// A counter of the kernel's driver (`counters` in debugfs).
    #[track_caller]
    pub fn counter(&self, name: &str) -> u64 {
        driver::counter(&self.ok(format!("cat {}", driver::COUNTERS)), name)
    }

    /// Checks the kernel's messages for mistakes.
    #[track_caller]
    pub fn assert_no_splats(&self) {
        driver::assert_no_splats(self.name(), &self.ok("dmesg"), &[]);
    }

    /// Process id of its QEMU.
    pub fn pid(&self) -> u32 {
        self.machine.program.pid()
    }

    /// Runs a command of QEMU's machine protocol without arguments.
    #[track_caller]
    pub fn qmp(&self, command: &str) -> Value {
        self.qmp_with(command, &json!({}))
    }

    /// Runs a command of QEMU's machine protocol.
    #[track_caller]
    pub fn qmp_with(&self, command: &str, arguments: &Value) -> Value {
        let answer = self.try_qmp(command, arguments);
        answer.unwrap_or_else(|error| panic!("{}: {command} {arguments}: {error}", self.vm.name))
    }

    /// Runs a command of QEMU's machine protocol; QEMU may refuse.
    ///
    /// # Errors
    /// QEMU's reason.
    pub fn try_qmp(&self, command: &str, arguments: &Value) -> Result<Value, String> {
        let mut qmp = self.machine.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        qmp.command(command, arguments)
    }

    /// Runs a line of QEMU's human monitor; returns the answer.
    #[track_caller]
    pub fn monitor(&self, line: &str) -> String {
        let said = self.qmp_with("human-monitor-command", &json!({ "command-line": line }));
        said.as_str().unwrap_or_default().trim().to_owned()
    }

    /// Waits for an unread event of QEMU; returns its data.
    #[track_caller]
    pub fn qmp_event(&self, name: &str, limit: Duration) -> Value {
        let mut qmp = self.machine.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        match qmp.event(name, limit) {
            Ok(Some(data)) => data,
            Ok(None) => panic!("{}: no {name} within {limit:?}", self.vm.name),
            Err(error) => panic!("{}: waiting for {name}: {error}", self.vm.name),
        }
    }

    /// Stops the guest's processors.
    #[track_caller]
    pub fn pause(&self) {
        self.qmp("stop");
    }

    /// Lets them go on.
    #[track_caller]
    pub fn resume(&self) {
        self.qmp("cont");
    }

    /// Whether its processors run.
    #[track_caller]
    pub fn running(&self) -> bool {
        self.qmp("query-status")["running"] == true
    }

    /// Resets the guest like the reset button, and waits until it takes commands again. Running
    /// commands end as [`End::Gone`](super::End::Gone).
    #[track_caller]
    pub fn reset(&self) {
        self.rebooting(|| {
            self.qmp("system_reset");
        });
    }

    /// Runs `cause`, a reason to boot, and waits until the guest takes commands again.
    #[track_caller]
    pub fn rebooting<T>(&self, cause: impl FnOnce() -> T) -> T {
        let before = self.machine.channel.boots();
        self.machine.will_boot();
        let result = cause();
        self.machine.wait_boots(before + 1);
        result
    }

    /// Kills QEMU, and waits for its end. Commands end as [`End::Gone`](super::End::Gone).
    pub fn kill(&self) {
        self.machine.program.kill();
    }

    /// Closes the control channel, so the guest powers off, and waits for QEMU's end.
    #[track_caller]
    pub fn power_off(&self) -> ExitStatus {
        self.machine.channel.close();
        self.wait_exit()
    }

    /// Waits until QEMU has ended by itself.
    #[track_caller]
    pub fn wait_exit(&self) -> ExitStatus {
        self.machine.program.wait(Duration::from_secs(60))
    }

    /// Whether QEMU runs and the guest can be talked to.
    pub fn is_alive(&self) -> bool {
        self.machine.program.ended().is_none() && !self.machine.channel.closed()
    }

    /// Kills QEMU if still running, and boots the guest under a new QEMU on the same sockets.
    #[track_caller]
    pub fn restart(&mut self) {
        self.kill();
        self.machine = self.host.start(&self.vm);
        self.wait_ready();
    }
}

impl fmt::Debug for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "guest {}", self.vm.name)
    }
}
