//! What the daemon drops: access to files by landlock before it makes its sockets, system calls by
//! seccomp after.
//!
//! The daemon maps the memory of all its guests, so a guest that takes it over should find as
//! little as possible to go on with.
//!
//! - **Files** ([`restrict_files`]): nothing can be opened, read or executed. Sockets can be made
//!   and removed in the directories in which sockets were configured, and nowhere else: a guest
//!   that is added at run time needs its socket in one of them. TCP ports cannot be bound or
//!   connected. A kernel without landlock (before 5.13) is a warning.
//! - **System calls** ([`restrict_syscalls`]): a list of what the daemon and its libraries use.
//!   No program can be started, no process made (threads can), no memory made executable, no
//!   socket but Unix sockets, and no file opened at all. `open` fails with EPERM in every
//!   mode, since libraries try it and live without. What is not in the list fails with
//!   EPERM too, or in strict mode kills the daemon. EPERM is the default because
//!   the list depends on the C library: a call that a later version makes for its comfort should
//!   not end every guest's connections.
//!
//! Both are for a process of its own; a daemon inside another program leaves them alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as ArgLen, SeccompCmpOp as Cmp,
    SeccompCondition as Condition, SeccompFilter, SeccompRule, TargetArch,
};
use thiserror::Error;

use crate::args::SandboxMode;

/// Why there is no sandbox.
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
        /// Why.
        source: Box<landlock::PathFdError>,
    },
    /// The filter cannot be made.
    #[error("seccomp: {0}")]
    Filter(#[from] seccompiler::BackendError),
    /// The filter cannot be installed.
    #[error("seccomp: {0}")]
    Install(#[from] seccompiler::Error),
}

/// Keeps the memory of guests out of core dumps, and other processes of the same user out of this
/// one's memory.
///
/// # Errors
/// The kernel refuses.
pub fn forbid_dumps() -> std::io::Result<()> {
    use rustix::process::{DumpableBehavior, Resource, Rlimit, setrlimit};
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}

/// Drops access to files, except for making and removing sockets in `directories`. Holds for this thread
/// and those it starts, so call it before there are any.
///
/// # Errors
/// A directory does not exist, or the kernel refuses. Not that it lacks landlock.
pub fn restrict_files<'a>(
    directories: impl IntoIterator<Item = &'a Path>,
) -> Result<(), SandboxError> {
    let abi = ABI::V5;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .create()?;
    for path in directories {
        let directory = PathFd::new(path).map_err(|source| SandboxError::Directory {
            path: path.into(),
            source: Box::new(source),
        })?;
        let access = AccessFs::MakeSock | AccessFs::RemoveFile;
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

/// Restricts the system calls of all threads.
///
/// # Errors
/// The kernel or the architecture has no seccomp filters.
pub fn restrict_syscalls(mode: SandboxMode) -> Result<(), SandboxError> {
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
    let filters = [
        program(listed(&opening()), SeccompAction::Allow, refuse(libc::EPERM))?,
        // Its flags lie in memory where no filter can look. Without it, libraries use clone.
        program(no_clone3, SeccompAction::Allow, refuse(libc::ENOSYS))?,
        program(allowed()?, otherwise, SeccompAction::Allow)?,
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

/// What may be called, with conditions on arguments where there are any.
fn allowed() -> Result<BTreeMap<i64, Vec<SeccompRule>>, SandboxError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        CALLS.iter().chain(ARCH_CALLS).map(|call| (*call, Vec::new())).collect();
    rules.extend(opening().into_iter().map(|call| (call, Vec::new())));
    rules.insert(libc::SYS_clone3, Vec::new());

    let only = |arg, op, value| -> Result<SeccompRule, SandboxError> {
        Ok(SeccompRule::new(vec![Condition::new(arg, ArgLen::Dword, op, value)?])?)
    };
    let exec = libc::PROT_EXEC as u64;
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_mmap, vec![only(2, Cmp::MaskedEq(exec), 0)?]);
    rules.insert(libc::SYS_mprotect, vec![only(2, Cmp::MaskedEq(exec), 0)?]);
    rules.insert(libc::SYS_clone, vec![only(0, Cmp::MaskedEq(thread), thread)?]);
    rules.insert(libc::SYS_socket, vec![only(0, Cmp::Eq, libc::AF_UNIX as u64)?]);
    let prctl = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA];
    let prctl: Result<_, _> = prctl.iter().map(|op| only(0, Cmp::Eq, *op as u64)).collect();
    rules.insert(libc::SYS_prctl, prctl?);
    // This process only: the daemon may run as root. 0 is the caller itself.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, vec![only(0, Cmp::Eq, own)?]);
    rules.insert(libc::SYS_prlimit64, vec![only(0, Cmp::Eq, 0)?, only(0, Cmp::Eq, own)?]);
    let ioctl: Result<_, _> = IOCTLS.iter().map(|request| only(1, Cmp::Eq, *request)).collect();
    rules.insert(libc::SYS_ioctl, ioctl?);
    Ok(rules)
}

/// Requests of ioctl(2): for nonblocking sockets and to recognise a terminal.
const IOCTLS: [u64; 3] = [libc::FIONBIO, libc::TCGETS, libc::FIOCLEX];

/// Calls without conditions, on every architecture.
const CALLS: &[i64] = &[
    // descriptors
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_readv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_ppoll,
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
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // Unix sockets and their names
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_shutdown,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_unlinkat,
    libc::SYS_readlinkat,
    // threads
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_membarrier,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    // signals
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // time and chance
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
];

/// Older forms that only some architectures have.
#[cfg(target_arch = "x86_64")]
const ARCH_CALLS: &[i64] = &[
    libc::SYS_poll,
    libc::SYS_epoll_wait,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_unlink,
    libc::SYS_readlink,
    libc::SYS_chmod,
    libc::SYS_time,
];
/// Older forms that only some architectures have.
#[cfg(not(target_arch = "x86_64"))]
const ARCH_CALLS: &[i64] = &[];
