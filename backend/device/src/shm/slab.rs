// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A slab's memory: data, then the control tail with the nonce and the signal lines.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use virtio_ism_abi::signal::{Line, SlabLine};
use virtio_ism_abi::slab::{
    CONTROL_LEN, CONTROL_VERSION, ControlHeader, LINE_ARMED, LINE_LEN, LINE_PEND, MAX_LINES,
    SLAB_LINE, SLAB_PEND, line_offset,
};
use vm_memory::VolatileSlice;
use zerocopy::IntoBytes;

use super::{PairRange, Sealed, ShmError};

/// Sealed memory in the layout of [`virtio_ism_abi::slab`]: a file of its own, or a range of a pair's memory.
#[derive(Debug)]
pub struct SlabMemory {
    memory: Arc<Sealed>,
    /// Begin of the data in the file, bytes.
    base: u64,
    data_len: u64,
    range: Option<PairRange>,
}

impl SlabMemory {
    /// A slab with `data_len` bytes of data and this nonce in its control tail, in a file of its own.
    ///
    /// # Errors
    /// As [`Sealed::new`].
    pub fn new(data_len: u64, nonce: u64) -> Result<SlabMemory, ShmError> {
        let memory = Arc::new(Sealed::new(data_len.saturating_add(CONTROL_LEN as u64))?);
        SlabMemory { memory, base: 0, data_len, range: None }.with_header(nonce)
    }

    /// The same slab in a range of a pair's memory. The range has room for data and control tail.
    ///
    /// # Errors
    /// As [`Sealed::write`].
    pub fn within(range: PairRange, data_len: u64, nonce: u64) -> Result<SlabMemory, ShmError> {
        let (memory, base) = (range.pair().memory.clone(), range.offset());
        SlabMemory { memory, base, data_len, range: Some(range) }.with_header(nonce)
    }

    fn with_header(self, nonce: u64) -> Result<SlabMemory, ShmError> {
        let header = ControlHeader {
            nonce: nonce.into(),
            version: CONTROL_VERSION.into(),
            nlines: (MAX_LINES as u32).into(),
        };
        self.memory.write(self.base + self.data_len, header.as_bytes())?;
        Ok(self)
    }

    /// Length of data and control tail, bytes.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.data_len + CONTROL_LEN as u64
    }

    /// Length of the data, bytes.
    pub fn data_len(&self) -> u64 {
        self.data_len
    }

    /// The descriptor, to be given to the owner's and the user's front end.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// Begin of the slab in its file, bytes.
    pub fn fd_offset(&self) -> u64 {
        self.base
    }

    /// The pair's memory with the slab; `None` for a file of its own.
    pub fn range(&self) -> Option<&PairRange> {
        self.range.as_ref()
    }

    /// `len` bytes of data at `offset`.
    ///
    /// # Errors
    /// [`ShmError::Range`] outside of the data, [`ShmError::Map`] if the daemon cannot map it.
    pub fn data(&self, offset: u64, len: u64) -> Result<VolatileSlice<'_>, ShmError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.data_len => self.memory.slice(self.base + offset, len),
            _ => Err(ShmError::Range { offset, len }),
        }
    }

    /// Makes a range of the data read as zero.
    ///
    /// # Errors
    /// [`ShmError::Range`] outside of the data, otherwise as [`Sealed::zero`].
    pub fn zero(&self, offset: u64, len: u64) -> Result<(), ShmError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.data_len => self.memory.zero(self.base + offset, len),
            _ => Err(ShmError::Range { offset, len }),
        }
    }

    /// Signal line `line`.
    ///
    /// # Errors
    /// [`ShmError::Range`] beyond the last line, [`ShmError::Map`] if the daemon cannot map it.
    pub fn line(&self, line: u16) -> Result<Line<'_>, ShmError> {
        let start = self.line_start(line)?;
        let armed: &AtomicU32 = self.memory.atomic(start + LINE_ARMED as u64)?;
        let pend: &AtomicU64 = self.memory.atomic(start + LINE_PEND as u64)?;
        Ok(Line { armed, pend })
    }

    /// The slab's own line, with the pending word of signal line `line`.
    ///
    /// # Errors
    /// As [`SlabMemory::line`].
    pub fn slab_line(&self, line: u16) -> Result<SlabLine<'_>, ShmError> {
        self.line_start(line)?;
        let start = self.base + self.data_len + SLAB_LINE as u64;
        let armed: &AtomicU32 = self.memory.atomic(start + LINE_ARMED as u64)?;
        let word = SLAB_PEND as u64 + u64::from(line / 64) * 8;
        let pend: &AtomicU64 = self.memory.atomic(start + word)?;
        Ok(SlabLine { armed, pend })
    }

    /// Clears a line not used by any DMB.
    ///
    /// # Errors
    /// As [`Sealed::write`].
    pub fn clear_line(&self, line: u16) -> Result<(), ShmError> {
        self.memory.write(self.line_start(line)?, &[0; LINE_LEN])
    }

    fn line_start(&self, line: u16) -> Result<u64, ShmError> {
        let offset = line_offset(line).ok_or(ShmError::Range {
            offset: u64::from(line) * LINE_LEN as u64,
            len: LINE_LEN as u64,
        })?;
        Ok(self.base + self.data_len + offset as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;
    use vm_memory::Bytes;
    use zerocopy::FromBytes;

    const DATA: u64 = 64 << 10;

    #[test]
    fn the_control_tail_says_the_nonce_and_everything_else_is_zero() {
        let slab = SlabMemory::new(DATA, 0x1122_3344_5566_7788).unwrap();
        assert_eq!(slab.len(), DATA + CONTROL_LEN as u64);
        let mut bytes = vec![1; slab.len() as usize];
        slab.memory.slice(0, slab.len()).unwrap().read_slice(&mut bytes, 0).unwrap();
        let (data, tail) = bytes.split_at(DATA as usize);
        let (header, rest) = ControlHeader::read_from_prefix(tail).unwrap();
        assert_eq!(header.nonce.get(), 0x1122_3344_5566_7788);
        assert_eq!((header.version.get(), header.nlines.get()), (1, MAX_LINES as u32));
        assert!(data.iter().chain(rest).all(|b| *b == 0));
    }

    #[test]
    fn lines_lie_where_the_driver_looks_for_them() {
        let slab = SlabMemory::new(DATA, 1).unwrap();
        assert!(slab.line(2).unwrap().raise(5).is_empty(), "nobody armed it");
        let word = slab.memory.slice(DATA + 64 * 3 + 8, 8).unwrap();
        assert_eq!(word.load::<u64>(0, Ordering::Acquire).unwrap(), (1u64 << 5).to_le());
        slab.memory
            .slice(DATA + 64 * 3, 4)
            .unwrap()
            .store(1u32.to_le(), 0, Ordering::Release)
            .unwrap();
        assert!(!slab.line(2).unwrap().raise(5).is_empty(), "armed");
        slab.clear_line(2).unwrap();
        assert_eq!(word.load::<u64>(0, Ordering::Acquire).unwrap(), 0);
    }

    #[test]
    fn the_line_of_the_slab_ends_the_control_tail() {
        let slab = SlabMemory::new(DATA, 1).unwrap();
        let last = MAX_LINES as u16 - 1;
        let line = slab.line(last).unwrap();
        line.set_in_slab(true);
        assert!(line.raise_in(0, last, slab.slab_line(last).unwrap()).is_empty());
        let word = slab.memory.slice(slab.len() - 8, 8).unwrap();
        let bit = word.load::<u64>(0, Ordering::Acquire).unwrap();
        assert_eq!(bit, (1u64 << (last % 64)).to_le());
        assert!(slab.slab_line(last + 1).is_err());
    }

    #[test]
    fn a_slab_in_a_pair_s_memory_keeps_to_its_range() {
        let pair = crate::shm::PairMemory::new(4 << 20, 1 << 20).unwrap();
        let ranges = [1 << 20; 2].map(|len| pair.alloc(len).unwrap());
        let [first, second] = ranges.map(|range| SlabMemory::within(range, DATA, 1).unwrap());
        assert_eq!((first.fd_offset(), second.fd_offset()), (0, 1 << 20));
        second.data(0, DATA).unwrap().write_slice(&vec![7; DATA as usize], 0).unwrap();
        assert!(second.line(0).unwrap().raise(1).is_empty());
        second.slab_line(0).unwrap().raise(0);
        let mut bytes = vec![1; DATA as usize];
        first.data(0, DATA).unwrap().read_slice(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        let pend = first.line(0).unwrap().pend;
        assert_eq!(pend.load(Ordering::Acquire), 0);
        assert!(first.zero(1, DATA).is_err(), "the control tail is not data");
        second.zero(0, DATA).unwrap();
        second.data(0, DATA).unwrap().read_slice(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn neither_data_nor_lines_reach_beyond_their_part() {
        let slab = SlabMemory::new(DATA, 1).unwrap();
        assert!(slab.data(0, DATA).is_ok());
        assert!(slab.data(1, DATA).is_err(), "the control tail is not data");
        assert!(slab.line(MAX_LINES as u16 - 1).is_ok());
        assert!(slab.line(MAX_LINES as u16).is_err());
        assert!(slab.line(u16::MAX).is_err());
    }
}
