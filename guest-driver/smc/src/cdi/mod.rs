// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc cdi`: the configuration for container engines to give a container a device.

mod checks;
mod edits;
mod file;
mod formats;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use smc_settings::{Place, PlaceReport};

use crate::error::CliError;
use crate::output;
use crate::paths;
use crate::run::Rule;
use edits::{Edits, HostFiles};

/// Help of `smc cdi`.
pub(crate) const LONG_ABOUT: &str = "\
Prints a CDI specification (Container Device Interface), by which podman, Docker, containerd and CRI-O
put the programs of a container on SMC. Images need no change, and containers no privilege:

    smc cdi --output /etc/cdi/smc.json
    podman run --device virtio-ism/fabric=any nginx

That is the device pool of the packaged service; --pool names another one. A container gets the directory of the pool's socket, libsmc_preload.so, a file /etc/ld.so.preload that
makes the dynamic linker load that, this program as /usr/local/bin/smc, and the settings in its
environment. LD_PRELOAD stays as the image or the user has set it. \"smc stat connections\" in the
container shows what its connections are.

Containers find out by TCP option 254 which peers speak SMC: the specification has a hook by which the
runtime has \"smc grant\" run for each container, on the host. With --no-hook there is none. Containers
then propose SMC to the servers that --peer names. All of them must have the device, since another
server would take the first message for data. Programs for another libc than glibc stay on TCP.

Engines without CDI get the same by other formats: \"options\" for docker run, docker service create
and podman run, \"ctr\" for containerd's ctr run, \"compose\" for docker compose and docker stack deploy. No hook runs for these: \"smc
grant --cgroup\" lets all containers below a cgroup find their peers.";

/// End of the help of `smc cdi`.
pub(crate) const AFTER: &str = "\
Examples:
  smc cdi --pool /run/ism/web/web.sock --peer 10.89.0.0/24 --output /etc/cdi/smc-web.json
  docker run $(smc cdi --pool /run/ism/web/web.sock --format options) debian nginx";

/// The output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A CDI specification
    #[default]
    Cdi,
    /// Options of docker run, docker service create, podman run and nerdctl run
    Options,
    /// Options of ctr run
    Ctr,
    /// The beginning of a compose file, whose services have a line <<: *smc-NAME
    Compose,
}

/// Options of `smc cdi`.
#[derive(Args, Debug)]
pub(crate) struct CdiArgs {
    /// Socket of a device pool, alone in a directory for containers; repeat the option for more
    /// devices. The file name without extension is the name of the device [default: the pool of the
    /// packaged service].
    #[arg(long, value_name = "SOCKET")]
    pool: Vec<PathBuf>,

    /// The pools need not be there yet: their daemon starts later.
    #[arg(long)]
    later: bool,

    /// Servers to which the containers' programs propose SMC without asking:
    /// ADDRESS[/BITS][:PORT[-PORT]], where * is any address; repeat the option for more [default:
    /// SMC_RUN_CONNECT of the container].
    #[arg(long, value_name = "RULE", value_delimiter = ',')]
    peer: Vec<Rule>,

    /// Clients allowed to use SMC, and ports, in the same form.
    #[arg(long, value_name = "RULE", value_delimiter = ',', default_value = "*")]
    accept: Vec<Rule>,

    /// No hook, so no TCP option 254: for runtimes without rights of root.
    #[arg(long)]
    no_hook: bool,

    /// The library [default: where "smc run" finds it].
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,

    /// Format of the output.
    #[arg(long, value_enum, default_value_t)]
    format: Format,

    /// Write the output into this file, readable for others; its directory is made.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Prints or writes the chosen format.
///
/// # Errors
/// The library is not found, a pool is not there, a path has no name, the directory of a pool has
/// something else, or the file cannot be written.
pub(crate) fn run(args: &CdiArgs) -> Result<(), CliError> {
    let files = HostFiles::find(args.library.as_deref())?;
    let has_hook = args.format == Format::Cdi && !args.no_hook;
    if let Some(path) = checks::open_to_others(&files.program).filter(|_| has_hook) {
        let program = &files.program;
        output::note(&format!(
            "smc cdi: the hook runs {program:?} as root, and others than root can change {path:?}"
        ));
    }
    let pools = match args.pool.is_empty() {
        true => vec![PlaceReport::at(Place::Service).directory.join(paths::POOL)],
        false => args.pool.clone(),
    };
    for pool in &pools {
        checks::is_alone(pool)?;
        if !args.later {
            checks::is_pool(pool)?;
        }
    }
    let devices = pools.iter().map(|pool| Edits::of(args, pool, &files));
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    let text = match args.format {
        Format::Cdi => formats::specification(&devices)?,
        Format::Options => formats::options(&devices)?,
        Format::Ctr => formats::ctr(&devices)?,
        Format::Compose => formats::compose(&devices)?,
    };
    // A refused pool leaves no list behind.
    files.write_list()?;
    match &args.output {
        None => output::print(&text),
        Some(file) => file::write(file, text.as_bytes())
            .map_err(CliError::io(format!("cannot write {}", file.display()))),
    }
}
