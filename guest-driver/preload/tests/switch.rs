// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A policy file that changes under running programs: new connections follow, open ones stay.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "../../tests/rendezvous/bed.rs"]
mod bed;
mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::{Fabric, Running, await_listener, eventually, free_port, my_role, role};
use smc_rendezvous::{Options, PassedOn, Rendezvous};
use virtio_ism_abi::event::LeaveReason;

const TCP: &str = "default = 'tcp'";
const SMC: &str = "default = 'smc'";

/// The client ends when this file exists.
fn end_file() -> PathBuf {
    std::env::var_os("END").unwrap().into()
}

fn echo(mut stream: TcpStream) {
    let mut word = [0; 5];
    while stream.read_exact(&mut word).is_ok() {
        stream.write_all(&word).unwrap();
    }
}

fn ask(stream: &mut TcpStream) {
    stream.write_all(b"hello").unwrap();
    let mut back = [0; 5];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"hello");
}

/// The program of both roles. The client keeps one connection, and makes others.
fn is_program() -> bool {
    let Some((role, port)) = my_role() else { return false };
    if role == "server" {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let kept = listener.accept().unwrap().0;
        let kept = std::thread::spawn(move || echo(kept));
        while !kept.is_finished() {
            echo(listener.accept().unwrap().0);
        }
        return true;
    }
    let connect = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut kept = connect();
    while !end_file().exists() {
        ask(&mut kept);
        ask(&mut connect());
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(kept);
    // The server's loop looks once more.
    std::thread::sleep(Duration::from_millis(20));
    while TcpStream::connect(("127.0.0.1", port)).is_ok() {
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

struct Pair {
    fabric: Fabric,
    server: Running,
    client: Running,
}

impl Pair {
    /// Starts a server and a client with these policy files.
    fn start(test: &str, server: Option<&Path>, client: Option<&Path>, fabric: Fabric) -> Pair {
        Pair::start_with(test, (server, client), fabric, None)
    }

    /// Like [`Pair::start`]; with an option, the programs have no other way to find each other.
    fn start_with(
        test: &str,
        (server, client): (Option<&Path>, Option<&Path>),
        fabric: Fabric,
        option: Option<&PassedOn>,
    ) -> Pair {
        let port = free_port();
        let program = |policy: Option<&Path>| {
            let mut command: Command = fabric.smc(std::env::current_exe().unwrap());
            command.env("SMC_RUN_ALWAYS", "*").env("END", fabric.file("end"));
            // Without the variable the file of the machine counts.
            command.env("SMC_CONFIG", "");
            if let Some(policy) = policy {
                command.env("SMC_RUN_POLICY", policy);
            }
            if let Some(option) = option {
                command.env("SMC_RUN_CONNECT", "").env("SMC_RUN_RENDEZVOUS", "auto");
                command.env("SMC_RUN_OPTION", option.to_string());
            }
            command
        };
        let server = role(&mut program(server), test, "server", port);
        await_listener(port);
        let client = role(&mut program(client), test, "client", port);
        Pair { fabric, server, client }
    }

    /// Waits until further connections are of this kind, at both ends, and none of the other kind.
    fn await_only(&self, smc: bool) {
        let of_kind = || if smc { self.fabric.decided() } else { swap(self.fabric.decided()) };
        let mut others = of_kind().1;
        let mut begun = of_kind().0;
        eventually(|| {
            let (now, other) = of_kind();
            if other != others {
                (others, begun) = (other, now);
            }
            now >= begun + 20
        });
    }

    fn end(self) -> Fabric {
        std::fs::write(self.fabric.file("end"), "").unwrap();
        self.client.finish_beside(&[&self.server]);
        self.server.finish();
        assert_eq!(self.fabric.broken(), Vec::<String>::new());
        self.fabric
    }
}

fn swap((smc, tcp): (usize, usize)) -> (usize, usize) {
    (tcp, smc)
}

fn put(file: &Path, text: &str) {
    let new = file.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, file).unwrap();
}

#[test]
fn new_connections_follow_a_changed_policy() {
    const TEST: &str = "new_connections_follow_a_changed_policy";
    if is_program() {
        return;
    }
    // The file of both ends, of the server, and of the client.
    for (server, client) in [(true, true), (true, false), (false, true)] {
        let fabric = Fabric::new(2);
        let file = fabric.file("policy.toml");
        put(&file, SMC);
        let of = |end: bool| end.then_some(&*file);
        let pair = Pair::start(TEST, of(server), of(client), fabric);
        pair.await_only(true);
        put(&file, TCP);
        pair.await_only(false);
        // A client does not report a connection for which nothing was expected.
        let said = || pair.fabric.said("the policy says TCP") > 0;
        if server {
            eventually(said);
        }
        assert_eq!(said(), server);
        // Written in its place, as an editor may do.
        std::fs::write(&file, SMC).unwrap();
        pair.await_only(true);
        pair.end();
    }
}

/// Open connections go on over TCP, which the kept one of the programs shows by its answers.
#[test]
fn a_drained_pool_says_so_to_new_connections() {
    const TEST: &str = "a_drained_pool_says_so_to_new_connections";
    if is_program() {
        return;
    }
    let pair = Pair::start(TEST, None, None, Fabric::with_pool(8));
    pair.await_only(true);
    let daemon = pair.fabric.daemon();
    let pool = daemon.list().remove(0).spec.name;
    let left = daemon.drain(&pool, LeaveReason::Drain, Duration::from_secs(60)).unwrap();
    assert_eq!((left.left, left.asked), (2, 2));
    pair.await_only(false);
    assert!(pair.fabric.said("it is drained, or about to go") > 0);
    assert_eq!(daemon.undrain(&pool).unwrap(), 2);
    pair.await_only(true);
    pair.end();
}

/// The programs begin after the drain, with devices from the daemon.
#[test]
fn a_pool_drained_before_a_program_begins_says_so_and_comes_back() {
    const TEST: &str = "a_pool_drained_before_a_program_begins_says_so_and_comes_back";
    if is_program() {
        return;
    }
    let fabric = Fabric::with_pool(8);
    let pool = fabric.daemon().list().remove(0).spec.name;
    let minute = Duration::from_secs(60);
    fabric.daemon().drain(&pool, LeaveReason::Drain, minute).unwrap();
    let pair = Pair::start(TEST, None, None, fabric);
    pair.await_only(false);
    assert!(pair.fabric.said("it is drained, or about to go") > 0);
    // The client may not have opened its device yet.
    assert!(pair.fabric.daemon().undrain(&pool).unwrap() > 0);
    pair.await_only(true);
    pair.end();
}

/// The server's listener answers TCP option 254 or not since before the change.
#[test]
fn a_listener_follows_a_changed_policy() {
    const TEST: &str = "a_listener_follows_a_changed_policy";
    if is_program() {
        return;
    }
    bed::run(|| {
        bed::ip("link set lo up");
        let option = Rendezvous::attach(Options::default()).unwrap().pass_on().unwrap();
        for first in [SMC, TCP] {
            let fabric = Fabric::new(2);
            let file = fabric.file("policy.toml");
            put(&file, first);
            let pair = Pair::start_with(TEST, (Some(&file), None), fabric, Some(&option));
            pair.await_only(first == SMC);
            put(&file, if first == SMC { TCP } else { SMC });
            pair.await_only(first != SMC);
            put(&file, first);
            pair.await_only(first == SMC);
            pair.end();
        }
    });
}

#[test]
fn a_file_without_meaning_changes_nothing() {
    const TEST: &str = "a_file_without_meaning_changes_nothing";
    if is_program() {
        return;
    }
    let fabric = Fabric::new(2);
    let file = fabric.file("policy.toml");
    put(&file, SMC);
    let pair = Pair::start(TEST, Some(&file), Some(&file), fabric);
    pair.await_only(true);
    put(&file, "default = 'tcp");
    eventually(|| pair.fabric.said("policy_stays") >= 2);
    pair.await_only(true);
    std::fs::remove_file(&file).unwrap();
    pair.await_only(true);
    // A rule with a key of a later release is TCP.
    put(&file, "[[rule]]\nuse = 'always-smc'\nlater = 1");
    pair.await_only(false);
    assert!(pair.fabric.said("policy_key") >= 2);
    // A FIFO would hold up a reader.
    std::fs::remove_file(&file).unwrap();
    let fifo = Command::new("mkfifo").arg(&file).status().unwrap();
    assert!(fifo.success());
    pair.await_only(false);
    pair.end();
}

#[test]
fn a_share_of_the_connections_is_smc() {
    const TEST: &str = "a_share_of_the_connections_is_smc";
    if is_program() {
        return;
    }
    let fabric = Fabric::new(2);
    let file = fabric.file("policy.toml");
    let share = |share: &str| {
        put(&file, &format!("[[rule]]\nuse = 'smc'\nwhen = 'connect'\nshare = '{share}'"));
    };
    share("0%");
    let pair = Pair::start(TEST, None, Some(&file), fabric);
    pair.await_only(false);
    share("50%");
    let before = pair.fabric.decided();
    eventually(|| {
        let now = pair.fabric.decided();
        now.0 >= before.0 + 20 && now.1 >= before.1 + 20
    });
    share("100%");
    pair.await_only(true);
    pair.end();
}

/// A rule of another user, program, cgroup or port concerns nothing here.
#[test]
fn a_changed_rule_concerns_its_user_program_cgroup_and_port_alone() {
    const TEST: &str = "a_changed_rule_concerns_its_user_program_cgroup_and_port_alone";
    if is_program() {
        return;
    }
    let fabric = Fabric::new(2);
    let file = fabric.file("policy.toml");
    put(&file, SMC);
    let pair = Pair::start(TEST, Some(&file), None, fabric);
    pair.await_only(true);
    let user = rustix::process::geteuid().as_raw();
    let name = std::env::current_exe().unwrap();
    let name = name.file_name().unwrap().to_str().unwrap();
    let rules = |user: u32, program: &str, cgroup: &str, ports: &str| {
        let fits = format!("users = [{user}]\nprograms = ['{program}']\ncgroups = ['{cgroup}']");
        put(&file, &format!("[[rule]]\nuse = 'tcp'\n{fits}\nports = ['{ports}']"));
    };
    for (n, [is_user, is_program, is_cgroup, is_port]) in [
        [false, true, true, true],
        [true, false, true, true],
        [true, true, false, true],
        [true, true, true, false],
        [true, true, true, true],
    ]
    .into_iter()
    .enumerate()
    {
        rules(
            if is_user { user } else { user + 1 },
            if is_program { name } else { "other" },
            if is_cgroup { "/" } else { "no.service" },
            if is_port { "1-65535" } else { "1-2" },
        );
        pair.await_only(n != 4);
    }
    pair.end();
}
