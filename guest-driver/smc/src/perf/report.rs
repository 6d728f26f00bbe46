//! Results as tables and as JSON lines.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;

use super::job::{Percentiles, TransportKind};
use super::memory::Memory;
use super::run::{Plan, Results};
use crate::error::CliError;
use crate::output;

/// One JSON line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    measure: String,
    unit: &'static str,
    runs: usize,
    smc: Option<f64>,
    tcp: Option<f64>,
    unix: Option<f64>,
    limit: Option<f64>,
    ratio: Option<f64>,
}

/// The median; of an even number of values, the mean of the two in the middle.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = *sorted.get((sorted.len() - 1) / 2)?;
    Some((lower + upper) / 2.0)
}

/// Rounds to five significant digits; the measurement has no more.
pub(super) fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

/// A number for tables: three significant digits, with spaces between the thousands.
pub(super) fn human(value: f64) -> String {
    if value < 100.0 {
        let decimals = if value < 10.0 { 2 } else { 1 };
        return format!("{value:.decimals$}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

impl Results {
    pub(super) fn of(&self, transport: TransportKind) -> &[f64] {
        let found = self.values.iter().find(|(c, _)| *c == transport);
        found.map(|(_, values)| values.as_slice()).unwrap_or_default()
    }

    /// The median over the rounds.
    pub(super) fn median(&self, transport: TransportKind) -> Option<f64> {
        median(self.of(transport).iter().copied())
    }

    /// Median of the ratios within the rounds; more than 1: `transport` is better than `other`.
    pub(super) fn ratio(&self, transport: TransportKind, other: TransportKind) -> Option<f64> {
        let pairs = self.of(transport).iter().zip(self.of(other));
        let time = self.experiment.unit.is_time();
        median(pairs.map(|(own, other)| if time { other / own } else { own / other }))
    }

    fn rows(&self) -> impl Iterator<Item = Row> + '_ {
        self.experiment.rows.iter().map(|(name, transport)| Row {
            measure: name.clone(),
            unit: self.experiment.unit.name(),
            runs: self.of(*transport).len(),
            smc: self.median(*transport).map(rounded),
            tcp: self.median(TransportKind::Tcp).map(rounded),
            unix: self.median(TransportKind::Unix).map(rounded),
            limit: self.median(TransportKind::Ring).map(rounded),
            ratio: self.ratio(*transport, TransportKind::Tcp).map(rounded),
        })
    }

    /// Percentiles of a transport, each the median over the rounds; the longest is the longest.
    fn percentiles(&self, transport: TransportKind) -> Option<Percentiles> {
        let (_, rounds) = self.times.iter().find(|(c, _)| *c == transport)?;
        let of = |pick: fn(&Percentiles) -> f64| median(rounds.iter().map(pick));
        Some(Percentiles {
            p50: of(|t| t.p50)?,
            p90: of(|t| t.p90)?,
            p99: of(|t| t.p99)?,
            p999: of(|t| t.p999)?,
            max: rounds.iter().map(|t| t.max).fold(0.0, f64::max),
        })
    }
}

pub(super) fn to_line(row: &impl Serialize) -> Result<String, CliError> {
    let mut line = serde_json::to_string(row).map_err(|e| CliError::io("JSON")(e.into()))?;
    line.push('\n');
    Ok(line)
}

/// Prints a JSON object for each measure of an experiment.
///
/// # Errors
/// Standard output cannot be written.
pub(super) fn print_json(results: &Results) -> Result<(), CliError> {
    for row in results.rows() {
        output::print(&to_line(&row)?)?;
    }
    Ok(())
}

/// Prints memory as JSON objects.
///
/// # Errors
/// Standard output cannot be written.
pub(super) fn print_memory_json(memory: Option<&Memory>) -> Result<(), CliError> {
    for (measure, unit, value) in memory.into_iter().flat_map(Memory::lines) {
        let row = Row {
            measure: measure.into(),
            unit,
            runs: 1,
            smc: Some(rounded(value)),
            tcp: None,
            unix: None,
            limit: None,
            ratio: None,
        };
        output::print(&to_line(&row)?)?;
    }
    Ok(())
}

pub(super) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    table.set_header(header.iter().map(Cell::new));
    table
}

pub(super) fn number(value: Option<f64>) -> Cell {
    Cell::new(value.map_or_else(|| "-".into(), human)).set_alignment(CellAlignment::Right)
}

pub(super) fn times(value: Option<f64>) -> Cell {
    let text = value.map_or_else(|| "-".into(), |value| format!("{} x", human(value)));
    Cell::new(text).set_alignment(CellAlignment::Right)
}

/// Prints tables of all results.
///
/// # Errors
/// Standard output cannot be written.
pub(super) fn print_tables(
    all: &[Results],
    memory: Option<&Memory>,
    plan: &Plan,
) -> Result<(), CliError> {
    let mut text = String::new();
    if !all.is_empty() {
        text += &render(all);
        let _ = writeln!(
            text,
            "Medians of {} runs of {} s each, transports taking turns, on {} processors. Against \
             TCP: how many times\nas much, or as fast (median of the ratios within the rounds).",
            plan.rounds,
            plan.seconds,
            std::thread::available_parallelism().map_or(0, |n| n.get()),
        );
    }
    for results in all.iter().filter(|results| results.times.iter().any(|(_, t)| !t.is_empty())) {
        text += &render_times(results);
    }
    for (measure, unit, value) in memory.into_iter().flat_map(Memory::lines) {
        let _ = writeln!(text, "{measure}: {} {unit}", human(value));
    }
    output::print(&text)
}

fn render(all: &[Results]) -> String {
    let mut table = table(&[
        "",
        "unit",
        "SMC-D\nwindow",
        "SMC-D\nmove",
        "TCP",
        "Unix\nsocket",
        "raw\nmemory",
        "window\nagainst TCP",
        "move\nagainst TCP",
    ]);
    for results in all {
        let mut row =
            vec![Cell::new(&results.experiment.title), Cell::new(results.experiment.unit.name())];
        row.extend(TransportKind::LOCAL.map(|transport| number(results.median(transport))));
        row.push(times(results.ratio(TransportKind::Window, TransportKind::Tcp)));
        row.push(times(results.ratio(TransportKind::Move, TransportKind::Tcp)));
        table.add_row(row);
    }
    format!("{table}\n")
}

pub(super) fn render_times(results: &Results) -> String {
    let title = format!("{}, us", results.experiment.title);
    let mut table = table(&[&title, "p50", "p90", "p99", "p99.9", "max"]);
    for transport in TransportKind::ALL {
        if let Some(p) = results.percentiles(transport) {
            let mut row = vec![Cell::new(transport.title())];
            row.extend([p.p50, p.p90, p.p99, p.p999, p.max].map(|us| number(Some(us))));
            table.add_row(row);
        }
    }
    format!("\n{table}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::measure::{Overrides, by_name};

    fn results(name: &str, smc: &[f64], tcp: &[f64]) -> Results {
        let experiment = by_name(name, &Overrides::default()).unwrap();
        let values =
            vec![(TransportKind::Window, smc.to_vec()), (TransportKind::Tcp, tcp.to_vec())];
        Results { experiment, values, times: Vec::new(), kicks: Vec::new(), smc_paths: Vec::new() }
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median([]), None);
    }

    #[test]
    fn a_ratio_is_taken_within_rounds_and_more_is_better() {
        // The rounds differ by a factor; medians of the columns would give 10 / 4.
        let rates = results("rate_100b", &[10.0, 100.0, 8.0], &[5.0, 20.0, 4.0]);
        assert_eq!(rates.ratio(TransportKind::Window, TransportKind::Tcp), Some(2.0));
        let times = results("rtt_spin", &[1.0], &[20.0]);
        assert_eq!(times.ratio(TransportKind::Window, TransportKind::Tcp), Some(20.0));
    }

    #[test]
    fn json_has_exactly_the_promised_keys_and_null_where_nothing_was_measured() {
        let row = results("short_conn", &[1000.0 / 3.0], &[1000.0]).rows().next().unwrap();
        let line = to_line(&row).unwrap();
        assert_eq!(
            line,
            "{\"measure\":\"short_conn\",\"unit\":\"connections/s\",\"runs\":1,\"smc\":333.33,\
             \"tcp\":1000.0,\"unix\":null,\"limit\":null,\"ratio\":0.33333}\n"
        );
    }

    #[test]
    fn numbers_for_people_have_three_digits_or_thousands() {
        let texts = [0.123, 9.876, 12.34, 123.4, 1234.5, 12_345_678.0].map(human);
        assert_eq!(texts, ["0.12", "9.88", "12.3", "123", "1 234", "12 345 678"]);
    }
}
