// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc capture`: the bytes of connections on SMC, as the TCP connections that they would have been.

mod pcapng;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use clap::Args;
use guest_driver::statistics::{self, Record};

use crate::error::CliError;
use crate::stat::{ReportRequest, Scope, sockets};
use pcapng::Writer;

/// Help of `smc capture`.
pub(crate) const LONG_ABOUT: &str = "\
Writes the bytes that processes send and receive by SMC into a capture (pcapng), which Wireshark opens
as the TCP connections that it would have been: addresses, ports, order and times are those of the
connections. Each process is an interface. Connections of the kernel's TCP are not in it: tcpdump sees
those.

A capture begins with the bytes of the moment. If the processes write faster than this command, some
bytes are missing, and Wireshark shows the gap; the processes never wait. A capture costs a process one
system call for each send and receive, and nothing once it has ended.

Only the user of a process, and root, may capture it. The file has all the data of the connections.";

/// End of the help of `smc capture`.
pub(crate) const AFTER: &str = "\
Examples:
  smc capture -w redis.pcapng --process redis-server
  smc capture -w - --port 6379 | wireshark -k -i -
  smc capture -w - --seconds 10 | tshark -r - -d tcp.port==6379,redis";

/// Options of `smc capture`.
#[derive(Args, Debug)]
pub(crate) struct CaptureArgs {
    /// The file; "-" is standard output.
    #[arg(long, short, value_name = "FILE")]
    write: PathBuf,

    /// Only processes with this id, or this in their name.
    #[arg(long, value_name = "PID|NAME")]
    process: Option<String>,

    /// Only connections with this port at either end.
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,

    /// End after so many seconds [default: when it is interrupted].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86400))]
    seconds: Option<u32>,

    /// Processes of all users that this one may look into, whatever XDG_RUNTIME_DIR says.
    #[arg(long, short)]
    all: bool,
}

/// How often new processes are looked for, and what was captured is written.
const INTERVAL: Duration = Duration::from_millis(500);
/// Records that wait to be written at most.
const QUEUE: usize = 256;

/// A process, and a record of it.
type Found = (u32, Record);

/// Captures until the time is over or nobody reads any more.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn run(args: &CaptureArgs) -> Result<(), CliError> {
    let out: Box<dyn Write> = if args.write.as_os_str() == "-" {
        Box::new(io::stdout().lock())
    } else {
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(&args.write);
        Box::new(file.map_err(CliError::io(format!("cannot make {}", args.write.display())))?)
    };
    let written = write(args, BufWriter::new(out));
    match written {
        Err(error) if args.write.as_os_str() == "-" => Err(CliError::Output(error)),
        other => other.map_err(CliError::io(format!("cannot write {}", args.write.display()))),
    }
}

fn write(args: &CaptureArgs, out: impl Write) -> io::Result<()> {
    let scope = if args.all { Scope::Host } else { Scope::of_environment() };
    let end = args.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds.into()));
    let (sender, records) = mpsc::sync_channel(QUEUE);
    let mut writer = Writer::new(out)?;
    let mut known = BTreeSet::new();
    let mut next_look = Instant::now();
    loop {
        let now = Instant::now();
        if end.is_some_and(|end| now >= end) {
            return writer.flush();
        }
        if now >= next_look {
            look(args, &scope, &mut known, &sender);
            writer.flush()?;
            next_look = Instant::now() + INTERVAL;
        }
        match records.recv_timeout(next_look.saturating_duration_since(Instant::now())) {
            Ok((pid, record)) => {
                let ports = [record.local.port(), record.peer.port()];
                if args.port.is_none_or(|port| ports.contains(&port)) {
                    writer.record(pid, &record)?;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return writer.flush(),
        }
    }
}

/// Begins to capture the processes that were not there at the last look.
fn look(
    args: &CaptureArgs,
    scope: &Scope,
    known: &mut BTreeSet<PathBuf>,
    sender: &SyncSender<Found>,
) {
    let found: Vec<ReportRequest> = sockets(scope);
    // A socket of the same name may come back later.
    known.retain(|path| found.iter().any(|one| one.socket == *path));
    for one in found {
        if known.contains(&one.socket) || !is_wanted(args, one.process()) {
            continue;
        }
        let Ok(mut stream) = statistics::capture(&one.at(), one.pid) else { continue };
        let (pid, sender) = (one.process(), sender.clone());
        let body = move || {
            while let Ok(Some(record)) = Record::read(&mut stream) {
                if sender.send((pid, record)).is_err() {
                    return;
                }
            }
        };
        if std::thread::Builder::new().spawn(body).is_ok() {
            known.insert(one.socket);
        }
    }
}

fn is_wanted(args: &CaptureArgs, pid: u32) -> bool {
    args.process.as_deref().is_none_or(|wanted| match wanted.parse::<u32>() {
        Ok(wanted) => wanted == pid,
        Err(_) => pcapng::program(pid).contains(wanted),
    })
}
