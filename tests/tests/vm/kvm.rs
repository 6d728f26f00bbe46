// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How kicks, interrupts and mappings travel under KVM. `cargo xtask vm --nested` runs these tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use smc_tests::eventually;
use smc_tests::vm::{Bed, Guest, print_always};

use crate::ends::{Client, serve};

/// Where the kernel's trace facilities are.
const TRACING: &str = "/sys/kernel/tracing";
/// Kernel functions on the path of kicks and interrupts.
const WAKING: [&str; 4] = [
    // A guest's store to the address of an ioeventfd.
    "ioeventfd_write",
    // A write to the eventfd of an irqfd.
    "irqfd_wakeup",
    // A read of an eventfd.
    "eventfd_read",
    // QEMU asks for an interrupt.
    "kvm_send_userspace_msi",
];
/// Kernel functions on the path of a mapping.
const MAPPING: [&str; 2] = [
    // QEMU adds, moves or removes a memory slot.
    "kvm_set_memory_region",
    // The addresses of some memory of QEMU's process are about to change.
    "kvm_mmu_notifier_invalidate_range_start",
];

/// Names of threads: of a guest's processor, of the daemon's queues, of QEMU's main loop.
const PROCESSOR: &str = "CPU 0/KVM";
const DAEMON: &str = "vring_worker";
const QEMU: &str = "ism-";

/// Whether guests run under KVM here, and KVM's functions can be probed.
fn can_probe() -> bool {
    let kvm = std::env::var_os("ACCEL").is_some_and(|accel| accel == "kvm");
    let probes = Path::new(TRACING).join("kprobe_events").exists();
    if !(kvm && probes) {
        print_always("NOT TESTED here: the paths under KVM. cargo xtask vm --nested tests them");
    }
    kvm && probes
}

/// Records calls of some functions during its life.
struct Probes;

impl Probes {
    #[track_caller]
    fn of(functions: &[&str]) -> Probes {
        let commands: String =
            functions.iter().map(|name| format!("p:ism/{name} {name}\n")).collect();
        write("kprobe_events", &commands);
        write("buffer_size_kb", "4096");
        write("events/ism/enable", "1");
        write("trace", "");
        Probes
    }

    /// Ends the record, and returns the calls so far: how often a thread of a name has called a
    /// function.
    #[track_caller]
    fn calls(&self) -> Calls {
        write("tracing_on", "0");
        let trace = fs::read_to_string(format!("{TRACING}/trace")).unwrap();
        let mut calls = Calls::default();
        for (thread, function) in trace.lines().filter_map(call) {
            *calls.0.entry((thread.to_owned(), function.to_owned())).or_default() += 1;
        }
        calls
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        for (file, value) in
            [("events/ism/enable", "0"), ("kprobe_events", ""), ("tracing_on", "1")]
        {
            let _ = fs::write(format!("{TRACING}/{file}"), value);
        }
    }
}

#[track_caller]
fn write(file: &str, value: &str) {
    fs::write(format!("{TRACING}/{file}"), value).unwrap_or_else(|error| panic!("{file}: {error}"));
}

/// Thread and function, from a line such as
/// `  CPU 0/KVM-153     [001] .....   113.522549: ioeventfd_write: (ioeventfd_write+0x0/0x80)`.
fn call(line: &str) -> Option<(&str, &str)> {
    let (task, rest) = line.split_once(" [")?;
    let (thread, _) = task.trim().rsplit_once('-')?;
    let (_, rest) = rest.split_once(": ")?;
    Some((thread, rest.split_once(": ")?.0))
}

/// How often threads, by their names, have called functions.
#[derive(Debug, Default)]
struct Calls(BTreeMap<(String, String), u64>);

impl Calls {
    /// Calls of a function by threads whose name begins so.
    fn by(&self, thread: &str, function: &str) -> u64 {
        let calls = self.0.iter().filter(|((t, f), _)| t.starts_with(thread) && f == function);
        calls.map(|(_, n)| n).sum()
    }
}

/// Counters of the daemon and of KVM at one moment.
#[derive(Clone, Copy, Debug)]
struct Counts {
    /// Signals requested by drivers, less signals without a need for a kick.
    kicks: u64,
    /// Wake records in drivers' event queues.
    wakes: u64,
    /// How often a guest's processor went back to QEMU for a store or load.
    qemu_exits: u64,
}

impl Counts {
    #[track_caller]
    fn now(bed: &Bed, guests: &[Guest; 2]) -> Counts {
        let ports = bed.list();
        Counts {
            kicks: ports.iter().map(|port| port.counts.signals - port.counts.kicks_saved).sum(),
            wakes: ports.iter().map(|port| port.counts.wakes).sum(),
            qemu_exits: guests.iter().map(|guest| statistic(guest, "mmio_exits")).sum(),
        }
    }

    fn since(self, before: Counts) -> Counts {
        Counts {
            kicks: self.kicks - before.kicks,
            wakes: self.wakes - before.wakes,
            qemu_exits: self.qemu_exits - before.qemu_exits,
        }
    }
}

/// KVM's counter of a machine: a file of `/sys/kernel/debug/kvm/PID-FD`.
#[track_caller]
fn statistic(guest: &Guest, name: &str) -> u64 {
    let pid = guest.pid();
    let machines = fs::read_dir("/sys/kernel/debug/kvm").unwrap().flatten();
    let of = |name: &str| name.split_once('-').is_some_and(|(owner, _)| owner == pid.to_string());
    let mut machines = machines.filter(|entry| of(&entry.file_name().to_string_lossy()));
    let machine = machines.next().unwrap_or_else(|| panic!("KVM has no machine of process {pid}"));
    let text = fs::read_to_string(machine.path().join(name)).unwrap();
    text.trim().parse().unwrap()
}

#[test]
fn kicks_and_interrupts_do_not_pass_through_qemu() {
    if !can_probe() {
        return;
    }
    let bed = Bed::alone();
    let guests = bed.pair();
    let [a, b] = &guests;
    let _server = serve(a);
    let mut client = Client::new(b, a);
    client.connect();
    client.command("stream");
    let before = Counts::now(&bed, &guests);
    let probes = Probes::of(&WAKING);
    let mut counts = before;
    eventually("there were a thousand wakes", || {
        thread::sleep(Duration::from_secs(1));
        counts = Counts::now(&bed, &guests).since(before);
        counts.wakes >= 1000
    });
    let calls = probes.calls();
    print_always(&format!("{counts:?}, {calls:?}"));
    let few = counts.wakes / 5;
    // Now and then a kick finds the queue busy, and is unnecessary; so is an interrupt. An eventfd
    // read by the daemon, or by KVM, was not read by QEMU: QEMU's own reads are of other eventfds.
    assert!(calls.by(PROCESSOR, "ioeventfd_write") >= counts.kicks / 2);
    assert!(calls.by(DAEMON, "eventfd_read") >= counts.kicks / 2);
    assert!(calls.by(DAEMON, "irqfd_wakeup") >= counts.wakes / 2);
    assert!(calls.by("", "kvm_send_userspace_msi") < few);
    assert!(counts.qemu_exits < few);
    bed.assert_faultless();
}

#[test]
fn a_slab_in_the_window_costs_a_notification_and_no_memory_slot() {
    if !can_probe() {
        return;
    }
    for connections in [1, 16, 500] {
        let bed = Bed::alone();
        let guests = bed.pair();
        let [a, b] = &guests;
        let server = a.spawn("exec smc perf --device pci --serve 7000");
        server.wait_for("serving");
        let faults = || guests.iter().map(|guest| statistic(guest, "pf_taken")).sum::<u64>();
        let before = faults();
        let probes = Probes::of(&MAPPING);
        let client = b.spawn(format!(
            "exec smc perf --device pci --to {}:7000 echo_200 --connections {connections} \
             --buffer 1M --runs 1 --seconds 2",
            a.ip()
        ));
        let mut slabs = 0;
        while client.ended().is_none() {
            slabs = slabs.max(bed.list().iter().map(|port| port.slabs).sum());
            thread::sleep(Duration::from_millis(50));
        }
        client.wait().ok();
        let calls = probes.calls();
        let notified = calls.by(QEMU, "kvm_mmu_notifier_invalidate_range_start");
        print_always(&format!(
            "{connections} connections, {slabs} slabs: {} changes of memory slots, {notified} \
             notifications, {} page faults of both guests",
            calls.by("", "kvm_set_memory_region"),
            faults() - before
        ));
        assert!(slabs >= 2);
        assert_eq!(calls.by("", "kvm_set_memory_region"), 0);
        assert!(notified >= slabs);
    }
}
