// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Decline: not by SMC (RFC 7609 A.2.5; SMCv2 "CLC V2 Decline").
//!
//! ```text
//! 0 header | 8 peer id | 16 diagnosis | 20 OS (high nibble), reserved | 24 trailer
//! 44 bytes:                                     24 reasons Dv2, Dv1, Rv2, Rv1 | 40 trailer
//! ```

use core::fmt;

use super::header::{self, FLAG_BIT4, Header};
use super::{EyeCatcher, Kind, Version};
use crate::wire::WireError;
use crate::wire::codec::Reader;
use crate::wire::ids::{OsType, PeerId};

/// Total length without the fields of version 2.
const SHORT_LEN: usize = 28;
/// Total length with them (CLCV2-77).
const LONG_LEN: usize = 44;

/// Why an SMC type was declined; the meaning of the number is the sender's affair (CLC-49).
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Diagnosis(pub u32);

impl Diagnosis {
    /// Zero: in a type reason, "was not offered" (CLCV2-79).
    pub const NONE: Diagnosis = Diagnosis(0);
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

impl fmt::Debug for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Diagnosis({self})")
    }
}

/// The reason for each SMC type; all zero in a late Decline (CLCV2-79, CLCV2-81).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TypeReasons {
    /// Why not SMC-Dv2.
    pub smcd_v2: Diagnosis,
    /// Why not SMC-Dv1.
    pub smcd_v1: Diagnosis,
    /// Why not SMC-Rv2.
    pub smcr_v2: Diagnosis,
    /// Why not SMC-Rv1.
    pub smcr_v1: Diagnosis,
}

/// A Decline message.
///
/// Version 1 is sent as 28 bytes and version 2 as 44, as Linux breaks the connection otherwise;
/// either length is taken with either version (CLCV2-82), and either eye catcher (CLCV2-78). The
/// short form has no operating system and no type reasons: both read as zero and are not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decline {
    /// Version; decides the form on emit.
    pub version: Version,
    /// The link group is out of sync: drop its known state (CLC-50).
    pub out_of_sync: bool,
    /// Sender; zero for SMC-D in Linux.
    pub peer_id: PeerId,
    /// The reason evaluated last (CLCV2-80).
    pub diagnosis: Diagnosis,
    /// Sender's operating system; 44-byte form only.
    pub os: OsType,
    /// Reason per SMC type; 44-byte form only.
    pub reasons: TypeReasons,
}

impl Decline {
    pub(super) fn parse_body(header: &Header, body: &[u8]) -> Result<Decline, WireError> {
        let long = match header.length {
            SHORT_LEN => false,
            LONG_LEN => true,
            _ if header.version() == Version::V1 => return Err(header.length_mismatch(SHORT_LEN)),
            _ => return Err(header.length_mismatch(LONG_LEN)),
        };
        let mut reader = Reader::new(body);
        reader.skip(header::HEADER_LEN, "header")?;
        let mut decline = Decline {
            version: header.version(),
            out_of_sync: header.flags & FLAG_BIT4 != 0,
            peer_id: PeerId(reader.array("peer id")?),
            diagnosis: Diagnosis(reader.u32("diagnosis")?),
            os: OsType::default(),
            reasons: TypeReasons::default(),
        };
        if long {
            decline.os = OsType::from_code(reader.u8("operating system")? >> 4);
            reader.skip(3, "reserved")?;
            let mut reason = || reader.u32("type reason").map(Diagnosis);
            decline.reasons = TypeReasons {
                smcd_v2: reason()?,
                smcd_v1: reason()?,
                smcr_v2: reason()?,
                smcr_v1: reason()?,
            };
        }
        Ok(decline)
    }

    /// The bytes of the message.
    pub fn emit(&self) -> Vec<u8> {
        let flags = if self.out_of_sync { FLAG_BIT4 } else { 0 };
        let mut writer = header::start(EyeCatcher::Smcr, Kind::Decline, self.version, flags);
        writer.bytes(&self.peer_id.0);
        writer.u32(self.diagnosis.0);
        match self.version {
            Version::V1 => writer.zeros(4),
            Version::V2 => {
                writer.u8(self.os.code() << 4);
                writer.zeros(3);
                let TypeReasons { smcd_v2, smcd_v1, smcr_v2, smcr_v1 } = self.reasons;
                for reason in [smcd_v2, smcd_v1, smcr_v2, smcr_v1] {
                    writer.u32(reason.0);
                }
            }
        }
        header::finish(writer, EyeCatcher::Smcr)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Message;
    use super::*;

    fn decline(version: Version) -> Decline {
        Decline {
            version,
            out_of_sync: false,
            peer_id: PeerId([1, 2, 3, 4, 5, 6, 7, 8]),
            diagnosis: Diagnosis(0x0303_0001),
            os: OsType::default(),
            reasons: TypeReasons::default(),
        }
    }

    fn parse(bytes: &[u8]) -> Result<Decline, WireError> {
        match Message::parse(bytes)? {
            Message::Decline(decline) => Ok(decline),
            other => panic!("not a Decline: {other:?}"),
        }
    }

    // Shows: CLC-49.
    #[test]
    fn version_decides_the_length_that_is_sent() {
        assert_eq!(decline(Version::V1).emit().len(), SHORT_LEN);
        assert_eq!(decline(Version::V2).emit().len(), LONG_LEN);
    }

    #[test]
    fn out_of_sync_is_bit_4_of_byte_7_in_both_versions() {
        for version in [Version::V1, Version::V2] {
            let sent = Decline { out_of_sync: true, ..decline(version) };
            assert_eq!(sent.emit()[7], version.number() << 4 | 0x08);
            assert_eq!(parse(&sent.emit()), Ok(sent));
        }
    }

    // Shows: CLCV2-78.
    #[test]
    fn either_length_is_taken_with_either_version_and_either_eye_catcher() {
        let mut short_v2 = decline(Version::V1).emit();
        short_v2[7] = 0x20;
        assert_eq!(parse(&short_v2), Ok(decline(Version::V2)));
        let mut long_v1 = decline(Version::V2).emit();
        long_v1[7] = 0x10;
        assert_eq!(parse(&long_v1), Ok(decline(Version::V1)));
        let mut smcd = decline(Version::V1).emit();
        smcd[3] = 0xc4;
        let at = 24;
        let got = EyeCatcher::Smcr.bytes();
        assert_eq!(parse(&smcd), Err(WireError::BadTrailingEyeCatcher { at, got }));
        smcd[27] = 0xc4;
        assert_eq!(parse(&smcd), Ok(decline(Version::V1)));
    }

    #[test]
    fn other_lengths_are_refused() {
        let mut bytes = decline(Version::V2).emit();
        bytes.drain(36..40);
        bytes[6] = 40;
        let got = 40;
        let message = "Decline";
        assert_eq!(parse(&bytes), Err(WireError::LengthMismatch { message, got, expected: 44 }));
        bytes[7] = 0x10;
        assert_eq!(parse(&bytes), Err(WireError::LengthMismatch { message, got, expected: 28 }));
    }

    // Shows: CLCV2-77.
    #[test]
    fn type_reasons_stand_in_the_order_of_the_specification() {
        let reasons = TypeReasons {
            smcd_v2: Diagnosis(1),
            smcd_v1: Diagnosis(2),
            smcr_v2: Diagnosis(3),
            smcr_v1: Diagnosis(4),
        };
        let sent = Decline { reasons, os: OsType::AIX, ..decline(Version::V2) };
        let bytes = sent.emit();
        assert_eq!(bytes[20], 0x30);
        assert_eq!(bytes[24..40], [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4]);
        assert_eq!(parse(&bytes), Ok(sent));
    }
}
