// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Deadlines: a hanging test reports its place and aborts the process.

use std::collections::HashMap;
use std::io::Write;
use std::panic::Location;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
pub use smc_test_support::{TIMEOUT, eventually};

/// Default deadline of a test: a watchdog, like [`TIMEOUT`].
pub const LIMIT: Duration = Duration::from_secs(300);

/// `time` on a slow machine, an emulated one: `SMC_TEST_SLOW=N` multiplies it.
pub fn slowly(time: Duration) -> Duration {
    time * slowness()
}

/// Scales `rounds` identical rounds down for a slow machine, so they take the same time.
pub fn fewer(rounds: usize) -> usize {
    rounds.div_ceil(slowness() as usize)
}

fn slowness() -> u32 {
    static SLOW: OnceLock<u32> = OnceLock::new();
    *SLOW.get_or_init(|| {
        let text = std::env::var("SMC_TEST_SLOW").unwrap_or_else(|_| "1".into());
        text.parse().ok().filter(|n| *n > 0).expect("SMC_TEST_SLOW is a number, 1 or more")
    })
}

/// [`TIMEOUT`] with this machine.
pub fn test_timeout() -> Duration {
    slowly(TIMEOUT)
}

struct Watched {
    name: String,
    end: Instant,
    limit: Duration,
}

#[derive(Default)]
struct Table {
    tests: HashMap<u64, Watched>,
    notes: HashMap<ThreadId, (String, String, Instant)>,
    next: u64,
}

fn table() -> MutexGuard<'static, Table> {
    static TABLE: OnceLock<Mutex<Table>> = OnceLock::new();
    TABLE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes a thread's note at the thread's end.
struct Noted;

impl Drop for Noted {
    fn drop(&mut self) {
        table().notes.remove(&thread::current().id());
    }
}

thread_local! {
    static NOTED: Noted = const { Noted };
}

/// Notes the calling thread's next act; printed if a test hangs.
#[track_caller]
pub fn note(what: impl Into<String>) {
    let place = Location::caller();
    let current = thread::current();
    let _ = NOTED.try_with(|_| ());
    let who = current.name().unwrap_or("unnamed").to_owned();
    let what = format!("{}:{}: {}", place.file(), place.line(), what.into());
    table().notes.insert(current.id(), (who, what, Instant::now()));
}

/// Checks how long wake-ups took, by a [`Stopwatch`](smc_test_support::Stopwatch). A lost one is made
/// good for after a second, and refused; on a slow machine one in ten may be late for other reasons.
#[track_caller]
pub fn assert_prompt(wakes: &[Duration]) {
    let late = wakes.iter().filter(|wake| **wake >= Duration::from_millis(900)).count();
    let slow = slowly(Duration::from_secs(1)) > Duration::from_secs(1);
    let allowed = if slow { wakes.len().div_ceil(10) } else { 0 };
    println!("longest wake-up: {:?}", wakes.iter().max());
    assert!(late <= allowed, "{late} of {} wake-ups are late: {wakes:?}", wakes.len());
}

/// Runs `body` with a deadline for a machine of ordinary speed (see [`slowly`]). Past the deadline,
/// the process prints every thread's note and aborts: a hung test cannot be ended in any other way.
#[track_caller]
pub fn watched<T>(limit: Duration, body: impl FnOnce() -> T) -> T {
    static WATCHER: OnceLock<()> = OnceLock::new();
    WATCHER.get_or_init(|| {
        raise_descriptor_limit();
        thread::Builder::new().name("watch".into()).spawn(watch).unwrap();
    });
    let limit = slowly(limit);
    let name = thread::current().name().unwrap_or("unnamed").to_owned();
    note("begins");
    let key = {
        let mut table = table();
        let key = table.next;
        table.next += 1;
        table.tests.insert(key, Watched { name, end: Instant::now() + limit, limit });
        key
    };
    struct Unwatch(u64);
    impl Drop for Unwatch {
        fn drop(&mut self) {
            table().tests.remove(&self.0);
        }
    }
    let _unwatch = Unwatch(key);
    body()
}

/// Raises the soft limit of descriptors. The devices of all tests of a program share one limit, and a
/// user's usual one of 1,024 leaves two doorbells to a device.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
}

fn watch() {
    loop {
        thread::sleep(Duration::from_millis(200));
        let now = Instant::now();
        let table = table();
        let Some(late) = table.tests.values().find(|test| test.end <= now) else { continue };
        // `eprintln!` would not do: the test harness captures its output.
        let _ = std::io::stderr().write_all(report(&table, late).as_bytes());
        std::process::abort();
    }
}

fn report(table: &Table, late: &Watched) -> String {
    let mut text = format!("\n{} hangs: not done after {:?}\n", late.name, late.limit);
    for (who, what, since) in table.notes.values() {
        text += &format!("  {who}, {:.1} s ago: {what}\n", since.elapsed().as_secs_f32());
    }
    text += "threads:\n";
    for entry in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read = |file| std::fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        let (comm, call, wchan) = (read("comm"), read("syscall"), read("wchan"));
        let call = call.split(' ').next().unwrap_or_default().trim();
        text += &format!("  {:<16} in system call {call} ({wchan})\n", comm.trim());
    }
    text
}
