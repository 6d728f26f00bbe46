// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The table, as mapped by several processes.

use super::*;

const SHORT: (u64, u64) = (2048, 1);
const LONG: (u64, u64) = (1 << 30, 1000);

fn address(n: u32) -> SocketAddr {
    SocketAddr::new(IpAddr::V4((0x0a00_0000 + n).into()), 80)
}

/// A table as mapped by this many processes.
fn mapped<const N: usize>() -> [Arc<TrafficTable>; N] {
    let memory = create(None).unwrap();
    [(); N].map(|()| TrafficTable::adopt(&memory, Path::new("/bin/client"), None).unwrap())
}

fn key(table: &TrafficTable, server: u32) -> EndpointKey {
    table.key(&Endpoint::Server(address(server)))
}

fn connect(table: &Arc<TrafficTable>, server: u32, seen: (u64, u64)) -> Choice {
    let choice = table.choose(key(table, server), None);
    match choice {
        Choice::Tcp => {}
        Choice::Sample => table.add_sample(
            EndpointKey::from_bits(key(table, server).to_bits()),
            &Observation { bytes: seen.0, round_trips: seen.1, lifetime: Default::default() },
        ),
        Choice::Smc => {
            table.observe(&Endpoint::Server(address(server)), false).ended(seen, &CostModel::HOST);
        }
    }
    choice
}

#[test]
fn a_sample_is_judged_by_the_costs_of_the_connections_on_smc() {
    for (model, stays) in [(CostModel::HOST, true), (CostModel::GUEST, false)] {
        let [table] = mapped();
        let server = Endpoint::Server(address(1));
        (0..8).for_each(|_| table.observe(&server, false).ended((0, 0), &model));
        // 100 KiB and 3 round trips.
        let seen = Observation { bytes: 100 << 10, round_trips: 3, ..Observation::default() };
        table.add_sample(key(&table, 1), &seen);
        assert_eq!(table.choose(key(&table, 1), None) == Choice::Tcp, stays, "{model:?}");
        table.add_sample(key(&table, 2), &seen);
        assert_eq!(table.endpoints().len(), 1, "a sample makes no entry");
    }
}

#[test]
fn processes_that_make_a_connection_each_learn_together() {
    let all = mapped::<8>();
    for table in &all {
        assert_eq!(connect(table, 1, SHORT), Choice::Smc);
    }
    let mut choices = Vec::new();
    for n in 0..128 {
        choices.push(connect(&all[n % 8], 1, SHORT));
    }
    let samples: Vec<_> = (0..128).filter(|n| choices[*n] == Choice::Sample).collect();
    assert_eq!(samples, [63, 127]);
    assert!(choices.iter().all(|choice| *choice != Choice::Smc));
    // Another server is another matter.
    assert_eq!(connect(&all[0], 2, SHORT), Choice::Smc);
    let [known] = &all[3].endpoints()[..1] else { panic!() };
    let known = all[3].endpoints().into_iter().find(|e| e.tcp > 0).unwrap_or_else(|| known.clone());
    assert_eq!(known.endpoint, Endpoint::Server(address(1)));
    assert!(known.on_tcp && known.learned && !known.forced, "{known:?}");
    assert_eq!((known.smc, known.tcp, known.samples), (8, 128, 2));
    assert_eq!((known.bytes, known.round_trips), SHORT);
    assert!(known.gain < 100 && known.lifetime_us < 10_000_000, "{known:?}");
}

#[test]
fn a_sample_that_pays_puts_the_next_connections_on_smc() {
    let [table] = mapped();
    (0..8).for_each(|_| assert_eq!(connect(&table, 1, SHORT), Choice::Smc));
    (0..63).for_each(|_| assert_eq!(connect(&table, 1, LONG), Choice::Tcp));
    assert_eq!(connect(&table, 1, LONG), Choice::Sample);
    (0..100).for_each(|_| assert_eq!(connect(&table, 1, LONG), Choice::Smc));
}

#[test]
fn programs_and_ends_do_not_learn_from_each_other() {
    let memory = create(None).unwrap();
    let [one, other] = ["/bin/one", "/bin/other"]
        .map(|path| TrafficTable::adopt(&memory, path.as_ref(), None).unwrap());
    for _ in 0..8 {
        one.observe(&Endpoint::Listener(address(1)), false).ended(SHORT, &CostModel::HOST);
        connect(&one, 2, SHORT);
    }
    assert_eq!(one.choose(key(&one, 1), None), Choice::Smc);
    assert_eq!(one.choose(key(&one, 2), None), Choice::Tcp);
    assert_eq!(other.choose(key(&other, 2), None), Choice::Smc);
    assert_eq!((one.endpoints().len(), other.endpoints().len()), (2, 0));
    one.count_tcp(one.key(&Endpoint::Listener(address(1))));
    one.count_tcp(one.key(&Endpoint::Listener(address(7))));
    assert_eq!(one.endpoints().iter().map(|known| known.tcp).sum::<u64>(), 2);
}

#[test]
fn any_number_of_servers_has_room_and_the_one_in_use_stays_known() {
    let [table] = mapped();
    (0..8).for_each(|_| assert_eq!(connect(&table, 0, SHORT), Choice::Smc));
    for n in 1..5000 {
        assert_eq!(
            connect(&table, 0, SHORT),
            match n % 64 {
                0 => Choice::Sample,
                _ => Choice::Tcp,
            }
        );
        assert_eq!(connect(&table, n, SHORT), Choice::Smc);
    }
    assert_eq!(table.endpoints().len(), GROUPS * WAYS);
}

#[test]
fn an_observer_of_a_replaced_endpoint_changes_nothing() {
    let [table] = mapped();
    let observer = table.observe(&Endpoint::Server(address(0)), false);
    table.word(observer.at, entry::HASH).store(7, Ordering::Relaxed);
    let at = observer.at;
    observer.ended(SHORT, &CostModel::HOST);
    assert_eq!(table.word(at, entry::ENDED).load(Ordering::Relaxed), 0);
}

#[test]
fn any_words_are_borne() {
    for value in [u64::MAX, 1 << 63, 0x5555_5555_5555_5555, 1] {
        let [table] = mapped();
        connect(&table, 1, SHORT);
        for at in 0..GROUPS * WAYS {
            for word in entry::ESTIMATE..ENTRY_SIZE / 8 {
                table.word(at, word).store(value, Ordering::Relaxed);
            }
        }
        table.header(header::CLOCK).store(u64::MAX, Ordering::Relaxed);
        for n in 0..200 {
            connect(&table, n, (u64::MAX, u64::MAX));
            connect(&table, 1, (u64::MAX, u64::MAX));
        }
        table.endpoints();
        // A connection is observed all the same.
        let at = table.find(key(&table, 1).0).unwrap();
        table.word(at, entry::ESTIMATE).store(value, Ordering::Relaxed);
        assert!((0..64).any(|_| table.choose(key(&table, 1), None) != Choice::Tcp));
    }
}

#[test]
fn other_files_are_refused() {
    let other = sealed_memfd("other", SIZE as u64).unwrap();
    let short = sealed_memfd("short", SIZE as u64 / 2).unwrap();
    let (end, _) = rustix::pipe::pipe().unwrap();
    for fd in [other, short, end] {
        assert!(TrafficTable::adopt(fd, Path::new("x"), None).is_err());
    }
}

#[test]
fn many_threads_lose_no_choice() {
    let all = mapped::<4>();
    (0..8).for_each(|_| assert_eq!(connect(&all[0], 1, SHORT), Choice::Smc));
    let samples = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for table in &all {
            scope.spawn(|| {
                for _ in 0..64 * 25 {
                    if table.choose(key(table, 1), None) == Choice::Sample {
                        samples.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    assert_eq!(samples.into_inner(), 100);
}

#[test]
fn a_server_without_smc_is_left_alone_for_longer_each_time() {
    let [one, other] = mapped();
    let server = Endpoint::Server(address(1));
    let key = one.key(&server);
    let second = 1_000_000;
    let is_plain = |at: u64| other.is_plain(key, || at * second);
    assert!(!is_plain(100));
    one.note_plain(&server, 100 * second);
    assert!(is_plain(100) && is_plain(101) && !is_plain(102));
    other.note_plain(&server, 102 * second);
    assert!(is_plain(105) && !is_plain(106));
    (0..20).for_each(|_| one.note_plain(&server, 200 * second));
    assert!(is_plain(200 + 2047) && !is_plain(200 + 2048));
    // Another server is another matter, and a server speaking SMC after all begins anew.
    assert!(!one.is_plain(one.key(&Endpoint::Server(address(2))), || 200 * second));
    one.observe(&server, false).ended(LONG, &CostModel::HOST);
    assert!(!is_plain(200));
    one.note_plain(&server, 300 * second);
    assert!(is_plain(301) && !is_plain(302));
}
