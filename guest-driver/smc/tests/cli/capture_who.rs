// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc capture`: permissions, a pipe as output, and two captures at a time.

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use crate::settings::{SERVICE, in_empty_run};
use crate::support::{Dir, Fabric, Running, eventually, smc, text};

/// A server and a client with a connection in use.
fn pair(fabric: &Fabric) -> (Running, Running, u16) {
    let (mut server, port, _log) = fabric.listen(&[]);
    let client = crate::stat::client(fabric, port, &[]);
    server.0.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    (server, client, port)
}

fn send(client: &mut Running, server: &mut Running, bytes: &[u8]) {
    client.0.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    server.0.stdout.as_mut().unwrap().read_exact(&mut vec![0; bytes.len()]).unwrap();
}

/// A program's standard error, as a growing file.
fn said(dir: &Dir, name: &str) -> (std::fs::File, impl Fn() -> String + use<>) {
    let path = dir.path(name);
    let file = std::fs::File::create(&path).unwrap();
    (file, move || std::fs::read_to_string(&path).unwrap())
}

#[test]
fn a_process_of_another_user_and_one_that_is_none_are_refused_aloud() {
    let output = smc(&["capture", "-w", "-", "--process", "999999999"]).output().unwrap();
    assert!(text(&output.stderr).contains("there is no process 999999999"), "{output:?}");
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let fabric = Fabric::start("capture-other");
    let (server, _client, _port) = pair(&fabric);
    let dir = Dir::new("capture-other-files");
    let program = dir.path("smc");
    std::fs::copy(env!("CARGO_BIN_EXE_smc"), &program).unwrap();
    let as_other = |options: &[&str]| {
        let mut other = Command::new("setpriv");
        other.args(["--reuid", "4243", "--regid", "4243", "--clear-groups", &program, "capture"]);
        other.args(options).env("XDG_RUNTIME_DIR", "/nonexistent").stdin(Stdio::null());
        let output = other.output().unwrap();
        (output.status.code(), text(&output.stderr), output.stdout)
    };
    let pid = server.0.id().to_string();
    let (status, error, bytes) = as_other(&["-w", "-", "--process", &pid]);
    assert_eq!((status, bytes.len()), (Some(1), 0), "{error}");
    assert!(error.contains("of user 0: only that user and root may capture it"), "{error}");
    // Without a name the user gets nothing, and a note about the lack of processes.
    let (_, error, bytes) = as_other(&["-w", "-", "--all", "--seconds", "1"]);
    assert!(error.contains("no process that may be captured has SMC now"), "{error}");
    assert!(bytes.len() < 64, "the head of the file alone");
}

#[test]
fn a_pipe_gets_what_passes_while_it_passes() {
    let fabric = Fabric::start("capture-pipe");
    let (mut server, mut client, port) = pair(&fabric);
    let mut command = fabric.smc(&["capture", "-w", "-", "--port", &port.to_string()]);
    let mut capture = Running(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut pipe = capture.0.stdout.take().unwrap();
    let (sender, pieces) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(n @ 1..) = pipe.read(&mut piece) {
            if sender.send(piece[..n].to_vec()).is_err() {
                return;
            }
        }
    });
    // The capture goes on, and the pipe has the bytes already.
    let mut all = Vec::new();
    eventually("the pipe has the bytes", || {
        send(&mut client, &mut server, b"in the pipe");
        all.extend(pieces.try_iter().flatten());
        all.windows(11).any(|bytes| bytes == b"in the pipe")
    });
    assert!(capture.0.try_wait().unwrap().is_none());
    // The pipe has no reader any more: the capture ends by itself, and quietly.
    drop(pieces);
    eventually("it ends", || {
        send(&mut client, &mut server, b"to nobody");
        capture.0.try_wait().unwrap().is_some()
    });
}

#[test]
fn a_second_capture_ends_the_first_which_says_so() {
    let fabric = Fabric::start("capture-two");
    let (mut server, mut client, _port) = pair(&fabric);
    let dir = Dir::new("capture-two-files");
    let begin = |name: &str| {
        let (file, said) = said(&dir, &format!("{name}.log"));
        let path = dir.path(name);
        let capture = fabric.smc(&["capture", "-w", &path]).stderr(file).spawn().unwrap();
        let length = move || std::fs::metadata(&path).map_or(0, |file| file.len());
        (Running(capture), length, said)
    };
    let (_first, length, first_said) = begin("first");
    eventually("the first has begun", || {
        send(&mut client, &mut server, b"to the first");
        length() > 200
    });
    let (_second, length, second_said) = begin("second");
    eventually("the second has begun", || {
        send(&mut client, &mut server, b"to the second");
        length() > 200
    });
    eventually("the first says that it has ended", || {
        send(&mut client, &mut server, b"more");
        let said = first_said();
        [&client, &server].iter().all(|one| {
            let line = format!("the capture of smc {} has ended: another capture", one.0.id());
            said.contains(&line)
        })
    });
    assert_eq!(second_said(), "");
}

/// Both have process 1, whose socket has the same name.
#[test]
fn root_captures_two_containers_at_once() {
    let Some(output) = in_empty_run(&format!(
        r#"{SERVICE}
        mount -t proc proc /proc
        cp "$SMC" /run/inside
        container() {{
            unshare --mount --pid --fork --kill-child --mount-proc sh -c '
                mkdir -p /run/user/7 && mount -t tmpfs none /run/user/7
                export XDG_RUNTIME_DIR=/run/user/7
                exec /run/inside listen -v 127.0.0.1:0' </dev/null >/run/$1.got 2>/run/$1.log &
            for n in $(seq 2400); do grep -q listening /run/$1.log && break || sleep 0.05; done
            port=$(sed -n 's/.*127.0.0.1:\([0-9]*\).*/\1/p' /run/$1.log | head -1)
        }}
        mkfifo /run/one.in /run/two.in
        for name in one two; do
            container $name
            "$SMC" connect -v 127.0.0.1:$port </run/$name.in >/run/$name.back 2>/run/$name.side &
        done
        exec 8>/run/one.in 9>/run/two.in
        say() {{ echo "$1 to one" >&8; echo "$1 to two" >&9; }}
        await() {{
            for n in $(seq 2400); do say $1 || break; sleep 0.05; eval "$2" && return; done
            cat /run/*.log /run/*.side
            exit 1
        }}
        has_both() {{ grep -qa "$1 to one" $2 && grep -qa "$1 to two" $2; }}
        await hello 'has_both hello "/run/one.got /run/two.got"'
        "$SMC" capture --all -w /run/first --process inside 2>/run/first.log &
        await first 'has_both first /run/first'
        "$SMC" capture --all -w /run/second --process inside 2>/run/second.log &
        await second 'has_both second /run/second'
        await more '[ "$(grep -c "has ended: another capture" /run/first.log)" = 2 ]'
        [ ! -s /run/second.log ]
        echo captured
        "#
    )) else {
        return;
    };
    let said = (text(&output.stdout), text(&output.stderr));
    assert!(said.0.ends_with("captured\n"), "{said:?}");
}
