// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The log of the library in any program, for the search for a mistake. `SMC_LOG` sets the levels, and
//! `SMC_LOG_FILE` the file.
//!
//! A line is one write, of text without colours. Without a reader of standard error the program loses
//! lines, but neither waits nor gets a signal.

use std::ffi::{OsStr, c_int};
use std::fmt::{self, Write as _};
use std::os::fd::{IntoRawFd, OwnedFd};
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber};

use crate::sys::{is_writable, own_numbers, quiet_write, raw};
use crate::{report_file, status};

/// How much: a level, or levels for parts, as `warn,guest_driver=trace`.
const LEVELS: &str = "SMC_LOG";
/// The file to append to. Without it lines go to standard error.
pub(crate) const FILE: &str = "SMC_LOG_FILE";

/// The lowest number of the log's descriptor.
const LOWEST: c_int = 690;

/// Begins the log, if wanted. Returns the mistake in the settings.
pub(crate) fn begin() -> Option<String> {
    let text = std::env::var_os(LEVELS).filter(|text| !text.is_empty())?;
    let filter = match text.to_str().unwrap_or_default().parse::<Filter>() {
        Ok(filter) => filter,
        Err(word) => return Some(format!("{LEVELS}: `{word}` is no level of a log")),
    };
    let file = std::env::var_os(FILE).filter(|file| !file.is_empty());
    let fd = match open(file.as_deref()) {
        Ok(fd) => fd,
        Err(error) => {
            let name = file.as_deref().map(Path::new);
            let name =
                name.map_or_else(|| "standard error".into(), |name| name.display().to_string());
            return Some(format!("{FILE}: cannot write {name}: {error}"));
        }
    };
    if file.is_some() && filter.level(status::TARGET) >= LevelFilter::WARN {
        FILE_OF_WARNINGS.store(fd, Ordering::Relaxed);
    }
    let log = Log { filter, fd, waits: file.is_some() };
    // There is no other subscriber in this library.
    let _ = tracing::subscriber::set_global_default(log);
    None
}

/// The descriptor of the log, if the log is a file with the warnings of [`status`]; -1: otherwise.
static FILE_OF_WARNINGS: AtomicI32 = AtomicI32::new(-1);

/// The descriptor kept by a process after the end of its program. Not standard error: its reader waits
/// for the end.
pub(crate) fn file_of_warnings() -> Option<c_int> {
    Some(FILE_OF_WARNINGS.load(Ordering::Relaxed)).filter(|fd| *fd >= 0)
}

/// Writes a warning, without memory and without a lock.
pub(crate) fn warn_at_once(text: &str) {
    use std::io::Write as _;
    let Some(fd) = file_of_warnings() else { return };
    let mut line = [0u8; 256];
    let mut rest = &mut line[..];
    // Too long a text is cut.
    let (pid, target) = (raw::getpid(), status::TARGET);
    let _ = writeln!(rest, "{}  WARN {pid}/{pid} {target}: {text}", Time::now());
    let left = rest.len();
    let written = line.len() - left;
    let _ = quiet_write::write(fd, line.get(..written).unwrap_or_default());
}

/// A descriptor for the log, away from the program's numbers.
fn open(file: Option<&OsStr>) -> std::io::Result<c_int> {
    let fd: OwnedFd = match file {
        Some(file) => report_file::open_own(Path::new(file))?.into(),
        None => status::standard_error().ok_or(std::io::ErrorKind::NotFound)?,
    };
    let high = rustix::io::fcntl_dupfd_cloexec(&fd, LOWEST).unwrap_or(fd).into_raw_fd();
    own_numbers::enter(high);
    Ok(high)
}

/// Levels of the written lines.
#[derive(Debug, PartialEq, Eq)]
struct Filter {
    /// For parts without a level of their own.
    others: LevelFilter,
    /// Parts, by the beginnings of their names.
    parts: Vec<(String, LevelFilter)>,
}

impl FromStr for Filter {
    /// The word that is no level.
    type Err = String;

    fn from_str(text: &str) -> Result<Filter, String> {
        let mut filter = Filter { others: LevelFilter::OFF, parts: Vec::new() };
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            let (part, level) = match word.split_once('=') {
                Some((part, level)) => (Some(part), level),
                None => (None, word),
            };
            // An empty word would be a level.
            let level = (!level.is_empty()).then(|| level.parse().ok()).flatten();
            let level: LevelFilter = level.ok_or_else(|| word.to_owned())?;
            match part {
                Some(part) => filter.parts.push((part.into(), level)),
                None => filter.others = level,
            }
        }
        Ok(filter)
    }
}

impl Filter {
    fn level(&self, target: &str) -> LevelFilter {
        let fitting = self.parts.iter().filter(|(part, _)| target.starts_with(part.as_str()));
        fitting.max_by_key(|(part, _)| part.len()).map_or(self.others, |(_, level)| *level)
    }

    fn most(&self) -> LevelFilter {
        self.parts.iter().map(|(_, level)| *level).fold(self.others, Ord::max)
    }
}

struct Log {
    filter: Filter,
    fd: c_int,
    /// A write may wait for a disk.
    waits: bool,
}

impl Subscriber for Log {
    fn register_callsite(&self, of: &'static Metadata<'static>) -> Interest {
        if self.enabled(of) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, of: &Metadata<'_>) -> bool {
        of.is_event() && *of.level() <= self.filter.level(of.target())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.filter.most())
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = String::new();
        let of = event.metadata();
        let thread = ism_sys::thread_number();
        let _ = write!(
            line,
            "{} {:>5} {}/{thread} {}:",
            Time::now(),
            of.level(),
            raw::getpid(),
            of.target()
        );
        event.record(&mut Fields(&mut line));
        line.push('\n');
        if self.waits || is_writable(self.fd) {
            // The program goes on without a writable log.
            let _ = quiet_write::write(self.fd, line.as_bytes());
        }
    }

    // There are no spans in the library.

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Writes the fields of an event after its head. Text of others, as a peer's name, stays in its line.
struct Fields<'a>(&'a mut String);

impl Fields<'_> {
    fn push(&mut self, name: &str, value: &str) {
        self.0.push(' ');
        if name != "message" {
            self.0.push_str(name);
            self.0.push('=');
        }
        for c in value.chars() {
            match c.is_control() {
                true => self.0.extend(c.escape_default()),
                false => self.0.push(c),
            }
        }
    }
}

impl Visit for Fields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field.name(), value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push(field.name(), &format!("{value:?}"));
    }
}

/// A time in UTC, in the format of RFC 3339.
struct Time(Duration);

impl Time {
    fn now() -> Time {
        Time(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, seconds) = (self.0.as_secs() / 86_400, self.0.as_secs() % 86_400);
        // Years begin in March here, so the day of a leap year is the last one.
        let days = days + 719_468;
        let (era, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = era * 400 + year + u64::from(month <= 2);
        let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
        let micros = self.0.subsec_micros();
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_level_of_the_longest_name_that_fits() {
        let filter: Filter = "warn, guest_driver=debug,guest_driver::conn=off".parse().unwrap();
        for (target, level) in [
            ("guest_driver::socket", LevelFilter::DEBUG),
            ("guest_driver::conn::send", LevelFilter::OFF),
            ("smc_verbs", LevelFilter::WARN),
        ] {
            assert_eq!(filter.level(target), level, "{target}");
        }
        assert_eq!(filter.most(), LevelFilter::DEBUG);
        for wrong in ["loud", "warn,guest_driver=", "guest_driver=3x"] {
            assert!(wrong.parse::<Filter>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399, "2000-02-28T23:59:59.000000Z"),
            (951_868_799, "2000-02-29T23:59:59.000000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(Time(Duration::from_secs(seconds)).to_string(), text);
        }
    }

    #[test]
    fn text_of_others_stays_in_its_line() {
        let mut line = String::new();
        Fields(&mut line).push("peer", "a\nb\u{1b}[31m");
        assert_eq!(line, " peer=a\\nb\\u{1b}[31m");
    }
}
