//! The ports on which this process listens. A thread that connects to one of them must not wait for
//! a handshake: the same thread may have to accept the connection.

use crate::sys::fork_lock::ForkMutex;

/// Ports that this process listens on.
static LISTENING: ForkMutex<Vec<u16>> = ForkMutex::new(Vec::new());

/// Whether this process listens at all.
pub(crate) fn any() -> bool {
    !LISTENING.lock().is_empty()
}

/// Whether this process listens on a port.
pub(crate) fn listens_on(port: u16) -> bool {
    LISTENING.lock().contains(&port)
}

/// Stores that this process listens on a port.
pub(crate) fn add(port: u16) {
    let mut ports = LISTENING.lock();
    if !ports.contains(&port) {
        ports.push(port);
    }
}
