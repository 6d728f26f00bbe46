// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Helpers: processes started by this command from its own program, and their messages.
//!
//! A helper gets its task as one argument and reports on its standard output, a JSON object per
//! line. Its standard input is a pipe without data. The kernel closes the pipe when the starting
//! process ends for any reason; then the helper ends too. Helpers have a process group of their
//! own, so Ctrl-C on the terminal reaches helpers only that way.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::CliError;

/// How long a helper may take to end after its standard input is closed.
const GRACE: Duration = Duration::from_secs(5);

/// One line of a helper.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line<T> {
    /// A message of its task.
    Message(T),
    /// Its task has failed.
    Error(String),
}

/// A helper, from the view of the starting process. Dropping the value ends the helper.
#[derive(Debug)]
pub(crate) struct Helper {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Helper {
    /// Starts this program with the hidden subcommand `role` and a task.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(crate) fn start(name: &str, role: &str, task: &impl Serialize) -> Result<Helper, CliError> {
        let failed = |problem: String| CliError::Helper { name: name.into(), problem };
        let task = serde_json::to_string(task).map_err(|error| failed(error.to_string()))?;
        let mut child = Command::new("/proc/self/exe")
            .arg0("smc")
            .args([role, &task])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| failed(format!("cannot be started: {error}")))?;
        let stdin = child.stdin.take();
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Helper { name: name.into(), child, stdin, lines })
    }

    /// Process id of the helper.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end of the process, which has left its task and pipes to a child of its own. This
    /// process then becomes another program by exec, without a child from here.
    pub(crate) fn leave(mut self) {
        wait_for(&mut self.child, GRACE);
        // Dropping would close the pipe.
        std::mem::forget(self);
    }

    /// The helper's next message.
    ///
    /// # Errors
    /// The helper sends nothing for `timeout`, reports an error, or has ended.
    pub(crate) fn receive<T: DeserializeOwned>(&self, timeout: Duration) -> Result<T, CliError> {
        self.try_receive(timeout)?.ok_or_else(|| CliError::Helper {
            name: self.name.clone(),
            problem: format!("sent nothing for {timeout:?}"),
        })
    }

    /// Like [`Helper::receive`], but returns `None` if the helper sends nothing in that time.
    ///
    /// # Errors
    /// The helper reports an error, or has ended.
    pub(crate) fn try_receive<T: DeserializeOwned>(
        &self,
        time: Duration,
    ) -> Result<Option<T>, CliError> {
        let failed = |problem: String| CliError::Helper { name: self.name.clone(), problem };
        let line = match self.lines.recv_timeout(time) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(failed("ended before its task was done".into()));
            }
        };
        match serde_json::from_str(&line) {
            Ok(Line::Message(message)) => Ok(Some(message)),
            Ok(Line::Error(error)) => Err(failed(format!("failed: {error}"))),
            Err(error) => Err(failed(format!("sent {line:?}: {error}"))),
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        drop(self.stdin.take());
        if !wait_for(&mut self.child, GRACE) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Waits for a child to end; `false`: the child runs on after `limit`.
pub(crate) fn wait_for(child: &mut Child, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    let mut pause = Duration::from_micros(100);
    loop {
        match child.try_wait() {
            Ok(None) if Instant::now() < deadline => std::thread::sleep(pause),
            Ok(None) => return false,
            Ok(Some(_)) | Err(_) => return true,
        }
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

/// Sends a message to the starting process.
///
/// # Errors
/// The starting process has ended.
pub(crate) fn send(what: &impl Serialize) -> std::io::Result<()> {
    write_line(&Line::Message(what))
}

fn write_line<T: Serialize>(line: &Line<T>) -> std::io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    let mut out = std::io::stdout().lock();
    out.write_all(&text)?;
    out.flush()
}

/// Runs a helper's task and reports its error. The process exits with its starter.
pub(crate) fn run<T: DeserializeOwned>(
    task: &str,
    body: impl FnOnce(T) -> Result<(), CliError>,
) -> ExitCode {
    std::thread::spawn(|| {
        wait_for_parent_end();
        std::process::exit(1);
    });
    run_unwatched(task, body)
}

/// Like [`run`], for a task calling [`wait_for_parent_end`] itself.
pub(crate) fn run_unwatched<T: DeserializeOwned>(
    task: &str,
    body: impl FnOnce(T) -> Result<(), CliError>,
) -> ExitCode {
    let task = serde_json::from_str(task)
        .map_err(|error| CliError::Usage(format!("not a task of this program: {error}")));
    match task.and_then(body) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = write_line::<()>(&Line::Error(error.to_string()));
            ExitCode::FAILURE
        }
    }
}

/// Returns when the starting process has ended or closed the pipe.
pub(crate) fn wait_for_parent_end() {
    let mut sink = [0u8; 64];
    while matches!(std::io::stdin().read(&mut sink), Ok(n) if n > 0) {}
}

/// Raises the limit of descriptors: a helper may serve many connections.
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!(%error, "descriptor limit");
    }
}
