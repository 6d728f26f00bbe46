// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The suite's interface to an SMC-D fabric.

/// A device of the suite on a fabric.
pub trait Fabric: Send + Sync {
    /// GID of the device.
    fn gid(&self) -> [u8; 16];
    /// CHID of the fabric.
    fn chid(&self) -> u16;
    /// Registers a DMB, writable for the device with the GID `user`.
    ///
    /// # Errors
    /// Why not, as a sentence.
    fn register(&self, user: [u8; 16]) -> Result<Box<dyn Buffer>, String>;
    /// Attaches a DMB of `len` bytes of the target by its token.
    ///
    /// # Errors
    /// Why not, as a sentence.
    fn attach(&self, token: [u8; 8], len: u32) -> Result<Box<dyn PeerBuffer>, String>;
}

/// A DMB of the suite.
pub trait Buffer: Send {
    /// Token of the DMB, as in a CLC message.
    fn token(&self) -> [u8; 8];
    /// Length of the DMB as a size code.
    fn size_code(&self) -> u8;
    /// The producer word and the consumer-and-flags word stored by the target, as raw bytes of the
    /// memory.
    fn words(&self) -> [[u8; 8]; 2];
    /// `len` bytes from `offset`, counted from the start of the DMB.
    fn read(&self, offset: u32, len: usize) -> Vec<u8>;
}

/// A DMB of the target.
pub trait PeerBuffer: Send {
    /// Writes pieces (offset in the DMB, bytes), then the two words, and signals the target.
    ///
    /// # Errors
    /// Why not, as a sentence.
    fn deliver(&self, pieces: &[(u32, &[u8])], words: [[u8; 8]; 2]) -> Result<(), String>;
}
