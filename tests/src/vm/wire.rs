// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What goes over the control channel: a JSON object per line.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Longest line that either side reads, bytes.
pub(super) const MAX_LINE: usize = 4 << 20;

/// What the host asks for.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    /// The command it is about; the host numbers them.
    pub(super) id: u64,
    #[serde(flatten)]
    pub(super) ask: Ask,
}

/// What is to be done with a command.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Ask {
    /// Start it.
    Run(Start),
    /// Send it, and what it started, a signal.
    Kill { kill: i32 },
    /// Give it more standard input.
    Feed { feed: String },
    /// End its standard input.
    Eof { eof: bool },
}

/// A command to be started.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Start {
    /// Program and arguments.
    pub(super) run: Vec<String>,
    /// Variables on top of the guest's environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) env: BTreeMap<String, String>,
    /// Its standard input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) stdin: Option<String>,
    /// Whether standard input goes on after that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) open: bool,
}

/// What the guest says.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Report {
    /// The command it is about; 0 for the guest itself.
    pub(super) id: u64,
    #[serde(flatten)]
    pub(super) what: What,
}

/// What happened.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum What {
    /// The guest has booted and takes commands. Whatever ran before is gone.
    Ready(String),
    /// Standard output.
    Out(String),
    /// Standard error.
    Err(String),
    /// It ended with this code.
    Exit(i32),
    /// It was ended by this signal.
    Signal(i32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn same(request: &Request, text: &str) {
        assert_eq!(serde_json::to_string(request).unwrap(), text);
        assert_eq!(&serde_json::from_str::<Request>(text).unwrap(), request);
    }

    #[test]
    fn requests_are_flat_objects() {
        let start = Start { run: vec!["smc".into(), "devices".into()], ..Start::default() };
        same(&Request { id: 1, ask: Ask::Run(start) }, r#"{"id":1,"run":["smc","devices"]}"#);
        let start = Start {
            run: vec!["cat".into()],
            env: [("A".to_owned(), "b".to_owned())].into(),
            stdin: Some("in".into()),
            open: true,
        };
        let text = r#"{"id":2,"run":["cat"],"env":{"A":"b"},"stdin":"in","open":true}"#;
        same(&Request { id: 2, ask: Ask::Run(start) }, text);
        same(&Request { id: 3, ask: Ask::Kill { kill: 9 } }, r#"{"id":3,"kill":9}"#);
        same(&Request { id: 4, ask: Ask::Feed { feed: "x".into() } }, r#"{"id":4,"feed":"x"}"#);
        same(&Request { id: 5, ask: Ask::Eof { eof: true } }, r#"{"id":5,"eof":true}"#);
    }

    #[test]
    fn reports_are_flat_objects() {
        for (what, text) in [
            (What::Ready("a".into()), r#"{"id":7,"ready":"a"}"#),
            (What::Out("text".into()), r#"{"id":7,"out":"text"}"#),
            (What::Err("text".into()), r#"{"id":7,"err":"text"}"#),
            (What::Exit(3), r#"{"id":7,"exit":3}"#),
            (What::Signal(9), r#"{"id":7,"signal":9}"#),
        ] {
            let report = Report { id: 7, what };
            assert_eq!(serde_json::to_string(&report).unwrap(), text);
            assert_eq!(serde_json::from_str::<Report>(text).unwrap(), report);
        }
    }

    #[test]
    fn lines_that_make_no_sense_are_refused() {
        for bad in ["", "{}", "[]", r#"{"id":1}"#, r#"{"run":["a"]}"#, r#"{"id":-1,"kill":9}"#] {
            assert!(serde_json::from_str::<Request>(bad).is_err(), "{bad}");
        }
    }
}
