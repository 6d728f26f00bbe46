// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stacks, and their settings.

use std::ffi::c_char;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use guest_driver::{Config, Rnics, statistics};
use smc_core::wire::ids::Eid;
use smc_rendezvous::Mode;

use crate::error::{Error, code_of};
use crate::fork::Generation;
use crate::memory;

/// `struct smc_options`.
#[repr(C)]
pub(crate) struct Options {
    size: usize,
    eids: *const c_char,
    rnics: *const c_char,
    statistics: *const c_char,
    recv_buffer: u32,
    spin_us: i32,
    device_timeout_ms: i32,
    detect_timeout_ms: i32,
    rendezvous: i32,
    reserved: u32,
}

/// The settings of [`Options`]; `None`: the default.
#[derive(Debug, Default)]
pub(crate) struct StackConfig {
    eids: Option<Vec<Eid>>,
    rnics: Option<Rnics>,
    statistics: Option<PathBuf>,
    recv_buffer: Option<usize>,
    spin: Option<Duration>,
    device_timeout: Option<Duration>,
    detect_timeout: Option<Duration>,
    rendezvous: Mode,
}

/// `smc_stack`.
#[derive(Debug)]
pub(crate) struct Stack {
    pub(crate) stack: Arc<guest_driver::Stack>,
    pub(crate) generation: Generation,
}

fn wrong(what: String) -> Error {
    Error::new(libc::EINVAL, what)
}

/// A time; -1: the default.
fn time(name: &str, value: i32, unit: fn(u64) -> Duration) -> Result<Option<Duration>, Error> {
    match u64::try_from(value) {
        Ok(value) => Ok(Some(unit(value))),
        Err(_) if value == -1 => Ok(None),
        Err(_) => Err(wrong(format!("{name} is {value}"))),
    }
}

impl StackConfig {
    /// Reads the caller's options.
    ///
    /// # Errors
    /// EINVAL, E2BIG.
    ///
    /// # Safety
    /// `options` is NULL, or leads to `size` bytes according to its field, and its pointers lead to texts.
    pub(crate) unsafe fn read(options: *const Options) -> Result<StackConfig, Error> {
        if options.is_null() {
            return Ok(StackConfig::default());
        }
        // SAFETY: the caller's promise; every version of the struct begins with the size.
        let size = unsafe { options.cast::<usize>().read() };
        let known = size_of::<Options>();
        if size < known {
            return Err(wrong(format!("the options have {size} bytes instead of {known}")));
        }
        // SAFETY: the caller's promise.
        let all = unsafe { memory::bytes(options.cast(), size) }?;
        if all.iter().skip(known).any(|byte| *byte != 0) {
            let text = format!("the options have {size} bytes, of which only {known} are known");
            return Err(Error::new(libc::E2BIG, text));
        }
        // SAFETY: the caller's promise; the options are as long as the struct.
        let options = unsafe { memory::object(options, "the options are NULL") }?;
        // SAFETY: the caller's promise.
        let text = |at| unsafe { memory::optional_text(at) };
        let rendezvous = match options.rendezvous {
            0 => Mode::Off,
            1 => Mode::Auto,
            2 => Mode::Required,
            other => return Err(wrong(format!("rendezvous is {other}"))),
        };
        if options.reserved != 0 {
            return Err(wrong(format!("reserved is {}", options.reserved)));
        }
        Ok(StackConfig {
            eids: text(options.eids)?.map(eids).transpose()?,
            rnics: text(options.rnics)?.map(rnics),
            statistics: text(options.statistics)?.map(PathBuf::from),
            recv_buffer: buffer(options.recv_buffer)?,
            spin: time("spin_us", options.spin_us, Duration::from_micros)?,
            device_timeout: time(
                "device_timeout_ms",
                options.device_timeout_ms,
                Duration::from_millis,
            )?,
            detect_timeout: time(
                "detect_timeout_ms",
                options.detect_timeout_ms,
                Duration::from_millis,
            )?,
            rendezvous,
        })
    }
}

fn eids(text: &str) -> Result<Vec<Eid>, Error> {
    let eid = |name: &str| Eid::new(name).map_err(|why| wrong(format!("EID {name:?}: {why}")));
    text.split(',').map(eid).collect()
}

fn rnics(text: &str) -> Rnics {
    match text {
        "none" => Rnics::None,
        names => Rnics::Names(names.split(',').map(str::to_owned).collect()),
    }
}

/// A size of buffers. Another one would be rounded without a word.
fn buffer(size: u32) -> Result<Option<usize>, Error> {
    match size {
        0 => Ok(None),
        _ if size.is_power_of_two() && (16 << 10..=1 << 20).contains(&size) => {
            Ok(Some(size as usize))
        }
        _ => Err(wrong(format!("recv_buffer is {size}"))),
    }
}

impl Stack {
    /// Opens a stack.
    ///
    /// # Errors
    /// As `smc_stack_open`.
    pub(crate) fn open(device: &str, given: StackConfig) -> Result<Stack, Error> {
        let generation = Generation::current();
        let mut config = match device {
            "" => return Err(wrong("the device is an empty text".into())),
            "none" => Config::default(),
            device => Config::new(device),
        };
        for eid in given.eids.into_iter().flatten() {
            config = config.eid(eid);
        }
        config.rnics = given.rnics.unwrap_or(config.rnics);
        config.statistics = given.statistics.map(|directory| statistics::path_in(&directory));
        config.recv_buffer = given.recv_buffer.unwrap_or(config.recv_buffer);
        config.spin = given.spin.unwrap_or(config.spin);
        config.device_timeout = given.device_timeout.unwrap_or(config.device_timeout);
        config.detect_timeout = given.detect_timeout.unwrap_or(config.detect_timeout);
        config.rendezvous = given.rendezvous;
        let stack = guest_driver::Stack::open(config).map_err(|error| {
            let code = error.raw_os_error().unwrap_or_else(|| match code_of(error.kind()) {
                // There is no device for this user.
                libc::EIO | libc::EACCES => libc::ENODEV,
                code => code,
            });
            Error::new(code, error.to_string())
        })?;
        Ok(Stack { stack, generation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn defaults() -> Options {
        Options {
            size: size_of::<Options>(),
            eids: std::ptr::null(),
            rnics: std::ptr::null(),
            statistics: std::ptr::null(),
            recv_buffer: 0,
            spin_us: -1,
            device_timeout_ms: -1,
            detect_timeout_ms: -1,
            rendezvous: 0,
            reserved: 0,
        }
    }

    fn code_of(options: &Options) -> Option<i32> {
        // SAFETY: the options are valid, and their texts are literals.
        unsafe { StackConfig::read(options) }.err().map(|error| error.code())
    }

    #[test]
    fn options_have_defaults_and_each_wrong_value_is_refused() {
        assert_eq!(code_of(&defaults()), None);
        let wrong: [fn(&mut Options); 9] = [
            |options| options.size -= 1,
            |options| options.eids = c"lower case".as_ptr(),
            |options| options.eids = c"A,,B".as_ptr(),
            |options| options.recv_buffer = 16383,
            |options| options.recv_buffer = 1 << 21,
            |options| options.spin_us = -2,
            |options| options.device_timeout_ms = i32::MIN,
            |options| options.rendezvous = 3,
            |options| options.reserved = 1,
        ];
        for (number, change) in wrong.into_iter().enumerate() {
            let mut options = defaults();
            change(&mut options);
            assert_eq!(code_of(&options), Some(libc::EINVAL), "{number}");
        }
    }

    #[test]
    fn fields_of_a_later_version_have_to_be_zero() {
        #[repr(C)]
        struct Later(Options, u64);
        let mut later = Later(defaults(), 0);
        later.0.size = size_of::<Later>();
        // SAFETY: the value is as long as its size field.
        let read = |later: &Later| unsafe { StackConfig::read((&raw const *later).cast()) };
        assert!(read(&later).is_ok());
        later.1 = 1;
        assert_eq!(read(&later).unwrap_err().code(), libc::E2BIG);
    }
}
