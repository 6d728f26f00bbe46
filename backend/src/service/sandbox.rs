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
//! All that is for a process of its own; a daemon inside another program leaves it alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as ArgLen, SeccompCmpOp as Cmp,
    SeccompCondition as Condition, SeccompFilter, SeccompRule, TargetArch,
};
use thiserror::Error;

use crate::service::args::SandboxMode;

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
    #[error("seccomp: {0}")]
    Filter(#[from] seccompiler::BackendError),
    /// The filter cannot be installed.
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

/// Restricts the system calls of all threads.
///
/// # Errors
/// The kernel or the architecture has no seccomp filters.
pub fn restrict_syscalls(who: Process, mode: SandboxMode) -> Result<(), SandboxError> {
    let allowed = match who {
        Process::Daemon => daemon_calls()?,
        Process::Broker => broker_calls()?,
        Process::ConfigReader => common_calls()?,
    };
    install(who, allowed, mode)
}

/// As [`restrict_syscalls`], for the process that makes the broker again when it is killed. It reads
/// nothing that another process has written. The broker restricts itself further.
///
/// # Errors
/// Those of [`restrict_syscalls`].
pub fn restrict_keeper_syscalls(mode: SandboxMode) -> Result<(), SandboxError> {
    let mut allowed = broker_calls()?;
    allowed.extend(KEEPER.iter().map(|call| (*call, Vec::new())));
    install(Process::Broker, allowed, mode)
}

fn install(who: Process, allowed: Rules, mode: SandboxMode) -> Result<(), SandboxError> {
    let otherwise = match mode {
        SandboxMode::Off => return Ok(()),
        SandboxMode::On => SeccompAction::Errno(libc::EPERM as u32),
        SandboxMode::Strict => SeccompAction::KillProcess,
    };
    let arch: TargetArch = std::env::consts::ARCH.try_into()?;
    let program = |rules, otherwise, matching| -> Result<BpfProgram, SandboxError> {
        Ok(SeccompFilter::new(rules, otherwise, matching, arch)?.try_into()?)
    };
    let listed = |calls: &[i64]| calls.iter().map(|call| (*call, Vec::new())).collect();

    // The strictest verdict of all filters counts.
    let refuse = |error: i32| SeccompAction::Errno(error as u32);
    let no_clone3 = listed(&[libc::SYS_clone3]);
    // Which files one may open, landlock says.
    let no_opening = if who == Process::ConfigReader { Vec::new() } else { opening() };
    let filters = [
        program(listed(&no_opening), SeccompAction::Allow, refuse(libc::EPERM))?,
        // Its flags lie in memory where no filter can look. Without it, libraries use clone.
        program(no_clone3, SeccompAction::Allow, refuse(libc::ENOSYS))?,
        program(allowed, otherwise, SeccompAction::Allow)?,
    ];
    for filter in &filters {
        seccompiler::apply_filter_all_threads(filter)?;
    }
    Ok(())
}

/// Ways to open a file.
fn opening() -> Vec<i64> {
    let mut calls = vec![libc::SYS_openat, libc::SYS_openat2];
    #[cfg(target_arch = "x86_64")]
    calls.extend([libc::SYS_open, libc::SYS_creat]);
    calls
}

/// System calls, with conditions on arguments where there are any.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// A condition on the lower half of an argument.
fn only(argument: u8, op: Cmp, value: u64) -> Result<SeccompRule, SandboxError> {
    Ok(SeccompRule::new(vec![Condition::new(argument, ArgLen::Dword, op, value)?])?)
}

/// What both processes may call.
fn common_calls() -> Result<Rules, SandboxError> {
    let mut rules: Rules = COMMON.iter().map(|call| (*call, Vec::new())).collect();
    // Refused by a filter of their own.
    rules.extend(opening().into_iter().map(|call| (call, Vec::new())));
    rules.insert(libc::SYS_clone3, Vec::new());
    let exec = libc::PROT_EXEC as u64;
    rules.insert(libc::SYS_mmap, vec![only(2, Cmp::MaskedEq(exec), 0)?]);
    rules.insert(libc::SYS_mprotect, vec![only(2, Cmp::MaskedEq(exec), 0)?]);
    let fcntl: Result<Vec<_>, _> = FCNTLS.iter().map(|op| only(1, Cmp::Eq, *op as u64)).collect();
    let mut fcntl = fcntl?;
    // Without O_ASYNC, which makes the kernel send signals.
    fcntl.push(SeccompRule::new(vec![
        Condition::new(1, ArgLen::Dword, Cmp::Eq, libc::F_SETFL as u64)?,
        Condition::new(2, ArgLen::Dword, Cmp::MaskedEq(libc::O_ASYNC as u64), 0)?,
    ])?);
    rules.insert(libc::SYS_fcntl, fcntl);
    // This process only. 0 is the caller itself.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, vec![only(0, Cmp::Eq, own)?]);
    rules.insert(libc::SYS_prlimit64, vec![only(0, Cmp::Eq, 0)?, only(0, Cmp::Eq, own)?]);
    Ok(rules)
}

/// What the daemon may call.
fn daemon_calls() -> Result<Rules, SandboxError> {
    let mut rules = common_calls()?;
    rules.extend(DAEMON.iter().chain(DAEMON_ARCH).map(|call| (*call, Vec::new())));
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_clone, vec![only(0, Cmp::MaskedEq(thread), thread)?]);
    let prctl = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA];
    let prctl: Result<_, _> = prctl.iter().map(|op| only(0, Cmp::Eq, *op as u64)).collect();
    rules.insert(libc::SYS_prctl, prctl?);
    let ioctl: Result<_, _> = IOCTLS
        .iter()
        .chain(&crate::vhost::IOCTLS)
        .map(|request| only(1, Cmp::Eq, *request))
        .collect();
    rules.insert(libc::SYS_ioctl, ioctl?);
    Ok(rules)
}

/// What the broker may call.
fn broker_calls() -> Result<Rules, SandboxError> {
    let mut rules = common_calls()?;
    rules.extend(BROKER.iter().chain(BROKER_ARCH).map(|call| (*call, Vec::new())));
    rules.insert(libc::SYS_socket, vec![only(0, Cmp::Eq, libc::AF_UNIX as u64)?]);
    Ok(rules)
}

/// Requests of ioctl(2), beside those of guest memory: for nonblocking sockets and to recognise a
/// terminal.
const IOCTLS: [u64; 3] = [libc::FIONBIO, libc::TCGETS, libc::FIOCLEX];

/// Commands of fcntl(2). Not those by which the kernel signals a process or leases a file.
const FCNTLS: [i32; 7] = [
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
];

/// Calls of both processes without conditions, on every architecture.
const COMMON: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    // whether a line of the log can be written
    libc::SYS_ppoll,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_listen,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_getsockname,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
];

/// Calls of the daemon without conditions, on every architecture.
const DAEMON: &[i64] = &[
    // descriptors
    libc::SYS_pread64,
    libc::SYS_readv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_lseek,
    libc::SYS_fstatfs,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    // wakes across devices; the contexts are made before
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_destroy,
    // memory of slabs and guests
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_getrusage,
    // connections
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getpeername,
    // threads
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_membarrier,
    // time
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
];

/// Calls of the broker without conditions, on every architecture.
const BROKER: &[i64] = &[
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_fchmod,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_unlinkat,
    // its notes, in a file without a name
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_ftruncate,
];

/// Calls of the process that makes the broker again.
const KEEPER: &[i64] = &[
    libc::SYS_clone,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_seccomp,
    libc::SYS_prctl,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
];

/// Older forms that only some architectures have.
#[cfg(target_arch = "x86_64")]
const DAEMON_ARCH: &[i64] = &[libc::SYS_poll, libc::SYS_epoll_wait, libc::SYS_time];
/// Older forms that only some architectures have.
#[cfg(target_arch = "x86_64")]
const BROKER_ARCH: &[i64] = &[libc::SYS_stat, libc::SYS_lstat, libc::SYS_unlink, libc::SYS_time];
/// Older forms that only some architectures have.
#[cfg(not(target_arch = "x86_64"))]
const DAEMON_ARCH: &[i64] = &[];
/// Older forms that only some architectures have.
#[cfg(not(target_arch = "x86_64"))]
const BROKER_ARCH: &[i64] = &[];

#[cfg(test)]
mod tests {
    use super::*;
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
        let place = std::env::temp_dir().join(format!("ism-{who}-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        command.env("ISM_TEST_SANDBOX", who).env("ISM_TEST_PLACE", &place);
        let output = command.output().unwrap();
        std::fs::remove_dir_all(&place).unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        let refused = said.lines().filter_map(|line| line.strip_prefix("refused: "));
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
