// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lists of known differences from TCP.
//!
//! An entry begins with a line `SEQUENCE | WAYS | ROW`. Lines `why: TEXT` say why a program does
//! not mind, or what has to be repaired. Lines `STEP => ANSWER` are the answers different from TCP;
//! without any, all answers may differ. `...` at the end of an answer is any text, and ` or `
//! stands between alternative answers. `sometimes` after the row: the difference is a race. `symbols`
//! after the row: the difference is of programs that are reached by the functions of libc.

use crate::run::Way;

/// A known difference.
#[derive(Clone, Debug)]
pub(crate) struct Difference {
    pub(crate) sequence: String,
    pub(crate) ways: Vec<String>,
    /// Whether the difference is to be repaired.
    pub(crate) defect: bool,
    /// Whether the difference occurs only sometimes.
    pub(crate) sometimes: bool,
    /// Whether the difference is of programs that are reached by the functions of libc.
    symbols: bool,
    pub(crate) why: String,
    /// Steps and their answers.
    pub(crate) answers: Vec<(String, String)>,
}

impl Difference {
    /// Whether the different answers are the ones of this entry.
    pub(crate) fn fits(&self, answers: &[(String, String)]) -> bool {
        let same = |(one, other): (&(String, String), &(String, String))| {
            one.0 == other.0 && is_answer(&one.1, &other.1)
        };
        self.answers.is_empty()
            || self.answers.len() == answers.len() && self.answers.iter().zip(answers).all(same)
    }

    /// Whether the entry is about this sequence and way.
    pub(crate) fn is_about(&self, sequence: &str, way: Way) -> bool {
        // A difference known on the ring may come on another carrier, too.
        let of_way = |name: &String| name == way.name() || name == "both" && way.is_both();
        self.sequence == sequence && self.ways.iter().any(of_way)
    }

    /// The hanging step, if any.
    pub(crate) fn step_that_hangs(&self) -> Option<&str> {
        let found = self.answers.iter().find(|(_, answer)| answer.ends_with(crate::run::HANGS));
        found.map(|(step, _)| step.as_str())
    }
}

/// Whether `seen` is one of the listed alternatives.
fn is_answer(listed: &str, seen: &str) -> bool {
    listed.split(" or ").any(|one| match one.strip_suffix("...") {
        Some(beginning) => seen.starts_with(beginning),
        None => one == seen,
    })
}

fn parse(text: &str, defect: bool) -> Vec<Difference> {
    let mut all: Vec<Difference> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some((step, answer)) = line.split_once(" => ") {
            let entry = (step.trim().to_owned(), answer.trim().to_owned());
            all.last_mut().expect(line).answers.push(entry);
        } else if let Some(why) = line.trim().strip_prefix("why:") {
            let known = &mut all.last_mut().expect(line).why;
            *known = format!("{known} {}", why.trim()).trim().to_owned();
        } else {
            let parts: Vec<_> = line.split('|').map(str::trim).collect();
            let [sequence, ways, row] = parts[..] else { panic!("no entry: {line}") };
            all.push(Difference {
                sequence: sequence.into(),
                ways: ways.split(',').map(|way| way.trim().to_owned()).collect(),
                defect,
                sometimes: row.contains("sometimes"),
                symbols: row.contains("symbols"),
                why: String::new(),
                answers: Vec::new(),
            });
        }
    }
    all
}

/// The known differences. A static program is reached by its system calls.
pub(crate) fn known() -> Vec<Difference> {
    let mut all = parse(include_str!("differences/failures.txt"), true);
    all.extend(parse(include_str!("differences/smaller.txt"), true));
    all.extend(parse(include_str!("differences/accepted.txt"), false));
    all.retain(|one| !(cfg!(target_feature = "crt-static") && one.symbols));
    all
}
