// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Socket activation: the test is the service manager, and keeps the sockets open.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::io::fcntl_dupfd_cloexec;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use rustix::process::{Signal, kill_process};
use vhost_device_ism::management::{AddGuest, Client};

use super::front_end::*;
use super::place::connected;
use super::pool::{ask, front_end};
use super::program::{PROGRAM, Program, strict, work};

/// A socket with a path, not listening.
fn bound(path: &Path, kind: SocketType) -> OwnedFd {
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

fn listening(path: &Path, kind: SocketType) -> OwnedFd {
    let socket = bound(path, kind);
    listen(&socket, 16).unwrap();
    socket
}

/// The program with these sockets as descriptors from 3 on. A shell execs the program, so LISTEN_PID can be
/// the shell's process id.
fn activated(sockets: &[&OwnedFd], args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "export LISTEN_PID=$$; exec \"$@\"", "sh", PROGRAM]).args(args);
    command.env("LISTEN_FDS", sockets.len().to_string()).env_remove("RUST_LOG");
    pass(&mut command, sockets);
    command
}

fn pass(command: &mut Command, sockets: &[&OwnedFd]) {
    // Copies with numbers above the target range.
    let copies: Vec<OwnedFd> =
        sockets.iter().map(|socket| fcntl_dupfd_cloexec(socket, 100).unwrap()).collect();
    let place_them = move || {
        for (number, copy) in (3..).zip(&copies) {
            // SAFETY: the child has no use for another descriptor with this number.
            if unsafe { libc::dup2(copy.as_raw_fd(), number) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure calls only dup2, allowed there.
    unsafe { command.pre_exec(place_them) };
}

fn run(mut command: Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn start(place: &Place, sockets: &[&OwnedFd], args: &[&str]) -> Program {
    let mut command = activated(sockets, args);
    command.stderr(Stdio::piped());
    Program::start_by(command, place, &[])
}

#[test]
fn sockets_of_every_kind_are_served_and_outlive_the_daemon() {
    let place = Place::new();
    let [a, b, pool, management, metrics] =
        ["a", "b", "p", "m", "r"].map(|name| place.path(name).to_str().unwrap().to_owned());
    let stream = |path: &str| listening(Path::new(path), SocketType::STREAM);
    let made = [
        stream(&metrics),
        listening(Path::new(&pool), SocketType::SEQPACKET),
        stream(&a),
        stream(&management),
    ];
    // The daemon makes sockets not passed: b's. The path of a is given in another form.
    let directory = place.path("..").join(Path::new(&a).parent().unwrap().file_name().unwrap());
    let odd = directory.join("a").to_str().unwrap().to_owned();
    let pool_of_two = format!("{pool},devices=2");
    let options = ["-s", &odd, "-s", &b, "-s", &pool_of_two, "--management", &management];
    let mut options = [&options[..], &["--metrics", &metrics, strict()]].concat();
    if rustix::process::geteuid().is_root() {
        options.extend(["--user", "65534:65533"]);
    }
    let mut program = start(&place, &made.each_ref(), &options);
    work(Path::new(&a), Path::new(&b));
    let (_member, _) = front_end(ask(Path::new(&pool)).unwrap());
    let mut client = Client::connect(&management).unwrap();
    assert_eq!(client.list().unwrap().len(), 4, "three guests, and a front end of the pool");
    let mut reader = Client::connect(&metrics).unwrap();
    assert!(reader.metrics().unwrap().contains("ism_connected"));
    assert!(reader.remove("a").is_err());
    // Clients see the user who started the daemon, even after a change of user.
    let peer = rustix::net::sockopt::socket_peercred(connected(Path::new(&a))).unwrap();
    assert_eq!(peer.uid, rustix::process::geteuid());
    let said = program.end(Signal::TERM);
    assert!(!said.contains("ERROR"), "{said}");
    for path in [&a, &pool, &management, &metrics] {
        assert!(Path::new(path).exists(), "{path} is not the daemon's to remove");
    }
    assert!(!Path::new(&b).exists());
}

#[test]
fn front_ends_wait_in_the_queue_while_the_daemon_starts_again() {
    let place = Place::new();
    let [a, b, pool] = ["a", "b", "p"].map(|name| place.path(name));
    let sockets = [
        listening(&a, SocketType::STREAM),
        listening(&b, SocketType::STREAM),
        listening(&pool, SocketType::SEQPACKET),
    ];
    let words = [&a, &b, &pool].map(|path| path.to_str().unwrap().to_owned());
    let pool_of_two = format!("{},devices=2", words[2]);
    let options = ["-s", &words[0], "-s", &words[1], "-s", &pool_of_two, strict()];
    let daemon = || start(&place, &sockets.each_ref(), &options);
    let greet = |path: &Path| {
        let path = path.to_owned();
        std::thread::spawn(move || FrontEnd::greet(&path))
    };
    // Before a daemon runs.
    let waiting = greet(&a);
    let member = {
        let pool = pool.clone();
        std::thread::spawn(move || ask(&pool).unwrap())
    };
    let mut first = daemon();
    let (mut served, gid) = waiting.join().unwrap();
    drop(front_end(member.join().unwrap()));
    // Behind a connected front end: served by the next daemon.
    let waiting = greet(&a);
    first.end(Signal::TERM);
    served.wait_cut();
    assert!(!waiting.is_finished());
    let second = daemon();
    let (mut served, other) = waiting.join().unwrap();
    assert_ne!(gid, other);
    // A killed daemon leaves a connection of its own in the queue.
    let waiting = greet(&a);
    kill_process(second.pid(), Signal::KILL).unwrap();
    served.wait_cut();
    drop(second);
    let mut third = daemon();
    drop(waiting.join().unwrap());
    work(&a, &b);
    third.end(Signal::TERM);
    assert!(a.exists() && b.exists() && pool.exists());
}

/// Starts the program with one descriptor to refuse, also with `--check-config`.
fn refuses(socket: &OwnedFd, option: &str, expected: &str) {
    for more in [&[][..], &["--check-config"]] {
        let output = run(activated(&[socket], &[&["-s", option][..], more].concat()));
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(expected), "{said} not: {expected}");
    }
}

#[test]
fn a_descriptor_that_cannot_be_served_is_refused_by_its_number_and_path() {
    let place = Place::new();
    let path = |name: &str| place.path(name);
    let text = |name: &str| place.path(name).to_str().unwrap().to_owned();
    let third = |name: &str, what: &str| format!("passed descriptor 3, {}: {what}", text(name));

    let other = listening(&path("other"), SocketType::STREAM);
    let nobody = "no guest, and neither the management nor the metrics socket, has this path";
    refuses(&other, &text("a"), &third("other", nobody));
    let mute = bound(&path("mute"), SocketType::STREAM);
    refuses(&mute, &text("mute"), &third("mute", "it does not listen"));
    let datagrams = bound(&path("datagrams"), SocketType::DGRAM);
    refuses(&datagrams, &text("datagrams"), &third("datagrams", "it is a socket of datagrams"));
    let kind = |expected| {
        format!("it has another type than the configured socket of this path, which is {expected}")
    };
    let packets = listening(&path("packets"), SocketType::SEQPACKET);
    refuses(&packets, &text("packets"), &third("packets", &kind("SOCK_STREAM")));
    let stream = format!("{},devices=2", text("other"));
    refuses(&other, &stream, &third("other", &kind("SOCK_SEQPACKET")));
    let file = File::create(path("file")).unwrap().into();
    refuses(&file, &text("file"), &third("file", "it is no Unix socket"));
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap().into();
    refuses(&tcp, &text("a"), "passed descriptor 3, socket:[");
    let (pair, _other_end) = UnixStream::pair().unwrap();
    refuses(&pair.into(), &text("a"), "passed descriptor 3: it does not listen");
    let name = format!("ism-activation-{}", std::process::id());
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let hidden =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    bind(&hidden, &address).unwrap();
    listen(&hidden, 1).unwrap();
    refuses(&hidden, &text("a"), "passed descriptor 3: it has no path in the file system");

    // All mistakes are reported at once: a name, a missing descriptor, a duplicate.
    let twin = listening(&path("twin"), SocketType::STREAM);
    std::fs::remove_file(path("twin")).unwrap();
    let again = listening(&path("twin"), SocketType::STREAM);
    let mut command = activated(&[&twin, &other, &again], &["-s", &text("twin")]);
    command.env("LISTEN_FDS", "4").env("LISTEN_FDNAMES", "one:two:three:four");
    let output = run(command);
    let said = said(&output);
    for line in [
        format!("passed descriptor 4 (\"two\"), {}: {nobody}", text("other")),
        format!("passed descriptor 5 (\"three\"), {}: descriptor 3 has the same", text("twin")),
        "passed descriptor 6 (\"four\"): it is not open".to_owned(),
    ] {
        assert!(said.contains(&line), "{said} not: {line}");
    }
    for name in ["other", "mute", "datagrams", "packets", "file", "twin"] {
        assert!(path(name).exists(), "{name} was removed");
    }
}

#[test]
fn descriptors_of_another_process_are_left_alone() {
    let place = Place::new();
    let path = place.path("a");
    let socket = listening(&path, SocketType::STREAM);
    let mut command = Command::new(PROGRAM);
    command.arg("-s").arg(&path).env("LISTEN_PID", "1").env("LISTEN_FDS", "1");
    pass(&mut command, &[&socket]);
    // So the daemon makes its own socket, although another one exists at the path.
    let output = run(command);
    assert!(said(&output).contains("is in use by another program"), "{}", said(&output));
    // --fd works independently of LISTEN_FDS.
    let mut program = start(&place, &[&socket], &["--fd", "3", strict()]);
    drop(FrontEnd::greet(&path));
    program.end(Signal::TERM);
}

#[test]
fn checking_a_configuration_counts_the_sockets_and_leaves_them_as_they_are() {
    let place = Place::new();
    let path = place.path("a");
    let socket = listening(&path, SocketType::STREAM);
    let _waiting = [connected(&path), connected(&path)];
    let output = run(activated(&[&socket], &["-s", path.to_str().unwrap(), "--check-config"]));
    let counted = "nothing is wrong; fabrics: 1, guests: 1, passed sockets: 1\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), counted, "{}", said(&output));
    // The queue has room as before.
    drop(connected(&path));
}

#[test]
fn an_activated_socket_stays_when_its_guest_goes_and_comes() {
    let place = Place::new();
    let (path, management) = (place.path("a"), place.path("m"));
    let socket = listening(&path, SocketType::STREAM);
    let write = |guest: &str| {
        let text = format!("management = {management:?}\n{guest}");
        std::fs::write(place.path("c.toml"), text).unwrap();
    };
    let guest = format!("[[guest]]\nsocket = {path:?}\n");
    write(&guest);
    let config = place.path("c.toml");
    let mut program = start(&place, &[&socket], &["--config", config.to_str().unwrap(), strict()]);
    until_listening(&management);
    let mut client = Client::over(connected(&management)).unwrap();
    // Changed settings: the front end is cut, and the next one gets the new settings.
    let (mut front_end, _) = FrontEnd::greet(&path);
    write(&format!("{guest}max-maps = 4\n"));
    assert_eq!(client.reload().unwrap().changed, ["a"]);
    front_end.wait_cut();
    drop(FrontEnd::greet(&path));
    // The guest is removed and added: front ends connecting meanwhile wait.
    write("");
    assert_eq!(client.reload().unwrap().removed, ["a"]);
    assert!(path.exists());
    let waiting = {
        let path = path.clone();
        std::thread::spawn(move || FrontEnd::greet(&path))
    };
    client.add(&AddGuest { socket: path.clone(), ..AddGuest::default() }).unwrap();
    drop(waiting.join().unwrap());
    client.remove("a").unwrap();
    // A pool takes a socket of another type.
    let pool = AddGuest { socket: path.clone(), devices: Some(2), ..AddGuest::default() };
    let refused = client.add(&pool).unwrap_err().to_string();
    let expected = "was passed as SOCK_STREAM, and SOCK_SEQPACKET is needed";
    assert!(refused.contains(expected), "{refused}");
    program.end(Signal::TERM);
    assert!(path.exists() && !management.exists());
}

#[test]
fn a_client_behind_a_removed_guest_is_served_by_the_one_that_is_added_at_once() {
    let place = Place::new();
    let (path, management) = (place.path("a"), place.path("m"));
    let socket = listening(&path, SocketType::STREAM);
    let words = [&path, &management].map(|path| path.to_str().unwrap().to_owned());
    // Standard error is not read before the end.
    let log = ["--log-level", "warn"];
    let options = ["-s", &words[0], "--management", &words[1], strict(), log[0], log[1]];
    let mut program = start(&place, &[&socket], &options);
    until_listening(&management);
    // Both requests at once: the daemon adds the guest while the thread of the cut front end still ends.
    let mut client = connected(&management);
    let mut answers = BufReader::new(client.try_clone().unwrap());
    let mut answer = String::new();
    let requests =
        format!("{{\"op\":\"remove\",\"name\":\"a\"}}\n{{\"op\":\"add\",\"socket\":{path:?}}}\n");
    let (mut served, _) = FrontEnd::greet(&path);
    for _ in 0..200 {
        // A front end waits in connect(2), behind the daemon's own connection.
        let waiting = {
            let path = path.clone();
            std::thread::spawn(move || FrontEnd::greet(&path))
        };
        client.write_all(requests.as_bytes()).unwrap();
        for _ in 0..2 {
            answer.clear();
            answers.read_line(&mut answer).unwrap();
            assert!(answer.contains("\"ok\":true"), "{answer}");
        }
        served.wait_cut();
        served = waiting.join().unwrap().0;
    }
    program.end(Signal::TERM);
}
