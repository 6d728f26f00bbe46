// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A client's requests, one at a time, and their answers.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use thiserror::Error;

use crate::back_end::{BackEnd, BackEndError};
use crate::device::{Connect, Device, Report};
use crate::dma::{DmaError, MAX_MAPS};
use crate::irq::{IrqError, KINDS, MSIX};
use crate::region::{self, AccessError, MAX_DATA, REGIONS, SHARED_BAR, SharedMemory};
use crate::stream::{ClientStream, Incoming, StreamError};
use crate::wire::{BodyError, Fields, Header, MAX_FDS, command, put, sized, structure};
use crate::{Event, Identity};

/// Major version of the protocol; the minor version is 0, too.
const MAJOR: u16 = 0;

/// Why a client is no longer served.
#[derive(Debug, Error)]
pub enum EndError {
    /// The stream has ended, or is malformed.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// There is no back end.
    #[error(transparent)]
    BackEnd(#[from] BackEndError),
    /// The first message is not VERSION, or VERSION came again.
    #[error("command {0} where VERSION comes first, and once")]
    Order(u16),
    /// An unsupported version.
    #[error("version {0}.{1}; version {MAJOR}.0 is served")]
    Version(u16, u16),
    /// The text of VERSION does not end, or the message has descriptors.
    #[error("a VERSION of {len} bytes with {fds} descriptors and without an end")]
    VersionText {
        /// Bytes after the header.
        len: usize,
        /// Number of descriptors.
        fds: usize,
    },
}

impl EndError {
    /// Whether a correct client may end like this: a client can be killed at any time.
    pub fn is_orderly(&self) -> bool {
        matches!(self, EndError::Stream(StreamError::Closed | StreamError::Cut))
    }
}

/// A refused request. The client is still served.
#[derive(Debug, Error)]
enum Refusal {
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error(transparent)]
    Dma(#[from] DmaError),
    #[error(transparent)]
    Irq(#[from] IrqError),
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error("information on region {0}; there are {REGIONS}")]
    Region(u32),
    #[error("information on interrupts of kind {0}, which the function does not have")]
    Interrupts(u32),
    #[error("a write of {count} bytes with {len} bytes of data")]
    Data { count: u32, len: usize },
    /// Ends the client.
    #[error(transparent)]
    End(#[from] BackEndError),
}

impl Refusal {
    /// Whether correct clients send such a request, too, to probe for support.
    fn is_usual(&self) -> bool {
        match self {
            Refusal::Interrupts(kind) => *kind < KINDS,
            Refusal::Body(BodyError::Command(number)) => matches!(
                *number,
                command::GET_REGION_IO_FDS
                    | command::DIRTY_PAGES
                    | command::REGION_WRITE_MULTI
                    | command::DEVICE_FEATURE
            ),
            _ => false,
        }
    }

    fn errno(&self) -> u32 {
        let errno = match self {
            // Known to clients as "not supported by the device".
            Refusal::Body(BodyError::Command(_)) => Errno::NOTSUP,
            Refusal::Dma(DmaError::Overlap { .. }) => Errno::EXIST,
            Refusal::Dma(DmaError::NotMapped { .. }) => Errno::NOENT,
            Refusal::Dma(DmaError::TooMany | DmaError::TooManyFiles) => Errno::NOSPC,
            _ => Errno::INVAL,
        };
        errno.raw_os_error().unsigned_abs()
    }
}

/// Serves one client to its end. `share` makes the shared memory, for a client that maps areas with files of
/// their own; its argument is the largest number of areas, and without shared memory the device has none.
/// `connect` makes a connection to the back end: at the begin, and when a
/// driver resets the function after the end of the back end. `report` gets every [`Event`], and has to limit
/// its own log lines.
///
/// # Errors
/// The reason for the end; [`EndError::is_orderly`] tells an end without a fault.
pub fn serve<'a, B: BackEnd>(
    client: UnixStream,
    identity: Identity,
    share: impl FnOnce(usize) -> Option<SharedMemory>,
    connect: &'a mut Connect<'a, B>,
    report: &'a mut Report<'a>,
) -> Result<std::convert::Infallible, EndError> {
    let mut stream = ClientStream::new(client).map_err(StreamError::from)?;
    let areas = negotiate(&mut stream)?;
    let shared = if areas == 0 { None } else { share(areas) };
    let mut device = Device::new(identity, shared, connect, report)?;
    loop {
        match stream.next(device.link())? {
            Incoming::Other => {
                let gone = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
                device.lose_back_end(&gone.into());
            }
            Incoming::Message(header, _) if header.command == command::VERSION => {
                return Err(EndError::Order(header.command));
            }
            Incoming::Message(header, fds) => {
                device.report(Event::Request);
                let answer = handle(&mut device, &header, stream.body(&header), fds);
                let result = match answer {
                    Ok(Answer { body, with_files }) if header.wants_reply => {
                        let shared = device.shared().filter(|_| with_files);
                        let fds = shared.map(SharedMemory::fds).unwrap_or_default();
                        stream.send(&header.answer(body.len(), None), &body, &fds)
                    }
                    Ok(_) => Ok(()),
                    Err(Refusal::End(error)) => return Err(error.into()),
                    Err(refusal) => {
                        if !refusal.is_usual() {
                            device.report(Event::Refused(&refusal));
                        }
                        if header.wants_reply {
                            stream.send(&header.answer(0, Some(refusal.errno())), &[], &[])
                        } else {
                            Ok(())
                        }
                    }
                };
                result?;
            }
        }
    }
}

/// The answer to a served request.
struct Answer {
    body: Vec<u8>,
    /// The files of the shared memory go with the answer.
    with_files: bool,
}

impl From<Vec<u8>> for Answer {
    fn from(body: Vec<u8>) -> Answer {
        Answer { body, with_files: false }
    }
}

/// Number of areas of shared memory that a client maps with files of their own, from the text of its VERSION.
/// A client that says nothing, or says it in another form, has no such areas.
fn areas_of(text: &[u8]) -> usize {
    let text = text.strip_suffix(&[0]).unwrap_or(text);
    let text: serde_json::Value = serde_json::from_slice(text).unwrap_or_default();
    let capabilities = &text["capabilities"];
    if capabilities["sparse_mmap_fds"] != true {
        return 0;
    }
    // The protocol's default is one descriptor.
    let most = capabilities["max_msg_fds"].as_u64().unwrap_or(1);
    usize::try_from(most).unwrap_or(usize::MAX).min(MAX_FDS)
}

/// Answers VERSION. Returns the number of [areas](areas_of) mapped by the client.
fn negotiate(stream: &mut ClientStream) -> Result<usize, EndError> {
    let (first, fds) = stream.begin()?;
    if first != command::VERSION {
        return Err(EndError::Order(first));
    }
    let (header, fds) = stream.rest(fds)?;
    let body = stream.body(&header);
    let (len, fields) = (body.len(), Fields(body));
    let text = body.get(4..).unwrap_or_default();
    if len < 4 || !fds.is_empty() || text.last().is_some_and(|last| *last != 0) {
        return Err(EndError::VersionText { len, fds: fds.len() });
    }
    let (major, minor) = (fields.u16(0), fields.u16(2));
    if major != MAJOR {
        let errno = Errno::INVAL.raw_os_error().unsigned_abs();
        stream.send(&header.answer(0, Some(errno)), &[], &[])?;
        return Err(EndError::Version(major, minor));
    }
    let mut answer = vec![0; 4];
    put(&mut answer, 0, &MAJOR.to_ne_bytes());
    let areas = areas_of(text);
    let text = format!(
        "{{\"capabilities\":{{\"max_msg_fds\":{MAX_FDS},\"max_data_xfer_size\":{MAX_DATA},\
         \"pgsizes\":4096,\"max_dma_maps\":{MAX_MAPS}{}}}}}\0",
        if areas == 0 { "" } else { ",\"sparse_mmap_fds\":true" },
    );
    answer.extend(text.as_bytes());
    stream.send(&header.answer(answer.len(), None), &answer, &[])?;
    Ok(areas)
}

fn handle<B: BackEnd>(
    device: &mut Device<'_, B>,
    header: &Header,
    body: &[u8],
    mut fds: Vec<OwnedFd>,
) -> Result<Answer, Refusal> {
    let number = header.command;
    let most = match number {
        command::DMA_MAP => 1,
        command::SET_IRQS => MAX_FDS,
        _ => 0,
    };
    if fds.len() > most {
        let (fds, expected) = (fds.len(), most);
        return Err(BodyError::Descriptors { command: number, fds, expected }.into());
    }
    match number {
        command::DMA_MAP => {
            device.map(&structure(number, body, 32)?, fds.pop())?;
            Ok(Vec::new().into())
        }
        command::DMA_UNMAP => {
            device.unmap(&structure(number, body, 24)?)?;
            Ok(body.to_vec().into())
        }
        command::GET_INFO => {
            structure(number, body, 16)?;
            /// A PCI function with reset.
            const FLAGS: u32 = 3;
            Ok(words(&[16, FLAGS, REGIONS, KINDS]).into())
        }
        command::GET_REGION_INFO => region_info(&structure(number, body, 32)?, device.shared()),
        command::GET_IRQ_INFO => {
            let index = structure(number, body, 16)?.u32(8);
            // Interrupts for errors and for requests to return the device are absent; clients probe for these
            // two.
            if index > MSIX {
                return Err(Refusal::Interrupts(index));
            }
            let count = device.vectors().count_of(index);
            // By eventfd.
            Ok(words(&[16, u32::from(count != 0), index, count]).into())
        }
        command::SET_IRQS => {
            device.set_irqs(&structure(number, body, 20)?, fds)?;
            Ok(Vec::new().into())
        }
        command::REGION_READ => {
            let (region, offset, len) = access(sized(number, body, 16)?, device.shared())?;
            let mut answer = body.to_vec();
            answer.resize(16 + len, 0);
            device.read(region, offset, answer.get_mut(16..).unwrap_or_default());
            Ok(answer.into())
        }
        command::REGION_WRITE => write(device, number, body).map(Answer::from),
        command::RESET => {
            sized(number, body, 0)?;
            device.reset()?;
            Ok(Vec::new().into())
        }
        _ => Err(BodyError::Command(number).into()),
    }
}

fn write<B: BackEnd>(
    device: &mut Device<'_, B>,
    number: u16,
    body: &[u8],
) -> Result<Vec<u8>, Refusal> {
    let Some((head, data)) = body.split_at_checked(16) else {
        return Err(BodyError::Length { command: number, len: body.len(), expected: 16 }.into());
    };
    let count = Fields(head).u32(12);
    if data.len() != count as usize {
        return Err(Refusal::Data { count, len: data.len() });
    }
    let (region, offset, _) = access(Fields(head), device.shared())?;
    device.write(region, offset, data)?;
    Ok(head.to_vec())
}

/// Region, offset and length of an access, checked.
fn access(fields: Fields<'_>, shared: Option<&SharedMemory>) -> Result<(u32, u64, usize), Refusal> {
    let (offset, region, count) = (fields.u64(0), fields.u32(8), fields.u32(12));
    let shared = shared.map_or(0, SharedMemory::len);
    Ok((region, offset, region::check(region, offset, count, shared)?))
}

/// Bits of a region's flags.
mod region_flags {
    pub(super) const READ_WRITE: u32 = 3;
    pub(super) const MMAP: u32 = 4;
    /// Capabilities follow the structure.
    pub(super) const CAPABILITIES: u32 = 8;
}

/// Capability of a region with areas that have files of their own, and its version.
const SPARSE_MMAP_FDS: u32 = 0x8001 | 1 << 16;

fn region_info(fields: &Fields<'_>, shared: Option<&SharedMemory>) -> Result<Answer, Refusal> {
    /// Bytes of the structure, and thus the place of its first capability.
    const LEN: u32 = 32;
    let (argsz, index) = (fields.u32(0), fields.u32(8));
    if index >= REGIONS {
        return Err(Refusal::Region(index));
    }
    let size = region::size(index, shared.map_or(0, SharedMemory::len));
    let areas = match shared.filter(|_| index == SHARED_BAR) {
        None => Vec::new(),
        Some(shared) => areas(shared),
    };
    let all = LEN + areas.len() as u32;
    // A client without room for the areas asks again with room.
    let with_files = all > LEN && argsz >= all;
    let mut flags = if size == 0 { 0 } else { region_flags::READ_WRITE };
    if all > LEN {
        flags |= region_flags::MMAP;
    }
    // QEMU refuses capabilities without a place.
    let mut cap_offset = 0;
    if with_files {
        (flags, cap_offset) = (flags | region_flags::CAPABILITIES, LEN);
    }
    let mut body = words(&[all, flags, index, cap_offset]);
    body.extend(size.to_ne_bytes());
    body.extend([0; 8]);
    if with_files {
        body.extend(areas);
    }
    Ok(Answer { body, with_files })
}

/// The capability with the areas of the shared memory: for each its offset, the offset in its file, its
/// length, and the number of its file among the descriptors of the message.
fn areas(shared: &SharedMemory) -> Vec<u8> {
    let mut bytes = words(&[SPARSE_MMAP_FDS, 0, shared.files.len() as u32, 0]);
    for number in 0..shared.files.len() as u32 {
        for value in [u64::from(number) * shared.area_len, 0, shared.area_len] {
            bytes.extend(value.to_ne_bytes());
        }
        bytes.extend(words(&[number, 0]));
    }
    bytes
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
