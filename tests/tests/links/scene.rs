// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two stacks with an RNIC each, and the ways of losing their link.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use guest_driver::{ConnectionInfo, Rnics, SmcListener, SmcStream, Stack};
use smc_tests::bytes::Rng;
use smc_tests::{Fabric, TIMEOUT, note};
use smc_verbs::double::Rnic;

/// The fate of the only link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The client's port goes down.
    Clients,
    /// The server's port goes down.
    Servers,
    /// Both ports go down at once.
    Both,
}

pub(crate) const LOSSES: [Loss; 3] = [Loss::Clients, Loss::Servers, Loss::Both];

/// Differences between scenes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Whether the client, and the server, offers the option.
    pub(crate) outlive: [bool; 2],
    /// Elements begin with eye catchers.
    pub(crate) eye_catcher: bool,
    /// Release 2.0, without options.
    pub(crate) release_2_0: bool,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms { outlive: [true; 2], eye_catcher: false, release_2_0: false }
    }
}

/// The client's stack, the server's stack, and their RNICs.
pub(crate) struct Scene {
    pub(crate) rnics: [Rnic; 2],
    pub(crate) stacks: [Arc<Stack>; 2],
    listener: SmcListener,
    random: Rng,
}

impl Scene {
    pub(crate) fn new(terms: Terms, seed: u64) -> Scene {
        // RNICs are for the whole process.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        // An RNIC is found by the local address of TCP.
        let addresses = [Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 2)];
        let rnics = [0, 1].map(|end| Rnic::add(&format!("dbl{n}x{end}"), addresses[end].octets()));
        let stacks = [0, 1].map(|end| {
            let mut config = Fabric::Rdma.config(end, "/nowhere");
            config.rnics = Rnics::Names(vec![format!("dbl{n}x{end}")]);
            config.smcr.max_links = 1;
            config.smcr.eye_catcher = terms.eye_catcher;
            config.outlive_device = terms.outlive[end];
            config.testing.release_2_0 = terms.release_2_0;
            Stack::open(config).unwrap()
        });
        let listener = SmcListener::bind(&stacks[1], (addresses[1], 0)).unwrap();
        Scene { rnics, stacks, listener, random: Rng::new(seed) }
    }

    /// Both ends of a connection, the client's first.
    pub(crate) fn connect(&self) -> [SmcStream; 2] {
        let address = self.listener.local_addr().unwrap();
        let ends = thread::scope(|scope| {
            let client = scope.spawn(|| SmcStream::connect(&self.stacks[0], address).unwrap());
            let (server, _) = self.listener.accept().unwrap();
            [client.join().unwrap(), server]
        });
        for end in &ends {
            assert!(matches!(end.info(), ConnectionInfo::Smcr(_)), "{}", end.info());
            end.set_read_timeout(Some(TIMEOUT)).unwrap();
            end.set_write_timeout(Some(TIMEOUT)).unwrap();
        }
        ends
    }

    /// Holds every message sent from now on on the link.
    pub(crate) fn hold(&self) {
        self.rnics[0].hold(true);
    }

    /// Loses the link. A random part of the messages under way arrives.
    pub(crate) fn lose(&mut self, loss: Loss) {
        note(format!("{loss:?}"));
        let random = &mut self.random;
        let mut arrives = |under_way: usize| random.below(under_way as u32 + 1) as usize;
        match loss {
            Loss::Clients => self.rnics[0].cut(arrives),
            Loss::Servers => self.rnics[1].cut(arrives),
            Loss::Both => {
                self.rnics[0].cut(&mut arrives);
                self.rnics[1].cut(arrives);
            }
        }
    }
}
