// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use super::super::DelayedUpdate;
use super::{ConnectionHandler, TcpWatch};
use ism_sys::lock;

/// Wants to come back at each event.
struct Wishing {
    watch: Arc<TcpWatch<Wishing>>,
    log: Arc<Mutex<Vec<&'static str>>>,
}

impl ConnectionHandler for Wishing {
    fn has_waiters(&self) -> bool {
        false
    }
    fn take_change(&self) -> bool {
        false
    }
    fn on_wake(&self) {}
    fn on_arrival(&self) {}
    fn on_tick(&self) {}
    fn on_recheck(&self) {}
    fn on_delayed_update(&self, _read_before: Option<u64>) -> DelayedUpdate {
        DelayedUpdate::None
    }
    fn on_lost(&self, _key: u32) {}
    fn on_taken(&self, _key: u32) {}
    fn on_tcp(&self) {
        lock(&self.log).push("tcp");
        self.watch.want_return();
    }
}

#[test]
fn a_connection_that_comes_back_does_not_wait_for_the_bytes_of_others() {
    let (watch, log) = (TcpWatch::new().unwrap(), Arc::<Mutex<Vec<_>>>::default());
    let connections = [0; 2].map(|_| {
        let connection = Arc::new(Wishing { watch: watch.clone(), log: log.clone() });
        let (ours, mut peers) = UnixStream::pair().unwrap();
        peers.write_all(b"bytes").unwrap();
        watch.add(ours.as_fd(), Arc::downgrade(&connection)).unwrap();
        (connection, ours, peers)
    });
    // Both have an event before the first wait.
    watch.run(|| {
        if watch.take_wish() {
            lock(&log).push("upkeep");
        }
        if lock(&log).iter().filter(|word| **word == "tcp").count() == connections.len() {
            watch.stop_after(Vec::new());
        }
        None
    });
    assert_eq!(*lock(&log), ["tcp", "upkeep", "tcp", "upkeep"]);
}
