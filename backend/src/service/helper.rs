// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Helper processes for work forbidden in the daemon's sandbox, and their protocol.
//!
//! A request is one message on a packet socket, its answer another, with descriptors attached. Both carry the
//! number of the request, so an answer after its time limit is not taken for a later one. The process ends
//! with the daemon.

use std::ffi::CStr;
use std::io;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ism_device::sync::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::service::fork;
use crate::service::packets::{receive, send};
use crate::vhost::event_loop::{LoopHandle, Registration};
use crate::vhost::on_close::OnClose;

/// Longest wait for an answer after the end of a process possibly holding the request.
const LOST: Duration = Duration::from_secs(2);

/// A request or an answer, with the number of the request.
#[derive(Debug, Serialize, Deserialize)]
struct Numbered<T> {
    number: u64,
    what: T,
}

/// Messages to the daemon.
#[derive(Debug, Serialize, Deserialize)]
enum Reply<A> {
    Answer(Numbered<A>),
    /// The process was killed and replaced. Earlier requests may stay without an answer.
    Lost,
}

/// The daemon's end: requests `Q`, answers `A`.
#[derive(Debug)]
pub(crate) struct Helper<Q, A> {
    /// With the number of the last request. Locked over a request and its answer.
    channel: Mutex<(OwnedFd, u64)>,
    has_ended: Arc<AtomicBool>,
    messages: PhantomData<fn(Q) -> A>,
}

impl<Q: Serialize, A: DeserializeOwned> Helper<Q, A> {
    /// Starts a process to run `work` in a thread of this name. To be called while there is one thread.
    /// `timeout`: the longest wait for an answer.
    ///
    /// # Errors
    /// The kernel makes no socket or no process.
    pub(crate) fn start(
        name: &CStr,
        timeout: Option<Duration>,
        work: impl FnOnce(&Service<Q, A>),
    ) -> io::Result<Helper<Q, A>> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&ours, Timeout::Recv, timeout)?;
        let mut ours = Some(ours);
        fork::in_child(|| {
            // Otherwise the process would not see the end of the daemon.
            drop(ours.take());
            let _ = rustix::thread::set_name(name);
            work(&Service { channel: theirs, messages: PhantomData });
        })?;
        let channel = Mutex::new((ours.ok_or(Errno::BADF)?, 0));
        Ok(Helper { channel, has_ended: Arc::default(), messages: PhantomData })
    }

    /// Asks the process, and waits for its answer.
    ///
    /// # Errors
    /// The process has ended, was killed meanwhile, or has not answered within the time limit.
    pub(crate) fn ask(&self, request: Q) -> io::Result<(A, Vec<OwnedFd>)> {
        let (channel, number) = &mut *lock(&self.channel);
        *number += 1;
        send(channel, &Numbered { number: *number, what: request }, &[])?;
        let mut is_lost = false;
        loop {
            if is_lost && !is_readable_within(channel, LOST) {
                return Err(io::Error::other("the helper process was killed meanwhile"));
            }
            let (reply, fds) = receive::<Reply<A>>(channel)?;
            match reply.ok_or_else(|| io::Error::other("the helper process has ended"))? {
                Reply::Lost => is_lost = true,
                Reply::Answer(answer) if answer.number == *number => return Ok((answer.what, fds)),
                // The answer to an abandoned request.
                Reply::Answer(_) => {}
            }
        }
    }

    /// Makes the loop call `on_end` after the end of the process and of any parent able to replace it.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn on_end(
        &self,
        events: &LoopHandle,
        on_end: impl FnOnce() + Send + 'static,
    ) -> io::Result<Registration> {
        let has_ended = self.has_ended.clone();
        let channel = lock(&self.channel).0.try_clone()?;
        Ok(events.add(OnClose::new(channel, move || {
            has_ended.store(true, Ordering::Relaxed);
            on_end();
        })))
    }

    /// Whether the process was alive at the loop's last check, since `on_end`.
    pub(crate) fn is_up(&self) -> bool {
        !self.has_ended.load(Ordering::Relaxed)
    }
}

fn is_readable_within(channel: &OwnedFd, limit: Duration) -> bool {
    let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: 0 };
    poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&limit)) == Ok(1)
}

/// The end of the helper process.
#[derive(Debug)]
pub(crate) struct Service<Q, A> {
    channel: OwnedFd,
    messages: PhantomData<fn(A) -> Q>,
}

impl<Q: DeserializeOwned, A: Serialize> Service<Q, A> {
    /// Serves the daemon until the daemon's end.
    pub(crate) fn serve(&self, carry_out: impl Fn(Q) -> (A, Vec<OwnedFd>)) {
        while let Ok((Some(Numbered { number, what }), _)) = receive(&self.channel) {
            let (what, fds) = carry_out(what);
            if send(&self.channel, &Reply::Answer(Numbered { number, what }), &fds).is_err() {
                break;
            }
        }
    }

    /// Tells the daemon of a killed and replaced process.
    pub(crate) fn say_lost(&self) {
        let _ = send(&self.channel, &Reply::<A>::Lost, &[]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends in this process, without a process of its own for the service.
    fn ends<Q, A>(timeout: Option<Duration>) -> (Helper<Q, A>, Service<Q, A>) {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        set_socket_timeout(&ours, Timeout::Recv, timeout).unwrap();
        let channel = Mutex::new((ours, 0));
        let helper = Helper { channel, has_ended: Arc::default(), messages: PhantomData };
        (helper, Service { channel: theirs, messages: PhantomData })
    }

    #[test]
    fn an_answer_that_came_too_late_is_not_that_of_the_next_request() {
        let (helper, service) = ends::<u32, u32>(Some(Duration::from_millis(10)));
        assert!(helper.ask(1).is_err(), "nobody answers");
        set_socket_timeout(&lock(&helper.channel).0, Timeout::Recv, None).unwrap();
        let serving = std::thread::spawn(move || service.serve(|n| (n + 100, Vec::new())));
        assert_eq!(helper.ask(2).unwrap().0, 102);
        drop(helper);
        serving.join().unwrap();
    }

    #[test]
    fn a_request_that_a_killed_process_had_fails_and_the_next_one_is_answered() {
        let (helper, service) = ends::<u32, u32>(None);
        service.say_lost();
        let why = helper.ask(1).unwrap_err();
        assert!(why.to_string().contains("killed"), "{why}");
        let serving = std::thread::spawn(move || service.serve(|n| (n, Vec::new())));
        assert_eq!(helper.ask(2).unwrap().0, 2);
        drop(helper);
        serving.join().unwrap();
    }

    #[test]
    fn a_process_that_has_ended_is_said() {
        let (helper, service) = ends::<u32, u32>(None);
        drop(service);
        assert!(helper.ask(1).is_err());
        assert!(helper.is_up(), "only the loop sees the end");
    }

    #[test]
    fn a_request_may_be_without_words() {
        let (helper, service) = ends::<(), Result<(), i32>>(None);
        let serving = std::thread::spawn(move || service.serve(|()| (Err(2), Vec::new())));
        assert_eq!(helper.ask(()).unwrap().0, Err(2));
        assert_eq!(helper.ask(()).unwrap().0, Err(2));
        drop(helper);
        serving.join().unwrap();
    }

    #[test]
    fn descriptors_come_beside_an_answer() {
        let (helper, service) = ends::<u32, u32>(None);
        let serving = std::thread::spawn(move || {
            service.serve(|n| {
                let file = std::fs::File::open("/dev/null").unwrap();
                (n, vec![file.into()])
            });
        });
        assert_eq!(helper.ask(1).unwrap().1.len(), 1);
        drop(helper);
        serving.join().unwrap();
    }
}
