// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Each program runs over each kind of transport and comes to a number.

use std::sync::mpsc::channel;

use super::*;
use crate::perf::job::{Percentiles, TransportKind};
use crate::perf::usage::RunProcesses;
use crate::transport::{LOOPBACK, Ring, Tcp, Unix};

fn job(program: Program, size: usize) -> Job {
    Job {
        program,
        transport: TransportKind::Tcp,
        size,
        seconds: 0.03,
        buffer: 65536,
        spin_us: 50,
        connections: 5,
        idle: 0,
        threads: 2,
        rate: 0,
        device: None,
        eids: Vec::new(),
        remote: false,
        bind: LOOPBACK,
        dir: std::env::temp_dir(),
        address: String::new(),
        namespace: None,
        cgroup: None,
        pin: false,
        others: None,
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
fn paced_round_trips_are_as_many_as_are_due() {
    // 0.03 s, and a fifth before: 30 messages count, if the machine keeps up; late messages are
    // sent all the same.
    let paced = Job { rate: 1000, ..job(Program::Paced, 64) };
    let [None, Some(Outcome::Times(times))] = run(&Tcp::LOOPBACK, paced) else {
        panic!("no times")
    };
    assert!(0.0 < times.p50 && times.p50 <= times.p99, "{times:?}");
}

#[test]
fn threads_count_their_round_trips_together() {
    assert_rate(run(&Tcp::LOOPBACK, Job { threads: 16, ..job(Program::RoundTripThreads, 64) }));
}

#[test]
fn a_paced_stream_is_as_fast_as_it_should_be() {
    // 2,000 writes of 1,000 bytes a second.
    let paced = Job { rate: 2000, seconds: 0.3, ..job(Program::Stream, 1000) };
    let [Some(Outcome::PerSecond(rate)), _] = run(&Tcp::LOOPBACK, paced) else { panic!("no rate") };
    // Without the pace the rate is a thousand times as high; with a pause the rate can only be
    // lower.
    assert!(rate < 20e6, "{rate}");
}

#[test]
fn every_transport_with_descriptors_echoes_by_epoll_and_by_tokio() {
    for program in [Program::EchoEpoll, Program::EchoTokio] {
        let dir = std::env::temp_dir();
        assert_rate(run(&Tcp::LOOPBACK, job(program, 4096)));
        assert_rate(run(&Unix { dir }, job(program, 4096)));
    }
}

#[test]
fn a_client_that_knows_the_other_processes_reports_processor_time() {
    // Server and client are one process here, so each is charged with the whole time.
    let others = Some(RunProcesses { server: std::process::id(), daemon: None });
    for program in [
        Program::Stream,
        Program::RoundTrip,
        Program::Paced,
        Program::RoundTripThreads,
        Program::Echo,
        Program::EchoEpoll,
        Program::EchoTokio,
        Program::Short,
    ] {
        let rate = if program == Program::Paced { 1000 } else { 0 };
        let job = Job { others, rate, seconds: 0.1, ..job(program, 1000) };
        let (sender, receiver) = channel();
        let usage = std::thread::scope(|scope| {
            let served = job.clone();
            let server = scope.spawn(move || {
                let tell = |address: &str| sender.send(address.to_owned());
                serve(&Tcp::LOOPBACK, &served, |at| tell(at).map_err(io::Error::other)).unwrap()
            });
            let address = receiver.recv().unwrap();
            let driven = drive(&Tcp::LOOPBACK, &Job { address, ..job }).unwrap();
            assert_eq!(server.join().unwrap().usage, None, "{program:?}");
            driven.usage.unwrap_or_else(|| panic!("{program:?}"))
        });
        // From 2 ns for a byte of a stream to a second for a connection.
        let time = usage.per_work();
        assert!(time > 0.0 && time < 1.0, "{program:?}: {time}");
    }
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
    let (listener, address) = Ring.listen().unwrap();
    let by_epoll = Job { address, connections: 1, ..job(Program::EchoEpoll, 1) };
    let error = drive(&Ring, &by_epoll).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    drop(listener);
}
