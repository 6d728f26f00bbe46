// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The licence at the head of each source.

use std::fs;
use std::process::Command;

use super::text::root;

const LICENCE: &str = "Apache-2.0 OR BSD-3-Clause";
/// Folder of a module for Linux, with licences of Linux.
const MODULE: &str = "guest-driver/kernel/";
/// Scripts with builds of a quarter of an hour. Each names its build by a hash of its own text, so one
/// line more would make every user build again.
const HASHED: [&str; 4] =
    ["qemu/build.sh", "tests/uml/kernel.sh", "tests/vm/kernel.sh", "tests/vm/outer-kernel.sh"];

/// Sources in git without the licence in the first line, or in the second behind `#!`.
pub(crate) fn without_licence() -> Vec<String> {
    let mut git = Command::new("git");
    git.current_dir(root()).args(["ls-files", "--", "*.rs", "*.sh", "*.c", "*.h", "*.py"]);
    let listed = git.output().unwrap();
    if !listed.status.success() {
        println!("no repository of git: the heads of sources are NOT TESTED");
        return Vec::new();
    }
    let names = String::from_utf8(listed.stdout).unwrap();
    let lacks = |name: &&str| {
        let text = fs::read_to_string(root().join(name)).unwrap_or_default();
        let mut lines = text.lines().skip_while(|line| line.starts_with("#!/"));
        let first = lines.next().unwrap_or_default().trim_end_matches("*/").trim_end();
        let Some((comment, licence)) = first.split_once("SPDX-License-Identifier: ") else {
            return true;
        };
        let is_module = name.starts_with(MODULE) && !name.ends_with(".sh");
        let is_right = licence == LICENCE || is_module && licence.contains("GPL-2.0");
        !is_right || !["// ", "# ", "/* "].contains(&comment)
    };
    names.lines().filter(|name| !HASHED.contains(name)).filter(lacks).map(String::from).collect()
}
