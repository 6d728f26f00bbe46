//! Whether SMC is worthwhile for a connection that both ends could put on it, as far as earlier
//! connections of the program's processes tell ([`guest_driver::traffic`]).
//!
//! The client decides: if it does not ask for SMC, neither end does anything for it. A server learns
//! as well, for `smc stat`, and accepts whatever its clients propose.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use guest_driver::traffic::{Choice, Endpoint, TrafficTable};
use guest_driver::{ConnectionInfo, SmcStream};

use crate::config;
use crate::sys::borrowed;

static TABLE: OnceLock<Arc<TrafficTable>> = OnceLock::new();

/// Takes over the memory that `smc run` passed on. Returns its descriptor, which the program does
/// not know.
pub(super) fn init() -> Option<c_int> {
    let fd = config::get()?.traffic?;
    let program = std::env::current_exe().unwrap_or_default();
    // If the program's parent has closed it, the number may be another file's.
    let table = TrafficTable::adopt(borrowed(fd), &program).ok()?;
    let _ = TABLE.set(table);
    Some(fd)
}

/// What was learned, for reports.
pub(super) fn table() -> Option<Arc<TrafficTable>> {
    TABLE.get().cloned()
}

/// Whether the next connection to a server stays on TCP, because SMC would be slower.
pub(super) fn is_slower(server: &SocketAddr) -> bool {
    let (Some(table), Some(config)) = (TABLE.get(), config::get()) else { return false };
    !config.forces(server) && table.choose(server) == Choice::Tcp
}

/// Counts a connection that was accepted at this address and whose client has not proposed SMC.
pub(super) fn count_tcp(local: &SocketAddr) {
    if let Some(table) = TABLE.get() {
        table.count_tcp(local);
    }
}

/// Observes a connection that has come to SMC. Nobody has measured what SMC-R costs and gains, so
/// nothing is learned from it.
pub(super) fn observe(stream: &SmcStream, info: &ConnectionInfo, endpoint: Endpoint) {
    let (Some(table), ConnectionInfo::Smcd(_)) = (TABLE.get(), info) else { return };
    let forced = match &endpoint {
        Endpoint::Server(server) => config::get().is_some_and(|config| config.forces(server)),
        Endpoint::Listener(_) => false,
    };
    stream.observe(table.observe(&endpoint, forced));
}
