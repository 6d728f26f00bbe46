// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The processes with a statistics socket or with the library of `smc run`, at one moment.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use guest_driver::statistics::{self, Process};
use serde::Serialize;

use super::host::{self, Scope};
use crate::paths;

/// Processes that are asked at a time. A process that is stopped does not answer.
const AT_A_TIME: usize = 32;

/// The answers of processes, and the kernel's account of the processes.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Processes {
    #[serde(rename = "processes")]
    pub(crate) list: Vec<Process>,
    /// Processes without an answer.
    pub(crate) silent: Vec<Silent>,
}

/// A process without an answer.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Silent {
    pub(super) pid: u32,
    pub(crate) socket: PathBuf,
    pub(crate) problem: String,
}

impl Silent {
    pub(super) fn new(asked: &ReportRequest, error: &io::Error) -> Silent {
        let (pid, socket) = asked.key();
        Silent { pid, socket, problem: error.to_string() }
    }
}

/// A socket that is asked.
pub(crate) struct ReportRequest {
    /// Its path, as the process has bound it.
    pub(crate) socket: PathBuf,
    /// The process that has to answer, if only one may.
    pub(crate) pid: Option<u32>,
    /// The socket, where this process cannot reach it by that path.
    pub(super) file: Option<OwnedFd>,
}

impl ReportRequest {
    /// The path at which this process reaches it.
    pub(crate) fn at(&self) -> PathBuf {
        match &self.file {
            Some(file) => PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())),
            None => self.socket.clone(),
        }
    }

    /// The process: the one that has to answer, or the one that the socket is named after.
    pub(crate) fn process(&self) -> u32 {
        let named = || {
            let name = self.socket.file_stem()?.to_str()?.strip_prefix("process-")?;
            name.split('-').next()?.parse().ok()
        };
        self.pid.or_else(named).unwrap_or_default()
    }

    /// The process and the path: processes of two containers have sockets of the same name.
    pub(crate) fn key(&self) -> (u32, PathBuf) {
        (self.process(), self.socket.clone())
    }
}

impl Processes {
    /// Whether there is no process.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty() && self.silent.is_empty()
    }
}

/// Asks the processes of this user, or for root the processes of all users.
pub(crate) fn all() -> Processes {
    of(&Scope::of_environment())
}

/// Asks the processes of this user's directories and of `scope`.
pub(super) fn of(scope: &Scope) -> Processes {
    let mut processes = Processes::default();
    let asked = in_directories();
    for (asked, answer) in asked.iter().zip(ask_all(&asked)) {
        match answer {
            Ok(process) => processes.list.push(process),
            // It has just ended.
            Err(_) if !asked.socket.exists() => {}
            Err(error) => processes.silent.push(Silent::new(asked, &error)),
        }
    }
    host::add(&mut processes, scope);
    processes
}

/// The sockets in this user's directories.
fn in_directories() -> Vec<ReportRequest> {
    // Sockets in a directory that other users may write are not trusted. The one of a container, which
    // only root can make, is for all its users.
    let container = PathBuf::from(paths::CONTAINER_STATISTICS);
    let directories = std::iter::once(container).chain(paths::directory());
    let sockets = directories.flat_map(|at| statistics::find(&at));
    let request = |socket: PathBuf| ReportRequest { socket, pid: None, file: None };
    sockets.map(request).collect()
}

/// The sockets of all processes of this user's directories and of `scope`.
pub(crate) fn sockets(scope: &Scope) -> Vec<ReportRequest> {
    let mut all = in_directories();
    let known: Vec<_> = all.iter().map(ReportRequest::process).collect();
    all.extend(host::sockets(scope, |pid| known.contains(&pid)));
    all
}

/// The answers, in the order of the questions.
pub(super) fn ask_all(all: &[ReportRequest]) -> Vec<io::Result<Process>> {
    let ask = |asked: &ReportRequest| match asked.pid {
        Some(pid) => statistics::ask_process(&asked.at(), pid),
        None => statistics::ask(&asked.at()),
    };
    let of_some = |some: &[ReportRequest]| {
        std::thread::scope(|scope| {
            let threads: Vec<_> = some.iter().map(|one| scope.spawn(move || ask(one))).collect();
            let answers = threads.into_iter().map(|thread| thread.join());
            answers
                .map(|answer| answer.unwrap_or_else(|_| Err(io::ErrorKind::Other.into())))
                .collect()
        })
    };
    all.chunks(AT_A_TIME).flat_map::<Vec<_>, _>(of_some).collect()
}
