// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Filters of the system calls of a process.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as ArgLen, SeccompCmpOp as Cmp,
    SeccompCondition as Condition, SeccompFilter, SeccompRule, TargetArch,
};

use super::{Process, SandboxError};
use crate::service::args::SandboxMode;

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

/// Like [`restrict_syscalls`], for the broker's parent. The parent reads no data of other processes. The
/// broker restricts itself further.
///
/// # Errors
/// The errors of [`restrict_syscalls`].
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
    // Landlock decides about the config reader's files.
    let no_opening = if who == Process::ConfigReader { &[] } else { OPENING };
    let filters = [
        program(listed(no_opening), SeccompAction::Allow, refuse(libc::EPERM))?,
        // The flags of clone3 lie in memory, out of reach of filters. Without clone3, libraries use clone.
        program(no_clone3, SeccompAction::Allow, refuse(libc::ENOSYS))?,
        program(allowed, otherwise, SeccompAction::Allow)?,
    ];
    for filter in &filters {
        seccompiler::apply_filter_all_threads(filter)?;
    }
    Ok(())
}

/// Calls to open a file.
const OPENING: &[i64] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_creat,
];

/// System calls, with conditions on arguments, if any.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// A condition on the lower half of an argument.
fn only(argument: u8, op: Cmp, value: u64) -> Result<SeccompRule, SandboxError> {
    Ok(SeccompRule::new(vec![Condition::new(argument, ArgLen::Dword, op, value)?])?)
}

/// Calls allowed in every process.
fn common_calls() -> Result<Rules, SandboxError> {
    let mut rules: Rules = COMMON.iter().map(|call| (*call, Vec::new())).collect();
    // Refused by separate filters.
    rules.extend(OPENING.iter().map(|call| (*call, Vec::new())));
    rules.insert(libc::SYS_clone3, Vec::new());
    let exec = libc::PROT_EXEC as u64;
    rules.insert(libc::SYS_mmap, vec![only(2, Cmp::MaskedEq(exec), 0)?]);
    rules.insert(libc::SYS_mprotect, vec![only(2, Cmp::MaskedEq(exec), 0)?]);
    let fcntl: Result<Vec<_>, _> = FCNTLS.iter().map(|op| only(1, Cmp::Eq, *op as u64)).collect();
    let mut fcntl = fcntl?;
    // Without O_ASYNC: with O_ASYNC, the kernel sends signals.
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

/// Calls allowed in the daemon.
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

/// Calls allowed in the broker.
fn broker_calls() -> Result<Rules, SandboxError> {
    let mut rules = common_calls()?;
    rules.extend(BROKER.iter().chain(BROKER_ARCH).map(|call| (*call, Vec::new())));
    rules.insert(libc::SYS_socket, vec![only(0, Cmp::Eq, libc::AF_UNIX as u64)?]);
    Ok(rules)
}

/// Requests of ioctl(2), beside those of guest memory: for nonblocking sockets and to recognise a
/// terminal.
#[allow(clippy::unnecessary_cast, reason = "with musl the requests are numbers of 32 bits")]
const IOCTLS: [u64; 3] = [libc::FIONBIO as u64, libc::TCGETS as u64, libc::FIOCLEX as u64];

/// Commands of fcntl(2), without commands to make the kernel signal a process or lease a file.
const FCNTLS: [i32; 7] = [
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
];

/// Calls of every process without conditions, on every architecture.
const COMMON: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    // to check whether a line of the log can be written
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
    // the names' record, in a file without a name
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_ftruncate,
];

/// Calls of the broker's parent.
const KEEPER: &[i64] = &[
    libc::SYS_clone,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_seccomp,
    libc::SYS_prctl,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
];

/// Older calls of some architectures.
#[cfg(target_arch = "x86_64")]
const DAEMON_ARCH: &[i64] = &[libc::SYS_poll, libc::SYS_epoll_wait, libc::SYS_time];
/// Older calls of some architectures.
#[cfg(target_arch = "x86_64")]
const BROKER_ARCH: &[i64] = &[libc::SYS_stat, libc::SYS_lstat, libc::SYS_unlink, libc::SYS_time];
/// Older calls of some architectures.
#[cfg(not(target_arch = "x86_64"))]
const DAEMON_ARCH: &[i64] = &[];
/// Older calls of some architectures.
#[cfg(not(target_arch = "x86_64"))]
const BROKER_ARCH: &[i64] = &[];
