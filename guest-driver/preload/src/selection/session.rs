// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The SMC session of this process: an SMC stack on a device, opened by the first handshake.

use std::ffi::c_int;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use guest_driver::interpose::{FirstBytes, ForkLocks, Incoming, Outgoing};
use guest_driver::{Config as StackConfig, Fallback, Rnics, Stack, statistics};

use crate::config::RunConfig;
use crate::selection::{filters, inherited_options, own_calls, short_lived, worthwhile};
use crate::sys::fork_lock::ForkLock;
use crate::sys::own_copies::DriverLimit;
use crate::sys::own_stack::OwnStack;
use crate::sys::raw::Errno;
use crate::sys::{leaked, own_copies, owned, raw, timespec};
use crate::{config, fork, last_thread, status};

static CURRENT: AtomicPtr<ProcessSession> = AtomicPtr::new(std::ptr::null_mut());
static OPENING: ForkLock = ForkLock::new();

/// A session, and the generation of the opening process (see `fork`).
pub(crate) struct ProcessSession {
    generation: u32,
    stack: Arc<Stack>,
    has_device: bool,
    /// Time of the next attempt at a device, on the monotonic clock in microseconds.
    due: AtomicU64,
}

impl ProcessSession {
    /// Begins the client's half of the handshake on a connected stream. `awaited`: the server waits
    /// for a message, so a client without a Proposal sends a Decline.
    pub(crate) fn outgoing(&self, tcp: TcpStream, awaited: bool) -> Outgoing {
        let limit = inherited_options::receive_buffer(tcp.as_raw_fd());
        let mut outgoing = Outgoing::new(&self.stack, tcp, awaited);
        limit.into_iter().for_each(|bytes| outgoing.limit_buffer(bytes));
        outgoing
    }

    /// Declines SMC on a stream kept by the program, to a server waiting for a message.
    pub(crate) fn decline_awaited(&self, tcp: &TcpStream) -> std::io::Result<()> {
        Outgoing::decline(&self.stack, tcp)
    }

    /// Begins the server's half of the handshake on an accepted stream.
    pub(crate) fn incoming(&self, tcp: TcpStream, first_bytes: FirstBytes) -> Incoming {
        let limit = inherited_options::receive_buffer(tcp.as_raw_fd());
        let mut incoming = Incoming::new(&self.stack, tcp, first_bytes);
        limit.into_iter().for_each(|bytes| incoming.limit_buffer(bytes));
        incoming
    }

    /// Declines the Proposal of a client, on a stream kept by the program.
    pub(crate) fn decline(&self, tcp: &TcpStream, first_bytes: FirstBytes) -> std::io::Result<()> {
        Incoming::decline(&self.stack, tcp, first_bytes)
    }

    /// The stack.
    pub(crate) fn stack(&self) -> &Arc<Stack> {
        &self.stack
    }

    /// Whether the last attempt to open a device is too recent for another one.
    fn is_fresh(&self) -> bool {
        raw::monotonic_micros() < self.due.load(Ordering::Relaxed)
    }
}

/// Pause between two attempts to open a device, microseconds. The pause is at least ten times as long
/// as the attempt: a daemon that hangs answers none for a second and more.
const RETRY: u64 = 1_000_000;

/// The time of the attempt after one that began then, on the monotonic clock in microseconds.
fn due_after(began: u64) -> u64 {
    let now = raw::monotonic_micros();
    now + RETRY.max(10 * now.saturating_sub(began))
}

/// Pauses between attempts at devices in use, milliseconds. The daemon may be about to notice the
/// end of a process.
const PAUSES_MS: [u64; 4] = [1, 4, 10, 25];

/// Attempts end after this time, microseconds: a daemon that hangs looks like a device in use.
const PATIENCE: u64 = 200_000;

/// The session of this process; the first call opens it. Without a device the session leaves all
/// connections to TCP and declines Proposals. So does the session of a program with system calls of
/// its own, or with locked memory. `None`: the library does nothing in this process.
pub(crate) fn current() -> Option<&'static ProcessSession> {
    let config = config::get()?;
    if own_calls::found() || has_locked_memory() {
        return declining();
    }
    let one_at_a_time = OPENING.lock();
    let known = raw_current();
    let known = known.filter(|open| open.generation == fork::generation());
    if let Some(open) = known
        && (open.has_device || open.is_fresh())
    {
        return Some(open);
    }
    own_calls::look_at_files();
    raw::without_signals(own_calls::look_for_sets);
    if own_calls::found() {
        drop(one_at_a_time);
        return declining();
    }
    if raw::without_signals(filters::forbid_devices) {
        return None;
    }
    let open = || match OwnStack::take() {
        Some(mut stack) => stack.run(|| open(config, known.is_none())),
        None => Err("there is no memory for a stack (see ulimit -v)".into()),
    };
    let began = raw::monotonic_micros();
    let opened = match (raw::without_signals(open), known) {
        (Ok(opened), _) => opened,
        (Err(_), Some(open)) => {
            open.due.store(due_after(began), Ordering::Relaxed);
            return Some(open);
        }
        (Err(why), None) => {
            status::no_device(&why);
            raw::without_signals(|| without_device(config, Some(began)))
        }
    };
    Some(publish(opened))
}

fn publish(opened: ProcessSession) -> &'static ProcessSession {
    // A session lives as long as the process, because connections refer to it. Nor may a child drop
    // the session of its parent.
    let opened: &'static ProcessSession = Box::leak(Box::new(opened));
    CURRENT.store(std::ptr::from_ref(opened).cast_mut(), Ordering::Release);
    last_thread::session_begins();
    opened
}

/// Like [`current`], for a client proposing SMC to this process. A process about to exit soon gets
/// a session without a device.
pub(crate) fn for_client() -> Option<&'static ProcessSession> {
    let config = config::get()?;
    {
        let _one_at_a_time = OPENING.lock();
        let known = raw_current().filter(|open| open.generation == fork::generation());
        if known.is_none() && !short_lived::is_worth_a_device() {
            status::device_skipped();
            return Some(publish(without_device(config, None)));
        }
    }
    current()
}

/// A session without a device, to decline all Proposals. `None`: the library does nothing in this
/// process.
pub(crate) fn declining() -> Option<&'static ProcessSession> {
    static DECLINING: AtomicPtr<ProcessSession> = AtomicPtr::new(std::ptr::null_mut());
    let config = config::get()?;
    let _one_at_a_time = OPENING.lock();
    let known = leaked(DECLINING.load(Ordering::Acquire));
    if let Some(open) = known.filter(|open: &&ProcessSession| open.generation == fork::generation())
    {
        return Some(open);
    }
    let opened = raw::without_signals(|| without_device(config, None));
    let opened: &'static ProcessSession = Box::leak(Box::new(opened));
    DECLINING.store(std::ptr::from_ref(opened).cast_mut(), Ordering::Release);
    Some(opened)
}

/// Whether the last attempt to open a device failed a moment ago, or none will be made.
pub(crate) fn lacks_device() -> bool {
    own_calls::found()
        || has_locked_memory()
        || raw_current().is_some_and(|open| {
            open.generation == fork::generation() && !open.has_device && open.is_fresh()
        })
}

/// Why TCP carries a connection that could have been on SMC with an open device.
pub(crate) fn no_device() -> Fallback {
    match own_calls::found() {
        true => Fallback::OwnCalls,
        false if has_locked_memory() => Fallback::NoDevice(LOCKED.into()),
        false => Fallback::NoDevice("none opens".into()),
    }
}

/// The generation of the process that has locked its future memory. A child of a fork has not.
static LOCKED_BY: AtomicU32 = AtomicU32::new(0);

const LOCKED: &str = "the program locks all memory that the process maps (mlockall)";

/// Notes that the kernel locks all memory mapped by the process from now on: no device opens.
pub(crate) fn note_locked_memory() {
    let now = fork::generation();
    if LOCKED_BY.swap(now, Ordering::Relaxed) != now {
        ism_sys::note_locked_memory();
        status::stays_on_tcp(LOCKED, opened().is_none());
    }
}

fn has_locked_memory() -> bool {
    LOCKED_BY.load(Ordering::Relaxed) == fork::generation()
}

fn raw_current() -> Option<&'static ProcessSession> {
    leaked(CURRENT.load(Ordering::Acquire))
}

/// Number of free descriptors required before the library opens a device. A device takes about
/// twenty, and the program needs some for further connections.
const FREE_FDS: usize = 36;
/// Upper bound of the numbers looked at for free ones.
const MOST_NUMBERS: u64 = 1024;

/// Whether this process may open so many more descriptors, with numbers from `lowest` on. The limit is
/// on numbers, and poll(2) tells which of them are free.
fn has_free_fds(descriptors: usize, lowest: c_int) -> bool {
    let left = own_copies::limit().saturating_sub(lowest.cast_unsigned().into());
    let numbers = (lowest..c_int::MAX).take(left.min(MOST_NUMBERS) as usize);
    let mut list: Vec<_> = numbers.map(|fd| libc::pollfd { fd, events: 0, revents: 0 }).collect();
    let _ = raw::ppoll(&mut list, Some(&timespec(Duration::ZERO)), None);
    list.iter().filter(|entry| entry.revents & libc::POLLNVAL != 0).count() >= descriptors
}

/// Copies a descriptor to a number above the numbers of a device.
pub(super) fn duplicate_above_device(fd: c_int) -> Result<OwnedFd, Errno> {
    let numbers = DriverLimit::take();
    raw::fcntl(fd, libc::F_DUPFD_CLOEXEC, numbers.lowest() + FREE_FDS as c_int)
        .map(|copy| owned(copy as c_int))
}

const FEW_DESCRIPTORS: &str = "too few descriptors are left (see ulimit -n)";

/// Reports, once, a process whose limit of descriptors allows no device. Such a process never tries to
/// open one, because no handshake begins.
pub(super) fn report_limit() {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    if !own_copies::allow_device() && !REPORTED.swap(true, Ordering::Relaxed) {
        status::no_device(FEW_DESCRIPTORS);
    }
}

/// Opens a session on the first free device. The error says why none opens. `patient`: whether to
/// try devices in use again for a moment.
fn open(config: &RunConfig, patient: bool) -> Result<ProcessSession, String> {
    if !own_copies::allow_device() {
        return Err(FEW_DESCRIPTORS.into());
    }
    let numbers = DriverLimit::take();
    let lowest = numbers.lowest();
    if !has_free_fds(FREE_FDS, lowest) {
        return Err(FEW_DESCRIPTORS.into());
    }
    // Above the duplicates of TCP sockets: the kernel closes the descriptors of a killed process in
    // the order of their numbers, and a peer should see the end of TCP before the end of the
    // device.
    ism_sys::set_lowest_descriptor(lowest);
    let _own = ism_sys::as_driver_thread();
    let mut left = match config.devices.is_empty() {
        true => smc_settings::find_fabric().map_err(|none| none.to_string())?.sockets,
        false => devices(&config.devices),
    };
    let (mut failed, mut taken, mut pauses) = (None, 0, PAUSES_MS.iter().filter(|_| patient));
    let (mut busy, began) = (String::new(), raw::monotonic_micros());
    while !left.is_empty() {
        let mut in_use = Vec::new();
        for socket in left {
            match open_device(config, &socket) {
                Ok(session) => return Ok(session),
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                    busy = error.to_string();
                    in_use.push(socket);
                }
                // The error names the device.
                Err(error) => failed = Some(error.to_string()),
            }
        }
        (left, taken) = match pauses.next() {
            Some(pause) if !in_use.is_empty() && raw::monotonic_micros() - began < PATIENCE => {
                std::thread::sleep(Duration::from_millis(*pause));
                (in_use, 0)
            }
            _ => (Vec::new(), in_use.len()),
        };
    }
    let why = match (failed, taken) {
        (Some(failed), 0) => failed,
        (Some(failed), taken) => format!("{failed}; {taken} more are taken by other processes"),
        (None, 0) => {
            let paths: Vec<_> = config.devices.iter().map(|path| path.to_string_lossy()).collect();
            format!("no device is at {}", paths.join(", "))
        }
        // For several devices their number says more.
        (None, 1) => busy,
        (None, taken) => format!("all {taken} devices are taken by other processes"),
    };
    Err(why)
}

/// Opens a session on this device, without a wait for the device.
fn open_device(config: &RunConfig, socket: &Path) -> std::io::Result<ProcessSession> {
    let mut stack = StackConfig::new(socket);
    apply_settings(&mut stack, config);
    stack.device_timeout = Duration::ZERO;
    stack.statistics = config.statistics_of_now().as_deref().map(statistics::path_in);
    let stack = Stack::open(stack)?;
    status::device_opened(socket);
    let due = AtomicU64::new(0);
    Ok(ProcessSession { generation: fork::generation(), stack, has_device: true, due })
}

/// Opens a session without a device, to leave all connections to TCP. `failed`: when an attempt at a
/// device began that failed. `smc stat` then shows the process, at the cost of a thread.
fn without_device(config: &RunConfig, failed: Option<u64>) -> ProcessSession {
    let mut stack = StackConfig::default();
    apply_settings(&mut stack, config);
    if failed.is_some() {
        stack.statistics = config.statistics_of_now().as_deref().map(statistics::path_in);
    } else {
        stack.rnics = Rnics::None;
    }
    let stack = match Stack::open(stack) {
        Ok(stack) => stack,
        // Without a device only the source of random numbers can fail.
        Err(_) => std::process::abort(),
    };
    let due = AtomicU64::new(due_after(failed.unwrap_or_else(raw::monotonic_micros)));
    ProcessSession { generation: fork::generation(), stack, has_device: false, due }
}

/// The session of this process, if a device is open.
pub(crate) fn opened() -> Option<&'static ProcessSession> {
    raw_current().filter(|open| open.generation == fork::generation() && open.has_device)
}

/// The descriptors of this process's devices and connections.
pub(crate) fn descriptors() -> Vec<c_int> {
    opened().map(|open| open.stack.descriptors()).unwrap_or_default()
}

/// The session for the relays of this process: the relays' own, if there is one.
pub(crate) fn of_relays() -> Option<&'static ProcessSession> {
    let known = raw_current().filter(|open| open.generation == fork::generation());
    known.or_else(declining)
}

fn apply_settings(stack: &mut StackConfig, config: &RunConfig) {
    if !config.eids.is_empty() {
        stack.eids.clone_from(&config.eids);
    }
    stack.traffic = worthwhile::table();
    stack.recv_buffer = config.buffer;
    stack.spin = config.spin;
    stack.outlive_device = config.outlive_device;
    stack.return_to_device = !config.stay_on_tcp;
    stack.detect_timeout = config.detect;
    // The server's program may accept a connection much later than the kernel.
    stack.clc_timeout = Duration::from_secs(30);
}

/// The devices; the entries of a directory in the order of their names.
fn devices(wanted: &[PathBuf]) -> Vec<PathBuf> {
    let mut sockets = Vec::new();
    for path in wanted {
        if path.is_dir() {
            sockets.extend(smc_settings::device_sockets(path).unwrap_or_default());
        } else {
            sockets.push(path.clone());
        }
    }
    sockets
}
