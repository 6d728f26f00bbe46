// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results as tables and as JSON lines.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;

use super::job::{Percentiles, Program, TransportKind};
use super::memory::Memory;
use super::run::{Plan, Results};
use super::usage::Usage;
use crate::error::CliError;
use crate::output;

/// From this share of the processors' time on, other processes may have changed the results.
pub(super) const LOADED: f64 = 0.1;

/// One JSON line.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Row {
    measure: String,
    unit: &'static str,
    runs: usize,
    smc: Option<f64>,
    tcp: Option<f64>,
    unix: Option<f64>,
    limit: Option<f64>,
    /// Of connections bound to their device, with `--bound`.
    #[serde(flatten)]
    bound: Option<Bound>,
    /// Of the peers of `--beside`, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    beside: BTreeMap<&'static str, Beside>,
    ratio: Option<f64>,
    /// The middle half of the ratios.
    ratio_low: Option<f64>,
    ratio_high: Option<f64>,
    /// Processor time of both ends and the daemon.
    cpu_unit: Option<&'static str>,
    cpu_smc: Option<f64>,
    cpu_tcp: Option<f64>,
    cpu_unix: Option<f64>,
    cpu_ratio: Option<f64>,
    /// The share of the processors' time used by others.
    others: Option<f64>,
    /// The value of each run.
    samples: Samples,
}

/// The values of connections bound to their device, and the ratio of those that outlive it to them.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Bound {
    bound: f64,
    bound_ratio: f64,
    bound_ratio_low: f64,
    bound_ratio_high: f64,
    bound_samples: Vec<f64>,
}

/// The values of a peer of `--beside`, and the ratios of SMC-D to it.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Beside {
    value: f64,
    ratio: Option<f64>,
    cpu: Option<f64>,
    cpu_ratio: Option<f64>,
    samples: Vec<f64>,
}

/// The values of a measure's runs by transport, in the order of the measurements.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Samples {
    smc: Vec<f64>,
    tcp: Vec<f64>,
    unix: Vec<f64>,
    limit: Vec<f64>,
}

/// The median; of an even number of values, the mean of the two in the middle.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = *sorted.get((sorted.len() - 1) / 2)?;
    Some((lower + upper) / 2.0)
}

/// Where the middle half of the values begins and ends.
pub(super) fn middle_half(values: &[f64]) -> Option<[f64; 2]> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let quarter = sorted.len() / 4;
    Some([*sorted.get(quarter)?, *sorted.get(sorted.len().checked_sub(1 + quarter)?)?])
}

/// The ratios within the rounds; more than 1: `own` is better.
fn ratios(own: &[f64], other: &[f64], less_is_better: bool) -> Vec<f64> {
    let pairs = own.iter().zip(other);
    pairs.map(|(own, other)| if less_is_better { other / own } else { own / other }).collect()
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
        median(self.ratios(transport, other))
    }

    /// The ratios within the rounds.
    fn ratios(&self, transport: TransportKind, other: TransportKind) -> Vec<f64> {
        ratios(self.of(transport), self.of(other), self.experiment.unit.is_time())
    }

    /// The 99th percentile of each round.
    fn p99s(&self, transport: TransportKind) -> Vec<f64> {
        let found = self.times.iter().find(|(c, _)| *c == transport);
        found.map(|(_, times)| times.iter().map(|t| t.p99).collect()).unwrap_or_default()
    }

    /// The additional results of a latency: the 99th percentile instead of the median.
    pub(super) fn with_p99(&self) -> Option<Results> {
        (self.experiment.program == Program::Paced).then(|| {
            let mut p99 = self.clone();
            p99.experiment.title += ", p99";
            p99.experiment.rows.iter_mut().for_each(|(name, _)| name.push_str("_p99"));
            p99.values = self.values.iter().map(|(c, _)| (*c, self.p99s(*c))).collect();
            p99.usages.clear();
            p99
        })
    }

    /// Processor time of both ends and the daemon in each round, in the experiment's unit.
    fn processor_times(&self, transport: TransportKind) -> Vec<f64> {
        let (_, factor) = self.experiment.unit.processor_time(self.experiment.size);
        let found = self.usages.iter().find(|(c, _)| *c == transport);
        let of = |usages: &Vec<Usage>| usages.iter().map(|u| u.per_work() * factor).collect();
        found.map(|(_, usages)| of(usages)).unwrap_or_default()
    }

    /// The median over the rounds of [`Results::processor_times`].
    pub(super) fn processor_time(&self, transport: TransportKind) -> Option<f64> {
        median(self.processor_times(transport))
    }

    /// How many times as much processor time `other` needs: the median of the ratios within the
    /// rounds.
    fn processor_ratio(&self, transport: TransportKind, other: TransportKind) -> Option<f64> {
        let times = |transport| self.processor_times(transport);
        median(ratios(&times(transport), &times(other), true))
    }

    /// The share of the processors' time used by others, the median of all runs.
    pub(super) fn others(&self) -> Option<f64> {
        median(self.usages.iter().flat_map(|(_, usages)| usages).map(Usage::others))
    }

    fn rows(&self) -> Vec<Row> {
        let of = |results: &Results| {
            let rows = results.experiment.rows.iter();
            rows.map(|(name, transport)| results.row(name, *transport)).collect::<Vec<_>>()
        };
        let p99 = self.with_p99();
        of(self).into_iter().chain(p99.iter().flat_map(of)).collect()
    }

    /// The results of connections bound to their device, where the window was measured beside them.
    fn bound(&self, smc: TransportKind) -> Option<Bound> {
        if smc != TransportKind::Window {
            return None;
        }
        let ratios = self.ratios(smc, TransportKind::Bound);
        let [low, high] = middle_half(&ratios)?;
        Some(Bound {
            bound: rounded(self.median(TransportKind::Bound)?),
            bound_ratio: rounded(median(ratios)?),
            bound_ratio_low: rounded(low),
            bound_ratio_high: rounded(high),
            bound_samples: self.of(TransportKind::Bound).iter().copied().map(rounded).collect(),
        })
    }

    /// The results of the peers of `--beside`.
    fn beside(&self, smc: TransportKind) -> BTreeMap<&'static str, Beside> {
        let of = |peer| {
            Some(Beside {
                value: rounded(self.median(peer)?),
                ratio: self.ratio(smc, peer).map(rounded),
                cpu: self.processor_time(peer).map(rounded),
                cpu_ratio: self.processor_ratio(smc, peer).map(rounded),
                samples: self.of(peer).iter().copied().map(rounded).collect(),
            })
        };
        let peers = TransportKind::PEERS.into_iter();
        peers.filter_map(|(name, peer)| Some((name, of(peer)?))).collect()
    }

    fn row(&self, name: &str, smc: TransportKind) -> Row {
        let middle = middle_half(&self.ratios(smc, TransportKind::Tcp));
        let cpu = |transport| self.processor_time(transport).map(rounded);
        let unit = self.experiment.unit.processor_time(self.experiment.size).0;
        let of = |transport| self.of(transport).iter().copied().map(rounded).collect();
        Row {
            measure: name.into(),
            unit: self.experiment.unit.name(),
            runs: self.of(smc).len(),
            smc: self.median(smc).map(rounded),
            tcp: self.median(TransportKind::Tcp).map(rounded),
            unix: self.median(TransportKind::Unix).map(rounded),
            limit: self.median(TransportKind::Ring).map(rounded),
            bound: self.bound(smc),
            beside: self.beside(smc),
            ratio: self.ratio(smc, TransportKind::Tcp).map(rounded),
            ratio_low: middle.map(|[low, _]| rounded(low)),
            ratio_high: middle.map(|[_, high]| rounded(high)),
            cpu_unit: cpu(smc).map(|_| unit),
            cpu_smc: cpu(smc),
            cpu_tcp: cpu(TransportKind::Tcp),
            cpu_unix: cpu(TransportKind::Unix),
            cpu_ratio: self.processor_ratio(smc, TransportKind::Tcp).map(rounded),
            others: self.others().map(rounded),
            samples: Samples {
                smc: of(smc),
                tcp: of(TransportKind::Tcp),
                unix: of(TransportKind::Unix),
                limit: of(TransportKind::Ring),
            },
        }
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
            ..Row::default()
        };
        output::print(&to_line(&row)?)?;
    }
    Ok(())
}

pub(super) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(header.iter().map(Cell::new));
    table.set_content_arrangement(output::arrangement());
    table
}

/// A table without empty columns.
fn table_of(header: &[impl AsRef<str>], rows: Vec<Vec<Cell>>) -> Table {
    let is_empty = |cell: Option<&Cell>| cell.is_none_or(|cell| cell.content() == "-");
    let is_shown = |column: usize| !rows.iter().all(|row| is_empty(row.get(column)));
    let shown: Vec<bool> = (0..header.len()).map(is_shown).collect();
    let is_shown = |column: &usize| shown.get(*column).is_some_and(|shown| *shown);
    let titles = header.iter().enumerate().filter(|(at, _)| is_shown(at));
    let mut table = table(&titles.map(|(_, title)| title.as_ref()).collect::<Vec<_>>());
    for row in rows {
        let row = row.into_iter().enumerate().filter(|(at, _)| is_shown(at));
        table.add_row(row.map(|(_, cell)| cell));
    }
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
             TCP: how many times\nas much, or as fast: median of the ratios within the rounds \
             [their middle half].\n",
            plan.rounds,
            plan.seconds,
            std::thread::available_parallelism().map_or(0, |n| n.get()),
        );
        text += &render_processor_times(all);
    }
    for results in all.iter().filter(|results| results.times.iter().any(|(_, t)| !t.is_empty())) {
        text += &render_times(results);
    }
    for (measure, unit, value) in memory.into_iter().flat_map(Memory::lines) {
        let _ = writeln!(text, "{measure}: {} {unit}", human(value));
    }
    output::print(&text)
}

/// Titles of columns: the measure, its unit, the transports in two lines each, and the ratios.
fn header_of(first: &str, transports: &[TransportKind], ratios: &[&str]) -> Vec<String> {
    let titles = transports.iter().map(|transport| transport.title().replacen(' ', "\n", 1));
    let ratios = ratios.iter().map(|title| (*title).to_owned());
    [first.to_owned(), "unit".to_owned()].into_iter().chain(titles).chain(ratios).collect()
}

fn render(all: &[Results]) -> String {
    let against = ["window\nagainst bound", "window\nagainst TCP", "move\nagainst TCP"];
    let header = header_of("", &TransportKind::LOCAL, &against);
    let mut rows = Vec::new();
    let p99s: Vec<_> = all.iter().map(Results::with_p99).collect();
    for results in all.iter().zip(&p99s).flat_map(|(one, p99)| [Some(one), p99.as_ref()]).flatten()
    {
        let mut row =
            vec![Cell::new(&results.experiment.title), Cell::new(results.experiment.unit.name())];
        row.extend(TransportKind::LOCAL.map(|transport| number(results.median(transport))));
        row.push(scattered(&results.ratios(TransportKind::Window, TransportKind::Bound)));
        let against = [TransportKind::Window, TransportKind::Move];
        row.extend(against.map(|smc| scattered(&results.ratios(smc, TransportKind::Tcp))));
        rows.push(row);
    }
    format!("{}\n", table_of(&header, rows))
}

/// A median of ratios with their middle half.
fn scattered(ratios: &[f64]) -> Cell {
    let text = match (median(ratios.iter().copied()), middle_half(ratios)) {
        (Some(median), Some([low, high])) if ratios.len() > 1 => {
            format!("{} x [{} .. {}]", human(median), human(low), human(high))
        }
        (median, _) => return times(median),
    };
    Cell::new(text).set_alignment(CellAlignment::Right)
}

fn render_processor_times(all: &[Results]) -> String {
    use TransportKind::{Move, Ring, Tcp, Window};
    let shown: Vec<_> = TransportKind::LOCAL.into_iter().filter(|kind| *kind != Ring).collect();
    let over = ["TCP's over\nwindow's", "TCP's over\nmove's"];
    let header = header_of("processor time of\nboth ends and daemon", &shown, &over);
    let mut rows = Vec::new();
    for results in all {
        let (unit, _) = results.experiment.unit.processor_time(results.experiment.size);
        let mut row = vec![Cell::new(&results.experiment.title), Cell::new(unit)];
        row.extend(shown.iter().map(|transport| number(results.processor_time(*transport))));
        row.push(times(results.processor_ratio(Window, Tcp)));
        row.push(times(results.processor_ratio(Move, Tcp)));
        rows.push(row);
    }
    let others = median(all.iter().filter_map(Results::others)).unwrap_or(0.0);
    let table = table_of(&header, rows);
    format!("{table}\nOthers used {:.0} % of the processors meanwhile.\n", others * 100.0)
}

/// A warning if others were at work: the figures then mean little, and the ratios less than usual.
pub(super) fn load_warning(all: &[Results]) -> Option<String> {
    let loaded: Vec<_> = all
        .iter()
        .filter_map(|results| Some((results, results.others().filter(|share| *share >= LOADED)?)))
        .map(|(results, share)| format!("{} ({:.0} %)", results.experiment.title, share * 100.0))
        .collect();
    (!loaded.is_empty()).then(|| {
        format!(
            "smc: warning: other processes used the processors during these measures, so trust no \
             figure: {}",
            loaded.join("; ")
        )
    })
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
        Results::empty(experiment, values)
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
        let rows = results("short_conn", &[1000.0 / 3.0], &[1000.0]).rows();
        let line = to_line(&rows[0]).unwrap();
        assert_eq!(
            line,
            "{\"measure\":\"short_conn\",\"unit\":\"connections/s\",\"runs\":1,\"smc\":333.33,\
             \"tcp\":1000.0,\"unix\":null,\"limit\":null,\"ratio\":0.33333,\"ratio_low\":0.33333,\
             \"ratio_high\":0.33333,\"cpu_unit\":null,\"cpu_smc\":null,\"cpu_tcp\":null,\
             \"cpu_unix\":null,\"cpu_ratio\":null,\"others\":null,\
             \"samples\":{\"smc\":[333.33],\"tcp\":[1000.0],\"unix\":[],\"limit\":[]}}\n"
        );
    }

    #[test]
    fn a_table_leaves_out_columns_in_which_nothing_was_measured() {
        let rows = vec![
            vec![Cell::new("a"), number(None), number(Some(1.0))],
            vec![Cell::new("b"), number(None), number(None)],
        ];
        let text = table_of(&["", "never", "once"], rows).to_string();
        assert!(!text.contains("never") && text.contains("once") && text.contains("1.00"));
    }

    #[test]
    fn the_middle_half_leaves_out_a_quarter_at_each_end() {
        assert_eq!(middle_half(&[5.0, 1.0, 4.0, 2.0, 3.0]), Some([2.0, 4.0]));
        assert_eq!(middle_half(&[2.0, 1.0]), Some([1.0, 2.0]));
        assert_eq!(middle_half(&[7.0]), Some([7.0, 7.0]));
        assert_eq!(middle_half(&[]), None);
    }

    fn used(work: f64, busy: f64, others: f64) -> Usage {
        let usage = serde_json::json!({
            "work": work, "ends": busy * 0.75, "daemon": busy * 0.25, "others": others
        });
        serde_json::from_value(usage).unwrap()
    }

    #[test]
    fn processor_time_is_per_message_and_more_of_it_for_tcp_is_better() {
        let mut echo = results("echo_epoll", &[1.0, 1.0], &[1.0, 1.0]);
        echo.usages = vec![
            (TransportKind::Window, vec![used(1e6, 2.0, 0.0), used(1e6, 4.0, 0.5)]),
            (TransportKind::Tcp, vec![used(1e6, 8.0, 0.25), used(1e6, 8.0, 0.25)]),
        ];
        assert_eq!(echo.processor_time(TransportKind::Window), Some(3.0));
        let row = &echo.rows()[0];
        assert_eq!((row.cpu_unit, row.cpu_ratio), (Some("us/echo"), Some(3.0)));
        assert_eq!(row.others, Some(0.25));
        assert!(load_warning(&[echo.clone()]).unwrap().contains("(25 %)"));
        echo.usages.iter_mut().for_each(|(_, all)| *all = vec![used(1.0, 1.0, 0.09)]);
        assert_eq!(load_warning(&[echo]), None);
    }

    #[test]
    fn a_latency_has_a_median_and_a_p99() {
        let mut paced = results("latency_1k", &[10.0, 30.0], &[20.0, 30.0]);
        let times = |p99| Percentiles { p99, ..Percentiles::default() };
        paced.times = vec![
            (TransportKind::Window, vec![times(50.0), times(70.0)]),
            (TransportKind::Tcp, vec![times(200.0), times(140.0)]),
        ];
        let rows = paced.rows();
        assert_eq!((&*rows[0].measure, rows[0].ratio), ("latency_1k", Some(1.5)));
        assert_eq!((&*rows[1].measure, rows[1].ratio), ("latency_1k_p99", Some(3.0)));
        assert_eq!((rows[1].smc, rows[1].unit), (Some(60.0), "us"));
        assert!(results("rtt_spin", &[1.0], &[1.0]).with_p99().is_none());
    }

    #[test]
    fn numbers_for_people_have_three_digits_or_thousands() {
        let texts = [0.123, 9.876, 12.34, 123.4, 1234.5, 12_345_678.0].map(human);
        assert_eq!(texts, ["0.12", "9.88", "12.3", "123", "1 234", "12 345 678"]);
    }
}
