// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reads the configuration file again while the daemon runs.
//!
//! The daemon cannot open files in its sandbox. At each request of the daemon, a small process outside opens
//! one file, the file of `--config`, and hands over the descriptor. The process takes no other request, and
//! may open files only in this file's directory.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, read_text};
use crate::service::helper::{Helper, Service};
use crate::vhost::event_loop::{LoopHandle, Registration};

/// Longest wait for an answer: the file may be on another host.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Request to open the file.
#[derive(Debug, Serialize, Deserialize)]
struct Request;

/// `Ok` comes with the descriptor; `Err` is the errno.
type Answer = Result<(), i32>;

/// Reads the configuration file.
#[derive(Debug)]
pub(crate) struct ConfigReader {
    path: PathBuf,
    /// The process, for a daemon without the right to open files.
    process: Option<Helper<Request, Answer>>,
}

impl ConfigReader {
    /// A reader opening the file in this process.
    pub(crate) fn direct(path: &Path) -> ConfigReader {
        ConfigReader { path: path.into(), process: None }
    }

    /// Starts the process. The process first calls `confine`. To be called while there is one thread.
    ///
    /// # Errors
    /// The kernel makes no socket or no process.
    pub(crate) fn start(path: &Path, confine: impl FnOnce() -> bool) -> io::Result<ConfigReader> {
        let process = Helper::start(c"config-reader", Some(TIMEOUT), |service| {
            if confine() {
                serve(service, path);
            }
        })?;
        Ok(ConfigReader { path: path.into(), process: Some(process) })
    }

    /// Makes the loop call `on_end` after the end of the process. `None`: there is no process.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn on_end(
        &self,
        events: &LoopHandle,
        on_end: impl FnOnce() + Send + 'static,
    ) -> io::Result<Option<Registration>> {
        self.process.as_ref().map(|process| process.on_end(events, on_end)).transpose()
    }

    /// The present text of the file.
    ///
    /// # Errors
    /// The file cannot be opened or read.
    pub(crate) fn text(&self) -> Result<String, ConfigError> {
        let opened = match &self.process {
            None => open(&self.path),
            Some(process) => ask(process),
        };
        let file =
            opened.map_err(|source| ConfigError::Read { path: self.path.clone(), source })?;
        read_text(File::from(file), &self.path)
    }
}

fn ask(process: &Helper<Request, Answer>) -> io::Result<OwnedFd> {
    let (answer, fds) = process.ask(Request)?;
    answer.map_err(io::Error::from_raw_os_error)?;
    fds.into_iter().next().ok_or_else(|| io::Error::other("it was not opened"))
}

/// Serves the daemon until the daemon's end.
fn serve(service: &Service<Request, Answer>, path: &Path) {
    service.serve(|Request| match open(path) {
        Ok(file) => (Ok(()), vec![file]),
        Err(error) => (Err(error.raw_os_error().unwrap_or(libc::EIO)), Vec::new()),
    });
}

/// Opens a regular file: reading another kind of file might never end.
///
/// # Errors
/// The errors of open(2); EINVAL: not a regular file.
pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    match FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
        FileType::RegularFile => Ok(file),
        _ => Err(Errno::INVAL.into()),
    }
}
