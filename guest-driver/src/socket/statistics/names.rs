// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Names of the files of a process in a directory of statistics.

const PREFIX: &str = "process-";
/// The inode of the first namespace of process ids: PROC_PID_INIT_INO.
const FIRST_NAMESPACE: u64 = 0xefff_fffc;

/// The name of this process's file. Hosts in namespaces of their own may share a directory, and repeat the ids
/// of processes; so the name has the namespace, too, but for the first one.
pub(super) fn own(suffix: &str) -> String {
    let namespace = rustix::fs::stat("/proc/self/ns/pid").ok().map(|found| found.st_ino);
    name(std::process::id(), namespace, suffix)
}

fn name(pid: u32, namespace: Option<u64>, suffix: &str) -> String {
    match namespace {
        None | Some(FIRST_NAMESPACE) => format!("{PREFIX}{pid}{suffix}"),
        Some(namespace) => format!("{PREFIX}{pid}-p{namespace:x}{suffix}"),
    }
}

/// The process id in a name: that of the process's own namespace.
pub(super) fn pid_of(name: &str, suffix: &str) -> Option<i32> {
    let middle = name.strip_prefix(PREFIX)?.strip_suffix(suffix)?;
    // The namespace may follow the id, and so may the number of a further stack of the process.
    middle.split('-').next()?.parse().ok().filter(|pid| *pid > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_ids_of_two_namespaces_have_two_names() {
        assert_eq!(name(7, Some(FIRST_NAMESPACE), ".sock"), "process-7.sock");
        assert_eq!(name(7, None, ".sock"), "process-7.sock");
        let [one, other] = [0xf000_0001, 0xf000_0002].map(|inode| name(7, Some(inode), ".tcp"));
        assert_ne!(one, other);
        for name in [&one, &other] {
            assert_eq!(pid_of(name, ".tcp"), Some(7));
        }
        assert_eq!(pid_of(&own(".sock"), ".sock"), i32::try_from(std::process::id()).ok());
    }

    #[test]
    fn names_of_sockets_have_the_process_id() {
        let of = |name| pid_of(name, ".sock");
        assert_eq!(of("process-17.sock"), Some(17));
        assert_eq!(of("process-17-2.sock"), Some(17));
        for other in ["process-.sock", "process-x.sock", "process-0.sock", "a.sock", "process-1"] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
