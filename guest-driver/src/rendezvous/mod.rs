//! How two TCP ends find that both speak SMC: RFC 7609's TCP option.
//!
//! A client that wants SMC puts the experimental option 254 with the magic E2 D4 C3 D9 on its SYN; a
//! server that speaks it answers with the same bytes on its SYN-ACK (RFC 7609 section 3.1 and
//! appendix A.1, OPT-1, OPT-4). Only when both were sent, the handshake of SMC begins; everybody
//! else never sees a byte of it (OPT-9). That is also how the kernel's AF_SMC finds its peers.
//!
//! # Why eBPF
//!
//! No socket option of Linux adds or shows an option of a SYN that is sent or of a SYN-ACK that is
//! received, and AF_SMC sets its own only on sockets of its own. What the kernel does offer is a
//! callback into eBPF for the TCP sockets of a cgroup, which may reserve room, write an option and
//! read those of the peer. The two programs are assembled here, instruction by instruction (see
//! `program.rs`); no compiler is needed, neither when this crate is built nor when it runs.
//!
//! # Who gets the option
//!
//! Only sockets that were named to [`Rendezvous::want`] and [`Rendezvous::listen`] and that the
//! [`Policy`] lets through; any other socket of the cgroup is left as it is. A listener answers only
//! if it was asked (OPT-5), and not where it could not keep the promise: with SYN cookies, with TCP
//! Fast Open, without room for the option.
//!
//! The wish and the answer are kept in the socket itself (a BPF socket storage), are gone with it,
//! and nobody can take one connection for another. Everything ends with the process: nothing is
//! pinned. Any number of processes may do this in one cgroup. An established connection costs
//! nothing; making one costs each end a few microseconds, most of them for the system calls that
//! name the socket and read the answer, and sockets that are not named nothing that can be measured.
//!
//! # What has to be granted
//!
//! Linux 5.15 or later, cgroup v2 mounted (beside version 1 is fine), and the capabilities CAP_BPF
//! and CAP_NET_ADMIN at the time of [`Rendezvous::attach`]; they may be given up afterwards, except
//! before Linux 5.19 where `kernel.unprivileged_bpf_disabled` is set; a process that has them may pass
//! its rendezvous on to programs without ([`Rendezvous::pass_on`]). [`Unavailable`] says what is
//! missing and which command grants it. Listeners that listened before they were named need Linux
//! 6.12: name them earlier, or use [`Rendezvous::bind`].

mod assembler;
mod bpf;
mod cgroup;
mod meeting;
mod policy;
mod program;
mod unavailable;

pub use meeting::{Asked, ClientMove, Meeting, Mode, PROPOSAL_PATIENCE, Plain, ServerMove};
pub use policy::{Policy, PolicyError, Verdict};
pub use unavailable::{Missing, Unavailable};

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use bpf::{Hook, Map, MapKind};
use program::{Maps, mark};

/// Listening ports at most; of more, the ones that were not asked for longest are forgotten.
const MAX_PORTS: u32 = 4096;
/// Connections under way at most whose SYN-ACK had no room for the option.
const MAX_REFUSED: u32 = 1024;
/// Networks of a policy times listening ports at most.
const MAX_CLIENTS: u32 = 1 << 16;
/// Descriptors that are passed on get numbers from here, above those that programs count on: the
/// first of these that the limit allows.
const PASSED_FROM: [i32; 3] = [700, 100, 3];
/// Connections in a listener's queue that [`Rendezvous::bind`] asks for.
const BACKLOG: i32 = 4096;

/// How a rendezvous is set up. The defaults suit most processes.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// The directory of the cgroup whose sockets take part; that of this process if none is named.
    /// It may be one above.
    pub cgroup: Option<PathBuf>,
    /// Which connections may ask for SMC, and be answered. Rules that name programs are held against
    /// the executable of this process.
    pub policy: Policy,
}

/// The rendezvous of a process. Sockets made while it lived keep their answers; new ones are plain
/// TCP when it is dropped.
#[derive(Debug)]
pub struct Rendezvous {
    marks: Map<i32, u32>,
    /// Whom a listener answers, if the policy looks at clients: 1 or 0.
    clients: Option<Map<Client, u64>>,
    policy: Policy,
    cgroup: OwnedFd,
    path: PathBuf,
    /// As long as it is open, the program is called.
    link: OwnedFd,
    /// Takes listeners that listen already; its error number if the kernel does not have it.
    late: Result<OwnedFd, i32>,
}

/// A port on which somebody listens.
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
    /// Bits that count of what follows.
    length: u32,
    port: u32,
    address: [u8; 16],
}

impl Rendezvous {
    /// Has the kernel call the programs for the sockets of a cgroup.
    ///
    /// # Errors
    /// What is missing.
    pub fn attach(options: Options) -> Result<Arc<Rendezvous>, Unavailable> {
        let denied = |what| move |error| Unavailable::of_bpf(what, error);
        let marks = Map::new(MapKind::SocketStorage, 0, "smc_marks");
        let marks = marks.map_err(denied("a BPF socket storage"))?;
        let ports = Map::<Listening, u64>::new(MapKind::LruHash, MAX_PORTS, "smc_ports");
        let ports = ports.map_err(denied("a BPF hash table"))?;
        let refused = Map::<u64, u64>::new(MapKind::LruHash, MAX_REFUSED, "smc_refused");
        let refused = refused.map_err(denied("a BPF hash table"))?;
        // Whoever it is passed on to may be concerned by other rules than this program.
        let looks = options.policy.looks_at_clients();
        let policy = of_this_program(options.policy);
        let clients = || Map::new(MapKind::PrefixTrie, MAX_CLIENTS, "smc_clients");
        let clients = looks.then(clients).transpose();
        let clients = clients.map_err(denied("a BPF prefix trie"))?;
        let (cgroup, path) = cgroup::open(options.cgroup.as_deref())?;
        let maps = Maps {
            marks: marks.as_fd(),
            ports: ports.as_fd(),
            refused: refused.as_fd(),
            clients: clients.as_ref().map(AsFd::as_fd),
        };
        let code = program::options(&maps).unwrap_or_default();
        let program = bpf::load(Hook::SockOps, "smc_option", &code).map_err(rejected)?;
        let link = bpf::attach(Hook::SockOps, program.as_fd(), cgroup.as_fd());
        let link = link.map_err(|error| match error.raw_os_error() {
            Some(libc::EPERM) => Unavailable::Occupied { path: path.clone() },
            Some(libc::EBADF) => Unavailable::Cgroup { path: path.clone(), error },
            _ => Unavailable::of_bpf("a BPF link to a cgroup", error),
        })?;
        let code = program::take_listener(&maps).unwrap_or_default();
        let late = bpf::load(Hook::SetSockOpt, "smc_listener", &code).map_err(|rejected| {
            tracing::debug!(error = %rejected.error, verifier = rejected.verifier, "BPF");
            rejected.error.raw_os_error().unwrap_or(libc::EINVAL)
        });
        tracing::debug!(cgroup = %path.display(), "TCP option 254 is at work");
        let cgroup = cgroup.into();
        Ok(Arc::new(Rendezvous { marks, clients, policy, cgroup, path, link, late }))
    }

    /// For programs that this process starts and that may lack the rights for a rendezvous of their
    /// own: its text goes into their environment or onto their command line, and from there to
    /// [`Rendezvous::adopt`].
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn pass_on(&self) -> io::Result<PassedOn> {
        let own = [
            Some(self.marks.as_fd()),
            self.clients.as_ref().map(AsFd::as_fd),
            self.late.as_ref().ok().map(AsFd::as_fd),
            Some(self.cgroup.as_fd()),
            Some(self.link.as_fd()),
        ];
        let mut passed = PassedOn { text: String::new(), _descriptors: Vec::new() };
        for fd in own {
            let number = match fd {
                Some(fd) => {
                    let copy = out_of_the_way(fd)?;
                    rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty())?;
                    let number = copy.as_raw_fd().to_string();
                    passed._descriptors.push(copy);
                    number
                }
                None => "-".to_owned(),
            };
            let comma = if passed.text.is_empty() { "" } else { "," };
            passed.text.push_str(comma);
            passed.text.push_str(&number);
        }
        Ok(passed)
    }

    /// The rendezvous that the process's parent passed on; its descriptors stay for programs that
    /// this one starts. The policy is this process's own.
    ///
    /// # Errors
    /// `InvalidInput`: the text is not one of [`Rendezvous::pass_on`]. Others: the descriptors have
    /// been closed since.
    pub fn adopt(text: &str, policy: Policy) -> io::Result<Arc<Rendezvous>> {
        let number = |part: &str| match part {
            "-" => Ok(None),
            digits => digits.parse().map(Some).map_err(|_| io::ErrorKind::InvalidInput),
        };
        let numbers = text.split(',').map(number).collect::<Result<Vec<Option<i32>>, _>>()?;
        let [Some(marks), clients, late, Some(cgroup), Some(link)] = numbers[..] else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let clients = clients.map(|number| Map::adopt(MapKind::PrefixTrie, number)).transpose()?;
        let late = late.map(bpf::duplicate).transpose()?.ok_or(libc::EOPNOTSUPP);
        let cgroup = bpf::duplicate(cgroup)?;
        let path = std::fs::read_link(format!("/proc/self/fd/{}", cgroup.as_raw_fd()))?;
        Ok(Arc::new(Rendezvous {
            marks: Map::adopt(MapKind::SocketStorage, marks)?,
            clients,
            policy: of_this_program(policy),
            cgroup,
            path,
            link: bpf::duplicate(link)?,
            late,
        }))
    }

    /// The numbers of its descriptors, for programs that close what they do not know.
    pub fn descriptors(&self) -> Vec<i32> {
        let own = [Some(self.marks.as_fd()), self.clients.as_ref().map(AsFd::as_fd)];
        let late = self.late.as_ref().ok().map(AsFd::as_fd);
        let rest = [late, Some(self.cgroup.as_fd()), Some(self.link.as_fd())];
        own.into_iter().chain(rest).flatten().map(|fd| fd.as_raw_fd()).collect()
    }

    /// The directory of the cgroup whose sockets take part.
    pub fn cgroup(&self) -> &std::path::Path {
        &self.path
    }

    /// Has a socket ask for SMC when it connects to `peer`; to be called before that. `false`: the
    /// policy says no, and it connects as any other.
    ///
    /// # Errors
    /// The kernel's. The socket then connects as any other.
    pub fn want(&self, socket: impl AsFd, peer: &SocketAddr) -> io::Result<bool> {
        if self.policy.connect(peer) == Verdict::Tcp {
            return Ok(false);
        }
        self.mark(socket.as_fd(), mark::WANT)?;
        Ok(true)
    }

    /// Has a listener answer clients that ask for SMC; to be called after bind(2), and best before
    /// listen(2). `false`: the policy says no.
    ///
    /// # Errors
    /// The socket listens already, and the kernel is older than 6.12 or the process has given up its
    /// capabilities: `Unsupported`. Others of the kernel. The listener then answers as any other.
    pub fn listen(&self, listener: impl AsFd) -> io::Result<bool> {
        let listener = listener.as_fd();
        if !self.welcome(listener)? {
            return Ok(false);
        }
        // SYN-ACKs that are sent again, and accepted sockets, look at what was asked for.
        bpf::save_syn(listener)?;
        self.mark(listener, mark::ANSWER)?;
        if sockopt::socket_acceptconn(listener)? {
            self.take_over(listener)?;
        }
        Ok(true)
    }

    /// Listens as [`TcpListener::bind`] does, and answers clients that ask for SMC.
    ///
    /// # Errors
    /// Those of the system calls, and of [`Rendezvous::listen`].
    pub fn bind(&self, addr: &SocketAddr) -> io::Result<TcpListener> {
        let mut named = Ok(true);
        let listener = bind(addr, |socket| named = self.listen(socket))?;
        named.map(|_| listener)
    }

    /// Whether both ends of a connection have sent the option, as seen from here.
    ///
    /// `None`: not known. The connection is not established, its socket was not named, or (of an
    /// accepted one) its SYN was not kept. A client must take that for "no", because its server does
    /// not wait for a Proposal; a server may look at the first bytes.
    pub fn peer_speaks_smc(&self, stream: impl AsFd) -> Option<bool> {
        let found = self.marks.get(&stream.as_fd().as_raw_fd());
        let mark = found.inspect_err(|error| tracing::debug!(%error, "socket storage")).ok()??;
        (mark & mark::KNOWN != 0).then_some(mark & mark::PEER != 0)
    }

    /// Tells the program whom a listener answers; whether that is anybody.
    fn welcome(&self, listener: BorrowedFd<'_>) -> io::Result<bool> {
        let address = rustix::net::getsockname(listener)?;
        let port = SocketAddr::try_from(address)?.port();
        if port == 0 {
            let text = "a listener is named after it is bound to a port";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let clients = self.policy.listen(port);
        if clients.iter().all(|(_, verdict)| *verdict == Verdict::Tcp) {
            return Ok(false);
        }
        if let Some(table) = &self.clients {
            for (network, verdict) in clients {
                let (address, length) = network.prefix();
                let length = 32 + u32::from(length);
                let key = Client { length, port: u32::from(port), address };
                table.set(&key, &u64::from(verdict == Verdict::Smc))?;
            }
        }
        Ok(true)
    }

    fn mark(&self, socket: BorrowedFd<'_>, bit: u32) -> io::Result<()> {
        self.marks.set(&socket.as_raw_fd(), &bit)
    }

    /// Prepares a listener that listens already: callbacks can be asked for only inside the kernel,
    /// and setsockopt(2) is a way to get there.
    fn take_over(&self, listener: BorrowedFd<'_>) -> io::Result<()> {
        let unsupported = |error: io::Error| {
            let text = format!("a socket that listens already cannot be taken over: {error}");
            io::Error::new(io::ErrorKind::Unsupported, text)
        };
        let program = match &self.late {
            Ok(program) => program,
            Err(error) => return Err(unsupported(io::Error::from_raw_os_error(*error))),
        };
        // Attached for this call only, so that those of others cost nothing more.
        let link = bpf::attach(Hook::SetSockOpt, program.as_fd(), self.cgroup.as_fd());
        let link = link.map_err(unsupported)?;
        let (level, name) = program::TAKE_LISTENER;
        let taken = bpf::set_socket_option(listener, level.cast_signed(), name.cast_signed(), 0);
        drop(link);
        taken.map_err(unsupported)
    }
}

/// The descriptors of a rendezvous, open for programs that are started as long as this lives.
#[derive(Debug)]
pub struct PassedOn {
    text: String,
    _descriptors: Vec<OwnedFd>,
}

impl std::fmt::Display for PassedOn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Another descriptor of the same, with a high number; closed when a program is executed.
fn out_of_the_way(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut result = Err(rustix::io::Errno::MFILE);
    for floor in PASSED_FROM {
        result = rustix::io::fcntl_dupfd_cloexec(fd, floor);
        // Beyond the limit, or nothing free up to it.
        if !matches!(result, Err(rustix::io::Errno::INVAL | rustix::io::Errno::MFILE)) {
            break;
        }
    }
    Ok(result?)
}

/// Listens as [`TcpListener::bind`] does, with something done in between.
fn bind(addr: &SocketAddr, prepare: impl FnOnce(BorrowedFd<'_>)) -> io::Result<TcpListener> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, addr)?;
    prepare(socket.as_fd());
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn of_this_program(policy: Policy) -> Policy {
    match std::env::current_exe() {
        Ok(executable) => policy.of_program(&executable),
        Err(_) => policy,
    }
}

fn rejected(rejected: bpf::Rejected) -> Unavailable {
    match rejected.error.raw_os_error() {
        // The verifier's refusals; a missing right is told at the first map.
        Some(libc::EACCES | libc::EINVAL) if !rejected.verifier.is_empty() => {
            Unavailable::kernel(format!("its verifier: {}", rejected.verifier))
        }
        _ => Unavailable::of_bpf("a BPF program for TCP", rejected.error),
    }
}
