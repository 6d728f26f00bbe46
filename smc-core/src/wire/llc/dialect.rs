// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where Linux and the specifications differ on LLC bytes (wire errata A-2, D-4, D-15).

/// Byte order of the length field of version 2, and of the RKey count of its Add Link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ByteOrder {
    /// As specified.
    #[default]
    BigEndian,
    /// As a little-endian Linux writes and reads them.
    LittleEndian,
    /// The low byte twice. Only for a count: a Linux of either byte order reads it right, because
    /// it reads one byte.
    Doubled,
}

impl ByteOrder {
    pub(super) fn put(self, value: u16) -> [u8; 2] {
        match self {
            ByteOrder::BigEndian => value.to_be_bytes(),
            ByteOrder::LittleEndian => value.to_le_bytes(),
            ByteOrder::Doubled => {
                let [_, low] = value.to_be_bytes();
                [low, low]
            }
        }
    }
}

/// Layout of the version 1 Add Link, which RFC 7609 Fig 32 draws without two reserved bytes that
/// version 2 and Linux have behind the MAC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddLinkLayout {
    /// GID at 12, as in version 2.
    #[default]
    Padded,
    /// GID at 10, as in Fig 32.
    Figure32,
}

/// How LLC bytes are written and what is taken of a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialect {
    /// Byte order of lengths in version 2 (LLCV2-3).
    pub length: ByteOrder,
    /// Byte order of the RKey count in the version 2 Add Link.
    pub count: ByteOrder,
    /// Layout of the version 1 Add Link.
    pub add_link: AddLinkLayout,
}

impl Dialect {
    /// As specified: big-endian, and lengths and counts must match what was received.
    pub const SPEC: Dialect = Dialect {
        length: ByteOrder::BigEndian,
        count: ByteOrder::BigEndian,
        add_link: AddLinkLayout::Padded,
    };
    /// What a little-endian Linux writes.
    pub const LINUX: Dialect = Dialect {
        length: ByteOrder::LittleEndian,
        count: ByteOrder::LittleEndian,
        add_link: AddLinkLayout::Padded,
    };
    /// What to write to a little-endian Linux.
    pub const TO_LINUX: Dialect = Dialect { count: ByteOrder::Doubled, ..Dialect::LINUX };

    /// Whether the peer's lengths may be swapped and its counts are worth nothing, so that the
    /// number of bytes received decides (wire errata D-4, D-15).
    pub(super) fn goes_by_bytes_received(&self) -> bool {
        self.length != ByteOrder::BigEndian
    }
}
