//! What the link groups of a process share.
//!
//! Rules kept here: LG-3, LG-4, LG-47, LG-48, LG-60, LG-61.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::time::{ClockId, Timespec, clock_gettime};
use smc_core::handshake::{LinkEnd, PeerLink, PeerRnic};
use smc_core::link_group::{LinkKey, RnicId, Role};
use smc_core::time::Tick;

use super::SmcrOptions;
use super::bell::Bell;
use super::device::{Sink, is_receiving};
use super::endpoint::Endpoint;
use super::group::{Group, Status};
use super::link::Link;
use super::port::Port;
use super::tokens::Tokens;
use crate::reactor::source::ReactorEvent;
use crate::sys::lock;

/// Groups, connections, ports, and what is to be told of them.
#[derive(Debug)]
pub(crate) struct Shared {
    /// All connections by alert token.
    pub(crate) tokens: Tokens<Endpoint>,
    /// How SMC-R is done here.
    pub(crate) options: SmcrOptions,
    ports: Vec<Arc<Port>>,
    epoch: Instant,
    /// The same, as the kernel counts.
    start: Timespec,
    groups: Mutex<Vec<Arc<Group>>>,
    /// Groups that have something to deal with.
    due: Mutex<Vec<Arc<Group>>>,
    has_due: AtomicBool,
    /// Connections that are over here while their last words are under way.
    leaving: Mutex<Vec<(Arc<Group>, Arc<Endpoint>)>>,
    has_leaving: AtomicBool,
    /// What is left of links and groups that are over.
    retired: Mutex<Vec<Retired>>,
    news: Mutex<VecDeque<ReactorEvent>>,
    has_news: AtomicBool,
    /// Wakes who listens for a reason of this process's own.
    kick: Bell,
    numbers: AtomicU32,
}

/// Links that were stopped and connections that end with them. What had arrived before counts, and may
/// not have been looked at yet.
#[derive(Debug, Default)]
pub(super) struct Retired {
    pub(super) links: Vec<Arc<Link>>,
    pub(super) lost: Vec<Arc<Endpoint>>,
}

impl Sink for &Shared {
    fn on_words(&mut self, endpoint: &Arc<Endpoint>) {
        self.tell(ReactorEvent::Arrived(endpoint.token()));
    }

    fn now(&self) -> Tick {
        Shared::now(self)
    }
}

impl Shared {
    pub(super) fn new(ports: Vec<Arc<Port>>, options: SmcrOptions) -> std::io::Result<Arc<Shared>> {
        // Groups are numbered from anywhere, so that a restart does not begin with the same ones.
        let first = u32::from_ne_bytes(super::tokens::random()?);
        Ok(Arc::new(Shared {
            tokens: Tokens::default(),
            options,
            ports,
            epoch: Instant::now(),
            start: clock_gettime(ClockId::Monotonic),
            groups: Mutex::default(),
            due: Mutex::default(),
            has_due: AtomicBool::new(false),
            leaving: Mutex::default(),
            has_leaving: AtomicBool::new(false),
            retired: Mutex::default(),
            news: Mutex::default(),
            has_news: AtomicBool::new(false),
            kick: Bell::new()?,
            numbers: AtomicU32::new(first),
        }))
    }

    /// As [`Shared::now`], up to a tick of the kernel ago: of the kernel's clocks the one that takes
    /// least.
    pub(super) fn lately(&self) -> Tick {
        let coarse = clock_gettime(ClockId::MonotonicCoarse);
        let micros = |time: Timespec| time.tv_sec * 1_000_000 + time.tv_nsec / 1000;
        Tick(u64::try_from(micros(coarse) - micros(self.start)).unwrap_or(0))
    }

    /// Now, as state machines count.
    pub(crate) fn now(&self) -> Tick {
        self.tick(Instant::now())
    }

    pub(super) fn tick(&self, at: Instant) -> Tick {
        let since = at.saturating_duration_since(self.epoch);
        Tick(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
    }

    pub(super) fn instant(&self, tick: Tick) -> Instant {
        self.epoch + std::time::Duration::from_micros(tick.0)
    }

    /// A number for a new group: 24 bits.
    pub(crate) fn next_number(&self) -> u32 {
        self.numbers.fetch_add(1, Ordering::Relaxed) & 0x00ff_ffff
    }

    /// All ports.
    pub(crate) fn ports(&self) -> &[Arc<Port>] {
        &self.ports
    }

    /// A port by its number.
    pub(crate) fn port(&self, id: RnicId) -> Option<Arc<Port>> {
        self.ports.iter().find(|port| port.id() == id).cloned()
    }

    /// Who listens is to look.
    pub(crate) fn kick(&self) -> &Bell {
        &self.kick
    }

    /// A group has something to deal with.
    pub(crate) fn have_work(&self, group: &Arc<Group>) {
        let mut due = lock(&self.due);
        if !due.iter().any(|other| Arc::ptr_eq(other, group)) {
            due.push(group.clone());
        }
        drop(due);
        self.rouse();
    }

    fn rouse(&self) {
        if !self.has_due.swap(true, Ordering::SeqCst) {
            self.kick.ring();
        }
    }

    /// Has the groups do what they have to.
    pub(super) fn work(&self) {
        // Called for a connection that is being told of a message: whoever tells it will come here.
        if is_receiving() {
            return;
        }
        if !self.has_due.load(Ordering::SeqCst) || !self.has_due.swap(false, Ordering::SeqCst) {
            return;
        }
        let due = std::mem::take(&mut *lock(&self.due));
        due.iter().for_each(|group| group.work());
        let retired = std::mem::take(&mut *lock(&self.retired));
        retired.iter().for_each(|retired| self.bury(retired));
    }

    /// Ends what was [retired](Retired) once its last messages were taken.
    pub(super) fn retire(&self, retired: Retired) {
        retired.links.iter().for_each(|link| link.stop());
        lock(&self.retired).push(retired);
        self.rouse();
    }

    fn bury(&self, Retired { links, lost }: &Retired) {
        for link in links {
            link.port().device().take_receives(&mut &*self);
            link.close();
        }
        for endpoint in lost {
            endpoint.fail();
            self.tell_lost(endpoint.token());
        }
    }

    fn tell(&self, news: ReactorEvent) {
        lock(&self.news).push_back(news);
        if !self.has_news.swap(true, Ordering::SeqCst) {
            self.kick.ring();
        }
    }

    /// A connection cannot go on.
    pub(crate) fn tell_lost(&self, token: u32) {
        self.tell(ReactorEvent::Lost(token));
    }

    /// The peer has given the element of a connection to another one.
    pub(crate) fn tell_taken(&self, token: u32) {
        self.tell(ReactorEvent::Taken(token));
    }

    /// Timers of groups may be sooner than they were.
    pub(crate) fn timers_changed(&self) {
        let told = lock(&self.news).iter().any(|news| matches!(news, ReactorEvent::Timers));
        if !told {
            self.tell(ReactorEvent::Timers);
        }
    }

    pub(super) fn take_news(&self) -> VecDeque<ReactorEvent> {
        if !self.has_news.load(Ordering::SeqCst) || !self.has_news.swap(false, Ordering::SeqCst) {
            return VecDeque::new();
        }
        std::mem::take(&mut *lock(&self.news))
    }

    /// All groups that are not over.
    pub(crate) fn groups(&self) -> Vec<Arc<Group>> {
        lock(&self.groups).clone()
    }

    /// Whether there are groups, or something is left of them.
    pub(crate) fn has_groups(&self) -> bool {
        !lock(&self.groups).is_empty() || !lock(&self.retired).is_empty()
    }

    /// A new group.
    pub(crate) fn enter(&self, group: Arc<Group>) {
        lock(&self.groups).push(group);
    }

    /// A group is over.
    pub(crate) fn forget(&self, group: &Group) {
        lock(&self.groups).retain(|other| !std::ptr::eq(Arc::as_ptr(other), group));
    }

    /// What a server has for this peer (CLC-19): a group with room, or one whose first contact is
    /// under way and worth waiting for.
    pub(crate) fn for_client(&self, peer: &PeerRnic) -> Option<Arc<Group>> {
        let groups = self.groups();
        let mine = |group: &&Arc<Group>| group.role() == Role::Server && group.is_with(peer);
        let mine: Vec<_> = groups.iter().filter(mine).collect();
        let usable = |group: &&&Arc<Group>| {
            group.status() == Status::Usable
                && group.with(|machine, _| machine.has_room()) == Some(true)
        };
        let forming = |group: &&&Arc<Group>| group.status() == Status::Forming;
        let found = mine.iter().find(usable).or_else(|| mine.iter().find(forming));
        found.map(|group| Arc::clone(group))
    }

    /// The group and the link that a server named to this client (CLC-33); without the link if
    /// there is a group with this server, but not that link.
    pub(crate) fn to_server(&self, peer: &PeerLink) -> Option<(Arc<Group>, Option<LinkKey>)> {
        let mut known = None;
        for group in self.groups() {
            // The address is that of the link, which need not be that of the first one.
            if group.role() != Role::Client || !group.is_with_stack(&peer.rnic) {
                continue;
            }
            let (qpn, gid) = (peer.qpn, peer.rnic.gid());
            if let Some(Some(link)) = group.with(|machine, _| machine.link_to(qpn, gid)) {
                return Some((group, Some(link)));
            }
            known = known.or(Some((group, None)));
        }
        known
    }

    /// A connection is over here; its last words may still be under way.
    pub(crate) fn part(&self, group: Arc<Group>, endpoint: Arc<Endpoint>) {
        if endpoint.is_quiet() {
            return self.parted(&group, &endpoint);
        }
        lock(&self.leaving).push((group, endpoint));
        self.has_leaving.store(true, Ordering::SeqCst);
    }

    fn parted(&self, group: &Arc<Group>, endpoint: &Arc<Endpoint>) {
        self.tokens.remove(endpoint.token());
        group.leave(endpoint);
    }

    /// Whether there are connections whose last words may still be under way.
    pub(super) fn has_leaving(&self) -> bool {
        self.has_leaving.load(Ordering::SeqCst)
    }

    /// Lets go of connections whose last words have arrived. `true`: there are others.
    pub(super) fn let_go(&self) -> bool {
        if !self.has_leaving() {
            return false;
        }
        let (gone, left): (Vec<_>, Vec<_>) = std::mem::take(&mut *lock(&self.leaving))
            .into_iter()
            .partition(|(group, endpoint)| group.status() == Status::Over || endpoint.is_quiet());
        let mut leaving = lock(&self.leaving);
        leaving.extend(left);
        let more = !leaving.is_empty();
        self.has_leaving.store(more, Ordering::SeqCst);
        drop(leaving);
        gone.iter().for_each(|(group, endpoint)| self.parted(group, endpoint));
        more
    }
}

/// What Accept or Confirm tell of this end of a link, but for the element.
pub(crate) fn link_end(link: &super::link::Link, direct: bool) -> LinkEnd {
    use smc_core::wire::ids::{Mac, Rkey, SizeCode};
    LinkEnd {
        gid: link.gid(),
        mac: link.port().mac().unwrap_or(Mac::NONE),
        qpn: link.qpn(),
        psn: link.psn(),
        mtu: link.port().view().mtu,
        rkey: Rkey(0),
        address: 0,
        index: 1,
        token: 0,
        size: SizeCode::MIN,
        direct,
    }
}

#[cfg(test)]
mod tests {
    use smc_core::wire::clc::Version;
    use smc_core::wire::ids::{Gid, Mac, PeerId, Qpn};

    use super::*;

    // Shows: LG-3.
    #[test]
    fn a_group_serves_one_direction_only() {
        let shared = Shared::new(Vec::new(), SmcrOptions::default()).unwrap();
        let gid = Gid::from_ipv4([10, 0, 0, 2]);
        let peer = PeerRnic::new(Version::V2, PeerId([7; 8]), gid, Mac::NONE);
        let enter = |role| {
            let group = Group::new(shared.next_number(), role, peer, &shared);
            shared.enter(group.clone());
            group
        };
        // To the peer as a server: nothing for the peer as a client, and the other way round.
        let out = enter(Role::Client);
        assert!(shared.for_client(&peer).is_none());
        let into = enter(Role::Server);
        assert!(shared.for_client(&peer).is_some_and(|group| Arc::ptr_eq(&group, &into)));
        let named = PeerLink { rnic: peer, qpn: Qpn::new(1) };
        let (group, link) = shared.to_server(&named).unwrap();
        assert!(Arc::ptr_eq(&group, &out));
        assert_eq!(link, None);
    }
}
