// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::{TcpHandler, TcpWatch};
use ism_sys::lock;

/// Wants to come back at each event.
struct Wishing {
    watch: Arc<TcpWatch<Wishing>>,
    log: Arc<Mutex<Vec<&'static str>>>,
    visits: AtomicU32,
    /// The watch stops after this many visits; 0: visits do nothing.
    most_visits: u32,
}

impl Wishing {
    fn new(watch: &Arc<TcpWatch<Wishing>>, most_visits: u32) -> Arc<Wishing> {
        let (watch, log, visits) = (watch.clone(), Arc::default(), AtomicU32::new(0));
        Arc::new(Wishing { watch, log, visits, most_visits })
    }
}

impl TcpHandler for Wishing {
    fn is_sending(&self) -> bool {
        false
    }
    fn on_tcp(&self) {
        lock(&self.log).push("tcp");
        self.watch.want_return();
    }
    fn on_visit(&self) -> bool {
        let visits = self.visits.fetch_add(1, Ordering::Relaxed) + 1;
        if visits == self.most_visits {
            self.watch.stop_after(Vec::new());
        }
        visits < self.most_visits
    }
}

#[test]
fn a_connection_is_visited_until_it_says_so_and_an_ended_one_is_not() {
    let watch = TcpWatch::new().unwrap();
    let [ended, connection] = [1, 2].map(|visits| Wishing::new(&watch, visits));
    for connection in [&ended, &connection] {
        watch.enter(Arc::downgrade(connection));
    }
    drop(ended);
    watch.run(|| None);
    assert_eq!(connection.visits.load(Ordering::Relaxed), 2);
}

// The parent's thread may enter a connection between the fork and the first entry of the child.
#[test]
fn a_set_that_is_the_parents_keeps_its_events() {
    let watch = TcpWatch::new().unwrap();
    let connection = Wishing::new(&watch, 0);
    let name = watch.enter(Arc::downgrade(&connection));
    let (ours, mut peers) = UnixStream::pair().unwrap();
    let none = rustix::event::epoll::EventFlags::empty();
    watch.watch(ours.as_fd(), name, none, super::BYTES).unwrap();
    watch.leave_to_parent();
    watch.watch(ours.as_fd(), name, none, super::ROOM).unwrap();
    watch.forget_number(ours.as_fd());
    peers.write_all(b"bytes").unwrap();
    watch.run(|| {
        if !lock(&connection.log).is_empty() {
            watch.stop_after(Vec::new());
        }
        None
    });
    assert_eq!(*lock(&connection.log), ["tcp"]);
}

#[test]
fn a_connection_that_comes_back_does_not_wait_for_the_bytes_of_others() {
    let (watch, log) = (TcpWatch::new().unwrap(), Arc::<Mutex<Vec<_>>>::default());
    let connections = [0; 2].map(|_| {
        let mut connection = Wishing::new(&watch, 0);
        Arc::get_mut(&mut connection).unwrap().log = log.clone();
        let (ours, mut peers) = UnixStream::pair().unwrap();
        peers.write_all(b"bytes").unwrap();
        let name = watch.enter(Arc::downgrade(&connection));
        let none = rustix::event::epoll::EventFlags::empty();
        watch.watch(ours.as_fd(), name, none, super::BYTES).unwrap();
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
