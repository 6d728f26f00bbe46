// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The management socket's server, on the event loop. No client can block the server: all calls are
//! non-blocking, the length of lines and the number of clients are bounded, and the server reads nothing from
//! a client with unread answers.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};

use super::wire::{Answer, Guest, Request};
use crate::config::LeaveTime;
use crate::service::error::DaemonError;
use crate::service::guests::Guests;
use crate::service::leave::LeaveInfo;
use crate::service::reload::Reload;
use crate::vhost::event_loop::Registration;
use crate::vhost::unix_socket::{Backlog, BoundSocket, SocketError};
use crate::vhost::waker::{Waker, watch};
use crate::vhost::watched_listener::WatchedListener;
use ism_device::sync::lock;
use virtio_ism_abi::event::LeaveReason;

/// Longest line, bytes.
const MAX_LINE: usize = 64 << 10;
/// Clients at a time. A further client evicts the client idle for longest.
const MAX_CLIENTS: usize = 16;
/// Time limit for cutting the clients.
const STOP: Duration = Duration::from_secs(3);

/// The running server.
pub(crate) struct Server {
    guests: Arc<Guests>,
    watched: Registration,
    _socket: BoundSocket,
}

/// Rights of a socket's clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Everything.
    Full,
    /// Read counters.
    Read,
}

/// The event loop's subscriber for the socket and its clients.
struct Clients {
    access: Access,
    guests: Arc<Guests>,
    reload: Arc<Reload>,
    listener: WatchedListener,
    /// By descriptor.
    all: BTreeMap<RawFd, Client>,
    /// Connections and events so far.
    turn: u64,
    later: Arc<LaterAnswers>,
}

/// Delayed answers, by the number of the client.
struct LaterAnswers {
    waker: Waker,
    answers: Mutex<Vec<(u64, Answer)>>,
}

impl LaterAnswers {
    fn push(&self, client: u64, answer: Answer) {
        lock(&self.answers).push((client, answer));
        self.waker.wake();
    }
}

struct Client {
    stream: UnixStream,
    /// Turn of the client's connection.
    id: u64,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Close after writing the output.
    done: bool,
    /// The client sends nothing more: close after answering all requests.
    last: bool,
    /// Waits for a delayed answer.
    waits: bool,
    /// Turn of the client's last transfer.
    active: u64,
}

impl Server {
    pub(crate) fn start(
        path: &Path,
        mode: u32,
        access: Access,
        guests: Arc<Guests>,
        reload: Arc<Reload>,
    ) -> Result<Server, DaemonError> {
        let (listener, socket) = BoundSocket::bind(guests.names(), path, mode, Backlog::Several)?;
        let failed = |source| SocketError::Io { action: "listen on", path: path.into(), source };
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = WatchedListener::new(listener.into()).map_err(failed)?;
        let waker = Waker::new().map_err(failed)?;
        let watched = guests.events().add(Clients {
            access,
            guests: guests.clone(),
            reload,
            listener,
            all: BTreeMap::new(),
            turn: 0,
            later: Arc::new(LaterAnswers { waker, answers: Mutex::default() }),
        });
        Ok(Server { guests, watched, _socket: socket })
    }

    /// Closes all connections.
    pub(crate) fn stop(self) {
        drop(self.watched);
        self.guests.events().wait_done(Instant::now() + STOP);
    }
}

impl MutEventSubscriber for Clients {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        self.listener.watch(ops);
        self.later.waker.watch(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        self.turn += 1;
        if self.later.waker.take(events) {
            self.answer_later(ops);
        } else if self.listener.is_ready(events, ops) {
            self.accept(ops);
        } else {
            self.serve_client(events.fd(), ops);
        }
    }
}

impl Clients {
    fn accept(&mut self, ops: &mut EventOps<'_>) {
        let stream = match rustix::net::accept_with(
            self.listener.socket(),
            rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK,
        ) {
            Ok(stream) => UnixStream::from(stream),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            Err(error) => {
                tracing::warn!(%error, "a client of the management socket was not accepted");
                return self.listener.pause_briefly(self.guests.events().timers(), ops);
            }
        };
        if self.all.len() == MAX_CLIENTS {
            let oldest = self.all.iter().min_by_key(|(_, client)| client.active);
            if let Some((fd, _)) = oldest {
                let fd = *fd;
                self.remove(fd, ops);
            }
        }
        if watch(&stream, EventSet::IN, ops) {
            let client = Client {
                id: self.turn,
                input: Vec::new(),
                output: Vec::new(),
                done: false,
                last: false,
                waits: false,
                active: self.turn,
                stream,
            };
            self.all.insert(client.stream.as_raw_fd(), client);
        }
    }

    /// Continues with a client, and ends its connection when over.
    fn serve_client(&mut self, fd: RawFd, ops: &mut EventOps<'_>) {
        let turn = self.turn;
        let Some(mut client) = self.all.remove(&fd) else { return };
        client.active = turn;
        // A waiting client is only called at the end of its connection.
        if !client.waits && self.serve(&mut client).is_ok() {
            // A client with its next request already read is called again, after the others.
            let is_writing = !client.output.is_empty() || client.has_request();
            let wish = match (client.waits, is_writing) {
                (true, _) => EventSet::empty(),
                (false, false) => EventSet::IN,
                (false, true) => EventSet::OUT,
            };
            if ops.modify(Events::new(&client.stream, wish)).is_ok() {
                self.all.insert(fd, client);
                return;
            }
        }
        let _ = ops.remove(Events::empty(&client.stream));
    }

    fn remove(&mut self, fd: RawFd, ops: &mut EventOps<'_>) {
        if let Some(client) = self.all.remove(&fd) {
            let _ = ops.remove(Events::empty(&client.stream));
        }
    }

    /// Answers the clients with finished delayed answers.
    fn answer_later(&mut self, ops: &mut EventOps<'_>) {
        let answers = std::mem::take(&mut *lock(&self.later.answers));
        for (id, answer) in answers {
            let Some((fd, client)) = self.all.iter_mut().find(|(_, client)| client.id == id) else {
                continue;
            };
            (client.output, client.waits) = (line(&answer), false);
            let fd = *fd;
            self.serve_client(fd, ops);
        }
    }

    /// Reads, answers one request, and writes as far as possible; an error ends the connection. The client's
    /// next request has to wait for the loop's other work.
    fn serve(&self, client: &mut Client) -> io::Result<()> {
        if client.output.is_empty() {
            if !client.has_request() {
                client.read()?;
            }
            if !self.answer_next(client) {
                return if client.last { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) };
            }
        }
        while !client.output.is_empty() {
            match client.stream.write(&client.output) {
                Ok(n) => drop(client.output.drain(..n)),
                Err(error) if is_temporary(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        let is_over = client.done || (client.last && !client.waits && !client.has_request());
        if is_over { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    /// Answers one request of the input; `false` without a whole request.
    fn answer_next(&self, client: &mut Client) -> bool {
        if is_http(&client.input) {
            return self.answer_http(client);
        }
        let Some(end) = client.input.iter().position(|byte| *byte == b'\n') else {
            if client.input.len() > MAX_LINE {
                client.output = line(&refusal(format!("a line of more than {MAX_LINE} bytes")));
                client.done = true;
                return true;
            }
            return false;
        };
        let text: Vec<u8> = client.input.drain(..=end).collect();
        if !text.trim_ascii().is_empty() {
            match self.answer(&text, client.id) {
                Some(answer) => client.output = line(&answer),
                None => client.waits = true,
            }
        }
        true
    }

    fn answer_http(&self, client: &mut Client) -> bool {
        let (input, ends) = (&client.input, client.has_request());
        if !ends && input.len() <= MAX_LINE {
            return false;
        }
        let line = input.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let mut words = line.split(|byte| *byte == b' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next());
        let (status, body) = match path {
            _ if !ends => ("431 Request Header Fields Too Large", String::new()),
            _ if method != b"GET" && method != b"HEAD" => ("405 Method Not Allowed", String::new()),
            Some(b"/metrics") => ("200 OK", self.guests.metrics()),
            _ => ("404 Not Found", String::new()),
        };
        client.output = format!(
            "HTTP/1.1 {status}\r\nContent-Type: application/openmetrics-text; version=1.0.0; \
             charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        )
        .into_bytes();
        if method != b"HEAD" {
            client.output.extend_from_slice(body.as_bytes());
        }
        client.done = true;
        true
    }

    /// The answer to a client's request. `None`: the answer comes later.
    fn answer(&self, text: &[u8], client: u64) -> Option<Answer> {
        let request = match serde_json::from_slice(text) {
            Ok(request) => request,
            Err(error) => return Some(refusal(error.to_string())),
        };
        let done = |result: Result<(), DaemonError>| match result {
            Ok(()) => Answer { ok: true, ..Answer::default() },
            Err(error) => refusal(error.to_string()),
        };
        Some(match request {
            Request::Add(_)
            | Request::Remove { .. }
            | Request::Drain { .. }
            | Request::Undrain { .. }
            | Request::Reload
                if self.access == Access::Read =>
            {
                refusal("this socket is for metrics: nothing can be changed here".to_owned())
            }
            Request::Reload => {
                let later = self.later.clone();
                self.reload.request(move |result| {
                    later.push(
                        client,
                        match result {
                            Ok(done) => {
                                Answer { ok: true, reloaded: Some(done), ..Answer::default() }
                            }
                            Err(error) => refusal(error.to_string()),
                        },
                    );
                });
                return None;
            }
            Request::List => {
                let guests = self.guests.list().iter().map(Guest::from).collect();
                Answer { ok: true, guests: Some(guests), ..Answer::default() }
            }
            Request::Metrics => {
                let text = self.guests.metrics();
                Answer { ok: true, text: Some(text), ..Answer::default() }
            }
            Request::Add(guest) => done(
                guest
                    .into_spec(self.guests.config().default_chid())
                    .map_err(DaemonError::from)
                    .and_then(|spec| self.guests.add(spec, false)),
            ),
            Request::Remove { name, timeout } => {
                return self.leave(client, name, LeaveReason::Removal, timeout);
            }
            Request::Drain { name, timeout, migration } => {
                let reason = if migration { LeaveReason::Migration } else { LeaveReason::Drain };
                return self.leave(client, name, reason, timeout);
            }
            Request::Undrain { name } => match self.guests.undrain(&name) {
                Ok(devices) => Answer { ok: true, undrained: Some(devices), ..Answer::default() },
                Err(error) => refusal(error.to_string()),
            },
        })
    }
}

impl Clients {
    /// Asks the drivers of a guest to leave, and then removes the guest if this is the reason. `None`: the
    /// answer comes later, after the drivers have left or their time is over.
    fn leave(
        &self,
        client: u64,
        name: String,
        reason: LeaveReason,
        timeout: Option<LeaveTime>,
    ) -> Option<Answer> {
        let within = timeout.map(|LeaveTime(within)| within);
        let leaving = match self.guests.ask_to_leave(&name, reason, within) {
            Ok(leaving) => leaving,
            Err(error) => return Some(refusal(error.to_string())),
        };
        let guests = self.guests.clone();
        let finish = move |left: LeaveInfo| {
            // Without a wait for the guest's threads: a hanging front end must not block other clients.
            let removed = match reason {
                LeaveReason::Removal => guests.remove(&name).map(drop),
                _ => Ok(()),
            };
            match removed {
                Ok(()) => Answer { ok: true, left: Some(left), ..Answer::default() },
                Err(error) => refusal(error.to_string()),
            }
        };
        if leaving.is_over() {
            return Some(finish(leaving.wait()));
        }
        let later = self.later.clone();
        let started = std::thread::Builder::new()
            .name("leave".into())
            .spawn(move || later.push(client, finish(leaving.wait())));
        // The drivers are told, and the guest is unchanged.
        started.err().map(|error| refusal(DaemonError::Thread(error).to_string()))
    }
}

impl Client {
    fn read(&mut self) -> io::Result<()> {
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer) {
            // The last line may lack its end.
            Ok(0) if !self.input.is_empty() && !is_http(&self.input) => {
                self.input.push(b'\n');
                self.last = true;
            }
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => self.input.extend_from_slice(buffer.get(..n).unwrap_or_default()),
            Err(error) if is_temporary(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Whether a whole request was read.
    fn has_request(&self) -> bool {
        let input = &self.input;
        match is_http(input) {
            true => input.windows(4).any(|w| w == b"\r\n\r\n") || input.ends_with(b"\n\n"),
            false => input.contains(&b'\n'),
        }
    }
}

/// Whether a request is HTTP.
fn is_http(input: &[u8]) -> bool {
    ["GET ", "HEAD ", "POST ", "PUT ", "DELETE ", "OPTIONS "]
        .iter()
        .any(|method| input.starts_with(method.as_bytes()))
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn refusal(error: String) -> Answer {
    Answer { ok: false, error: Some(error), ..Answer::default() }
}

fn line(answer: &Answer) -> Vec<u8> {
    let mut line = serde_json::to_vec(answer).unwrap_or_default();
    line.push(b'\n');
    line
}
