// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Clients killed at any moment of connecting and talking. They must leave nothing behind: no
//! mapping and no descriptor in the server, nothing on the devices. `SMC_KILLS=2000 cargo test
//! --release -p smc-preload --test kills` runs longer than the suite does.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;
#[path = "common/held.rs"]
mod held;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Fabric, await_listener, free_port, my_role, role};
use held::Held;

/// Number of clients at a time. Each has a device, and the server has another.
const LANES: usize = 7;
/// Number of connections that a client makes at a time.
const AT_ONCE: usize = 3;
/// A client's output after its first exchange.
const TALKING: &str = "talking";

/// Echoes.
fn serve(listener: TcpListener) {
    for mut stream in listener.incoming().map_while(Result::ok) {
        thread::spawn(move || {
            let mut buf = [0; 4096];
            while let Ok(n @ 1..) = stream.read(&mut buf) {
                if stream.write_all(&buf[..n]).is_err() {
                    return;
                }
            }
        });
    }
}

fn talk(port: u16) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    let (data, mut back) = ([7; 1000], [0; 1000]);
    for _ in 0..3 {
        stream.write_all(&data)?;
        stream.read_exact(&mut back)?;
    }
    Ok(())
}

/// Connects and exchanges bytes, again and again, and prints a line after the first exchange.
fn talk_for_ever(port: u16) -> ! {
    talk(port).unwrap();
    println!("{TALKING}");
    for _ in 1..AT_ONCE {
        thread::spawn(move || while talk(port).is_ok() {});
    }
    loop {
        talk(port).unwrap();
    }
}

#[test]
fn killed_clients_leave_nothing_behind() {
    const TEST: &str = "killed_clients_leave_nothing_behind";
    match my_role() {
        Some((role, port)) if role == "server" => {
            return serve(TcpListener::bind(("127.0.0.1", port)).unwrap());
        }
        Some((role, port)) if role == "visitor" => return talk(port).unwrap(),
        Some((_, port)) => talk_for_ever(port),
        None => {}
    }
    let kills: usize = std::env::var("SMC_KILLS").map_or(40, |text| text.parse().unwrap());
    let fabric = Fabric::new(LANES + 1);
    let program = || fabric.smc(std::env::current_exe().unwrap());
    let port = free_port();
    let server = role(&mut program(), TEST, "server", port);
    await_listener(port);
    let alone = || fabric.open_devices().len() == 1;
    let visit = || {
        role(&mut program(), TEST, "visitor", port).finish();
        common::eventually(alone);
    };
    visit();
    let held = || {
        let Held { descriptors, mappings, threads, .. } = Held::by(server.pid());
        (descriptors, mappings, threads)
    };
    // Descriptors of this process: the daemon's, and the pipes to programs.
    let open = || Held::by(std::process::id()).descriptors;
    // The server's threads end, and the daemon releases slabs.
    thread::sleep(Duration::from_millis(500));
    let (before, open_before) = (held(), open());
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        for lane in 0..LANES {
            let (done, program) = (&done, &program);
            scope.spawn(move || {
                let mut moment = lane as u64;
                loop {
                    let n = done.fetch_add(1, Ordering::Relaxed);
                    if n >= kills {
                        return;
                    }
                    let mut client = role(&mut program(), TEST, "client", port);
                    moment = (moment * 37 + 11) % 101;
                    // Some are killed while they open their device, however slow the machine is,
                    // others later.
                    if n % 2 == 0 {
                        common::eventually(|| {
                            client.said().contains(TALKING) || client.has_ended()
                        });
                    }
                    thread::sleep(Duration::from_millis(moment));
                    // Dropping kills the client.
                    drop(client);
                }
            });
        }
    });
    common::eventually(alone);
    // The server makes one timer at the first need.
    let is_clean = || {
        let ((fds, mappings, threads), open) = (held(), open());
        // Something of the first visitor may still have been there.
        fds <= before.0 && mappings <= before.1 && threads <= before.2 && open <= open_before + 1
    };
    let begun = Instant::now();
    while !is_clean() && begun.elapsed() < common::TIMEOUT {
        thread::sleep(Duration::from_millis(50));
    }
    let devices = fabric.open_devices();
    let text = format!(
        "descriptors, mappings and threads of the server: {before:?}, now {:?}; descriptors of the daemon: \
         {open_before}, now {}\n{kills} killed, {} ends on SMC; {devices:?}\n{}{}",
        held(),
        open(),
        fabric.decided().0,
        held::mappings(server.pid()),
        held::kinds(server.pid()),
    );
    println!("{text}");
    assert!(is_clean(), "{text}");
    let device = devices.first().unwrap();
    assert_eq!(
        (device.dmbs, device.attached, device.slabs, device.stale_maps),
        (0, 0, 0, 0),
        "{text}"
    );
}
