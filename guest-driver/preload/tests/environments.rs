// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs in environments with an effect on the library: with sanitizers, with another clock,
//! with small stacks, of other machines, and with a log.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Fabric, Running, await_listener, compiled, free_port, run_ends};

/// The path of libfaketime. `None`, with a message: not installed.
fn libfaketime() -> Option<PathBuf> {
    let directory = format!("/usr/lib/{}-linux-gnu/faketime", std::env::consts::ARCH);
    let library = PathBuf::from(directory).join("libfaketimeMT.so.1");
    if library.is_file() {
        return Some(library);
    }
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "the package faketime is missing");
    let _ = writeln!(std::io::stderr(), "SKIPPED: the package faketime is not installed");
    None
}

/// Whether valgrind is there. `false`, with a message: not installed.
fn has_valgrind() -> bool {
    let found = Command::new("valgrind").arg("--version").stdout(Stdio::null()).status();
    if found.is_ok() {
        return true;
    }
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "the package valgrind is missing");
    let _ = writeln!(std::io::stderr(), "SKIPPED: the package valgrind is not installed");
    false
}

#[test]
fn a_program_under_valgrind_runs_on_tcp_and_the_report_says_so() {
    if !has_valgrind() {
        return;
    }
    let program = compiled("sanitized", &["-DTEST=valgrind"]);
    for (server, client) in [(true, true), (false, true), (true, false)] {
        let fabric = Fabric::new(2);
        run_ends(|mode, port| {
            let is_under = if mode == "server" { server } else { client };
            let mut command = match is_under {
                true => fabric.smc("valgrind"),
                // A client would propose SMC to a server without the library.
                false => fabric.on(client, &program),
            };
            if is_under {
                command.args(["--quiet", "--error-exitcode=9"]).arg(&program);
            }
            command.args([mode, port]);
            command
        });
        assert_eq!(fabric.decided().0, 0);
        let under = usize::from(server) + usize::from(client);
        assert_eq!(fabric.said("as under valgrind"), under);
    }
    std::fs::remove_file(program).unwrap();
}

#[test]
fn a_signal_ends_the_close_of_a_connection_that_lingers() {
    let program = compiled("lingers", &[]);
    // The end of the process does not linger.
    let ways = ["signal", "restart", "jump", "cancel", "dup2", "dup3", "close_range", "exit"];
    for way in ways {
        for smc in [false, true] {
            let fabric = Fabric::new(2);
            run_ends(|mode, port| {
                let mut command = fabric.on(smc, &program);
                command.args([mode, port, way]);
                command
            });
            assert_eq!(fabric.decided().0, if smc { 4 } else { 0 }, "{way}");
        }
    }
    std::fs::remove_file(program).unwrap();
}

#[test]
fn time_limits_pass_although_the_programs_clock_stands_still_or_goes_wrong() {
    let Some(wrapper) = libfaketime() else { return };
    let program = compiled("clock", &[]);
    // A clock that stands still, one ahead of time, and a slow one.
    for clock in ["2020-01-01 00:00:00", "+2d", "+0 x0.5"] {
        for (smc, is_first) in [(false, false), (true, false), (true, true)] {
            let fabric = Fabric::new(4);
            let port = free_port().to_string();
            let command = |mode: &str| {
                let mut command = fabric.on(smc, &program);
                let own = common::library();
                let order = match (smc, is_first) {
                    (false, _) => vec![&wrapper],
                    (true, true) => vec![&wrapper, &own],
                    (true, false) => vec![&own, &wrapper],
                };
                command.env("LD_PRELOAD", std::env::join_paths(order).unwrap());
                command.env("FAKETIME", clock).args([mode, &port]).stdout(Stdio::piped());
                command
            };
            let server = command("server").spawn().unwrap();
            await_listener(port.parse().unwrap());
            let client = Running::start(&mut command("client")).finish();
            assert_eq!(client, "in time\n", "{clock}, smc: {smc}");
            let server = server.wait_with_output().unwrap();
            assert_eq!(String::from_utf8_lossy(&server.stdout), "end\n");
            assert!(!smc || fabric.decided().0 > 0, "the connections were on TCP");
        }
    }
}

/// Runs both ends, directly and as children of a shell.
fn run_with(sanitizer: &str) {
    let program = compiled("sanitized", &[sanitizer]);
    for (smc, is_child) in [(false, false), (true, false), (true, true)] {
        let fabric = Fabric::new(4);
        let port = free_port().to_string();
        let command = |mode: &str| {
            let mut command = match is_child {
                false => fabric.on(smc, &program),
                true => {
                    let mut shell = fabric.on(smc, "sh");
                    shell.args(["-c", "\"$0\" \"$@\"; exit $?"]).arg(&program);
                    shell
                }
            };
            command.env_remove("ASAN_OPTIONS").env_remove("TSAN_OPTIONS");
            command.args([mode, &port]).stdout(Stdio::piped()).stderr(Stdio::piped());
            command
        };
        let server = command("server").spawn().unwrap();
        await_listener(port.parse().unwrap());
        let client = command("client").output().unwrap();
        for output in [client, server.wait_with_output().unwrap()] {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{sanitizer}, smc: {smc}: {}\n{said}", output.status);
            assert_eq!(String::from_utf8_lossy(&output.stdout), "all bytes\n", "{said}");
        }
        assert!(!smc || fabric.decided().0 > 0, "the connections were on TCP");
    }
}

smc_test_support::tests_of! {
    run_with:
    fn a_program_with_the_address_sanitizer_runs_on_smc("-fsanitize=address");
    fn a_program_with_the_thread_sanitizer_runs_on_smc("-fsanitize=thread");
    fn a_program_with_the_sanitizer_of_undefined_behaviour_runs_on_smc("-fsanitize=undefined");
}

/// Runs both ends of a program with the arguments `MODE PORT SIZE`.
fn run_with_size(fabric: &Fabric, program: &Path, size: &str) {
    run_ends(|mode, port| {
        let mut command = fabric.smc(program);
        command.args([mode, port, size]);
        command
    });
}

#[test]
fn threads_with_the_smallest_stack_use_connections() {
    let program = compiled("small_stacks", &[]);
    // The least possible size, and a little more.
    for size in ["0", "32768"] {
        for fabric in [Fabric::new(4), Fabric::with_pool(4)] {
            run_with_size(&fabric, &program, size);
            assert!(fabric.decided().0 > 0, "the connections were on TCP");
        }
    }
}

#[test]
fn coroutines_make_first_connections_on_stacks_of_any_size() {
    let program = compiled("coroutines", &[]);
    for kib in ["16", "32", "64", "128", "256", "512"] {
        let fabric = Fabric::new(4);
        run_with_size(&fabric, &program, kib);
        assert_eq!(fabric.decided(), (14, 0), "{kib} KiB");
    }
    std::fs::remove_file(program).unwrap();
}

#[test]
fn a_program_that_can_have_no_thread_connects_without_waiting_for_the_server_to_accept() {
    let program = compiled("threadless", &[]);
    for smc in [false, true] {
        let fabric = Fabric::new(2);
        run_ends(|mode, port| {
            let mut command = fabric.on(smc, &program);
            command.args([mode, port]);
            command
        });
        // The connection made before.
        assert_eq!(fabric.decided().0, if smc { 2 } else { 0 });
    }
    std::fs::remove_file(program).unwrap();
}

#[test]
fn what_a_program_sets_and_waits_for_does_not_change_while_it_starts_others() {
    let program = compiled("spawns_beside", &[]);
    // Without a device the connections are decided for TCP while the relays begin.
    for devices in [4, 0] {
        let fabric = Fabric::new(devices);
        run_with_size(&fabric, &program, "8");
        assert_eq!(fabric.decided().0 > 0, devices > 0);
    }
}

/// Runs both ends of a program with a change of its process. Returns the standard error of both.
fn run_change(fabric: &Fabric, program: &Path, change: &str, smc: bool) -> String {
    let port = free_port().to_string();
    let command = |mode: &str| {
        let mut command = fabric.on(smc, program);
        command.args([mode, &port, change]);
        if change.starts_with("new-") || change.starts_with("join-") {
            // One more thread of the library.
            command.env("SMC_RUN_STATISTICS", fabric.file("statistics"));
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let server = command("server").spawn().unwrap();
    await_listener(port.parse().unwrap());
    let client = command("client").output().unwrap();
    let ends = [client, server.wait_with_output().unwrap()];
    let said = ends.each_ref().map(|end| String::from_utf8_lossy(&end.stderr).into_owned());
    for end in &ends {
        let wrote = String::from_utf8_lossy(&end.stdout);
        assert_eq!(wrote, "all bytes\n", "{change}, smc: {smc}: {}, {said:?}", end.status);
    }
    said.concat()
}

/// With each of the changes, with the library and without, the connection goes on as before.
/// `test`: the file of the program is for one test.
fn change_while_connected(test: &str, changes: &[&str]) {
    let program = compiled("changes", &[&format!("-DTEST={test}")]);
    for change in changes {
        for smc in [false, true] {
            let fabric = Fabric::new(2);
            assert_eq!(run_change(&fabric, &program, change, smc), "", "{change}, smc: {smc}");
            assert!(!smc || fabric.decided() == (2, 0), "{change}: {:?}", fabric.decided());
        }
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn what_a_program_changes_of_its_process_leaves_its_connections() {
    let anybodys = ["descriptors", "dumpable", "threads", "memory", "files", "alone"];
    change_while_connected("process", &anybodys);
    if is_root() {
        let roots = ["user", "root", "mounts", "network", "processes", "joined"];
        change_while_connected("process", &roots);
    }
}

#[test]
fn a_program_asks_for_user_namespaces_and_its_connections_go_on() {
    if is_root() {
        change_while_connected("namespaces", &["first-new-user", "new-user", "join-time"]);
    }
}

#[test]
fn connections_go_on_when_a_program_locks_its_memory() {
    if is_root() {
        change_while_connected("locks", &["locked-all", "locked-some"]);
    }
}

#[test]
fn a_program_that_has_locked_its_memory_stays_on_tcp_and_the_report_says_so() {
    if !is_root() {
        return;
    }
    let program = compiled("changes", &["-DTEST=full"]);
    for (change, smc) in
        [("first-locked-all", true), ("first-locked-full", true), ("first-locked-full", false)]
    {
        let fabric = Fabric::new(2);
        let said = run_change(&fabric, &program, change, smc);
        let message = "locks all memory that the process maps (mlockall)";
        assert_eq!(said.contains(message), smc, "{change}: {said}");
        assert_eq!(fabric.decided().0, 0, "{change}");
    }
}

#[test]
fn a_program_whose_address_space_is_limited_makes_its_first_connection() {
    let program = compiled("changes", &["-DTEST=memory"]);
    let mut decided = (0, 0);
    for kib in [0, 64, 512, 1 << 10, 3 << 10, 8 << 10, 24 << 10, 96 << 10, 1 << 20, 1 << 30] {
        let fabric = Fabric::new(2);
        let said = run_change(&fabric, &program, &format!("first-memory-{kib}"), true);
        decided = fabric.decided();
        let is_tcp = decided.0 == 0 && said.contains("stays on TCP");
        assert!(decided == (2, 0) || is_tcp, "{kib} KiB: {decided:?} {said}");
    }
    assert_eq!(decided, (2, 0), "there is enough");
    std::fs::remove_file(program).unwrap();
}

#[test]
fn a_program_of_another_machine_starts_without_the_library_and_without_a_word() {
    let compile = |name: &str, options: &[&str]| compiled(name, options);
    let starts = compile("starts", &[]);
    let narrow = ["-m32", "-nostdlib", "-static", "-fno-pic", "-fno-stack-protector", "-no-pie"];
    let program = compile("shows_preload", &narrow);
    // Another library stays in the list.
    let other = format!("/lib/{}-linux-gnu/libm.so.6", std::env::consts::ARCH);
    let fabric = Fabric::new(1);
    let directory = program.parent().unwrap();
    let name = program.file_name().unwrap();
    let script = fabric.file("script");
    std::fs::write(&script, format!("#!{}\n", program.display())).unwrap();
    make_executable(&script);
    let run = |way: &str, directory: &Path, name: &OsStr| {
        let mut command = fabric.smc(&starts);
        let list = std::env::join_paths([common::library(), other.clone().into()]).unwrap();
        command.env("LD_PRELOAD", list).arg(way).arg(directory).arg(name);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{way}: {}", output.status);
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{way}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let expected = format!("LD_PRELOAD={other}\n");
    for way in [
        "execve", "execv", "execvp", "execvpe", "execl", "execlp", "execle", "fexecve", "execveat",
        "syscall", "spawn", "spawnp",
    ] {
        assert_eq!(run(way, directory, name), expected, "{way}");
    }
    assert_eq!(run("vfork", directory, name), expected.repeat(2));
    assert_eq!(run("execve", script.parent().unwrap(), OsStr::new("script")), expected);
    // A program that can load the library gets it.
    let all = run("execvp", Path::new("/usr/bin"), OsStr::new("env"));
    assert!(
        all.lines().any(|line| line.starts_with("LD_PRELOAD=") && line.contains("libsmc_preload"))
    );
}

fn make_executable(file: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs both ends with a log, and returns the client's standard error.
fn run_with_log(fabric: &Fabric, program: &Path, prepare: impl Fn(&mut Command)) -> String {
    let port = free_port().to_string();
    let command = |mode: &str| {
        let mut command = fabric.smc(program);
        prepare(&mut command);
        command.args([mode, &port]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let mut server = command("server").spawn().unwrap();
    // The server's log has no reader, which must not end the server.
    drop(server.stderr.take());
    await_listener(port.parse().unwrap());
    let client = command("client").output().unwrap();
    assert!(client.status.success(), "{}", client.status);
    assert_eq!(String::from_utf8_lossy(&client.stdout), "all bytes\n");
    let server = server.wait_with_output().unwrap();
    assert!(server.status.success(), "{}", server.status);
    String::from_utf8(client.stderr).unwrap()
}

#[test]
fn the_librarys_log_goes_where_it_is_asked_for() {
    let program = compiled("sanitized", &[]);
    let fabric = Fabric::new(4);
    let quiet = run_with_log(&fabric, &program, |command| {
        command.env_remove("SMC_LOG").env("RUST_LOG", "trace");
    });
    assert_eq!(quiet, "", "RUST_LOG is the program's");

    let said = run_with_log(&fabric, &program, |command| {
        command.env("SMC_LOG", "debug");
    });
    assert!(!said.contains('\u{1b}'), "colours in a pipe:\n{said}");
    for line in said.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        assert!(words.len() > 4 && words[0].ends_with('Z'), "{line}");
        assert!(["ERROR", "WARN", "INFO", "DEBUG"].contains(&words[1]), "{line}");
    }
    let has =
        |said: &str, words: [&str; 2]| said.lines().any(|l| words.iter().all(|w| l.contains(w)));
    assert!(has(&said, [" smc_preload: ", "\"event\":\"connection\""]), "{said}");
    assert!(has(&said, ["DEBUG", " guest_driver::"]), "{said}");

    let said = run_with_log(&fabric, &program, |command| {
        command.env("SMC_LOG", "off,guest_driver=debug");
    });
    assert!(has(&said, ["DEBUG", " guest_driver::"]) && !said.contains(" smc_preload: "), "{said}");

    let file = fabric.file("log");
    let said = run_with_log(&fabric, &program, |command| {
        command.env("SMC_LOG", "info").env("SMC_LOG_FILE", &file);
    });
    assert_eq!(said, "", "the file has it");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(has(&text, [" INFO ", "\"role\":\"client\""]), "{text}");
    assert!(has(&text, [" INFO ", "\"role\":\"server\""]), "{text}");

    let said = run_with_log(&fabric, &program, |command| {
        command.env("SMC_LOG", "loud");
    });
    assert!(said.contains("SMC_LOG: `loud` is no level"), "{said}");
}
