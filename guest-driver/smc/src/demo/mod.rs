// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc demo`: one run of everything, with an explanation of each step.

mod exchange;
mod peer;
mod tap;
mod text;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

pub(crate) use peer::run as peer;

use crate::error::CliError;
use crate::helper::Helper;
use crate::output;
use crate::stack::parse_size;
use crate::temporary_fabric::TemporaryFabric;
use peer::{DemoMessage, Source, Task};
use tap::Tap;

/// Help of `smc demo`.
pub(crate) const LONG_ABOUT: &str = "\
Demonstrates SMC-D, without anything else running. It starts a daemon with two devices, a server
process and a client process, and shows how they come to share memory. Then it sends a file (or
generated data) there and back over SMC-D and over TCP, block by block in turns, and compares hashes
and times. At last it kills the daemon while the connection is in use.

At its end it stops everything that it started, and removes the sockets.";

/// Options of `smc demo`.
#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// The file to send [default: generated data].
    file: Option<PathBuf>,

    /// Bytes of generated data.
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size,
          conflicts_with = "file")]
    size: usize,
}

/// How long a process may take for a step.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs the demo.
///
/// # Errors
/// A process failed, or the returned data differs from the sent data.
pub(crate) fn run(args: &DemoArgs) -> Result<(), CliError> {
    let (source, length, name) = source(args)?;
    let mut fabric = TemporaryFabric::start(&["server", "client"])?;
    output::print(&format!(
        "1. A fabric\n   vhost-device-ism, process {}, emulates two virtio-ism devices on fabric \
         ff00:\n   {}\n   {}\n\n",
        fabric.daemon_pid(),
        fabric.device("server").display(),
        fabric.device("client").display(),
    ))?;

    let server =
        Helper::start("server", "__demo", &Task::Server { device: fabric.device("server") })?;
    let DemoMessage::Listening { gid, smc, tcp } = server.receive(TIMEOUT)? else {
        return Err(unexpected_report("server"));
    };
    output::print(&format!(
        "2. Two programs\n   server, process {}, opened its device and listens on {smc}\n   \
         {:13}its device is GID {gid}\n",
        server.pid(),
        "",
    ))?;
    let address: SocketAddr = smc.parse().map_err(|_| unexpected_report("server"))?;
    let tap = Tap::start(address).map_err(CliError::io("relay"))?;
    let task = Task::Client {
        device: fabric.device("client"),
        smc: tap.address().to_string(),
        tcp,
        source,
    };
    let client = Helper::start("client", "__demo", &task)?;
    let receive = || client.receive(TIMEOUT).map_err(|error| cause(&server, error));
    let DemoMessage::Opened { gid } = receive()? else { return Err(unexpected_report("client")) };
    output::print(&format!(
        "   client, process {}, opened its device and connects by TCP\n   {:13}its device is GID \
         {gid}\n\n",
        client.pid(),
        "",
    ))?;

    let DemoMessage::Connected { window, micros } = receive()? else {
        return Err(unexpected_report("client"));
    };
    let path = match window {
        true => "from here on each end stores into the peer's DMB (the window)",
        false => "from here on the device copies into the peer's DMB (moves)",
    };
    output::print(&format!(
        "3. The handshake, as a relay on the TCP connection recorded it\n{}   {micros:>5} us  connected \
         by SMC-D: {path}\n\n",
        text::handshake(&tap.handshake()),
    ))?;

    let progress = progress_bar(length);
    let (bytes, sent, smc, tcp) = loop {
        match receive()? {
            DemoMessage::Progress(bytes) => progress.set_position(bytes),
            DemoMessage::Done { bytes, sent, smc, tcp } => break (bytes, sent, smc, tcp),
            _ => return Err(unexpected_report("client")),
        }
    };
    progress.finish_and_clear();
    for (what, got) in [
        ("SHA-256 of what the server got by SMC", &smc.at_server),
        ("SHA-256 of what came back by SMC", &smc.came_back),
        ("SHA-256 of what the server got by TCP", &tcp.at_server),
        ("SHA-256 of what came back by TCP", &tcp.came_back),
    ] {
        if *got != sent {
            return Err(CliError::Different { what, sent, got: got.clone() });
        }
    }
    output::print(&format!(
        "4. The bytes\n   {bytes} bytes of {name} went there and back\n   SHA-256 sent: {sent}\n   \
         SHA-256 at the server: the same\n   SHA-256 of what came back: the same\n{}\n",
        counters(&fabric, &tap)?,
    ))?;
    output::print(&format!(
        "5. The same over TCP, block by block in turns\n{}\n",
        text::table(bytes, &smc, &tcp),
    ))?;
    replace_daemon(&mut fabric, &tap, &client)?;
    output::print("Measured properly: smc perf.    By hand: smc fabric, smc listen, smc connect.\n")
}

/// More bytes than the records by which a connection leaves shared memory and comes back.
const RECORDS: u64 = 64 << 10;

/// Kills the daemon while the client's blocks go there and back, and waits until they go through shared
/// memory again: the relay on the TCP connection tells.
fn replace_daemon(
    fabric: &mut TemporaryFabric,
    tap: &Tap,
    client: &Helper,
) -> Result<(), CliError> {
    let (last, before) = (fabric.daemon_pid(), tap.total());
    // Whether a block went over TCP, other than the blocks reported already.
    let block = || {
        while client.try_receive::<DemoMessage>(Duration::ZERO)?.is_some() {}
        let before = tap.total();
        let received = client.receive::<DemoMessage>(TIMEOUT);
        received.map(|_| tap.total() - before > RECORDS)
    };
    fabric.replace_daemon(|| {
        while !block()? {}
        Ok(())
    })?;
    let start = Instant::now();
    while block()? {}
    let back = start.elapsed();
    output::print(&format!(
        "6. The daemon is killed while blocks go there and back\n   process {last} was killed, and the \
         connection went on: {} bytes by TCP\n   process {} took its place, and {} ms later the \
         connection was in shared memory again\n   all blocks came back as they were sent\n\n",
        tap.total() - before,
        fabric.daemon_pid(),
        back.as_millis(),
    ))
}

fn source(args: &DemoArgs) -> Result<(Source, u64, String), CliError> {
    let Some(path) = &args.file else {
        return Ok((
            Source::Generated(args.size as u64),
            args.size as u64,
            "generated data".into(),
        ));
    };
    let what = format!("cannot open {}", path.display());
    // Open the file here, so an error comes before anything is started.
    let file = ism_sys::open_regular(path).map_err(CliError::io(what.clone()))?;
    let metadata = file.metadata().map_err(CliError::io(what))?;
    Ok((Source::File(path.clone()), metadata.len(), path.display().to_string()))
}

/// Counters of the relay and the daemon: proof that the bytes went through neither.
fn counters(fabric: &TemporaryFabric, tap: &Tap) -> Result<String, CliError> {
    let asked = fabric.management()?.list();
    let guests = asked
        .map_err(|source| CliError::Management { socket: fabric.device("management"), source })?;
    let sum = |pick: fn(&vhost_device_ism::management::Guest) -> u64| -> u64 {
        guests.iter().map(pick).sum()
    };
    Ok(format!(
        "   The TCP connection below SMC carried {} bytes: the handshake, and nothing since.\n   The \
         daemon copied {} bytes, and was asked {} times to wake a sleeping peer.\n",
        tap.total(),
        sum(|guest| guest.counts.move_bytes),
        sum(|guest| guest.counts.signals.saturating_sub(guest.counts.kicks_saved)),
    ))
}

/// The server's error, more specific than the client's "connection reset"; else the client's error.
fn cause(server: &Helper, error: CliError) -> CliError {
    match server.receive::<DemoMessage>(Duration::from_secs(2)) {
        Err(cause @ CliError::Helper { .. }) if cause.to_string().contains("failed") => cause,
        _ => error,
    }
}

fn unexpected_report(name: &str) -> CliError {
    CliError::Helper { name: name.into(), problem: "did not report what was expected".into() }
}

/// A bar on a terminal, nothing elsewhere.
fn progress_bar(length: u64) -> ProgressBar {
    let bar = ProgressBar::new(length);
    let template = "   {bar:40} {bytes}/{total_bytes} there and back";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
