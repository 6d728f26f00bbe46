//! What became of the connections of this process: a line per event in a file of its own, if
//! `smc run --status` asked for it.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use guest_driver::{Facts, Fallback};
use smc_core::handshake::FallbackReason;

use crate::config;
use crate::sys::borrowed;

fn write_line(text: &str) {
    let Some(dir) = config::get().and_then(|config| config.status.as_ref()) else { return };
    let path = dir.join(format!("{}.jsonl", std::process::id()));
    let file = File::options().create(true).append(true).open(path);
    if let Ok(mut file) = file {
        // A report that cannot be written is no reason to disturb the program.
        let _ = file.write_all(format!("{text}\n").as_bytes());
    }
}

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

/// The session has a device.
pub(crate) fn device_opened(device: &Path) {
    write_line(&format!(
        "{{\"event\":\"session\",\"device\":{}}}",
        quoted(&device.display().to_string())
    ));
}

/// The session has none, because this process will probably be over soon.
pub(crate) fn device_skipped() {
    write_no_device("processes of this server are over soon");
}

fn write_no_device(why: &str) {
    write_line(&format!("{{\"event\":\"no_device\",\"why\":{}}}", quoted(why)));
}

/// The session has none.
pub(crate) fn no_device(why: &str) {
    write_no_device(why);
    if !REPORTED.swap(true, Ordering::Relaxed) {
        let program = std::env::current_exe().unwrap_or_default();
        let program = program.file_name().unwrap_or_default().to_string_lossy();
        print_error(&format!(
            "smc run: {program} ({}) stays on TCP: {why}; it looks again about every second. Each process \
             needs a virtio-ism device of its own: \"smc devices\" shows those in use, \"smc doctor\" what \
             is missing\n",
            std::process::id()
        ));
    }
}

/// Standard error as it was when the program began.
static STANDARD_ERROR: OnceLock<(u64, u64)> = OnceLock::new();
/// It was said that there is no device; children that are forked do not repeat it.
static REPORTED: AtomicBool = AtomicBool::new(false);

/// Notes what standard error is.
pub(crate) fn init() {
    let fd = borrowed(2);
    // Where a connection takes its place, text would be data.
    let domain = rustix::net::sockopt::socket_domain(fd);
    let inet = [rustix::net::AddressFamily::INET, rustix::net::AddressFamily::INET6];
    if let Ok(stat) = rustix::fs::fstat(fd)
        && !domain.is_ok_and(|domain| inet.contains(&domain))
    {
        let _ = STANDARD_ERROR.set((stat.st_dev, stat.st_ino));
    }
}

/// Writes to standard error, unless the program has put something else in its place or nobody takes it.
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
    // A reader that goes in this moment means SIGPIPE: it ends with a thread in which it is blocked.
    std::thread::scope(|scope| {
        let write = || crate::sys::raw::write(2, text.as_bytes());
        let _ = std::thread::Builder::new().stack_size(64 << 10).spawn_scoped(scope, write);
    });
}

/// A connection was decided.
pub(crate) fn connection_decided(socket: impl AsFd, role: &str, facts: &Facts) {
    if config::get().is_none_or(|config| config.status.is_none()) {
        return;
    }
    let text = |name: Option<rustix::net::SocketAddrAny>| {
        let address = name.and_then(|name| std::net::SocketAddr::try_from(name).ok());
        address.map_or_else(|| "?".into(), |address| address.to_string())
    };
    let local = text(rustix::net::getsockname(&socket).ok());
    let peer = text(rustix::net::getpeername(&socket).ok().flatten());
    write_line(&format!(
        "{{\"event\":\"connection\",\"role\":\"{role}\",\"local\":\"{local}\",\"peer\":\"{peer}\",\
         \"smc\":{},\"facts\":{}}}",
        facts.is_smc(),
        quoted(&facts.to_string())
    ));
}

/// TCP option 254 is required and cannot be had.
pub(crate) fn no_option() {
    let why = config::get().and_then(|config| config.no_option.as_deref());
    let why = why.unwrap_or("nobody passed it on");
    write_line(&format!("{{\"event\":\"no_option\",\"why\":{}}}", quoted(why)));
}

/// A client did not propose SMC.
pub(crate) fn server_stays_on_tcp(socket: impl AsFd) {
    connection_decided(socket, "server", &Facts::Tcp(FallbackReason::PeerNotSmc.into()));
}

/// A client does not propose SMC.
pub(crate) fn client_stays_on_tcp(socket: impl AsFd, why: Fallback) {
    connection_decided(socket, "client", &Facts::Tcp(why));
}

/// A handshake broke its connection.
pub(crate) fn connection_failed(role: &str, why: &std::io::Error) {
    write_line(&format!(
        "{{\"event\":\"broken\",\"role\":\"{role}\",\"why\":{}}}",
        quoted(&why.to_string())
    ));
}
