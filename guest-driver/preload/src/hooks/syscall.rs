// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `syscall`, a bypass of all other hooks: this hook calls the others for the relevant numbers.

use std::ffi::{c_int, c_ulong};

use libc::{off64_t, socklen_t};

use super::{
    bytes, clone, descriptors, exec, files, filters, fork_and_exit, linux_aio, locked_memory,
    readiness, rights, signals, sockets,
};
use crate::config;
use crate::hooks::within::within;
use crate::sys::raw::{self, Errno};
use crate::sys::user_memory::libc_result;
#[cfg(target_arch = "x86_64")]
use crate::sys::user_memory::{errno, set_errno};

/// Converts arguments to the types of a hook's parameters, and calls it.
macro_rules! call {
    ($room:ident :: $hook:ident ($($arg:expr => $type:ty),*)) => {
        // SAFETY: the program's arguments, as the system call takes them.
        unsafe { $room::$hook($($arg as $type),*) as i64 }
    };
}

/// `syscall`.
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn syscall(
    number: i64,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> i64 {
    if number == libc::SYS_exit {
        fork_and_exit::before_exit(a as c_int);
    }
    if config::get().is_some()
        && let Some(result) = by_hook(number, [a, b, c, d, e, f])
    {
        return result;
    }
    // SAFETY: the program's arguments, unchanged.
    libc_result(unsafe { raw::call(number, [a, b, c, d, e, f]) }) as i64
}

/// The numbers answered by [`by_hook`], and calls with an effect on the library.
#[cfg(target_arch = "x86_64")]
pub(super) const ANSWERED: [i64; 58] = [
    libc::SYS_io_uring_setup,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_recvmmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_dup,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_ioctl,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_epoll_create,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_io_submit,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_rt_sigaction,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mlockall,
    libc::SYS_prctl,
    libc::SYS_seccomp,
];

/// The result of a system call by an instruction of the program, as from the kernel. `None`: the call
/// is the kernel's. The program's `errno` stays as it is.
#[cfg(target_arch = "x86_64")]
pub(super) fn answer(number: i64, arguments: [usize; 6]) -> Option<isize> {
    config::get()?;
    if number == libc::SYS_exit {
        fork_and_exit::before_exit(arguments[0] as c_int);
        return None;
    }
    // Go listens by MPTCP where the kernel has MPTCP, and by TCP elsewhere.
    if number == libc::SYS_socket && arguments[2] as c_int == libc::IPPROTO_MPTCP {
        return Some(-(libc::EPROTONOSUPPORT as isize));
    }
    let error = errno();
    let result = by_vfork(number, arguments).or_else(|| by_hook(number, arguments));
    let result = result.map(|result| match result {
        -1 => -(errno() as isize),
        result => result as isize,
    });
    set_errno(error);
    result
}

/// A child on the caller's stack and memory until it executes a program. While there are connections on
/// SMC or on their way to SMC, a fork makes the child, as for libc's `vfork`.
#[cfg(target_arch = "x86_64")]
fn by_vfork(number: i64, arguments: [usize; 6]) -> Option<i64> {
    const BOTH: u64 = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
    let [a, b, ..] = arguments;
    let (flags, stack) = match number {
        libc::SYS_clone => (a as u64, b as u64),
        libc::SYS_clone3 => words_of_clone3(a, b).map(|words| (words[0], words[5]))?,
        libc::SYS_vfork => (BOTH, 0),
        _ => return None,
    };
    if flags & BOTH != BOTH || stack != 0 || !clone::is_fork(flags & !BOTH) {
        return None;
    }
    if !super::escapes::is_vfork_a_fork() {
        return None;
    }
    if number != libc::SYS_clone3 {
        let flags = if number == libc::SYS_vfork { libc::SIGCHLD as u64 } else { flags & !BOTH };
        let mut arguments = arguments;
        arguments[0] = flags as usize;
        arguments[1] = 0;
        return Some(fork_by(libc::SYS_clone, arguments));
    }
    // A copy of the arguments, with other flags.
    let mut words = [0u64; 16];
    let room = size_of_val(&words);
    // The kernel refuses a longer structure with anything in it.
    let length = b.min(room);
    // SAFETY: the program's arguments, of the length passed by the program.
    unsafe { std::ptr::copy_nonoverlapping(a as *const u8, words.as_mut_ptr().cast(), length) };
    words[0] &= !BOTH;
    Some(fork_by(number, [words.as_ptr() as usize, length, 0, 0, 0, 0]))
}

fn by_hook(number: i64, [a, b, c, d, e, f]: [usize; 6]) -> Option<i64> {
    Some(match number {
        // The library could not see calls by io_uring. Without io_uring, programs use epoll.
        libc::SYS_io_uring_setup => libc_result(Err(Errno(libc::ENOSYS))) as i64,
        libc::SYS_socket => call!(sockets::socket(a => c_int, b => c_int, c => c_int)),
        libc::SYS_connect => call!(sockets::connect(a => c_int, b => *const _, c => socklen_t)),
        libc::SYS_listen => call!(sockets::listen(a => c_int, b => c_int)),
        libc::SYS_accept => call!(sockets::accept(a => c_int, b => *mut _, c => *mut _)),
        libc::SYS_accept4 => {
            call!(sockets::accept4(a => c_int, b => *mut _, c => *mut _, d => c_int))
        }
        libc::SYS_shutdown => call!(sockets::shutdown(a => c_int, b => c_int)),
        libc::SYS_getsockname => call!(sockets::getsockname(a => c_int, b => *mut _, c => *mut _)),
        libc::SYS_getpeername => call!(sockets::getpeername(a => c_int, b => *mut _, c => *mut _)),
        libc::SYS_getsockopt => call!(sockets::getsockopt(
            a => c_int, b => c_int, c => c_int, d => *mut _, e => *mut _)),
        libc::SYS_setsockopt => call!(sockets::setsockopt(
            a => c_int, b => c_int, c => c_int, d => *const _, e => socklen_t)),
        libc::SYS_read => call!(bytes::read(a => c_int, b => *mut _, c => usize)),
        libc::SYS_write => call!(bytes::write(a => c_int, b => *const _, c => usize)),
        libc::SYS_readv => call!(bytes::readv(a => c_int, b => *const _, c => c_int)),
        libc::SYS_writev => call!(bytes::writev(a => c_int, b => *const _, c => c_int)),
        libc::SYS_recvfrom => call!(bytes::recvfrom(
            a => c_int, b => *mut _, c => usize, d => c_int, e => *mut _, f => *mut _)),
        libc::SYS_sendto => call!(bytes::sendto(
            a => c_int, b => *const _, c => usize, d => c_int, e => *const _, f => socklen_t)),
        libc::SYS_recvmsg => call!(bytes::recvmsg(a => c_int, b => *mut _, c => c_int)),
        libc::SYS_sendmsg => call!(bytes::sendmsg(a => c_int, b => *const _, c => c_int)),
        libc::SYS_recvmmsg => call!(bytes::recvmmsg(
            a => c_int, b => *mut _, c => u32, d => c_int, e => *mut _)),
        libc::SYS_sendmmsg => {
            call!(bytes::sendmmsg(a => c_int, b => *mut _, c => u32, d => c_int))
        }
        libc::SYS_sendfile => {
            call!(files::sendfile(a => c_int, b => c_int, c => *mut off64_t, d => usize))
        }
        libc::SYS_splice => call!(files::splice(a => c_int, b => *mut off64_t, c => c_int,
            d => *mut off64_t, e => usize, f => u32)),
        libc::SYS_dup => call!(descriptors::dup(a => c_int)),
        libc::SYS_dup3 => call!(descriptors::dup3(a => c_int, b => c_int, c => c_int)),
        libc::SYS_fcntl => call!(descriptors::fcntl(a => c_int, b => c_int, c => u64)),
        libc::SYS_ioctl => call!(descriptors::ioctl(a => c_int, b => u64, c => *mut c_int)),
        libc::SYS_close => call!(descriptors::close(a => c_int)),
        libc::SYS_close_range => {
            call!(descriptors::close_range(a => u32, b => u32, c => c_int))
        }
        libc::SYS_ppoll => {
            call!(readiness::ppoll(a => *mut _, b => u64, c => *const _, d => *const _))
        }
        libc::SYS_pselect6 => {
            let sets = [b, c, d].map(|set| set as *mut _);
            let (time, mask) = (e as *mut _, f as *const _);
            // SAFETY: the program's arguments, as the system call takes them.
            libc_result(unsafe { readiness::pselect6(a as c_int, sets, time, mask) }?) as i64
        }
        // The offset is in two halves. The second one is empty.
        libc::SYS_preadv2 => call!(bytes::preadv2(
            a => c_int, b => *const _, c => c_int, d => off64_t, f => c_int)),
        libc::SYS_pwritev2 => call!(bytes::pwritev2(
            a => c_int, b => *const _, c => c_int, d => off64_t, f => c_int)),
        libc::SYS_epoll_create1 => call!(readiness::epoll_create1(a => c_int)),
        libc::SYS_epoll_ctl => {
            call!(readiness::epoll_ctl(a => c_int, b => c_int, c => c_int, d => *mut _))
        }
        libc::SYS_epoll_pwait => call!(readiness::epoll_pwait(
            a => c_int, b => *mut _, c => c_int, d => c_int, e => *const _)),
        libc::SYS_epoll_pwait2 => call!(readiness::epoll_pwait2(
            a => c_int, b => *mut _, c => c_int, d => *const _, e => *const _)),
        libc::SYS_io_submit => {
            // SAFETY: the program's arguments, as the system call takes them.
            libc_result(unsafe { linux_aio::submit(a, b as i64, c as *const _) }) as i64
        }
        libc::SYS_execve => call!(exec::execve(a => *const _, b => *const _, c => *const _)),
        libc::SYS_execveat => call!(exec::execveat(
            a => c_int, b => *const _, c => *const _, d => *const _, e => c_int)),
        libc::SYS_clone if clone::is_fork(a as u64) && b == 0 => {
            fork_by(number, [a, b, c, d, e, f])
        }
        libc::SYS_clone3 if is_fork_of(a, b) => fork_by(number, [a, b, c, d, e, f]),
        libc::SYS_clone => {
            clone::note(a as u64);
            return None;
        }
        libc::SYS_clone3 => {
            clone::note(flags_of(a, b).unwrap_or(libc::CLONE_VM as u64));
            return None;
        }
        libc::SYS_rt_sigaction => {
            // SAFETY: the program's arguments, as the system call takes them.
            return unsafe { signals::rt_sigaction(a as c_int, b as *const _, c as *mut _, d) };
        }
        _ => {
            return of_process(number, [a, b, c, d, e])
                .or_else(|| by_old_number(number, [a, b, c, d, e, f]));
        }
    })
}

/// Calls with an effect on the process.
fn of_process(number: i64, [a, b, c, d, e]: [usize; 5]) -> Option<i64> {
    Some(match number {
        libc::SYS_exit_group => {
            within(fork_and_exit::close_connections);
            return None;
        }
        libc::SYS_setuid => call!(rights::setuid(a => u32)),
        libc::SYS_setreuid => call!(rights::setreuid(a => u32, b => u32)),
        libc::SYS_setresuid => call!(rights::setresuid(a => u32, b => u32, c => u32)),
        libc::SYS_chroot => call!(rights::chroot(a => *const _)),
        libc::SYS_unshare => call!(clone::unshare(a => c_int)),
        libc::SYS_setns => call!(clone::setns(a => c_int, b => c_int)),
        libc::SYS_mlockall => call!(locked_memory::mlockall(a => c_int)),
        libc::SYS_prctl => call!(filters::prctl(
            a => c_int, b => c_ulong, c => c_ulong, d => c_ulong, e => c_ulong)),
        libc::SYS_seccomp => libc_result(filters::seccomp([a, b, c, d, e, 0])) as i64,
        _ => return None,
    })
}

/// Calls missing on newer architectures.
#[cfg(target_arch = "x86_64")]
fn by_old_number(number: i64, [a, b, c, d, e, f]: [usize; 6]) -> Option<i64> {
    Some(match number {
        libc::SYS_dup2 => call!(descriptors::dup2(a => c_int, b => c_int)),
        libc::SYS_select => call!(readiness::select(
            a => c_int, b => *mut _, c => *mut _, d => *mut _, e => *mut _)),
        libc::SYS_epoll_create => call!(readiness::epoll_create(a => c_int)),
        libc::SYS_poll => call!(readiness::poll(a => *mut _, b => u64, c => c_int)),
        libc::SYS_epoll_wait => {
            call!(readiness::epoll_wait(a => c_int, b => *mut _, c => c_int, d => c_int))
        }
        libc::SYS_fork => fork_by(number, [a, b, c, d, e, f]),
        libc::SYS_vfork => {
            clone::note(libc::CLONE_VM as u64);
            return None;
        }
        _ => return None,
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn by_old_number(_number: i64, _arguments: [usize; 6]) -> Option<i64> {
    None
}

/// The words of the first version of the arguments of `clone3`. `at`, `len`: address and length passed
/// by the program.
fn words_of_clone3(at: usize, len: usize) -> Option<[u64; 8]> {
    let has_all = at != 0 && len >= size_of::<[u64; 8]>();
    // SAFETY: the program's arguments, of the length passed by the program.
    has_all.then(|| unsafe { (at as *const [u64; 8]).read_unaligned() })
}

/// The flags of a `clone3`.
fn flags_of(at: usize, len: usize) -> Option<u64> {
    words_of_clone3(at, len).map(|words| words[0])
}

/// Whether a `clone3` makes a process as `fork` does, on the caller's stack.
fn is_fork_of(at: usize, len: usize) -> bool {
    words_of_clone3(at, len).is_some_and(|words| clone::is_fork(words[0]) && words[5] == 0)
}

/// A fork without libc. libc would have called the handlers.
fn fork_by(number: i64, arguments: [usize; 6]) -> i64 {
    // SAFETY: the program's arguments, unchanged; the child goes on with a copy of this stack.
    let make = || unsafe { raw::call(number, arguments) };
    libc_result(clone::fork_by(make, |result| *result == Ok(0))) as i64
}
