// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc capture`: the bytes of connections on SMC, written as if the connections were TCP.

mod pcapng;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use clap::Args;
use guest_driver::statistics::{self, Record};

use crate::error::CliError;
use crate::output;
use crate::stat::{ReportRequest, Scope, has_socket, sockets};
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

Only the user of a process, and root, may capture it; another user is refused, and told so. One
capture of a process is on at a time: a second one ends the first, which says so. Processes are
looked for twice a second, so one that lives shorter is seen by its peer alone. A process tells of
itself: where processes do not trust each other, capture one. The file has all the data of the
connections.";

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

/// How often to look for new processes, and to flush the capture.
const INTERVAL: Duration = Duration::from_millis(500);
/// Capacity of the queue of records.
const QUEUE: usize = 256;

/// What the capture of a process tells.
enum Told {
    Record(u32, Record),
    /// No more comes from the socket of this process.
    End(u32, PathBuf),
}

/// Captures until the time is over or nobody reads any more.
///
/// # Errors
/// The file cannot be written, or the named process may not be captured.
pub(crate) fn run(args: &CaptureArgs) -> Result<(), CliError> {
    args.check_process()?;
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
    let end = args.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds.into()));
    let (sender, told) = mpsc::sync_channel(QUEUE);
    let mut captured = Captured { args, known: BTreeSet::new(), refused: BTreeSet::new(), sender };
    let mut writer = Writer::new(out)?;
    captured.look();
    if captured.known.is_empty() {
        output::note("smc: no process that may be captured has SMC now; those that get it will be");
    }
    let mut next_look = Instant::now();
    loop {
        let now = Instant::now();
        if end.is_some_and(|end| now >= end) {
            return writer.flush();
        }
        if now >= next_look {
            captured.look();
            writer.flush()?;
            next_look = Instant::now() + INTERVAL;
        }
        match told.recv_timeout(next_look.saturating_duration_since(Instant::now())) {
            Ok(Told::Record(pid, record)) => {
                let ports = [record.local.port(), record.peer.port()];
                if args.port.is_none_or(|port| ports.contains(&port)) {
                    writer.record(pid, &record)?;
                }
            }
            Ok(Told::End(pid, socket)) => note_end(pid, &socket),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return writer.flush(),
        }
    }
}

/// Says that the capture of a process has ended though the process goes on.
fn note_end(pid: u32, socket: &Path) {
    if has_socket(pid, socket) {
        let program = output::printable(&pcapng::program(pid));
        output::note(&format!(
            "smc: the capture of {program} {pid} has ended: another capture of it has begun"
        ));
    }
}

/// The processes that are captured.
struct Captured<'a> {
    args: &'a CaptureArgs,
    known: BTreeSet<(u32, PathBuf)>,
    /// Those that may not be captured, which is said once.
    refused: BTreeSet<(u32, PathBuf)>,
    sender: SyncSender<Told>,
}

impl Captured<'_> {
    /// Begins to capture the processes that were not there at the last look.
    fn look(&mut self) {
        let scope = if self.args.all { Scope::Host } else { Scope::of_environment() };
        let found: Vec<ReportRequest> = sockets(&scope);
        // A socket of the same name may come back later.
        let now: BTreeSet<_> = found.iter().map(ReportRequest::key).collect();
        self.known.retain(|known| now.contains(known));
        for one in found {
            if self.known.contains(&one.key()) || !self.args.wants(one.process()) {
                continue;
            }
            match self.begin(&one) {
                Ok(()) => {
                    self.known.insert(one.key());
                }
                // It ends, or does not answer now.
                Err(error) if !is_refusal(&error) => {}
                Err(error) => {
                    let pid = one.process();
                    let program = output::printable(&pcapng::program(pid));
                    if self.refused.insert(one.key()) {
                        output::note(&format!("smc: {program} {pid} cannot be captured: {error}"));
                    }
                }
            }
        }
    }

    fn begin(&self, one: &ReportRequest) -> io::Result<()> {
        let mut stream = statistics::capture(&one.at(), one.pid)?;
        let (pid, socket, sender) = (one.process(), one.socket.clone(), self.sender.clone());
        let body = move || {
            while let Ok(Some(record)) = Record::read(&mut stream) {
                if sender.send(Told::Record(pid, record)).is_err() {
                    return;
                }
            }
            // Nobody listens at the end.
            let _ = sender.send(Told::End(pid, socket));
        };
        std::thread::Builder::new().spawn(body).map(drop)
    }
}

fn is_refusal(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

impl CaptureArgs {
    fn wants(&self, pid: u32) -> bool {
        self.process.as_deref().is_none_or(|wanted| match wanted.parse::<u32>() {
            Ok(wanted) => wanted == pid,
            Err(_) => pcapng::program(pid).contains(wanted),
        })
    }

    /// Whether the process named by id can ever be captured.
    fn check_process(&self) -> Result<(), CliError> {
        let Some(pid) = self.process.as_deref().and_then(|wanted| wanted.parse::<u32>().ok())
        else {
            return Ok(());
        };
        let own = rustix::process::geteuid();
        match std::fs::metadata(format!("/proc/{pid}")) {
            Err(_) => Err(CliError::Capture(format!("there is no process {pid}"))),
            Ok(process) if own.is_root() || process.uid() == own.as_raw() => Ok(()),
            Ok(process) => Err(CliError::Capture(format!(
                "process {pid} is of user {}: only that user and root may capture it",
                process.uid()
            ))),
        }
    }
}
