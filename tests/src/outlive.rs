// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An echoing process, with connections able to outlive their devices, while daemons come and go.
//! `smc-test-peer outlive` is this process, and its test is the other end of the connections.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use guest_driver::{Config, SmcListener, SmcStream, Stack};

use crate::bench::Fabric;

/// How bytes travel between the ends of each pair of devices: the first by the window, the second by
/// moves.
pub const PATHS: [Fabric; 2] = [Fabric::Window, Fabric::Move];

/// A stack with this device, of the pair with this number.
///
/// # Errors
/// The device is not there.
pub fn stack(pair: usize, device: &str) -> std::io::Result<Arc<Stack>> {
    let mut config: Config = PATHS[pair].config(0, device);
    config.outlive_device = true;
    // A connection too late in leaving holds the test up.
    config.testing.leave_time = Duration::from_secs(3600);
    Stack::open(config)
}

/// Resources of a process, and the outcome of its accepted connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Open descriptors.
    pub descriptors: usize,
    /// Resident memory, KiB.
    pub memory_kib: usize,
    /// Open devices of the process's stacks.
    pub devices: usize,
    /// Closed connections still in the process's stacks.
    pub closing: usize,
    /// Connections with an orderly end.
    pub whole: usize,
    /// Connections ended by an error.
    pub failed: usize,
}

impl Held {
    /// The counts of this process now.
    pub fn now(stacks: &[Arc<Stack>]) -> Held {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = |text: &str| text.split_whitespace().next().and_then(|n| n.parse().ok());
        Held {
            descriptors: fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count()),
            memory_kib: memory.and_then(number).unwrap_or_default(),
            devices: stacks.iter().map(|stack| stack.devices().len()).sum(),
            closing: stacks.iter().map(|stack| stack.totals().closing).sum(),
            whole: 0,
            failed: 0,
        }
    }

    /// The counts as a line of numbers.
    fn to_line(self) -> String {
        let Held { descriptors, memory_kib, devices, closing, whole, failed } = self;
        format!("{descriptors} {memory_kib} {devices} {closing} {whole} {failed}")
    }

    /// The counts in a process's line.
    ///
    /// # Panics
    /// If the line is malformed.
    pub fn from_line(line: &str) -> Held {
        let numbers: Vec<usize> =
            line.split(' ').map(|n| n.parse().unwrap_or_else(|_| panic!("{line}"))).collect();
        let [descriptors, memory_kib, devices, closing, whole, failed] = numbers[..] else {
            panic!("{line}")
        };
        Held { descriptors, memory_kib, devices, closing, whole, failed }
    }
}

/// Accepts connections on each of the two devices, and echoes. Says the addresses of its listeners,
/// and its resources for each line of its standard input.
///
/// # Panics
/// If a device is missing.
pub fn serve(devices: [&str; 2], say: impl Fn(&str)) {
    let ended = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let mut addresses = Vec::new();
    let stacks: Vec<_> = devices.iter().enumerate().map(|(n, at)| stack(n, at).unwrap()).collect();
    for stack in &stacks {
        let listener = SmcListener::bind(stack, "127.0.0.1:0").unwrap();
        addresses.push(listener.local_addr().unwrap().to_string());
        let ended = ended.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, ended) = (stream.unwrap(), ended.clone());
                thread::spawn(move || {
                    let failed =
                        send_back(stream).inspect_err(|error| eprintln!("outlive: {error}"));
                    ended[usize::from(failed.is_err())].fetch_add(1, Ordering::SeqCst);
                });
            }
        });
    }
    say(&addresses.join(" "));
    for _ in std::io::stdin().lines().map_while(Result::ok) {
        let [whole, failed] = [0, 1].map(|n: usize| ended[n].load(Ordering::SeqCst));
        say(&Held { whole, failed, ..Held::now(&stacks) }.to_line());
    }
}

fn send_back(mut stream: SmcStream) -> std::io::Result<()> {
    let mut buf = vec![0; 20_000];
    loop {
        match stream.read(&mut buf)? {
            0 => return stream.shutdown(Shutdown::Write),
            n => stream.write_all(&buf[..n])?,
        }
    }
}
