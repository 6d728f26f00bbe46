// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon's counters as text.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;
use vhost_device_ism::management::Guest;

use super::table::{row, size, table};

/// A fabric with its guests.
#[derive(Debug, Serialize)]
pub(super) struct Fabric<'a> {
    chid: &'a str,
    guests: Vec<&'a Guest>,
}

/// Guests by their fabric.
pub(super) fn by_fabric(guests: &[Guest]) -> Vec<Fabric<'_>> {
    let mut fabrics: BTreeMap<&str, Vec<&Guest>> = BTreeMap::new();
    for guest in guests {
        fabrics.entry(&guest.chid).or_default().push(guest);
    }
    fabrics.into_iter().map(|(chid, guests)| Fabric { chid, guests }).collect()
}

/// As text; with what there was some time ago, rates.
pub(super) fn render(guests: &[Guest], rates: Option<(Duration, &[Guest])>) -> String {
    if guests.is_empty() {
        return "The daemon has no guests.\n".into();
    }
    let mut text = String::new();
    for fabric in by_fabric(guests) {
        // The front ends of a pool are no guests of their own.
        let guests = || fabric.guests.iter().filter(|guest| guest.pool.is_none());
        let up = guests().filter(|guest| guest.connected).count();
        let _ =
            writeln!(text, "fabric {}: {} guests, {up} connected", fabric.chid, guests().count());
        text += &render_fabric(&fabric, rates);
    }
    text
}

fn render_fabric(fabric: &Fabric<'_>, rates: Option<(Duration, &[Guest])>) -> String {
    let mut what = table(&["guest", "GID", "peers", "DMBs", "bytes", "attached", "slabs", "bytes"]);
    let headings = ["guest", "commands", "moves", "bytes", "signals", "saved", "wakes", "lost"];
    let mut how = table(&headings);
    let mut trouble = String::new();
    for guest in &fabric.guests {
        let gid = match (&guest.gid, guest.connected) {
            _ if guest.devices.is_some() => pool(guest),
            (Some(gid), _) => gid.clone(),
            (None, true) => "connected, no driver".into(),
            (None, false) => "not connected".into(),
        };
        let n = |n: u64| n.to_string();
        row(
            &mut what,
            &guest.name,
            [
                gid,
                n(guest.peers),
                n(guest.dmbs),
                size(guest.dmb_bytes),
                n(guest.attached),
                n(guest.slabs),
                size(guest.slab_bytes),
            ],
        );
        let counters = counters(guest);
        let shown = match rates.and_then(|(time, old)| Some((time, same_session(old, guest)?))) {
            Some((time, old)) => per_second(counters, self::counters(old), time),
            None => counters.map(|n| n as f64),
        };
        let [commands, moves, bytes, signals, saved, wakes, lost] = shown;
        let n = |n: f64| format!("{n:.0}");
        let cells =
            [n(commands), n(moves), size(bytes as u64), n(signals), n(saved), n(wakes), n(lost)];
        row(&mut how, &guest.name, cells);
        let reasons =
            [("commands refused", &guest.refusals), ("moves refused", &guest.move_refusals)];
        for (kind, counts) in reasons.into_iter().chain([("faults", &guest.faults)]) {
            for (reason, count) in counts {
                let _ = writeln!(trouble, "  {}: {kind}, {reason}: {count}", guest.name);
            }
        }
    }
    let counted = if rates.is_some() { "per second" } else { "of all connections so far" };
    format!("{what}\n{counted}:\n{how}\n{trouble}")
}

/// What becomes of the devices of a pool.
fn pool(guest: &Guest) -> String {
    let (devices, in_use) = (guest.devices.unwrap_or(0), guest.devices_in_use.unwrap_or(0));
    let refused = guest.refused_connections.unwrap_or(0);
    match refused {
        0 => format!("pool: {in_use} of {devices} devices in use"),
        n => format!("pool: {in_use} of {devices} devices in use, {n} refused"),
    }
}

fn counters(guest: &Guest) -> [u64; 7] {
    [
        guest.commands,
        guest.moves,
        guest.move_bytes,
        guest.signals,
        guest.kicks_saved,
        guest.wakes,
        guest.sw_events_lost,
    ]
}

/// The earlier counters of a guest, unless its device has begun another session since.
fn same_session<'a>(old: &'a [Guest], guest: &Guest) -> Option<&'a Guest> {
    old.iter().find(|old| old.name == guest.name && old.gid == guest.gid)
}

fn per_second(now: [u64; 7], before: [u64; 7], time: Duration) -> [f64; 7] {
    let mut rates = [0.0; 7];
    for ((rate, now), before) in rates.iter_mut().zip(now).zip(before) {
        *rate = now.saturating_sub(before) as f64 / time.as_secs_f64().max(0.001);
    }
    rates
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(name: &str, chid: &str) -> Guest {
        Guest { name: name.into(), chid: chid.into(), ..Guest::default() }
    }

    #[test]
    fn guests_are_shown_by_fabric_with_what_was_refused() {
        let mut a = guest("vm1", "ff00");
        a.refusals.insert("NO_SPACE".into(), 3);
        let text = render(&[a, guest("vm2", "ff05")], None);
        assert!(text.contains("fabric ff00: 1 guests, 0 connected"), "{text}");
        assert!(text.contains("fabric ff05"), "{text}");
        assert!(text.contains("vm1: commands refused, NO_SPACE: 3"), "{text}");
    }

    #[test]
    fn a_pool_is_shown_with_its_front_ends() {
        let any = Guest { devices: Some(8), devices_in_use: Some(1), ..guest("any", "ff00") };
        let busy = Guest { refused_connections: Some(3), ..any.clone() };
        let front_end = Guest {
            gid: Some("3f31".into()),
            connected: true,
            pool: Some("any".into()),
            ..guest("any/7", "ff00")
        };
        let text = render(&[any, front_end], None);
        assert!(text.contains("fabric ff00: 1 guests"), "{text}");
        assert!(text.contains("pool: 1 of 8 devices in use"), "{text}");
        assert!(text.contains("any/7") && text.contains("3f31"), "{text}");
        assert!(render(&[busy], None).contains("in use, 3 refused"));
    }

    #[test]
    fn rates_are_of_one_session_of_a_device() {
        let old = Guest { gid: Some("1".into()), moves: 10, ..guest("a", "ff00") };
        let now = Guest { moves: 30, ..old.clone() };
        let rates = per_second(counters(&now), counters(&old), Duration::from_secs(2));
        assert_eq!(rates[1], 10.0);
        let later = Guest { gid: Some("2".into()), ..now };
        assert!(same_session(&[old], &later).is_none());
    }
}
