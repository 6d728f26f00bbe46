// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Loops that move many bytes, files and pipes.

use std::ffi::{c_int, c_void};
use std::io::{Seek, Write};
use std::os::fd::IntoRawFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::{fd, named, names, ret, show};
use crate::script::Words;

/// After this time without progress a loop ends.
const TIMEOUT: Duration = Duration::from_secs(50);

fn would_block() -> bool {
    std::io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN)
}

fn wait_for(fd: c_int, events: i16) {
    let mut list = [libc::pollfd { fd, events, revents: 0 }];
    unsafe { libc::poll(list.as_mut_ptr(), 1, 1000) };
}

/// Sends all bytes, in as many calls as necessary.
fn send_all(fd: c_int, data: &[u8]) -> String {
    let (mut done, mut begun) = (0, Instant::now());
    while done < data.len() {
        let rest = &data[done..];
        let n = unsafe { libc::send(fd, rest.as_ptr().cast(), rest.len(), libc::MSG_NOSIGNAL) };
        match usize::try_from(n) {
            Ok(n) => (done, begun) = (done + n, Instant::now()),
            Err(_) if would_block() && begun.elapsed() < TIMEOUT => wait_for(fd, libc::POLLOUT),
            Err(_) => return format!("{done}, then {}", ret(-1)),
        }
    }
    done.to_string()
}

/// Receives so many bytes, or up to the end of data.
fn recv_all(fd: c_int, wanted: Option<usize>) -> String {
    let mut data = Vec::new();
    let mut room = vec![0; 64 << 10];
    let mut begun = Instant::now();
    while wanted.is_none_or(|wanted| data.len() < wanted) {
        let most = wanted.map_or(room.len(), |wanted| room.len().min(wanted - data.len()));
        let n = unsafe { libc::recv(fd, room.as_mut_ptr().cast(), most, 0) };
        match usize::try_from(n) {
            Ok(0) => return format!("{} {}, then end of data", data.len(), show(&data)),
            Ok(n) => {
                data.extend_from_slice(&room[..n]);
                begun = Instant::now();
            }
            Err(_) if would_block() && begun.elapsed() < TIMEOUT => wait_for(fd, libc::POLLIN),
            Err(_) => return format!("{} {}, then {}", data.len(), show(&data), ret(-1)),
        }
    }
    format!("{} {}", data.len(), show(&data))
}

/// `many N`: N connections. Each sends a line and gets it back before any is closed.
fn many(n: i64) -> String {
    let port = super::sockets::server_port();
    let connect = |_| {
        let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) };
        (super::sockets::connect_to(fd, false, port) == 0).then_some(fd)
    };
    let fds: Vec<_> = (0..n).filter_map(connect).collect();
    let sent = fds.iter().filter(|fd| send_all(**fd, b"line") == "4").count();
    let back = fds.iter().filter(|fd| recv_all(**fd, Some(4)) == "4 \"line\"").count();
    fds.iter().for_each(|fd| _ = unsafe { libc::close(*fd) });
    format!("{} connected, {sent} sent, {back} had it back", fds.len())
}

/// `echo N`: accepts N connections, and sends back the bytes of each up to its end.
fn echo(n: i64) -> String {
    let none = std::ptr::null_mut();
    let accept = |_| unsafe { libc::accept(fd("l"), none, std::ptr::null_mut()) };
    let fds: Vec<_> = (0..n).map(accept).collect();
    let received = fds.iter().filter(|fd| recv_all(**fd, Some(4)) == "4 \"line\"").count();
    let sent = fds.iter().filter(|fd| send_all(**fd, b"line") == "4").count();
    let ends = fds.iter().filter(|fd| recv_all(**fd, None) == "0 \"\", then end of data").count();
    fds.iter().for_each(|fd| _ = unsafe { libc::close(*fd) });
    format!("{received} received, {sent} sent, {ends} ends")
}

/// Sends until no more fits.
fn fill(fd: c_int) -> String {
    static SENT: Mutex<usize> = Mutex::new(0);
    let data = [b'f'; 4096];
    let mut sent = SENT.lock().unwrap();
    loop {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let n = unsafe { libc::send(fd, data.as_ptr().cast(), data.len(), flags) };
        match usize::try_from(n) {
            Ok(n) => *sent += n,
            Err(_) => return format!("full, {}", ret(-1)),
        }
    }
}

/// A file with bytes whose values show their position, open for reading.
fn file(n: usize) -> c_int {
    use std::os::fd::FromRawFd;
    let fd = unsafe { libc::memfd_create(c"data".as_ptr(), 0) };
    let mut file = unsafe { std::fs::File::from_raw_fd(fd) };
    file.write_all(&crate::common::pattern(n)).unwrap();
    file.rewind().unwrap();
    file.into_raw_fd()
}

fn file_at(fd: c_int) -> i64 {
    unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) }
}

pub(super) fn operate(op: &str, name: &str, words: &mut Words<'_>) -> Option<String> {
    let none = std::ptr::null_mut::<libc::loff_t>();
    Some(match op {
        "sendall" => send_all(fd(name), &words.data()),
        "recvall" => recv_all(fd(name), Some(usize::try_from(words.number()).unwrap())),
        // One call that sends more than fits.
        "send-part" => {
            let data = vec![b'p'; usize::try_from(words.number()).unwrap()];
            let n = unsafe { libc::send(fd(name), data.as_ptr().cast(), data.len(), 0) };
            match usize::try_from(n) {
                Ok(n) if n == data.len() => "all".into(),
                Ok(_) => "a part".into(),
                Err(_) => ret(-1),
            }
        }
        "drain" => recv_all(fd(name), None),
        "fill" => fill(fd(name)),
        "many" => many(words.number()),
        "echo" => echo(words.number()),
        "file" => named(name, file(usize::try_from(words.number()).unwrap())),
        "open" => {
            let path = std::ffi::CString::new(words.word()).unwrap();
            named(name, unsafe { libc::open(path.as_ptr(), libc::O_RDONLY) })
        }
        "pipe" => {
            let mut ends = [0; 2];
            let flags = names::flags("O_", &words.word());
            let result = unsafe { libc::pipe2(ends.as_mut_ptr(), flags) };
            named(&format!("{name}r"), ends[0]);
            named(&format!("{name}w"), ends[1]);
            ret(result as isize)
        }
        // sendfile:TO FROM N [OFFSET]; repeated until N bytes have gone or a call fails.
        "sendfile" => {
            let (to, from) = (fd(name), fd(&words.word()));
            let n = usize::try_from(words.number()).unwrap();
            let mut offset = words.word().parse::<i64>().ok();
            let mut done = 0;
            while done < n {
                let at = offset.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
                let moved = unsafe { libc::sendfile(to, from, at, n - done) };
                match usize::try_from(moved) {
                    Ok(0) => break,
                    Ok(moved) => done += moved,
                    Err(_) if done > 0 && would_block() => wait_for(to, libc::POLLOUT),
                    Err(_) => return Some(format!("{done}, then {}", ret(-1))),
                }
            }
            format!("{done} offset {offset:?} file at {}", file_at(from))
        }
        // splice:FROM TO N [FLAGS]
        "splice" => {
            let (from, to) = (fd(name), fd(&words.word()));
            let n = usize::try_from(words.number()).unwrap();
            let flags = names::flags("SPLICE_F_", &words.word()) as u32;
            ret(unsafe { libc::splice(from, none, to, none, n, flags) })
        }
        "splice-offset" => {
            let (from, to) = (fd(name), fd(&words.word()));
            let mut offset: libc::loff_t = 0;
            ret(unsafe { libc::splice(from, &mut offset, to, none, 10, 0) })
        }
        "tee" => {
            let (from, to) = (fd(name), fd(&words.word()));
            ret(unsafe { libc::tee(from, to, 100, 0) })
        }
        "vmsplice" => {
            // The pipe has the memory itself.
            let data = Vec::leak(words.data());
            let iov = libc::iovec {
                iov_base: data.as_ptr().cast_mut().cast::<c_void>(),
                iov_len: data.len(),
            };
            ret(unsafe { libc::vmsplice(fd(name), &iov, 1, 0) })
        }
        "copy-file-range" => {
            let (from, to) = (fd(name), fd(&words.word()));
            ret(unsafe { libc::copy_file_range(from, none, to, none, 100, 0) })
        }
        _ => return None,
    })
}
