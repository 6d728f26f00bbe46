// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Streams between two machines that go on when their devices go.
//!
//! ```text
//! smc-test-peer streams serve DEVICE PATH ADDRESS     echoes; prints "listens", then a line for each
//!                                                     connection that fails
//! smc-test-peer streams talk DEVICE PATH ADDRESS N    reads commands, a word a line, and answers each
//! ```
//!
//! PATH is `window` or `moves`. The commands of `talk`:
//!
//! - `open` makes N connections: "open smc", or "open tcp" without any if one of them is TCP;
//! - `flow` sends and receives on each in the background, and answers when bytes of each came back;
//! - `more` answers when more bytes of each came back;
//! - `left` answers when each has left its device;
//! - `finish` ends all streams: "whole", how many bytes came back, and the longest time without any.
//!
//! A stream that fails, or whose bytes are not those that were sent, is an answer that says so.

use std::io::{self, BufRead, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use guest_driver::socket::{CurrentCarrier, DataPath};
use guest_driver::{Config, SmcListener, SmcStream, Stack};

use crate::bytes::{difference, fill};

/// How long one CLC message may take. Emulated guests on a busy host are slow.
const CLC_TIMEOUT: Duration = Duration::from_secs(60);
/// How long anything may take that happens by itself.
const LIMIT: Duration = Duration::from_secs(120);
/// Bytes of one write.
const BLOCK: usize = 16 << 10;
/// Between two writes, so that an emulated processor has time for more than copies.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes of each stream that a command awaits.
const SOME: usize = 128 << 10;
/// Between two looks at what happens by itself.
const LOOK: Duration = Duration::from_millis(10);

fn open(device: &str, path: &str) -> Arc<Stack> {
    let mut config = Config::new(device);
    (config.clc_timeout, config.detect_timeout) = (CLC_TIMEOUT, CLC_TIMEOUT);
    config.outlive_device = true;
    config.path = match path {
        "window" => DataPath::Auto,
        "moves" => DataPath::Move,
        _ => panic!("{path:?} is neither window nor moves"),
    };
    Stack::open(config).unwrap()
}

/// Listens and echoes.
///
/// # Panics
/// The device cannot be opened, or the address is taken.
pub fn serve(device: &str, path: &str, address: &str, say: fn(&str)) {
    let stack = open(device, path);
    let listener = SmcListener::bind(&stack, address).unwrap();
    say("listens");
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        thread::spawn(move || {
            if let Err(error) = echo(&mut stream) {
                say(&format!("failed {:?} on {}", error.kind(), stream.info()));
            }
        });
    }
}

fn echo(stream: &mut SmcStream) -> io::Result<()> {
    let mut buf = vec![0; BLOCK];
    loop {
        match stream.read(&mut buf)? {
            0 => {
                // The client may have gone.
                let _ = stream.shutdown(Shutdown::Write);
                return Ok(());
            }
            n => stream.write_all(buf.get(..n).unwrap_or_default())?,
        }
    }
}

/// One stream, and the thread that reads what comes back.
struct Flow {
    back: Arc<AtomicUsize>,
    reader: JoinHandle<Result<Duration, String>>,
    writer: JoinHandle<Result<usize, String>>,
}

impl Flow {
    fn start(stream: SmcStream, seed: u64, stop: &Arc<AtomicBool>) -> Flow {
        let (stream, back, stop) = (Arc::new(stream), Arc::new(AtomicUsize::new(0)), stop.clone());
        let (reads, count) = (stream.clone(), back.clone());
        let reader = thread::spawn(move || read(&reads, seed, &count));
        let writer = thread::spawn(move || write(&stream, seed, &stop));
        Flow { back, reader, writer }
    }

    fn is_over(&self) -> bool {
        self.reader.is_finished() || self.writer.is_finished()
    }

    fn end(self) -> Result<(usize, Duration), String> {
        let ended = |what: &str| format!("{what} has panicked");
        let back = self.back;
        let sent = self.writer.join().map_err(|_| ended("a writer"))??;
        let pause = self.reader.join().map_err(|_| ended("a reader"))??;
        match back.load(Ordering::Relaxed) {
            received if received == sent => Ok((sent, pause)),
            received => Err(format!("{received} bytes of {sent} came back")),
        }
    }
}

fn write(mut stream: &SmcStream, seed: u64, stop: &AtomicBool) -> Result<usize, String> {
    let (mut block, mut done) = (vec![0; BLOCK], 0);
    while !stop.load(Ordering::Relaxed) {
        fill(seed, done, &mut block);
        stream.write_all(&block).map_err(|error| format!("stream {seed}: write: {error}"))?;
        done += block.len();
        thread::sleep(PAUSE);
    }
    let ended = stream.shutdown(Shutdown::Write);
    ended.map_err(|error| format!("stream {seed}: shutdown: {error}"))?;
    Ok(done)
}

/// Checks what comes back. The longest time without any of it.
fn read(mut stream: &SmcStream, seed: u64, back: &AtomicUsize) -> Result<Duration, String> {
    let (mut buf, mut expected) = (vec![0; BLOCK], vec![0; BLOCK]);
    let (mut done, mut last, mut longest) = (0, Instant::now(), Duration::ZERO);
    loop {
        let n = stream.read(&mut buf);
        let n = n.map_err(|error| format!("stream {seed}: read after {done} bytes: {error}"))?;
        longest = longest.max(last.elapsed());
        last = Instant::now();
        if n == 0 {
            return Ok(longest);
        }
        let (got, wanted) = (buf.get(..n), expected.get_mut(..n));
        let (Some(got), Some(wanted)) = (got, wanted) else { return Ok(longest) };
        fill(seed, done, wanted);
        if let Some((at, byte, wanted)) = difference(got, wanted) {
            return Err(format!("stream {seed}: byte {} is {byte}, not {wanted}", done + at));
        }
        done += n;
        back.store(done, Ordering::Relaxed);
    }
}

/// What `talk` has.
struct Talk {
    stack: Arc<Stack>,
    address: String,
    streams: usize,
    opened: Vec<SmcStream>,
    flows: Vec<Flow>,
    stop: Arc<AtomicBool>,
    rounds: u64,
}

impl Talk {
    fn open(&mut self) -> Result<String, String> {
        self.opened.clear();
        for _ in 0..self.streams {
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
        let seeds = self.rounds * 1000..;
        let flows = self.opened.drain(..).zip(seeds);
        self.flows = flows.map(|(stream, seed)| Flow::start(stream, seed, &self.stop)).collect();
        self.more()?;
        Ok("flows".into())
    }

    fn more(&mut self) -> Result<String, String> {
        let count = |flow: &Flow| flow.back.load(Ordering::Relaxed);
        let before: Vec<usize> = self.flows.iter().map(count).collect();
        self.until("more bytes of each stream", |talk| {
            talk.flows.iter().zip(&before).all(|(flow, before)| count(flow) >= before + SOME)
        })?;
        Ok("more".into())
    }

    fn left(&mut self) -> Result<String, String> {
        self.until("all streams on TCP", |talk| {
            let changes = talk.stack.connections().into_iter().filter_map(|conn| conn.changes);
            let left = |now| !matches!(now, CurrentCarrier::Leaving);
            changes.filter(|all| all.count > 0 && left(all.now)).count() >= talk.streams
        })?;
        Ok("left".into())
    }

    fn until(&mut self, what: &str, done: impl Fn(&Talk) -> bool) -> Result<(), String> {
        let end = Instant::now() + LIMIT;
        while !done(self) {
            if self.flows.iter().any(Flow::is_over) {
                return self.finish().and(Err(format!("{what}: a stream is over")));
            }
            if Instant::now() > end {
                let back = self.flows.iter().map(|flow| flow.back.load(Ordering::Relaxed));
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
        Ok(format!("whole {bytes} bytes, longest pause {} ms", longest.as_millis()))
    }
}

/// Carries out the commands that come on standard input.
///
/// # Panics
/// The device cannot be opened.
pub fn talk(device: &str, path: &str, address: &str, streams: usize, say: fn(&str)) {
    let mut talk = Talk {
        stack: open(device, path),
        address: address.into(),
        streams,
        opened: Vec::new(),
        flows: Vec::new(),
        stop: Arc::default(),
        rounds: 0,
    };
    for command in io::stdin().lock().lines().map_while(Result::ok) {
        let answer = match command.as_str() {
            "open" => talk.open(),
            "flow" => talk.flow(),
            "more" => talk.more(),
            "left" => talk.left(),
            "finish" => talk.finish(),
            command => Err(format!("no command {command:?}")),
        };
        say(&answer.unwrap_or_else(|error| format!("failed: {error}")));
    }
}
