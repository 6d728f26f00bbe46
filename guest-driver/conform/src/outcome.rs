// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The outcomes allowed by a case, and their comparison with events.

use toml::{Table, Value};

use crate::check::check;
use crate::link::Event;
use crate::llc::Llc;
use crate::message::Kind;
use crate::value::{Scope, to_hex};

/// How an event compares with an outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Match {
    /// The event is the outcome.
    Yes,
    /// The kind is right, but a checked field is wrong.
    Wrong(String),
    /// The event is of another kind.
    No,
}

/// Compares an event with `outcome`: a name, or a table with one name and the checks.
///
/// # Errors
/// The mistake of the case's author.
pub(crate) fn compare(event: &Event, outcome: &Value, scope: &Scope) -> Result<Match, String> {
    let none = Table::new();
    let (name, checks) = match outcome {
        Value::String(name) => (name.as_str(), &none),
        Value::Table(table) => match table.iter().next() {
            Some((name, Value::Table(checks))) if table.len() == 1 => (name.as_str(), checks),
            _ => return Err(format!("{outcome} is no outcome")),
        },
        _ => return Err(format!("{outcome} is no outcome")),
    };
    let kind = match name {
        "proposal" => Some(Kind::Proposal),
        "accept" => Some(Kind::Accept),
        "confirm" => Some(Kind::Confirm),
        "decline" | "fallback" => Some(Kind::Decline),
        "end" | "reset" | "open" | "data" | "cdc" | "down" => None,
        name => match Llc::of_name(name) {
            Some(kind) => Some(Kind::Llc(kind)),
            None => return Err(format!("no outcome is called {name:?}")),
        },
    };
    Ok(match (event, kind) {
        // A request is no answer, and the other way round.
        (Event::Message(message), Some(kind @ Kind::Llc(_))) if message.kind == kind => {
            match check(message, &reply_only(checks), scope) {
                Ok(()) => check(message, checks, scope).map_or_else(Match::Wrong, |()| Match::Yes),
                Err(_) => Match::No,
            }
        }
        (Event::Message(message), Some(kind)) if message.kind == kind => {
            check(message, checks, scope).map_or_else(Match::Wrong, |()| Match::Yes)
        }
        (Event::End | Event::Reset | Event::LinkDown(_), None) if name == "down" => Match::Yes,
        (Event::End, None) if name == "end" => Match::Yes,
        (Event::Reset, None) if name == "end" || name == "reset" => Match::Yes,
        (Event::Nothing, None) if name == "open" => Match::Yes,
        (Event::Data(_), None) if name == "data" => Match::Yes,
        _ => Match::No,
    })
}

/// The checks of the reply bit alone.
fn reply_only(checks: &Table) -> Table {
    checks
        .iter()
        .filter(|(name, _)| *name == "reply")
        .map(|(n, v)| (n.clone(), v.clone()))
        .collect()
}

/// Whether an outcome is about the link of SMC-R.
pub(crate) fn is_of_link(outcome: &Value) -> bool {
    let is = |name: &str| name == "down" || Llc::of_name(name).is_some();
    outcome.as_str().is_some_and(is)
        || outcome.as_table().is_some_and(|table| table.keys().any(|name| is(name)))
}

/// Whether the event of an outcome is silence.
pub(crate) fn is_open(outcome: &Value) -> bool {
    outcome.as_str() == Some("open")
}

/// Checks of the words in the target's control block, if the outcome has any.
pub(crate) fn of_words(outcome: &Value) -> Option<&Table> {
    outcome.as_table()?.get("cdc")?.as_table()
}

/// Whether data has to come through after this outcome.
pub(crate) fn falls_back(outcome: &Value) -> bool {
    let is = |name: &str| name == "fallback";
    outcome.as_str().is_some_and(is)
        || outcome.as_table().is_some_and(|table| table.keys().any(|name| is(name)))
}

/// An event in words.
pub(crate) fn describe(event: &Event, within: u64) -> String {
    match event {
        Event::Message(message) if message.kind == Kind::Decline => {
            format!("a decline of {:#010x}", message.number("diagnosis"))
        }
        Event::Message(message) => {
            format!("{} of {} bytes", message.kind.name(), message.bytes.len())
        }
        Event::Unreadable(why) => format!("a message that cannot be read: {why}"),
        Event::Data(bytes) => {
            format!("{} bytes of data: {}", bytes.len(), to_hex(bytes.get(..16).unwrap_or(bytes)))
        }
        Event::LinkDown(why) => format!("the end of the link: {why}"),
        Event::End => "an end (FIN)".into(),
        Event::Reset => "a reset (RST)".into(),
        Event::Nothing => format!("nothing within {within} ms"),
    }
}

/// Outcomes in words.
pub(crate) fn describe_all(outcomes: &[Value]) -> String {
    let words = outcomes.iter().map(|outcome| match outcome {
        Value::String(name) => name.clone(),
        other => other.to_string(),
    });
    words.collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::encode;

    fn outcome(text: &str) -> Value {
        let table: Table = format!("x = {text}").parse().unwrap();
        table["x"].clone()
    }

    #[test]
    fn an_event_is_compared_with_kind_and_fields() {
        let table = "message = 'decline'\ndiagnosis = 7".parse().unwrap();
        let decline = Event::Message(encode(&table, &Scope::default()).unwrap());
        let of = |event: &Event, text: &str| compare(event, &outcome(text), &Scope::default());
        assert_eq!(of(&decline, "'decline'"), Ok(Match::Yes));
        assert_eq!(of(&decline, "'fallback'"), Ok(Match::Yes));
        assert_eq!(of(&decline, "{ decline = { diagnosis = 7 } }"), Ok(Match::Yes));
        assert!(matches!(of(&decline, "{ decline = { diagnosis = 8 } }"), Ok(Match::Wrong(_))));
        for other in ["'accept'", "'end'", "'open'", "'data'"] {
            assert_eq!(of(&decline, other), Ok(Match::No));
        }
        assert_eq!(of(&Event::Reset, "'end'"), Ok(Match::Yes));
        assert_eq!(of(&Event::End, "'reset'"), Ok(Match::No));
        assert_eq!(of(&Event::Nothing, "'open'"), Ok(Match::Yes));
        assert!(of(&Event::End, "'ends'").is_err() && of(&Event::End, "3").is_err());
    }
}
