// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reasons for the lack of a rendezvous, and the way to grant one.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Reasons why this process cannot set and read TCP options on this machine. The text names the missing
/// precondition and its grant.
#[derive(Debug, Error)]
pub enum Unavailable {
    /// The process lacks capabilities.
    #[error(
        "this process lacks {missing}: grant it with `setcap cap_bpf,cap_net_admin+ep {program}`, \
         `AmbientCapabilities=CAP_BPF CAP_NET_ADMIN` in its systemd unit, or \
         `--cap-add BPF --cap-add NET_ADMIN` for its container", program = own_program()
    )]
    Capabilities {
        /// Names of the capabilities.
        missing: Missing,
    },
    /// The process has its capabilities only inside a user namespace, without effect on bpf(2).
    #[error(
        "bpf(2) is not for user namespaces, and this process is in one: start it (or its \
         container) as root of the machine, with CAP_BPF and CAP_NET_ADMIN"
    )]
    UserNamespace,
    /// A filter of system calls forbids bpf(2).
    #[error(
        "a seccomp filter forbids bpf(2): allow it in the container's profile \
         (`--security-opt seccomp=FILE`), or in the systemd unit (`SystemCallFilter=bpf` as well)"
    )]
    Seccomp,
    /// Something else forbids bpf(2): lockdown, a security module.
    #[error(
        "the kernel forbids bpf(2) to this process although it has the capabilities ({0}): look at \
         /sys/kernel/security/lockdown and at the audit log of the security module"
    )]
    Forbidden(io::Error),
    /// There is no cgroup v2.
    #[error(
        "cgroup v2 is not mounted: `mount -t cgroup2 none /sys/fs/cgroup` (or \
         /sys/fs/cgroup/unified if v1 is in use)"
    )]
    NoCgroup,
    /// The cgroup of the process cannot be opened.
    #[error(
        "cannot open the cgroup {path}: {error}; if the process is in a container, give it its own \
         cgroup namespace (`--cgroupns=private`) with cgroup v2 mounted"
    )]
    Cgroup {
        /// Directory of the cgroup.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// Only a cgroup below the root can be granted the option for all its processes.
    #[error(
        "{path} is no cgroup below the root of cgroup v2: a grant is for the processes of one \
         container or service, such as /sys/fs/cgroup/system.slice/NAME.service"
    )]
    NotGrantable {
        /// The named directory.
        path: PathBuf,
    },
    /// Another program holds the cgroup for itself.
    #[error(
        "another program is attached to the cgroup {path} or one above it and allows none beside \
         it: see `bpftool cgroup tree`, and attach that one with `multi`"
    )]
    Occupied {
        /// The directory of the cgroup.
        path: PathBuf,
    },
    /// The cgroup already has the maximum number of programs.
    #[error(
        "{most} programs are attached to the cgroup {path} already, and it can have no more: see \
         `bpftool cgroup show {path}`", most = super::bpf::MAX_ATTACHED
    )]
    Full {
        /// The directory of the cgroup.
        path: PathBuf,
    },
    /// The kernel lacks a feature.
    #[error(
        "Linux {release} cannot do this ({what}): 5.15 or later with CONFIG_BPF_SYSCALL, \
         CONFIG_CGROUP_BPF and CONFIG_INET is needed"
    )]
    Kernel {
        /// `uname -r`
        release: String,
        /// The refused step, and the error.
        what: String,
    },
    /// The rendezvous passed on by the process's parent is gone, or could not be opened.
    #[error("{0}")]
    PassedOn(io::Error),
    /// The system lacks a resource.
    #[error(
        "{what}: {error}; if memory is short, `ulimit -l unlimited` helps on kernels before 5.11"
    )]
    System {
        /// The failed step.
        what: &'static str,
        /// The error of the system.
        error: io::Error,
    },
}

/// Why a program was not loaded.
#[derive(Debug)]
pub(super) struct Rejected {
    pub(super) error: io::Error,
    /// The last lines of the verifier's log.
    pub(super) verifier: String,
}

/// Capabilities missing from a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// CAP_BPF: to make maps and load programs.
    pub bpf: bool,
    /// CAP_NET_ADMIN: for programs with access to TCP.
    pub net_admin: bool,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.bpf, self.net_admin) {
            (true, true) => "CAP_BPF and CAP_NET_ADMIN",
            (true, false) => "CAP_BPF",
            (false, _) => "CAP_NET_ADMIN",
        })
    }
}

impl Unavailable {
    /// Finds the reason of an error of bpf(2).
    pub(super) fn of_bpf(what: &'static str, error: io::Error) -> Unavailable {
        Self::diagnose(what, error, &fs::read_to_string("/proc/self/status").unwrap_or_default())
    }

    fn diagnose(what: &'static str, error: io::Error, status: &str) -> Unavailable {
        match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => match (lacks(status), seccomp(status)) {
                (Some(missing), _) => Unavailable::Capabilities { missing },
                (None, _) if in_user_namespace() => Unavailable::UserNamespace,
                (None, true) => Unavailable::Seccomp,
                (None, false) => Unavailable::Forbidden(error),
            },
            Some(libc::ENOSYS) if seccomp(status) => Unavailable::Seccomp,
            Some(libc::ENOSYS | libc::EINVAL | libc::E2BIG | libc::EOPNOTSUPP) => {
                Self::kernel(format!("{what}: {error}"))
            }
            _ => Unavailable::System { what, error },
        }
    }

    /// Finds the reason why a program could not be loaded.
    pub(super) fn of_load(rejected: Rejected) -> Unavailable {
        match rejected.error.raw_os_error() {
            // The verifier refused the program. A missing capability fails already at the first map.
            Some(libc::EACCES | libc::EINVAL) if !rejected.verifier.is_empty() => {
                Unavailable::kernel(format!("its verifier: {}", rejected.verifier))
            }
            _ => Unavailable::of_bpf("a BPF program for TCP", rejected.error),
        }
    }

    /// Finds the reason why a program could not be attached to a cgroup.
    pub(super) fn of_attaching(path: &Path, error: io::Error) -> Unavailable {
        let path = path.to_owned();
        match error.raw_os_error() {
            Some(libc::EPERM) => Unavailable::Occupied { path },
            Some(libc::E2BIG) => Unavailable::Full { path },
            Some(libc::EBADF) => Unavailable::Cgroup { path, error },
            _ => Unavailable::of_bpf("a BPF program of a cgroup", error),
        }
    }

    /// The kernel lacks a feature.
    pub(super) fn kernel(what: String) -> Unavailable {
        let release = ism_sys::machine().map_or("?".into(), |(_, release)| release);
        Unavailable::Kernel { release, what }
    }
}

/// The path of this program, for a command line.
fn own_program() -> String {
    std::env::current_exe().map_or("PROGRAM".into(), |path| path.display().to_string())
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim))
}

/// The missing capabilities of the process, if any; unknown counts as none.
fn lacks(status: &str) -> Option<Missing> {
    const NET_ADMIN: u64 = 1 << 12;
    const SYS_ADMIN: u64 = 1 << 21;
    const BPF: u64 = 1 << 39;
    let has = u64::from_str_radix(field(status, "CapEff")?, 16).ok()?;
    let missing = Missing {
        bpf: has & (BPF | SYS_ADMIN) == 0,
        net_admin: has & (NET_ADMIN | SYS_ADMIN) == 0,
    };
    (missing.bpf || missing.net_admin).then_some(missing)
}

fn seccomp(status: &str) -> bool {
    field(status, "Seccomp").is_some_and(|mode| mode != "0")
}

/// Whether this process is in a user namespace other than the first. The first maps every id to itself.
fn in_user_namespace() -> bool {
    fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_whitespace().collect::<Vec<_>>() != ["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "Name:\tx\nCapEff:\t000001ffffffffff\nSeccomp:\t0\nSeccomp_filters:\t0\n";
    const USER: &str = "Name:\tx\nCapEff:\t0000000000000000\nSeccomp:\t0\n";
    const FILTERED: &str = "CapEff:\t000001ffffffffff\nSeccomp:\t2\nSeccomp_filters:\t1\n";

    fn eperm() -> io::Error {
        io::Error::from_raw_os_error(libc::EPERM)
    }

    #[test]
    fn names_the_capabilities_that_are_missing_and_a_command() {
        let why = Unavailable::diagnose("map", eperm(), USER);
        let text = why.to_string();
        assert!(text.contains("lacks CAP_BPF and CAP_NET_ADMIN"), "{text}");
        assert!(text.contains("setcap cap_bpf,cap_net_admin+ep /"), "{text}");
        let only_net = lacks("CapEff:\t0000008000000000\n").unwrap();
        assert_eq!(only_net.to_string(), "CAP_NET_ADMIN");
        let only_bpf = lacks("CapEff:\t0000000000001000\n").unwrap();
        assert_eq!(only_bpf.to_string(), "CAP_BPF");
    }

    #[test]
    fn a_mighty_process_that_may_not_is_filtered_or_forbidden() {
        if in_user_namespace() {
            return;
        }
        let why = Unavailable::diagnose("map", eperm(), FILTERED);
        assert!(matches!(why, Unavailable::Seccomp), "{why}");
        let why = Unavailable::diagnose("map", eperm(), ROOT);
        assert!(matches!(why, Unavailable::Forbidden(_)), "{why}");
    }

    #[test]
    fn a_call_that_does_not_exist_is_an_old_kernel_or_a_filter() {
        let enosys = || io::Error::from_raw_os_error(libc::ENOSYS);
        let why = Unavailable::diagnose("map", enosys(), ROOT);
        assert!(matches!(why, Unavailable::Kernel { .. }), "{why}");
        let why = Unavailable::diagnose("map", enosys(), FILTERED);
        assert!(matches!(why, Unavailable::Seccomp), "{why}");
    }

    #[test]
    fn old_kernels_know_the_all_powerful_capability_only() {
        assert_eq!(lacks("CapEff:\t0000000000200000\n"), None);
        assert_eq!(lacks("nothing to read"), None);
    }
}
