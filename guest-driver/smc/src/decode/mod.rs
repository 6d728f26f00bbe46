// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc decode`: shows the fields of CLC, LLC and CDC messages, and their defects.
//!
//! Input is hex in many forms, a file of raw bytes, or a capture. In a capture, TCP streams are
//! followed for CLC messages and the SMC option of their SYNs, RoCEv2 packets for LLC and CDC.
//! SMC-D data does not pass any network and is in no capture.
//!
//! A file may come from anybody. One frame is in memory at a time, and the state kept of earlier
//! frames is bounded by the constants of [`stream`] and [`roce`].

mod capture;
mod hex;
mod packet;
mod report;
mod roce;
mod stream;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, BufReader, BufWriter, IsTerminal, Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use smc_core::wire::cdc::{CDC_LEN, CDC_TYPE, CONTROL_BLOCK_LEN};
use smc_core::wire::llc::{Dialect, Kind as LlcKind, LLC_LEN};
use smc_core::wire::view::{self, View};
use thiserror::Error;

use capture::{Capture, CaptureError, is_capture};
use packet::{Packet, dissect};
use report::{Place, Report};
use roce::Sends;
use stream::{End, StreamItem, Streams};

/// Limit of hex text or raw bytes to read, several times the need of [`hex::MAX_BYTES`].
const MAX_INPUT: u64 = 8 << 20;

/// Show the fields of CLC, LLC and CDC messages
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DecodeArgs {
    /// Hex digits of one or more messages, or a file with hex, raw bytes or a capture (pcap,
    /// pcapng); standard input if there is none
    ///
    /// Spaces, colons, 0x, C arrays and the dumps of xxd, hexdump, tcpdump and Wireshark are
    /// understood.
    #[arg(value_name = "HEX|FILE")]
    input: Vec<String>,
    /// The kind of message, if the first bytes do not show it (not for captures)
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    kind: Kind,
    /// Print a JSON object per line
    #[arg(long)]
    json: bool,
}

/// End of the help of `smc decode`.
pub(crate) const AFTER: &str = "\
Exit status: 0 if a receiver would take all messages, 1 if it would refuse one or the input cannot be
read.";

/// Kinds of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// By their first bytes
    #[default]
    Auto,
    /// Connection Layer Control, from the TCP connection
    Clc,
    /// Link Layer Control of SMC-R
    Llc,
    /// Connection Data Control of SMC-R
    Cdc,
    /// The first 32 bytes of an SMC-D buffer
    ControlBlock,
}

/// Why `smc decode` failed.
#[derive(Debug, Error)]
pub(crate) enum DecodeError {
    /// A file cannot be opened.
    #[error("cannot open {path}: {source}")]
    Open {
        /// Path of the file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Reading failed.
    #[error("cannot read: {0}")]
    Read(#[source] io::Error),
    /// Writing failed.
    #[error("cannot write: {0}")]
    Write(#[source] io::Error),
    /// Nothing to decode.
    #[error("there are no bytes to decode")]
    Empty,
    /// A character invalid in every form of hex.
    #[error("line {line}: {found:?} is no hex digit")]
    HexDigit {
        /// Line of the text, from 1.
        line: usize,
        /// The character.
        found: char,
    },
    /// Neither hex nor a file.
    #[error("there is no file {argument:?}, and it is no hex: {why}")]
    Neither {
        /// The only argument.
        argument: String,
        /// Why the argument is no hex.
        why: Box<DecodeError>,
    },
    /// Half a byte.
    #[error("line {line}: {token:?} has an odd number of digits")]
    HexOdd {
        /// Line of the text, from 1.
        line: usize,
        /// The digits.
        token: String,
    },
    /// More bytes than the limit.
    #[error("more than {max} bytes of hex")]
    TooMuchHex {
        /// The limit.
        max: usize,
    },
    /// The capture is broken. Earlier messages have been printed.
    #[error("broken capture: {0}")]
    Capture(#[from] CaptureError),
}

/// Decodes the input named by `args` onto standard output. `false`: a receiver would refuse some
/// message.
///
/// # Errors
/// [`DecodeError`]. A wrong message is no error: the report describes the defect.
pub(crate) fn run(args: DecodeArgs) -> Result<bool, DecodeError> {
    let out = BufWriter::new(io::stdout().lock());
    match run_to(args, io::stdin().lock(), out) {
        // The reader of the pipe (`head`, say) has closed the pipe.
        Err(DecodeError::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(true),
        other => other.map(|refused| refused == 0),
    }
}

/// Runs [`run`] with other input and output. Returns the number of messages a receiver would
/// refuse.
pub(crate) fn run_to(
    args: DecodeArgs,
    stdin: impl Read,
    out: impl Write,
) -> Result<u64, DecodeError> {
    let DecodeArgs { input, kind, json } = args;
    let mut report = Report::new(out, json);
    let result = match &input[..] {
        [] => {
            if io::stdin().is_terminal() && !cfg!(test) {
                crate::output::note("Reading hex from the terminal; end with Ctrl-D.");
            }
            stream_of(stdin, kind, &mut report)
        }
        [only] if only == "-" => stream_of(stdin, kind, &mut report),
        [only] if names_file(only) => {
            let open = |source| DecodeError::Open { path: only.into(), source };
            let file = File::open(only).map_err(open)?;
            stream_of(BufReader::new(file), kind, &mut report)
        }
        [only] if !only.contains(char::is_whitespace) => {
            let neither = |why| DecodeError::Neither { argument: only.clone(), why: Box::new(why) };
            bytes_of(&hex::parse(only).map_err(neither)?, kind, &mut report)
        }
        words => bytes_of(&hex::parse(&words.join(" "))?, kind, &mut report),
    };
    // Print the earlier findings even after an error.
    let finished = report.finish().map_err(DecodeError::Write);
    result.and(finished.map(|summary| summary.refused))
}

/// Whether the argument names a file rather than bytes: the file exists, or the argument looks like
/// a path. Dumps may have slashes, but have spaces as well.
fn names_file(argument: &str) -> bool {
    let is_path = argument.contains('/') && !argument.contains(char::is_whitespace);
    is_path || Path::new(argument).exists()
}

/// Decodes a capture, hex text, or raw bytes, by their first bytes.
fn stream_of(
    mut reader: impl Read,
    kind: Kind,
    report: &mut Report<impl Write>,
) -> Result<(), DecodeError> {
    let mut start = Vec::new();
    reader.by_ref().take(4).read_to_end(&mut start).map_err(DecodeError::Read)?;
    if is_capture(&start) {
        return capture_of(start.chain(reader), report);
    }
    let mut bytes = Vec::new();
    let mut rest = start.chain(reader.take(MAX_INPUT));
    rest.read_to_end(&mut bytes).map_err(DecodeError::Read)?;
    let is_text = |byte: &u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
    match std::str::from_utf8(&bytes) {
        Ok(text) if bytes.iter().all(is_text) => bytes_of(&hex::parse(text)?, kind, report),
        _ => bytes_of(&bytes, kind, report),
    }
}

/// Messages one behind the other.
fn bytes_of(bytes: &[u8], kind: Kind, report: &mut Report<impl Write>) -> Result<(), DecodeError> {
    if bytes.is_empty() {
        return Err(DecodeError::Empty);
    }
    let mut at = 0;
    while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
        let length = first_length(rest, kind).clamp(1, rest.len());
        let message = rest.get(..length).unwrap_or(rest);
        let several = message.len() != bytes.len();
        let place = Place { byte: several.then_some(at), ..Place::default() };
        report.message(&place, message, &explain(message, kind)).map_err(DecodeError::Write)?;
        at += length;
    }
    Ok(())
}

fn explain(message: &[u8], kind: Kind) -> View {
    match guess(message, kind) {
        Kind::Llc => view::llc(message, &dialect(message)),
        Kind::Cdc => view::cdc(message),
        Kind::ControlBlock => view::control_block(message),
        Kind::Clc => view::clc(message),
        Kind::Auto => view::any(message),
    }
}

/// The kind of message by its first bytes, if recognizable.
fn guess(bytes: &[u8], kind: Kind) -> Kind {
    match (kind, bytes) {
        (Kind::Auto, [0xe2, 0xd4, 0xc3, ..]) => Kind::Clc,
        // A control block has a reserved byte where a message has its length.
        (Kind::Auto, [CDC_TYPE, 0, ..]) => Kind::ControlBlock,
        (Kind::Auto, [CDC_TYPE, ..]) => Kind::Cdc,
        (Kind::Auto, [first, ..]) if LlcKind::from_type_byte(*first).is_ok() => Kind::Llc,
        (kind, _) => kind,
    }
}

/// Length of the first message; the length of all bytes, if the header does not show a length.
fn first_length(bytes: &[u8], kind: Kind) -> usize {
    let all = bytes.len();
    match (guess(bytes, kind), bytes) {
        (Kind::Clc, [_, _, _, _, _, l0, l1, ..]) => {
            match usize::from(u16::from_be_bytes([*l0, *l1])) {
                0..8 => all,
                length => length,
            }
        }
        (Kind::Cdc, _) => CDC_LEN,
        (Kind::ControlBlock, _) => CONTROL_BLOCK_LEN,
        (Kind::Llc, [0x20..=0x2f, l0, l1, ..]) => {
            let lengths = [u16::from_be_bytes([*l0, *l1]), u16::from_le_bytes([*l0, *l1])];
            let fits = |length: &usize| (LLC_LEN..=all).contains(length);
            lengths.map(usize::from).into_iter().find(fits).unwrap_or(all)
        }
        (Kind::Llc, _) => LLC_LEN,
        _ => all,
    }
}

/// Linux writes the length of version 2 in the byte order of its machine.
fn dialect(message: &[u8]) -> Dialect {
    let swapped = |l: [u8; 2]| usize::from(u16::from_le_bytes(l)) == message.len();
    match message {
        [0x20..=0x2f, l0, l1, ..] if l0 != l1 && swapped([*l0, *l1]) => Dialect::LINUX,
        _ => Dialect::default(),
    }
}

fn capture_of(reader: impl Read, report: &mut Report<impl Write>) -> Result<(), DecodeError> {
    let mut streams = Streams::default();
    let mut sends = Sends::default();
    let result = frames_of(reader, &mut streams, &mut sends, report);
    for unfinished in streams.unfinished() {
        let place = place_of(unfinished.frame, unfinished.ends);
        let view = view::clc(&unfinished.bytes);
        report.message(&place, &unfinished.bytes, &view).map_err(DecodeError::Write)?;
    }
    report.summary.dropped_directions = streams.dropped.directions;
    report.summary.dropped_segments = streams.dropped.segments;
    result
}

fn frames_of(
    reader: impl Read,
    streams: &mut Streams,
    sends: &mut Sends,
    report: &mut Report<impl Write>,
) -> Result<(), DecodeError> {
    let mut capture = Capture::new(reader)?;
    while let Some(frame) = capture.next()? {
        report.summary.frames = frame.number;
        match dissect(frame.link, &frame.data) {
            Some(Packet::Tcp(segment)) => {
                let place = place_of(frame.number, (segment.from, segment.to));
                for found in streams.segment(frame.number, &segment) {
                    write_found(&place, found, report).map_err(DecodeError::Write)?;
                }
            }
            Some(Packet::Roce { from, to, data }) => {
                let Some(send) = sends.packet(from, to, data) else { continue };
                // Other users of RDMA are on the port as well.
                let kind = guess(&send.bytes, Kind::Auto);
                if send.bytes.len() < LLC_LEN || !matches!(kind, Kind::Llc | Kind::Cdc) {
                    continue;
                }
                let place = Place {
                    frame: Some(frame.number),
                    from: Some(from.to_string()),
                    to: Some(to.to_string()),
                    qpn: Some(send.qpn),
                    ..Place::default()
                };
                let view = explain(&send.bytes, kind);
                report.message(&place, &send.bytes, &view).map_err(DecodeError::Write)?;
            }
            None => {}
        }
    }
    Ok(())
}

fn place_of(frame: u64, (from, to): (End, End)) -> Place {
    Place {
        frame: Some(frame),
        from: Some(SocketAddr::from(from).to_string()),
        to: Some(SocketAddr::from(to).to_string()),
        ..Place::default()
    }
}

fn write_found(
    place: &Place,
    found: StreamItem,
    report: &mut Report<impl Write>,
) -> io::Result<()> {
    match found {
        StreamItem::Announced { reply, extra } => {
            let who = if reply { "the server" } else { "the client" };
            let wrong = match extra {
                0 => String::new(),
                _ => format!("; {extra} bytes too many, the option has 6"),
            };
            report.note(place, &format!("TCP option 254: {who} announces SMC{wrong}"), &[])
        }
        StreamItem::OtherExperiment { kind, data } => {
            let note = format!("TCP option {kind} of another experiment");
            report.note(place, &note, &data)
        }
        StreamItem::Clc(bytes) | StreamItem::Broken(bytes) => {
            report.message(place, &bytes, &view::clc(&bytes))
        }
        StreamItem::NoClc(bytes) => {
            report.note(place, "both ends announced SMC, but the stream begins with", &bytes)
        }
    }
}
