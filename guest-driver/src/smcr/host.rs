// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The RNICs of a process as one event source of a reactor.

use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::fd::OwnedFd;
use smc_core::link_group::RnicId;
use smc_core::wire::llc::DeleteReason;

use super::alternates::alternate;
use super::device::Device;
use super::groups::LinkGroups;
use super::inbox::{Input, WorkSignal};
use super::port::Port;
use super::shared::Shared;
use super::subnets::Subnets;
use super::{NoRdma, Rnics, SmcrOptions, info};
use crate::reactor::source::{PolledSource, REACTOR_NAME, ReactorEvent, Source, SourceParts};
use ism_sys::out_of_the_way;
use smc_info::{LinkGroupInfo, RnicInfo};
use smc_verbs::AsyncEvent;

/// Interval of checks of closing connections with their last words under way.
const CLOSING_INTERVAL: Duration = Duration::from_millis(50);
/// One poll of this many takes send completions although no thread waits for one.
const SENDS_EVERY: u32 = 16;
/// Interval of the host's checks for removed RNICs while there are link groups.
const REMOVAL_INTERVAL: Duration = Duration::from_secs(1);
/// A port without a usable address is queried again after this time at the earliest.
const REFRESH_INTERVAL: Duration = Duration::from_millis(200);

/// The RNICs of a process, and its link groups.
pub(crate) struct RdmaHost {
    shared: Arc<Shared>,
    groups: Arc<LinkGroups>,
    epoll: OwnedFd,
    /// The queues were armed, and were polled since.
    polled_since_arming: AtomicBool,
    /// The epoll set may report events not read yet.
    unread: AtomicBool,
    /// Polls of the queues until now.
    polls: AtomicU32,
    refreshed: std::sync::Mutex<Option<Instant>>,
    /// The time of the host's next check for removed RNICs.
    next_removal_check: std::sync::Mutex<Option<Instant>>,
    subnets: Subnets,
}

/// The kernel's list of RNICs usable by processes; absent before the first one.
const RNICS: &str = "/sys/class/infiniband_verbs";

/// Names in the epoll set: the kick, then two per device, the first of its completion channel and the
/// second of its asynchronous events.
const SIGNAL: u64 = 0;

/// Whether a name is of a completion channel.
const fn is_channel(name: u64) -> bool {
    name % 2 == 1
}

impl RdmaHost {
    /// Opens the RNICs.
    ///
    /// # Errors
    /// See [`NoRdma`]; with [`Rnics::Auto`] an RNIC failing to open is left out.
    pub(crate) fn open(wanted: &Rnics, how: &SmcrOptions) -> Result<Arc<RdmaHost>, NoRdma> {
        if *wanted == Rnics::None {
            return Err(NoRdma::Off);
        }
        if *wanted == Rnics::Auto && !Path::new(RNICS).exists() {
            // Loading the library would take long, in every process.
            return Err(NoRdma::NoDevice);
        }
        let infos = smc_verbs::devices().map_err(|why| match why {
            smc_verbs::VerbsUnavailable::Library(_) => NoRdma::NoLibrary,
            other => match wanted {
                Rnics::Names(names) => NoRdma::Rnic {
                    name: names.first().cloned().unwrap_or_default(),
                    why: other.to_string(),
                },
                _ => NoRdma::NoDevice,
            },
        })?;
        let signal = WorkSignal::new().map_err(|error| NoRdma::System(error.to_string()))?;
        let mut devices = Vec::new();
        let mut ports = Vec::new();
        for info in &infos {
            let Some(numbers) = wanted.ports_of(info.name()) else { continue };
            match open(info, numbers, (devices.len(), ports.len() as u32), &signal) {
                Ok((device, mut found)) => {
                    devices.push(device);
                    ports.append(&mut found);
                }
                Err(why) if *wanted == Rnics::Auto => {
                    tracing::debug!(rnic = info.name(), %why, "left out");
                }
                Err(why) => return Err(NoRdma::Rnic { name: info.name().into(), why }),
            }
        }
        if let Rnics::Names(names) = wanted {
            let known = |name: &&String| {
                let device = name.split('/').next().unwrap_or_default();
                !devices.iter().any(|d: &Arc<Device>| d.name() == device)
            };
            if let Some(name) = names.iter().find(known) {
                return Err(NoRdma::Rnic { name: name.clone(), why: "no such RNIC".into() });
            }
        }
        if ports.is_empty() {
            return Err(NoRdma::NoDevice);
        }
        let failed = |error: std::io::Error| NoRdma::Rnic {
            name: devices.first().map(|d| d.name().to_owned()).unwrap_or_default(),
            why: error.to_string(),
        };
        let epoll = listen(&signal, &devices).map_err(failed)?;
        let system = |error: std::io::Error| NoRdma::System(error.to_string());
        let shared = Shared::new(devices, ports, how.clone(), signal).map_err(system)?;
        let groups = LinkGroups::new(&shared);
        Ok(Arc::new(RdmaHost {
            shared,
            groups,
            epoll,
            polled_since_arming: AtomicBool::new(false),
            unread: AtomicBool::new(false),
            polls: AtomicU32::new(0),
            refreshed: std::sync::Mutex::new(None),
            next_removal_check: std::sync::Mutex::new(None),
            subnets: Subnets::default(),
        }))
    }

    /// Whether a port is up.
    pub(crate) fn has_active_port(&self) -> bool {
        self.shared.ports().iter().any(|port| port.is_active())
    }

    /// The state shared by the groups.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The link groups.
    pub(crate) fn link_groups(&self) -> &Arc<LinkGroups> {
        &self.groups
    }

    pub(crate) fn subnets(&self) -> &Subnets {
        &self.subnets
    }

    /// The port whose interface has the local address of a TCP connection.
    pub(crate) fn port_of(&self, local: IpAddr) -> Option<Arc<Port>> {
        let find = || {
            let fits = |port: &&Arc<Port>| port.is_active() && port.source_v2(local).is_some();
            self.shared.ports().iter().find(fits).cloned()
        };
        find().or_else(|| {
            // Addresses come and go, and the asynchronous events may not have been read yet.
            let mut refreshed = ism_sys::lock(&self.refreshed);
            if refreshed.is_some_and(|at| at.elapsed() < REFRESH_INTERVAL) {
                return None;
            }
            *refreshed = Some(Instant::now());
            drop(refreshed);
            for port in self.shared.ports() {
                port.refresh();
            }
            find()
        })
    }

    /// RNIC ports as they are now.
    pub(crate) fn rnics(&self) -> Vec<RnicInfo> {
        self.shared.ports().iter().map(|port| info::rnic(port, &self.shared)).collect()
    }

    /// Link groups as they are now.
    pub(crate) fn groups(&self) -> Vec<LinkGroupInfo> {
        self.groups.groups().iter().map(info::group).collect()
    }

    /// Closes the link groups in order (LG-57, CLOSE-36). The stack is dropped, so nothing is answered
    /// afterwards.
    pub(crate) fn shut_down(&self) {
        let end = Instant::now() + Duration::from_millis(200);
        for group in self.groups.groups() {
            group.with(|machine, now| machine.terminate(DeleteReason::OPERATOR, now));
        }
        while self.groups.has_groups() && Instant::now() < end {
            self.poll_events(&mut |_| {});
            self.on_timer(Instant::now());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Handles the events reported by the epoll set.
    fn read_set(&self) {
        let mut ready = [const { MaybeUninit::<epoll::Event>::uninit() }; 8];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut ready, Some(&now)) else { return };
        for event in ready.iter() {
            match event.data.u64() {
                SIGNAL => self.shared.signal().drain(),
                REACTOR_NAME => {}
                name => {
                    let Some(device) = self.device(name) else { continue };
                    match is_channel(name) {
                        true => device.on_notice(),
                        false => self.on_async(device),
                    }
                }
            }
        }
    }

    /// The device of a name in the set; `None`: the name is [`SIGNAL`].
    fn device(&self, name: u64) -> Option<&Arc<Device>> {
        self.shared.devices().get((name.checked_sub(1)? / 2) as usize)
    }

    fn on_async(&self, device: &Arc<Device>) {
        while let Some(event) = device.context().next_async_event() {
            tracing::debug!(rnic = device.name(), ?event, "RNIC event");
            match event {
                AsyncEvent::PortActive(_)
                | AsyncEvent::PortDown(_)
                | AsyncEvent::GidChange(_)
                | AsyncEvent::PortChange(_) => {}
                AsyncEvent::DeviceFatal | AsyncEvent::CqError(_) => device.set_dead(),
                AsyncEvent::QpFatal(qpn)
                | AsyncEvent::QpRequest(qpn)
                | AsyncEvent::QpAccess(qpn) => {
                    let links = self.shared.links_over(device);
                    links.iter().filter(|link| link.qpn() == qpn).for_each(|link| link.fail());
                    continue;
                }
                AsyncEvent::QpNotice(..) | AsyncEvent::Other(_) => continue,
            }
            let mine = |port: &&Arc<Port>| Arc::ptr_eq(port.device(), device);
            self.shared.ports().iter().filter(mine).for_each(|port| self.update_port(port));
        }
    }

    /// Marks RNICs removed from the host. A driver waiting for its users (soft-RoCE) reports no event,
    /// although the RNIC carries nothing any more. Returns the time of the next check; `None`: there is
    /// no link group.
    fn check_for_removed(&self, now: Instant) -> Option<Instant> {
        let mut next_removal_check = ism_sys::lock(&self.next_removal_check);
        if !self.groups.has_groups() {
            *next_removal_check = None;
            return None;
        }
        let next = *next_removal_check.get_or_insert(now + REMOVAL_INTERVAL);
        if now < next {
            return Some(next);
        }
        *next_removal_check = Some(now + REMOVAL_INTERVAL);
        drop(next_removal_check);
        let listed = |device: &&Arc<Device>| is_listed(Path::new(RNICS), device.node());
        for device in
            self.shared.devices().iter().filter(|device| !device.is_dead() && !listed(device))
        {
            tracing::warn!(rnic = device.name(), "the RNIC was taken away");
            device.set_dead();
            let mine = |port: &&Arc<Port>| Arc::ptr_eq(port.device(), device);
            self.shared.ports().iter().filter(mine).for_each(|port| self.update_port(port));
        }
        Some(now + REMOVAL_INTERVAL)
    }

    /// Queries a port and puts its change of state into the inboxes of all groups.
    fn update_port(&self, port: &Arc<Port>) {
        let was = port.is_active();
        let is = port.refresh();
        for group in self.groups.groups() {
            match (is, group.pattern()) {
                (false, _) if was || port.device().is_dead() => {
                    group.put(Input::PortDown(port.id()));
                }
                (true, Some((first, direct))) => {
                    let version = group.version();
                    if let Some(rnic) = alternate(&self.shared, port, &first, version, direct) {
                        group.put(Input::PortUp(rnic));
                    }
                }
                _ => {}
            }
        }
    }
}

fn open(
    info: &smc_verbs::DeviceInfo,
    numbers: Option<Vec<u8>>,
    (index, first): (usize, u32),
    signal: &Arc<WorkSignal>,
) -> Result<(Arc<Device>, Vec<Arc<Port>>), String> {
    let device = Device::open(info, index, signal).map_err(|error| error.to_string())?;
    let all = device.context().limits().map_err(|error| error.to_string())?.ports;
    let numbers = numbers.unwrap_or_else(|| (1..=all).collect());
    let mut ports = Vec::new();
    for (number, id) in numbers.into_iter().zip(first..) {
        let port = Port::new(RnicId(id), &device, number);
        ports.push(port.map_err(|error| format!("port {number}: {error}"))?);
    }
    Ok((device, ports))
}

/// Whether the kernel still lists an RNIC with this device file in the directory `class`. Without the
/// directory the answer is `true`.
fn is_listed(class: &Path, node: &Path) -> bool {
    !class.exists() || node.file_name().is_none_or(|name| class.join(name).exists())
}

fn listen(signal: &WorkSignal, devices: &[Arc<Device>]) -> std::io::Result<OwnedFd> {
    let set = out_of_the_way(|| epoll::create(epoll::CreateFlags::CLOEXEC))?;
    let add = |fd: BorrowedFd<'_>, name, how| {
        epoll::add(&set, fd, epoll::EventData::new_u64(name), epoll::EventFlags::IN | how)
    };
    let (level, edge) = (epoll::EventFlags::empty(), epoll::EventFlags::ET);
    add(signal.as_fd(), SIGNAL, level)?;
    for (i, device) in devices.iter().enumerate() {
        let name = 1 + 2 * i as u64;
        // Edge-triggered: the event alone reports a notice, so no read per message is needed.
        add(device.channel_fd(), name, edge)?;
        add(device.context().as_fd(), name + 1, level)?;
    }
    Ok(set)
}

impl Source for RdmaHost {
    fn event_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn event_set(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.as_fd())
    }

    fn arm_interrupts(&self) -> bool {
        if self.unread.swap(false, Ordering::AcqRel) {
            self.read_set();
        }
        if self.polled_since_arming.swap(false, Ordering::AcqRel) {
            return true;
        }
        let alive = self.shared.devices().iter().filter(|device| !device.is_dead());
        // Every device is armed, not only the first unarmed one.
        let fresh = alive.fold(false, |fresh, device| device.arm() | fresh);
        self.polled_since_arming.store(fresh, Ordering::Release);
        // A notice from before the sleep is still in the set and ends the wait.
        !fresh
    }

    fn clear_event_fd(&self) {
        // The woken thread wants its event first. The set is read before the next sleep.
        self.unread.store(true, Ordering::Release);
    }

    fn on_reported(&self, name: u64) {
        match self.device(name).filter(|_| is_channel(name)) {
            Some(device) => device.on_notice(),
            None => self.clear_event_fd(),
        }
    }

    fn suppress_interrupts(&self) {
        // An armed queue costs nothing until a completion comes.
        self.polled_since_arming.store(false, Ordering::Release);
    }

    fn poll_events(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool {
        // A thread in need of room polls send completions itself.
        let is_turn = self.polls.fetch_add(1, Ordering::Relaxed).is_multiple_of(SENDS_EVERY);
        for device in self.shared.devices() {
            if is_turn || self.groups.has_closing() || device.has_waiting() {
                self.shared.poll_sends(device);
                self.shared.flush_device(device);
            }
        }
        self.poll_arrivals(handle)
    }

    fn is_gone(&self) -> bool {
        false
    }
}

impl From<Arc<RdmaHost>> for SourceParts {
    fn from(host: Arc<RdmaHost>) -> SourceParts {
        SourceParts { polled: Some(host.clone()), source: host, lines: None }
    }
}

impl PolledSource for RdmaHost {
    fn poll_arrivals(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool {
        for device in self.shared.devices() {
            let handle = |token| handle(ReactorEvent::Arrived(token));
            self.shared.poll_receives(device, || self.shared.lately(), handle);
        }
        self.groups.work();
        self.groups.finish_closing();
        for events in self.shared.take_events() {
            handle(events);
        }
        // `false`: a thread continuing for as long as there is traffic would never return. Remaining
        // completions keep it from sleeping.
        false
    }

    fn has_peers(&self) -> bool {
        self.groups.has_groups()
    }

    fn on_timer(&self, now: Instant) -> Option<Instant> {
        let next_removal_check = self.check_for_removed(now);
        let tick = self.shared.tick(now);
        let due = self.groups.groups().iter().filter_map(|group| group.on_timer(tick)).min();
        let due =
            due.map(|due| self.shared.instant(due)).into_iter().chain(next_removal_check).min();
        // A timer may end a group and its connections.
        self.groups.work();
        match self.groups.finish_closing() {
            true => Some(due.map_or(now + CLOSING_INTERVAL, |due| due.min(now + CLOSING_INTERVAL))),
            false => due,
        }
    }
}

impl std::fmt::Debug for RdmaHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RdmaHost").field("devices", &self.shared.devices()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_rnic_that_is_not_listed_any_more_was_taken_away() {
        let own = smc_test_support::TestDir::new();
        let class = own.path("rnics");
        let node = Path::new("/dev/infiniband/uverbs7");
        assert!(is_listed(&class, node), "there is no sysfs");
        std::fs::create_dir_all(class.join("uverbs7")).unwrap();
        assert!(is_listed(&class, node));
        std::fs::remove_dir(class.join("uverbs7")).unwrap();
        assert!(!is_listed(&class, node));
    }
}
