//! Decline: not by SMC (RFC 7609 A.2.5; SMCv2 "CLC V2 Decline").

use core::fmt;

use super::Version;
use crate::wire::ids::{OsType, PeerId};

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
/// either length is taken with either version (CLCV2-82). The short form has no operating system
/// and no type reasons: they read as zero and are not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decline {
    /// Version, which decides the form that is sent.
    pub version: Version,
    /// The link group is out of sync: drop what is known of it (CLC-50).
    pub out_of_sync: bool,
    /// Sender; zero for SMC-D in Linux.
    pub peer_id: PeerId,
    /// The last reason that was evaluated (CLCV2-80).
    pub diagnosis: Diagnosis,
    /// Sender's operating system; 44-byte form only.
    pub os: OsType,
    /// Reason per SMC type; 44-byte form only.
    pub reasons: TypeReasons,
}
