// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sockets of processes: their paths, and connections to them.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::net::SocketAddrUnix;

use super::{Process, tcp_notes};
use ism_sys::peer_process;

/// How long a process may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of an answer at most.
const MAX_LEN: usize = 64 << 20;
/// Age of a file whose socket, if it was to have one, has it.
const SETTLED: Duration = Duration::from_secs(2);
/// The most files of a directory read by [`find`].
const MAX_FILES: usize = 65_536;
/// The beginning of the name of a client that wants copies of passing bytes.
pub(super) const CAPTURE: &[u8] = b"smc-capture-";
const PREFIX: &str = "process-";
const SUFFIX: &str = ".sock";

/// The path of this process's socket in a directory for such sockets.
pub fn path_in(directory: impl AsRef<Path>) -> PathBuf {
    directory.as_ref().join(format!("{PREFIX}{}{SUFFIX}", std::process::id()))
}

/// The process id in the name of a socket.
fn pid_of(name: &str) -> Option<i32> {
    let middle = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    // The number of a further stack of the process may follow the id.
    middle.split('-').next()?.parse().ok().filter(|pid| *pid > 0)
}

/// Finds the sockets of processes in a directory, and removes the files of dead processes.
pub fn find(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.take(MAX_FILES).flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let path = entry.path();
        if let Some(pid) = tcp_notes::pid_of(name) {
            if tcp_notes::is_left(&path, || is_gone(pid) && is_settled(&entry)) {
                let _ = fs::remove_file(&path);
            }
            continue;
        }
        let Some(pid) = pid_of(name) else { continue };
        if !entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            continue;
        }
        if is_of_nobody(&path) || is_gone(pid) && is_of_ended_listener(&path) {
            // A process that binds a socket makes the file a moment before.
            if is_settled(&entry) {
                tracing::debug!(path = %path.display(), "of a process that has ended");
                let _ = fs::remove_file(&path);
            }
            continue;
        }
        found.push(path);
    }
    found.sort();
    found
}

/// Whether there is no process with this id here.
fn is_gone(pid: i32) -> bool {
    use rustix::process::{Pid, test_kill_process};
    Pid::from_raw(pid).is_none_or(|pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH))
}

/// Whether the creation of a file is long past. A file of the future is from before the clock was set.
fn is_settled(entry: &fs::DirEntry) -> bool {
    let made = entry.metadata().and_then(|metadata| metadata.modified());
    made.is_ok_and(|made| {
        let now = SystemTime::now();
        let apart = now.duration_since(made).or_else(|_| made.duration_since(now));
        apart.is_ok_and(|apart| apart > SETTLED)
    })
}

/// Whether no process has the socket of this file, in any namespace: ids say nothing about the
/// processes of another container. The kernel finds a socket before it notices the wrong kind, so the
/// listening process does not see the probe.
pub(super) fn is_of_nobody(path: &Path) -> bool {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = || {
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)
    };
    probe() == Err(rustix::io::Errno::CONNREFUSED)
}

/// Whether a socket is open only because a child of the listening process has inherited it.
fn is_of_ended_listener(path: &Path) -> bool {
    let listener = connect_now(path, None).and_then(peer_process);
    listener.is_ok_and(|listener| listener.pid.is_some_and(is_gone))
}

/// Gets the report of the process that listens at a socket.
///
/// # Errors
/// No process answers in time, or the answer is no [`Process`].
pub fn ask(socket: &Path) -> io::Result<Process> {
    read(UnixStream::connect(socket)?)
}

/// Gets the report of the process that listens at a socket, if it is the one with this id here. The
/// report has this id, whatever the process says.
///
/// # Errors
/// Those of [`ask`], or another process listens there.
pub fn ask_process(socket: &Path, pid: u32) -> io::Result<Process> {
    let stream = connect_now(socket, None)?;
    let listener = peer_process(&stream)?.pid.and_then(|pid| u32::try_from(pid).ok());
    if listener != Some(pid) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(Process { pid, ..read(stream)? })
}

/// Has the process that listens at a socket send copies of what its connections on SMC send and
/// receive. [`Record::read`](super::Record::read) reads them. What the caller does not read in time is
/// left out. `pid`: the process that has to be there.
///
/// # Errors
/// Nobody listens there, this user may not ask, or another process listens there.
pub fn capture(socket: &Path, pid: Option<u32>) -> io::Result<UnixStream> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut name = CAPTURE.to_vec();
    name.extend_from_slice(format!("{}-{number}", std::process::id()).as_bytes());
    let stream = connect_now(socket, Some(&SocketAddrUnix::new_abstract_name(&name)?))?;
    let listener = peer_process(&stream)?.pid.and_then(|pid| u32::try_from(pid).ok());
    if pid.is_some() && listener != pid {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(stream)
}

/// Connects, by a name or without. A process that accepts nobody must not keep this one waiting.
fn connect_now(socket: &Path, name: Option<&SocketAddrUnix>) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    if let Some(name) = name {
        bind(&stream, name)?;
    }
    connect(&stream, &SocketAddrUnix::new(socket)?)?;
    rustix::io::ioctl_fionbio(&stream, false)?;
    Ok(stream.into())
}

fn read(mut stream: UnixStream) -> io::Result<Process> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let mut answer = Vec::new();
    let mut piece = vec![0u8; 64 << 10];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(n) => answer.extend_from_slice(piece.get(..n).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        }
        if answer.len() > MAX_LEN {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
    }
    serde_json::from_slice(&answer)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_the_process_that_was_meant_is_asked_and_it_cannot_keep_the_asker_waiting() {
        let path = std::env::temp_dir().join(format!("smc-ask-{}.sock", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let own = std::process::id();
        let thread = std::thread::spawn(move || {
            // The first one has asked for another process, and sends nothing.
            drop(listener.accept().unwrap());
            let report = serde_json::to_vec(&Process { pid: 1, ..Process::default() }).unwrap();
            listener.accept().unwrap().0.write_all(&report).unwrap();
            listener
        });
        let error = ask_process(&path, own + 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(ask_process(&path, own).unwrap().pid, own, "whatever it says");
        let _listener = thread.join().unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            match connect_now(&path, None) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn names_of_sockets_have_the_process_id() {
        assert_eq!(pid_of("process-17.sock"), Some(17));
        assert_eq!(pid_of("process-17-2.sock"), Some(17));
        for other in ["process-.sock", "process-x.sock", "process-0.sock", "a.sock", "process-1"] {
            assert_eq!(pid_of(other), None, "{other}");
        }
    }
}
