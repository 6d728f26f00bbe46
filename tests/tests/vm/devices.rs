//! How a guest's devices come to programs, and what is said of them.

use smc_tests::vm::{Bed, Vm};

use crate::ends::{Client, serve};

#[test]
fn a_device_is_bound_listed_measured_and_given_back() {
    let bed = Bed::new();
    let [a] = bed.boot([Vm::named("a").append("ism.bind=no")]);
    let unbound = a.ok(["smc", "devices"]);
    println!("{unbound}");
    assert!(unbound.contains("smc devices --bind"), "{unbound}");
    a.ok(["smc", "devices", "--bind"]);
    // As often as one likes.
    a.ok(["smc", "devices", "--bind"]);
    let listed = a.ok(["smc", "devices", "--json"]);
    let devices: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let device = &devices[0];
    println!("{device}");
    assert_eq!(device["driver"], "vfio-pci", "{device}");
    assert_eq!(device["chid"], "ff00", "{device}");
    assert_eq!(device["path"], "window", "{device}");
    for rate in ["store_rate", "load_rate"] {
        assert!(device[rate].as_u64().is_some_and(|rate| rate > 500 << 20), "{rate}: {device}");
    }
    assert_eq!(device["window"].as_u64(), Some(64 << 30), "{device}");
    a.ok(["smc", "devices", "--unbind"]);
    assert_ne!(a.run(["smc-test-peer", "rogue", "look", "pci"]).code(), 0);
    bed.assert_faultless();
}

#[test]
fn uio_and_one_interrupt_line_do_as_well() {
    let bed = Bed::new();
    let [a, b] = bed.boot([Vm::named("a"), Vm::named("b").append("ism.bind=no")]);
    b.ok(["smc", "devices", "--bind", "--uio"]);
    let listed = b.ok(["smc", "devices"]);
    println!("{listed}");
    assert!(listed.contains("uio_pci_generic") && listed.contains("INTx"), "{listed}");
    let _server = serve(&a);
    let mut client = Client::new(&b, &a);
    client.connect();
    for _ in 0..20 {
        client.ping();
    }
    // It sleeps until the line goes up.
    assert_eq!(client.tell("wait"), "waits");
    a.reset();
    client.failed_after();
    bed.assert_faultless();
}
