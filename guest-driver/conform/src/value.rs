// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Values of cases: numbers and strings of TOML as bytes of a message.
//!
//! A number is big-endian. A string is one of
//!
//! ```text
//! $name          a value of the suite or of an earlier message of the dialogue
//! hex:e2d4 00*8  bytes; *n repeats the preceding byte
//! text:LAB       ASCII, filled up with blanks
//! ```

use std::collections::BTreeMap;

use toml::Value;

/// Values by name, for `$name`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scope {
    values: BTreeMap<String, Vec<u8>>,
}

impl Scope {
    /// Gives a name a value, or another one.
    pub(crate) fn set(&mut self, name: impl Into<String>, value: impl Into<Vec<u8>>) {
        self.values.insert(name.into(), value.into());
    }

    /// The value of a name.
    pub(crate) fn get(&self, name: &str) -> Option<&[u8]> {
        self.values.get(name).map(Vec::as_slice)
    }

    /// The values of all names with the prefix `start`.
    pub(crate) fn beginning<'a>(&'a self, start: &'a str) -> impl Iterator<Item = &'a [u8]> {
        let from = self.values.range(start.to_owned()..);
        from.take_while(move |(name, _)| name.starts_with(start)).map(|(_, value)| value.as_slice())
    }

    /// Forgets the names with the prefix `start`.
    pub(crate) fn forget(&mut self, start: &str) {
        self.values.retain(|name, _| !name.starts_with(start));
    }
}

/// The bytes of a value in a field of `len` bytes; without `len`, the value's own length.
///
/// # Errors
/// A sentence for the author of the case.
pub(crate) fn bytes_of(
    value: &Value,
    len: Option<usize>,
    scope: &Scope,
) -> Result<Vec<u8>, String> {
    let bytes = match value {
        Value::Integer(number) => {
            let number = u64::try_from(*number).map_err(|_| format!("{number} is negative"))?;
            return number_of(number, len.unwrap_or(1));
        }
        Value::Boolean(flag) => vec![u8::from(*flag)],
        Value::String(text) => match text.split_once(':') {
            _ if text.starts_with('$') => {
                let name = text.get(1..).unwrap_or_default();
                scope.get(name).ok_or_else(|| format!("nothing is called {text}"))?.to_vec()
            }
            Some(("hex", digits)) => hex_of(digits)?,
            Some(("text", words)) => {
                let mut bytes = words.as_bytes().to_vec();
                bytes.resize(len.unwrap_or(bytes.len()), b' ');
                bytes
            }
            _ => return Err(format!("{text:?} is neither $name, hex:.. nor text:..")),
        },
        other => return Err(format!("{other} is no value of a field")),
    };
    match len {
        Some(len) if len != bytes.len() => {
            Err(format!("{value} has {} bytes, the field has {len}", bytes.len()))
        }
        _ => Ok(bytes),
    }
}

/// A number in `len` bytes.
fn number_of(number: u64, len: usize) -> Result<Vec<u8>, String> {
    let all = number.to_be_bytes();
    let fits = len >= 8 || number >> (8 * len) == 0;
    if !fits {
        return Err(format!("{number} does not fit into {len} bytes"));
    }
    let mut bytes = vec![0; len.saturating_sub(8)];
    bytes.extend(all.get(8 - len.min(8)..).unwrap_or_default());
    Ok(bytes)
}

/// Bytes as a number; the last 8 if there are more.
pub(crate) fn as_number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Reads `e2d4c3d9 00*8`: groups of hex digits. `*n` repeats the last byte of a group.
pub(crate) fn hex_of(text: &str) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    for group in text.split_whitespace() {
        let (digits, times) = match group.split_once('*') {
            Some((digits, times)) => {
                (digits, times.parse().map_err(|_| format!("{group:?}: {times:?} is no count"))?)
            }
            None => (group, 1usize),
        };
        if digits.len() % 2 != 0 || !digits.is_ascii() {
            return Err(format!("{group:?} has an odd number of digits"));
        }
        let mut of_group = Vec::new();
        for at in (0..digits.len()).step_by(2) {
            let pair = digits.get(at..at + 2).unwrap_or_default();
            let byte = u8::from_str_radix(pair, 16);
            of_group.push(byte.map_err(|_| format!("{pair:?} is no byte in hex"))?);
        }
        let last = of_group.last().copied();
        bytes.extend(of_group);
        if let (Some(last), Some(more)) = (last, times.checked_sub(1)) {
            bytes.extend(std::iter::repeat_n(last, more.min(1 << 16)));
        }
    }
    Ok(bytes)
}

/// Hex digits of bytes.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_four_forms() {
        let mut scope = Scope::default();
        scope.set("eid", *b"AB");
        let of = |value: Value, len| bytes_of(&value, len, &scope);
        assert_eq!(of(0x102.into(), Some(3)), Ok(vec![0, 1, 2]));
        assert_eq!(of("$eid".into(), None), Ok(b"AB".to_vec()));
        assert_eq!(of("hex:e2d4 00*3".into(), None), Ok(vec![0xe2, 0xd4, 0, 0, 0]));
        assert_eq!(of("text:A".into(), Some(3)), Ok(b"A  ".to_vec()));
    }

    #[test]
    fn wrong_values_are_said_to_be_wrong() {
        let of = |value: Value, len| bytes_of(&value, len, &Scope::default()).unwrap_err();
        assert!(of(256.into(), Some(1)).contains("does not fit"));
        assert!(of((-1).into(), Some(1)).contains("negative"));
        assert!(of("$x".into(), None).contains("nothing is called $x"));
        assert!(of("hex:0".into(), None).contains("odd"));
        assert!(of("hex:zz".into(), None).contains("no byte"));
        assert!(of("hex:00".into(), Some(2)).contains("1 bytes, the field has 2"));
        assert!(of("words".into(), None).contains("neither"));
    }
}
