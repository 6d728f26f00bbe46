// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two honest devices, talking all the time: their bytes stay right, and they never wait for long.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{Config, DataPath, SmcListener, SmcStream, Stack};
use virtio_ism_abi::Gid;

use crate::bytes::{Rng, difference, fill};

/// Longest message, bytes: more than the ring.
const LONGEST: u32 = 100_000;
/// Messages of one connection.
const MESSAGES: u32 = 2_000;
/// Round trips kept for percentiles.
const SAMPLES: usize = 1 << 16;

/// How long round trips took.
#[derive(Debug, Default)]
pub(super) struct Times {
    samples: Vec<Duration>,
    count: u64,
    longest: Duration,
}

impl Times {
    fn add(&mut self, took: Duration) {
        let at = self.count as usize % SAMPLES;
        if at < self.samples.len() {
            self.samples[at] = took;
        } else {
            self.samples.push(took);
        }
        self.count += 1;
        self.longest = self.longest.max(took);
    }

    fn at(&self, sorted: &[Duration], thousandth: usize) -> Duration {
        sorted.get(sorted.len() * thousandth / 1000).copied().unwrap_or_default()
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut sorted = self.samples.clone();
        sorted.sort_unstable();
        let [p50, p99] = [500, 990].map(|at| self.at(&sorted, at));
        let longest = self.longest;
        write!(f, "{} round trips, p50 {p50:.1?}, p99 {p99:.1?}, longest {longest:.1?}", self.count)
    }
}

/// Results of a pair.
#[derive(Debug, Default)]
struct Progress {
    stop: AtomicBool,
    bytes: AtomicU64,
    times: Mutex<Times>,
    /// Since when the round trip under way lasts.
    since: Mutex<Option<Instant>>,
    wrong: Mutex<Option<String>>,
}

impl Progress {
    fn fail(&self, what: String) {
        self.wrong.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(what);
    }
}

/// A server and a client, whose messages come back.
#[derive(Debug)]
pub(super) struct Bystander {
    name: &'static str,
    progress: Arc<Progress>,
    client: Option<thread::JoinHandle<()>>,
    gids: [Gid; 2],
}

impl Bystander {
    /// Opens both devices and begins to talk.
    pub(super) fn start(
        name: &'static str,
        sockets: [&Path; 2],
        path: DataPath,
        seed: u64,
    ) -> io::Result<Bystander> {
        let open = |socket: &Path| {
            // A loaded machine is no reason for TCP, nor is a device that is gone.
            let mut config = Config { path, outlive_device: false, ..Config::new(socket) };
            (config.clc_timeout, config.detect_timeout) =
                (Duration::from_secs(20), Duration::from_secs(5));
            Stack::open(config)
        };
        let (server, client) = (open(sockets[0])?, open(sockets[1])?);
        let gid = |stack: &Arc<Stack>| stack.devices().first().map_or(Gid::NONE, |(_, gid)| *gid);
        let gids = [gid(&server), gid(&client)];
        let listener = SmcListener::bind(&server, "127.0.0.1:0")?;
        let address = listener.local_addr()?;
        thread::Builder::new().name(format!("{name} server")).spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                thread::spawn(move || echo(&mut stream));
            }
        })?;
        let progress = Arc::new(Progress::default());
        let told = progress.clone();
        let client = thread::Builder::new().name(format!("{name} client")).spawn(move || {
            let mut rng = Rng::new(seed);
            while !told.stop.load(Ordering::Relaxed) {
                let talked = SmcStream::connect(&client, address)
                    .and_then(|stream| talk(&stream, &mut rng, &told));
                if let Err(error) = talked {
                    return told.fail(format!("{name}: {error}"));
                }
            }
        })?;
        Ok(Bystander { name, progress, client: Some(client), gids })
    }

    /// The GIDs of its devices.
    pub(super) fn gids(&self) -> [Gid; 2] {
        self.gids
    }

    /// A pair's failure, if any: an error, a wrong byte, no progress for `limit`.
    pub(super) fn wrong(&self, limit: Duration) -> Option<String> {
        let lock = |e| PoisonError::into_inner(e);
        if let Some(what) = &*self.progress.wrong.lock().unwrap_or_else(lock) {
            return Some(what.clone());
        }
        let since = (*self.progress.since.lock().unwrap_or_else(PoisonError::into_inner))?;
        let longest = self.progress.times.lock().unwrap_or_else(PoisonError::into_inner).longest;
        let waited = since.elapsed().max(longest);
        (waited > limit).then(|| format!("{}: no progress for {waited:.1?}", self.name))
    }

    /// Bytes and times measured since the last call.
    pub(super) fn take_times(&self) -> (u64, Times) {
        let mut times = self.progress.times.lock().unwrap_or_else(PoisonError::into_inner);
        (self.progress.bytes.swap(0, Ordering::Relaxed), std::mem::take(&mut times))
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        self.progress.stop.store(true, Ordering::Relaxed);
        if let Some(client) = self.client.take()
            && self.wrong(Duration::from_secs(10)).is_none()
        {
            let _ = client.join();
        }
    }
}

fn echo(stream: &mut SmcStream) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..n]).is_err() {
            return;
        }
    }
}

/// One connection: messages of all sizes, each echo compared with its message.
fn talk(stream: &SmcStream, rng: &mut Rng, progress: &Progress) -> io::Result<()> {
    if !stream.is_smc() {
        return Err(io::Error::other(format!("{}", stream.info())));
    }
    let (mut sent, mut back) = (Vec::new(), Vec::new());
    for _ in 0..MESSAGES {
        if progress.stop.load(Ordering::Relaxed) {
            break;
        }
        let longest = if rng.one_in(16) { LONGEST } else { 2_000 };
        let len = 1 + rng.below(longest) as usize;
        sent.resize(len, 0);
        back.resize(len, 0);
        fill(rng.bits(), 0, &mut sent);
        let start = Instant::now();
        *progress.since.lock().unwrap_or_else(PoisonError::into_inner) = Some(start);
        // Not more at once than the ring of the way back takes, or both ends wait to write.
        for (sent, back) in sent.chunks(30_000).zip(back.chunks_mut(30_000)) {
            (&mut &*stream).write_all(sent)?;
            (&mut &*stream).read_exact(back)?;
        }
        let took = start.elapsed();
        *progress.since.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if let Some((at, is, ought)) = difference(&back, &sent) {
            let what = format!("byte {at} of {len} is {is:#04x} instead of {ought:#04x}");
            return Err(io::Error::other(what));
        }
        progress.bytes.fetch_add(2 * len as u64, Ordering::Relaxed);
        progress.times.lock().unwrap_or_else(PoisonError::into_inner).add(took);
    }
    Ok(())
}
