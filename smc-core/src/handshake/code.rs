// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The diagnosis codes of Decline messages: Linux's values, each with a sentence for people.

use core::fmt;

macro_rules! decline_codes {
    ($($variant:ident = $value:literal, $name:literal, $advice:literal;)*) => {
        /// The diagnosis of a Decline message: Linux's values (CLC-49, CLCV2-77), and from
        /// 0x0a010000 on this project's own, for reasons unknown to Linux.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum DeclineCode {
            $(
                #[doc = concat!("`", $name, "`, ", stringify!($value), ": ", $advice, ".")]
                $variant,
            )*
            /// A value this table does not know; only reported (CLC-49).
            Unknown(u32),
        }

        impl DeclineCode {
            /// The named codes.
            pub const ALL: &[DeclineCode] = &[$(DeclineCode::$variant,)*];

            /// The number on the wire.
            pub const fn value(self) -> u32 {
                match self {
                    $(DeclineCode::$variant => $value,)*
                    DeclineCode::Unknown(value) => value,
                }
            }

            /// Linux's short name, in the spelling of its tools.
            pub const fn name(self) -> &'static str {
                match self {
                    $(DeclineCode::$variant => $name,)*
                    DeclineCode::Unknown(_) => "UNKNOWN",
                }
            }

            /// The meaning and, if possible, advice for the user.
            pub const fn advice(self) -> &'static str {
                match self {
                    $(DeclineCode::$variant => $advice,)*
                    DeclineCode::Unknown(_) => "a code of another implementation",
                }
            }
        }

        impl From<u32> for DeclineCode {
            fn from(value: u32) -> DeclineCode {
                match value {
                    $($value => DeclineCode::$variant,)*
                    other => DeclineCode::Unknown(other),
                }
            }
        }
    };
}

decline_codes! {
    NoMemory = 0x0101_0000, "MEM", "memory for a buffer or for its attachment ran out";
    ConfirmLinkTimeout = 0x0201_0000, "TIMEOUT_CL",
        "no CONFIRM LINK came on the new RDMA link: look at the RoCE network";
    AddLinkTimeout = 0x0202_0000, "TIMEOUT_AL",
        "no ADD LINK came on the RDMA link: look at the RoCE network";
    Configuration = 0x0300_0000, "CNFERR",
        "the configuration of one end does not allow what the other asked for";
    PeerNoSmc = 0x0301_0000, "PEERNOSMC", "the peer does not speak SMC or offered no type of it";
    IpSec = 0x0302_0000, "IPSEC", "the connection is under an IPsec policy, which SMC would bypass";
    NoSmcDevice = 0x0303_0000, "NOSMCDEV",
        "no SMC device on one end: start a virtio-ism device or check the options of the daemon";
    NoSmcdDevice = 0x0303_0001, "NOSMCDDEV",
        "no usable SMC-D device, or no common EID: configure the same --eid on both ends";
    NoSmcrDevice = 0x0303_0002, "NOSMCRDEV", "no usable RDMA device, GID or route for SMC-R";
    NoIsm2Support = 0x0303_0003, "NOISM2SUPP", "that end has no device for SMC-D version 2";
    NoV2Extension = 0x0303_0004, "NOV2EXT", "the Proposal offers version 2 but lacks its extension";
    NoSmcdV2Extension = 0x0303_0005, "NOV2DEXT",
        "the Proposal offers SMC-D version 2 but lacks its extension";
    NoSeid = 0x0303_0006, "NOSEID", "no system EID in common";
    NoSmcdV2Device = 0x0303_0007, "NOSMCD2DEV",
        "no device with the same CHID that reaches the peer's GID: both ends must be on one \
         fabric of one host";
    NoUeid = 0x0303_0008, "NOUEID", "no EID is configured: configure the same --eid on both ends";
    ReleaseMismatch = 0x0303_0009, "RELEASEERR",
        "Confirm does not repeat the release or features of Accept";
    MaxConnections = 0x0303_000a, "MAXCONNERR",
        "the number of connections per link group is out of range or was changed";
    MaxLinks = 0x0303_000b, "MAXLINKERR",
        "the number of links per link group is out of range or was changed";
    ModeUnsupported = 0x0304_0000, "MODEUNSUPP",
        "the server chose a type or version of SMC that was not offered";
    RmbEyeCatcher = 0x0305_0000, "RMBE_EC", "the peer uses eye catchers in its buffer elements";
    OptionUnsupported = 0x0306_0000, "OPTUNSUPP",
        "a socket option or TCP Fast Open that SMC does not have was asked for";
    DifferentPrefix = 0x0307_0000, "DIFFPREFIX",
        "the ends are not in one IP subnet, which version 1 needs";
    VlanLookup = 0x0308_0000, "GETVLANERR", "the VLAN of the connection is unknown";
    IsmVlan = 0x0309_0000, "ISMVLANERR", "the SMC-D device refused the VLAN";
    NoActiveLink = 0x030a_0000, "NOACTLINK", "the link group has no active link";
    NoServerLink = 0x030b_0000, "NOSRVLINK",
        "the server named a link that the client does not have";
    VersionMismatch = 0x030c_0000, "VERSMISMAT", "the versions of the ends do not fit";
    TooManyDmbs = 0x030d_0000, "MAX_DMB",
        "the device has no room for another DMB: raise the daemon's limits or close connections";
    NoRoute = 0x030e_0000, "NOROUTE", "no IP route to the peer's RDMA address";
    NotIndirect = 0x030f_0000, "NOINDIRECT",
        "the peer says that the RDMA route has a gateway, but it has none";
    OutOfSync = 0x0400_0000, "SYNCERR",
        "the server reuses a link that the client no longer knows; the next connection makes a \
         new one";
    PeerDeclined = 0x0500_0000, "PEERDECL", "the peer declined";
    Internal = 0x0999_0000, "INTERR", "an internal error";
    RTokenTable = 0x0999_0001, "ERR_RTOK", "the table of remote memory keys is full";
    LinkNotReady = 0x0999_0002, "ERR_RDYLNK",
        "an RDMA queue pair could not be brought into service";
    BufferRegistration = 0x0999_0003, "ERR_REGBUF",
        "a buffer could not be registered or attached, or the peer refused its key";
    Policy = 0x0a01_0000, "POLICY", "a rule of the policy file says TCP";
    NoRule = 0x0a02_0000, "NORULE",
        "no rule (--peer, --accept) names the peer, and TCP option 254 is not in use: see smc doctor";
    NoOption = 0x0a03_0000, "NOOPTION",
        "TCP option 254 cannot be used here: smc doctor says what is missing";
    TcpWanted = 0x0a04_0000, "TCPWANTED", "the program asked for what SMC does not have";
    TooShort = 0x0a05_0000, "TOOSHORT", "connections with this server are too short for SMC";
    SameProcess = 0x0a06_0000, "SAMEPROC", "client and server are one process";
    NoDescriptor = 0x0a07_0000, "NODESCR", "no descriptor is left: raise the limit (ulimit -n)";
    DeclinedBefore = 0x0a08_0000, "DECLBEFORE",
        "the server has lately declined several times in a row";
    Filtered = 0x0a09_0000, "FILTER", "a filter of system calls forbids what a device needs";
    OwnCalls = 0x0a0a_0000, "OWNCALLS",
        "the program makes system calls by instructions of its own, which the library does not see";
    Drained = 0x0a0b_0000, "DRAINED",
        "the device takes on no new connections, as the daemon was told: vhost-device-ism ctl undrain";
    OutsideShare = 0x0a0c_0000, "SHARE",
        "a rule of the policy file gives SMC to a share of the connections, and this is none of these";
    ByteOrder = 0x0a0d_0000, "BYTEORDER",
        "the machines of the ends have different byte orders, so the ends cannot share memory";
    NoAnswer = 0x0a0e_0000, "NOANSWER",
        "the device, or over RDMA the peer, left a command unanswered: is its process stopped, or \
         the machine too busy?";
    DmbInUse = 0x0a0f_0000, "DMBINUSE", "the peer offered a DMB that is not free";
}

impl fmt::Display for DeclineCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:08x} {}: {}", self.value(), self.name(), self.advice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_the_wire_and_has_a_sentence() {
        for &code in DeclineCode::ALL {
            assert_eq!(DeclineCode::from(code.value()), code);
            assert!(!code.name().is_empty());
            assert!(code.advice().len() > 10, "{code:?}");
        }
        assert_eq!(DeclineCode::ALL.len(), 51);
    }

    // Shows: CLC-49.
    #[test]
    fn unknown_code_is_kept_as_it_is() {
        let code = DeclineCode::from(0x1234_5678);
        assert_eq!(code, DeclineCode::Unknown(0x1234_5678));
        assert_eq!(code.value(), 0x1234_5678);
        assert!(code.to_string().contains("0x12345678"));
    }
}
