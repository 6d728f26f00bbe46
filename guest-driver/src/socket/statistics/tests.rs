// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reports over sockets.

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use smc_test_support::{Stopwatch, TestDir, eventually};

use super::*;
use crate::socket::{Config, Rnics, SmcStream, Stack};

/// A directory with the sockets of stacks.
struct Dir(TestDir);

impl Dir {
    fn new() -> Dir {
        Dir(TestDir::new())
    }

    fn stack(&self) -> Arc<Stack> {
        let statistics = Some(path_in(&self.0));
        Stack::open(Config { rnics: Rnics::None, statistics, ..Config::default() }).unwrap()
    }

    /// Waits until this many sockets are left: a thread of a stack may outlive the last user of the
    /// stack for a moment.
    #[track_caller]
    fn keeps(&self, count: usize) {
        eventually("so many sockets are left", || find(&self.0).len() == count);
    }
}

#[test]
fn a_process_tells_its_connections_and_why_they_are_tcp() {
    let dir = Dir::new();
    let stack = dir.stack();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let stream = SmcStream::connect(&stack, address).unwrap();
    stream.send(b"12345").unwrap();
    listener.accept().unwrap().0.read_exact(&mut [0; 5]).unwrap();
    drop(SmcStream::connect_tcp(&stack, address).unwrap());
    let process = ask(&find(&dir.0)[0]).unwrap();
    assert_eq!((process.version, process.pid), (VERSION, std::process::id()));
    assert!(!process.program.is_empty());
    let [connection] = &process.connections[..] else { panic!("{process:?}") };
    assert_eq!((connection.kind.as_str(), connection.peer), ("TCP", Some(address)));
    assert!(connection.sent >= 5, "{connection:?}");
    let reason = connection.reason.as_ref().unwrap();
    assert_eq!((reason.name.as_str(), reason.side.as_str()), ("NOSMCDEV", "here"));
    assert_eq!(process.totals.tcp, 2);
    assert_eq!(process.totals.reasons.iter().map(|reason| reason.count).sum::<u64>(), 2);
    assert_eq!(process.no_rdma.as_deref(), Some("RDMA is switched off"));
}

#[test]
fn the_socket_goes_with_the_stack_and_each_stack_has_one() {
    let dir = Dir::new();
    let (one, two) = (dir.stack(), dir.stack());
    assert_eq!(find(&dir.0).len(), 2);
    drop(one);
    dir.keeps(1);
    ask(&find(&dir.0)[0]).unwrap();
    drop(two);
    dir.keeps(0);
}

#[test]
fn only_the_user_may_ask() {
    use std::os::unix::fs::PermissionsExt;
    let dir = Dir::new();
    let _stack = dir.stack();
    let mode = std::fs::metadata(&find(&dir.0)[0]).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

/// Makes a file look a while old.
fn age(path: &Path) {
    use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};
    let long_ago = Timespec { tv_sec: 1_000_000_000, tv_nsec: 0 };
    let times = Timestamps { last_access: long_ago, last_modification: long_ago };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

#[test]
fn sockets_of_dead_processes_are_removed_and_others_left_alone() {
    let dir = Dir::new();
    // No process has the first id: it is beyond the largest. A process has the second, but the socket
    // was from a process of another container.
    let stale = ["process-2147483647.sock", "process-1.sock", "process-1-2.sock"];
    let stale = stale.map(|name| dir.0.join(name));
    for path in &stale {
        drop(UnixListener::bind(path).unwrap());
    }
    let file = dir.0.join("process-2147483646.sock");
    std::fs::write(&file, "not a socket").unwrap();
    let other = dir.0.join("a.sock");
    drop(UnixListener::bind(&other).unwrap());
    for path in [&file, &other] {
        age(path);
    }
    assert!(find(&dir.0).is_empty());
    assert!(stale.iter().all(|path| path.exists()), "their processes may be about to bind them");
    stale.iter().for_each(|path| age(path));
    assert!(find(&dir.0).is_empty());
    assert!(!stale.iter().any(|path| path.exists()) && file.exists() && other.exists());
}

#[test]
fn a_socket_that_is_not_listening_yet_is_left_alone() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, socket};
    let dir = Dir::new();
    let path = dir.0.join("process-2147483647.sock");
    let bound = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&bound, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    age(&path);
    assert_eq!(find(&dir.0), std::slice::from_ref(&path));
    drop(bound);
    assert!(find(&dir.0).is_empty() && !path.exists());
}

#[test]
fn notes_of_dead_processes_are_removed_whatever_namespace_their_ids_are_of() {
    use std::os::unix::fs::FileExt;
    let dir = Dir::new();
    let notes = TcpReasons::create(&dir.0).unwrap();
    let [own, elsewhere, silent] = [std::process::id(), i32::MAX as u32, i32::MAX as u32 - 1]
        .map(|pid| dir.0.join(format!("process-{pid}.tcp")));
    std::fs::hard_link(&own, &elsewhere).unwrap();
    // A process that died before it could mark the file as held.
    std::fs::copy(&own, &silent).unwrap();
    std::fs::File::options().write(true).open(&silent).unwrap().write_all_at(&[0; 8], 8).unwrap();
    find(&dir.0);
    assert!(silent.exists(), "it may be about to say it");
    for path in [&own, &silent] {
        age(path);
    }
    find(&dir.0);
    assert!(own.exists() && elsewhere.exists() && !silent.exists());
    drop(notes);
    find(&dir.0);
    assert!(!own.exists() && !elsewhere.exists());
}

#[test]
fn a_name_that_an_earlier_process_left_is_taken_over() {
    let dir = Dir::new();
    drop(UnixListener::bind(path_in(&dir.0)).unwrap());
    let _stack = dir.stack();
    assert_eq!(ask(&path_in(&dir.0)).unwrap().pid, std::process::id());
}

#[test]
fn a_name_that_another_user_has_taken_is_left_and_the_process_is_found_all_the_same() {
    let dir = Dir::new();
    // No socket, like another user's file in a directory where each user removes only its own.
    std::fs::create_dir(path_in(&dir.0)).unwrap();
    let _stack = dir.stack();
    let found = find(&dir.0);
    let [socket] = &found[..] else { panic!("{found:?}") };
    assert_ne!(*socket, path_in(&dir.0));
    assert_eq!(ask(socket).unwrap().pid, std::process::id());
}

#[test]
fn readers_that_do_not_read_keep_nobody_waiting() {
    let dir = Dir::new();
    let stack = dir.stack();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // Enough connections for a document beyond the buffer of a socket.
    let connect =
        |_| (SmcStream::connect_tcp(&stack, address).unwrap(), listener.accept().unwrap());
    let streams: Vec<_> = (0..400).map(connect).collect();
    let path = path_in(&dir.0);
    // Each slow client is given up after two seconds.
    let _slow = [(); 5].map(|()| UnixStream::connect(&path).unwrap());
    let start = Stopwatch::start();
    assert_eq!(ask(&path).unwrap().connections.len(), streams.len());
    assert!(start.elapsed() < Duration::from_millis(1900), "{:?}", start.elapsed());
}

#[test]
fn answers_that_are_none_are_errors() {
    let dir = Dir::new();
    let path = dir.0.join("process-1.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let answer = std::thread::spawn(move || {
        use std::io::Write;
        listener.accept().unwrap().0.write_all(b"{\"pid\":").unwrap();
    });
    assert_eq!(ask(&path).unwrap_err().kind(), std::io::ErrorKind::InvalidData);
    answer.join().unwrap();
    assert!(ask(&path).is_err());
}
