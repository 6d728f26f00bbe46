// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The knowledge about servers kept for later programs of the same user on this machine.
//!
//! Each `smc run` makes a table of its own. Without more, a loop of programs with one connection each
//! would begin to learn again with every program. So the table begins with the entries of a file in a
//! private directory of the user, and a process writes the entry of a server into the file when the entry
//! has learned something. No process maps the file: a process of another user may have inherited a table,
//! and could shrink a file under the others.
//!
//! The file is a claim. Its owner and its permissions are checked, its size is bounded, and an entry counts
//! for [`LASTING`] after its last change. A wrong entry costs speed only.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ism_sys::{check_file_size, effective_user, is_fatal, read_clock};
use rustix::fs::OFlags;
use rustix::time::ClockId;

use super::layout::{ENTRY_SIZE, GROUPS, MAGIC, SIZE, WAYS, entry, group};

/// How long an entry counts. A user of a server with short connections may later want a long one.
pub(super) const LASTING: Duration = Duration::from_secs(600);

/// Entries read by one call. The number of all entries is a multiple.
const PART: usize = 8 * WAYS;

/// The words of an entry.
pub(super) type Words = [u64; ENTRY_SIZE / 8];

/// The file, as used by one process.
#[derive(Debug)]
pub(super) struct TrafficFile {
    path: PathBuf,
    /// An attempt to write has failed, so there will be no further one.
    failed: AtomicBool,
}

impl TrafficFile {
    pub(super) fn new(path: &Path) -> TrafficFile {
        TrafficFile { path: path.into(), failed: AtomicBool::new(false) }
    }

    /// Opens the file for reading, too.
    ///
    /// # Errors
    /// The file is not a private file of this user, or open(2) fails.
    fn open(&self, options: &mut OpenOptions) -> io::Result<File> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let options = options.read(true).write(true).mode(0o600);
        let file = options.custom_flags(flags.bits().cast_signed()).open(&self.path)?;
        let found = file.metadata()?;
        let is_private = found.is_file()
            && found.uid() == effective_user()
            && found.mode() & 0o077 == 0
            && found.nlink() == 1;
        if is_private { Ok(file) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    /// The lasting entries, each with its index. Makes the file if it is missing or of another version.
    ///
    /// # Errors
    /// The file cannot be made, or is not a private file of this user.
    pub(super) fn load(&self) -> io::Result<Vec<(usize, Words)>> {
        let file = self.open(OpenOptions::new().create(true))?;
        let mut magic = [0; 8];
        let is_known = file.metadata()?.len() == SIZE as u64
            && file.read_exact_at(&mut magic, 0).is_ok()
            && magic == MAGIC.to_ne_bytes();
        if !is_known {
            check_file_size(SIZE as u64)?;
            file.set_len(0)?;
            file.set_len(SIZE as u64)?;
            file.write_all_at(&MAGIC.to_ne_bytes(), 0)?;
            return Ok(Vec::new());
        }
        let now = now();
        let mut found = Vec::new();
        // In parts: fresh memory for the whole file would take longer than the calls.
        let mut part = [0; PART * ENTRY_SIZE];
        for first in (0..GROUPS * WAYS).step_by(PART) {
            file.read_exact_at(&mut part, ((1 + first) * ENTRY_SIZE) as u64)?;
            let entries = (first..).zip(part.chunks_exact(ENTRY_SIZE));
            found.extend(entries.filter_map(|(at, bytes)| Some((at, lasting(at, bytes, now)?))));
        }
        Ok(found)
    }

    /// Writes an entry, unless a write has failed before. The program may have become another user's, or
    /// have forbidden system calls.
    pub(super) fn save(&self, at: usize, mut words: Words) {
        if self.failed.load(Ordering::Relaxed) {
            return;
        }
        if let Some(saved) = words.get_mut(entry::SAVED) {
            *saved = now();
        }
        if let Err(error) = self.write(at, &words) {
            tracing::debug!(%error, path = %self.path.display(), "connections are not remembered");
            self.failed.store(true, Ordering::Relaxed);
        }
    }

    fn write(&self, at: usize, words: &Words) -> io::Result<()> {
        if is_fatal(libc::SYS_pwrite64) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        check_file_size(SIZE as u64)?;
        let file = self.open(&mut OpenOptions::new())?;
        let mut magic = [0; 8];
        file.read_exact_at(&mut magic, 0)?;
        // After a change of the root directory, the path may be another file's.
        if magic != MAGIC.to_ne_bytes() || at >= GROUPS * WAYS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        file.write_all_at(&bytes, ((1 + at) * ENTRY_SIZE) as u64)
    }
}

/// The entry at an index of the file, if the entry belongs there and still counts. Numbers of connections
/// are those of a table, and begin anew.
fn lasting(at: usize, bytes: &[u8], now: u64) -> Option<Words> {
    let mut words: Words = [0; ENTRY_SIZE / 8];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().ok()?);
    }
    let get = |word: usize| words.get(word).copied().unwrap_or_default();
    // A clock of seconds since the start of the machine: an entry of an earlier start may be in the future.
    let age = now.checked_sub(get(entry::SAVED))?;
    let hash = get(entry::HASH);
    if hash == 0 || age > LASTING.as_secs() || !group(hash).any(|place| place == at) {
        return None;
    }
    for counter in [entry::SMC, entry::TCP, entry::SAMPLES, entry::USED, entry::FORCED] {
        if let Some(word) = words.get_mut(counter) {
            *word = 0;
        }
    }
    Some(words)
}

/// Seconds since the start of the machine.
fn now() -> u64 {
    read_clock(ClockId::Boottime).tv_sec.cast_unsigned()
}
