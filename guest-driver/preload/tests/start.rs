// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cost of starting a program, and the costs avoided at its first connection.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::time::Duration;

use common::{Fabric, await_listener, free_port, my_role, role};

/// Kilobytes of the first part of libc changed by the program: headers and the table of symbols.
fn changed(smaps: &str) -> usize {
    let is_first = |line: &&str| line.contains(" r--p 00000000 ") && line.contains("/libc.so");
    let mut lines = smaps.lines().skip_while(|line| !is_first(line));
    let line = lines.find(|line| line.starts_with("Private_Dirty:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The memory of an idle program with the library.
fn memory() -> String {
    let fabric = Fabric::new(1);
    let output = fabric.smc("cat").arg("/proc/self/smaps").output().unwrap();
    let smaps = String::from_utf8(output.stdout).unwrap();
    assert!(smaps.contains("/libsmc_preload.so"), "{smaps}");
    smaps
}

#[test]
fn libcs_table_of_symbols_stays_as_it_is_until_the_program_opens_an_object() {
    let smaps = memory();
    assert_eq!(changed(&smaps), 0, "{smaps}");
}

#[test]
fn the_unwinder_is_not_loaded_until_somebody_needs_it() {
    let smaps = memory();
    assert!(!smaps.contains("/libgcc_s"), "{smaps}");
}

/// How many numbers the kernel's table of this process's descriptors has.
fn table_size() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("FDSize:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn the_first_connection_finds_a_table_of_descriptors_that_is_large_enough() {
    const TEST: &str = "the_first_connection_finds_a_table_of_descriptors_that_is_large_enough";
    if let Some((end, port)) = my_role() {
        let before = table_size();
        let mut stream = match end.as_str() {
            "server" => TcpListener::bind(("127.0.0.1", port)).unwrap().accept().unwrap().0,
            _ => TcpStream::connect(("127.0.0.1", port)).unwrap(),
        };
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        // The kernel lets all processors see a larger table before a thread goes on.
        assert_eq!(table_size(), before);
        return;
    }
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let most = most.unwrap_or(u64::MAX);
    for limit in [1024, 4096, 5000, 20_000, 100_000].into_iter().filter(|limit| *limit <= most) {
        let fabric = Fabric::new(2);
        let command = || {
            let mut command = fabric.smc(std::env::current_exe().unwrap());
            let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            // SAFETY: the child of a fork makes one system call.
            unsafe {
                command.pre_exec(move || {
                    let set = libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
                    if set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
                })
            };
            command
        };
        let port = free_port();
        let server = role(&mut command(), TEST, "server", port);
        await_listener(port);
        role(&mut command(), TEST, "client", port).finish();
        server.finish();
        assert_eq!(fabric.decided(), (2, 0), "limit {limit}");
    }
}

/// A daemon that was stopped, for example, takes connections by its kernel and answers none. A process
/// waits for the answer once and not at each of its connections.
#[test]
fn connections_do_not_wait_one_after_the_other_for_a_daemon_that_hangs() {
    const TEST: &str = "connections_do_not_wait_one_after_the_other_for_a_daemon_that_hangs";
    const CONNECTIONS: usize = 5;
    if let Some((end, port)) = my_role() {
        let exchange = |mut stream: TcpStream| {
            stream.write_all(b"x").unwrap();
            stream.read_exact(&mut [0]).unwrap();
        };
        if end == "server" {
            let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
            listener.incoming().take(CONNECTIONS).for_each(|stream| exchange(stream.unwrap()));
        } else {
            for _ in 0..CONNECTIONS {
                exchange(TcpStream::connect(("127.0.0.1", port)).unwrap());
                std::thread::sleep(Duration::from_millis(300));
            }
        }
        return;
    }
    let fabric = Fabric::without_daemon();
    let daemon = UnixListener::bind(fabric.devices().join("00.sock")).unwrap();
    let port = free_port();
    let end = |name| role(&mut fabric.smc(std::env::current_exe().unwrap()), TEST, name, port);
    let server = end("server");
    await_listener(port);
    end("client").finish();
    server.finish();
    daemon.set_nonblocking(true).unwrap();
    let asked = daemon.incoming().map_while(Result::ok).count();
    // Once by the client. The server has no Proposal to answer.
    assert!((1..=2).contains(&asked), "asked {asked} times");
    assert_eq!(fabric.decided().0, 0);
}

/// A static program, and its output about its own beginning.
#[cfg(target_arch = "x86_64")]
const BEGINNING: &str = r#"
#define _GNU_SOURCE
#include <elf.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static __thread int own = 7;
int main(int argc, char **argv, char **environment) {
    for (int i = 0; i < argc; i++) printf("argument %s\n", argv[i]);
    for (; *environment; environment++) printf("variable %s\n", *environment);
    Elf64_auxv_t *entry = (Elf64_auxv_t *)(environment + 1);
    for (; entry->a_type != AT_NULL; entry++) {
        int is_address = entry->a_type == AT_RANDOM || entry->a_type == AT_EXECFN
            || entry->a_type == AT_PLATFORM || entry->a_type == AT_SYSINFO_EHDR;
        printf("entry %ld %lx\n", entry->a_type, is_address ? 0 : entry->a_un.a_val);
    }
    char text[4096] = "", line[256];
    if (readlink("/proc/self/exe", text, sizeof text - 1) < 0) return 1;
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status))
        if (!strncmp(line, "Sig", 3) || !strncmp(line, "Shd", 3) || !strncmp(line, "Threads", 7)
            || !strncmp(line, "TracerPid", 9) || !strncmp(line, "PPid", 4)) printf("%s", line);
    printf("file %s, own %d, parent %d\n", text, own, getppid());
    return 5;
}
"#;

#[cfg(target_arch = "x86_64")]
#[test]
fn a_static_program_begins_as_without_a_loader() {
    let fabric = Fabric::without_daemon();
    let (source, program) = (fabric.file("beginning.c"), fabric.file("beginning"));
    std::fs::write(&source, BEGINNING).unwrap();
    let mut cc = std::process::Command::new("cc");
    assert!(cc.args(["-static", "-o"]).args([&program, &source]).status().unwrap().success());
    let run = |loads: bool| {
        let mut command = fabric.smc(&program);
        let load = move || match loads {
            // The loader waits for the program.
            true => ism_sys::Loader::start().map(std::mem::forget).map_err(std::io::Error::other),
            false => Ok(()),
        };
        // SAFETY: the child has one thread, and its copy of the allocator is usable.
        let output = unsafe { command.args(["one", ""]).pre_exec(load) }.output().unwrap();
        assert_eq!(output.status.code(), Some(5), "{output:?}");
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(run(true), run(false));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_traced_process_gets_no_loader() {
    let load = || {
        // SAFETY: an all-zero set is valid. A signal would stop the process for its tracer.
        unsafe {
            let mut all = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::sigprocmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
        }
        match ism_sys::Loader::start() {
            Err(ism_sys::LoadError::NotTraced(error)) => Err(error),
            _ => Ok(()),
        }
    };
    let mut command = std::process::Command::new("true");
    // SAFETY: the child has one thread, and its copy of the allocator is usable.
    let error = unsafe { command.pre_exec(load) }.spawn().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EPERM));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_thread_is_traced_no_more_if_its_program_cannot_be_executed() {
    let number = |of: &str, name: &str| {
        let status = std::fs::read_to_string(format!("/proc/{of}/status")).unwrap();
        let mut words = status.split_whitespace().skip_while(|word| *word != name);
        words.nth(1).unwrap().parse::<u32>().unwrap()
    };
    let tracer = || number("thread-self", "TracerPid:");
    let loader = ism_sys::Loader::start().unwrap();
    assert_ne!(number(&tracer().to_string(), "PPid:"), std::process::id());
    loader.withdraw();
    common::eventually(|| tracer() == 0);
}
