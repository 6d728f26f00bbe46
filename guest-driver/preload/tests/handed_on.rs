// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Listeners handed on to a program without the library. TCP option 254 answers for a socket,
//! whichever program accepts its clients: no such program may read a byte of SMC, and all clients
//! must be served. The option needs root. Without root these tests print SKIPPED, and fail where
//! `CI=true`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

#[path = "../../tests/rendezvous/bed.rs"]
mod bed;
#[path = "common/c.rs"]
mod c;
mod common;
#[path = "common/handed.rs"]
mod handed;

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Fabric, Running, await_listener, eventually, role, test_of};
use handed::{CLIENTS, is_program};
use smc_rendezvous::{Options, PassedOn, Policy, Rendezvous, cgroup_of, grant};
use smc_test_support::TestDir;

const PORT: u16 = 6000;
/// The ways from one program to the next.
const WAYS: [&str; 15] = [
    "execve",
    "execvp",
    "fexecve",
    "execveat",
    "syscall",
    "fork",
    "raw fork",
    "shared memory",
    "posix_spawn",
    "system",
    "standard input",
    "setuid",
    "noexec",
    "unreadable",
    "SCM_RIGHTS",
];

/// A program with the library, and the rendezvous in the form of `smc run`.
fn with_library(fabric: &Fabric, passed: &PassedOn) -> Command {
    with_settings(fabric.smc(std::env::current_exe().unwrap()), passed)
}

/// Like [`with_library`], without any capability.
fn without_rights(fabric: &Fabric, passed: &PassedOn) -> Command {
    let mut command = fabric.smc("setpriv");
    command.args(["--bounding-set=-all", "--inh-caps=-all", "--securebits=+noroot"]);
    command.arg(std::env::current_exe().unwrap());
    with_settings(command, passed)
}

fn with_settings(mut command: Command, passed: &PassedOn) -> Command {
    command
        .env("SMC_RUN_CONNECT", "")
        .env("SMC_RUN_RENDEZVOUS", "auto")
        .env("SMC_RUN_OPTION", passed.to_string());
    command
}

fn plain() -> Command {
    Command::new(std::env::current_exe().unwrap())
}

fn client(mut command: Command, test: &str, first: &str, visits: usize) -> Running {
    command.env("VISITS", visits.to_string()).env("FIRST", first);
    role(&mut command, test, "client", PORT)
}

/// Runs a test in a network of its own, if this process is none of the programs.
fn on_loopback<T: FnOnce(&str) + Send>(test: T) {
    if !is_program() {
        bed::run(|| {
            bed::ip("link set lo up");
            test(test_of::<T>().unwrap());
        });
    }
}

/// Waits until no socket listens on [`PORT`] (1770 hexadecimal) any more.
fn await_closed() {
    eventually(|| {
        let text = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
        !text.lines().any(|line| line.contains(":1770 ") && line.contains(" 0A "))
    });
}

/// The start of a listener's owner.
type Start = fn(&Fabric, &PassedOn) -> Command;

fn attached() -> PassedOn {
    Rendezvous::attach(Options::default()).unwrap().pass_on().unwrap()
}

/// Hands a listener on in one way, and visits the next program with clients of both kinds.
fn hand_over(
    test: &str,
    way: &str,
    (first, early): (&str, bool),
    (start, passed): (Start, &PassedOn),
) {
    let fabric = Fabric::new(3);
    let mut owner = start(&fabric, passed);
    owner.env("WAY", way).env("FIRST", first);
    if !early {
        owner.env("AFTER", "1");
    }
    let place = TestDir::for_programs();
    match way {
        "setuid" => drop(owner.env("PROGRAM", program_of(&place, 0o4755))),
        "noexec" | "unreadable" => keep_the_library(&mut owner, &place),
        _ => {}
    }
    let socket = fabric.file("socket");
    let mut receiver = None;
    if way == "SCM_RIGHTS" {
        owner.env("SOCKET", &socket);
        let mut command = plain();
        command.env("SOCKET", &socket).env("FIRST", first);
        receiver = Some(role(&mut command, test, "receiver", PORT));
        eventually(|| socket.exists());
    }
    let owner = role(&mut owner, test, "owner", PORT);
    await_listener(PORT);
    if !early {
        // The owner hands the listener on before any client comes.
        eventually(|| fabric.said("left_listener") > 0);
    }
    // This client's SYN is answered if the listener is not handed on yet.
    let before = client(with_library(&fabric, passed), test, first, 1);
    before.finish_beside(&[&owner]);
    client(plain(), test, first, 1).finish_beside(&[&owner]);
    client(with_library(&fabric, passed), test, first, CLIENTS - 2).finish_beside(&[&owner]);
    if let Some(receiver) = receiver {
        receiver.finish();
        drop(owner);
    } else {
        owner.finish();
    }
    await_closed();
    assert_eq!(fabric.decided().0, 0, "{way}");
    assert_eq!(fabric.broken(), [""; 0], "{way}");
    assert_eq!(fabric.said("\"again\""), usize::from(early), "{way}");
}

/// Without capabilities the process cannot change the listener itself: no listener of its port answers
/// any more.
#[test]
fn a_process_without_rights_hands_its_listener_on() {
    on_loopback(|test| {
        for way in ["execve", "fork", "posix_spawn"] {
            for how in [("server", true), ("client", true), ("server", false), ("client", false)] {
                hand_over(test, way, how, (without_rights, &attached()));
            }
        }
    });
}

/// The processes of a container have the option by a grant to their cgroup.
#[test]
fn a_process_with_a_grant_hands_its_listener_on() {
    on_loopback(|test| {
        grant(&cgroup_of(std::process::id()).unwrap()).unwrap();
        let passed = Rendezvous::granted(Policy::default()).unwrap().pass_on().unwrap();
        for way in ["execve", "fork", "posix_spawn"] {
            for how in [("server", true), ("client", true), ("server", false), ("client", false)] {
                hand_over(test, way, how, (without_rights, &passed));
            }
        }
    });
}

/// A server whose listener a program with the library takes over loses nothing.
#[test]
fn a_program_with_the_library_goes_on_with_smc() {
    on_loopback(|test| {
        let ways = ["execve", "execvp", "fexecve", "execveat", "syscall", "fork", "posix_spawn"];
        for (way, early) in ways.into_iter().flat_map(|way| [(way, true), (way, false)]) {
            let fabric = Fabric::new(3);
            let passed = attached();
            let mut owner = with_library(&fabric, &passed);
            owner.env("WAY", way).env("KEEPS", "1");
            if !early {
                owner.env("AFTER", "1");
            }
            let owner = role(&mut owner, test, "owner", PORT);
            await_listener(PORT);
            let smc = || with_library(&fabric, &passed);
            client(smc(), test, "client", CLIENTS - 1).finish_beside(&[&owner]);
            client(plain(), test, "client", 1).finish_beside(&[&owner]);
            owner.finish();
            await_closed();
            assert_eq!(fabric.decided(), (2 * (CLIENTS - 1), 1), "{way}, early: {early}");
        }
    });
}

/// Like the test above, for a program that runs already, like the next HAProxy: the listener comes
/// by a message.
#[test]
fn a_program_that_gets_the_listener_by_a_message_goes_on_with_smc() {
    on_loopback(|test| {
        for early in [true, false] {
            let fabric = Fabric::new(3);
            let passed = attached();
            let socket = fabric.file("socket");
            let start = |role_of: &str| {
                let mut command = with_library(&fabric, &passed);
                command.env("WAY", "SCM_RIGHTS").env("SOCKET", &socket).env("FIRST", "client");
                if !early {
                    command.env("AFTER", "1");
                }
                role(&mut command, test, role_of, PORT)
            };
            let receiver = start("receiver");
            eventually(|| socket.exists());
            let owner = start("owner");
            await_listener(PORT);
            let smc = || with_library(&fabric, &passed);
            client(smc(), test, "client", CLIENTS - 1).finish_beside(&[&owner, &receiver]);
            client(plain(), test, "client", 1).finish_beside(&[&owner, &receiver]);
            receiver.finish();
            drop(owner);
            await_closed();
            assert_eq!(fabric.decided(), (2 * (CLIENTS - 1), 1), "early: {early}");
            assert_eq!(fabric.said("left_listener"), 0, "early: {early}");
        }
    });
}

/// An unused connection is decided before a program without the library gets it.
#[test]
fn a_connection_handed_on_has_no_byte_of_smc() {
    on_loopback(|test| {
        let ways = ["execve", "execvp", "fexecve", "syscall", "fork", "raw fork", "system"];
        let ways = ways.into_iter().chain(["posix_spawn", "setuid", "noexec", "unreadable"]);
        for (way, first) in ways.flat_map(|way| [(way, "server"), (way, "client")]) {
            for with in [true, false] {
                println!("{way}, {first} first, library at the client: {with}");
                let fabric = Fabric::new(3);
                let passed = attached();
                let mut owner = with_library(&fabric, &passed);
                owner.env("WAY", way).env("FIRST", first).env("CONNECTION", "1");
                let place = TestDir::for_programs();
                match way {
                    "setuid" => drop(owner.env("PROGRAM", program_of(&place, 0o4755))),
                    "noexec" | "unreadable" => keep_the_library(&mut owner, &place),
                    _ => {}
                }
                let owner = role(&mut owner, test, "owner", PORT);
                await_listener(PORT);
                let command = if with { with_library(&fabric, &passed) } else { plain() };
                client(command, test, first, 1).finish_beside(&[&owner]);
                owner.finish();
                await_closed();
                assert_eq!(fabric.decided().0, 0, "{way}");
                assert_eq!(fabric.broken(), [""; 0], "{way}");
                assert_eq!(fabric.said("\"again\""), 0, "{way}: the Proposal is declined");
            }
        }
    });
}

/// A server gets its listener unseen by the library. Its client's first attempt fails, invisible to
/// the client's program.
#[test]
fn a_client_connects_again_where_nobody_took_the_answer_back() {
    on_loopback(|test| {
        for first in ["server", "client"] {
            let fabric = Fabric::new(3);
            let passed = attached();
            let traffic = guest_driver::traffic::create(None).unwrap();
            let with_library = || {
                let mut command = with_library(&fabric, &passed);
                command.env("SMC_RUN_TRAFFIC", traffic.as_raw_fd().to_string());
                command
            };
            let mut owner = with_library();
            owner.env("WAY", "stolen").env("AFTER", "1");
            let owner = role(&mut owner, test, "owner", PORT);
            await_listener(PORT);
            let mut thief = plain();
            thief.env("OWNER", owner.pid().to_string()).env("FIRST", first);
            thief.env("NUMBER", number_of_listener(owner.pid()).to_string());
            let thief = role(&mut thief, test, "thief", PORT);
            eventually(|| thief.said().contains("stolen"));
            // The second process knows what the first one has seen.
            client(with_library(), test, first, 2).finish_beside(&[&thief]);
            client(with_library(), test, first, 2).finish_beside(&[&thief]);
            thief.finish();
            drop(owner);
            await_closed();
            assert_eq!((fabric.decided().0, fabric.said("\"again\"")), (0, 1));
        }
    });
}

/// The number of the listening descriptor in a process.
fn number_of_listener(pid: u32) -> c_int {
    let table = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    let line = table.lines().find(|line| line.contains(":1770 ") && line.contains(" 0A ")).unwrap();
    let socket = format!("socket:[{}]", line.split_whitespace().nth(9).unwrap());
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let is_it =
        |fd: &std::fs::DirEntry| std::fs::read_link(fd.path()).unwrap() == Path::new(&socket);
    fds.into_iter().find(is_it).unwrap().file_name().to_str().unwrap().parse().unwrap()
}

/// A listener that a program with the library inherits, and does not use, stays unchanged.
#[test]
fn a_listener_that_leaks_into_a_program_with_the_library_stays_plain() {
    on_loopback(|test| {
        let fabric = Fabric::new(3);
        let passed = attached();
        // The settings are for the server's child, which has the library.
        let mut server = with_library(&fabric, &passed);
        server.env_remove("LD_PRELOAD").env("LIBRARY", common::library());
        let server = role(&mut server, test, "leaky", PORT);
        eventually(|| server.said().contains("ready"));
        client(with_library(&fabric, &passed), test, "client", CLIENTS).finish_beside(&[&server]);
        server.finish();
        await_closed();
        assert_eq!((fabric.decided(), fabric.said("\"again\"")), ((0, CLIENTS), 0));
    });
}

/// The clients of a closed listener may come to another one, of a program without the library.
#[test]
fn a_listener_whose_clients_may_migrate_does_not_answer() {
    on_loopback(|test| {
        // Of the network of this thread.
        let may = "/proc/sys/net/ipv4/tcp_migrate_req";
        for (migrates, expected) in [("0", 2), ("1", 0)] {
            std::fs::write(may, migrates).unwrap();
            let (fabric, passed) = (Fabric::new(3), attached());
            let mut owner = with_library(&fabric, &passed);
            owner.env("SHARES", "1").env("AFTER", "1").env("SERVES", "1").env("WAY", "none");
            let owner = role(&mut owner, test, "owner", PORT);
            await_listener(PORT);
            client(with_library(&fabric, &passed), test, "client", 1).finish_beside(&[&owner]);
            owner.finish();
            await_closed();
            assert_eq!(fabric.decided().0, expected, "tcp_migrate_req = {migrates}");
        }
    });
}

/// A copy of this program, owned by another user. With the set-user-id bit the kernel gives the
/// program other rights, and the loader does not load the library.
fn program_of(place: &TestDir, mode: u32) -> PathBuf {
    let copy = place.path("program");
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    std::os::unix::fs::chown(&copy, Some(65534), None).unwrap();
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(mode)).unwrap();
    copy
}

/// The next program is told to load the library, from a directory mounted with `noexec` by then.
fn keep_the_library(owner: &mut Command, place: &TestDir) {
    let directory = place.path("library");
    std::fs::create_dir(&directory).unwrap();
    let copy = directory.join("libsmc_preload.so");
    std::fs::copy(common::library(), &copy).unwrap();
    owner.env("LD_PRELOAD", copy).env("PROGRAM", program_of(place, 0o755)).env("KEEPS", "1");
}

fn each_way(test: &str, first: &str, early: bool) {
    for way in WAYS {
        println!("{way}");
        hand_over(test, way, (first, early), (with_library, &attached()));
    }
}

#[test]
fn a_listener_handed_on_before_its_first_client_is_plain_and_the_server_speaks_first() {
    on_loopback(|test| each_way(test, "server", false));
}

#[test]
fn a_listener_handed_on_before_its_first_client_is_plain_and_the_client_speaks_first() {
    on_loopback(|test| each_way(test, "client", false));
}

#[test]
fn a_client_that_waits_while_its_listener_is_handed_on_is_served_and_the_server_speaks_first() {
    on_loopback(|test| each_way(test, "server", true));
}

#[test]
fn a_client_that_waits_while_its_listener_is_handed_on_is_served_and_the_client_speaks_first() {
    on_loopback(|test| each_way(test, "client", true));
}
