//! Connections that are TCP, and why.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::{Mutex, Weak};

use smc_core::handshake::FallbackReason;

use super::Reason;
use crate::info::Fallback;
use crate::sys::lock;

/// A socket that can tell what it is.
pub(in crate::socket) trait Described: Send + Sync {
    /// Its TCP connection, and why it is one.
    fn tcp(&self) -> Option<(&TcpStream, &Fallback)>;
}

/// Which end made a connection TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    Here,
    Peer,
}

impl Side {
    fn of(why: &Fallback) -> Side {
        match why {
            Fallback::Handshake(FallbackReason::DeclinedByPeer(_) | FallbackReason::PeerNotSmc) => {
                Side::Peer
            }
            _ => Side::Here,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Side::Here => "here",
            Side::Peer => "peer",
        }
    }
}

/// What a stack knows of its TCP connections.
#[derive(Default)]
pub(in crate::socket) struct Plain {
    /// By code and side: how many, and the text of the last one.
    reasons: Mutex<BTreeMap<(u32, Side), (u64, String)>>,
    open: Mutex<Vec<Weak<dyn Described>>>,
}

/// Reasons at most: a peer chooses the codes of its Declines.
const MAX_REASONS: usize = 64;

impl Plain {
    /// Another connection is TCP.
    pub(in crate::socket) fn count(&self, why: &Fallback) {
        let mut reasons = lock(&self.reasons);
        let mut key = (why.code().value(), Side::of(why));
        if reasons.len() >= MAX_REASONS && !reasons.contains_key(&key) {
            key.0 = 0;
        }
        let entry = reasons.entry(key).or_default();
        entry.0 += 1;
        // The sentence costs an allocation; connections that are refused alike come in numbers.
        if entry.1.is_empty() {
            entry.1 = why.to_string();
        }
    }

    /// From now on it is listed, for as long as it lives.
    pub(in crate::socket) fn enter(&self, socket: Weak<dyn Described>) {
        let mut open = lock(&self.open);
        // Room that would have to grow is looked through first, which costs little per socket.
        if open.len() == open.capacity() {
            open.retain(|socket| socket.strong_count() > 0);
            let half_empty = open.len() * 2;
            open.reserve(half_empty.max(16));
        }
        open.push(socket);
    }

    /// Counted reasons, those of most connections first.
    pub(super) fn reasons(&self) -> Vec<Reason> {
        let reasons = lock(&self.reasons);
        let mut list: Vec<_> = reasons
            .iter()
            .map(|((code, side), (count, says))| Reason::new(*code, side.word(), says, *count))
            .collect();
        list.sort_by_key(|reason| std::cmp::Reverse(reason.count));
        list
    }

    /// The sockets that live.
    pub(super) fn open(&self) -> Vec<std::sync::Arc<dyn Described>> {
        lock(&self.open).iter().filter_map(Weak::upgrade).collect()
    }
}

/// A connection's reason.
pub(super) fn reason(why: &Fallback) -> Reason {
    Reason::new(why.code().value(), Side::of(why).word(), &why.to_string(), 1)
}

impl std::fmt::Debug for Plain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plain").field("reasons", &lock(&self.reasons).len()).finish_non_exhaustive()
    }
}
