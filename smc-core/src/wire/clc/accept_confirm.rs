// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Accept and Confirm: the parts shared by their four layouts.
//!
//! Both messages of an SMC type have the same fields: the server's in Accept, the client's in
//! Confirm (RFC 7609 A.2.3, A.2.4; SMCv2 "CLC Accept", "CLC Confirm"). The layouts are in
//! [`super::smcd`] and [`super::smcr`].

use crate::wire::WireError;
use crate::wire::codec::{Reader, Writer};
use crate::wire::ids::{Features, Hostname, OsType, Release, SizeCode};

/// SMC type bits of byte 7.
pub(super) const TYPE_R: u8 = 0b00;
pub(super) const TYPE_D: u8 = 0b01;

/// Element size from the high nibble of its byte; a code above `max` is a reserved value.
pub(super) fn size_code(
    byte: u8,
    max: SizeCode,
    field: &'static str,
) -> Result<SizeCode, WireError> {
    let value = byte >> 4;
    match SizeCode::new(value) {
        Some(size) if size <= max => Ok(size),
        _ => Err(WireError::ReservedValue { field, value }),
    }
}

/// First contact extension (SMCv2 "FCE"): parameters of a new link group or ISM peer.
///
/// ```text
///  0 link type (SMC-R) | 1 OS (high nibble), release (low) | 2 reserved | 4 host name
/// 36 max connections, max links (SMC-R) | 38 features | 40 vendor options | 44 reserved
/// ```
///
/// SMC-D sends the second line from v2.1 on, SMC-R always (CLCV2-65, wire errata A-11). The limits
/// of a link group are in SMC-R's extension only (EISM-24).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fce {
    /// Sender's operating system.
    pub os: OsType,
    /// Release in Accept: the negotiated one; Confirm repeats it (CLCV2-86).
    pub release: Release,
    /// Sender's host name.
    pub hostname: Hostname,
    /// Accept: the server's features; Confirm: the common ones (CLCV2-61). v2.1 only.
    pub features: Features,
    /// Vendor's answer; zero without (CLCV2-15). v2.1 only.
    pub vendor: [u8; 4],
}

/// Bytes of an extension without the fields of v2.1.
pub(super) const FCE_V2_0_LEN: usize = 36;
/// Bytes of an extension with them.
pub(super) const FCE_V2_1_LEN: usize = 52;

impl Fce {
    /// Reads bytes 1 to 35.
    pub(super) fn parse_base(reader: &mut Reader<'_>) -> Result<Fce, WireError> {
        let byte = reader.u8("operating system and release")?;
        reader.skip(2, "reserved")?;
        Ok(Fce {
            os: OsType::from_code(byte >> 4),
            release: Release::from_code(byte),
            hostname: Hostname::from_wire(reader.array("host name")?),
            ..Fce::default()
        })
    }

    /// Reads bytes 38 to 51.
    pub(super) fn parse_v2_1(&mut self, reader: &mut Reader<'_>) -> Result<(), WireError> {
        self.features = Features::from_bits_truncate(reader.u16("feature mask")?);
        self.vendor = reader.array("vendor options")?;
        reader.skip(8, "reserved")
    }

    /// Writes bytes 1 to 35.
    pub(super) fn emit_base(&self, writer: &mut Writer) {
        writer.u8(self.os.code() << 4 | self.release.code());
        writer.zeros(2);
        writer.bytes(self.hostname.as_bytes());
    }

    /// Writes bytes 38 to 51; zeros in v2.0.
    pub(super) fn emit_v2_1(&self, writer: &mut Writer) {
        if self.release.has_v2_1_fields() {
            writer.u16(self.features.bits());
            writer.bytes(&self.vendor);
            writer.zeros(8);
        } else {
            writer.zeros(14);
        }
    }
}
