// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kinds of descriptors passed by a front end.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::{Errno, ReadWriteFlags};

use ism_device::shm::Kicker;

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Whether a file is an eventfd.
///
/// A pipe or a socket instead could block the reading or writing thread, or raise SIGPIPE. Asking the
/// kernel's asynchronous IO, limited to eventfds, needs no file of `/proc`. With `/proc` a compromised daemon
/// would see more than its own descriptors.
pub(super) fn is_eventfd(file: &File) -> bool {
    let answer = kicker().and_then(|kicker| kicker.is_eventfd(file.as_fd()).ok());
    // Without asynchronous IO: accept any descriptor of an anonymous inode. Other kinds of anonymous inodes
    // neither block nor raise signals in the uses here.
    answer.unwrap_or_else(|| {
        rustix::fs::fstat(file).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == 0)
    })
}

/// Recognises eventfds. Created by the first call: the sandbox forbids later creation.
pub(super) fn kicker() -> Option<&'static Kicker> {
    static KICKER: OnceLock<Option<Kicker>> = OnceLock::new();
    KICKER.get_or_init(|| Kicker::new().ok()).as_ref()
}

/// Whether this eventfd counts down by one per read (EFD_SEMAPHORE). The counter is as before, or at least 1
/// if not zero before.
///
/// A thread waiting for kicks would find such an eventfd readable for up to 2^64 reads.
pub(super) fn is_semaphore(file: &File) -> bool {
    let mut before = [0; 8];
    let had_count = take(file, &mut before).is_ok();
    for _ in 0..2 {
        // Only a semaphore can be full now. If the owner fills a counter at this moment, only the owner's own
        // thread blocks.
        let mut poll = [PollFd::new(file, PollFlags::OUT)];
        if rustix::event::poll(&mut poll, Some(&AT_ONCE)) != Ok(1) {
            return true;
        }
        let _ = rustix::io::write(file, &1u64.to_ne_bytes());
    }
    let mut count = [0; 8];
    let semaphore = take(file, &mut count).is_ok() && u64::from_ne_bytes(count) == 1;
    // More than two: a kick came meanwhile.
    if !semaphore && (had_count || u64::from_ne_bytes(count) > 2) {
        let _ = rustix::io::write(file, &1u64.to_ne_bytes());
    }
    semaphore
}

/// Takes the count of a kick eventfd without ever blocking.
///
/// The front end has the same eventfd, so it could empty the counter between a poll and a read here, and also
/// clear O_NONBLOCK. `RWF_NOWAIT` belongs to this call alone.
pub(super) fn drain_eventfd(file: &File) {
    let _ = take(file, &mut [0; 8]);
}

/// Reads the counter if not zero.
fn take(file: &File, count: &mut [u8; 8]) -> Result<usize, Errno> {
    let whole_file = u64::MAX; // -1: no position, as read()
    let read = rustix::io::preadv2(
        file,
        &mut [IoSliceMut::new(count)],
        whole_file,
        ReadWriteFlags::NOWAIT,
    );
    if read != Err(Errno::OPNOTSUPP) {
        return read;
    }
    // Before Linux 5.8.
    let mut poll = [PollFd::new(file, PollFlags::IN)];
    match rustix::event::poll(&mut poll, Some(&AT_ONCE)) {
        Ok(1) => rustix::io::read(file, count),
        _ => Err(Errno::AGAIN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::OwnedFd;

    #[test]
    fn tells_eventfds_from_everything_else() {
        let event = File::from(eventfd(0, EventfdFlags::empty()).unwrap());
        let (pipe, _) = std::io::pipe().unwrap();
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC);
        assert!(is_eventfd(&event));
        assert!(!is_eventfd(&File::from(OwnedFd::from(pipe))));
        assert!(!is_eventfd(&File::from(epoll.unwrap())));
        assert!(!is_eventfd(&File::open("/dev/null").unwrap()));
    }

    #[test]
    fn tells_semaphores_from_counters_and_loses_no_kick() {
        let semaphore = File::from(eventfd(0, EventfdFlags::SEMAPHORE).unwrap());
        assert!(is_semaphore(&semaphore));
        let full = File::from(eventfd(0, EventfdFlags::SEMAPHORE).unwrap());
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!(is_semaphore(&full));

        let counter = File::from(eventfd(0, EventfdFlags::empty()).unwrap());
        assert!(!is_semaphore(&counter));
        let mut count = [0; 8];
        assert_eq!(take(&counter, &mut count), Err(Errno::AGAIN), "nobody has kicked");
        rustix::io::write(&counter, &7u64.to_ne_bytes()).unwrap();
        assert!(!is_semaphore(&counter));
        assert_eq!(take(&counter, &mut count), Ok(8));
        assert_eq!(u64::from_ne_bytes(count), 1, "the kick is still there");
    }

    #[test]
    fn draining_empties_and_never_blocks() {
        let event = File::from(eventfd(3, EventfdFlags::empty()).unwrap());
        drain_eventfd(&event);
        drain_eventfd(&event); // empty and blocking: would hang
        let mut poll = [rustix::event::PollFd::new(&event, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut poll, Some(&now)), Ok(0));
    }
}
