// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The RNICs of a process, and its options for SMC-R.

use std::time::Duration;

use smc_core::connection::Ring;
use smc_core::wire::Cursor;
use smc_core::wire::ids::OsType;
use thiserror::Error;

/// The RNICs used by a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Rnics {
    /// None: no SMC-R.
    None,
    /// Every RNIC present. Having none is no error.
    #[default]
    Auto,
    /// The RNICs with these names (such as `rxe0` or `mlx5_0`), all ports or one (`mlx5_0/1`).
    Names(Vec<String>),
}

/// Options of a process for SMC-R.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmcrOptions {
    /// Offer and accept version 1 (RFC 7609).
    pub v1: bool,
    /// Offer and accept version 2.
    pub v2: bool,
    /// The most links of a link group, 1 to 8 (two unless both ends are of release 2.1).
    pub max_links: u8,
    /// The most connections of a link group, 1 to 255; the group after that is a parallel one.
    pub max_connections: u8,
    /// Write and expect eye catchers at the start of elements (RMB-6); Linux has none.
    pub eye_catcher: bool,
    /// The operating system of version 1 peers, not named in their messages. AF_SMC departs from the
    /// specification, and so does this end towards Linux. Version 2 peers name their system.
    pub v1_peer_os: OsType,
    /// The time of silence before a link is tested (TEST LINK); zero: never.
    pub test_link: Duration,
    /// The lifetime of a link group after its last connection.
    pub idle_group: Duration,
    /// Physical networks: names of network interfaces or RNICs (with port, as `mlx5_0/1`), each with
    /// the id of its network. A connection with a listed interface uses an RNIC of the same network;
    /// other connections use the RNIC of their own interface.
    pub pnet: Vec<(String, String)>,
}

impl SmcrOptions {
    /// The ring in an element of `len` bytes.
    pub(crate) fn ring(&self, len: u32) -> Ring {
        ring(len, self.eye_catcher)
    }

    /// The start of the cursors of an element.
    pub(crate) fn ring_start(&self) -> Cursor {
        smallest(self.eye_catcher).start()
    }
}

/// The ring in an element of `len` bytes, behind an eye catcher or not.
pub(crate) fn ring(len: u32, eye_catcher: bool) -> Ring {
    let ring = match eye_catcher {
        true => Ring::smcr(len),
        false => Ring::smcr_without_eye_catcher(len),
    };
    // Elements are of 16 KiB to 512 MiB, each a valid ring length.
    ring.unwrap_or_else(|_| smallest(eye_catcher))
}

/// The smallest ring of an element.
fn smallest(eye_catcher: bool) -> Ring {
    const WITH: Ring = match Ring::smcr(16 << 10) {
        Ok(ring) => ring,
        Err(_) => panic!("16 KiB hold a ring"),
    };
    const WITHOUT: Ring = match Ring::smcr_without_eye_catcher(16 << 10) {
        Ok(ring) => ring,
        Err(_) => panic!("16 KiB are a ring"),
    };
    if eye_catcher { WITH } else { WITHOUT }
}

impl Default for SmcrOptions {
    fn default() -> SmcrOptions {
        SmcrOptions {
            v1: true,
            v2: true,
            max_links: 2,
            max_connections: 255,
            eye_catcher: false,
            v1_peer_os: OsType::LINUX,
            test_link: Duration::from_secs(30),
            idle_group: Duration::from_secs(600),
            pnet: Vec::new(),
        }
    }
}

/// The reason for the absence of SMC-R.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NoRdma {
    /// RDMA is switched off.
    #[error("RDMA is switched off")]
    Off,
    /// libibverbs is not available.
    #[error("no libibverbs")]
    NoLibrary,
    /// There is no RNIC at all.
    #[error("no RNIC")]
    NoDevice,
    /// An RNIC requested by name cannot be used.
    #[error("{name}: {why}")]
    Rnic {
        /// The name.
        name: String,
        /// The error of the RNIC.
        why: String,
    },
    /// The system has no room for RDMA.
    #[error("no room for RDMA: {0}")]
    System(String),
}

impl Rnics {
    /// The ports of an RNIC to be used: `None`, none; `Some(None)`, all.
    pub(super) fn ports_of(&self, device: &str) -> Option<Option<Vec<u8>>> {
        let names = match self {
            Rnics::None => return None,
            Rnics::Auto => return Some(None),
            Rnics::Names(names) => names,
        };
        let mut ports = Vec::new();
        for name in names {
            match name.split_once('/') {
                None if name == device => return Some(None),
                Some((name, port)) if name == device => ports.extend(port.parse::<u8>()),
                _ => {}
            }
        }
        (!ports.is_empty()).then_some(Some(ports))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnics_are_named_whole_or_by_port() {
        let names = |list: &[&str]| Rnics::Names(list.iter().map(|n| n.to_string()).collect());
        assert_eq!(Rnics::None.ports_of("rxe0"), None);
        assert_eq!(Rnics::Auto.ports_of("rxe0"), Some(None));
        assert_eq!(names(&["rxe1"]).ports_of("rxe0"), None);
        assert_eq!(names(&["rxe0"]).ports_of("rxe0"), Some(None));
        assert_eq!(names(&["a/1", "b/1", "a/2"]).ports_of("a"), Some(Some(vec![1, 2])));
        assert_eq!(names(&["a/x"]).ports_of("a"), None);
    }
}
