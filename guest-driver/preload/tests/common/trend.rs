// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether a resource grows: the slope of counts at many moments, not the difference of two.

/// Parts of a series, in each of which a count has to grow.
const PARTS: usize = 3;

/// By how much a series of (moment, count) grows from its first moment to its last, at the rate of
/// the third with the least growth, and no more than on the whole. A reverted growth does not
/// count, nor does a step or two, as when an allocator asks for more for the largest request so
/// far. A growth coming again and again counts.
pub(crate) fn growth(series: &[(f64, f64)]) -> f64 {
    let last = series.len().saturating_sub(1);
    let ends = (0..=PARTS).map(|part| part * last / PARTS).collect::<Vec<_>>();
    let parts = ends.windows(2).filter_map(|ends| series.get(ends[0]..=ends[1]));
    let least = parts.map(slope).fold(slope(series), f64::min);
    match (series.first(), series.last()) {
        (Some(first), Some(last)) => least * (last.0 - first.0),
        _ => 0.0,
    }
}

/// The median of the slopes between all pairs (Theil and Sen).
fn slope(series: &[(f64, f64)]) -> f64 {
    let mut slopes: Vec<f64> = Vec::new();
    for (at, earlier) in series.iter().enumerate() {
        let later = series.iter().skip(at + 1).filter(|later| later.0 > earlier.0);
        slopes.extend(later.map(|later| (later.1 - earlier.1) / (later.0 - earlier.0)));
    }
    slopes.sort_by(f64::total_cmp);
    slopes.get(slopes.len() / 2).copied().unwrap_or(0.0)
}

#[test]
fn what_comes_again_and_again_grows() {
    let every_third: Vec<_> = (0..60).map(|at| (f64::from(at), f64::from(7 + at / 3))).collect();
    assert!((18.0..22.0).contains(&growth(&every_third)), "{}", growth(&every_third));
}

#[test]
fn what_comes_and_goes_or_comes_once_does_not_grow() {
    let by_turns: Vec<_> = (0..60).map(|at| (f64::from(at), f64::from(at * 7 % 13))).collect();
    assert!(growth(&by_turns).abs() < 1.0, "{}", growth(&by_turns));
    for moments in [9, 60] {
        for (first, second) in (0..moments).flat_map(|first| [(first, first), (first, moments - 1)])
        {
            let steps = |at| f64::from((at >= first) as i32 + (at >= second) as i32);
            let steps = (0..moments).map(|at| (f64::from(at), 4000.0 * steps(at)));
            assert_eq!(growth(&steps.collect::<Vec<_>>()), 0.0, "{first}, {second} of {moments}");
        }
    }
    assert_eq!(growth(&[]), 0.0);
    assert_eq!(growth(&[(1.0, 5.0)]), 0.0);
}
