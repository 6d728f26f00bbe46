// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lock-free words of `guest-driver` under loom. Their files hold the tests; this package builds
//! them without the packages that do not build with `--cfg loom`.

#[cfg(loom)]
#[allow(dead_code, reason = "the tests use a part")]
#[path = "../../../guest-driver/src/conn/end_word.rs"]
mod end_word;

#[cfg(loom)]
#[allow(dead_code, reason = "the tests use a part")]
#[path = "../../../guest-driver/src/reactor/work.rs"]
mod work;

#[cfg(loom)]
#[allow(dead_code, reason = "the tests use a part")]
#[path = "../../../guest-driver/sys/src/once.rs"]
mod once;
