// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The two programs.

use std::io::{self, BufRead, ErrorKind};
use std::net::SocketAddr;
use std::sync::{Arc, Barrier, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::cells::{LIMIT, Talk};
use super::net::{Line, Net};
use super::report::Report;
use crate::linux::Allocation;

/// How long "connect" tries to reach a server before its listen.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes of an order on a connection, padded with blanks.
const ORDER: usize = 64;
/// Handshakes at a time: AF_SMC as server does them one after the other, and each may take 6 s.
const HANDSHAKES: usize = 10;
/// Time for closing a connection before the report complains.
const CLOSES: Duration = Duration::from_secs(10);
/// Stack of a connection's thread.
const STACK: usize = 256 << 10;

/// The work on one connection.
#[derive(Clone, Debug)]
struct Order {
    cell: String,
    len: usize,
    seed: u64,
}

impl Order {
    fn parse(line: &str) -> Option<Order> {
        let mut words = line.split_whitespace();
        let cell = words.next()?.to_owned();
        let len = words.next()?.parse().ok()?;
        let seed = words.next()?.parse().ok()?;
        Some(Order { cell, len, seed })
    }

    fn send(&self, line: &Line) -> io::Result<()> {
        let text = format!("{:<ORDER$}", format!("{} {} {}", self.cell, self.len, self.seed));
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            rest = &rest[line.send(rest)?..];
        }
        Ok(())
    }

    fn receive(line: &Line) -> io::Result<Order> {
        let (mut text, mut got) = ([0; ORDER], 0);
        while got < ORDER {
            match line.recv(&mut text[got..])? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => got += n,
            }
        }
        let order = Order::parse(&String::from_utf8_lossy(&text));
        order.ok_or_else(|| io::Error::other("no order"))
    }

    /// Plays one half of the order, and closes the connection.
    fn play(&self, line: Line, first: bool, start: Instant) -> Report {
        let mut report = Report { cell: self.cell.clone(), ..Report::default() };
        report.carrier = line.carrier();
        let mut talk = Talk::new(&line, self.seed);
        if let Err(error) = talk.play(&self.cell, self.len, first) {
            report.error = format!("{:?}: {error}", error.kind());
        }
        talk.into_report(&mut report);
        let (closed, done) = mpsc::channel();
        // AF_SMC waits for bytes sent on a lost link; soft-RoCE repeats them for ever.
        let close = move || {
            drop(line);
            let _ = closed.send(());
        };
        thread::Builder::new().stack_size(STACK).spawn(close).unwrap();
        if done.recv_timeout(CLOSES).is_err() {
            report.note += "does not close ";
        }
        report.millis = start.elapsed().as_millis() as u64;
        report
    }
}

fn say_report(report: &Report, say: fn(&str)) {
    say(&serde_json::to_string(report).unwrap());
}

/// Listens, and plays its half of each client's order. Never returns.
///
/// # Panics
/// If the sockets cannot be made.
pub fn serve(who: &str, address: &str, say: fn(&str)) {
    let net = Net::new(who);
    let door = net.listen(address.parse().unwrap()).unwrap();
    say("ready");
    loop {
        let line = door.accept();
        let start = Instant::now();
        thread::Builder::new()
            .stack_size(STACK)
            .spawn(move || {
                let mut failed = Report { cell: "accept".into(), ..Report::default() };
                let order = line.and_then(|line| {
                    failed.carrier = line.carrier();
                    line.set_timeouts(Some(LIMIT))?;
                    line.set_nodelay()?;
                    Ok((Order::receive(&line)?, line))
                });
                match order {
                    Ok((order, line)) => say_report(&order.play(line, false, start), say),
                    Err(error) => {
                        failed.error = format!("{:?}: {error}", error.kind());
                        say_report(&failed, say);
                    }
                }
            })
            .unwrap();
    }
}

fn connect(net: &Net, addr: SocketAddr) -> io::Result<Line> {
    let end = Instant::now() + TIMEOUT;
    loop {
        match net.connect(addr) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < end => {
                thread::sleep(Duration::from_millis(50));
            }
            other => {
                let line = other?;
                line.set_timeouts(Some(LIMIT))?;
                line.set_nodelay()?;
                return Ok(line);
            }
        }
    }
}

/// Obeys one order as the client.
fn obey(net: &Net, addr: SocketAddr, order: &Order, opened: impl FnOnce(&Line)) -> Report {
    let start = Instant::now();
    let line = connect(net, addr).and_then(|line| {
        opened(&line);
        order.send(&line)?;
        Ok(line)
    });
    match line {
        Ok(line) => order.play(line, true, start),
        Err(error) => Report {
            cell: order.cell.clone(),
            error: format!("connect {:?}: {error}", error.kind()),
            millis: start.elapsed().as_millis() as u64,
            ..Report::default()
        },
    }
}

/// Carries out the orders on standard input, as the client: a report per order. `many` opens so many
/// connections at once; its report is the last connection's, with the first error of all. `connects`
/// opens so many one after the other. `failing` opens a connection per allocation of connecting, and
/// each allocation fails once; the report's note has the outcomes.
///
/// With a trailing `&` an order runs in the background, so others can follow. Such an order has
/// another report before its own, `opened`, once the connection is there.
///
/// # Panics
/// If the sockets cannot be made.
pub fn talk(who: &str, address: &str, say: fn(&str)) {
    let net = Net::new(who);
    let addr: SocketAddr = address.parse().unwrap();
    let mut background = Vec::new();
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        let Some(order) = Order::parse(&line) else {
            say(&format!("no order: {line}"));
            continue;
        };
        if order.cell == "many" {
            say_report(&many(&net, addr, &order), say);
        } else if order.cell == "connects" {
            say_report(&connects(&net, addr, &order), say);
        } else if order.cell == "failing" {
            say_report(&failing(&net, addr, &order), say);
        } else if line.ends_with('&') {
            let net = net.clone();
            background.push(thread::spawn(move || {
                let opened = |line: &Line| {
                    let cell = "opened".into();
                    say_report(&Report { cell, carrier: line.carrier(), ..Report::default() }, say);
                };
                say_report(&obey(&net, addr, &order, opened), say);
            }));
        } else {
            say_report(&obey(&net, addr, &order, |_| {}), say);
        }
    }
}

/// `order.len` connections one after the other, with a byte there and back on each.
fn connects(net: &Net, addr: SocketAddr, order: &Order) -> Report {
    let start = Instant::now();
    let each = Order { cell: "ping".into(), len: 1, ..order.clone() };
    let mut report = Report::default();
    for _ in 0..order.len {
        report = obey(net, addr, &each, |_| {});
        if !report.error.is_empty() {
            return report;
        }
    }
    let took = start.elapsed();
    report.millis = took.as_millis() as u64;
    report.note = format!("{:.1}", order.len as f64 / took.as_secs_f64());
    report
}

/// A connection for each failing kernel allocation in connecting. If a connection is made all the
/// same, its bytes must be right.
fn failing(net: &Net, addr: SocketAddr, order: &Order) -> Report {
    let start = Instant::now();
    let each = Order { cell: "ping".into(), len: 1000, ..order.clone() };
    let (mut report, mut failed, mut by_smc) = (Report::default(), 0, 0);
    let mut allocation = Allocation::first().unwrap();
    loop {
        let (line, was_last) = allocation.fail(|| net.connect(addr)).unwrap();
        match line {
            Err(_) => failed += 1,
            Ok(line) => {
                let prepared = line.set_timeouts(Some(LIMIT)).and_then(|()| each.send(&line));
                report = each.play(line, true, Instant::now());
                by_smc += usize::from(report.carrier.kind.starts_with("smc-"));
                if let Err(error) = prepared {
                    report.error = format!("{:?}: {error}", error.kind());
                }
                if !report.error.is_empty() {
                    break;
                }
            }
        }
        if was_last {
            break;
        }
    }
    let all = allocation.number();
    report.note = format!("{all} allocations, {failed} failed, {by_smc} by SMC");
    report.millis = start.elapsed().as_millis() as u64;
    report
}

/// `order.len` connections open at the same time, with 10 000 bytes there and back on each.
fn many(net: &Net, addr: SocketAddr, order: &Order) -> Report {
    let start = Instant::now();
    let open = Arc::new(Barrier::new(order.len));
    let doing = Arc::new((Mutex::new(0), Condvar::new()));
    let each = |n| {
        let (net, open, doing) = (net.clone(), Arc::clone(&open), Arc::clone(&doing));
        let order = Order { len: 10_000, seed: order.seed + n as u64, ..order.clone() };
        let body = move || {
            let (count, changed) = &*doing;
            let free = changed.wait_while(count.lock().unwrap(), |count| *count >= HANDSHAKES);
            *free.unwrap() += 1;
            let connected = || {
                *count.lock().unwrap() -= 1;
                changed.notify_one();
                open.wait();
            };
            let mut waited = false;
            let report = obey(&net, addr, &order, |_| {
                connected();
                waited = true;
            });
            if !waited {
                connected();
            }
            report
        };
        thread::Builder::new().stack_size(STACK).spawn(body).unwrap()
    };
    let threads: Vec<_> = (0..order.len).map(each).collect();
    let mut reports: Vec<Report> = threads.into_iter().map(|one| one.join().unwrap()).collect();
    let failed = reports.iter().filter(|report| !report.error.is_empty()).count();
    let error = reports.iter().find(|report| !report.error.is_empty());
    let error = error.map(|report| report.error.clone()).unwrap_or_default();
    let carried = reports.iter().filter(|report| report.carrier.kind.starts_with("smc-")).count();
    let mut last = reports.pop().unwrap_or_default();
    last.error = error;
    last.note = format!("{carried} of {} by SMC, {failed} failed ", order.len);
    last.millis = start.elapsed().as_millis() as u64;
    last
}
