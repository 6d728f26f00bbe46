// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc-device-plugin`: the device plugin of Kubernetes for device pools, or their driver of dynamic resource
//! allocation.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use smc_device_plugin::{ApiServer, Files, Node, Pool, drive, serve};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

/// Offers device pools of vhost-device-ism to the pods of this node.
///
/// Each pool is a resource virtio-ism/NAME; a container with it gets the device virtio-ism/fabric=NAME
/// of the CDI specification that "smc cdi" writes. With --node the pools are published as devices of
/// that node for dynamic resource allocation (DRA), and no device plugin runs.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// A pool by its name in the CDI specification, how many containers may have it at a time (32),
    /// and its CHID at the daemon (ff00); repeat it for more
    #[arg(long, value_name = "NAME[=CONTAINERS[@CHID]]", required = true)]
    pool: Vec<Pool>,

    /// The directory of the sockets of kubelet and plugins
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/kubelet/device-plugins")]
    directory: PathBuf,

    /// DRA: the name of the node
    #[arg(long)]
    node: Option<String>,

    /// DRA: the directory in which the kubelet looks for drivers
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/kubelet/plugins_registry")]
    registry: PathBuf,

    /// DRA: the API server; by default the one that Kubernetes names to each container
    #[arg(long, value_name = "URL")]
    api_server: Option<String>,

    /// DRA: the directory with the token and ca.crt of the service account
    #[arg(long, value_name = "DIRECTORY", default_value = ACCOUNT)]
    account: PathBuf,

    /// DRA: the CDI specification by "smc cdi", kept outside of the runtime's directory
    #[arg(long, value_name = "FILE", default_value = "/opt/vhost-device-ism/cdi.json")]
    specification: PathBuf,

    /// DRA: the file that the specification becomes for the container runtime
    #[arg(long, value_name = "FILE", default_value = "/etc/cdi/smc.json")]
    cdi: PathBuf,
}

const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The API server by the environment of a container.
fn in_cluster() -> Option<String> {
    let variable = |name| std::env::var(name).ok();
    let host = variable("KUBERNETES_SERVICE_HOST")?;
    let port = variable("KUBERNETES_SERVICE_PORT")?;
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    Some(format!("https://{host}:{port}"))
}

/// Begins the driver, or a plugin for each pool.
fn begin(args: Args) -> Result<JoinSet<()>, Box<dyn std::error::Error>> {
    let mut tasks = JoinSet::new();
    let Some(node) = args.node else {
        for pool in args.pool {
            let directory = args.directory.clone();
            tasks.spawn(async move { serve(pool, &directory).await });
        }
        return Ok(tasks);
    };
    let address = args.api_server.or_else(in_cluster);
    let address = address.ok_or("no API server: give --api-server outside of a pod")?;
    let server = ApiServer::new(&address, &args.account)?;
    let files =
        Files { registry: args.registry, specification: args.specification, runtime: args.cdi };
    tasks.spawn(drive(Node::new(&node, args.pool)?, files, server));
    Ok(tasks)
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
    let mut tasks = match begin(args) {
        Ok(tasks) => tasks,
        Err(error) => {
            tracing::error!(%error, "cannot begin");
            return ExitCode::FAILURE;
        }
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        // A task has panicked: the kubelet restarts this program at its next check of the container.
        _ = tasks.join_next() => return ExitCode::FAILURE,
    }
    // Sockets are removed.
    tasks.shutdown().await;
    ExitCode::SUCCESS
}
