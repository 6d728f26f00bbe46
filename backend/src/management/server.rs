//! One thread serves the management socket. No client can hold it up: all calls are non-blocking,
//! the length of lines and the number of clients are bounded, and the server reads nothing from a
//! client that does not read its answers.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

use super::wire::{Answer, Guest, Request};
use crate::error::DaemonError;
use crate::guests::Guests;
use crate::metrics;
use crate::reload::Reload;
use crate::vhost::counted_threads::CountedThreads;
use crate::vhost::unix_socket::{Backlog, BoundSocket, SocketError};

/// Longest line, bytes.
const MAX_LINE: usize = 64 << 10;
/// Clients at a time. One more evicts the client that was idle for longest.
const MAX_CLIENTS: usize = 16;
/// How long the thread may take to stop.
const STOP: Duration = Duration::from_secs(3);

/// The running server.
pub(crate) struct Server {
    inner: Arc<Inner>,
    thread: CountedThreads,
    _socket: BoundSocket,
}

/// What the clients of a socket may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Everything.
    Full,
    /// Read counters.
    Read,
}

struct Inner {
    access: Access,
    guests: Arc<Guests>,
    reload: Arc<Reload>,
    stopping: AtomicBool,
    stop: OwnedFd,
}

struct Client {
    stream: UnixStream,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Close once the output is written.
    done: bool,
    /// Nothing more will be read: close once all that was read is answered.
    last: bool,
    /// Turn in which it last sent or read something.
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
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| failed(error.into()))?;
        let stopping = AtomicBool::new(false);
        let inner = Arc::new(Inner { access, guests, reload, stopping, stop });
        let thread = CountedThreads::default();
        let runner = inner.clone();
        thread.spawn("management", move || runner.run(&listener)).map_err(DaemonError::Thread)?;
        Ok(Server { inner, thread, _socket: socket })
    }

    /// Ends the thread and closes all connections.
    pub(crate) fn stop(self) {
        self.inner.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.inner.stop, &1u64.to_ne_bytes());
        self.thread.wait_for(0, STOP);
    }
}

impl Inner {
    fn run(&self, listener: &UnixListener) {
        let mut clients: Vec<Client> = Vec::new();
        let mut turn = 0;
        loop {
            let mut fds =
                vec![PollFd::new(&self.stop, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
            fds.extend(clients.iter().map(|client| {
                let wish = if client.output.is_empty() { PollFlags::IN } else { PollFlags::OUT };
                PollFd::new(&client.stream, wish)
            }));
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!(%error, "management ends"),
            }
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            turn += 1;
            let mut flags = ready.iter().skip(2);
            clients.retain_mut(|client| match flags.next() {
                Some(true) => {
                    client.active = turn;
                    self.serve(client).is_ok()
                }
                _ => true,
            });
            if ready.get(1) == Some(&true) {
                accept(listener, &mut clients, turn);
            }
        }
    }

    /// Reads, answers and writes as far as it goes; an error ends the connection.
    fn serve(&self, client: &mut Client) -> io::Result<()> {
        if client.output.is_empty() {
            let mut buffer = [0; 4096];
            match client.stream.read(&mut buffer) {
                // The last line may lack its end.
                Ok(0) if !client.input.is_empty() && !is_http(&client.input) => {
                    client.input.push(b'\n');
                    client.last = true;
                }
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => client.input.extend_from_slice(buffer.get(..n).unwrap_or_default()),
                Err(error) if is_temporary(&error) => {}
                Err(error) => return Err(error),
            }
        }
        loop {
            while !client.output.is_empty() {
                match client.stream.write(&client.output) {
                    Ok(n) => drop(client.output.drain(..n)),
                    Err(error) if is_temporary(&error) => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
            if client.done || !self.answer_next(client) {
                return match client.done || client.last {
                    true => Err(io::ErrorKind::UnexpectedEof.into()),
                    false => Ok(()),
                };
            }
        }
    }

    /// Answers one request of the input; `false` if there is none.
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
            client.output = line(&self.answer(&text));
        }
        true
    }

    fn answer_http(&self, client: &mut Client) -> bool {
        let input = &client.input;
        let ends = input.windows(4).any(|w| w == b"\r\n\r\n") || input.ends_with(b"\n\n");
        if !ends && input.len() <= MAX_LINE {
            return false;
        }
        let line = input.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let mut words = line.split(|byte| *byte == b' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next());
        let (status, body) = match path {
            _ if !ends => ("431 Request Header Fields Too Large", String::new()),
            _ if method != b"GET" && method != b"HEAD" => ("405 Method Not Allowed", String::new()),
            Some(b"/metrics") => ("200 OK", metrics::render(&self.guests.list())),
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

    fn answer(&self, text: &[u8]) -> Answer {
        let request = match serde_json::from_slice(text) {
            Ok(request) => request,
            Err(error) => return refusal(error.to_string()),
        };
        let done = |result: Result<(), DaemonError>| match result {
            Ok(()) => Answer { ok: true, ..Answer::default() },
            Err(error) => refusal(error.to_string()),
        };
        match request {
            Request::Add(_) | Request::Remove { .. } | Request::Reload
                if self.access == Access::Read =>
            {
                refusal("this socket is for metrics: nothing can be changed here".to_owned())
            }
            Request::Reload => match self.reload.run() {
                Ok(done) => Answer { ok: true, reloaded: Some(done), ..Answer::default() },
                Err(error) => refusal(error.to_string()),
            },
            Request::List => {
                let guests = self.guests.list().iter().map(Guest::from).collect();
                Answer { ok: true, guests: Some(guests), ..Answer::default() }
            }
            Request::Metrics => {
                let text = metrics::render(&self.guests.list());
                Answer { ok: true, text: Some(text), ..Answer::default() }
            }
            Request::Add(guest) => done(
                guest
                    .into_spec(self.guests.config().default_chid())
                    .map_err(DaemonError::from)
                    .and_then(|spec| self.guests.add(spec, false)),
            ),
            // Does not wait: a front end that hangs must not hold up other clients.
            Request::Remove { name } => done(self.guests.remove(&name).map(drop)),
        }
    }
}

/// Whether a request is one of HTTP.
fn is_http(input: &[u8]) -> bool {
    ["GET ", "HEAD ", "POST ", "PUT ", "DELETE ", "OPTIONS "]
        .iter()
        .any(|method| input.starts_with(method.as_bytes()))
}

fn accept(listener: &UnixListener, clients: &mut Vec<Client>, turn: u64) {
    let Ok((stream, _)) = listener.accept() else { return };
    if stream.set_nonblocking(true).is_err() {
        return;
    }
    if clients.len() == MAX_CLIENTS {
        let oldest = clients.iter().enumerate().min_by_key(|(_, client)| client.active);
        if let Some((index, _)) = oldest {
            clients.swap_remove(index);
        }
    }
    clients.push(Client {
        stream,
        input: Vec::new(),
        output: Vec::new(),
        done: false,
        last: false,
        active: turn,
    });
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
