// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A small blocking client of the management socket.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use thiserror::Error;

use super::wire::{AddGuest, Answer, Call, Guest};
use crate::config::LeaveTime;
use crate::service::leave::LeaveInfo;
use crate::service::reload::ReloadInfo;

/// Longest accepted answer, bytes.
const MAX_ANSWER: u64 = 16 << 20;
/// Longest wait for the daemon's answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Longest time a daemon gives drivers to leave.
const LONGEST_LEAVE: Duration = Duration::from_secs(3600);

/// Why a request failed.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The socket fails, or the daemon does not answer.
    #[error("management socket: {0}")]
    Io(#[from] io::Error),
    /// The answer is malformed.
    #[error("answer: {0}")]
    Answer(#[from] serde_json::Error),
    /// The daemon refuses the request.
    #[error("{0}")]
    Refused(String),
}

/// A connection to a daemon's management socket.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// No daemon listens there, or permission is missing.
    pub fn connect(path: impl AsRef<Path>) -> Result<Client, ClientError> {
        Client::over(UnixStream::connect(path)?)
    }

    /// Uses an existing connection to the socket.
    ///
    /// # Errors
    /// The stream's timeouts cannot be set.
    pub fn over(stream: UnixStream) -> Result<Client, ClientError> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        Ok(Client { stream: BufReader::new(stream) })
    }

    /// The guests and their counters.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn list(&mut self) -> Result<Vec<Guest>, ClientError> {
        Ok(self.call(&Call::List)?.guests.unwrap_or_default())
    }

    /// Adds a guest.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn add(&mut self, guest: &AddGuest) -> Result<(), ClientError> {
        self.call(&Call::Add(guest)).map(|_| ())
    }

    /// Removes a guest. The drivers get the daemon's default time to leave.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn remove(&mut self, name: &str) -> Result<(), ClientError> {
        self.remove_within(name, None).map(drop)
    }

    /// Removes a guest. The drivers get `within` to leave, or else the daemon's default time.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn remove_within(
        &mut self,
        name: &str,
        within: Option<Duration>,
    ) -> Result<LeaveInfo, ClientError> {
        self.call_within(&Call::Remove { name, timeout: within.map(LeaveTime) }, within)
    }

    /// Asks the drivers of a guest to leave, within `within` or else the daemon's default time. The guest
    /// stays, and its devices take on nothing new. `is_migration`: the machine moves to another host.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn drain(
        &mut self,
        name: &str,
        within: Option<Duration>,
        is_migration: bool,
    ) -> Result<LeaveInfo, ClientError> {
        let timeout = within.map(LeaveTime);
        self.call_within(&Call::Drain { name, timeout, migration: is_migration }, within)
    }

    /// Cancels the drain of a guest, before or after its drivers have left. Returns the number of drained
    /// devices.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn undrain(&mut self, name: &str) -> Result<usize, ClientError> {
        Ok(self.call(&Call::Undrain { name })?.undrained.unwrap_or_default())
    }

    /// A call with `within` for the drivers. The daemon's own time is an hour at most.
    fn call_within(
        &mut self,
        call: &Call<'_>,
        within: Option<Duration>,
    ) -> Result<LeaveInfo, ClientError> {
        let limit = TIMEOUT + within.unwrap_or(LONGEST_LEAVE);
        self.stream.get_ref().set_read_timeout(Some(limit))?;
        let answer = self.call(call);
        self.stream.get_ref().set_read_timeout(Some(TIMEOUT))?;
        Ok(answer?.left.unwrap_or_default())
    }

    /// Metrics in OpenMetrics text format.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn metrics(&mut self) -> Result<String, ClientError> {
        Ok(self.call(&Call::Metrics)?.text.unwrap_or_default())
    }

    /// Makes the daemon read its configuration file again.
    ///
    /// # Errors
    /// See [`ClientError`]; then nothing has changed.
    pub fn reload(&mut self) -> Result<ReloadInfo, ClientError> {
        Ok(self.call(&Call::Reload)?.reloaded.unwrap_or_default())
    }

    fn call(&mut self, call: &Call<'_>) -> Result<Answer, ClientError> {
        let mut line = serde_json::to_vec(call)?;
        line.push(b'\n');
        self.stream.get_mut().write_all(&line)?;
        let mut answer = Vec::new();
        self.stream.by_ref().take(MAX_ANSWER).read_until(b'\n', &mut answer)?;
        if answer.last() != Some(&b'\n') {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let answer: Answer = serde_json::from_slice(&answer)?;
        match answer {
            Answer { ok: true, .. } => Ok(answer),
            Answer { error, .. } => Err(ClientError::Refused(error.unwrap_or_default())),
        }
    }
}
