// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The entry for programs whose threads are not libc's: the program makes its threads by `clone`, and
//! uses the thread pointer for itself.
//!
//! The library needs a thread of libc. So each thread of the program has a *lent* thread: the block and
//! the variables of a thread of libc whose kernel thread has ended. The GS register, without a use by
//! such programs, has the address of the [`Block`]. The entry exchanges the thread pointer, and the way
//! back gives the program's back. The other rules are those of [`super::entry`].

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};

use super::entry::{self, Frame};
use super::words::Words;
use crate::sys::STACK as STACK_OF_LIBRARY;
use crate::sys::fork_lock::ForkMutex;
use crate::sys::own_stack::OwnStack;
use crate::sys::raw;

/// The words of a thread of the program.
#[repr(C)]
pub(super) struct Block {
    /// The end of the library's stack.
    pub(super) stack: usize,
    /// Not zero: the thread is between the entry and the way back.
    busy: AtomicU8,
    /// Not zero: a thread of the program has the block.
    pub(super) is_used: AtomicU8,
    /// Not zero: the maker of the thread still reads the block.
    is_new: AtomicU8,
    /// The thread pointer of the lent thread.
    pub(super) lent: usize,
    /// The thread pointer of the program, while the thread is busy.
    pub(super) own: UnsafeCell<usize>,
    /// The block of the next child.
    child: UnsafeCell<usize>,
    /// The block of the maker, and the tail of its thunk.
    maker: UnsafeCell<usize>,
    tail: UnsafeCell<usize>,
    /// For dispatched system calls.
    pub(super) dispatch: Words,
}

// SAFETY: the cells are of the thread that has the block, or of its maker until the thread begins.
unsafe impl Sync for Block {}

const BUSY: usize = offset_of!(Block, busy);

/// The blocks of this process. A child of a fork leaves alone the blocks of other threads of its parent.
static BLOCKS: ForkMutex<Vec<&'static Block>> = ForkMutex::new(Vec::new());

/// The addresses of the program's handlers by signal, and of the library's handler; 0: the program's
/// threads are libc's.
pub(super) static HANDLERS: AtomicUsize = AtomicUsize::new(0);
pub(super) static ON_SIGNAL: AtomicUsize = AtomicUsize::new(0);
/// The kernel's handler of the program's signals.
static KERNEL_HANDLER: AtomicUsize = AtomicUsize::new(0);

/// Whether the processor's instructions for thread pointers may be used.
fn has_instructions() -> bool {
    const FSGSBASE: u64 = 2;
    // SAFETY: reads a table of the process.
    unsafe { libc::getauxval(libc::AT_HWCAP2) & FSGSBASE != 0 }
}

/// Gives the calling thread a block: the first thread of the program, with libc's first thread.
/// `handlers`, `library`: the table of the program's signal handlers, and the library's handler.
/// `kernel`: the handler in place of the program's.
///
/// # Errors
/// The reason why no thread can be lent.
pub(super) fn prepare(handlers: usize, library: usize, kernel: usize) -> Result<(), String> {
    if !has_instructions() {
        return Err("the kernel lets no program set its thread pointer here (FSGSBASE)".into());
    }
    let block = Block::new(raw::this_thread()).ok_or("there is no memory for a stack")?;
    block.is_used.store(1, Ordering::Relaxed);
    BLOCKS.lock().push(block);
    // The next one shows whether threads can be lent at all.
    let next = lend().ok_or("no thread can be made for the library")?;
    next.is_used.store(0, Ordering::Relaxed);
    HANDLERS.store(handlers, Ordering::Relaxed);
    ON_SIGNAL.store(library, Ordering::Relaxed);
    KERNEL_HANDLER.store(kernel, Ordering::Relaxed);
    Ok(())
}

/// Makes the calling thread the first one of the program: from now on its calls enter the library.
pub(super) fn begin() {
    let first = BLOCKS.lock().first().copied();
    if let Some(first) = first {
        // SAFETY: the program does not use the register, and the instruction is there.
        unsafe { std::arch::asm!("wrgsbase {}", in(reg) std::ptr::from_ref(first)) };
    }
}

/// The numbers for the thunks: the prefix for the segment of the mark, and its place there.
pub(super) const PREFIX: u8 = 0x65;
pub(super) const PLACE_OF_BUSY: i32 = BUSY as i32;

impl Block {
    fn new(lent: usize) -> Option<&'static Block> {
        let block = Block {
            stack: OwnStack::take()?.into_end(),
            busy: AtomicU8::new(0),
            is_used: AtomicU8::new(0),
            is_new: AtomicU8::new(0),
            lent,
            own: UnsafeCell::new(0),
            child: UnsafeCell::new(0),
            maker: UnsafeCell::new(0),
            tail: UnsafeCell::new(0),
            dispatch: Words::default(),
        };
        Some(Box::leak(Box::new(block)))
    }

    /// The end of the free part of the library's stack below a stack pointer on this stack.
    pub(super) fn free_below(&self, rsp: usize) -> Option<usize> {
        /// Bytes below a stack pointer that a function may use without a change of the stack pointer.
        const RED_ZONE: usize = 128;
        let is_here = self.stack.wrapping_sub(rsp) < STACK_OF_LIBRARY;
        is_here.then_some(rsp.wrapping_sub(RED_ZONE) & !15)
    }

    fn is_free(&self) -> bool {
        // Acquire: the former thread's last use of the block is over.
        self.is_used.load(Ordering::Acquire) == 0 && self.is_new.load(Ordering::Acquire) == 0
    }
}

/// The block of the calling thread, which has one.
pub(super) fn current() -> &'static Block {
    let at: *const Block;
    // SAFETY: reads a register; only threads with a block come here, and blocks live for ever.
    unsafe {
        std::arch::asm!("rdgsbase {}", out(reg) at, options(nomem, nostack));
        &*at
    }
}

/// Takes a block for a new thread. `None`: there is no memory.
pub(super) fn lend() -> Option<&'static Block> {
    let mut blocks = BLOCKS.lock();
    if let Some(block) = blocks.iter().find(|block| block.is_free()) {
        block.is_used.store(1, Ordering::Relaxed);
        return Some(block);
    }
    let block = Block::new(raw::without_signals(make_thread)?)?;
    block.is_used.store(1, Ordering::Relaxed);
    blocks.push(block);
    Some(block)
}

/// The thread pointer of a new thread, and the id of its kernel thread, zero when the thread has ended.
#[derive(Default)]
struct Ended {
    pointer: AtomicUsize,
    id: AtomicU32,
}

/// Bytes of the stack of a thread without a kernel thread.
const STACK: usize = 128 << 10;

/// Makes a thread of libc without a kernel thread: its thread pointer. libc keeps the block and the
/// variables of a thread until the thread returns, and this thread never returns.
fn make_thread() -> Option<usize> {
    let ended = Ended { id: AtomicU32::new(1), ..Ended::default() };
    let argument = (&raw const ended).cast_mut().cast();
    // SAFETY: the attributes are of this function, which waits until the thread has made its last use of
    // the argument.
    let made = unsafe {
        let (mut thread, mut attributes) = (0, std::mem::zeroed());
        libc::pthread_attr_init(&raw mut attributes);
        // The memory also has the block and the variables.
        libc::pthread_attr_setstacksize(&raw mut attributes, STACK);
        let made = libc::pthread_create(&raw mut thread, &attributes, end_at_once, argument);
        libc::pthread_attr_destroy(&raw mut attributes);
        made
    };
    if made != 0 {
        return None;
    }
    loop {
        let id = ended.id.load(Ordering::Acquire);
        if id == 0 {
            return Some(ended.pointer.load(Ordering::Relaxed));
        }
        let at = ended.id.as_ptr() as usize;
        let args = [at, libc::FUTEX_WAIT as usize, id as usize, 0, 0, 0];
        // SAFETY: the kernel reads the word, which is on this stack.
        let _ = unsafe { raw::call(libc::SYS_futex, args) };
    }
}

extern "C" fn end_at_once(argument: *mut c_void) -> *mut c_void {
    // SAFETY: the maker waits.
    let ended = unsafe { &*argument.cast::<Ended>() };
    ended.pointer.store(raw::this_thread(), Ordering::Relaxed);
    // SAFETY: the kernel clears the word, and wakes the maker, when the thread has ended. The thread
    // ends without libc, and so keeps its block.
    unsafe {
        let _ = raw::call(libc::SYS_set_robust_list, [0, 24, 0, 0, 0, 0]);
        let at = ended.id.as_ptr() as usize;
        let _ = raw::call(libc::SYS_set_tid_address, [at, 0, 0, 0, 0, 0]);
        let _ = raw::call(libc::SYS_exit, [0; 6]);
    }
    std::process::abort()
}

/// Ways out of the entry.
const BACK: u32 = 0;
const NEW_THREAD: u32 = 1;
const END_OF_THREAD: u32 = 2;

/// Answers a call, and says how the entry goes on.
///
/// # Safety
/// The frame is of the entry, on the stack of the calling thread.
unsafe extern "C" fn answer(frame: *mut Frame) -> u32 {
    // SAFETY: the caller's promise.
    let frame = unsafe { &mut *frame };
    let (number, flags) = (frame.rax as i64, frame.rdi);
    if entry::ask_frame(frame) {
        frame.rcx += entry::ANSWERED;
        return BACK;
    }
    const SHARED: usize = libc::CLONE_VM as usize;
    const WAITS: usize = libc::CLONE_VFORK as usize;
    match number {
        libc::SYS_exit => END_OF_THREAD,
        libc::SYS_clone if flags & (SHARED | WAITS) == SHARED => match lend() {
            Some(child) => {
                child.is_new.store(1, Ordering::Relaxed);
                let this = current();
                // SAFETY: cells of this thread, and of a block without a thread.
                unsafe {
                    *this.child.get() = std::ptr::from_ref(child) as usize;
                    *child.maker.get() = std::ptr::from_ref(this) as usize;
                }
                NEW_THREAD
            }
            None => {
                frame.rax = -(libc::EAGAIN as isize) as usize;
                frame.rcx += entry::ANSWERED;
                BACK
            }
        },
        // Programs go on with `clone`.
        libc::SYS_clone3 => {
            frame.rax = -(libc::ENOSYS as isize) as usize;
            frame.rcx += entry::ANSWERED;
            BACK
        }
        _ => BACK,
    }
}

/// The entry. rcx: as for [`entry::enter`].
///
/// # Safety
/// For thunks only.
#[unsafe(naked)]
unsafe extern "C" fn enter() {
    std::arch::naked_asm!(
        ".cfi_startproc",
        ".cfi_undefined rip",
        "cmp rax, {numbers}",
        "jae 7f",
        "lea r11, [rip + {calls}]",
        "cmp byte ptr [r11 + rax], 0",
        "je 7f",
        "rdgsbase r11",
        "test r11, r11",
        "jz 7f",
        "cmp byte ptr [r11 + {busy}], 0",
        "jne 7f",
        // A signal handler from here on leaves its calls to the kernel.
        "mov byte ptr [r11 + {busy}], 1",
        "mov r11, [r11 + {stack}]",
        "xchg rsp, r11",
        "push r11",
        "push rcx",
        "push rdi",
        "push rsi",
        "push rdx",
        "push r10",
        "push r8",
        "push r9",
        "push rax",
        "push rax",
        "rdfsbase rax",
        "mov gs:[{own}], rax",
        "mov rax, gs:[{lent}]",
        "wrfsbase rax",
        "cld",
        "mov rdi, rsp",
        "call {answer}",
        "xorps xmm15, xmm15",
        "mov r11, gs:[{own}]",
        "wrfsbase r11",
        "cmp eax, {new_thread}",
        "pop rax",
        "pop rax",
        "pop r9",
        "pop r8",
        "pop r10",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rcx",
        "pop rsp",
        "je 4f",
        "ja 5f",
        "mov byte ptr gs:[{busy}], 0",
        "jmp rcx",
        // A new thread has the GS register of its maker, so the maker has the child's block meanwhile.
        "4:",
        "mov r11, gs:[{child}]",
        "mov [r11 + {tail}], rcx",
        "wrgsbase r11",
        "syscall",
        "mov rcx, gs:[{tail}]",
        "test rax, rax",
        "jz 6f",
        "jns 3f",
        "mov byte ptr gs:[{is_used}], 0",
        "3: mov r11, gs:[{maker}]",
        "mov byte ptr gs:[{is_new}], 0",
        "wrgsbase r11",
        "6: add rcx, {answered}",
        "jmp rcx",
        // The block is another thread's from here on.
        "5:",
        "rdgsbase r11",
        "xor ecx, ecx",
        "wrgsbase rcx",
        "mov byte ptr [r11 + {busy}], 0",
        "mov byte ptr [r11 + {is_used}], 0",
        "syscall",
        "ud2",
        "7:",
        "add rcx, {others}",
        "jmp rcx",
        ".cfi_endproc",
        numbers = const entry::NUMBERS,
        calls = sym entry::CALLS,
        stack = const offset_of!(Block, stack),
        busy = const BUSY,
        is_used = const offset_of!(Block, is_used),
        is_new = const offset_of!(Block, is_new),
        lent = const offset_of!(Block, lent),
        own = const offset_of!(Block, own),
        child = const offset_of!(Block, child),
        maker = const offset_of!(Block, maker),
        tail = const offset_of!(Block, tail),
        new_thread = const NEW_THREAD,
        answered = const entry::ANSWERED,
        others = const entry::OTHERS,
        answer = sym answer,
    )
}

/// The address of the entry.
pub(super) fn address() -> usize {
    enter as unsafe extern "C" fn() as *const c_void as usize
}

/// The handler of the program's signals, in place of the library's. While a thread is in the library,
/// with the lent thread's pointer, the signal is for the library's handler. All others are for the
/// program's at once.
///
/// # Safety
/// For the kernel only.
#[unsafe(naked)]
unsafe extern "C" fn on_signal() {
    std::arch::naked_asm!(
        "rdgsbase rax",
        "test rax, rax",
        "jz 2f",
        "cmp byte ptr [rax + {busy}], 0",
        "je 2f",
        "rdfsbase r8",
        "cmp r8, [rax + {lent}]",
        "jne 2f",
        "jmp [rip + {on_signal}]",
        "2:",
        "mov r8, [rip + {handlers}]",
        "movsxd r9, edi",
        "mov r8, [r8 + 8 * r9]",
        // SIG_DFL and the like: the program has changed the action just now.
        "cmp r8, 4096",
        "jbe 3f",
        "jmp r8",
        "3:",
        "ret",
        busy = const BUSY,
        lent = const offset_of!(Block, lent),
        on_signal = sym ON_SIGNAL,
        handlers = sym HANDLERS,
    )
}

/// The kernel's handler of the program's signals. `None`: the library's.
pub(super) fn kernel_handler() -> Option<usize> {
    Some(KERNEL_HANDLER.load(Ordering::Relaxed)).filter(|handler| *handler != 0)
}

/// The handler for the kernel.
pub(super) fn own_handler() -> usize {
    on_signal as unsafe extern "C" fn() as *const c_void as usize
}

/// Calls a handler of the program from the library's, with the program's thread pointer.
///
/// # Safety
/// The arguments are the kernel's, and the handler is the program's.
pub(super) unsafe fn call_handler(
    handler: usize,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: the caller's promise.
    unsafe { with_own_pointer(signal, info.cast(), context, handler) }
}

/// # Safety
/// As [`call_handler`]; the calling thread has a block, and is in the library.
#[unsafe(naked)]
unsafe extern "C" fn with_own_pointer(_: c_int, _: *mut c_void, _: *mut c_void, _: usize) {
    std::arch::naked_asm!(
        "push rbx",
        "rdfsbase rbx",
        "mov rax, gs:[{own}]",
        "wrfsbase rax",
        "call rcx",
        "wrfsbase rbx",
        "pop rbx",
        "ret",
        own = const offset_of!(Block, own),
    )
}
