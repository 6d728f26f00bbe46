// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon's own work: one thread waits for every event not of a single front end.
//!
//! Signals, the management and metrics sockets with their clients, the listening sockets of guests, and
//! deadlines are *subscribers* of an event manager. The thread calls a subscriber when one of its descriptors
//! is ready. A subscriber must not block: work a front end or a file can stall runs on a thread of its own.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use event_manager::{EventManager, MutEventSubscriber, RemoteEndpoint, SubscriberOps};

use super::counted_threads::CountedThreads;
use super::timers::Timers;

/// Time limit for the end of the thread.
const STOP: Duration = Duration::from_secs(3);

type Subscriber = Box<dyn MutEventSubscriber + Send>;

/// A running event loop. Dropping the loop ends the thread and drops the subscribers.
pub(crate) struct EventLoop {
    handle: LoopHandle,
    thread: CountedThreads,
    ended: Arc<AtomicBool>,
}

/// Adds subscribers, from any thread.
#[derive(Clone)]
pub(crate) struct LoopHandle {
    endpoint: RemoteEndpoint<Subscriber>,
    thread: Arc<OnceLock<ThreadId>>,
    timers: Timers,
}

impl EventLoop {
    /// Starts the thread.
    ///
    /// # Errors
    /// No descriptor or no thread is left.
    pub(crate) fn start() -> io::Result<EventLoop> {
        let mut manager = EventManager::<Subscriber>::new().map_err(io::Error::other)?;
        let (timers, on_deadline) = Timers::new()?;
        manager.add_subscriber(Box::new(on_deadline));
        let (endpoint, id) = (manager.remote_endpoint(), Arc::new(OnceLock::new()));
        let handle = LoopHandle { endpoint, thread: id.clone(), timers };
        let (thread, ended) = (CountedThreads::default(), Arc::new(AtomicBool::new(false)));
        let is_over = ended.clone();
        thread.spawn("event-loop", move || {
            let _ = id.set(thread::current().id());
            // Acquire: partner of the store in `drop`.
            while !is_over.load(Ordering::Acquire) {
                if let Err(error) = manager.run() {
                    tracing::error!(%error, "the event loop ends");
                    return;
                }
            }
        })?;
        Ok(EventLoop { handle, thread, ended })
    }

    /// The handle for adding subscribers.
    pub(crate) fn handle(&self) -> &LoopHandle {
        &self.handle
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        self.handle.timers.close();
        // Release: partner of the load in the thread.
        self.ended.store(true, Ordering::Release);
        let _ = self.handle.endpoint.kick();
        self.thread.wait_for(0, STOP);
    }
}

impl LoopHandle {
    /// The deadlines of the loop.
    pub(crate) fn timers(&self) -> &Timers {
        &self.timers
    }

    /// Makes the loop call `subscriber` for its descriptors, until the registration is dropped. If the loop
    /// has ended, drops `subscriber` at once.
    pub(crate) fn add(&self, subscriber: impl MutEventSubscriber + Send + 'static) -> Registration {
        let id = Arc::new(OnceLock::new());
        let added = id.clone();
        let subscriber: Subscriber = Box::new(subscriber);
        let _ = self.endpoint.fire(move |ops| {
            let _ = added.set(ops.add_subscriber(subscriber));
        });
        let handle = self.clone();
        let remove = move || {
            let _ = handle.endpoint.fire(move |ops| {
                if let Some(id) = id.get() {
                    drop(ops.remove_subscriber(*id));
                }
            });
        };
        Registration { remove: Some(Box::new(remove)) }
    }

    /// Waits until the loop has done all work given before, at the latest until `deadline`; `false` on
    /// time-out. On the loop's own thread, returns at once.
    pub(crate) fn wait_done(&self, deadline: Instant) -> bool {
        if self.thread.get() == Some(&thread::current().id()) {
            return true;
        }
        let (done, is_done) = mpsc::channel();
        // The loop may have ended and dropped its work.
        let _ = self.endpoint.fire(move |_| {
            let _ = done.send(());
        });
        let left = deadline.saturating_duration_since(Instant::now());
        !matches!(is_done.recv_timeout(left), Err(mpsc::RecvTimeoutError::Timeout))
    }
}

/// A subscriber registered with the loop. Dropping the registration makes the loop drop the subscriber soon
/// after.
pub(crate) struct Registration {
    remove: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(remove) = self.remove.take() {
            remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::waker::Waker;
    use super::*;
    use event_manager::{EventOps, Events};

    struct Echo {
        waker: Waker,
        heard: mpsc::Sender<ThreadId>,
    }

    impl MutEventSubscriber for Echo {
        fn init(&mut self, ops: &mut EventOps<'_>) {
            self.waker.watch(ops);
        }

        fn process(&mut self, events: Events, _: &mut EventOps<'_>) {
            assert!(self.waker.take(events));
            self.heard.send(thread::current().id()).unwrap();
        }
    }

    fn echo() -> (Echo, Waker, mpsc::Receiver<ThreadId>) {
        let (heard, receiver) = mpsc::channel();
        let waker = Waker::new().unwrap();
        (Echo { waker: waker.clone(), heard }, waker, receiver)
    }

    use smc_test_support::TIMEOUT as LONG;

    #[test]
    fn all_subscribers_are_called_on_one_thread_until_they_are_removed() {
        let events = EventLoop::start().unwrap();
        let (first, wake_first, first_heard) = echo();
        let (second, wake_second, second_heard) = echo();
        let first = events.handle().add(first);
        let second = events.handle().add(second);
        wake_first.wake();
        wake_second.wake();
        let threads = [&first_heard, &second_heard].map(|heard| heard.recv_timeout(LONG).unwrap());
        assert_eq!(threads[0], threads[1]);
        drop(first);
        assert!(events.handle().wait_done(Instant::now() + LONG));
        // The subscriber is dropped, so its channel is closed.
        assert_eq!(first_heard.try_recv(), Err(mpsc::TryRecvError::Disconnected));
        wake_first.wake();
        wake_second.wake();
        second_heard.recv_timeout(LONG).unwrap();
        drop(events);
        assert_eq!(second_heard.try_recv(), Err(mpsc::TryRecvError::Disconnected));
        drop(second);
    }

    #[test]
    fn a_loop_that_has_ended_drops_what_it_is_given() {
        let events = EventLoop::start().unwrap();
        let handle = events.handle().clone();
        drop(events);
        let (late, _, heard) = echo();
        let late = handle.add(late);
        assert!(handle.wait_done(Instant::now() + LONG));
        assert_eq!(heard.try_recv(), Err(mpsc::TryRecvError::Disconnected));
        drop(late);
    }
}
