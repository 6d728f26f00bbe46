// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Registers of a device, mapped into this process.

use std::fmt;
use std::sync::Arc;

use super::{OutOfBounds, SharedMem};

/// A bounds-checked range of device registers. Every access is one volatile load or store of
/// exactly its width.
#[derive(Clone)]
pub struct Registers {
    offset: usize,
    len: usize,
    mem: Arc<SharedMem>,
}

macro_rules! access {
    ($read:ident, $write:ident, $word:ty) => {
        #[doc = concat!("Loads a little-endian `", stringify!($word), "`.")]
        ///
        /// # Errors
        /// The word does not lie in the range, or is not aligned.
        #[inline]
        pub fn $read(&self, at: usize) -> Result<$word, OutOfBounds> {
            let word = self.word(at, size_of::<$word>())?.cast::<$word>();
            // SAFETY: `word` checked bounds and alignment; `mem` keeps the range mapped. Any bits
            // are a value of the type. An effect of the load on the device does not concern our
            // memory.
            Ok(<$word>::from_le(unsafe { word.read_volatile() }))
        }

        #[doc = concat!("Stores a little-endian `", stringify!($word), "`.")]
        ///
        /// # Errors
        /// The word does not lie in the range, or is not aligned.
        #[inline]
        pub fn $write(&self, at: usize, value: $word) -> Result<(), OutOfBounds> {
            let word = self.word(at, size_of::<$word>())?.cast::<$word>();
            // SAFETY: as for the load; no reference to the range exists.
            unsafe { word.write_volatile(value.to_le()) };
            Ok(())
        }
    };
}

impl Registers {
    /// `len` bytes at `offset` of a mapping.
    ///
    /// # Errors
    /// The bytes do not lie in the mapping.
    pub fn new(mem: &Arc<SharedMem>, offset: usize, len: usize) -> Result<Registers, OutOfBounds> {
        mem.slice(offset, len)?;
        Ok(Registers { offset, len, mem: Arc::clone(mem) })
    }

    access!(read_u8, write_u8, u8);
    access!(read_u16, write_u16, u16);
    access!(read_u32, write_u32, u32);
    access!(read_u64, write_u64, u64);

    /// Bytes of the range.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the range has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    fn word(&self, at: usize, size: usize) -> Result<*mut u8, OutOfBounds> {
        let refused = OutOfBounds { offset: at, len: size, size: self.len };
        if at > self.len || size > self.len - at {
            return Err(refused);
        }
        // SAFETY: `new` checked the range against the mapping, and `at` lies in the range.
        let word = unsafe { self.mem.start().as_ptr().add(self.offset + at) };
        if word.addr().is_multiple_of(size) { Ok(word) } else { Err(refused) }
    }
}

impl fmt::Debug for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registers").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_every_width_are_little_endian_and_in_bounds() {
        let mem = SharedMem::anonymous(4096).unwrap();
        let registers = Registers::new(&mem, 64, 16).unwrap();
        registers.write_u64(0, 0x1122_3344_5566_7788).unwrap();
        assert_eq!(registers.read_u8(0).unwrap(), 0x88);
        assert_eq!(registers.read_u16(2).unwrap(), 0x5566);
        assert_eq!(registers.read_u32(4).unwrap(), 0x1122_3344);
        let mut bytes = [0; 8];
        mem.slice(64, 8).unwrap().copy_out(0, &mut bytes).unwrap();
        assert_eq!(bytes, 0x1122_3344_5566_7788u64.to_le_bytes());
        assert!(registers.read_u64(12).is_err());
        assert!(registers.write_u8(16, 0).is_err());
        assert!(registers.read_u32(usize::MAX).is_err());
        assert!(registers.read_u32(2).is_err(), "not aligned");
        assert!(Registers::new(&mem, 4090, 8).is_err());
    }

    #[test]
    fn a_revoked_mapping_reads_as_zero_and_takes_stores() {
        let mem = SharedMem::anonymous(4096).unwrap();
        let registers = Registers::new(&mem, 0, 4096).unwrap();
        registers.write_u32(0, 7).unwrap();
        mem.revoke().unwrap();
        assert_eq!(registers.read_u32(0).unwrap(), 0);
        registers.write_u32(0, 8).unwrap();
    }
}
