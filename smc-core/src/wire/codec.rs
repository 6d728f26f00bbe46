// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reads and writes fields one after the other; the reader reports name and place of missing bytes.

use super::WireError;

/// Reads big-endian fields; never reads beyond its slice (SEC-10).
///
/// Positions are bytes from the start of the message, so the slice starts there too.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader { bytes, at: 0 }
    }

    /// A reader of `need` bytes from `at` on, the target of an offset field.
    pub(crate) fn area(
        bytes: &'a [u8],
        area: &'static str,
        at: usize,
        need: usize,
    ) -> Result<Self, WireError> {
        match at.checked_add(need) {
            Some(end) if end <= bytes.len() => Ok(Reader { bytes, at }),
            _ => Err(WireError::OutOfRange { area, at, need, end: bytes.len() }),
        }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], WireError> {
        let rest = self.bytes.get(self.at..).unwrap_or(&[]);
        let Some(array) = rest.first_chunk::<N>() else {
            return Err(WireError::Truncated { field, at: self.at, need: N, have: rest.len() });
        };
        self.at += N;
        Ok(*array)
    }

    pub(crate) fn skip(&mut self, n: usize, field: &'static str) -> Result<(), WireError> {
        let have = self.bytes.len().saturating_sub(self.at);
        if have < n {
            return Err(WireError::Truncated { field, at: self.at, need: n, have });
        }
        self.at += n;
        Ok(())
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        self.array::<1>(field).map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        self.array(field).map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        self.array(field).map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        self.array(field).map(u64::from_be_bytes)
    }
}

/// Writes big-endian fields at the end of a buffer.
#[derive(Debug, Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn with_capacity(n: usize) -> Self {
        Writer(Vec::with_capacity(n))
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_be_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_be_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_be_bytes());
    }

    /// A count below 256 by its type; a larger one is a mistake in this crate and saturates.
    pub(crate) fn count(&mut self, n: usize) {
        self.u8(u8::try_from(n).unwrap_or(u8::MAX));
    }

    /// Reserved bytes.
    pub(crate) fn zeros(&mut self, n: usize) {
        self.0.resize(self.0.len() + n, 0);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Overwrites two bytes written before, such as a length.
    pub(crate) fn patch_u16(&mut self, at: usize, value: u16) {
        if let Some(slot) = self.0.get_mut(at..at + 2) {
            slot.copy_from_slice(&value.to_be_bytes());
        }
    }

    pub(crate) fn into_vec(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reader_names_the_field_that_is_missing() {
        let mut reader = Reader::new(&[1, 2, 3]);
        assert_eq!(reader.u16("first"), Ok(0x0102));
        let missing = WireError::Truncated { field: "second", at: 2, need: 4, have: 1 };
        assert_eq!(reader.u32("second"), Err(missing));
        assert_eq!(reader.u8("third"), Ok(3));
        assert_eq!(reader.at(), 3);
    }

    #[test]
    fn area_beyond_the_end_is_refused_without_overflow() {
        assert!(Reader::area(&[0; 8], "area", 4, 4).is_ok());
        let beyond = |at, need| WireError::OutOfRange { area: "area", at, need, end: 8 };
        assert_eq!(Reader::area(&[0; 8], "area", 4, 5).unwrap_err(), beyond(4, 5));
        let far = usize::MAX;
        assert_eq!(Reader::area(&[0; 8], "area", far, 1).unwrap_err(), beyond(far, 1));
    }

    #[test]
    fn writer_patches_what_it_wrote() {
        let mut writer = Writer::with_capacity(8);
        writer.u16(0);
        writer.u8(7);
        writer.patch_u16(0, 0x0102);
        assert_eq!(writer.into_vec(), [1, 2, 7]);
    }
}
