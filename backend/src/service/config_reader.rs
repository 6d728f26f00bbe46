// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reads the configuration file again while the daemon runs.
//!
//! The daemon cannot open files in its sandbox. A small process outside of it opens one file, that of
//! `--config`, whenever the daemon asks, and hands over the descriptor. It takes no other request, and
//! may open files in that file's directory only.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use ism_device::sync::lock;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, read_text};
use crate::service::fork;
use crate::service::packets::{receive, send};
use crate::vhost::event_loop::{LoopHandle, Registration};
use crate::vhost::on_close::OnClose;

/// Longest wait for the process: the file may be on another host.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Open the file. The answer has the same number.
#[derive(Debug, Serialize, Deserialize)]
struct Request {
    number: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    number: u64,
    /// Why there is no descriptor.
    errno: Option<i32>,
}

/// What reads the file.
#[derive(Debug)]
pub(crate) struct ConfigReader {
    path: PathBuf,
    /// The process, if this one may not open files. With the number of the last request.
    process: Option<Mutex<(OwnedFd, u64)>>,
}

impl ConfigReader {
    /// Opens the file itself.
    pub(crate) fn direct(path: &Path) -> ConfigReader {
        ConfigReader { path: path.into(), process: None }
    }

    /// Starts the process, which calls `confine` first. To be called while there is one thread.
    ///
    /// # Errors
    /// The kernel makes no socket or no process.
    pub(crate) fn start(path: &Path, confine: impl FnOnce() -> bool) -> io::Result<ConfigReader> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&ours, Timeout::Recv, Some(TIMEOUT))?;
        let mut ours = Some(ours);
        fork::in_child(|| {
            // Else the end of the daemon would not be seen.
            drop(ours.take());
            let _ = rustix::thread::set_name(c"config-reader");
            if confine() {
                serve(&theirs, path);
            }
        })?;
        let process = Some(Mutex::new((ours.ok_or(Errno::BADF)?, 0)));
        Ok(ConfigReader { path: path.into(), process })
    }

    /// Has the loop call `on_end` when the process is gone. `None`: there is none.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn on_end(
        &self,
        events: &LoopHandle,
        on_end: impl FnOnce() + Send + 'static,
    ) -> io::Result<Option<Registration>> {
        let channel = self.process.as_ref().map(|process| lock(process).0.try_clone());
        Ok(channel.transpose()?.map(|channel| events.add(OnClose::new(channel, on_end))))
    }

    /// The text of the file as it is now.
    ///
    /// # Errors
    /// It cannot be opened or read.
    pub(crate) fn text(&self) -> Result<String, ConfigError> {
        let opened = match &self.process {
            None => open(&self.path),
            Some(process) => ask(&mut lock(process)),
        };
        let file =
            opened.map_err(|source| ConfigError::Read { path: self.path.clone(), source })?;
        read_text(File::from(file), &self.path)
    }
}

fn ask((channel, number): &mut (OwnedFd, u64)) -> io::Result<OwnedFd> {
    *number += 1;
    send(channel, &Request { number: *number }, &[])?;
    loop {
        let (answer, fds) = receive::<Answer>(channel)?;
        match answer {
            None => return Err(io::Error::other("the process that reads it has ended")),
            // Of a request that was given up.
            Some(answer) if answer.number != *number => {}
            Some(Answer { errno: Some(errno), .. }) => {
                return Err(io::Error::from_raw_os_error(errno));
            }
            Some(_) => {
                let file = fds.into_iter().next();
                return file.ok_or_else(|| io::Error::other("it was not opened"));
            }
        }
    }
}

/// Serves the daemon until it ends.
fn serve(channel: &OwnedFd, path: &Path) {
    while let Ok((Some(Request { number }), _)) = receive(channel) {
        let sent = match open(path) {
            Ok(file) => send(channel, &Answer { number, errno: None }, &[file]),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                send(channel, &Answer { number, errno: Some(errno) }, &[])
            }
        };
        if sent.is_err() {
            break;
        }
    }
}

/// Opens a regular file: of another one, reading might never end.
///
/// # Errors
/// Those of open(2); EINVAL: it is something else.
pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    match FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
        FileType::RegularFile => Ok(file),
        _ => Err(Errno::INVAL.into()),
    }
}
