// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The thread sending reports.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, SendFlags, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType,
};

use super::paths::{CAPTURE, in_place_of_planted, is_of_nobody, numbered, path_in};
use super::{Process, find};
use crate::capture;
use ism_sys::{PollInterest, move_out_of_the_way, out_of_the_way, timespec};

/// Number of clients at a time; others wait in the queue of the socket.
const MAX_CLIENTS: usize = 8;
/// The longest time of a client to read its report.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after the process had no descriptor or memory for a client.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(50);
/// Time during which a report is used again for further clients.
const REUSE_TIME: Duration = Duration::from_millis(20);
/// The longest time before the thread looks for files left behind.
const FIRST_LOOK: Duration = Duration::from_millis(500);
/// Length of the queue of the socket.
const BACKLOG: i32 = 64;
/// The most stacks of one process with a socket.
const MAX_STACKS: u64 = 16;

/// The socket of a stack. Dropping it ends its thread.
pub(in crate::socket) struct Server {
    path: PathBuf,
    /// The process that made the socket: a child that inherits it must not remove the file.
    pid: u32,
    listener: Arc<UnixListener>,
}

/// A client with part of its report unread.
struct ReportClient {
    stream: OwnedFd,
    document: Arc<Vec<u8>>,
    done: usize,
    deadline: Instant,
}

impl Server {
    /// Listens, and sends the reports of `report`. The thread ends when `report` returns `None`.
    ///
    /// # Errors
    /// The socket or the thread cannot be made.
    pub(in crate::socket) fn start(
        path: &Path,
        report: impl Fn() -> Option<Process> + Send + 'static,
    ) -> io::Result<Server> {
        let directory = path.parent().map(Path::to_owned);
        let (listener, path) = bind(path)?;
        let listener = Arc::new(listener);
        let spare = spare_of(&listener);
        let server = Server { path, pid: std::process::id(), listener: listener.clone() };
        let body = move || {
            // Files left behind by other processes. The program's first connection makes descriptors
            // now, and would wait for each file that this thread looks at.
            let _ = ism_sys::wait([(listener.as_fd(), PollInterest::Read)], Some(FIRST_LOOK));
            if let Some(directory) = directory {
                find(&directory);
            }
            ReportThread { clients: Vec::new(), listener, spare, report, last: None }.run();
        };
        ism_sys::start_thread("smc-statistics", ism_sys::USUAL_STACK, body)?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // Ends the wait of the thread.
            let _ = net::shutdown(&*self.listener, net::Shutdown::Both);
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Server").field(&self.path).finish()
    }
}

/// Listens at this path, or beside it if another stack of this process does, or if another user has put
/// a file there.
fn bind(path: &Path) -> io::Result<(UnixListener, PathBuf)> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for number in 1..=MAX_STACKS {
        let path = if number == 1 { path.to_owned() } else { numbered(path, number) };
        match bind_one(&path) {
            Ok(listener) => return Ok((listener, path)),
            Err(error) => last = error,
        }
        if let Some(other) = in_place_of_planted(&path, |kind| kind.is_socket()) {
            return Ok((bind_one(&other)?, other));
        }
        if last.kind() != io::ErrorKind::AddrInUse {
            break;
        }
    }
    Err(last)
}

fn bind_one(path: &Path) -> io::Result<UnixListener> {
    let bound = listen(path).or_else(|error| {
        // An earlier process had this id, and left its socket behind.
        if error.kind() != io::ErrorKind::AddrInUse || !is_of_nobody(path) {
            return Err(error);
        }
        fs::remove_file(path)?;
        listen(path)
    })?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(bound)
}

/// Like [`UnixListener::bind`], but by system calls: the preloaded library replaces libc's functions
/// and calls this in the middle of one of them.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let make = || net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = out_of_the_way(make)?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// A number held for a client: another one of the listener.
fn spare_of(listener: &UnixListener) -> Option<OwnedFd> {
    out_of_the_way(|| listener.as_fd().try_clone_to_owned()).ok()
}

/// Whether a client wants copies of passing bytes instead of a report, by its name.
fn asks_for_capture(client: Option<&SocketAddrAny>) -> bool {
    let name = client.and_then(|client| SocketAddrUnix::try_from(client.clone()).ok());
    name.as_ref()
        .and_then(SocketAddrUnix::abstract_name)
        .is_some_and(|name| name.starts_with(CAPTURE))
}

/// The state of the thread.
struct ReportThread<F> {
    listener: Arc<UnixListener>,
    /// A number for the next client, in case the program has taken every other.
    spare: Option<OwnedFd>,
    report: F,
    last: Option<(Instant, Arc<Vec<u8>>)>,
    clients: Vec<ReportClient>,
}

/// The thread's work, in a process without such a thread: see [`OwnReport::serve`].
pub(in crate::socket) struct OwnReport {
    /// Removes the file.
    _server: Server,
    thread: ReportThread<Box<dyn Fn() -> Option<Process> + Send>>,
}

impl OwnReport {
    /// Listens in this directory.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(in crate::socket) fn start(
        directory: &Path,
        report: impl Fn() -> Option<Process> + Send + 'static,
    ) -> io::Result<OwnReport> {
        let (listener, path) = bind(&path_in(directory))?;
        let listener = Arc::new(listener);
        let spare = spare_of(&listener);
        let server = Server { path, pid: std::process::id(), listener: listener.clone() };
        let report: Box<dyn Fn() -> Option<Process> + Send> = Box::new(report);
        let thread = ReportThread { listener, spare, report, last: None, clients: Vec::new() };
        Ok(OwnReport { _server: server, thread })
    }

    /// The descriptor, readable when there are clients.
    pub(in crate::socket) fn waits_for(&self) -> RawFd {
        self.thread.listener.as_raw_fd()
    }

    /// Answers waiting clients, as far as they read, without copies for any of them.
    pub(in crate::socket) fn serve(&mut self) {
        let _ = self.thread.serve(drop);
    }
}

impl<F: Fn() -> Option<Process>> ReportThread<F> {
    fn run(mut self) {
        while self.wait().is_ok() && self.serve(capture::begin).is_some() {}
    }

    /// Serves the clients. `capture`: gets clients that ask for copies of passing bytes. `None`: there
    /// will be no more.
    fn serve(&mut self, capture: fn(OwnedFd)) -> Option<()> {
        self.clients.retain_mut(|client| !client.go_on());
        if self.spare.is_none() {
            self.spare = spare_of(&self.listener);
        }
        while self.clients.len() < MAX_CLIENTS {
            let making = ism_sys::making();
            let accepted = net::acceptfrom_with(&self.listener, SocketFlags::CLOEXEC);
            let accepted = accepted.map(|(stream, from)| (move_out_of_the_way(stream), from));
            drop(making);
            match accepted {
                Ok((stream, from)) if asks_for_capture(from.as_ref()) => capture(stream),
                Ok((stream, _)) => {
                    let document = self.document()?;
                    let deadline = Instant::now() + CLIENT_TIMEOUT;
                    let mut client = ReportClient { stream, document, done: 0, deadline };
                    if !client.go_on() {
                        self.clients.push(client);
                    }
                }
                Err(Errno::WOULDBLOCK) => break,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::MFILE) if self.spare.take().is_some() => {}
                // Descriptors or memory may be free again after a pause.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    std::thread::sleep(SHORTAGE_PAUSE);
                    break;
                }
                // The program has closed the descriptor.
                Err(error) => {
                    tracing::debug!(%error, "statistics end");
                    return None;
                }
            }
        }
        Some(())
    }

    /// Waits for a client. An error: the thread has to end.
    fn wait(&self) -> io::Result<()> {
        let clients = &self.clients;
        use rustix::event::{PollFd, PollFlags};
        let flags = match clients.len() < MAX_CLIENTS {
            true => PollFlags::IN,
            // The end of the listener is reported all the same.
            false => PollFlags::empty(),
        };
        let mut fds = vec![PollFd::from_borrowed_fd(self.listener.as_fd(), flags)];
        fds.extend(clients.iter().map(|client| PollFd::new(&client.stream, PollFlags::OUT)));
        let next = clients.iter().map(|client| client.deadline).min();
        let timeout = next.map(|next| timespec(next.saturating_duration_since(Instant::now())));
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        match fds.first().is_some_and(|fd| !fd.revents().contains(PollFlags::HUP)) {
            true => Ok(()),
            false => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// A report, new or a moment old. `None`: the stack is dropped.
    fn document(&mut self) -> Option<Arc<Vec<u8>>> {
        if let Some((made, document)) = &self.last
            && made.elapsed() < REUSE_TIME
        {
            return Some(document.clone());
        }
        let mut text = serde_json::to_vec(&(self.report)()?).unwrap_or_default();
        text.push(b'\n');
        let document = Arc::new(text);
        self.last = Some((Instant::now(), document.clone()));
        Some(document)
    }
}

impl ReportClient {
    /// Sends as much as the socket takes. `true`: the client has everything, or took too long.
    fn go_on(&mut self) -> bool {
        loop {
            let rest = self.document.get(self.done..).unwrap_or_default();
            if rest.is_empty() {
                return true;
            }
            // The program may not ignore SIGPIPE.
            match net::send(&self.stream, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(n) => self.done += n,
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => return Instant::now() >= self.deadline,
                Err(_) => return true,
            }
        }
    }
}
