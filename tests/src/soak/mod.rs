// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A long hostile run: `cargo xtask soak`.
//!
//! The daemon runs as its own program, in its sandbox. Several hostile front ends attack the daemon
//! over real vhost-user sockets, each with its own port: `life` is one connection of such a front end.
//! Its acts are drawn from a seed: commands, moves, rings, messages (`driver`, `message`), faulting,
//! shrinking and swapped memory (`memory`), descriptors of wrong kinds (`descriptor`), slabs and
//! answers to mappings (`window`). Two pairs of honest devices talk meanwhile (`bystander`), one over
//! the window, one by moves.
//!
//! The run checks: the daemon (`program`) neither ends nor panics; every byte of the pairs is right,
//! and none of their round trips takes longer than [`Options::longest`]; between two rounds, without
//! hostile front ends, the daemon's resources are back at their level after the first round.
//!
//! Then link groups are simulated (`links`).

mod bystander;
mod descriptor;
mod driver;
mod life;
mod links;
mod memory;
mod message;
mod program;
mod window;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::DataPath;

use crate::bench::Dir;
use crate::bytes::Rng;
use bystander::Bystander;
use life::{Life, Shared};
use program::{Held, Program};

/// Ports of the pairs: server and client over the window, server and client by moves.
const PAIRS: [&str; 4] = ["window-server", "window-client", "move-server", "move-client"];
/// Tolerated growth of the daemon's memory after the first round, KiB: an allocator keeps some.
const SLACK: usize = 8 << 10;
/// How long the daemon may need to let go of everything.
const SETTLE: Duration = Duration::from_secs(40);
/// How often the daemon and the pairs are looked at.
const LOOK: Duration = Duration::from_millis(50);

/// How long and how hard.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program `vhost-device-ism`.
    pub daemon: PathBuf,
    /// Seed of the hostile front ends' acts.
    pub seed: u64,
    /// Operations on devices before the end of the run.
    pub operations: u64,
    /// Steps of simulated link groups.
    pub steps: u64,
    /// Time limit of the run, with any number of operations.
    pub time: Duration,
    /// Hostile front ends at a time.
    pub front_ends: u32,
    /// Longest round trip allowed for the honest pairs.
    pub longest: Duration,
    /// Only this connection of this hostile front end.
    pub only: Option<(u32, u32)>,
}

/// Present acts of the hostile front ends, for the report of a failure.
type Now = Mutex<Vec<String>>;

/// Runs the soak test and prints a summary.
///
/// # Errors
/// The failure, and how to repeat the run.
pub fn run(options: &Options) -> Result<(), String> {
    println!("soak: seed {:#x}", options.seed);
    let now = Now::default();
    let failed = |what: String| {
        let lives = now.lock().unwrap_or_else(PoisonError::into_inner).join("\n");
        format!(
            "{what}\nlast of each hostile front end:\n{lives}\n\
             again: cargo xtask soak --seed {:#x} --front-ends {}",
            options.seed, options.front_ends
        )
    };
    let start = Instant::now();
    let steps = thread::scope(|scope| {
        // The device and the link groups have nothing in common, so each has its own thread.
        let links = scope.spawn(|| links::run(options.seed, options.steps, options.time));
        let device = attack(options, start, &now);
        (device, links.join())
    });
    steps.0.map_err(failed)?;
    let (runs, report) = steps.1.map_err(|_| "the simulation panicked".to_owned())??;
    println!(
        "soak: {} steps of {runs} simulated pairs of hosts: {} link groups and links, {} of {} \
         connections complete, {} failovers, {} bytes",
        report.steps,
        report.links,
        report.completed,
        report.connections,
        report.failovers,
        report.bytes
    );
    println!("soak: nothing found in {:.0?}", start.elapsed());
    Ok(())
}

fn hostile(n: u32) -> String {
    format!("hostile{n}")
}

fn attack(options: &Options, start: Instant, now: &Now) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let directory = Dir::new();
    let ports: Vec<String> =
        PAIRS.iter().map(ToString::to_string).chain((0..options.front_ends).map(hostile)).collect();
    let mut program =
        Program::start(&options.daemon, directory.path(), &ports).map_err(|e| text(&e))?;
    let path = |port: &str| directory.path().join(port);
    let pair = |name, ports: [&str; 2], data, seed| {
        let sockets = ports.map(path);
        let sockets = [sockets[0].as_path(), sockets[1].as_path()];
        Bystander::start(name, sockets, data, seed).map_err(|e| text(&e))
    };
    let pairs = [
        pair("window", [PAIRS[0], PAIRS[1]], DataPath::Window, options.seed)?,
        pair("moves", [PAIRS[2], PAIRS[3]], DataPath::Move, !options.seed)?,
    ];
    let shared = Shared::default();
    *shared.bystanders.lock().unwrap_or_else(PoisonError::into_inner) =
        pairs.iter().flat_map(Bystander::gids).collect();
    // Alone for a while, to compare.
    thread::sleep((options.time / 20).min(Duration::from_secs(5)));
    let before: Vec<_> = pairs.iter().map(|pair| pair.take_times().1).collect();

    let lives = AtomicU32::new(0);
    let mut first: Option<Held> = None;
    let (mut round, mut most) = (0, Held::default());
    let left = || options.time.saturating_sub(start.elapsed());
    loop {
        // Short rounds at first: the level of a warm daemon is known early.
        let length = (options.time / 12).clamp(Duration::from_secs(2), Duration::from_secs(60));
        let end = Instant::now() + length.min(left());
        shared.stop.store(false, Ordering::Relaxed);
        thread::scope(|scope| {
            for n in 0..options.front_ends {
                let front_end =
                    Hostile { options, n, path: path(&hostile(n)), shared: &shared, now };
                let lives = &lives;
                scope.spawn(move || {
                    lives.fetch_add(front_end.live(round), Ordering::Relaxed);
                });
            }
            let wrong = loop {
                thread::sleep(LOOK);
                let wrong = program
                    .ended()
                    .or_else(|| pairs.iter().find_map(|pair| pair.wrong(options.longest)));
                let done = shared.done.load(Ordering::Relaxed) >= options.operations;
                if wrong.is_some() || done || Instant::now() >= end {
                    break wrong;
                }
            };
            let held = program.held();
            most = if held.anonymous > most.anonymous { held } else { most };
            shared.stop.store(true, Ordering::Relaxed);
            wrong.map_or(Ok(()), |what| Err(format!("{what}\n{}", program.last_lines())))
        })?;
        settle(&mut program, &pairs, options, first)?;
        println!(
            "soak: round {round}: {} operations, {:.0?}; {}",
            shared.done.load(Ordering::Relaxed),
            start.elapsed(),
            program.held()
        );
        first.get_or_insert_with(|| program.held());
        round += 1;
        let done = shared.done.load(Ordering::Relaxed);
        if done >= options.operations || left().is_zero() || options.only.is_some() {
            break;
        }
        for n in 0..options.front_ends {
            program.renew(&hostile(n)).map_err(|e| text(&e))?;
        }
    }
    println!(
        "soak: {} operations in {} connections of {} hostile front ends, {round} rounds, {:.0?}",
        shared.done.load(Ordering::Relaxed),
        lives.load(Ordering::Relaxed),
        options.front_ends,
        start.elapsed()
    );
    for (pair, before) in pairs.iter().zip(before) {
        let (bytes, times) = pair.take_times();
        println!("soak: {} alone: {before}", pair.name());
        println!("soak: {} meanwhile: {times}, {bytes} bytes", pair.name());
    }
    println!("soak: the daemon at first: {}", first.unwrap_or_default());
    println!("soak: under attack: {most}");
    println!("soak: at last: {}", program.held());
    program.panics().map_or(Ok(()), Err)
}

/// One hostile front end.
struct Hostile<'a> {
    options: &'a Options,
    n: u32,
    path: PathBuf,
    shared: &'a Shared,
    now: &'a Now,
}

impl Hostile<'_> {
    /// Connects again and again until the stop. Returns the number of connections.
    fn live(&self, round: u32) -> u32 {
        let mut count = 0;
        while !self.shared.stop.load(Ordering::Relaxed) {
            let number = match self.options.only {
                Some((front_end, number)) if front_end == self.n && count == 0 => number,
                Some(_) => break,
                None => round << 20 | count,
            };
            count += 1;
            self.connect(number);
        }
        count
    }

    /// One connection.
    fn connect(&self, number: u32) {
        let n = self.n;
        let seed = Rng::new(self.options.seed ^ u64::from(n) << 32 ^ u64::from(number)).bits();
        let Some(mut life) = Life::begin(&self.path, self.shared, seed) else { return };
        let mut step = 0;
        while step < life.plan.operations && !self.shared.stop.load(Ordering::Relaxed) {
            if !life.step(step) {
                break;
            }
            step += 1;
        }
        let name = format!("front end {n}");
        let said = format!("{name}: --only {n}:{number}, {:?}: {:?}", life.plan, life.remembered);
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.retain(|line| !line.starts_with(&name));
        now.push(said);
        drop(now);
        life.end();
    }
}

/// Waits until the daemon has let go of the hostile front ends, and compares.
fn settle(
    program: &mut Program,
    pairs: &[Bystander],
    options: &Options,
    first: Option<Held>,
) -> Result<(), String> {
    let start = Instant::now();
    loop {
        if let Some(what) = program.ended().or_else(|| program.panics()) {
            return Err(format!("{what}\n{}", program.last_lines()));
        }
        if let Some(what) = pairs.iter().find_map(|pair| pair.wrong(options.longest)) {
            return Err(what);
        }
        let guests = program.list().map_err(|error| error.to_string())?;
        let left = guests.iter().find(|guest| {
            let hostile = !PAIRS.contains(&guest.name.as_str());
            hostile && (guest.connected || guest.hanging > 0 || guest.dmbs > 0)
        });
        let held = program.held();
        let grown = first.and_then(|first| grown(first, held));
        match (left, grown) {
            (None, None) => return Ok(()),
            _ if start.elapsed() < SETTLE => thread::sleep(LOOK),
            (Some(guest), _) => {
                return Err(format!("the daemon has not let go of {guest:?}: {held}"));
            }
            (None, Some(what)) => {
                let lines = program.descriptors().join("\n");
                return Err(format!("the daemon has grown: {what}\n{guests:#?}\n{lines}"));
            }
        }
    }
}

/// Describes the growth, if any.
fn grown(first: Held, now: Held) -> Option<String> {
    let more = now.descriptors > first.descriptors
        || now.threads > first.threads
        || now.mappings > first.mappings + 2
        || now.anonymous > first.anonymous + SLACK
        || now.shared > first.shared + SLACK;
    more.then(|| format!("{first}; now {now}"))
}
