// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Curves on logarithmic axes.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::{Area, MARGIN, PANEL, bar, color, failed, label, line, scale, write};
use crate::error::CliError;
use crate::perf::job::TransportKind;

/// A curve.
#[derive(Clone, Debug)]
pub(in crate::perf) struct Curve {
    /// Name of the curve in the legend.
    pub(in crate::perf) name: String,
    /// The transport, for the colour.
    pub(in crate::perf) transport: TransportKind,
    /// Points of the curve, from left to right; all values are above zero.
    pub(in crate::perf) points: Vec<(f64, f64)>,
}

/// Curves in one pair of axes.
#[derive(Clone, Debug)]
pub(in crate::perf) struct Panel {
    pub(in crate::perf) title: String,
    /// Label of the vertical axis.
    pub(in crate::perf) unit: String,
    /// Label of the horizontal axis.
    pub(in crate::perf) x: String,
    pub(in crate::perf) curves: Vec<Curve>,
}

/// A logarithmic axis, from one power of ten to another.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LogAxis {
    low: f64,
    high: f64,
}

impl LogAxis {
    /// The axis for these values.
    fn of(values: impl Iterator<Item = f64> + Clone) -> LogAxis {
        let low = values.clone().fold(f64::INFINITY, f64::min).log10().floor();
        let high = values.fold(0.0, f64::max).log10().ceil();
        match low.is_finite() && high.is_finite() {
            true => LogAxis { low, high: high.max(low + 1.0) },
            false => LogAxis { low: 0.0, high: 1.0 },
        }
    }

    /// Where a value lies, 0 to 1.
    fn at(&self, value: f64) -> f64 {
        (value.log10() - self.low) / (self.high - self.low)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> + use<> {
        (self.low as i32..=self.high as i32).map(|power| 10f64.powi(power))
    }
}

pub(super) fn panel<DB: DrawingBackend>(
    area: &Area<DB>,
    (x0, y0): (i32, i32),
    shown: &Panel,
) -> Result<(), CliError> {
    let left_top = |size| label(size, HPos::Left, VPos::Top);
    write(area, &shown.title, (x0 + 20, y0 + 8), left_top(16))?;
    write(area, &shown.unit, (x0 + 20, y0 + 30), left_top(16))?;
    let (left, right) = (x0 + MARGIN.0, x0 + PANEL.0 - MARGIN.2);
    let (top, bottom) = (y0 + MARGIN.1, y0 + PANEL.1 - MARGIN.3);
    let points = || shown.curves.iter().flat_map(|curve| &curve.points);
    let (across, up) = (LogAxis::of(points().map(|p| p.0)), LogAxis::of(points().map(|p| p.1)));
    let x = |value| left + (f64::from(right - left) * across.at(value)).round() as i32;
    let y = |value| bottom - (f64::from(bottom - top) * up.at(value)).round() as i32;
    let grey = RGBColor(220, 220, 220);
    for tick in up.ticks() {
        line(area, [(left, y(tick)), (right, y(tick))], grey)?;
        write(area, &scale(tick), (left - 6, y(tick)), label(16, HPos::Right, VPos::Center))?;
    }
    for tick in across.ticks() {
        line(area, [(x(tick), top), (x(tick), bottom)], grey)?;
        write(area, &scale(tick), (x(tick), bottom + 8), label(16, HPos::Center, VPos::Top))?;
    }
    write(area, &shown.x, (right, bottom + 28), label(16, HPos::Right, VPos::Top))?;
    let mut legend = left;
    for curve in &shown.curves {
        let color = color(curve.transport);
        let places: Vec<_> = curve.points.iter().map(|(n, value)| (x(*n), y(*value))).collect();
        for place in &places {
            area.draw(&Circle::new(*place, 4, color.filled())).map_err(failed)?;
        }
        let path = PathElement::new(places, color.stroke_width(2));
        area.draw(&path).map_err(failed)?;
        bar(area, [(legend, bottom + 54), (legend + 16, bottom + 70)], color)?;
        let at = (legend + 24, bottom + 62);
        write(area, &curve.name, at, label(16, HPos::Left, VPos::Center))?;
        legend += 40 + 8 * curve.name.len() as i32;
    }
    line(area, [(left, top), (left, bottom)], BLACK)?;
    line(area, [(left, bottom), (right, bottom)], BLACK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_goes_from_a_power_of_ten_to_another() {
        let axis = LogAxis::of([3.0, 250.0].into_iter());
        assert_eq!(axis.ticks().collect::<Vec<_>>(), [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!([axis.at(1.0), axis.at(1000.0)], [0.0, 1.0]);
        assert_eq!(LogAxis::of([10.0].into_iter()).ticks().count(), 2);
        assert_eq!(LogAxis::of([].into_iter()).ticks().count(), 2, "nothing was measured");
    }
}
