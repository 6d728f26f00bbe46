// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A server's knowledge of its clients without a system call.

use super::*;

#[test]
fn a_client_without_the_option_is_known_without_a_call() {
    bed::run(|| {
        let (_wire, parent) = (Wire::honest(), attach());
        let passed = parent.pass_on().unwrap();
        let child = Rendezvous::adopt(&passed.to_string(), Policy::default()).unwrap();
        // The last listener sees IPv4 clients by addresses in the form of IPv6.
        let dual = TcpListener::from(socket(&"[::]:0".parse().unwrap()));
        rustix::net::bind(&dual, &"[::]:0".parse::<SocketAddr>().unwrap()).unwrap();
        assert!(parent.listen(&dual).unwrap());
        rustix::net::listen(&dual, 64).unwrap();
        let port = dual.local_addr().unwrap().port();
        let mapped = SocketAddr::new(THERE[0].parse().unwrap(), port);
        let listeners = [parent.bind(&any(0)).unwrap(), parent.bind(&any(1)).unwrap(), dual];
        for (at, listener) in listeners.iter().enumerate() {
            let to = if at == 2 { mapped } else { there(listener.local_addr().unwrap()) };
            let mut open = Vec::new();
            for _ in 0..20 {
                let client = ask_at(&[&parent], to);
                let (server, from) = listener.accept().unwrap();
                for one in [&parent, &child] {
                    assert!(one.may_speak_smc(&from), "{from}");
                }
                open.push((client, server, from));
            }
            let mut plain = 0;
            for _ in 0..20 {
                let client = TcpStream::connect(to).unwrap();
                let (server, from) = listener.accept().unwrap();
                assert_eq!(parent.peer_speaks_smc(&server), Some(false));
                // Seldom another client is in the same bucket.
                plain += usize::from(!parent.may_speak_smc(&from));
                assert_eq!(parent.may_speak_smc(&from), child.may_speak_smc(&from));
                drop(client);
            }
            assert!(plain >= 15, "{plain} of 20");
            // Ended by the server, the client, and a reset.
            let froms: Vec<_> = open.iter().map(|(_, _, from)| *from).collect();
            for (n, (client, server, _)) in open.into_iter().enumerate() {
                match n % 3 {
                    0 => drop((server, client)),
                    1 => drop((client, server)),
                    _ => {
                        let now = Some(Duration::ZERO);
                        rustix::net::sockopt::set_socket_linger(&client, now).unwrap();
                        drop(client);
                        std::thread::sleep(Duration::from_millis(20));
                        drop(server);
                    }
                }
            }
            let until = Instant::now() + Duration::from_secs(20);
            while froms.iter().any(|from| parent.may_speak_smc(from)) {
                assert!(Instant::now() < until, "ended connections are counted for ever");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    });
}

/// The client counts as a client without the option: no server waits for its Proposal or resets it.
#[test]
fn a_client_that_is_not_answered_is_none_that_may_speak_smc() {
    bed::run(|| {
        let (_wire, rendezvous) = (Wire::honest(), attach());
        let listener = rendezvous.bind(&any(0)).unwrap();
        rendezvous.pause(&listener).unwrap();
        for _ in 0..20 {
            let client = ask(&[&rendezvous], &listener);
            let (server, from) = listener.accept().unwrap();
            assert_eq!(rendezvous.peer_speaks_smc(&client), Some(false));
            assert_eq!(rendezvous.peer_speaks_smc(&server), Some(false));
            assert!(!rendezvous.may_speak_smc(&from));
        }
    });
}

/// A connection waiting for accept(2) is counted, however long, and a retransmitted SYN is counted once.
#[test]
fn a_client_with_the_option_is_never_taken_for_one_without() {
    bed::run(|| {
        let mut lost = 0;
        let _wire = Wire::new(move |packet| match packet.is_syn() && !packet.is_ack() {
            true if lost < 1 => {
                lost += 1;
                Fate::Lose
            }
            _ => Fate::Pass,
        });
        let rendezvous = attach();
        let listener = rendezvous.bind(&any(0)).unwrap();
        let clients: Vec<_> = (0..50).map(|_| ask(&[&rendezvous], &listener)).collect();
        std::thread::sleep(Duration::from_millis(100));
        for _ in &clients {
            let (server, from) = listener.accept().unwrap();
            assert!(rendezvous.may_speak_smc(&from));
            assert_eq!(rendezvous.peer_speaks_smc(&server), Some(true));
        }
        drop(clients);
    });
}

/// No process can hide a client of another one: only the kernel's program writes.
#[test]
fn no_process_writes_what_is_known_of_clients() {
    bed::run(|| {
        let rendezvous = attach();
        let fd = *rendezvous.descriptors().last().unwrap();
        // SAFETY: the number is the number of an open descriptor.
        let map = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        for (protection, allowed) in [
            (rustix::mm::ProtFlags::READ, true),
            (rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE, false),
        ] {
            // SAFETY: a new mapping, not in use elsewhere.
            let mapped = unsafe {
                rustix::mm::mmap(
                    std::ptr::null_mut(),
                    4096,
                    protection,
                    rustix::mm::MapFlags::SHARED,
                    map,
                    0,
                )
            };
            assert_eq!(mapped.is_ok(), allowed, "{protection:?}");
        }
    });
}
