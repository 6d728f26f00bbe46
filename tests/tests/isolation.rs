// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Isolation of devices from each other's memory.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

use std::time::Duration;

use smc_tests::hostile::{Hostile, LEN};
use smc_tests::raw::Device;
use smc_tests::watch::LIMIT;
use smc_tests::{Bench, Fabric, TIMEOUT, eventually, read_exactly, send_all, watched};
use vhost_device_ism::config::FabricSpec;
use virtio_ism::{DeliverError, IsmError};
use virtio_ism_abi::{Chid, Gid, Status, Token};

#[track_caller]
fn refused<T>(result: Result<T, IsmError>, expected: Status) {
    match result {
        Err(IsmError::Refused { status, .. }) => assert_eq!(status, expected),
        Err(error) => panic!("{error} instead of {expected:?}"),
        Ok(_) => panic!("granted instead of {expected:?}"),
    }
}

/// A daemon with ports 0 to 2 on fabric ff00, 3 on ff01, 4 on loopback.
fn fabrics() -> Bench {
    Bench::tuned(Fabric::Window, 5, |config| {
        for (port, chid) in [(3, 0xff01), (4, 0xffff)] {
            config.fabrics.push(FabricSpec::new(Chid(chid)));
            config.guests[port].chid = Chid(chid);
        }
    })
}

// Shows: SEC-14.
#[test]
fn fabrics_cannot_see_each_other() {
    watched(LIMIT, || {
        let bench = fabrics();
        let devices: Vec<Device> = (0..5).map(|n| Device::open(&bench, n)).collect();
        let (here, there) = (&devices[0].ism, [&devices[3].ism, &devices[4].ism]);
        let own = here.register(devices[1].ism.gid(), LEN, 0).unwrap();
        for other in there {
            assert_ne!(other.chid(), here.chid());
            assert_eq!(here.query_gid(other.gid()).unwrap(), None);
            assert_eq!(other.query_gid(here.gid()).unwrap(), None);
            refused(here.register(other.gid(), LEN, 0), Status::Enodev);
            refused(here.signal_event(other.gid(), 1, 2), Status::Enodev);
            refused(other.attach(own.token(), LEN), Status::Enoent);
        }
        assert!(here.query_gid(devices[1].ism.gid()).unwrap().is_some());
    });
}

// Shows: SEC-7.
#[test]
fn a_token_that_leaked_is_worth_nothing_to_a_third_device() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 4);
        let pair = bench.pair();
        let (member, thief) = (Device::open(&bench, 2), Device::open(&bench, 3));
        let (hostile, victim) = Hostile::connect(&pair, &member);
        // Every token of the connection, and the token of an unattached DMB.
        let unused = member.ism.register(pair.server.devices()[0].1, LEN, 0).unwrap();
        for token in [hostile.theirs.token(), hostile.own.token(), unused.token()] {
            refused(thief.ism.attach(token, LEN), Status::Enoent);
        }
        // Nor for its owner: the owner is not its user.
        refused(member.ism.attach(unused.token(), LEN), Status::Enoent);
        // The entitled devices still have access.
        send_all(&victim, b"fine");
        eventually("the bytes are there", || {
            let mut bytes = [0; 4];
            hostile.own.memory().copy_out(32, &mut bytes).unwrap();
            &bytes == b"fine"
        });
    });
}

#[test]
fn guessed_tokens_and_gids_are_nobodys() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 2);
        let (a, b) = (Device::open(&bench, 0), Device::open(&bench, 1));
        let own = a.ism.register(b.ism.gid(), LEN, 0).unwrap();
        let good = own.token().0;
        for token in [0, 1, u64::MAX, good ^ 1, good.wrapping_add(1), good.swap_bytes(), good << 1]
        {
            refused(b.ism.attach(Token(token), LEN), Status::Enoent);
        }
        for gid in [Gid::NONE, Gid([0xff; 16]), Gid([7; 16])] {
            assert!(!matches!(a.ism.query_gid(gid), Ok(Some(_))), "{gid}");
            assert!(a.ism.register(gid, LEN, 0).is_err(), "{gid}");
        }
        b.ism.attach(own.token(), LEN).unwrap();
    });
}

#[test]
fn a_token_dies_with_its_dmb() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 2);
        let (a, b) = (Device::open(&bench, 0), Device::open(&bench, 1));
        let own = a.ism.register(b.ism.gid(), LEN, 0).unwrap();
        let token = own.token();
        let peer = b.ism.attach(token, LEN).unwrap();
        drop(own);
        let gone = |error: Result<(), DeliverError>| error.is_err();
        eventually("deliveries fail", || {
            let _ = b.ism.poll_events(&mut |_| {});
            gone(peer.deliver(&[(32, b"late")], [0; 2], true))
        });
        drop(peer);
        refused(b.ism.attach(token, LEN), Status::Enoent);
        // Another DMB in its place has another token.
        let again = a.ism.register(b.ism.gid(), LEN, 0).unwrap();
        assert_ne!(again.token(), token);
        let mut bytes = vec![1; LEN as usize];
        again.memory().copy_out(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "a new DMB is zeroed");
    });
}

#[test]
fn the_daemon_is_never_the_first_to_touch_a_drivers_memory() {
    for fabric in [Fabric::Window, Fabric::Move] {
        watched(LIMIT, || {
            let bench = Bench::new(fabric, 2);
            let pair = bench.pair();
            let streams: Vec<_> = (0..20).map(|_| pair.connect()).collect();
            for (client, server) in &streams {
                for (from, to) in [(client, server), (server, client)] {
                    send_all(from, &[7; 20_000]);
                    assert_eq!(read_exactly(to, 20_000), [7; 20_000]);
                }
            }
            // Where the kernel does not tell, this is 0 in any case.
            let touched: Vec<u64> =
                bench.daemon().list().iter().map(|guest| guest.touched_bytes).collect();
            assert_eq!(touched, [0, 0], "{fabric:?}");
        });
    }
}

#[test]
fn a_late_store_reaches_nobody_elses_memory() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 3);
        let owner = Device::open(&bench, 0);
        let (user, other) = (Device::open(&bench, 1), Device::open(&bench, 2));
        let own = owner.ism.register(user.ism.gid(), LEN, 0).unwrap();
        let _peer = user.ism.attach(own.token(), LEN).unwrap();
        drop(own);
        // The user can still reach memory shared by the owner with this user alone.
        let for_other = owner.ism.register(other.ism.gid(), LEN, 0).unwrap();
        let _attached = other.ism.attach(for_other.token(), LEN).unwrap();
        for slab in smc_tests::hostile::slabs(&user) {
            smc_tests::hostile::flood(&slab, || u64::MAX);
        }
        std::thread::sleep(Duration::from_millis(50));
        let mut bytes = vec![1; LEN as usize];
        for_other.memory().copy_out(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "written by a device that has no right to it");
    });
}

#[test]
fn gids_of_different_lives_differ() {
    watched(LIMIT, || {
        let bench = Bench::new(Fabric::Window, 1);
        let mut seen = Vec::new();
        for _ in 0..5 {
            let mut device = None;
            eventually("the port is free", || {
                let free = bench.daemon().list().iter().all(|port| port.device.is_none());
                if free {
                    device = Some(Device::open(&bench, 0));
                }
                free
            });
            let gid = device.unwrap().ism.gid();
            assert!(!seen.contains(&gid), "{gid} came back");
            // A version 4 UUID.
            assert_eq!((gid.0[6] >> 4, gid.0[8] >> 6), (4, 0b10), "{gid}");
            seen.push(gid);
        }
    });
}

#[test]
fn a_busy_fabric_does_not_slow_another_one_down() {
    watched(LIMIT, || {
        let bench = Bench::tuned(Fabric::Move, 4, |config| {
            config.fabrics.push(FabricSpec::new(Chid(0xff01)));
            config.guests[2].chid = Chid(0xff01);
            config.guests[3].chid = Chid(0xff01);
        });
        let busy = smc_tests::Pair::new(bench.stack(0), bench.stack(1), true);
        let calm = smc_tests::Pair::new(bench.stack(2), bench.stack(3), true);
        let (from, to) = busy.connect();
        let (client, server) = calm.connect();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let piece = vec![1; 100_000];
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    from.send(&piece).unwrap();
                }
                drop(from);
            });
            scope.spawn(|| {
                let mut buf = vec![0; 100_000];
                while to.recv(&mut buf).is_ok_and(|n| n > 0) {}
            });
            let start = std::time::Instant::now();
            for _ in 0..200 {
                send_all(&client, b"ping");
                assert_eq!(read_exactly(&server, 4), b"ping");
            }
            println!("200 messages beside a busy fabric: {:?}", start.elapsed());
            assert!(start.elapsed() < TIMEOUT);
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    });
}
