// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The claims and actions of a hostile process.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use guest_driver::statistics::{Connection, DeviceInfo, Handshakes, Process, Reason};
use serde_json::{Value, json};

use crate::support::Running;

/// Text harmful to a terminal, in the strings of a lie.
const HARMFUL: &str = "nginx\x1b[2J\x07\r\u{85}\u{9b}\u{202e}\u{2066}";
/// Text forbidden in every output.
pub(super) const CLAIMED: &str = "claimed-by-a-lie";

/// The ends of a connection.
pub(super) type Ends = (SocketAddr, SocketAddr);

/// The subject of the lies.
pub(super) struct Victim {
    pub(super) pid: u32,
    pub(super) ends: Ends,
    /// The directory of the process's statistics socket.
    pub(super) directory: PathBuf,
}

/// The answer of the hostile process.
enum Answer {
    /// These bytes.
    Bytes(Vec<u8>),
    /// The first bytes, and then the others for ever.
    Endless(&'static [u8], Vec<u8>),
    /// Records of a capture without end: of a connection, or of ever new ones.
    Records(Option<Ends>),
    /// A byte now and then.
    Slow,
    /// Nothing, but the connection stays.
    Nothing,
    /// No accept, with a full queue.
    Full,
}

/// The one true answer.
pub(super) const TRUTH: &str = "a connection of its own";

/// The lies. A process tells each by itself, and then there is one process for each at once.
pub(super) const LIES: &[&str] = &[
    "is silent",
    "has a full queue",
    "is stopped with a full queue",
    "drips",
    "spaces without end",
    "string without end",
    "list without end",
    "closes at once",
    "no JSON",
    "no UTF-8",
    "half of it",
    "deep nesting",
    "deep nesting in what is skipped",
    "duplicate fields",
    "duplicate connections",
    "many connections",
    "connections of nobody",
    "connection of another user",
    "connection of another user as TCP",
    "connections without addresses",
    "many devices without a path",
    "many reasons",
    "many strings",
    "a long string",
    "many groups",
    "many endpoints",
    "another program",
    "another process",
    "control characters",
    "names of kinds",
    "largest numbers",
    "negative numbers",
    "a number that is none",
    "another version",
    "a name that is no UTF-8",
    "a path that is no UTF-8",
    "a name that forges lines",
    "many names",
    "the name of another user's socket",
    "the name of another user's socket, answering",
    "a FIFO",
    "a symbolic link",
    "a program name that is no UTF-8",
    "a program name with control characters",
    "many descriptors",
    "many processes",
    "many mapped files of notes",
    "notes that are another file by now",
    "records of ever new connections",
    "records of another user's connection",
];

fn base() -> Process {
    let reason = Reason {
        code: 0x0301_0000,
        name: CLAIMED.into(),
        side: "peer".into(),
        says: "text".into(),
        count: 1,
        advice: CLAIMED.into(),
    };
    let totals = Handshakes { tcp: 1, reasons: vec![reason], ..Handshakes::default() };
    Process { version: 1, pid: 1, program: CLAIMED.into(), totals, ..Process::default() }
}

fn connection(kind: &str, ends: Ends) -> Connection {
    Connection {
        kind: kind.into(),
        local: Some(ends.0),
        peer: Some(ends.1),
        state: "Active".into(),
        sent: 4_242_424_242,
        ..Connection::default()
    }
}

fn bytes(value: &impl serde::Serialize) -> Answer {
    Answer::Bytes(serde_json::to_vec(value).unwrap())
}

/// The base with one field changed.
fn with(change: impl FnOnce(&mut Value)) -> Answer {
    let mut value = serde_json::to_value(base()).unwrap();
    change(&mut value);
    bytes(&value)
}

fn connections(list: Vec<Connection>) -> Answer {
    bytes(&Process { connections: list, ..base() })
}

/// The answer for a lie. `own`: a connection of the process. `None`: nothing special.
fn answer(lie: &str, own: Ends, victim: &Victim) -> Option<Answer> {
    let nowhere = |n: u32| {
        let local = SocketAddr::new((0x0a00_0000 + n).to_be_bytes().into(), 80);
        (local, "192.0.2.1:9".parse().unwrap())
    };
    let nested = |count: usize| [vec![b'['; count], vec![b']'; count]].concat();
    Some(match lie {
        TRUTH => connections(vec![connection("SMC-D v2.1", own)]),
        "is silent" => Answer::Nothing,
        "has a full queue" | "is stopped with a full queue" => Answer::Full,
        "the name of another user's socket" => Answer::Full,
        "records of ever new connections" => Answer::Records(None),
        "records of another user's connection" => Answer::Records(Some(victim.ends)),
        "drips" => Answer::Slow,
        "spaces without end" => Answer::Endless(b"{", vec![b' '; 1 << 16]),
        "string without end" => Answer::Endless(b"{\"program\":\"", vec![b'x'; 1 << 16]),
        "list without end" => {
            Answer::Endless(b"{\"devices\":[{\"path\":\"\"}", b",{\"path\":\"\"}".repeat(4096))
        }
        "closes at once" => Answer::Bytes(Vec::new()),
        "no JSON" => Answer::Bytes(b"HTTP/1.1 200 OK\r\n\r\n".to_vec()),
        "no UTF-8" => Answer::Bytes(b"{\"program\":\"\xff\xfe\"}".to_vec()),
        "half of it" => {
            let whole = serde_json::to_vec(&base()).unwrap();
            Answer::Bytes(whole[..whole.len() / 2].to_vec())
        }
        "deep nesting" => Answer::Bytes(nested(500_000)),
        "deep nesting in what is skipped" => {
            Answer::Bytes([b"{\"x\":".to_vec(), nested(500_000), b"}".to_vec()].concat())
        }
        "duplicate fields" => {
            let whole = String::from_utf8(serde_json::to_vec(&base()).unwrap()).unwrap();
            Answer::Bytes(whole.replacen('{', "{\"pid\":7,", 1).into_bytes())
        }
        "duplicate connections" => connections(vec![connection("SMC-D v2.1", own); 1000]),
        "many connections" => {
            connections((0..100_000).map(|n| connection("SMC-D v2.1", nowhere(n))).collect())
        }
        "connections of nobody" => {
            connections((0..500).map(|n| connection("SMC-D v2.1", nowhere(n))).collect())
        }
        "connection of another user" => connections(vec![connection("SMC-D v2.1", victim.ends)]),
        "connection of another user as TCP" => {
            let reversed = (victim.ends.1, victim.ends.0);
            connections([victim.ends, reversed].map(|ends| connection("TCP", ends)).to_vec())
        }
        "connections without addresses" => {
            let one = Connection { kind: "SMC-D v2.1".into(), ..Connection::default() };
            connections(vec![one; 500])
        }
        _ => return answer_of_fields(lie, own, victim),
    })
}

/// Like [`answer`], for lies about other fields than the connections.
fn answer_of_fields(lie: &str, own: Ends, victim: &Victim) -> Option<Answer> {
    Some(match lie {
        "many devices without a path" => {
            bytes(&Process { devices: vec![DeviceInfo::default(); 8000], ..base() })
        }
        "many reasons" => {
            let mut many = base();
            let first = many.totals.reasons[0].clone();
            many.totals.reasons = (0..5000)
                .map(|n| Reason { code: n, name: format!("{CLAIMED}-{n}"), ..first.clone() })
                .collect();
            bytes(&many)
        }
        "many strings" => with(|all| all["x"] = vec![json!("x"); 100_000].into()),
        "a long string" => with(|all| all["no_rdma"] = "x".repeat(500_000).into()),
        "many groups" => with(|all| all["groups"] = vec![json!({}); 100_000].into()),
        "many endpoints" => {
            let one = json!({"table": 1, "end": "server", "address": "192.0.2.1:1",
                "on_tcp": false, "learned": false, "forced": false, "gain": 1, "smc": 1, "tcp": 1,
                "samples": 1, "bytes": 1, "round_trips": 1, "lifetime_us": 1});
            with(|all| all["endpoints"] = vec![one; 5000].into())
        }
        "another program" => with(|all| all["program"] = CLAIMED.into()),
        "another process" => with(|all| all["pid"] = victim.pid.into()),
        "control characters" => {
            let mut all = base();
            all.program = HARMFUL.into();
            all.no_rdma = Some(HARMFUL.into());
            let problem = Some(HARMFUL.into());
            all.devices = vec![DeviceInfo { path: HARMFUL.into(), problem, ..Default::default() }];
            all.totals.reasons[0].says = HARMFUL.into();
            all.totals.reasons[0].side = HARMFUL.into();
            let mut one = connection("TCP", own);
            (one.state, one.reason) = (HARMFUL.into(), Some(all.totals.reasons[0].clone()));
            all.connections = vec![one];
            bytes(&all)
        }
        "names of kinds" => {
            let kinds = [CLAIMED, "SMC-X v1", "SMC-D \x1b", "SMC-D claimed-by-a-lie", ""];
            connections(kinds.map(|kind| connection(kind, own)).to_vec())
        }
        "largest numbers" => {
            let mut all = base();
            (all.totals.sent, all.totals.received) = (u64::MAX, u64::MAX);
            (all.totals.smc_d, all.totals.tcp, all.omitted) = (u64::MAX, u64::MAX, usize::MAX);
            all.totals.peers = usize::MAX;
            let most =
                Connection { sent: u64::MAX, received: u64::MAX, ..connection("SMC-D v2.1", own) };
            all.connections = vec![most.clone(), most];
            bytes(&all)
        }
        "negative numbers" => with(|all| all["totals"]["sent"] = (-1).into()),
        "a number that is none" => with(|all| all["totals"]["sent"] = "many".into()),
        "another version" => with(|all| all["version"] = u64::MAX.into()),
        "the name of another user's socket, answering" => {
            let all = Process { pid: victim.pid, ..base() };
            bytes(&Process { connections: vec![connection("TCP", victim.ends)], ..all })
        }
        _ => return None,
    })
}

/// A record of a capture, with bytes forbidden in every capture.
fn record((local, peer): Ends, place: u64) -> Vec<u8> {
    let octets = |end: SocketAddr| match end.ip() {
        std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(ip) => ip.octets(),
    };
    let mut record = (CLAIMED.len() as u32).to_le_bytes().to_vec();
    record.extend([0, 0]);
    record.extend([local, peer].map(|end| end.port().to_le_bytes()).as_flattened());
    record.extend([0; 6]);
    record.extend([local, peer].map(octets).as_flattened());
    record.extend([1, place].map(u64::to_le_bytes).as_flattened());
    [record, CLAIMED.as_bytes().to_vec()].concat()
}

/// The inodes of the sockets with a path ending in `name`.
fn inodes(name: &str) -> Vec<u64> {
    let table = std::fs::read("/proc/net/unix").unwrap();
    let table = String::from_utf8_lossy(&table).into_owned();
    let lines = table.lines().filter(|line| line.ends_with(&format!("/{name}")));
    lines.map(|line| line.split_whitespace().nth(6).unwrap().parse().unwrap()).collect()
}

/// Maps a file.
fn map(path: &Path) -> std::sync::Arc<ism_sys::SharedMem> {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    ism_sys::SharedMem::from_fd(&file, 4096).unwrap()
}

/// Answers for ever, each client in a thread, and holds all descriptors.
fn serve(listener: UnixListener, answer: Answer) {
    let answer: &'static Answer = Box::leak(Box::new(answer));
    if matches!(answer, Answer::Full) {
        rustix::net::listen(&listener, 0).unwrap();
        let path = listener.local_addr().unwrap();
        std::mem::forget(UnixStream::connect_addr(&path).unwrap());
        std::mem::forget(listener);
        return;
    }
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            std::thread::spawn(move || respond(client, answer));
        }
    });
}

fn respond(mut client: UnixStream, answer: &Answer) {
    match answer {
        Answer::Bytes(bytes) => drop(client.write_all(bytes)),
        Answer::Endless(first, rest) => {
            let mut sent = client.write_all(first);
            while sent.is_ok() {
                sent = client.write_all(rest);
            }
        }
        Answer::Records(ends) => {
            let mut n = 0_u32;
            let mut sent = Ok(());
            while sent.is_ok() {
                n += 1;
                let new = SocketAddr::new(n.to_be_bytes().into(), 7);
                sent = client.write_all(&record(ends.unwrap_or((new, new)), n.into()));
            }
        }
        Answer::Slow => {
            while client.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        Answer::Nothing | Answer::Full => drop(client.read(&mut [0])),
    }
}

/// Acts as the lie demands, and reports the completion. Ends with its standard input.
pub(super) fn tell(lie: &str, directory: &Path, victim: &Victim) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let _server = listener.accept().unwrap();
    let own = (client.local_addr().unwrap(), client.peer_addr().unwrap());
    let name = |pid: u32| format!("process-{pid}.sock");
    std::fs::create_dir_all(directory).unwrap();
    let own_path = directory.join(name(std::process::id()));
    let mut held: Vec<Box<dyn std::any::Any>> = Vec::new();
    if let Some(answer) = answer(lie, own, victim) {
        let path = match lie.starts_with("the name of another user's socket") {
            // The socket name of a further stack.
            true => victim.directory.join(format!("process-{}-{}.sock", victim.pid, lie.len())),
            false => own_path.clone(),
        };
        // The preceding process with this lie may have left the socket.
        let _ = std::fs::remove_file(&path);
        serve(UnixListener::bind(path).unwrap(), answer);
    }
    let abstract_name = |name: &[u8]| {
        UnixListener::bind_addr(&UnixAddress::from_abstract_name(name).unwrap()).unwrap()
    };
    let set_program = |name: &[u8]| std::fs::write("/proc/self/comm", name).unwrap();
    match lie {
        "a name that is no UTF-8" => held.push(Box::new(abstract_name(b"\xff\xfe"))),
        "a path that is no UTF-8" => {
            let file = std::ffi::OsStr::from_bytes(b"\xff\xfe\n").to_owned();
            held.push(Box::new(UnixListener::bind(directory.join(file)).unwrap()));
        }
        "a name that forges lines" => {
            let line = |n: u64| format!("\n0: 2 0 10000 1 1 {n} /{CLAIMED}/{}", name(victim.pid));
            for inode in inodes(&name(victim.pid)) {
                held.push(Box::new(abstract_name(line(inode).as_bytes())));
            }
        }
        "many names" => {
            for n in 1000..1800 {
                let file = format!("process-{}-{n}.sock", victim.pid);
                held.push(Box::new(UnixListener::bind(directory.join(file)).unwrap()));
            }
        }
        "a FIFO" => {
            let mode = rustix::fs::Mode::RWXU;
            let kind = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, &own_path, kind, mode, 0).unwrap();
        }
        "a symbolic link" => {
            let to = victim.directory.join(name(victim.pid));
            std::os::unix::fs::symlink(to, &own_path).unwrap();
        }
        "a program name that is no UTF-8" => set_program(b"\xff\xfe"),
        "a program name with control characters" => set_program("\x1b[2J\u{9b}\u{202e}".as_bytes()),
        "many descriptors" => {
            for _ in 0..900 {
                held.push(Box::new(client.try_clone().unwrap()));
            }
        }
        "many processes" => {
            for _ in 0..100 {
                held.push(Box::new(Running(Command::new("sleep").arg("600").spawn().unwrap())));
            }
        }
        "many mapped files of notes" | "notes that are another file by now" => {
            let count = if lie.starts_with("many") { 2000 } else { 1 };
            for n in 1..=count {
                let file = directory.join(format!("process-{n}.tcp"));
                std::fs::write(&file, [0; 4096]).unwrap();
                held.push(Box::new(map(&file)));
            }
            if count == 1 {
                let file = directory.join("process-1.tcp");
                std::fs::remove_file(&file).unwrap();
                std::os::unix::fs::symlink("/etc/shadow", &file).unwrap();
            }
        }
        _ => {}
    }
    // Like a program under `smc run`, whose TCP connections are shown.
    let library = directory.join(std::process::id().to_string());
    std::fs::create_dir_all(&library).unwrap();
    let library = library.join("libsmc_preload.so");
    std::fs::write(&library, [0; 4096]).unwrap();
    held.push(Box::new(map(&library)));
    println!("ready");
    if lie == "is stopped with a full queue" {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)
            .unwrap();
    }
    let _ = std::io::stdin().read(&mut [0]);
    drop(held);
}
