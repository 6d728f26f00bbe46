// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc capture`: the bytes of connections on SMC, written as if the connections were TCP.

mod owners;
pub(crate) mod packets;
mod pcapng;

use std::collections::BTreeSet;
use std::fs::{File, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::Args;
use guest_driver::statistics::{self, Record};
use ism_sys::lock;
use rustix::fs::OFlags;

use crate::error::CliError;
use crate::stat::{ReportRequest, Scope, has_socket, sockets};
use crate::{output, proc_files};
use owners::{Owner, Owners};
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
looked for twice a second, so one that lives shorter is seen by its peer alone. A record is written if
the kernel says that the process has that connection, or that it is over. The file has all the data of
the connections; it has to be new, or a file of yours, and only you may read it.";

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
/// Stack size, in bytes, of a thread reading the records of a process.
const STACK: usize = 128 << 10;

/// A look takes this part of the time at most.
const PART: u32 = 10;

/// A message to the writing thread.
enum Told {
    /// Sockets of processes that may be captured.
    Found(Vec<ReportRequest>),
    Record(u32, Record),
    /// No more records from this process: another capture has taken the process over.
    Taken(u32),
    /// This process cannot be captured any more.
    End(u32),
}

/// Captured processes, and processes taken over by another capture.
type Known = Arc<Mutex<BTreeSet<u32>>>;

/// Captures until the time is over or the reader of the output is gone.
///
/// # Errors
/// The file cannot be written, or the named process may not be captured.
pub(crate) fn run(args: &CaptureArgs) -> Result<(), CliError> {
    args.check_process()?;
    let out: Box<dyn Write> = if args.write.as_os_str() == "-" {
        Box::new(io::stdout().lock())
    } else {
        let file = open_own(&args.write);
        Box::new(file.map_err(CliError::io(format!("cannot make {}", args.write.display())))?)
    };
    let written = write(args, BufWriter::new(out));
    match written {
        Err(error) if args.write.as_os_str() == "-" => Err(CliError::Output(error)),
        other => other.map_err(CliError::io(format!("cannot write {}", args.write.display()))),
    }
}

/// Makes the file, for this user only, or empties it. The capture has data of others, so an
/// existing file must belong to this user and have no second name; a device is allowed.
fn open_own(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = File::options();
    options.write(true).create(true).truncate(false).mode(0o600);
    let file = match options.custom_flags(flags.bits() as i32).open(path) {
        // Root alone makes devices, so a link on the way to a device does no harm.
        Err(error) if is_device(path) => {
            let file = File::options().write(true).open(path)?;
            let is_device = file.metadata()?.file_type().is_char_device();
            return if is_device { Ok(file) } else { Err(error) };
        }
        opened => opened?,
    };
    let found = file.metadata()?;
    if found.file_type().is_char_device() {
        return Ok(file);
    }
    if !found.is_file() {
        return Err(io::Error::other("it is no file; \"-w -\" writes into a pipe"));
    }
    if found.uid() != rustix::process::geteuid().as_raw() || found.nlink() != 1 {
        let why = "a file of another user, or with several names, is there";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.set_len(0)?;
    Ok(file)
}

fn is_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_char_device())
}

fn write(args: &CaptureArgs, out: impl Write) -> io::Result<()> {
    let end = args.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds.into()));
    let (sender, told) = mpsc::sync_channel(QUEUE);
    let known = Known::default();
    let mut captured = Captured { args, known: known.clone(), refused: BTreeSet::new(), sender };
    let mut writer = Writer::new(out)?;
    let mut owners = Owners::new();
    let scope = if args.all { Scope::Host } else { Scope::of_environment() };
    let first = sockets(&scope, &BTreeSet::new());
    captured.begin_all(first);
    if lock(&known).is_empty() {
        output::note("smc: no process that may be captured has SMC now; those that get it will be");
    }
    let looks = captured.sender.clone();
    std::thread::Builder::new().spawn(move || look(&scope, &known, &looks))?;
    let mut next_flush = Instant::now() + INTERVAL;
    loop {
        let now = Instant::now();
        if end.is_some_and(|end| now >= end) {
            return writer.flush();
        }
        if now >= next_flush {
            writer.flush()?;
            next_flush = now + INTERVAL;
        }
        if owners.next().is_some_and(|next| now >= next) {
            for (pid, owner, record) in owners.decide() {
                writer.record(pid, owner == Owner::Own, &record)?;
            }
        }
        let times = [Some(next_flush), end, owners.next()];
        let next = times.into_iter().flatten().min().unwrap_or(next_flush);
        match told.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(Told::Found(found)) => captured.begin_all(found),
            Ok(Told::Record(pid, record)) => {
                let ports = [record.local.port(), record.peer.port()];
                if args.port.is_none_or(|port| ports.contains(&port))
                    && let Some(record) = owners.admit(pid, record)
                {
                    writer.record(pid, true, &record)?;
                }
            }
            Ok(Told::Taken(pid)) => note_taken(pid),
            Ok(Told::End(pid)) => {
                writer.forget(pid);
                owners.forget(pid);
                lock(&captured.known).remove(&pid);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return writer.flush(),
        }
    }
}

/// Looks for new processes, again and again. A separate thread, so a slow look delays no record.
fn look(scope: &Scope, known: &Known, found: &SyncSender<Told>) {
    let mut took = Duration::ZERO;
    loop {
        std::thread::sleep(INTERVAL.max(took * PART));
        let begin = Instant::now();
        let old = {
            let mut known = lock(known);
            // Another process may get the id.
            known.retain(|pid| Path::new("/proc").join(pid.to_string()).exists());
            known.clone()
        };
        if found.send(Told::Found(sockets(scope, &old))).is_err() {
            return;
        }
        took = begin.elapsed();
    }
}

/// Tells the user about the end of a capture although the process goes on.
fn note_taken(pid: u32) {
    let program = output::printable_line(&proc_files::program(pid));
    output::note(&format!(
        "smc: the capture of {program} {pid} has ended: another capture of it has begun"
    ));
}

/// The captured processes.
struct Captured<'a> {
    args: &'a CaptureArgs,
    known: Known,
    /// Processes that may not be captured. Each is reported once.
    refused: BTreeSet<u32>,
    sender: SyncSender<Told>,
}

impl Captured<'_> {
    /// Begins to capture the unknown processes.
    fn begin_all(&mut self, found: Vec<ReportRequest>) {
        for one in found {
            let pid = one.pid;
            if lock(&self.known).contains(&pid) || !self.args.wants(pid) {
                continue;
            }
            match self.begin(&one) {
                Ok(()) => drop(lock(&self.known).insert(pid)),
                // The process is ending, or does not answer now.
                Err(error) if error.kind() != io::ErrorKind::PermissionDenied => {}
                Err(error) => {
                    let program = output::printable_line(&proc_files::program(pid));
                    if self.refused.insert(pid) {
                        output::note(&format!("smc: {program} {pid} cannot be captured: {error}"));
                    }
                }
            }
        }
    }

    fn begin(&self, one: &ReportRequest) -> io::Result<()> {
        let mut stream = statistics::capture(&one.at(), one.pid)?;
        let (pid, socket, sender) = (one.pid, one.socket.clone(), self.sender.clone());
        let body = move || {
            while let Ok(Some(record)) = Record::read(&mut stream) {
                if sender.send(Told::Record(pid, record)).is_err() {
                    return;
                }
            }
            // No thread listens at the end.
            let _ = sender.send(match has_socket(pid, &socket) {
                true => Told::Taken(pid),
                false => Told::End(pid),
            });
        };
        std::thread::Builder::new().stack_size(STACK).spawn(body).map(drop)
    }
}

impl CaptureArgs {
    fn wants(&self, pid: u32) -> bool {
        self.process.as_deref().is_none_or(|wanted| match wanted.parse::<u32>() {
            Ok(wanted) => wanted == pid,
            Err(_) => proc_files::program(pid).contains(wanted),
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    #[test]
    fn a_capture_goes_into_no_file_of_another_user() {
        let dir = std::env::temp_dir().join(format!("smc-capture-file-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = |name: &str| dir.join(name);
        let mode = |file: File| file.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(open_own(&path("new")).map(mode).unwrap(), 0o600);
        std::fs::write(path("own"), "old").unwrap();
        std::fs::set_permissions(path("own"), Permissions::from_mode(0o666)).unwrap();
        let file = open_own(&path("own")).unwrap();
        assert_eq!((file.metadata().unwrap().len(), mode(file)), (0, 0o600));
        assert!(open_own(Path::new("/dev/null")).is_ok());

        std::fs::write(path("kept"), "kept").unwrap();
        std::fs::hard_link(path("kept"), path("second name")).unwrap();
        symlink(path("own"), path("link")).unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), fifo, mode, 0).unwrap();
        for refused in ["second name", "link", "fifo"] {
            assert!(open_own(&path(refused)).is_err(), "{refused}");
        }
        if rustix::process::geteuid().is_root() {
            std::fs::write(path("other"), "kept").unwrap();
            chown(path("other"), Some(4001), None).unwrap();
            assert!(open_own(&path("other")).is_err());
            assert_eq!(std::fs::read(path("other")).unwrap(), b"kept");
        }
        assert_eq!(std::fs::read(path("kept")).unwrap(), b"kept");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
