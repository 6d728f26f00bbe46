//! The processes that can be asked.

use std::path::PathBuf;

use guest_driver::statistics::{self, Process};
use serde::Serialize;

use crate::places;

/// Processes that are asked at a time: one that is stopped answers never.
const AT_A_TIME: usize = 32;

/// What the processes of this user say.
#[derive(Debug, Default, Serialize)]
pub(super) struct Processes {
    #[serde(rename = "processes")]
    pub(super) list: Vec<Process>,
    /// Those that do not answer.
    pub(super) silent: Vec<Silent>,
}

/// A process that does not answer.
#[derive(Debug, Serialize)]
pub(super) struct Silent {
    pub(super) socket: PathBuf,
    pub(super) problem: String,
}

impl Processes {
    /// Whether there is nobody to show.
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty() && self.silent.is_empty()
    }
}

/// Asks them all.
pub(super) fn all() -> Processes {
    let mut processes = Processes::default();
    // What lies in a directory that others may write is nothing to go by.
    if !places::directory().exists() {
        return processes;
    }
    let Ok(directory) = places::make_directory() else { return processes };
    let sockets = statistics::find(&directory);
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
