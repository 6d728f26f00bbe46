// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Notifications from the rings and the mapper of a connection.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ism_device::sync::lock;
use virtio_ism_abi::CONTROL_QUEUE;
use vmm_sys_util::epoll::EventSet;

use super::Connection;
use crate::vhost::faults::Fault;
use crate::vhost::mapper::{Answer, Job, MapObserver};
use crate::vhost::ring::{Ring, RingObserver};

impl RingObserver for Connection {
    fn bad_descriptor(&self, queue: usize, what: &'static str) {
        self.fault(
            Fault::NotEventfd,
            format_args!(
                "the {what} descriptor of queue {queue} is neither an eventfd that counts up \
                 nor, for calls, a socket of a pair; closing"
            ),
        );
        self.close();
    }

    fn kick_closing(&self, fd: RawFd) {
        for worker in &*lock(&self.framework.workers) {
            // The data does not matter for removal. An unregistered descriptor is no error.
            let _ = worker.unregister_listener(fd, EventSet::IN, self.notifier_event());
        }
    }

    fn message(&self) {
        self.charge_and_wait();
    }

    fn ring_changed(&self, queue: usize, running: bool) {
        if queue == usize::from(CONTROL_QUEUE) {
            self.mapper.set_running(running);
        }
        if let Some(stopped) = self.stopped.ring_changed(queue, running)
            && let Some(grace) = self.options.stopped_grace
        {
            self.arm(stopped + grace);
        }
    }
}

impl MapObserver for Connection {
    fn generation(&self) -> u32 {
        self.ring(CONTROL_QUEUE).map_or(0, Ring::generation)
    }

    fn request_sent(&self) {
        self.arm(Instant::now() + self.options.ack_timeout);
    }

    fn job_done(&self, job: Job, answer: Answer) {
        self.guest.account.charge_thread(Instant::now());
        let ok = match &answer {
            Answer::Done => true,
            // The rule after a reset: the front end has emptied the window itself.
            Answer::Refused if matches!(job, Job::Stale(_)) => false,
            Answer::Refused => {
                self.fault(Fault::MapRefused, format_args!("the front end refused a mapping"));
                false
            }
            Answer::NotAsked(why) => {
                tracing::debug!(guest = self.options.name, why, "a mapping was not asked for");
                false
            }
            Answer::Unknown(error) => {
                self.fault(Fault::BadMessage, format_args!("channel: {error}; closing"));
                // The job ends without an outcome; the device allows for this. The connection ends as well,
                // because the front end's mappings are unknown.
                return self.close();
            }
            // The front end's mappings are unknown here as well, but no message was illegal: the front end
            // may have been killed.
            Answer::Gone => return self.close(),
        };
        let reply = match job {
            Job::Map(job, pending) => Some((pending, self.device.mapped(job, ok))),
            Job::Unmap(job, pending) => Some((pending, self.device.unmapped(job, ok))),
            // Not asked: dropped, and offered again after the next HELLO.
            Job::Stale(_) if matches!(answer, Answer::NotAsked(_)) => return,
            Job::Stale(stale) => {
                self.device.stale_unmapped(stale);
                None
            }
        };
        if let Some(reply) = reply {
            lock(&self.replies.ready).push_back(reply);
            self.replies.has_ready.store(true, Ordering::Release);
            self.reschedule(0, CONTROL_QUEUE);
        }
        // The job may have left a mapping unknown to every driver.
        self.unmap_stale();
    }
}
