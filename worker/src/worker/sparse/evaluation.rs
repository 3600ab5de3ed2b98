//! What an evaluation of a model of tables measures.

use crate::{
    recorder::wall,
    worker::{WorkerError, driver::Driver},
};
use paraft_common::Step;
use paraft_data::metrics::{ClassMetrics, NumberMetrics};
use paraft_models::{Evaluation, Predicts};
use paraft_record::{Event, event};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// Metrics by name.
pub type Metrics = BTreeMap<String, f64>;

/// The samples of an evaluation.
pub struct Measured {
    sums: Sums,
    correct: u64,
    count: u64,
}

enum Sums {
    Clicks(Box<ClassMetrics>),
    Numbers(Box<NumberMetrics>),
    /// The sum of the losses.
    Pairs(f64),
}

impl Measured {
    pub fn new(predicts: Predicts) -> Self {
        let sums = match predicts {
            Predicts::Clicks => Sums::Clicks(Box::default()),
            Predicts::Numbers => Sums::Numbers(Box::default()),
            Predicts::Pairs => Sums::Pairs(0.0),
        };
        Self { sums, correct: 0, count: 0 }
    }

    /// Adds samples, each with the model's score.
    pub fn add(&mut self, scores: &[f32], labels: &[f32]) {
        for (score, label) in scores.iter().zip(labels) {
            self.count += 1;
            match &mut self.sums {
                Sums::Clicks(metrics) => {
                    metrics.add(*score, *label);
                    self.correct += u64::from((*score > 0.0) == (*label > 0.5));
                }
                Sums::Numbers(metrics) => metrics.add(*score, *label),
                Sums::Pairs(loss) => *loss += f64::from(*score),
            }
        }
    }

    /// Loss and accuracy, and what else there is.
    pub fn result(&self) -> (Evaluation, Metrics) {
        let n = self.count as f64;
        let (loss_sum, all) = match &self.sums {
            Sums::Clicks(metrics) => {
                let auc = ("auc", metrics.auc().map(|area| area.value));
                let entropy = ("normalized_entropy", metrics.normalized_entropy());
                (metrics.log_loss().map(|loss| loss * n), vec![auc, entropy])
            }
            Sums::Numbers(metrics) => {
                let rmse = metrics.rmse();
                (rmse.map(|r| r * r * n), vec![("rmse", rmse)])
            }
            Sums::Pairs(loss) => (Some(*loss), Vec::new()),
        };
        let metric = |(name, value): (&str, Option<f64>)| {
            value.filter(|v| v.is_finite()).map(|v| (name.to_string(), v))
        };
        let metrics = all.into_iter().filter_map(metric).collect();
        let loss_sum = loss_sum.unwrap_or(0.0);
        (Evaluation { loss_sum, correct: self.correct, count: self.count }, metrics)
    }
}

/// Shows the progress of an evaluation that takes long.
pub struct Progress {
    done: usize,
    of: usize,
    at: (u64, Option<Step>),
    said: Instant,
}

impl Progress {
    pub fn new(of: usize, at: (u64, Option<Step>)) -> Self {
        Self { done: 0, of, at, said: Instant::now() }
    }

    pub fn says(&mut self, samples: usize, driver: &mut Driver) -> Result<(), WorkerError> {
        const INTERVAL: Duration = Duration::from_secs(1);
        self.done += samples;
        if self.said.elapsed() < INTERVAL {
            return Ok(());
        }
        self.said = Instant::now();
        let ((epoch, step), worker) = (self.at, driver.worker());
        let (done, of) = (self.done as u64, self.of as u64);
        let event = event::Evaluating { wall: wall(), worker, epoch, step, done, of };
        Ok(driver.recorder.write(&Event::Evaluating(event))?)
    }
}
