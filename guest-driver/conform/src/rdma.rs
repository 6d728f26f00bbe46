// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The suite's interface to an RNIC for SMC-R.

use std::time::Duration;

/// The target's end of a link, as in the target's Accept or Confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEnd {
    /// Address of the target's RNIC.
    pub gid: [u8; 16],
    /// Queue pair.
    pub qpn: u32,
    /// Initial packet sequence number.
    pub psn: u32,
    /// Code of its MTU.
    pub mtu: u8,
}

/// An RNIC of the suite on a network of the target.
pub trait RdmaDevice: Send + Sync {
    /// Address of the RNIC, as a GID.
    fn gid(&self) -> [u8; 16];
    /// Another address, for a second link. Without one there are no second links.
    fn second_gid(&self) -> Option<[u8; 16]> {
        None
    }
    /// MAC address of the RNIC's port.
    fn mac(&self) -> [u8; 6];
    /// Makes a queue pair, and registers 64 KiB of memory writable for its peer.
    ///
    /// # Errors
    /// Why not, as a sentence.
    fn queue_pair(&self) -> Result<Box<dyn QueuePair>, String>;
}

/// A queue pair of the suite. Dropping the value ends the queue pair.
pub trait QueuePair: Send {
    /// Number of the queue pair.
    fn qpn(&self) -> u32;
    /// Initial packet sequence number.
    fn psn(&self) -> u32;
    /// Key of the memory.
    fn rkey(&self) -> u32;
    /// Address of the memory.
    fn address(&self) -> u64;
    /// Connects the queue pair with the target's end.
    ///
    /// # Errors
    /// Why not, as a sentence.
    fn connect(&mut self, peer: &LinkEnd) -> Result<(), String>;
    /// Sends a message.
    ///
    /// # Errors
    /// The link is over, and why.
    fn send(&mut self, message: &[u8]) -> Result<(), String>;
    /// The next message, if one comes within `limit`.
    ///
    /// # Errors
    /// The link is over, and why.
    fn receive(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, String>;
    /// Writes bytes to memory of the target, by its key and address there. Later messages come behind
    /// the bytes.
    ///
    /// # Errors
    /// The link is over, and why.
    fn write(&mut self, to: (u32, u64), bytes: &[u8]) -> Result<(), String>;
    /// `len` bytes of the memory that is writable for the target.
    fn read(&self, at: usize, len: usize) -> Vec<u8>;
}
