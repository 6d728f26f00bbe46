// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Limits of this driver.

use std::time::Duration;

/// How long a control command or a move may take before the device counts as failed.
pub const CONTROL_TIMEOUT: Duration = Duration::from_secs(5);

/// Most pieces (runs of contiguous bytes) of one MOVE.
pub const MAX_PIECES: usize = 8;
