// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Failing allocations: each of the first 100 of pages during the probe of a device, and each one of a
//! connecting program.
//!
//! Slab allocations do not fail during the probe: user-mode Linux would not release the parts of an
//! interrupt after a failed allocation, and would warn the next time.

use std::time::Duration;

use smc_tests::vm::{Bed, Run, Uml};

use crate::ends::{End, connection_on, one, pair};

/// Enough for some hundred rounds.
const LIMIT: Duration = Duration::from_secs(180);

/// The first number of a text.
#[track_caller]
fn number(text: &str) -> u32 {
    let digits = text.split_whitespace().next().and_then(|word| word.parse().ok());
    digits.unwrap_or_else(|| panic!("no number: {text}"))
}

#[test]
fn a_device_is_probed_although_any_allocation_may_fail() {
    let bed = Bed::new();
    let guest = one(&bed);
    guest.ok("cd /sys/bus/virtio/drivers/virtio_ism && echo virtio? > unbind");
    let driver = "/sys/bus/virtio/drivers/virtio_ism";
    let (bind, unbind) = (format!("{driver}/bind"), format!("{driver}/unbind"));
    let device = guest.ok("ls /sys/bus/virtio/devices").trim().to_owned();
    // Queues, and most of 128 slots of moves; a slab needs fewer pages. The later allocations are
    // AF_SMC's, and AF_SMC panics later without their memory (docs/linux.md).
    let fail = ["smc-test-peer", "linux", "fail-writes", &bind, &device, &unbind, "100"];
    let said = guest.ok(Run::from(fail).within(LIMIT));
    println!("{said}");
    assert!(number(&said) > 80, "{said}");
    guest.ok(["sh", "-c", &format!("echo {device} > {bind}")]);
    let mut server = End::serve(&guest, "linux");
    let mut client = End::talk(&guest, "linux", &guest.ip());
    connection_on("smc-d", &mut server, &mut client, "bulk 300000 1");
    drop((server, client));
    guest.finish();
}

#[test]
fn a_client_connects_or_fails_although_any_allocation_may_fail() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    let server = End::serve(&a, "linux");
    let mut client = End::talk_within(&b, "linux", &a.ip(), LIMIT);
    client.order("failing 0 1");
    let report = client.report();
    println!("{}", report.note);
    assert_eq!(report.error, "", "{}", report.note);
    assert!(number(&report.note) > 30, "{}", report.note);
    server.kill();
    client.kill();
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    connection_on("smc-d", &mut server, &mut client, "bulk 1000000 2");
    drop((server, client));
    bed.assert_faultless();
    Uml::finish_all([a, b]);
}
