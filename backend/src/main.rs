//! The `vhost-device-ism` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    vhost_device_ism::run_main(std::env::args_os())
}
