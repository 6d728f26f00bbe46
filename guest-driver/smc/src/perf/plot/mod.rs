// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results as a picture: a panel per measure, a bar per transport, a dot per run; or curves.

pub(super) mod curves;

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::job::TransportKind;
use super::report::{LOADED, human};
use super::run::Results;
use crate::error::CliError;
use curves::Panel;

/// Pixels of a panel, sides and height.
const PANEL: (i32, i32) = (460, 400);
/// Height of the title above all panels.
const TITLE: i32 = 90;
/// Panels side by side at most.
const COLUMNS: usize = 3;
/// Around the axes of a panel: left, top, right, bottom.
const MARGIN: (i32, i32, i32, i32) = (80, 62, 20, 96);

/// Whether the file can be drawn: its name ends in `.svg`.
pub(super) fn is_drawable(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "svg")
}

fn failed(error: impl std::fmt::Display) -> CliError {
    CliError::Plot(error.to_string())
}

/// A file for a picture, made before any measurement.
#[derive(Debug)]
pub(super) struct PlotFile {
    path: PathBuf,
    file: File,
}

impl PlotFile {
    /// Makes the file, or empties it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn create(path: &Path) -> Result<PlotFile, CliError> {
        let cannot = CliError::io(format!("cannot write {}", path.display()));
        Ok(PlotFile { file: File::create(path).map_err(cannot)?, path: path.into() })
    }

    /// Draws all results.
    ///
    /// # Errors
    /// There is nothing to draw, or the file cannot be written.
    pub(super) fn draw(self, all: &[Results]) -> Result<(), CliError> {
        if all.is_empty() {
            return Err(failed("there is nothing to draw: name a measure other than memory"));
        }
        let all: Vec<Results> =
            all.iter().flat_map(|one| [Some(one.clone()), one.with_p99()]).flatten().collect();
        self.paint(&Picture::Bars(&all))
    }

    /// Draws curves.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn draw_curves(self, panels: &[Panel], runs: usize) -> Result<(), CliError> {
        self.paint(&Picture::Curves(panels, runs))
    }

    fn paint(mut self, picture: &Picture<'_>) -> Result<(), CliError> {
        let columns = picture.len().clamp(1, COLUMNS);
        let rows = picture.len().div_ceil(columns);
        // A single panel needs room for the legend.
        let width = (columns as i32 * PANEL.0).max(900) as u32;
        let size = (width, (TITLE + rows as i32 * PANEL.1) as u32);
        let mut text = String::new();
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        paint(&area, picture, columns)?;
        drop(area);
        let cannot = CliError::io(format!("cannot write {}", self.path.display()));
        self.file.write_all(text.as_bytes()).map_err(cannot)
    }
}

/// The contents of the picture.
enum Picture<'a> {
    Bars(&'a [Results]),
    /// Curves with points that are medians of the given number of runs.
    Curves(&'a [Panel], usize),
}

impl Picture<'_> {
    /// Number of panels.
    fn len(&self) -> usize {
        match self {
            Picture::Bars(all) => all.len(),
            Picture::Curves(panels, _) => panels.len(),
        }
    }
}

/// The date, machine and version of the measurement.
fn provenance() -> String {
    let system = rustix::system::uname();
    let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    format!(
        "{}, {}, Linux {}, {} processors, smc {}",
        date(now.map_or(0, |since| since.as_secs())),
        text(system.nodename()),
        text(system.release()),
        std::thread::available_parallelism().map_or(0, |n| n.get()),
        env!("CARGO_PKG_VERSION"),
    )
}

/// The date of a time since 1970, as YYYY-MM-DD.
fn date(seconds: u64) -> String {
    // Days since 0000-03-01, in eras of 400 years: a leap day is then the last day of its year.
    let days = seconds / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..10 => (year + era * 400, month + 3),
        _ => (year + era * 400 + 1, month - 9),
    };
    format!("{year:04}-{month:02}-{day:02}")
}

fn color(transport: TransportKind) -> RGBColor {
    // Distinguishable with colour blindness, and in grey.
    match transport {
        TransportKind::Smc | TransportKind::Window => RGBColor(0, 90, 170),
        TransportKind::Bound => RGBColor(0, 0, 0),
        TransportKind::Move => RGBColor(86, 180, 233),
        TransportKind::Tcp => RGBColor(213, 94, 0),
        TransportKind::Veth => RGBColor(160, 70, 0),
        TransportKind::Sockmap => RGBColor(150, 150, 0),
        TransportKind::FastOpen => RGBColor(204, 121, 167),
        TransportKind::Vsock => RGBColor(0, 158, 115),
        TransportKind::Unix => RGBColor(240, 180, 60),
        TransportKind::Ring => RGBColor(120, 120, 120),
    }
}

type Area<DB> = DrawingArea<DB, Shift>;

fn label<'a>(size: i32, h: HPos, v: VPos) -> TextStyle<'a> {
    ("sans-serif", size).into_font().color(&BLACK).pos(Pos::new(h, v))
}

fn write<DB: DrawingBackend>(
    area: &Area<DB>,
    text: &str,
    at: (i32, i32),
    style: TextStyle<'_>,
) -> Result<(), CliError> {
    area.draw(&Text::new(text.to_owned(), at, style)).map_err(failed)
}

fn bar<DB: DrawingBackend>(
    area: &Area<DB>,
    corners: [(i32, i32); 2],
    color: RGBColor,
) -> Result<(), CliError> {
    area.draw(&Rectangle::new(corners, color.filled())).map_err(failed)
}

fn line<DB: DrawingBackend>(
    area: &Area<DB>,
    ends: [(i32, i32); 2],
    color: RGBColor,
) -> Result<(), CliError> {
    area.draw(&PathElement::new(ends.to_vec(), color.stroke_width(1))).map_err(failed)
}

fn paint<DB: DrawingBackend>(
    area: &Area<DB>,
    picture: &Picture<'_>,
    columns: usize,
) -> Result<(), CliError> {
    area.fill(&WHITE).map_err(failed)?;
    let title = match picture {
        Picture::Bars(all) => {
            let first = all.first().and_then(|results| results.values.first());
            let runs = first.map_or(0, |v| v.1.len());
            format!("smc perf: SMC-D next to TCP, medians of {runs} runs (dots: single runs)")
        }
        Picture::Curves(_, runs) => {
            format!("smc perf scale: SMC-D next to TCP, medians of {runs} runs")
        }
    };
    let left_top = |size| label(size, HPos::Left, VPos::Top);
    write(area, &title, (20, 10), left_top(24))?;
    write(area, &provenance(), (20, 38), left_top(16))?;
    let place = |at: usize| {
        let (column, row) = ((at % columns) as i32, (at / columns) as i32);
        (column * PANEL.0, TITLE + row * PANEL.1)
    };
    match picture {
        Picture::Bars(all) => {
            legend(area, all)?;
            for (at, results) in all.iter().enumerate() {
                panel(area, place(at), results)?;
            }
        }
        Picture::Curves(panels, _) => {
            for (at, shown) in panels.iter().enumerate() {
                curves::panel(area, place(at), shown)?;
            }
        }
    }
    area.present().map_err(failed)
}

fn legend<DB: DrawingBackend>(area: &Area<DB>, all: &[Results]) -> Result<(), CliError> {
    let mut x = 20;
    for transport in TransportKind::ALL {
        if all.iter().any(|results| !results.of(transport).is_empty()) {
            bar(area, [(x, 64), (x + 16, 80)], color(transport))?;
            write(area, transport.title(), (x + 24, 72), label(16, HPos::Left, VPos::Center))?;
            x += 46 + 10 * transport.title().len() as i32;
        }
    }
    Ok(())
}

fn panel<DB: DrawingBackend>(
    area: &Area<DB>,
    (x0, y0): (i32, i32),
    results: &Results,
) -> Result<(), CliError> {
    let unit = results.experiment.unit;
    let better = if unit.is_time() { "less is better" } else { "more is better" };
    write(area, &results.experiment.title, (x0 + 20, y0 + 8), label(16, HPos::Left, VPos::Top))?;
    let (left, right) = (x0 + MARGIN.0, x0 + PANEL.0 - MARGIN.2);
    let (top, bottom) = (y0 + MARGIN.1, y0 + PANEL.1 - MARGIN.3);
    let highest = results.values.iter().flat_map(|(_, v)| v).copied().fold(0.0, f64::max);
    let axis = Axis::up_to(highest);
    let y = |value: f64| bottom - ((bottom - top) as f64 * value / axis.end).round() as i32;
    for tick in axis.ticks() {
        line(area, [(left, y(tick)), (right, y(tick))], RGBColor(220, 220, 220))?;
        write(area, &scale(tick), (left - 6, y(tick)), label(16, HPos::Right, VPos::Center))?;
    }
    write(
        area,
        &format!("{}, {better}", unit.name()),
        (x0 + 20, y0 + 30),
        label(16, HPos::Left, VPos::Top),
    )?;
    let shown: Vec<_> = results.values.iter().filter(|(_, v)| !v.is_empty()).collect();
    let slot = (right - left) / shown.len().max(1) as i32;
    for (at, (transport, values)) in shown.into_iter().enumerate() {
        let Some(median) = results.median(*transport) else { continue };
        let middle = left + slot * at as i32 + slot / 2;
        let half = (slot / 3).min(34);
        bar(area, [(middle - half, y(median)), (middle + half, bottom)], color(*transport))?;
        for value in values {
            let dot = Circle::new((middle, y(*value)), 2, BLACK.mix(0.6).filled());
            area.draw(&dot).map_err(failed)?;
        }
        let processor_time = results.processor_time(*transport).map(human).unwrap_or_default();
        let lines = [short(*transport), &human(median), &processor_time];
        for (line, text) in lines.into_iter().enumerate() {
            let at = (middle, bottom + 8 + 18 * line as i32);
            write(area, text, at, label(16, HPos::Center, VPos::Top))?;
        }
    }
    if let Some(others) = results.others() {
        let (unit, _) = results.experiment.unit.processor_time(results.experiment.size);
        let mut captions = vec![format!("last line: processor time, {unit}")];
        if others >= LOADED {
            captions.push(format!("trust no figure: others used {:.0} %", others * 100.0));
        }
        // One below the other: side by side, the captions are longer than a panel.
        for (line, text) in captions.iter().enumerate() {
            let at = (x0 + 20, bottom + 62 + 16 * line as i32);
            write(area, text, at, label(16, HPos::Left, VPos::Top))?;
        }
    }
    line(area, [(left, top), (left, bottom)], BLACK)?;
    line(area, [(left, bottom), (right, bottom)], BLACK)
}

fn short(transport: TransportKind) -> &'static str {
    match transport {
        TransportKind::Smc => "SMC-D",
        TransportKind::Window => "window",
        TransportKind::Bound => "bound",
        TransportKind::Move => "move",
        TransportKind::Tcp => "TCP",
        TransportKind::Veth => "veth",
        TransportKind::Sockmap => "sockmap",
        TransportKind::FastOpen => "fast open",
        TransportKind::Vsock => "vsock",
        TransportKind::Unix => "Unix",
        TransportKind::Ring => "raw",
    }
}

/// A round number, short enough for the side of an axis.
fn scale(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{} M", v / 1e6),
        v if v >= 1e4 => format!("{} k", v / 1e3),
        v => format!("{}", (v * 1e6).round() / 1e6),
    }
}

/// A scale from zero in round steps.
struct Axis {
    end: f64,
    step: f64,
}

impl Axis {
    fn up_to(highest: f64) -> Axis {
        let highest = if highest > 0.0 { highest } else { 1.0 };
        let magnitude = 10f64.powf((highest / 4.0).log10().floor());
        let rounds = [1.0, 2.0, 2.5, 5.0, 10.0].map(|factor| factor * magnitude);
        let step = rounds.into_iter().find(|step| step * 5.0 >= highest);
        let step = step.unwrap_or(highest);
        Axis { end: (highest / step).ceil() * step, step }
    }

    fn ticks(&self) -> impl Iterator<Item = f64> + '_ {
        let count = (self.end / self.step).round() as u32;
        (0..=count).map(|n| f64::from(n) * self.step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::measure::{Overrides, by_name};

    fn results() -> Results {
        let experiment = by_name("bulk", &Overrides::default()).unwrap();
        let values = TransportKind::ALL.map(|transport| (transport, vec![900.0, 1000.0, 1100.0]));
        Results::empty(experiment, values.to_vec())
    }

    #[test]
    fn an_axis_has_three_to_six_round_steps() {
        for highest in [0.013, 0.9, 1.0, 7.3, 99.0, 12_345.0, 7.1e6] {
            let axis = Axis::up_to(highest);
            let ticks: Vec<f64> = axis.ticks().collect();
            assert!((3..=6).contains(&ticks.len()), "{highest}: {ticks:?}");
            assert!(axis.end >= highest && axis.end < highest * 2.0, "{highest}: {ticks:?}");
        }
    }

    #[test]
    fn numbers_beside_an_axis_are_short() {
        assert_eq!(
            [0.0, 0.25, 0.1 + 0.2, 2500.0, 12_500.0, 2.5e6].map(scale),
            ["0", "0.25", "0.3", "2500", "12.5 k", "2.5 M"]
        );
    }

    #[test]
    fn a_plot_has_title_units_and_legend() {
        let own = smc_test_support::TestDir::new();
        let path = own.path("plot.svg");
        PlotFile::create(&path).unwrap().draw(&[results(), results()]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for word in
            [&provenance()[..], "medians of 3 runs", "MiB/s, more is better", "TCP", "1 000"]
        {
            assert!(text.contains(word), "{word}");
        }
    }

    #[test]
    fn a_caption_is_no_longer_than_its_panel() {
        let own = smc_test_support::TestDir::new();
        let path = own.path("plot.svg");
        let mut loaded = results();
        let used = r#"{"work": 1.0, "ends": 0.5, "daemon": 0.0, "others": 0.71}"#;
        loaded.usages = vec![(TransportKind::Tcp, vec![serde_json::from_str(used).unwrap()])];
        PlotFile::create(&path).unwrap().draw(&[loaded.clone(), loaded]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('<')).collect();
        let has = |word: &str| lines.iter().filter(|line| line.contains(word)).count();
        assert_eq!([has("processor time"), has("others used 71 %")], [2, 2], "{lines:?}");
        // A letter takes half of the height of a line, or less.
        let most = PANEL.0 as usize / 8;
        let captions = lines.iter().filter(|line| line.contains("last line"));
        assert!(captions.clone().all(|line| line.len() <= most), "{lines:?}");
    }

    #[test]
    fn only_a_name_that_ends_in_svg_is_drawn() {
        assert!(is_drawable(Path::new("a.b/plot.svg")));
        for name in ["plot", "plot.png", "plot.SVG", "svg", ".svg", "svg/plot"] {
            assert!(!is_drawable(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        let own = smc_test_support::TestDir::new();
        let path = own.path("empty.svg");
        let empty = PlotFile::create(&path).unwrap().draw(&[]);
        assert!(matches!(empty, Err(CliError::Plot(_))));
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error_before_anything_is_measured() {
        let error = PlotFile::create(Path::new("/nowhere/plot.svg")).unwrap_err();
        assert!(error.to_string().contains("cannot write /nowhere/plot.svg"), "{error}");
    }

    #[test]
    fn a_date_is_that_of_the_calendar() {
        let dates = [0, 951_782_400, 951_868_800, 1_795_544_356].map(date);
        assert_eq!(dates, ["1970-01-01", "2000-02-29", "2000-03-01", "2026-11-24"]);
    }
}
