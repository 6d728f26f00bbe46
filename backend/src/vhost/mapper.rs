// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The map thread: asks one front end to map and unmap slabs.
//!
//! A request waits for its acknowledgement without a limit, and cannot be cancelled: the channel's descriptor
//! is out of reach in the framework. So the request waits in a thread of its own. If the answer does not come
//! in time ([`Mapper::overdue`]), the daemon cuts the connection. The thread goes on waiting, counted, and
//! holds only the job.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags};
use vhost::vhost_user::{Backend, Error as VhostUserError, VhostUserFrontendReqHandler};
use virtio_ism_abi::{DOORBELL_SHMID, WINDOW_SHMID};

use super::chain::PendingReply;
use super::counted_threads::CountedThreads;
use super::faults::is_end_of_front_end;
use ism_device::sync::lock;
use ism_device::{MapJob, StaleMap, UnmapJob};

/// A request to the front end.
#[derive(Debug)]
pub(super) enum Job {
    /// Map a slab, then answer.
    Map(MapJob, PendingReply),
    /// Unmap a slab, then answer.
    Unmap(UnmapJob, PendingReply),
    /// Unmap a range left mapped by a past session.
    Stale(StaleMap),
}

impl Job {
    fn generation(&self) -> Option<u32> {
        match self {
            Job::Map(_, pending) | Job::Unmap(_, pending) => Some(pending.generation),
            Job::Stale(_) => None,
        }
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Done.
    Done,
    /// The front end refused the request.
    Refused,
    /// The request was not sent, for this reason.
    NotAsked(&'static str),
    /// The request was sent, and the front end's answer is unknown.
    Unknown(String),
    /// Unknown as well, because the front end has left or closed the channel.
    Gone,
}

/// The owner of the jobs: provides the ring's state for the map thread, and takes the results.
pub(super) trait MapObserver: Send + Sync {
    /// The control ring's generation now.
    fn generation(&self) -> u32;
    /// A request goes to the front end now. The observer calls [`Mapper::overdue`] after the front end's time
    /// limit.
    fn request_sent(&self);
    /// The job has ended with this answer.
    fn job_done(&self, job: Job, answer: Answer);
}

/// Jobs of one front end, in order.
#[derive(Default)]
pub(super) struct Mapper {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    channel: Option<Backend>,
    /// The front end has asked for the size of the window.
    size_asked: bool,
    /// The control ring runs: requests may go out. A request may crash a VMM with a stopped device.
    running: bool,
    closed: bool,
    started: bool,
    asked_at: Option<Instant>,
}

impl Mapper {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Sets the channel for requests. `true`: the front end has asked for the size of the window
    /// before.
    pub(super) fn set_channel(&self, channel: Backend) -> bool {
        let mut state = self.lock();
        state.channel = Some(channel);
        state.size_asked
    }

    /// The front end asks for the size of the window. `true`: the channel is set.
    pub(super) fn note_size_asked(&self) -> bool {
        let mut state = self.lock();
        state.size_asked = true;
        state.channel.is_some()
    }

    /// Sets whether requests may go out.
    pub(super) fn set_running(&self, running: bool) {
        self.lock().running = running;
        self.changed.notify_one();
    }

    /// Ends the thread as soon as no request to the front end is outstanding.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        // A hanging thread must not keep the jobs' resources.
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        self.changed.notify_one();
        drop(jobs);
    }

    /// Adds a job. The first job starts the thread.
    pub(super) fn push(
        self: &Arc<Self>,
        job: Job,
        observer: Weak<dyn MapObserver>,
        threads: &CountedThreads,
    ) -> std::io::Result<()> {
        let mut state = self.lock();
        state.jobs.push_back(job);
        if !state.started {
            let mapper = self.clone();
            threads.spawn("map", move || mapper.run(&observer))?;
            state.started = true;
        }
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Whether the front end has kept a request waiting for `limit` or longer.
    pub(super) fn overdue(&self, limit: Duration) -> Overdue {
        match self.lock().asked_at {
            None => Overdue::No,
            Some(at) if at.elapsed() >= limit => Overdue::Yes,
            Some(at) => Overdue::At(at + limit),
        }
    }

    fn run(&self, observer: &Weak<dyn MapObserver>) {
        while let Some((job, channel)) = self.next() {
            let stale = match observer.upgrade() {
                Some(observer) => {
                    job.generation().is_some_and(|generation| generation != observer.generation())
                }
                None => return,
            };
            let answer = match (stale, channel) {
                (true, _) => Answer::NotAsked("the ring was started anew"),
                (false, None) => Answer::NotAsked("there is no channel for requests"),
                (false, Some(channel)) => self.ask(&job, &channel, observer),
            };
            // Upgraded again only now: a thread a front end can block must own little.
            let Some(observer) = observer.upgrade() else { return };
            observer.job_done(job, answer);
        }
    }

    fn next(&self) -> Option<(Job, Option<Backend>)> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if state.running
                && let Some(job) = state.jobs.pop_front()
            {
                return Some((job, state.channel.clone()));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn ask(&self, job: &Job, channel: &Backend, observer: &Weak<dyn MapObserver>) -> Answer {
        let request = match job {
            Job::Map(job, _) => {
                // None: an earlier job mapped the same slab.
                let Some(r) = job.request() else { return Answer::Done };
                let request =
                    map(r.fd_offset, r.window_offset, r.len, VhostUserMMapFlags::WRITABLE);
                let answer = self.send(observer, || channel.shmem_map(&request, &r.fd));
                return match answer {
                    Answer::Done => self.hand_over_doorbell(job, channel, observer),
                    answer => answer,
                };
            }
            Job::Unmap(job, _) => {
                map(0, job.window_offset(), job.len(), VhostUserMMapFlags::empty())
            }
            Job::Stale(stale) => {
                map(0, stale.window_offset(), stale.len(), VhostUserMMapFlags::empty())
            }
        };
        self.send(observer, || channel.shmem_unmap(&request))
    }

    /// Hands the doorbell of a mapped slab, if any, to the front end. The front end may refuse.
    fn hand_over_doorbell(
        &self,
        job: &MapJob,
        channel: &Backend,
        observer: &Weak<dyn MapObserver>,
    ) -> Answer {
        let Some(doorbell) = job.doorbell() else { return Answer::Done };
        let flags = match doorbell.rings {
            true => VhostUserMMapFlags::WRITABLE,
            false => VhostUserMMapFlags::empty(),
        };
        let number = u64::from(doorbell.slab_id);
        let request = map(number, doorbell.window_offset, doorbell.len, flags);
        let request = VhostUserMMap { shmid: DOORBELL_SHMID, ..request };
        let fd = doorbell.fd.as_fd().as_raw_fd();
        match self.send(observer, || channel.shmem_map(&request, &fd)) {
            unknown @ (Answer::Unknown(_) | Answer::Gone) => return unknown,
            answer => job.doorbell_answered(answer == Answer::Done),
        }
        Answer::Done
    }

    fn send(
        &self,
        observer: &Weak<dyn MapObserver>,
        request: impl FnOnce() -> std::io::Result<u64>,
    ) -> Answer {
        self.lock().asked_at = Some(Instant::now());
        if let Some(observer) = observer.upgrade() {
            observer.request_sent();
        }
        let result = request();
        self.lock().asked_at = None;
        let Err(error) = result else { return Answer::Done };
        let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
        match cause {
            Some(VhostUserError::FrontendInternalError) => Answer::Refused,
            Some(error) if is_end_of_front_end(error) => Answer::Gone,
            _ => Answer::Unknown(error.to_string()),
        }
    }
}

/// A request about a part of the window.
fn map(fd_offset: u64, shm_offset: u64, len: u64, flags: VhostUserMMapFlags) -> VhostUserMMap {
    let (shmid, flags) = (WINDOW_SHMID, flags.bits());
    VhostUserMMap { shmid, padding: [0; 7], fd_offset, shm_offset, len, flags }
}

/// See [`Mapper::overdue`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// No request waits for an answer.
    No,
    /// A request waits for its answer, and is overdue from this time on.
    At(Instant),
    /// A request has waited for too long.
    Yes,
}
