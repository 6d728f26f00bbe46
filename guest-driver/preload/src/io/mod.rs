// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The calls that read, write, wait for readiness, and ask for or change options.

pub(crate) mod control;
pub(crate) mod epoll_ctl;
pub(crate) mod epoll_wait;
pub(crate) mod kernel;
pub(crate) mod poll;
pub(crate) mod tcp_info;
pub(crate) mod transfer;
