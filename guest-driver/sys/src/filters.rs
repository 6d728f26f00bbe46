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

/// A system call, and its name.
type Call = (c_long, &'static str);

/// Gives calls their names.
macro_rules! calls {
    ($($(#[$on:meta])? $number:ident $name:literal,)*) => {
        [$($(#[$on])? (libc::$number, $name),)*]
    };
}

/// Calls that this project can do without. The last one not any more when a device is open.
const OPTIONAL: [Call; 4] = calls! {
    SYS_bpf "bpf", SYS_seccomp "seccomp", SYS_io_uring_setup "io_uring_setup",
    SYS_futex_waitv "futex_waitv",
};

/// Calls needed to use a device. Each has the flags, commands and kinds of its calls here, since a filter
/// may forbid others: `MemoryDenyWriteExecute=` of systemd forbids mmap with PROT_EXEC. Addresses and
/// descriptors are invalid, so the call changes only the child.
const REQUIRED: &[Call] = &calls! {
    SYS_clone "clone", SYS_accept4 "accept4", SYS_bind "bind", SYS_connect "connect",
    SYS_clock_nanosleep "clock_nanosleep", SYS_dup3 "dup3", SYS_epoll_pwait2 "epoll_pwait2",
    SYS_epoll_create1 "epoll_create1", SYS_epoll_ctl "epoll_ctl", SYS_epoll_pwait "epoll_pwait",
    SYS_eventfd2 "eventfd2", SYS_fcntl "fcntl", SYS_fstat "fstat", SYS_ftruncate "ftruncate",
    SYS_futex "futex", SYS_getdents64 "getdents64", SYS_getpeername "getpeername",
    SYS_getrandom "getrandom", SYS_getsockname "getsockname", SYS_getsockopt "getsockopt",
    SYS_ioctl "ioctl", SYS_kill "kill", SYS_listen "listen", SYS_madvise "madvise",
    SYS_memfd_create "memfd_create", SYS_mmap "mmap", SYS_mprotect "mprotect",
    SYS_munmap "munmap", SYS_openat "openat", SYS_ppoll "ppoll", SYS_prctl "prctl",
    SYS_pread64 "pread64", SYS_prlimit64 "prlimit64", SYS_readlinkat "readlinkat",
    SYS_recvfrom "recvfrom", SYS_recvmsg "recvmsg", SYS_rt_sigpending "rt_sigpending",
    SYS_rt_sigprocmask "rt_sigprocmask", SYS_sched_getaffinity "sched_getaffinity",
    SYS_sendmsg "sendmsg", SYS_sendto "sendto", SYS_set_robust_list "set_robust_list",
    SYS_setsockopt "setsockopt", SYS_shutdown "shutdown", SYS_socket "socket",
    SYS_socketpair "socketpair", SYS_statx "statx", SYS_tgkill "tgkill", SYS_unlinkat "unlinkat",
    SYS_wait4 "wait4",
    #[cfg(target_arch = "x86_64")] SYS_chmod "chmod",
    #[cfg(target_arch = "x86_64")] SYS_open "open",
    #[cfg(target_arch = "x86_64")] SYS_poll "poll",
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
    fatal != 0 && all().zip(0..).any(|((one, _), at)| one == number && fatal >> at & 1 != 0)
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

/// Number of filters of this process, if they end the process for no call.
pub fn harmless_filters() -> u32 {
    match FATAL.load(Ordering::Acquire) {
        UNKNOWN if find() != 0 => 0,
        UNKNOWN | 0 => filters().try_into().unwrap_or(0),
        _ => 0,
    }
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
    names.filter(|(_, at)| fatal >> at & 1 != 0).map(|((_, name), _)| name).next()
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
    /// No address, descriptor, process, size or flags.
    const NOTHING: [usize; 6] = [usize::MAX; 6];
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
        for ((number, _), at) in all().zip(1..).skip(first as usize) {
            findings.tried.store(at, Ordering::Relaxed);
            // SAFETY: as above.
            let result = unsafe { call(number, &NOTHING) };
            let is_refused = [-(libc::EPERM as isize), -(libc::EACCES as isize)].contains(&result);
            if is_refused && NEVER_REFUSED.contains(&number) {
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

    /// Has the kernel do this if this thread, or a child of it, makes these calls.
    fn filter(calls: &[c_long], action: u32) {
        let statement =
            |code: u32, jt: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf: 0, k };
        let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
        for (at, number) in calls.iter().enumerate() {
            let over = (calls.len() - at) as u8;
            filter.push(statement(
                libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
                over,
                *number as u32,
            ));
        }
        filter.push(statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW));
        filter.push(statement(libc::BPF_RET | libc::BPF_K, 0, action));
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the program is valid until the calls return.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let set =
                libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program);
            assert_eq!(set, 0);
        }
    }

    fn names(fatal: u64) -> Vec<&'static str> {
        all().zip(0..).filter(|(_, at)| fatal >> at & 1 != 0).map(|((_, name), _)| name).collect()
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
