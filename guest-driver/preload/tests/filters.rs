// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs in filters of system calls, such as `SystemCallFilter=`, that end a process at a
//! forbidden call.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::ffi::c_long;

use common::{Fabric, Running, await_listener, compiled, free_port, run_ends};

/// The forbidden calls of a service with `SystemCallFilter=@system-service` and, as in systemd's
/// manual, `SystemCallFilter=~@privileged @resources` (systemd 252).
#[rustfmt::skip]
const UNUSUAL: [c_long; 70] = [
    libc::SYS_acct, libc::SYS_adjtimex, libc::SYS_bpf, libc::SYS_capset, libc::SYS_chroot,
    libc::SYS_clock_adjtime, libc::SYS_clock_settime, libc::SYS_delete_module,
    libc::SYS_fanotify_init, libc::SYS_fanotify_mark, libc::SYS_fchown, libc::SYS_fchownat,
    libc::SYS_finit_module, libc::SYS_fsconfig, libc::SYS_fsmount, libc::SYS_fsopen,
    libc::SYS_fspick, libc::SYS_init_module, libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register, libc::SYS_io_uring_setup, libc::SYS_ioprio_set,
    libc::SYS_kexec_load, libc::SYS_landlock_add_rule, libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_restrict_self, libc::SYS_lookup_dcookie, libc::SYS_mbind,
    libc::SYS_memfd_secret, libc::SYS_migrate_pages, libc::SYS_mincore, libc::SYS_mount,
    libc::SYS_mount_setattr, libc::SYS_move_mount, libc::SYS_move_pages, libc::SYS_nfsservctl,
    libc::SYS_open_by_handle_at, libc::SYS_open_tree, libc::SYS_perf_event_open,
    libc::SYS_pidfd_getfd, libc::SYS_pivot_root, libc::SYS_pkey_alloc, libc::SYS_pkey_free,
    libc::SYS_pkey_mprotect, libc::SYS_process_mrelease, libc::SYS_ptrace, libc::SYS_quotactl,
    libc::SYS_quotactl_fd, libc::SYS_reboot, libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr, libc::SYS_sched_setparam, libc::SYS_sched_setscheduler,
    libc::SYS_seccomp, libc::SYS_set_mempolicy, libc::SYS_setdomainname, libc::SYS_setgroups,
    libc::SYS_sethostname, libc::SYS_setpriority, libc::SYS_setresuid, libc::SYS_setreuid,
    libc::SYS_setrlimit, libc::SYS_settimeofday, libc::SYS_setuid, libc::SYS_swapoff,
    libc::SYS_swapon, libc::SYS_syslog, libc::SYS_umount2, libc::SYS_vhangup,
    libc::SYS_kexec_file_load,
];

/// Runs both ends of a program in a filter.
fn run_in_filter(fabric: &Fabric, action: &str, calls: &[c_long]) {
    run_in_rules(
        fabric,
        action,
        &calls.iter().map(c_long::to_string).collect::<Vec<_>>().join(","),
    );
}

/// The same with rules about arguments as well.
fn run_in_rules(fabric: &Fabric, action: &str, calls: &str) {
    let (filtered, program) = (compiled("filtered", &[]), compiled("sanitized", &[]));
    run_ends(|mode, port| {
        let mut command = fabric.smc(&filtered);
        command.args([action, calls]).arg(&program).args([mode, port]);
        command
    });
    assert_eq!(fabric.broken(), [] as [String; 0]);
}

#[test]
fn a_service_with_a_usual_filter_is_on_smc() {
    let fabric = Fabric::new(2);
    run_in_filter(&fabric, "ends", &UNUSUAL);
    assert_eq!(fabric.decided(), (8, 0));
}

/// Options of systemd's units to forbid calls by their arguments: memory both written and executed
/// (`MemoryDenyWriteExecute=`), files with the rights of others (`RestrictSUIDSGID=`), new
/// namespaces (`RestrictNamespaces=`).
#[test]
fn a_service_with_filters_on_arguments_is_on_smc() {
    let special = libc::S_ISUID.to_string();
    let rules = [
        (libc::SYS_mmap, 2, (libc::PROT_WRITE | libc::PROT_EXEC).to_string()),
        (libc::SYS_mprotect, 2, libc::PROT_EXEC.to_string()),
        (libc::SYS_pkey_mprotect, 2, libc::PROT_EXEC.to_string()),
        (libc::SYS_shmat, 2, libc::SHM_EXEC.to_string()),
        (libc::SYS_openat, 3, special.clone()),
        (libc::SYS_fchmodat, 2, special.clone()),
        (libc::SYS_mkdirat, 2, special),
        (libc::SYS_clone, 0, libc::CLONE_NEWNET.to_string()),
        (libc::SYS_clone, 0, libc::CLONE_NEWUSER.to_string()),
    ];
    let rules = rules.map(|(call, at, bits)| format!("{call}:{at}:{bits}")).join(",");
    for action in ["ends", "refuses"] {
        let fabric = Fabric::new(2);
        run_in_rules(&fabric, action, &rules);
        assert_eq!(fabric.decided(), (8, 0), "{action}");
    }
}

/// The same option of memory in systemd since version 256.
#[test]
fn a_service_whose_kernel_denies_writable_code_is_on_smc() {
    let filtered = compiled("filtered", &[]);
    let tried = std::process::Command::new(&filtered).args(["mdwe", "0", "true"]).status();
    if tried.unwrap().code() == Some(77) {
        eprintln!("SKIPPED: the kernel has no PR_SET_MDWE");
        return;
    }
    let fabric = Fabric::new(2);
    run_in_rules(&fabric, "mdwe", "0");
    assert_eq!(fabric.decided(), (8, 0));
}

#[test]
fn a_filter_that_knows_no_sleep_on_several_words_leaves_connections_on_smc() {
    for action in ["ends", "refuses"] {
        let fabric = Fabric::new(2);
        run_in_filter(&fabric, action, &[libc::SYS_futex_waitv]);
        assert_eq!(fabric.decided(), (8, 0), "{action}");
    }
}

/// A device needs these calls, and the program does not.
#[test]
fn a_program_that_may_not_make_a_call_of_the_library_goes_on_on_tcp() {
    for (action, call) in [
        ("ends", libc::SYS_memfd_create),
        ("ends", libc::SYS_epoll_create1),
        ("ends", libc::SYS_ppoll),
        ("refuses", libc::SYS_ppoll),
        ("refuses", libc::SYS_getsockname),
        ("refuses", libc::SYS_getrandom),
    ] {
        let fabric = Fabric::new(2);
        run_in_filter(&fabric, action, &[call]);
        assert_eq!(fabric.decided(), (0, 0), "{action} {call}");
        assert!(fabric.said("(seccomp) forbids") > 0, "{action} {call}: not reported");
    }
}

/// The program reads the file of its process, before its removal.
#[test]
fn connections_of_a_program_in_such_a_filter_are_counted_with_that_reason() {
    let script = "
import socket
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
accepted = listener.accept()[0]
files = [line.split()[-1] for line in open('/proc/self/maps') if line.endswith('.tcp\\n')]
notes = open(files[-1], 'rb').read()
# Before the sentence there is the number of connections.
at = notes.index(b'a filter of system calls (seccomp) forbids memfd_create')
assert int.from_bytes(notes[at - 8:at], 'little') == 2
";
    let fabric = Fabric::new(1);
    let call = libc::SYS_memfd_create.to_string();
    let mut command = fabric.smc(compiled("filtered", &[]));
    command.env("SMC_RUN_STATISTICS", fabric.file("statistics"));
    command.args(["ends", &call, "/usr/bin/python3", "-c", script]);
    assert!(command.status().unwrap().success());
}

/// The started programs inherit sockets, so their libraries look at these first.
#[test]
fn programs_that_such_a_program_starts_go_on_as_well() {
    let script = "
import os, socket
connection = socket.socket()
connection.set_inheritable(True)
raise SystemExit(os.system('true'))
";
    for action in ["ends", "refuses"] {
        let fabric = Fabric::new(1);
        let call = libc::SYS_ppoll.to_string();
        let mut command = fabric.smc(compiled("filtered", &[]));
        command.args([action, &call, "/usr/bin/python3", "-c", script]);
        assert!(command.status().unwrap().success(), "{action}");
    }
}

/// One end has a connection on SMC when it gets the filter, and the other end has none.
#[test]
fn a_program_that_gets_a_filter_goes_on_with_its_connections() {
    let program = compiled("sandboxed", &[]);
    for how in ["prctl", "seccomp", "all", "strict", "sleeps"] {
        for confined in ["server", "client", "both"] {
            for smc in [false, true] {
                let fabric = Fabric::new(2);
                let port = free_port().to_string();
                let command = |mode: &str| {
                    let mut command = fabric.on(smc, &program);
                    let how = if [mode, "both"].contains(&confined) { how } else { "none" };
                    command.args([mode, how, &port]);
                    command
                };
                let server = Running::start(&mut command("server"));
                await_listener(port.parse().unwrap());
                let client = Running::start(&mut command("client")).finish_beside(&[&server]);
                let what = format!("{how}, {confined}, smc: {smc}");
                assert_eq!(
                    (client, server.finish()),
                    ("all bytes\n".into(), "all bytes\n".into()),
                    "{what}"
                );
                assert!(!smc || fabric.decided() == (2, 0), "{what}");
            }
        }
    }
}
