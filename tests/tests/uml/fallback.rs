// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections falling back to TCP: bytes flow, and the kernel reports the reason.

use smc_tests::vm::{Bed, Uml};

use crate::ends::{End, connection, connection_on, pair};

// Shows: EID-8.
#[test]
fn without_a_common_enterprise_id_connections_are_tcp() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    b.ok("smc-test-peer linux no-ueids");
    b.ok("smc-test-peer linux ueid ANOTHER");
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    let [here, there] = connection(&mut server, &mut client, "bulk 100000 1");
    assert_eq!(here.carrier.kind, "tcp", "{:?}", here.carrier);
    assert_eq!(there.carrier.kind, "tcp", "{:?}", there.carrier);
    assert_ne!(here.carrier.reason, "", "the kernel says why");
    b.ok("smc-test-peer linux no-ueids");
    b.ok("smc-test-peer linux ueid VIRTIO-ISM");
    connection_on("smc-d", &mut server, &mut client, "bulk 100000 2");
    drop((server, client));
    Uml::finish_all([a, b]);
}

#[test]
fn a_kernel_without_the_device_gets_tcp() {
    let bed = Bed::new();
    let [a, b] = pair(&bed);
    b.ok("rmmod virtio_ism");
    let mut server = End::serve(&a, "linux");
    let mut client = End::talk(&b, "linux", &a.ip());
    connection_on("tcp", &mut server, &mut client, "bulk 100000 1");
    b.ok("insmod /lib/modules/virtio_ism.ko");
    connection_on("smc-d", &mut server, &mut client, "bulk 100000 2");
    drop((server, client));
    Uml::finish_all([a, b]);
}
