//! What kind of descriptor did a front end pass?

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::AsRawFd;

use rustix::io::{Errno, ReadWriteFlags};

/// Whether this is an eventfd.
///
/// A pipe or a socket in its place could block the thread that reads or writes it, or raise SIGPIPE. There
/// is no call that asks the question; the name of an anonymous inode is the kernel's own answer and
/// cannot be forged (a file of that name shows up with its directory). Without `/proc` nothing is
/// an eventfd.
pub(super) fn is_eventfd(file: &File) -> bool {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::readlink(link, Vec::new())
        .is_ok_and(|target| target.as_bytes() == b"anon_inode:[eventfd]")
}

/// Takes the count of a kick eventfd without ever blocking.
///
/// The front end has the same eventfd and could empty it between our poll and our read, and
/// whether a read then blocks is a flag that it can change as well. `RWF_NOWAIT` is ours alone.
pub(super) fn drain_eventfd(file: &File) {
    let mut count = [0; 8];
    let whole_file = u64::MAX; // -1: no position, as read()
    let read = rustix::io::preadv2(
        file,
        &mut [IoSliceMut::new(&mut count)],
        whole_file,
        ReadWriteFlags::NOWAIT,
    );
    if read == Err(Errno::OPNOTSUPP) {
        // Before Linux 5.8.
        let mut poll = [rustix::event::PollFd::new(file, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        if rustix::event::poll(&mut poll, Some(&now)) == Ok(1) {
            let _ = rustix::io::read(file, &mut count);
        }
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
    fn draining_empties_and_never_blocks() {
        let event = File::from(eventfd(3, EventfdFlags::empty()).unwrap());
        drain_eventfd(&event);
        drain_eventfd(&event); // empty and blocking: would hang
        let mut poll = [rustix::event::PollFd::new(&event, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut poll, Some(&now)), Ok(0));
    }
}
