// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Frames out of pcap and pcapng files.
//!
//! The reader's memory is bounded by construction: one frame at a time, at most [`MAX_FRAME`]
//! bytes, and a short list of interfaces. Frames cut off by the capturing program are passed on up
//! to the cut.

use std::io::{self, Read};

use thiserror::Error;

/// Maximum length of a frame, bytes: the largest snapshot length in use.
pub(super) const MAX_FRAME: usize = 256 << 10;
/// Most interfaces of a pcapng section.
const MAX_INTERFACES: usize = 1024;

/// A defect of a capture file.
#[derive(Debug, Error)]
pub(crate) enum CaptureError {
    /// Reading failed, or the file ends within a record.
    #[error("after frame {frame}: {source}")]
    Read {
        /// Frames before.
        frame: u64,
        /// Why.
        source: io::Error,
    },
    /// A record longer than any frame.
    #[error("after frame {frame}: record of {len} bytes")]
    TooLong {
        /// Frames before.
        frame: u64,
        /// Its length by its own header.
        len: u32,
    },
    /// A pcapng block whose lengths contradict each other.
    #[error("after frame {frame}: block type {kind:#x} with length {len}")]
    BadBlock {
        /// Frames before.
        frame: u64,
        /// Type of the block.
        kind: u32,
        /// Its length by its own header.
        len: u32,
    },
    /// A section header with an invalid byte-order magic.
    #[error("after frame {frame}: section header with byte-order magic {magic:02x?}")]
    BadSection {
        /// Frames before.
        frame: u64,
        /// The bytes in place of the magic.
        magic: [u8; 4],
    },
    /// More interfaces than any real capture has.
    #[error("more than {MAX_INTERFACES} interfaces in a section")]
    TooManyInterfaces,
    /// A frame of an undescribed interface.
    #[error("frame {frame} belongs to interface {interface}, which is not described")]
    NoInterface {
        /// The frame.
        frame: u64,
        /// Its interface number.
        interface: u32,
    },
}

/// One frame.
pub(super) struct Frame {
    /// Number in the file, from 1, as Wireshark counts.
    pub(super) number: u64,
    /// Link type (the LINKTYPE registry of the pcap format).
    pub(super) link: u32,
    /// The captured part of the frame.
    pub(super) data: Vec<u8>,
}

#[derive(Clone, Copy)]
enum Order {
    Big,
    Little,
}

impl Order {
    fn u16(self, bytes: [u8; 2]) -> u16 {
        match self {
            Order::Big => u16::from_be_bytes(bytes),
            Order::Little => u16::from_le_bytes(bytes),
        }
    }

    fn u32(self, bytes: [u8; 4]) -> u32 {
        match self {
            Order::Big => u32::from_be_bytes(bytes),
            Order::Little => u32::from_le_bytes(bytes),
        }
    }
}

enum Format {
    Pcap {
        link: u32,
    },
    /// Link type and snapshot length of the section's interfaces.
    PcapNg {
        interfaces: Vec<(u32, u32)>,
    },
}

/// Reads frames one after the other.
pub(super) struct Capture<R> {
    reader: R,
    order: Order,
    format: Format,
    frames: u64,
}

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const OLD_PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;

/// Whether a file with this beginning is a capture.
pub(super) fn is_capture(start: &[u8]) -> bool {
    matches!(
        start.first_chunk(),
        Some(
            [0xa1, 0xb2, 0xc3, 0xd4]
                | [0xa1, 0xb2, 0x3c, 0x4d]
                | [0xd4, 0xc3, 0xb2, 0xa1]
                | [0x4d, 0x3c, 0xb2, 0xa1]
                | [0x0a, 0x0d, 0x0d, 0x0a]
        )
    )
}

impl<R: Read> Capture<R> {
    /// Reads the file header.
    ///
    /// # Errors
    /// [`CaptureError`] if the input is no capture; callers check with [`is_capture`] first.
    pub(super) fn new(mut reader: R) -> Result<Self, CaptureError> {
        let wrap = |source| CaptureError::Read { frame: 0, source };
        let magic: [u8; 4] = array(&mut reader).map_err(wrap)?;
        if u32::from_be_bytes(magic) == SECTION {
            let format = Format::PcapNg { interfaces: Vec::new() };
            let mut capture = Capture { reader, order: Order::Big, format, frames: 0 };
            capture.section()?;
            return Ok(capture);
        }
        let order = match magic[0] {
            0xa1 => Order::Big,
            _ => Order::Little,
        };
        let header: [u8; 20] = array(&mut reader).map_err(wrap)?;
        let [.., l0, l1, l2, l3] = header;
        // The upper bits say how long a trailing checksum is.
        let link = order.u32([l0, l1, l2, l3]) & 0x0fff_ffff;
        Ok(Capture { reader, order, format: Format::Pcap { link }, frames: 0 })
    }

    /// The next frame, `None` at the end of the file.
    ///
    /// # Errors
    /// [`CaptureError`]; nothing more can be read then.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, CaptureError> {
        match self.format {
            Format::Pcap { link } => self.next_record(link),
            Format::PcapNg { .. } => self.next_packet_block(),
        }
    }

    fn next_record(&mut self, link: u32) -> Result<Option<Frame>, CaptureError> {
        let Some(header) = self.start::<16>()? else { return Ok(None) };
        let [_, _, _, _, _, _, _, _, l0, l1, l2, l3, ..] = header;
        let len = self.order.u32([l0, l1, l2, l3]);
        let data = self.take(len)?;
        self.frames += 1;
        Ok(Some(Frame { number: self.frames, link, data }))
    }

    fn next_packet_block(&mut self) -> Result<Option<Frame>, CaptureError> {
        loop {
            let Some(kind) = self.start::<4>()? else { return Ok(None) };
            let kind = self.order.u32(kind);
            if kind == SECTION {
                self.section()?;
                continue;
            }
            let len = self.word()?;
            let body = match len.checked_sub(12) {
                Some(body) if len.is_multiple_of(4) => body,
                _ => return Err(CaptureError::BadBlock { frame: self.frames, kind, len }),
            };
            let known = matches!(kind, INTERFACE | OLD_PACKET | SIMPLE_PACKET | ENHANCED_PACKET);
            let block = if known {
                self.take(body)?
            } else {
                self.skip(body)?;
                Vec::new()
            };
            if self.word()? != len {
                return Err(CaptureError::BadBlock { frame: self.frames, kind, len });
            }
            if known && let Some(frame) = self.block(kind, len, &block)? {
                return Ok(Some(frame));
            }
        }
    }

    /// Parses a known block, and returns its frame, if any.
    fn block(&mut self, kind: u32, len: u32, block: &[u8]) -> Result<Option<Frame>, CaptureError> {
        let order = self.order;
        let frame = self.frames;
        let bad = || CaptureError::BadBlock { frame, kind, len };
        let word = |at: usize| -> Result<u32, CaptureError> {
            let bytes = block.get(at..).and_then(|rest| rest.first_chunk()).ok_or_else(bad)?;
            Ok(order.u32(*bytes))
        };
        let half = || -> Result<u32, CaptureError> {
            Ok(order.u16(*block.first_chunk().ok_or_else(bad)?).into())
        };
        let Format::PcapNg { interfaces } = &mut self.format else { return Ok(None) };
        if kind == INTERFACE {
            if interfaces.len() == MAX_INTERFACES {
                return Err(CaptureError::TooManyInterfaces);
            }
            interfaces.push((half()?, word(4)?));
            return Ok(None);
        }
        let number = frame + 1;
        let (interface, at, captured) = match kind {
            ENHANCED_PACKET => (word(0)?, 20, word(12)?),
            OLD_PACKET => (half()?, 20, word(12)?),
            // A simple packet states the original length only, not the captured length.
            _ => (0, 4, word(0)?),
        };
        let described = usize::try_from(interface).ok().and_then(|i| interfaces.get(i));
        let Some((link, snaplen)) = described else {
            return Err(CaptureError::NoInterface { frame: number, interface });
        };
        let body = block.get(at..).ok_or_else(bad)?;
        let mut captured = usize::try_from(captured).unwrap_or(usize::MAX);
        if kind == SIMPLE_PACKET {
            if *snaplen != 0 {
                captured = captured.min(usize::try_from(*snaplen).unwrap_or(usize::MAX));
            }
            captured = captured.min(body.len());
        }
        let data = body.get(..captured).ok_or_else(bad)?.to_vec();
        self.frames = number;
        Ok(Some(Frame { number, link: *link, data }))
    }

    /// The rest of a section header, behind its type.
    fn section(&mut self) -> Result<(), CaptureError> {
        let frame = self.frames;
        let len: [u8; 4] = self.array()?;
        let magic: [u8; 4] = self.array()?;
        self.order = match magic {
            [0x1a, 0x2b, 0x3c, 0x4d] => Order::Big,
            [0x4d, 0x3c, 0x2b, 0x1a] => Order::Little,
            _ => return Err(CaptureError::BadSection { frame, magic }),
        };
        let len = self.order.u32(len);
        let rest = match len.checked_sub(16) {
            Some(rest) if len.is_multiple_of(4) => rest,
            _ => return Err(CaptureError::BadBlock { frame, kind: SECTION, len }),
        };
        self.skip(rest)?;
        if self.word()? != len {
            return Err(CaptureError::BadBlock { frame, kind: SECTION, len });
        }
        self.format = Format::PcapNg { interfaces: Vec::new() };
        Ok(())
    }

    /// The first bytes of a record, `None` at the end of the file.
    fn start<const N: usize>(&mut self) -> Result<Option<[u8; N]>, CaptureError> {
        let frame = self.frames;
        let mut bytes = [0; N];
        let mut have = 0;
        while let Some(rest) = bytes.get_mut(have..).filter(|rest| !rest.is_empty()) {
            match self.reader.read(rest) {
                Ok(0) if have == 0 => return Ok(None),
                Ok(0) => {
                    let source = io::ErrorKind::UnexpectedEof.into();
                    return Err(CaptureError::Read { frame, source });
                }
                Ok(n) => have += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(CaptureError::Read { frame, source }),
            }
        }
        Ok(Some(bytes))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CaptureError> {
        let frame = self.frames;
        array(&mut self.reader).map_err(|source| CaptureError::Read { frame, source })
    }

    fn word(&mut self) -> Result<u32, CaptureError> {
        let order = self.order;
        Ok(order.u32(self.array()?))
    }

    fn take(&mut self, len: u32) -> Result<Vec<u8>, CaptureError> {
        let frame = self.frames;
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        // 64 bytes more than a frame: the header of the enclosing block.
        if size > MAX_FRAME + 64 {
            return Err(CaptureError::TooLong { frame, len });
        }
        let mut data = vec![0; size];
        self.reader.read_exact(&mut data).map_err(|source| CaptureError::Read { frame, source })?;
        Ok(data)
    }

    fn skip(&mut self, len: u32) -> Result<(), CaptureError> {
        let frame = self.frames;
        let skipped = io::copy(&mut self.reader.by_ref().take(len.into()), &mut io::sink());
        match skipped {
            Ok(n) if n == u64::from(len) => Ok(()),
            Ok(_) => {
                let source = io::ErrorKind::UnexpectedEof.into();
                Err(CaptureError::Read { frame, source })
            }
            Err(source) => Err(CaptureError::Read { frame, source }),
        }
    }
}

fn array<const N: usize>(reader: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    reader.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::hex;

    // Two packets, "one" and "three": as text2pcap 4.0.17 of Wireshark writes them, on Ethernet,
    const PCAP: &str = "\
        d4c3b2a10200040000000000000000000000040001000000c8ac0d6b0100000003000000030000006f6e65c8ac0d6b02 \
        00000005000000050000007468726565";
    // and as editcap makes pcapng of another file, on "Linux cooked" (113).
    const PCAPNG: &str = "\
        0a0d0d0a6c0000004d3c2b1a01000000ffffffffffffffff0400450045646974636170202857697265736861726b2920 \
        342e302e313720284769742076342e302e3137207061636b6167656420617320342e302e31372d302b64656231327533 \
        29000000000000006c000000010000001400000071000000000004001400000006000000240000000000000081610600 \
        c1c7876b03000000030000006f6e65002400000006000000280000000000000081610600c2c7876b0500000005000000 \
        746872656500000028000000";

    fn bytes(file: &str) -> Vec<u8> {
        hex::parse(file).unwrap()
    }

    fn frames(file: &[u8]) -> (Vec<Frame>, Option<CaptureError>) {
        let mut capture = match Capture::new(file) {
            Ok(capture) => capture,
            Err(error) => return (Vec::new(), Some(error)),
        };
        let mut frames = Vec::new();
        loop {
            match capture.next() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => return (frames, None),
                Err(error) => return (frames, Some(error)),
            }
        }
    }

    #[test]
    fn reads_what_another_program_wrote() {
        for (file, link) in [(bytes(PCAP), 1), (bytes(PCAPNG), 113)] {
            assert!(is_capture(&file));
            let (frames, error) = frames(&file);
            assert!(error.is_none(), "{error:?}");
            let got: Vec<_> = frames.iter().map(|f| (f.number, f.link, &f.data[..])).collect();
            assert_eq!(got, [(1, link, &b"one"[..]), (2, link, &b"three"[..])]);
        }
    }

    #[test]
    fn gives_the_frames_before_the_place_where_a_file_is_cut() {
        for file in [bytes(PCAP), bytes(PCAPNG)] {
            let (frames, error) = frames(&file[..file.len() - 1]);
            assert_eq!(frames.len(), 1);
            assert!(matches!(error, Some(CaptureError::Read { frame: 1, .. })), "{error:?}");
        }
    }

    #[test]
    fn refuses_a_record_longer_than_any_frame() {
        let mut file = bytes(PCAP);
        file[24 + 8..24 + 12].copy_from_slice(&0x7fff_ffffu32.to_be_bytes());
        let mut little = file.clone();
        little[24 + 8..24 + 12].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
        for file in [file, little] {
            let (_, error) = frames(&file);
            assert!(matches!(error, Some(CaptureError::TooLong { frame: 0, .. })), "{error:?}");
        }
    }

    #[test]
    fn refuses_blocks_with_contradicting_lengths_and_unknown_interfaces() {
        let good = bytes(PCAPNG);
        let mut trailer = good.clone();
        let end = trailer.len() - 4;
        trailer[end] ^= 4;
        trailer[end + 3] ^= 4;
        assert!(matches!(frames(&trailer).1, Some(CaptureError::BadBlock { .. })));

        let mut interface = good.clone();
        // Section header 108 bytes, interface 20, packet header 8: its interface number.
        interface[108 + 20 + 8..108 + 20 + 12].copy_from_slice(&[1; 4]);
        let error = frames(&interface).1;
        assert!(matches!(error, Some(CaptureError::NoInterface { .. })), "{error:?}");
    }

    #[test]
    fn hex_is_no_capture() {
        assert!(!is_capture(b"e2d4"));
        assert!(!is_capture(b""));
    }
}
