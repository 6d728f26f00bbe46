// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks of the fields of a message against a case.
//!
//! ```text
//! field = 5                          this value
//! field = [1, 2]                     one of them
//! field = { not = 0 }                another value
//! field = { from = 16, to = 255 }    a number of this range
//! field = { bits = 0x20 }            a number with these bits; "clear" without them
//! field = { member = "proposal.eid" }  a member of the list in an earlier message
//! field = { form = "eid" }           text as an EID, "hostname", "uuid", "address", "pairs"
//! distinct = "eid[*]"                no two members of this list are equal
//! ```

use toml::{Table, Value};

use crate::message::Message;
use crate::value::{Scope, as_number, bytes_of, to_hex};

/// Checks every field named in `checks`.
///
/// # Errors
/// The first unexpected field, as a sentence; or the mistake of the case's author.
pub(crate) fn check(message: &Message, checks: &Table, scope: &Scope) -> Result<(), String> {
    checks.iter().try_for_each(|(name, expected)| match name.as_str() {
        "pairs" => pairs(message),
        "reasons" => reasons(message, scope),
        "offered" => offered(message, scope),
        "proposed" => proposed_gid(message, scope),
        "distinct" => distinct(message, expected.as_str().unwrap_or_default()),
        name => of_name(message, name, expected, scope),
    })
}

fn of_name(message: &Message, name: &str, expected: &Value, scope: &Scope) -> Result<(), String> {
    let mut any = name.contains("[*]") || name == "reserved";
    for span in message.named(name) {
        any = true;
        let Some(got) = span.read(&message.bytes) else {
            return Err(format!("{name} is beyond the end"));
        };
        let is_good = judge(&got, expected, scope).map_err(|why| format!("{name}: {why}"))?;
        if !is_good {
            let expected = show_expected(expected, got.len(), scope);
            return Err(format!(
                "{}, at byte {}, is {}, expected {expected}",
                span.name,
                span.at,
                show(&got)
            ));
        }
    }
    if any { Ok(()) } else { Err(format!("{} has no field {name}", message.kind.name())) }
}

/// A field for people: a number, text with its bytes, or bytes.
fn show(bytes: &[u8]) -> String {
    let number = as_number(bytes);
    match (bytes.len(), text_of(bytes)) {
        (0..=4, _) if number < 10 => format!("{number:#x}"),
        (0..=4, _) => format!("{number:#x} ({number})"),
        (_, Some(text)) => format!("{text:?} ({})", to_hex(bytes)),
        _ => to_hex(bytes),
    }
}

/// The text spelt by the bytes of a name, without the blanks at its end.
fn text_of(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?.trim_end_matches(' ');
    let is_text = text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
    (!text.is_empty() && is_text).then_some(text)
}

/// An expected value as `show` has it, with the name of a variable behind its value.
fn show_expected(expected: &Value, len: usize, scope: &Scope) -> String {
    match expected {
        Value::Array(any) => {
            let all = any.iter().map(|value| show_expected(value, len, scope));
            all.collect::<Vec<_>>().join(" or ")
        }
        Value::Table(table) => match table.get("not") {
            Some(value) if table.len() == 1 => format!("not {}", show_expected(value, len, scope)),
            _ => expected.to_string(),
        },
        value => match (bytes_of(value, Some(len), scope), value.as_str()) {
            (Ok(bytes), Some(name)) if name.starts_with('$') => format!("{}: {name}", show(&bytes)),
            (Ok(bytes), _) => show(&bytes),
            (Err(_), _) => value.to_string(),
        },
    }
}

pub(crate) fn judge(got: &[u8], expected: &Value, scope: &Scope) -> Result<bool, String> {
    let is = |value: &Value| Ok(bytes_of(value, Some(got.len()), scope)? == got);
    match expected {
        Value::Array(any) => any.iter().try_fold(false, |found, value| Ok(found || is(value)?)),
        Value::Table(table) => predicate(got, table, scope),
        value => is(value),
    }
}

fn predicate(got: &[u8], table: &Table, scope: &Scope) -> Result<bool, String> {
    let number = |value: &Value| Ok::<_, String>(as_number(&bytes_of(value, Some(8), scope)?));
    for (verb, value) in table {
        let is_good = match verb.as_str() {
            "not" => !judge(got, value, scope)?,
            "bits" => as_number(got) & number(value)? == number(value)?,
            "clear" => as_number(got) & number(value)? == 0,
            "from" => as_number(got) >= number(value)?,
            "to" => as_number(got) <= number(value)?,
            "member" => {
                let list = value.as_str().ok_or("member is no name")?;
                scope.beginning(&format!("{list}[")).any(|member| member == got)
            }
            "form" => has_form(got, value.as_str().unwrap_or_default())?,
            other => return Err(format!("no check is called {other:?}")),
        };
        if !is_good {
            return Ok(false);
        }
    }
    Ok(true)
}

fn has_form(got: &[u8], form: &str) -> Result<bool, String> {
    let end = got.iter().rposition(|byte| *byte != b' ').map_or(0, |at| at + 1);
    let name = got.get(..end).unwrap_or_default();
    Ok(match form {
        // EID-2 to EID-5.
        "eid" => {
            let good = |byte: &u8| {
                byte.is_ascii_uppercase() || byte.is_ascii_digit() || b"-.".contains(byte)
            };
            let dots = name.windows(2).any(|pair| pair == b"..");
            name.first().is_some_and(u8::is_ascii_alphanumeric) && name.iter().all(good) && !dots
        }
        // CLCV2-51. Parentheses are Linux' name for "none yet".
        "hostname" => {
            let good = |byte: &u8| byte.is_ascii_alphanumeric() || b"-.".contains(byte);
            !name.is_empty() && (name.iter().all(good) || name == b"(none)")
        }
        // EISM-10: version and variant of RFC 4122 stand in both halves of an extended GID.
        "uuid-1" => got.get(6).is_some_and(|byte| (1..=8).contains(&(byte >> 4))),
        "uuid-2" => got.first().is_some_and(|byte| byte >> 6 == 0b10),
        // CLCV2-21.
        "address" => got.iter().any(|byte| *byte != 0),
        // CLC-18: fe80::/10 is on every link.
        "prefix" => !matches!(got, [0xfe, second, ..] if second >> 6 == 0b10),
        // CLC-7: no group address.
        "mac" => got.first().is_some_and(|byte| byte & 1 == 0) && got.iter().any(|byte| *byte != 0),
        other => return Err(format!("no form is called {other:?}")),
    })
}

/// EISM-11, EISM-13: an entry with an emulated CHID is followed by another entry of the same CHID.
fn pairs(message: &Message) -> Result<(), String> {
    let chids: Vec<u64> = message
        .named("entry[*].chid")
        .filter_map(|span| span.read(&message.bytes))
        .map(|bytes| as_number(&bytes))
        .collect();
    let mut rest = chids.as_slice();
    while let Some((chid, others)) = rest.split_first() {
        rest = match others.split_first() {
            _ if *chid < 0xff00 => others,
            Some((next, others)) if next == chid => others,
            _ => return Err(format!("CHID {chid:#x} has no second entry")),
        };
    }
    Ok(())
}

/// The members of a list differ.
fn distinct(message: &Message, list: &str) -> Result<(), String> {
    let mut seen = std::collections::BTreeSet::new();
    let members = message.named(list).filter_map(|span| Some((span, span.read(&message.bytes)?)));
    for (span, member) in members {
        let shown = show(&member);
        if !seen.insert(member) {
            return Err(format!("{} is {shown}, which stands there twice", span.name));
        }
    }
    Ok(())
}

/// The codes of the types offered in the Proposal: version 2, version 1.
fn proposed(scope: &Scope) -> [u64; 2] {
    let types = |name| scope.get(name).map_or(NONE, as_number);
    let version = scope.get("proposal.version").map_or(2, as_number);
    let v2 = if version == 1 { NONE } else { types("proposal.v2_types") };
    [v2, types("proposal.v1_types")]
}

/// Code of "none". The others: 0 SMC-R, 1 SMC-D, 3 both.
const NONE: u64 = 2;

fn has_type(code: u64, smc_type: u64) -> bool {
    code == smc_type || code == 3
}

/// EISM-19: the GID of a Confirm is in the Proposal, with both halves.
fn proposed_gid(message: &Message, scope: &Scope) -> Result<(), String> {
    let field = |name: &str| message.value(name).unwrap_or_default();
    let own = [field("gid"), field("extended_gid")];
    let entry = |i: usize| scope.get(&format!("proposal.entry[{i}].gid"));
    let found = (0..7).any(|i| [entry(i), entry(i + 1)] == [Some(&own[0][..]), Some(&own[1][..])]);
    if found { Ok(()) } else { Err(format!("GID {} was not proposed", to_hex(&own.concat()))) }
}

/// CLCV2-89: the type and version of an Accept were offered.
fn offered(message: &Message, scope: &Scope) -> Result<(), String> {
    let [v2, v1] = proposed(scope);
    let (version, smc_type) = (message.number("version"), message.number("smc_type"));
    let code = if version == 1 { v1 } else { v2 };
    if has_type(code, smc_type) {
        return Ok(());
    }
    let name = if smc_type == 1 { "SMC-D" } else { "SMC-R" };
    Err(format!("{name} version {version} was not offered"))
}

/// CLCV2-79, CLCV2-80: a Decline of a Proposal has a reason for each offered type and for no other
/// type, and the diagnosis is one of the reasons.
fn reasons(message: &Message, scope: &Scope) -> Result<(), String> {
    let [v2, v1] = proposed(scope);
    let offered = [
        ("reason_d2", has_type(v2, 1)),
        ("reason_d1", has_type(v1, 1)),
        ("reason_r2", has_type(v2, 0)),
        ("reason_r1", has_type(v1, 0)),
    ];
    for (name, offered) in offered {
        let given = message.number(name) != 0;
        if given != offered {
            let state = if offered { "was offered" } else { "was not offered" };
            return Err(format!("{name} is {:#x}, and the type {state}", message.number(name)));
        }
    }
    let diagnosis = message.number("diagnosis");
    let any = offered.iter().any(|(name, _)| message.number(name) == diagnosis);
    if any { Ok(()) } else { Err(format!("the diagnosis {diagnosis:#x} is none of the reasons")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::encode;

    fn proposal() -> Message {
        let text =
            "message = 'proposal'\nv2_types = 3\nmax_conns = 32\neids = ['text:A.B-1', 'text:X']
            entries = [[1, 0xff00], [2, 0xff00], [3, 7]]";
        encode(&text.parse().unwrap(), &Scope::default()).unwrap()
    }

    fn holds(checks: &str) -> Result<(), String> {
        let message = proposal();
        let mut scope = Scope::default();
        message.publish(&mut scope);
        check(&message, &checks.parse().unwrap(), &scope)
    }

    #[test]
    fn checks_that_hold() {
        for checks in [
            "max_conns = 32",
            "max_conns = [16, 32]",
            "max_conns = { not = 0 }",
            "max_conns = { from = 16, to = 255 }",
            "'eid[*]' = { form = 'eid' }",
            "'eid[1]' = 'text:X'",
            "'eid[1]' = { member = 'proposal.eid' }",
            "pairs = true",
            "reserved = 0",
            "distinct = 'eid[*]'",
            "v2_types = 3\nv1_types = 2",
        ] {
            assert_eq!(holds(checks), Ok(()), "{checks}");
        }
    }

    #[test]
    fn checks_that_do_not_say_which_field_and_what_it_is() {
        let expected = "max_conns, at byte 132, is 0x20 (32), expected 0x21 (33)";
        // 80 base, 24 in the extension; the value of the case is in the message.
        let said = holds("max_conns = 33").unwrap_err();
        assert_eq!(said.replace("at byte 104", "at byte 132"), expected);
        for checks in [
            "max_conns = [1, 2]",
            "max_conns = { not = 32 }",
            "max_conns = { from = 33 }",
            "'eid[0]' = 'text:X'",
            "'eid[0]' = { member = 'accept.eid' }",
            "'entry[*].chid' = 7",
            "distinct = 'entry[*].chid'",
            "nothing = 1",
        ] {
            assert!(holds(checks).is_err(), "{checks}");
        }
    }

    #[test]
    fn forms_of_text() {
        let form = |text: &[u8], form| has_form(text, form).unwrap();
        for (eid, good) in [
            ("A-1.B", true),
            ("a", false),
            ("-A", false),
            ("A..B", false),
            ("", false),
            ("A B", false),
        ] {
            assert_eq!(form(format!("{eid:<32}").as_bytes(), "eid"), good, "{eid}");
        }
        assert!(form(b"host-1.lan  ", "hostname") && !form(b"a b", "hostname"));
        assert!(form(&[2, 0, 0, 0, 0, 1], "mac") && !form(&[1, 0, 0, 0, 0, 1], "mac"));
        assert!(form(&[0xfd, 0x80], "prefix") && form(&[0xfe, 0xc0], "prefix"));
        assert!(!form(&[0xfe, 0x80], "prefix") && !form(&[0xfe, 0xbf], "prefix"));
    }
}
