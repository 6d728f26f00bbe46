// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The share of new connections that a rule of a policy gives to SMC.

use std::fmt;

/// A share, in parts of ten thousand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u16);

const WHOLE: u16 = 10_000;

impl Share {
    /// Reads a share, such as "5%" or "0.25%".
    pub(super) fn parse(text: &str) -> Option<Share> {
        let number = text.strip_suffix('%')?.trim_end();
        let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !is_number(whole) || !is_number(part) || part.len() > 2 {
            return None;
        }
        let hundredths = format!("{part:0<2}").parse::<u16>().ok()?;
        let share = whole.parse::<u16>().ok()?.checked_mul(100)?.checked_add(hundredths)?;
        (share <= WHOLE).then_some(Share(share))
    }

    /// Whether a new connection belongs to the share. Each connection is drawn by itself, so the children of
    /// a fork and programs with one connection choose as others do.
    pub(super) fn takes_next(self) -> bool {
        let mut random = [0; 8];
        let drawn = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
        drawn == Ok(random.len()) && self.takes(u64::from_ne_bytes(random))
    }

    fn takes(self, random: u64) -> bool {
        (u128::from(random) * u128::from(WHOLE)) >> 64 < u128::from(self.0)
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0 / 100, self.0 % 100) {
            (whole, 0) => write!(f, "{whole}%"),
            (whole, part) => write!(f, "{whole}.{part:02}%"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_percentage_with_two_digits_at_most() {
        for (text, share) in
            [("5%", 500), ("0.25%", 25), ("0.5 %", 50), ("0%", 0), ("100%", 10_000)]
        {
            assert_eq!(Share::parse(text), Some(Share(share)), "{text}");
        }
        for text in ["5", "", "%", ".5%", "5.%", "-1%", "+1%", "100.01%", "101%", "0.125%", "x%"] {
            assert_eq!(Share::parse(text), None, "{text}");
        }
        assert_eq!(Share(500).to_string(), "5%");
        assert_eq!(Share(25).to_string(), "0.25%");
    }

    #[test]
    fn the_share_of_connections_is_drawn() {
        for share in [0, 500, 5000, 10_000] {
            let taken = (0..10_000).filter(|_| Share(share).takes_next()).count();
            // Seven times the standard deviation of the widest scatter.
            assert!(taken.abs_diff(share.into()) <= 350, "{share}: {taken}");
            assert!(!matches!(share, 0 | 10_000) || taken == usize::from(share));
        }
        assert!(!Share(0).takes(0) && Share(1).takes(0));
        assert!(Share(10_000).takes(u64::MAX) && !Share(9999).takes(u64::MAX));
    }
}
