// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The fields of a view.

use core::fmt;

use crate::wire::WireError;

/// One range of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// First byte, from the start of the input.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
    /// How many areas the field is in.
    pub depth: usize,
    /// Name of the field.
    pub name: &'static str,
    /// The value in words; empty for an area.
    pub value: String,
    /// The error in the field, if any.
    pub problem: Option<String>,
    /// Whether this is an area, with deeper fields behind.
    pub is_area: bool,
}

/// A whole input, explained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The real or apparent type of the message.
    pub title: String,
    /// The fields, by offset; an area comes before its own fields.
    pub fields: Vec<Field>,
    /// The strict parser's reason for refusal.
    pub error: Option<WireError>,
}

/// A line per field: offset and length, name, value, and `!` before a problem.
impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        for field in &self.fields {
            let indent = 2 * field.depth;
            let Field { offset, len, name, value, .. } = field;
            write!(f, "{offset:>5} {len:>4}  {:indent$}", "")?;
            let width = 30_usize.saturating_sub(indent);
            match (value.as_str(), &field.problem) {
                ("", None) => write!(f, "{name}")?,
                (value, None) => write!(f, "{name:<width$} {value}")?,
                ("", Some(problem)) => write!(f, "{name:<width$} ! {problem}")?,
                (value, Some(problem)) => write!(f, "{name:<width$} {value}  ! {problem}")?,
            }
            writeln!(f)?;
        }
        match &self.error {
            Some(error) => writeln!(f, "refused: {error}"),
            None => Ok(()),
        }
    }
}
