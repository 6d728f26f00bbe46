// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A link group with two links loses a link under flowing bytes, and gets the link back.
//!
//! Limits of AF_SMC in these tests:
//!
//! - AF_SMC does not repeat its read position after the loss of the last report with its link. A sender
//!   here holds back a byte, and asks with this byte.
//! - As server over soft-RoCE, AF_SMC waits without limit for its bytes on a link before deleting the
//!   link at a client's wish. So the test does not demand the link's return where the client's interface
//!   goes down.
//! - Meanwhile AF_SMC takes the bytes sent there for under way, and collects up to half of its send
//!   buffer before sending. The receiver here asks once in a second, then ever more seldom. In about one
//!   run of eight this makes a pause of up to a second.

use std::thread;
use std::time::{Duration, Instant};

use smc_tests::interop::Report;
use smc_tests::linux::Smc;
use smc_tests::vm::{Bed, Guest, Job, Run, Vm};

use super::interop::logged;

/// How long bytes may pause where the guests do not wait for processors.
const PAUSE: Duration = Duration::from_secs(3);

/// How long bytes flow before the link is lost.
const UNDER_WAY: Duration = Duration::from_millis(400);

/// This project's sockets, with tests of silent links.
const RUST: &str = "rust:test=1000";

/// How a link is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    /// The client's interface goes down.
    Interface,
    /// The server's interface goes down.
    ServersInterface,
    /// The client's cable is pulled.
    Cable,
    /// The client's adapter is removed; the removal waits for the adapter's users.
    Adapter,
}

/// Bytes moved in each direction: 16 MiB, or `SMC_FAILOVER_BULK` MiB; 1024 take minutes.
fn bulk() -> usize {
    let mib = std::env::var("SMC_FAILOVER_BULK").ok().and_then(|text| text.parse().ok());
    mib.unwrap_or(16) << 20
}

#[track_caller]
fn report(job: &mut Job) -> Report {
    let line = job.line();
    let report: Report = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
    assert_eq!(report.error, "", "{report:?}");
    report
}

#[track_caller]
fn smc(guest: &Guest) -> Smc {
    serde_json::from_str(&guest.ok(["smc-test-peer", "linux", "show"])).unwrap()
}

/// Active links of a kernel's only link group. An unfinished link does not count: a connection
/// proposed by its adapter gets another link group.
#[track_caller]
fn links(guest: &Guest) -> usize {
    smc(guest).groups.iter().flat_map(|group| &group.links).filter(|link| link.is_active()).count()
}

/// Waits for two links. A server adds the second link on news of an adapter, or else a minute later
/// (LG-26). AF_SMC may take a minute to report the deletion of the former link, and a minute more to
/// answer another attempt.
#[track_caller]
fn two_links(mut links: impl FnMut() -> usize) {
    let start = Instant::now();
    while links() != 2 {
        assert!(start.elapsed() < Duration::from_secs(200), "still no two links");
        // Asking takes the guest's only processor.
        thread::sleep(Duration::from_millis(200));
    }
    println!("two links after {} ms", start.elapsed().as_millis());
}

/// Two guests with two adapters each.
#[track_caller]
fn guests(bed: &Bed) -> [Guest; 2] {
    let guests = bed.boot(["a", "b"].map(|name| Vm::named(name).no_ism().rnics(2).mtu(9000)));
    for guest in &guests {
        guest.ok(["smc-test-peer", "linux", "ueid", "VIRTIO-ISM"]);
    }
    guests
}

/// Loses the link of a connection, waits for the end of the connection, and for the return of the
/// link. `server` and `client` name the kinds of sockets.
#[track_caller]
fn survives(server: &str, client: &str, loss: Loss) {
    lives_on(server, client, loss, true);
}

/// Like [`survives`]. The return of the link only counts if `returns`.
#[track_caller]
fn lives_on(server: &str, client: &str, loss: Loss, returns: bool) {
    let bed = Bed::new();
    let [a, b] = guests(&bed);
    // A busy host moves about 2 MB/s.
    let limit = Duration::from_secs(180 + (bulk() >> 20) as u64);
    let command = ["smc-test-peer", "interop", "serve", server, "0.0.0.0:5000"];
    let mut serves = a.spawn(logged(Run::from(command)).within(limit));
    assert_eq!(serves.line(), "ready");
    let address = format!("{}:5000", a.ip());
    let command = ["smc-test-peer", "interop", "talk", client, &address];
    let mut talks = b.spawn(logged(Run::from(command)).open_stdin().within(limit));
    // The link group, with its second link.
    ping(&mut talks, &mut serves);
    for (guest, who) in [(&a, server), (&b, client)] {
        if who == "linux" {
            two_links(|| links(guest));
        }
    }
    two_links(|| ping(&mut talks, &mut serves).carrier.links as usize);
    let start = Instant::now();
    talks.feed(&format!("bulk {} 2 &\n", bulk()));
    let opened = report(&mut talks);
    assert_eq!(opened.carrier.kind, "smc-r", "{opened:?}");
    let nic: u32 = opened.carrier.adapter.trim_start_matches("rxe").parse().unwrap();
    thread::sleep(UNDER_WAY);
    let delay = || a.run_delay() + b.run_delay();
    let delay_before = delay();
    let _removal = lose(&a, &b, nic, loss);
    let lost = start.elapsed();
    let here = report(&mut talks);
    assert!(Duration::from_millis(here.millis) > lost, "{here:?} was over before {lost:?}");
    let there = report(&mut serves);
    let limit = PAUSE + (delay() - delay_before);
    assert_eq!((here.sent, here.sent_digest), (there.received, there.received_digest));
    assert_eq!((there.sent, there.sent_digest), (here.received, here.received_digest));
    assert_eq!(here.sent, bulk() as u64 + 1);
    // The adapter of the lost link, as at first.
    assert_eq!(here.carrier.adapter, there.carrier.adapter);
    println!(
        "{client} client -> {server} server, {loss:?} of rxe{nic}: {} MiB each way in {} ms \
         ({}{}), longest pauses {} and {} ms of at most {}",
        bulk() >> 20,
        here.millis,
        here.note,
        there.note,
        there.pause,
        here.pause,
        limit.as_millis()
    );
    for pause in [here.pause, there.pause] {
        assert!(Duration::from_millis(pause) <= limit, "a pause of {pause} ms, not {limit:?}");
    }
    if loss == Loss::Adapter {
        let later = ping(&mut talks, &mut serves);
        assert_ne!(later.carrier.adapter, opened.carrier.adapter, "{later:?}");
    }
    if !returns {
        return;
    }
    restore(&a, &b, nic, loss);
    for (guest, who) in [(&a, server), (&b, client)] {
        if who == "linux" {
            two_links(|| {
                let links = links(guest);
                if links == 0 {
                    // An AF_SMC too busy to answer Test Link has lost its link group, and makes
                    // another one for the next connection.
                    ping(&mut talks, &mut serves);
                }
                links
            });
        }
    }
    two_links(|| ping(&mut talks, &mut serves).carrier.links as usize);
    let again = ping(&mut talks, &mut serves);
    assert_eq!(again.carrier.kind, "smc-r", "{again:?}");
    if server != "linux" && client != "linux" {
        assert_eq!(again.carrier.group, opened.carrier.group, "{again:?}");
    }
}

/// Makes a separate connection; returns the client's report.
#[track_caller]
fn ping(talks: &mut Job, serves: &mut Job) -> Report {
    talks.feed("ping 1000 3\n");
    let here = report(talks);
    report(serves);
    here
}

/// Loses the link. Returns the job of a lasting removal, if there is one.
fn lose(a: &Guest, b: &Guest, nic: u32, loss: Loss) -> Option<Job> {
    match loss {
        Loss::Interface => drop(b.ok(format!("ip link set eth{nic} down"))),
        Loss::ServersInterface => drop(a.ok(format!("ip link set eth{nic} down"))),
        Loss::Cable => b.set_cable(nic, false),
        Loss::Adapter => return Some(b.spawn(format!("smc-test-peer rdma remove rxe{nic}"))),
    }
    None
}

fn restore(a: &Guest, b: &Guest, nic: u32, loss: Loss) {
    match loss {
        Loss::Interface => drop(b.ok(format!("ip link set eth{nic} up"))),
        Loss::ServersInterface => drop(a.ok(format!("ip link set eth{nic} up"))),
        Loss::Cable => b.set_cable(nic, true),
        Loss::Adapter => unreachable!("its users keep it from coming back"),
    }
    // Right after a failed search for the neighbour, a guest refuses a connect at once.
    let ping = format!("ping -c 1 -W 1 {}", a.ip_on(nic));
    smc_tests::eventually("the network is back", || b.run(ping.as_str()).code() == 0);
}

smc_test_support::tests_of! {
    survives:
    // Shows: LG-30.
    fn rust_to_rust_when_an_interface_goes_down(RUST, RUST, Loss::Interface);
    // Shows: LG-30.
    fn rust_to_rust_when_the_servers_interface_goes_down(RUST, RUST, Loss::ServersInterface);
    // Shows: LG-26, SOCK-13.
    fn rust_to_rust_when_a_cable_is_pulled(RUST, RUST, Loss::Cable);
}

// Shows: LG-30.
#[test]
fn rust_to_rust_when_an_adapter_is_taken_away() {
    lives_on(RUST, RUST, Loss::Adapter, false);
}

smc_test_support::tests_of! {
    survives:
    // Shows: LG-35.
    fn rust_to_rust_in_version_1("rust:v1,test=1000", "rust:v1,test=1000", Loss::Interface);
    // Shows: LG-30.
    fn linux_to_rust_when_an_interface_goes_down(RUST, "linux", Loss::Interface);
    // Shows: LG-30.
    fn linux_to_rust_when_the_servers_interface_goes_down(RUST, "linux", Loss::ServersInterface);
}

// Asked by a client to delete a link, a server of AF_SMC first waits for its own messages on the link, and
// soft-RoCE repeats these for ever: the link group never gets another link.
// Shows: LG-30.
#[test]
fn rust_to_linux_when_an_interface_goes_down() {
    lives_on("linux", RUST, Loss::Interface, false);
}

// Shows: LG-30.
#[test]
fn rust_to_linux_when_the_servers_interface_goes_down() {
    survives("linux", RUST, Loss::ServersInterface);
}
