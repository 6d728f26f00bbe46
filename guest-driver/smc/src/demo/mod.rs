//! `smc demo`: the whole thing once, with a story.

mod exchange;
mod peer;
mod story;
mod tap;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

pub(crate) use peer::run as peer;

use crate::error::CliError;
use crate::helper::Helper;
use crate::output;
use crate::rig::Rig;
use crate::stack::parse_size;
use peer::{Said, Source, Task};
use tap::Tap;

/// Help of `smc demo`.
pub(crate) const LONG_ABOUT: &str = "\
Shows SMC-D at work, without anything else running: starts a daemon with two devices, a server
process and a client process, tells how they come to share memory, sends a file (or made-up data)
there and back over SMC-D and over TCP, block by block in turns, and compares hashes and times.

Everything it starts ends with it, and its sockets are removed.";

/// Options of `smc demo`.
#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// What to send; without one, made-up data.
    file: Option<PathBuf>,

    /// How much to make up.
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size,
          conflicts_with = "file")]
    size: usize,
}

/// How long a process may take for one thing.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the demo.
///
/// # Errors
/// Something did not work, or what came back is not what was sent.
pub(crate) fn run(args: &DemoArgs) -> Result<(), CliError> {
    let (source, length, name) = source(args)?;
    let rig = Rig::start(&["server", "client"])?;
    output::print(&format!(
        "1. A fabric\n   vhost-device-ism, process {}, emulates two virtio-ism devices on fabric \
         ff00:\n   {}\n   {}\n\n",
        rig.daemon_pid(),
        rig.device("server").display(),
        rig.device("client").display(),
    ))?;

    let server = Helper::start("server", "__demo", &Task::Server { device: rig.device("server") })?;
    let Said::Listening { gid, smc, tcp } = server.hear(PATIENCE)? else {
        return Err(confused("server"));
    };
    output::print(&format!(
        "2. Two programs\n   server, process {}, opened its device and listens on {smc}\n   \
         {:13}its device is GID {gid}\n",
        server.pid(),
        "",
    ))?;
    let address: SocketAddr = smc.parse().map_err(|_| confused("server"))?;
    let tap = Tap::start(address).map_err(CliError::io("relay"))?;
    let task =
        Task::Client { device: rig.device("client"), smc: tap.address().to_string(), tcp, source };
    let client = Helper::start("client", "__demo", &task)?;
    let hear = || client.hear(PATIENCE).map_err(|error| cause(&server, error));
    let Said::Opened { gid } = hear()? else { return Err(confused("client")) };
    output::print(&format!(
        "   client, process {}, opened its device and connects by TCP\n   {:13}its device is GID \
         {gid}\n\n",
        client.pid(),
        "",
    ))?;

    let Said::Connected { window, micros } = hear()? else { return Err(confused("client")) };
    let path = match window {
        true => "from here on each end stores into the peer's DMB (the window)",
        false => "from here on the device copies into the peer's DMB (moves)",
    };
    output::print(&format!(
        "3. The handshake, as a relay on the TCP connection saw it\n{}   {micros:>5} us  connected \
         by SMC-D: {path}\n\n",
        story::handshake(&tap.handshake()),
    ))?;

    let progress = progress_bar(length);
    let (bytes, sent, smc, tcp) = loop {
        match hear()? {
            Said::Progress(bytes) => progress.set_position(bytes),
            Said::Done { bytes, sent, smc, tcp } => break (bytes, sent, smc, tcp),
            _ => return Err(confused("client")),
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
        counters(&rig, &tap)?,
    ))?;
    output::print(&format!(
        "5. The same over TCP, block by block in turns\n{}\n\
         Measured properly: smc perf.    By hand: smc fabric, smc listen, smc connect.\n",
        story::table(bytes, &smc, &tcp),
    ))
}

fn source(args: &DemoArgs) -> Result<(Source, u64, String), CliError> {
    let Some(path) = &args.file else {
        return Ok((Source::Generated(args.size as u64), args.size as u64, "made-up data".into()));
    };
    let what = format!("cannot open {}", path.display());
    // Here, so that the error comes before anything is started.
    let file = std::fs::File::open(path).map_err(CliError::io(what.clone()))?;
    let metadata = file.metadata().map_err(CliError::io(what))?;
    if metadata.is_dir() {
        return Err(CliError::Usage(format!("{} is a directory, not a file", path.display())));
    }
    Ok((Source::File(path.clone()), metadata.len(), path.display().to_string()))
}

/// Where the bytes went, by those who would have seen them elsewhere.
fn counters(rig: &Rig, tap: &Tap) -> Result<String, CliError> {
    let asked = rig.management()?.list();
    let guests = asked
        .map_err(|source| CliError::Management { socket: rig.device("management"), source })?;
    let sum = |pick: fn(&vhost_device_ism::management::Guest) -> u64| -> u64 {
        guests.iter().map(pick).sum()
    };
    Ok(format!(
        "   The TCP connection below SMC carried {} bytes: the handshake, and nothing since.\n   The \
         daemon copied {} bytes, and was asked {} times to wake a peer that slept.\n",
        tap.total(),
        sum(|guest| guest.move_bytes),
        sum(|guest| guest.signals.saturating_sub(guest.kicks_saved)),
    ))
}

/// The server's own words say more than the client's "connection reset".
fn cause(server: &Helper, error: CliError) -> CliError {
    match server.hear::<Said>(Duration::from_millis(300)) {
        Err(cause @ CliError::Helper { .. }) if cause.to_string().contains("failed") => cause,
        _ => error,
    }
}

fn confused(name: &str) -> CliError {
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
