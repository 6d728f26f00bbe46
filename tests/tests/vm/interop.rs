// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Interoperability of this project's SMC-R and the kernel's AF_SMC, as client and as server, in every
//! version possible with soft-RoCE.
//!
//! Each test boots two guests for one version and number of links, and goes through all cells (see
//! `smc_tests::interop`) for each pair of ends, printing a line per cell. For each connection the test
//! asks the kernel whether SMC-R was the carrier.

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use smc_tests::eventually;
use smc_tests::interop::Report;
use smc_tests::linux::Smc;
use smc_tests::vm::{Bed, End, Guest, Job, Run, Vm};

/// The enterprise id of both ends, the default of stacks without a configured one.
const EID: &str = "VIRTIO-ISM";
const PORT: u16 = 5000;
/// Limit for a survivor's notice of a killed peer: a link is tested after [`TEST_LINK_SOON`] seconds,
/// and the answer awaited for up to two seconds.
const SOON: Duration = Duration::from_secs(10);
const TEST_LINK_SOON: u32 = 3;
/// How long a survivor is listened to.
const GIVEN_UP: Duration = Duration::from_secs(60);
/// After how many seconds of silence a link is tested while no end is killed. A link is given up if
/// no answer comes within two seconds, and an emulated guest may get no processor for so long.
const TEST_LINK_LATE: u32 = 60;

/// One version, with one number of links.
struct Setup {
    name: &'static str,
    adapters: u32,
    mtu: Option<u32>,
    links: u32,
    version: u8,
    release: u8,
    /// `linux` and `rust` with options.
    linux: Kernel,
    rust: &'static str,
}

/// A setting of the kernel.
enum Kernel {
    /// Version 2.1 with so many links of a link group at most.
    V2(&'static str),
    /// Version 1.
    V1,
}

/// The kind of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Linux,
    Rust,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Side::Linux => "Linux",
            Side::Rust => "Rust",
        }
    }
}

/// Two guests under one setup.
struct Field<'a> {
    setup: &'a Setup,
    a: Guest,
    b: Guest,
    /// After how many seconds of silence new links are tested.
    test_link: u32,
    /// A further option of this project's end, about idle link groups.
    idle: &'static str,
    /// Whether a cell has failed once and was run again.
    repeated: bool,
    failed: Vec<String>,
    lines: File,
    _bed: Bed,
}

/// Bytes of bulk: 4 MiB, or `SMC_INTEROP_BULK` MiB; 100 take minutes under emulation.
fn bulk() -> usize {
    let mib = std::env::var("SMC_INTEROP_BULK").ok().and_then(|text| text.parse().ok());
    mib.unwrap_or(4) << 20
}

/// With a log of the own stack in the transcript, filtered by `SMC_INTEROP_LOG`, for example
/// `guest_driver=debug`.
pub(super) fn logged(run: Run) -> Run {
    match std::env::var("SMC_INTEROP_LOG") {
        Ok(filter) => run.env("RUST_LOG", &filter),
        Err(_) => run,
    }
}

impl<'a> Field<'a> {
    #[track_caller]
    fn new(setup: &'a Setup) -> Field<'a> {
        let bed = Bed::alone();
        let [a, b] = bed.boot(["a", "b"].map(|name| {
            let mut vm = Vm::named(name).no_ism().rnics(setup.adapters);
            if let Some(mtu) = setup.mtu {
                vm = vm.mtu(mtu);
            }
            if matches!(setup.linux, Kernel::V1) { vm.v1() } else { vm }
        }));
        for guest in [&a, &b] {
            match setup.linux {
                Kernel::V2(links) => {
                    guest.ok(["smc-test-peer", "linux", "ueid", EID]);
                    let set = ["smc-test-peer", "linux", "set", "smcr_max_links_per_lgr", links];
                    guest.ok(set);
                }
                Kernel::V1 => {}
            }
        }
        let lines = File::create(bed.log("cells.txt")).unwrap();
        let (test_link, failed) = (TEST_LINK_LATE, Vec::new());
        Field { setup, a, b, test_link, idle: "", repeated: false, failed, lines, _bed: bed }
    }

    /// Adapters without link groups. Later links are tested after so many seconds of silence.
    #[track_caller]
    fn fresh(&mut self, test_link: u32) {
        self.test_link = test_link;
        let seconds = test_link.to_string();
        for guest in [&self.a, &self.b] {
            guest.ok(["smc-test-peer", "linux", "set", "smcr_testlink_time", &seconds]);
            for n in 0..self.setup.adapters {
                guest.ok(format!("smc-test-peer rdma remove rxe{n}"));
            }
        }
        for guest in [&self.a, &self.b] {
            for n in 0..self.setup.adapters {
                guest.ok(format!("smc-test-peer rdma add rxe{n} eth{n}"));
            }
            eventually("no link groups are left", || smc(guest).groups.is_empty());
        }
    }

    fn who(&self, side: Side) -> String {
        match side {
            Side::Linux => "linux".into(),
            Side::Rust => {
                let millis = self.test_link * 1000;
                format!("rust:{},test={millis}{}", self.setup.rust, self.idle)
            }
        }
    }

    #[track_caller]
    fn serve(&self, side: Side) -> Job {
        let address = format!("0.0.0.0:{PORT}");
        let run = Run::from(["smc-test-peer", "interop", "serve", &self.who(side), &address]);
        let mut server = self.a.spawn(logged(run).within(Duration::from_secs(300)));
        assert_eq!(server.line(), "ready");
        server
    }

    /// A new server in the place of another.
    #[track_caller]
    fn serve_again(&self, side: Side, server: Job) -> Job {
        server.kill();
        server.wait();
        self.serve(side)
    }

    #[track_caller]
    fn talk(&self, side: Side) -> Job {
        let address = format!("{}:{PORT}", self.a.ip());
        let run = Run::from(["smc-test-peer", "interop", "talk", &self.who(side), &address]);
        self.b.spawn(logged(run).open_stdin().within(Duration::from_secs(300)))
    }

    /// Checks a report for SMC-R of this version as the carrier.
    fn carried(&self, report: &Report) -> Result<(), String> {
        let Setup { version, release, links, .. } = *self.setup;
        let carrier = &report.carrier;
        if carrier.kind != "smc-r" {
            return Err(format!("carried by {} ({})", carrier.kind, carrier.reason));
        }
        if (carrier.version, carrier.release) != (version, release) {
            return Err(format!("version {}.{}", carrier.version, carrier.release));
        }
        // The first contact is over before the second link is there.
        if carrier.links != links && carrier.links != 1 {
            return Err(format!("{} links", carrier.links));
        }
        Ok(())
    }

    /// Prints a cell's line, and remembers failures.
    fn say(&mut self, sides: [Side; 2], cell: &str, result: Result<String, String>) {
        match &result {
            Ok(text) => drop(self.print(sides, cell, "ok", text)),
            Err(text) => {
                let line = self.print(sides, cell, "FAILED", text);
                self.failed.push(line);
            }
        }
    }

    /// Prints a cell's line.
    fn print(&mut self, [server, client]: [Side; 2], cell: &str, word: &str, text: &str) -> String {
        let pair = format!("{} client -> {} server", client.name(), server.name());
        let line = format!("{:<16} {pair:<27} {cell:<20} {word:<6} {text}", self.setup.name);
        println!("{line}");
        // For readers during the test, and after a hang.
        let _ = writeln!(self.lines, "{line}");
        line
    }

    /// Whether a cell with this result is to be run again; prints the decision. The kernel waits two
    /// seconds for its peer's answer, and soft-RoCE breaks a link with late packets. An emulated guest
    /// on a busy machine gets no processor for so long now and then. So one cell of a test may fail
    /// once.
    fn repeats<T>(&mut self, sides: [Side; 2], cell: &str, result: &Result<T, String>) -> bool {
        let Err(text) = result else { return false };
        if self.repeated {
            return false;
        }
        self.repeated = true;
        self.print(sides, cell, "again", text);
        true
    }
}

/// The state of a kernel's SMC.
#[track_caller]
fn smc(guest: &Guest) -> Smc {
    serde_json::from_str(&guest.ok(["smc-test-peer", "linux", "show"])).unwrap()
}

#[track_caller]
fn report(job: &mut Job) -> Report {
    let line = job.line();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

/// The report of an end, without its error.
fn flawless(who: &str, report: &Report) -> Result<(), String> {
    if report.error.is_empty() { Ok(()) } else { Err(format!("{who}: {}", report.error)) }
}

/// Both ends have seen the same bytes.
fn same_bytes(client: &Report, server: &Report) -> Result<(), String> {
    let there = (client.sent, client.sent_digest) == (server.received, server.received_digest);
    let back = (server.sent, server.sent_digest) == (client.received, client.received_digest);
    if there && back { Ok(()) } else { Err(format!("other bytes: {client:?} {server:?}")) }
}

/// An order for a client and its server, both left unchanged by earlier orders.
fn cell(
    field: &Field<'_>,
    [server, client]: [&mut Job; 2],
    order: &str,
) -> Result<(Report, Report), String> {
    client.feed(&format!("{order}\n"));
    let here = report(client);
    let connected = !here.error.starts_with("connect");
    if !connected {
        return Err(format!("client: {}", here.error));
    }
    let there = report(server);
    flawless("client", &here)?;
    flawless("server", &there)?;
    field.carried(&here).map_err(|error| format!("client: {error}"))?;
    field.carried(&there).map_err(|error| format!("server: {error}"))?;
    Ok((here, there))
}

/// An order whose bytes must be the same at both ends, on a connection of the link group of the first
/// one.
fn moved(
    field: &Field<'_>,
    ends: [&mut Job; 2],
    name: &str,
    order: &str,
    groups: &mut Option<[u32; 2]>,
) -> Result<String, String> {
    let (here, there) = cell(field, ends, order)?;
    if !name.starts_with("abort") {
        same_bytes(&here, &there)?;
    }
    let now = [here.carrier.group, there.carrier.group];
    let first = *groups.get_or_insert(now);
    if now != first {
        return Err(format!("link groups {first:x?}, then {now:x?}"));
    }
    let text = format!("{} ms  {}{}", here.millis, here.note, there.note);
    Ok(match name {
        "bulk" => format!("{} MiB each way, {text}", bulk() >> 20),
        _ => text,
    })
}

/// Runs the cells of one pair of ends.
fn cells(field: &mut Field<'_>, sides: [Side; 2]) {
    field.fresh(TEST_LINK_LATE);
    let mut before = [smc(&field.a), smc(&field.b)];
    let mut server = field.serve(sides[0]);
    let mut client = field.talk(sides[1]);
    let mut groups = None;
    for (name, order) in [
        ("first contact", "ping 10000 1".to_owned()),
        ("subsequent contact", "ping 10000 2".to_owned()),
        ("1 B", "byte 0 3".to_owned()),
        ("bulk", format!("bulk {} 4", bulk())),
        ("ring wrap", "wrap 500000 5".to_owned()),
        ("window closed", "window 0 6".to_owned()),
        ("half close", "half 1000000 7".to_owned()),
        ("abort", "abort 0 8".to_owned()),
        ("abort by server", "turned-abort 0 9".to_owned()),
        ("urgent byte", "urgent 0 10".to_owned()),
    ] {
        let mut result = moved(field, [&mut server, &mut client], name, &order, &mut groups);
        if field.repeats(sides, name, &result) {
            drop((server, client));
            field.fresh(TEST_LINK_LATE);
            before = [smc(&field.a), smc(&field.b)];
            (server, client) = (field.serve(sides[0]), field.talk(sides[1]));
            groups = None;
            result = moved(field, [&mut server, &mut client], name, &order, &mut groups);
        }
        let failed = result.is_err();
        field.say(sides, name, result);
        if failed {
            // Ends out of step would fail every later cell.
            (server, client) = (field.serve_again(sides[0], server), field.talk(sides[1]));
            let again = cell(field, [&mut server, &mut client], "ping 10000 2");
            groups = again.ok().map(|(here, there)| [here, there].map(|end| end.carrier.group));
        }
    }
    let result = second_link(field, sides);
    field.say(sides, "links", result);
    let mut result = many(field, [&mut server, &mut client]);
    if field.repeats(sides, "100 connections", &result) {
        drop((server, client));
        field.fresh(TEST_LINK_LATE);
        before = [smc(&field.a), smc(&field.b)];
        (server, client) = (field.serve(sides[0]), field.talk(sides[1]));
        result = many(field, [&mut server, &mut client]);
    }
    let failed = result.is_err();
    field.say(sides, "100 connections", result);
    if failed {
        (server, client) = (field.serve_again(sides[0], server), field.talk(sides[1]));
    }
    let result = in_the_kernel(field, sides, &before);
    field.say(sides, "kernel's counts", result);
    drop((server, client));
    field.fresh(TEST_LINK_SOON);
    (server, client) = (field.serve(sides[0]), field.talk(sides[1]));
    for (name, order, kill_client) in
        [("client killed", "flood 0 11 &", true), ("server killed", "pour 0 12 &", false)]
    {
        let mut result = killed(field, [&mut server, &mut client], order, kill_client);
        if field.repeats(sides, name, &result) {
            drop((server, client));
            field.fresh(TEST_LINK_SOON);
            (server, client) = (field.serve(sides[0]), field.talk(sides[1]));
            result = killed(field, [&mut server, &mut client], order, kill_client);
        }
        field.say(sides, name, result);
        if kill_client {
            client = field.talk(sides[1]);
        } else {
            server = field.serve_again(sides[0], server);
        }
        let result = cell(field, [&mut server, &mut client], "ping 1000 13");
        let result = result.map(|(here, _)| format!("{} ms", here.millis));
        field.say(sides, "connects again", result);
    }
    drop((server, client));
    let result = idle(field, sides);
    field.say(sides, "group idle and freed", result);
}

/// A link group without connections goes away at both ends, and is made again.
fn idle(field: &mut Field<'_>, sides: [Side; 2]) -> Result<String, String> {
    if sides == [Side::Linux; 2] {
        return Ok("not shown: the kernel waits 600 s, and nothing changes that".to_owned());
    }
    field.idle = ",idle=1000";
    let (mut server, mut client) = (field.serve(sides[0]), field.talk(sides[1]));
    let before = cell(field, [&mut server, &mut client], "ping 1000 14");
    let start = Instant::now();
    let gone = before.and_then(|(here, there)| {
        for (guest, end, side) in [(&field.a, &there, sides[0]), (&field.b, &here, sides[1])] {
            let known = || smc(guest).groups.iter().any(|group| group.id == end.carrier.group);
            while side == Side::Linux && known() {
                if start.elapsed() > SOON {
                    return Err(format!("{} keeps the link group", guest.name()));
                }
                std::thread::sleep(Duration::from_millis(500));
            }
        }
        std::thread::sleep(Duration::from_millis(3000).saturating_sub(start.elapsed()));
        let (here2, there2) = cell(field, [&mut server, &mut client], "ping 1000 15")?;
        let groups = |here: &Report, there: &Report| [here.carrier.group, there.carrier.group];
        let (old, new) = (groups(&here, &there), groups(&here2, &there2));
        if old[0] == new[0] || old[1] == new[1] {
            return Err(format!("link groups {old:x?}, then {new:x?}"));
        }
        Ok(format!("gone after {} ms at the latest", start.elapsed().as_millis()))
    });
    field.idle = "";
    gone
}

/// Checks the number of links of the link group in the view of each participating kernel.
fn second_link(field: &Field<'_>, sides: [Side; 2]) -> Result<String, String> {
    let mut seen = Vec::new();
    for (guest, side) in [&field.a, &field.b].into_iter().zip(sides) {
        if side == Side::Linux {
            let groups = smc(guest).groups;
            let [group] = groups.as_slice() else {
                return Err(format!("{} link groups", groups.len()));
            };
            if group.links.len() as u32 != field.setup.links {
                return Err(format!("{}: {group:?}", guest.name()));
            }
            let adapters: Vec<&str> = group.links.iter().map(|link| &*link.adapter).collect();
            seen.push(format!("{} {}", guest.name(), adapters.join("+")));
        }
    }
    Ok(seen.join(", "))
}

fn many(field: &Field<'_>, [server, client]: [&mut Job; 2]) -> Result<String, String> {
    client.feed("many 100 100\n");
    let here = report(client);
    flawless("client", &here)?;
    if !here.note.starts_with("100 of 100 ") {
        return Err(here.note);
    }
    for _ in 0..100 {
        let there = report(server);
        flawless("server", &there)?;
        field.carried(&there)?;
    }
    Ok(format!("{} ms", here.millis))
}

/// Checks the kernel's counters: connections of this version, and no fallback to TCP.
fn in_the_kernel(field: &Field<'_>, sides: [Side; 2], before: &[Smc; 2]) -> Result<String, String> {
    let version = usize::from(field.setup.version - 1);
    let mut text = Vec::new();
    for (n, guest) in [&field.a, &field.b].into_iter().enumerate() {
        if sides[n] != Side::Linux {
            continue;
        }
        let (before, after) = (&before[n], smc(guest));
        if after.fallbacks != before.fallbacks {
            return Err(format!("{} fell back: {:x?}", guest.name(), after.fallbacks));
        }
        let of = |smc: &Smc| [smc.counts.server, smc.counts.client][n][version];
        let count = of(&after) - of(before);
        if count < 100 {
            return Err(format!("{} has counted {count}", guest.name()));
        }
        text.push(format!("{} {count}", guest.name()));
    }
    Ok(text.join(", "))
}

/// Kills one end while bytes flow to the other.
fn killed(
    field: &Field<'_>,
    [server, client]: [&mut Job; 2],
    order: &str,
    kill_client: bool,
) -> Result<String, String> {
    client.feed(&format!("{order}\n"));
    field.carried(&report(client))?;
    std::thread::sleep(Duration::from_millis(300));
    let (victim, survivor) = if kill_client { (client, server) } else { (server, client) };
    victim.kill();
    let start = Instant::now();
    if !survivor.has_line_within(GIVEN_UP) {
        return Err(format!("heard nothing within {GIVEN_UP:?}"));
    }
    let report = report(survivor);
    let took = start.elapsed();
    field.carried(&report)?;
    if report.received == 0 && report.sent == 0 {
        return Err(format!("nothing had flowed: {}", report.error));
    }
    if took > SOON {
        return Err(format!("heard after {took:?}: {}", report.error));
    }
    assert_eq!(victim.ended(), Some(End::Signal(9)));
    Ok(format!("{} ms, {}", took.as_millis(), report.error))
}

/// Whether a pair of ends is named in `SMC_INTEROP_ONLY=rust-linux,linux-linux`, client first. Without
/// the variable every pair is wanted, but the kernel with itself only with one link: this pair
/// validates the test, and once is enough.
fn wanted(setup: &Setup, sides: [Side; 2]) -> bool {
    let [server, client] = sides.map(|side| side.name().to_lowercase());
    match std::env::var("SMC_INTEROP_ONLY") {
        Ok(only) => only.split(',').any(|name| name == format!("{client}-{server}")),
        Err(_) => sides != [Side::Linux; 2] || setup.links == 1,
    }
}

/// Runs the cells of every pair of ends. For an impossible pair prints the reason.
#[track_caller]
fn matrix(setup: &Setup, impossible: &[([Side; 2], &str)]) {
    let mut field = Field::new(setup);
    for sides in [
        [Side::Linux, Side::Linux],
        [Side::Linux, Side::Rust],
        [Side::Rust, Side::Linux],
        [Side::Rust, Side::Rust],
    ] {
        if !wanted(setup, sides) {
            continue;
        }
        match impossible.iter().find(|(pair, _)| *pair == sides) {
            None => cells(&mut field, sides),
            Some((_, why)) => {
                let [server, client] = sides.map(Side::name);
                let pair = format!("{client} client -> {server} server");
                println!("{:<16} {pair:<27} cannot be: {why}", setup.name);
            }
        }
    }
    assert!(field.failed.is_empty(), "{} cells:\n{}", field.failed.len(), field.failed.join("\n"));
}

// Shows: CLC-36, CLC-40, CLC-44, LLCV2-39, LG-45, LG-47, LG-56, LG-62, RMB-4, CLOSE-37.
#[test]
fn version_2_1_with_one_link() {
    let setup = Setup {
        name: "v2.1, 1 link",
        adapters: 1,
        mtu: Some(9000),
        links: 1,
        version: 2,
        release: 1,
        linux: Kernel::V2("1"),
        rust: "links=1",
    };
    matrix(&setup, &[]);
}

// Shows: CLC-33, CLC-48, LG-47, LG-58, LG-60.
#[test]
fn version_2_1_with_two_links() {
    let setup = Setup {
        name: "v2.1, 2 links",
        adapters: 2,
        mtu: None,
        links: 2,
        version: 2,
        release: 1,
        linux: Kernel::V2("2"),
        rust: "links=2",
    };
    matrix(&setup, &[]);
}

// Shows: CLCV2-37, LG-58.
#[test]
fn version_2_0() {
    let setup = Setup {
        name: "v2.0",
        adapters: 2,
        mtu: None,
        links: 2,
        version: 2,
        release: 0,
        linux: Kernel::V2("2"),
        rust: "v2.0",
    };
    let why = "AF_SMC offers and answers release 1 unless its peer does not";
    matrix(&setup, &[([Side::Linux; 2], why)]);
}

// Shows: CLC-19, CLC-22, CLC-48, CLCV2-4, LLC-2, LG-58, RMB-4, SOCK-13.
#[test]
fn version_1() {
    let setup = Setup {
        name: "v1, 2 links",
        adapters: 2,
        mtu: None,
        links: 2,
        version: 1,
        release: 0,
        linux: Kernel::V1,
        rust: "v1",
    };
    matrix(&setup, &[]);
}
