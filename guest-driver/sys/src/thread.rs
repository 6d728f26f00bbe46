// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The beginning and the end of a thread.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::OnceBox;
use crate::descriptor::note_own_thread;
use crate::process::resource_limit;

/// Default size of a thread's stack, bytes.
pub const USUAL_STACK: usize = 2 << 20;

/// Starts a thread of this project, unnoticed by a program in the same process. `stack`: the size of the
/// thread's stack, bytes.
///
/// # Errors
/// There can be no thread, or there is no memory for the thread.
pub fn start_thread<T: Send + 'static>(
    name: &str,
    stack: usize,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    can_start_thread()?;
    let builder = thread::Builder::new().name(name.into()).stack_size(stack);
    let start = move || {
        let unnamed = Unnamed::new();
        builder.spawn(move || {
            drop(unnamed);
            note_own_thread();
            body()
        })
    };
    let starter = STARTER.get().filter(|starter| starter.process == std::process::id());
    let Some(starter) = starter else { return start() };
    let (answer, started) = mpsc::channel();
    let job = Box::new(move || drop(answer.send(start())));
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    starter.jobs.send(job).map_err(|_| gone())?;
    started.recv().map_err(|_| gone())?
}

/// Threads without a name yet. A thread begins with the name of its starter.
static UNNAMED: AtomicUsize = AtomicUsize::new(0);

struct Unnamed;

impl Unnamed {
    fn new() -> Unnamed {
        UNNAMED.fetch_add(1, Ordering::Relaxed);
        Unnamed
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        UNNAMED.fetch_sub(1, Ordering::Release);
    }
}

/// Forgets the threads of the parent, in the child of a fork.
pub fn forget_unnamed_threads() {
    UNNAMED.store(0, Ordering::Relaxed);
}

/// Waits until all started threads have their names, but a tenth of a second at most: the child of a fork
/// that the library has not seen lacks a thread about to be named.
pub fn await_names_of_threads() {
    let begin = Instant::now();
    while UNNAMED.load(Ordering::Acquire) > 0 && begin.elapsed() < Duration::from_millis(100) {
        thread::yield_now();
    }
}

/// A thread that starts the others.
struct Starter {
    process: u32,
    jobs: Sender<Box<dyn FnOnce() + Send>>,
}

static STARTER: OnceBox<Starter> = OnceBox::new();

/// Starts all threads in another thread from now on. The kernel refuses new threads to a thread whose
/// children will be in another PID namespace.
///
/// # Errors
/// The errors of [`start_thread`].
pub fn start_threads_elsewhere() -> io::Result<()> {
    if STARTER.get().is_some() {
        return Ok(());
    }
    let (jobs, received) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
    let stack = 256 << 10;
    start_thread("smc-starter", stack, move || received.iter().for_each(|job| job()))?;
    let _ = STARTER.set(Starter { process: std::process::id(), jobs });
    Ok(())
}

/// Whether the kernel locks all memory mapped by the process (MCL_FUTURE), within RLIMIT_MEMLOCK.
static MEMORY_IS_LOCKED: AtomicBool = AtomicBool::new(false);

/// Notes that the program has locked its future memory, so a thread may lack memory from now on.
pub fn note_locked_memory() {
    MEMORY_IS_LOCKED.store(true, Ordering::Relaxed);
}

/// Whether libc has memory for the description of a thread: without such memory the standard library would
/// end the process. A program at its limit of locked memory can have no more, and neither can a program at
/// its limit of address space or data.
fn can_start_thread() -> io::Result<()> {
    const ENOUGH: usize = 16 << 10;
    let is_limited = |resource| resource_limit(resource).is_some();
    let is_locked = MEMORY_IS_LOCKED.load(Ordering::Relaxed);
    if !is_locked && !is_limited(libc::RLIMIT_AS) && !is_limited(libc::RLIMIT_DATA) {
        return Ok(());
    }
    // SAFETY: the memory is this function's, and free takes null, too.
    let is_there = unsafe {
        let memory = libc::malloc(ENOUGH);
        libc::free(memory);
        !memory.is_null()
    };
    is_there.then_some(()).ok_or(io::ErrorKind::OutOfMemory.into())
}

/// The fate of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinOutcome {
    /// The thread has ended.
    Ended,
    /// The thread has panicked.
    Panicked,
    /// The thread did not end in time, and runs on by itself.
    Runs,
}

/// Waits for the end of a thread already told to end, for at most `limit`. A thread in a wait for
/// descriptors cannot be told if the program has closed them.
pub fn join_within(thread: JoinHandle<()>, limit: Duration) -> JoinOutcome {
    let deadline = Instant::now() + limit;
    let mut pause = Duration::from_micros(20);
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            return JoinOutcome::Runs;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    if thread.join().is_ok() { JoinOutcome::Ended } else { JoinOutcome::Panicked }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_thread_that_does_not_end_is_left() {
        let (end, ended) = mpsc::channel::<()>();
        let runs = thread::spawn(move || ended.recv().unwrap_or_default());
        assert_eq!(join_within(runs, Duration::from_millis(50)), JoinOutcome::Runs);
        drop(end);
        let long = smc_test_support::TIMEOUT;
        assert_eq!(join_within(thread::spawn(|| ()), long), JoinOutcome::Ended);
        let panics = thread::spawn(|| std::panic::resume_unwind(Box::new(())));
        assert_eq!(join_within(panics, long), JoinOutcome::Panicked);
    }

    #[test]
    fn a_started_thread_has_its_name_after_the_wait() {
        let has_name = || {
            let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
            let name_of = |thread: std::fs::DirEntry| std::fs::read(thread.path().join("comm"));
            threads.flat_map(name_of).any(|name| name == b"awaited-name\n")
        };
        for _ in 0..200 {
            let (end, ended) = mpsc::channel::<()>();
            let thread = start_thread("awaited-name", USUAL_STACK, move || ended.recv()).unwrap();
            await_names_of_threads();
            assert!(has_name());
            drop(end);
            let _ = thread.join().unwrap();
        }
    }
}
