// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The `vhost-device-ism` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    vhost_device_ism::run_main(std::env::args_os())
}
