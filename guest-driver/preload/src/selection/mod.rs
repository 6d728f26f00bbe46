//! SMC or TCP: who finds out, and when.
//!
//! A connection that was accepted, or that a program is making, is *undecided* until a call needs to
//! know. So a server that forks for each client leaves the handshake to the child, which opens a
//! session of its own; and a program that accepts from an event loop finds the client's message
//! waiting, so that the handshake is over in a moment. What takes longer goes on in a thread of its
//! own, and the program is told when it is over.

mod circuit_breaker;
mod declined_servers;
mod device_lock;
pub(crate) mod establish;
mod first_bytes;
mod handshake;
mod listening_ports;
pub(crate) mod option;
pub(crate) mod resolve;
pub(crate) mod session;
pub(crate) mod short_lived;

/// What carries a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Selected {
    /// SMC.
    Smc,
    /// TCP, or it is not connected: the kernel knows.
    Tcp,
    /// Nothing any more.
    Broken,
    /// It is not known yet.
    NotYet,
}

/// How long a call may wait for a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// As long as it takes.
    Block,
    /// So long that a peer that is awake can answer.
    Short,
}
