// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls to read, to write, to wait for readiness, and to ask for or to change options.

pub(crate) mod control;
pub(crate) mod epoll_ctl;
pub(crate) mod epoll_wait;
pub(crate) mod kernel;
pub(crate) mod poll;
pub(crate) mod tcp_info;
pub(crate) mod transfer;
