// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Place of a test's sockets, and time limits of a test.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vhost_device_ism::Daemon;
use vhost_device_ism::config::{Config, GuestSpec};

/// Longest wait for what must come.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// A directory for sockets, removed at the end.
pub(crate) struct Place(PathBuf);

impl Place {
    pub(crate) fn new() -> Place {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ism-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Place(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A daemon in this process with guests of these names.
    pub(crate) fn daemon(&self, guests: &[&str]) -> Daemon {
        self.daemon_with(guests, |_| ())
    }

    pub(crate) fn daemon_with(&self, guests: &[&str], change: impl FnOnce(&mut Config)) -> Daemon {
        let guests = guests.iter().map(|name| GuestSpec::new(self.path(name))).collect();
        let mut config = Config { guests, ..Config::default() };
        change(&mut config);
        Daemon::start(config).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Waits until `done`.
pub(crate) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until a program listens on a socket for many clients.
pub(crate) fn until_listening(path: &Path) {
    drop(connected(path));
}

/// A connection to a socket, with retries: the name exists for a moment before listen(2).
pub(crate) fn connected(path: &Path) -> UnixStream {
    let mut socket = UnixStream::connect(path);
    eventually("a connection", || {
        if socket.is_err() {
            socket = UnixStream::connect(path);
        }
        socket.is_ok()
    });
    socket.unwrap()
}

/// Memory of a guest.
pub(crate) fn memfd(len: u64, seal: bool) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("guest", flags).unwrap());
    file.set_len(len).unwrap();
    if seal {
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    }
    file
}
