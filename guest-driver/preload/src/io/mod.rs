//! The calls that read, write, wait for readiness, and ask for or change options.

pub(crate) mod control;
pub(crate) mod epoll_ctl;
pub(crate) mod epoll_wait;
pub(crate) mod kernel;
pub(crate) mod poll;
pub(crate) mod transfer;
