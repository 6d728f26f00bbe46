// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The shared parts of the tests: the command, a fabric, and processes with the lifetime of the
//! test.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use smc_test_support::TestDir;

/// The command, independent of the environment.
pub(crate) fn smc(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_smc"));
    command.args(args);
    for name in
        ["SMC_DEVICE", "SMC_EID", "SMC_MANAGEMENT", "SMC_CONFIG", "RUST_LOG", "XDG_RUNTIME_DIR"]
    {
        command.env_remove(name);
    }
    command
}

/// Runs the command to its end.
pub(crate) fn run(args: &[&str]) -> Output {
    smc(args).stdin(Stdio::null()).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A process to kill at the end of the test.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) use smc_test_support::eventually;

/// A directory to remove at the end.
pub(crate) struct Dir(pub(crate) TestDir);

impl Dir {
    pub(crate) fn new(_name: &str) -> Dir {
        Dir(TestDir::new())
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

/// `smc fabric` without options, shared by processes as if in three terminals.
pub(crate) struct Fabric {
    daemon: Running,
    dir: Dir,
}

impl Fabric {
    pub(crate) fn start(name: &str) -> Fabric {
        let dir = Dir::new(name);
        let mut command = smc(&["fabric"]);
        command.env("XDG_RUNTIME_DIR", &dir.0).stdin(Stdio::null()).stderr(Stdio::null());
        let daemon = Running(command.spawn().unwrap());
        let management = dir.0.join("smc/management.sock");
        eventually("the daemon listens", || UnixStream::connect(&management).is_ok());
        Fabric { daemon, dir }
    }

    /// Ends the daemon without a chance to do anything about its connections.
    pub(crate) fn kill_daemon(&mut self) {
        self.daemon.0.kill().unwrap();
        self.daemon.0.wait().unwrap();
    }

    /// The directory in place of the user's runtime directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.dir.0
    }

    /// The command with the fabric's directory.
    pub(crate) fn smc(&self, args: &[&str]) -> Command {
        let mut command = smc(args);
        command.env("XDG_RUNTIME_DIR", &self.dir.0);
        command
    }

    /// The command by another name.
    pub(crate) fn smc_as(&self, name: &str) -> Command {
        use std::os::unix::process::CommandExt;
        let mut command = self.smc(&[]);
        command.arg0(name);
        command
    }

    /// A listening `smc listen -v` with more options, its input and output piped, and its port.
    pub(crate) fn listen(&self, options: &[&str]) -> (Running, u16, BufReader<ChildStderr>) {
        let mut command = self.smc(&["listen", "-v"]);
        command.args(options).arg("127.0.0.1:0");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut server = Running(command.spawn().unwrap());
        let mut log = BufReader::new(server.0.stderr.take().unwrap());
        let mut line = String::new();
        log.read_line(&mut line).unwrap();
        let port = line.trim().rsplit(':').next().and_then(|port| port.parse().ok());
        (server, port.unwrap_or_else(|| panic!("{line}")), log)
    }

    /// Sends `input` by a client, until the client's end.
    pub(crate) fn connect(&self, port: u16, options: &[&str], input: &[u8]) -> Output {
        let mut command = self.smc(&["connect", "-v"]);
        command.args(options).args(["127.0.0.1", &port.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut client = command.spawn().unwrap();
        let mut stdin = client.stdin.take().unwrap();
        let input = input.to_vec();
        let writer = std::thread::spawn(move || {
            // A client refusing the connection reads nothing.
            let _ = stdin.write_all(&input);
        });
        let output = client.wait_with_output().unwrap();
        writer.join().unwrap();
        output
    }
}

/// Whether a process exists (and is not merely waiting to be reaped).
pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}
