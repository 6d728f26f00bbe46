// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bytes of a reply to a control command.

use std::ops::Deref;

use virtio_ism_abi::Status;
use virtio_ism_abi::command::{ReplyHeader, StatsReply};
use zerocopy::IntoBytes;

/// Bytes of a reply.
#[derive(Clone, Copy)]
pub struct Reply {
    bytes: [u8; Reply::MAX],
    len: usize,
}

impl Reply {
    /// Longest reply in bytes: STATS.
    pub const MAX: usize = size_of::<ReplyHeader>() + size_of::<StatsReply>();

    /// A success: header and body.
    pub(super) fn ok(tag: u32, body: &[u8]) -> Reply {
        let mut reply = Reply::refusal(tag, Status::Ok);
        if let Some(room) = reply.bytes.get_mut(reply.len..reply.len + body.len()) {
            room.copy_from_slice(body);
            reply.len += body.len();
        }
        reply
    }

    /// The header alone.
    pub(super) fn refusal(tag: u32, status: Status) -> Reply {
        let header =
            ReplyHeader { status: status.code().into(), tag: tag.into(), ..Default::default() };
        let mut reply = Reply { bytes: [0; Reply::MAX], len: size_of::<ReplyHeader>() };
        // The buffer is longer than a header.
        let _ = header.write_to_prefix(&mut reply.bytes);
        reply
    }

    /// Truncates the reply to `room` bytes.
    pub(super) fn cut(mut self, room: usize) -> Reply {
        self.len = self.len.min(room);
        self
    }

    /// The status of the reply; `None` if truncated before the status.
    pub fn status(&self) -> Option<Status> {
        let code = self.first_chunk::<2>()?;
        Status::from_code(u16::from_le_bytes(*code))
    }
}

impl Deref for Reply {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl std::fmt::Debug for Reply {
    /// Without the body, which may hold a token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply").field("status", &self.status()).field("len", &self.len).finish()
    }
}
