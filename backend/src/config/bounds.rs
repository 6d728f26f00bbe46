// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bounds of a configuration's numbers, and the syntax of its values.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use virtio_ism_abi::{Chid, Gid};

use super::error::ConfigError;

/// Largest number of move queues: in the framework, a 64-bit mask holds the queues of a thread, and two
/// queues are control and event.
pub const MAX_MOVE_QUEUES: u16 = 62;
/// Default size of the window, bytes.
pub const DEFAULT_WINDOW: u64 = 64 << 30;
/// Smallest window, bytes: room for the slabs of one pair in both directions.
pub const MIN_WINDOW: u64 = 64 << 20;
/// Largest window, bytes.
pub const MAX_WINDOW: u64 = 1 << 44;
/// Most devices of one pool socket.
pub const MAX_POOL: u32 = 4096;
/// Default CHID of a fabric.
pub const DEFAULT_CHID: Chid = Chid::VIRTIO_FIRST;

/// Most bytes of a socket's path: `sun_path` of unix(7) has 108, and a NUL ends it.
const MAX_SOCKET_PATH: usize = 107;

/// Longest time to leave, seconds.
const LONGEST: f64 = 3600.0;

/// Reads a CHID: four hexadecimal digits, `ff00` to `ffff` (EISM-6, EISM-7).
///
/// # Errors
/// [`ConfigError::Chid`].
pub fn parse_chid(text: &str) -> Result<Chid, ConfigError> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let chid = u16::from_str_radix(digits, 16).ok().map(Chid);
    chid.filter(|chid| chid.is_emulated()).ok_or_else(|| ConfigError::Chid(text.into()))
}

/// Reads a GID: a version 4 UUID (EISM-9).
///
/// # Errors
/// [`ConfigError::Gid`].
pub fn parse_gid(text: &str) -> Result<Gid, ConfigError> {
    let uuid = uuid::Uuid::parse_str(text).ok().filter(|uuid| uuid.get_version_num() == 4);
    uuid.map(|uuid| Gid(uuid.into_bytes())).ok_or_else(|| ConfigError::Gid(text.into()))
}

/// Reads permission bits, octal.
///
/// # Errors
/// [`ConfigError::SocketMode`].
pub fn parse_mode(text: &str) -> Result<u32, ConfigError> {
    // `from_str_radix` would accept a sign.
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= 0o777);
    mode.ok_or_else(|| ConfigError::SocketMode(text.into()))
}

/// Checks that a Unix socket can have the path.
///
/// # Errors
/// [`ConfigError::SocketPath`].
pub(super) fn check_socket_path(path: &Path) -> Result<(), ConfigError> {
    let len = path.as_os_str().as_bytes().len();
    match len <= MAX_SOCKET_PATH {
        true => Ok(()),
        false => Err(ConfigError::SocketPath { path: path.into(), len, limit: MAX_SOCKET_PATH }),
    }
}

/// Seconds in an operator's notation, such as 1 or 0.25.
///
/// # Errors
/// A message quoting the text.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no number of seconds from 0 to {LONGEST}");
    duration(text.parse().map_err(|_| wrong())?).ok_or_else(wrong)
}

/// A duration from seconds; `None` for a negative number, no number, or more than an hour.
fn duration(seconds: f64) -> Option<Duration> {
    (0.0..=LONGEST).contains(&seconds).then(|| Duration::from_secs_f64(seconds))
}

/// A time in seconds, within the bounds of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub(crate) struct LeaveTime(pub(crate) Duration);

impl TryFrom<f64> for LeaveTime {
    type Error = String;

    fn try_from(seconds: f64) -> Result<LeaveTime, String> {
        let wrong = || format!("{seconds} is no number of seconds from 0 to {LONGEST}");
        duration(seconds).map(LeaveTime).ok_or_else(wrong)
    }
}

impl From<LeaveTime> for f64 {
    fn from(seconds: LeaveTime) -> f64 {
        seconds.0.as_secs_f64()
    }
}

/// Reads a size in bytes with an optional suffix K, M, G or T (powers of 1024).
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size; examples: 4G, 65536M");
    let (digits, shift) = match text.char_indices().last() {
        Some((end, 'k' | 'K')) => (&text[..end], 10),
        Some((end, 'm' | 'M')) => (&text[..end], 20),
        Some((end, 'g' | 'G')) => (&text[..end], 30),
        Some((end, 't' | 'T')) => (&text[..end], 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

/// Reads a size in a file: a number of bytes, or text with a suffix as for options.
pub(super) fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    struct Size;
    impl Visitor<'_> for Size {
        type Value = u64;

        fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            formatter.write_str("a number of bytes, or a size such as \"64G\"")
        }

        fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<u64, E> {
            Ok(number)
        }

        fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<u64, E> {
            u64::try_from(number).map_err(|_| E::custom(format!("{number} is not a size")))
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<u64, E> {
            parse_size(text).map_err(E::custom)
        }
    }
    deserializer.deserialize_any(Size).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::time::Duration;

    #[test]
    fn seconds_have_fractions_and_an_end() {
        assert_eq!(parse_seconds("0.25"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_seconds("0"), Ok(Duration::ZERO));
        assert_eq!(parse_seconds("3600"), Ok(Duration::from_secs(3600)));
        for wrong in ["", "-1", "3601", "NaN", "inf", "1s"] {
            let error = parse_seconds(wrong).unwrap_err();
            assert!(error.contains(wrong) && error.contains("seconds"), "{error}");
        }
    }

    #[test]
    fn sizes_have_suffixes() {
        assert_eq!(parse_size("64G"), Ok(64 << 30));
        assert_eq!(parse_size("512m"), Ok(512 << 20));
        assert_eq!(parse_size("4096"), Ok(4096));
        for bad in ["", "G", "1X", "-1", "18446744073709551615T"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_mode_that_is_none_is_shown_as_it_was_written() {
        assert!(matches!(parse_mode("660"), Ok(0o660)));
        for bad in ["999", "1000", "", "+66", "rw"] {
            let refused = parse_mode(bad);
            assert!(matches!(&refused, Err(ConfigError::SocketMode(text)) if text == bad));
        }
    }
}
