// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files of /proc. Names in the files are chosen by processes: not necessarily UTF-8, and without
//! bound.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// Limit of a line in bytes; the rest of the line is skipped.
const MAX_LINE: u64 = 32 << 10;
/// Limit in bytes of a file read as a whole.
const MAX_FILE: u64 = 1 << 20;

/// Passes the lines of a file to `each` until `each` returns `false`. Only one line is in memory.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn byte_lines(
    path: impl AsRef<Path>,
    mut each: impl FnMut(&[u8]) -> bool,
) -> io::Result<()> {
    let mut file = BufReader::with_capacity(64 << 10, File::open(path)?);
    let mut line = Vec::new();
    loop {
        line.clear();
        if file.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if line.last() == Some(&b'\n') {
            line.pop();
        } else if line.len() as u64 == MAX_LINE {
            file.skip_until(b'\n')?;
        }
        if !each(&line) {
            return Ok(());
        }
    }
}

/// Like [`byte_lines`], with invalid UTF-8 replaced.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn lines(path: impl AsRef<Path>, mut each: impl FnMut(&str) -> bool) -> io::Result<()> {
    byte_lines(path, |line| each(&String::from_utf8_lossy(line)))
}

/// The beginning of a file.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn bytes(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The name of a process's program; empty if the process has ended.
pub(crate) fn program(pid: u32) -> String {
    let name = bytes(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(&name).trim_end_matches('\n').to_owned()
}

/// The inode of the socket behind a link of /proc/PID/fd.
pub(crate) fn socket_inode(link: impl AsRef<Path>) -> Option<u64> {
    let target = fs::read_link(link).ok()?;
    target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// The identity of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// Process id in the innermost PID namespace.
    pub(crate) own_pid: u32,
    /// Users of the process: real, effective, saved, and file system user.
    pub(crate) users: Vec<u32>,
}

impl Status {
    /// `None`: the process has ended.
    pub(crate) fn of(pid: u32) -> Option<Status> {
        let mut status = Status { own_pid: pid, users: Vec::new() };
        let read = lines(format!("/proc/{pid}/status"), |line| {
            if let Some(pids) = line.strip_prefix("NSpid:") {
                let own = pids.split_whitespace().next_back();
                status.own_pid = own.and_then(|own| own.parse().ok()).unwrap_or(pid);
                return false;
            }
            if let Some(users) = line.strip_prefix("Uid:") {
                status.users = users.split_whitespace().filter_map(|id| id.parse().ok()).collect();
            }
            true
        });
        read.ok().filter(|()| !status.users.is_empty())?;
        Some(status)
    }

    /// Whether the process may have made a file of this user. A file of root may be from a time
    /// when the process was root.
    pub(crate) fn can_have_made(&self, owner: u32) -> bool {
        owner == 0 || self.users.contains(&owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_may_be_no_text_and_of_any_length() {
        let path = std::env::temp_dir().join(format!("smc-lines-{}", std::process::id()));
        let long = [vec![b'x'; MAX_LINE as usize + 7], b"\nlast".to_vec()].concat();
        fs::write(&path, [b"a\xff\xfeb\n\n".to_vec(), long].concat()).unwrap();
        let mut seen = Vec::new();
        let mut look = |stop: &str| {
            seen.clear();
            lines(&path, |line| {
                seen.push(line.to_owned());
                line != stop
            })
            .unwrap();
            seen.clone()
        };
        let all = look("");
        assert_eq!(all, ["a\u{fffd}\u{fffd}b", ""]);
        let all = look("none");
        let lengths: Vec<_> = all.iter().map(String::len).collect();
        assert_eq!(lengths, [8, 0, MAX_LINE as usize, 4], "{lengths:?}");
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn this_process_is_known() {
        let pid = std::process::id();
        let status = Status::of(pid).unwrap();
        assert!(status.can_have_made(rustix::process::geteuid().as_raw()));
        assert!(!status.can_have_made(4_294_967_294));
        assert!(!program(pid).is_empty() && program(u32::MAX).is_empty());
        assert_eq!(Status::of(u32::MAX), None);
    }
}
