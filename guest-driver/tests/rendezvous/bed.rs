// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A network namespace and a cgroup of a test's own.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use smc_rendezvous::{Options, Rendezvous};

/// One test at a time: the cgroup is the process's.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a test in a new network namespace, in a cgroup of its own. Without the rights for both, the test is
/// skipped with a message; in CI (`CI=true`) the test fails.
pub(crate) fn run(test: impl FnOnce() + Send) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let bed = match Bed::make() {
        Ok(bed) => bed,
        Err(why) if std::env::var("CI").is_ok_and(|ci| ci == "true") => {
            panic!("TCP options cannot be tested here: {why}")
        }
        Err(why) => {
            // Written past the output capture of the test harness.
            let _ = writeln!(io::stderr(), "SKIPPED, nothing was tested: {why}");
            return;
        }
    };
    let outcome = std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            leave_network().expect("it was possible a moment ago");
            test();
        });
        inside.join()
    });
    drop(bed);
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// The process is in a cgroup of its own until this is dropped.
struct Bed {
    cgroup: PathBuf,
    parent: PathBuf,
}

impl Bed {
    fn make() -> Result<Bed, String> {
        let probe = Rendezvous::attach(Options::default()).map_err(|why| why.to_string())?;
        let parent = probe.cgroup().expect("it attached").to_owned();
        drop(probe);
        // After leaving its network, a thread is of no further use.
        let able = std::thread::spawn(leave_network).join();
        able.map_err(|_| "no thread")?.map_err(|error| {
            format!("a network namespace: {error}; it takes CAP_SYS_ADMIN (`sudo -E cargo test`)")
        })?;
        fs::metadata("/dev/net/tun").map_err(|error| format!("/dev/net/tun: {error}"))?;
        let cgroup = parent.join(format!("smc-test-{}", std::process::id()));
        let made = fs::create_dir(&cgroup).and_then(|()| move_to(&cgroup));
        made.map_err(|error| format!("a cgroup {}: {error}", cgroup.display()))?;
        Ok(Bed { cgroup, parent })
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let left = move_to(&self.parent).and_then(|()| remove(&self.cgroup));
        if let Err(error) = left {
            eprintln!("{} is left behind: {error}", self.cgroup.display());
        }
    }
}

/// Removes a cgroup. The kernel reports a busy cgroup until its last processes are gone.
fn remove(cgroup: &Path) -> io::Result<()> {
    let mut left = 100;
    loop {
        match fs::remove_dir(cgroup) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && left > 0 => left -= 1,
            done => return done,
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

fn move_to(cgroup: &Path) -> io::Result<()> {
    fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string())
}

/// Moves the calling thread, and the threads started by this thread, to a network of their own.
fn leave_network() -> io::Result<()> {
    // SAFETY: descriptor tables stay shared, only the network changes.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET)? };
    Ok(())
}

/// Runs `ip` with these words.
pub(crate) fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status().expect("ip(8)");
    assert!(status.success(), "ip {words}");
}
