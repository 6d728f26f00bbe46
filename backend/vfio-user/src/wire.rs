// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vfio-user messages in the stream's format, and their checks.
//!
//! A message is a header and a body. All numbers have the byte order of the host. Each request is read from a
//! private copy, with an error for each kind of mistake.

use thiserror::Error;

use crate::region::MAX_DATA;

/// Bytes of a header.
pub(crate) const HEADER: usize = 16;
/// Bytes of a client's longest message: a REGION_WRITE, or a VERSION with its text.
pub(crate) const MAX_MESSAGE: usize = HEADER + 16 + MAX_DATA;
/// Most descriptors of a client's message.
pub(crate) const MAX_FDS: usize = 16;

/// Bits of the flags: the type of a message.
const TYPE: u32 = 0xf;
/// A reply.
pub(crate) const REPLY: u32 = 1;
/// No reply is wanted.
const NO_REPLY: u32 = 1 << 4;
/// The reply is an error.
pub(crate) const ERROR: u32 = 1 << 5;

/// Numbers of the commands.
pub(crate) mod command {
    pub(crate) const VERSION: u16 = 1;
    pub(crate) const DMA_MAP: u16 = 2;
    pub(crate) const DMA_UNMAP: u16 = 3;
    pub(crate) const GET_INFO: u16 = 4;
    pub(crate) const GET_REGION_INFO: u16 = 5;
    pub(crate) const GET_REGION_IO_FDS: u16 = 6;
    pub(crate) const GET_IRQ_INFO: u16 = 7;
    pub(crate) const SET_IRQS: u16 = 8;
    pub(crate) const REGION_READ: u16 = 9;
    pub(crate) const REGION_WRITE: u16 = 10;
    pub(crate) const RESET: u16 = 13;
    pub(crate) const DIRTY_PAGES: u16 = 14;
    pub(crate) const REGION_WRITE_MULTI: u16 = 15;
    pub(crate) const DEVICE_FEATURE: u16 = 16;
}

/// Why a header ends the stream: the following bytes cannot be told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HeaderError {
    /// Shorter than a header, or longer than any message.
    #[error("a message of {0} bytes; it has {HEADER} to {MAX_MESSAGE}")]
    Size(u32),
    /// Not a request.
    #[error("flags {0:#x}, which are no request")]
    Flags(u32),
}

/// The head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) id: u16,
    pub(crate) command: u16,
    /// Bytes after the header.
    pub(crate) body: usize,
    pub(crate) wants_reply: bool,
}

impl Header {
    pub(crate) fn parse(bytes: &[u8; HEADER]) -> Result<Header, HeaderError> {
        let fields = Fields(bytes);
        let (size, flags) = (fields.u32(4), fields.u32(8));
        let len = usize::try_from(size).unwrap_or(usize::MAX);
        if !(HEADER..=MAX_MESSAGE).contains(&len) {
            return Err(HeaderError::Size(size));
        }
        if flags & TYPE != 0 || flags & !(TYPE | NO_REPLY | ERROR) != 0 {
            return Err(HeaderError::Flags(flags));
        }
        Ok(Header {
            id: fields.u16(0),
            command: fields.u16(2),
            body: len - HEADER,
            wants_reply: flags & NO_REPLY == 0,
        })
    }

    /// The header of an answer with `body` bytes, or of an error.
    pub(crate) fn answer(&self, body: usize, errno: Option<u32>) -> [u8; HEADER] {
        let flags = REPLY | errno.map_or(0, |_| ERROR);
        let mut bytes = [0; HEADER];
        put(&mut bytes, 0, &self.id.to_ne_bytes());
        put(&mut bytes, 2, &self.command.to_ne_bytes());
        // No answer is longer than the longest request.
        put(&mut bytes, 4, &((HEADER + body) as u32).to_ne_bytes());
        put(&mut bytes, 8, &flags.to_ne_bytes());
        put(&mut bytes, 12, &errno.unwrap_or(0).to_ne_bytes());
        bytes
    }
}

/// Fields of a body by their offset. Bytes beyond the end are zeros: the length is checked before.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let bytes = self.0.get(at..).and_then(|tail| tail.first_chunk::<N>());
        bytes.copied().unwrap_or([0; N])
    }

    pub(crate) fn u16(&self, at: usize) -> u16 {
        u16::from_ne_bytes(self.array(at))
    }

    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.array(at))
    }

    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.array(at))
    }
}

/// Stores bytes at an offset; cuts bytes beyond the end.
pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..) {
        for (byte, value) in place.iter_mut().zip(value) {
            *byte = *value;
        }
    }
}

/// Why a body is wrong. The request is refused, and the stream goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BodyError {
    /// A wrong length for the command.
    #[error("command {command} with {len} bytes after the header instead of {expected}")]
    Length {
        /// The command.
        command: u16,
        /// Actual length, bytes.
        len: usize,
        /// Expected length, bytes.
        expected: usize,
    },
    /// `argsz` is smaller than the structure.
    #[error("command {command} with argsz {argsz}; the structure has {least} bytes")]
    ArgSize {
        /// The command.
        command: u16,
        /// The value of `argsz`.
        argsz: u32,
        /// Bytes of the structure.
        least: u32,
    },
    /// A wrong number of descriptors for the command.
    #[error("command {command} with {fds} descriptors instead of {expected}")]
    Descriptors {
        /// The command.
        command: u16,
        /// Actual number of descriptors.
        fds: usize,
        /// Expected number of descriptors.
        expected: usize,
    },
    /// Not a command of a client, or an unsupported one.
    #[error("command {0}, which is not served")]
    Command(u16),
}

/// Checks a body for exactly `expected` bytes; the first four are `argsz`.
pub(crate) fn structure(
    command: u16,
    body: &[u8],
    expected: usize,
) -> Result<Fields<'_>, BodyError> {
    let fields = sized(command, body, expected)?;
    let (argsz, least) = (fields.u32(0), expected as u32);
    if argsz < least {
        return Err(BodyError::ArgSize { command, argsz, least });
    }
    Ok(fields)
}

/// Checks a body for exactly `expected` bytes.
pub(crate) fn sized(command: u16, body: &[u8], expected: usize) -> Result<Fields<'_>, BodyError> {
    if body.len() != expected {
        return Err(BodyError::Length { command, len: body.len(), expected });
    }
    Ok(Fields(body))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(size: u32, flags: u32) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        put(&mut bytes, 0, &7u16.to_ne_bytes());
        put(&mut bytes, 2, &command::REGION_READ.to_ne_bytes());
        put(&mut bytes, 4, &size.to_ne_bytes());
        put(&mut bytes, 8, &flags.to_ne_bytes());
        bytes
    }

    #[test]
    fn a_header_says_what_follows() {
        let parsed = Header::parse(&header(32, NO_REPLY)).unwrap();
        let expected = Header { id: 7, command: 9, body: 16, wants_reply: false };
        assert_eq!(parsed, expected);
        let answer = Header::parse(&header(32, 0)).unwrap().answer(3, Some(22));
        let fields = Fields(&answer);
        assert_eq!((fields.u16(0), fields.u16(2), fields.u32(4)), (7, 9, 19));
        assert_eq!((fields.u32(8), fields.u32(12)), (REPLY | ERROR, 22));
    }

    #[test]
    fn a_length_that_no_message_has_is_refused() {
        for size in [0, 15, MAX_MESSAGE as u32 + 1, u32::MAX] {
            assert_eq!(Header::parse(&header(size, 0)), Err(HeaderError::Size(size)));
        }
        assert!(Header::parse(&header(16, 0)).is_ok());
        assert!(Header::parse(&header(MAX_MESSAGE as u32, 0)).is_ok());
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for flags in [REPLY, 2, 0xf, 1 << 6, u32::MAX] {
            assert_eq!(Header::parse(&header(16, flags)), Err(HeaderError::Flags(flags)));
        }
    }
}
