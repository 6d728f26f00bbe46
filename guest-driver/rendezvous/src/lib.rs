// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Discovery of SMC between two TCP ends: RFC 7609's TCP option.
//!
//! An SMC client puts the experimental option 254 with the magic E2 D4 C3 D9 on its SYN; an SMC server
//! answers with the same bytes on its SYN-ACK (RFC 7609 section 3.1 and appendix A.1, OPT-1, OPT-4). The
//! handshake of SMC begins only if both ends sent the option; any other peer never receives a byte of SMC
//! (OPT-9). The kernel's AF_SMC finds its peers in the same way.
//!
//! # Why eBPF
//!
//! No socket option of Linux adds an option to a sent SYN or shows an option of a received SYN-ACK, and
//! AF_SMC sets its option only on sockets of its own. But the kernel offers a callback into eBPF for the TCP
//! sockets of a cgroup. The callback may reserve room, write an option and read the options of the peer. The
//! two programs are assembled here, instruction by instruction (see `program.rs`); no compiler is needed,
//! neither when this crate is built nor when it runs.
//!
//! # Which sockets send the option
//!
//! The programs serve only sockets passed to [`Rendezvous::want`] or [`Rendezvous::listen`] and allowed by
//! the [`Policy`]. Other sockets of the cgroup stay unchanged. A listener answers only a SYN with the option
//! (OPT-5). A listener does not answer where the connection could not use SMC afterwards: with SYN cookies,
//! with TCP Fast Open, or without room for the option.
//!
//! The kernel keeps request and answer in the socket itself (a BPF socket storage) and frees both with the
//! socket, so one connection cannot be mistaken for another. Nothing is pinned, so everything ends with the
//! process. Any number of processes may attach to one cgroup. The programs cost an established connection
//! nothing. Making a connection costs each end a few microseconds, most of them for the system calls to mark
//! the socket and read the answer. For other sockets no cost could be measured.
//!
//! # Needed grants
//!
//! Linux 5.15 or later, cgroup v2 mounted (beside version 1 is fine), and the capabilities CAP_BPF and
//! CAP_NET_ADMIN at the time of [`Rendezvous::attach`]. The process may drop them afterwards, except before
//! Linux 5.19 where `kernel.unprivileged_bpf_disabled` is set. A process with the capabilities may pass its
//! rendezvous on to programs without ([`Rendezvous::pass_on`]), or grant the option to all processes of
//! another cgroup ([`grant`]), for example of a container. [`Unavailable`] names the missing precondition and
//! the command to grant it. [`Rendezvous::listen`] on an already listening socket needs Linux 6.12: call the
//! method earlier, or use [`Rendezvous::bind`].

#![deny(unsafe_code)]

mod assembler;
#[allow(unsafe_code, reason = "no crate makes bpf(2) calls without a compiler for BPF")]
mod bpf;
mod cgroup;
mod granted;
mod kernel_grant;
mod kernel_sockets;
mod kernel_types;
mod listener;
mod offer;
mod peer_discovery;
mod peer_rule;
mod policy;
mod program;
mod sockmap;
mod unavailable;

pub use granted::{cgroup_of, grant};
pub use kernel_sockets::{KernelSockets, NoKernelSockets};
pub use peer_discovery::{
    ClientAction, Mode, OptionRequest, PROPOSAL_TIMEOUT, PeerDiscovery, ServerAction, TcpReason,
};
pub use peer_rule::{PeerRule, PeerRuleError};
pub use policy::{AllowedProtocol, Policy, PolicyChoice, PolicyError, Share, UnknownKey};
pub use sockmap::Sockmap;
pub use unavailable::{Missing, Unavailable};

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::thread::CapabilitySet;

use bpf::{Hook, Map, MapKind, MappedArray};
use program::{BUCKETS, Maps, bucket_of, mark};

/// Listening ports at most. The kernel drops the least recently used one for a further port.
const MAX_PORTS: u32 = 4096;
/// Connections under way at most whose SYN-ACK had no room for the option.
const MAX_REFUSED: u32 = 1024;
/// Networks of a policy times listening ports at most.
const MAX_CLIENTS: u32 = 1 << 16;
/// Lowest numbers for passed-on descriptors, above numbers in use by programs, if there is none beyond the
/// limit of the process. The first number within the limit is used.
const PASSED_FROM: [i32; 3] = [700, 100, 3];
/// Backlog of the listeners of [`Rendezvous::bind`].
const BACKLOG: i32 = 4096;
/// The text of [`Rendezvous::pass_on`] in place of numbers of descriptors.
const GRANTED: &str = "granted";
/// Begins the text of [`Rendezvous::offer`], before the number of a socket.
const OFFERED: &str = "offered:";
/// Begins the answer to a process if the offered rendezvous could not be opened, before the reason.
const FAILED: char = '!';

/// How a rendezvous is set up. The defaults suit most processes.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// The directory of the cgroup of participating sockets: the cgroup of this process, or an ancestor of
    /// this cgroup. `None`: the cgroup of this process.
    pub cgroup: Option<PathBuf>,
    /// The connections with the right to send and answer the option. Rules with names of programs are
    /// compared with the executable of this process.
    pub policy: Policy,
}

/// The rendezvous of a process. After its drop, existing sockets keep their answers, and new sockets are
/// plain TCP.
#[derive(Debug)]
pub struct Rendezvous {
    policy: Policy,
    access: Access,
}

/// How a process reaches the marks of its sockets.
#[derive(Debug)]
enum Access {
    /// By bpf(2).
    Attached(Box<Attached>),
    /// By options of the sockets: the cgroup has a [`grant`].
    Granted,
}

/// The descriptors of a rendezvous.
#[derive(Debug)]
struct Attached {
    marks: Map<i32, u32>,
    /// Whether the listeners of a port answer: 1; 0: the port is paused.
    ports: Map<Listening, u64>,
    /// Whether a listener answers a client: 1 or 0. Present if the policy depends on clients.
    clients: Option<Map<Client, u64>>,
    asked: Option<AskedClients>,
    cgroup: OwnedFd,
    path: PathBuf,
    /// The kernel calls the program as long as this is open.
    link: OwnedFd,
    /// The program for already listening sockets; the error number if the kernel refused the program.
    late: Result<OwnedFd, i32>,
}

/// Number of open connections with possible SMC clients, per bucket of clients. Only the kernel's program
/// writes the numbers, so no process can hide a client from another process.
#[derive(Debug)]
struct AskedClients {
    map: Map<u32, u64>,
    mapped: MappedArray,
}

impl AskedClients {
    fn new(map: Map<u32, u64>) -> io::Result<AskedClients> {
        let mapped = MappedArray::new(&map, BUCKETS as usize)?;
        Ok(AskedClients { map, mapped })
    }

    /// `None`: the kernel cannot map the array, or there is no memory for the array. The option is then
    /// looked up for each accepted socket.
    fn make() -> Option<AskedClients> {
        let map = Map::new(MapKind::ReadOnlyArray, BUCKETS, "smc_asked");
        let made = map.and_then(AskedClients::new);
        made.inspect_err(|error| tracing::debug!(%error, "no array of clients")).ok()
    }
}

/// The port of a listener.
#[derive(Clone, Copy, Debug, zerocopy::IntoBytes, zerocopy::FromBytes, zerocopy::Immutable)]
#[repr(C)]
struct Listening {
    /// Cookie of the network namespace.
    netns: u64,
    port: u32,
    zero: u32,
}

/// Clients of a listening port: a key of a longest prefix match.
#[derive(Clone, Copy, Debug, zerocopy::IntoBytes, zerocopy::FromBytes, zerocopy::Immutable)]
#[repr(C)]
struct Client {
    /// Number of significant bits behind this field.
    length: u32,
    port: u32,
    address: [u8; 16],
}

/// The maps needed by every program.
struct SocketMaps {
    marks: Map<i32, u32>,
    ports: Map<Listening, u64>,
    refused: Map<u64, u64>,
}

impl SocketMaps {
    fn new() -> Result<SocketMaps, Unavailable> {
        let denied = |what| move |error| Unavailable::of_bpf(what, error);
        let marks = Map::new(MapKind::SocketStorage, 0, "smc_marks");
        let marks = marks.map_err(denied("a BPF socket storage"))?;
        let ports = Map::<Listening, u64>::new(MapKind::LruHash, MAX_PORTS, "smc_ports");
        let ports = ports.map_err(denied("a BPF hash table"))?;
        let refused = Map::<u64, u64>::new(MapKind::LruHash, MAX_REFUSED, "smc_refused");
        let refused = refused.map_err(denied("a BPF hash table"))?;
        Ok(SocketMaps { marks, ports, refused })
    }

    fn for_programs<'a>(
        &'a self,
        clients: Option<BorrowedFd<'a>>,
        asked: Option<BorrowedFd<'a>>,
    ) -> Maps<'a> {
        let SocketMaps { marks, ports, refused } = self;
        let (marks, ports, refused) = (marks.as_fd(), ports.as_fd(), refused.as_fd());
        Maps { marks, ports, refused, clients, asked }
    }
}

impl Rendezvous {
    /// Attaches a rendezvous. A process without the right uses the grant of its cgroup.
    ///
    /// # Errors
    /// The missing precondition of attaching; there is no grant either.
    pub fn open(options: Options) -> Result<Arc<Rendezvous>, Unavailable> {
        let policy = options.policy.clone();
        Self::attach(options).or_else(|why| Self::granted(policy).ok_or(why))
    }

    /// Uses the grant of this process's cgroup ([`grant`]), without any capability. `None`: there is no
    /// grant.
    pub fn granted(policy: Policy) -> Option<Arc<Rendezvous>> {
        let policy = policy.of_this_process();
        granted::is_granted().then(|| Arc::new(Rendezvous { policy, access: Access::Granted }))
    }

    fn attached(&self) -> Option<&Attached> {
        match &self.access {
            Access::Attached(attached) => Some(attached),
            Access::Granted => None,
        }
    }

    /// Has the kernel call the programs for the sockets of a cgroup.
    ///
    /// # Errors
    /// The missing precondition.
    pub fn attach(options: Options) -> Result<Arc<Rendezvous>, Unavailable> {
        let sockets = SocketMaps::new()?;
        // Before `Policy::of_this_process`: other rules may concern a program with an adopted rendezvous.
        let by_client = options.policy.depends_on_client();
        let policy = options.policy.of_this_process();
        let clients = || Map::new(MapKind::PrefixTrie, MAX_CLIENTS, "smc_clients");
        let clients = by_client.then(clients).transpose();
        let clients = clients.map_err(|error| Unavailable::of_bpf("a BPF prefix trie", error))?;
        let asked = AskedClients::make();
        let (cgroup, path) = cgroup::open(options.cgroup.as_deref())?;
        let counted = asked.as_ref().map(|asked| asked.map.as_fd());
        let maps = sockets.for_programs(clients.as_ref().map(AsFd::as_fd), counted);
        let code = program::options(&maps).unwrap_or_default();
        let program =
            bpf::load(Hook::SockOps, "smc_option", &code).map_err(Unavailable::of_load)?;
        let link = bpf::attach(Hook::SockOps, program.as_fd(), cgroup.as_fd());
        let link = link.map_err(|error| Unavailable::of_attaching(&path, error))?;
        let code = listener::listeners(&maps).unwrap_or_default();
        let late = bpf::load(Hook::SetSockOpt, "smc_listener", &code).map_err(|rejected| {
            tracing::debug!(error = %rejected.error, verifier = rejected.verifier, "BPF");
            rejected.error.raw_os_error().unwrap_or(libc::EINVAL)
        });
        tracing::debug!(cgroup = %path.display(), "TCP option 254 is at work");
        let SocketMaps { marks, ports, .. } = sockets;
        let cgroup = cgroup.into();
        let attached = Attached { marks, ports, clients, asked, cgroup, path, link, late };
        Ok(Arc::new(Rendezvous { policy, access: Access::Attached(Box::new(attached)) }))
    }

    /// Makes the rendezvous available to programs started by this process, even without the capabilities for
    /// a rendezvous of their own. The text of the result goes into their environment or onto their command
    /// line, and from there to [`Rendezvous::adopt`].
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn pass_on(&self) -> io::Result<PassedOn> {
        let Some(attached) = self.attached() else {
            return Ok(PassedOn { text: GRANTED.to_owned(), _descriptors: Vec::new() });
        };
        let mut passed = PassedOn { text: String::new(), _descriptors: Vec::new() };
        let mut numbers = Vec::new();
        for fd in attached.in_order() {
            numbers.push(fd.map(|fd| passed.add(fd)).transpose()?);
        }
        passed.text = text_of(numbers);
        Ok(passed)
    }

    /// Offers a rendezvous to programs started by this process, to be opened when one of them needs the
    /// rendezvous: most programs never do. The result is the text for [`Rendezvous::adopt`], and the
    /// descriptor for [`Rendezvous::serve`] in a process with the capabilities.
    ///
    /// # Errors
    /// This process lacks the right to open a rendezvous; or no descriptors are left.
    pub fn offer() -> Result<(PassedOn, OwnedFd), Unavailable> {
        let denied = |error| Unavailable::of_bpf("a BPF socket storage", error);
        Map::<i32, u32>::new(MapKind::SocketStorage, 0, "smc_marks").map_err(denied)?;
        // For the programs.
        let capabilities = rustix::thread::capabilities(None).map(|sets| sets.effective);
        let needed = CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN;
        if !capabilities.is_ok_and(|effective| effective.intersects(needed)) {
            return Err(denied(io::Error::from_raw_os_error(libc::EPERM)));
        }
        let failed = |error| Unavailable::System { what: "a socket for programs", error };
        let (programs, own) = offer::pair().map_err(failed)?;
        let mut passed = PassedOn { text: String::new(), _descriptors: Vec::new() };
        let number = passed.add(programs.as_fd()).map_err(failed)?;
        passed.text = format!("{OFFERED}{number}");
        Ok((passed, own))
    }

    /// Whether a text is from [`Rendezvous::offer`].
    pub fn is_offer(text: &str) -> bool {
        text.starts_with(OFFERED)
    }

    /// Opens an offered rendezvous for the programs. `offered`: from [`Rendezvous::offer`], with the byte of
    /// a program to be read. The caller closes the descriptor afterwards. The rendezvous lasts as long as the
    /// programs.
    pub fn serve(options: Options, offered: BorrowedFd<'_>) {
        let given = match Rendezvous::open(options) {
            Ok(rendezvous) => {
                let own = rendezvous.attached().map(Attached::in_order).unwrap_or_default();
                let mut next = 0..;
                let text = match rendezvous.access {
                    Access::Attached(_) => {
                        text_of(own.iter().map(|fd| fd.and_then(|_| next.next())))
                    }
                    Access::Granted => GRANTED.to_owned(),
                };
                let fds: Vec<_> = own.into_iter().flatten().collect();
                offer::give(offered, &text, &fds)
            }
            Err(why) => offer::give(offered, &format!("{FAILED}{why}"), &[]),
        };
        if let Err(error) = given {
            tracing::debug!(%error, "no program gets the rendezvous");
        }
    }

    /// Adopts the rendezvous passed on by the process's parent. The descriptors stay open for programs
    /// started by this process. The policy is this process's own.
    ///
    /// # Errors
    /// `InvalidInput`: the text is not a text of [`Rendezvous::pass_on`]. Others: the descriptors have been
    /// closed since.
    pub fn adopt(text: &str, policy: Policy) -> io::Result<Arc<Rendezvous>> {
        if text == GRANTED {
            let none = || io::Error::new(io::ErrorKind::NotFound, "the cgroup has no grant");
            return Self::granted(policy).ok_or_else(none);
        }
        if let Some(number) = text.strip_prefix(OFFERED) {
            return Self::take_offered(number, policy);
        }
        let number = |part: &str| match part {
            "-" => Ok(None),
            digits => digits.parse().map(Some).map_err(|_| io::ErrorKind::InvalidInput),
        };
        let numbers = text.split(',').map(number).collect::<Result<Vec<Option<i32>>, _>>()?;
        let [Some(marks), Some(ports), clients, late, Some(cgroup), Some(link), asked] =
            numbers[..]
        else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let clients = clients.map(|number| Map::adopt(MapKind::PrefixTrie, number)).transpose()?;
        let asked = asked.map(|number| Map::adopt(MapKind::ReadOnlyArray, number)).transpose()?;
        let late = late.map(bpf::duplicate).transpose()?.ok_or(libc::EOPNOTSUPP);
        let cgroup = bpf::duplicate(cgroup)?;
        let path = std::fs::read_link(format!("/proc/self/fd/{}", cgroup.as_raw_fd()))?;
        let attached = Attached {
            marks: Map::adopt(MapKind::SocketStorage, marks)?,
            ports: Map::adopt(MapKind::LruHash, ports)?,
            clients,
            // Without memory for the mapping, the array is not used.
            asked: asked.and_then(|map| AskedClients::new(map).ok()),
            cgroup,
            path,
            link: bpf::duplicate(link)?,
            late,
        };
        let access = Access::Attached(Box::new(attached));
        Ok(Arc::new(Rendezvous { policy: policy.of_this_process(), access }))
    }

    /// Adopts an offered rendezvous.
    fn take_offered(number: &str, policy: Policy) -> io::Result<Arc<Rendezvous>> {
        let number = number.parse().map_err(|_| io::ErrorKind::InvalidInput)?;
        let (text, fds) = offer::take(bpf::duplicate(number)?.as_fd())?;
        if let Some(why) = text.strip_prefix(FAILED) {
            return Err(io::Error::other(why.to_owned()));
        }
        // The text counts the descriptors of the message. Any other text is refused with the message.
        let fd_of = |part: &str| fds.get(part.parse::<usize>().ok()?).map(AsRawFd::as_raw_fd);
        match &*text {
            GRANTED => Self::adopt(GRANTED, policy),
            _ => Self::adopt(&text_of(text.split(',').map(fd_of)), policy),
        }
    }

    /// The numbers of the rendezvous's descriptors, for programs closing unknown descriptors.
    pub fn descriptors(&self) -> Vec<i32> {
        let own = self.attached().into_iter().flat_map(Attached::in_order);
        own.flatten().map(|fd| fd.as_raw_fd()).collect()
    }

    /// The directory of the cgroup of participating sockets. `None`: the granted cgroup of this process.
    pub fn cgroup(&self) -> Option<&std::path::Path> {
        self.attached().map(|attached| &*attached.path)
    }

    /// Has a socket send the option when connecting to `peer`. Call this before connect(2) (SOCK-7). `false`:
    /// the policy forbids the option, and the socket connects as any other.
    ///
    /// # Errors
    /// As bpf(2). The socket then connects as any other.
    pub fn want(&self, socket: impl AsFd, peer: &SocketAddr) -> io::Result<bool> {
        if self.policy.choose(peer) != PolicyChoice::Smc {
            return Ok(false);
        }
        self.mark(socket.as_fd(), mark::WANT)?;
        Ok(true)
    }

    /// Undoes [`Rendezvous::want`] for an unconnected socket: its next connection is made without the option,
    /// unless `want` is called again.
    ///
    /// # Errors
    /// As bpf(2), or as setsockopt(2) with a granted option. The socket goes on sending the option.
    pub fn unmark(&self, socket: impl AsFd) -> io::Result<()> {
        self.mark(socket.as_fd(), 0)
    }

    /// Has a listener answer clients with the option. Call this after bind(2), and best before listen(2).
    /// `false`: the policy forbids the option, or the listener was withdrawn.
    ///
    /// # Errors
    /// `Unsupported`: the socket listens already, and the kernel is older than 6.12 or the process has
    /// dropped its capabilities; or the policy has rules about clients, and the process only has the grant of
    /// its cgroup. Other errors are errors of system calls. The listener then answers as any other.
    pub fn listen(&self, listener: impl AsFd) -> io::Result<bool> {
        self.listen_by(&self.policy, None, listener.as_fd())
    }

    /// Like [`Rendezvous::listen`], by a policy of the caller's. `before`: the policy of an earlier call for
    /// this listener. If the policy forbids all clients, an answering listener goes on to answer, and the
    /// server has to decline.
    ///
    /// # Errors
    /// As [`Rendezvous::listen`].
    pub fn listen_by(
        &self,
        policy: &Policy,
        before: Option<&Policy>,
        listener: BorrowedFd<'_>,
    ) -> io::Result<bool> {
        if !self.allow_clients((policy, before), listener)? {
            return Ok(false);
        }
        match self.mark_of(listener) {
            Ok(mark) if mark & mark::WITHDRAWN != 0 => return Ok(false),
            Ok(mark) if mark & mark::ANSWER != 0 => return Ok(true),
            _ => {}
        }
        // The programs read the saved SYN for a retransmitted SYN-ACK and for an accepted socket.
        bpf::save_syn(listener)?;
        self.mark(listener, mark::ANSWER)?;
        if sockopt::socket_acceptconn(listener)? {
            self.prepare_listening(listener)?;
        }
        Ok(true)
    }

    /// Whether a listener answers clients with the option: [`Rendezvous::listen`] was called for the listener
    /// in any process, and [`Rendezvous::withdraw`] was not.
    pub fn answers(&self, listener: impl AsFd) -> bool {
        self.mark_of(listener.as_fd()).is_ok_and(|mark| mark & mark::ANSWER != 0)
    }

    /// Has a listener answer no further client, before a program without SMC gets the listener. No listener
    /// of its port answers until [`Rendezvous::withdraw`]. [`Rendezvous::peer_speaks_smc`] still knows the
    /// connections of clients answered before.
    ///
    /// # Errors
    /// As bpf(2) and setsockopt(2). The listener may go on answering.
    pub fn pause(&self, listener: impl AsFd) -> io::Result<()> {
        let listener = listener.as_fd();
        let Some(attached) = self.attached() else { return granted::pause(listener) };
        let address = SocketAddr::try_from(rustix::net::getsockname(listener)?)?;
        let netns = bpf::netns_cookie(listener)?;
        let key = Listening { netns, port: address.port().into(), zero: 0 };
        attached.ports.set(&key, &0)
    }

    /// Undoes [`Rendezvous::listen`] for a listener with a paused port. Other listeners of the port answer
    /// again, except on kernels older than 6.12 or after the process has dropped its capabilities.
    pub fn withdraw(&self, listener: impl AsFd) {
        let listener = listener.as_fd();
        let released = match self.attached() {
            None => granted::release_listener(listener),
            Some(attached) => attached.set_late_option(listener, listener::RELEASE),
        };
        let Err(error) = released else { return };
        tracing::debug!(%error, "the port stays without the option");
        // The paused port answers no client. TCP goes on to call the program for the listener, and its
        // accepted sockets clear their callback flag.
        if let Some(attached) = self.attached() {
            let _ = attached.marks.set(&listener.as_raw_fd(), &(mark::WITHDRAWN | mark::OWNED));
        }
    }

    /// Listens like [`TcpListener::bind`], and answers clients asking for SMC.
    ///
    /// # Errors
    /// As the system calls, and as [`Rendezvous::listen`].
    pub fn bind(&self, addr: &SocketAddr) -> io::Result<TcpListener> {
        let mut named = Ok(true);
        let listener = bind(addr, |socket| named = self.listen(socket))?;
        named.map(|_| listener)
    }

    /// Whether both ends of a connection have sent the option, as this end knows once TCP has
    /// connected (OPT-10). Each connection has an answer of its own (OPT-11).
    ///
    /// `None`: not known. The connection is not established, its socket was not marked, or the
    /// kernel did not save the SYN of an accepted socket. A client must take `None` for "no",
    /// because its server does not wait for a Proposal; a server may peek at the first bytes.
    pub fn peer_speaks_smc(&self, stream: impl AsFd) -> Option<bool> {
        let found = self.mark_of(stream.as_fd());
        let mark = found.inspect_err(|error| tracing::debug!(%error, "socket storage")).ok()?;
        (mark & mark::KNOWN != 0).then_some(mark & mark::PEER != 0)
    }

    /// Whether the client of an accepted connection may speak SMC, without a system call. `false`: the client
    /// has not sent the option, or was not answered, provided that [`Rendezvous::listen`] returned `true` for
    /// the listener and the connection has not been reset. [`Rendezvous::peer_speaks_smc`] tells the rest.
    pub fn may_speak_smc(&self, client: &SocketAddr) -> bool {
        // accept(2) takes the lock held by the kernel while establishing the connection and calling the
        // program. So the program has counted the connection.
        let asked = self.attached().and_then(|attached| attached.asked.as_ref());
        let Some(asked) = asked else { return true };
        asked.mapped.load(bucket_of(client)).is_none_or(|open| open != 0)
    }

    /// Writes the clients of a listener to the map. `false`: the policy forbids all clients.
    fn allow_clients(
        &self,
        (policy, before): (&Policy, Option<&Policy>),
        listener: BorrowedFd<'_>,
    ) -> io::Result<bool> {
        let address = rustix::net::getsockname(listener)?;
        let port = SocketAddr::try_from(address)?.port();
        if port == 0 {
            let text = "a listener can answer the option only after it is bound to a port";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let clients = policy.listen(port, before);
        if clients.iter().all(|(_, allowed)| *allowed == AllowedProtocol::Tcp) {
            return Ok(false);
        }
        let Some(attached) = self.attached() else {
            if clients.iter().all(|(_, allowed)| *allowed != AllowedProtocol::Tcp) {
                return Ok(true);
            }
            let text = "the option has been granted to the cgroup, without rules about clients";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        };
        if let Some(table) = &attached.clients {
            for (network, allowed) in clients {
                let (address, length) = network.prefix();
                let length = 32 + u32::from(length);
                let key = Client { length, port: u32::from(port), address };
                table.set(&key, &u64::from(allowed != AllowedProtocol::Tcp))?;
            }
        }
        Ok(true)
    }

    /// The mark of a socket; 0: none.
    fn mark_of(&self, socket: BorrowedFd<'_>) -> io::Result<u32> {
        match &self.access {
            Access::Attached(attached) => {
                attached.marks.get(&socket.as_raw_fd()).map(Option::unwrap_or_default)
            }
            Access::Granted => granted::mark_of(socket),
        }
    }

    fn mark(&self, socket: BorrowedFd<'_>, bit: u32) -> io::Result<()> {
        match &self.access {
            Access::Attached(attached) => attached.marks.set(&socket.as_raw_fd(), &bit),
            Access::Granted => granted::set_mark(socket, bit),
        }
    }

    /// Prepares an already listening socket. Only code inside the kernel can request the callbacks for such a
    /// socket, so this method runs a program there by setsockopt(2).
    fn prepare_listening(&self, listener: BorrowedFd<'_>) -> io::Result<()> {
        let unsupported = |error: io::Error| {
            let text = format!("a socket that listens already cannot answer the option: {error}");
            io::Error::new(io::ErrorKind::Unsupported, text)
        };
        let Some(attached) = self.attached() else {
            return granted::take_listener(listener).map_err(unsupported);
        };
        attached.set_late_option(listener, listener::TAKE).map_err(unsupported)
    }
}

impl Attached {
    /// Calls setsockopt(2) for an already listening socket. Its program is attached for this call only, at no
    /// further cost for calls of other processes.
    fn set_late_option(&self, listener: BorrowedFd<'_>, name: i32) -> io::Result<()> {
        let late = self.late.as_ref().map_err(|error| io::Error::from_raw_os_error(*error))?;
        let link = bpf::attach(Hook::SetSockOpt, late.as_fd(), self.cgroup.as_fd())?;
        let set = bpf::set_socket_option(listener, listener::LEVEL, name, 0);
        drop(link);
        set
    }

    /// The descriptors as [`Rendezvous::pass_on`] writes them.
    fn in_order(&self) -> [Option<BorrowedFd<'_>>; offer::MOST] {
        [
            Some(self.marks.as_fd()),
            Some(self.ports.as_fd()),
            self.clients.as_ref().map(AsFd::as_fd),
            self.late.as_ref().ok().map(AsFd::as_fd),
            Some(self.cgroup.as_fd()),
            Some(self.link.as_fd()),
            self.asked.as_ref().map(|asked| asked.map.as_fd()),
        ]
    }
}

/// The descriptors of a rendezvous. Programs started by this process inherit the descriptors as long as this
/// value lives.
#[derive(Debug)]
pub struct PassedOn {
    text: String,
    _descriptors: Vec<OwnedFd>,
}

impl PassedOn {
    /// Adds a copy with a high number, and returns the number.
    fn add(&mut self, fd: BorrowedFd<'_>) -> io::Result<i32> {
        let copy = duplicate_high(fd)?;
        rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty())?;
        let number = copy.as_raw_fd();
        self._descriptors.push(copy);
        Ok(number)
    }
}

/// The text for these numbers of descriptors, with "-" for a missing one.
fn text_of(numbers: impl IntoIterator<Item = Option<i32>>) -> String {
    let texts = numbers.into_iter().map(|number| number.map_or("-".into(), |n| n.to_string()));
    texts.collect::<Vec<_>>().join(",")
}

impl std::fmt::Display for PassedOn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Duplicates a descriptor to a high number, close-on-exec.
fn duplicate_high(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut result = ism_sys::duplicate_beyond_limit(fd);
    for floor in PASSED_FROM {
        if result.is_ok() {
            break;
        }
        result = rustix::io::fcntl_dupfd_cloexec(fd, floor);
        // The floor is beyond the limit, or no number from there to the limit is free.
        if !matches!(result, Err(rustix::io::Errno::INVAL | rustix::io::Errno::MFILE)) {
            break;
        }
    }
    Ok(result?)
}

/// Listens as [`TcpListener::bind`] does, and calls `prepare` between bind(2) and listen(2).
fn bind(addr: &SocketAddr, prepare: impl FnOnce(BorrowedFd<'_>)) -> io::Result<TcpListener> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, addr)?;
    prepare(socket.as_fd());
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}
