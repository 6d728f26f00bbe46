// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A descriptor is given back in its state on TCP: after any action of the library on a socket, the
//! socket has the same options, flags and registrations as on TCP, and carries its next connection
//! in the same way.
//!
//! Each program prints its observations, and all combinations must print the same as on TCP.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all pointers are to locals of the call")]

#[path = "common/c.rs"]
mod c;
mod common;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use common::{Fabric, await_listener, free_port, my_role, role};

/// More than both kernels take without a reader.
const MANY: usize = 4_063_232;
const TEST: &str = "a_socket_is_given_back_as_it_was";

/// Options whose values depend on the time, on the path of the packets, or on earlier questions.
const VARYING: &[(i32, i32)] = &[
    (libc::SOL_SOCKET, libc::SO_ERROR),
    (libc::SOL_SOCKET, libc::SO_SNDBUF),
    (libc::SOL_SOCKET, libc::SO_RCVBUF),
    (libc::SOL_SOCKET, libc::SO_COOKIE),
    (libc::SOL_SOCKET, libc::SO_MEMINFO),
    (libc::SOL_SOCKET, libc::SO_INCOMING_CPU),
    (libc::SOL_SOCKET, libc::SO_INCOMING_NAPI_ID),
    (libc::SOL_SOCKET, libc::SO_NETNS_COOKIE),
    (libc::SOL_SOCKET, libc::SO_TXREHASH),
    (libc::IPPROTO_TCP, libc::TCP_INFO),
    (libc::IPPROTO_TCP, libc::TCP_CC_INFO),
    (libc::IPPROTO_TCP, libc::TCP_TIMESTAMP),
    (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP),
    // The kernel changes TCP_QUICKACK with the traffic.
    (libc::IPPROTO_TCP, libc::TCP_QUICKACK),
    (libc::IPPROTO_TCP, libc::TCP_ZEROCOPY_RECEIVE),
    (libc::IPPROTO_TCP, libc::TCP_MAXSEG),
    (libc::IPPROTO_IP, libc::IP_MTU),
    // IP_PROTOCOL, which returns the local port.
    (libc::IPPROTO_IP, 52),
];

/// Every option known to `getsockopt`, and the flags of a descriptor.
fn properties(fd: i32) -> String {
    let mut text = String::new();
    for (level, most) in [(libc::SOL_SOCKET, 90), (libc::IPPROTO_TCP, 50), (libc::IPPROTO_IP, 60)] {
        for name in (1..=most).filter(|name| !VARYING.contains(&(level, *name))) {
            let (mut value, mut len) = ([0u8; 256], 256u32);
            let at = value.as_mut_ptr().cast();
            let found = unsafe { libc::getsockopt(fd, level, name, at, &mut len) } == 0;
            let _ = match found {
                true => write!(text, "{level}.{name}={len}:"),
                false => {
                    let error = std::io::Error::last_os_error().raw_os_error().unwrap();
                    write!(text, "{level}.{name}=error{error}")
                }
            };
            // Most are zeros.
            let used = value.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            value[..used].iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
            text.push(' ');
        }
    }
    unsafe {
        let (getfl, getfd) = (libc::fcntl(fd, libc::F_GETFL), libc::fcntl(fd, libc::F_GETFD));
        let (owner, signal) = (libc::fcntl(fd, libc::F_GETOWN), libc::fcntl(fd, 11));
        let _ = write!(text, "fl={getfl:o} fd={getfd} owner={owner} signal={signal}");
    }
    text
}

/// The kernel's own registrations of an epoll set, without numbers of inodes.
fn registrations(set: &c::Epoll) -> String {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", set.as_raw_fd())).unwrap();
    let lines = text.lines().filter(|line| line.starts_with("tfd:"));
    let words = lines.map(|line| line.split_whitespace().take(6).collect::<Vec<_>>().join(" "));
    words.collect::<Vec<_>>().join("; ")
}

/// A client's socket for one connection after the other.
struct Reused {
    socket: TcpStream,
    port: u16,
    set: c::Epoll,
}

impl Reused {
    fn new(port: u16) -> Reused {
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        let fd = unsafe { libc::socket(libc::AF_INET, kind, 0) };
        let reused = Reused {
            socket: TcpStream::from(unsafe { OwnedFd::from_raw_fd(fd) }),
            port,
            set: c::Epoll::new(),
        };
        reused.set.add(&reused.socket, libc::EPOLLIN | libc::EPOLLET, 77);
        reused
    }

    fn fd(&self) -> i32 {
        self.socket.as_raw_fd()
    }

    fn show(&self, when: &str) {
        println!("seen {when}: {}", properties(self.fd()));
        if when.contains("unconnected") {
            println!("seen {when}, its set: {}", registrations(&self.set));
            let name = self.socket.local_addr().map(|name| (name.ip(), name.port() == 0));
            println!("seen {when}, its names: {name:?} {:?}", self.socket.peer_addr().is_ok());
        }
    }

    fn connect(&self) {
        let result = c::connect(&self.socket, std::net::Ipv4Addr::LOCALHOST, self.port);
        println!("seen connect: {:?}", result.map_err(|error| error.raw_os_error()));
    }

    /// `connect` to no address.
    fn disconnect(&self) {
        let nowhere: libc::sockaddr_in = unsafe { std::mem::zeroed() };
        let at = std::ptr::from_ref(&nowhere).cast();
        let result = unsafe { libc::connect(self.fd(), at, 16) };
        println!("seen disconnect: {result} {:?}", self.socket.take_error().unwrap());
    }

    /// Has the server carry out an order, and exchanges some bytes.
    fn meet(&self, order: u8) {
        let mut stream = &self.socket;
        stream.write_all(&[order]).unwrap();
        let mut answer = [0];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [order]);
    }

    /// The next connection of the socket carries many bytes to the end.
    fn carries_many_bytes(&self) {
        self.connect();
        self.meet(b'm');
        let mut stream = &self.socket;
        let sent = stream.write_all(&common::pattern(MANY));
        println!("seen sent: {:?}", sent.map_err(|error| error.kind()));
        self.show("after many bytes");
    }
}

/// Carries orders out, one connection after the other.
fn server(listener: &TcpListener) {
    let mut held = Vec::new();
    loop {
        let (mut stream, _) = listener.accept().unwrap();
        let mut order = [0];
        let begun = stream.read_exact(&mut order);
        if begun.is_err() {
            println!("seen no order");
            continue;
        }
        stream.write_all(&order).unwrap();
        match order[0] {
            b'q' => return,
            b'r' => {
                // Unread bytes make the close a reset.
                c::poll(&stream, libc::POLLIN, 5000).unwrap();
            }
            b'c' => {}
            _ => {
                let mut all = Vec::new();
                let end = stream.read_to_end(&mut all).map_err(|error| error.kind());
                let right = all == common::pattern(MANY);
                println!("seen order {}: {} bytes, {right}, {end:?}", order[0], all.len());
                if order[0] == b'h' {
                    held.push(stream);
                }
            }
        }
    }
}

fn client(port: u16) {
    // Used again and again.
    let one = Reused::new(port);
    one.show("unconnected");
    for _ in 0..2 {
        one.connect();
        one.meet(b'e');
        one.show("in use");
        one.disconnect();
        one.show("unconnected again");
    }
    one.carries_many_bytes();
    drop(one);

    // The peer resets the connection, or ends it.
    for order in [b'r', b'c'] {
        let one = Reused::new(port);
        one.connect();
        one.meet(order);
        if order == b'r' {
            (&one.socket).write_all(b"unread").unwrap();
        }
        let end = (&one.socket).read(&mut [0; 9]).map_err(|error| error.kind());
        println!("seen end: {end:?} {:?}", one.socket.local_addr().map(|name| name.ip()));
        one.show("ended");
        if order == b'r' {
            println!(
                "seen again: {}",
                c::connect(&one.socket, [127, 0, 0, 1].into(), port).is_ok()
            );
            println!("seen listen: {}", unsafe { libc::listen(one.fd(), 1) });
        }
        one.disconnect();
        one.show("unconnected after the end");
        one.carries_many_bytes();
    }

    // The program ends the connection itself first. The result of a disconnect depends on whether
    // the peer has also ended the connection: this one does not.
    let one = Reused::new(port);
    one.connect();
    one.meet(b'h');
    one.socket.shutdown(Shutdown::Both).unwrap();
    one.disconnect();
    one.show("unconnected after shutdown");
    one.carries_many_bytes();
    drop(one);

    // A refused connection.
    let one = Reused { port: free_port(), ..Reused::new(port) };
    one.connect();
    one.show("unconnected, refused");
    let one = Reused { port, ..one };
    one.carries_many_bytes();
    drop(one);

    // Refused while no call waits.
    let one = Reused { port: free_port(), ..Reused::new(port) };
    one.socket.set_nonblocking(true).unwrap();
    one.connect();
    c::poll(&one.socket, libc::POLLOUT, 5000).unwrap();
    println!("seen error: {:?}", one.socket.take_error().unwrap().map(|error| error.kind()));
    one.socket.set_nonblocking(false).unwrap();
    one.show("unconnected, refused later");
    let one = Reused { port, ..one };
    // The kernel reports once more that the first connection has failed.
    one.connect();
    one.carries_many_bytes();
    drop(one);

    // Two descriptors, one of them closed.
    let one = Reused::new(port);
    one.connect();
    one.meet(b'e');
    drop(one.socket.try_clone().unwrap());
    one.show("in use, beside a closed duplicate");
    let other = one.socket.try_clone().unwrap();
    one.disconnect();
    println!("seen duplicate: {}", properties(other.as_raw_fd()));
    one.carries_many_bytes();
    drop((one, other));

    // The socket listens afterwards.
    let one = Reused::new(port);
    one.connect();
    one.meet(b'e');
    one.disconnect();
    assert_eq!(unsafe { libc::listen(one.fd(), 1) }, 0);
    one.show("listening");
    drop(one);

    in_a_child(port);
    let one = Reused::new(port);
    one.connect();
    one.meet(b'q');
}

/// A child of a fork uses the connection: in both processes the program's options keep their values
/// and effects.
fn in_a_child(port: u16) {
    use std::time::Duration;
    let one = Reused::new(port);
    one.connect();
    one.meet(b'e');
    one.socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    one.socket.set_write_timeout(Some(Duration::from_secs(9))).unwrap();
    one.socket.set_nodelay(true).unwrap();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let child = c::fork(|| {
        let mut stream = &one.socket;
        stream.write_all(b"by a child").unwrap();
        let waited = stream.read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(waited.map_err(|kind| kind == ErrorKind::WouldBlock), Err(true));
        let text = properties(one.fd());
        (&theirs).write_all(text.as_bytes()).unwrap();
    });
    drop(ours.try_clone().unwrap());
    c::wait(child);
    let mut text = vec![0; 1 << 16];
    let n = (&ours).read(&mut text).unwrap();
    println!("seen in a child: {}", String::from_utf8_lossy(&text[..n]));
    one.show("in use beside a child");
    let waited = (&one.socket).read(&mut [0]).map_err(|error| error.kind());
    println!("seen time limit: {waited:?}");
    one.socket.set_read_timeout(Some(Duration::from_millis(70))).unwrap();
    println!("seen new limit: {:?}", one.socket.read_timeout().unwrap());
    let waited = (&one.socket).read(&mut [0]).map_err(|error| error.kind());
    println!("seen new time limit: {waited:?}");
}

/// The observations of the programs, in their order.
fn seen(text: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.split_once("seen "));
    lines.map(|(_, seen)| seen.to_owned()).collect()
}

/// The words that differ between two lines.
fn differences(tcp: &str, smc: &str) -> String {
    let words = |text: &str| -> BTreeMap<String, String> {
        let words = text.split(' ').filter_map(|word| word.split_once('='));
        words.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    let (tcp_words, smc_words) = (words(tcp), words(smc));
    let differ = tcp_words.iter().filter(|(name, value)| smc_words.get(*name) != Some(value));
    let differ: Vec<_> = differ
        .map(|(name, value)| format!("{name}: {value}, now {:?}", smc_words.get(name)))
        .collect();
    match differ.is_empty() {
        true => format!("{tcp}\n    now {smc}"),
        false => format!("{}: {}", tcp.split(':').next().unwrap_or_default(), differ.join("; ")),
    }
}

#[test]
fn a_socket_is_given_back_as_it_was() {
    if let Some((role, port)) = my_role() {
        match &*role {
            "server" => server(&TcpListener::bind(("127.0.0.1", port)).unwrap()),
            _ => client(port),
        }
        return;
    }
    let mut on_tcp: Option<[Vec<String>; 2]> = None;
    for (server_smc, client_smc) in [(false, false), (true, true), (true, false), (false, true)] {
        let fabric = Fabric::new(4);
        let port = free_port();
        let this = std::env::current_exe().unwrap();
        let server = role(&mut fabric.on(server_smc, &this), TEST, "server", port);
        await_listener(port);
        let mut command = fabric.on(client_smc, &this);
        if !server_smc {
            command.env("SMC_RUN_CONNECT", "");
        }
        let client = role(&mut command, TEST, "client", port);
        let texts = [client.finish_beside(&[&server]), server.finish()];
        let seen = texts.map(|text| seen(&text));
        if server_smc && client_smc {
            assert!(fabric.decided().0 >= 12, "on SMC and on TCP: {:?}", fabric.decided());
        }
        let Some(expected) = &on_tcp else {
            on_tcp = Some(seen);
            continue;
        };
        let pairs = expected.iter().flatten().zip(seen.iter().flatten());
        let differ: Vec<_> = pairs.filter(|(tcp, smc)| tcp != smc).collect();
        let differ: Vec<_> = differ.into_iter().map(|(a, b)| differences(a, b)).collect();
        let lens = (expected.each_ref().map(Vec::len), seen.each_ref().map(Vec::len));
        assert!(
            differ.is_empty() && lens.0 == lens.1,
            "server {server_smc}, client {client_smc}: {lens:?}\n  {}",
            differ.join("\n  ")
        );
    }
}
