// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets of other processes, according to `/proc`.
//!
//! Another process can have a socket of this process only by inheritance. So the other process is
//! younger than the socket, and descends from this process. After the end of its parent, the other
//! process is a child of an ancestor of this process. Processes with hidden descriptors count only in
//! these cases. In doubt a process counts as a holder.

use std::collections::HashMap;
use std::ffi::c_int;
use std::fs;
use std::path::Path;

use crate::socket::stream::TemporaryRelay;
use crate::sys::{borrowed, raw};

/// Maximum number of generations between a process and the first one.
const MAX_DEPTH: usize = 128;
/// The flag of a kernel thread in `/proc/PID/stat` (PF_KTHREAD).
const KERNEL_THREAD: u64 = 0x0020_0000;

/// Fields of `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessStat {
    parent: i32,
    is_of_kernel: bool,
    /// Ticks since the machine was started.
    begun: u64,
}

impl ProcessStat {
    fn parse(line: &str) -> Option<ProcessStat> {
        // The name, in brackets, may hold anything.
        let (_, rest) = line.rsplit_once(')')?;
        let word = |at: usize| rest.split_ascii_whitespace().nth(at);
        Some(ProcessStat {
            parent: word(1)?.parse().ok()?,
            is_of_kernel: word(6)?.parse::<u64>().ok()? & KERNEL_THREAD != 0,
            begun: word(19)?.parse().ok()?,
        })
    }

    fn of(pid: i32) -> Option<ProcessStat> {
        ProcessStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }
}

/// The processes, each read once.
#[derive(Default)]
struct Processes {
    known: HashMap<i32, Option<ProcessStat>>,
    /// This process and its ancestors.
    own: Vec<i32>,
}

impl Processes {
    fn stat(&mut self, pid: i32) -> Option<ProcessStat> {
        *self.known.entry(pid).or_insert_with(|| ProcessStat::of(pid))
    }

    /// `None`: an ancestor is hidden.
    fn new(this: i32) -> Option<Processes> {
        let mut all = Processes::default();
        let mut at = this;
        while at != 0 && all.own.len() < MAX_DEPTH {
            all.own.push(at);
            at = all.stat(at)?.parent;
        }
        (at == 0).then_some(all)
    }

    /// Whether a process may have inherited a descriptor of this process. The descriptor is not older
    /// than `begun`.
    fn may_have_inherited(&mut self, pid: i32, begun: u64) -> bool {
        let mut at = pid;
        for _ in 0..MAX_DEPTH {
            let Some(stat) = self.stat(at) else { return true };
            if stat.is_of_kernel {
                return false;
            }
            if stat.begun < begun {
                // Descendants may have inherited the descriptor if this process is a descendant, too.
                return at != pid && self.own.contains(&at);
            }
            if stat.parent == 0 {
                return true;
            }
            at = stat.parent;
        }
        true
    }
}

/// Whether other processes may have the programs' ends of these temporary relays, one answer for each.
pub(super) fn may_have(temporaries: &[&TemporaryRelay]) -> Vec<bool> {
    look(temporaries).unwrap_or_else(|| vec![true; temporaries.len()])
}

/// Whether another process has a socket, as far as visible.
pub(crate) fn is_elsewhere(fd: c_int) -> bool {
    let Ok(socket) = rustix::fs::fstat(borrowed(fd)) else { return false };
    let this = raw::getpid();
    let has = |pid: i32| inodes_of(pid).is_ok_and(|inodes| inodes.contains(&socket.st_ino));
    processes().into_iter().flatten().any(|pid| pid != this && has(pid))
}

/// The processes in `/proc`.
fn processes() -> std::io::Result<impl Iterator<Item = i32>> {
    let entries = fs::read_dir("/proc")?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

fn look(temporaries: &[&TemporaryRelay]) -> Option<Vec<bool>> {
    let this = raw::getpid();
    if fs::read_link("/proc/self").ok()? != Path::new(&this.to_string()) {
        // This `/proc` is of another PID namespace.
        return None;
    }
    let mut processes = Processes::new(this)?;
    let mut held = vec![false; temporaries.len()];
    let mut sees_first = false;
    for entry in fs::read_dir("/proc").ok()? {
        let Ok(pid) = entry.ok()?.file_name().to_str().unwrap_or_default().parse::<i32>() else {
            continue;
        };
        sees_first |= pid == 1;
        if pid == this {
            continue;
        }
        match inodes_of(pid) {
            Ok(inodes) => {
                for (temporary, held) in temporaries.iter().zip(&mut held) {
                    *held |= inodes.contains(&temporary.inode);
                }
            }
            Err(error) if is_gone(&error) => {}
            Err(_) => {
                for (temporary, held) in temporaries.iter().zip(&mut held) {
                    *held |= processes.may_have_inherited(pid, temporary.begun);
                }
            }
        }
    }
    // Processes of other users may be hidden, and the first process is root's.
    sees_first.then_some(held)
}

/// Whether a descriptor was closed, or a process has ended, since the listing.
fn is_gone(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// The inodes of a process's sockets.
fn inodes_of(pid: i32) -> std::io::Result<Vec<u64>> {
    let mut inodes = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let target = match fs::read_link(entry?.path()) {
            Ok(target) => target,
            Err(error) if is_gone(&error) => continue,
            Err(error) => return Err(error),
        };
        let inode = target
            .to_str()
            .and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
        inodes.extend::<Option<u64>>(inode);
    }
    Ok(inodes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};

    use super::*;

    const STAT: &str = "7 (a) b (c) S 5 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 9 10";

    #[test]
    fn a_line_of_stat_has_a_parent_and_a_time_behind_any_name() {
        let stat = ProcessStat { parent: 5, is_of_kernel: false, begun: 12345 };
        assert_eq!(ProcessStat::parse(STAT), Some(stat));
        assert!(ProcessStat::parse(&STAT.replace("4194560", "2129984")).unwrap().is_of_kernel);
        for wrong in ["", "7", "7 (a) S", "7 (a) S x 7 7 0 -1 1 1 2 3 4 5 6 7 8 20 0 1 0 1 9"] {
            assert_eq!(ProcessStat::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_child_that_has_the_socket_is_found_until_it_ends() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (ours, theirs) = (OwnedFd::from(ours), OwnedFd::from(theirs));
        let [first, second] = [&ours, &theirs].map(|end| TemporaryRelay::new(end).unwrap());
        // The child of a fork in another test has all sockets for a moment.
        let await_holders = |expected: [bool; 2]| {
            smc_test_support::eventually("the holders", || {
                may_have(&[&first, &second]) == expected
            });
        };
        await_holders([false, false]);
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(theirs).spawn().unwrap();
        assert!(ours.as_raw_fd() > 2);
        await_holders([false, true]);
        drop(child.stdin.take());
        child.wait().unwrap();
        await_holders([false, false]);
    }

    #[test]
    fn what_descends_from_this_process_may_have_inherited_and_others_have_not() {
        let this = raw::getpid();
        let own = ProcessStat::of(this).unwrap().begun;
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let pid = child.id() as i32;
        let mut processes = Processes::new(this).unwrap();
        assert!(processes.may_have_inherited(pid, own));
        // Ancestors are older than the socket.
        let own_processes = processes.own.clone();
        assert!(own_processes.iter().all(|pid| !processes.may_have_inherited(*pid, own + 1)));
        let stranger = ProcessStat { parent: 3, is_of_kernel: false, begun: own + 10 };
        let older = ProcessStat { parent: 1, is_of_kernel: false, begun: 0 };
        processes.known.extend([(2_000_000_001, Some(stranger)), (3, Some(older))]);
        processes.own.retain(|pid| *pid != 3);
        assert!(!processes.may_have_inherited(2_000_000_001, own + 5));
        processes.own.push(3);
        assert!(processes.may_have_inherited(2_000_000_001, own + 5), "its parent has ended");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
