// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What filters of system calls (seccomp(2)) do with the calls of this project.
//!
//! A filter may end the process for a call that its program does not make: `SystemCallFilter=` of
//! systemd does, unless the unit says otherwise. Nobody can read a filter, and a call that ends the
//! process cannot be tried. So a child tries all of them, with arguments that no call takes, and its
//! end says which. That happens once, and only in a process with filters.

use std::ffi::c_long;
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

/// Calls that this project can do without.
const OPTIONAL: [Call; 4] = calls! {
    SYS_bpf "bpf", SYS_seccomp "seccomp", SYS_io_uring_setup "io_uring_setup",
    SYS_futex_waitv "futex_waitv",
};

/// Calls without which no device is used.
const REQUIRED: &[Call] = &calls! {
    SYS_accept4 "accept4", SYS_bind "bind", SYS_connect "connect", SYS_dup3 "dup3",
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
    #[cfg(target_arch = "x86_64")] SYS_chmod "chmod",
    #[cfg(target_arch = "x86_64")] SYS_open "open",
    #[cfg(target_arch = "x86_64")] SYS_poll "poll",
    #[cfg(target_arch = "x86_64")] SYS_readlink "readlink",
    #[cfg(target_arch = "x86_64")] SYS_unlink "unlink",
};

/// Which of [`all`] end the process, a bit each; [`UNKNOWN`] before that was tried.
static FATAL: AtomicU64 = AtomicU64::new(UNKNOWN);
/// How many filters there were when that was tried.
static TRIED_WITH: AtomicI64 = AtomicI64::new(0);
/// See [`know_filters`].
static HARMLESS: AtomicU32 = AtomicU32::new(0);
const UNKNOWN: u64 = 1 << 63;
const ALL_FATAL: u64 = UNKNOWN - 1;

fn all() -> impl Iterator<Item = Call> {
    OPTIONAL.into_iter().chain(REQUIRED.iter().copied())
}

/// The first filters of this process, so many, are known to end it for none of these calls.
pub fn know_filters(number: u32) {
    HARMLESS.store(number, Ordering::Relaxed);
}

/// How many filters this process has; -1: some, and nobody knows how many.
fn filters() -> i64 {
    // SAFETY: the call has no further arguments.
    if unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) } == 0 {
        return 0;
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(-1)
}

/// Whether a filter ends the process for an optional call. Of others it says nothing.
pub fn is_fatal(number: c_long) -> bool {
    let fatal = match FATAL.load(Ordering::Acquire) {
        UNKNOWN => find(),
        fatal => fatal,
    };
    fatal != 0 && all().zip(0..).any(|((one, _), at)| one == number && fatal >> at & 1 != 0)
}

/// A call without which no device is used, if a filter ends the process for it. Filters that have come
/// since the last time are seen.
pub fn fatal_call() -> Option<&'static str> {
    let known = FATAL.load(Ordering::Acquire);
    let fatal = match known == UNKNOWN || TRIED_WITH.load(Ordering::Relaxed) != filters() {
        true => find(),
        false => known,
    };
    let names = all().zip(0..).skip(OPTIONAL.len());
    names.filter(|(_, at)| fatal >> at & 1 != 0).map(|((_, name), _)| name).next()
}

/// How many filters this process has, if they end it for no call.
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
    let fatal = if are_known { 0 } else { find_by_child() };
    TRIED_WITH.store(filters, Ordering::Relaxed);
    FATAL.store(fatal, Ordering::Release);
    fatal
}

/// The call that a child tries, from 1. Memory that it shares with its parent.
struct Progress(*mut AtomicU32);

impl Progress {
    fn new() -> Option<Progress> {
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: new memory.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), size_of::<u32>(), access, kind, -1, 0) };
        (at != libc::MAP_FAILED).then_some(Progress(at.cast()))
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: a page of zeros, until `self` is dropped.
        unsafe { &*self.0 }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // SAFETY: nothing else refers to the page.
        unsafe { libc::munmap(self.0.cast(), size_of::<u32>()) };
    }
}

/// Has children try all calls. A child that is ended leaves the rest to another.
fn find_by_child() -> u64 {
    let Some(progress) = Progress::new() else { return ALL_FATAL };
    let (mut fatal, mut next) = (0, 0);
    let number = all().count() as u32;
    while next < number {
        progress.word().store(next, Ordering::Relaxed);
        if !run_child(&progress, next) {
            return ALL_FATAL;
        }
        match progress.word().load(Ordering::Relaxed) {
            // It was ended before it tried anything.
            tried if tried <= next => return ALL_FATAL,
            tried if tried > number => break,
            tried => (fatal, next) = (fatal | 1 << (tried - 1), tried),
        }
    }
    fatal
}

/// Runs a child to its end. It is one that nobody else waits for, and it leaves no core. `false`: there
/// can be none.
fn run_child(progress: &Progress, first: u32) -> bool {
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
    // SAFETY: a child with a copy of the memory, and without a signal at its end. It makes system
    // calls only, of which none touches this process.
    let child = unsafe { call(libc::SYS_clone, &NONE) };
    if child == 0 {
        let no_core = [libc::PR_SET_DUMPABLE as usize, 0, 0, 0, 0, 0];
        // SAFETY: as above. Calls fail for arguments that lead nowhere.
        unsafe { call(libc::SYS_prctl, &no_core) };
        for ((number, _), at) in all().zip(1..).skip(first as usize) {
            progress.word().store(at, Ordering::Relaxed);
            // SAFETY: as above.
            unsafe { call(number, &NOTHING) };
        }
        progress.word().store(u32::MAX, Ordering::Relaxed);
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

    /// Has the kernel end the process if this thread, or a child of it, makes these calls.
    fn end_for(calls: &[c_long]) {
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
        filter.push(statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_KILL_PROCESS));
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
    fn a_child_finds_what_a_filter_ends_a_process_for() {
        assert!(all().count() < 63);
        assert_eq!(names(find_by_child()), [] as [&str; 0]);
        // A filter is the thread's, and ends with it.
        let thread = std::thread::spawn(|| {
            end_for(&[libc::SYS_bpf, libc::SYS_ppoll, libc::SYS_futex_waitv]);
            names(find_by_child())
        });
        assert_eq!(thread.join().unwrap(), ["bpf", "futex_waitv", "ppoll"]);
        // The child cannot begin.
        let thread = std::thread::spawn(|| {
            end_for(&[libc::SYS_prctl]);
            find_by_child()
        });
        assert_eq!(thread.join().unwrap(), ALL_FATAL);
    }
}
