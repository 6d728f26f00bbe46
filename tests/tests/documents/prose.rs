// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Pronouns in the comments of sources.

/// Words in the place of a noun, for which a reader has to look elsewhere.
const PRONOUNS: [&str; 7] = ["it", "they", "those", "that", "which", "who", "what"];
/// Most pronouns in 1,000 words of comments of a file.
const MOST: usize = 35;
/// Beginnings of documentation without a noun.
const BEGINNINGS: [&str; 6] = ["what", "those", "as", "all", "who", "whoever"];
/// Words without a place in comments.
const REFUSED: [&str; 3] = ["nobody", "somebody", "whoever"];

/// The comments of one file.
#[derive(Debug, Default)]
pub(crate) struct Comments {
    file: String,
    pub(crate) words: usize,
    pub(crate) pronouns: usize,
    /// Lines with a refused word, and documentation with a refused beginning.
    refused: Vec<String>,
}

impl Comments {
    /// Reads the lines of comments of a file, given by its path and its text.
    pub(crate) fn of((file, text): &(String, String)) -> Comments {
        let mut comments = Comments { file: file.clone(), ..Comments::default() };
        let mut in_docs = false;
        for (at, line) in text.lines().map(str::trim).enumerate() {
            let is_doc = line.starts_with("///") || line.starts_with("//!");
            if line.starts_with("//") && !line.starts_with("// SPDX") {
                comments.add(line, at + 1, is_doc && !in_docs);
            }
            in_docs = is_doc;
        }
        comments
    }

    fn add(&mut self, line: &str, at: usize, begins_docs: bool) {
        let is_in_word = |c: char| c.is_ascii_alphabetic() || c == '\'';
        let words: Vec<String> = line
            .split(|c: char| !is_in_word(c))
            .filter(|word| word.starts_with(|c: char| c.is_ascii_alphabetic()))
            .map(str::to_ascii_lowercase)
            .collect();
        let among = |list: &[&str], word: &String| list.contains(&word.as_str());
        self.words += words.len();
        self.pronouns += words.iter().filter(|word| among(&PRONOUNS, word)).count();
        let beginning = words.first().filter(|word| begins_docs && among(&BEGINNINGS, word));
        let refused = words.iter().find(|word| among(&REFUSED, word));
        if let Some(word) = beginning.or(refused) {
            self.refused.push(format!("{}:{at}: {word}", self.file));
        }
    }

    pub(crate) fn faults(&self) -> Vec<String> {
        let most = (self.words * MOST).div_ceil(1000);
        let Comments { file, words, pronouns, refused } = self;
        let many = (*pronouns > most)
            .then(|| format!("{file}: {pronouns} pronouns in {words} words, {most} are enough"));
        many.into_iter().chain(refused.iter().cloned()).collect()
    }
}
