// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A dynamic linker for a program without one, such as a static program.
//!
//! This process is about to execute the program. A *loader*, no child of this process, traces the
//! process until the program's first instruction. There the loader has the process map the dynamic
//! linker of glibc, gives the linker a stack of its own, and begins the linker in place of the program.
//! The linker loads the libraries of LD_PRELOAD with a libc, and calls their constructors. One of these
//! must begin the program: [`Beginning::of_this_process`]. The loader ends before the linker begins.
//! Process id, parent, file, auxiliary vector, heap and stack of the program are the kernel's.
//!
//! If the loader fails before a change of the process, the program begins as usual. After a change, the
//! loader or the kernel (PTRACE_O_EXITKILL) ends the process.

mod beginning;
mod linker;

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_long};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use beginning::{BEGINNING, ENTRY};
use libc::{pid_t, user_regs_struct};
use linker::{Linker, PAGE, down, up};
use thiserror::Error;

use crate::interrupt::call;

pub use beginning::Beginning;

/// The dynamic linker of glibc.
const LINKER: &CStr = c"/lib64/ld-linux-x86-64.so.2";
/// The program for the linker: the smallest library of glibc. Its first instruction is never reached.
const PROGRAM: &CStr = c"libdl.so.2";

/// Bytes of the linker's stack, and the most words of arguments, environment and auxiliary vector.
const STACK: u64 = 1 << 20;
const MOST_WORDS: usize = 1 << 14;

/// Why no dynamic linker can be loaded into the next program.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The dynamic linker of glibc is not there, or has an unknown form.
    #[error("the dynamic linker of glibc cannot be used: {0}")]
    Linker(io::Error),
    /// There are no more processes or descriptors.
    #[error("there is no process for loading: {0}")]
    NoProcess(io::Error),
    /// This process is traced already, or the kernel allows no tracing.
    #[error("the kernel does not let this process be traced: {0} (a tracer, or Yama)")]
    NotTraced(io::Error),
}

/// A loader that waits for the next program of this process.
#[derive(Debug)]
pub struct Loader {
    /// The loader's process.
    process: OwnedFd,
}

impl Loader {
    /// Has the dynamic linker loaded into the next program executed by the calling thread. The program has
    /// no more rights than this process: a traced process gets none. The process may be a child of vfork.
    ///
    /// # Errors
    /// [`LoadError`]: the next program begins as usual.
    pub fn start() -> Result<Loader, LoadError> {
        Loader::start_for(libc::PTRACE_O_TRACEEXEC)
    }

    /// Variant of [`Loader::start`] for the next program executed by the next child of the calling thread.
    /// The child is made by vfork, or by `posix_spawn` of libc.
    ///
    /// # Errors
    /// As [`Loader::start`].
    pub fn start_for_child() -> Result<Loader, LoadError> {
        Loader::start_for(libc::PTRACE_O_TRACEEXEC | libc::PTRACE_O_TRACEVFORK)
    }

    /// `events`: options of the trace.
    fn start_for(events: c_int) -> Result<Loader, LoadError> {
        let linker = Linker::read(LINKER).map_err(LoadError::Linker)?;
        // SAFETY: no arguments.
        let thread = unsafe { call(libc::SYS_gettid, &[0; 6]) } as pid_t;
        let traced = Cell::new(thread);
        let mut tracer = Tracer { traced, events, file: -1, linker, words: vec![0; MOST_WORDS] };
        let pipes = || Ok((io::pipe()?, io::pipe()?));
        let ((from, to_maker), (from_maker, to)) = pipes().map_err(LoadError::NoProcess)?;
        let ours = [from.as_raw_fd(), to.as_raw_fd()];
        let begin = || tracer.run(from_maker.as_raw_fd(), to_maker.as_raw_fd(), ours);
        apart(begin).map_err(LoadError::NoProcess)?;
        // The other end stays open: the maker gets no SIGPIPE if the loader has ended.
        drop(to_maker);
        let number = receive(ours[0]).map_err(LoadError::NoProcess)?;
        // SAFETY: numbers. The loader waits for this process, so the id is the loader's.
        let process = unsafe {
            let number = number as usize;
            call(libc::SYS_prctl, &[libc::PR_SET_PTRACER as usize, number, 0, 0, 0, 0]);
            result(call(libc::SYS_pidfd_open, &[number, 0, 0, 0, 0, 0]))
        };
        let process = process.map_err(LoadError::NoProcess)? as c_int;
        // SAFETY: a new descriptor.
        let loader = Loader { process: unsafe { OwnedFd::from_raw_fd(process) } };
        let answer = send(ours[1], 0).and_then(|()| receive(ours[0]));
        match answer.map_err(LoadError::NoProcess)? {
            0 => Ok(loader),
            error => Err(LoadError::NotTraced(io::Error::from_raw_os_error(error))),
        }
    }

    /// Ends the loader: the program could not be executed.
    pub fn withdraw(self) {
        let process = self.process.as_fd().as_raw_fd() as usize;
        let arguments = [process, libc::SIGKILL as usize, 0, 0, 0, 0];
        // SAFETY: numbers. The kernel lets this process go.
        unsafe { call(libc::SYS_pidfd_send_signal, &arguments) };
    }
}

fn result(result: isize) -> io::Result<isize> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result as c_int)) } else { Ok(result) }
}

/// Runs `begin` in a process that is no child of this one, with a copy of the calling thread and of the
/// memory, and with all signals blocked. Other threads may hold locks in the copy, so `begin` makes
/// system calls only. The process between the two ends at once, without a signal.
fn apart(begin: impl FnOnce()) -> io::Result<()> {
    let set = |new: &u64, old: Option<&mut u64>| {
        let old = old.map_or(0, |old| std::ptr::from_mut(old) as usize);
        let new = std::ptr::from_ref(new) as usize;
        let arguments = [libc::SIG_SETMASK as usize, new, old, size_of::<u64>(), 0, 0];
        // SAFETY: both sets are valid until the call returns.
        unsafe { call(libc::SYS_rt_sigprocmask, &arguments) };
    };
    let mut before = 0;
    set(&u64::MAX, Some(&mut before));
    // SAFETY: the child goes on with a copy of this stack, and makes system calls only.
    let made = match unsafe { call(libc::SYS_clone, &[0; 6]) } {
        0 => {
            // SAFETY: as above.
            let made = unsafe { call(libc::SYS_clone, &[0; 6]) };
            if made == 0 {
                begin();
            }
            exit(made < 0)
        }
        made => result(made),
    };
    if let Ok(between) = made {
        let arguments = [between as usize, 0, libc::__WALL as usize, 0, 0, 0];
        // SAFETY: the call stores no status.
        while unsafe { call(libc::SYS_wait4, &arguments) } == -libc::EINTR as isize {}
    }
    set(&before, None);
    made.map(drop)
}

/// Ends this process without libc, whose handlers are the program's.
fn exit(failed: bool) -> ! {
    loop {
        // SAFETY: a number.
        unsafe { call(libc::SYS_exit_group, &[usize::from(failed), 0, 0, 0, 0, 0]) };
    }
}

fn send(to: c_int, number: c_int) -> io::Result<()> {
    let arguments = [to as usize, &raw const number as usize, size_of::<c_int>(), 0, 0, 0];
    // SAFETY: a number of this function.
    result(unsafe { call(libc::SYS_write, &arguments) }).map(drop)
}

fn receive(from: c_int) -> io::Result<c_int> {
    let mut number: c_int = 0;
    let arguments = [from as usize, &raw mut number as usize, size_of::<c_int>(), 0, 0, 0];
    loop {
        // SAFETY: room of this function.
        match unsafe { call(libc::SYS_read, &arguments) } {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n if n == -libc::EINTR as isize => {}
            n => return result(n).map(|_| number),
        }
    }
}

/// The loader in its own process. After the trace has begun, no memory is allocated.
struct Tracer {
    /// The traced thread: the last one that stopped.
    traced: Cell<pid_t>,
    /// Options of the trace.
    events: c_int,
    /// The memory of the process.
    file: c_int,
    linker: Linker,
    words: Vec<u64>,
}

type Step<T> = Result<T, &'static str>;

impl Tracer {
    /// `of_maker`: descriptors to close, the maker's ends of the pipes.
    fn run(&mut self, from_maker: c_int, to_maker: c_int, of_maker: [c_int; 2]) {
        for fd in of_maker {
            // SAFETY: a number.
            unsafe { call(libc::SYS_close, &[fd as usize, 0, 0, 0, 0, 0]) };
        }
        // SAFETY: no arguments.
        let this = unsafe { call(libc::SYS_getpid, &[0; 6]) } as c_int;
        if send(to_maker, this).and_then(|()| receive(from_maker)).is_err() {
            return;
        }
        let seized = self.ptrace(libc::PTRACE_SEIZE, 0, self.events as usize);
        if send(to_maker, -seized as c_int).is_ok() && seized == 0 && self.await_exec() {
            self.load();
        }
    }

    /// `request`: a number whose type depends on the libc. The result is the kernel's.
    fn ptrace(&self, request: impl Into<i64>, address: usize, data: usize) -> isize {
        let request: i64 = request.into();
        let arguments = [request as usize, self.traced.get() as usize, address, data, 0, 0];
        // SAFETY: requests about the traced process; data of this process live until the call returns.
        unsafe { call(libc::SYS_ptrace, &arguments) }
    }

    /// The status of the process when it stops. `None`: the process has ended.
    fn stopped(&self) -> Option<c_int> {
        let mut status: c_int = 0;
        let any = usize::MAX;
        let arguments = [any, &raw mut status as usize, libc::__WALL as usize, 0, 0, 0];
        loop {
            // SAFETY: the status is valid until the call returns.
            let got = unsafe { call(libc::SYS_wait4, &arguments) };
            if got > 0 {
                // An executing thread gets the id of its process.
                self.traced.set(got as pid_t);
                return libc::WIFSTOPPED(status).then_some(status);
            }
            if got != -libc::EINTR as isize {
                return None;
            }
        }
    }

    /// Waits for the execution of the program. Signals before that are the process's. If a child shall
    /// execute the program, its parent goes on without a trace.
    fn await_exec(&self) -> bool {
        let is_event = |status, event| status >> 8 == libc::SIGTRAP | event << 8;
        while let Some(status) = self.stopped() {
            if is_event(status, libc::PTRACE_EVENT_EXEC) {
                return true;
            }
            if is_event(status, libc::PTRACE_EVENT_VFORK) {
                self.ptrace(libc::PTRACE_DETACH, 0, 0);
                continue;
            }
            let is_signal = status >> 16 == 0;
            let signal = if is_signal { libc::WSTOPSIG(status) } else { 0 };
            self.ptrace(libc::PTRACE_CONT, 0, signal as usize);
        }
        false
    }

    /// Loads the linker, or ends the process.
    fn load(&mut self) {
        // From here on the kernel ends the process if the loader dies.
        self.ptrace(libc::PTRACE_SETOPTIONS, 0, libc::PTRACE_O_EXITKILL as usize);
        let mut path = [0u8; 32];
        // The array is long enough, and the zeros behind the path stay.
        let _ = write!(path.as_mut_slice(), "/proc/{}/mem", self.traced.get());
        let flags = (libc::O_RDWR | libc::O_CLOEXEC) as usize;
        let arguments = [path.as_ptr() as usize, flags, 0, 0, 0, 0];
        // SAFETY: the path is this function's.
        self.file = unsafe { call(libc::SYS_open, &arguments) } as c_int;
        let done = if self.file < 0 { Ok(()) } else { self.begin_linker() };
        if let Err(step) = done {
            let parts = ["smc run: the program was ended: ", step, " failed while loading SMC\n"];
            for part in parts {
                let error = libc::STDERR_FILENO as usize;
                // SAFETY: text of this program.
                unsafe {
                    call(libc::SYS_write, &[error, part.as_ptr() as usize, part.len(), 0, 0, 0])
                };
            }
            let arguments = [self.traced.get() as usize, libc::SIGKILL as usize, 0, 0, 0, 0];
            // SAFETY: numbers.
            unsafe { call(libc::SYS_kill, &arguments) };
            return;
        }
        self.ptrace(libc::PTRACE_SETOPTIONS, 0, 0);
        self.ptrace(libc::PTRACE_DETACH, 0, 0);
    }

    fn registers(&self) -> Step<user_regs_struct> {
        // SAFETY: all zeros is a value of this type, and the kernel fills the value.
        let mut registers: user_regs_struct = unsafe { std::mem::zeroed() };
        match self.ptrace(libc::PTRACE_GETREGS, 0, &raw mut registers as usize) {
            0 => Ok(registers),
            _ => Err("reading registers"),
        }
    }

    fn set_registers(&self, registers: &user_regs_struct) -> Step<()> {
        match self.ptrace(libc::PTRACE_SETREGS, 0, std::ptr::from_ref(registers) as usize) {
            0 => Ok(()),
            _ => Err("setting registers"),
        }
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Step<()> {
        let (from, to) = (bytes.as_ptr() as usize, at as usize);
        let arguments = [self.file as usize, from, bytes.len(), to, 0, 0];
        // SAFETY: bytes of this process.
        let n = unsafe { call(libc::SYS_pwrite64, &arguments) };
        if n == bytes.len() as isize { Ok(()) } else { Err("writing memory") }
    }

    fn read<const N: usize>(&self, at: u64) -> Step<[u8; N]> {
        let mut bytes = [0u8; N];
        let arguments = [self.file as usize, bytes.as_mut_ptr() as usize, N, at as usize, 0, 0];
        // SAFETY: room of this process.
        let n = unsafe { call(libc::SYS_pread64, &arguments) };
        if n == N as isize { Ok(bytes) } else { Err("reading memory") }
    }

    /// Lets the process run to a breakpoint. Signals wait, as for a process that has not begun.
    fn run_to_breakpoint(&self) -> Step<()> {
        self.ptrace(libc::PTRACE_CONT, 0, 0);
        loop {
            let status = self.stopped().ok_or("running to the first instruction")?;
            if status >> 8 == libc::SIGTRAP {
                return Ok(());
            }
            let is_signal = status >> 16 == 0;
            let signal = if is_signal { libc::WSTOPSIG(status) } else { 0 };
            self.ptrace(libc::PTRACE_CONT, 0, signal as usize);
        }
    }

    /// A system call of the process.
    fn call(&self, at: u64, number: c_long, words: [u64; 6]) -> Step<u64> {
        let mut registers = self.registers()?;
        registers.rip = at;
        registers.rax = number as u64;
        registers.orig_rax = u64::MAX;
        let [rdi, rsi, rdx, r10, r8, r9] = words;
        (registers.rdi, registers.rsi, registers.rdx) = (rdi, rsi, rdx);
        (registers.r10, registers.r8, registers.r9) = (r10, r8, r9);
        self.set_registers(&registers)?;
        self.run_to_breakpoint()?;
        let result = self.registers()?.rax;
        if result > -4096i64 as u64 { Err("a system call") } else { Ok(result) }
    }

    /// Brings the process to the linker's first instruction.
    fn begin_linker(&mut self) -> Step<()> {
        const BREAKPOINT: u8 = 0xcc;
        let entry = self.registers()?.rip;
        let before: [u8; 3] = self.read(entry)?;
        self.write(entry, &[BREAKPOINT])?;
        self.run_to_breakpoint()?;
        let stack = self.registers()?.rsp;
        self.write(entry, &[0x0f, 0x05, BREAKPOINT])?;
        let base = self.map_linker(entry, stack)?;
        let access = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let kind = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
        let room = self.call(entry, libc::SYS_mmap, [0, STACK, access, kind, u64::MAX, 0])?;
        let top = self.fill_stack(room, base, [BEGINNING, stack, ENTRY, entry])?;
        self.write(entry, &before)?;
        let mut registers = self.registers()?;
        registers.rip = base + self.linker.entry;
        registers.rsp = top;
        registers.orig_rax = u64::MAX;
        (registers.rax, registers.rdi, registers.rsi, registers.rdx) = (0, 0, 0, 0);
        (registers.rcx, registers.r8, registers.r9) = (0, 0, 0);
        (registers.r10, registers.r11) = (0, 0);
        self.set_registers(&registers)
    }

    /// Maps the linker: its base.
    fn map_linker(&self, entry: u64, stack: u64) -> Step<u64> {
        // The kernel makes more of a stack than the first page.
        let path = stack - 2 * PAGE;
        self.write(path, LINKER.to_bytes_with_nul())?;
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
        let file = self.call(entry, libc::SYS_open, [path, flags, 0, 0, 0, 0])?;
        let private = libc::MAP_PRIVATE as u64;
        let (fixed, anonymous) = (libc::MAP_FIXED as u64, libc::MAP_ANONYMOUS as u64);
        let all = [0, self.linker.end(), 0, private | anonymous, u64::MAX, 0];
        let base = self.call(entry, libc::SYS_mmap, all)?;
        for segment in &self.linker.segments {
            let begin = base + down(segment.address);
            let in_file = base + segment.address + segment.in_file;
            let end = up(base + segment.address + segment.in_memory);
            let [access, from] = [segment.access, down(segment.offset)];
            let words = [begin, up(in_file) - begin, access, private | fixed, file, from];
            self.call(entry, libc::SYS_mmap, words)?;
            if segment.in_memory > segment.in_file {
                let zeros = [0u8; PAGE as usize];
                let rest = (up(in_file) - in_file) as usize;
                self.write(in_file, zeros.get(..rest).unwrap_or_default())?;
            }
            if end > up(in_file) {
                let kind = private | fixed | anonymous;
                let words = [up(in_file), end - up(in_file), access, kind, u64::MAX, 0];
                self.call(entry, libc::SYS_mmap, words)?;
            }
        }
        self.call(entry, libc::SYS_close, [file, 0, 0, 0, 0, 0])?;
        Ok(base)
    }

    /// Fills the linker's stack: its stack pointer. The texts of the environment are the program's.
    fn fill_stack(&mut self, room: u64, base: u64, beginning: [u64; 4]) -> Step<u64> {
        let [_, stack, ..] = beginning;
        let texts = room + STACK - PAGE;
        self.write(texts, LINKER.to_bytes_with_nul())?;
        let program = texts + LINKER.count_bytes() as u64 + 1;
        self.write(program, PROGRAM.to_bytes_with_nul())?;
        let mut words = std::mem::take(&mut self.words);
        let mut used = 0;
        let mut put = |word: u64| {
            *words.get_mut(used).ok_or("copying the environment")? = word;
            used += 1;
            Ok(())
        };
        [2, texts, program, 0].into_iter().try_for_each(&mut put)?;
        let count = u64::from_le_bytes(self.read(stack)?);
        let mut at = stack + 8 * (count + 2);
        loop {
            let text = u64::from_le_bytes(self.read(at)?);
            at += 8;
            put(text)?;
            if text == 0 {
                break;
            }
        }
        beginning.into_iter().try_for_each(&mut put)?;
        loop {
            let kind = u64::from_le_bytes(self.read(at)?);
            let value = u64::from_le_bytes(self.read(at + 8)?);
            at += 16;
            let value = match kind {
                libc::AT_PHDR => base + self.linker.headers,
                libc::AT_PHNUM => self.linker.count,
                libc::AT_BASE => 0,
                libc::AT_ENTRY => base + self.linker.entry,
                _ => value,
            };
            [kind, value].into_iter().try_for_each(&mut put)?;
            if kind == libc::AT_NULL {
                break;
            }
        }
        let top = (texts - 8 * used as u64) & !15;
        let words = words.get(..used).unwrap_or_default();
        // SAFETY: any bytes of words may be read.
        let bytes = unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), 8 * used) };
        self.write(top, bytes)?;
        Ok(top)
    }
}
