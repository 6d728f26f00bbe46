//! The ports on which this process listens. A thread that connects to one of them must not wait for
//! a handshake: the same thread may have to accept the connection.

use std::sync::Mutex;

use crate::sys::lock;

/// Ports that this process listens on.
static LISTENING: Mutex<Vec<u16>> = Mutex::new(Vec::new());

/// Whether this process listens on a port.
pub(crate) fn listens_on(port: u16) -> bool {
    lock(&LISTENING).contains(&port)
}

/// Stores that this process listens on a port.
pub(crate) fn add(port: u16) {
    let mut ports = lock(&LISTENING);
    if !ports.contains(&port) {
        ports.push(port);
    }
}
