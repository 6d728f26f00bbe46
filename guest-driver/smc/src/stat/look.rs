// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The time of one look at all processes, and threads for parallel looks.
//!
//! A hostile process can delay any reader: by a filesystem of its own, or by memory with missing
//! pages. So each process is read by a thread that may be given up. A user with unresponsive
//! processes keeps its share of the threads and of the time, and no more.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ism_sys::lock;

/// Threads at a time.
const MOST: usize = 64;
/// Threads at a time for the processes of one user.
const MOST_OF_USER: usize = 16;
/// Bytes of a thread's stack.
const STACK: usize = 256 << 10;

/// Threads looking at processes now, by user, including threads given up.
static BUSY: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());

/// A thread's place in [`BUSY`].
struct Place(u32);

impl Place {
    fn take(user: u32) -> Option<Place> {
        let mut busy = lock(&BUSY);
        let own = busy.entry(user).or_default();
        if *own >= MOST_OF_USER {
            return None;
        }
        *own += 1;
        Some(Place(user))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut busy = lock(&BUSY);
        if let Some(own) = busy.get_mut(&self.0) {
            *own -= 1;
        }
        busy.retain(|_, own| *own > 0);
    }
}

/// The remaining time for a look.
pub(super) fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

/// Does a piece of work for each job, on a few threads at once, until a time. The jobs of a user
/// come in their order, and in turn with the jobs of other users. `take` gets the results. Jobs
/// without time left are skipped.
pub(super) fn for_each<J: Send + 'static, T: Send + 'static>(
    jobs: impl IntoIterator<Item = (u32, J)>,
    until: Instant,
    work: impl Fn(J) -> T + Send + Sync + 'static,
    mut take: impl FnMut(T),
) {
    let mut queues: BTreeMap<u32, VecDeque<J>> = BTreeMap::new();
    for (user, job) in jobs {
        queues.entry(user).or_default().push_back(job);
    }
    let work = Arc::new(work);
    let (sender, results) = mpsc::channel();
    let mut under_way = 0;
    loop {
        let mut begun = false;
        queues.retain(|user, queue| {
            let place = if under_way < MOST { Place::take(*user) } else { None };
            if let Some(place) = place
                && let Some(job) = queue.pop_front()
            {
                let (work, sender) = (work.clone(), sender.clone());
                let body = move || {
                    let found = work(job);
                    drop(place);
                    let _ = sender.send(found);
                };
                let thread = std::thread::Builder::new().stack_size(STACK).spawn(body);
                under_way += usize::from(thread.is_ok());
                begun = true;
            }
            !queue.is_empty()
        });
        if left(until).is_zero() || under_way == 0 && !begun {
            return;
        }
        if begun && under_way < MOST && !queues.is_empty() {
            results.try_iter().for_each(|found| {
                under_way -= 1;
                take(found);
            });
            continue;
        }
        match results.recv_timeout(left(until)) {
            Ok(found) => {
                under_way -= 1;
                take(found);
            }
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_whose_processes_do_not_let_go_keeps_no_other_waiting() {
        // Users of no other test.
        let (hostile, other) = (u32::MAX - 1, u32::MAX - 2);
        let jobs = (0..100).map(|n| (hostile, n)).chain((100..150).map(|n| (other, n)));
        let mut found = Vec::new();
        let until = Instant::now() + Duration::from_secs(60);
        let (stop, stopped) = mpsc::channel::<()>();
        let (stop, stopped) = (Mutex::new(Some(stop)), Arc::new(Mutex::new(stopped)));
        let waits = stopped.clone();
        for_each(
            jobs,
            until,
            move |n| {
                if n < 100 {
                    // Until the processes of the other user are done.
                    let _ = lock(&waits).recv();
                }
                n
            },
            |n| {
                found.push(n);
                if found.len() == 50 {
                    assert!(found.iter().all(|n| *n >= 100), "{found:?}");
                    lock(&stop).take();
                }
            },
        );
        found.sort();
        assert_eq!(found, (0..150).collect::<Vec<_>>());
    }

    #[test]
    fn what_does_not_answer_is_given_up_and_keeps_its_place() {
        let user = u32::MAX - 3;
        let (stop, stopped) = mpsc::channel::<()>();
        let stopped = Mutex::new(stopped);
        let until = Instant::now() + Duration::from_millis(50);
        for_each([(user, ())], until, move |()| lock(&stopped).recv().is_ok(), |_| unreachable!());
        assert_eq!(lock(&BUSY).get(&user), Some(&1));
        drop(stop);
        while lock(&BUSY).contains_key(&user) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
