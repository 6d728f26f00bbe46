// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! TCP option 254: which connections ask for SMC by the option, and how their peers answer.
//!
//! `smc run` attaches the rendezvous and passes its descriptors on, so the program needs no rights.
//! The hooks protect these descriptors from calls of the program to close all descriptors.

use std::ffi::c_int;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use guest_driver::Fallback;
use ism_sys::OnceBox;
use smc_core::handshake::FallbackReason;
use smc_rendezvous::{
    ClientAction, Mode, PROPOSAL_TIMEOUT, PeerDiscovery, Policy, PolicyChoice, Rendezvous,
    ServerAction,
};

use crate::selection::server_memory::ServerRecord;
use crate::selection::{answering_listeners, kernel_sockets, listening_ports, own_calls, session};
use crate::socket::smc_request::SmcRequest;
use crate::sys::{borrowed, local_address, raw};
use crate::{config, fork, policy, status};

/// The rendezvous as adopted by this process, for the rest of its life. Most processes of a shell
/// or a build never make a connection, so the first use adopts the rendezvous.
static ADOPTED: OnceBox<Adopted> = OnceBox::new();
/// Descriptors passed on by `smc run`, ascending.
static PASSED: OnceBox<Vec<c_int>> = OnceBox::new();

struct Adopted {
    discovery: PeerDiscovery,
    /// The descriptors of the rendezvous, ascending.
    descriptors: Vec<c_int>,
}

/// The action of a server on an accepted connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AcceptAction {
    /// Looks at the client's first bytes.
    Peek {
        /// How long the client may take if the program wants to write first.
        timeout: Duration,
        /// The client has announced a Proposal.
        announced: bool,
    },
    /// Leaves the connection to TCP.
    Tcp,
}

/// Stores the descriptors passed on by `smc run`, when the program begins.
pub(crate) fn init() {
    let Some(config) = config::get() else { return };
    let option = config.option.as_deref().filter(|_| config.rendezvous != Mode::Off);
    let numbers = option.into_iter().flat_map(|text| text.split([',', ':']));
    let mut passed: Vec<_> = numbers.filter_map(|number| number.parse::<c_int>().ok()).collect();
    passed.extend(config.traffic);
    passed.sort_unstable();
    let _ = PASSED.set(passed);
    if config.rendezvous == Mode::Required {
        // The user hears at once of a missing rendezvous.
        let _ = discovery();
    }
}

/// The rendezvous, adopted by the first call. `None`: there are no settings, or the process shares
/// its memory with its parent but not its descriptors.
fn discovery() -> Option<&'static PeerDiscovery> {
    match ADOPTED.get() {
        Some(adopted) => Some(&adopted.discovery),
        None => adopt(),
    }
}

#[cold]
fn adopt() -> Option<&'static PeerDiscovery> {
    let config = config::get()?;
    if fork::shares_memory() {
        return None;
    }
    let passed = config.option.as_deref();
    // The policy of this process may change, so the callers ask it.
    let discovery = PeerDiscovery::adopt(config.rendezvous, passed, Policy::default());
    if discovery.rendezvous().is_none() {
        // An offer not kept: the user has not heard of it from `smc run`.
        let is_broken = passed.is_some_and(Rendezvous::is_offer);
        let is_needed = config.connect.is_empty() && discovery.mode() == Mode::Auto;
        if is_broken && is_needed || discovery.mode() == Mode::Required {
            status::no_option(&why_missing(&discovery), is_broken);
        }
    }
    let rendezvous = discovery.rendezvous();
    let mut descriptors = rendezvous.map(|found| found.descriptors()).unwrap_or_default();
    descriptors.sort_unstable();
    Some(&ADOPTED.get_or_init(|| Adopted { discovery, descriptors }).discovery)
}

/// The rendezvous, if there is one.
pub(crate) fn rendezvous() -> Option<&'static Rendezvous> {
    discovery()?.rendezvous().map(|found| &**found)
}

/// Whether a descriptor was passed on by `smc run` or belongs to the rendezvous. The program does
/// not know these descriptors.
#[inline]
pub(crate) fn is_reserved(fd: c_int) -> bool {
    let has = |list: &[c_int]| list.binary_search(&fd).is_ok();
    PASSED.get().is_some_and(|passed| has(passed))
        || ADOPTED.get().is_some_and(|adopted| has(&adopted.descriptors))
}

/// The parts of a range of descriptors without reserved ones (see [`is_reserved`]) and without
/// `others`.
pub(crate) fn ranges_without_reserved(
    others: &[c_int],
    first: c_int,
    last: c_int,
) -> Vec<(c_int, c_int)> {
    let passed = PASSED.get().into_iter().flatten();
    let own = ADOPTED.get().into_iter().flat_map(|adopted| &adopted.descriptors);
    let mut reserved: Vec<_> = passed.chain(own).chain(others).copied().collect();
    reserved.sort_unstable();
    reserved.dedup();
    between(&reserved, first, last)
}

fn between(reserved: &[c_int], first: c_int, last: c_int) -> Vec<(c_int, c_int)> {
    let mut parts = Vec::with_capacity(reserved.len() + 1);
    let mut from = first;
    for &fd in reserved.iter().filter(|fd| (first..=last).contains(*fd)) {
        if from < fd {
            parts.push((from, fd - 1));
        }
        from = fd + 1;
    }
    if from <= last {
        parts.push((from, last));
    }
    parts
}

/// Whether SMC may carry any connection made by the program. A rendezvous not yet adopted counts as
/// present.
pub(crate) fn may_connect() -> bool {
    let attached = |config: &config::RunConfig| match ADOPTED.get() {
        Some(adopted) => adopted.discovery.rendezvous().is_some(),
        None => config.option.is_some() && config.rendezvous != Mode::Off,
    };
    config::get().is_some_and(|config| !config.connect.is_empty() || attached(config))
}

/// Why SMC carries no connection made by the program, if so.
pub(super) fn why_none_connects() -> Option<Fallback> {
    (config::get().is_some() && !may_connect())
        .then(|| discovery().map_or(Fallback::NoRule, no_way))
}

/// Why a peer not named by any rule is not asked for SMC, or cannot ask.
fn no_way(discovery: &PeerDiscovery) -> Fallback {
    match (discovery.mode(), discovery.rendezvous()) {
        (Mode::Off, _) | (_, Some(_)) => Fallback::NoRule,
        (_, None) => Fallback::NoRendezvous(why_missing(discovery)),
    }
}

/// Why there is no rendezvous.
fn why_missing(discovery: &PeerDiscovery) -> String {
    let found = discovery.unavailable().map(ToString::to_string);
    let told = || config::get().and_then(|config| config.no_option.clone());
    found.or_else(told).unwrap_or_else(|| "smc run did not pass it on".into())
}

/// Why a client has not proposed SMC: the option did not tell the client of this server's SMC, or
/// the client does not speak SMC.
pub(super) fn why_not_proposed() -> Fallback {
    match discovery().map(no_way) {
        _ if own_calls::found() => Fallback::OwnCalls,
        Some(why @ Fallback::NoRendezvous(_)) => why,
        _ => FallbackReason::PeerNotSmc.into(),
    }
}

/// Makes a socket ask for SMC, before it connects.
///
/// # Errors
/// The reason for the connection to stay on TCP.
pub(super) fn before_connect(
    fd: c_int,
    to: &SocketAddr,
    server: ServerRecord,
) -> Result<SmcRequest, Fallback> {
    let (Some(config), Some(discovery)) = (config::get(), discovery()) else {
        return Err(Fallback::NoRule);
    };
    match config.policy().choose(to) {
        PolicyChoice::Smc => {}
        PolicyChoice::Tcp => return Err(Fallback::Policy),
        PolicyChoice::OutsideShare => return Err(Fallback::OutsideShare),
    }
    own_calls::look_at_files();
    let port = to.port();
    if listening_ports::has_listened_on(port) && is_here(to) && listening_ports::listens_on(port) {
        // The connecting thread may have to accept as well, and could not wait for itself.
        return Err(Fallback::SameProcess);
    }
    let in_list = config.connects(*to);
    let (listed, asks) = match (discovery.mode(), discovery.rendezvous()) {
        (Mode::Required, None) => (false, false),
        (Mode::Required, Some(_)) => (false, in_list || config.connect.is_empty()),
        (Mode::Auto, Some(_)) => (in_list, true),
        (Mode::Auto, None) | (Mode::Off, _) => (in_list, false),
    };
    // Without a device there is no use in asking.
    if !listed && !asks {
        return Err(no_way(discovery));
    }
    if !listed && session::lacks_device() {
        return Err(session::no_device());
    }
    if server.is_declining(raw::monotonic_micros) {
        return Ok(SmcRequest { server: *to, asked: None, listed: false, awaited: None });
    }
    let asked = Some(discovery.before_connect(borrowed(fd), to));
    Ok(SmcRequest { server: *to, asked, listed, awaited: None })
}

/// Whether an address belongs to this machine.
fn is_here(to: &SocketAddr) -> bool {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    // `connect` sends nothing here. The kernel only chooses the source address.
    let chosen = UdpSocket::bind(any).and_then(|socket| {
        socket.connect(to)?;
        socket.local_addr()
    });
    chosen.is_ok_and(|chosen| chosen.ip() == to.ip())
}

/// Undoes [`before_connect`] for a socket that did not connect. The program may connect the socket
/// to a server not meant for SMC. Such a server must not wait for a Proposal.
pub(crate) fn after_failed_connect(request: SmcRequest, socket: impl AsFd) {
    if request.asked.is_some()
        && let Some(discovery) = discovery()
    {
        discovery.unmark(socket);
    }
}

/// Decides for a client with a connected socket. `Ok`: the client proposes SMC; `Ok(true)`: the
/// server waits for a message. The error is the reason for TCP.
pub(crate) fn after_connect(request: SmcRequest, socket: impl AsFd) -> Result<bool, Fallback> {
    if let Some(awaited) = request.awaited {
        return Ok(awaited);
    }
    let Some(asked) = request.asked else { return Err(Fallback::DeclinedBefore) };
    let Some(discovery) = discovery() else { return Ok(false) };
    action(request, discovery, discovery.connected(socket, asked))
}

/// Like [`after_connect`], while TCP may still be connecting. `None`: the server has not answered
/// yet.
pub(crate) fn during_connect(
    request: SmcRequest,
    socket: impl AsFd,
) -> Option<Result<bool, Fallback>> {
    let (asked, discovery) = (request.asked?, discovery()?);
    Some(action(request, discovery, discovery.answered(socket, asked)?))
}

fn action(
    request: SmcRequest,
    discovery: &PeerDiscovery,
    action: ClientAction,
) -> Result<bool, Fallback> {
    match action {
        ClientAction::Propose { awaited } => Ok(awaited),
        ClientAction::UseTcp(_) if request.listed => Ok(false),
        ClientAction::UseTcp(reason) => Err(Fallback::from_discovery(reason, discovery)),
    }
}

/// Makes a bound socket answer clients that ask for SMC. The hook calls this before `listen`.
pub(crate) fn before_listen(fd: c_int) {
    let Some(config) = config::get().filter(|config| !config.accept.is_empty()) else { return };
    own_calls::look_at_files();
    if own_calls::found() {
        return;
    }
    let Some(local) = local_address(fd) else { return };
    let Some(discovery) = discovery().filter(|found| found.rendezvous().is_some()) else { return };
    if config.accept.iter().any(|rule| rule.has_port(local.port())) && !may_migrate(fd) {
        // A socket already listening may have clients without an answer.
        let is_first = raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Ok(0);
        if discovery.listen_by(config.policy(), config.earlier_policies().next(), borrowed(fd)) {
            answering_listeners::note();
            if is_first {
                answering_listeners::add(fd);
            }
        }
    }
}

/// Reads a changed policy file, before the policy decides on a new connection. Listeners of this process
/// then answer by the new policy. A listener that need not answer any more goes on to do so, and the
/// Proposals of its clients are declined.
#[inline]
pub(super) fn refresh_policy() {
    if policy::refresh() {
        let option = |fd: &c_int, name| raw::socket_option(*fd, libc::SOL_SOCKET, name);
        let is_listener = |fd: &c_int| {
            option(fd, libc::SO_ACCEPTCONN) == Ok(1)
                && option(fd, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP)
        };
        kernel_sockets::open_descriptors().into_iter().filter(is_listener).for_each(before_listen);
    }
}

/// Whether the clients of a closed listener may come to another one on the same port
/// (`net.ipv4.tcp_migrate_req`). The other listener may answer no client.
fn may_migrate(fd: c_int) -> bool {
    raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT) != Ok(0)
        && std::fs::read_to_string("/proc/sys/net/ipv4/tcp_migrate_req")
            .is_ok_and(|text| text.trim() != "0")
}

/// The process has inherited a listening socket. An answering socket was prepared by a process with
/// the library. Otherwise a process without the library may accept from the socket. So this process
/// prepares the socket only when accepting from the socket itself.
pub(crate) fn note_inherited_listener(fd: c_int) {
    match rendezvous() {
        Some(rendezvous) if rendezvous.answers(borrowed(fd)) => {
            answering_listeners::note();
            own_calls::look_at_files();
        }
        _ => answering_listeners::add_inherited(fd),
    }
}

/// The program accepts from a descriptor outside [`answering_listeners`].
#[inline]
pub(crate) fn before_accept(fd: c_int) {
    if answering_listeners::take_inherited(fd) {
        before_listen(fd);
    }
}

/// The server's action on a connection of this client, just accepted by a listener of
/// [`answering_listeners`], if known without a system call.
pub(crate) fn after_accept_from(client: &SocketAddr) -> Option<AcceptAction> {
    Some(accept_action(discovery()?.accepted_from(client)?))
}

/// The server's action on a connection just accepted.
pub(crate) fn after_accept(tcp: impl AsFd) -> AcceptAction {
    let action = discovery().map(|discovery| discovery.accepted(tcp));
    accept_action(action.unwrap_or(ServerAction::Peek))
}

fn accept_action(action: ServerAction) -> AcceptAction {
    let detect = config::get().map(|config| config.detect).unwrap_or_default();
    let names_clients = config::get().is_some_and(config::RunConfig::names_clients);
    match action {
        ServerAction::AwaitProposal => {
            AcceptAction::Peek { timeout: PROPOSAL_TIMEOUT, announced: true }
        }
        ServerAction::UseTcp => AcceptAction::Tcp,
        // A client with SMC would have announced a Proposal, unless the settings name the client.
        ServerAction::NotAnnounced if !names_clients => {
            AcceptAction::Peek { timeout: Duration::ZERO, announced: false }
        }
        ServerAction::Peek | ServerAction::NotAnnounced => {
            AcceptAction::Peek { timeout: detect, announced: false }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::between;

    #[test]
    fn closing_all_descriptors_leaves_out_the_reserved_ones() {
        assert_eq!(between(&[], 3, 9), [(3, 9)]);
        assert_eq!(between(&[5, 6, 8], 3, 9), [(3, 4), (7, 7), (9, 9)]);
        assert_eq!(between(&[3, 9], 3, 9), [(4, 8)]);
        assert_eq!(between(&[2, 10], 3, 9), [(3, 9)]);
        assert_eq!(between(&[3], 3, 3), []);
        assert_eq!(between(&[700], 3, i32::MAX), [(3, 699), (701, i32::MAX)]);
    }
}
