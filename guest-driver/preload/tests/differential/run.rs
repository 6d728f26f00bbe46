// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One run of a sequence: two processes at first, to carry out its operations one after another.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::agent;
use crate::common::Fabric;
use crate::script::{Sequence, Step};

/// The ends with the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    Tcp,
    Both,
    Server,
    Client,
    /// Both, and the daemon ends as soon as a connection is on SMC.
    Lost,
    /// Like `Lost`, and the daemon has a successor at once.
    Back,
}

impl Way {
    /// The ways to be compared with TCP.
    pub(crate) const WITH_LIBRARY: [Way; 3] = [Way::Both, Way::Server, Way::Client];

    /// The ways in which a connection changes its carrier.
    pub(crate) const CHANGING: [Way; 2] = [Way::Lost, Way::Back];

    pub(crate) fn is_both(self) -> bool {
        matches!(self, Way::Both | Way::Lost | Way::Back)
    }

    /// The name in the lists of differences.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Tcp => "tcp",
            Way::Both => "both",
            Way::Server => "server",
            Way::Client => "client",
            Way::Lost => "lost",
            Way::Back => "back",
        }
    }
}

/// The outcome of a run.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// The answer of each step, and at last the end of the two programs.
    pub(crate) answers: Vec<String>,
    /// Number of ends of connections on SMC.
    pub(crate) on_smc: usize,
    /// The output of the programs, and the library's reports.
    pub(crate) notes: String,
}

/// The answer of an operation that does not return.
pub(crate) const HANGS: &str = "hangs";
/// A sequence that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// The limit for a step known to hang.
const KNOWN_HANG: Duration = Duration::from_millis(1200);
/// How long the programs may take to start on a busy machine.
const START: Duration = smc_test_support::TIMEOUT;
/// Devices of a run of its own.
const DEVICES: usize = 8;
/// How long programs may take to hear that their device is gone.
const HEARD: Duration = Duration::from_millis(30);
/// In place of an answer, after a hanging operation or in an ended process.
const NOT_DONE: &str = "-";

/// One program.
struct Agent {
    child: Option<Child>,
    pid: i32,
    status: Option<String>,
    to: File,
    from: File,
    received: Vec<u8>,
}

fn state_of(pid: i32) -> Option<char> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(") ")?.1.chars().next()
}

fn status_text(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}"),
        (_, Some(signal)) => agent::signal_name(signal),
        _ => "?".into(),
    }
}

impl Agent {
    /// How the program ended, if so. Only the children of this process have a status.
    fn ended(&mut self) -> Option<String> {
        if self.status.is_none() {
            self.status = match &mut self.child {
                Some(child) => child.try_wait().ok().flatten().map(status_text),
                None if self.pid == 0 || state_of(self.pid).is_some_and(|state| state != 'Z') => {
                    None
                }
                None => Some("ended".into()),
            };
        }
        self.status.clone()
    }

    /// The program's next line; its end; or nothing until the deadline.
    fn line(&mut self, deadline: Instant) -> String {
        let mut has_ended = false;
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return String::from_utf8_lossy(&line).trim_end().to_owned();
            }
            if has_ended {
                return self.ended().unwrap_or_default();
            }
            if Instant::now() >= deadline {
                return HANGS.into();
            }
            let mut list = [libc::pollfd { fd: self.from.as_raw_fd(), events: 1, revents: 0 }];
            let shown = unsafe { libc::poll(list.as_mut_ptr(), 1, 5) };
            if shown > 0 {
                let mut room = [0; 4096];
                if let Ok(n) = self.from.read(&mut room) {
                    self.received.extend_from_slice(&room[..n]);
                }
            } else {
                // The last bytes before the end may still be in the FIFO: one more look.
                has_ended = self.ended().is_some();
                let mut more = [libc::pollfd { fd: self.from.as_raw_fd(), events: 1, revents: 0 }];
                if has_ended && unsafe { libc::poll(more.as_mut_ptr(), 1, 0) } > 0 {
                    has_ended = false;
                }
            }
        }
    }

    fn tell(&mut self, line: &str) {
        self.to.write_all(format!("{line}\n").as_bytes()).unwrap();
    }
}

/// A run in progress.
struct Run<'a> {
    fabric: &'a Fabric,
    /// A fabric of this run only, with an ending daemon.
    own: Option<Fabric>,
    dir: PathBuf,
    way: Way,
    agents: BTreeMap<String, Agent>,
    port: Option<String>,
    deadline: Instant,
    has_changed: bool,
}

/// Where in the kernel the threads of a process wait.
fn whereabouts(name: &str, pid: i32) -> String {
    let mut text = String::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let read = |file| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        text += &format!("{name}: {} waits in {}\n", read("comm").trim(), read("wchan"));
    }
    text
}

fn fifo(path: &Path) -> File {
    let name = CString::new(path.to_str().unwrap()).unwrap();
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    // Opened for both directions, a FIFO neither blocks nor ends.
    File::options().read(true).write(true).open(path).unwrap()
}

impl Run<'_> {
    fn start(&mut self, name: &str) {
        let pipe = |end| fifo(&self.dir.join(format!("{name}.{end}")));
        let (to, from) = (pipe("in"), pipe("out"));
        let mut agent = Agent { child: None, pid: 0, status: None, to, from, received: Vec::new() };
        let with_library = match name {
            "s" => self.way.is_both() || self.way == Way::Server,
            "c" => self.way.is_both() || self.way == Way::Client,
            // A process of the sequence starts the agent.
            _ => {
                self.agents.insert(name.to_owned(), agent);
                return;
            }
        };
        let fabric = self.own.as_ref().unwrap_or(self.fabric);
        let mut command = fabric.on(with_library, std::env::current_exe().unwrap());
        let error = File::create(self.dir.join(format!("{name}.err"))).unwrap();
        command
            .args([crate::TEST, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"])
            .env(agent::DIR, &self.dir)
            .env(agent::NAME, name)
            .env("SMC_RUN_STATUS", self.dir.join("status"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(error)
            .process_group(0);
        self.tell_settings(&mut command);
        let prepare = move || {
            // The daemon's descriptors in this process would take numbers used by sequences.
            let cloexec = libc::CLOSE_RANGE_CLOEXEC as libc::c_int;
            unsafe { libc::close_range(3, libc::c_uint::MAX, cloexec) };
            if !with_library {
                return Ok(());
            }
            // Like `smc run`.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            ism_sys::withhold_io_uring()
        };
        unsafe { command.pre_exec(prepare) };
        let child = command.spawn().unwrap();
        (agent.pid, agent.child) = (child.id() as i32, Some(child));
        let hello = agent.line(self.deadline);
        assert!(hello.starts_with("hello"), "{name}: {hello}");
        self.agents.insert(name.to_owned(), agent);
    }

    fn tell_settings(&self, command: &mut Command) {
        match self.way {
            // A busy machine may take longer than 200 ms to deliver a Proposal.
            Way::Both | Way::Lost | Way::Back => command.env("SMC_RUN_DETECT_MS", "10000"),
            // The settings name no server of this client: servers without SMC must not get a
            // Proposal.
            Way::Client => command.env("SMC_RUN_CONNECT", "*:1"),
            _ => command,
        };
    }

    /// Carries out a step and returns the answer.
    fn step(&mut self, step: &Step) -> String {
        let Step { agent: name, operation } = step;
        let mut words = operation.split_whitespace();
        let op = words.next().unwrap_or_default();
        if name == "-" {
            std::thread::sleep(Duration::from_millis(op.parse().unwrap()));
            return "ok".into();
        }
        let deadline = self.deadline;
        let Some(agent) = self.agents.get_mut(name).filter(|agent| agent.pid != 0) else {
            return NOT_DONE.into();
        };
        if agent.ended().is_some() {
            return NOT_DONE.into();
        }
        agent.tell(operation);
        let mut answer = agent.line(deadline);
        if answer.starts_with("hello ") {
            answer = "ok".into();
        }
        if let Some(port) = answer.strip_prefix("ok port=") {
            self.port = Some(port.to_owned());
            let others: Vec<_> = self.agents.keys().cloned().collect();
            others.iter().for_each(|other| self.tell_port(other));
            return "ok".into();
        }
        let makes_agent =
            matches!(op, "fork" | "vfork" | "spawn" | "clone" | "clone-sys" | "clone-asm");
        if makes_agent && answer == "ok" {
            let child = words.next().unwrap().to_owned();
            let agent = self.agents.get_mut(&child).unwrap();
            let hello = agent.line(deadline);
            let Some(pid) = hello.strip_prefix("hello ") else { return format!("{child} {hello}") };
            agent.pid = pid.parse().unwrap();
            self.tell_port(&child);
        }
        answer
    }

    fn tell_port(&mut self, name: &str) {
        let agent = self.agents.get_mut(name).unwrap();
        if let Some(port) = &self.port
            && agent.pid != 0
            && agent.ended().is_none()
        {
            agent.tell(&format!("port {port}"));
            agent.line(self.deadline);
        }
    }

    /// Ends the programs, children first, and returns how the client, the server and the others
    /// ended.
    fn finish(&mut self) -> Vec<String> {
        let mut names: Vec<_> = self.agents.keys().cloned().collect();
        names.sort_by_key(|name| !name.contains('.'));
        let (mut ends, mut others) = (Vec::new(), "ended".to_owned());
        for name in names {
            let agent = self.agents.get_mut(&name).unwrap();
            if agent.pid == 0 {
                continue;
            }
            if agent.ended().is_none() {
                agent.tell("exit 0");
                agent.line(Instant::now() + LIMIT);
            }
            let end = agent.ended();
            if agent.child.is_some() {
                ends.push(end.unwrap_or_else(|| HANGS.into()));
            } else if end.is_none() {
                others = format!("{name} {HANGS}");
            }
        }
        ends.push(others);
        ends
    }

    /// The reports of the library, and the number of ends of connections on SMC in them.
    fn reports(&self) -> (usize, String) {
        let files = std::fs::read_dir(self.dir.join("status")).into_iter().flatten().flatten();
        let text = files.map(|file| std::fs::read_to_string(file.path()).unwrap_or_default());
        let text: String = text.collect();
        (text.matches("\"smc\":true").count(), text)
    }

    /// Ends the daemon when both ends of a connection are on SMC.
    fn change_carrier(&mut self) {
        if self.has_changed || self.own.is_none() || self.reports().0 < 2 {
            return;
        }
        self.has_changed = true;
        if let Some(own) = &mut self.own {
            own.kill_daemon();
            if self.way == Way::Back {
                own.start_daemon(DEVICES);
            }
        }
        // The programs hear of the end in a moment. Earlier actions are right as well.
        std::thread::sleep(HEARD);
    }

    fn notes(&self, hangs: bool) -> (usize, String) {
        let (on_smc, mut notes) = self.reports();
        let all_hang = hangs.then_some(&self.agents).into_iter().flatten();
        for (name, agent) in all_hang.filter(|(_, agent)| agent.pid != 0) {
            notes += &whereabouts(name, agent.pid);
        }
        for name in ["s", "c"] {
            notes +=
                &std::fs::read_to_string(self.dir.join(format!("{name}.err"))).unwrap_or_default();
        }
        (on_smc, notes)
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        for agent in self.agents.values_mut() {
            if let Some(child) = &mut agent.child {
                // All its children are in its group.
                unsafe { libc::kill(-agent.pid, libc::SIGKILL) };
                let _ = child.wait();
            }
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Runs a sequence once.
///
/// `hang` is a step known to hang, with less time than other steps.
pub(crate) fn run(fabric: &Fabric, sequence: &Sequence, way: Way, hang: Option<&str>) -> Outcome {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let dir = fabric.file(&format!("run-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
    std::fs::create_dir_all(dir.join("status")).unwrap();
    let deadline = Instant::now() + START;
    let agents = BTreeMap::new();
    let own = Way::CHANGING.contains(&way).then(|| Fabric::new(DEVICES));
    let has_changed = false;
    let mut run = Run { fabric, own, dir, way, agents, port: None, deadline, has_changed };
    sequence.agents().iter().for_each(|name| run.start(name));
    run.deadline = Instant::now() + LIMIT;
    let mut outcome = Outcome::default();
    for step in &sequence.steps {
        let hangs = outcome.answers.iter().any(|answer| answer.contains(HANGS));
        if hang.is_some_and(|hang| step.to_string() == hang) {
            run.deadline = run.deadline.min(Instant::now() + KNOWN_HANG);
        }
        let answer = if hangs { NOT_DONE.into() } else { run.step(step) };
        run.change_carrier();
        outcome.answers.push(answer);
    }
    let hangs = outcome.answers.iter().any(|answer| answer.contains(HANGS));
    outcome.answers.extend(if hangs { vec![NOT_DONE.into(); 3] } else { run.finish() });
    let hangs = outcome.answers.iter().any(|answer| answer.contains(HANGS));
    (outcome.on_smc, outcome.notes) = run.notes(hangs);
    outcome
}
