// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Streams between two machines, able to go on without their devices.
//!
//! ```text
//! smc-test-peer streams serve DEVICE PATH ADDRESS     echoes, on the next port over TCP alone; prints
//!                                                     "listens", a line for each failing connection,
//!                                                     and pauses on request
//! smc-test-peer streams talk DEVICE PATH ADDRESS N    reads commands, a word a line, and answers each
//! ```
//!
//! PATH is `window` or `moves`. The commands of `talk`:
//!
//! - `open` makes N connections, and one more for requests: "open smc", or "open tcp" without any if
//!   one of them is TCP;
//! - `flow` sends and receives on each in the background, and on as many of TCP alone beside them, and
//!   answers once bytes of each came back;
//! - `more` answers once more bytes of each came back;
//! - `left` answers once each has left its device since the last `flow` or `back`;
//! - `back` answers once each has left its device since then and is on a device again;
//! - `carriers` says how many are on a device, on TCP, and on the way;
//! - `pauses` says the longest times without bytes on any since the last `pauses`:
//!   "pauses 120 ms, by TCP alone 80 ms". `serve` knows this command, too;
//! - `finish` ends all streams: "whole", the number of bytes echoed, and the longest time without any.
//!
//! After a failure of a stream, or a wrong byte, the answer is the error.

mod flow;

use std::collections::BTreeMap;
use std::io::{self, BufRead};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::socket::{CarrierChanges, CurrentCarrier, DataPath};
use guest_driver::{Config, SmcListener, SmcStream, Stack};

use flow::{Flow, Kind, Line, Pauses, echo};

/// How long one CLC message may take. Emulated guests on a busy host are slow.
const CLC_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for a change without a command.
const LIMIT: Duration = Duration::from_secs(120);
/// Pause between two checks for such a change.
const LOOK: Duration = Duration::from_millis(10);

fn open(device: &str, path: &str) -> Arc<Stack> {
    let mut config = Config::new(device);
    (config.clc_timeout, config.detect_timeout) = (CLC_TIMEOUT, CLC_TIMEOUT);
    config.outlive_device = true;
    config.path = match path {
        // A busy host may find the window slow.
        "window" => DataPath::Window,
        "moves" => DataPath::Move,
        _ => panic!("{path:?} is neither window nor moves"),
    };
    Stack::open(config).unwrap()
}

/// The address for TCP alone.
fn beside(address: &str) -> SocketAddr {
    let mut address: SocketAddr = address.parse().unwrap();
    address.set_port(address.port() + 1);
    address
}

/// Listens and echoes, and says pauses for each line of its standard input.
///
/// # Panics
/// The device cannot be opened, or an address is taken.
pub fn serve(device: &str, path: &str, address: &str, say: fn(&str)) {
    let stack = open(device, path);
    let listener = SmcListener::bind(&stack, address).unwrap();
    let beside = TcpListener::bind(beside(address)).unwrap();
    let pauses = Pauses::default();
    say("listens");
    let (over_tcp, asked) = (pauses.clone(), pauses.clone());
    thread::spawn(move || {
        for stream in beside.incoming().flatten() {
            let pauses = over_tcp.clone();
            thread::spawn(move || echo(&stream, &pauses));
        }
    });
    thread::spawn(move || {
        for _ in io::stdin().lock().lines().map_while(Result::ok) {
            say(&asked.take());
        }
    });
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        let pauses = pauses.clone();
        thread::spawn(move || {
            if let Err(error) = echo(&stream, &pauses) {
                say(&format!("failed {:?} on {}", error.kind(), stream.info()));
            }
        });
    }
}

/// State of `talk`.
struct Talk {
    stack: Arc<Stack>,
    address: String,
    streams: usize,
    opened: Vec<SmcStream>,
    /// Changes of carrier of each flowing connection, counted at the end of a command.
    seen: BTreeMap<SocketAddr, u32>,
    flows: Vec<Flow>,
    pauses: Pauses,
    stop: Arc<AtomicBool>,
    rounds: u64,
}

impl Talk {
    fn open(&mut self) -> Result<String, String> {
        self.opened.clear();
        for _ in 0..=self.streams {
            let stream = SmcStream::connect(&self.stack, &*self.address);
            let stream = stream.map_err(|error| format!("connect: {error}"))?;
            if !stream.is_smc() {
                self.opened.clear();
                return Ok("open tcp".into());
            }
            self.opened.push(stream);
        }
        Ok("open smc".into())
    }

    fn flow(&mut self) -> Result<String, String> {
        self.stop = Arc::default();
        self.rounds += 1;
        let local = self.opened.iter().map(|stream| Some((stream.local_addr().ok()?, 0)));
        self.seen = local.collect::<Option<_>>().ok_or("a connection without an address")?;
        let mut lines: Vec<Arc<dyn Line>> = Vec::new();
        lines.extend(self.opened.drain(..).map(|stream| Arc::new(stream) as Arc<dyn Line>));
        // As many as of the others: the longest of several pauses is longer than one.
        for _ in 0..lines.len() {
            let tcp = TcpStream::connect(beside(&self.address));
            lines.push(Arc::new(tcp.map_err(|error| format!("connect by TCP: {error}"))?));
        }
        // The last of each carrier is for requests.
        let requests = [self.streams, 2 * self.streams + 1];
        let flows = lines.into_iter().enumerate().map(|(n, line)| {
            let kind = if requests.contains(&n) { Kind::Requests } else { Kind::Stream };
            Flow::start(line, kind, self.rounds * 1000 + n as u64, &self.stop, &self.pauses)
        });
        self.flows = flows.collect();
        self.more()?;
        Ok("flows".into())
    }

    fn more(&mut self) -> Result<String, String> {
        let before: Vec<usize> = self.flows.iter().map(Flow::back).collect();
        self.until("more bytes of each stream", |talk| {
            talk.flows.iter().zip(&before).all(|(flow, before)| flow.back() >= before + flow.some())
        })?;
        Ok("more".into())
    }

    /// The carriers and their changes of the flowing connections.
    fn changes(&self) -> BTreeMap<SocketAddr, CarrierChanges> {
        let all = self.stack.connections().into_iter();
        let all = all.filter_map(|conn| Some((conn.local?, conn.changes?)));
        all.filter(|(local, _)| self.seen.contains_key(local)).collect()
    }

    /// Waits for each connection to have changed its carrier since the last such command, and to be on
    /// a wanted carrier.
    fn changed(&mut self, what: &str, wanted: fn(CurrentCarrier) -> bool) -> Result<(), String> {
        self.until(what, |talk| {
            let changes = talk.changes();
            talk.seen.iter().all(|(local, seen)| {
                changes.get(local).is_some_and(|all| all.count > *seen && wanted(all.now))
            })
        })
    }

    fn left(&mut self) -> Result<String, String> {
        self.changed("all streams on TCP", |now| !matches!(now, CurrentCarrier::Leaving))?;
        Ok("left".into())
    }

    fn back(&mut self) -> Result<String, String> {
        self.changed("all streams on a device", |now| matches!(now, CurrentCarrier::Device))?;
        for (local, changes) in self.changes() {
            self.seen.insert(local, changes.count);
        }
        Ok("back".into())
    }

    fn carriers(&self) -> String {
        let [mut device, mut tcp, mut leaving] = [0; 3];
        for changes in self.changes().values() {
            *match changes.now {
                CurrentCarrier::Device => &mut device,
                CurrentCarrier::Tcp => &mut tcp,
                CurrentCarrier::Leaving => &mut leaving,
            } += 1;
        }
        format!("device {device}, tcp {tcp}, leaving {leaving}")
    }

    fn until(&mut self, what: &str, done: impl Fn(&Talk) -> bool) -> Result<(), String> {
        let end = Instant::now() + LIMIT;
        while !done(self) {
            if self.flows.iter().any(Flow::is_over) {
                return self.finish().and(Err(format!("{what}: a stream is over")));
            }
            if Instant::now() > end {
                let back = self.flows.iter().map(Flow::back);
                return Err(format!(
                    "{what}: not within {LIMIT:?}; back: {:?}; {:?}",
                    back.collect::<Vec<_>>(),
                    self.stack.connections()
                ));
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<String, String> {
        self.stop.store(true, Ordering::Relaxed);
        let (mut bytes, mut longest) = (0, Duration::ZERO);
        for flow in self.flows.drain(..) {
            let (sent, pause) = flow.end()?;
            bytes += sent;
            longest = longest.max(pause);
        }
        self.seen.clear();
        Ok(format!("whole {bytes} bytes, longest pause {} ms", longest.as_millis()))
    }
}

/// Carries out the commands on standard input.
///
/// # Panics
/// If the device cannot be opened.
pub fn talk(device: &str, path: &str, address: &str, streams: usize, say: fn(&str)) {
    let mut talk = Talk {
        stack: open(device, path),
        address: address.into(),
        streams,
        opened: Vec::new(),
        seen: BTreeMap::new(),
        flows: Vec::new(),
        pauses: Pauses::default(),
        stop: Arc::default(),
        rounds: 0,
    };
    for command in io::stdin().lock().lines().map_while(Result::ok) {
        let answer = match command.as_str() {
            "open" => talk.open(),
            "flow" => talk.flow(),
            "more" => talk.more(),
            "left" => talk.left(),
            "back" => talk.back(),
            "carriers" => Ok(talk.carriers()),
            "pauses" => Ok(talk.pauses.take()),
            "finish" => talk.finish(),
            command => Err(format!("no command {command:?}")),
        };
        say(&answer.unwrap_or_else(|error| format!("failed: {error}")));
    }
}
