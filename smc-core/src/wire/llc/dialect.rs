// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where Linux and the specifications differ on LLC bytes (wire errata A-2, D-4, D-15).

/// Byte order of the length field of version 2, and of the RKey count of its Add Link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ByteOrder {
    /// The specified order.
    #[default]
    BigEndian,
    /// The order of a little-endian Linux, written and read.
    LittleEndian,
    /// The low byte twice. Only for a count: a Linux of either byte order reads one byte, hence the
    /// right value.
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

/// Layout of the version 1 Add Link. RFC 7609 Fig 32 lacks the two reserved bytes of version 2 and
/// Linux behind the MAC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddLinkLayout {
    /// GID at 12, as in version 2.
    #[default]
    Padded,
    /// GID at 10, as in Fig 32.
    Figure32,
}

/// Encoding of LLC bytes, and tolerance of a peer's encoding.
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
    /// The specification: big-endian; lengths and counts must match the received bytes.
    pub const SPEC: Dialect = Dialect {
        length: ByteOrder::BigEndian,
        count: ByteOrder::BigEndian,
        add_link: AddLinkLayout::Padded,
    };
    /// The encoding of a little-endian Linux.
    pub const LINUX: Dialect = Dialect {
        length: ByteOrder::LittleEndian,
        count: ByteOrder::LittleEndian,
        add_link: AddLinkLayout::Padded,
    };
    /// The encoding for messages to a little-endian Linux.
    pub const TO_LINUX: Dialect = Dialect { count: ByteOrder::Doubled, ..Dialect::LINUX };

    /// Whether the number of received bytes decides, because the peer's lengths may be swapped and
    /// its counts are useless (wire errata D-4, D-15).
    pub(super) fn goes_by_bytes_received(&self) -> bool {
        self.length != ByteOrder::BigEndian
    }
}
