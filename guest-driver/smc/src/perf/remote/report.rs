// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results between machines, as a table and as JSON lines.

use std::fmt::Write as _;

use comfy_table::Cell;
use serde::Serialize;

use crate::error::CliError;
use crate::output;
use crate::perf::job::TransportKind;
use crate::perf::measure::Unit;
use crate::perf::report::{median, number, render_times, rounded, table, times, to_line};
use crate::perf::run::{Kicks, Plan, Results};

/// One JSON line.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    measure: String,
    unit: &'static str,
    runs: usize,
    /// The carrier of SMC's bytes: `window` or `move`.
    path: String,
    smc: Option<f64>,
    tcp: Option<f64>,
    vsock: Option<f64>,
    ratio: Option<f64>,
    vsock_ratio: Option<f64>,
}

fn word(window: bool) -> &'static str {
    if window { "window" } else { "move" }
}

impl Results {
    /// The SMC-D transport of the experiment. Every experiment has one.
    fn smc(&self) -> TransportKind {
        self.experiment.rows.first().map_or(TransportKind::Smc, |(_, transport)| *transport)
    }

    /// How SMC's bytes travelled, in all rounds.
    fn path(&self) -> String {
        let mut paths: Vec<String> = Vec::new();
        for both in &self.smc_paths {
            let (out, back) = (word(both.client.window), word(both.server.window));
            let path = if out == back { out.into() } else { format!("{out} out, {back} back") };
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
        paths.join(" or ")
    }

    /// The counts of both ends together, medians over the rounds: word, unit, value.
    fn counts(&self) -> Vec<(&'static str, &'static str, f64)> {
        let [kicks, wakes, commands] = match self.experiment.unit {
            Unit::MebibytesPerSecond => ["kicks/MiB", "wakes/MiB", "commands/MiB"],
            Unit::Microseconds => ["kicks/round trip", "wakes/round trip", "commands/round trip"],
            Unit::ConnectionsPerSecond => {
                ["kicks/connection", "wakes/connection", "commands/connection"]
            }
            _ => return Vec::new(),
        };
        let of = |word, unit, value: fn(&Kicks) -> f64| {
            Some((word, unit, median(self.kicks.iter().map(value))?))
        };
        let all = [
            of("kicks", kicks, |counts| counts.kicks),
            of("wakes", wakes, |counts| counts.wakes),
            of("commands", commands, |counts| counts.commands),
        ];
        all.into_iter().flatten().collect()
    }

    fn remote_rows(&self) -> Vec<Row> {
        let name = self.experiment.rows.first().map(|(name, _)| name.clone()).unwrap_or_default();
        let row = Row {
            measure: name.clone(),
            unit: self.experiment.unit.name(),
            runs: self.of(self.smc()).len(),
            path: self.path(),
            smc: self.median(self.smc()).map(rounded),
            tcp: self.median(TransportKind::Tcp).map(rounded),
            vsock: self.median(TransportKind::Vsock).map(rounded),
            ratio: self.ratio(self.smc(), TransportKind::Tcp).map(rounded),
            vsock_ratio: self.ratio(self.smc(), TransportKind::Vsock).map(rounded),
        };
        let mut rows = vec![row];
        for (what, unit, value) in self.counts() {
            rows.push(Row {
                measure: format!("{name}_{what}"),
                unit,
                runs: self.kicks.len(),
                path: self.path(),
                smc: Some(rounded(value)),
                tcp: None,
                vsock: None,
                ratio: None,
                vsock_ratio: None,
            });
        }
        rows
    }
}

/// Prints the JSON lines of an experiment.
///
/// # Errors
/// Standard output cannot be written.
pub(super) fn print_json(results: &Results) -> Result<(), CliError> {
    for row in results.remote_rows() {
        output::print(&to_line(&row)?)?;
    }
    Ok(())
}

/// Prints tables of all results. `processors`: of this machine and of the server.
///
/// # Errors
/// Standard output cannot be written.
pub(super) fn print_tables(
    all: &[Results],
    plan: &Plan,
    server: &str,
    processors: [usize; 2],
) -> Result<(), CliError> {
    let mut text = render(all);
    let [here, there] = processors;
    let _ = writeln!(
        text,
        "Medians of {} runs of {} s each between this machine ({here} processors) and {server} \
         ({there}),\ntransports taking turns. Against: how many times as much, or as fast (median \
         of the ratios within the rounds).",
        plan.rounds, plan.seconds,
    );
    text += &smc_paths(all);
    for results in all.iter().filter(|results| results.times.iter().any(|(_, t)| !t.is_empty())) {
        text += &render_times(results);
    }
    output::print(&text)
}

fn render(all: &[Results]) -> String {
    let vsock = all.iter().any(|results| !results.of(TransportKind::Vsock).is_empty());
    let mut header = vec!["", "unit", "SMC-D", "by", "TCP", "SMC-D\nagainst TCP"];
    header.extend(vsock.then_some(["vsock", "SMC-D\nagainst vsock"]).into_iter().flatten());
    let mut table = table(&header);
    for (results, row) in
        all.iter().flat_map(|r| r.remote_rows().into_iter().map(move |row| (r, row)))
    {
        let title = match row.unit.split_once('/') {
            Some(("kicks", _)) => "  kicks of the devices, both ends",
            Some(("wakes", _)) => "  wakes by the devices, both ends",
            Some(("commands", _)) => "  control commands, both ends",
            _ => &results.experiment.title,
        };
        let mut cells = vec![
            Cell::new(title),
            Cell::new(row.unit),
            number(row.smc),
            Cell::new(&row.path),
            number(row.tcp),
            times(row.ratio),
        ];
        if vsock {
            cells.extend([number(row.vsock), times(row.vsock_ratio)]);
        }
        table.add_row(cells);
    }
    format!("{table}\n")
}

/// Fabric and GIDs of the last SMC connection.
fn smc_paths(all: &[Results]) -> String {
    match all.iter().flat_map(|results| &results.smc_paths).last() {
        Some(both) => format!(
            "SMC-D went over fabric {}, in the last run between GID {} (here) and GID {}.\n",
            both.client.chid, both.client.gid, both.client.peer,
        ),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::measure::{Overrides, between};
    use crate::perf::run::SmcPaths;
    use crate::transport::SmcPath;

    fn results(transports: &[TransportKind]) -> Results {
        let experiment = between("bulk", &Overrides::default(), transports).unwrap();
        let values = [TransportKind::Smc, TransportKind::Tcp, TransportKind::Vsock].into_iter();
        let values = values.zip([vec![800.0, 900.0], vec![100.0, 90.0], vec![200.0, 450.0]]);
        let values = values.filter(|(transport, _)| transports.contains(transport)).collect();
        let end = |gid: &str, peer: &str| SmcPath {
            window: true,
            chid: "ff00".into(),
            gid: gid.into(),
            peer: peer.into(),
        };
        let both = SmcPaths { client: end("aa", "bb"), server: end("bb", "aa") };
        let commands = 0.0;
        let kicks = [(0.25, 1.0), (0.75, 2.0)];
        let kicks = kicks.map(|(kicks, wakes)| Kicks { kicks, wakes, commands });
        Results {
            kicks: kicks.to_vec(),
            smc_paths: vec![both.clone(), both],
            ..Results::empty(experiment, values)
        }
    }

    #[test]
    fn json_has_the_promised_keys_and_kicks_have_lines_of_their_own() {
        let rows =
            results(&[TransportKind::Smc, TransportKind::Tcp, TransportKind::Vsock]).remote_rows();
        let lines: Vec<_> = rows.iter().map(|row| to_line(row).unwrap()).collect();
        assert_eq!(
            lines[0],
            "{\"measure\":\"bulk\",\"unit\":\"MiB/s\",\"runs\":2,\"path\":\"window\",\"smc\":850.0,\
             \"tcp\":95.0,\"vsock\":325.0,\"ratio\":9.0,\"vsock_ratio\":3.0}\n"
        );
        assert_eq!(
            lines[1],
            "{\"measure\":\"bulk_kicks\",\"unit\":\"kicks/MiB\",\"runs\":2,\"path\":\"window\",\
             \"smc\":0.5,\"tcp\":null,\"vsock\":null,\"ratio\":null,\"vsock_ratio\":null}\n"
        );
        assert!(lines[2].contains("\"bulk_wakes\"") && lines[2].contains("\"smc\":1.5"));
    }

    #[test]
    fn the_table_tells_what_carried_smc() {
        let mut mixed = results(&[TransportKind::Smc, TransportKind::Tcp]);
        mixed.smc_paths[1].server.window = false;
        let text = render(std::slice::from_ref(&mixed)) + &smc_paths(&[mixed]);
        assert!(text.contains("window or window out, move back"), "{text}");
        assert!(text.contains("fabric ff00") && text.contains("GID aa (here)"), "{text}");
        assert!(!text.contains("vsock"), "{text}");
    }
}
