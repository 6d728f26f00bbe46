// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon's counters as text.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::iter;
use std::time::Duration;

use serde::Serialize;
use vhost_device_ism::management::{Counter, Counts, Guest};

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

/// Counters as text; given earlier counters, rates.
pub(super) fn render(guests: &[Guest], rates: Option<(Duration, &[Guest])>) -> String {
    if guests.is_empty() {
        return "The daemon has no guests.\n".into();
    }
    let mut text = String::new();
    for fabric in by_fabric(guests) {
        // The front ends of a pool are no guests of their own.
        let guests = || fabric.guests.iter().filter(|guest| guest.pool.is_none());
        let up = guests().filter(|guest| guest.connected).count();
        let number = match guests().count() {
            1 => "1 guest".to_owned(),
            number => format!("{number} guests"),
        };
        let _ = writeln!(text, "fabric {}: {number}, {up} connected", fabric.chid);
        text += &render_fabric(&fabric, rates);
    }
    text
}

fn render_fabric(fabric: &Fabric<'_>, rates: Option<(Duration, &[Guest])>) -> String {
    let mut what = table(&["guest", "GID", "peers", "DMBs", "bytes", "attached", "slabs", "bytes"]);
    let columns = counted(&fabric.guests);
    let headings: Vec<String> = columns.iter().map(|row| row.name.replace('_', " ")).collect();
    let mut how =
        table(&iter::once("guest").chain(headings.iter().map(String::as_str)).collect::<Vec<_>>());
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
        let before = rates.and_then(|(time, old)| Some((time, same_session(old, guest)?)));
        row(&mut how, &guest.name, columns.iter().map(|row| count(row, guest, before)));
        let reasons =
            [("commands refused", &guest.refusals), ("moves refused", &guest.move_refusals)];
        for (kind, counts) in reasons.into_iter().chain([("faults", &guest.faults)]) {
            for (reason, count) in counts {
                let _ = writeln!(trouble, "  {}: {kind}, {reason}: {count}", guest.name);
            }
        }
    }
    if columns.is_empty() {
        return format!("{what}\n{trouble}");
    }
    let counted = if rates.is_some() { "per second" } else { "of all connections so far" };
    format!("{what}\n{counted}:\n{how}\n{trouble}")
}

/// The use of the devices of a pool.
fn pool(guest: &Guest) -> String {
    let (devices, in_use) = (guest.devices.unwrap_or(0), guest.devices_in_use.unwrap_or(0));
    let refused = guest.refused_connections.unwrap_or(0);
    match refused {
        0 => format!("pool: {in_use} of {devices} devices in use"),
        n => format!("pool: {in_use} of {devices} devices in use, {n} refused"),
    }
}

/// Counters other than zero for some guest.
fn counted(guests: &[&Guest]) -> Vec<&'static Counter> {
    let is_zero = |row: &Counter| guests.iter().all(|guest| (row.get)(&guest.counts) == 0);
    Counts::ALL.iter().filter(|row| !is_zero(row)).collect()
}

/// A counter as text; given earlier counters, its rate.
fn count(row: &Counter, guest: &Guest, before: Option<(Duration, &Guest)>) -> String {
    let now = (row.get)(&guest.counts);
    let shown = match before {
        Some((time, old)) => per_second(now, (row.get)(&old.counts), time),
        None => now as f64,
    };
    if row.name.ends_with("_bytes") { size(shown as u64) } else { format!("{shown:.0}") }
}

/// The earlier counters of a guest, unless its device has begun another session since.
fn same_session<'a>(old: &'a [Guest], guest: &Guest) -> Option<&'a Guest> {
    old.iter().find(|old| old.name == guest.name && old.gid == guest.gid)
}

fn per_second(now: u64, before: u64, time: Duration) -> f64 {
    now.saturating_sub(before) as f64 / time.as_secs_f64().max(0.001)
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
        assert!(text.contains("fabric ff00: 1 guest, 0 connected"), "{text}");
        assert!(text.contains("fabric ff05"), "{text}");
        assert!(text.contains("vm1: commands refused, NO_SPACE: 3"), "{text}");
    }

    #[test]
    fn each_counter_has_a_column_once_it_has_counted() {
        for row in Counts::ALL {
            let heading = row.name.replace('_', " ");
            let counts = serde_json::from_str(&format!("{{\"{}\":77}}", row.name)).unwrap();
            let text = render(&[Guest { counts, ..guest("vm1", "ff00") }], None);
            assert!(text.contains(&heading) && text.contains("77"), "{heading}: {text}");
        }
        assert!(!render(&[guest("vm1", "ff00")], None).contains("connections so far"));
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
        assert!(text.contains("fabric ff00: 1 guest,"), "{text}");
        assert!(text.contains("pool: 1 of 8 devices in use"), "{text}");
        assert!(text.contains("any/7") && text.contains("3f31"), "{text}");
        assert!(render(&[busy], None).contains("in use, 3 refused"));
    }

    #[test]
    fn rates_are_of_one_session_of_a_device() {
        let moves = |moves| Counts { moves, ..Counts::default() };
        let old = Guest { gid: Some("1".into()), counts: moves(10), ..guest("a", "ff00") };
        let now = Guest { counts: moves(30), ..old.clone() };
        let before = Some((Duration::from_secs(2), std::slice::from_ref(&old)));
        let text = render(std::slice::from_ref(&now), before);
        assert!(text.contains("per second") && text.contains(" 10 "), "{text}");
        let later = Guest { gid: Some("2".into()), ..now };
        assert!(same_session(&[old], &later).is_none());
    }
}
