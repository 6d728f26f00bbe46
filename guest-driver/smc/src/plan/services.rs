// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The services of this host: processes with the same program, user and cgroup.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use guest_driver::go_program::Door;
use serde::Serialize;

use crate::doctor::FEW_DESCRIPTORS;
use crate::proc_files::{self, Status};
use crate::run::inspect;

/// File name of the library of `smc run`.
const LIBRARY: &str = "libsmc_preload.so";

/// The name of a service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub(super) struct ServiceName {
    pub(super) program: String,
    pub(super) user: Option<u32>,
    /// Last part of the cgroup: a unit of systemd, or a container.
    pub(super) cgroup: Option<String>,
}

impl std::fmt::Display for ServiceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.program)?;
        match (&self.cgroup, self.user) {
            (Some(cgroup), _) => write!(f, " ({})", cgroup.get(..CGROUP).unwrap_or(cgroup)),
            (None, Some(user)) => write!(f, " (user {user})"),
            (None, None) => Ok(()),
        }
    }
}

/// Characters of a cgroup's name in a table: the id of a container is longer.
const CGROUP: usize = 40;

/// The processes of a service, and the things in the way of SMC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Service {
    pub(super) pids: BTreeSet<u32>,
    /// The library is in the processes already.
    pub(super) has_library: bool,
    /// Reasons for TCP under `smc run`.
    pub(super) obstacles: BTreeSet<String>,
    /// Facts that may matter.
    pub(super) notes: BTreeSet<String>,
}

/// The services with connections, and the owners of sockets.
#[derive(Debug, Default)]
pub(super) struct ServiceTable {
    pub(super) all: BTreeMap<ServiceName, Service>,
    owners: HashMap<u32, ServiceName>,
    /// Processes this user may not inspect.
    pub(super) hidden: usize,
}

/// The visible processes.
pub(super) fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

impl ServiceTable {
    /// Finds the owners of these sockets.
    pub(super) fn of(wanted: &HashSet<u32>) -> ServiceTable {
        let mut services = ServiceTable::default();
        for pid in pids() {
            let links = match fs::read_dir(format!("/proc/{pid}/fd")) {
                Ok(links) => links,
                Err(error) => {
                    // Other errors mean that the process has ended.
                    services.hidden += usize::from(error.kind() == ErrorKind::PermissionDenied);
                    continue;
                }
            };
            let inodes = links.flatten().filter_map(|link| proc_files::socket_inode(link.path()));
            let own: Vec<u32> = inodes
                .filter_map(|inode| u32::try_from(inode).ok())
                .filter(|inode| wanted.contains(inode) && !services.owners.contains_key(inode))
                .collect();
            if own.is_empty() {
                continue;
            }
            let name = name_of(pid);
            services.all.entry(name.clone()).or_default().look(pid);
            services.owners.extend(own.into_iter().map(|inode| (inode, name.clone())));
        }
        services
    }

    /// The service with this socket.
    pub(super) fn owner(&self, inode: u32) -> ServiceName {
        let unknown = || ServiceName { program: "?".into(), user: None, cgroup: None };
        self.owners.get(&inode).cloned().unwrap_or_else(unknown)
    }
}

fn name_of(pid: u32) -> ServiceName {
    let exe = fs::read_link(format!("/proc/{pid}/exe")).ok();
    let exe = exe.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy());
    let exe = exe.map(|name| name.trim_end_matches(" (deleted)").to_owned());
    ServiceName {
        program: exe.unwrap_or_else(|| proc_files::program(pid)),
        user: Status::of(pid).and_then(|status| status.users.get(1).copied()),
        cgroup: cgroup(&proc_files::bytes(format!("/proc/{pid}/cgroup")).unwrap_or_default()),
    }
}

/// The last part of a process's cgroup, of version 2 if that has a name, or of systemd's hierarchy.
fn cgroup(file: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(file);
    let of = |head: &str| {
        let path = text.lines().find_map(|line| line.split_once(head).map(|(_, path)| path));
        path?.rsplit('/').find(|part| !part.is_empty()).map(str::to_owned)
    };
    of("0::").or_else(|| of(":name=systemd:"))
}

impl Service {
    /// Judges a process.
    fn look(&mut self, pid: u32) {
        self.pids.insert(pid);
        let maps = |word: &str| {
            let mut found = false;
            let _ = proc_files::lines(format!("/proc/{pid}/maps"), |line| {
                found = line.ends_with(word);
                !found
            });
            found
        };
        self.has_library |= maps(LIBRARY);
        let exe = PathBuf::from(format!("/proc/{pid}/exe"));
        match inspect::door(&exe) {
            Some(Ok(Door::Libc)) => {}
            Some(Ok(Door::SystemCalls | Door::LoadedSystemCalls)) => {
                self.notes.insert("written in Go: needs smc run --go".into());
            }
            Some(Ok(Door::Dispatch)) => {
                self.notes.insert("a static program: needs smc run --system-calls".into());
            }
            Some(Ok(Door::DispatchOfMusl)) => {
                self.notes.insert("linked with musl: needs smc run --system-calls".into());
            }
            Some(Err(why)) => {
                self.obstacles.insert(why.to_string());
            }
            None => {
                self.notes.insert("the file of the program cannot be read".into());
            }
        }
        let environment = proc_files::bytes(format!("/proc/{pid}/environ")).unwrap_or_default();
        for variable in environment.split(|byte| *byte == 0) {
            let preloaded = variable.strip_prefix(b"LD_PRELOAD=").filter(|value| !value.is_empty());
            if let Some(other) = preloaded.map(String::from_utf8_lossy)
                && !other.contains(LIBRARY)
            {
                self.notes.insert(format!("has another library preloaded: {other}"));
            }
        }
        let _ = proc_files::lines(format!("/proc/{pid}/status"), |line| {
            let filter = line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "2");
            if filter {
                let says =
                    "has a filter of system calls (seccomp), which smc run tries at its start";
                self.notes.insert(says.into());
            }
            !filter
        });
        if let Some(limit) = descriptors(pid).filter(|limit| *limit < FEW_DESCRIPTORS) {
            let says = format!("the limit of descriptors is {limit}: SMC needs {FEW_DESCRIPTORS}");
            self.obstacles.insert(says);
        }
    }
}

/// Soft limit of a process's descriptors. `None`: no limit, or the process has ended.
fn descriptors(pid: u32) -> Option<u64> {
    let mut limit = None;
    let _ = proc_files::lines(format!("/proc/{pid}/limits"), |line| {
        let found = line.strip_prefix("Max open files");
        limit = found.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        found.is_none()
    });
    limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_of_the_cgroup_names_a_service() {
        let of = |text: &str| cgroup(text.as_bytes());
        assert_eq!(of("0::/system.slice/redis.service\n").as_deref(), Some("redis.service"));
        assert_eq!(of("1:name=systemd:/a/b.scope\n0::/\n").as_deref(), Some("b.scope"));
        assert_eq!(of("0::/\n"), None);
        assert_eq!(of(""), None);
    }
}
