// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The backend channel: answers requests of the daemon, and notices when the daemon goes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags};
use vhost::vhost_user::{
    Error as VhostUserError, FrontendReqHandler, HandlerResult, VhostUserFrontendReqHandler,
};
use virtio_ism_abi::{DOORBELL_SHMID, WINDOW_SHMID};

use crate::transport::doorbells::{Doorbells, Slab};
use crate::virtqueue::Health;
use ism_sys::{
    ForkLocks, LockGuardList, MapError, OnceBox, PollInterest, Reservation, duplicate, is_free,
    lock, try_hold, wait,
};

/// When the next step of the set-up has to be done; `None`: the device is set up. Requests of the
/// `vhost` crate have no timeout of their own.
#[derive(Debug)]
pub(super) struct StepDeadline(Mutex<Option<Instant>>);

impl ForkLocks for StepDeadline {
    fn is_unlocked(&self) -> bool {
        is_free(&self.0)
    }
}

impl StepDeadline {
    /// The next step may take this long.
    pub(super) fn within(timeout: Duration) -> Arc<StepDeadline> {
        Arc::new(StepDeadline(Mutex::new(Some(Instant::now() + timeout))))
    }

    /// The step is done, and the next one may take this long.
    pub(super) fn extend(&self, timeout: Duration) {
        *lock(&self.0) = Some(Instant::now() + timeout);
    }

    /// The device is set up.
    pub(super) fn remove(&self) {
        *lock(&self.0) = None;
    }

    fn left(&self) -> Option<Duration> {
        lock(&self.0).map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }
}

/// Answers SHMEM_MAP and SHMEM_UNMAP.
#[derive(Debug, Default)]
pub(super) struct WindowServer {
    window: OnceBox<Arc<Reservation>>,
    doorbells: OnceBox<Arc<Doorbells>>,
}

impl WindowServer {
    /// Sets the window. Until then, requests are refused.
    pub(super) fn open(&self, window: &Arc<Reservation>) {
        let _ = self.window.set(Arc::clone(window));
    }

    /// Takes doorbells from now on.
    pub(super) fn take_doorbells(&self, doorbells: &Arc<Doorbells>) {
        let _ = self.doorbells.set(Arc::clone(doorbells));
    }

    /// Handles a SHMEM_MAP without a mapping, with the doorbell of a slab.
    fn add_doorbell(&self, request: &VhostUserMMap, fd: &dyn AsRawFd) -> HandlerResult<u64> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let doorbells = self.doorbells.get().ok_or_else(invalid)?;
        let slab = Slab {
            offset: request.shm_offset,
            number: u32::try_from(request.fd_offset).map_err(|_| invalid())?,
            is_own: request.flags & VhostUserMMapFlags::WRITABLE.bits() == 0,
        };
        doorbells.add(slab, duplicate(fd)?)?;
        Ok(0)
    }

    fn window(&self, shmid: u8) -> io::Result<&Reservation> {
        match self.window.get() {
            Some(window) if shmid == WINDOW_SHMID => Ok(window),
            _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }
}

impl VhostUserFrontendReqHandler for WindowServer {
    fn shmem_map(&self, request: &VhostUserMMap, fd: &dyn AsRawFd) -> HandlerResult<u64> {
        if request.shmid == DOORBELL_SHMID {
            return self.add_doorbell(request, fd);
        }
        let (offset, len, fd_offset) = (request.shm_offset, request.len, request.fd_offset);
        let result = self.window(request.shmid).and_then(|window| {
            let fd = duplicate(fd)?;
            if request.flags & VhostUserMMapFlags::WRITABLE.bits() == 0 {
                return Err(to_io(MapError::ReadOnly));
            }
            window.map(offset, len, fd.as_fd(), fd_offset).map_err(to_io)
        });
        if let Err(error) = &result {
            tracing::warn!(offset, len, %error, "refused to map");
        }
        result.map(|()| 0)
    }

    fn shmem_unmap(&self, request: &VhostUserMMap) -> HandlerResult<u64> {
        let (offset, len) = (request.shm_offset, request.len);
        let result =
            self.window(request.shmid).and_then(|window| window.unmap(offset, len).map_err(to_io));
        match (&result, self.doorbells.get()) {
            (Err(error), _) => tracing::warn!(offset, len, %error, "refused to unmap"),
            (Ok(()), Some(doorbells)) => doorbells.remove(offset),
            (Ok(()), None) => {}
        }
        result.map(|()| 0)
    }
}

/// Converts an error to the errno of the answer, and logs its text.
fn to_io(error: MapError) -> io::Error {
    tracing::debug!(%error, "window");
    let errno = match &error {
        MapError::Mmap(source) => source.raw_os_error().unwrap_or(libc::EIO),
        _ => libc::EINVAL,
    };
    io::Error::from_raw_os_error(errno)
}

/// Most requests of one [`BackendChannel::serve_now`].
const REQUESTS: usize = 1024;

/// The backend channel and the main socket, served by one thread until either ends.
pub(super) struct BackendChannel {
    /// Locked only during a request, for a later takeover by the child of a fork.
    handler: Mutex<FrontendReqHandler<WindowServer>>,
    requests: Arc<OwnedFd>,
    main: Arc<OwnedFd>,
    health: Arc<Health>,
    deadline: Arc<StepDeadline>,
}

impl ForkLocks for BackendChannel {
    fn try_hold<'a>(&'a self, held: &mut LockGuardList<'a>) -> bool {
        try_hold(&self.handler, held)
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let handler = lock(&self.handler);
        let ends = [handler.as_raw_fd(), handler.get_tx_raw_fd()];
        ends.into_iter().chain(self.waits_for()).collect()
    }

    fn is_unlocked(&self) -> bool {
        self.deadline.is_unlocked()
    }
}

impl BackendChannel {
    /// `main`: a descriptor of the main socket.
    pub(super) fn new(
        server: Arc<WindowServer>,
        main: OwnedFd,
        health: Arc<Health>,
        deadline: Arc<StepDeadline>,
    ) -> io::Result<BackendChannel> {
        let making = ism_sys::making();
        let mut handler = FrontendReqHandler::new(server).map_err(io::Error::other)?;
        drop(making);
        handler.set_reply_ack_flag(true);
        // A process has few descriptors, and most are for its program.
        let (requests, main) = (Arc::new(duplicate(&handler)?), Arc::new(main));
        health.shut_down_with(&requests);
        health.shut_down_with(&main);
        let handler = Mutex::new(handler);
        Ok(BackendChannel { handler, requests, main, health, deadline })
    }

    /// The daemon's end of the channel, to be sent to the daemon.
    pub(super) fn daemon_end(&self) -> io::Result<OwnedFd> {
        duplicate(&lock(&self.handler).get_tx_raw_fd())
    }

    pub(super) fn start(self: &Arc<Self>) -> io::Result<JoinHandle<()>> {
        let channel = Arc::clone(self);
        ism_sys::start_thread("ism-channel", ism_sys::USUAL_STACK, move || {
            let why = channel.serve();
            channel.health.fail(&why);
        })
    }

    /// The descriptors of the channel: readable or hung up when there is work.
    pub(super) fn waits_for(&self) -> [RawFd; 2] {
        [self.requests.as_raw_fd(), self.main.as_raw_fd()]
    }

    /// Handles the pending work, in a process without the thread.
    pub(super) fn serve_now(&self) {
        // The caller waits for edges, so all requests are handled, and no more than a daemon may send.
        for _ in 0..REQUESTS {
            match self.serve_once(Some(Duration::ZERO)) {
                Ok(true) => {}
                Ok(false) => return,
                Err(why) => return self.health.fail(&why),
            }
        }
    }

    /// Serves the channel. Returns the reason for its end.
    fn serve(&self) -> String {
        loop {
            let left = self.deadline.left();
            if left.is_some_and(|left| left.is_zero()) {
                return "the daemon takes too long to answer".into();
            }
            // Short, since nothing wakes this thread when the deadline changes.
            let timeout = left.map(|left| left.min(Duration::from_millis(500)));
            if let Err(why) = self.serve_once(timeout) {
                return why;
            }
        }
    }

    /// Waits once, and handles a request if there is one. The error says why the channel ends.
    fn serve_once(&self, timeout: Option<Duration>) -> Result<bool, String> {
        let fds = [
            (self.requests.as_fd(), PollInterest::Read),
            (self.main.as_fd(), PollInterest::HangUp),
        ];
        let [requests, main] = wait(fds, timeout).map_err(|error| format!("poll: {error}"))?;
        if main.hang_up {
            return Err("the daemon closed the connection".into());
        }
        if !requests.readable && !requests.hang_up {
            return Ok(false);
        }
        let mut handler = lock(&self.handler);
        // A request comes with descriptors.
        let _making = ism_sys::making();
        match handler.handle_request() {
            // A refused and answered request concerns the daemon only.
            Ok(_) | Err(VhostUserError::ReqHandlerError(_)) => Ok(true),
            Err(error) => Err(format!("backend channel: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ism_sys::sealed_memfd;

    const K64: u64 = 64 << 10;

    fn request(shmid: u8, offset: u64, len: u64) -> VhostUserMMap {
        VhostUserMMap {
            shmid,
            shm_offset: offset,
            len,
            flags: VhostUserMMapFlags::WRITABLE.bits(),
            ..VhostUserMMap::default()
        }
    }

    #[test]
    fn refuses_hostile_mappings() {
        let server = WindowServer::default();
        let fd = sealed_memfd("t", 4 * K64).unwrap();
        let fd: &dyn AsRawFd = &fd;
        assert!(server.shmem_map(&request(1, 0, K64), fd).is_err(), "no window yet");
        let window = Arc::new(Reservation::new(4 * K64).unwrap());
        server.open(&window);
        assert!(server.shmem_map(&request(2, 0, K64), fd).is_err(), "another region");
        assert!(server.shmem_map(&request(1, 3 * K64, 2 * K64), fd).is_err(), "beyond");
        assert!(server.shmem_map(&request(1, u64::MAX - 1, 2), fd).is_err(), "overflow");
        let read_only = VhostUserMMap { flags: 0, ..request(1, 0, K64) };
        assert!(server.shmem_map(&read_only, fd).is_err(), "read only");
        assert!(server.shmem_map(&request(1, 0, K64), &-1).is_err(), "no descriptor");
        server.shmem_map(&request(1, 0, 2 * K64), fd).unwrap();
        assert!(server.shmem_map(&request(1, K64, K64), fd).is_err(), "overlap");
        assert!(server.shmem_unmap(&request(1, K64, K64)).is_err(), "a part");
        server.shmem_unmap(&request(1, 0, 2 * K64)).unwrap();
        assert!(server.shmem_unmap(&request(1, 0, 2 * K64)).is_err(), "twice");
    }

    /// Sends SHMEM_MAP as a daemon does. Returns the value of the answer.
    fn shmem_map(
        daemon: &std::os::unix::net::UnixStream,
        request: &VhostUserMMap,
        fd: Option<&OwnedFd>,
    ) -> io::Result<u64> {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        use std::io::Read;
        const SHMEM_MAP: u32 = 9;
        const VERSION_1_NEED_REPLY: u32 = 1 | 8;
        let words = [SHMEM_MAP, VERSION_1_NEED_REPLY, size_of::<VhostUserMMap>() as u32];
        let mut message: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        message.extend([request.shmid, 0, 0, 0, 0, 0, 0, 0]);
        for word in [request.fd_offset, request.shm_offset, request.len, request.flags] {
            message.extend(word.to_ne_bytes());
        }
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let parts = [io::IoSlice::new(&message)];
        sendmsg(daemon, &parts, &mut ancillary, SendFlags::NOSIGNAL)?;
        let mut answer = [0; 20];
        (&mut &*daemon).read_exact(&mut answer)?;
        Ok(answer.last_chunk().map_or(0, |value| u64::from_ne_bytes(*value)))
    }

    #[test]
    fn a_refused_mapping_leaves_the_device_alive_and_a_broken_request_does_not() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let health = Health::new();
        let server = Arc::new(WindowServer::default());
        let window = Arc::new(Reservation::new(4 * K64).unwrap());
        server.open(&window);
        let deadline = StepDeadline::within(Duration::ZERO);
        deadline.remove();
        let channel = BackendChannel::new(server, ours.into(), health.clone(), deadline).unwrap();
        let daemon = std::os::unix::net::UnixStream::from(channel.daemon_end().unwrap());
        let thread = Arc::new(channel).start().unwrap();
        let fd = sealed_memfd("t", 2 * K64).unwrap();
        assert_eq!(shmem_map(&daemon, &request(1, K64, 2 * K64), Some(&fd)).unwrap(), 0);
        assert!(window.slice(K64, 2 * K64).is_some());
        assert_ne!(shmem_map(&daemon, &request(1, 0, 2 * K64), Some(&fd)).unwrap(), 0, "overlap");
        assert_ne!(shmem_map(&daemon, &request(1, 4 * K64, K64), Some(&fd)).unwrap(), 0, "beyond");
        assert!(!health.is_gone());
        shmem_map(&daemon, &request(1, 0, K64), None).unwrap_err();
        thread.join().unwrap();
        assert!(health.is_gone() && window.slice(0, 1).is_none());
    }

    #[test]
    fn a_daemon_that_never_answers_fails_the_device() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let health = Health::new();
        let server = Arc::new(WindowServer::default());
        let deadline = StepDeadline::within(Duration::from_millis(20));
        let main = ours.try_clone().unwrap().into();
        let channel = BackendChannel::new(server, main, health.clone(), deadline).unwrap();
        let thread = Arc::new(channel).start().unwrap();
        // Like a request without an answer.
        assert_eq!(io::Read::read(&mut &ours, &mut [0; 1]).unwrap(), 0);
        thread.join().unwrap();
        assert!(health.is_gone());
    }
}
