//! Medians and quantiles of measured values.

/// The median, and the spread: the range of the middle half of the values (between the quartiles) over the median, so that
/// a moment in which the machine did something else does not make all of them worthless. One value has none.
pub fn median(values: &[f64]) -> Option<(f64, Option<f64>)> {
    let mut v: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
    v.sort_by(f64::total_cmp);
    if v.is_empty() {
        return None;
    }
    // Between two of them, in proportion.
    let at = |share: f64| {
        let place = share * (v.len() - 1) as f64;
        let (below, above) = (v[place.floor() as usize], v[place.ceil() as usize]);
        below + (above - below) * place.fract()
    };
    let mid = at(0.5);
    let spread = if mid != 0.0 { (at(0.75) - at(0.25)) / mid } else { 0.0 };
    Some((mid, (v.len() > 1).then_some(spread)))
}

/// The smallest of the sorted values that at least this share of them does not exceed: always one that was measured.
pub fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spread_is_that_of_the_middle_half() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[f64::NAN, 3.0]), Some((3.0, None)));
        assert_eq!(median(&[4.0, 2.0]), Some((3.0, Some(1.0 / 3.0))));
        assert_eq!(median(&[1.0, 9.0, 2.0]), Some((2.0, Some(2.0))));
        // One that is far off does not count.
        assert_eq!(median(&[10.0, 11.0, 9.0, 10.0, 1000.0]), Some((10.0, Some(0.1))));
        assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0], 0.5), Some(2.0));
    }
}
