// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Names of 32 bytes, blank padded: EIDs and host names.

use core::fmt;

use thiserror::Error;

const LEN: usize = 32;

fn pad(name: &[u8]) -> [u8; LEN] {
    let mut bytes = [b' '; LEN];
    for (slot, byte) in bytes.iter_mut().zip(name) {
        *slot = *byte;
    }
    bytes
}

fn print(bytes: &[u8; LEN], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let end = bytes.iter().rposition(|b| *b != b' ').map_or(0, |last| last + 1);
    for byte in bytes.iter().take(end) {
        write!(f, "{}", byte.escape_ascii())?;
    }
    Ok(())
}

/// An Enterprise ID: 32 bytes, blank padded, compared as a whole (EID-1, EID-9).
///
/// [`Eid::new`] makes a valid user EID. A received EID is kept unchecked, for comparison with a
/// local one byte by byte.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Eid([u8; LEN]);

/// Why a text is no user EID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum EidError {
    /// No characters.
    #[error("an EID has at least one character")]
    Empty,
    /// More than 32 characters (EID-1).
    #[error("an EID has at most 32 characters, not {0}")]
    TooLong(usize),
    /// Something other than A-Z, 0-9, hyphen and dot (EID-2).
    #[error("character {got:?} at position {at}; A-Z, 0-9, '-' and '.' are allowed")]
    BadCharacter {
        /// Position, from 0.
        at: usize,
        /// The character.
        got: char,
    },
    /// The first character is a hyphen or dot (EID-3).
    #[error("an EID begins with a letter or digit, not {0:?}")]
    BadFirst(char),
    /// Two dots in a row (EID-4).
    #[error("two dots in a row at position {0}")]
    DoubleDot(usize),
}

impl Eid {
    /// Zero: a system EID not offered.
    pub const ZERO: Eid = Eid([0; LEN]);

    /// A user EID; shorter names are padded with blanks (EID-1 to EID-5).
    ///
    /// # Errors
    /// [`EidError`] names the broken rule.
    pub fn new(name: &str) -> Result<Eid, EidError> {
        let Some(first) = name.chars().next() else { return Err(EidError::Empty) };
        for (at, got) in name.chars().enumerate() {
            if !matches!(got, 'A'..='Z' | '0'..='9' | '-' | '.') {
                return Err(EidError::BadCharacter { at, got });
            }
        }
        if name.len() > LEN {
            return Err(EidError::TooLong(name.len()));
        }
        if !first.is_ascii_alphanumeric() {
            return Err(EidError::BadFirst(first));
        }
        if let Some(at) = name.find("..") {
            return Err(EidError::DoubleDot(at));
        }
        Ok(Eid(pad(name.as_bytes())))
    }

    /// The field of the wire, not checked.
    pub const fn from_wire(bytes: [u8; LEN]) -> Eid {
        Eid(bytes)
    }

    /// The field for the wire.
    pub const fn as_bytes(&self) -> &[u8; LEN] {
        &self.0
    }
}

impl Default for Eid {
    fn default() -> Self {
        Eid::ZERO
    }
}

impl core::str::FromStr for Eid {
    type Err = EidError;

    fn from_str(name: &str) -> Result<Eid, EidError> {
        Eid::new(name)
    }
}

impl fmt::Display for Eid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(&self.0, f)
    }
}

impl fmt::Debug for Eid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Eid(\"{self}\")")
    }
}

/// The host name of a first contact extension: 32 bytes, blank padded (CLCV2-51).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hostname([u8; LEN]);

/// The error of an invalid host name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("character {got:?} at position {at}; letters, digits, '-' and '.' are allowed")]
pub struct HostnameError {
    /// Position, from 0.
    pub at: usize,
    /// The character.
    pub got: char,
}

impl Hostname {
    /// 32 blanks: no name.
    pub const BLANK: Hostname = Hostname([b' '; LEN]);

    /// A host name to send; longer ones are cut to 32 characters (CLCV2-51).
    ///
    /// # Errors
    /// [`HostnameError`] names the first forbidden character. Send [`Hostname::BLANK`] then: a host
    /// name never fails a connection.
    pub fn new(name: &str) -> Result<Hostname, HostnameError> {
        for (at, got) in name.chars().enumerate() {
            if !(got.is_ascii_alphanumeric() || matches!(got, '-' | '.')) {
                return Err(HostnameError { at, got });
            }
        }
        Ok(Hostname(pad(name.as_bytes())))
    }

    /// The field of the wire, not checked.
    pub const fn from_wire(bytes: [u8; LEN]) -> Hostname {
        Hostname(bytes)
    }

    /// The field for the wire.
    pub const fn as_bytes(&self) -> &[u8; LEN] {
        &self.0
    }

    /// The name up to the first blank, or `None` if the name is empty or has forbidden characters
    /// (CLCV2-52: such a name may be dropped).
    pub fn text(&self) -> Option<&str> {
        let name = self.0.split(|b| *b == b' ').next()?;
        let allowed = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.');
        if name.is_empty() || !name.iter().all(allowed) {
            return None;
        }
        core::str::from_utf8(name).ok()
    }
}

impl Default for Hostname {
    fn default() -> Self {
        Hostname::BLANK
    }
}

impl fmt::Display for Hostname {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(&self.0, f)
    }
}

impl fmt::Debug for Hostname {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hostname(\"{self}\")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: EID-2, EID-3, EID-4.
    #[test]
    fn eid_rules_each_have_a_name() {
        assert_eq!(Eid::new(""), Err(EidError::Empty));
        assert_eq!(Eid::new(&"A".repeat(33)), Err(EidError::TooLong(33)));
        assert_eq!(Eid::new("Abc"), Err(EidError::BadCharacter { at: 1, got: 'b' }));
        assert_eq!(Eid::new("A_B"), Err(EidError::BadCharacter { at: 1, got: '_' }));
        assert_eq!(Eid::new("A B"), Err(EidError::BadCharacter { at: 1, got: ' ' }));
        assert_eq!(Eid::new("-A"), Err(EidError::BadFirst('-')));
        assert_eq!(Eid::new(".A"), Err(EidError::BadFirst('.')));
        assert_eq!(Eid::new("A..B"), Err(EidError::DoubleDot(1)));
    }

    // Shows: EID-1, EID-5, EID-9.
    #[test]
    fn eid_is_padded_with_blanks_and_compared_as_a_whole() {
        let eid = Eid::new("SITE-1.LAB").unwrap();
        assert_eq!(&eid.as_bytes()[..12], b"SITE-1.LAB  ");
        assert_eq!(eid.to_string(), "SITE-1.LAB");
        assert_ne!(Eid::new("ABC").unwrap(), Eid::new("ABC.").unwrap());
        assert!(Eid::new(&"A".repeat(32)).is_ok());
    }

    #[test]
    fn wire_eid_prints_escaped() {
        let mut bytes = [b' '; 32];
        bytes[0] = 0;
        bytes[1] = b'\n';
        assert_eq!(Eid::from_wire(bytes).to_string(), "\\x00\\n");
    }

    // Shows: CLCV2-51.
    #[test]
    fn long_hostname_is_cut() {
        let name = Hostname::new(&"h".repeat(33)).unwrap();
        assert_eq!(name.text(), Some("h".repeat(32).as_str()));
    }

    // Shows: CLCV2-52.
    #[test]
    fn hostname_ends_at_the_first_blank_and_odd_ones_are_dropped() {
        let mut bytes = [b' '; 32];
        bytes[..6].copy_from_slice(b"vm1 xy");
        assert_eq!(Hostname::from_wire(bytes).text(), Some("vm1"));
        bytes[..6].copy_from_slice(b"(none)");
        assert_eq!(Hostname::from_wire(bytes).text(), None);
        assert_eq!(Hostname::from_wire([0; 32]).text(), None);
        assert_eq!(Hostname::BLANK.text(), None);
        assert_eq!(Hostname::new("a_b"), Err(HostnameError { at: 1, got: '_' }));
    }
}
