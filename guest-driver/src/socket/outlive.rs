// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The thread for connections able to outlive their device.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustc_hash::FxHashSet;
use smc_core::wire::clc::CarrierFeatures;

use super::devices::Cause;
use super::returns;
use super::stack::Stack;
use super::upkeep::SWEEP_PAUSE;
use crate::conn::Conn;
use crate::handshake::ring::RingParams;
use crate::reactor::Reactor;
use crate::reactor::tcp_watch::{TcpHandler, TcpWatch};
use crate::smcd::{Fabric, Fabrics};
use ism_sys::{OnceBox, lock};
use virtio_ism::IsmDevice;

/// Interval of checks whether connections have left a lost device.
const LOOK: Duration = Duration::from_millis(5);

/// The longest time for connections to read memory of a lost device. Their peers answer meanwhile.
const LONGEST_STAY: Duration = Duration::from_secs(5);

/// Waits until no connection reads memory of a lost device, and lets the device take the memory.
pub(super) fn part_from(stack: &Weak<Stack>, device: &IsmDevice, reactor: &Reactor<Conn>) {
    let start = Instant::now();
    while !device.memory_stays() && device.has_memory() {
        let mut stay = reactor.connections();
        stay.retain(|conn| conn.needs_device_memory());
        if stay.is_empty() {
            break;
        }
        if start.elapsed() > LONGEST_STAY {
            tracing::debug!(connections = stay.len(), "peers have not left a device in time");
            stay.iter().for_each(|conn| conn.keep_memory());
            break;
        }
        std::thread::sleep(LOOK);
    }
    device.let_go();
    // Closed connections are swept by the thread for TCP from now on.
    if let Some(stack) = stack.upgrade() {
        stack.wake_tcp_watch();
    }
}

/// Interval of a stack's checks for the return of a device that connections have left.
const RETURN_PAUSE: Duration = Duration::from_millis(250);
/// Pause between two steps of connections during the bring-up of their links.
const LINK_PAUSE: Duration = Duration::from_millis(2);

/// The connections able to outlive their carrier, and their return to a device.
#[derive(Default)]
pub(super) struct CarrierWatch {
    /// The TCP connections of these connections.
    watch: OnceBox<Arc<TcpWatch<Conn>>>,
    /// Some connection may come back. Only the thread for TCP reads the word.
    any: AtomicBool,
    /// A thread checks the connections. SeqCst: cleared before the thread reads `again`.
    runs: AtomicBool,
    /// The thread is to check once more. SeqCst: set behind a look at `runs`.
    again: AtomicBool,
    /// A device has been opened since the last check.
    opened: AtomicBool,
}

impl CarrierWatch {
    /// The watch for the TCP connections, if there is one yet.
    pub(super) fn watch(&self) -> Option<&Arc<TcpWatch<Conn>>> {
        self.watch.get()
    }

    /// The connections, with or without a device.
    fn connections(&self) -> Vec<Arc<Conn>> {
        self.watch().map(|watch| watch.connections()).unwrap_or_default()
    }

    /// Notes that a device was opened: a refusal concerned the former device.
    pub(super) fn device_opened(&self) {
        self.opened.store(true, Ordering::Release);
    }
}

impl Stack {
    /// The watch for the TCP connections of connections able to outlive their device, if enabled.
    pub(super) fn tcp_watch(self: &Arc<Self>) -> Option<Arc<TcpWatch<Conn>>> {
        if !self.config().outlive_device {
            return None;
        }
        if let Some(watch) = self.outliving.watch() {
            return Some(watch.clone());
        }
        self.start_watch()
            .inspect_err(|error| tracing::warn!(%error, "connections end with their device"))
            .ok()
    }

    /// Informs a device that its driver needs it no more, if the device asks for this and no connection
    /// is about to leave it. Returns the longest time until the next check.
    pub(super) fn answer_leave(&self, fabric: &Fabric) -> Option<Duration> {
        fabric.answer_leave(self.config().testing.leave_time, || {
            let live = self.live_devices();
            let device = live.iter().find(|live| std::ptr::eq(&*live.fabric, fabric));
            device.is_some_and(|live| {
                live.reactor.connections().iter().any(|c| c.must_leave_device())
            })
        })
    }

    /// The connections continuing without their device.
    pub(super) fn without_device(&self) -> Vec<Arc<Conn>> {
        self.not_among(&self.reactors())
    }

    /// The connections able to outlive their device, and in none of these reactors.
    pub(super) fn not_among(&self, reactors: &[Arc<Reactor<Conn>>]) -> Vec<Arc<Conn>> {
        let mut all = self.outliving.connections();
        let known: FxHashSet<_> = reactors
            .iter()
            .flat_map(|reactor| reactor.connections())
            .map(|conn| Arc::as_ptr(&conn).addr())
            .collect();
        all.retain(|conn| !known.contains(&Arc::as_ptr(conn).addr()));
        all
    }

    /// Whether connections of this reactor, with its device gone, may continue with another one.
    pub(super) fn waits_on_tcp(&self, reactor: &Arc<Reactor<Conn>>) -> bool {
        let all = self.outliving.connections();
        all.iter().any(|conn| Arc::ptr_eq(conn.reactor(), reactor))
    }

    /// The features of both ends for a connection that outlives its device.
    pub(super) fn carrier_features(&self) -> CarrierFeatures {
        match self.config().return_to_device {
            true => CarrierFeatures::RETURN,
            false => CarrierFeatures::empty(),
        }
    }

    /// Has connections on TCP come back to their devices, on a thread of its own for one pass over
    /// them. Returns the longest time until the next call.
    fn bring_back(
        self: &Arc<Self>,
        watch: &TcpWatch<Conn>,
        next: &mut Instant,
    ) -> Option<Duration> {
        let is_wanted = watch.take_wish();
        if is_wanted {
            // Valid until a thread has checked.
            self.outliving.any.store(true, Ordering::Release);
        }
        if !is_wanted && !self.outliving.any.load(Ordering::Acquire) {
            return None;
        }
        let now = Instant::now();
        if !is_wanted && now < *next {
            return Some(next.saturating_duration_since(now));
        }
        if self.outliving.runs.swap(true, Ordering::SeqCst) {
            // Seen by the running thread, or by the next.
            self.outliving.again.store(true, Ordering::SeqCst);
            return Some(RETURN_PAUSE);
        }
        *next = now + RETURN_PAUSE;
        let stack = self.clone();
        let started = ism_sys::start_thread("smc-return", ism_sys::USUAL_STACK, move || {
            loop {
                stack.outliving.again.store(false, Ordering::SeqCst);
                stack.look_for_returns();
                if !stack.outliving.again.load(Ordering::SeqCst) {
                    break;
                }
            }
            stack.outliving.runs.store(false, Ordering::SeqCst);
            if stack.outliving.again.load(Ordering::SeqCst)
                && let Some(watch) = stack.outliving.watch()
            {
                watch.want_return();
            }
        });
        if let Err(error) = started {
            tracing::warn!(%error, "connections stay on TCP for now");
            self.outliving.runs.store(false, Ordering::SeqCst);
        }
        Some(RETURN_PAUSE)
    }

    /// Does the next step for each connection that may come back to its device.
    fn look_for_returns(self: &Arc<Self>) {
        let all = self.outliving.connections();
        let mut coming = all.clone();
        coming.retain(|conn| conn.may_return_to_ring());
        self.outliving.any.store(!coming.is_empty(), Ordering::Release);
        if coming.is_empty() {
            return;
        }
        returns::retry(&all);
        // Connections staying on TCP may end meanwhile.
        drop(all);
        // Opens the devices again where possible.
        let current = self.current_for(Cause::Return);
        if self.outliving.opened.swap(false, Ordering::AcqRel) {
            // A refusal concerned the former device.
            coming.iter().for_each(|conn| conn.retry_return());
        }
        let mut links = false;
        for conn in coming {
            links |= conn.return_to_ring(&current.ring_params(&conn, self.buffer_len()));
        }
        if links {
            std::thread::sleep(LINK_PAUSE);
            self.outliving.again.store(true, Ordering::SeqCst);
        }
    }

    /// Does the work of the thread for TCP, in a process without it: calls the connections not on their
    /// device. `true`: there are some.
    pub(super) fn serve_tcp(&self) -> bool {
        let all = self.outliving.connections();
        let mut any = false;
        let stays = RingParams {
            config: Arc::new(smc_core::handshake::Config::new(self.peer_id())),
            fabrics: Fabrics::default(),
            rdma: None,
            buffer: self.buffer_len(),
        };
        for conn in all.iter().filter(|conn| conn.needs_turns()) {
            conn.on_tcp();
            // Without a device of this process, the connection declines.
            conn.return_to_ring(&stays);
            any = true;
        }
        any
    }

    fn start_watch(self: &Arc<Self>) -> io::Result<Arc<TcpWatch<Conn>>> {
        let watch = TcpWatch::new()?;
        let (stack, set) = (Arc::downgrade(self), watch.clone());
        ism_sys::start_thread("smc-tcp", ism_sys::USUAL_STACK, move || {
            let mut next = Instant::now();
            set.run(|| {
                let stack = stack.upgrade()?;
                // A connection may have lost the reactor responsible for this.
                stack.sweep();
                let sweeps = (!lock(&stack.maintenance.closing).is_empty()).then_some(SWEEP_PAUSE);
                let returns = stack.bring_back(&set, &mut next);
                sweeps.into_iter().chain(returns).min()
            });
        })?;
        // Only a watch with a thread, and only one of them.
        if self.outliving.watch.set(watch.clone()).is_err() {
            watch.stop_after(Vec::new());
        }
        Ok(self.outliving.watch().cloned().unwrap_or(watch))
    }
}
