// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Behaviour of the device, one sentence of docs/virtio-ism.md (or one attack) per test.

use crate as ism;

mod attacks;
mod commands;
mod events;
mod fixed_window;
mod harness;
mod leaving;
mod moves;
mod session_end;
mod window;
