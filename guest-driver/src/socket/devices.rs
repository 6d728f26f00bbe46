// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The devices of a stack, open or not, and the resources that they give to handshakes.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use smc_core::handshake;
use virtio_ism::transport::DeviceAddress;

use super::no_device::is_temporary;
use super::statistics::DeviceInfo;
use crate::conn::Conn;
use crate::handshake::{ByRdma, EstablishedConn};
use crate::reactor::Reactor;
use crate::smcd::{Fabric, Fabrics};
use crate::smcr::RdmaHost;
use ism_sys::{is_free, lock};
use smc_info::Fallback;

/// The shortest pause before a stack tries again to open a device.
const REOPEN_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause: a daemon that was too busy to answer may be fast again.
const LONGEST_REOPEN_PAUSE: Duration = Duration::from_secs(30);
/// The longest pause for connections waiting on TCP for a PCI function of use soon, as in a migration: with
/// a short attempt, less than two intervals of their thread. An attempt takes seconds there if the guest gets
/// no processor.
const LONGEST_RETURN_PAUSE: Duration = Duration::from_millis(400);

/// The table of devices.
pub(super) struct Devices(Mutex<Slots>);

struct Slots {
    list: Vec<Slot>,
    /// The resources of handshakes. A stack makes new ones when it opens or loses a device.
    current: Option<Arc<Current>>,
}

/// The place of a device of the configuration.
pub(super) struct Slot {
    address: DeviceAddress,
    live: Option<OpenDevice>,
    /// The reactor of the last open device.
    reactor: Option<Arc<Reactor<Conn>>>,
    /// The fabrics of lost devices, as long as a handshake may make a connection of one.
    gone: Vec<Weak<Fabric>>,
    /// The user of the daemon of the first device opened here.
    owner: Option<u32>,
    /// Not before this time is the device to be opened.
    due: Option<Instant>,
    /// The same for the thread of connections waiting on TCP.
    due_to_return: Option<Instant>,
    error: String,
    kind: io::ErrorKind,
}

impl Slot {
    /// The device, if open and not about to go.
    pub(super) fn offered(&self) -> Option<&OpenDevice> {
        self.live.as_ref().filter(|live| !live.fabric.device().is_leaving())
    }

    /// The fabrics of lost devices, with the present reactor.
    pub(super) fn gone(&self) -> impl Iterator<Item = (Weak<Fabric>, Arc<Reactor<Conn>>)> {
        let with_reactor = |reactor: &Arc<Reactor<Conn>>| {
            self.gone.iter().cloned().zip(std::iter::repeat(reactor.clone()))
        };
        self.reactor.iter().flat_map(with_reactor)
    }

    /// The open device.
    pub(super) fn open(&self) -> Option<&OpenDevice> {
        self.live.as_ref()
    }

    /// The address of the device.
    pub(super) fn address(&self) -> &DeviceAddress {
        &self.address
    }

    /// The reactor of the last open device.
    pub(super) fn last_reactor(&self) -> Option<&Arc<Reactor<Conn>>> {
        self.reactor.as_ref()
    }

    /// The user of the daemon of the first device opened here.
    pub(super) fn owner(&self) -> Option<u32> {
        self.owner
    }

    /// The address, and the reason for no device for new connections.
    pub(super) fn problem(&self) -> String {
        let leaves = "the device is about to go";
        let why = if self.live.is_some() { leaves } else { &self.error };
        format!("{}: {why}", self.address)
    }

    fn new(address: &DeviceAddress) -> Slot {
        Slot {
            address: address.clone(),
            live: None,
            reactor: None,
            gone: Vec::new(),
            owner: None,
            due: None,
            due_to_return: None,
            error: String::new(),
            kind: io::ErrorKind::Other,
        }
    }

    /// Forgets a lost device, and opens the device by `open` if it is time for this cause. `true`:
    /// something has changed.
    fn update(&mut self, cause: Cause, open: impl FnOnce(&Slot) -> io::Result<OpenDevice>) -> bool {
        let mut changed = false;
        let is_lost = |live: &OpenDevice| live.reactor.is_lost() || live.fabric.device().is_gone();
        if self.live.as_ref().is_some_and(is_lost) {
            self.gone.retain(|fabric| fabric.strong_count() > 0);
            self.gone.extend(self.live.take().map(|live| Arc::downgrade(&live.fabric)));
            changed = true;
        }
        let now = Instant::now();
        let due = match cause {
            Cause::Program => self.due,
            Cause::Return => self.due_to_return,
        };
        if self.live.is_some() || due.is_some_and(|due| due > now) {
            return changed;
        }
        self.due = Some(now + REOPEN_PAUSE);
        self.due_to_return = self.due;
        match open(self) {
            Ok(live) => {
                self.owner = self.owner.or(live.fabric.device().owner());
                self.reactor = Some(live.reactor.clone());
                self.live = Some(live);
            }
            Err(error) => {
                let attempt = now.elapsed();
                let pauses = reopen_pauses(is_temporary(&self.address, error.kind()), attempt);
                [self.due, self.due_to_return] = pauses.map(|pause| Some(Instant::now() + pause));
                self.kind = error.kind();
                let last = std::mem::replace(&mut self.error, error.to_string());
                if self.error != last {
                    tracing::debug!(device = %self.address, %error, ?attempt, "no device yet");
                }
            }
        }
        true
    }
}

/// The cause of an attempt to open a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// A call of the program, which waits for the attempt.
    Program,
    /// The thread of connections waiting on TCP.
    Return,
}

/// An open device, with the reactor of its events.
#[derive(Clone)]
pub(super) struct OpenDevice {
    pub(super) fabric: Arc<Fabric>,
    pub(super) reactor: Arc<Reactor<Conn>>,
}

/// The devices and the configuration of a handshake.
pub struct Current {
    pub(crate) fabrics: Fabrics,
    pub(crate) config: Arc<handshake::Config>,
    pub(super) rdma: Option<(Arc<RdmaHost>, Arc<Reactor<Conn>>)>,
    /// The devices of the fabrics, and devices about to go.
    pub(super) open: Vec<OpenDevice>,
    /// The fabrics of lost devices, with the reactors of their successors.
    pub(super) gone: Vec<(Weak<Fabric>, Arc<Reactor<Conn>>)>,
    pub(super) missing: String,
}

impl Current {
    /// The reactor of a connection. Its device may have gone during the handshake.
    pub(crate) fn reactor(&self, established: &EstablishedConn) -> Option<&Arc<Reactor<Conn>>> {
        match established {
            EstablishedConn::D(conn) => {
                let its = Arc::as_ptr(&conn.fabric);
                let open = self.open.iter().map(|open| (Arc::as_ptr(&open.fabric), &open.reactor));
                let gone = self.gone.iter().map(|(fabric, reactor)| (fabric.as_ptr(), reactor));
                open.chain(gone).find(|(fabric, _)| *fabric == its).map(|(_, reactor)| reactor)
            }
            EstablishedConn::R(_) => self.rdma.as_ref().map(|(_, reactor)| reactor),
        }
    }

    /// The resources of handshakes for SMC-R, if there is any RNIC.
    pub(crate) fn rdma(&self) -> Option<ByRdma<'_>> {
        self.rdma.as_ref().map(|(host, reactor)| ByRdma { host, observer: &**reactor })
    }

    /// The reason for no device, if there is none.
    pub(crate) fn no_device(&self) -> Option<Fallback> {
        (self.fabrics.0.is_empty() && self.rdma.is_none()).then(|| match self.open.is_empty() {
            true => Fallback::NoDevice(self.missing.clone()),
            false => Fallback::Drained,
        })
    }
}

impl Devices {
    /// The devices with these addresses, none open yet.
    pub(super) fn new<'a>(addresses: impl Iterator<Item = &'a DeviceAddress>) -> Devices {
        let list = addresses.map(Slot::new).collect();
        Devices(Mutex::new(Slots { list, current: None }))
    }

    /// The open devices, as `describe` makes resources of them. Tries again to open the others by
    /// `open`, if it is time for this cause.
    pub(super) fn current(
        &self,
        cause: Cause,
        open: impl Fn(&Slot) -> io::Result<OpenDevice>,
        describe: impl FnOnce(&[Slot]) -> Current,
    ) -> Arc<Current> {
        let mut slots = lock(&self.0);
        let mut changed = false;
        for slot in &mut slots.list {
            changed |= slot.update(cause, &open);
        }
        let offered = slots.list.iter().filter(|slot| slot.offered().is_some()).count();
        changed |= slots.current.as_ref().is_none_or(|c| c.fabrics.0.len() != offered);
        let known = slots.current.take().filter(|_| !changed);
        let current = known.unwrap_or_else(|| Arc::new(describe(&slots.list)));
        slots.current = Some(current.clone());
        current
    }

    /// The last resources of handshakes. Opens no device.
    pub(super) fn last(&self) -> Option<Arc<Current>> {
        lock(&self.0).current.clone()
    }

    /// The kinds of the errors of opening the devices.
    pub(super) fn error_kinds(&self) -> Vec<io::ErrorKind> {
        lock(&self.0).list.iter().map(|slot| slot.kind).collect()
    }

    /// The open devices, and lost ones that no handshake has found lost yet.
    pub(super) fn open(&self) -> Vec<OpenDevice> {
        lock(&self.0).list.iter().filter_map(Slot::open).cloned().collect()
    }

    /// The devices of the configuration, open or not.
    pub(super) fn infos(&self) -> Vec<DeviceInfo> {
        let slots = lock(&self.0);
        let describe = |slot: &Slot| {
            let path = slot.address.to_string();
            match &slot.live {
                Some(OpenDevice { fabric, .. }) => DeviceInfo {
                    path,
                    chid: Some(fabric.chid().to_string()),
                    gid: Some(fabric.device().gid().to_string()),
                    problem: None,
                },
                None => {
                    let problem = Some(slot.error.clone());
                    DeviceInfo { path, problem, ..DeviceInfo::default() }
                }
            }
        };
        slots.list.iter().map(describe).collect()
    }

    /// Whether no thread holds the lock.
    pub(super) fn is_unlocked(&self) -> bool {
        is_free(&self.0)
    }

    /// Ends the reactors of the open devices.
    pub(super) fn stop(&mut self) {
        let slots = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        slots.list.iter().filter_map(Slot::open).for_each(|live| live.reactor.stop());
    }
}

/// The pauses after a failed attempt to open a device: for calls of the program, and for connections that
/// wait on TCP. The first is ten times as long as the attempt, because a daemon that hangs answers none
/// for seconds, and calls of the program wait for each.
fn reopen_pauses(is_temporary: bool, attempt: Duration) -> [Duration; 2] {
    let pause = (10 * attempt).clamp(REOPEN_PAUSE, LONGEST_REOPEN_PAUSE);
    [pause, if is_temporary { pause.min(LONGEST_RETURN_PAUSE) } else { pause }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_try_a_function_of_use_soon_more_often_than_calls() {
        let pauses = |is_temporary, attempt| {
            let pauses = reopen_pauses(is_temporary, Duration::from_millis(attempt));
            pauses.map(|pause| pause.as_millis())
        };
        assert_eq!(pauses(true, 1), [100, 100]);
        assert_eq!(pauses(true, 230), [2300, 400]);
        assert_eq!(pauses(true, 9000), [30_000, 400]);
        assert_eq!(pauses(false, 230), [2300, 2300]);
    }
}
