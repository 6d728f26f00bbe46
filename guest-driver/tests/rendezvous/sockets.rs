// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Handling of the option by `SmcStream` and `SmcListener`.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_driver::{Config, ConnectionInfo, Fallback, SmcListener, SmcStream, Stack};
use smc_rendezvous::{Mode, PROPOSAL_TIMEOUT, Policy};
use smc_test_support::TestDir;
use vhost_device_ism::Daemon;
use vhost_device_ism::config::GuestSpec;

use super::wire::{Fate, Wire, there};
use super::{any, ask_at, attach, bed};

/// A test waits this long for a server to end a connection.
use smc_test_support::TIMEOUT;

/// A fabric of two devices.
struct Fabric {
    _daemon: Daemon,
    dir: TestDir,
}

impl Fabric {
    fn new() -> Fabric {
        let dir = TestDir::new();
        let daemon = Daemon::start(vhost_device_ism::Config::default()).unwrap();
        for name in ["server", "client"] {
            daemon.add_guest(GuestSpec::new(dir.join(name))).unwrap();
        }
        Fabric { _daemon: daemon, dir }
    }

    fn stack(&self, name: &str, mode: Mode, policy: &str) -> Arc<Stack> {
        Stack::open(self.config(name, mode, policy)).unwrap()
    }

    fn config(&self, name: &str, mode: Mode, policy: &str) -> Config {
        let mut config = Config::new(self.dir.join(name));
        config.rendezvous = mode;
        config.rendezvous_options.policy = Policy::parse(policy).unwrap();
        // A wait for this time-out is noticed.
        config.detect_timeout = Duration::from_secs(20);
        config
    }
}

fn here(listener: &SmcListener) -> SocketAddr {
    there(listener.local_addr().unwrap())
}

/// The server speaks first: the hardest case for a server waiting for a Proposal.
fn greet(mut server: impl Write, mut client: impl Read) {
    server.write_all(b"220 ready").unwrap();
    let mut banner = [0; 9];
    client.read_exact(&mut banner).unwrap();
    assert_eq!(&banner, b"220 ready");
}

fn reason(stream: &SmcStream) -> Fallback {
    match stream.info() {
        ConnectionInfo::Tcp(why) => why,
        smc => panic!("{smc}"),
    }
}

// Shows: OPT-8, OPT-11, OPT-12, SOCK-7.
#[test]
fn two_stacks_find_each_other() {
    bed::run(|| {
        let _wire = Wire::honest();
        let fabric = Fabric::new();
        let server = fabric.stack("server", Mode::Required, "");
        let client = fabric.stack("client", Mode::Required, "");
        for family in [0, 1] {
            let bound = SmcListener::bind(&server, any(family)).unwrap();
            let taken = SmcListener::new(&server, TcpListener::bind(any(family)).unwrap()).unwrap();
            for listener in [bound, taken] {
                let to = here(&listener);
                let accepted = std::thread::spawn(move || listener.accept().unwrap().0);
                let timeout = Duration::from_secs(10);
                let stream = SmcStream::connect_timeout(&client, &to, timeout).unwrap();
                assert!(stream.is_smc(), "{}", stream.info());
                greet(accepted.join().unwrap(), stream);
            }
        }
    });
}

// Shows: OPT-9.
#[test]
fn a_plain_server_sees_no_byte_of_smc() {
    bed::run(|| {
        let _wire = Wire::honest();
        let fabric = Fabric::new();
        for mode in [Mode::Auto, Mode::Required] {
            let client = fabric.stack("client", mode, "");
            let listener = TcpListener::bind(any(0)).unwrap();
            let to = there(listener.local_addr().unwrap());
            let mut stream = SmcStream::connect(&client, to).unwrap();
            assert!(matches!(reason(&stream), Fallback::Handshake(_)), "{}", stream.info());
            let (mut server, _) = listener.accept().unwrap();
            stream.write_all(b"GET /").unwrap();
            let mut request = [0; 5];
            server.read_exact(&mut request).unwrap();
            assert_eq!(&request, b"GET /");
        }
    });
}

// Shows: OPT-9.
#[test]
fn a_plain_client_is_served_at_once() {
    bed::run(|| {
        let _wire = Wire::honest();
        let fabric = Fabric::new();
        let stack = fabric.stack("server", Mode::Required, "");
        let listener = SmcListener::bind(&stack, any(0)).unwrap();
        let client = TcpStream::connect(here(&listener)).unwrap();
        let start = smc_test_support::Stopwatch::start();
        let (server, _) = listener.accept().unwrap();
        greet(&server, &client);
        assert!(start.elapsed() < Duration::from_secs(10), "nobody looked for a Proposal");
        assert!(!server.is_smc());
    });
}

/// Runs a test with the option removed from the SYN, or from the SYN-ACK.
fn stripped(mode: Mode, from_synack: bool, test: impl FnOnce(&Arc<Stack>, SmcListener) + Send) {
    bed::run(move || {
        let _wire = Wire::new(move |packet| {
            if packet.is_syn() && packet.is_ack() == from_synack {
                packet.replace_option([1; 8]);
            }
            Fate::Pass
        });
        let fabric = Fabric::new();
        let server = fabric.stack("server", mode, "");
        let client = fabric.stack("client", mode, "");
        test(&client, SmcListener::bind(&server, any(0)).unwrap());
    });
}

// Shows: OPT-16.
#[test]
fn stripped_options_leave_tcp() {
    let both = [Mode::Auto, Mode::Required].map(|mode| (mode, false));
    for (mode, from_synack) in both.into_iter().chain([(Mode::Auto, true)]) {
        stripped(mode, from_synack, |client, listener| {
            let to = here(&listener);
            let accepted = std::thread::spawn(move || listener.accept().unwrap().0);
            let start = smc_test_support::Stopwatch::start();
            let mut stream = SmcStream::connect(client, to).unwrap();
            assert!(matches!(reason(&stream), Fallback::Handshake(_)), "{}", stream.info());
            stream.write_all(b"GET /").unwrap();
            let mut request = [0; 5];
            let mut server = accepted.join().unwrap();
            server.read_exact(&mut request).unwrap();
            assert_eq!(&request, b"GET /");
            assert!(start.elapsed() < PROPOSAL_TIMEOUT, "nobody waited for a Proposal");
        });
    }
}

/// The server speaks first, to a client unaware of its awaited Proposal.
// Shows: OPT-16.
#[test]
fn a_server_that_speaks_first_does_so_if_no_proposal_has_come() {
    bed::run(|| {
        let _wire = Wire::honest();
        let fabric = Fabric::new();
        let mut config = fabric.config("server", Mode::Auto, "");
        config.clc_timeout = Duration::from_secs(1);
        let listener = SmcListener::bind(&Stack::open(config).unwrap(), any(0)).unwrap();
        let client = ask_at(&[&attach()], here(&listener));
        let start = Instant::now();
        let (server, _) = listener.accept().unwrap();
        assert!(start.elapsed() >= Duration::from_millis(900), "it waits for a Proposal");
        greet(&server, &client);
        assert!(!server.is_smc());
    });
}

/// The server has answered a client known to speak SMC.
// Shows: ERR-9.
#[test]
fn where_the_option_is_required_one_that_is_stripped_from_the_synack_only_is_the_end() {
    stripped(Mode::Required, true, |client, listener| {
        let to = here(&listener);
        let accepted = std::thread::spawn(move || listener.accept().unwrap().0);
        let mut stream = SmcStream::connect(client, to).unwrap();
        assert!(matches!(reason(&stream), Fallback::Handshake(_)), "{}", stream.info());
        stream.write_all(b"GET /").unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        assert_ended(stream, "data");
        let plain = TcpStream::connect(to).unwrap();
        greet(accepted.join().unwrap(), plain);
    });
}

/// The server ends a connection without a byte.
fn assert_ended(mut client: impl Read, what: &str) {
    let mut got = Vec::new();
    let end = client.read_to_end(&mut got).map_err(|error| error.kind());
    assert!(got.is_empty(), "{what}: {got:x?}");
    assert!(matches!(end, Ok(_) | Err(ErrorKind::ConnectionReset)), "{what}: {end:?}");
}

// Shows: OPT-8, CLC-54, CLC-55, ERR-8, ERR-9.
#[test]
fn where_both_ends_sent_the_option_only_clc_goes_on() {
    bed::run(|| {
        let _wire = Wire::honest();
        let fabric = Fabric::new();
        let mut config = fabric.config("server", Mode::Required, "");
        config.clc_timeout = Duration::from_secs(1);
        let listener = SmcListener::bind(&Stack::open(config).unwrap(), any(0)).unwrap();
        let to = here(&listener);
        let accepted = std::thread::spawn(move || listener.accept().unwrap().0);
        let rendezvous = attach();
        let ask = || {
            let client = ask_at(&[&rendezvous], to);
            client.set_read_timeout(Some(TIMEOUT)).unwrap();
            client
        };
        let eye_catcher = [0xe2, 0xd4, 0xc3, 0xd9];
        let with = |rest: &[u8]| [&eye_catcher, rest].concat();
        for (what, bytes) in [
            ("data", b"GET / HTTP/1.0\r\n\r\n".to_vec()),
            ("nothing", Vec::new()),
            ("three bytes of an eye catcher", eye_catcher[..3].to_vec()),
            ("seven bytes of a header", with(&[1, 0, 0xe0])),
            ("a length that no Proposal has", with(&[1, 0xff, 0xff, 0x26])),
            ("an Accept", with(&[2, 0, 68, 0x10])),
        ] {
            let mut client = ask();
            client.write_all(&bytes).unwrap();
            assert_ended(client, what);
        }
        // A late Decline is still a Decline.
        let mut client = ask();
        std::thread::sleep(Duration::from_millis(300));
        client.write_all(&with(&[4, 0, 28, 0x10])).unwrap();
        client.write_all(&[&[0; 8][..], &[3, 3, 0, 0], &[0; 4], &eye_catcher].concat()).unwrap();
        greet(accepted.join().unwrap(), client);
    });
}

// Shows: SEC-4.
#[test]
fn a_policy_says_why() {
    bed::run(|| {
        let _wire = Wire::honest();
        let fabric = Fabric::new();
        let policy = "[[rule]]\nuse = 'tcp'\npeers = ['10.77.0.2']";
        let client = fabric.stack("client", Mode::Required, policy);
        let server = fabric.stack("server", Mode::Required, "");
        let listener = SmcListener::bind(&server, any(0)).unwrap();
        let stream = SmcStream::connect(&client, here(&listener)).unwrap();
        assert_eq!(reason(&stream), Fallback::Policy);
        assert!(!listener.accept().unwrap().0.is_smc());
    });
}

#[test]
fn clients_that_know_by_configuration_are_understood() {
    bed::run(|| {
        let _wire = Wire::honest();
        let fabric = Fabric::new();
        let server = fabric.stack("server", Mode::Auto, "");
        let client = fabric.stack("client", Mode::Off, "");
        let listener = SmcListener::bind(&server, any(0)).unwrap();
        let to = here(&listener);
        let accepted = std::thread::spawn(move || listener.accept().unwrap().0);
        let stream = SmcStream::connect(&client, to).unwrap();
        assert!(stream.is_smc(), "{}", stream.info());
        assert!(accepted.join().unwrap().is_smc());
    });
}

#[test]
fn without_a_device_nobody_is_asked() {
    bed::run(|| {
        let wire = Wire::honest();
        let config = Config {
            rendezvous: Mode::Required,
            rnics: guest_driver::Rnics::None,
            ..Config::default()
        };
        let stack = Stack::open(config).unwrap();
        let listener = TcpListener::bind(any(0)).unwrap();
        let stream = SmcStream::connect(&stack, there(listener.local_addr().unwrap())).unwrap();
        assert!(matches!(reason(&stream), Fallback::NoDevice(_)), "{}", stream.info());
        assert_eq!(super::options(&wire), super::silence());
    });
}
