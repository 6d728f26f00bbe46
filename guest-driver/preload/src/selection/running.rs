//! The connections whose handshakes other threads carry out.

use std::sync::Mutex;

use crate::socket::table::DescriptorRef;
use crate::sys::fork_lock::ForkLock;
use crate::sys::lock;

/// Held by those who use [`RUNNING`] or the list of `waiting`, and by a process while it forks.
pub(super) static RUNNING_LOCK: ForkLock = ForkLock::new();
/// The connections whose handshakes run in other threads.
static RUNNING: Mutex<Vec<DescriptorRef>> = Mutex::new(Vec::new());

/// Enters a connection whose handshake another thread carries out. The caller holds
/// [`RUNNING_LOCK`].
pub(super) fn begin(descriptor: &DescriptorRef) {
    lock(&RUNNING).push(descriptor.clone());
}

/// Undoes [`begin`]. The caller does not hold [`RUNNING_LOCK`].
pub(super) fn end(descriptor: DescriptorRef) {
    let other = {
        let _running = RUNNING_LOCK.lock();
        let mut running = lock(&RUNNING);
        let at = running.iter().position(|other| other.is(&descriptor));
        at.map(|at| running.swap_remove(at))
    };
    // The last references close a connection whose descriptors the program has closed.
    drop((other, descriptor));
}

/// Whether one of the connections fulfils a condition. The caller holds [`RUNNING_LOCK`].
pub(super) fn any(condition: impl Fn(&DescriptorRef) -> bool) -> bool {
    lock(&RUNNING).iter().any(condition)
}

/// Forgets the parent's connections, in the child of a fork. The caller holds [`RUNNING_LOCK`].
pub(super) fn forget() {
    let parents = std::mem::take(&mut *lock(&RUNNING));
    // The child's copies of the threads' stacks hold references as well, for ever.
    std::mem::forget(parents);
}
