//! The thread that answers.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::{Process, find};
use crate::socket::Stack;
use crate::sys::EventFd;

/// Readers at a time; others wait in the queue of the socket.
const MAX_READERS: usize = 8;
/// How long a reader may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause while there is no room for a reader.
const SHORTAGE: Duration = Duration::from_millis(50);
/// A document is made at most so often; who asks sooner gets the one that there is.
const FRESH: Duration = Duration::from_millis(20);
/// Readers that may wait for their turn.
const BACKLOG: i32 = 64;
/// Stacks of one process that can be asked.
const MAX_STACKS: u32 = 16;

/// The socket of a stack. Its end is the end of its thread.
pub(in crate::socket) struct Server {
    path: PathBuf,
    /// The process that made it: a child that inherits it must not remove its file.
    pid: u32,
    stop: Arc<EventFd>,
}

/// Somebody who reads.
struct Reader {
    stream: OwnedFd,
    document: Arc<Vec<u8>>,
    done: usize,
    deadline: Instant,
}

impl Server {
    /// Listens, and answers for the stack as long as that lives.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(in crate::socket) fn start(path: &Path, stack: &Arc<Stack>) -> io::Result<Server> {
        if let Some(directory) = path.parent() {
            find(directory);
        }
        let (listener, path) = bind(path)?;
        let stop = Arc::new(EventFd::new()?);
        let server = Server { path, pid: std::process::id(), stop: stop.clone() };
        let stack = Arc::downgrade(stack);
        let body = move || Answers { listener, stop, stack, last: None }.run();
        std::thread::Builder::new().name("smc-statistics".into()).spawn(body)?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            self.stop.signal();
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Server").field(&self.path).finish()
    }
}

/// Listens at this path, or beside it if another stack of this process does.
fn bind(path: &Path) -> io::Result<(UnixListener, PathBuf)> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for number in 1..=MAX_STACKS {
        let path = numbered(path, number);
        match bind_one(&path) {
            Ok(listener) => return Ok((listener, path)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn bind_one(path: &Path) -> io::Result<UnixListener> {
    let bound = listen(path).or_else(|error| {
        let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        // An earlier process had this name, and did not tidy up.
        let stale = error.kind() == io::ErrorKind::AddrInUse
            && UnixStream::connect(path).is_err_and(refused);
        if !stale {
            return Err(error);
        }
        fs::remove_file(path)?;
        listen(path)
    })?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(bound)
}

/// As [`UnixListener::bind`], by the kernel itself: where this library stands in for libc's functions
/// it is called in the middle of one of them.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// `x.sock`, `x-2.sock`, `x-3.sock` and so on.
fn numbered(path: &Path, number: u32) -> PathBuf {
    let (Some(stem), true) = (path.file_stem(), number > 1) else { return path.to_owned() };
    let mut name = stem.to_owned();
    name.push(format!("-{number}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// What the thread has.
struct Answers {
    listener: UnixListener,
    stop: Arc<EventFd>,
    stack: Weak<Stack>,
    last: Option<(Instant, Arc<Vec<u8>>)>,
}

impl Answers {
    fn run(mut self) {
        let mut readers: Vec<Reader> = Vec::new();
        loop {
            if self.wait(&readers).is_err() {
                return;
            }
            readers.retain_mut(|reader| !reader.go_on());
            while readers.len() < MAX_READERS {
                match net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
                    Ok(stream) => {
                        let Some(document) = self.document() else { return };
                        let deadline = Instant::now() + PATIENCE;
                        let mut reader = Reader { stream, document, done: 0, deadline };
                        if !reader.go_on() {
                            readers.push(reader);
                        }
                    }
                    Err(Errno::WOULDBLOCK) => break,
                    Err(Errno::INTR | Errno::CONNABORTED) => {}
                    // There may be room again: not at once.
                    Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                        std::thread::sleep(SHORTAGE);
                        break;
                    }
                    // Somebody has closed the descriptor.
                    Err(error) => {
                        tracing::debug!(%error, "statistics end");
                        return;
                    }
                }
            }
        }
    }

    /// Waits for something to do. An error: there will be nothing any more.
    fn wait(&self, readers: &[Reader]) -> io::Result<()> {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let mut fds = vec![PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN)];
        fds.extend(readers.iter().map(|reader| PollFd::new(&reader.stream, PollFlags::OUT)));
        if readers.len() < MAX_READERS {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        let next = readers.iter().map(|reader| reader.deadline).min();
        let timeout = next.map(|next| {
            let left = next.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        match fds.first().is_some_and(|stop| stop.revents().is_empty()) {
            true => Ok(()),
            false => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// What there is, not much older than now. `None`: the stack is gone.
    fn document(&mut self) -> Option<Arc<Vec<u8>>> {
        if let Some((made, document)) = &self.last
            && made.elapsed() < FRESH
        {
            return Some(document.clone());
        }
        let stack = self.stack.upgrade()?;
        let mut text = serde_json::to_vec(&Process::of(&stack)).unwrap_or_default();
        text.push(b'\n');
        let document = Arc::new(text);
        self.last = Some((Instant::now(), document.clone()));
        Some(document)
    }
}

impl Reader {
    /// Writes what it takes. `true`: it needs nothing more, or has taken too long.
    fn go_on(&mut self) -> bool {
        loop {
            let rest = self.document.get(self.done..).unwrap_or_default();
            if rest.is_empty() {
                return true;
            }
            // A program whose own this is not may have SIGPIPE as it was.
            match net::send(&self.stream, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(n) => self.done += n,
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => return Instant::now() >= self.deadline,
                Err(_) => return true,
            }
        }
    }
}
