// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The thinnest real path: a daemon, two stacks, one TCP connect, one handshake, bytes both ways.

use std::io::{Read, Write};

use guest_driver::{Config, ConnectionInfo, SmcListener, SmcStream, Stack};
use vhost_device_ism::Daemon;
use vhost_device_ism::config::GuestSpec;

// Shows: CDC-46, SOCK-19.
#[test]
fn two_stacks_talk_through_the_device() {
    let dir = smc_test_support::TestDir::new();
    let daemon = Daemon::start(vhost_device_ism::Config::default()).unwrap();
    let sockets = ["a", "b"].map(|name| dir.join(name));
    for socket in &sockets {
        daemon.add_guest(GuestSpec::new(socket)).unwrap();
    }

    let server = Stack::open(Config::new(&sockets[0])).unwrap();
    let client = Stack::open(Config::new(&sockets[1])).unwrap();
    let listener = SmcListener::bind(&server, "127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();

    let echo = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.is_smc());
            let mut data = Vec::new();
            stream.read_to_end(&mut data).unwrap();
            stream.write_all(&data).unwrap();
        }
    });
    for first_contact in [true, false] {
        let mut stream = SmcStream::connect(&client, addr).unwrap();
        stream.set_read_timeout(Some(smc_test_support::TIMEOUT)).unwrap();
        let ConnectionInfo::Smcd(info) = stream.info() else { panic!("{}", stream.info()) };
        assert_eq!(info.first_contact, first_contact);
        let data: Vec<u8> = (0..300_000u32).map(|i| (i * 7 % 251) as u8).collect();
        let writer = stream.try_clone().unwrap();
        let copy = data.clone();
        let pump = std::thread::spawn(move || {
            (&mut &writer).write_all(&copy).unwrap();
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        pump.join().unwrap();
        let mut back = Vec::new();
        stream.read_to_end(&mut back).unwrap();
        assert!(back == data, "{} bytes came back", back.len());
    }
    echo.join().unwrap();
    daemon.stop();
    std::fs::remove_dir_all(&dir).unwrap();
}
