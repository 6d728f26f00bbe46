// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kinds of interrupts.

use std::fmt;

/// The kind of a device's interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupts {
    /// Message-signalled, with this many vectors.
    MsiX {
        /// Vectors of the device.
        vectors: u16,
    },
    /// One line, shared by all queues (and possibly with other devices).
    IntX,
}

impl fmt::Display for Interrupts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Interrupts::MsiX { vectors: 1 } => f.write_str("MSI-X (1 vector)"),
            Interrupts::MsiX { vectors } => write!(f, "MSI-X ({vectors} vectors)"),
            Interrupts::IntX => f.write_str("INTx"),
        }
    }
}
