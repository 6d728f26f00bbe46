// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The findings, as text for people or as a JSON object per line.

use std::fmt::Write as _;
use std::io::{self, Write};

use serde::Serialize;
use smc_core::wire::view::View;

/// The place of a finding.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Place {
    /// Frame of a capture, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) frame: Option<u64>,
    /// First byte in hex or binary input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) byte: Option<usize>,
    /// Sender.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) from: Option<String>,
    /// Receiver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) to: Option<String>,
    /// Queue pair of the receiver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) qpn: Option<u32>,
}

/// Counts of a whole input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Summary {
    /// Frames of the capture; 0 for hex.
    pub(super) frames: u64,
    /// Messages found.
    pub(super) messages: u64,
    /// Messages a receiver would refuse.
    pub(super) refused: u64,
    /// TCP directions given up to stay within bounds.
    pub(super) dropped_directions: u64,
    /// TCP segments given up.
    pub(super) dropped_segments: u64,
}

#[derive(Serialize)]
struct JsonField<'a> {
    offset: usize,
    length: usize,
    depth: usize,
    name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    value: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<&'a str>,
}

#[derive(Serialize)]
struct JsonMessage<'a> {
    #[serde(flatten)]
    place: &'a Place,
    message: &'a str,
    length: usize,
    fields: Vec<JsonField<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    hex: String,
}

#[derive(Serialize)]
struct JsonNote<'a> {
    #[serde(flatten)]
    place: &'a Place,
    note: &'a str,
    #[serde(skip_serializing_if = "String::is_empty")]
    hex: String,
}

#[derive(Serialize)]
struct JsonSummary {
    summary: Summary,
}

/// Writes entries immediately, so memory stays bounded.
pub(super) struct Report<W> {
    out: W,
    json: bool,
    /// Counts so far.
    pub(super) summary: Summary,
}

impl<W: Write> Report<W> {
    pub(super) fn new(out: W, json: bool) -> Self {
        Report { out, json, summary: Summary::default() }
    }

    /// A message, whole or not.
    pub(super) fn message(&mut self, place: &Place, bytes: &[u8], view: &View) -> io::Result<()> {
        self.summary.messages += 1;
        self.summary.refused += u64::from(view.error.is_some());
        if self.json {
            let fields = view.fields.iter().map(|field| JsonField {
                offset: field.offset,
                length: field.len,
                depth: field.depth,
                name: field.name,
                value: &field.value,
                problem: field.problem.as_deref(),
            });
            return self.line(&JsonMessage {
                place,
                message: &view.title,
                length: bytes.len(),
                fields: fields.collect(),
                refused: view.error.as_ref().map(ToString::to_string),
                hex: hex(bytes),
            });
        }
        writeln!(self.out, "{}{view}", words(place))
    }

    /// A remark worth a line without a message; `bytes` are shown if not empty.
    pub(super) fn note(&mut self, place: &Place, note: &str, bytes: &[u8]) -> io::Result<()> {
        let hex = hex(bytes);
        if self.json {
            return self.line(&JsonNote { place, note, hex });
        }
        let gap = if hex.is_empty() { "" } else { ": " };
        writeln!(self.out, "{}{note}{gap}{hex}\n", words(place))
    }

    /// The end.
    pub(super) fn finish(mut self) -> io::Result<Summary> {
        let summary = self.summary;
        if self.json {
            self.line(&JsonSummary { summary })?;
        } else {
            let Summary { frames, messages, refused, dropped_directions, dropped_segments } =
                summary;
            if frames != 0 {
                writeln!(self.out, "{frames} frames, {messages} messages, {refused} refused")?;
            }
            if dropped_directions + dropped_segments != 0 {
                writeln!(
                    self.out,
                    "not followed, to stay within bounds: {dropped_directions} TCP directions, \
                     {dropped_segments} segments"
                )?;
            }
        }
        self.out.flush()?;
        Ok(summary)
    }

    fn line(&mut self, value: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, value)?;
        self.out.write_all(b"\n")
    }
}

/// `frame 5, 10.9.0.1:40000 > 10.9.0.2:5000` and a line end, or nothing.
fn words(place: &Place) -> String {
    let mut words = String::new();
    if let Some(frame) = place.frame {
        let _ = write!(words, "frame {frame}");
    }
    if let Some(byte) = place.byte {
        let _ = write!(words, "byte {byte}");
    }
    if let (Some(from), Some(to)) = (&place.from, &place.to) {
        let _ = write!(words, ", {from} > {to}");
    }
    if let Some(qpn) = place.qpn {
        let _ = write!(words, ", queue pair {qpn:#x}");
    }
    if !words.is_empty() {
        words.push('\n');
    }
    words
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}
