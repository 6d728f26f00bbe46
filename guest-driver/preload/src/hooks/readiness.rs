// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hooks of poll, select and epoll.

use std::ffi::{c_int, c_ulong};
use std::time::Duration;

use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};

use guest_driver::interpose::SignalMask;

use crate::config;
use crate::hooks::libc_symbols::call_libc;
use crate::hooks::within::{cancellable, within};
use crate::io::{epoll_ctl, epoll_wait};
use crate::relay::take_back;
use crate::socket::table::DESCRIPTORS;
use crate::socket::{descriptors, registrations};
use crate::sys::raw::{Errno, SysResult};
use crate::sys::user_memory::{self, libc_result};

/// The program's list.
///
/// # Safety
/// `list` leads to `n` entries.
unsafe fn entries<'a>(list: *mut pollfd, n: nfds_t) -> &'a mut [pollfd] {
    if user_memory::is_nowhere(list, n as usize) || n == 0 || n > 1 << 24 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(list, n as usize) }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn poll(
    list: *mut pollfd,
    n: c_ulong,
    timeout: c_int,
) -> c_int {
    // SAFETY: the program's list.
    let entries = unsafe { entries(list, n) };
    if crate::io::poll::has_known(entries) {
        let timeout = user_memory::millis(timeout);
        let result = cancellable(|| crate::io::poll::poll(entries, timeout, None));
        return libc_result(result) as c_int;
    }
    poll_natively(list, n, timeout)
}

#[cfg(target_arch = "x86_64")]
fn poll_natively(list: *mut pollfd, n: c_ulong, timeout: c_int) -> c_int {
    call_libc!(poll, libc::SYS_poll, (list: *mut pollfd, n: c_ulong, timeout: c_int) -> c_int)
}

#[cfg(not(target_arch = "x86_64"))]
fn poll_natively(list: *mut pollfd, n: c_ulong, timeout: c_int) -> c_int {
    call_libc!(poll, -1, (list: *mut pollfd, n: c_ulong, timeout: c_int) -> c_int)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn ppoll(
    list: *mut pollfd,
    n: c_ulong,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's list.
    let entries = unsafe { entries(list, n) };
    // SAFETY: the program's time.
    if crate::io::poll::has_known(entries) && !unsafe { user_memory::is_no_time(timeout) } {
        // SAFETY: as above.
        let (timeout, mask) = unsafe { (user_memory::timespec(timeout), user_memory::mask(mask)) };
        return libc_result(cancellable(|| crate::io::poll::poll(entries, timeout, mask))) as c_int;
    }
    call_libc!(ppoll, libc::SYS_ppoll, (list: *mut pollfd, n: c_ulong, timeout: *const timespec,
          mask: *const sigset_t) -> c_int)
}

/// A set of `select` as words.
///
/// # Safety
/// `set` is null or has room for `n` descriptors.
unsafe fn words<'a>(set: *mut fd_set, n: c_int) -> Option<&'a mut [u64]> {
    let words = usize::try_from(n).unwrap_or(0).div_ceil(64);
    if set.is_null() {
        return None;
    }
    // SAFETY: the caller's promise; the kernel works on whole words, too.
    Some(unsafe { std::slice::from_raw_parts_mut(set.cast(), words) })
}

/// `select`, if the library knows a descriptor in the sets.
///
/// # Safety
/// The sets are null or have room for `n` descriptors.
unsafe fn select_here(
    n: c_int,
    [read, write, except]: [*mut fd_set; 3],
    timeout: Option<Duration>,
    mask: Option<SignalMask>,
) -> Option<SysResult> {
    config::get()?;
    if [read, write, except].iter().any(|set| !set.is_null() && user_memory::is_nowhere(*set, 1)) {
        return None;
    }
    // SAFETY: the caller's promise.
    let (mut read, mut write, mut except) =
        unsafe { (words(read, n), words(write, n), words(except, n)) };
    let sets = (&mut read, &mut write, &mut except);
    crate::io::poll::select(usize::try_from(n).unwrap_or(0).min(65536), sets, timeout, mask)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn select(
    n: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the program's time.
    let time = unsafe { timeout.as_ref() }.map(|time| {
        let micros = u64::try_from(time.tv_usec).unwrap_or(0);
        Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0)) + Duration::from_micros(micros)
    });
    let begun = std::time::Instant::now();
    let sets = [read, write, except];
    // SAFETY: the program's sets.
    if let Some(result) = cancellable(|| unsafe { select_here(n, sets, time, None) }) {
        if let Some(time) = time {
            let left = time.saturating_sub(begun.elapsed());
            // Linux stores the remaining time.
            // SAFETY: the program's time.
            unsafe {
                (*timeout).tv_sec = left.as_secs() as i64;
                (*timeout).tv_usec = left.subsec_micros().into();
            }
        }
        return libc_result(result) as c_int;
    }
    call_libc!(select, -1, (n: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
          timeout: *mut timeval) -> c_int)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pselect(
    n: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's time and mask.
    let (time, signals) = unsafe { (user_memory::timespec(timeout), user_memory::mask(mask)) };
    let sets = [read, write, except];
    // SAFETY: the program's time.
    if !unsafe { user_memory::is_no_time(timeout) }
        // SAFETY: the program's sets.
        && let Some(result) = cancellable(|| unsafe { select_here(n, sets, time, signals) })
    {
        return libc_result(result) as c_int;
    }
    call_libc!(pselect, -1, (n: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
          timeout: *const timespec, mask: *const sigset_t) -> c_int)
}

/// The last argument of the system call `pselect6`.
#[repr(C)]
pub(super) struct MaskArgument {
    mask: *const sigset_t,
    size: usize,
}

/// The system call `pselect6`, if the library knows a descriptor in the sets. Stores the remaining
/// time, as the kernel does.
///
/// # Safety
/// As the system call.
pub(super) unsafe fn pselect6(
    n: c_int,
    sets: [*mut fd_set; 3],
    timeout: *mut timespec,
    mask: *const MaskArgument,
) -> Option<SysResult> {
    // SAFETY: the program's time and mask.
    let (time, mask) = unsafe {
        let mask = mask.as_ref().map_or(std::ptr::null(), |argument| argument.mask);
        (user_memory::timespec(timeout), user_memory::mask(mask))
    };
    // SAFETY: as above.
    if unsafe { user_memory::is_no_time(timeout) } {
        return None;
    }
    let begun = std::time::Instant::now();
    // SAFETY: the program's sets.
    let result = cancellable(|| unsafe { select_here(n, sets, time, mask) })?;
    if let Some(time) = time {
        let left = time.saturating_sub(begun.elapsed());
        // SAFETY: the program's time, which is not null.
        unsafe { timeout.write(crate::sys::timespec(left)) };
    }
    Some(result)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn epoll_create(size: c_int) -> c_int {
    let fd = call_libc!(epoll_create, -1, (size: c_int) -> c_int);
    if fd >= 0 {
        within(|| {
            descriptors::remove_stale(fd);
            descriptors::add_epoll_set(fd);
        });
    }
    fd
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn epoll_create1(flags: c_int) -> c_int {
    let fd = call_libc!(epoll_create1, libc::SYS_epoll_create1, (flags: c_int) -> c_int);
    if fd >= 0 {
        within(|| {
            descriptors::remove_stale(fd);
            descriptors::add_epoll_set(fd);
        });
    }
    fd
}

/// `epoll_ctl` for a known descriptor. `None`: the kernel carries out the call.
///
/// # Safety
/// `event` leads to an event, or nowhere.
unsafe fn control_here(
    set: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> Option<SysResult> {
    let descriptor = take_back::hold(fd)?;
    let Some(socket) = descriptor.stream() else {
        // A set in a set: the kernel polls the inner one.
        registrations::hand_to_kernel(fd);
        return None;
    };
    if op != libc::EPOLL_CTL_DEL && user_memory::is_nowhere(event, 1) {
        return Some(Err(Errno(libc::EFAULT)));
    }
    let event = match op {
        libc::EPOLL_CTL_DEL => epoll_event { events: 0, u64: 0 },
        // SAFETY: the program's event.
        _ => unsafe { event.read_unaligned() },
    };
    // Copied, because the structure is packed.
    let event = (event.events, event.u64);
    Some(epoll_ctl::control(set, op, fd, &descriptor, socket, event))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn epoll_ctl(
    set: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the program's event.
    let here = || unsafe { control_here(set, op, fd, event) };
    if DESCRIPTORS.has(fd)
        && let Some(result) = within(here)
    {
        return libc_result(result) as c_int;
    }
    call_libc!(epoll_ctl, libc::SYS_epoll_ctl, (set: c_int, op: c_int, fd: c_int,
          event: *mut epoll_event) -> c_int)
}

/// Waits for a known set. `None`: the kernel carries out the call.
///
/// # Safety
/// `list` leads to room for `max` events.
unsafe fn wait_here(
    set: c_int,
    list: *mut epoll_event,
    max: c_int,
    timeout: Option<Duration>,
    mask: Option<SignalMask>,
) -> Option<SysResult> {
    let descriptor = DESCRIPTORS.get(set)?;
    let room = usize::try_from(max).ok().filter(|room| *room > 0)?;
    if user_memory::is_nowhere(list, room) {
        // The kernel reports the error when there is an event to write.
        let mut event = [epoll_event { events: 0, u64: 0 }];
        let result = epoll_wait::wait(descriptor.set()?, set, &mut event, timeout, mask)?;
        return Some(match result {
            Ok(1..) => Err(Errno(libc::EFAULT)),
            other => other,
        });
    }
    // SAFETY: the caller's promise.
    let out = unsafe { std::slice::from_raw_parts_mut(list, room.min(1 << 17)) };
    epoll_wait::wait(descriptor.set()?, set, out, timeout, mask)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn epoll_wait(
    set: c_int,
    list: *mut epoll_event,
    max: c_int,
    timeout: c_int,
) -> c_int {
    if DESCRIPTORS.has(set) {
        let timeout = user_memory::millis(timeout);
        // SAFETY: the program's list.
        if let Some(result) = cancellable(|| unsafe { wait_here(set, list, max, timeout, None) }) {
            return libc_result(result) as c_int;
        }
    }
    call_libc!(epoll_wait, -1, (set: c_int, list: *mut epoll_event, max: c_int, timeout: c_int)
          -> c_int)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn epoll_pwait(
    set: c_int,
    list: *mut epoll_event,
    max: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    if DESCRIPTORS.has(set) {
        // SAFETY: the program's list and mask.
        let result = cancellable(|| unsafe {
            wait_here(set, list, max, user_memory::millis(timeout), user_memory::mask(mask))
        });
        if let Some(result) = result {
            return libc_result(result) as c_int;
        }
    }
    call_libc!(epoll_pwait, -1, (set: c_int, list: *mut epoll_event, max: c_int, timeout: c_int,
          mask: *const sigset_t) -> c_int)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C-unwind" fn epoll_pwait2(
    set: c_int,
    list: *mut epoll_event,
    max: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's time.
    if DESCRIPTORS.has(set) && !unsafe { user_memory::is_no_time(timeout) } {
        // SAFETY: the program's time, list and mask.
        let result = cancellable(|| unsafe {
            wait_here(set, list, max, user_memory::timespec(timeout), user_memory::mask(mask))
        });
        if let Some(result) = result {
            return libc_result(result) as c_int;
        }
    }
    call_libc!(epoll_pwait2, -1, (set: c_int, list: *mut epoll_event, max: c_int,
          timeout: *const timespec, mask: *const sigset_t) -> c_int)
}
