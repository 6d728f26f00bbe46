// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Inheritance: the child of a fork takes over the devices and connections of its ending parent.
//!
//! The child has the parent's memory and descriptors, and one thread. The parent forks while it holds
//! the locks of the devices' queues ([`Stack::hold_devices`]), so no thread of the parent uses a device
//! afterwards, nor takes bytes out of a send queue. The child checks that no other lock was held
//! ([`ForkLocks`]), forgets the parent's threads ([`Stack::take_over`]), and does the work of these
//! threads ([`StackUpkeep::turn`]).

use std::io;
use std::net::TcpStream;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::SmcStream;
use super::devices::OpenDevice;
use super::stack::Stack;
use super::statistics::OwnReport;
use crate::conn::{self, Conn};
use crate::handshake::client::DeclineAnswer;
use crate::reactor::Upkeep;
use crate::reactor::wait::prepare_thread;
use ism_sys::{ForkLocks, LockGuardList, is_free, lock};
use virtio_ism::IsmDevice;

/// Pause between two checks of TCP, in a process without a thread for TCP.
const TCP_PAUSE: Duration = Duration::from_millis(5);
/// Pause between two attempts to hold the devices.
const PAUSE: Duration = Duration::from_micros(500);

/// The fate of the locks held by [`Stack::hold_devices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFork<T> {
    /// The locks are released.
    Release(T),
    /// The locks stay held: this process uses the devices no more.
    Keep(T),
}

/// The work of a stack's threads, in a process that has one thread.
pub struct StackUpkeep {
    stack: Arc<Stack>,
    live: Vec<(OpenDevice, Upkeep)>,
    reports: Option<OwnReport>,
}

#[doc(hidden)]
impl Stack {
    /// Whether the child of a fork can take the devices over.
    pub fn can_be_inherited(&self) -> bool {
        let devices = self.open_devices();
        devices.iter().all(|device| device.can_be_inherited())
    }

    /// Checks the connections closed by the program ([`SmcStream::any_has_unsent_bytes`]).
    pub fn check_closed(&self) {
        self.sweep();
    }

    /// Runs `body`, with a fork in it, while no thread of this process uses a device. Tries for at most
    /// `limit`; `None`: the time did not suffice.
    pub fn hold_devices<T>(
        &self,
        limit: Duration,
        body: impl FnOnce() -> AfterFork<T>,
    ) -> Option<T> {
        let until = Instant::now() + limit;
        prepare_thread();
        loop {
            if self.devices.is_unlocked() {
                let devices = self.open_devices();
                let mut held = LockGuardList::new();
                if devices.iter().all(|device| device.try_hold(&mut held)) {
                    // The child has the present send queues.
                    conn::hold_queues(true);
                    return Some(match body() {
                        AfterFork::Release(result) => {
                            conn::hold_queues(false);
                            if let Some(watch) = self.outliving.watch() {
                                watch.look_again();
                            }
                            result
                        }
                        AfterFork::Keep(result) => {
                            std::mem::forget(held);
                            std::mem::forget(devices);
                            result
                        }
                    });
                }
            }
            if Instant::now() >= until {
                return None;
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Takes the devices over, in the child. Connections other than `kept` are closed, as the kernel
    /// does for an ending process.
    pub fn take_over(self: &Arc<Self>, kept: &[&SmcStream]) -> StackUpkeep {
        self.outliving.watch().into_iter().for_each(|watch| watch.leave_to_parent());
        let live = self.live_devices();
        for OpenDevice { reactor, fabric, .. } in &live {
            reactor.forget_threads();
            fabric.device().forget_threads();
            self.take_connections_over(reactor.connections(), kept);
        }
        let without = self.without_device();
        without.iter().for_each(|conn| conn.reactor().forget_threads());
        self.take_connections_over(without, kept);
        let live = live.into_iter().map(|live| (live, Upkeep::new())).collect();
        let directory = self.config().statistics.as_deref().and_then(Path::parent);
        let stack = Arc::downgrade(self);
        let report = move || Some(stack.upgrade()?.report());
        let reports = directory.and_then(|directory| OwnReport::start(directory, report).ok());
        StackUpkeep { stack: self.clone(), live, reports }
    }

    fn take_connections_over(&self, all: Vec<Arc<Conn>>, kept: &[&SmcStream]) {
        all.iter().for_each(|conn| conn.forget_threads());
        let is_kept = |conn: &Arc<Conn>| {
            kept.iter().filter_map(|stream| stream.conn()).any(|other| Arc::ptr_eq(conn, other))
        };
        let closing = lock(self.closing()).clone();
        let is_closing = |conn: &Arc<Conn>| closing.iter().any(|other| Arc::ptr_eq(conn, other));
        for conn in all.into_iter().filter(|conn| !is_kept(conn) && !is_closing(conn)) {
            conn.close(false);
            self.adopt(conn);
        }
    }

    fn open_devices(&self) -> Vec<Arc<IsmDevice>> {
        self.live_devices().iter().map(|live| live.fabric.device().clone()).collect()
    }
}

#[doc(hidden)]
impl ForkLocks for Stack {
    fn is_unlocked(&self) -> bool {
        self.devices.is_unlocked()
            && is_free(&self.maintenance.closing)
            && is_free(&self.maintenance.deferred_drops)
            && self.tcp_connections().is_unlocked()
            && self.offers.is_unlocked()
            && self.outliving.watch().is_none_or(|watch| watch.is_unlocked())
            && self.live_devices().iter().all(|live| {
                live.reactor.is_unlocked()
                    && live.fabric.is_unlocked()
                    && live.fabric.device().is_unlocked()
                    && live.reactor.connections().iter().all(|conn| conn.is_unlocked())
            })
            && self
                .without_device()
                .iter()
                .all(|conn| conn.is_unlocked() && conn.reactor().is_unlocked())
            && lock(&self.maintenance.closing).iter().all(|conn| conn.is_unlocked())
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let mut all = Vec::new();
        for live in self.live_devices() {
            all.extend(live.reactor.descriptors());
            all.extend(live.fabric.device().descriptors());
            all.extend(live.reactor.connections().iter().flat_map(|conn| conn.descriptors()));
        }
        all.extend(self.outliving.watch().into_iter().flat_map(|watch| watch.descriptors()));
        for conn in self.without_device() {
            all.extend(conn.reactor().descriptors());
            all.extend(conn.descriptors());
        }
        all.extend(lock(&self.maintenance.closing).iter().flat_map(|conn| conn.descriptors()));
        all
    }
}

#[doc(hidden)]
impl SmcStream {
    /// Whether the child of a fork can take the connection over, by needing only memory and
    /// descriptors.
    pub fn can_be_inherited(&self) -> bool {
        self.conn().is_some_and(|conn| conn.can_be_inherited())
    }
}

impl StackUpkeep {
    /// Does the due work, and returns the time until the next call.
    pub fn turn(&mut self) -> Duration {
        let stack = &self.stack;
        // A client may read slowly.
        self.reports.iter_mut().for_each(OwnReport::serve);
        let turn = |(live, upkeep): &mut (OpenDevice, Upkeep)| {
            live.reactor.keep_up(upkeep, || stack.maintain(Some(&live.fabric)))
        };
        let pause = self.live.iter_mut().map(turn).min();
        let pause = pause.or_else(|| stack.maintain(None)).unwrap_or(Duration::MAX);
        if stack.serve_tcp() { pause.min(TCP_PAUSE) } else { pause }
    }

    /// The connections with bytes not taken by their peers, and the number of bytes.
    fn undelivered_of(&self) -> impl Iterator<Item = (Arc<Conn>, u64)> {
        let reactors = self.stack.reactors().into_iter();
        let all = reactors.flat_map(|reactor| reactor.connections());
        let counted = all.chain(self.stack.without_device()).map(|conn| {
            let bytes = conn.undelivered();
            (conn, bytes)
        });
        counted.filter(|(_, bytes)| *bytes > 0)
    }

    /// The number of connections with bytes not taken by their peers, and the number of bytes.
    pub fn undelivered(&self) -> (usize, u64) {
        self.undelivered_of().fold((0, 0), |(count, sum), (_, bytes)| (count + 1, sum + bytes))
    }

    /// Resets these connections: an end of data would claim that their peers have every byte.
    pub fn reset_undelivered(&self) {
        self.undelivered_of().for_each(|(conn, _)| conn.close(true));
    }

    /// The descriptors to wait for; then the process calls [`StackUpkeep::serve`].
    pub fn waits_for(&self) -> Vec<RawFd> {
        let devices = self.live.iter().flat_map(|(live, _)| live.fabric.device().waits_for());
        devices.chain(self.reports.as_ref().map(OwnReport::waits_for)).collect()
    }

    /// Answers requests of devices, and clients asking for reports.
    pub fn serve(&mut self) {
        self.live.iter().for_each(|(live, _)| live.fabric.device().serve());
        self.reports.iter_mut().for_each(OwnReport::serve);
    }
}

/// Ends the handshake of a client, begun by another process: waits for the server's answer and declines
/// it. A process that takes connections over has none of the threads that were about to read the
/// answer.
pub struct PendingDecline {
    handshake: DeclineAnswer,
    tcp: TcpStream,
}

impl PendingDecline {
    /// Begins on a stream with a Proposal sent by that process, and nothing read. `None`: the stack has
    /// nothing to propose.
    pub fn new(stack: &Arc<Stack>, tcp: TcpStream) -> Option<PendingDecline> {
        // Not the present devices: the device of the Proposal may have gone, and no other is opened for
        // this.
        let last = stack.devices.last()?;
        let handshake = DeclineAnswer::new(&last.config)?;
        Some(PendingDecline { handshake, tcp })
    }

    /// The TCP stream.
    pub fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// The TCP stream, for later use.
    pub fn into_tcp(self) -> TcpStream {
        self.tcp
    }

    /// Continues as far as the server's bytes allow. `true`: TCP carries the connection from here on.
    ///
    /// # Errors
    /// The handshake has broken the connection.
    pub fn advance(&mut self) -> io::Result<bool> {
        self.handshake.advance(&self.tcp).map_err(io::Error::from)
    }
}

impl std::fmt::Debug for PendingDecline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingDecline").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for StackUpkeep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StackUpkeep").field("devices", &self.live.len()).finish_non_exhaustive()
    }
}
