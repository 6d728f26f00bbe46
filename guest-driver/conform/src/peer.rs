// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sources of connections with the target.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a connection attempt may take.
const CONNECT: Duration = Duration::from_secs(10);

/// Connects with TCP option 254.
pub trait Announce: Send + Sync {
    /// Connects, and returns whether the server answered the option.
    ///
    /// # Errors
    /// No connection.
    fn connect(&self, server: SocketAddr) -> io::Result<(TcpStream, bool)>;
}

/// One connection, and its program if the suite started one.
pub(crate) struct Connection {
    pub(crate) tcp: TcpStream,
    pub(crate) program: Option<Program>,
}

/// Makes or takes connections, one at a time.
pub(crate) enum Peer<'a> {
    /// The target is a server.
    Server { address: SocketAddr, announce: Option<&'a dyn Announce> },
    /// The target is a client, and connects to this listener.
    Client { listener: &'a TcpListener, program: Option<&'a str>, wait: Duration },
}

impl Peer<'_> {
    /// Another connection.
    ///
    /// # Errors
    /// Why there is none, as a sentence.
    pub(crate) fn connect(&self) -> Result<Connection, String> {
        match self {
            Peer::Server { address, announce: None } => {
                let tcp = TcpStream::connect_timeout(address, CONNECT);
                let tcp = tcp.map_err(|error| format!("cannot connect to {address}: {error}"))?;
                Ok(Connection { tcp, program: None })
            }
            Peer::Server { address, announce: Some(announce) } => {
                let connected = announce.connect(*address);
                let (tcp, answered) =
                    connected.map_err(|error| format!("cannot connect to {address}: {error}"))?;
                match answered {
                    true => Ok(Connection { tcp, program: None }),
                    false => Err("the server has not answered TCP option 254".into()),
                }
            }
            Peer::Client { listener, program, wait } => {
                let program = program.map(|line| Program::start(line, listener)).transpose()?;
                let tcp = accept(listener, *wait)?;
                Ok(Connection { tcp, program })
            }
        }
    }
}

fn accept(listener: &TcpListener, wait: Duration) -> Result<TcpStream, String> {
    let failed = |error: io::Error| format!("cannot accept: {error}");
    let deadline = Instant::now() + wait;
    listener.set_nonblocking(true).map_err(failed)?;
    loop {
        match listener.accept() {
            Ok((tcp, _)) => {
                tcp.set_nonblocking(false).map_err(failed)?;
                return Ok(tcp);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= deadline {
                    return Err(format!("no client has connected within {} s", wait.as_secs()));
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(failed(error)),
        }
    }
}

/// A client program started by the suite. Its standard input and output belong to the connection.
pub(crate) struct Program {
    child: Child,
    output: Receiver<Vec<u8>>,
    read: Vec<u8>,
    /// The last bytes of the program's standard error.
    errors: Arc<Mutex<Vec<u8>>>,
}

/// Limit of the kept bytes of standard error.
const ERRORS: usize = 400;

impl Program {
    /// Starts a command line of the shell, with `{port}` replaced.
    fn start(line: &str, listener: &TcpListener) -> Result<Program, String> {
        let failed = |error: io::Error| format!("cannot start {line:?}: {error}");
        let port = listener.local_addr().map_err(failed)?.port();
        let mut command = Command::new("/bin/sh");
        // `exec` replaces the shell, so killing the child kills the program.
        command.arg("-c").arg(format!("exec {}", line.replace("{port}", &port.to_string())));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (sender, output) = channel();
        if let Some(mut stdout) = child.stdout.take() {
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(n @ 1..) = stdout.read(&mut buffer) {
                    if sender.send(buffer.get(..n).unwrap_or_default().to_vec()).is_err() {
                        return;
                    }
                }
            });
        }
        let errors: Arc<Mutex<Vec<u8>>> = Arc::default();
        if let Some(mut stderr) = child.stderr.take() {
            let errors = errors.clone();
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(n @ 1..) = stderr.read(&mut buffer) {
                    let mut errors = errors.lock().unwrap_or_else(|lost| lost.into_inner());
                    errors.extend(buffer.get(..n).unwrap_or_default());
                    let surplus = errors.len().saturating_sub(ERRORS);
                    errors.drain(..surplus);
                }
            });
        }
        Ok(Program { child, output, read: Vec::new(), errors })
    }

    /// The last bytes of the program's standard error.
    pub(crate) fn errors(&self) -> String {
        let errors = self.errors.lock().unwrap_or_else(|lost| lost.into_inner());
        String::from_utf8_lossy(&errors).trim().to_owned()
    }

    /// Writes to the program's standard input.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        if let Some(stdin) = &mut self.child.stdin {
            // A program that has ended reads nothing; the connection shows the end.
            let _ = stdin.write_all(bytes).and_then(|()| stdin.flush());
        }
    }

    /// The program's output, once there are `len` bytes or after `limit`.
    pub(crate) fn read(&mut self, len: usize, limit: Duration) -> Vec<u8> {
        let deadline = Instant::now() + limit;
        while self.read.len() < len {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.read.extend(bytes),
                Err(_) => break,
            }
        }
        let len = len.min(self.read.len());
        self.read.drain(..len).collect()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_standard_error_is_kept() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let line = "sh -c 'yes words | head -c 9000 >&2; echo the last ones >&2'";
        let program = Program::start(line, &listener).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !program.errors().ends_with("the last ones") {
            assert!(Instant::now() < deadline, "{}", program.errors());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(program.errors().len() <= ERRORS);
    }
}
