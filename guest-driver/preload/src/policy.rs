// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Changes of the policy file while the program runs. New connections look at the file, a few times per
//! second at most. A file that is missing, unreadable or wrong changes nothing: a program may have left
//! the file behind with its root directory or its user.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use smc_rendezvous::Policy;

use crate::sys::fork_lock::ForkMutex;
use crate::sys::own_stack::OwnStack;
use crate::sys::raw;
use crate::{config, fork, policies, status};

/// Shortest pause between two looks, microseconds.
const INTERVAL: u64 = 200_000;
/// A file changed so shortly before a look may change once more, with the same time and length.
const SETTLED: Duration = Duration::from_secs(2);
/// Time of the next look, on the monotonic clock in microseconds.
static DUE: AtomicU64 = AtomicU64::new(0);
/// The file at the last look.
static SEEN: ForkMutex<Option<Seen>> = ForkMutex::new(None);

/// A state of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    file: (u64, u64),
    length: u64,
    changed: (i64, i64),
    /// Whether the file was last changed long before the look.
    is_settled: bool,
}

impl Seen {
    fn of(file: &Path) -> Option<Seen> {
        let found = std::fs::metadata(file).ok()?;
        let age =
            found.modified().ok().and_then(|time| SystemTime::now().duration_since(time).ok());
        Some(Seen {
            file: (found.dev(), found.ino()),
            length: found.len(),
            changed: (found.ctime(), found.ctime_nsec()),
            is_settled: age.is_some_and(|age| age > SETTLED),
        })
    }
}

/// Reads the file if changed. `true`: another policy is in force from now on.
#[inline]
pub(crate) fn refresh() -> bool {
    let file = config::get().and_then(|config| config.policy_file.as_deref());
    let Some(file) = file else { return false };
    let (due, now) = (DUE.load(Ordering::Relaxed), raw::monotonic_micros());
    let is_due = now >= due && !fork::shares_memory();
    // One thread looks.
    let order = Ordering::Relaxed;
    is_due
        && DUE.compare_exchange(due, now + INTERVAL, order, order).is_ok()
        && raw::without_signals(|| look(file))
}

#[cold]
fn look(file: &Path) -> bool {
    let (Some(config), Some(now)) = (config::get(), Seen::of(file)) else { return false };
    let mut seen = SEEN.lock();
    if seen.replace(now).is_some_and(|before| before == now && before.is_settled) {
        return false;
    }
    // A parser needs more stack than a thread of the program may have.
    let Some(mut stack) = OwnStack::take() else { return false };
    let read = stack.run(|| Policy::load(file).map(Policy::of_this_process));
    match read {
        Ok(policy) if policy == *config.policy() || policies::are_full() => false,
        Ok(policy) => {
            status::policy_changed(policy.len());
            for key in policy.unknown() {
                status::policy_key(&key.to_string());
            }
            policies::add(policy);
            true
        }
        Err(error) => {
            status::policy_stays(&error.to_string());
            false
        }
    }
}
