// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask vm perf`: SMC-D between two guests, next to TCP over virtio-net and, given a back end
//! (`VSOCK_DAEMON`), next to virtio sockets; with `VFIO_USER`, by this protocol. The arguments go to
//! `smc perf --to`.
#![allow(clippy::unwrap_used, reason = "it ends at its first surprise")]

use std::time::Duration;

use smc_tests::vm::{Bed, Guest, Run, Vm};

/// Context ids of the guests.
const CID: [u32; 2] = [3, 4];

fn main() {
    let bed = Bed::new();
    let sockets = CID.map(|cid| bed.path(&format!("vsock{cid}")));
    let vsock = std::env::var_os("VSOCK_DAEMON").map(|daemon| {
        let mut command = vec![daemon];
        for (cid, socket) in CID.iter().zip(&sockets) {
            let host = bed.path(&format!("vsock{cid}-host"));
            command.push("--vm".into());
            let (socket, host) = (socket.display(), host.display());
            command.push(format!("guest-cid={cid},socket={socket},uds-path={host}").into());
        }
        let program = bed.program("vsock", &command);
        smc_tests::eventually("the vsock back end listens", || {
            assert!(program.ended().is_none(), "the vsock back end has ended");
            sockets.iter().all(|socket| socket.exists())
        });
        program
    });
    let vfio_user = std::env::var_os("VFIO_USER").is_some();
    let [a, b] = ["a", "b"].map(|name| {
        let vm = Vm::named(name);
        if vfio_user { vm.vfio_user() } else { vm }
    });
    let [a, b] = match vsock {
        Some(_) => [a.vsock(&sockets[0]), b.vsock(&sockets[1])],
        None => [a, b],
    };
    eprintln!("vm-perf: boots two guests");
    let [a, b] = bed.boot([a, b]);
    let _server = a.spawn(["smc", "perf", "--serve", "7000", "--device", "pci"]);
    wait_for_port(&a, 7000);

    let mut command: Vec<String> =
        ["smc", "perf", "--device", "pci", "--to"].map(str::to_owned).into();
    command.push(format!("{}:7000", a.ip()));
    if vsock.is_some() {
        command.extend(["--vsock".to_owned(), CID[0].to_string()]);
    }
    command.extend(std::env::args().skip(1));
    eprintln!("vm-perf: measures ({})", command.join(" "));
    let mut client = b.spawn(Run::new(command).within(Duration::from_secs(600)));
    while let Some(line) = client.next_line() {
        println!("{line}");
    }
    client.wait().ok();
}

/// Waits for a listener on a TCP port of a guest.
fn wait_for_port(guest: &Guest, port: u16) {
    let line = format!("netstat -ltn | grep -q ':{port} '");
    smc_tests::eventually("the server listens", || guest.run(line.as_str()).code() == 0);
}
