//! Tests of `bands`.

use super::*;

fn line(points: &[(f64, f64)]) -> Line {
    Line::new(points.iter().copied())
}

#[test]
fn a_band_holds_its_lines_and_ends_where_the_first_of_them_ends() {
    // Straight lines: 2x and 4x, whose mean is 3x wherever it is asked.
    let a = line(&[(0.0, 0.0), (1.0, 2.0), (5.0, 10.0)]);
    let b = line(&[(1.0, 4.0), (2.0, 8.0), (4.0, 16.0)]);
    let c = common(vec![a, b]);
    assert_eq!((c.x[0], *c.x.last().unwrap()), (1.0, 4.0));
    for i in 0..c.x.len() {
        let near = |v: f64, wanted: f64| (v - wanted).abs() < 1e-4 * wanted;
        assert!(near(c.y[i], 3.0 * c.x[i]) && near(c.low[i], 2.0 * c.x[i]) && near(c.high[i], 4.0 * c.x[i]));
    }
}

#[test]
fn the_nth_points_go_together() {
    let c = by_number(&[line(&[(1.0, 0.5), (2.0, 0.9)]), line(&[(3.0, 0.7), (4.0, 0.8), (5.0, 1.0)])]);
    assert_eq!((c.x, c.y), (vec![2.0, 3.0], vec![0.6, 0.85]));
    assert_eq!((c.low, c.high), (vec![0.5, 0.8], vec![0.7, 0.9]));
}

#[test]
fn one_run_has_no_band_and_a_gap_stays_a_gap() {
    assert!(common(vec![line(&[(0.0, 1.0), (1.0, 2.0)]), Line::default()]).low.is_empty());
    let c = by_number(&[line(&[(1.0, f64::NAN)]), line(&[(1.0, 2.0)])]);
    assert!(c.y[0].is_nan() && c.low[0].is_nan());
}
