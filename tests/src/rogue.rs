// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Misbehaving guests, as programs: a test runs them in a virtual machine, and only this machine may
//! suffer. The programs take any device address, so processes of the host can run them, too.
//!
//! ```text
//! smc-test-peer rogue scribble DEVICE SECONDS   random bytes over its own rings and buffers
//! smc-test-peer rogue smear DEVICE ADDRESS      a connection, then random bytes over the window
//! smc-test-peer rogue lie DEVICE ADDRESS N     N connections to AF_SMC, with lies about the bytes read
//!                                              and in the control tails of slabs
//! smc-test-peer rogue storm DEVICE OTHER SECONDS  wakes another device of its own without a pause
//! smc-test-peer rogue loiter ADDRESS SECONDS    200 clients a second, each with a part of a Proposal,
//!                                              or all of it; each stays for a while
//! smc-test-peer rogue look DEVICE               reads the whole window, counts non-zero bytes
//! smc-test-peer rogue churn DEVICE GID SECONDS  registers and drops DMBs for a peer; "own": for
//!                                              another PCI device of this guest
//! smc-test-peer rogue deaf DEVICE ADDRESS       registers DMBs for "flicker", takes no event
//! smc-test-peer rogue flicker DEVICE PORT N     comes and goes N times, with events for "deaf";
//!                                              says its port first
//! ```

use std::collections::{HashMap, VecDeque};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use smc_core::wire::cdc::{CONTROL_BLOCK_LEN, ConsumerWord, ProducerWord, StateFlags};
use smc_core::wire::cursor::Cursor;
use smc_core::wire::ids::DmbToken;
use smc_rendezvous::{Mode, Options, PeerDiscovery};
use virtio_ism_abi::command::Op;
use virtio_ism_abi::slab::CONTROL_LEN;
use virtio_ism_abi::{Gid, Token};

use crate::bytes::Rng;
use crate::raw::{Device, LINK, dmbe, host, proposal, propose, propose_to_linux, put};

/// Bytes of a rogue's DMBs.
const LEN: u32 = 16 << 10;

/// Runs one of the programs.
///
/// # Panics
/// On unknown arguments, or if a device cannot be opened.
pub fn run(args: &[&str], say: fn(&str)) {
    match *args {
        ["scribble", device, seconds] => scribble(device, seconds.parse().unwrap(), say),
        ["smear", device, address] => smear(device, address, say),
        ["lie", device, address, n] => lie(device, address, n.parse().unwrap(), say),
        ["storm", device, other, seconds] => storm(device, other, seconds.parse().unwrap(), say),
        ["loiter", address, seconds] => loiter(address, seconds.parse().unwrap(), say),
        ["look", device] => look(device, say),
        ["churn", device, gid, seconds] => churn(device, gid, seconds.parse().unwrap(), say),
        ["deaf", device, address] => deaf(device, address, say),
        ["flicker", device, port, n] => flicker(device, port, n.parse().unwrap(), say),
        _ => panic!("unknown rogue: {args:?}"),
    }
}

/// Address ranges of this process within the device's reach: the driver's pool of guest memory.
fn pools() -> Vec<(u64, u64)> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("virtio-ism") || line.contains("anon_hugepage"))
        .filter_map(|line| {
            let (start, end) = line.split_whitespace().next()?.split_once('-')?;
            Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
        })
        .collect()
}

/// Writes random bytes over the rings and slots at the start of the driver's own pool, during
/// commands, while the device reads there. Repeats with a fresh device each time.
fn scribble(device: &str, seconds: u64, say: fn(&str)) {
    let end = Instant::now() + Duration::from_secs(seconds);
    let memory = File::options().write(true).open("/proc/self/mem").unwrap();
    let mut rng = Rng::new(seconds);
    let (opened, mut refused) = (Arc::new(AtomicU32::new(0)), 0u32);
    // The program's own driver reads the scribbled memory, and may wait for ever.
    let so_far = opened.clone();
    thread::spawn(move || {
        thread::sleep(Duration::from_secs(seconds + 10));
        say(&format!("scribbled until device {} kept it", so_far.load(Ordering::Relaxed)));
        std::process::exit(0);
    });
    while Instant::now() < end {
        let Ok(device) = Device::at(device) else {
            refused += 1;
            thread::sleep(Duration::from_millis(50));
            continue;
        };
        opened.fetch_add(1, Ordering::Relaxed);
        let transport = &*device.transport;
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) && !transport.is_gone() {
                        let _ = transport.control(Op::Stats, &[], &mut [0; 128]);
                    }
                });
            }
            for _ in 0..20_000 {
                for (start, end) in pools() {
                    // Rings are where allocation begins: after the first 2 MiB at the latest.
                    let span = (end - start).min(4 << 20);
                    for _ in 0..64 {
                        let at = start + u64::from(rng.below((span / 8) as u32)) * 8;
                        let _ = memory.write_at(&rng.bits().to_ne_bytes(), at);
                    }
                }
                if transport.is_gone() || Instant::now() >= end {
                    break;
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
    let opened = opened.load(Ordering::Relaxed);
    say(&format!("scribbled over {opened} devices, {refused} were refused"));
}

/// Shakes hands properly, then writes random bytes over every byte of its window.
fn smear(device: &str, address: &str, say: fn(&str)) {
    let device = Device::at(device).unwrap();
    let (tcp, accepted) = propose(address.parse().unwrap(), &device.config()).accepted();
    let DmbToken(token) = accepted.peer().token;
    let theirs = device.ism.attach(Token(token), accepted.peer().size.bytes()).unwrap();
    let own = device.ism.register(Gid(accepted.devices().peer.0), 64 << 10, 0).unwrap();
    let (_, confirm) = accepted.confirm(dmbe(own.token().0, 64 << 10), LINK);
    put(&tcp, &confirm);
    say("connected");
    let mut rng = Rng::new(1);
    let mut written = 0;
    for round in 0..3 {
        written += write_window(&device, &mut rng, false);
        // Whatever the words say now, the victim looks at them.
        let _ = theirs.signal();
        say(&format!("round {round}: {written} bytes written"));
    }
}

/// Writes random bytes over every mapped byte of a device's window, or over the control tails of
/// slabs. Returns the number of bytes.
fn write_window(device: &Device, rng: &mut Rng, only_tails: bool) -> u64 {
    const STEP: u64 = CONTROL_LEN as u64;
    let mut bytes = vec![0; STEP as usize];
    let mut written = 0;
    for at in (0..device.transport.window_size()).step_by(STEP as usize) {
        let Some(part) = device.transport.window_slice(at, STEP) else { continue };
        // Behind a slab's tail there is a gap, since slabs are aligned.
        if only_tails && device.transport.window_slice(at + STEP, STEP).is_some() {
            continue;
        }
        for eight in bytes.chunks_exact_mut(8) {
            eight.copy_from_slice(&rng.bits().to_ne_bytes());
        }
        // A tail begins with the nonce, read by the program's own driver.
        let from = if only_tails { 64 } else { 0 };
        part.copy_in(from, &bytes[from..]).unwrap();
        written += STEP - from as u64;
    }
    written
}

/// Does a proper handshake with AF_SMC and has AF_SMC send as fast as possible. Then lies about the
/// bytes read and about the end, and writes random bytes over the control tails of slabs, if there are
/// any. Stays until its standard input ends.
///
/// The producer cursor is no lie: AF_SMC trusts the cursor, and would read beyond its buffer
/// (docs/linux.md).
fn lie(device: &str, address: &str, n: usize, say: fn(&str)) {
    /// Messages of a connection.
    const ROUNDS: usize = 200;
    /// Counts of a cursor: around the length of a buffer, and of a word.
    const COUNTS: [u32; 8] = [0, 1, 0xffd8, 0xffff, 0x1_0000, 0x7fff_ffff, 0x8000_0000, u32::MAX];
    /// An order of [`crate::interop`].
    const ORDER: &str = "pour 0 1";
    let device = Device::at(device).unwrap();
    let discovery = PeerDiscovery::open(Mode::Required, Options::default());
    let address = address.parse().unwrap();
    let mut rng = Rng::new(n as u64);
    let (mut told, mut written) = (0u32, 0);
    // AF_SMC takes a DMB again for a later connection.
    let (mut attached, mut open) = (HashMap::new(), Vec::new());
    for _ in 0..n {
        let (tcp, accepted) = propose_to_linux(address, &device.config(), &discovery).accepted();
        let DmbToken(token) = accepted.peer().token;
        let len = accepted.peer().size.bytes();
        let theirs =
            attached.entry(token).or_insert_with(|| device.ism.attach(Token(token), len).unwrap());
        let own = device.ism.register(Gid(accepted.devices().peer.0), 64 << 10, 0).unwrap();
        let (_, confirm) = accepted.confirm(dmbe(own.token().0, 64 << 10), LINK);
        put(&tcp, &confirm);
        let order = format!("{ORDER:<64}");
        let producer = ProducerWord { cursor: Cursor::new(0, order.len() as u32) }.to_u64();
        let ring = CONTROL_BLOCK_LEN as u32;
        theirs.deliver(&[(ring, order.as_bytes())], [producer, 0], true).unwrap();
        for round in 0..ROUNDS {
            let count = COUNTS[rng.below(COUNTS.len() as u32) as usize];
            let wrap = [0, 1, u16::MAX, rng.bits() as u16][rng.below(4) as usize];
            // Not in the first half, whose connection the end would be. All end by an abort.
            let flags = match round {
                _ if round + 1 == ROUNDS => u16::from_ne_bytes([0, StateFlags::ABORT.bits()]),
                _ if round * 2 < ROUNDS => 0,
                _ => rng.bits() as u16,
            };
            let cursor = ConsumerWord::from_u64(u64::from(flags) << 48);
            let cursor = ConsumerWord { cursor: Cursor::new(wrap, count), ..cursor };
            // Behind the order.
            let bytes = rng.bits().to_ne_bytes();
            let piece = (ring + 64 + rng.below(len - ring - 72), &bytes[..]);
            if theirs.deliver(&[piece], [producer, cursor.to_u64()], round % 3 != 0).is_err() {
                break;
            }
            told += 1;
            if round % 10 == 0 {
                // Time for AF_SMC to send, misled by the lies.
                thread::sleep(Duration::from_millis(1));
            }
        }
        written += write_window(&device, &mut rng, true);
        let _ = theirs.signal();
        open.push((tcp, own));
    }
    say(&format!("lied in {told} messages of {n} connections, and in {written} bytes of slabs"));
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Stores into a DMB and signals each time, as fast as the device allows.
fn storm(device: &str, other: &str, seconds: u64, say: fn(&str)) {
    let (user, owner) = (Device::at(device).unwrap(), Device::at(other).unwrap());
    let dmb = owner.ism.register(user.ism.gid(), LEN, 0).unwrap();
    let theirs = user.ism.attach(dmb.token(), LEN).unwrap();
    say(&format!("storms as {}", user.ism.gid()));
    let (start, mut n, mut refused) = (Instant::now(), 0u64, 0u64);
    while start.elapsed() < Duration::from_secs(seconds) {
        match theirs.deliver(&[(0, &[1; 64])], [n, n], true) {
            Ok(()) => n += 1,
            Err(_) => refused += 1,
        }
    }
    say(&format!("signalled {n} times, {refused} were refused"));
}

/// Clients with handshakes begun and never ended.
fn loiter(address: &str, seconds: u64, say: fn(&str)) {
    /// Clients staying at a time.
    const STAY: usize = 400;
    /// Pause between two clients.
    const PAUSE: Duration = Duration::from_millis(5);
    let (_, proposal) = proposal(&host(&[(0x8001, 0x5a)]));
    let mut clients = VecDeque::new();
    let (start, mut n, mut refused) = (Instant::now(), 0usize, 0u32);
    while start.elapsed() < Duration::from_secs(seconds) {
        let Ok(tcp) = TcpStream::connect(address) else {
            refused += 1;
            thread::sleep(PAUSE);
            continue;
        };
        let bytes = [0, 1, 8, proposal.len()][n % 4];
        put(&tcp, &proposal[..bytes]);
        clients.push_back(tcp);
        clients.drain(..clients.len().saturating_sub(STAY));
        n += 1;
        thread::sleep(PAUSE);
    }
    say(&format!("{n} clients loitered, {refused} were refused"));
}

/// Reads the whole window without owning or using a single DMB.
fn look(device: &str, say: fn(&str)) {
    let device = Device::at(device).unwrap();
    const STEP: u64 = 64 << 10;
    let mut bytes = vec![0; STEP as usize];
    let (mut seen, mut found) = (0u64, 0usize);
    for at in (0..device.transport.window_size()).step_by(STEP as usize) {
        let Some(part) = device.transport.window_slice(at, STEP) else { continue };
        part.copy_out(0, &mut bytes).unwrap();
        seen += STEP;
        found += bytes.iter().filter(|byte| **byte != 0).count();
    }
    say(&format!("looked at {seen} of {} bytes, {found} not zero", device.transport.window_size()));
}

/// Registers and drops DMBs as fast as the device answers.
fn churn(device: &str, gid: &str, seconds: u64, say: fn(&str)) {
    let device = Device::at(device).unwrap();
    // The peer of its own: another device of this guest.
    let other = (gid == "own").then(|| Device::at("pci").unwrap());
    let user = other.as_ref().map_or_else(|| parse_gid(gid), |other| other.ism.gid());
    say(&format!("churns as {}", device.ism.gid()));
    let (start, mut n, mut refused) = (Instant::now(), 0u32, 0u32);
    while start.elapsed() < Duration::from_secs(seconds) {
        match device.ism.register(user, LEN, (n % 64) as u16) {
            Ok(dmb) => drop(dmb),
            Err(_) => refused += 1,
        }
        n += 1;
    }
    say(&format!("registered {n} DMBs, {refused} were refused"));
}

/// Registers a DMB for each GID told by `flicker`, and never takes an event.
fn deaf(device: &str, address: &str, say: fn(&str)) {
    let device = Device::at(device).unwrap();
    say(&format!("deaf as {}", device.ism.gid()));
    let mut dmbs = Vec::new();
    loop {
        let Ok(tcp) = TcpStream::connect(address) else {
            thread::sleep(Duration::from_millis(20));
            continue;
        };
        let mut line = String::new();
        let _ = BufReader::new(&tcp).read_line(&mut line);
        match line.trim() {
            "" => continue,
            "end" => break,
            gid => dmbs.push(device.ism.register(parse_gid(gid), LEN, 0)),
        }
        let _ = writeln!(&tcp, "{}", device.ism.gid());
    }
    let alive = !device.ism.is_gone();
    say(&format!("registered for {} peers; the device lives: {alive}", dmbs.len()));
}

/// Comes, sends events to the deaf one, and goes; `n` times.
fn flicker(device: &str, port: &str, n: usize, say: fn(&str)) {
    let listener = TcpListener::bind(format!("0.0.0.0:{port}")).unwrap();
    say(&listener.local_addr().unwrap().port().to_string());
    let (mut sent, mut refused) = (0, 0);
    for _ in 0..n {
        let device = Device::at(device).unwrap();
        let (tcp, _) = listener.accept().unwrap();
        writeln!(&tcp, "{}", device.ism.gid()).unwrap();
        let mut line = String::new();
        BufReader::new(&tcp).read_line(&mut line).unwrap();
        let deaf = parse_gid(line.trim());
        // More than the device keeps for a deaf peer.
        for code in 0..9 {
            match device.ism.signal_event(deaf, code, 0) {
                Ok(()) => sent += 1,
                Err(_) => refused += 1,
            }
        }
    }
    let (tcp, _) = listener.accept().unwrap();
    writeln!(&tcp, "end").unwrap();
    say(&format!("came and went {n} times; {sent} events sent, {refused} refused"));
}

fn parse_gid(text: &str) -> Gid {
    Gid(u128::from_str_radix(&text.replace('-', ""), 16).unwrap().to_be_bytes())
}
