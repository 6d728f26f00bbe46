// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Test Link: is anybody there? (RFC 7609 A.3.8; SMCv2 "Test Link")
//!
//! ```text
//! 4 user data (16) | 20 reserved
//! ```

use super::header::{self, Header, REPLY, flag};
use super::{Dialect, Kind};
use crate::wire::WireError;
use crate::wire::clc::Version;

/// Test Link, request or reply (LLCV2-38).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TestLink {
    /// Whether this is the reply.
    pub reply: bool,
    /// Echoed unchanged in the reply (LLC-58).
    pub data: [u8; 16],
}

impl TestLink {
    pub(super) fn parse(header: &Header, bytes: &[u8]) -> Result<TestLink, WireError> {
        let mut reader = header.body(bytes)?;
        Ok(TestLink { reply: header.reply(), data: reader.array("user data")? })
    }

    pub(super) fn emit(&self, version: Version, dialect: &Dialect) -> Vec<u8> {
        let mut writer = header::start(version, Kind::TestLink, 0, flag(self.reply, REPLY));
        writer.bytes(&self.data);
        header::finish(writer, version, dialect)
    }
}
