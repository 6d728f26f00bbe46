//! Bytes explained field by field, for people: what `smc decode` prints.
//!
//! This level judges nothing and never fails. Broken messages are its purpose: each field that can
//! be made out is listed with its place and its value in words, a field that is wrong says so, and
//! what cannot be made out is listed as bytes. The fields always cover the whole input, in order
//! and without overlap; an offset that leads backwards or outside is noted and not followed. Where
//! the strict parser refuses the message, its error is there as well.
//!
//! Values are shown as they are, DMB tokens and RKeys included.

mod cdc;
mod clc;
mod llc;
mod walk;
mod words;

use core::fmt;

use super::WireError;
use super::llc::Dialect;

/// One stretch of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// First byte, from the start of the input.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
    /// How many areas the field is in.
    pub depth: usize,
    /// What it is called.
    pub name: &'static str,
    /// What it says; empty for an area.
    pub value: String,
    /// What is wrong with it.
    pub problem: Option<String>,
    /// Whether this is an area that consists of the deeper fields that follow.
    pub is_area: bool,
}

/// A whole input, explained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// What kind of message it is, or seems to be.
    pub title: String,
    /// Its fields, by offset; an area comes before what is in it.
    pub fields: Vec<Field>,
    /// Why the strict parser refuses it.
    pub error: Option<WireError>,
}

/// Explains bytes of a kind that has to be guessed: CLC by its eye catcher, CDC by its first byte,
/// LLC otherwise.
pub fn any(bytes: &[u8]) -> View {
    match bytes {
        [0xe2, 0xd4, 0xc3, ..] => clc(bytes),
        [super::cdc::CDC_TYPE, ..] if bytes.len() == super::cdc::CONTROL_BLOCK_LEN => {
            control_block(bytes)
        }
        [super::cdc::CDC_TYPE, ..] => cdc(bytes),
        [first, ..] if super::llc::Kind::from_type_byte(*first).is_ok() => {
            llc(bytes, &Dialect::default())
        }
        _ => clc(bytes),
    }
}

/// Explains a CLC message.
pub fn clc(bytes: &[u8]) -> View {
    clc::view(bytes)
}

/// Explains an LLC message.
pub fn llc(bytes: &[u8], dialect: &Dialect) -> View {
    llc::view(bytes, dialect)
}

/// Explains an SMC-R CDC message.
pub fn cdc(bytes: &[u8]) -> View {
    cdc::message(bytes)
}

/// Explains an SMC-D control block, the first 32 bytes of a DMB element.
pub fn control_block(bytes: &[u8]) -> View {
    cdc::control_block(bytes)
}

/// A line per field: offset and length, name, value, and `!` before what is wrong.
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

#[cfg(test)]
mod tests;
