// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System calls without libc, because this library replaces libc's functions.

use std::ffi::c_int;

use guest_driver::interpose::SignalMask;
use ism_sys::interrupt;

/// The number of an error, the same as in `errno`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) c_int);

/// Result of a system call.
pub(crate) type SysResult = Result<usize, Errno>;

/// Result of an interrupted call inside the library. The call begins again after a handler with
/// SA_RESTART.
pub(crate) const RESTART: Errno = Errno(512);

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Errno {
        use std::io::ErrorKind as K;
        Errno(error.raw_os_error().unwrap_or(match error.kind() {
            K::WouldBlock => libc::EAGAIN,
            K::BrokenPipe => libc::EPIPE,
            K::ConnectionReset => libc::ECONNRESET,
            K::ConnectionAborted => libc::ECONNABORTED,
            K::ConnectionRefused => libc::ECONNREFUSED,
            K::NotConnected => libc::ENOTCONN,
            K::TimedOut => libc::ETIMEDOUT,
            K::Interrupted => libc::EINTR,
            K::InvalidInput => libc::EINVAL,
            K::OutOfMemory => libc::ENOMEM,
            _ => libc::ECONNRESET,
        }))
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(error: rustix::io::Errno) -> Errno {
        Errno(error.raw_os_error())
    }
}

/// Makes a system call.
///
/// # Safety
/// Arguments with addresses must be valid for the system call.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) unsafe fn call(number: i64, a: [usize; 6]) -> SysResult {
    ism_sys::may_delay();
    let result: isize;
    // SAFETY: the caller's promise; the kernel clobbers rcx and r11 only.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") number as isize => result,
            in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
            in("r10") a[3], in("r8") a[4], in("r9") a[5],
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    done(result)
}

/// Makes a system call.
///
/// # Safety
/// Arguments with addresses must be valid for the system call.
#[cfg(target_arch = "aarch64")]
#[inline]
pub(crate) unsafe fn call(number: i64, a: [usize; 6]) -> SysResult {
    ism_sys::may_delay();
    let result: isize;
    // SAFETY: the caller's promise; the kernel keeps all registers but x0.
    unsafe {
        std::arch::asm!("svc 0", in("x8") number, inlateout("x0") a[0] => result,
            in("x1") a[1], in("x2") a[2], in("x3") a[3], in("x4") a[4], in("x5") a[5],
            options(nostack));
    }
    done(result)
}

#[inline]
fn done(result: isize) -> SysResult {
    match result {
        -4095..=-1 => Err(Errno((-result) as c_int)),
        value => Ok(value as usize),
    }
}

/// Defines a system call with numbers as its only arguments.
macro_rules! numbers {
    ($(#[$doc:meta])* $name:ident = $number:ident ($($arg:ident),*)) => {
        $(#[$doc])*
        pub(crate) fn $name($($arg: c_int),*) -> SysResult {
            let mut all = [0usize; 6];
            let given = [$($arg as isize as usize),*];
            all.iter_mut().zip(given).for_each(|(slot, value)| *slot = value);
            // SAFETY: no argument of this call is an address.
            unsafe { call(libc::$number, all) }
        }
    };
}

numbers!(
    /// `close`.
    close = SYS_close(fd));
numbers!(
    /// `fcntl` with a number.
    fcntl = SYS_fcntl(fd, command, argument));
numbers!(
    /// `dup3`.
    dup3 = SYS_dup3(old, new, flags));
numbers!(
    /// `close_range`.
    close_range = SYS_close_range(first, last, flags));
numbers!(
    /// `exit_group`.
    exit_group = SYS_exit_group(status));
numbers!(
    /// `epoll_create1`.
    epoll_create1 = SYS_epoll_create1(flags));

/// Whether the process may make changed instructions executable (PR_SET_MDWE).
pub(crate) fn may_change_instructions() -> bool {
    const PR_GET_MDWE: usize = 66;
    // SAFETY: numbers only. An older kernel does not know the call, and has no such prohibition.
    unsafe { call(libc::SYS_prctl, [PR_GET_MDWE, 0, 0, 0, 0, 0]) }.unwrap_or(0) == 0
}

/// The process in which a call of [`fork_apart`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForkResult {
    /// The calling process.
    Parent,
    /// The new process.
    Child,
}

/// Makes a process with a copy of this process's memory and the calling thread, with all signals
/// blocked. The new process is no child of this process: an intermediate process makes the new one and
/// exits at once. No handlers of libc run, and no process gets a signal.
pub(crate) fn fork_apart() -> Result<ForkResult, Errno> {
    let all = u64::MAX;
    let mut old = 0u64;
    let (new, before) = (std::ptr::addr_of!(all) as usize, std::ptr::addr_of_mut!(old) as usize);
    let set = libc::SIG_SETMASK as usize;
    // SAFETY: both words are valid until the call returns.
    unsafe { call(libc::SYS_rt_sigprocmask, [set, new, before, 8, 0, 0]) }?;
    // SAFETY: the child goes on with a copy of this stack. Without a signal number the parent gets no
    // signal at the child's end.
    let forked = match unsafe { call(libc::SYS_clone, [0; 6]) } {
        // SAFETY: as above.
        Ok(0) => match unsafe { call(libc::SYS_clone, [0; 6]) } {
            Ok(0) => return Ok(ForkResult::Child),
            result => loop {
                let _ = exit_group(c_int::from(result.is_err()));
            },
        },
        Ok(child) => {
            let options = (libc::__WALL) as usize;
            // SAFETY: the call stores no status.
            while unsafe { call(libc::SYS_wait4, [child, 0, options, 0, 0, 0]) }
                == Err(Errno(libc::EINTR))
            {}
            Ok(ForkResult::Parent)
        }
        Err(error) => Err(error),
    };
    // SAFETY: as above.
    let _ = unsafe { call(libc::SYS_rt_sigprocmask, [set, before, 0, 8, 0, 0]) };
    forked
}

/// The error of a system call in a copy of this process. The copy has only the calling thread and exits
/// after the call. `None`: the call succeeds there, or there can be no copy.
pub(crate) fn error_in_copy(call: impl Fn() -> SysResult) -> Option<Errno> {
    let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok()?;
    let mut error = [0u8; size_of::<c_int>()];
    match fork_apart().ok()? {
        ForkResult::Child => loop {
            let failed = call().err().map_or(0, |error| error.0);
            let _ = rustix::io::write(&theirs, &failed.to_ne_bytes());
            let _ = exit_group(0);
        },
        ForkResult::Parent => {
            drop(theirs);
            let _ = rustix::io::read(ours, &mut error);
        }
    }
    Some(Errno(c_int::from_ne_bytes(error))).filter(|error| error.0 != 0)
}

/// Lets SIGTERM end this process, with all other signals blocked. The program's handler does not run.
pub(crate) fn allow_termination() {
    // The kernel's struct: handler, flags, restorer, mask.
    let default = [libc::SIG_DFL, 0, 0, 0];
    let signal = libc::SIGTERM as usize;
    let only: u64 = 1 << (libc::SIGTERM - 1);
    let (action, set) = (std::ptr::addr_of!(default) as usize, std::ptr::addr_of!(only) as usize);
    // SAFETY: action and set are valid until the calls return.
    unsafe {
        let _ = call(libc::SYS_rt_sigaction, [signal, action, 0, 8, 0, 0]);
        let _ = call(libc::SYS_rt_sigprocmask, [libc::SIG_UNBLOCK as usize, set, 0, 8, 0, 0]);
    }
}

/// The process id. Unlike a cached id, valid in the child of a fork.
pub(crate) fn getpid() -> c_int {
    // SAFETY: the call has no arguments and cannot fail.
    unsafe { call(libc::SYS_getpid, [0; 6]) }.map_or(0, |pid| pid as c_int)
}

/// A number of the calling thread, the same in the child of a fork.
pub(crate) fn this_thread() -> usize {
    // SAFETY: the call has no arguments and cannot fail.
    unsafe { libc::pthread_self() as usize }
}

/// Number of running threads of the program; 2 stands for more. Other threads of the process are the
/// library's, according to their names.
pub(crate) fn threads_of_program() -> usize {
    ism_sys::await_names_of_threads();
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return 1 };
    let stat_of = |thread: &std::path::Path| std::fs::read_to_string(thread.join("stat"));
    // The name in parentheses.
    let name_of = |stat: &str| {
        let name = stat.split_once(" (").and_then(|(_, name)| name.rsplit_once(") "));
        name.map_or_else(String::new, |(name, _)| name.to_owned())
    };
    // The program's own name, inherited by its threads, may look like a library thread's.
    let first = stat_of("/proc/self".as_ref()).map(|stat| name_of(&stat)).unwrap_or_default();
    let is_programs = |thread: &std::fs::DirEntry| {
        let stat = stat_of(&thread.path()).unwrap_or_default();
        let name = name_of(&stat);
        // A letter for the state.
        let state = stat.rsplit_once(") ").map_or("", |(_, state)| state);
        let has_ended = state.is_empty() || state.starts_with(['Z', 'X']);
        let is_ours = name.starts_with("smc-") || name.starts_with("ism-");
        !has_ended && (!is_ours || name == first)
    };
    threads.flatten().filter(is_programs).take(2).count()
}

/// Whether the calling thread is the first one of its process.
pub(crate) fn is_first_thread() -> bool {
    // SAFETY: the call has no arguments.
    unsafe { call(libc::SYS_gettid, [0; 6]) }.is_ok_and(|id| id as c_int == getpid())
}

/// Whether another process has the same table of descriptors; an error if the kernel does not tell.
pub(crate) fn shares_descriptors_with(pid: c_int) -> Result<bool, Errno> {
    const KCMP_FILES: usize = 2;
    let args = [getpid() as usize, pid as usize, KCMP_FILES, 0, 0, 0];
    // SAFETY: numbers only.
    unsafe { call(libc::SYS_kcmp, args) }.map(|order| order == 0)
}

/// Sends SIGPIPE to the calling thread, like a write on a closed connection.
pub(crate) fn raise_sigpipe() {
    // SAFETY: the arguments are numbers; the signal goes to the calling thread.
    unsafe {
        let thread = call(libc::SYS_gettid, [0; 6]).unwrap_or(0);
        let _ =
            call(libc::SYS_tgkill, [getpid() as usize, thread, libc::SIGPIPE as usize, 0, 0, 0]);
    }
}

/// Sends a signal to a thread of this process.
pub(crate) fn signal_thread(thread: c_int, signal: c_int) -> SysResult {
    let args = [getpid() as usize, thread as usize, signal as usize, 0, 0, 0];
    // SAFETY: numbers only.
    unsafe { call(libc::SYS_tgkill, args) }
}

/// Sends a signal to the calling thread, with the address of the kernel's information.
pub(crate) fn signal_this_thread(signal: c_int, info: Option<usize>) {
    // SAFETY: the call has no arguments.
    let thread = unsafe { call(libc::SYS_gettid, [0; 6]) }.unwrap_or(0);
    if let Some(info) = info {
        let args = [getpid() as usize, thread, signal as usize, info, 0, 0];
        // SAFETY: the kernel has written the words of the signal there.
        if unsafe { call(libc::SYS_rt_tgsigqueueinfo, args) }.is_ok() {
            return;
        }
    }
    let _ = signal_thread(thread as c_int, signal);
}

/// Blocks a signal for the calling thread.
pub(crate) fn block_signal(signal: c_int) {
    let only: u64 = 1 << (signal - 1);
    let args = [libc::SIG_BLOCK as usize, (&raw const only) as usize, 0, 8, 0, 0];
    // SAFETY: the set is valid until the call returns.
    let _ = unsafe { call(libc::SYS_rt_sigprocmask, args) };
}

/// Whether another thread of this process has sent a signal.
///
/// # Safety
/// `info` is the kernel's argument of a handler.
pub(crate) unsafe fn is_from_this_process(info: *const libc::siginfo_t) -> bool {
    const SI_TKILL: c_int = -6;
    // SAFETY: the caller's promise.
    unsafe { (*info).si_code == SI_TKILL && (*info).si_pid() == getpid() }
}

/// The kernel's handler and flags of a signal.
pub(crate) fn action_of(signal: c_int) -> Option<[usize; 2]> {
    // The kernel's struct: handler, flags, restorer, mask.
    let mut action = [0usize; 4];
    let at = action.as_mut_ptr() as usize;
    // SAFETY: there is room for the kernel's struct of four words.
    unsafe { call(libc::SYS_rt_sigaction, [signal as usize, 0, at, 8, 0, 0]) }.ok()?;
    Some([action[0], action[1]])
}

// Returns from a handler. Unwinders recognize these instructions, as long as there is no unwind
// information for the instructions or for the byte before.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .text.smc_restore,\"ax\",@progbits",
    ".balign 16",
    "nop",
    ".globl smc_restore",
    ".hidden smc_restore",
    "smc_restore:",
    "mov rax, 15",
    "syscall",
    ".popsection",
);
#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    fn smc_restore();
}

/// The kernel's action of a signal with a handler: handler, flags, restorer, mask.
pub(crate) fn action(handler: usize, flags: c_int, mask: u64) -> [usize; 4] {
    #[cfg(target_arch = "x86_64")]
    const SA_RESTORER: usize = 0x0400_0000;
    #[cfg(target_arch = "x86_64")]
    let (flags, restorer) = (flags as usize | SA_RESTORER, smc_restore as *const () as usize);
    #[cfg(not(target_arch = "x86_64"))]
    let (flags, restorer) = (flags as usize, 0);
    [handler, flags, restorer, mask as usize]
}

/// Sets the kernel's action of a signal. Returns the old action.
pub(crate) fn set_action(signal: c_int, action: &[usize; 4]) -> Option<[usize; 4]> {
    let mut before = [0usize; 4];
    let (new, old) = (action.as_ptr() as usize, before.as_mut_ptr() as usize);
    // SAFETY: both are valid until the call returns.
    unsafe { call(libc::SYS_rt_sigaction, [signal as usize, new, old, 8, 0, 0]) }.ok()?;
    Some(before)
}

/// Sets the kernel's handler of a signal, with the flags and the mask as they are.
pub(crate) fn set_handler_again(signal: c_int, handler: usize) {
    let mut action = [0usize; 4];
    let at = action.as_mut_ptr() as usize;
    // SAFETY: there is room for the kernel's struct of four words.
    if unsafe { call(libc::SYS_rt_sigaction, [signal as usize, 0, at, 8, 0, 0]) }.is_ok() {
        action[0] = handler;
        set_action(signal, &action);
    }
}

/// Replaces the kernel's handler of a signal. Returns the old handler.
pub(crate) fn replace_handler(signal: c_int, handler: usize, flags: c_int) -> Option<usize> {
    set_action(signal, &action(handler, flags, 0)).map(|[before, ..]| before)
}

/// One `epoll_ctl`.
pub(crate) fn epoll_ctl(set: c_int, op: c_int, fd: c_int, events: u32, data: u64) -> SysResult {
    let event = libc::epoll_event { events, u64: data };
    let event = std::ptr::addr_of!(event) as usize;
    // SAFETY: the event is valid until the call returns.
    unsafe { call(libc::SYS_epoll_ctl, [set as usize, op as usize, fd as usize, event, 0, 0]) }
}

/// `ppoll`.
pub(crate) fn ppoll(
    fds: &mut [libc::pollfd],
    timeout: Option<&libc::timespec>,
    mask: Option<SignalMask>,
) -> SysResult {
    // The kernel writes the remaining time into its copy.
    let mut left = timeout.copied();
    let time = left.as_mut().map_or(0, |time| std::ptr::from_mut(time) as usize);
    let list = fds.as_mut_ptr() as usize;
    let mask = mask.as_ref().map_or(0, |mask| std::ptr::from_ref(&mask.0) as usize);
    let args = [list, fds.len(), time, mask, 8, 0];
    if timeout.is_some_and(|timeout| timeout.tv_sec == 0 && timeout.tv_nsec == 0) {
        // SAFETY: list, time and mask are valid until the call returns.
        return unsafe { call(libc::SYS_ppoll, args) };
    }
    // SAFETY: as above.
    unsafe { sleep(libc::SYS_ppoll, args) }
}

/// Makes a system call with a sleep. Any signal ends the sleep, independent of the handler's flags.
/// With a deferred signal the call does not begin.
///
/// # Safety
/// As [`call`].
pub(crate) unsafe fn sleep(number: i64, args: [usize; 6]) -> SysResult {
    // SAFETY: the caller's promise.
    done(interrupt::listening(|| unsafe { interrupt::sleep_call(number, &args) }))
}

/// `read` into memory of the library.
pub(crate) fn read(fd: c_int, buf: &mut [u8]) -> SysResult {
    let at = buf.as_mut_ptr() as usize;
    // SAFETY: the slice is valid for its length.
    unsafe { call(libc::SYS_read, [fd as usize, at, buf.len(), 0, 0, 0]) }
}

/// `pread` into memory of the library.
pub(crate) fn pread(fd: c_int, buf: &mut [u8], offset: i64) -> SysResult {
    let at = buf.as_mut_ptr() as usize;
    // SAFETY: the slice is valid for its length.
    unsafe { call(libc::SYS_pread64, [fd as usize, at, buf.len(), offset as usize, 0, 0]) }
}

/// `write` from memory of the library.
pub(crate) fn write(fd: c_int, buf: &[u8]) -> SysResult {
    let at = buf.as_ptr() as usize;
    // SAFETY: the slice is valid for its length.
    unsafe { call(libc::SYS_write, [fd as usize, at, buf.len(), 0, 0, 0]) }
}

/// Capacity of a pipe in bytes; EINVAL if the descriptor is no pipe.
pub(crate) fn pipe_size(pipe: c_int) -> SysResult {
    match fcntl(pipe, libc::F_GETPIPE_SZ, 0) {
        Err(_) if fcntl(pipe, libc::F_GETFD, 0).is_ok() => Err(Errno(libc::EINVAL)),
        size => size,
    }
}

/// The number returned by a request of `ioctl`.
fn number_of(fd: c_int, request: usize) -> SysResult {
    let mut number: c_int = 0;
    let at = std::ptr::from_mut(&mut number) as usize;
    // SAFETY: the number is valid until the call returns.
    unsafe { call(libc::SYS_ioctl, [fd as usize, request, at, 0, 0, 0]) }.map(|_| number as usize)
}

/// Bytes queued in a pipe or a socket (FIONREAD).
pub(crate) fn queued_bytes(fd: c_int) -> SysResult {
    number_of(fd, libc::FIONREAD as usize)
}

/// Memory of bytes written to a Unix socket and not read (TIOCOUTQ); 0: all bytes were read.
pub(crate) fn unread_bytes(fd: c_int) -> SysResult {
    number_of(fd, libc::TIOCOUTQ as usize)
}

/// Whether the next byte of a socket is urgent (SIOCATMARK).
pub(crate) fn is_at_mark(fd: c_int) -> bool {
    const SIOCATMARK: usize = 0x8905;
    number_of(fd, SIOCATMARK).is_ok_and(|at_mark| at_mark != 0)
}

/// Whether there is no memory at an address.
#[cold]
pub(crate) fn is_unmapped(at: usize) -> bool {
    // Nothing is mapped in the first page, nor in the kernel's half.
    if !(0x1000..=usize::MAX / 2).contains(&at) {
        return true;
    }
    let page = at - at % ism_sys::page_size();
    // SAFETY: the call only checks the address, since Linux 2.6.19.
    let asked = unsafe { call(libc::SYS_msync, [page, 1, libc::MS_ASYNC as usize, 0, 0, 0]) };
    asked == Err(Errno(libc::ENOMEM))
}

/// Maps a page of zeros shared by this process with its forked children. The page is never unmapped.
pub(crate) fn shared_page() -> Option<*mut u8> {
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    let len = ism_sys::page_size();
    let args = [0, len, access as usize, kind as usize, usize::MAX, 0];
    // SAFETY: the kernel chooses an unused address.
    let page = unsafe { call(libc::SYS_mmap, args) }.ok()?;
    Some(page as *mut u8)
}

/// Maps a page of zeros, cleared by the kernel in the child of a fork. The page is never unmapped.
/// `None`: the kernel lacks MADV_WIPEONFORK.
pub(crate) fn page_cleared_in_children() -> Option<*mut u8> {
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let len = ism_sys::page_size();
    let args = [0, len, access as usize, kind as usize, usize::MAX, 0];
    // SAFETY: the kernel chooses an unused address.
    let page = unsafe { call(libc::SYS_mmap, args) }.ok()?;
    let advice = libc::MADV_WIPEONFORK as usize;
    // SAFETY: the page is this function's own, and still unwritten.
    unsafe { call(libc::SYS_madvise, [page, len, advice, 0, 0, 0]) }.ok()?;
    Some(page as *mut u8)
}

/// Microseconds since the machine's start.
pub(crate) fn monotonic_micros() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // libc's function, because of its speed without a system call.
    // SAFETY: `now` is valid until the call returns.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    (now.tv_sec as u64).saturating_mul(1_000_000) + now.tv_nsec as u64 / 1000
}

/// `getsockopt` of an option with a number.
pub(crate) fn socket_option(fd: c_int, level: c_int, name: c_int) -> Result<c_int, Errno> {
    let mut value: c_int = 0;
    let mut len: libc::socklen_t = 4;
    let (at, room) = (std::ptr::from_mut(&mut value), std::ptr::from_mut(&mut len));
    let args = [fd as usize, level as usize, name as usize, at as usize, room as usize, 0];
    // SAFETY: both are valid until the call returns.
    unsafe { call(libc::SYS_getsockopt, args) }.map(|_| value)
}

/// `setsockopt` of an option with a number. A failure leaves the option unchanged.
pub(crate) fn set_socket_option(fd: c_int, level: c_int, name: c_int, value: c_int) {
    let at = std::ptr::from_ref(&value) as usize;
    let args = [fd as usize, level as usize, name as usize, at, 4, 0];
    // SAFETY: the value is valid until the call returns.
    let _ = unsafe { call(libc::SYS_setsockopt, args) };
}

/// The read or write timeout of a socket, microseconds; 0: none.
pub(crate) fn timeout_of(fd: c_int, name: c_int) -> u64 {
    let mut value = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut len = std::mem::size_of::<libc::timeval>() as libc::socklen_t;
    let (at, room) = (std::ptr::from_mut(&mut value), std::ptr::from_mut(&mut len));
    let args =
        [fd as usize, libc::SOL_SOCKET as usize, name as usize, at as usize, room as usize, 0];
    // SAFETY: both are valid until the call returns.
    match unsafe { call(libc::SYS_getsockopt, args) } {
        Ok(_) => (value.tv_sec as u64).saturating_mul(1_000_000) + value.tv_usec as u64,
        Err(_) => 0,
    }
}

/// TCP_INFO of a socket, if the kernel fills at least `least` bytes.
fn tcp_info(fd: c_int, least: usize) -> Option<[u64; 32]> {
    let mut info = [0u64; 32];
    let mut len = std::mem::size_of_val(&info) as libc::socklen_t;
    let (at, room) = (info.as_mut_ptr() as usize, std::ptr::from_mut(&mut len) as usize);
    let args = [fd as usize, libc::IPPROTO_TCP as usize, libc::TCP_INFO as usize, at, room, 0];
    // SAFETY: both are valid until the call returns, and the kernel writes no more than `len`
    // bytes.
    unsafe { call(libc::SYS_getsockopt, args) }.ok()?;
    (len as usize >= least).then_some(info)
}

/// Whether a TCP socket is in the state CLOSE: not connecting yet, or no more.
pub(crate) fn is_closed_tcp(fd: c_int) -> bool {
    const TCP_CLOSE: u8 = 7;
    tcp_info(fd, 8).is_some_and(|info| info[0].to_ne_bytes()[0] == TCP_CLOSE)
}

/// Whether a TCP connection has carried any bytes.
pub(crate) fn has_moved_bytes(fd: c_int) -> Option<bool> {
    let info = tcp_info(fd, 136)?;
    // tcpi_bytes_acked and tcpi_bytes_received; the SYN may count as one.
    Some(info[15] > 1 || info[16] > 0)
}

/// Bytes received by a TCP connection. The end of data counts as one.
pub(crate) fn received_bytes(fd: c_int) -> Option<u64> {
    // tcpi_bytes_received
    tcp_info(fd, 136).map(|info| info[16])
}

/// Whether a TCP connection has sent or received a segment with data.
pub(crate) fn has_data_segments(fd: c_int) -> bool {
    // tcpi_data_segs_in and tcpi_data_segs_out.
    tcp_info(fd, 160).is_some_and(|info| info[19] != 0)
}

/// Bytes carried by a TCP connection, both directions together, and the maximum number of turns between
/// the two ends.
pub(crate) fn tcp_traffic(fd: c_int) -> Option<(u64, u64)> {
    let info = tcp_info(fd, 160)?;
    // tcpi_data_segs_in and tcpi_data_segs_out.
    let segments = [info[19] & u64::from(u32::MAX), info[19] >> 32];
    Some((info[15].saturating_add(info[16]), segments[0].min(segments[1])))
}

/// Resets a TCP connection (RST). The socket is unconnected afterwards.
pub(crate) fn disconnect(fd: c_int) {
    // SAFETY: an all-zero address is of family AF_UNSPEC.
    let nowhere: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    let at = std::ptr::addr_of!(nowhere) as usize;
    let len = std::mem::size_of_val(&nowhere);
    // SAFETY: the address is valid until the call returns.
    let _ = unsafe { call(libc::SYS_connect, [fd as usize, at, len, 0, 0, 0]) };
}

/// Blocks the program's signals in the calling thread while `f` runs. Threads that `f` starts
/// inherit the blocked signals.
pub(crate) fn without_signals<T>(f: impl FnOnce() -> T) -> T {
    blocking_signals(|_| f())
}

/// Variant of [`without_signals`]; `f` gets the set of signals blocked by the program.
pub(crate) fn blocking_signals<T>(f: impl FnOnce(SignalMask) -> T) -> T {
    let mut blocked = SignalGuard::none();
    blocked.block();
    f(blocked.0.unwrap_or(SignalMask(0)))
}

/// Blocks the program's signals until dropped.
#[derive(Debug)]
pub(crate) struct SignalGuard(Option<SignalMask>);

impl SignalGuard {
    /// Not blocked yet.
    pub(crate) const fn none() -> SignalGuard {
        SignalGuard(None)
    }

    /// Blocks the signals.
    pub(crate) fn block(&mut self) {
        self.0 = self.0.or_else(block_signals);
    }

    /// The mask for a sleep of the thread, if different from the present mask. `wanted`: the mask of
    /// the program's call.
    pub(crate) fn mask(&self, wanted: Option<SignalMask>) -> Option<SignalMask> {
        wanted.or(self.0)
    }
}

impl Drop for SignalGuard {
    fn drop(&mut self) {
        if let Some(mask) = self.0 {
            restore_signals(mask);
        }
    }
}

/// Blocks the program's signals. Returns the set of signals blocked by the program.
fn block_signals() -> Option<SignalMask> {
    // The two signals of libc stay unblocked: setuid must reach all threads.
    let all: u64 = !(0b11 << 31);
    let mut old = 0u64;
    let (new, before) = (std::ptr::addr_of!(all) as usize, std::ptr::addr_of_mut!(old) as usize);
    // SAFETY: both words are valid until the call returns.
    let blocked = unsafe {
        call(libc::SYS_rt_sigprocmask, [libc::SIG_SETMASK as usize, new, before, 8, 0, 0])
    };
    blocked.is_ok().then_some(SignalMask(old))
}

/// Undoes [`block_signals`].
fn restore_signals(SignalMask(mask): SignalMask) {
    let before = std::ptr::addr_of!(mask) as usize;
    // SAFETY: the word is valid until the call returns.
    let _ =
        unsafe { call(libc::SYS_rt_sigprocmask, [libc::SIG_SETMASK as usize, before, 0, 8, 0, 0]) };
}

/// Whether the program has a signal handler without SA_RESTART.
pub(crate) fn signals_interrupt() -> bool {
    // Signals of faults interrupt no call, and two signals are libc's own.
    let faults = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP];
    let others =
        |signal: &usize| !faults.contains(&(*signal as c_int)) && !(32..34).contains(signal);
    (1..=64usize).filter(others).any(interrupts)
}

/// Whether a pending signal ends a waiting call: the handler runs only after the call, or does not
/// restart calls.
pub(crate) fn signals_end_call() -> bool {
    interrupt::is_deferred() || signals_interrupt()
}

/// Whether a signal is pending, not blocked by the program, with a handler without SA_RESTART.
pub(crate) fn is_interrupted(blocked: SignalMask) -> bool {
    let mut pending = 0u64;
    let at = std::ptr::from_mut(&mut pending) as usize;
    // SAFETY: the word is valid until the call returns.
    let asked = unsafe { call(libc::SYS_rt_sigpending, [at, 8, 0, 0, 0, 0]) };
    let pending = if asked.is_ok() { pending & !blocked.0 } else { 0 };
    (1..=64usize).filter(|signal| pending >> (signal - 1) & 1 != 0).any(interrupts)
}

/// Whether a signal has a handler without SA_RESTART.
fn interrupts(signal: usize) -> bool {
    // The kernel's struct: handler, flags, restorer, mask.
    let mut action = [0usize; 4];
    let at = action.as_mut_ptr() as usize;
    // SAFETY: there is room for the kernel's struct of four words.
    let asked = unsafe { call(libc::SYS_rt_sigaction, [signal, 0, at, 8, 0, 0]) };
    let handled = action[0] != libc::SIG_DFL && action[0] != libc::SIG_IGN;
    asked.is_ok() && handled && action[1] & libc::SA_RESTART as usize == 0
}
