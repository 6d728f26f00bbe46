//! What a program does with a connection: reads, writes and waits for readiness.

pub(crate) mod poll;
pub(crate) mod transfer;
