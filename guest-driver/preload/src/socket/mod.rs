// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The library's record of a descriptor: the state of a TCP or SMC connection, or an epoll set, and
//! the connection's registrations in epoll sets.

pub(crate) mod descriptors;
pub(crate) mod epoll_members;
pub(crate) mod epoll_set;
pub(crate) mod owner_pipe;
pub(crate) mod pair;
mod proposal_answer;
pub(crate) mod registration;
pub(crate) mod registrations;
pub(crate) mod sleeper;
pub(crate) mod smc_request;
pub(crate) mod states;
pub(crate) mod stream;
pub(crate) mod table;
