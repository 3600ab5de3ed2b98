//! A synthetic stream of clicks with the shape of Criteo's, for load and for proofs: what there is to learn is known.
//!
//! ```text
//!  sample i:  26 ranks by Zipf's law --generation of the day--> 26 ids --+
//!             13 log-normal numbers --ln(1 + x)--> 13 dense values ------+--teacher--> chance of a click --> label
//! ```
//!
//! The teacher is a factorisation machine: a bias, a weight for each dense value and each id, and for each id a vector of
//! 8, whose products of any two fields count. So a linear model reaches only a part of the teacher's AUC.
//!
//! Sample i is a function of the seed and i alone, by whole numbers and `+ - * /`: any worker on any host makes any
//! sample with the same bits, and nothing is stored.

use super::SparseBatch;
use super::law::Zipf;
use crate::DataError;
use paraft_common::draws::{draw, unit};
use paraft_common::optim::exact::{exp, ln};
use std::sync::Arc;

/// Fields, as in Criteo's logs.
pub(crate) const FIELDS: usize = 26;
/// Dense values, as in Criteo's logs.
pub(crate) const DENSE: usize = 13;
/// Distinct categories of each field in the logs of the Display Advertising Challenge.
const CARDINALITIES: [u64; FIELDS] = [
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992,
    5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
];
/// The length of the teacher's vectors.
const FACTORS: usize = 8;
/// The teacher's weights and vectors are below this. Then the sum of the weights deviates by 0.7 and that of the
/// products by 1: there is as much to gain by products as by weights.
const EFFECT: f64 = 0.24;
/// The part of samples that are clicks.
const BASE_RATE: f64 = 0.25;
/// Samples of the first day on which the teacher's bias is set.
const CALIBRATION: u64 = 4096;

/// Which stream. The defaults are those of the job file.
#[derive(Clone, Debug, PartialEq)]
pub struct ClicksOptions {
    /// The seed of everything. Default 0.
    pub seed: u64,
    /// The first sample. Default 0.
    pub first: u64,
    /// Number of samples, 1 or more. Default 1,000,000.
    pub samples: u32,
    /// Caps the number of categories of a field, Criteo's (3 to 10,131,227), 1 or more. Default: no cap.
    pub max_categories: u64,
    /// Samples in a day, 1 or more. Default 1,000,000.
    pub day: u64,
    /// The part of categories that each day are replaced by ones never seen before, 0 to 1; 1 replaces all. Default 0.01.
    pub drift: f64,
}

impl Default for ClicksOptions {
    fn default() -> Self {
        let max_categories = u64::MAX;
        Self { seed: 0, first: 0, samples: 1_000_000, max_categories, day: 1_000_000, drift: 0.01 }
    }
}

/// A synthetic stream.
#[derive(Clone, Debug)]
pub struct Clicks {
    options: ClicksOptions,
    made: Arc<Made>,
}

/// What follows from the seed.
#[derive(Debug)]
struct Made {
    laws: Vec<Zipf>,
    dense: Vec<LogNormal>,
    bias: f64,
}

#[derive(Debug)]
struct LogNormal {
    mean: f64,
    deviation: f64,
    /// The teacher's weight.
    effect: f64,
}

/// Independent seeds made of one.
enum Purpose {
    Laws,
    Dense,
    Samples,
    Ids,
    Phases,
    Teacher,
}

impl Clicks {
    /// Prepares the stream, in some ten milliseconds.
    ///
    /// # Errors
    /// [`DataError::Option`] of a number outside its range.
    pub fn new(options: ClicksOptions) -> Result<Self, DataError> {
        let bad = |key, why: &str| Err(DataError::Option { key, why: why.into() });
        if options.samples == 0 || options.first.checked_add(u64::from(options.samples)).is_none() {
            return bad("samples", "there must be 1 or more, numbered below 2^64");
        }
        if options.max_categories == 0 || options.day == 0 {
            return bad(if options.day == 0 { "day" } else { "max_categories" }, "must be 1 or more");
        }
        if !(0.0..=1.0).contains(&options.drift) {
            return bad("drift", "must be from 0 to 1");
        }
        let of = |purpose| draw(options.seed, purpose as u64);
        let laws = CARDINALITIES.iter().zip(0..).map(|(categories, field)| {
            Zipf::new((*categories).min(options.max_categories), 1.02 + 0.18 * unit(of(Purpose::Laws), field))
        });
        let dense = (0..DENSE as u64).map(|j| {
            let seed = draw(of(Purpose::Dense), j);
            LogNormal {
                mean: 4.0 * unit(seed, 0),
                deviation: 1.0 + unit(seed, 1),
                effect: 0.15 * (2.0 * unit(seed, 2) - 1.0),
            }
        });
        let made = Made { laws: laws.collect(), dense: dense.collect(), bias: 0.0 };
        let mut clicks = Self { options, made: Arc::new(made) };
        let bias = clicks.calibrated();
        if let Some(made) = Arc::get_mut(&mut clicks.made) {
            made.bias = bias;
        }
        Ok(clicks)
    }

    /// Which stream it is.
    pub fn options(&self) -> &ClicksOptions {
        &self.options
    }

    /// The stream without its last samples, and these; both parts have one at least.
    pub(super) fn split(&self, last: u32) -> (Self, Self) {
        let (mut train, mut test) = (self.clone(), self.clone());
        train.options.samples = self.options.samples.saturating_sub(last).max(1);
        test.options.samples = last;
        test.options.first = self.options.first + u64::from(train.options.samples);
        (train, test)
    }

    /// Adds sample `i`, counted from the stream's begin at 0, to a batch of 26 fields. Returns the chance of a click that
    /// the teacher gives: by that score no model can be beaten.
    pub fn push(&self, i: u64, batch: &mut SparseBatch) -> f64 {
        let score = self.features(i, batch) + self.made.bias;
        let chance = logistic(score);
        let clicked = unit(self.seed_of(i), 1000) < chance;
        batch.end(f32::from(u8::from(clicked)), 1.0);
        chance
    }

    fn of(&self, purpose: Purpose) -> u64 {
        draw(self.options.seed, purpose as u64)
    }

    fn seed_of(&self, i: u64) -> u64 {
        draw(self.of(Purpose::Samples), i)
    }

    /// Adds a sample's ids and dense values; returns the teacher's score without its bias.
    fn features(&self, i: u64, batch: &mut SparseBatch) -> f64 {
        let (seed, day) = (self.seed_of(i), i / self.options.day);
        let mut teacher = Teacher::default();
        for (at, law) in self.made.laws.iter().enumerate() {
            let rank = law.rank(unit(seed, at as u64));
            let id = self.id(at as u64, rank, day);
            batch.fields[at].push(id, 1.0);
            teacher.add(draw(self.of(Purpose::Teacher), id));
        }
        let mut score = teacher.score();
        for (at, law) in self.made.dense.iter().enumerate() {
            let value = softplus(law.mean + law.deviation * normal(seed, 100 + 3 * at as u64));
            batch.dense.push(value as f32);
            score += law.effect * (value - law.mean);
        }
        score
    }

    /// The id of a field's rank on a day. The rank's generation grows by `drift` a day on average, at another time for
    /// each rank; the id is a hash of both, so that it says nothing about its rank.
    fn id(&self, field: u64, rank: u64, day: u64) -> u64 {
        let ranks = draw(self.of(Purpose::Phases), field);
        let phase = draw(ranks, rank) >> 32;
        let step = (self.options.drift * (1u64 << 32) as f64) as u128;
        let generation = (u128::from(day) * step + u128::from(phase)) >> 32;
        let ids = draw(draw(self.of(Purpose::Ids), field), generation as u64);
        draw(ids, rank)
    }

    /// The bias with which the first day's samples have the base rate.
    fn calibrated(&self) -> f64 {
        let mut batch = SparseBatch::new(FIELDS);
        let first = CALIBRATION.min(self.options.day);
        let scores: Vec<f64> = (0..first).map(|i| self.features(i, &mut batch)).collect();
        let (mut low, mut high) = (-64.0, 64.0);
        for _ in 0..48 {
            let bias = (low + high) / 2.0;
            let rate = scores.iter().map(|s| logistic(s + bias)).sum::<f64>() / first as f64;
            if rate < BASE_RATE { low = bias } else { high = bias }
        }
        low
    }
}

/// The sums of a factorisation machine.
#[derive(Default)]
struct Teacher {
    linear: f64,
    sum: [f64; FACTORS],
    squares: f64,
}

impl Teacher {
    /// Adds an id, whose weight and vector are the numbers of this seed.
    fn add(&mut self, seed: u64) {
        let number = |j: usize| EFFECT * (2.0 * unit(seed, j as u64) - 1.0);
        self.linear += number(FACTORS);
        for (j, sum) in self.sum.iter_mut().enumerate() {
            let v = number(j);
            *sum += v;
            self.squares += v * v;
        }
    }

    fn score(&self) -> f64 {
        let all: f64 = self.sum.iter().map(|s| s * s).sum();
        self.linear + (all - self.squares) / 2.0
    }
}

/// A number of mean 0 and deviation 1, near to normal: the sum of twelve uniform ones.
fn normal(seed: u64, at: u64) -> f64 {
    let quarter = |i: u64| {
        let bits = draw(seed, at + i);
        (0..4).map(|part| bits >> (16 * part) & 0xffff).sum::<u64>()
    };
    let sum: u64 = (0..3).map(quarter).sum();
    (sum as f64 + 6.0) / 65536.0 - 6.0
}

/// ln(1 + e^x).
fn softplus(x: f64) -> f64 {
    x.max(0.0) + ln(1.0 + exp(-x.abs()))
}

fn logistic(x: f64) -> f64 {
    let small = exp(-x.abs());
    if x < 0.0 { small / (1.0 + small) } else { 1.0 / (1.0 + small) }
}

#[cfg(test)]
#[path = "clicks_tests.rs"]
mod tests;
