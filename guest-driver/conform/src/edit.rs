// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Edits of the bytes of a well-formed message.

use serde::Deserialize;
use toml::Value;

use crate::message::Message;
use crate::value::{Scope, bytes_of};

/// A place in a message: a byte, or the first field of a name.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Place {
    Byte(usize),
    Field(String),
}

/// One edit. Exactly one of the verbs is there.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Edit {
    /// Writes `to` here.
    set: Option<Place>,
    to: Option<Value>,
    /// Inverts bit `bit` (0 is the most significant one) here.
    flip: Option<Place>,
    #[serde(default)]
    bit: usize,
    /// Inserts `bytes` before this place.
    insert: Option<Place>,
    /// Appends these bytes.
    append: Option<Value>,
    bytes: Option<Value>,
    /// Removes `count` bytes from here.
    cut: Option<Place>,
    #[serde(default)]
    count: usize,
    /// Keeps this many bytes.
    truncate: Option<usize>,
    /// Writes the number of bytes into the field of the length, wrong `by` this.
    #[serde(default)]
    resize: bool,
    #[serde(default)]
    by: isize,
}

impl Edit {
    /// Changes the bytes of a message. Places of fields are those before the edit.
    ///
    /// # Errors
    /// A sentence for the author of the case.
    pub(crate) fn apply(&self, message: &mut Message, scope: &Scope) -> Result<(), String> {
        let place = |place: &Place, message: &Message| match place {
            Place::Byte(at) => Ok((*at, None)),
            Place::Field(name) => match message.named(name).next() {
                Some(span) => Ok((span.at, Some(span.clone()))),
                None => Err(format!("an edit names the field {name:?}, which is not there")),
            },
        };
        if let (Some(set), Some(to)) = (&self.set, &self.to) {
            let (at, span) = place(set, message)?;
            let value = bytes_of(to, span.as_ref().map(|span| span.len), scope)?;
            match span {
                Some(span) => span.write(&mut message.bytes, &value),
                None => overwrite(&mut message.bytes, at, &value)?,
            }
        }
        if let Some(flip) = &self.flip {
            let (at, span) = place(flip, message)?;
            let bit = span
                .and_then(|span| span.bits)
                .map_or(self.bit, |(shift, bits)| usize::from(8 - shift - bits) + self.bit);
            let byte = message.bytes.get_mut(at + bit / 8);
            *byte.ok_or_else(|| format!("there is no byte {at}"))? ^= 0x80 >> (bit % 8);
        }
        if let Some(insert) = &self.insert {
            let (at, _) = place(insert, message)?;
            let bytes = bytes_of(self.bytes.as_ref().ok_or("insert has no bytes")?, None, scope)?;
            if at > message.bytes.len() {
                return Err(format!("there is no byte {at}"));
            }
            message.bytes.splice(at..at, bytes);
        }
        if let Some(append) = &self.append {
            message.bytes.extend(bytes_of(append, None, scope)?);
        }
        if let Some(cut) = &self.cut {
            let (at, _) = place(cut, message)?;
            let end = at.saturating_add(self.count);
            if end > message.bytes.len() {
                return Err(format!("there are no bytes {at} to {end}"));
            }
            message.bytes.drain(at..end);
        }
        if let Some(len) = self.truncate {
            message.bytes.truncate(len);
        }
        if self.resize {
            let len =
                u16::try_from(message.bytes.len().wrapping_add_signed(self.by)).unwrap_or(u16::MAX);
            overwrite(&mut message.bytes, 5, &len.to_be_bytes())?;
        }
        Ok(())
    }
}

fn overwrite(bytes: &mut [u8], at: usize, value: &[u8]) -> Result<(), String> {
    let len = bytes.len();
    let own = bytes.get_mut(at..at + value.len());
    own.ok_or_else(|| format!("byte {at} is beyond {len} bytes"))?.copy_from_slice(value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::encode;
    use crate::value::to_hex;

    fn edited(edit: &str) -> Result<Vec<u8>, String> {
        let scope = Scope::default();
        let base = "message = 'decline'\nversion = 1\ndiagnosis = 0x03030000".parse().unwrap();
        let mut message = encode(&base, &scope).unwrap();
        let edit: Edit = toml::from_str(edit).unwrap();
        edit.apply(&mut message, &scope).map(|()| message.bytes)
    }

    #[test]
    fn each_verb_changes_what_it_says() {
        let base = edited("").unwrap();
        assert_eq!(
            to_hex(&base),
            "e2d4c3d904001c10000000000000000003030000 00000000e2d4c3d9".replace(' ', "")
        );
        let with = |edit: &str, change: &dyn Fn(&mut Vec<u8>)| {
            let mut expected = base.clone();
            change(&mut expected);
            assert_eq!(to_hex(&edited(edit).unwrap()), to_hex(&expected), "{edit}");
        };
        with("set = 'diagnosis'\nto = 1", &|b| b[16..20].copy_from_slice(&[0, 0, 0, 1]));
        with("set = 'version'\nto = 3", &|b| b[7] = 0x30);
        with("set = 9\nto = 'hex:aabb'", &|b| b[9..11].copy_from_slice(&[0xaa, 0xbb]));
        with("flip = 'eye_catcher'\nbit = 9", &|b| b[1] ^= 0x40);
        with("flip = 'out_of_sync'", &|b| b[7] ^= 0x08);
        with("insert = 24\nbytes = 'hex:00*16'\nresize = true", &|b| {
            b.splice(24..24, [0; 16]);
            b[6] = 44;
        });
        with("cut = 'diagnosis'\ncount = 4", &|b| drop(b.drain(16..20)));
        with("truncate = 5", &|b| b.truncate(5));
        with("append = 'text:data'", &|b| b.extend(b"data"));
    }

    #[test]
    fn a_place_that_is_not_there_is_the_authors_mistake() {
        for edit in ["set = 'x'\nto = 1", "set = 28\nto = 1", "flip = 28", "cut = 20\ncount = 9"] {
            assert!(edited(edit).is_err(), "{edit}");
        }
    }
}
