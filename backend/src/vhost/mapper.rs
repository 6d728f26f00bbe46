//! The map thread: asks one front end to map and unmap slabs.
//!
//! A request waits for its acknowledgement without a limit, and nothing can take it back: the
//! channel's descriptor is out of reach in the framework. So the request waits in a thread of its
//! own. If the answer does not come in time ([`Mapper::overdue`]), the daemon cuts the connection. The
//! thread goes on waiting, counted, and holds nothing but the job.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags};
use vhost::vhost_user::{Backend, Error as VhostUserError, VhostUserFrontendReqHandler};
use virtio_ism_abi::WINDOW_SHMID;

use super::chain::PendingReply;
use super::counted_threads::CountedThreads;
use crate::device::sync::lock;
use crate::device::{MapJob, StaleMap, UnmapJob};

/// What waits for the front end.
#[derive(Debug)]
pub(super) enum Job {
    /// Map a slab, then answer.
    Map(MapJob, PendingReply),
    /// Unmap a slab, then answer.
    Unmap(UnmapJob, PendingReply),
    /// Unmap what a past generation left.
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

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Done.
    Done,
    /// The front end says no.
    Refused,
    /// It was not asked, for this reason.
    NotAsked(&'static str),
    /// It was asked, and what it did is unknown.
    Unknown(String),
}

/// Takes the results.
pub(super) trait Client: Send + Sync {
    /// The control ring's generation now.
    fn generation(&self) -> u32;
    /// The front end was asked, or could not be.
    fn done(&self, job: Job, answer: Answer);
    /// A request goes out; ask [`Mapper::overdue`] when its time is over.
    fn asking(&self);
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
    /// The control ring runs: requests may go out. A VMM whose device is stopped may crash on one.
    running: bool,
    closed: bool,
    started: bool,
    asked_at: Option<Instant>,
}

impl Mapper {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The channel for requests.
    pub(super) fn set_channel(&self, channel: Backend) {
        self.lock().channel = Some(channel);
    }

    /// Whether requests may go out.
    pub(super) fn set_running(&self, running: bool) {
        self.lock().running = running;
        self.changed.notify_one();
    }

    /// Ends the thread as soon as it waits for no front end.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        // What jobs hold must not stay with a thread that hangs.
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        self.changed.notify_one();
        drop(jobs);
    }

    /// Adds a job. The first one starts the thread.
    pub(super) fn push(
        self: &Arc<Self>,
        job: Job,
        client: Weak<dyn Client>,
        threads: &CountedThreads,
    ) -> std::io::Result<()> {
        let mut state = self.lock();
        state.jobs.push_back(job);
        if !state.started {
            let mapper = self.clone();
            threads.spawn("map", move || mapper.run(&client))?;
            state.started = true;
        }
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// When the request that is out now was sent, if that is at least `limit` ago; else the time
    /// at which it would be.
    pub(super) fn overdue(&self, limit: Duration) -> Overdue {
        match self.lock().asked_at {
            None => Overdue::No,
            Some(at) if at.elapsed() >= limit => Overdue::Yes,
            Some(at) => Overdue::At(at + limit),
        }
    }

    fn run(&self, client: &Weak<dyn Client>) {
        while let Some((job, channel)) = self.next() {
            let stale = match client.upgrade() {
                Some(client) => {
                    job.generation().is_some_and(|generation| generation != client.generation())
                }
                None => return,
            };
            let answer = match (stale, channel) {
                (true, _) => Answer::NotAsked("the ring was started anew"),
                (false, None) => Answer::NotAsked("there is no channel for requests"),
                (false, Some(channel)) => self.ask(&job, &channel, client),
            };
            // Not replies over the request: what a hanging front end holds should be little.
            let Some(client) = client.upgrade() else { return };
            client.done(job, answer);
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

    fn ask(&self, job: &Job, channel: &Backend, client: &Weak<dyn Client>) -> Answer {
        let map = |fd_offset, shm_offset, len, flags: VhostUserMMapFlags| VhostUserMMap {
            shmid: WINDOW_SHMID,
            padding: [0; 7],
            fd_offset,
            shm_offset,
            len,
            flags: flags.bits(),
        };
        let request = match job {
            Job::Map(job, _) => {
                // None: an earlier job mapped the same slab.
                let Some(r) = job.request() else { return Answer::Done };
                let request =
                    map(r.fd_offset, r.window_offset, r.len, VhostUserMMapFlags::WRITABLE);
                return self.send(client, || channel.shmem_map(&request, &r.fd));
            }
            Job::Unmap(job, _) => {
                map(0, job.window_offset(), job.len(), VhostUserMMapFlags::empty())
            }
            Job::Stale(stale) => {
                map(0, stale.window_offset(), stale.len(), VhostUserMMapFlags::empty())
            }
        };
        self.send(client, || channel.shmem_unmap(&request))
    }

    fn send(
        &self,
        client: &Weak<dyn Client>,
        request: impl FnOnce() -> std::io::Result<u64>,
    ) -> Answer {
        self.lock().asked_at = Some(Instant::now());
        if let Some(client) = client.upgrade() {
            client.asking();
        }
        let result = request();
        self.lock().asked_at = None;
        let Err(error) = result else { return Answer::Done };
        let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
        match cause {
            Some(VhostUserError::FrontendInternalError) => Answer::Refused,
            _ => Answer::Unknown(error.to_string()),
        }
    }
}

/// See [`Mapper::overdue`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// Nothing is out.
    No,
    /// Something is out, and will be overdue then.
    At(Instant),
    /// Something is out for too long.
    Yes,
}
