//! What evaluations report of predictions: AUC, log loss, normalised entropy, RMSE.
//!
//! Each is a sum over samples that is exact, so workers may add up their parts in any order, of any size, and get the same
//! bits. Every sample counts once, whatever its importance in training. A score that is not finite makes the
//! metric NaN: it is neither lost nor hidden.

mod sums;

use paraft_common::optim::exact::{exp, ln};
use sums::ExactSum;

/// Bins of scores.
const BINS: usize = 1 << 16;
/// Bins to the unit of a score. So bins cover scores from -32 to 32, chances from 1e-14 to 1 - 1e-14.
const BINS_A_UNIT: f32 = 1024.0;

/// The area under the ROC curve: the chance that of one sample labelled 1 and one labelled 0 the first has the higher
/// score; equal scores count half. A label is 1 if it is above 0.5. None if all labels are alike, NaN if a score is.
///
/// # Panics
/// If there are not as many labels as scores.
pub fn auc(scores: &[f32], labels: &[f32]) -> Option<f64> {
    assert_eq!(scores.len(), labels.len(), "scores and labels");
    let mut rows: Vec<(f32, bool)> =
        scores.iter().map(|s| *s + 0.0).zip(labels.iter().map(|l| *l > 0.5)).collect();
    rows.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let ties = rows.chunk_by(|a, b| a.0 == b.0).map(|tie| {
        let ones = tie.iter().filter(|row| row.1).count() as u64;
        [tie.len() as u64 - ones, ones]
    });
    let area = Area::of(ties)?;
    Some(if scores.iter().any(|s| s.is_nan()) { f64::NAN } else { area.value })
}

/// An AUC of scores in bins, where scores of one bin count as equal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Area {
    /// The AUC.
    pub value: f64,
    /// By how much it may differ from the AUC of the scores themselves. With ten thousand samples or more of scores
    /// that spread over some units it is about 0.0001.
    pub within: f64,
}

impl Area {
    /// Of groups of equal scores, rising, each with its number of labels 0 and 1.
    fn of(groups: impl Iterator<Item = [u64; 2]>) -> Option<Self> {
        // Pairs in halves, so that a tie is a whole number.
        let (mut zeros, mut ones, mut halves, mut tied) = (0u128, 0u128, 0u128, 0u128);
        for [no, yes] in groups.map(|group| group.map(u128::from)) {
            halves += yes * (2 * zeros + no);
            tied += yes * no;
            zeros += no;
            ones += yes;
        }
        let pairs = (zeros * ones) as f64;
        (pairs > 0.0)
            .then(|| Self { value: halves as f64 / (2.0 * pairs), within: tied as f64 / (2.0 * pairs) })
    }
}

/// The metrics of classes 0 and 1, for predictions as scores: log odds, before the logistic function.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassMetrics {
    /// Of each bin of scores the number of labels 0 and 1.
    bins: Vec<[u64; 2]>,
    loss: ExactSum,
}

impl Default for ClassMetrics {
    fn default() -> Self {
        Self { bins: vec![[0; 2]; BINS], loss: ExactSum::default() }
    }
}

impl ClassMetrics {
    /// Counts a sample. The label is 1 if it is above 0.5.
    pub fn add(&mut self, score: f32, label: f32) {
        let yes = label > 0.5;
        // A conversion to whole numbers saturates, and takes NaN as 0.
        let bin = ((score * BINS_A_UNIT).floor() as i64).saturating_add(BINS as i64 / 2);
        self.bins[bin.clamp(0, BINS as i64 - 1) as usize][usize::from(yes)] += 1;
        // -ln of the chance that the score gives to the label.
        let score = f64::from(score);
        let wrong = if yes { -score } else { score };
        let loss = wrong.max(0.0) + ln(1.0 + exp(-wrong.abs()));
        self.loss.add(if score.is_finite() { loss } else { f64::NAN });
    }

    /// Adds another worker's samples.
    pub fn merge(&mut self, other: &Self) {
        for (to, from) in self.bins.iter_mut().zip(&other.bins) {
            *to = [to[0].saturating_add(from[0]), to[1].saturating_add(from[1])];
        }
        self.loss.merge(&other.loss);
    }

    /// The AUC. None if all labels are alike.
    pub fn auc(&self) -> Option<Area> {
        let area = Area::of(self.bins.iter().copied())?;
        Some(if self.loss.not_finite > 0 { Area { value: f64::NAN, ..area } } else { area })
    }

    /// The mean of -ln(chance of the label), in nats. None without samples.
    pub fn log_loss(&self) -> Option<f64> {
        let [zeros, ones] = self.labels();
        (zeros + ones > 0).then(|| self.loss.value() / (zeros + ones) as f64)
    }

    /// The log loss over that of the best constant, the share of labels 1: below 1 the model knows more. None if all
    /// labels are alike. (He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014.)
    pub fn normalized_entropy(&self) -> Option<f64> {
        let [zeros, ones] = self.labels().map(|n| n as f64);
        let n = zeros + ones;
        let entropy = |part: f64| -part / n * ln(part / n);
        (zeros > 0.0 && ones > 0.0)
            .then(|| self.log_loss().map(|loss| loss / (entropy(zeros) + entropy(ones))))?
    }

    fn labels(&self) -> [u64; 2] {
        self.bins.iter().fold([0; 2], |sum, bin| [sum[0] + bin[0], sum[1] + bin[1]])
    }
}

/// The metric of numbers to predict.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NumberMetrics {
    samples: u64,
    squares: ExactSum,
}

impl NumberMetrics {
    /// Counts a sample.
    pub fn add(&mut self, prediction: f32, label: f32) {
        let error = f64::from(prediction) - f64::from(label);
        self.samples += 1;
        self.squares.add(error * error);
    }

    /// Adds another worker's samples.
    pub fn merge(&mut self, other: &Self) {
        self.samples = self.samples.saturating_add(other.samples);
        self.squares.merge(&other.squares);
    }

    /// The root of the mean squared error. None without samples.
    pub fn rmse(&self) -> Option<f64> {
        (self.samples > 0).then(|| (self.squares.value() / self.samples as f64).sqrt())
    }
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
