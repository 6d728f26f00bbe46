// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! io_uring, with system calls by libc's `syscall` or without libc, as liburing makes them.

use std::ffi::{c_int, c_void};
use std::mem::{size_of, zeroed};
use std::sync::atomic::{AtomicU32, Ordering};

use super::bytes::got;
use super::{around, fd, names};
use crate::script::Words;

/// `struct io_sqring_offsets` and `struct io_cqring_offsets`, as far as they are used here.
#[repr(C)]
#[derive(Default)]
struct Offsets {
    head: u32,
    tail: u32,
    mask: u32,
    entries: u32,
    /// Flags and `dropped` of the submission ring, `overflow` and `cqes` of the completion ring.
    fifth: u32,
    sixth: u32,
    array: u32,
    more: [u32; 3],
}

/// `struct io_uring_params`
#[repr(C)]
#[derive(Default)]
struct Parameters {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread: [u32; 2],
    features: u32,
    wq_fd: u32,
    reserved: [u32; 3],
    sq: Offsets,
    cq: Offsets,
}

/// `struct io_uring_sqe`
#[repr(C)]
#[derive(Clone, Copy)]
struct Submission {
    opcode: u8,
    flags: u8,
    priority: u16,
    fd: i32,
    offset: u64,
    address: u64,
    len: u32,
    op_flags: u32,
    user_data: u64,
    rest: [u64; 3],
}

const SETUP: i64 = libc::SYS_io_uring_setup;
const ENTER: i64 = libc::SYS_io_uring_enter;

/// Whether the kernel has io_uring and this process may use it.
pub(crate) fn is_available() -> bool {
    let mut parameters = Parameters::default();
    let fd = around::inline(SETUP, [2, (&raw mut parameters) as usize, 0, 0, 0, 0]);
    if fd >= 0 {
        unsafe { libc::close(fd as c_int) };
    }
    fd >= 0
}

/// One operation in a ring of its own; returns its result, or a negative error.
fn submit(by_libc: bool, submission: Submission) -> isize {
    let mut parameters = Parameters::default();
    let ring = around::call(by_libc, SETUP, [2, (&raw mut parameters) as usize, 0, 0, 0, 0]);
    if ring < 0 {
        return ring;
    }
    let map = |len: usize, offset: i64| unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let none = std::ptr::null_mut();
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let at = libc::mmap(none, len, protection, flags, ring as c_int, offset);
        assert_ne!(at, libc::MAP_FAILED);
        at.cast::<u8>()
    };
    let (sq, cq) = (&parameters.sq, &parameters.cq);
    let submissions = map(sq.array as usize + 4 * parameters.sq_entries as usize, 0);
    let completions = map(cq.sixth as usize + 16 * parameters.cq_entries as usize, 0x800_0000);
    let entries = map(size_of::<Submission>() * parameters.sq_entries as usize, 0x1000_0000);
    unsafe {
        entries.cast::<Submission>().write(submission);
        submissions.add(sq.array as usize).cast::<u32>().write(0);
        let tail = &*submissions.add(sq.tail as usize).cast::<AtomicU32>();
        // Release: the kernel reads the entry after the tail.
        tail.store(1, Ordering::Release);
        // IORING_ENTER_GETEVENTS
        let entered = around::call(by_libc, ENTER, [ring as usize, 1, 1, 1, 0, 0]);
        let result = match entered {
            ..0 => entered,
            // The result follows the eight bytes of user data.
            _ => completions.add(cq.sixth as usize + 8).cast::<i32>().read() as isize,
        };
        for (at, len) in [
            (submissions, sq.array as usize + 4 * parameters.sq_entries as usize),
            (completions, cq.sixth as usize + 16 * parameters.cq_entries as usize),
            (entries, size_of::<Submission>() * parameters.sq_entries as usize),
        ] {
            libc::munmap(at.cast::<c_void>(), len);
        }
        libc::close(ring as c_int);
        result
    }
}

/// The operation without a ring, as programs do it on a kernel without io_uring.
fn without_ring(op: &str, of: &Submission) -> isize {
    let (fd, at, len) = (of.fd, of.address as *mut c_void, of.len as usize);
    let mut polled = libc::pollfd { fd, events: of.op_flags as i16, revents: 0 };
    let result = unsafe {
        match op {
            "nop" => 0,
            "poll" => libc::poll(&raw mut polled, 1, -1) as isize,
            "accept" => libc::accept(fd, std::ptr::null_mut(), std::ptr::null_mut()) as isize,
            "close" => libc::close(fd) as isize,
            "read" => libc::read(fd, at, len),
            "write" => libc::write(fd, at, len),
            "send" => libc::send(fd, at, len, 0),
            "recv" => libc::recv(fd, at, len, 0),
            _ => libc::shutdown(fd, len as c_int) as isize,
        }
    };
    match (op, result) {
        (_, ..0) => -(std::io::Error::last_os_error().raw_os_error().unwrap() as isize),
        ("poll", _) => polled.revents as isize,
        _ => result,
    }
}

/// `uring-OP` without libc, `uring-sys-OP` by `syscall`.
pub(super) fn operate(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    let op = op.strip_prefix("uring-")?;
    let (by_libc, op) = op.strip_prefix("sys-").map_or((false, op), |op| (true, op));
    let mut submission: Submission = unsafe { zeroed() };
    submission.fd = fd(name);
    let mut room = Vec::new();
    submission.opcode = match op {
        "nop" => 0,
        "poll" => 6,
        "accept" => 13,
        "close" => 19,
        "read" => 22,
        "write" => 23,
        "send" => 26,
        "recv" => 27,
        "shutdown" => 34,
        _ => return None,
    };
    match op {
        "read" | "recv" => room = vec![0u8; usize::try_from(words.number()).unwrap()],
        "write" | "send" => room = words.data(),
        "poll" => submission.op_flags = names::poll_events(&words.word()) as u32,
        "accept" => submission.fd = fd("l"),
        "shutdown" => submission.len = words.number() as u32,
        _ => {}
    }
    if !room.is_empty() {
        submission.address = room.as_mut_ptr() as u64;
        submission.len = room.len() as u32;
    }
    if matches!(op, "read" | "write") {
        submission.offset = u64::MAX;
    }
    let mut result = submit(by_libc, submission);
    if !by_libc && result == -(libc::ENOSYS as isize) {
        result = without_ring(op, &submission);
    }
    Some(match (result, op) {
        (..0, _) => format!("-1 {}", names::error_name(-result as c_int)),
        (_, "read" | "recv") => got(result, &room),
        (_, "poll") => names::show_poll(result as i16),
        (_, "accept") => super::named(name, result as c_int),
        _ => result.to_string(),
    })
}
