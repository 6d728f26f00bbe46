// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The messages of the control channel: a JSON object per line.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Longest line accepted by either side, bytes.
pub(super) const MAX_LINE: usize = 4 << 20;

/// A request of the host.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    /// The command's number, given by the host.
    pub(super) id: u64,
    #[serde(flatten)]
    pub(super) ask: Ask,
}

/// An action on a command.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Ask {
    /// Start the command.
    Run(Start),
    /// Send a signal to the command's process group.
    Kill { kill: i32 },
    /// Feed more standard input.
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
    /// Standard input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) stdin: Option<String>,
    /// Whether more standard input follows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) open: bool,
}

/// A report of the guest.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Report {
    /// The command's number; 0 for the guest itself.
    pub(super) id: u64,
    #[serde(flatten)]
    pub(super) what: What,
}

/// An event of a command, or of the guest.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum What {
    /// The guest has booted and takes commands. Whatever ran before is gone.
    Ready(String),
    /// Standard output.
    Out(String),
    /// Standard error.
    Err(String),
    /// The command ended with this code.
    Exit(i32),
    /// The command was ended by this signal.
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
