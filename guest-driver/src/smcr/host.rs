//! The RNICs of a process as one source of wake-ups.
//!
//! Rules kept here: LG-57, CLOSE-36.

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
use crate::info::{LinkGroupInfo, RnicInfo};
use crate::reactor::source::{OTHER, ReactorEvent, Source};
use crate::verbs::{self, AsyncEvent};

/// How soon connections whose last words are under way are looked at again.
const SOON: Duration = Duration::from_millis(50);
/// One look in so many is at the send completions although nobody waits for one.
const SELDOM: u32 = 16;
/// How often it is looked whether RNICs are still there, while there are link groups.
const ROUND: Duration = Duration::from_secs(1);
/// A port that has nothing to offer is not asked again sooner.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// The RNICs of a process, and its link groups.
pub(crate) struct RdmaHost {
    shared: Arc<Shared>,
    groups: Arc<LinkGroups>,
    epoll: OwnedFd,
    /// The queues were armed and looked at since.
    settled: AtomicBool,
    /// The set has something to report that was not read yet.
    unread: AtomicBool,
    /// Looks at the queues.
    looks: AtomicU32,
    asked: std::sync::Mutex<Option<Instant>>,
    /// When it is to be looked whether RNICs are still there.
    round: std::sync::Mutex<Option<Instant>>,
    subnets: Subnets,
}

/// Where the kernel lists RNICs that processes can use; not there before there is one.
const RNICS: &str = "/sys/class/infiniband_verbs";

/// Names in the epoll set: the kick, then two per device, the first of its completion channel and the
/// second of its asynchronous events.
const KICK: u64 = 0;

/// Whether a name is of a completion channel.
const fn is_channel(name: u64) -> bool {
    name % 2 == 1
}

impl RdmaHost {
    /// Opens the RNICs.
    ///
    /// # Errors
    /// See [`NoRdma`]; with [`Rnics::Auto`] an RNIC that cannot be opened is left out.
    pub(crate) fn open(wanted: &Rnics, how: &SmcrOptions) -> Result<Arc<RdmaHost>, NoRdma> {
        if *wanted == Rnics::None {
            return Err(NoRdma::Off);
        }
        if *wanted == Rnics::Auto && !Path::new(RNICS).exists() {
            // Loading the library to hear that would take a while, and each process would.
            return Err(NoRdma::NoDevice);
        }
        let infos = verbs::devices().map_err(|why| match why {
            verbs::VerbsUnavailable::Library(_) => NoRdma::NoLibrary,
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
            settled: AtomicBool::new(false),
            unread: AtomicBool::new(false),
            looks: AtomicU32::new(0),
            asked: std::sync::Mutex::new(None),
            round: std::sync::Mutex::new(None),
            subnets: Subnets::default(),
        }))
    }

    /// What the groups share.
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
            // Addresses come and go, and nobody may have listened to what the devices tell of it.
            let mut asked = crate::sys::lock(&self.asked);
            if asked.is_some_and(|at| at.elapsed() < ASK_AGAIN) {
                return None;
            }
            *asked = Some(Instant::now());
            drop(asked);
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

    /// Ends the link groups in order and answers nobody any more; the stack is dropped.
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

    /// Goes on with all that the set reports.
    fn read_set(&self) {
        let mut ready = [const { MaybeUninit::<epoll::Event>::uninit() }; 8];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut ready, Some(&now)) else { return };
        for event in ready.iter() {
            match event.data.u64() {
                KICK => self.shared.signal().drain(),
                OTHER => {}
                name => {
                    let Some(device) = self.device(name) else { continue };
                    match is_channel(name) {
                        true => device.note_notice(),
                        false => self.on_async(device),
                    }
                }
            }
        }
    }

    /// The device of a name in the set.
    fn device(&self, name: u64) -> Option<&Arc<Device>> {
        self.shared.devices().get(((name - 1) / 2) as usize)
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
            self.shared.ports().iter().filter(mine).for_each(|port| self.look_at(port));
        }
    }

    /// Looks for RNICs that were taken away. One whose driver waits for its users to leave says nothing
    /// by itself (soft-RoCE), and carries nothing any more. When to look again; `None`: there is nobody
    /// whom it would concern.
    fn look_for_lost(&self, now: Instant) -> Option<Instant> {
        let mut round = crate::sys::lock(&self.round);
        if !self.groups.has_groups() {
            *round = None;
            return None;
        }
        let next = *round.get_or_insert(now + ROUND);
        if now < next {
            return Some(next);
        }
        *round = Some(now + ROUND);
        drop(round);
        let listed = |device: &&Arc<Device>| is_listed(Path::new(RNICS), device.node());
        for device in
            self.shared.devices().iter().filter(|device| !device.is_dead() && !listed(device))
        {
            tracing::warn!(rnic = device.name(), "the RNIC was taken away");
            device.set_dead();
            let mine = |port: &&Arc<Port>| Arc::ptr_eq(port.device(), device);
            self.shared.ports().iter().filter(mine).for_each(|port| self.look_at(port));
        }
        Some(now + ROUND)
    }

    /// A port may have come or gone.
    fn look_at(&self, port: &Arc<Port>) {
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
    info: &verbs::DeviceInfo,
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

/// Whether the kernel still lists an RNIC, whose device file this is, in this directory. Without a
/// directory nobody can tell.
fn is_listed(class: &Path, node: &Path) -> bool {
    !class.exists() || node.file_name().is_none_or(|name| class.join(name).exists())
}

fn listen(signal: &WorkSignal, devices: &[Arc<Device>]) -> std::io::Result<OwnedFd> {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let add = |fd: BorrowedFd<'_>, name, how| {
        epoll::add(&set, fd, epoll::EventData::new_u64(name), epoll::EventFlags::IN | how)
    };
    let (level, edge) = (epoll::EventFlags::empty(), epoll::EventFlags::ET);
    add(signal.as_fd(), KICK, level)?;
    for (i, device) in devices.iter().enumerate() {
        let name = 1 + 2 * i as u64;
        // That there is a notice is all that it says, so it need not be read for each message.
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
        if self.settled.swap(false, Ordering::AcqRel) {
            return true;
        }
        let alive = self.shared.devices().iter().filter(|device| !device.is_dead());
        // All of them, not only the first that was not armed.
        let fresh = alive.fold(false, |fresh, device| device.arm() | fresh);
        self.settled.store(fresh, Ordering::Release);
        // A notice that came while nobody slept is in the set still, which ends the wait.
        !fresh
    }

    fn clear_event_fd(&self) {
        // Who was woken wants what woke it; the set is read before the next sleep.
        self.unread.store(true, Ordering::Release);
    }

    fn on_reported(&self, name: u64) {
        match self.device(name).filter(|_| is_channel(name)) {
            Some(device) => device.note_notice(),
            None => self.clear_event_fd(),
        }
    }

    fn suppress_interrupts(&self) {
        // A notice that is on order costs nothing until it comes.
        self.settled.store(false, Ordering::Release);
    }

    fn poll_events(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool {
        // Who needs room looks by itself.
        let seldom = self.looks.fetch_add(1, Ordering::Relaxed).is_multiple_of(SELDOM);
        for device in self.shared.devices() {
            if seldom || self.groups.has_leaving() || device.has_waiting() {
                self.shared.poll_sends(device);
                self.shared.flush_device(device);
            }
        }
        self.poll_arrivals(handle)
    }

    fn poll_arrivals(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool {
        for device in self.shared.devices() {
            let handle = |token| handle(ReactorEvent::Arrived(token));
            self.shared.poll_receives(device, || self.shared.lately(), handle);
        }
        self.groups.work();
        self.groups.let_go();
        for news in self.shared.take_news() {
            handle(news);
        }
        // Traffic itself makes these, so a thread would be at it for as long as others keep it up;
        // what is left keeps it from sleeping.
        false
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn must_be_polled(&self) -> bool {
        true
    }

    fn has_peers(&self) -> bool {
        self.groups.has_groups()
    }

    fn on_timer(&self, now: Instant) -> Option<Instant> {
        let round = self.look_for_lost(now);
        let tick = self.shared.tick(now);
        let due = self.groups.groups().iter().filter_map(|group| group.on_timer(tick)).min();
        let due = due.map(|due| self.shared.instant(due)).into_iter().chain(round).min();
        // A timer may end a group, and with it connections.
        self.groups.work();
        match self.groups.let_go() {
            true => Some(due.map_or(now + SOON, |due| due.min(now + SOON))),
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
        let class = std::env::temp_dir().join(format!("rnics-{}", std::process::id()));
        let node = Path::new("/dev/infiniband/uverbs7");
        assert!(is_listed(&class, node), "there is no sysfs");
        std::fs::create_dir_all(class.join("uverbs7")).unwrap();
        assert!(is_listed(&class, node));
        std::fs::remove_dir(class.join("uverbs7")).unwrap();
        assert!(!is_listed(&class, node));
        std::fs::remove_dir(&class).unwrap();
    }
}
