// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Place of a test's sockets, and time limits of a test.

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use smc_test_support::TestDir;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use vhost_device_ism::Daemon;
use vhost_device_ism::config::{Config, GuestSpec};

pub(crate) use smc_test_support::TIMEOUT;

/// A directory for sockets.
pub(crate) struct Place(TestDir);

impl Place {
    pub(crate) fn new() -> Place {
        Place(TestDir::new())
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

pub(crate) fn eventually(what: &str, done: impl FnMut() -> bool) {
    smc_test_support::eventually(what, done);
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
