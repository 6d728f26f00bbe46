//! What a program does with a connection: reads, writes and waits for readiness.

pub(crate) mod control;
pub(crate) mod epoll_ctl;
pub(crate) mod epoll_wait;
pub(crate) mod poll;
pub(crate) mod transfer;
