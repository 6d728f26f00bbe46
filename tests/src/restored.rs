// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One end of a connection, in a process continuing like a restored machine: with a copy of the former
//! window.
//!
//! ```text
//! smc-test-peer restored DEVICE PATH    reads commands, and answers each by a line
//! ```
//!
//! PATH is `window` or `moves`. Commands:
//!
//! - `listen` says the address, `accept` and `connect ADDRESS` say "smc" or "tcp";
//! - `save` replaces every mapping by a private copy: "saved N";
//! - `send N` sends the next N bytes of a pattern, and `pour N` does so in the background: "sent N" or
//!   "poured N", or the number of bytes sent and the error;
//! - `recv N` takes the next N bytes: "got N", or the number of bytes received and the error or end;
//!   `rest` takes every byte up to the end;
//! - `urgent` sends an urgent byte, `mark` takes one;
//! - `done` ends the own direction, `close` closes, `abort` throws everything away;
//! - `carrier` says the carrier of the connection;
//! - `exit` ends the process at once.

use std::io::{self, BufRead};
use std::net::Shutdown;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{Config, SmcListener, SmcStream, Stack};

use crate::bench::Fabric;
use crate::bytes::{difference, fill};

/// How long a call may take.
const LIMIT: Duration = Duration::from_secs(30);
/// The urgent byte.
const URGENT: u8 = b'!';

struct Restored {
    stack: Arc<Stack>,
    listener: Option<SmcListener>,
    stream: Option<Arc<SmcStream>>,
    sent: usize,
    received: usize,
}

fn failed(done: usize, error: &io::Error) -> String {
    format!("{done} and {:?}", error.kind())
}

fn send(stream: &SmcStream, from: usize, len: usize) -> String {
    let mut bytes = vec![0; len];
    fill(1, from, &mut bytes);
    let mut done = 0;
    while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
        match stream.send(rest) {
            Ok(n) => done += n,
            Err(error) => return failed(done, &error),
        }
    }
    done.to_string()
}

/// Takes the urgent byte, as soon as there is one.
fn mark(stream: &SmcStream) -> io::Result<String> {
    let begun = Instant::now();
    loop {
        match stream.recv_urgent() {
            Ok(URGENT) => return Ok("mark".to_owned()),
            Ok(other) => return Ok(format!("mark {other}")),
            Err(error) if begun.elapsed() > LIMIT => return Err(error),
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

impl Restored {
    fn begin(&mut self, stream: SmcStream) -> io::Result<String> {
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let carrier = if stream.is_smc() { "smc" } else { "tcp" };
        self.stream = Some(Arc::new(stream));
        Ok(carrier.to_owned())
    }

    fn receive(&mut self, stream: &SmcStream, most: usize) -> String {
        let (mut done, mut buf) = (0, vec![0; 20_000]);
        while done < most {
            let part = buf.len().min(most - done);
            let n = match stream.recv(buf.get_mut(..part).unwrap_or_default()) {
                Ok(0) => return format!("{done} and the end"),
                Ok(n) => n,
                Err(error) => return failed(done, &error),
            };
            let mut expected = vec![0; n];
            fill(1, self.received, &mut expected);
            if let Some((at, ..)) = difference(buf.get(..n).unwrap_or_default(), &expected) {
                return format!("{done} and a wrong byte at {}", self.received + at);
            }
            self.received += n;
            done += n;
        }
        done.to_string()
    }

    fn obey(&mut self, command: &str, say: fn(&str)) -> io::Result<String> {
        let (command, word) = command.split_once(' ').unwrap_or((command, ""));
        let number = || word.parse::<usize>().map_err(io::Error::other);
        match command {
            "listen" => {
                let listener = SmcListener::bind(&self.stack, "127.0.0.1:0")?;
                let address = listener.local_addr()?.to_string();
                self.listener = Some(listener);
                return Ok(address);
            }
            "connect" => return self.begin(SmcStream::connect(&self.stack, word)?),
            "accept" => {
                let listener = self.listener.as_ref().ok_or(io::ErrorKind::NotConnected)?;
                let (stream, _) = listener.accept()?;
                return self.begin(stream);
            }
            "save" => {
                let copied = ism_sys::keep_private_copies("ism-slab")?;
                return Ok(format!("saved {copied}"));
            }
            "exit" => std::process::exit(0),
            _ => {}
        }
        let stream = self.stream.clone().ok_or(io::ErrorKind::NotConnected)?;
        Ok(match command {
            "send" | "pour" => {
                let (from, len) = (self.sent, number()?);
                self.sent += len;
                if command == "send" {
                    return Ok(format!("sent {}", send(&stream, from, len)));
                }
                thread::spawn(move || say(&format!("poured {}", send(&stream, from, len))));
                "pours".to_owned()
            }
            "recv" => format!("got {}", self.receive(&stream, number()?)),
            "rest" => format!("got {}", self.receive(&stream, usize::MAX)),
            "urgent" => {
                stream.send_urgent(URGENT)?;
                "urgent".to_owned()
            }
            "mark" => mark(&stream)?,
            "done" => {
                stream.shutdown(Shutdown::Write)?;
                "done".to_owned()
            }
            "close" => {
                self.stream = None;
                "closed".to_owned()
            }
            "abort" => {
                stream.set_linger(Some(Duration::ZERO))?;
                self.stream = None;
                "aborted".to_owned()
            }
            "carrier" => {
                let changes = self.stack.connections().pop().and_then(|conn| conn.changes);
                changes.map_or("none".to_owned(), |changes| format!("{:?}", changes.now))
            }
            other => format!("no command {other:?}"),
        })
    }
}

/// Carries out the commands on standard input.
///
/// # Panics
/// If the device cannot be opened.
pub fn run(device: &str, path: &str, say: fn(&str)) {
    let fabric = if path == "moves" { Fabric::Move } else { Fabric::Window };
    // The process stands for a virtual machine with its own kernel.
    ism_sys::sleep_on_no_words();
    let mut config: Config = fabric.config(0, device);
    config.outlive_device = true;
    config.clc_timeout = Duration::from_secs(60);
    let stack = Stack::open(config).unwrap();
    let mut end = Restored { stack, listener: None, stream: None, sent: 0, received: 0 };
    for command in io::stdin().lock().lines().map_while(Result::ok) {
        let answer = end.obey(&command, say);
        say(&answer.unwrap_or_else(|error| format!("{command}: {:?}", error.kind())));
    }
}
