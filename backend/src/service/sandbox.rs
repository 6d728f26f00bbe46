// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rights given up by the daemon after its start.
//!
//! The daemon maps the memory of all its guests, so an attacker in the daemon should gain as little as
//! possible.
//!
//! - **Rights**: a daemon started as root becomes another user (`--user`) and has no capabilities.
//! - **Files** ([`restrict_files`]): nothing can be opened, read, executed, made or removed. TCP ports cannot
//!   be bound or connected, abstract sockets cannot be connected, and processes outside cannot be sent
//!   signals. A kernel without landlock (before 5.13) is a warning. A daemon started as root also has an
//!   empty directory as its root.
//! - **System calls** ([`restrict_syscalls`]): a list of the calls of the daemon and its libraries. No
//!   program can be started, no process made (threads can), no memory made executable, no socket made or
//!   connected, no mode changed, no file opened at all, and no path queried. `open` fails with EPERM in every
//!   mode, since libraries try `open` and tolerate the failure. Calls outside the list also fail with EPERM,
//!   or kill the daemon in strict mode. EPERM is the default because the list depends on the C library: an
//!   optional call of a later version should not end every guest's connections.
//!
//! - **Namespaces**: a daemon started as root has a network without interfaces, and no System V objects of
//!   the host.
//!
//! All threads have the same filter: threads share their memory, so an attacker in one thread has the calls
//! of all.
//!
//! Work needing a path later (a socket for another guest, the end) is done by the broker (`broker.rs`), a
//! process outside with a sandbox of its own. Another process opens the configuration file again
//! (`config_reader.rs`).
//!
//! The sandbox is for a process of its own; a daemon inside another program does not use the sandbox.

// The crate for filters of system calls knows these machines.
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
#[path = "sandbox/calls.rs"]
mod calls;
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
#[path = "sandbox/no_calls.rs"]
mod calls;

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use thiserror::Error;

pub use calls::{restrict_keeper_syscalls, restrict_syscalls};

/// Why the sandbox cannot be set up.
#[derive(Debug, Error)]
pub enum SandboxError {
    /// The file rules cannot be made.
    #[error("landlock: {0}")]
    Files(#[from] RulesetError),
    /// A directory of sockets cannot be opened.
    #[error("landlock: {path}: {source}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: Box<landlock::PathFdError>,
    },
    /// The filter cannot be made.
    #[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
    #[error("seccomp: {0}")]
    Filter(#[from] seccompiler::BackendError),
    /// The filter cannot be installed.
    #[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
    #[error("seccomp: {0}")]
    Install(#[from] seccompiler::Error),
}

/// Keeps the memory of guests out of core dumps, and protects this process's memory from other processes of
/// the same user.
///
/// # Errors
/// The kernel refuses.
pub fn forbid_dumps() -> std::io::Result<()> {
    use rustix::process::{DumpableBehavior, Resource, Rlimit, setrlimit};
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}

/// Drops access to files, except for making and removing sockets in `directories`. Affects only this thread
/// and threads started later, so to be called before any other threads.
///
/// # Errors
/// A directory does not exist, or the kernel refuses. A kernel without landlock is no error.
pub fn restrict_files<'a>(
    directories: impl IntoIterator<Item = &'a Path>,
) -> Result<(), SandboxError> {
    restrict_files_to(directories, AccessFs::MakeSock | AccessFs::RemoveFile)
}

/// Drops access to files, except for reading files in `directories`; otherwise like [`restrict_files`].
///
/// # Errors
/// The errors of [`restrict_files`].
pub fn restrict_files_to_reading<'a>(
    directories: impl IntoIterator<Item = &'a Path>,
) -> Result<(), SandboxError> {
    restrict_files_to(directories, AccessFs::ReadFile.into())
}

fn restrict_files_to<'a>(
    directories: impl IntoIterator<Item = &'a Path>,
    access: BitFlags<AccessFs>,
) -> Result<(), SandboxError> {
    let abi = ABI::V7;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?;
    for path in directories {
        let directory = PathFd::new(path).map_err(|source| SandboxError::Directory {
            path: path.into(),
            source: Box::new(source),
        })?;
        rules = rules.add_rule(PathBeneath::new(directory, access))?;
    }
    match rules.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced => {}
        RulesetStatus::PartiallyEnforced => {
            tracing::info!("this kernel knows only a part of landlock");
        }
        RulesetStatus::NotEnforced => {
            tracing::warn!("this kernel has no landlock: files are not restricted");
        }
    }
    Ok(())
}

/// The process calling [`restrict_syscalls`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Process {
    /// The daemon.
    Daemon,
    /// The process making the sockets.
    Broker,
    /// The process opening the configuration file.
    ConfigReader,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::args::SandboxMode;
    use std::process::Command;

    /// Names of refused attempts in the sandbox of `who`, in a process of its own.
    fn refused_in(who: &str) -> String {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "service::sandbox::tests::in_the_sandbox",
            "--ignored",
            "--nocapture",
        ]);
        let place = smc_test_support::TestDir::new();
        command.env("ISM_TEST_SANDBOX", who).env("ISM_TEST_PLACE", &place);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        // On one processor the harness begins the first line with the name of the test.
        let refused = said.split("refused: ").skip(1);
        refused.filter_map(|line| line.split(':').next()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_daemon_that_was_taken_over_reaches_nothing() {
        let all = "open connect socket bind chmod unlink mkdir fork signal limits ioctl owner async \
                   stat statx readlink access";
        assert_eq!(refused_in("daemon"), all);
    }

    #[test]
    fn a_config_reader_that_was_taken_over_opens_files_of_its_directory_only() {
        // Without a directory in this test.
        let all = "open connect socket bind chmod unlink mkdir fork signal limits ioctl thread owner \
                   async stat statx readlink access";
        assert_eq!(refused_in("config-reader"), all);
    }

    #[test]
    fn a_broker_that_was_taken_over_reaches_sockets_only() {
        let all = "open bind chmod unlink mkdir fork signal limits ioctl thread owner async readlink \
                   access";
        assert_eq!(refused_in("broker"), all);
    }

    /// Attempts of an attacker in the daemon.
    #[test]
    #[ignore = "the tests above run it in a process of its own"]
    fn in_the_sandbox() {
        use rustix::fs::{AtFlags, CWD, Mode, OFlags};
        use rustix::io::Result;
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

        let who = match std::env::var("ISM_TEST_SANDBOX").as_deref() {
            Ok("broker") => Process::Broker,
            Ok("config-reader") => Process::ConfigReader,
            _ => Process::Daemon,
        };
        let unix = || {
            let flags = SocketFlags::CLOEXEC;
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        };
        let (parent, own) = (rustix::process::getppid().unwrap(), unix().unwrap());
        let place = PathBuf::from(std::env::var("ISM_TEST_PLACE").unwrap());
        let (file, name) = (place.join("file"), place.join("socket"));
        std::fs::write(&file, "x").unwrap();
        let address = SocketAddrUnix::new(&name).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&name).unwrap();
        let other = SocketAddrUnix::new(place.join("other")).unwrap();

        match who {
            Process::ConfigReader => restrict_files_to_reading([]).unwrap(),
            _ => restrict_files([]).unwrap(),
        }
        restrict_syscalls(who, SandboxMode::On).unwrap();
        let fcntl = |command, argument| crate::service::fork::fcntl(&own, command, argument);
        let nobody = rustix::process::Rlimit { current: Some(1), maximum: Some(1) };
        let tries: [(&str, &dyn Fn() -> Result<()>); 18] = [
            ("open", &|| rustix::fs::open(&file, OFlags::RDONLY, Mode::empty()).map(drop)),
            ("connect", &|| rustix::net::connect(&own, &address)),
            ("socket", &|| unix().map(drop)),
            ("bind", &|| rustix::net::bind(&own, &other)),
            ("chmod", &|| rustix::fs::chmod(&file, Mode::from_raw_mode(0o4777))),
            ("unlink", &|| rustix::fs::unlinkat(CWD, &file, rustix::fs::AtFlags::empty())),
            ("mkdir", &|| rustix::fs::mkdir(place.join("new"), Mode::empty())),
            ("fork", &|| match Command::new("/bin/true").spawn() {
                Ok(_) => Ok(()),
                Err(_) => Err(rustix::io::Errno::PERM),
            }),
            ("signal", &|| rustix::process::test_kill_process(parent)),
            ("limits", &|| {
                let what = rustix::process::Resource::Core;
                rustix::process::prlimit(Some(parent), what, nobody).map(drop)
            }),
            ("ioctl", &|| rustix::io::ioctl_fionread(&own).map(drop)),
            ("thread", &|| match std::thread::Builder::new().spawn(|| ()) {
                Ok(thread) => thread.join().map_err(|_| rustix::io::Errno::IO),
                Err(_) => Err(rustix::io::Errno::PERM),
            }),
            // The kernel would send signals for the descriptor to another process.
            ("owner", &|| fcntl(libc::F_SETOWN, parent.as_raw_pid())),
            ("async", &|| fcntl(libc::F_SETFL, libc::O_ASYNC)),
            // The flag is meant for descriptors, but allows a path as well.
            ("stat", &|| rustix::fs::statat(CWD, &file, AtFlags::EMPTY_PATH).map(drop)),
            ("statx", &|| {
                let what = rustix::fs::StatxFlags::SIZE;
                rustix::fs::statx(CWD, &file, AtFlags::EMPTY_PATH, what).map(drop)
            }),
            ("readlink", &|| rustix::fs::readlink(&file, Vec::new()).map(drop)),
            ("access", &|| rustix::fs::access(&file, rustix::fs::Access::EXISTS)),
        ];
        for (name, attempt) in tries {
            match attempt() {
                Ok(()) => println!("done: {name}"),
                Err(error) => println!("refused: {name}: {error}"),
            }
        }
    }
}
