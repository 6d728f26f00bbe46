// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What kind of descriptor did a front end pass?

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::{Errno, ReadWriteFlags};

use ism_device::shm::Kicker;

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Whether this is an eventfd.
///
/// A pipe or a socket in its place could block the thread that reads or writes it, or raise SIGPIPE.
/// The kernel's asynchronous IO takes eventfds only, so it is asked. Its answer needs no file of
/// `/proc`, by which a daemon that was taken over would see more than its own descriptors.
pub(super) fn is_eventfd(file: &File) -> bool {
    let answer = kicker().and_then(|kicker| kicker.is_eventfd(file.as_fd()).ok());
    // Without asynchronous IO: one of the descriptors that have no file behind them. The others of
    // these neither block nor raise signals where this is used.
    answer.unwrap_or_else(|| {
        rustix::fs::fstat(file).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == 0)
    })
}

/// What recognises eventfds. The first call makes it: the sandbox allows none later.
pub(super) fn kicker() -> Option<&'static Kicker> {
    static KICKER: OnceLock<Option<Kicker>> = OnceLock::new();
    KICKER.get_or_init(|| Kicker::new().ok()).as_ref()
}

/// Whether this eventfd counts down by one per read (EFD_SEMAPHORE). Its counter is as before, at
/// least 1 if there was a count.
///
/// Such an eventfd stays readable for up to 2^64 reads of a thread that waits for kicks.
pub(super) fn is_semaphore(file: &File) -> bool {
    let mut before = [0; 8];
    let had_count = take(file, &mut before).is_ok();
    for _ in 0..2 {
        // Only a semaphore can be full now. One that its owner fills at this moment blocks the
        // owner's own thread.
        let mut poll = [PollFd::new(file, PollFlags::OUT)];
        if rustix::event::poll(&mut poll, Some(&AT_ONCE)) != Ok(1) {
            return true;
        }
        let _ = rustix::io::write(file, &1u64.to_ne_bytes());
    }
    let mut count = [0; 8];
    let semaphore = take(file, &mut count).is_ok() && u64::from_ne_bytes(count) == 1;
    // More than two: somebody kicked meanwhile.
    if !semaphore && (had_count || u64::from_ne_bytes(count) > 2) {
        let _ = rustix::io::write(file, &1u64.to_ne_bytes());
    }
    semaphore
}

/// Takes the count of a kick eventfd without ever blocking.
///
/// The front end has the same eventfd and could empty it between our poll and our read, and
/// whether a read then blocks is a flag that it can change as well. `RWF_NOWAIT` is ours alone.
pub(super) fn drain_eventfd(file: &File) {
    let _ = take(file, &mut [0; 8]);
}

/// Reads the counter if it is not zero.
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
