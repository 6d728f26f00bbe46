// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program of both ends: carries out one operation per line and answers with one line.
//!
//! The lines come and go through two FIFOs, so a forked child can have its own pair. The numbers of
//! their descriptors are high, out of the way of the sequences' low numbers.

mod around;
mod bytes;
mod names;
mod outside;
mod processes;
mod sockets;
mod streams;
mod uring;
mod waits;

use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::script::Words;

/// Environment: the directory of the FIFOs.
pub(crate) const DIR: &str = "SMC_DIFFERENTIAL_DIR";
/// Environment: the name of this agent.
pub(crate) const NAME: &str = "SMC_DIFFERENTIAL_AGENT";
/// Environment: the agent's descriptors at the start (`x=0,l=4`).
pub(crate) const FDS: &str = "SMC_DIFFERENTIAL_FDS";

/// The name of this agent. A forked child changes it.
static OWN_NAME: Mutex<String> = Mutex::new(String::new());
/// The descriptors of the two FIFOs.
const CONTROL: [c_int; 2] = [500, 501];

/// The descriptors with a name given by the sequence.
static FDS_BY_NAME: Mutex<BTreeMap<String, c_int>> = Mutex::new(BTreeMap::new());
/// Operations that run in threads of their own.
static STARTED: Mutex<BTreeMap<String, JoinHandle<String>>> = Mutex::new(BTreeMap::new());

/// The descriptor of this name. `#7` is the number 7, `bad` is no descriptor.
fn fd(name: &str) -> c_int {
    match name.strip_prefix('#') {
        Some(number) => number.parse().unwrap(),
        None if name == "bad" => -1,
        None => *FDS_BY_NAME.lock().unwrap().get(name).unwrap_or(&999),
    }
}

/// Gives a descriptor a name, and answers for the call returning the descriptor.
fn named(name: &str, fd: c_int) -> String {
    if fd >= 0 {
        FDS_BY_NAME.lock().unwrap().insert(name.to_owned(), fd);
    }
    ok(fd as isize)
}

/// The answer for a call whose return value counts.
fn ret(value: isize) -> String {
    if value < 0 { format!("-1 {}", names::errno()) } else { value.to_string() }
}

/// The answer for a call whose return value may vary.
fn ok(value: isize) -> String {
    if value < 0 { ret(value) } else { "ok".into() }
}

/// Bytes as text, or their number and a hash if there are many.
fn show(bytes: &[u8]) -> String {
    if bytes.len() <= 48 {
        return format!("\"{}\"", bytes.escape_ascii());
    }
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// Runs as an agent and exits, if this process is one.
pub(crate) fn run_if_agent() {
    if let Ok(port) = std::env::var(processes::ONCE) {
        processes::connect_send_exit(port.parse().unwrap());
    }
    let Ok(name) = std::env::var(NAME) else { return };
    // Does not outlive the test. A forked child is killed with its group.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    for pair in std::env::var(FDS).unwrap_or_default().split(',') {
        if let Some((name, number)) = pair.split_once('=') {
            named(name, number.parse().unwrap());
        }
    }
    serve(&name);
}

/// Opens the FIFOs of this agent, and carries out operations for the rest of the process.
fn serve(name: &str) -> ! {
    name.clone_into(&mut OWN_NAME.lock().unwrap());
    let dir = std::env::var(DIR).unwrap();
    for (end, number) in ["in", "out"].into_iter().zip(CONTROL) {
        let path = CString::new(format!("{dir}/{name}.{end}")).unwrap();
        unsafe {
            let opened = libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            assert!(opened >= 0);
            assert_eq!(libc::dup3(opened, number, libc::O_CLOEXEC), number);
            libc::close(opened);
        }
    }
    answer(&format!("hello {}", std::process::id()));
    let mut input = Vec::new();
    loop {
        let mut room = [0u8; 4096];
        let n = unsafe { libc::read(CONTROL[0], room.as_mut_ptr().cast(), room.len()) };
        let Ok(n) = usize::try_from(n) else { continue };
        input.extend_from_slice(&room[..n]);
        while let Some(end) = input.iter().position(|byte| *byte == b'\n') {
            let line = String::from_utf8(input.drain(..=end).collect()).unwrap();
            answer(&carry_out(line.trim()));
        }
    }
}

fn answer(text: &str) {
    let line = format!("{text}\n");
    let mut rest = line.as_bytes();
    while !rest.is_empty() {
        let n = unsafe { libc::write(CONTROL[1], rest.as_ptr().cast(), rest.len()) };
        rest = &rest[usize::try_from(n).unwrap_or(0)..];
    }
}

/// Carries out a line, in a thread of its own if the line ends with `&` and the thread's name.
fn carry_out(line: &str) -> String {
    if let Some(thread) = line.strip_prefix("join") {
        let handle = STARTED.lock().unwrap().remove(thread.trim());
        return handle.map_or("no such thread".into(), |handle| handle.join().unwrap());
    }
    let Some((operation, thread)) = line.rsplit_once('&').filter(|(before, _)| {
        // An `&` inside of a string is data.
        !before.ends_with('"') && before.matches('"').count() % 2 == 0
    }) else {
        return operate(line);
    };
    let operation = operation.trim().to_owned();
    let begun = std::thread::spawn(move || operate(&operation));
    // The operation has begun and waits by then.
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(5));
        if begun.is_finished() {
            break;
        }
    }
    STARTED.lock().unwrap().insert(thread.trim().to_owned(), begun);
    "started".into()
}

/// Carries out one operation.
fn operate(line: &str) -> String {
    let mut words = Words::new(line);
    let first = words.word();
    let (op, name) = first.split_once(':').unwrap_or((&first, ""));
    let name = if name.is_empty() { "x" } else { name };
    let rooms = [
        sockets::operate,
        bytes::operate,
        streams::operate,
        waits::operate,
        processes::operate,
        around::operate,
        uring::operate,
        outside::operate,
    ];
    let done = rooms.iter().find_map(|operate| operate(op, name, &mut words));
    done.unwrap_or_else(|| format!("unknown operation {op}"))
}

pub(crate) use names::signal_name;
pub(crate) use uring::is_available as has_uring;
