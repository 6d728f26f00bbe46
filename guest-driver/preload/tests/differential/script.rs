// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sequences: text with one operation per line.
//!
//! A sequence begins with a line `## NAME | PAGE`, possibly followed by `| WORDS`. `any` among the
//! words: the connections may be TCP with the library at both ends. `uring`: the sequence needs
//! io_uring. Each further line names an agent and an operation, or is one of [`MACROS`].

use std::collections::BTreeSet;
use std::iter::Peekable;
use std::str::Chars;

/// Common beginnings of sequences.
const MACROS: &[(&str, &[&str])] = &[
    // A connection not used yet by any program.
    ("fresh", &["s listen", "c connect", "s accept"]),
    ("fresh-nb", &["s listen", "c connect nb", "s accept nb"]),
    // A connection after a byte in each direction. The first `fionread` makes a server begin SMC's
    // handshake.
    (
        "meet",
        &[
            "s listen",
            "c connect",
            "s accept",
            "s fionread",
            "c send \"c\"",
            "s recv 1",
            "s send \"s\"",
            "c recv 1",
        ],
    ),
    (
        "meet-nb",
        &[
            "s listen",
            "c connect nb",
            "s accept nb",
            "s fionread",
            "c poll OUT 5000",
            "c sendall \"c\"",
            "s poll IN 5000",
            "s recv 1",
            "s poll OUT 5000",
            "s sendall \"s\"",
            "c poll IN 5000",
            "c recv 1",
        ],
    ),
];

/// One operation of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// The agent to carry out the operation.
    pub(crate) agent: String,
    /// The operation.
    pub(crate) operation: String,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.agent, self.operation)
    }
}

/// A sequence of operations.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    /// Its name; unique.
    pub(crate) name: String,
    /// The manual page of the tested behaviour.
    pub(crate) page: String,
    /// Whether SMC has to carry the connections if both ends have the library.
    pub(crate) expects_smc: bool,
    /// Whether the sequence needs io_uring.
    pub(crate) needs_uring: bool,
    pub(crate) steps: Vec<Step>,
}

impl Sequence {
    /// The names of the agents, the two ends first.
    pub(crate) fn agents(&self) -> Vec<String> {
        let mut names: Vec<String> = vec!["s".into(), "c".into()];
        let others: BTreeSet<_> = self.steps.iter().map(|step| step.agent.clone()).collect();
        names.extend(others.into_iter().filter(|name| name.contains('.')));
        names
    }
}

/// Reads a text of sequences.
pub(crate) fn parse(text: &str) -> Vec<Sequence> {
    let mut all: Vec<Sequence> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(head) = line.strip_prefix("## ") {
            let mut parts = head.split('|').map(str::trim);
            let name = parts.next().unwrap_or_default().to_owned();
            let page = parts.next().unwrap_or_else(|| panic!("{name}: no page")).to_owned();
            let words: Vec<_> = parts.next().unwrap_or_default().split_whitespace().collect();
            all.push(Sequence {
                name,
                page,
                expects_smc: !words.contains(&"any"),
                needs_uring: words.contains(&"uring"),
                steps: Vec::new(),
            });
        } else if !line.is_empty() && !line.starts_with('#') {
            let sequence = all.last_mut().expect("a sequence begins with its name");
            let known = MACROS.iter().find(|(name, _)| *name == line);
            let lines = known.map_or(std::slice::from_ref(&line), |(_, lines)| lines);
            sequence.steps.extend(lines.iter().map(|line| {
                let (agent, operation) = line.split_once(' ').expect(line);
                Step { agent: agent.into(), operation: operation.trim().into() }
            }));
        }
    }
    all
}

/// The words of an operation. A word in quotes is data.
pub(crate) struct Words<'a> {
    rest: Peekable<Chars<'a>>,
}

impl<'a> Words<'a> {
    /// The words of a line.
    pub(crate) fn new(line: &'a str) -> Words<'a> {
        Words { rest: line.chars().peekable() }
    }

    fn skip_spaces(&mut self) {
        while self.rest.next_if(|c| c.is_whitespace()).is_some() {}
    }

    /// The next word; empty at the end.
    pub(crate) fn word(&mut self) -> String {
        self.skip_spaces();
        let mut word = String::new();
        while let Some(c) = self.rest.next_if(|c| !c.is_whitespace()) {
            word.push(c);
        }
        word
    }

    /// The next word, or a default at the end.
    pub(crate) fn word_or(&mut self, default: &str) -> String {
        let word = self.word();
        if word.is_empty() { default.into() } else { word }
    }

    /// The next word as a number.
    pub(crate) fn number(&mut self) -> i64 {
        let word = self.word();
        word.parse().unwrap_or_else(|_| panic!("\"{word}\" is no number"))
    }

    /// The rest, as words.
    pub(crate) fn all(&mut self) -> Vec<String> {
        std::iter::from_fn(|| Some(self.word()).filter(|word| !word.is_empty())).collect()
    }

    /// The unchanged rest.
    pub(crate) fn rest(&mut self) -> String {
        self.skip_spaces();
        self.rest.by_ref().collect()
    }

    /// Data: a word in quotes, or a number of bytes whose values show their position.
    pub(crate) fn data(&mut self) -> Vec<u8> {
        self.skip_spaces();
        if self.rest.next_if_eq(&'"').is_none() {
            return crate::common::pattern(usize::try_from(self.number()).unwrap());
        }
        let mut data = Vec::new();
        while let Some(c) = self.rest.next() {
            match c {
                '"' => break,
                '\\' => data.push(match self.rest.next() {
                    Some('n') => b'\n',
                    Some('r') => b'\r',
                    Some('0') => 0,
                    other => other.unwrap() as u8,
                }),
                c => data.push(c as u8),
            }
        }
        data
    }
}
