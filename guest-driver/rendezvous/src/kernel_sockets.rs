// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets of the kernel's AF_SMC in place of TCP sockets, for every program of a cgroup: static ones, too.
//!
//! socket(2) asks `update_socket_protocol` for the protocol. The kernel permits a program to answer in place
//! of this function, for MPTCP. AF_SMC is a protocol, too, since Linux 6.11. In C the program would be:
//!
//! ```c
//! cgroups: array with one cgroup
//!
//! int smc_sockets(int family, int type, int protocol)
//! {
//!     if (family is AF_INET or AF_INET6 && (type & SOCK_TYPE_MASK) == SOCK_STREAM
//!             && protocol is 0, IPPROTO_TCP or IPPROTO_MPTCP
//!             && bpf_current_task_under_cgroup(&cgroups, 0) == 1)
//!         return IPPROTO_SMC;
//!     return 0;                                           // the kernel goes on with its function
//! }
//! ```
//!
//! The kernel calls the program for each socket(2) of the machine, also by io_uring. Other cgroups pay a few
//! comparisons. Existing sockets stay unchanged.

use std::fs;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, Protocol, RawProtocol, SocketType, ipproto};
use rustix::thread::CapabilitySet;
use thiserror::Error;

use super::assembler::{Assembler, Helper, Instruction, Reg, When, Width};
use super::bpf::{self, Hook, Map, MapKind};
use super::cgroup::Temporary;
use super::kernel_types;
use super::unavailable::{Rejected, Unavailable};

const FUNCTION: &str = "update_socket_protocol";
const IPPROTO_TCP: i32 = 6;
/// Asked for by Go since 1.24.
const IPPROTO_MPTCP: i32 = 262;
/// `SOCK_TYPE_MASK`: the rest are flags.
const TYPE_MASK: i32 = 0xf;

/// IPPROTO_SMC.
pub(super) const SMC: Protocol = match RawProtocol::new(256) {
    Some(raw) => Protocol::from_raw(raw),
    None => ipproto::TCP,
};

/// Reasons for the lack of [`KernelSockets`]. The text names the missing precondition.
#[derive(Debug, Error)]
pub enum NoKernelSockets {
    /// AF_SMC is missing, or is no protocol yet.
    #[error(
        "the kernel has no IPPROTO_SMC ({0}): Linux 6.11 or later with CONFIG_SMC is needed \
         (\"modprobe smc\")"
    )]
    NoProtocol(io::Error),
    /// The kernel does not describe its types.
    #[error("{file}: {0}: a kernel with CONFIG_DEBUG_INFO_BTF is needed", file = kernel_types::FILE)]
    NoTypes(io::Error),
    /// The kernel has no place for the program.
    #[error("the kernel's types name no {FUNCTION}: Linux 6.6 or later is needed")]
    NoFunction,
    /// The kernel permits no program in place of its function.
    #[error(
        "the kernel does not let a program answer for {FUNCTION}: CONFIG_MPTCP, which permits it, is \
         needed"
    )]
    NotReplaceable,
    /// The kernel has no programs at its functions.
    #[error(
        "the kernel has no programs at its own functions ({0}): CONFIG_BPF_JIT, CONFIG_BPF_EVENTS and \
         CONFIG_FUNCTION_TRACER are needed"
    )]
    NoTracing(io::Error),
    /// The process lacks a capability.
    #[error("this process lacks CAP_PERFMON, needed for programs at functions of the kernel")]
    Perfmon,
    /// A file of a grant cannot be made or removed.
    #[error(
        "{path}: {error}; the file system of BPF keeps a grant (\"mount -t bpf bpf /sys/fs/bpf\")"
    )]
    Files {
        /// The file or directory.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// Other preconditions of eBPF and cgroups.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
}

/// A cgroup whose programs get sockets of AF_SMC from socket(2), when they ask for TCP. Dropping the value
/// removes the cgroup, if no process is left in there. Sockets made before stay as they are.
#[derive(Debug)]
pub struct KernelSockets {
    cgroup: Temporary,
    _link: OwnedFd,
}

impl KernelSockets {
    /// Makes a cgroup with this name below the one of this process. A process enters by writing 0 to
    /// `cgroup.procs`; so its children enter, too.
    ///
    /// # Errors
    /// The missing precondition.
    pub fn make(name: &str) -> Result<KernelSockets, NoKernelSockets> {
        Self::make_for(SMC, name)
    }

    fn make_for(protocol: Protocol, name: &str) -> Result<KernelSockets, NoKernelSockets> {
        let cgroup = Temporary::make(name)?;
        let link = attach_for(protocol, &cgroup.open()?)?;
        Ok(KernelSockets { cgroup, _link: link })
    }

    /// Whether [`KernelSockets::make`] would find everything but the right to make a cgroup.
    ///
    /// # Errors
    /// The missing precondition.
    pub fn check() -> Result<(), NoKernelSockets> {
        attach(FUNCTION, SMC).map(|_| ())
    }

    /// The directory of the cgroup.
    pub fn cgroup(&self) -> &Path {
        self.cgroup.path()
    }

    /// Waits until no process is in the cgroup any more.
    ///
    /// # Errors
    /// The cgroup cannot be watched.
    pub fn wait_until_empty(&self) -> io::Result<()> {
        let mut events = fs::File::open(self.cgroup().join("cgroup.events"))?;
        let mut text = String::new();
        loop {
            text.clear();
            events.rewind()?;
            events.read_to_string(&mut text)?;
            if text.lines().any(|line| line == "populated 0") {
                return Ok(());
            }
            match poll(&mut [PollFd::new(&events, PollFlags::PRI)], None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn denied(error: io::Error) -> Unavailable {
    Unavailable::of_bpf("a BPF array of cgroups", error)
}

/// Attaches the program for a cgroup, for as long as the returned descriptor is open.
pub(super) fn attach_for(
    protocol: Protocol,
    cgroup: &fs::File,
) -> Result<OwnedFd, NoKernelSockets> {
    let (cgroups, link) = attach(FUNCTION, protocol)?;
    cgroups.set(&0, &cgroup.as_raw_fd().cast_unsigned()).map_err(denied)?;
    Ok(link)
}

/// Attaches the program to a function, for no cgroup yet.
fn attach(function: &str, protocol: Protocol) -> Result<(Map<u32, u32>, OwnedFd), NoKernelSockets> {
    rustix::net::socket(AddressFamily::INET, SocketType::STREAM, Some(protocol))
        .map_err(|error| NoKernelSockets::NoProtocol(error.into()))?;
    let types = fs::read(kernel_types::FILE).map_err(NoKernelSockets::NoTypes)?;
    let function = kernel_types::function(&types, function).ok_or(NoKernelSockets::NoFunction)?;
    let cgroups = Map::new(MapKind::Cgroups, 1, "smc_cgroups").map_err(denied)?;
    let code = sockets(cgroups.as_fd().as_raw_fd(), protocol).unwrap_or_default();
    let loaded = bpf::load(Hook::Function(function), "smc_sockets", &code).map_err(rejected)?;
    let link = bpf::attach_to_function(loaded.as_fd()).map_err(NoKernelSockets::NoTracing)?;
    Ok((cgroups, link))
}

fn rejected(rejected: Rejected) -> NoKernelSockets {
    let needed = CapabilitySet::PERFMON | CapabilitySet::SYS_ADMIN;
    match rejected.error.raw_os_error() {
        Some(libc::EPERM)
            if rustix::thread::capabilities(None)
                .is_ok_and(|sets| !sets.effective.intersects(needed)) =>
        {
            NoKernelSockets::Perfmon
        }
        _ if rejected.verifier.contains("is not modifiable") => NoKernelSockets::NotReplaceable,
        // The kernel does not know the type of the program.
        Some(libc::EINVAL) if rejected.verifier.is_empty() => {
            NoKernelSockets::NoTracing(rejected.error)
        }
        _ => Unavailable::of_load(rejected).into(),
    }
}

/// The program. Its context has the arguments of the function, 64 bits each.
fn sockets(cgroups: RawFd, protocol: Protocol) -> Option<Vec<Instruction>> {
    let mut a = Assembler::default();
    let (stream, tcp, out) = (a.label(), a.label(), a.label());
    a.copy(Reg::R6, Reg::R1);
    argument(&mut a, 0);
    a.jump_if(Reg::R7, When::Equal, libc::AF_INET, stream);
    a.jump_if(Reg::R7, When::NotEqual, libc::AF_INET6, out);
    a.here(stream);
    argument(&mut a, 8);
    a.and(Reg::R7, TYPE_MASK);
    a.jump_if(Reg::R7, When::NotEqual, libc::SOCK_STREAM, out);
    argument(&mut a, 16);
    a.jump_if(Reg::R7, When::Equal, 0, tcp);
    a.jump_if(Reg::R7, When::Equal, IPPROTO_TCP, tcp);
    a.jump_if(Reg::R7, When::NotEqual, IPPROTO_MPTCP, out);
    a.here(tcp);
    a.set_map(Reg::R1, cgroups);
    a.set(Reg::R2, 0);
    a.call(Helper::IsUnderCgroup);
    // Not 1: another cgroup, or no cgroup in the array yet.
    a.jump_if(Reg::R0, When::NotEqual, 1, out);
    a.set(Reg::R0, protocol.as_raw().get().cast_signed());
    a.exit();
    a.here(out);
    a.set(Reg::R0, 0);
    a.exit();
    a.finish()
}

/// Loads an argument of type `int` into R7, without the undefined upper half.
fn argument(a: &mut Assembler, offset: i16) {
    a.load(Width::Double, Reg::R7, Reg::R6, offset);
    a.shift_left(Reg::R7, 32);
    a.shift_right(Reg::R7, 32);
}

#[cfg(test)]
pub(super) mod tests {
    use std::process::Command;

    use rustix::net::{SocketFlags, socket_with, sockopt};

    use super::*;

    /// The cgroup of a child in the test.
    const CHILD: &str = "SMC_TEST_CGROUP";
    /// Protocols of [`protocols`] on TCP.
    pub(crate) const TCP: [u32; 7] = [6, 6, 262, 17, 1, 0, 0];
    /// Protocols of [`protocols`] with MPTCP in place of TCP.
    pub(crate) const MPTCP: [u32; 7] = [262, 262, 262, 17, 1, 0, 0];

    /// The protocol of a new socket.
    fn protocol_of(family: AddressFamily, kind: SocketType, asked: Option<Protocol>) -> u32 {
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, asked).unwrap();
        sockopt::socket_protocol(&socket).unwrap().map_or(0, |protocol| protocol.as_raw().get())
    }

    pub(crate) fn protocols() -> [u32; 7] {
        use AddressFamily as Family;
        let tcp = Some(ipproto::TCP);
        [
            protocol_of(Family::INET, SocketType::STREAM, None),
            protocol_of(Family::INET6, SocketType::STREAM, tcp),
            protocol_of(Family::INET, SocketType::STREAM, Some(ipproto::MPTCP)),
            protocol_of(Family::INET, SocketType::DGRAM, None),
            protocol_of(Family::INET, SocketType::RAW, Some(ipproto::ICMP)),
            protocol_of(Family::UNIX, SocketType::STREAM, None),
            protocol_of(Family::NETLINK, SocketType::RAW, None),
        ]
    }

    /// In a child of [`assert_child_gets`], in its cgroup: the protocols of new sockets.
    pub(crate) fn child_prints() -> bool {
        let Some(cgroup) = std::env::var_os(CHILD) else { return false };
        fs::write(Path::new(&cgroup).join("cgroup.procs"), "0").unwrap();
        println!("protocols {:?}", protocols());
        true
    }

    #[track_caller]
    pub(crate) fn assert_child_gets(expected: [u32; 7], cgroup: &Path) {
        assert!(child_gets(expected, cgroup), "expected {expected:?}");
    }

    /// Runs the calling test in a child process, and the child in a cgroup.
    pub(crate) fn child_gets(expected: [u32; 7], cgroup: &Path) -> bool {
        let mut child = Command::new("/proc/self/exe");
        child.arg("--exact").args(std::thread::current().name()).arg("--nocapture");
        let output = child.env(CHILD, cgroup).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        println!("{said}");
        said.contains(&format!("protocols {expected:?}"))
    }

    /// The program with MPTCP in place of AF_SMC: kernels with MPTCP are common. Takes root.
    #[test]
    fn only_tcp_sockets_of_the_cgroup_change_their_protocol() {
        if child_prints() {
            return;
        }
        let name = format!("smc-test-{}", std::process::id());
        let made = match KernelSockets::make_for(ipproto::MPTCP, &name) {
            Ok(made) => made,
            Err(why) => return skipped(&why.to_string()),
        };
        assert_child_gets(MPTCP, made.cgroup());
        assert_eq!(protocols(), TCP, "outside of the cgroup");
        made.wait_until_empty().unwrap();
        let path = made.cgroup().to_owned();
        drop(made);
        assert!(!path.exists());
    }

    #[test]
    fn a_function_that_permits_no_answer_is_refused() {
        match attach("inet_release", ipproto::MPTCP) {
            Err(NoKernelSockets::NotReplaceable) => {}
            Err(why) => skipped(&why.to_string()),
            Ok(_) => panic!("attached"),
        }
        let none = attach("no_such_function", ipproto::MPTCP);
        assert!(matches!(none, Err(NoKernelSockets::NoFunction | NoKernelSockets::NoProtocol(_))));
    }

    /// Reports a left-out test. Whether programs may be at functions of the kernel is the machine's choice, also
    /// by its security modules, so a run as root may be left out, too.
    pub(crate) fn skipped(why: &str) {
        eprintln!("SKIPPED: {why}");
    }
}
