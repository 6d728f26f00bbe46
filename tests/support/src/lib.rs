// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! For the tests of all crates: waiting for an event, ports, and directories of a test.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::net::TcpListener;
use std::ops::Deref;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait for an event: a watchdog. A test of a prompt event measures the time itself, and
/// even on the busiest machine no event takes this long.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Waits until `done`, and panics with `what` after [`TIMEOUT`]. Returns the time waited.
#[track_caller]
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        // A check may cost the only processor, needed by other threads.
        let pause = start.elapsed() / 20;
        thread::sleep(pause.clamp(Duration::from_millis(1), Duration::from_millis(100)));
    }
    start.elapsed()
}

/// Ports of a block, and the first port. The kernel's own ports begin at 32,768.
const BLOCK: u16 = 100;
const FIRST_PORT: u16 = 10_000;
const BLOCKS: u16 = 200;

/// The rest of a block of ports.
struct Ports {
    next: u16,
    end: u16,
}

impl Ports {
    /// A block of no other process: its abstract socket lives as long as this process. Abstract names
    /// belong to a network namespace, as ports do.
    fn claim() -> Ports {
        let first = std::process::id() % u32::from(BLOCKS);
        let claimed = (0..BLOCKS).cycle().skip(first as usize).find_map(|block| {
            let name = format!("smc-test-ports-{block}");
            let claim =
                UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).ok()?).ok()?;
            std::mem::forget(claim);
            Some(FIRST_PORT + block * BLOCK)
        });
        let next = claimed.unwrap();
        Ports { next, end: next + BLOCK }
    }
}

/// A port without a listener. No other test gets the port, and the kernel gives it to no client.
pub fn free_port() -> u16 {
    static PORTS: Mutex<Ports> = Mutex::new(Ports { next: 0, end: 0 });
    let mut ports = PORTS.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if ports.next == ports.end {
            *ports = Ports::claim();
        }
        let port = ports.next;
        ports.next += 1;
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
}

/// Whether a process listens on the port, in the network namespace of this process.
pub fn listens(process: &str, port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    ["tcp", "tcp6"].iter().any(|table| {
        let path = format!("/proc/{process}/net/{table}");
        fs::read_to_string(path).unwrap_or_default().lines().any(|line| {
            let mut words = line.split_whitespace().skip(1);
            words.next().is_some_and(|local| local.ends_with(&wanted)) && words.nth(1) == Some("0A")
        })
    })
}

/// The time of an operation, without the time of a busy machine.
///
/// For promises of the form "within three seconds". Threads of a busy machine wait for a processor,
/// for memory or for a disk, and the kernel reports how long at least one thread waited. If this is
/// all the time, a promise can not be tested, and no time has passed here.
#[derive(Debug)]
pub struct Stopwatch {
    start: Instant,
    busy: Duration,
}

impl Stopwatch {
    /// Starts the measurement.
    #[must_use]
    pub fn start() -> Stopwatch {
        Stopwatch { start: Instant::now(), busy: busy() }
    }

    /// The time until now.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        let all = self.start.elapsed();
        all.saturating_sub(busy().saturating_sub(self.busy))
    }
}

/// How long threads of this machine have waited in vain so far. Nothing, if the kernel does not tell.
fn busy() -> Duration {
    let of = |resource: &str| {
        let text = fs::read_to_string(format!("/proc/pressure/{resource}")).unwrap_or_default();
        let total = text.lines().next().and_then(|some| some.rsplit_once("total="));
        Duration::from_micros(total.map_or(0, |(_, total)| total.parse().unwrap()))
    };
    of("cpu") + of("memory") + of("io")
}

/// Reports a left-out test past the test harness. With `CI=true`, no test may be left out.
#[track_caller]
pub fn leave_out(why: &str) {
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "{why}");
    let thread = thread::current();
    let _ = writeln!(io::stderr(), "NOT TESTED: {}: {why}", thread.name().unwrap_or_default());
}

/// A program in its own namespaces, by these options of unshare(1). Users other than root also get a
/// user namespace. `None`, after a report: this user may not have one, as on Ubuntu.
#[must_use]
pub fn unshare(options: &[&str]) -> Option<Command> {
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    let start = || {
        let mut command = Command::new("unshare");
        command.args((!is_root).then_some("--map-root-user")).args(options);
        command
    };
    if start().arg("true").output().is_ok_and(|output| output.status.success()) {
        return Some(start());
    }
    leave_out(&format!("no namespaces by unshare {}", options.join(" ")));
    None
}

/// The names of all directories of tests begin with this.
const PREFIX: &str = "smc-test-";

/// An empty directory for one test, removed with the value. If the process was killed, the next test
/// making a directory removes the leftover.
#[derive(Debug)]
pub struct TestDir {
    path: PathBuf,
    /// The process has a lock on its directory, and so have its forks. Small kernels have no locks.
    _lock: Option<File>,
}

impl TestDir {
    /// A directory where temporary files are.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "a default makes no directory")]
    pub fn new() -> TestDir {
        static REMOVED: Once = Once::new();
        TestDir::within(&std::env::temp_dir(), &REMOVED)
    }

    /// A directory in memory, if there is such a file system.
    #[must_use]
    pub fn in_memory() -> TestDir {
        static REMOVED: Once = Once::new();
        let memory = Path::new("/dev/shm");
        if memory.is_dir() { TestDir::within(memory, &REMOVED) } else { TestDir::new() }
    }

    /// A directory on the file system of the test's own program, where programs may run, also with the
    /// rights of another user. The file system of temporary files may forbid both.
    #[must_use]
    pub fn for_programs() -> TestDir {
        static REMOVED: Once = Once::new();
        TestDir::within(std::env::current_exe().unwrap().parent().unwrap(), &REMOVED)
    }

    fn within(place: &Path, removed: &Once) -> TestDir {
        removed.call_once(|| remove_those_without_process(place));
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = place.join(format!("{PREFIX}{}-{n}", std::process::id()));
            // A process of another namespace may have this name, or a killed process may have left
            // one.
            if DirBuilder::new().mode(0o755).create(&path).is_err() {
                assert!(path.exists(), "{} can not be made", path.display());
                continue;
            }
            // Until the lock is there, another process may take the directory for a leftover.
            match locked(&path) {
                Ok(None) => {}
                Ok(lock) => return TestDir { path, _lock: lock },
                Err(why) => {
                    assert_eq!(why.kind(), ErrorKind::Unsupported, "{}: {why}", path.display());
                    return TestDir { path, _lock: None };
                }
            }
        }
    }

    /// A file of the directory.
    #[must_use]
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }
}

impl Deref for TestDir {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl AsRef<OsStr> for TestDir {
    fn as_ref(&self) -> &OsStr {
        self.path.as_os_str()
    }
}

impl AsRef<Path> for TestDir {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The lock on an unused directory, if the directory still exists.
///
/// # Errors
/// If the kernel has no such locks.
fn locked(path: &Path) -> io::Result<Option<File>> {
    let Ok(directory) = File::open(path) else { return Ok(None) };
    match directory.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(why)) => return Err(why),
    }
    let there = fs::symlink_metadata(path).map(|found| found.ino()).ok();
    let own = directory.metadata().ok().filter(fs::Metadata::is_dir).map(|found| found.ino());
    Ok((own.is_some() && own == there).then_some(directory))
}

fn remove_those_without_process(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        if !entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()) {
            continue;
        }
        if let Ok(Some(_lock)) = locked(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A test for each row: its name, and the arguments of the function in front.
#[macro_export]
macro_rules! tests_of {
    ($run:ident: $($(#[$meta:meta])* fn $name:ident($($argument:expr),* $(,)?);)*) => {
        $($(#[$meta])*
        #[test]
        fn $name() {
            $run($($argument),*);
        })*
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_blocks_of_ports_have_none_in_common() {
        let (one, other) = (Ports::claim(), Ports::claim());
        assert!(one.end <= other.next || other.end <= one.next);
    }

    #[test]
    fn a_directory_is_new_and_ends_with_its_value() {
        let (one, other) = (TestDir::new(), TestDir::new());
        assert_ne!(one.path, other.path);
        fs::write(one.path("file"), "").unwrap();
        let path = one.path.clone();
        drop(one);
        assert!(!path.exists() && other.exists());
    }

    #[test]
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let place = TestDir::new();
        let alive = TestDir::within(&place, &Once::new());
        fs::create_dir(place.path("smc-test-1-0")).unwrap();
        fs::write(place.path("smc-test-1-0/file"), "").unwrap();
        fs::create_dir(place.path("else")).unwrap();
        let new = TestDir::within(&place, &Once::new());
        assert!(alive.exists() && new.exists() && place.path("else").exists());
        assert!(!place.path("smc-test-1-0").exists());
    }

    #[test]
    fn no_more_time_passes_than_on_the_clock() {
        let (clock, watch) = (Instant::now(), Stopwatch::start());
        thread::sleep(Duration::from_millis(10));
        assert!(watch.elapsed() <= clock.elapsed());
    }

    #[test]
    fn an_event_is_awaited_and_its_time_is_told() {
        let begun = Instant::now();
        let took = eventually("three looks", {
            let mut looks = 0;
            move || {
                looks += 1;
                looks == 3
            }
        });
        assert!(took <= begun.elapsed());
    }
}
