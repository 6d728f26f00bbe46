//! SMC or TCP: what carries a connection, and the handshake that decides it.

mod circuit_breaker;
pub(crate) mod declined_servers;
mod device_lock;
pub(crate) mod establish;
pub(crate) mod handshake;
pub(crate) mod option;
pub(crate) mod session;
pub(crate) mod short_lived;
