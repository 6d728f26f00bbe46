// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! IP addresses in a text, as numbers.

use std::collections::HashMap;
use std::net::IpAddr;

/// The numbers of the addresses so far.
#[derive(Debug, Default)]
pub(super) struct Mask {
    known: HashMap<IpAddr, usize>,
}

/// Whether a character may be part of an address. A scope (`%eth0`) and a port in brackets stay.
fn is_part(c: char) -> bool {
    c.is_ascii_hexdigit() || c == '.' || c == ':'
}

impl Mask {
    /// The text with numbers in the place of addresses. An address of all zeros, and addresses of
    /// the loopback interface, stay: neither tells anything.
    pub(super) fn applied(&mut self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while !rest.is_empty() {
            let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            let (word, behind) = rest.split_at(end);
            // Letters before or behind: a word of some language.
            let begins = !out.ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let ends = !behind.starts_with(|c: char| c.is_alphanumeric() || c == '_');
            if begins && ends {
                self.word(&mut out, word)
            } else {
                out.push_str(word)
            }
            let next = behind.chars().next().map_or(0, char::len_utf8);
            let (between, after) = behind.split_at(next);
            out.push_str(between);
            rest = after;
        }
        out
    }

    /// Replaces an address in a word of digits, colons and full stops. The word may end with a port
    /// or with the full stop of a sentence.
    fn word(&mut self, out: &mut String, word: &str) {
        let trimmed = word.trim_end_matches(['.', ':']);
        let port = trimmed.rsplit_once(':').filter(|(host, _)| !host.contains(':'));
        for (address, more) in [Some((trimmed, "")), port].into_iter().flatten() {
            // "::" of a longer one has been trimmed.
            let exact = [word, address].into_iter().find_map(|it| Some((it, it.parse().ok()?)));
            let Some((it, ip)) = exact else { continue };
            let behind = if it == word { "" } else { word.get(trimmed.len()..).unwrap_or("") };
            out.push_str(&self.number(it, ip));
            if it != word && !more.is_empty() {
                out.push(':');
                out.push_str(more);
            }
            out.push_str(behind);
            return;
        }
        out.push_str(word);
    }

    fn number(&mut self, text: &str, ip: IpAddr) -> String {
        let ip = ip.to_canonical();
        if ip.is_unspecified() || ip.is_loopback() {
            return text.to_owned();
        }
        let next = self.known.len() + 1;
        format!("ADDRESS-{}", self.known.entry(ip).or_insert(next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_numbers_and_nothing_else_changes() {
        let mut mask = Mask::default();
        let cases = [
            ("from 192.0.2.7:80 to 192.0.2.8.", "from ADDRESS-1:80 to ADDRESS-2."),
            ("[2001:db8::7]:443, 192.0.2.7", "[ADDRESS-3]:443, ADDRESS-1"),
            ("::ffff:192.0.2.8 fe80::1%eth0", "ADDRESS-2 ADDRESS-4%eth0"),
            ("\"peer\":\"192.0.2.9:5\"}", "\"peer\":\"ADDRESS-5:5\"}"),
            ("192.0.2.7/24", "ADDRESS-1/24"),
            ("127.0.0.1:80 ::1 0.0.0.0 ::", "127.0.0.1:80 ::1 0.0.0.0 ::"),
            (
                "Linux 6.1.0-18 at 14:18:10 dead.beef a: b",
                "Linux 6.1.0-18 at 14:18:10 dead.beef a: b",
            ),
            ("0000:00:04.0 v2.1.0 é192", "0000:00:04.0 v2.1.0 é192"),
        ];
        for (text, masked) in cases {
            assert_eq!(mask.applied(text), masked);
        }
    }
}
