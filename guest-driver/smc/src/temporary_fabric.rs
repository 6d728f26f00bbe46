// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A fabric for as long as a command runs: a daemon of its own on sockets in a temporary directory.
//!
//! This process starts a *supervisor*, and the supervisor starts the daemon, and another one in the
//! place of a daemon killed by [`TemporaryFabric::replace_daemon`]. When this process has ended, even by
//! SIGKILL, the supervisor stops the daemon and removes the sockets.

use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use vhost_device_ism::management::Client;

use crate::error::CliError;
use crate::helper::{self, Helper};

/// How long a daemon may take to listen.
const START: Duration = Duration::from_secs(10);
/// Time without a daemon.
const VACANCY: Duration = Duration::from_millis(500);
/// How long a daemon may take to end.
const STOP: Duration = Duration::from_secs(3);

/// The task of a supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    dir: PathBuf,
    devices: Vec<String>,
}

/// The message of a supervisor once the daemon listens.
#[derive(Debug, Serialize, Deserialize)]
struct Listening {
    pid: u32,
}

/// A fabric with some devices.
#[derive(Debug)]
pub(crate) struct TemporaryFabric {
    dir: PathBuf,
    daemon: u32,
    // Dropped first: the supervisor removes the contents of the directory.
    supervisor: Helper,
}

impl TemporaryFabric {
    /// Starts a daemon with the devices of these names on one fabric.
    ///
    /// # Errors
    /// The directory cannot be made, or the daemon does not start.
    pub(crate) fn start(devices: &[&str]) -> Result<TemporaryFabric, CliError> {
        let dir = temporary_directory()?;
        let task = Task { dir: dir.clone(), devices: devices.iter().map(|&d| d.into()).collect() };
        let supervisor = Helper::start("fabric", "__supervisor", &task)?;
        let Listening { pid } = supervisor.receive(START)?;
        Ok(TemporaryFabric { dir, daemon: pid, supervisor })
    }

    /// The socket of a device.
    pub(crate) fn device(&self, name: &str) -> PathBuf {
        socket(&self.dir, name)
    }

    /// The directory of the fabric, also for other short-lived sockets.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Process id of the daemon.
    pub(crate) fn daemon_pid(&self) -> u32 {
        self.daemon
    }

    /// Kills the daemon, runs `meanwhile`, and waits for the next daemon.
    ///
    /// # Errors
    /// `meanwhile` failed, or the next daemon does not start.
    pub(crate) fn replace_daemon(
        &mut self,
        meanwhile: impl FnOnce() -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        if let Some(pid) = i32::try_from(self.daemon).ok().and_then(Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        meanwhile()?;
        let Listening { pid } = self.supervisor.receive(START)?;
        self.daemon = pid;
        Ok(())
    }

    /// A client of the daemon's management socket.
    ///
    /// # Errors
    /// [`CliError::Management`].
    pub(crate) fn management(&self) -> Result<Client, CliError> {
        let socket = socket(&self.dir, "management");
        Client::connect(&socket).map_err(|source| CliError::Management { socket, source })
    }
}

fn socket(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.sock"))
}

fn temporary_directory() -> Result<PathBuf, CliError> {
    let name = format!("smc-{}", uuid::Uuid::new_v4().simple());
    let dir = std::env::temp_dir().join(name);
    let made = std::fs::DirBuilder::new().mode(0o700).create(&dir);
    made.map_err(CliError::io(format!("cannot make {}", dir.display())))?;
    Ok(dir)
}

/// Runs the supervisor process.
pub(crate) fn supervise(task: &str) -> ExitCode {
    helper::run_unwatched(task, |task: Task| {
        let result = supervise_daemon(&task);
        if let Err(error) = std::fs::remove_dir_all(&task.dir) {
            tracing::warn!(dir = %task.dir.display(), %error, "cannot remove");
        }
        result
    })
}

fn supervise_daemon(task: &Task) -> Result<(), CliError> {
    let mut daemon = start_daemon(task)?;
    let parent = thread::spawn(helper::wait_for_parent_end);
    while !parent.is_finished() {
        // A daemon that ends by itself has no successor: the command fails.
        let end = daemon.try_wait().ok().flatten();
        if end.is_some_and(|end| end.signal() == Some(Signal::KILL.as_raw())) {
            thread::sleep(VACANCY);
            daemon = start_daemon(task)?;
        }
        thread::sleep(Duration::from_millis(10));
    }
    if let Some(pid) = i32::try_from(daemon.id()).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, Signal::TERM);
    }
    if !helper::wait_for(&mut daemon, STOP) {
        let _ = daemon.kill();
        let _ = daemon.wait();
    }
    Ok(())
}

/// Starts a daemon, and reports that it listens.
fn start_daemon(task: &Task) -> Result<Child, CliError> {
    let failed = |problem: String| CliError::Helper { name: "daemon".into(), problem };
    let management = socket(&task.dir, "management");
    let mut command = Command::new("/proc/self/exe");
    command.arg0("smc").arg("__daemon").stdin(Stdio::null()).stdout(Stdio::null());
    command.arg("--management").arg(&management).args(["--log-level", "warn"]);
    for name in &task.devices {
        command.arg("--socket-path").arg(socket(&task.dir, name));
    }
    let mut daemon =
        command.spawn().map_err(|error| failed(format!("cannot be started: {error}")))?;
    let deadline = Instant::now() + START;
    while Client::connect(&management).is_err() {
        let ended = daemon.try_wait().ok().flatten();
        if let Some(status) = ended {
            return Err(failed(format!("ended with {status}")));
        }
        if Instant::now() > deadline {
            let _ = daemon.kill();
            let _ = daemon.wait();
            return Err(failed("does not listen".into()));
        }
        thread::sleep(Duration::from_millis(2));
    }
    // A parent that has ended is found by the caller.
    let _ = helper::send(&Listening { pid: daemon.id() });
    Ok(daemon)
}

/// Runs the daemon process: the daemon of `smc fabric`, ended together with its supervisor.
pub(crate) fn daemon(args: Vec<std::ffi::OsString>) -> ExitCode {
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::TERM)) {
        tracing::debug!(%error, "death signal");
    }
    vhost_device_ism::run_main(std::iter::once("smc fabric".into()).chain(args))
}
