// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Calls not bound to the library by the order of the objects: by a handle of libc, by a plug-in
//! that binds to its own dependencies first, by one in a namespace of its own. Such calls behave
//! like calls of the program. Libraries that wrap the same functions still find the next function
//! in the order.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/combinations.rs"]
mod combinations;
mod common;

use std::ffi::{CString, c_void};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;

use combinations::{accept_and_greet, connect, connect_and_greet, in_each_combination};
use common::{Fabric, await_listener, compiled_of, free_port, library, my_role, role};
use smc_test_support::TestDir;

/// A way around the order of the objects.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// `dlsym` with a handle of libc.
    Handle,
    /// `dlvsym` with a handle of libc.
    VersionedHandle,
    /// A plug-in opened with RTLD_DEEPBIND.
    Deep,
    /// The same, bound at its first calls.
    DeepAndLazy,
    /// A plug-in opened by another one with RTLD_DEEPBIND.
    DeepInDeep,
    /// A plug-in in a namespace of its own.
    Namespace,
}

type Receive = unsafe extern "C" fn(RawFd, *mut c_void, usize, i32) -> isize;
type Send = unsafe extern "C" fn(RawFd, *const c_void, usize, i32) -> isize;
type ReadInto = unsafe extern "C" fn(RawFd, *mut c_void, usize) -> isize;
type Poll = unsafe extern "C" fn(*mut libc::pollfd, u64, i32) -> isize;

/// The functions of a way.
struct Calls {
    recv: Receive,
    send: Send,
    read: ReadInto,
    poll: Poll,
    is_plugin: bool,
}

/// One of the libraries beside this file, compiled.
fn compiled(name: &str) -> PathBuf {
    compiled_of("plugins", name, &["-shared", "-fPIC"])
}

fn text(path: &std::path::Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}

fn symbol(handle: *mut c_void, name: &str) -> *mut c_void {
    let name = CString::new(name).unwrap();
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    found
}

#[cfg(target_arch = "x86_64")]
const VERSION: &std::ffi::CStr = c"GLIBC_2.2.5";
#[cfg(not(target_arch = "x86_64"))]
const VERSION: &std::ffi::CStr = c"GLIBC_2.17";

impl Calls {
    fn by(way: Way) -> Calls {
        let handle = match way {
            Way::Handle | Way::VersionedHandle => unsafe {
                libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY)
            },
            _ => open_plugin(way),
        };
        assert!(!handle.is_null(), "{:?}", unsafe { std::ffi::CStr::from_ptr(libc::dlerror()) });
        let is_plugin = !matches!(way, Way::Handle | Way::VersionedHandle);
        let find = |name: &str| match way {
            Way::Handle => symbol(handle, name),
            Way::VersionedHandle => {
                let name = CString::new(name).unwrap();
                unsafe { libc::dlvsym(handle, name.as_ptr(), VERSION.as_ptr()) }
            }
            _ => symbol(handle, &format!("plug_{name}")),
        };
        unsafe {
            Calls {
                recv: std::mem::transmute::<*mut c_void, Receive>(find("recv")),
                send: std::mem::transmute::<*mut c_void, Send>(find("send")),
                read: match is_plugin {
                    true => std::mem::transmute::<*mut c_void, ReadInto>(find("read_by_address")),
                    false => std::mem::transmute::<*mut c_void, ReadInto>(find("__read")),
                },
                poll: std::mem::transmute::<*mut c_void, Poll>(find("poll")),
                is_plugin,
            }
        }
    }

    /// A result, or the error.
    fn result(&self, value: isize) -> Result<usize, i32> {
        match value {
            0.. => Ok(value as usize),
            _ if self.is_plugin => Err(-value as i32),
            _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
        }
    }

    fn recv(&self, fd: &impl AsRawFd, room: &mut [u8], flags: i32) -> Result<usize, i32> {
        let at = room.as_mut_ptr().cast();
        self.result(unsafe { (self.recv)(fd.as_raw_fd(), at, room.len(), flags) })
    }

    fn read(&self, fd: &impl AsRawFd, room: &mut [u8]) -> Result<usize, i32> {
        self.result(unsafe { (self.read)(fd.as_raw_fd(), room.as_mut_ptr().cast(), room.len()) })
    }

    fn send(&self, fd: &impl AsRawFd, bytes: &[u8]) -> Result<usize, i32> {
        let at = bytes.as_ptr().cast();
        self.result(unsafe { (self.send)(fd.as_raw_fd(), at, bytes.len(), libc::MSG_NOSIGNAL) })
    }

    fn poll(&self, fd: &impl AsRawFd, timeout: i32) -> i16 {
        let mut list = [libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        self.result(unsafe { (self.poll)(list.as_mut_ptr(), 1, timeout) }).unwrap();
        list[0].revents
    }

    /// Reads as many bytes as the text has, and compares them.
    fn expect(&self, stream: &TcpStream, text: &str) {
        let mut got = vec![0; text.len()];
        let mut at = 0;
        while at < got.len() {
            let n = match at % 2 {
                0 => self.read(stream, &mut got[at..]),
                _ => self.recv(stream, &mut got[at..], 0),
            };
            let n = n.unwrap();
            assert!(n > 0, "the end came after {at} bytes");
            at += n;
        }
        assert_eq!(String::from_utf8_lossy(&got), text);
    }
}

fn open_plugin(way: Way) -> *mut c_void {
    let file = compiled("plugin");
    let path = text(&file);
    let deep = libc::RTLD_DEEPBIND;
    unsafe {
        match way {
            Way::Namespace => libc::dlmopen(libc::LM_ID_NEWLM, path.as_ptr(), libc::RTLD_NOW),
            Way::DeepAndLazy => libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | deep),
            Way::DeepInDeep => {
                let outer = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | deep);
                assert!(!outer.is_null());
                let open = symbol(outer, "plug_open");
                let open: extern "C" fn(*const libc::c_char) -> *mut c_void =
                    std::mem::transmute(open);
                // Another file, since the linker knows an object by its inode.
                let own = TestDir::for_programs();
                let inner = own.path("inner.so");
                std::fs::copy(&file, &inner).unwrap();
                open(text(&inner).as_ptr())
            }
            _ => libc::dlopen(path.as_ptr(), libc::RTLD_NOW | deep),
        }
    }
}

/// A conversation with a way around the library at one end.
fn talk(calls: &Calls, mut stream: TcpStream) {
    calls.expect(&stream, "a line of the program\n");
    calls.send(&stream, b"a line of the plug-in\n").unwrap();
    let mut room = [0; 100];
    assert_eq!(calls.recv(&stream, &mut room, libc::MSG_DONTWAIT), Err(libc::EAGAIN));
    assert_eq!(calls.poll(&stream, 0), 0);
    stream.write_all(b"more?\n").unwrap();
    assert_eq!(calls.poll(&stream, 20_000) & libc::POLLIN, libc::POLLIN);
    calls.expect(&stream, "more\n");
    calls.send(&stream, &vec![b'.'; 100_000]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(calls.recv(&stream, &mut room, 0), Ok(0));
}

/// The other end.
fn talk_back(mut stream: TcpStream) {
    stream.write_all(b"a line of the program\n").unwrap();
    let mut room = [0; 28];
    stream.read_exact(&mut room).unwrap();
    assert_eq!(&room, b"a line of the plug-in\nmore?\n");
    stream.write_all(b"more\n").unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    assert!(all.len() == 100_000 && all.iter().all(|byte| *byte == b'.'));
}

/// Defines the tests of a way: as the first call of a server, of a client, and in the middle.
macro_rules! ways {
    ($($name:ident $way:expr;)*) => {$(
        #[test]
        fn $name() {
            fn server(listener: TcpListener) {
                let calls = Calls::by($way);
                talk(&calls, listener.accept().unwrap().0);
                talk(&calls, accept_and_greet(&listener));
                talk_back(listener.accept().unwrap().0);
                talk_back(accept_and_greet(&listener));
            }
            fn client(port: u16) {
                let calls = Calls::by($way);
                talk_back(connect(port));
                talk_back(connect_and_greet(port));
                talk(&calls, connect(port));
                talk(&calls, connect_and_greet(port));
            }
            let all_on_smc = |fabric: &Fabric, ends| match ends {
                (true, true) => assert_eq!(fabric.decided(), (8, 0)),
                _ => assert_eq!(fabric.decided().0, 0),
            };
            in_each_combination(server, client, all_on_smc);
        }
    )*};
}

ways! {
    by_a_handle_of_libc Way::Handle;
    by_a_version_and_a_handle_of_libc Way::VersionedHandle;
    by_a_plugin_that_binds_deep Way::Deep;
    by_a_plugin_that_binds_deep_and_late Way::DeepAndLazy;
    by_a_plugin_of_a_plugin_that_binds_deep Way::DeepInDeep;
    by_a_plugin_in_its_own_namespace Way::Namespace;
}

/// Has the kernel refuse each change of libc's pages, as glibc does itself from 2.43 on. `false`: the
/// kernel cannot.
fn seal_libc() -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.ends_with("/libc.so.6")).all(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let [start, end] = [start, rest.split(' ').next().unwrap()]
            .map(|address| usize::from_str_radix(address, 16).unwrap());
        unsafe { libc::syscall(libc::SYS_mseal, start, end - start, 0) == 0 }
    })
}

/// A connection in use goes on, and later ones stay on TCP: the library cannot lead the calls of a
/// plug-in to itself.
macro_rules! sealed {
    ($($name:ident $way:expr;)*) => {$(
        #[test]
        fn $name() {
            fn server(listener: TcpListener) {
                let stream = accept_and_greet(&listener);
                if !seal_libc() {
                    return println!("NOT TESTED: the kernel has no mseal");
                }
                let calls = Calls::by($way);
                talk(&calls, stream);
                talk(&calls, listener.accept().unwrap().0);
                talk_back(listener.accept().unwrap().0);
            }
            fn client(port: u16) {
                let stream = connect_and_greet(port);
                if !seal_libc() {
                    return;
                }
                talk_back(stream);
                let calls = Calls::by($way);
                talk_back(connect(port));
                talk(&calls, connect(port));
            }
            let first_on_smc = |fabric: &Fabric, ends| match ends {
                // With a kernel without mseal there is one connection, too.
                (true, true) => assert_eq!(fabric.decided().0, 2),
                _ => assert_eq!(fabric.decided().0, 0),
            };
            in_each_combination(server, client, first_on_smc);
        }
    )*};
}

sealed! {
    by_a_handle_of_a_sealed_libc Way::Handle;
    by_a_plugin_that_binds_deep_to_a_sealed_libc Way::Deep;
    by_a_plugin_in_its_own_namespace_beside_a_sealed_libc Way::Namespace;
}

/// A plug-in that makes all calls of a client itself.
#[test]
fn plugins_that_connect() {
    const WAYS: [Way; 3] = [Way::Deep, Way::DeepAndLazy, Way::Namespace];
    fn server(listener: TcpListener) {
        for _ in WAYS {
            let (mut stream, _) = listener.accept().unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            stream.write_all(text.to_uppercase().as_bytes()).unwrap();
        }
    }
    fn client(port: u16) {
        type Client = unsafe extern "C" fn(u16, *mut c_void, usize) -> isize;
        for way in WAYS {
            let client = symbol(open_plugin(way), "plug_client");
            let client = unsafe { std::mem::transmute::<*mut c_void, Client>(client) };
            let mut answer = [0; 100];
            let n = unsafe { client(port, answer.as_mut_ptr().cast(), answer.len()) };
            assert_eq!(&answer[..usize::try_from(n).unwrap()], b"A LINE");
        }
    }
    let all_on_smc = |fabric: &Fabric, ends| match ends {
        (true, true) => assert_eq!(fabric.decided(), (6, 0)),
        _ => assert_eq!(fabric.decided().0, 0),
    };
    in_each_combination(server, client, all_on_smc);
}

/// A library that wraps the same functions, before and behind the library, with a plug-in.
#[test]
fn beside_a_library_that_wraps_the_same_functions() {
    const TEST: &str = "beside_a_library_that_wraps_the_same_functions";
    if let Some((role, port)) = my_role() {
        if role == "server" {
            let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
            talk_back(accept_and_greet(&listener));
        } else {
            let mut stream = connect_and_greet(port);
            assert!(unsafe { libc::fcntl(stream.as_raw_fd(), libc::F_GETFL) } >= 0);
            stream.set_nonblocking(false).unwrap();
            let mut line = [0; 22];
            stream.read_exact(&mut line).unwrap();
            stream.write_all(b"a line of the plug-in\nmore?\n").unwrap();
            stream.read_exact(&mut line[..5]).unwrap();
            stream.write_all(&[b'.'; 100_000]).unwrap();
            let count = symbol(libc::RTLD_DEFAULT, "wrapped_calls");
            let count: extern "C" fn() -> u64 = unsafe { std::mem::transmute(count) };
            // A file's calls go through both libraries.
            let before = count();
            std::fs::read("/proc/self/comm").unwrap();
            assert!(count() > before);
        }
        return;
    }
    let wrapper = compiled("wrapper");
    let (ours, theirs) = (library(), wrapper.to_str().unwrap().to_owned());
    let ours = ours.to_str().unwrap();
    for order in [format!("{ours}:{theirs}"), format!("{theirs}:{ours}")] {
        let fabric = Fabric::new(6);
        let port = free_port();
        let this = std::env::current_exe().unwrap();
        let server = role(fabric.smc(&this).env("LD_PRELOAD", &order), TEST, "server", port);
        await_listener(port);
        let client = role(fabric.smc(&this).env("LD_PRELOAD", &order), TEST, "client", port);
        client.finish_beside(&[&server]);
        server.finish();
        assert_eq!(fabric.decided(), (2, 0), "{order}");
    }
}

unsafe extern "C" {
    fn eventfd_read(fd: RawFd, number: *mut u64) -> i32;
    fn eventfd_write(fd: RawFd, number: u64) -> i32;
    fn backtrace_symbols_fd(list: *const *mut c_void, n: i32, fd: RawFd);
    fn __select(
        n: i32,
        read: *mut libc::fd_set,
        write: *mut libc::fd_set,
        except: *mut libc::fd_set,
        time: *mut libc::timeval,
    ) -> i32;
}

/// Functions of libc that read and write inside of libc, and one by another of its names.
#[test]
fn calls_that_libc_makes_itself() {
    fn server(listener: TcpListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let fd = stream.as_raw_fd();
        unsafe {
            let mut number = 0;
            assert_eq!(eventfd_read(fd, &raw mut number), 0);
            assert_eq!(number, 0x0807_0605_0403_0201);
            assert_eq!(eventfd_write(fd, number + 1), 0);
            let mut set: libc::fd_set = std::mem::zeroed();
            libc::FD_SET(fd, &raw mut set);
            let none = std::ptr::null_mut();
            let mut time = libc::timeval { tv_sec: 20, tv_usec: 0 };
            assert_eq!(__select(fd + 1, &raw mut set, none, none, &raw mut time), 1);
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            let here = server as *const () as *mut c_void;
            backtrace_symbols_fd(&raw const here, 1, fd);
        }
        stream.write_all(b"the end\n").unwrap();
    }
    fn client(port: u16) {
        let mut stream = connect(port);
        stream.write_all(&[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        let mut number = [0; 8];
        stream.read_exact(&mut number).unwrap();
        assert_eq!(number, [2, 2, 3, 4, 5, 6, 7, 8]);
        stream.write_all(b"x").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.ends_with("]\nthe end\n"), "{text}");
    }
    in_each_combination(server, client, |_, _| {});
}
