// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc decode` in scripts: its exit status.

use crate::support::{Dir, run, text};

const DECLINE: &str = "e2d4c3c404001c10 0000000000000000 03010000 00000000 e2d4c3c4";

#[test]
fn the_exit_status_says_whether_a_receiver_would_take_the_messages() {
    let good = run(&["decode", DECLINE]);
    assert_eq!(good.status.code(), Some(0), "{}", text(&good.stdout));
    let refused = run(&["decode", &DECLINE[..40]]);
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stdout));
    assert!(text(&refused.stdout).contains("refused: "));
}

#[test]
fn what_looks_like_a_path_is_one() {
    let missing = run(&["decode", "/no/such/file"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(
        text(&missing.stderr).contains("cannot open /no/such/file"),
        "{}",
        text(&missing.stderr)
    );
    let directory = Dir::new("decode");
    let output = run(&["decode", &directory.path("")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot read"), "{}", text(&output.stderr));
}
