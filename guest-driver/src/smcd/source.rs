// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio-ism device as the event source of a reactor.
//!
//! [`SmcdSource`] translates the records of the device into events for connections. Records about a
//! peer as a whole also go to the [`Fabric`].

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use virtio_ism_abi::event::Event;
use virtio_ism_abi::{Gid, Token};

use super::fabric::{DeferredDrop, Fabric};
use crate::reactor::source::{LineName, Lines, ReactorEvent, Source, SourceParts, Tags};
use virtio_ism::{EVENTS_PER_POLL, IsmDevice};

/// The user of a device, informed of events beyond a single connection.
pub(crate) trait DeviceUser: Send + Sync {
    /// Drops `object` soon, on a thread allowed to block.
    fn defer_drop(&self, object: DeferredDrop);

    /// The device stays, after a request to leave.
    fn device_stays(&self);
}

/// The events of one device, for the connections of one fabric.
pub(crate) struct SmcdSource {
    device: Arc<IsmDevice>,
    // Weak: connections keep their reactor, which must not keep the peers of a lost device.
    fabric: Weak<Fabric>,
    user: Weak<dyn DeviceUser>,
}

impl SmcdSource {
    /// The source of the fabric's device. Resources of departed peers go to `user`, because their drop
    /// may block.
    pub(crate) fn new(fabric: &Arc<Fabric>, user: Weak<dyn DeviceUser>) -> Arc<SmcdSource> {
        let (device, fabric) = (fabric.device().clone(), Arc::downgrade(fabric));
        Arc::new(SmcdSource { device, fabric, user })
    }

    /// Passes a record on: to the connections first, so their failures are known before the fabric
    /// releases the peer's resources.
    fn translate(&self, event: Event, handle: &mut dyn FnMut(ReactorEvent)) {
        match event {
            Event::SlabWake(wake) => {
                for slab in wake.slabs.iter().take(wake.n.get() as usize) {
                    let mut raised = Vec::new();
                    match self.device.take_slab(slab.get(), &mut raised) {
                        true => raised.into_iter().for_each(|(slab, line)| {
                            handle(ReactorEvent::WakeLine(slab, line));
                        }),
                        false => handle(ReactorEvent::WakeGroup(slab.get())),
                    }
                }
            }
            Event::DmbSignal(signal) => {
                for entry in signal.entries.iter().take(signal.n.get() as usize) {
                    handle(ReactorEvent::Wake(entry.idx.get()));
                }
            }
            Event::PeerDown { gid, .. } => {
                handle(ReactorEvent::PeerLost(peer_tag(gid)));
                if let Some((fabric, user)) = self.owners() {
                    user.defer_drop(fabric.peer_down(gid));
                }
            }
            Event::DmbGone { token, .. } => {
                handle(ReactorEvent::BufferLost(token.0));
                if let Some((fabric, user)) = self.owners()
                    && let Some(buffer) = fabric.dmb_gone(token)
                {
                    user.defer_drop(buffer);
                }
            }
            Event::SwEvent { gid, code, info } => {
                if let Some(fabric) = self.fabric.upgrade() {
                    fabric.sw_event(gid, code, info);
                }
            }
            Event::Leave { number, reason, within } => {
                tracing::debug!(reason = reason.name(), ?within, "the device is about to go");
                if let Some(fabric) = self.fabric.upgrade() {
                    fabric.leave_within(number, within);
                }
                handle(ReactorEvent::Leave);
            }
            Event::Stay { .. } => {
                tracing::debug!("the device stays");
                handle(ReactorEvent::Stay);
                if let Some((fabric, user)) = self.owners() {
                    fabric.stay();
                    user.device_stays();
                }
            }
            Event::Lost { n } => tracing::warn!(n, "software events were lost"),
        }
    }

    fn owners(&self) -> Option<(Arc<Fabric>, Arc<dyn DeviceUser>)> {
        Some((self.fabric.upgrade()?, self.user.upgrade()?))
    }
}

/// The tags of a connection with this peer, writing the DMB of this token.
pub(crate) fn tags(peer: Gid, token: Token) -> Tags {
    Tags { peer: peer_tag(peer), buffer: token.0 }
}

fn peer_tag(gid: Gid) -> u128 {
    u128::from_ne_bytes(gid.0)
}

impl Source for SmcdSource {
    fn event_fd(&self) -> BorrowedFd<'_> {
        self.device.event_fd()
    }

    fn event_set(&self) -> Option<BorrowedFd<'_>> {
        self.device.event_set()
    }

    fn on_reported(&self, name: u64) {
        self.device.on_reported(name);
    }

    fn arm_interrupts(&self) -> bool {
        self.device.arm_interrupts()
    }

    fn clear_event_fd(&self) {
        self.device.clear_event_fd();
    }

    fn suppress_interrupts(&self) {
        self.device.suppress_interrupts();
    }

    fn poll_events(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool {
        // An error means a lost device, as reported by `is_gone`.
        self.device
            .poll_events(&mut |event| self.translate(event, handle))
            .is_ok_and(|n| n == EVENTS_PER_POLL)
    }

    fn is_gone(&self) -> bool {
        self.device.is_gone()
    }
}

impl Lines for SmcdSource {
    fn poll_lines(&self, raised: &mut Vec<LineName>) {
        self.device.poll_lines(raised);
    }

    fn arm_lines(&self) -> bool {
        self.device.arm_lines()
    }

    fn disarm_lines(&self) {
        self.device.disarm_lines();
    }

    fn age_lines(&self) {
        self.device.age_lines();
    }

    fn recheck_lines(&self) {
        self.device.recheck_lines();
    }
}

impl From<Arc<SmcdSource>> for SourceParts {
    fn from(source: Arc<SmcdSource>) -> SourceParts {
        SourceParts { lines: Some(source.clone()), source, polled: None }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use std::time::Duration;

    use vhost_device_ism::config::GuestSpec;
    use vhost_device_ism::{Config, Daemon};

    use super::*;
    use ism_sys::lock;
    use virtio_ism::{OpenOptions, Prefer};

    const LEN: u32 = 16 << 10;

    #[derive(Default)]
    struct Deferred(Mutex<Vec<DeferredDrop>>);

    impl DeviceUser for Deferred {
        fn defer_drop(&self, object: DeferredDrop) {
            lock(&self.0).push(object);
        }

        fn device_stays(&self) {}
    }

    /// Two devices of a daemon in this process.
    fn pair(prefer: Prefer) -> (Daemon, [Arc<IsmDevice>; 2]) {
        let own = smc_test_support::TestDir::new();
        let daemon = Daemon::start(Config::default()).unwrap();
        let devices = ["a", "b"].map(|end| {
            let socket = own.path(end);
            daemon.add_guest(GuestSpec::new(&socket)).unwrap();
            IsmDevice::open(OpenOptions { prefer, ..OpenOptions::new(socket) }).unwrap()
        });
        (daemon, devices)
    }

    fn events(source: &SmcdSource) -> Vec<ReactorEvent> {
        let mut events = Vec::new();
        for _ in 0..200 {
            source.poll_events(&mut |event| events.push(event));
            if !events.is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        events
    }

    #[test]
    fn a_signal_names_the_group_of_a_window_or_the_key_of_guest_memory() {
        for prefer in [Prefer::Window, Prefer::Move] {
            let (_daemon, [a, b]) = pair(prefer);
            let user = Arc::new(Deferred::default());
            let user: Weak<Deferred> = Arc::downgrade(&user);
            let source = SmcdSource::new(&Fabric::new(a.clone()), user);
            let own = a.register(b.gid(), LEN, 0).unwrap();
            let theirs = b.attach(own.token(), LEN).unwrap();
            if let Some(line) = own.line() {
                assert!(line.arm());
            }
            theirs.deliver(&[], [1, 0], true).unwrap();
            let expected = match own.slab_id() {
                Some(slab) => ReactorEvent::WakeLine(slab, own.line_index().unwrap()),
                None => ReactorEvent::Wake(own.idx()),
            };
            assert_eq!(events(&source), [expected]);
        }
    }

    #[test]
    fn a_peer_that_leaves_ends_its_connections_and_its_resources_are_dropped_later() {
        let (_daemon, [a, b]) = pair(Prefer::Window);
        let fabric = Fabric::new(a);
        let deferred = Arc::new(Deferred::default());
        let user: Weak<Deferred> = Arc::downgrade(&deferred);
        let source = SmcdSource::new(&fabric, user);
        let peer = fabric.peer(b.gid());
        let _own = peer.take(LEN).unwrap();
        let gone = b.gid();
        drop(b);
        let tags = tags(gone, Token(0));
        assert!(events(&source).contains(&ReactorEvent::PeerLost(tags.peer)));
        assert_eq!(lock(&deferred.0).len(), 1);
        assert!(fabric.known(gone).is_none());
    }
}
