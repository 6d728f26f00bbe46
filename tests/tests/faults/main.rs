// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Failures: dying processes, peers stalling, lying or vanishing, lost devices. Survivors notice,
//! others are not harmed, and no resource is left behind.
#![allow(clippy::unwrap_used, reason = "a test ends at its first surprise")]

mod asleep;
mod back;
mod claims;
mod confirmed;
mod damage;
mod deaths;
mod doorbell;
mod ends;
mod half_open;
mod handshake;
mod hostile;
mod killed;
mod leave;
mod liars;
mod like_tcp;
mod moves;
mod on_tcp;
mod outlive;
mod prompt;
mod restored;
mod settled;
mod support;
mod undrain;
mod vanish;
