// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A server and a client for tests acting on the machines below. Both print a line for each event.
//!
//! ```text
//! smc-test-peer serve DEVICE ADDRESS    echoes; prints "N accepted smc", then "N ended HOW"
//! smc-test-peer talk DEVICE ADDRESS     reads commands, a word a line, and answers each by a line
//! ```
//!
//! The commands of `talk`:
//!
//! - `connect` drops the connection, if there is one, and makes a new one;
//! - `ping` sends bytes to the server and compares the echo;
//! - `stream` sends and receives in the background until an error;
//! - `wait` receives in the background until an error;
//! - `gid` prints the GID of the device.
//!
//! A background job prints "failed KIND after N bytes, MS ms after the last" at its end.

use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{Config, SmcListener, SmcStream, Stack};

use crate::bytes::pattern;

/// How long `connect` tries to reach a server before its listen.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// How long one CLC message may take. An emulated guest sharing a processor with eight others takes
/// seconds for a millisecond's work of the host.
const CLC_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the server waits for the first bytes of a client. No client here is an ordinary TCP client
/// waiting for the server's bytes.
const DETECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes of a `ping`.
const PING: usize = 10_000;

fn open(device: &str) -> Arc<Stack> {
    let mut config = Config::new(device);
    config.outlive_device = false;
    (config.clc_timeout, config.detect_timeout) = (CLC_TIMEOUT, DETECT_TIMEOUT);
    Stack::open(config).unwrap()
}

fn carrier(stream: &SmcStream) -> &'static str {
    if stream.is_smc() { "smc" } else { "tcp" }
}

fn gid(stack: &Arc<Stack>) -> String {
    stack.devices().first().map_or_else(|| "none".to_owned(), |(_, gid)| gid.to_string())
}

/// Listens and echoes.
///
/// # Panics
/// The device cannot be opened, or the address is taken.
pub fn serve(device: &str, address: &str, say: fn(&str)) {
    let stack = open(device);
    let listener = SmcListener::bind(&stack, address).unwrap();
    say(&format!("listens as {}", gid(&stack)));
    for (n, stream) in listener.incoming().enumerate() {
        let mut stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                say(&format!("refused: {error}"));
                continue;
            }
        };
        say(&format!("{n} accepted {}", carrier(&stream)));
        thread::spawn(move || {
            let mut total = 0;
            let ended = echo(&mut stream, &mut total);
            let how = ended.map_or_else(|error| format!("{:?}", error.kind()), |()| "end".into());
            say(&format!("{n} ended {how} after {total} bytes"));
        });
    }
}

fn echo(stream: &mut SmcStream, total: &mut usize) -> io::Result<()> {
    let mut buf = vec![0; 64 << 10];
    loop {
        let n = stream.read(&mut buf)?;
        if n == 0 {
            return Ok(());
        }
        *total += n;
        stream.write_all(buf.get(..n).unwrap_or_default())?;
    }
}

fn connect(stack: &Arc<Stack>, address: &str) -> io::Result<SmcStream> {
    let end = Instant::now() + CONNECT_TIMEOUT;
    loop {
        match SmcStream::connect(stack, address) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < end => {
                thread::sleep(Duration::from_millis(50));
            }
            other => return other,
        }
    }
}

fn ping(stream: &SmcStream, seed: u64) -> io::Result<()> {
    let bytes = pattern(seed, PING);
    let mut back = vec![0; PING];
    (&mut &*stream).write_all(&bytes)?;
    (&mut &*stream).read_exact(&mut back)?;
    if bytes == back { Ok(()) } else { Err(io::Error::other("other bytes came back")) }
}

/// Moves bytes until an error. Returns the line to print then.
fn move_until_failure(stream: &SmcStream, sends: bool) -> String {
    let mut buf = vec![7; 16 << 10];
    let (mut total, mut seen) = (0, Instant::now());
    loop {
        let result = if sends {
            (&mut &*stream).write_all(&buf).and_then(|()| (&mut &*stream).read_exact(&mut buf))
        } else {
            match (&mut &*stream).read(&mut buf) {
                Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
                other => other.map(drop),
            }
        };
        match result {
            Ok(()) => (total, seen) = (total + buf.len(), Instant::now()),
            Err(error) => {
                let after = seen.elapsed().as_millis();
                let kind = error.kind();
                return format!("failed {kind:?} after {total} bytes, {after} ms after the last");
            }
        }
    }
}

/// Carries out the commands on standard input.
///
/// # Panics
/// If the device cannot be opened.
pub fn talk(device: &str, address: &str, say: fn(&str)) {
    let stack = open(device);
    let mut stream: Option<Arc<SmcStream>> = None;
    for (n, command) in io::stdin().lock().lines().map_while(Result::ok).enumerate() {
        let answer = match (command.as_str(), &stream) {
            ("gid", _) => gid(&stack),
            ("connect", _) => {
                stream = None;
                match connect(&stack, address) {
                    Ok(new) => {
                        let answer = format!("connected {}", carrier(&new));
                        stream = Some(Arc::new(new));
                        answer
                    }
                    Err(error) => format!("failed {:?}: {error}", error.kind()),
                }
            }
            ("ping", Some(stream)) => match ping(stream, n as u64) {
                Ok(()) => "pong".to_owned(),
                Err(error) => format!("failed {:?}: {error}", error.kind()),
            },
            ("stream" | "wait", Some(stream)) => {
                let (stream, sends) = (stream.clone(), command == "stream");
                thread::spawn(move || say(&move_until_failure(&stream, sends)));
                format!("{command}s")
            }
            (command, _) => format!("cannot {command:?} now"),
        };
        say(&answer);
    }
}
