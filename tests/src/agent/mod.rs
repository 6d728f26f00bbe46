// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The far end of a conformance test: a program, here or in another machine, with stacks, listeners
//! and streams. The program executes calls on them.
//!
//! ```text
//! smc-test-peer agent DEVICE ADDRESS    says "listens on ADDRESS"; serves for ever
//! ```
//!
//! Calls come over plain TCP. A control connection carries one call at a time and has its own thread,
//! so a blocking read and a write by another thread of the test run side by side. The program trusts
//! every call: run an agent on a bench, never on a network.

pub mod far;
pub mod wire;

mod objects;

use std::collections::HashMap;
use std::io;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use guest_driver::{Config, DeviceAddress, Stack};

use objects::Objects;
use wire::{Answer, Call, Failure, receive, send};

use crate::watch::{note, slowly};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens a stack. A machine has one device, possibly still held by its last user: retries for a while.
///
/// # Errors
/// Errors of [`Stack::open`].
pub fn open(config: &Config) -> io::Result<Arc<Stack>> {
    let start = Instant::now();
    loop {
        match Stack::open(config.clone()) {
            Err(error) if start.elapsed() < slowly(Duration::from_millis(500)) => {
                note(format!("opens a stack again: {error}"));
                thread::sleep(Duration::from_millis(20));
            }
            result => return result,
        }
    }
}

/// Running tests by number.
type Tests = Mutex<HashMap<u64, Arc<Objects>>>;

/// Serves for ever: stacks open `device` unless the test names another.
///
/// # Errors
/// If listening on the address or accepting fails.
pub fn serve(
    device: &str,
    addr: impl ToSocketAddrs,
    listens: impl FnOnce(std::net::SocketAddr),
) -> io::Result<()> {
    let listener = TcpListener::bind(addr)?;
    let device = DeviceAddress::from(device);
    let tests = Tests::default();
    listens(listener.local_addr()?);
    thread::scope(|scope| {
        loop {
            let (tcp, from) = listener.accept()?;
            let (tests, device) = (&tests, &device);
            scope.spawn(move || {
                if let Err(error) = attend(&tcp, tests, device) {
                    eprintln!("control connection of {from}: {error}");
                }
            });
        }
    })
}

/// Executes the calls of one control connection up to its end.
fn attend(tcp: &TcpStream, tests: &Tests, device: &DeviceAddress) -> io::Result<()> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    tcp.set_nodelay(true)?;
    match receive(tcp)? {
        Some((Call::Begin { test }, _)) => {
            let objects = lock(tests).entry(test).or_default().clone();
            let end = converse(tcp, &objects, device);
            lock(tests).remove(&test);
            // The test's process may have died during blocked calls on other connections.
            end.and(objects.clear())
        }
        Some((Call::Join { test }, _)) => {
            let objects = lock(tests).get(&test).cloned();
            let objects = objects.ok_or_else(|| invalid("the test has ended"))?;
            converse(tcp, &objects, device)
        }
        _ => Err(invalid("no request to listen")),
    }
}

fn converse(tcp: &TcpStream, objects: &Objects, device: &DeviceAddress) -> io::Result<()> {
    send(tcp, &Answer::Ok(serde_json::Value::Null), &[])?;
    while let Some((call, bytes)) = receive::<Call>(tcp)? {
        let (answer, bytes) = match objects.execute(call, bytes, device) {
            Ok((value, bytes)) => (Answer::Ok(value), bytes),
            Err(error) => (Answer::Err(Failure::from(&error)), Vec::new()),
        };
        send(tcp, &answer, &bytes)?;
    }
    Ok(())
}
