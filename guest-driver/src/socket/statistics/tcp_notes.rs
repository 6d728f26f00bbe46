// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The reasons for TCP connections handed back to the program, noted in a file mapped by the process.
//!
//! A program that never uses SMC opens no stack, and has no thread to answer. So the reasons are in a
//! file beside the sockets of statistics: one word per descriptor, and a count per reason, only
//! growing. Noting a reason costs a store and an addition, and no system call. A reader looks up the
//! words of the process's sockets known to the kernel, so words of closed ones mean nothing.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ism_sys::{SharedMem, SharedSlice};
use rustix::fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock};

use super::names;
use super::paths::in_place_of_planted;
use super::reason::{Reason, Side};
use smc_info::Fallback;

/// First word of the file: its kind, and the version of its layout.
const MAGIC: u64 = u64::from_le_bytes(*b"SMCtcpn2");
/// Offset of the file's mark [`HELD`].
const HOLDING: usize = 8;
/// The file has a lock for as long as a process has it mapped. The lock belongs to the open file, kept
/// by the mapping after the descriptor is closed, so the kernel removes the lock when the process ends.
const HELD: u64 = 1;
/// The most different reasons. Further ones share the last place.
const REASONS: usize = 32;
/// The most bytes of the sentence of a reason.
const TEXT: usize = 232;
/// Bytes of a reason: its key, the length of the sentence, the connections, and the sentence.
const REASON: usize = 24 + TEXT;
/// Offset of the number of connections in a reason.
const COUNT: usize = 16;
/// First byte of the reasons.
const FIRST_REASON: usize = 64;
/// Descriptors with places of their own. Higher ones share them; the later note holds.
const PLACES: usize = 1 << 12;
/// First byte of the places.
const FIRST_PLACE: usize = FIRST_REASON + REASONS * REASON;
/// Bytes of the file.
const SIZE: usize = FIRST_PLACE + 8 * PLACES;
/// A bit set in every key: 0 means no key.
const SET: u64 = 1 << 63;
const SUFFIX: &str = ".tcp";

/// The reasons of one process, written by it.
#[derive(Debug)]
pub struct TcpReasons {
    path: PathBuf,
    memory: SharedSlice,
}

/// The file of a process in a directory of statistics sockets.
fn path_in(directory: &Path) -> PathBuf {
    directory.join(names::own(SUFFIX))
}

/// The process id in the name of such a file.
pub(super) fn pid_of(name: &str) -> Option<i32> {
    names::pid_of(name, SUFFIX)
}

/// Whether no process writes to such a file any more, in any namespace. `otherwise`: the assumption for
/// a file that does not tell.
pub(super) fn is_left(path: &Path, otherwise: impl FnOnce() -> bool) -> bool {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::options().read(true).custom_flags(flags.bits() as i32).open(path);
    let is_held = |file: &File| {
        let mut word = [0; 8];
        let is_file = file.metadata().is_ok_and(|file| file.is_file());
        is_file
            && file.read_exact_at(&mut word, HOLDING as u64).is_ok()
            && u64::from_ne_bytes(word) == HELD
    };
    match file {
        Ok(file) if is_held(&file) => {
            flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        }
        _ => otherwise(),
    }
}

/// The place of a descriptor's word.
fn place(fd: i32) -> Option<usize> {
    Some(FIRST_PLACE + 8 * (usize::try_from(fd).ok()? % PLACES))
}

impl TcpReasons {
    /// Makes the file of this process in a directory for such files.
    ///
    /// # Errors
    /// The file cannot be made, filled or mapped.
    pub fn create(directory: &Path) -> io::Result<TcpReasons> {
        let mut path = path_in(directory);
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = match options.open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                match in_place_of_planted(&path, |kind| kind.is_file()) {
                    Some(other) => path = other,
                    // An earlier process had this id.
                    None => std::fs::remove_file(&path)?,
                }
                options.open(&path)?
            }
            opened => opened?,
        };
        // Without the room on the disk, a store would kill the process.
        let made = ism_sys::check_file_size(SIZE as u64)
            .and_then(|()| Ok(fallocate(&file, FallocateFlags::empty(), 0, SIZE as u64)?))
            .and_then(|()| SharedMem::from_fd(&file, SIZE).map_err(io::Error::other))
            .and_then(|memory| memory.slice(0, SIZE).map_err(io::Error::other));
        match made {
            Ok(memory) => {
                let notes = TcpReasons { path, memory };
                if let (Ok(()), Some(word)) =
                    (flock(&file, FlockOperation::LockShared), notes.word(HOLDING))
                {
                    word.store(HELD, Ordering::Release);
                }
                if let Some(word) = notes.word(0) {
                    word.store(MAGIC, Ordering::Release);
                }
                Ok(notes)
            }
            Err(error) => {
                let _ = std::fs::remove_file(&path);
                Err(error)
            }
        }
    }

    /// Removes the file of this process. The memory stays.
    pub fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
    }

    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.memory.atomic_u64(at).ok()
    }

    /// Notes the reason for TCP on a descriptor's connection, and counts the connection unless already
    /// noted.
    pub fn note(&self, fd: i32, why: &Fallback) {
        let (Some(index), Some(at)) = (self.index(why), place(fd)) else { return };
        if !self.has(fd)
            && let Some(count) = self.word(FIRST_REASON + index * REASON + COUNT)
        {
            count.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(word) = self.word(at) {
            word.store((fd as u64) << 8 | (index as u64 + 1), Ordering::Release);
        }
    }

    /// Whether there is a note on a descriptor.
    pub fn has(&self, fd: i32) -> bool {
        let word = place(fd).and_then(|at| self.word(at));
        word.is_some_and(|word| is_of(word.load(Ordering::Relaxed), fd))
    }

    /// Removes the note on a descriptor, now another connection's.
    pub fn forget(&self, fd: i32) {
        if self.has(fd)
            && let Some(word) = place(fd).and_then(|at| self.word(at))
        {
            word.store(0, Ordering::Release);
        }
    }

    /// The place of a reason, entered by its first connection.
    fn index(&self, why: &Fallback) -> Option<usize> {
        let own = key(why);
        for index in 0..REASONS {
            let is_last = index + 1 == REASONS;
            let key = if is_last { SET } else { own };
            let at = FIRST_REASON + index * REASON;
            let word = self.word(at)?;
            let found = match word.load(Ordering::Acquire) {
                0 => word.compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire),
                found => Err(found),
            };
            match found {
                Ok(_) => {
                    let text = if is_last { "several reasons".into() } else { why.to_string() };
                    let bytes = text.as_bytes();
                    let bytes = bytes.get(..bytes.len().min(TEXT))?;
                    self.memory.copy_in(at + REASON - TEXT, bytes).ok()?;
                    self.word(at + 8)?.store(bytes.len() as u64, Ordering::Release);
                    return Some(index);
                }
                Err(found) if found == key => return Some(index),
                Err(_) => {}
            }
        }
        None
    }
}

fn is_of(word: u64, fd: i32) -> bool {
    word & 0xff != 0 && u64::try_from(fd).is_ok_and(|fd| word >> 8 == fd)
}

/// The key of a reason: the number, and the end.
fn key(why: &Fallback) -> u64 {
    let side = match Side::of(why) {
        Side::Here => 0,
        Side::Peer => 1,
    };
    SET | side << 32 | u64::from(why.code().value())
}

/// The notes of a process, as read by another one. The process may write anything there.
#[derive(Debug)]
pub struct TcpReasonReader {
    /// Each reason with its number of connections so far.
    reasons: Vec<Option<(Arc<Reason>, u64)>>,
    bytes: Vec<u8>,
}

impl TcpReasonReader {
    /// The process with such a file, by the name in the path: the id in the process's own view.
    pub fn process_of(path: &Path) -> Option<u32> {
        let pid = path.file_name().and_then(|name| name.to_str()).and_then(pid_of)?;
        u32::try_from(pid).ok()
    }

    /// Reads the file of a process, opened for reading.
    ///
    /// # Errors
    /// The file cannot be read, or is of another kind.
    pub fn read(file: &File) -> io::Result<TcpReasonReader> {
        let mut bytes = vec![0; SIZE];
        file.read_exact_at(&mut bytes, 0)?;
        if word(&bytes, 0) != Some(MAGIC) {
            return Err(ErrorKind::InvalidData.into());
        }
        let reasons = (0..REASONS).map(|index| {
            let at = FIRST_REASON + index * REASON;
            let (key, length) = (word(&bytes, at)?, word(&bytes, at + 8)?);
            let count = word(&bytes, at + COUNT)?;
            let length = usize::try_from(length).ok().filter(|length| *length <= TEXT)?;
            if key & SET == 0 {
                return None;
            }
            let side = if key >> 32 & 1 == 0 { Side::Here } else { Side::Peer };
            let says = String::from_utf8_lossy(bytes.get(at + REASON - TEXT..)?.get(..length)?);
            // The low half of the key.
            let reason = Arc::new(Reason::new(key as u32, side.word(), &says, 1));
            Some((reason, count))
        });
        Ok(TcpReasonReader { reasons: reasons.collect(), bytes })
    }

    /// The reasons with the numbers of the process's connections, ended ones included.
    pub fn counts(&self) -> Vec<Reason> {
        let counted = self.reasons.iter().flatten().filter(|(_, count)| *count > 0);
        counted.map(|(reason, count)| Reason { count: *count, ..Reason::clone(reason) }).collect()
    }

    /// The reason noted on a descriptor of the process.
    pub fn reason(&self, fd: i32) -> Option<&Arc<Reason>> {
        let word = word(&self.bytes, place(fd)?)?;
        let index = usize::try_from(word & 0xff).ok()?.checked_sub(1)?;
        self.reasons.get(index).filter(|_| is_of(word, fd))?.as_ref().map(|(reason, _)| reason)
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use smc_core::handshake::{DeclineCode, FallbackReason};

    use super::*;

    #[test]
    fn a_reader_finds_what_was_noted_and_believes_nothing_else() {
        let dir = smc_test_support::TestDir::new();
        // An earlier process had the id.
        std::fs::write(path_in(&dir), "old").unwrap();
        let notes = TcpReasons::create(&dir).unwrap();
        let peer = Fallback::from(FallbackReason::PeerNotSmc);
        for (fd, why) in [(7, &Fallback::Policy), (8, &peer), (9, &Fallback::TooShort)] {
            notes.note(fd, why);
        }
        let shared = 7 + PLACES as i32;
        assert!(notes.has(7) && !notes.has(shared) && !notes.has(-1));
        notes.forget(shared);
        notes.forget(9);
        let path = path_in(&dir);
        let process_of = |path: &Path| TcpReasonReader::process_of(path);
        assert_eq!(process_of(&path), Some(std::process::id()));
        assert_eq!(process_of(Path::new("/x/process-7-a.tcp")), Some(7));
        assert_eq!(process_of(Path::new("/x/process-7.sock")), None);
        let read = |path: &Path| TcpReasonReader::read(&File::open(path).unwrap());
        let says = |fd| {
            let found = read(&path).unwrap();
            found.reason(fd).map(|reason| (reason.side.clone(), reason.says.clone()))
        };
        assert_eq!(says(7), Some(("here".to_owned(), Fallback::Policy.to_string())));
        assert_eq!(says(8), Some(("peer".to_owned(), peer.to_string())));
        assert_eq!([says(9), says(shared), says(-1)], [None, None, None]);
        // Ended connections stay counted, and a second note on a connection does not count.
        notes.note(8, &Fallback::Policy);
        notes.forget(8);
        notes.note(8, &peer);
        let counts = |code: DeclineCode| {
            let counts = read(&path).unwrap().counts();
            counts.iter().find(|reason| reason.code == code.value()).map(|reason| reason.count)
        };
        let codes = [DeclineCode::Policy, DeclineCode::PeerNoSmc, DeclineCode::TooShort];
        assert_eq!(codes.map(counts), [Some(1), Some(2), Some(1)]);
        // The later note has the place.
        notes.note(shared, &Fallback::Policy);
        assert!(says(7).is_none() && says(shared).is_some());

        // Each byte of the reasons set to anything.
        for value in [0, 1, 0x7f, 0xff] {
            let planted = dir.join("planted");
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[8..].fill(value);
            std::fs::write(&planted, &bytes).unwrap();
            assert!((0..100).all(|fd| read(&planted).unwrap().reason(fd).is_none()));
            std::fs::write(&planted, &bytes[..SIZE - 1]).unwrap();
            assert!(read(&planted).is_err(), "too short");
        }
        notes.remove();
        assert!(!path.exists());
        notes.note(10, &Fallback::Policy);
    }

    #[test]
    fn what_another_user_has_put_in_the_place_of_the_file_is_left_there() {
        let dir = smc_test_support::TestDir::new();
        // No file of this kind, like another user's in a directory where each user removes only its
        // own.
        std::fs::create_dir(path_in(&dir)).unwrap();
        let notes = TcpReasons::create(&dir).unwrap();
        notes.note(7, &Fallback::Policy);
        assert_eq!(TcpReasonReader::process_of(&notes.path), Some(std::process::id()));
        assert!(path_in(&dir).is_dir() && notes.path.is_file());
        let read = TcpReasonReader::read(&File::open(&notes.path).unwrap()).unwrap();
        assert!(read.reason(7).is_some());
        notes.remove();
        assert!(!notes.path.exists());
    }

    #[test]
    fn more_reasons_than_places_are_counted_together() {
        let dir = smc_test_support::TestDir::new();
        let notes = TcpReasons::create(&dir).unwrap();
        for index in 0..REASONS - 1 {
            let word = notes.word(FIRST_REASON + index * REASON).unwrap();
            word.store(SET | index as u64, Ordering::Relaxed);
        }
        for fd in [3, 4, 4] {
            notes.note(fd, &Fallback::Policy);
        }
        let counts = TcpReasonReader::read(&File::open(path_in(&dir)).unwrap()).unwrap().counts();
        let [several] = &counts[..] else { panic!("{counts:?}") };
        assert_eq!((several.code, several.count), (0, 2));
        notes.remove();
    }
}
