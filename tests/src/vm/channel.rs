// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's end of the control channel of one guest.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::run::End;
use super::wire::{Ask, MAX_LINE, Report, Request, What};

/// Bytes of output kept of a command, each for out and err.
const KEPT: usize = 16 << 20;

/// Characters of a line in the transcript.
const LONGEST: usize = 500;

/// Longest time for the guest to leave requests unread.
const WRITE: Duration = Duration::from_secs(20);

/// Longest time of a moving guest without a QEMU.
const MOVE: Duration = Duration::from_secs(120);

/// Output and end of a command so far.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) out: String,
    pub(super) err: String,
    pub(super) end: Option<End>,
}

#[derive(Debug, Default)]
struct State {
    // Number of the guest's "ready" reports.
    boots: u32,
    closed: bool,
    jobs: HashMap<u64, Known>,
    next: u64,
    // Another QEMU is to have the guest, so the end of a socket is not the channel's end.
    moving: bool,
    // The other QEMU's socket.
    socket: Option<UnixStream>,
}

impl State {
    fn end_all(&mut self) {
        for job in self.jobs.values_mut() {
            job.end.get_or_insert(End::Gone);
        }
    }
}

/// A connection to the agent in a guest.
#[derive(Debug)]
pub(super) struct Channel {
    guest: String,
    writer: Mutex<UnixStream>,
    state: Mutex<State>,
    changed: Condvar,
    transcript: Transcript,
}

impl Channel {
    /// Over a connected socket.
    pub(super) fn new(guest: &str, socket: UnixStream, transcript: File) -> Arc<Channel> {
        let reader = socket.try_clone().unwrap();
        socket.set_write_timeout(Some(WRITE)).unwrap();
        let channel = Arc::new(Channel {
            guest: guest.to_owned(),
            writer: Mutex::new(socket),
            state: Mutex::default(),
            changed: Condvar::new(),
            transcript: Transcript { file: transcript, start: Instant::now() },
        });
        let listener = Arc::clone(&channel);
        let name = format!("control {guest}");
        thread::Builder::new().name(name).spawn(move || listener.listen(reader)).unwrap();
        channel
    }

    pub(super) fn guest(&self) -> &str {
        &self.guest
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self, socket: UnixStream) {
        let mut lines = BufReader::new(socket);
        let mut line = Vec::new();
        loop {
            let mut limited = std::io::Read::take(&mut lines, (MAX_LINE - line.len()) as u64);
            let read = limited.read_until(b'\n', &mut line);
            if line.last() != Some(&b'\n') && line.len() < MAX_LINE || read.is_err() {
                // A partial line continues on the next socket.
                match self.next_socket() {
                    Some(socket) => lines = BufReader::new(socket),
                    None => break,
                }
                continue;
            }
            match serde_json::from_slice::<Report>(&line) {
                Ok(report) => self.hear(report),
                Err(_) if line == b"\n" => {}
                Err(_) => self.transcript.line(0, '?', &String::from_utf8_lossy(&line)),
            }
            line.clear();
        }
        self.transcript.line(0, '-', "closed");
        let mut state = self.state();
        state.closed = true;
        state.end_all();
        self.changed.notify_all();
    }

    /// The socket of the guest's present QEMU, if there is one.
    fn next_socket(&self) -> Option<UnixStream> {
        self.wait_state(MOVE, |state| match state.socket.take() {
            Some(socket) => Some(Some(socket)),
            None => (!state.moving).then_some(None),
        })?
    }

    /// The guest is about to go on in another QEMU, and takes no commands until [`Channel::go_on`].
    pub(super) fn will_move(&self) {
        self.transcript.line(0, '-', "moves");
        self.state().moving = true;
    }

    /// The guest goes on in the QEMU behind this socket. The old QEMU's output is read first, to its
    /// end.
    pub(super) fn go_on(&self, socket: UnixStream) {
        self.transcript.line(0, '-', "goes on");
        let reader = socket.try_clone().unwrap();
        socket.set_write_timeout(Some(WRITE)).unwrap();
        *self.writer.lock().unwrap_or_else(PoisonError::into_inner) = socket;
        let mut state = self.state();
        (state.moving, state.socket) = (false, Some(reader));
        self.changed.notify_all();
    }

    fn hear(&self, Report { id, what }: Report) {
        match &what {
            What::Ready(name) => self.transcript.line(id, '*', &format!("{name} is ready")),
            What::Out(text) => self.transcript.line(id, '|', text),
            What::Err(text) => self.transcript.line(id, '!', text),
            What::Exit(code) => self.transcript.line(id, '=', &format!("exit code {code}")),
            What::Signal(signal) => self.transcript.line(id, '=', &format!("signal {signal}")),
        }
        let mut state = self.state();
        if let What::Ready(_) = what {
            state.boots += 1;
            state.end_all();
        } else if let Some(job) = state.jobs.get_mut(&id) {
            match what {
                What::Ready(_) => {}
                What::Out(text) => keep(&mut job.out, &text),
                What::Err(text) => keep(&mut job.err, &text),
                What::Exit(code) => job.end = Some(End::Code(code)),
                What::Signal(signal) => job.end = Some(End::Signal(signal)),
            }
        }
        self.changed.notify_all();
    }

    /// Sends a request. Errors are ignored: the reader notices a lost guest.
    pub(super) fn ask(&self, id: u64, ask: Ask) {
        let request = Request { id, ask };
        let mut text = serde_json::to_vec(&request).unwrap();
        self.transcript.line(id, '>', &String::from_utf8_lossy(&text));
        text.push(b'\n');
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writer.write_all(&text);
    }

    /// A number for a new command.
    pub(super) fn enter(&self) -> u64 {
        let mut state = self.state();
        state.next += 1;
        let id = state.next;
        let end = state.closed.then_some(End::Gone);
        state.jobs.insert(id, Known { end, ..Known::default() });
        id
    }

    /// Forgets a command.
    pub(super) fn leave(&self, id: u64) -> Known {
        self.state().jobs.remove(&id).unwrap_or_default()
    }

    /// Calls `read` with the state of a command.
    pub(super) fn with_command<T>(&self, id: u64, read: impl FnOnce(&Known) -> T) -> T {
        read(self.state().jobs.entry(id).or_default())
    }

    /// Waits until `done` says something of a command, or for `limit`.
    pub(super) fn wait<T>(
        &self,
        id: u64,
        limit: Duration,
        mut done: impl FnMut(&Known) -> Option<T>,
    ) -> Option<T> {
        self.wait_state(limit, |state| state.jobs.get(&id).and_then(&mut done))
    }

    /// How often the guest has booted.
    pub(super) fn boots(&self) -> u32 {
        self.state().boots
    }

    pub(super) fn closed(&self) -> bool {
        self.state().closed
    }

    /// Waits for the guest's boot number `boots`, its end, or `limit`. Returns whether the guest has
    /// booted.
    pub(super) fn wait_boots(&self, boots: u32, limit: Duration) -> bool {
        let done = |state: &mut State| (state.boots >= boots || state.closed).then_some(());
        self.wait_state(limit, done).is_some() && self.boots() >= boots
    }

    fn wait_state<T>(
        &self,
        limit: Duration,
        mut done: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let end = Instant::now() + limit;
        let mut state = self.state();
        loop {
            if let Some(answer) = done(&mut state) {
                return Some(answer);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Closes the channel; the guest powers off.
    pub(super) fn close(&self) {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writer.shutdown(std::net::Shutdown::Both);
    }
}

fn keep(text: &mut String, more: &str) {
    if text.len() + more.len() <= KEPT {
        text.push_str(more);
    }
}

/// Every line sent and received, with its time.
#[derive(Debug)]
struct Transcript {
    file: File,
    start: Instant,
}

impl Transcript {
    fn line(&self, id: u64, kind: char, text: &str) {
        let at = self.start.elapsed().as_secs_f32();
        let mut block = String::new();
        for line in text.trim_end_matches('\n').split('\n') {
            let (shown, more) = match line.char_indices().nth(LONGEST) {
                Some((end, _)) => (&line[..end], " ..."),
                None => (line, ""),
            };
            block += &format!("{at:8.3} {id:3}{kind} {shown}{more}\n");
        }
        let _ = (&self.file).write_all(block.as_bytes());
    }
}
