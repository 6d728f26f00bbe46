//! `smc stat`: what the daemon counts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;
use vhost_device_ism::management::{Client, Guest};

use crate::error::CliError;
use crate::{output, places};

/// Help of `smc stat`.
pub(crate) const LONG_ABOUT: &str = "\
Shows what a daemon counts, by its management socket: the fabrics and their guests, what they hold,
and how bytes and wake-ups went.

  DMBs        registered buffers and their bytes; attached: buffers of peers it may write
  slabs       shared memory that holds the buffers of one pair of guests
  moves       copies by the device; stores through the window are not the daemon's to see
  signals     how often somebody was to be woken; saved: was awake, so nothing had to be done;
              wakes: records that were posted
  refused     commands and moves that were refused, by reason
  faults      what a front end or driver did wrong

Counters of a guest start anew with each connection of its front end.";

/// Options of `smc stat`.
#[derive(Args, Debug)]
pub(crate) struct StatArgs {
    /// Management socket of the daemon [default: that of "smc fabric" without options].
    #[arg(long, value_name = "SOCKET", env = "SMC_MANAGEMENT")]
    management: Option<PathBuf>,

    /// Print JSON: an object with a list of fabrics; with --watch one a line.
    #[arg(long)]
    json: bool,

    /// Repeat, every so many seconds.
    #[arg(long, short, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1",
          value_parser = clap::value_parser!(u32).range(1..=86400))]
    watch: Option<u32>,
}

#[derive(Debug, Serialize)]
struct Fabric<'a> {
    chid: &'a str,
    guests: Vec<&'a Guest>,
}

/// Prints once, or again and again.
///
/// # Errors
/// No daemon answers.
pub(crate) fn run(args: &StatArgs) -> Result<(), CliError> {
    let socket = args.management.clone().unwrap_or_else(|| places::socket(places::MANAGEMENT));
    let failed = |source| CliError::Management { socket: socket.clone(), source };
    let mut client = Client::connect(&socket).map_err(failed)?;
    let mut before: Option<(Instant, Vec<Guest>)> = None;
    loop {
        let guests = client.list().map_err(failed)?;
        let now = Instant::now();
        let text = match args.json {
            true => json(&guests)?,
            false => {
                let clear = if args.watch.is_some() { "\x1b[H\x1b[J" } else { "" };
                let rates = before.as_ref().map(|(then, old)| (now - *then, old.as_slice()));
                format!("{clear}{}", render(&guests, rates))
            }
        };
        output::print(&text)?;
        let Some(seconds) = args.watch else { return Ok(()) };
        before = Some((now, guests));
        std::thread::sleep(Duration::from_secs(seconds.into()));
    }
}

fn by_fabric(guests: &[Guest]) -> Vec<Fabric<'_>> {
    let mut fabrics: BTreeMap<&str, Vec<&Guest>> = BTreeMap::new();
    for guest in guests {
        fabrics.entry(&guest.chid).or_default().push(guest);
    }
    fabrics.into_iter().map(|(chid, guests)| Fabric { chid, guests }).collect()
}

fn json(guests: &[Guest]) -> Result<String, CliError> {
    let value = serde_json::json!({ "fabrics": by_fabric(guests) });
    Ok(format!("{value}\n"))
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header(header.iter().enumerate().map(|(at, title)| {
        let side = if at == 0 { CellAlignment::Left } else { CellAlignment::Right };
        Cell::new(title).set_alignment(side)
    }));
    table
}

fn row(table: &mut Table, name: &str, cells: impl IntoIterator<Item = String>) {
    let mut row = vec![Cell::new(name)];
    row.extend(cells.into_iter().map(|text| Cell::new(text).set_alignment(CellAlignment::Right)));
    table.add_row(row);
}

/// A number of bytes in three digits.
fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = if unit == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.decimals$} {}", units.get(unit).unwrap_or(&"B"))
}

fn render(guests: &[Guest], rates: Option<(Duration, &[Guest])>) -> String {
    if guests.is_empty() {
        return "The daemon has no guests.\n".into();
    }
    let mut text = String::new();
    for fabric in by_fabric(guests) {
        let up = fabric.guests.iter().filter(|guest| guest.connected).count();
        let _ = writeln!(
            text,
            "fabric {}: {} guests, {up} connected",
            fabric.chid,
            fabric.guests.len()
        );
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
        let shown = match rates.and_then(|(time, old)| Some((time, same_life(old, guest)?))) {
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
    let counted = if rates.is_some() { "per second" } else { "since the front end connected" };
    format!("{what}\n{counted}:\n{how}\n{trouble}")
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

/// The guest as it was, unless its device is another one since.
fn same_life<'a>(old: &'a [Guest], guest: &Guest) -> Option<&'a Guest> {
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
    fn rates_are_of_one_life_of_a_device() {
        let old = Guest { gid: Some("1".into()), moves: 10, ..guest("a", "ff00") };
        let now = Guest { moves: 30, ..old.clone() };
        let rates = per_second(counters(&now), counters(&old), Duration::from_secs(2));
        assert_eq!(rates[1], 10.0);
        let reborn = Guest { gid: Some("2".into()), ..now };
        assert!(same_life(&[old], &reborn).is_none());
    }

    #[test]
    fn sizes_have_three_digits() {
        assert_eq!(
            [0, 999, 65536, 1 << 20, 3 << 30].map(size),
            ["0 B", "999 B", "64.0 KiB", "1.0 MiB", "3.0 GiB"]
        );
    }
}
