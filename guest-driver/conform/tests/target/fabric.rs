// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A fabric of this process, shared by the suite and the target. The fabric carries no data: only
//! the suite's presence and buffers are known.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use smc_conform::{Buffer, PeerBuffer};
use smc_core::handshake::{Candidate, Dmbe};

use super::CHID;

/// GID of the suite.
pub(crate) const SUITE: [u8; 16] = [0x43, 2, 3, 4, 5, 6, 0x47, 8, 0x99, 10, 11, 12, 13, 14, 15, 17];
/// Size code of the suite's buffers.
const SIZE: u8 = 2;

/// The suite's buffers: size code by token.
#[derive(Clone, Default)]
pub(crate) struct Fabric(Arc<Mutex<HashMap<u64, u8>>>);

impl Fabric {
    /// Whether the suite is at the other end of a pair of devices.
    pub(crate) fn reaches(&self, pair: &Candidate) -> bool {
        let halves = if pair.chid.is_emulated() { 16 } else { 8 };
        pair.peer.0[..halves] == SUITE[..halves]
    }

    /// Whether the suite has this buffer.
    pub(crate) fn has(&self, buffer: &Dmbe) -> bool {
        let size = self.0.lock().unwrap().get(&buffer.token.0).copied();
        size == Some(buffer.size.code())
    }
}

impl smc_conform::Fabric for Fabric {
    fn gid(&self) -> [u8; 16] {
        SUITE
    }

    fn chid(&self) -> u16 {
        CHID
    }

    fn register(&self, _: [u8; 16]) -> Result<Box<dyn Buffer>, String> {
        let mut buffers = self.0.lock().unwrap();
        let token = 0x5000 + buffers.len() as u64;
        buffers.insert(token, SIZE);
        Ok(Box::new(Registered(token)))
    }

    fn attach(&self, _: [u8; 8], _: u32) -> Result<Box<dyn PeerBuffer>, String> {
        Ok(Box::new(Nobodys))
    }
}

/// A buffer of the target, never read.
struct Nobodys;

impl PeerBuffer for Nobodys {
    fn deliver(&self, _: &[(u32, &[u8])], _: [[u8; 8]; 2]) -> Result<(), String> {
        Ok(())
    }
}

struct Registered(u64);

impl Buffer for Registered {
    fn token(&self) -> [u8; 8] {
        self.0.to_be_bytes()
    }

    fn size_code(&self) -> u8 {
        SIZE
    }

    fn words(&self) -> [[u8; 8]; 2] {
        [[0; 8]; 2]
    }

    fn read(&self, _: u32, len: usize) -> Vec<u8> {
        vec![0; len]
    }
}
