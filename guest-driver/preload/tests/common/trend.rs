// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether a resource grows: the slope of counts at many moments, not the difference of two.

/// By how much a series of (moment, count) grows from its first moment to its last: the median of
/// the slopes between all pairs (Theil and Sen), times the time. A change that reverts, or a single
/// step in the middle, does not count. Repeated steps do.
pub(crate) fn growth(series: &[(f64, f64)]) -> f64 {
    let (Some(first), Some(last)) = (series.first(), series.last()) else { return 0.0 };
    let mut slopes: Vec<f64> = Vec::new();
    for (at, earlier) in series.iter().enumerate() {
        let later = series.iter().skip(at + 1).filter(|later| later.0 > earlier.0);
        slopes.extend(later.map(|later| (later.1 - earlier.1) / (later.0 - earlier.0)));
    }
    slopes.sort_by(f64::total_cmp);
    slopes.get(slopes.len() / 2).map_or(0.0, |slope| slope * (last.0 - first.0))
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
    let step = |at: i32| (f64::from(at), if at < 15 { 4.0 } else { 12.0 });
    assert_eq!(growth(&(0..60).map(step).collect::<Vec<_>>()), 0.0);
    assert_eq!(growth(&[]), 0.0);
    assert_eq!(growth(&[(1.0, 5.0)]), 0.0);
}
