// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A forward-only walk over the input.

use super::{Field, View, words};
use crate::wire::WireError;

pub(super) struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Fields end here: at the trailer, or at the end of the input.
    end: usize,
    depth: usize,
    fields: Vec<Field>,
    /// A field was cut off; later fields cannot be shown.
    cut: bool,
}

/// A field in the list, for later notes.
#[derive(Clone, Copy)]
pub(super) struct Mark(usize);

impl<'a> Walk<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Walk { bytes, at: 0, end: bytes.len(), depth: 0, fields: Vec::new(), cut: false }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Bytes up to the end of the fields.
    pub(super) fn left(&self) -> usize {
        self.end.saturating_sub(self.at)
    }

    /// Moves the end of the fields, at most to the end of the input.
    pub(super) fn set_end(&mut self, end: usize) {
        self.end = end.clamp(self.at, self.bytes.len().max(self.at));
    }

    fn push(&mut self, name: &'static str, len: usize, value: String) -> Mark {
        let (offset, depth) = (self.at, self.depth);
        self.fields.push(Field { offset, len, depth, name, value, problem: None, is_area: false });
        self.at += len;
        Mark(self.fields.len() - 1)
    }

    /// Takes `N` bytes. Fewer available bytes are taken too and end the walk.
    pub(super) fn take<const N: usize>(
        &mut self,
        name: &'static str,
        say: impl FnOnce([u8; N]) -> String,
    ) -> Option<[u8; N]> {
        if self.cut {
            return None;
        }
        let rest = self.bytes.get(self.at..self.end).unwrap_or(&[]);
        match rest.first_chunk::<N>() {
            Some(bytes) => {
                self.push(name, N, say(*bytes));
                Some(*bytes)
            }
            None => {
                self.cut = true;
                self.push(name, rest.len(), words::hex(rest));
                self.problem(format!("needs {N} bytes, {} are there", rest.len()));
                None
            }
        }
    }

    pub(super) fn u8(&mut self, name: &'static str, say: impl FnOnce(u8) -> String) -> Option<u8> {
        self.take(name, |[byte]| say(byte)).map(|[byte]| byte)
    }

    pub(super) fn u16(
        &mut self,
        name: &'static str,
        say: impl FnOnce(u16) -> String,
    ) -> Option<u16> {
        self.take(name, |bytes| say(u16::from_be_bytes(bytes))).map(u16::from_be_bytes)
    }

    pub(super) fn u32(
        &mut self,
        name: &'static str,
        say: impl FnOnce(u32) -> String,
    ) -> Option<u32> {
        self.take(name, |bytes| say(u32::from_be_bytes(bytes))).map(u32::from_be_bytes)
    }

    /// Bytes shown as hexadecimal digits.
    pub(super) fn hex<const N: usize>(&mut self, name: &'static str) -> Option<[u8; N]> {
        self.take(name, |bytes| words::hex(&bytes))
    }

    /// Reserved bytes: shown if not zero. A nonzero value is no error for a receiver.
    pub(super) fn reserved<const N: usize>(&mut self) {
        self.take::<N>("reserved", |bytes| words::reserved(&bytes));
    }

    /// Unassigned bytes up to `at`.
    pub(super) fn raw_until(&mut self, name: &'static str, at: usize) -> Option<Mark> {
        let until = at.min(self.end);
        let bytes = self.bytes.get(self.at..until).filter(|bytes| !bytes.is_empty())?;
        Some(self.push(name, bytes.len(), words::hex(bytes)))
    }

    /// Marks the field before as wrong.
    pub(super) fn problem(&mut self, text: impl Into<String>) {
        if let Some(mark) = self.last() {
            self.note(mark, text);
        }
    }

    /// The field before.
    pub(super) fn last(&self) -> Option<Mark> {
        self.fields.len().checked_sub(1).map(Mark)
    }

    /// Marks a field as wrong; the first note on a field stays.
    pub(super) fn note(&mut self, mark: Mark, text: impl Into<String>) {
        if let Some(field) = self.fields.get_mut(mark.0) {
            field.problem.get_or_insert(text.into());
        }
    }

    /// Walks an area: the fields taken by `inside` are listed below the area's name.
    pub(super) fn area(&mut self, name: &'static str, inside: impl FnOnce(&mut Self)) {
        if self.cut {
            return;
        }
        let mark = self.push(name, 0, String::new());
        let start = self.at;
        self.depth += 1;
        inside(self);
        self.depth -= 1;
        let len = self.at - start;
        if let Some(field) = self.fields.get_mut(mark.0) {
            field.len = len;
            field.is_area = true;
        }
    }

    /// Goes to the target of an offset field. An offset leading back or outside is noted at the
    /// field, and the area is not walked.
    pub(super) fn follow(&mut self, offset_field: Option<Mark>, target: usize) -> bool {
        if self.cut {
            return false;
        }
        let text = if target < self.at {
            format!("leads to {target}, into what ends at {}", self.at)
        } else if target >= self.end {
            format!("leads to {target}, beyond the last field at {}", self.end)
        } else {
            self.raw_until("not assigned", target);
            return true;
        };
        if let Some(mark) = offset_field {
            self.note(mark, text);
        }
        false
    }

    /// Lists the bytes left up to the end of the fields as bytes without meaning.
    pub(super) fn leftover(&mut self) {
        self.cut = false;
        if self.raw_until("not assigned", self.end).is_some() {
            self.problem("no field is here");
        }
    }

    /// Ends the walk: whatever is left of the input is behind the message.
    pub(super) fn finish(mut self, title: String, error: Option<WireError>) -> View {
        self.leftover();
        self.end = self.bytes.len();
        if self.raw_until("behind the message", self.end).is_some() {
            self.problem("the message has ended before");
        }
        View { title, fields: self.fields, error }
    }
}
