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
use crate::region::{self, AccessError, MAX_DATA, REGIONS};
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

/// Serves one client to its end. `connect` makes a connection to the back end: at the begin, and when a
/// driver resets the function after the end of the back end. `report` gets every [`Event`], and has to limit
/// its own log lines.
///
/// # Errors
/// The reason for the end; [`EndError::is_orderly`] tells an end without a fault.
pub fn serve<'a, B: BackEnd>(
    client: UnixStream,
    identity: Identity,
    connect: &'a mut Connect<'a, B>,
    report: &'a mut Report<'a>,
) -> Result<std::convert::Infallible, EndError> {
    let mut stream = ClientStream::new(client).map_err(StreamError::from)?;
    negotiate(&mut stream)?;
    let mut device = Device::new(identity, connect, report)?;
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
                    Ok(body) if header.wants_reply => {
                        stream.send(&header.answer(body.len(), None), &body)
                    }
                    Ok(_) => Ok(()),
                    Err(Refusal::End(error)) => return Err(error.into()),
                    Err(refusal) => {
                        if !refusal.is_usual() {
                            device.report(Event::Refused(&refusal));
                        }
                        if header.wants_reply {
                            stream.send(&header.answer(0, Some(refusal.errno())), &[])
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

/// Answers VERSION. The client's capabilities do not matter: the server uses none.
fn negotiate(stream: &mut ClientStream) -> Result<(), EndError> {
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
        stream.send(&header.answer(0, Some(Errno::INVAL.raw_os_error().unsigned_abs())), &[])?;
        return Err(EndError::Version(major, minor));
    }
    let mut answer = vec![0; 4];
    put(&mut answer, 0, &MAJOR.to_ne_bytes());
    let text = format!(
        "{{\"capabilities\":{{\"max_msg_fds\":{MAX_FDS},\"max_data_xfer_size\":{MAX_DATA},\
         \"pgsizes\":4096,\"max_dma_maps\":{MAX_MAPS}}}}}\0"
    );
    answer.extend(text.as_bytes());
    stream.send(&header.answer(answer.len(), None), &answer)?;
    Ok(())
}

fn handle<B: BackEnd>(
    device: &mut Device<'_, B>,
    header: &Header,
    body: &[u8],
    mut fds: Vec<OwnedFd>,
) -> Result<Vec<u8>, Refusal> {
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
            Ok(Vec::new())
        }
        command::DMA_UNMAP => {
            device.unmap(&structure(number, body, 24)?)?;
            Ok(body.to_vec())
        }
        command::GET_INFO => {
            structure(number, body, 16)?;
            /// A PCI function with reset.
            const FLAGS: u32 = 3;
            Ok(words(&[16, FLAGS, REGIONS, KINDS]))
        }
        command::GET_REGION_INFO => region_info(&structure(number, body, 32)?),
        command::GET_IRQ_INFO => {
            let index = structure(number, body, 16)?.u32(8);
            // Interrupts for errors and for requests to return the device are absent; clients probe for these
            // two.
            if index > MSIX {
                return Err(Refusal::Interrupts(index));
            }
            let count = device.vectors().count_of(index);
            // By eventfd.
            Ok(words(&[16, u32::from(count != 0), index, count]))
        }
        command::SET_IRQS => {
            device.set_irqs(&structure(number, body, 20)?, fds)?;
            Ok(Vec::new())
        }
        command::REGION_READ => {
            let (region, offset, len) = access(sized(number, body, 16)?)?;
            let mut answer = body.to_vec();
            answer.resize(16 + len, 0);
            device.read(region, offset, answer.get_mut(16..).unwrap_or_default());
            Ok(answer)
        }
        command::REGION_WRITE => write(device, number, body),
        command::RESET => {
            sized(number, body, 0)?;
            device.reset()?;
            Ok(Vec::new())
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
    let (region, offset, _) = access(Fields(head))?;
    device.write(region, offset, data)?;
    Ok(head.to_vec())
}

/// Region, offset and length of an access, checked.
fn access(fields: Fields<'_>) -> Result<(u32, u64, usize), Refusal> {
    let (offset, region, count) = (fields.u64(0), fields.u32(8), fields.u32(12));
    Ok((region, offset, region::check(region, offset, count)?))
}

fn region_info(fields: &Fields<'_>) -> Result<Vec<u8>, Refusal> {
    let index = fields.u32(8);
    if index >= REGIONS {
        return Err(Refusal::Region(index));
    }
    let size = region::size(index);
    /// Readable and writable, not mappable.
    const FLAGS: u32 = 3;
    let mut answer = words(&[32, if size == 0 { 0 } else { FLAGS }, index, 0]);
    answer.extend(size.to_ne_bytes());
    answer.extend([0; 8]);
    Ok(answer)
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
