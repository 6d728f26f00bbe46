// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls that read and write once.

use std::ffi::{c_int, c_void};
use std::mem::{size_of, zeroed};

use super::{fd, names, ret, show};
use crate::script::Words;

/// A pointer into no memory.
fn nowhere() -> *mut c_void {
    std::ptr::without_provenance_mut(8)
}

/// The answer for a call that read into `room`.
pub(super) fn got(n: isize, room: &[u8]) -> String {
    match usize::try_from(n) {
        Ok(n) => format!("{n} {}", show(&room[..n.min(room.len())])),
        Err(_) => ret(-1),
    }
}

/// Halves of a buffer as a list of two, and an empty one between them.
fn halves(pointer: *mut u8, n: usize) -> [libc::iovec; 3] {
    let half = n / 2;
    let piece = |at: usize, len| libc::iovec {
        iov_base: pointer.wrapping_add(at).cast::<c_void>(),
        iov_len: len,
    };
    [piece(0, half), piece(half, 0), piece(half, n - half)]
}

fn message(iov: &mut [libc::iovec]) -> libc::msghdr {
    let mut header: libc::msghdr = unsafe { zeroed() };
    (header.msg_iov, header.msg_iovlen) = (iov.as_mut_ptr(), iov.len());
    header
}

fn write(op: &str, fd: c_int, words: &mut Words<'_>) -> String {
    let data = words.data();
    let flags = names::flags("MSG_", &words.word());
    let (pointer, n) = (data.as_ptr().cast::<c_void>(), data.len());
    let mut iov = halves(data.as_ptr().cast_mut(), n);
    let count = iov.len() as c_int;
    ret(unsafe {
        match op {
            "send" => libc::send(fd, pointer, n, flags),
            "write" => libc::write(fd, pointer, n),
            "sendto" => libc::sendto(fd, pointer, n, flags, std::ptr::null(), 0),
            "sendto-address" => {
                let addr: libc::sockaddr_in = zeroed();
                libc::sendto(fd, pointer, n, flags, (&raw const addr).cast(), 16)
            }
            "writev" => libc::writev(fd, iov.as_ptr(), count),
            "pwrite" => libc::pwrite(fd, pointer, n, 0),
            "pwritev" => libc::pwritev(fd, iov.as_ptr(), count, 0),
            "pwritev2" => libc::pwritev2(fd, iov.as_ptr(), count, -1, flags),
            "sendmsg" => libc::sendmsg(fd, &message(&mut iov), flags),
            // Two messages with the same bytes; the answer is the number of messages.
            _ => {
                let one = libc::mmsghdr { msg_hdr: message(&mut iov), msg_len: 0 };
                let mut list = [one, one];
                let sent = libc::sendmmsg(fd, list.as_mut_ptr(), 2, flags);
                if sent > 0 {
                    return format!("{sent} of {}", list[0].msg_len);
                }
                sent as isize
            }
        }
    })
}

fn read_message(op: &str, fd: c_int, room: &mut [u8], flags: c_int) -> String {
    let mut control = [0u64; 32];
    let mut iov = halves(room.as_mut_ptr(), room.len());
    let mut header = message(&mut iov);
    let mut name: libc::sockaddr_storage = unsafe { zeroed() };
    (header.msg_name, header.msg_namelen) = ((&raw mut name).cast(), 128);
    (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), 256);
    if op == "recvmmsg" {
        let half = room.len() / 2;
        let mut pieces = halves(room.as_mut_ptr(), room.len());
        let (first, second) = pieces.split_at_mut(1);
        let one = |iov: &mut [libc::iovec]| libc::mmsghdr { msg_hdr: message(iov), msg_len: 0 };
        let mut list = [one(first), one(&mut second[1..])];
        let none = std::ptr::null_mut();
        let n = unsafe { libc::recvmmsg(fd, list.as_mut_ptr(), 2, flags, none) };
        if n < 0 {
            return ret(-1);
        }
        let first = show(&room[..list[0].msg_len as usize]);
        let second = show(&room[half..half + list[1].msg_len as usize]);
        return format!("{n} {first} {second}");
    }
    let n = unsafe { libc::recvmsg(fd, &mut header, flags) };
    let text = got(n, room);
    if n < 0 {
        return text;
    }
    let flags = names::show_msg_flags(header.msg_flags);
    format!("{text} flags {flags} name {} control {}", header.msg_namelen, header.msg_controllen)
}

fn read(op: &str, fd: c_int, words: &mut Words<'_>) -> String {
    let mut room = vec![b'.'; usize::try_from(words.number()).unwrap()];
    let flags = names::flags("MSG_", &words.word());
    if matches!(op, "recvmsg" | "recvmmsg") {
        return read_message(op, fd, &mut room, flags);
    }
    let (pointer, n) = (room.as_mut_ptr().cast::<c_void>(), room.len());
    let iov = halves(room.as_mut_ptr(), n);
    let count = iov.len() as c_int;
    let done = unsafe {
        match op {
            "recv" => libc::recv(fd, pointer, n, flags),
            "read" => libc::read(fd, pointer, n),
            "recvfrom" => {
                let mut addr: libc::sockaddr_storage = zeroed();
                let mut len = size_of::<libc::sockaddr_storage>() as u32;
                let done = libc::recvfrom(fd, pointer, n, flags, (&raw mut addr).cast(), &mut len);
                return format!("{} address {len}", got(done, &room));
            }
            "readv" => libc::readv(fd, iov.as_ptr(), count),
            "pread" => libc::pread(fd, pointer, n, 0),
            "preadv" => libc::preadv(fd, iov.as_ptr(), count, 0),
            _ => libc::preadv2(fd, iov.as_ptr(), count, -1, flags),
        }
    };
    got(done, &room)
}

/// Calls with pointers into no memory, and with none.
fn bad(op: &str, fd: c_int, words: &mut Words<'_>) -> Option<String> {
    let iov = [libc::iovec { iov_base: nowhere(), iov_len: 10 }];
    let none = std::ptr::null_mut::<c_void>();
    Some(ret(unsafe {
        match op {
            "recv-nowhere" => libc::recv(fd, nowhere(), 10, 0),
            "read-nowhere" => libc::read(fd, nowhere(), 10),
            "readv-nowhere" => libc::readv(fd, iov.as_ptr(), 1),
            "readv-bad-list" => libc::readv(fd, nowhere().cast(), 1),
            "readv-many" => libc::readv(fd, iov.as_ptr(), 5000),
            "recvmsg-nowhere" => libc::recvmsg(fd, nowhere().cast(), 0),
            "send-nowhere" => libc::send(fd, nowhere(), 10, 0),
            "write-nowhere" => libc::write(fd, nowhere(), 10),
            "writev-nowhere" => libc::writev(fd, iov.as_ptr(), 1),
            "readv-huge" | "writev-huge" => {
                let huge = [libc::iovec { iov_base: nowhere(), iov_len: usize::MAX }];
                match op {
                    "readv-huge" => libc::readv(fd, huge.as_ptr(), 1),
                    _ => libc::writev(fd, huge.as_ptr(), 1),
                }
            }
            "preadv2-flags" | "pwritev2-flags" => {
                let mut room = [b'.'; 4];
                let iov = [libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: 4 }];
                let flags = words.number() as c_int;
                match op {
                    "preadv2-flags" => libc::preadv2(fd, iov.as_ptr(), 1, -1, flags),
                    _ => libc::pwritev2(fd, iov.as_ptr(), 1, -1, flags),
                }
            }
            // So many vectors of a byte.
            "writev-many" => {
                let mut byte = [b'v'; 1];
                let one = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
                let list = vec![one; usize::try_from(words.number()).unwrap()];
                libc::writev(fd, list.as_ptr(), list.len() as c_int)
            }
            "writev-negative" => libc::writev(fd, iov.as_ptr(), -1),
            "sendmsg-nowhere" => libc::sendmsg(fd, nowhere().cast(), 0),
            "recv-null" | "recvfrom-null" | "recvmsg-null" => {
                let n = usize::try_from(words.number()).unwrap();
                let flags = names::flags("MSG_", &words.word());
                let mut iov = [libc::iovec { iov_base: none, iov_len: n }];
                match op {
                    "recv-null" => libc::recv(fd, none, n, flags),
                    "recvfrom-null" => libc::recvfrom(fd, none, n, flags, none.cast(), none.cast()),
                    _ => libc::recvmsg(fd, &mut message(&mut iov), flags),
                }
            }
            "send-null" => libc::send(fd, none, usize::try_from(words.number()).unwrap(), 0),
            _ => return None,
        }
    }))
}

/// The completion of a send with MSG_ZEROCOPY, from the error queue.
fn error_queue(fd: c_int) -> String {
    let mut control = [0u64; 32];
    let mut header = message(&mut []);
    (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), 256);
    for _ in 0..40 {
        let n = unsafe { libc::recvmsg(fd, &mut header, libc::MSG_ERRQUEUE) };
        if n >= 0 {
            return "completion".into();
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
        header.msg_controllen = 256;
    }
    ret(-1)
}

pub(super) fn operate(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    let fd = fd(name);
    Some(match op {
        "send" | "write" | "sendto" | "sendto-address" | "writev" | "pwrite" | "pwritev"
        | "pwritev2" | "sendmsg" | "sendmmsg" => write(op, fd, words),
        "recv" | "read" | "recvfrom" | "readv" | "pread" | "preadv" | "preadv2" | "recvmsg"
        | "recvmmsg" => read(op, fd, words),
        "errqueue" => error_queue(fd),
        _ => return bad(op, fd, words),
    })
}
