// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes from hex in common forms: plain digits, C arrays, and the dumps of `xxd`, `hexdump -C`,
//! `tcpdump -x` and Wireshark.

use super::DecodeError;

/// Limit of the bytes taken from hex text.
pub(super) const MAX_BYTES: usize = 1 << 20;

/// Reads `text` as hex.
///
/// Spaces, colons, commas, brackets, quotes, `0x` and `\x` separate; `#` begins a comment; an
/// offset at the start of a line and the characters at its end are recognised as such.
///
/// # Errors
/// [`DecodeError::HexDigit`], [`DecodeError::HexOdd`] or [`DecodeError::TooMuchHex`].
pub(super) fn parse(text: &str) -> Result<Vec<u8>, DecodeError> {
    let mut bytes = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("");
        parse_line(line, index + 1, &mut bytes)?;
        if bytes.len() > MAX_BYTES {
            return Err(DecodeError::TooMuchHex { max: MAX_BYTES });
        }
    }
    Ok(bytes)
}

fn parse_line(line: &str, number: usize, bytes: &mut Vec<u8>) -> Result<(), DecodeError> {
    let line = line.trim();
    if let Some(data) = after_colon_offset(line) {
        // xxd and tcpdump: the characters stand behind two spaces.
        let data = data.split("  ").next().unwrap_or("");
        return parse_digits(data, number, bytes);
    }
    if is_end_offset(line, bytes.len()) {
        return Ok(());
    }
    if let Some(data) = after_spaced_offset(line, bytes.len()) {
        // hexdump puts the characters behind a bar, Wireshark behind three spaces.
        let data = data.split('|').next().unwrap_or("");
        let data = data.split("   ").next().unwrap_or("");
        for token in data.split_whitespace().take(16) {
            parse_digits(token, number, bytes)?;
        }
        return Ok(());
    }
    parse_digits(line, number, bytes)
}

/// `0x0010:  data` or `00000010: data`.
fn after_colon_offset(line: &str) -> Option<&str> {
    let (offset, data) = line.split_once(':')?;
    let digits = offset.strip_prefix("0x").unwrap_or(offset);
    let is_offset = digits.len() >= 4 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    (is_offset && data.starts_with([' ', '\t'])).then(|| data.trim_start())
}

/// `00000010  data` whose number is the count of bytes so far.
fn after_spaced_offset(line: &str, so_far: usize) -> Option<&str> {
    let (offset, data) = line.split_once("  ")?;
    let data = data.trim_start();
    let value = usize::from_str_radix(offset, 16).ok()?;
    let first = data.split_whitespace().next()?;
    (offset.len() >= 4 && value == so_far && first.len() == 2).then_some(data)
}

/// The last line of `hexdump -C`: the count of bytes and nothing else.
fn is_end_offset(line: &str, so_far: usize) -> bool {
    so_far > 0 && line.len() >= 7 && usize::from_str_radix(line, 16) == Ok(so_far)
}

fn parse_digits(data: &str, line: usize, bytes: &mut Vec<u8>) -> Result<(), DecodeError> {
    let is_separator = |c: char| {
        c.is_whitespace() || matches!(c, ':' | ',' | ';' | '-' | '[' | ']' | '{' | '}' | '"' | '\'')
    };
    for token in data.split(is_separator) {
        let token = token.strip_prefix("0x").or(token.strip_prefix("0X")).unwrap_or(token);
        let mut half = None;
        for c in token.replace("\\x", "").chars() {
            let Some(digit) = c.to_digit(16) else {
                return Err(DecodeError::HexDigit { line, found: c });
            };
            // A digit of base 16 fits a byte.
            let digit = digit as u8;
            half = match half {
                None => Some(digit),
                Some(high) => {
                    bytes.push(high << 4 | digit);
                    None
                }
            };
        }
        if half.is_some() {
            return Err(DecodeError::HexOdd { line, token: token.chars().take(32).collect() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: [u8; 20] =
        [0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 0x1c, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0x61, 0x62, 0x63, 0x64];

    #[test]
    fn takes_the_usual_dumps() {
        let forms = [
            "e2d4c3d904001c10 0000000000000000 61626364",
            "E2:D4:C3:D9:04:00:1C:10:00:00:00:00:00:00:00:00:61:62:63:64",
            "{0xe2d4c3d9, 0x04001c10, \\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00} # rest\n'61626364'",
            "00000000: e2d4 c3d9 0400 1c10 0000 0000 0000 0000  ................\n\
             00000010: 6162 6364                                abcd",
            "00000000  e2 d4 c3 d9 04 00 1c 10  00 00 00 00 00 00 00 00  |................|\n\
             00000010  61 62 63 64                                       |abcd|\n00000014",
            "\t0x0000:  e2d4 c3d9 0400 1c10 0000 0000 0000 0000  ................\n\
             \t0x0010:  6162 6364                                abcd",
            "0000   e2 d4 c3 d9 04 00 1c 10 00 00 00 00 00 00 00 00   ................\n\
             0010   61 62 63 64                                       abcd",
        ];
        for form in forms {
            assert_eq!(parse(form).unwrap(), BYTES, "{form}");
        }
    }

    #[test]
    fn says_what_is_no_hex_and_where() {
        assert!(matches!(parse("e2d4\nxy"), Err(DecodeError::HexDigit { line: 2, found: 'x' })));
        assert!(matches!(parse("e2 d"), Err(DecodeError::HexOdd { line: 1, .. })));
    }

    #[test]
    fn stops_at_its_limit() {
        let line = "00".repeat(1 << 16) + "\n";
        assert!(matches!(parse(&line.repeat(17)), Err(DecodeError::TooMuchHex { .. })));
    }

    #[test]
    fn four_digits_and_two_spaces_are_data_unless_they_count_the_bytes() {
        assert_eq!(parse("e2d4  c3").unwrap(), [0xe2, 0xd4, 0xc3]);
    }
}
