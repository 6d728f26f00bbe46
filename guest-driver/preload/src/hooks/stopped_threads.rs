// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The library's threads end for a call that the kernel allows to a process with one thread only, and
//! go on after it, where they were.
//!
//! The program's only thread sends libc's signal for all threads (SIGSETXID) to each thread of the
//! library; nobody else can send it meanwhile. The handler notes where its thread is, and ends it by
//! the kernel's call: nothing unwinds, and the stack stays as it is. After the call each thread is
//! made again on its stack and with its thread-local memory, and returns from the handler. So it goes
//! on in what the signal has interrupted, as after any other handler.
//!
//! A thread of the library may hold a lock while it does not exist. So the program's thread makes
//! system calls only and takes no memory.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use libc::siginfo_t;
use rustix::fs::{Mode, OFlags, RawDir, SeekFrom};

use crate::sys::raw::{self, SysResult};

/// The signal by which libc has all threads change their user.
const SIGSETXID: c_int = 33;
/// How long a thread may take until it ends.
const LIMIT_MICROS: u64 = 1_000_000;
/// Pause between two looks.
const PAUSE_NANOS: i64 = 100_000;

/// What libc's threads share with each other.
const SHARED: c_int = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM;

/// What is known of a thread that has ended.
#[derive(Debug)]
struct StoppedThread {
    /// [`FREE`], [`NOTED`], [`FAILED`] or [`RUNS`].
    state: AtomicU32,
    /// Not zero until the thread has left its stack. The kernel clears it.
    on_stack: AtomicU32,
    /// Where the kernel has put what it needs to return from the handler.
    frame: AtomicUsize,
    /// The thread-local memory.
    tls: AtomicUsize,
    /// Where libc has the number of the thread.
    tid_address: AtomicUsize,
    /// The list of robust locks, and its size.
    robust_list: [AtomicUsize; 2],
    /// The area of restartable sequences. 0: there is none.
    rseq: AtomicUsize,
    /// The kernel has agreed to leave that area.
    left_rseq: AtomicBool,
    name: [AtomicU64; 2],
}

/// Nobody has taken the place.
const FREE: u32 = 0;
/// The thread ends, or has ended.
const NOTED: u32 = 1;
/// The thread goes on, because something about it is not known.
const FAILED: u32 = 2;
/// The thread was made again.
const RUNS: u32 = 3;

impl StoppedThread {
    const fn none() -> StoppedThread {
        StoppedThread {
            state: AtomicU32::new(FREE),
            on_stack: AtomicU32::new(0),
            frame: AtomicUsize::new(0),
            tls: AtomicUsize::new(0),
            tid_address: AtomicUsize::new(0),
            robust_list: [const { AtomicUsize::new(0) }; 2],
            rseq: AtomicUsize::new(0),
            left_rseq: AtomicBool::new(false),
            name: [const { AtomicU64::new(0) }; 2],
        }
    }
}

/// So many threads can be stopped.
const MOST: usize = 64;
static THREADS: [StoppedThread; MOST] = [const { StoppedThread::none() }; MOST];
/// The next free place; [`CLOSED`] or more: no thread is to stop.
static NEXT: AtomicUsize = AtomicUsize::new(CLOSED);
const CLOSED: usize = 1 << 32;

/// Where the area of restartable sequences is, from the thread-local memory on. 0: libc has none.
static RSEQ_OFFSET: AtomicUsize = AtomicUsize::new(0);
const RSEQ_SIZE: usize = 32;
/// What stands before the code that the kernel jumps to.
#[cfg(target_arch = "x86_64")]
const RSEQ_SIGNATURE: usize = 0x5305_3053;
#[cfg(target_arch = "aarch64")]
const RSEQ_SIGNATURE: usize = 0xd428_bc00;

/// Makes a call while the process has the calling thread only, which is the program's and the first.
/// `None`: the library's threads could not be stopped, or not be made again, and no call was made.
pub(super) fn alone(call: impl FnOnce() -> SysResult) -> Option<SysResult> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let tasks = rustix::fs::open(c"/proc/self/task", flags, Mode::empty()).ok()?;
    if !raw::is_first_thread() || has_shadow_stacks() {
        return None;
    }
    RSEQ_OFFSET.store(rseq_offset(), Ordering::Relaxed);
    let mask = set_mask(u64::MAX)?;
    // No lock is taken and no memory from here on.
    let result = can_make_threads().then(|| {
        let flags = libc::SA_SIGINFO | libc::SA_RESTART;
        let own = raw::action(stop as *const () as usize, flags, u64::MAX);
        let libcs = raw::set_action(SIGSETXID, &own)?;
        let is_alone = stop_all(&tasks);
        let result = is_alone.then(call);
        let noted = close();
        // A signal that is still on its way would have libc's handler look for a user.
        raw::set_action(SIGSETXID, &[libc::SIG_IGN, 0, 0, 0]);
        THREADS.iter().take(noted).for_each(start);
        THREADS.iter().take(noted).for_each(await_start);
        raw::set_action(SIGSETXID, &libcs);
        result
    });
    set_mask(mask);
    result.flatten()
}

/// Sets the signal mask of the thread, libc's signals included. Returns the one before.
fn set_mask(mask: u64) -> Option<u64> {
    let mut before = 0u64;
    let (new, old) = ((&raw const mask) as usize, (&raw mut before) as usize);
    let args = [libc::SIG_SETMASK as usize, new, old, 8, 0, 0];
    // SAFETY: both words are valid until the call returns.
    unsafe { raw::call(libc::SYS_rt_sigprocmask, args) }.ok().map(|_| before)
}

/// Whether functions return by a stack of their own, which a new thread does not have.
#[cfg(target_arch = "x86_64")]
fn has_shadow_stacks() -> bool {
    const ARCH_SHSTK_STATUS: usize = 0x5005;
    let mut status = 0u64;
    let args = [ARCH_SHSTK_STATUS, (&raw mut status) as usize, 0, 0, 0, 0];
    // SAFETY: the word is valid until the call returns.
    unsafe { raw::call(libc::SYS_arch_prctl, args) }.is_ok() && status != 0
}

#[cfg(target_arch = "aarch64")]
fn has_shadow_stacks() -> bool {
    const PR_GET_SHADOW_STACK_STATUS: usize = 74;
    let mut status = 0u64;
    let args = [PR_GET_SHADOW_STACK_STATUS, (&raw mut status) as usize, 0, 0, 0, 0];
    // SAFETY: the word is valid until the call returns.
    unsafe { raw::call(libc::SYS_prctl, args) }.is_ok() && status != 0
}

/// What libc (since 2.35) says of restartable sequences.
fn rseq_offset() -> usize {
    // SAFETY: libc's symbols have these types.
    unsafe {
        let size = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr()).cast::<u32>();
        let offset = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()).cast::<isize>();
        match size.as_ref().zip(offset.as_ref()) {
            Some((size, offset)) if *size != 0 => *offset as usize,
            _ => 0,
        }
    }
}

fn pause() {
    let time = libc::timespec { tv_sec: 0, tv_nsec: PAUSE_NANOS };
    let args = [(&raw const time) as usize, 0, 0, 0, 0, 0];
    // SAFETY: the time is valid until the call returns.
    let _ = unsafe { raw::call(libc::SYS_nanosleep, args) };
}

/// Whether the process has one thread, as the kernel sees it: the call asks for nothing else.
fn is_alone() -> bool {
    // SAFETY: a number.
    unsafe { raw::call(libc::SYS_unshare, [libc::CLONE_THREAD as usize, 0, 0, 0, 0, 0]) }.is_ok()
}

/// Whether this process may have another thread: not, for instance, when its children are to begin
/// another PID namespace.
fn can_make_threads() -> bool {
    // It only makes one system call.
    let mut stack = MaybeUninit::<[u128; 16]>::uninit();
    let on_stack = AtomicU32::new(1);
    let flags = SHARED | libc::CLONE_CHILD_CLEARTID;
    let top = stack.as_mut_ptr().wrapping_add(1) as usize;
    // SAFETY: the thread touches no memory but its stack, which stays until the thread has left it.
    let made = unsafe { clone(flags, top, on_stack.as_ptr() as usize, 0, 0) };
    while made > 0 && on_stack.load(Ordering::Acquire) != 0 {
        pause();
    }
    made > 0
}

/// Has all other threads stop. `false`: one of them does not.
fn stop_all(tasks: &OwnedFd) -> bool {
    THREADS.iter().for_each(|thread| thread.state.store(FREE, Ordering::Relaxed));
    NEXT.store(0, Ordering::SeqCst);
    let begun = raw::monotonic_micros();
    while !is_alone() {
        let failed = THREADS.iter().any(|thread| thread.state.load(Ordering::Acquire) == FAILED);
        let is_late = raw::monotonic_micros().saturating_sub(begun) > LIMIT_MICROS;
        if failed || is_late || NEXT.load(Ordering::SeqCst) > MOST {
            return false;
        }
        signal_others(tasks);
        pause();
    }
    true
}

/// Sends the signal to all threads but this one. All are the library's.
fn signal_others(tasks: &OwnedFd) {
    let this = ism_sys::thread_number();
    let mut room = [MaybeUninit::uninit(); 2048];
    let _ = rustix::fs::seek(tasks, SeekFrom::Start(0));
    let mut entries = RawDir::new(tasks, &mut room);
    while let Some(Ok(entry)) = entries.next() {
        let number = entry.file_name().to_str().ok().and_then(|name| name.parse::<c_int>().ok());
        if let Some(thread) = number.filter(|number| *number != this) {
            let _ = raw::signal_thread(thread, SIGSETXID);
        }
    }
}

/// No further thread stops from now on. Returns how many places are taken.
fn close() -> usize {
    let taken = NEXT.swap(CLOSED, Ordering::SeqCst).min(MOST);
    for thread in THREADS.iter().take(taken) {
        // It is in the handler.
        while thread.state.load(Ordering::Acquire) == FREE {
            pause();
        }
    }
    taken
}

/// The handler, in a thread of the library.
unsafe extern "C" fn stop(_signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let Some(thread) = THREADS.get(NEXT.fetch_add(1, Ordering::SeqCst)) else { return };
    // The kernel's frame begins with what it returns by, which is its business.
    let frame = if cfg!(target_arch = "x86_64") { context as usize } else { info as usize };
    if !note(thread, frame) {
        return thread.state.store(FAILED, Ordering::Release);
    }
    thread.state.store(NOTED, Ordering::Release);
    loop {
        // SAFETY: this thread alone ends. Nobody touches its stack until it has left it.
        let _ = unsafe { raw::call(libc::SYS_exit, [0; 6]) };
    }
}

/// Notes what a new thread needs to take the place of the calling one. `false`: the kernel does not
/// tell.
fn note(thread: &StoppedThread, frame: usize) -> bool {
    const PR_GET_TID_ADDRESS: usize = 40;
    let mut at = 0usize;
    let mut list = [0usize; 2];
    let mut name = [0u64; 2];
    let address = |of: *mut usize| of as usize;
    let [at_at, first, size] = [&raw mut at, &raw mut list[0], &raw mut list[1]].map(address);
    let name_at = name.as_mut_ptr() as usize;
    // SAFETY: all words are valid until the calls return.
    let known = unsafe {
        raw::call(libc::SYS_prctl, [PR_GET_TID_ADDRESS, at_at, 0, 0, 0, 0]).is_ok()
            && raw::call(libc::SYS_get_robust_list, [0, first, size, 0, 0, 0]).is_ok()
            && raw::call(libc::SYS_prctl, [libc::PR_GET_NAME as usize, name_at, 0, 0, 0, 0]).is_ok()
    };
    if !known || at == 0 {
        return false;
    }
    let tls = thread_pointer();
    let rseq = match RSEQ_OFFSET.load(Ordering::Relaxed) {
        0 => 0,
        offset => tls.wrapping_add(offset),
    };
    for (place, value) in [
        (&thread.frame, frame),
        (&thread.tls, tls),
        (&thread.tid_address, at),
        (&thread.robust_list[0], list[0]),
        (&thread.robust_list[1], list[1]),
        (&thread.rseq, rseq),
    ] {
        place.store(value, Ordering::Relaxed);
    }
    thread.name[0].store(name[0], Ordering::Relaxed);
    thread.name[1].store(name[1], Ordering::Relaxed);
    thread.on_stack.store(1, Ordering::Relaxed);
    let on_stack = thread.on_stack.as_ptr() as usize;
    // SAFETY: the kernel forgets memory of this thread, so that it looks at none of it when the thread
    // ends. The word lives as long as the process.
    unsafe {
        let _ = raw::call(libc::SYS_set_robust_list, [0, list[1], 0, 0, 0, 0]);
        let left = rseq != 0 && raw::call(libc::SYS_rseq, leaving(rseq)).is_ok();
        thread.left_rseq.store(left, Ordering::Relaxed);
        let _ = raw::call(libc::SYS_set_tid_address, [on_stack, 0, 0, 0, 0, 0]);
    }
    true
}

fn leaving(rseq: usize) -> [usize; 6] {
    const RSEQ_FLAG_UNREGISTER: usize = 1;
    [rseq, RSEQ_SIZE, RSEQ_FLAG_UNREGISTER, RSEQ_SIGNATURE, 0, 0]
}

/// Makes a thread again.
fn start(thread: &StoppedThread) {
    if thread.state.load(Ordering::Acquire) != NOTED {
        return;
    }
    while thread.on_stack.load(Ordering::Acquire) != 0 {
        pause();
    }
    const FLAGS: c_int =
        SHARED | libc::CLONE_SETTLS | libc::CLONE_PARENT_SETTID | libc::CLONE_CHILD_CLEARTID;
    let [frame, tls, tid_address] = [&thread.frame, &thread.tls, &thread.tid_address]
        .map(|place| place.load(Ordering::Relaxed));
    // Below what the kernel has put there, the stack is free.
    let top = (frame - 512) & !15;
    let begun = raw::monotonic_micros();
    loop {
        // SAFETY: the thread that had the stack and the memory has ended, and the new one goes on in
        // its place.
        let made =
            unsafe { clone(FLAGS, top, tid_address, tls, std::ptr::from_ref(thread) as usize) };
        if made > 0 {
            return;
        }
        // There was room for the thread a moment ago. Without it connections could wait for ever.
        if raw::monotonic_micros().saturating_sub(begun) > 10 * LIMIT_MICROS {
            std::process::abort();
        }
        pause();
    }
}

/// Waits until a thread has its name again.
fn await_start(thread: &StoppedThread) {
    while thread.state.load(Ordering::Acquire) == NOTED {
        pause();
    }
}

/// The first function of a thread that was made again, below the kernel's frame. All signals are
/// blocked until it returns to where the old thread was.
unsafe extern "C" fn go_on(thread: &StoppedThread) -> ! {
    let load = |place: &AtomicUsize| place.load(Ordering::Relaxed);
    let name = [0, 1].map(|at: usize| thread.name[at].load(Ordering::Relaxed));
    let name_at = name.as_ptr() as usize;
    let [list, size] = [0, 1].map(|at: usize| load(&thread.robust_list[at]));
    let (frame, rseq) = (load(&thread.frame), load(&thread.rseq));
    // SAFETY: the name is valid until the call returns; list and area are this thread's.
    unsafe {
        let _ = raw::call(libc::SYS_prctl, [libc::PR_SET_NAME as usize, name_at, 0, 0, 0, 0]);
        let _ = raw::call(libc::SYS_set_robust_list, [list, size, 0, 0, 0, 0]);
        let mut enter = leaving(rseq);
        enter[2] = 0;
        let is_left = thread.left_rseq.load(Ordering::Relaxed);
        if rseq != 0 && !(is_left && raw::call(libc::SYS_rseq, enter).is_ok()) {
            // libc asks the kernel for the number of the processor when there is none here.
            (rseq as *mut [i32; 2]).write_volatile([0, -1]);
        }
    }
    thread.state.store(RUNS, Ordering::Release);
    // SAFETY: the kernel's frame is there as the kernel has left it.
    unsafe { return_from_handler(frame) }
}

#[cfg(target_arch = "x86_64")]
fn thread_pointer() -> usize {
    let at: usize;
    // SAFETY: the first word of the thread-local memory is its address.
    unsafe { std::arch::asm!("mov {}, fs:[0]", out(reg) at, options(nostack, readonly)) };
    at
}

#[cfg(target_arch = "aarch64")]
fn thread_pointer() -> usize {
    let at: usize;
    // SAFETY: reads a register.
    unsafe { std::arch::asm!("mrs {}, tpidr_el0", out(reg) at, options(nostack, nomem)) };
    at
}

/// # Safety
/// The address is that of a frame which the kernel has put on the stack of a handler.
#[cfg(target_arch = "x86_64")]
unsafe fn return_from_handler(frame: usize) -> ! {
    // SAFETY: the caller's promise.
    unsafe {
        std::arch::asm!("mov rsp, {}", "mov eax, 15", "syscall", "ud2",
            in(reg) frame, options(noreturn))
    }
}

/// # Safety
/// The address is that of a frame which the kernel has put on the stack of a handler.
#[cfg(target_arch = "aarch64")]
unsafe fn return_from_handler(frame: usize) -> ! {
    // SAFETY: the caller's promise.
    unsafe {
        std::arch::asm!("mov sp, {}", "mov x8, #139", "svc 0", "brk #1",
            in(reg) frame, options(noreturn))
    }
}

/// Makes a thread. With `thread` it calls [`go_on`], without it ends at once. Returns the number of the
/// thread, or an error as the kernel has it.
///
/// # Safety
/// The memory below `stack` is the new thread's, and `tid_address` is a word that lives as long as it.
#[cfg(target_arch = "x86_64")]
unsafe fn clone(
    flags: c_int,
    stack: usize,
    tid_address: usize,
    tls: usize,
    thread: usize,
) -> isize {
    let result: isize;
    // SAFETY: the caller's promise. The new thread comes back from the call with another stack, and
    // never leaves these instructions.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 3f",
            "test r12, r12",
            "jz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call {go_on}",
            "2:",
            "mov eax, 60",
            "xor edi, edi",
            "syscall",
            "ud2",
            "3:",
            go_on = sym go_on,
            inlateout("rax") libc::SYS_clone as isize => result,
            in("rdi") flags as usize, in("rsi") stack, in("rdx") tid_address,
            in("r10") tid_address, in("r8") tls, in("r12") thread,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// Makes a thread. With `thread` it calls [`go_on`], without it ends at once. Returns the number of the
/// thread, or an error as the kernel has it.
///
/// # Safety
/// The memory below `stack` is the new thread's, and `tid_address` is a word that lives as long as it.
#[cfg(target_arch = "aarch64")]
unsafe fn clone(
    flags: c_int,
    stack: usize,
    tid_address: usize,
    tls: usize,
    thread: usize,
) -> isize {
    let result: isize;
    // SAFETY: the caller's promise. The new thread comes back from the call with another stack, and
    // never leaves these instructions.
    unsafe {
        std::arch::asm!(
            "svc 0",
            "cbnz x0, 3f",
            "cbz x20, 2f",
            "mov x29, xzr",
            "mov x0, x20",
            "bl {go_on}",
            "2:",
            "mov x8, #93",
            "mov x0, xzr",
            "svc 0",
            "brk #1",
            "3:",
            go_on = sym go_on,
            inlateout("x0") flags as isize => result,
            in("x1") stack, in("x2") tid_address, in("x3") tls, in("x4") tid_address,
            in("x8") libc::SYS_clone, in("x20") thread, out("x30") _,
        );
    }
    result
}
