// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask vm demo`: two virtual machines meet over shared memory.
#![allow(clippy::unwrap_used, reason = "it ends at its first surprise")]

use std::time::{Duration, Instant};

use smc_tests::vm::{Bed, Guest, Run, Vm};

/// MiB to send.
const SIZE: u32 = 256;

fn main() {
    println!("1. A fabric");
    let bed = Bed::new();
    println!("   vhost-device-ism is process {}; it has no guests yet.\n", bed.daemon_pid());

    println!("2. Two virtual machines");
    let start = Instant::now();
    let [a, b] = bed.boot(["a", "b"].map(|name| Vm::named(name).mem("1G")));
    for guest in [&a, &b] {
        let port = bed.counters(guest.name());
        println!(
            "   {} is QEMU process {}, address {}; its window is {} GiB of PCI BAR.",
            guest.name(),
            guest.pid(),
            guest.ip(),
            port.window_size >> 30
        );
    }
    println!("   They have booted within {:.1} s.\n", start.elapsed().as_secs_f32());

    println!("3. The device inside each, driven from user space through VFIO");
    for guest in [&a, &b] {
        println!("   {}$ smc devices", guest.name());
        show(&guest.ok(["smc", "devices"]));
    }

    println!("4. A connection: TCP first, three messages, then memory");
    let (smc, said) = transfer(
        [&a, &b],
        Run::from("smc listen -v --device pci 5000 > /tmp/copy"),
        &format!("smc connect -v --device pci {} 5000", a.ip()),
    );
    println!("   a$ smc listen -v --device pci 5000 > copy");
    show(&said[0]);
    println!("   b$ smc connect -v --device pci {} 5000 < data", a.ip());
    show(&said[1]);

    println!("5. The same data over TCP and virtio-net");
    // At the end of its input the server would close its half, and its client would stop sending.
    let server = Run::from("nc -l -p 5001 > /tmp/copy").open_stdin();
    let (tcp, _) = transfer([&a, &b], server, &format!("nc {} 5001", a.ip()));
    let rate = |time: Duration| f64::from(SIZE) / time.as_secs_f64();
    println!("   SMC-D {:6.0} MiB/s", rate(smc));
    println!("   TCP   {:6.0} MiB/s, programs' start and handshake included", rate(tcp));
    println!("   {:.1} times as fast; both copies are what was sent.\n", rate(smc) / rate(tcp));

    println!("6. What the daemon counted");
    for guest in [&a, &b] {
        let port = bed.counters(guest.name());
        println!(
            "   {}: {} DMBs, {} attached, {} moves, {} kicks saved, {} wakes",
            port.name,
            port.dmbs,
            port.attached,
            port.counts.moves,
            port.counts.kicks_saved,
            port.counts.wakes
        );
    }
}

/// Sends random data from the second guest to the first. Returns the time taken, and the programs'
/// output.
fn transfer([to, from]: [&Guest; 2], server: Run, client: &str) -> (Duration, [String; 2]) {
    from.ok(format!("[ -e /tmp/data ] || head -c {SIZE}m /dev/urandom > /tmp/data"));
    let server = to.spawn(server);
    // A port without a listener yet refuses the client.
    smc_tests::eventually("the server listens", || {
        to.run("netstat -ltn | grep -q ':500[01] '").code() == 0
    });
    let start = Instant::now();
    let sent = from.run(Run::from(format!("{client} < /tmp/data")));
    let took = start.elapsed();
    server.close_stdin();
    let received = server.wait();
    assert!(sent.code() == 0 && received.code() == 0, "{sent}\n{received}");
    let sums = [to.ok("sha256sum < /tmp/copy"), from.ok("sha256sum < /tmp/data")];
    assert_eq!(sums[0], sums[1], "the copy is not what was sent");
    (took, [received.err, sent.err])
}

fn show(text: &str) {
    for line in text.trim_end().lines() {
        println!("      {line}");
    }
    println!();
}
