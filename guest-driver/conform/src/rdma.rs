// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the suite needs of an RNIC for SMC-R.

use std::time::Duration;

/// The target's end of a link, as its Accept or Confirm names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEnd {
    /// Address of its RNIC.
    pub gid: [u8; 16],
    /// Queue pair.
    pub qpn: u32,
    /// Packet sequence number that it begins with.
    pub psn: u32,
    /// Code of its MTU.
    pub mtu: u8,
}

/// An RNIC of the suite on a network of the target.
pub trait RdmaDevice: Send + Sync {
    /// Its address.
    fn gid(&self) -> [u8; 16];
    /// Another address, for a second link. Without one there are no second links.
    fn second_gid(&self) -> Option<[u8; 16]> {
        None
    }
    /// MAC address of its port.
    fn mac(&self) -> [u8; 6];
    /// Makes a queue pair, and registers memory that its peer may write.
    ///
    /// # Errors
    /// Why not, as a sentence.
    fn queue_pair(&self) -> Result<Box<dyn QueuePair>, String>;
}

/// A queue pair of the suite. It ends when dropped.
pub trait QueuePair: Send {
    /// Its number.
    fn qpn(&self) -> u32;
    /// Packet sequence number that it begins with.
    fn psn(&self) -> u32;
    /// Key of the memory.
    fn rkey(&self) -> u32;
    /// Address of the memory.
    fn address(&self) -> u64;
    /// Connects it.
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
}
