// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc-device-plugin`: the device plugin of Kubernetes for device pools.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use smc_device_plugin::{Pool, serve};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

/// Offers device pools of vhost-device-ism to the pods of this node.
///
/// Each pool is a resource virtio-ism/NAME; a container with it gets the device virtio-ism/fabric=NAME
/// of the CDI specification that "smc cdi" writes.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// A pool by its name in the CDI specification, and how many containers may have it at a time
    /// (32); repeat it for more
    #[arg(long, value_name = "NAME[=CONTAINERS]", required = true)]
    pool: Vec<Pool>,

    /// The directory of the sockets of kubelet and plugins
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/kubelet/device-plugins")]
    directory: PathBuf,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false);
    // A failed write to the log would be reported to the same place, by a panic.
    log.log_internal_errors(false).init();
    let ends = signal(SignalKind::terminate()).and_then(|terminate| {
        signal(SignalKind::interrupt()).map(|interrupt| (terminate, interrupt))
    });
    let (mut terminate, mut interrupt) = match ends {
        Ok(signals) => signals,
        Err(error) => {
            tracing::error!(%error, "cannot wait for signals");
            return ExitCode::FAILURE;
        }
    };
    let mut pools = JoinSet::new();
    for pool in args.pool {
        let directory = args.directory.clone();
        pools.spawn(async move { serve(pool, &directory).await });
    }
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        // A pool has panicked: the kubelet restarts this program at its next check of the container.
        _ = pools.join_next() => return ExitCode::FAILURE,
    }
    // Sockets are removed.
    pools.shutdown().await;
    ExitCode::SUCCESS
}
