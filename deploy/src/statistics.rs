//! Medians and quantiles of measured values.

/// The median, and the spread: (largest - smallest) / median; one value has none.
pub fn median(values: &[f64]) -> Option<(f64, Option<f64>)> {
    let mut v: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
    v.sort_by(f64::total_cmp);
    let mid = *v.get(v.len() / 2)?;
    let mid = if v.len().is_multiple_of(2) { (mid + v[v.len() / 2 - 1]) / 2.0 } else { mid };
    let spread = if mid != 0.0 { (v[v.len() - 1] - v[0]) / mid } else { 0.0 };
    Some((mid, (v.len() > 1).then_some(spread)))
}

/// The smallest of the sorted values that at least this share of them does not exceed: always one that was measured.
pub fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}
