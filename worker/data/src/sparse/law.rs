//! Zipf's law over a bounded number of ranks, with the same bits on every host.

use paraft_common::optim::exact::{exp, ln};

/// Ranks that are drawn from exact sums; of those behind, the chance is the area under the curve.
const HEAD: u64 = 1024;

/// Ranks 1 to `ranks`, of which rank k is drawn with a chance proportional to k^-skew.
#[derive(Clone, Debug)]
pub(super) struct Zipf {
    ranks: u64,
    skew: f64,
    /// The chances of ranks 1 to k, times `total`.
    head: Vec<f64>,
    total: f64,
}

impl Zipf {
    /// Of 1 rank or more; `skew` above 1.
    pub fn new(ranks: u64, skew: f64) -> Self {
        let mut sum = 0.0;
        let head = (1..=ranks.min(HEAD)).map(|rank| {
            sum += power(rank as f64, -skew);
            sum
        });
        let head: Vec<f64> = head.collect();
        let mut law = Self { ranks, skew, head, total: 0.0 };
        law.total = law.last() + law.area(law.tail_to()) - law.area(law.tail_from());
        law
    }

    /// The rank, from 1, of a number from 0, below 1.
    pub fn rank(&self, unit: f64) -> u64 {
        let at = unit * self.total;
        if at < self.last() || self.ranks <= HEAD {
            let before = self.head.partition_point(|sum| *sum <= at) as u64;
            return (before + 1).min(self.ranks);
        }
        // The inverse of the area, then the next whole number.
        let area = self.area(self.tail_from()) + (at - self.last());
        let x = power(1.0 + area * (1.0 - self.skew), 1.0 / (1.0 - self.skew));
        ((x + 0.5) as u64).clamp(HEAD + 1, self.ranks)
    }

    fn last(&self) -> f64 {
        self.head.last().copied().unwrap_or_default()
    }

    fn tail_from(&self) -> f64 {
        self.head.len() as f64 + 0.5
    }

    fn tail_to(&self) -> f64 {
        self.ranks as f64 + 0.5
    }

    /// The area under the curve from 1 to `x`.
    fn area(&self, x: f64) -> f64 {
        (power(x, 1.0 - self.skew) - 1.0) / (1.0 - self.skew)
    }
}

fn power(base: f64, exponent: f64) -> f64 {
    let log = exponent * ln(base);
    if log > 0.0 { 1.0 / exp(-log) } else { exp(log) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chances_are_those_of_zipf() {
        const DRAWS: u32 = 400_000;
        for (ranks, skew) in [(1, 1.1), (3, 1.02), (1_000, 1.2), (1_025, 1.1), (200_000, 1.05)] {
            let law = Zipf::new(ranks, skew);
            let chances: Vec<f64> = (1..=ranks).map(|k| (k as f64).powf(-skew)).collect();
            let total: f64 = chances.iter().sum();
            let mut counts = vec![0u32; ranks as usize];
            for i in 0..DRAWS {
                counts[law.rank(f64::from(i) / f64::from(DRAWS)) as usize - 1] += 1;
            }
            // Evenly spaced numbers: each range of ranks has its share but for the two ends.
            for range in [0..1, 0..10, 10..100, 100..1_000, 1_000..2_000, 2_000..50_000, 50_000..200_000] {
                let range = range.start.min(counts.len())..range.end.min(counts.len());
                let seen: u32 = counts[range.clone()].iter().sum();
                let expected = chances[range.clone()].iter().sum::<f64>() / total * f64::from(DRAWS);
                assert!((f64::from(seen) - expected).abs() < 3.0, "{ranks} {range:?}: {seen} for {expected}");
            }
        }
    }

    #[test]
    fn the_last_rank_is_the_last() {
        for ranks in [1, 2, 1_024, 1_025, 10_131_227] {
            let law = Zipf::new(ranks, 1.05);
            assert_eq!((law.rank(0.0), law.rank(1.0 - f64::EPSILON / 2.0)), (1, ranks));
        }
    }
}
