// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Logs: `tracing` for this crate, and the framework's messages through `log`.
//!
//! Lines caused by a guest or a front end are limited in rate per port (see [`Fault`](crate::vhost::Fault))
//! and never show bytes of a guest. The framework logs broken descriptors and wrong messages without a limit,
//! so its log is off unless RUST_LOG enables it.
//!
//! Control characters of every line are escaped, so a path or name stays on one line and has no effect on a
//! terminal.
//!
//! A line standard error does not take at once is dropped, so a slow reader of the log cannot stall the
//! daemon. The next line tells the number of dropped lines.
//!
//! Under systemd's journal a line has no time, added by the journal itself, and begins with its priority as
//! in sd-daemon(3).

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, format};
use tracing_subscriber::registry::LookupSpan;

use crate::config::log_output::LogOutput;

/// Sets up logging to standard error. RUST_LOG wins over `level`.
pub(crate) fn init(level: Option<Level>) {
    let level = level.unwrap_or(Level::INFO);
    // Not "vhost": a name here is a prefix, and would also match this crate.
    let default = format!("{level},virtio_queue=off,vhost::=error,vhost_user_backend=off");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let has_colours = wants_colour();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(has_colours)
        .with_writer(move || Lines { stream: io::stderr(), has_colours })
        // An unwritable line would be reported to the same stream, by a panic.
        .log_internal_errors(false);
    // Fails if a subscriber is set already; then use the present one.
    let _ = match is_journal() {
        true => subscriber
            .event_format(JournalFormat(format().without_time().with_level(false)))
            .try_init(),
        false => subscriber.try_init(),
    };
}

/// Prints why the daemon does not start, at any log level.
pub(crate) fn print_error(error: &dyn fmt::Display) {
    let priority = if is_journal() { priority(Level::ERROR) } else { "" };
    // One write, so lines of other processes do not come between. A failed write has no other place to go.
    let line = format!("{priority}vhost-device-ism: {}\n", LogOutput(error));
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Colours only on terminals, unless turned off (no-color.org).
fn wants_colour() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    io::stderr().is_terminal() && !refused
}

/// Whether standard error is the stream in JOURNAL_STREAM: a program may have inherited the variable with
/// another standard error.
fn is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stat) = rustix::fs::fstat(io::stderr().as_fd()) else { return false };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}

/// Number of lines dropped since the last written line.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// A non-blocking stream of lines: each call of `write` is a line, written as a whole, cut at [`LINE_MAX`],
/// or dropped.
struct Lines {
    stream: io::Stderr,
    has_colours: bool,
}

/// Most bytes a pipe takes without blocking once poll(2) reports writability (PIPE_BUF).
const LINE_MAX: usize = 4096;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // No other thread of this process writes between the check and the line.
        let mut stream = self.stream.lock();
        if !is_writable(&stream) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
            return Ok(line.len());
        }
        let mut text = match DROPPED.swap(0, Ordering::Relaxed) {
            0 => Vec::new(),
            dropped => {
                let level = if is_journal() { priority(Level::WARN) } else { "" };
                format!(
                    "{level}vhost-device-ism: nobody read the log: {dropped} lines are missing\n"
                )
                .into_bytes()
            }
        };
        text.extend_from_slice(&escaped(line, self.has_colours));
        if text.len() > LINE_MAX {
            text.truncate(LINE_MAX - 1);
            text.push(b'\n');
        }
        stream.write_all(&text)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A line with its control characters escaped, except its end and this program's own colours. The line's
/// fields are escaped before.
fn escaped(line: &[u8], has_colours: bool) -> Vec<u8> {
    let mut text = Vec::with_capacity(line.len());
    let body = line.strip_suffix(b"\n").unwrap_or(line);
    for c in String::from_utf8_lossy(body).chars() {
        let is_colour = has_colours && c == '\x1b';
        match c.is_control() && !is_colour {
            true => text.extend(c.escape_default().map(|c| c as u8)),
            false => text.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    text.push(b'\n');
    text
}

/// Whether a stream takes a line now. A broken stream does: the write then fails.
fn is_writable(stream: impl AsFd) -> bool {
    let mut asked = [PollFd::new(&stream, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut asked, Some(&now)).map_or(true, |ready| ready > 0)
}

/// A level in syslog's notation.
fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        _ => "<7>",
    }
}

/// Lines with a priority in front.
struct JournalFormat(Format<Full, ()>);

impl<S, N> FormatEvent<S, N> for JournalFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        writer.write_str(priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_log_stays_one_line_and_does_nothing_to_a_terminal() {
        let shown = |line: &[u8]| String::from_utf8(escaped(line, false)).unwrap();
        assert_eq!(
            shown(b"path=/run/x\x1b]0;t\x07\n<3>forged\n"),
            "path=/run/x\\u{1b}]0;t\\u{7}\\n<3>forged\n"
        );
        assert_eq!(shown("gr\u{fc}n\n".as_bytes()), "gr\u{fc}n\n");
        assert_eq!(escaped(b"\x1b[32mINFO\x1b[0m a\rb\n", true), b"\x1b[32mINFO\x1b[0m a\\rb\n");
    }
}
