// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs on the host: QEMU, the daemon, and further programs of tests.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::paths;

/// A running program on the host. Killed when dropped, and when this process ends in whatever way.
#[derive(Debug)]
pub struct Program {
    name: String,
    pid: u32,
    child: Mutex<Child>,
}

impl Program {
    /// Starts a program whose output goes to a log.
    #[track_caller]
    pub(super) fn start<S: AsRef<OsStr>>(
        name: &str,
        command: &[S],
        env: &[(&str, &OsStr)],
        log: &File,
    ) -> Program {
        Program::start_with_input(name, command, env, log, Stdio::null())
    }

    /// Like [`Program::start`], with a standard input.
    #[track_caller]
    pub(super) fn start_with_input<S: AsRef<OsStr>>(
        name: &str,
        command: &[S],
        env: &[(&str, &OsStr)],
        log: &File,
        input: Stdio,
    ) -> Program {
        let mut leashed = Command::new(paths::test_peer());
        leashed.arg("leash").args(command).envs(env.iter().copied());
        leashed.stdin(input);
        leashed.stdout(log.try_clone().unwrap()).stderr(log.try_clone().unwrap());
        let child = spawn(leashed).unwrap_or_else(|error| panic!("cannot start {name}: {error}"));
        Program { name: name.to_owned(), pid: child.id(), child: Mutex::new(child) }
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The exit status, if the program has ended.
    #[track_caller]
    pub fn ended(&self) -> Option<ExitStatus> {
        self.child().try_wait().unwrap()
    }

    /// How long the program's threads were ready to run while others had the processors, in sum.
    ///
    /// This is the second number of `/proc/PID/task/TID/schedstat`, zero on kernels without this
    /// count.
    pub fn run_delay(&self) -> Duration {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid));
        let nanos = tasks.into_iter().flatten().flatten().filter_map(|task| {
            let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
            text.split_whitespace().nth(1)?.parse::<u64>().ok()
        });
        Duration::from_nanos(nanos.sum())
    }

    /// Sends SIGKILL, and waits for the end.
    pub fn kill(&self) {
        let mut child = self.child();
        let _ = child.kill();
        let _ = child.wait();
    }

    /// Sends SIGTERM.
    #[track_caller]
    pub fn terminate(&self) {
        let pid = rustix::process::Pid::from_raw(self.pid as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    /// Waits for the program to end by itself.
    #[track_caller]
    pub fn wait(&self, limit: Duration) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
            assert!(start.elapsed() < limit, "{} has not ended within {limit:?}", self.name);
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts a process from a thread living as long as this process, as the thread's death would end the
/// child.
fn spawn(command: Command) -> io::Result<Child> {
    type Request = (Command, Sender<io::Result<Child>>);
    static SPAWNER: OnceLock<Mutex<Sender<Request>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (requests, queue) = channel::<Request>();
        let body = move || {
            for (mut command, reply) in queue {
                let _ = reply.send(command.spawn());
            }
        };
        thread::Builder::new().name("spawner".into()).spawn(body).unwrap();
        Mutex::new(requests)
    });
    let (reply, child) = channel();
    let order = (command, reply);
    spawner.lock().unwrap_or_else(PoisonError::into_inner).send(order).unwrap();
    child.recv().unwrap()
}
