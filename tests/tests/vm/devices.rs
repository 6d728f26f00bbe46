// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How programs get a guest's devices, and the reports about the devices.

use std::path::Path;
use std::time::Duration;

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
    // Binding may be repeated.
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
    // The driver sleeps until the interrupt line goes up.
    assert_eq!(client.command("wait"), "waits");
    a.reset();
    client.failed_after();
    bed.assert_faultless();
}

#[test]
fn launch_scripts_give_each_guest_as_many_devices_as_asked() {
    let bed = Bed::new();
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../qemu");
    let launch = |name: &str, args: &[&str]| {
        let script = scripts.join(name);
        let mut command = vec![script.to_str().unwrap(), "--devices", "2"];
        command.extend(args);
        let ended = bed.program(name, &command).wait(Duration::from_secs(120));
        assert!(
            ended.success(),
            "{name}: {ended}, see {}",
            bed.log(&format!("{name}.log")).display()
        );
    };
    // Each is there, and can be had by a program.
    let has_two = "set -e; test $(smc devices --json | grep -o '\"ff00\"' | wc -l) = 2; \
                   test $(ls -d /sys/bus/pci/drivers/vfio-pci/0* | wc -l) = 2";
    launch("two.sh", &[has_two, has_two]);
    launch("many.sh", &["1", has_two]);
}
