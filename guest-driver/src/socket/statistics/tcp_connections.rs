// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The TCP connections of a stack, and the reasons for TCP.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::{Mutex, Weak};

use super::reason::{Reason, Side};
use ism_sys::{ForkLocks, is_free, lock};
use smc_info::Fallback;

/// A socket of the stack.
pub(in crate::socket) trait TcpSocket: Send + Sync {
    /// The socket's TCP connection, and the reason for TCP. `None`: SMC carries the connection.
    fn tcp(&self) -> Option<(&TcpStream, &Fallback)>;
}

/// The TCP connections of a stack, and the reasons counted.
#[derive(Default)]
pub(in crate::socket) struct TcpConnections {
    /// Number of connections by code and side, and the text of the first one.
    reasons: Mutex<BTreeMap<(u32, Side), (u64, String)>>,
    open: Mutex<Vec<Weak<dyn TcpSocket>>>,
}

/// The most different reasons: a peer chooses the codes of its Declines.
const MAX_REASONS: usize = 64;

impl ForkLocks for TcpConnections {
    fn is_unlocked(&self) -> bool {
        is_free(&self.reasons) && is_free(&self.open)
    }
}

impl TcpConnections {
    /// Counts one more connection.
    pub(in crate::socket) fn count(&self, why: &Fallback) {
        let mut reasons = lock(&self.reasons);
        let mut key = (why.code().value(), Side::of(why));
        if reasons.len() >= MAX_REASONS && !reasons.contains_key(&key) {
            key.0 = 0;
        }
        let entry = reasons.entry(key).or_default();
        entry.0 += 1;
        // The sentence costs an allocation, and many connections have the same reason.
        if entry.1.is_empty() {
            entry.1 = why.to_string();
        }
    }

    /// Adds a socket to the list, for its lifetime.
    pub(in crate::socket) fn enter(&self, socket: Weak<dyn TcpSocket>) {
        let mut open = lock(&self.open);
        // Before the list grows, dropped sockets are removed. This costs little per socket.
        if open.len() == open.capacity() {
            open.retain(|socket| socket.strong_count() > 0);
            let half_empty = open.len() * 2;
            open.reserve(half_empty.max(16));
        }
        open.push(socket);
    }

    /// Counted reasons, the most frequent first.
    pub(in crate::socket) fn reasons(&self) -> Vec<Reason> {
        let reasons = lock(&self.reasons);
        let mut list: Vec<_> = reasons
            .iter()
            .map(|((code, side), (count, says))| Reason::new(*code, side.word(), says, *count))
            .collect();
        list.sort_by_key(|reason| std::cmp::Reverse(reason.count));
        list
    }

    /// The sockets not dropped yet.
    pub(super) fn open(&self) -> Vec<std::sync::Arc<dyn TcpSocket>> {
        lock(&self.open).iter().filter_map(Weak::upgrade).collect()
    }
}

impl std::fmt::Debug for TcpConnections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpConnections")
            .field("reasons", &lock(&self.reasons).len())
            .finish_non_exhaustive()
    }
}
