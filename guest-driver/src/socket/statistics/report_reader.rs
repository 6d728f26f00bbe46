// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A question to a process, and the part of its answer received so far.
//!
//! The process may be hostile. Nothing here waits for the process, and its answer is bounded before
//! memory is spent on it: by its length, by the length of each string, and by the number of entries of
//! each list.

use std::io::{self, Read};
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::de::{Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};

use super::Process;
use super::paths::connect_now;
use ism_sys::{PeerProcess, peer_process, timespec};

/// The longest time of a process to answer [`ask`].
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// The most bytes of an answer without its connections.
const BASE_LEN: usize = 1 << 20;
/// The most bytes of an answer for each connection.
const CONNECTION_LEN: usize = 1 << 10;
/// The most bytes of a string of an answer.
const MAX_STRING: usize = 4096;
/// Bytes read at a time.
const PIECE: usize = 64 << 10;

/// A process being asked, and its answer so far.
#[derive(Debug)]
pub struct ReportReader {
    stream: UnixStream,
    listener: PeerProcess,
    answer: Vec<u8>,
}

impl AsFd for ReportReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl ReportReader {
    /// Asks the process listening at a socket, without waiting.
    ///
    /// # Errors
    /// No process listens there. [`io::ErrorKind::WouldBlock`]: its queue is full.
    pub fn new(socket: &Path) -> io::Result<ReportReader> {
        let stream = connect_now(socket, None)?;
        let listener = peer_process(&stream)?;
        stream.set_nonblocking(true)?;
        Ok(ReportReader { stream, listener, answer: Vec::new() })
    }

    /// The process being asked, as the kernel knows it.
    pub fn listener(&self) -> PeerProcess {
        self.listener
    }

    /// Bytes of the answer so far.
    pub fn length(&self) -> usize {
        self.answer.len()
    }

    /// Reads the arrived part, a piece at most. `true`: the answer is whole. `connections`: the most
    /// connections possible for the process.
    ///
    /// # Errors
    /// An error of the socket, or the answer is too long.
    pub fn read(&mut self, connections: usize) -> io::Result<bool> {
        let most = BASE_LEN.saturating_add(connections.saturating_mul(CONNECTION_LEN));
        let before = self.answer.len();
        let piece = (&self.stream).take(PIECE as u64).read_to_end(&mut self.answer);
        if self.answer.len() > most {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        match piece {
            Ok(_) => Ok(self.answer.len() - before < PIECE),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The whole answer.
    ///
    /// # Errors
    /// The answer is no [`Process`], or has too long a string.
    pub fn answer(self) -> io::Result<Process> {
        if longest_string(&self.answer) > MAX_STRING {
            return Err(io::ErrorKind::InvalidData.into());
        }
        serde_json::from_slice(&self.answer)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }
}

/// Gets the report of the process listening at a socket.
///
/// # Errors
/// No process answers in time, or the answer is no [`Process`].
pub fn ask(socket: &Path) -> io::Result<Process> {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut question = ReportReader::new(socket)?;
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    while !question.read(super::report::MAX_CONNECTIONS)? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut list = [PollFd::new(&question, PollFlags::IN)];
        match poll(&mut list, Some(&timespec(left))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    question.answer()
}

/// Bytes of the longest string of a JSON text, in its written form.
fn longest_string(text: &[u8]) -> usize {
    let (mut longest, mut now) = (0, None);
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        now = match (now, byte) {
            (None, b'"') => Some(0),
            (None, _) | (Some(_), b'"') => None,
            (Some(length), b'\\') => {
                bytes.next();
                Some(length + 2)
            }
            (Some(length), _) => Some(length + 1),
        };
        longest = longest.max(now.unwrap_or(0));
    }
    longest
}

/// Reads a list of `N` entries at most. Further entries are left out.
pub(super) fn first<'de, const N: usize, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    struct First<const N: usize, T>(PhantomData<T>);

    impl<'de, const N: usize, T: Deserialize<'de>> Visitor<'de> for First<N, T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a list")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut found = Vec::new();
            while found.len() < N {
                match list.next_element()? {
                    Some(entry) => found.push(entry),
                    None => return Ok(found),
                }
            }
            while list.next_element::<IgnoredAny>()?.is_some() {}
            Ok(found)
        }
    }
    deserializer.deserialize_seq(First::<N, T>(PhantomData))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::super::{DeviceInfo, Reason, VERSION};
    use super::*;

    /// The result of asking a process with this answer.
    fn asked(name: &str, answer: Vec<u8>) -> io::Result<Process> {
        let file = format!("smc-asked-{}-{name}.sock", std::process::id());
        let path = std::env::temp_dir().join(file);
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            // The other end may have closed by then.
            let _ = listener.accept().unwrap().0.write_all(&answer);
        });
        let process = ask(&path);
        thread.join().unwrap();
        std::fs::remove_file(&path).unwrap();
        process
    }

    fn json(process: &Process) -> Vec<u8> {
        serde_json::to_vec(process).unwrap()
    }

    #[test]
    fn lists_of_an_answer_are_cut_and_long_strings_and_answers_refused() {
        let device = DeviceInfo::default();
        let mut process = Process { version: VERSION, ..Process::default() };
        process.devices = vec![device.clone(); 1000];
        process.totals.reasons = vec![Reason::default(); 1000];
        let cut = asked("lists", json(&process)).unwrap();
        assert_eq!((cut.devices.len(), cut.totals.reasons.len()), (64, 64));

        process.devices = vec![DeviceInfo { path: "x".repeat(MAX_STRING + 1), ..device }];
        let error = asked("string", json(&process)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let most = BASE_LEN + super::super::report::MAX_CONNECTIONS * CONNECTION_LEN;
        let error = asked("long", vec![b' '; most + PIECE]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        let nested = [b"{\"version\":".to_vec(), vec![b'['; 200_000]].concat();
        assert_eq!(asked("deep", nested).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn the_longest_string_is_found_as_it_is_written() {
        for (text, longest) in [
            ("", 0),
            ("[\"ab\",7,\"abc\"]", 3),
            (r#"["a\"b\\","x"]"#, 6),
            ("\"open", 4),
            ("\"\\", 2),
        ] {
            assert_eq!(longest_string(text.as_bytes()), longest, "{text}");
        }
    }
}
