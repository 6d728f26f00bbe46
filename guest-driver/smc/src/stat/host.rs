// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's account of the processes of this machine: processes with statistics sockets,
//! processes with the library of `smc run`, and the open sockets of each.
//!
//! A user sees the processes accessible in /proc: its own. Root sees all, including containers. Any
//! process may be hostile: names are bytes, read data is bounded, and anything a process can delay
//! is left to threads that may be given up (`look`).

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use guest_driver::statistics::{Reason, TcpReasonReader};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, major, minor, openat2};

use super::look::{self, left};
use crate::proc_files::{self, Status};

/// File name of the installed library of `smc run`.
const LIBRARY: &str = "libsmc_preload.so";
/// Limit of the files with notes read per process.
const MAX_NOTES: usize = 4;
/// Limits of the sockets to look at: per process, and in total.
const MAX_SOCKETS: usize = 250_000;
const MAX_ALL_SOCKETS: usize = 600_000;
/// Limit of the statistics socket paths tried per process. Names with line ends can forge further
/// lines of the kernel's table.
const MAX_PATHS: usize = 1024;
/// Name of a process that only ends the connections of a process already gone.
const KEEPER: &str = "smc-keeper";
/// The variable with the directory of a process's socket, set by `smc run`.
const DIRECTORY: &[u8] = b"SMC_RUN_STATISTICS=";

/// The processes to look for, beside the processes with sockets in this user's directories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The processes of all users, as far as accessible to this user.
    Host,
    /// The processes using this directory.
    Directory(PathBuf),
}

impl Scope {
    /// Every process, unless the environment names a runtime directory other than the system's:
    /// then only the processes using that directory.
    pub(crate) fn of_environment() -> Scope {
        match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
            Some(directory) if !directory.starts_with("/run/user") => {
                Scope::Directory(directory.join("smc"))
            }
            _ => Scope::Host,
        }
    }

    fn has(&self, pid: u32, notes: &BTreeSet<Mapped>) -> bool {
        let Scope::Directory(directory) = self else { return true };
        let environment = proc_files::bytes(format!("/proc/{pid}/environ")).unwrap_or_default();
        let wanted = directory.as_os_str().as_bytes();
        notes.iter().any(|one| one.path.starts_with(directory))
            || environment
                .split(|byte| *byte == 0)
                .filter_map(|variable| variable.strip_prefix(DIRECTORY))
                .any(|path| path == wanted)
    }
}

/// A file mapped by a process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Mapped {
    inode: u64,
    /// Major and minor number.
    device: (u32, u32),
    path: PathBuf,
    /// Address range of the mapping.
    range: (u64, u64),
}

impl Mapped {
    /// A line of /proc/PID/maps.
    fn parse(line: &str) -> Option<Mapped> {
        let (fields, path) = line.split_at_checked(line.find('/')?)?;
        let mut fields = fields.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (major, minor) = fields.nth(2)?.split_once(':')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let number = |text| u32::from_str_radix(text, 16).ok();
        Some(Mapped {
            inode: fields.next()?.parse().ok()?,
            device: (number(major)?, number(minor)?),
            path: path.into(),
            range: (hex(start)?, hex(end)?),
        })
    }

    /// Opens the file with O_PATH, without side effects. Root gets the mapped file. Another user
    /// gets the file at the same path, if inode and device agree.
    fn open(&self, pid: u32) -> io::Result<OwnedFd> {
        let (start, end) = self.range;
        let link = format!("/proc/{pid}/map_files/{start:x}-{end:x}");
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        if let Ok(file) = rustix::fs::openat(CWD, link, flags, Mode::empty()) {
            return Ok(file);
        }
        let file = open_of(pid, &self.path)?;
        let found = fstat(&file)?;
        let device = (major(found.st_dev), minor(found.st_dev));
        match (found.st_ino, device) == (self.inode, self.device) {
            true => Ok(file),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// The notes in the file.
    fn notes(&self, pid: u32) -> io::Result<TcpReasonReader> {
        let named = expect(&self.open(pid)?, FileType::RegularFile)?;
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
        TcpReasonReader::read(&File::options().read(true).custom_flags(flags).open(named.path())?)
    }
}

/// An open file, with an unambiguous path.
#[derive(Debug)]
pub(super) struct FilePath(OwnedFd);

impl FilePath {
    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

/// Opens a path as seen by a process, confined to the root of the process.
fn open_of(pid: u32, path: &Path) -> io::Result<OwnedFd> {
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, format!("/proc/{pid}/root"), directory, Mode::empty())?;
    let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let named = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    // O_PATH has no side effects, whatever the file.
    Ok(openat2(root, path, named, Mode::empty(), inside)?)
}

fn expect(file: &OwnedFd, kind: FileType) -> io::Result<FilePath> {
    if FileType::from_raw_mode(fstat(file)?.st_mode) != kind {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(FilePath(file.try_clone()?))
}

/// The socket at a path, if the process may have made the socket. `root`: the process with the root
/// directory of the path.
pub(super) fn open_socket(root: u32, path: &Path, status: &Status) -> io::Result<FilePath> {
    let file = open_of(root, path)?;
    if !status.can_have_made(fstat(&file)?.st_uid) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    expect(&file, FileType::Socket)
}

/// The open sockets of a process: inodes, sorted, each with the reason noted for one of its
/// descriptors.
#[derive(Debug, Default)]
pub(crate) struct Holding {
    sockets: Vec<(u64, Option<Arc<Reason>>)>,
    /// The process's own counts of its TCP connections.
    counts: Vec<Reason>,
}

impl Holding {
    /// Finds the open sockets. `all`: the number of known sockets of all processes.
    fn look(
        pid: u32,
        (notes, own_pid): (&[Mapped], u32),
        all: &AtomicUsize,
    ) -> io::Result<Holding> {
        // A child without a file of its own maps its parent's file. The counts there are the
        // parent's.
        let has_own = notes
            .last()
            .is_some_and(|last| TcpReasonReader::process_of(&last.path) == Some(own_pid));
        let notes: Vec<_> = notes.iter().rev().filter_map(|one| one.notes(pid).ok()).collect();
        let mut sockets: Vec<(u64, Option<Arc<Reason>>)> = Vec::new();
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
            if sockets.len() >= MAX_SOCKETS || all.load(Ordering::Relaxed) >= MAX_ALL_SOCKETS {
                return Err(io::ErrorKind::QuotaExceeded.into());
            }
            let Some(inode) = proc_files::socket_inode(entry.path()) else { continue };
            let fd = entry.file_name().to_str().and_then(|name| name.parse().ok());
            let reason = fd.and_then(|fd| notes.iter().find_map(|notes| notes.reason(fd).cloned()));
            all.fetch_add(1, Ordering::Relaxed);
            sockets.push((inode, reason));
        }
        let counts = notes.first().filter(|_| has_own).map(TcpReasonReader::counts);
        sockets.sort_by_key(|(inode, reason)| (*inode, reason.is_none()));
        sockets.dedup_by_key(|(inode, _)| *inode);
        Ok(Holding { sockets, counts: counts.unwrap_or_default() })
    }

    /// The current sockets, without notes.
    pub(crate) fn of_now(pid: u32) -> io::Result<Holding> {
        Holding::look(pid, (&[], 0), &AtomicUsize::new(0))
    }

    pub(crate) fn has(&self, inode: u64) -> bool {
        self.sockets.binary_search_by_key(&inode, |(inode, _)| *inode).is_ok()
    }

    /// The reasons for the process's present and past TCP connections.
    pub(super) fn counts(&self) -> &[Reason] {
        &self.counts
    }

    pub(super) fn sockets(&self) -> &[(u64, Option<Arc<Reason>>)] {
        &self.sockets
    }
}

/// A process by the kernel's account.
#[derive(Debug)]
pub(super) struct ProcessState {
    pub(super) pid: u32,
    pub(super) status: Status,
    pub(super) program: String,
    /// Network namespace of the process.
    pub(super) network: PathBuf,
    /// Whether the process has the library of `smc run`.
    pub(super) has_library: bool,
    /// Mapped files with notes, the process's own file last.
    notes: Vec<Mapped>,
    /// `None`: this user may not know, or there was no time.
    pub(super) holding: Option<Holding>,
    /// Whether the process surely has no statistics socket.
    pub(super) is_mute: bool,
}

impl ProcessState {
    /// `None`: the process has ended, is inaccessible to this user, or is outside `scope`.
    fn look(pid: u32, scope: &Scope) -> Option<ProcessState> {
        let network = fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
        let status = Status::of(pid)?;
        let mut has_library = false;
        let mut notes = BTreeSet::new();
        let read = proc_files::lines(format!("/proc/{pid}/maps"), |line| {
            has_library |= line.ends_with(LIBRARY) && line.contains(&format!("/{LIBRARY}"));
            if line.ends_with(".tcp")
                && let Some(mapped) = Mapped::parse(line)
                && TcpReasonReader::process_of(&mapped.path).is_some()
            {
                notes.insert(mapped);
                // The file of a child is younger than its parent's.
                if notes.len() > MAX_NOTES {
                    notes.pop_first();
                }
            }
            true
        });
        read.ok()?;
        if !scope.has(pid, &notes) {
            return None;
        }
        let program = proc_files::program(pid);
        Some(ProcessState {
            pid,
            // The library may have any name. Nothing else has such notes.
            has_library: (has_library || !notes.is_empty()) && program != KEEPER,
            status,
            program,
            network,
            notes: notes.into_iter().collect(),
            holding: None,
            is_mute: false,
        })
    }
}

/// The processes seen, by their ids.
#[derive(Debug, Default)]
pub(super) struct Host {
    pub(super) seen: BTreeMap<u32, ProcessState>,
    /// Number of processes skipped for lack of time.
    pub(super) missed: usize,
}

/// The process id in the name of a socket of statistics.
pub(super) fn named(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?.strip_prefix("process-")?.strip_suffix(".sock")?;
    name.split('-').next()?.parse().ok()
}

/// The present processes, each with its user.
fn all_processes() -> Vec<(u32, u32)> {
    let own = std::process::id();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let pids = pids.filter(|pid| *pid != own);
    pids.filter_map(|pid| Some((fs::metadata(format!("/proc/{pid}")).ok()?.uid(), pid))).collect()
}

impl Host {
    /// Looks at the processes of `scope`, and at processes with an id in `others`.
    pub(super) fn look(scope: &Scope, others: &BTreeSet<u32>, until: Instant) -> Host {
        let mut host = Host::default();
        let all = all_processes();
        host.missed = all.len();
        let (scope, others) = (scope.clone(), others.clone());
        let work = move |pid| {
            ProcessState::look(pid, &scope).or_else(|| {
                let is_other = Status::of(pid).is_some_and(|one| others.contains(&one.own_pid));
                is_other.then(|| ProcessState::look(pid, &Scope::Host)).flatten()
            })
        };
        look::for_each(all, until, work, |found| {
            host.missed -= 1;
            if let Some(seen) = found {
                host.seen.insert(seen.pid, seen);
            }
        });
        host
    }

    /// Finds the open sockets of these processes.
    pub(super) fn look_at_sockets(&mut self, pids: &BTreeSet<u32>, until: Instant) {
        let all = Arc::new(AtomicUsize::new(0));
        let jobs: Vec<_> = pids
            .iter()
            .filter_map(|pid| self.seen.get(pid))
            .map(|one| {
                (
                    one.status.users.get(1).copied().unwrap_or(0),
                    (one.pid, one.notes.clone(), one.status.own_pid),
                )
            })
            .collect();
        let work = move |(pid, notes, own): (u32, Vec<Mapped>, u32)| {
            (pid, Holding::look(pid, (&notes[..], own), &all).ok())
        };
        look::for_each(jobs, until, work, |(pid, holding)| {
            if let Some(seen) = self.seen.get_mut(&pid) {
                seen.holding = holding;
            }
        });
    }

    /// The network namespaces, each with its processes by their ids in their own PID namespaces.
    fn networks(&self) -> BTreeMap<&Path, BTreeMap<u32, Vec<u32>>> {
        let mut networks: BTreeMap<&Path, BTreeMap<u32, Vec<u32>>> = BTreeMap::new();
        for seen in self.seen.values() {
            let network = networks.entry(&seen.network).or_default();
            network.entry(seen.status.own_pid).or_default().push(seen.pid);
        }
        networks
    }

    /// Passes the statistics sockets known to the kernel to `each`: the processes with the id in
    /// the name, the inode, and the path. Returns the namespaces read completely before `until`.
    fn for_each_socket(
        &self,
        until: Instant,
        mut each: impl FnMut(&[u32], u64, &Path),
    ) -> BTreeSet<PathBuf> {
        let mut whole = BTreeSet::new();
        for (network, by_own_pid) in self.networks() {
            let look = |line: &[u8]| {
                if let Some((inode, path)) = bound(line)
                    && let Some(pids) = named(path).and_then(|pid| by_own_pid.get(&pid))
                {
                    each(pids, inode, path);
                }
                !left(until).is_zero()
            };
            // A process may have ended meanwhile: try the next.
            let mut look = look;
            let mut pids = by_own_pid.values().flatten();
            let is_read = pids.any(|pid| {
                proc_files::byte_lines(format!("/proc/{pid}/net/unix"), &mut look).is_ok()
            });
            if is_read && !left(until).is_zero() {
                whole.insert(network.to_owned());
            }
        }
        whole
    }

    /// The processes named by statistics sockets.
    pub(super) fn named(&self, until: Instant) -> BTreeSet<u32> {
        let mut found = BTreeSet::new();
        self.for_each_socket(until, |pids, _, _| found.extend(pids));
        found
    }

    /// The paths of the open statistics sockets of each process.
    pub(super) fn paths(&mut self, until: Instant) -> BTreeMap<u32, BTreeSet<PathBuf>> {
        let mut found: BTreeMap<u32, BTreeSet<PathBuf>> = BTreeMap::new();
        let whole = self.for_each_socket(until, |pids, inode, path| {
            for pid in pids {
                let holding = self.seen.get(pid).and_then(|seen| seen.holding.as_ref());
                if holding.is_some_and(|holding| holding.has(inode)) {
                    let paths = found.entry(*pid).or_default();
                    if paths.len() < MAX_PATHS {
                        paths.insert(path.to_owned());
                    }
                }
            }
        });
        for seen in self.seen.values_mut() {
            let is_known = seen.holding.is_some() && whole.contains(&seen.network);
            seen.is_mute = is_known && !found.contains_key(&seen.pid);
        }
        found
    }
}

/// The inode and the path in a line of /proc/PID/net/unix, for a socket in the file system.
fn bound(line: &[u8]) -> Option<(u64, &Path)> {
    let mut rest = line;
    let mut field = || {
        let start = rest.iter().position(|byte| *byte != b' ')?;
        let text = rest.get(start..)?;
        let end = text.iter().position(|byte| *byte == b' ').unwrap_or(text.len());
        let (field, after) = text.split_at_checked(end)?;
        rest = after;
        Some(field)
    };
    let inode = (0..7).map(|_| field()).last()??;
    let inode = std::str::from_utf8(inode).ok()?.parse().ok()?;
    let path = rest.get(1..).filter(|path| path.starts_with(b"/"))?;
    Some((inode, Path::new(OsStr::from_bytes(path))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_file_has_an_inode_a_device_and_a_path_with_spaces() {
        let line = "7f00-7f01 rw-s 00000000 fd:1a 4711      /run/user/0/smc/a b/process-7.tcp";
        let found = Mapped::parse(line).unwrap();
        assert_eq!(
            (found.inode, found.device, found.range),
            (4711, (0xfd, 0x1a), (0x7f00, 0x7f01))
        );
        assert_eq!(found.path, PathBuf::from("/run/user/0/smc/a b/process-7.tcp"));
        assert_eq!(Mapped::parse("7f00-7f01 rw-p 00000000 00:00 0 [heap]"), None);
        assert_eq!(Mapped::parse("/"), None);
    }

    #[test]
    fn a_bound_socket_has_a_path_of_any_bytes() {
        let line =
            b"0000000000000000: 00000002 00000000 00010000 0001 01    42 /a \xff/process-7-x.sock";
        let (inode, path) = bound(line).unwrap();
        assert_eq!((inode, named(path)), (42, Some(7)));
        assert_eq!(path.as_os_str().as_bytes(), b"/a \xff/process-7-x.sock");
        for none in [
            &b"0: 2 0 1 1 01 42"[..],
            b"0: 2 0 1 1 01 42 @x",
            b"",
            b"Num RefCount",
            b"0: 2 0 1 1 01 x /y",
        ] {
            assert_eq!(bound(none), None);
        }
        for none in ["/a/process-.sock", "/a/process-7.tcp", "/process-x.sock", "/a"] {
            assert_eq!(named(Path::new(none)), None, "{none}");
        }
    }
}
