// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Processor time of a run: of both ends and the daemon, in user mode and in the kernel.
//!
//! The client asks the kernel at the beginning and at the end of the measurement. Time of the
//! kernel in interrupts is charged to the interrupted process: with TCP over the loopback interface
//! mostly to the sender.

use std::fs;
use std::time::{Duration, Instant};

use ism_sys::processor_time;
use serde::{Deserialize, Serialize};

use super::process_status::memory_of;

/// The processes of a run besides the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RunProcesses {
    pub(super) server: u32,
    /// Of SMC-D.
    pub(super) daemon: Option<u32>,
}

/// Processor time of a run, and its amount of work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Usage {
    /// Bytes, messages or connections.
    work: f64,
    /// Processor time of both ends, seconds.
    ends: f64,
    /// Processor time of the daemon, seconds.
    daemon: f64,
    /// Share of the processors' time used by other processes, or other virtual machines: 0 to 1.
    others: f64,
}

impl Usage {
    /// Processor time for a unit of work, seconds.
    pub(super) fn per_work(&self) -> f64 {
        (self.ends + self.daemon) / self.work
    }

    /// How much of the machine others have used.
    pub(super) fn others(&self) -> f64 {
        self.others
    }
}

/// The measurement of one run.
pub(super) struct Meter {
    processes: RunProcesses,
    start: Sample,
}

/// The cost of setting up connections.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Setup {
    /// Time, seconds.
    pub(super) seconds: f64,
    /// Private memory of client, server and daemon for the connections, bytes.
    pub(super) memory: [f64; 3],
}

/// Measures the cost of setting up connections.
pub(super) struct SetupMeter {
    processes: RunProcesses,
    at: Instant,
    memory: [u64; 3],
}

impl SetupMeter {
    /// Begins. `None`: see [`Meter::start`].
    pub(super) fn start(others: Option<RunProcesses>) -> Option<SetupMeter> {
        let processes = others?;
        Some(SetupMeter { processes, memory: memory(processes)?, at: Instant::now() })
    }

    /// Ends.
    pub(super) fn stop(self) -> Option<Setup> {
        let seconds = self.at.elapsed().as_secs_f64();
        let now = memory(self.processes)?;
        let grown = |at: usize| now.get(at)?.checked_sub(*self.memory.get(at)?);
        let memory = [0, 1, 2].map(|at| grown(at).unwrap_or(0) as f64);
        Some(Setup { seconds, memory })
    }
}

/// Private memory of client, server and daemon.
fn memory(processes: RunProcesses) -> Option<[u64; 3]> {
    let of = |pid| memory_of(pid, "RssAnon:").ok();
    Some([of(std::process::id())?, of(processes.server)?, processes.daemon.map_or(Some(0), of)?])
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    ends: Duration,
    daemon: Duration,
    /// Busy time of the processors.
    machine: Duration,
}

impl Meter {
    /// Begins. `None`: the other processes are unknown, because they run on another machine.
    pub(super) fn start(others: Option<RunProcesses>) -> Option<Meter> {
        let processes = others?;
        Some(Meter { processes, start: sample(processes)? })
    }

    /// Ends, after so much work.
    pub(super) fn stop(self, work: u64) -> Option<Usage> {
        let end = sample(self.processes)?;
        let since = |now: Duration, before: Duration| now.saturating_sub(before).as_secs_f64();
        let ends = since(end.ends, self.start.ends);
        let daemon = since(end.daemon, self.start.daemon);
        let machine = since(end.machine, self.start.machine);
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        let time = (end.at - self.start.at).as_secs_f64() * processors as f64;
        let others = ((machine - ends - daemon) / time).clamp(0.0, 1.0);
        (work > 0).then_some(Usage { work: work as f64, ends, daemon, others })
    }
}

fn sample(processes: RunProcesses) -> Option<Sample> {
    let of = |pid| processor_time(pid).ok();
    Some(Sample {
        at: Instant::now(),
        ends: of(std::process::id())? + of(processes.server)?,
        daemon: processes.daemon.map_or(Some(Duration::ZERO), of)?,
        // Last, so the other processes do not seem busy.
        machine: busy(&fs::read_to_string("/proc/stat").ok()?)?,
    })
}

/// The busy time in the first line of /proc/stat. Separately counted time in interrupts is left
/// out, because the ends cause most of it.
fn busy(stat: &str) -> Option<Duration> {
    let mut columns = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    // user, nice, system, idle, iowait, irq, softirq, steal
    let mut ticks = || columns.next().and_then(|ticks| ticks.parse::<u64>().ok());
    let busy = ticks()? + ticks()? + ticks()?;
    let [_, _, _, _, steal] = [ticks()?, ticks()?, ticks()?, ticks()?, ticks()?];
    let per_second = rustix::param::clock_ticks_per_second();
    Some(Duration::from_secs_f64((busy + steal) as f64 / per_second as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_is_that_of_programs_and_of_other_machines() {
        let tick = 1.0 / rustix::param::clock_ticks_per_second() as f64;
        let stat = "cpu  100 20 3 5000 600 70 80 4 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(busy(stat), Some(Duration::from_secs_f64(127.0 * tick)));
        assert_eq!(busy("cpu0 1 2"), None);
        assert!(busy(&fs::read_to_string("/proc/stat").unwrap()).unwrap() > Duration::ZERO);
    }

    #[test]
    fn work_is_charged_with_the_time_of_ends_and_daemon() {
        let usage = Usage { work: 4.0, ends: 1.5, daemon: 0.5, others: 0.0 };
        assert_eq!(usage.per_work(), 0.5);
    }
}
