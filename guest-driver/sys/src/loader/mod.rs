// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A dynamic linker for a program without one, such as a static program.

mod beginning;

pub use beginning::Beginning;
