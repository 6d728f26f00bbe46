// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sockets of processes: their paths, and connections to them.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use rustix::net::SocketAddrUnix;

use super::{names, tcp_notes};
use ism_sys::peer_process;

/// The age of a file after which its process has bound a socket to it, if ever.
const SETTLED: Duration = Duration::from_secs(2);
/// The most files of a directory read by [`find`].
const MAX_FILES: usize = 65_536;
/// The beginning of the name of a client that wants copies of passing bytes.
pub(super) const CAPTURE: &[u8] = b"smc-capture-";
const SUFFIX: &str = ".sock";

/// The path of this process's socket in a directory for such sockets.
pub fn path_in(directory: impl AsRef<Path>) -> PathBuf {
    directory.as_ref().join(names::own(SUFFIX))
}

/// `x-NUMBER.sock` for `x.sock`.
pub(super) fn numbered(path: &Path, number: u64) -> PathBuf {
    let Some(stem) = path.file_stem() else { return path.to_owned() };
    let mut name = stem.to_owned();
    name.push(format!("-{number:x}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// A name like that of `path`, not taken before by another process, by including the present time.
/// `None`: the file at `path` is this user's and of this kind, so there is no need for another.
///
/// Every user of a container may write its directory, and only the owner of a file can remove it.
pub(super) fn in_place_of_planted(
    path: &Path,
    is_kind: impl FnOnce(fs::FileType) -> bool,
) -> Option<PathBuf> {
    let planted = fs::symlink_metadata(path).ok()?;
    let is_own = planted.uid() == ism_sys::effective_user() && is_kind(planted.file_type());
    let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
    (!is_own).then(|| numbered(path, now))
}

/// Finds the sockets of processes in a directory, and removes the files of dead processes.
pub fn find(directory: &Path) -> Vec<PathBuf> {
    let making = ism_sys::making();
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let entries: Vec<_> = entries.take(MAX_FILES).flatten().collect();
    drop(making);
    let mut found = Vec::new();
    for entry in entries {
        // The checks open files and sockets for a moment.
        let _making = ism_sys::making();
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let path = entry.path();
        if let Some(pid) = tcp_notes::pid_of(name) {
            if tcp_notes::is_left(&path, || is_gone(pid) && is_settled(&entry)) {
                let _ = fs::remove_file(&path);
            }
            continue;
        }
        let Some(pid) = names::pid_of(name, SUFFIX) else { continue };
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

/// Has the process listening at a socket send copies of the bytes sent and received by its SMC
/// connections. [`Record::read`](super::Record::read) reads them. Copies not read in time are left out.
/// `pid`: the expected process.
///
/// # Errors
/// No process listens there, this user may not ask, or another process listens there.
pub fn capture(socket: &Path, pid: u32) -> io::Result<UnixStream> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut name = CAPTURE.to_vec();
    name.extend_from_slice(format!("{}-{number}", std::process::id()).as_bytes());
    let stream = connect_now(socket, Some(&SocketAddrUnix::new_abstract_name(&name)?))?;
    let listener = peer_process(&stream)?.pid.and_then(|pid| u32::try_from(pid).ok());
    if listener != Some(pid) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(stream)
}

/// Connects, by a name or without. A process that does not accept must not keep this one waiting.
pub(super) fn connect_now(socket: &Path, name: Option<&SocketAddrUnix>) -> io::Result<UnixStream> {
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_process_that_accepts_nobody_keeps_nobody_waiting_and_only_the_one_meant_is_captured() {
        let own_directory = smc_test_support::TestDir::new();
        let path = own_directory.path("ask.sock");
        let listener = UnixListener::bind(&path).unwrap();
        // A queue of std's length has more sockets than the usual limit of descriptors.
        rustix::net::listen(&listener, 1).unwrap();
        let own = std::process::id();
        let error = capture(&path, own + 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        capture(&path, own).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            match connect_now(&path, None) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        let asked = [capture(&path, own).map(drop), super::super::ask(&path).map(drop)];
        assert!(asked.iter().all(|asked| asked.as_ref().is_err_and(|e| e.kind() == full.kind())));
        drop(listener);
    }
}
