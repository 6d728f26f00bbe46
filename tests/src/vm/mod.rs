// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VM test bed: guests under QEMU with a shared daemon of their own, and commands run in the guests.
//!
//! ```no_run
//! use smc_tests::vm::Bed;
//!
//! let bed = Bed::new();
//! let [a, b] = bed.pair();
//! let server = a.spawn(["smc", "listen", "-v", "--device", "pci", "5000"]);
//! let client = b.run("echo hello | smc connect --device pci 10.0.0.1 5000");
//! assert_eq!(client.code(), 0);
//! assert_eq!(server.wait().out, "hello\n");
//! ```
//!
//! Every wait has a deadline, so a hanging guest ends its test with a panic naming the awaited event.
//! The logs of guests and daemon are in `target/vm/<test>/`, and stay there if the test fails. Every
//! process started by a test ends with the test, even if the test's process is killed.
//!
//! `cargo xtask vm` builds the parts (kernel, QEMU, initramfs, daemon) and names them to the tests by the
//! environment variables listed in `paths`.

mod bed;
mod channel;
mod child;
pub mod control;
mod driver;
pub mod ends;
pub mod figures;
mod guest;
mod host;
mod job;
pub mod leash;
mod logs;
mod machine;
mod migrate;
mod namespace;
mod paths;
pub mod probe;
mod qmp;
mod run;
mod semaphore;
mod uml;
pub mod unmodified;
mod wire;

pub use bed::Bed;
pub use child::Program;
pub use guest::Guest;
pub use job::Job;
pub use logs::print_always;
pub use machine::Vm;
pub use migrate::{Moved, Way};
pub use run::{End, Output, Run};
pub use uml::Uml;
