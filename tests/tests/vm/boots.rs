// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bed itself: guests boot, run commands, see their device and each other.

use std::time::{Duration, Instant};

use smc_tests::vm::{Bed, End, Run, Vm};

#[test]
fn a_guest_boots_and_sees_its_device() {
    let start = Instant::now();
    let bed = Bed::new();
    let guest = bed.guest("a");
    println!("booted in {:?}", start.elapsed());
    let ids = guest.ok("cat /sys/bus/pci/devices/*/vendor /sys/bus/pci/devices/*/device");
    assert!(ids.contains("0x1af4") && ids.contains("0x106c"), "{ids}");
    let driver = guest.ok("for d in /sys/bus/pci/devices/*; do
            [ $(cat $d/device) = 0x106c ] && basename $(readlink $d/driver)
        done; ls /dev/vfio");
    assert!(driver.contains("vfio-pci") && driver.contains("noiommu-0"), "{driver}");
    assert!(guest.power_off().success());
}

#[test]
fn commands_have_output_codes_and_signals() {
    let bed = Bed::new();
    let [guest] = bed.boot([Vm::named("a").no_ism()]);
    let output = guest.run("echo out; echo err >&2; exit 3");
    assert_eq!((output.out.as_str(), output.err.as_str()), ("out\n", "err\n"));
    assert_eq!(output.code(), 3);
    assert_eq!(guest.ok(Run::from(["cat"]).stdin("text")), "text");
    assert_eq!(guest.ok(Run::from("echo $X").env("X", "y")), "y\n");
    assert_eq!(guest.run(["/no/such/program"]).code(), 127);
    assert_eq!(guest.run("kill -11 $$").end, End::Signal(11));

    let sleeper = guest.spawn(["sleep", "1000"]);
    let mut counter = guest.spawn("for i in 1 2 3; do echo $i; done; sleep 1000");
    assert_eq!([counter.line(), counter.line(), counter.line()], ["1", "2", "3"]);
    assert_eq!(sleeper.ended(), None);
    sleeper.kill();
    assert_eq!(sleeper.ended(), Some(End::Signal(9)));
    assert_eq!(counter.ended(), None);

    let big = guest.ok("head -c 3000000 /dev/zero | tr '\\0' x");
    assert!(big.len() == 3_000_000 && big.bytes().all(|byte| byte == b'x'), "{}", big.len());
    // 0xff is no UTF-8.
    assert_eq!(guest.ok("printf 'a\\377b'"), "a\u{fffd}b");
}

#[test]
fn two_guests_reach_each_other_over_tcp() {
    let bed = Bed::new();
    let [a, b] = bed.pair();
    // At the end of its input, nc would close its half, and the client would stop sending.
    let server = a.spawn(Run::from("nc -l -p 5000").open_stdin());
    // The server may not listen yet.
    let line =
        format!("for i in $(seq 50); do nc {} 5000 && exit; sleep 0.1; done; exit 1", a.ip());
    b.ok(Run::from(line).stdin("hello from b\n"));
    assert_eq!(server.wait().ok(), "hello from b\n");
    assert_eq!(bed.list().iter().filter(|port| port.connected).count(), 2);
}

#[test]
fn a_paused_guest_answers_when_resumed() {
    let bed = Bed::new();
    let guest = bed.guest("a");
    guest.pause();
    assert!(!guest.running());
    let job = guest.spawn(["echo", "back"]);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(job.ended(), None);
    guest.resume();
    assert_eq!(job.wait().ok(), "back\n");
}

#[test]
fn guests_come_back_after_reset_panic_and_kill() {
    let bed = Bed::new();
    let mut guest = bed.guest("a");
    let job = guest.spawn(["sleep", "1000"]);
    guest.reset();
    assert_eq!(job.wait().end, End::Gone);
    assert_eq!(guest.ok(["echo", "reset"]), "reset\n");

    guest.rebooting(|| {
        guest.spawn("echo c > /proc/sysrq-trigger").wait();
    });
    assert!(guest.console().contains("sysrq triggered crash"), "{}", guest.console());

    let job = guest.spawn(["sleep", "1000"]);
    guest.kill();
    assert_eq!(job.wait().end, End::Gone);
    assert!(!guest.is_alive());
    guest.restart();
    assert_eq!(guest.ok(["echo", "again"]), "again\n");
}

#[test]
fn the_daemon_can_be_killed_and_started_again() {
    let bed = Bed::new();
    let guest = bed.guest("a");
    assert_eq!(bed.counters("a").connections, 1);
    bed.restart_daemon();
    smc_tests::eventually("QEMU connects again", || bed.counters("a").connected);
    guest.ok(["true"]);
}

#[test]
fn three_guests_share_an_ethernet() {
    let bed = Bed::new();
    let guests = bed.boot(["a", "b", "c"].map(|name| Vm::named(name).no_ism()));
    for from in &guests {
        for to in &guests {
            from.ok(format!("ping -c 1 -W 20 {}", to.ip()));
        }
    }
}

#[test]
fn a_device_can_be_unplugged() {
    let bed = Bed::new();
    let [guest] = bed.boot([Vm::named("a").another_ism().unpluggable()]);
    let count = || guest.ok("cat /sys/bus/pci/devices/*/device | grep -c 0x106c; true");
    assert_eq!(count(), "2\n");
    assert!(bed.counters("a").connected && bed.counters("a-2").connected);
    guest.qmp_with("device_del", &serde_json::json!({"id": "plug1"}));
    guest.qmp_event("DEVICE_DELETED", Duration::from_secs(30));
    assert_eq!(count(), "1\n");
    // The socket belongs to the machine and not to the device.
    guest.qmp_with("chardev-remove", &serde_json::json!({"id": "plug-socket1"}));
    smc_tests::eventually("the daemon sees it go", || !bed.counters("a-2").connected);
    assert!(bed.counters("a").connected);
}
