// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls of this project forbidden by filters of system calls (seccomp(2)).
//!
//! A filter may end the process for a call never made by its program: `SystemCallFilter=` of systemd does,
//! unless the unit says otherwise. Other filters refuse the call. A filter is unreadable, and a fatal call
//! cannot be tried. So a child tries all calls, with the flags of the calls here and with invalid
//! addresses, and the child's end tells the forbidden call. This happens once, and only in a process with
//! filters.

use std::ffi::c_long;
use std::fs::File;
use std::io::Read;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use super::interrupt::call;

/// A system call: number, name, and the arguments of each way of calling in this project.
type Call = (c_long, &'static str, &'static [[usize; 6]]);

/// No address, descriptor, process or size.
const NO: usize = usize::MAX;
/// Arguments without meaning for filters.
const NOTHING: &[[usize; 6]] = &[[NO; 6]];
/// A process number without a process.
const NOBODY: usize = i32::MAX as usize;
const CLOEXEC: usize = libc::O_CLOEXEC as usize;
const HERE: usize = libc::AT_FDCWD as usize;
/// Flags of a thread, except one. Without this flag no thread is made.
const THREAD: usize = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID) as usize;
const ACCESS: usize = (libc::PROT_READ | libc::PROT_WRITE) as usize;
const MEMORY: usize = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
const MADE: usize = (libc::O_WRONLY | libc::O_CREAT | libc::O_CLOEXEC) as usize;

/// Gives calls their names. Without arguments a call is [`NOTHING`]. Numbers are arguments of the call;
/// left out arguments are [`NO`].
macro_rules! calls {
    ($($(#[$on:meta])? $number:ident $name:literal $([$($argument:expr),*])*,)*) => {
        [$($(#[$on])? (libc::$number, $name, calls!(@all $([$($argument),*])*)),)*]
    };
    (@all) => { NOTHING };
    (@all $($list:tt)+) => { &[$(arguments(&$list)),+] };
}

/// The first arguments of a call, with [`NO`] after them.
const fn arguments(first: &[usize]) -> [usize; 6] {
    let mut all = [NO; 6];
    let (head, _) = all.split_at_mut(first.len());
    head.copy_from_slice(first);
    all
}

/// Calls dispensable for this project. The last one is needed once a device is open.
const OPTIONAL: [Call; 7] = calls! {
    SYS_pwrite64 "pwrite64",
    SYS_fallocate "fallocate", SYS_flock "flock",
    SYS_bpf "bpf", SYS_seccomp "seccomp", SYS_io_uring_setup "io_uring_setup",
    SYS_futex_waitv "futex_waitv",
};

/// Calls needed to use a device. Each has the flags, commands and kinds of its calls here, since a filter
/// may forbid others: `MemoryDenyWriteExecute=` of systemd forbids mmap with PROT_EXEC. Addresses and
/// descriptors are invalid, so the call changes only the child.
const REQUIRED: &[Call] = &calls! {
    SYS_clone "clone" [THREAD, 0],
    SYS_accept4 "accept4" [NO, 0, 0, CLOEXEC],
    SYS_bind "bind", SYS_connect "connect",
    SYS_clock_nanosleep "clock_nanosleep" [libc::CLOCK_REALTIME as usize, 0]
        [libc::CLOCK_MONOTONIC as usize, libc::TIMER_ABSTIME as usize],
    SYS_dup3 "dup3" [NO, NO, CLOEXEC],
    SYS_epoll_pwait2 "epoll_pwait2",
    SYS_epoll_create1 "epoll_create1" [CLOEXEC],
    SYS_epoll_ctl "epoll_ctl" [NO, libc::EPOLL_CTL_ADD as usize]
        [NO, libc::EPOLL_CTL_MOD as usize] [NO, libc::EPOLL_CTL_DEL as usize],
    SYS_epoll_pwait "epoll_pwait",
    SYS_eventfd2 "eventfd2" [0, (libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) as usize],
    SYS_fcntl "fcntl" [NO, libc::F_GETFD as usize] [NO, libc::F_GETFL as usize]
        [NO, libc::F_SETFL as usize, libc::O_NONBLOCK as usize]
        [NO, libc::F_DUPFD_CLOEXEC as usize, 3],
    SYS_fstat "fstat", SYS_ftruncate "ftruncate",
    SYS_futex "futex" [NO, libc::FUTEX_WAIT as usize] [NO, libc::FUTEX_WAKE as usize]
        [NO, (libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG) as usize]
        [NO, (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as usize],
    SYS_getdents64 "getdents64", SYS_getpeername "getpeername",
    SYS_getrandom "getrandom" [NO, 16, 0],
    SYS_getsockname "getsockname",
    SYS_getsockopt "getsockopt" [NO, libc::SOL_SOCKET as usize, libc::SO_ERROR as usize]
        [NO, libc::IPPROTO_TCP as usize, libc::TCP_INFO as usize],
    SYS_ioctl "ioctl" [NO, libc::FIONREAD as usize] [NO, libc::FIONBIO as usize],
    SYS_kill "kill" [NOBODY, 0],
    SYS_listen "listen" [NO, 128],
    SYS_madvise "madvise" [NO, 4096, libc::MADV_DONTNEED as usize],
    SYS_memfd_create "memfd_create" [NO, (libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) as usize],
    SYS_mmap "mmap" [0, NO, ACCESS, MEMORY, NO, 0]
        [0, 4096, ACCESS, libc::MAP_SHARED as usize, NO, 0],
    SYS_mprotect "mprotect" [NO, 4096, ACCESS] [NO, 4096, libc::PROT_NONE as usize],
    SYS_munmap "munmap",
    SYS_openat "openat" [HERE, NO, CLOEXEC, 0] [HERE, NO, MADE, 0o600],
    SYS_ppoll "ppoll" [NO, 1, 0, 0, 8],
    SYS_prctl "prctl" [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0]
        [libc::PR_SET_NAME as usize, NO, 0, 0, 0],
    SYS_pread64 "pread64",
    SYS_prlimit64 "prlimit64" [0, libc::RLIMIT_NOFILE as usize, 0, 0],
    SYS_readlinkat "readlinkat" [HERE],
    SYS_recvfrom "recvfrom" [NO, NO, 1, libc::MSG_DONTWAIT as usize, 0, 0],
    SYS_recvmsg "recvmsg" [NO, NO, libc::MSG_CMSG_CLOEXEC as usize],
    SYS_rt_sigpending "rt_sigpending" [NO, 8],
    SYS_rt_sigprocmask "rt_sigprocmask" [libc::SIG_SETMASK as usize, NO, 0, 8],
    SYS_sched_getaffinity "sched_getaffinity" [0, 128],
    SYS_sendmsg "sendmsg" [NO, NO, libc::MSG_NOSIGNAL as usize],
    SYS_sendto "sendto" [NO, NO, 1, libc::MSG_NOSIGNAL as usize, 0, 0],
    SYS_set_robust_list "set_robust_list",
    SYS_setsockopt "setsockopt" [NO, libc::SOL_SOCKET as usize, libc::SO_LINGER as usize]
        [NO, libc::IPPROTO_TCP as usize, libc::TCP_NODELAY as usize],
    SYS_shutdown "shutdown" [NO, libc::SHUT_WR as usize],
    SYS_socket "socket" [libc::AF_UNIX as usize, libc::SOCK_STREAM as usize | CLOEXEC, 0],
    SYS_socketpair "socketpair" [libc::AF_UNIX as usize, libc::SOCK_STREAM as usize | CLOEXEC, 0],
    SYS_statx "statx" [HERE, NO, 0, libc::STATX_BASIC_STATS as usize],
    SYS_tgkill "tgkill" [NOBODY, NOBODY, 0],
    SYS_unlinkat "unlinkat" [HERE, NO, 0],
    SYS_wait4 "wait4" [NOBODY, 0, 0, 0],
    #[cfg(target_arch = "x86_64")] SYS_chmod "chmod" [NO, 0o600],
    #[cfg(target_arch = "x86_64")] SYS_open "open" [NO, CLOEXEC, 0],
    #[cfg(target_arch = "x86_64")] SYS_poll "poll" [NO, 1, 0],
    #[cfg(target_arch = "x86_64")] SYS_readlink "readlink",
    #[cfg(target_arch = "x86_64")] SYS_unlink "unlink",
};

/// Required calls that must not be refused, either: the library would break the program's work.
const NEVER_REFUSED: &[c_long] = &[
    libc::SYS_connect,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_fcntl,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_getpeername,
    libc::SYS_getrandom,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_ppoll,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
];

/// Bits of the calls in [`all`] that end the process, or that are refused but must not be; [`UNKNOWN`]
/// before the first attempt.
static FATAL: AtomicU64 = AtomicU64::new(UNKNOWN);
/// Number of filters at the attempt.
static TRIED_WITH: AtomicI64 = AtomicI64::new(0);
/// See [`know_filters`].
static HARMLESS: AtomicU32 = AtomicU32::new(0);
const UNKNOWN: u64 = 1 << 63;
const ALL_FATAL: u64 = UNKNOWN - 1;

fn all() -> impl Iterator<Item = Call> {
    OPTIONAL.into_iter().chain(REQUIRED.iter().copied())
}

/// Declares the first `number` filters of this process harmless: they end the process for none of these
/// calls.
pub fn know_filters(number: u32) {
    HARMLESS.store(number, Ordering::Relaxed);
}

/// Number of filters of this process; -1: some, but the number is unknown.
fn filters() -> i64 {
    let asks = [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0];
    // SAFETY: the call has no further arguments.
    let mode = unsafe { call(libc::SYS_prctl, &asks) };
    // The kernel may know no filters.
    if mode == 0 || mode == -(libc::EINVAL as isize) {
        return 0;
    }
    // The kernel makes the text anew for each read, and the text is shorter. The stack may be small.
    let mut text = vec![0; 8192];
    let read = File::open("/proc/self/status").and_then(|mut status| status.read(&mut text));
    let status = text.get(..read.unwrap_or(0)).unwrap_or_default();
    let status = String::from_utf8_lossy(status);
    let line = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(-1)
}

/// Whether a filter forbids a call, for the tried calls. Filters newer than the last attempt are not seen.
pub fn is_fatal(number: c_long) -> bool {
    let fatal = match FATAL.load(Ordering::Acquire) {
        UNKNOWN => find(),
        fatal => fatal,
    };
    fatal != 0 && all().zip(0..).any(|((one, ..), at)| one == number && fatal >> at & 1 != 0)
}

/// A call needed to use a device, but forbidden by a filter. Filters newer than the last attempt are seen.
pub fn forbidden_call() -> Option<&'static str> {
    let known = FATAL.load(Ordering::Acquire);
    let fatal = match known == UNKNOWN || TRIED_WITH.load(Ordering::Relaxed) != filters() {
        true => find(),
        false => known,
    };
    first_behind(OPTIONAL.len(), fatal)
}

/// Number of tried filters of this process, if they end the process for no call. A filter of
/// [`withhold_io_uring`](crate::withhold_io_uring) needs no trial.
pub fn harmless_filters() -> u32 {
    match FATAL.load(Ordering::Acquire) {
        UNKNOWN if find() != 0 => 0,
        UNKNOWN | 0 => TRIED_WITH.load(Ordering::Relaxed).try_into().unwrap_or(0),
        _ => 0,
    }
}

/// Counts a new filter of this process that ends the process for no call. The other filters are known.
pub(crate) fn note_harmless() {
    let one_more = |known: i64| (known >= 0).then_some(known + 1);
    let _ = TRIED_WITH.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
}

fn find() -> u64 {
    let filters = filters();
    let are_known = filters >= 0 && filters <= HARMLESS.load(Ordering::Relaxed).into();
    let fatal = if are_known { 0 } else { find_by_child(None) };
    TRIED_WITH.store(filters, Ordering::Relaxed);
    note(fatal)
}

/// Adds the fatal calls of one thread to the others': filters are the threads', and stay.
fn note(fatal: u64) -> u64 {
    let all = |known: u64| (known & !UNKNOWN) | fatal;
    let known = FATAL.fetch_update(Ordering::AcqRel, Ordering::Acquire, |known| Some(all(known)));
    all(known.unwrap_or_default())
}

/// A call to give the calling thread a filter: number and arguments.
pub type FilterCall = (c_long, [usize; 6]);

/// A call needed to use a device, but forbidden by the calling thread's next filter. [`is_fatal`] knows of
/// the filter from then on.
///
/// # Safety
/// The arguments are for prctl(2) or seccomp(2), valid until this function returns.
pub unsafe fn forbidden_call_in(filter: FilterCall) -> Option<&'static str> {
    let fatal = note(find_by_child(Some(filter)));
    TRIED_WITH.store(filters().saturating_add(1), Ordering::Relaxed);
    first_behind(OPTIONAL.len() - 1, fatal)
}

/// The first of these calls, from `begin`.
fn first_behind(begin: usize, fatal: u64) -> Option<&'static str> {
    let names = all().zip(0..).skip(begin);
    names.filter(|(_, at)| fatal >> at & 1 != 0).map(|((_, name, _), _)| name).next()
}

/// Findings of children, in memory shared with the parent.
#[derive(Default)]
#[repr(C)]
struct Findings {
    /// The tried call, from 1.
    tried: AtomicU32,
    /// Calls that fail and must not.
    refused: AtomicU64,
}

/// A page of zeros for [`Findings`].
struct FindingsPage(*mut Findings);

impl FindingsPage {
    fn new() -> Option<FindingsPage> {
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        let len = size_of::<Findings>();
        // SAFETY: new memory.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, kind, -1, 0) };
        (at != libc::MAP_FAILED).then_some(FindingsPage(at.cast()))
    }
}

impl std::ops::Deref for FindingsPage {
    type Target = Findings;

    fn deref(&self) -> &Findings {
        // SAFETY: a page of zeros, until `self` is dropped.
        unsafe { &*self.0 }
    }
}

impl Drop for FindingsPage {
    fn drop(&mut self) {
        // SAFETY: nothing else refers to the page.
        unsafe { libc::munmap(self.0.cast(), size_of::<Findings>()) };
    }
}

/// Lets children try all calls, in a further filter if there is one. A killed child leaves the rest to
/// another.
fn find_by_child(filter: Option<FilterCall>) -> u64 {
    let Some(findings) = FindingsPage::new() else { return ALL_FATAL };
    let (mut fatal, mut next) = (0, 0);
    let number = all().count() as u32;
    while next < number {
        findings.tried.store(next, Ordering::Relaxed);
        if !run_child(&findings, next, filter) {
            return ALL_FATAL;
        }
        match findings.tried.load(Ordering::Relaxed) {
            // The child was killed before the first call.
            tried if tried <= next => return ALL_FATAL,
            tried if tried > number => break,
            tried => (fatal, next) = (fatal | 1 << (tried - 1), tried),
        }
    }
    fatal | findings.refused.load(Ordering::Relaxed)
}

/// Runs a child to its end. No other wait gets the child, and the child leaves no core. `false`: there can
/// be no child.
fn run_child(findings: &Findings, first: u32, filter: Option<FilterCall>) -> bool {
    const NONE: [usize; 6] = [0; 6];
    let (all_signals, mut before) = (u64::MAX, 0u64);
    let set_mask = |mask: &u64, before: *mut u64| {
        let (mask, before) = (std::ptr::from_ref(mask) as usize, before as usize);
        let arguments = [libc::SIG_SETMASK as usize, mask, before, size_of::<u64>(), 0, 0];
        // SAFETY: both masks are valid until the call returns.
        unsafe { call(libc::SYS_rt_sigprocmask, &arguments) }
    };
    // A handler of the program runs in the program only.
    set_mask(&all_signals, &raw mut before);
    // SAFETY: a child with a copy of the memory, and without a signal at its end. The child makes system
    // calls only, and none of them touches this process.
    let child = unsafe { call(libc::SYS_clone, &NONE) };
    if child == 0 {
        let no_core = [libc::PR_SET_DUMPABLE as usize, 0, 0, 0, 0, 0];
        // SAFETY: as above. Calls fail for invalid arguments.
        unsafe { call(libc::SYS_prctl, &no_core) };
        if let Some((number, arguments)) = filter {
            // SAFETY: the caller's promise.
            unsafe { call(number, &arguments) };
        }
        for ((number, _, ways), at) in all().zip(1..).skip(first as usize) {
            findings.tried.store(at, Ordering::Relaxed);
            let refusals = [-(libc::EPERM as isize), -(libc::EACCES as isize)];
            // SAFETY: as above.
            let is_refused = |way: &[usize; 6]| refusals.contains(&unsafe { call(number, way) });
            // Each way is tried, even after a refused one.
            if ways.iter().filter(|way| is_refused(way)).count() > 0
                && NEVER_REFUSED.contains(&number)
            {
                findings.refused.fetch_or(1 << (at - 1), Ordering::Relaxed);
            }
        }
        findings.tried.store(u32::MAX, Ordering::Relaxed);
        loop {
            // SAFETY: the process ends.
            unsafe { call(libc::SYS_exit_group, &NONE) };
        }
    }
    if child > 0 {
        let wait = [child as usize, 0, libc::__WALL as usize, 0, 0, 0];
        // SAFETY: the call stores nothing.
        while unsafe { call(libc::SYS_wait4, &wait) } == -(libc::EINTR as isize) {}
    }
    set_mask(&before, std::ptr::null_mut());
    child > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = libc::SECCOMP_RET_KILL_PROCESS;

    fn statement(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt, jf, k }
    }

    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

    fn set(mut filter: Vec<libc::sock_filter>) {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the program is valid until the calls return.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let set =
                libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program);
            assert_eq!(set, 0);
        }
    }

    /// Sets a filter with this action for these calls of this thread and its children.
    fn filter(calls: &[c_long], action: u32) {
        let mut filter = vec![statement(LOAD, 0, 0, 0)];
        for (at, number) in calls.iter().enumerate() {
            let over = (calls.len() - at) as u8;
            filter.push(statement(
                libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
                over,
                0,
                *number as u32,
            ));
        }
        filter.push(statement(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
        filter.push(statement(RETURN, 0, 0, action));
        set(filter);
    }

    fn names(fatal: u64) -> Vec<&'static str> {
        all()
            .zip(0..)
            .filter(|(_, at)| fatal >> at & 1 != 0)
            .map(|((_, name, _), _)| name)
            .collect()
    }

    /// Sets a filter with this action for a call with one of these bits in an argument.
    fn filter_argument((number, at, bits): (c_long, u32, u32), action: u32) {
        set(vec![
            statement(LOAD, 0, 0, 0),
            statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 3, number as u32),
            statement(LOAD, 0, 0, 16 + 8 * at),
            statement(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 0, 1, bits),
            statement(RETURN, 0, 0, action),
            statement(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
        ]);
    }

    /// Options of systemd forbid calls by arguments unused by this project.
    #[test]
    fn a_filter_on_arguments_of_others_forbids_nothing() {
        const SPECIAL: u32 = libc::S_ISUID | libc::S_ISGID;
        let names_of = |rule, action| {
            let thread = std::thread::spawn(move || {
                filter_argument(rule, action);
                names(find_by_child(None))
            });
            thread.join().unwrap()
        };
        let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        for rule in [
            // MemoryDenyWriteExecute=
            (libc::SYS_mmap, 2, libc::PROT_EXEC as u32),
            (libc::SYS_mprotect, 2, libc::PROT_EXEC as u32),
            // RestrictNamespaces=
            (libc::SYS_clone, 0, (libc::CLONE_NEWUSER | libc::CLONE_NEWNET) as u32),
            // RestrictSUIDSGID=
            (libc::SYS_openat, 3, SPECIAL),
            // RestrictAddressFamilies=: netlink and packet sockets
            (libc::SYS_socket, 0, 16),
            (libc::SYS_memfd_create, 1, 8),
            (libc::SYS_ioctl, 1, 0x8000_0000),
            (libc::SYS_fcntl, 1, 0x8),
            (libc::SYS_setsockopt, 1, 0x100),
            (libc::SYS_prctl, 0, 0x40),
        ] {
            assert_eq!(names_of(rule, END), [""; 0], "{rule:?}");
            assert_eq!(names_of(rule, refuse), [""; 0], "{rule:?}");
        }
        // Arguments in use by a call here.
        let makes_files = (libc::SYS_openat, 2, libc::O_CREAT as u32);
        assert_eq!(names_of(makes_files, END), ["openat"]);
        // A way after the first tried one.
        let sets_flags = (libc::SYS_fcntl, 1, libc::F_SETFL as u32);
        assert_eq!(names_of(sets_flags, refuse), ["fcntl"]);
    }

    #[test]
    fn a_child_finds_what_a_filter_forbids() {
        assert!(all().count() < 63);
        assert_eq!(names(find_by_child(None)), [] as [&str; 0]);
        // A filter is the thread's, and ends with the thread.
        let thread = std::thread::spawn(|| {
            filter(&[libc::SYS_bpf, libc::SYS_ppoll, libc::SYS_futex_waitv], END);
            names(find_by_child(None))
        });
        assert_eq!(thread.join().unwrap(), ["bpf", "futex_waitv", "ppoll"]);
        // A dispensable call may be refused.
        let thread = std::thread::spawn(|| {
            let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
            filter(&[libc::SYS_bpf, libc::SYS_ppoll, libc::SYS_futex_waitv], refuse);
            names(find_by_child(None))
        });
        assert_eq!(thread.join().unwrap(), ["futex_waitv", "ppoll"]);
        // The child cannot begin.
        let thread = std::thread::spawn(|| {
            filter(&[libc::SYS_prctl], END);
            find_by_child(None)
        });
        assert_eq!(thread.join().unwrap(), ALL_FATAL);
    }
}
