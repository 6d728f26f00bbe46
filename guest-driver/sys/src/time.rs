// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Durations in the form of the kernel, its clocks, and the processor time of a process.

use std::io;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::time::ClockId;

/// Converts a timeout for system calls. A duration beyond the range of the kernel becomes the
/// longest one.
pub fn timespec(timeout: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    }
}

/// The time of a kernel clock.
///
/// libc reads the clock, because `rustix` panics on a kernel whose vDSO lacks another function
/// (`__vdso_getcpu`), such as user-mode Linux.
pub fn read_clock(clock: ClockId) -> Timespec {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: libc may write to `time`, and knows each of these clocks.
    let read = unsafe { libc::clock_gettime(clock as libc::clockid_t, &mut time) };
    debug_assert_eq!(read, 0, "{clock:?}");
    Timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_nsec }
}

/// The processor time used by a process until now: in its own code and in the kernel, by all present and
/// past threads.
///
/// # Errors
/// There is no such process.
pub fn processor_time(pid: u32) -> io::Result<Duration> {
    // The kernel's name for the clock of a process (clock_getcpuclockid(3)): the inverted number,
    // then "of a process" and "in nanoseconds".
    const SCHED: i32 = 2;
    let pid = i32::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    let clock = (!pid << 3) | SCHED;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel may write to `time`, and checks the clock.
    if unsafe { libc::clock_gettime(clock, &mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Ok(Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_time_of_a_process_is_that_of_its_threads_and_not_that_of_the_clock() {
        let own = std::process::id();
        let before = processor_time(own).unwrap();
        let spin = || {
            let start = read_clock(ClockId::ThreadCPUTime);
            loop {
                let now = read_clock(ClockId::ThreadCPUTime);
                let nanos =
                    (now.tv_sec - start.tv_sec) * 1_000_000_000 + now.tv_nsec - start.tv_nsec;
                if nanos > 30_000_000 {
                    return;
                }
            }
        };
        std::thread::spawn(spin).join().unwrap();
        let used = processor_time(own).unwrap() - before;
        assert!(used >= Duration::from_millis(29), "{used:?}");
        // A sleeping child uses next to none.
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        std::thread::sleep(Duration::from_millis(60));
        let used = processor_time(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(used.unwrap() < Duration::from_millis(50));
        assert!(processor_time(u32::MAX).is_err());
    }
}
