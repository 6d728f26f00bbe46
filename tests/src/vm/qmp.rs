// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! QEMU's machine protocol: pause, reset, unplug, migrate.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long QEMU may take to answer.
const LIMIT: Duration = Duration::from_secs(30);

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub(super) struct Qmp {
    socket: BufReader<UnixStream>,
    // A line still incomplete.
    partial: Vec<u8>,
    events: VecDeque<Value>,
}

impl Qmp {
    /// A monitor over a connected socket.
    ///
    /// # Errors
    /// If the monitor's greeting is missing or wrong, or QEMU refuses `qmp_capabilities`.
    pub(super) fn new(socket: UnixStream) -> Result<Qmp, String> {
        let socket = BufReader::new(socket);
        let mut qmp = Qmp { socket, partial: Vec::new(), events: VecDeque::new() };
        let greeting = qmp.next(Instant::now() + LIMIT)?.ok_or("no greeting")?;
        if greeting.get("QMP").is_none() {
            return Err(format!("not a greeting: {greeting}"));
        }
        qmp.command("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Runs a command; returns its result, or its error.
    pub(super) fn command(&mut self, name: &str, arguments: &Value) -> Result<Value, String> {
        let mut text = json!({"execute": name, "arguments": arguments}).to_string();
        text.push('\n');
        let socket = self.socket.get_mut();
        socket.write_all(text.as_bytes()).map_err(|error| error.to_string())?;
        let end = Instant::now() + LIMIT;
        loop {
            let mut answer =
                self.next(end)?.ok_or_else(|| format!("{name}: no answer within {LIMIT:?}"))?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                return Err(error["desc"].as_str().unwrap_or_default().to_owned());
            }
            self.events.push_back(answer);
        }
    }

    /// The data of the next event of this name, or none within `limit`. Other events are kept.
    pub(super) fn event(&mut self, name: &str, limit: Duration) -> Result<Option<Value>, String> {
        let end = Instant::now() + limit;
        let mut at = 0;
        loop {
            while at < self.events.len() {
                if self.events[at]["event"] == name {
                    let mut event = self.events.remove(at).unwrap_or_default();
                    return Ok(Some(event["data"].take()));
                }
                at += 1;
            }
            match self.next(end)? {
                Some(event) => self.events.push_back(event),
                None => return Ok(None),
            }
        }
    }

    /// The next message, or none until `end`.
    fn next(&mut self, end: Instant) -> Result<Option<Value>, String> {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.socket.get_ref().set_read_timeout(Some(left)).map_err(|e| e.to_string())?;
            match self.socket.read_until(b'\n', &mut self.partial) {
                Ok(_) if self.partial.last() == Some(&b'\n') => {
                    let line = std::mem::take(&mut self.partial);
                    return serde_json::from_slice(&line).map(Some).map_err(|e| e.to_string());
                }
                Ok(_) => return Err("the monitor is closed".into()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}
