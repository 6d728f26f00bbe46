// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The processes that have a statistics socket.

use std::path::PathBuf;

use guest_driver::statistics::{self, Process};
use serde::Serialize;

use crate::paths;

/// Processes that are asked at a time. A process that is stopped does not answer.
const AT_A_TIME: usize = 32;

/// The answers of this user's processes.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Processes {
    #[serde(rename = "processes")]
    pub(crate) list: Vec<Process>,
    /// Those that do not answer.
    pub(crate) silent: Vec<Silent>,
}

/// A process that does not answer.
#[derive(Debug, Serialize)]
pub(crate) struct Silent {
    pub(crate) socket: PathBuf,
    pub(crate) problem: String,
}

impl Processes {
    /// Whether there is no process.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty() && self.silent.is_empty()
    }
}

/// Asks all processes.
pub(crate) fn all() -> Processes {
    let mut processes = Processes::default();
    // Sockets in a directory that other users may write are not trusted. The one of a container, which
    // only root can make, is for all its users.
    let container = PathBuf::from(paths::CONTAINER_STATISTICS);
    let directories = std::iter::once(container).chain(paths::directory());
    let sockets: Vec<_> = directories.flat_map(|at| statistics::find(&at)).collect();
    for some in sockets.chunks(AT_A_TIME) {
        let answers: Vec<_> = std::thread::scope(|scope| {
            let asked: Vec<_> =
                some.iter().map(|socket| scope.spawn(|| statistics::ask(socket))).collect();
            asked.into_iter().map(|thread| thread.join()).collect()
        });
        for (socket, answer) in some.iter().zip(answers) {
            match answer {
                Ok(Ok(process)) => processes.list.push(process),
                // It has just ended.
                Ok(Err(_)) if !socket.exists() => {}
                Ok(Err(error)) => processes
                    .silent
                    .push(Silent { socket: socket.clone(), problem: error.to_string() }),
                Err(_) => {}
            }
        }
    }
    processes.list.sort_by_key(|process| process.pid);
    processes
}
