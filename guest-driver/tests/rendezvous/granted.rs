// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Use of a cgroup's grant by processes without capabilities.

use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::path::Path;

use smc_rendezvous::{Unavailable, cgroup_of, grant};

use super::*;

/// Grants the option to the cgroup of the test, and gives up this thread's rights.
fn only_granted(policy: &str) -> Arc<Rendezvous> {
    grant(&cgroup_of(std::process::id()).unwrap()).unwrap();
    let none = rustix::thread::CapabilitySets {
        effective: rustix::thread::CapabilitySet::empty(),
        permitted: rustix::thread::CapabilitySet::empty(),
        inheritable: rustix::thread::CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none).unwrap();
    let mut options = Options::default();
    options.policy = Policy::parse(policy).unwrap();
    Rendezvous::open(options).unwrap()
}

// Shows: OPT-10, OPT-11.
#[test]
fn a_grant_serves_processes_without_capabilities() {
    bed::run(|| {
        let wire = Wire::honest();
        let rendezvous = only_granted("");
        assert!(Rendezvous::attach(Options::default()).is_err());
        assert_eq!(rendezvous.cgroup(), None);
        assert!(rendezvous.descriptors().is_empty());
        let listens = TcpListener::bind(any(0)).unwrap();
        rendezvous.listen(&listens).unwrap();
        for listener in
            [rendezvous.bind(&any(0)).unwrap(), rendezvous.bind(&any(1)).unwrap(), listens]
        {
            let client = ask(&[&rendezvous], &listener);
            let (server, from) = listener.accept().unwrap();
            assert_eq!(options(&wire), answered());
            assert!(rendezvous.may_speak_smc(&from));
            assert_eq!(rendezvous.peer_speaks_smc(&client), Some(true));
            assert_eq!(rendezvous.peer_speaks_smc(&server), Some(true));
        }
        let listener = rendezvous.bind(&any(0)).unwrap();
        let _client = plain(&listener);
        let (server, _) = listener.accept().unwrap();
        assert_eq!(rendezvous.peer_speaks_smc(&server), Some(false));
    });
}

/// One end in a container, the other one on the host.
#[test]
fn ends_with_and_without_a_grant_find_each_other() {
    bed::run(|| {
        let (wire, attached) = (Wire::honest(), attach());
        let granted = only_granted("");
        for (server, client) in [(&attached, &granted), (&granted, &attached)] {
            let listener = server.bind(&any(0)).unwrap();
            let connected = ask(&[client], &listener);
            let (accepted, _) = listener.accept().unwrap();
            assert_eq!(options(&wire), answered());
            assert_eq!(client.peer_speaks_smc(&connected), Some(true));
            assert_eq!(server.peer_speaks_smc(&accepted), Some(true));
        }
    });
}

#[test]
fn a_child_finds_the_grant_of_its_parent() {
    bed::run(|| {
        let text = only_granted("").pass_on().unwrap().to_string();
        assert!(Rendezvous::adopt(&text, Policy::default()).is_ok());
    });
}

#[test]
fn without_a_grant_there_is_none() {
    bed::run(|| {
        assert!(Rendezvous::granted(Policy::default()).is_none());
        let error = Rendezvous::adopt("granted", Policy::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    });
}

/// The table of clients can only be written by bpf(2).
#[test]
fn a_grant_has_no_rules_about_clients() {
    bed::run(|| {
        let rendezvous = only_granted("[[rule]]\nuse = \"tcp\"\npeers = [\"10.0.0.0/8\"]");
        let listener = TcpListener::bind(any(0)).unwrap();
        let error = rendezvous.listen(&listener).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("rules about clients"), "{error}");
    });
}

/// The kernel has room for 64 programs.
#[test]
fn a_cgroup_is_granted_once_however_often_it_is_asked_for() {
    bed::run(|| {
        let own = cgroup_of(std::process::id()).unwrap();
        for _ in 0..70 {
            grant(&own).unwrap();
        }
        assert!(Rendezvous::granted(Policy::default()).is_some());
    });
}

#[test]
fn only_a_cgroup_below_the_root_is_granted() {
    bed::run(|| {
        let own = cgroup_of(std::process::id()).unwrap();
        let root = own.ancestors().filter(|path| path.join("cgroup.procs").exists()).last();
        for path in [root.unwrap(), Path::new("/tmp")] {
            let why = grant(path).unwrap_err();
            assert!(matches!(why, Unavailable::NotGrantable { .. }), "{why}");
        }
        let why = grant(Path::new("/nowhere")).unwrap_err();
        assert!(matches!(why, Unavailable::Cgroup { .. }), "{why}");
    });
}

/// A process may call the options with any value.
#[test]
fn other_values_are_left_to_the_kernel_which_knows_no_such_option() {
    bed::run(|| {
        let rendezvous = only_granted("");
        let socket = socket(&any(0));
        let set = |name: i32, value: &[u8]| {
            // SAFETY: the value lives and has the stated length.
            let result = unsafe {
                let (level, length) = (0x62d4_c3d9, value.len() as libc::socklen_t);
                libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), length)
            };
            if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().raw_os_error()) }
        };
        for value in [&[][..], &[1], &[1, 0, 0], &[3, 0, 0, 0], &[12, 0, 0, 0], &[0xff; 8]] {
            assert_eq!(set(255, value), Err(Some(libc::ENOPROTOOPT)), "{value:?}");
        }
        assert_eq!(set(253, &[1, 0, 0, 0]), Err(Some(libc::ENOPROTOOPT)));
        // A longer value counts by its first bytes, as with other options.
        assert_eq!(set(255, &[1, 0, 0, 0, 9, 9]), Ok(()));
        assert_eq!(rendezvous.peer_speaks_smc(&socket), None);
    });
}

/// A socket asks for one connection. After a failure the socket may go to a server without SMC.
fn asks_once(rendezvous: &Rendezvous) {
    let (closed, listener) =
        (TcpListener::bind(any(0)).unwrap(), rendezvous.bind(&any(0)).unwrap());
    let (nowhere, to) = (closed.local_addr().unwrap(), listener.local_addr().unwrap());
    let (nowhere, to) = (there(nowhere), there(to));
    drop(closed);
    let client = socket(&to);
    assert!(rendezvous.want(&client, &nowhere).unwrap());
    assert!(rustix::net::connect(&client, &nowhere).is_err());
    rendezvous.unmark(&client).unwrap();
    rustix::net::connect(&client, &to).unwrap();
    assert_eq!(rendezvous.peer_speaks_smc(listener.accept().unwrap().0), Some(false));
    // The client may ask again.
    rustix::net::connect_unspec(&client).unwrap();
    assert!(rendezvous.want(&client, &to).unwrap());
    rustix::net::connect(&client, &to).unwrap();
    assert_eq!(rendezvous.peer_speaks_smc(listener.accept().unwrap().0), Some(true));
}

#[test]
fn a_socket_that_did_not_connect_asks_no_more() {
    bed::run(|| {
        let _wire = Wire::honest();
        asks_once(&attach());
        asks_once(&only_granted(""));
    });
}
