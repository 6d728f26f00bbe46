// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The choice of statistics sockets to ask, and the answers.
//!
//! The name of a socket contains a process id, and anybody may choose names. So a process is asked
//! only at sockets the process may have made, and the kernel has to name the process as the
//! listener. Requests run in parallel, and none is waited for beyond the time of the look.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use guest_driver::statistics::{self, Process, ReportReader};

use super::host::{FilePath, Host, named, open_socket};
use super::look::{self, left};
use crate::paths;
use crate::proc_files::Status;

/// Limit of the sockets to ask per process.
const MAX_SOCKETS: usize = 8;
/// Limit in bytes of the incomplete answers together.
const MAX_UNREAD: usize = 16 << 20;

/// A socket to ask.
#[derive(Debug)]
pub(crate) struct ReportRequest {
    /// Path of the socket, as bound by the process.
    pub(crate) socket: PathBuf,
    /// The process expected to answer.
    pub(crate) pid: u32,
    user: u32,
    named: FilePath,
}

impl ReportRequest {
    /// The path of the socket for this process.
    pub(crate) fn at(&self) -> PathBuf {
        self.named.path()
    }

    /// The process and the path: processes of two containers may have sockets of the same name.
    pub(crate) fn key(&self) -> (u32, PathBuf) {
        (self.pid, self.socket.clone())
    }
}

/// The sockets in this user's directories, by the ids in their names.
pub(super) fn in_directories() -> BTreeMap<u32, Vec<PathBuf>> {
    // The directory of a container is shared by all its users. Only root can make such a directory.
    let container = PathBuf::from(paths::CONTAINER_STATISTICS);
    let directories = std::iter::once(container).chain(paths::directory());
    let mut found: BTreeMap<u32, Vec<PathBuf>> = BTreeMap::new();
    for socket in directories.flat_map(|at| statistics::find(&at)) {
        if let Some(pid) = named(&socket) {
            found.entry(pid).or_default().push(socket);
        }
    }
    found
}

/// The possible sockets of a process.
struct Candidate {
    pid: u32,
    status: Status,
    /// The paths, each with the process whose root the path begins at.
    paths: Vec<(u32, PathBuf)>,
}

impl Candidate {
    fn open(self) -> Vec<ReportRequest> {
        let user = self.status.users.get(1).copied().unwrap_or(0);
        let open = |(root, socket): (u32, PathBuf)| {
            let named = open_socket(root, &socket, &self.status).ok()?;
            Some(ReportRequest { socket, pid: self.pid, user, named })
        };
        self.paths.into_iter().filter_map(open).take(MAX_SOCKETS).collect()
    }
}

/// The sockets of the processes seen, and of processes found by this user's directories. `own`: the
/// sockets of [`in_directories`]; `bound`: the sockets known to the kernel.
pub(crate) fn requests(
    host: &Host,
    own: &BTreeMap<u32, Vec<PathBuf>>,
    mut bound: BTreeMap<u32, BTreeSet<PathBuf>>,
    until: Instant,
) -> Vec<ReportRequest> {
    let here = std::process::id();
    let mut candidates: BTreeMap<u32, Candidate> = BTreeMap::new();
    let in_own = |status: &Status| own.get(&status.own_pid).into_iter().flatten();
    for seen in host.seen.values() {
        let mut paths: Vec<_> = in_own(&seen.status).map(|path| (here, path.clone())).collect();
        let bound = bound.remove(&seen.pid).unwrap_or_default();
        let known: BTreeSet<_> = paths.iter().map(|(_, path)| path.clone()).collect();
        paths.extend(bound.difference(&known).map(|path| (seen.pid, path.clone())));
        let status = seen.status.clone();
        candidates.insert(seen.pid, Candidate { pid: seen.pid, status, paths });
    }
    // Processes inaccessible to this user.
    for (pid, sockets) in own {
        if !candidates.contains_key(pid)
            && let Some(status) = Status::of(*pid).filter(|status| status.own_pid == *pid)
        {
            let paths = sockets.iter().map(|path| (here, path.clone())).collect();
            candidates.insert(*pid, Candidate { pid: *pid, status, paths });
        }
    }
    let with_paths = candidates.into_values().filter(|one| !one.paths.is_empty());
    let jobs = with_paths.map(|one| (one.status.users.get(1).copied().unwrap_or(0), one));
    let mut found = Vec::new();
    look::for_each(jobs, until, Candidate::open, |requests| found.extend(requests));
    found.sort_by_key(ReportRequest::key);
    // A container and this process may have one directory.
    found
}

/// An answer, or the error.
pub(super) type Answer = (ReportRequest, io::Result<Process>);

/// A pending request.
struct Open {
    request: ReportRequest,
    question: ReportReader,
    /// Maximum number of connections of the process.
    connections: usize,
}

/// Asks all, and passes each answer to `take` on arrival. Processes without an answer in time are
/// silent.
pub(super) fn ask_all(
    requests: Vec<ReportRequest>,
    connections: impl Fn(u32) -> usize,
    until: Instant,
    mut take: impl FnMut(Answer),
) {
    let jobs = requests.into_iter().map(|request| (request.user, request));
    let mut open: Vec<Open> = Vec::new();
    let begin = |request: ReportRequest| {
        let question = ReportReader::new(&request.at());
        (request, question)
    };
    look::for_each(jobs, until, begin, |(request, question)| match question {
        Ok(question) => {
            let connections = connections(request.pid);
            open.push(Open { request, question, connections });
        }
        Err(error) => take((request, Err(error))),
    });
    open.retain(|one| {
        let listener = one.question.listener().pid.and_then(|pid| u32::try_from(pid).ok());
        // Another process listens there. Its answer would say nothing about the expected process.
        listener == Some(one.request.pid)
    });
    while !open.is_empty() {
        if !wait(&open, until) {
            open.drain(..).for_each(|one| take((one.request, Err(io::ErrorKind::TimedOut.into()))));
            return;
        }
        let mut at = 0;
        while let Some(one) = open.get_mut(at) {
            match one.question.read(one.connections) {
                Ok(false) => at += 1,
                Ok(true) => {
                    let Open { request, question, .. } = open.swap_remove(at);
                    take((request, question.answer()));
                }
                Err(error) => take((open.swap_remove(at).request, Err(error))),
            }
            if unread(&open) > MAX_UNREAD
                && let Some(longest) = longest(&open)
            {
                let request = open.swap_remove(longest).request;
                take((request, Err(io::ErrorKind::FileTooLarge.into())));
            }
        }
    }
}

/// Waits for a part of an answer. `false`: there is no time left.
fn wait(open: &[Open], until: Instant) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut fds: Vec<_> =
        open.iter().map(|one| PollFd::new(&one.question, PollFlags::IN)).collect();
    let left = left(until);
    // An error other than EINTR cannot be: the descriptors are open.
    !left.is_zero() && poll(&mut fds, Some(&ism_sys::timespec(left))) != Ok(0)
}

fn unread(open: &[Open]) -> usize {
    open.iter().map(|one| one.question.length()).sum()
}

/// The longest answer of the user with the most bytes.
fn longest(open: &[Open]) -> Option<usize> {
    let mut of_user: BTreeMap<u32, usize> = BTreeMap::new();
    for one in open {
        *of_user.entry(one.request.user).or_default() += one.question.length();
    }
    let (user, _) = of_user.into_iter().max_by_key(|(_, length)| *length)?;
    let of_user = open.iter().enumerate().filter(|(_, one)| one.request.user == user);
    of_user.max_by_key(|(_, one)| one.question.length()).map(|(at, _)| at)
}

/// Whether a process still listens at a socket of statistics, as far as this user may see. Its file
/// system may keep the caller waiting.
pub(crate) fn has_socket(pid: u32, socket: &Path) -> bool {
    let Some(status) = Status::of(pid) else { return false };
    let listens = |root: u32| {
        let asked =
            open_socket(root, socket, &status).and_then(|file| ReportReader::new(&file.path()));
        let listener = asked.map(|question| question.listener().pid);
        listener.is_ok_and(|listener| listener.and_then(|it| u32::try_from(it).ok()) == Some(pid))
    };
    [std::process::id(), pid].into_iter().any(listens)
}
