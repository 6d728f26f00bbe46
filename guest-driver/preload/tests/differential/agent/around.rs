// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls around the names of libc's socket functions: stdio, `syscall`, system calls without libc,
//! and POSIX AIO.

use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::mem::zeroed;
use std::sync::Mutex;

use super::bytes::got;
use super::{fd, names, ret, show};
use crate::script::Words;

/// A system call that does not go through libc.
#[cfg(target_arch = "x86_64")]
pub(super) fn inline(number: i64, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result: isize;
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// A system call that does not go through libc.
#[cfg(target_arch = "aarch64")]
pub(super) fn inline(number: i64, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result: isize;
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a as isize => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
        );
    }
    result
}

/// A system call by `syscall`, or without libc. Errors are negative, as the kernel returns them.
pub(super) fn call(by_libc: bool, number: i64, all: [usize; 6]) -> isize {
    if !by_libc {
        return inline(number, all);
    }
    let [a, b, c, d, e, f] = all;
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) } as isize;
    match std::io::Error::last_os_error().raw_os_error() {
        Some(error) if result < 0 => -(error as isize),
        _ => result,
    }
}

fn kernel_ret(result: isize) -> String {
    if result >= 0 { result.to_string() } else { kernel_error(result) }
}

fn kernel_error(result: isize) -> String {
    format!("-1 {}", names::error_name(-result as c_int))
}

/// `sys-OP` and `asm-OP`.
fn by_number(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    let (by_libc, op) = match op.split_once('-')? {
        ("sys", op) => (true, op),
        ("asm", op) => (false, op),
        _ => return None,
    };
    let fd = fd(name) as usize;
    Some(match op {
        "write" | "sendto" | "sendmsg" => {
            let data = words.data();
            let iov =
                libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
            let mut header: libc::msghdr = unsafe { zeroed() };
            (header.msg_iov, header.msg_iovlen) = ((&raw const iov).cast_mut(), 1);
            let (pointer, n) = (data.as_ptr() as usize, data.len());
            kernel_ret(match op {
                "write" => call(by_libc, libc::SYS_write, [fd, pointer, n, 0, 0, 0]),
                "sendto" => call(by_libc, libc::SYS_sendto, [fd, pointer, n, 0, 0, 0]),
                _ => {
                    let header = (&raw const header) as usize;
                    call(by_libc, libc::SYS_sendmsg, [fd, header, 0, 0, 0, 0])
                }
            })
        }
        "read" | "recvfrom" => {
            let mut room = vec![0u8; usize::try_from(words.number()).unwrap()];
            let number = if op == "read" { libc::SYS_read } else { libc::SYS_recvfrom };
            let pointer = room.as_mut_ptr() as usize;
            let n = call(by_libc, number, [fd, pointer, room.len(), 0, 0, 0]);
            if n < 0 { kernel_error(n) } else { got(n, &room) }
        }
        "poll" => {
            let events = names::poll_events(&words.word());
            let mut list = [libc::pollfd { fd: fd as c_int, events, revents: 0 }];
            let pointer = list.as_mut_ptr() as usize;
            let millis = words.number() as usize;
            #[cfg(target_arch = "x86_64")]
            let n = call(by_libc, libc::SYS_poll, [pointer, 1, millis, 0, 0, 0]);
            #[cfg(not(target_arch = "x86_64"))]
            let n = {
                let time = [(millis / 1000) as i64, (millis % 1000) as i64 * 1_000_000];
                call(by_libc, libc::SYS_ppoll, [pointer, 1, time.as_ptr() as usize, 0, 0, 0])
            };
            format!("{} {}", kernel_ret(n), names::show_poll(list[0].revents))
        }
        "pselect6" => {
            let mut set: libc::fd_set = unsafe { zeroed() };
            unsafe { libc::FD_SET(fd as c_int, &raw mut set) };
            let millis = words.number();
            let time = [millis / 1000, millis % 1000 * 1_000_000];
            let (read, time) = ((&raw mut set) as usize, time.as_ptr() as usize);
            let n = call(by_libc, libc::SYS_pselect6, [fd + 1, read, 0, 0, time, 0]);
            let is_set = unsafe { libc::FD_ISSET(fd as c_int, &raw const set) };
            format!("{} {is_set}", kernel_ret(n))
        }
        "pwritev2" => {
            let data = words.data();
            let iov =
                libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
            let at = (&raw const iov) as usize;
            kernel_ret(call(by_libc, libc::SYS_pwritev2, [fd, at, 1, usize::MAX, 0, 0]))
        }
        "preadv2" => {
            let mut room = vec![0u8; usize::try_from(words.number()).unwrap()];
            let iov = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
            let at = (&raw const iov) as usize;
            let n = call(by_libc, libc::SYS_preadv2, [fd, at, 1, usize::MAX, 0, 0]);
            if n < 0 { kernel_error(n) } else { got(n, &room) }
        }
        "close" => kernel_ret(call(by_libc, libc::SYS_close, [fd, 0, 0, 0, 0, 0])),
        "shutdown" => {
            let how = words.number() as usize;
            kernel_ret(call(by_libc, libc::SYS_shutdown, [fd, how, 0, 0, 0, 0]))
        }
        "dup3" => {
            let new = words.number() as usize;
            kernel_ret(call(by_libc, libc::SYS_dup3, [fd, new, 0, 0, 0, 0]))
        }
        _ => return None,
    })
}

unsafe extern "C" {
    fn dprintf(fd: c_int, format: *const libc::c_char, ...) -> c_int;
}

/// The streams of stdio, by name. Addresses, because pointers may not be in a `static`.
static FILES: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

fn stream(name: &str) -> *mut libc::FILE {
    std::ptr::with_exposed_provenance_mut(*FILES.lock().unwrap().get(name).unwrap())
}

/// `f-OP`: stdio on the connection.
fn stdio(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    let op = op.strip_prefix("f-")?;
    if op == "open" {
        let mode = CString::new(words.word()).unwrap();
        let file = unsafe { libc::fdopen(fd(name), mode.as_ptr()) };
        if file.is_null() {
            return Some(ret(-1));
        }
        FILES.lock().unwrap().insert(name.to_owned(), file.expose_provenance());
        return Some("ok".into());
    }
    let file = stream(name);
    Some(unsafe {
        match op {
            "puts" => {
                let text = CString::new(words.data()).unwrap();
                ret(libc::fputs(text.as_ptr(), file).min(0) as isize)
            }
            "printf" => {
                let text = CString::new(words.data()).unwrap();
                ret(libc::fprintf(file, c"%s".as_ptr(), text.as_ptr()) as isize)
            }
            "write" => {
                let data = words.data();
                libc::fwrite(data.as_ptr().cast(), 1, data.len(), file).to_string()
            }
            "flush" => ret(libc::fflush(file) as isize),
            "unbuffered" => {
                ret(libc::setvbuf(file, std::ptr::null_mut(), libc::_IONBF, 0) as isize)
            }
            "gets" => {
                let mut line = [0u8; 4096];
                let got = libc::fgets(line.as_mut_ptr().cast(), 4096, file);
                match (got.is_null(), libc::ferror(file)) {
                    (true, 0) => "end of file".into(),
                    (true, _) => ret(-1),
                    _ => show(std::ffi::CStr::from_ptr(line.as_ptr().cast()).to_bytes()),
                }
            }
            "getc" => ret(libc::fgetc(file) as isize),
            "read" => {
                let mut room = vec![0u8; usize::try_from(words.number()).unwrap()];
                let n = libc::fread(room.as_mut_ptr().cast(), 1, room.len(), file);
                got(n as isize, &room)
            }
            "fileno" => (libc::fileno(file) == fd(name)).to_string(),
            "close" => ret(libc::fclose(file) as isize),
            _ => return None,
        }
    })
}

/// POSIX AIO: one operation, and a wait for its result.
fn aio(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    let mut room = match op {
        "aio-read" => vec![0; usize::try_from(words.number()).unwrap()],
        "aio-write" => words.data(),
        _ => return None,
    };
    unsafe {
        let mut block: libc::aiocb = zeroed();
        block.aio_fildes = fd(name);
        block.aio_buf = room.as_mut_ptr().cast();
        block.aio_nbytes = room.len();
        let begun =
            if op == "aio-read" { libc::aio_read(&mut block) } else { libc::aio_write(&mut block) };
        if begun < 0 {
            return Some(ret(-1));
        }
        while libc::aio_error(&block) == libc::EINPROGRESS {
            let list = [&raw const block];
            libc::aio_suspend(list.as_ptr(), 1, std::ptr::null());
        }
        let error = libc::aio_error(&block);
        let n = libc::aio_return(&mut block);
        Some(match (n, op) {
            (..0, _) => format!("-1 {}", names::error_name(error)),
            (_, "aio-read") => got(n, &room),
            _ => n.to_string(),
        })
    }
}

pub(super) fn operate(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    if op == "dprintf" {
        let text = CString::new(words.data()).unwrap();
        let n = unsafe { dprintf(fd(name), c"%s".as_ptr(), text.as_ptr()) };
        return Some(ret(n as isize));
    }
    by_number(op, name, words).or_else(|| stdio(op, name, words)).or_else(|| aio(op, name, words))
}
