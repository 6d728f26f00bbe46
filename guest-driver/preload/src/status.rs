// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report of the fate of this process's connections: a line per event, in a file per process
//! (`report_file`), if the user gave `smc run --status`.

use std::ffi::{c_int, c_long};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use guest_driver::{ConnectionInfo, Fallback};
use ism_sys::OnceBox;

use crate::sys::borrowed;
use crate::{config, report_file, tcp_notes};

fn write_line(text: &str) {
    tracing::info!(target: TARGET, "{text}");
    if let Some(directory) = config::get().and_then(|config| config.status.as_ref()) {
        let appended = report_file::append(directory, &format!("{text}\n"));
        if let Err(why) = appended
            && !INCOMPLETE.swap(true, Ordering::Relaxed)
        {
            print_error(&format!(
                "smc run: the report of {} ({}) in {} is incomplete: {why}\n",
                program_name(),
                std::process::id(),
                directory.display()
            ));
        }
    }
}

/// The part of the log with the reported events.
pub(crate) const TARGET: &str = "smc_preload";

/// Text as a JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Reports the device opened by the session.
pub(crate) fn device_opened(device: &Path) {
    write_line(&format!(
        "{{\"event\":\"session\",\"device\":{}}}",
        quoted(&device.display().to_string())
    ));
}

/// Reports that the session does without a device, because this process will probably exit soon.
pub(crate) fn device_skipped() {
    write_no_device("processes of this server exit soon");
}

/// Reports that new connections follow a changed policy file.
pub(crate) fn policy_changed(rules: usize) {
    write_line(&format!("{{\"event\":\"policy\",\"rules\":{rules}}}"));
}

/// Reports a key of the policy file that this release does not know.
pub(crate) fn policy_key(says: &str) {
    write_line(&format!("{{\"event\":\"policy_key\",\"says\":{}}}", quoted(says)));
}

/// Reports a changed policy file without effect.
pub(crate) fn policy_stays(why: &str) {
    write_line(&format!("{{\"event\":\"policy_stays\",\"why\":{}}}", quoted(why)));
}

fn write_no_device(why: &str) {
    write_line(&format!("{{\"event\":\"no_device\",\"why\":{}}}", quoted(why)));
}

/// Reports a failure to open any device, once on standard error as well.
pub(crate) fn no_device(why: &str) {
    write_no_device(why);
    if !REPORTED.swap(true, Ordering::Relaxed) {
        let program = program_name();
        print_error(&format!(
            "smc run: {program} ({}) stays on TCP: {why}; it tries again about every second. Each \
             process needs a virtio-ism device of its own: \"smc stat fabric\" lists the devices in use, \
             \"smc doctor\" shows what is missing\n",
            std::process::id()
        ));
    }
}

/// Reports that the library switches off, because a filter of system calls forbids a needed call.
pub(crate) fn stays_out(call: &str) {
    let is_fatal = |call: &c_long| ism_sys::is_fatal(*call);
    if CALLS_OF_REPORTS.iter().any(is_fatal) {
        return;
    }
    let why = format!("a filter of system calls (seccomp) forbids {call}");
    write_no_device(&why);
    if !is_fatal(&libc::SYS_ppoll) {
        let program = program_name();
        print_error(&format!("smc run: {program} ({}) stays on TCP: {why}\n", std::process::id()));
    }
}

/// Reports the same before the program has the filter.
pub(crate) fn leaves_for_filter(call: &str) {
    write_no_device(&format!(
        "the program gets a filter of system calls (seccomp) that forbids {call}"
    ));
}

/// Reports an emulator of the program's instructions: the library switches off.
pub(crate) fn is_emulated() {
    let why = "the program has no vDSO, as under valgrind, and its signals may come in another way";
    stays_on_tcp(why, true);
}

/// Reports why no device opens from now on. `prints`: also on standard error.
pub(crate) fn stays_on_tcp(why: &str, prints: bool) {
    write_no_device(why);
    if prints {
        let program = program_name();
        print_error(&format!("smc run: {program} ({}) stays on TCP: {why}\n", std::process::id()));
    }
}

/// Calls needed for any report.
const CALLS_OF_REPORTS: [c_long; 6] = [
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_openat,
    libc::SYS_prlimit64,
    libc::SYS_readlinkat,
    libc::SYS_statx,
];

/// Reports a failure to redirect libc's symbol table to the library, also on standard error.
pub(crate) fn libc_stays() {
    write_line("{\"event\":\"libc_stays\"}");
    print_error(&format!(
        "smc run: {} ({}) stays on TCP from now on: it opens another object, and libc's table of \
         symbols cannot lead to the library: the kernel (mseal) or the layout of libc forbids it\n",
        program_name(),
        std::process::id()
    ));
}

/// Reports that the program makes system calls outside of the library's view, also on standard error.
pub(crate) fn program_goes_around(what: &str) {
    write_line(&format!("{{\"event\":\"own_calls\",\"what\":{}}}", quoted(what)));
    print_error(&format!(
        "smc run: {} ({}) stays on TCP from now on: it calls {what} by instructions of its own, which \
         the library does not see\n",
        program_name(),
        std::process::id()
    ));
}

/// The name given at the start of the program.
fn program_name() -> String {
    let program =
        ism_sys::started_as().or_else(|| std::env::current_exe().ok()).unwrap_or_default();
    program.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Reports unreadable settings, on standard error.
pub(crate) fn cannot_read(mistakes: &[String]) {
    for mistake in mistakes {
        print_error(&format!("smc run: {mistake}: no connection is on SMC because of it\n"));
    }
}

/// Reports an unusable log of the library on standard error.
pub(crate) fn no_log(mistake: &str) {
    print_error(&format!("smc run: {mistake}: there is no log\n"));
}

/// Device and inode of standard error at the start of the program.
static STANDARD_ERROR: OnceBox<(u64, u64)> = OnceBox::new();
/// Whether standard error has the message about a missing device. Forked children do not repeat the
/// message.
static REPORTED: AtomicBool = AtomicBool::new(false);
/// The same for the message about missing lines of the report.
static INCOMPLETE: AtomicBool = AtomicBool::new(false);

/// Stores the file of standard error.
pub(crate) fn init() {
    let fd = borrowed(2);
    // If standard error is a connection, its peer would take the text for data.
    let domain = rustix::net::sockopt::socket_domain(fd);
    let inet = [rustix::net::AddressFamily::INET, rustix::net::AddressFamily::INET6];
    if let Ok(stat) = rustix::fs::fstat(fd)
        && !domain.is_ok_and(|domain| inet.contains(&domain))
    {
        let _ = STANDARD_ERROR.set((stat.st_dev, stat.st_ino));
    }
}

/// A descriptor of standard error. `None`: there is none, or a connection.
pub(crate) fn standard_error() -> Option<OwnedFd> {
    STANDARD_ERROR.get()?;
    rustix::io::fcntl_dupfd_cloexec(borrowed(2), 3).ok()
}

/// Writes to standard error, unless the program has replaced it or the write would block.
fn print_error(text: &str) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let fd = borrowed(2);
    let now = rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino));
    if now.is_none() || now != STANDARD_ERROR.get().copied() {
        return;
    }
    let mut list = [PollFd::new(&fd, PollFlags::OUT)];
    let _ = poll(&mut list, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    if list[0].revents() != PollFlags::OUT {
        return;
    }
    let _ = crate::sys::quiet_write::write(2, text.as_bytes());
}

/// The names of a connection known to the caller; the kernel is asked for the others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KnownNames {
    /// This end's.
    pub(crate) local: Option<SocketAddr>,
    /// The peer's.
    pub(crate) peer: Option<SocketAddr>,
}

/// Reports the carrier of a connection. `fd`: the program's descriptor; `socket`: an open descriptor.
pub(crate) fn connection_decided(fd: c_int, socket: impl AsFd, role: &str, info: &ConnectionInfo) {
    decided(fd, socket, role, info, KnownNames::default());
}

fn decided(fd: c_int, socket: impl AsFd, role: &str, info: &ConnectionInfo, names: KnownNames) {
    if let ConnectionInfo::Tcp(why) = info {
        tcp_notes::note(fd, why);
    }
    let has_file = config::get().is_some_and(|config| config.status.is_some());
    if !has_file && !tracing::enabled!(target: TARGET, tracing::Level::INFO) {
        return;
    }
    let text = |name: Option<SocketAddr>| name.map_or_else(|| "?".into(), |name| name.to_string());
    let read = |name: rustix::net::SocketAddrAny| SocketAddr::try_from(name).ok();
    let local = || rustix::net::getsockname(&socket).ok().and_then(read);
    let peer = || rustix::net::getpeername(&socket).ok().flatten().and_then(read);
    let (local, peer) = (text(names.local.or_else(local)), text(names.peer.or_else(peer)));
    write_line(&format!(
        "{{\"event\":\"connection\",\"role\":\"{role}\",\"local\":\"{local}\",\"peer\":\"{peer}\",\
         \"smc\":{},\"info\":{}}}",
        info.is_smc(),
        quoted(&info.to_string())
    ));
}

/// Reports the start of this keeper with the relays of an ended process.
pub(crate) fn keeper_begins(relays: usize) {
    write_line(&format!("{{\"event\":\"keeper\",\"relays\":{relays}}}"));
}

/// Reports that this process, a keeper, ends although peers have not taken these bytes.
pub(crate) fn keeper_gives_up(connections: usize, bytes: u64, after: Duration) {
    let seconds = after.as_secs();
    tracing::warn!(
        target: TARGET,
        connections, bytes, seconds, "a keeper ends: peers have taken nothing for so long"
    );
    write_line(&format!(
        "{{\"event\":\"keeper_gives_up\",\"connections\":{connections},\"bytes\":{bytes}}}"
    ));
}

/// Reports the lack of TCP option 254. `is_news`: `smc run` has not told the user.
pub(crate) fn no_option(why: &str, is_news: bool) {
    if is_news {
        let (program, id) = (program_name(), std::process::id());
        print_error(&format!(
            "smc run: connections that {program} ({id}) makes are TCP, for there is no TCP option 254: \
             {why} (see \"smc doctor\")\n"
        ));
    }
    write_line(&format!("{{\"event\":\"no_option\",\"why\":{}}}", quoted(why)));
}

/// Reports an accepted connection on TCP: the client did not propose SMC.
pub(crate) fn server_stays_on_tcp(fd: c_int, socket: impl AsFd, why: Fallback) {
    accepted_on_tcp(fd, socket, KnownNames::default(), why);
}

/// Variant of [`server_stays_on_tcp`] for a connection with known names.
pub(crate) fn accepted_on_tcp(fd: c_int, socket: impl AsFd, names: KnownNames, why: Fallback) {
    decided(fd, socket, "server", &ConnectionInfo::Tcp(why), names);
}

/// Reports a connection made by the program on TCP.
pub(crate) fn client_stays_on_tcp(fd: c_int, socket: impl AsFd, why: Fallback) {
    connection_decided(fd, socket, "client", &ConnectionInfo::Tcp(why));
}

/// Reports a connection in progress to this server on TCP.
pub(crate) fn connecting_on_tcp(fd: c_int, to: Option<SocketAddr>, why: Fallback) {
    // The unspecified address, for this machine, is no name.
    let peer = to.filter(|to| !to.ip().is_unspecified());
    let names = KnownNames { local: None, peer };
    decided(fd, borrowed(fd), "client", &ConnectionInfo::Tcp(why), names);
}

/// Reports a connection ended by a failed handshake.
pub(crate) fn connection_failed(role: &str, why: &std::io::Error) {
    write_line(&format!(
        "{{\"event\":\"broken\",\"role\":\"{role}\",\"why\":{}}}",
        quoted(&why.to_string())
    ));
}

/// Reports that a listener answers clients no more, because a program without the library gets the
/// listener. `done`: the kernel has agreed.
pub(crate) fn listener_left(local: &SocketAddr, done: bool) {
    write_line(&format!("{{\"event\":\"left_listener\",\"local\":\"{local}\",\"done\":{done}}}"));
}

/// Reports that a client connects again without SMC, because the server has answered a Proposal with
/// other bytes than a message of the handshake.
pub(crate) fn client_connects_again(server: &SocketAddr, why: &std::io::Error) {
    let why = quoted(&why.to_string());
    write_line(&format!("{{\"event\":\"again\",\"peer\":\"{server}\",\"why\":{why}}}"));
}

/// Reports that a server's client has ended the connection in the middle of its handshake. The program
/// sees the same as on TCP.
pub(crate) fn client_has_left(why: &std::io::Error) {
    let why = quoted(&why.to_string());
    write_line(&format!("{{\"event\":\"left\",\"role\":\"server\",\"why\":{why}}}"));
}
