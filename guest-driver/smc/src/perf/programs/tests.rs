//! Each program runs over each kind of transport and comes to a number.

use std::sync::mpsc::channel;

use super::*;
use crate::perf::job::{Percentiles, TransportKind};
use crate::transport::{Ring, Tcp, Unix};

fn job(program: Program, size: usize) -> Job {
    Job {
        program,
        transport: TransportKind::Tcp,
        size,
        seconds: 0.03,
        buffer: 65536,
        spin_us: 50,
        connections: 5,
        threads: 2,
        device: None,
        eids: Vec::new(),
        remote: false,
        bind: Tcp::LOOPBACK.0,
        dir: std::env::temp_dir(),
        address: String::new(),
        pin: false,
    }
}

fn run<T: Transport>(transport: &T, job: Job) -> [Option<Outcome>; 2] {
    let (sender, receiver) = channel();
    std::thread::scope(|scope| {
        let served = job.clone();
        let server = scope.spawn(move || {
            serve(transport, &served, |address| {
                sender.send(address.to_owned()).map_err(io::Error::other)
            })
            .unwrap()
        });
        let address = receiver.recv().unwrap();
        let driven = drive(transport, &Job { address, ..job }).unwrap();
        [server.join().unwrap().outcome, driven.outcome]
    })
}

fn assert_rate(outcomes: [Option<Outcome>; 2]) {
    let rates: Vec<_> = outcomes.into_iter().flatten().collect();
    assert!(matches!(rates[..], [Outcome::PerSecond(rate)] if rate > 0.0), "{rates:?}");
}

#[test]
fn a_stream_has_a_rate_at_its_receiver() {
    for size in [100, 65536, 200_000] {
        let outcomes = run(&Tcp::LOOPBACK, job(Program::Stream, size));
        assert!(outcomes[0].is_some());
        assert_rate(outcomes);
    }
    assert_rate(run(&Ring, job(Program::Stream, 65536)));
}

#[test]
fn round_trips_have_ordered_percentiles() {
    let [None, Some(Outcome::Times(times))] = run(&Tcp::LOOPBACK, job(Program::RoundTrip, 64))
    else {
        panic!("no times")
    };
    let Percentiles { p50, p90, p99, p999, max } = times;
    assert!(0.0 < p50 && p50 <= p90 && p90 <= p99 && p99 <= p999 && p999 <= max, "{times:?}");
}

#[test]
fn many_connections_echo() {
    let dir = std::env::temp_dir();
    assert_rate(run(&Tcp::LOOPBACK, job(Program::Echo, 4096)));
    // Longer than the sockets' buffers: writes come to a halt in the middle.
    let long = Job { seconds: 0.2, connections: 2, ..job(Program::Echo, 600_000) };
    assert_rate(run(&Unix { dir }, long));
}

#[test]
fn short_connections_are_counted() {
    assert_rate(run(&Tcp::LOOPBACK, job(Program::Short, 1024)));
}

#[test]
fn a_transport_that_cannot_wait_for_many_says_so() {
    let error = drive(&Ring, &job(Program::Echo, 1)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
}
