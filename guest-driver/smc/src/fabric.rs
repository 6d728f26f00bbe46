// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc fabric`: the daemon to emulate the devices.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;

use smc_settings::{Place, PlaceReport};

use crate::error::CliError;
use crate::paths;

/// Help of `smc fabric`.
pub(crate) const LONG_ABOUT: &str = "\
Runs vhost-device-ism, the daemon that emulates virtio-ism devices: one Unix socket per device, and
all devices on one fabric can let each other write into their buffers.

Without options it makes two devices, a.sock for servers and b.sock for clients, a pool of 16 devices
for all others, any.sock, and a management socket, in $XDG_RUNTIME_DIR/smc or /tmp/smc-UID. Programs use them by default unless this user may use the
packaged service (\"smc config\" tells). So this works in three terminals:

    smc fabric
    smc listen 5000
    smc connect localhost:5000

It logs warnings only, unless --log-level says something else.

With --socket-path, --fd, --config or --management it makes only the sockets that the options name.
The options are those of vhost-device-ism.";

/// Options of `smc fabric`.
#[derive(Args, Debug)]
pub(crate) struct FabricArgs {
    #[command(flatten)]
    daemon: vhost_device_ism::args::Args,
}

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// The default directory cannot be made.
pub(crate) fn run(args: &FabricArgs) -> Result<ExitCode, CliError> {
    let daemon = &args.daemon;
    let mut command: Vec<OsString> = std::env::args_os().skip(2).collect();
    let bare = daemon.command.is_none()
        && daemon.socket_path.is_empty()
        && daemon.fd.is_none()
        && daemon.config.is_none()
        && daemon.management.is_none()
        && daemon.metrics.is_none()
        && !daemon.check_config
        && !daemon.print_capabilities;
    if bare {
        let dir = paths::make_directory()?;
        for name in [paths::SERVER, paths::CLIENT] {
            command.push("--socket-path".into());
            command.push(dir.join(name).into());
        }
        // "smc run" takes any device, so both devices may be in use: offer a pool as well.
        let mut pool = dir.join(paths::POOL).into_os_string();
        pool.push(",devices=16");
        command.push("--socket-path".into());
        command.push(pool);
        command.push("--management".into());
        command.push(dir.join(paths::MANAGEMENT).into());
        // At the default level, messages about guests would disturb the user of the same terminal.
        if daemon.log_level.is_none() {
            command.extend(["--log-level".into(), "warn".into()]);
        }
        let [server, client, pool] = [paths::SERVER, paths::CLIENT, paths::POOL];
        crate::output::note(&format!(
            "devices: {0}/{server} {0}/{client} {0}/{pool}",
            dir.display()
        ));
        if let Some(before) = Place::ALL
            .into_iter()
            .take_while(|place| *place != Place::Own)
            .find(|place| PlaceReport::at(*place).sockets.is_ok())
        {
            crate::output::note(&format!(
                "programs use {before} unless SMC_DEVICE={}/{pool} is set",
                dir.display()
            ));
        }
        crate::output::note("statistics: smc stat    end: Ctrl-C");
    }
    Ok(vhost_device_ism::run_main(std::iter::once("smc fabric".into()).chain(command)))
}
