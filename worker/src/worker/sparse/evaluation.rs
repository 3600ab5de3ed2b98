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
pub enum Measured {
    Clicks { metrics: Box<ClassMetrics>, correct: u64, count: u64 },
    Numbers { metrics: NumberMetrics, count: u64 },
    Pairs { loss: f64, count: u64 },
}

impl Measured {
    pub fn new(predicts: Predicts) -> Self {
        match predicts {
            Predicts::Clicks => Self::Clicks { metrics: Box::default(), correct: 0, count: 0 },
            Predicts::Numbers => Self::Numbers { metrics: NumberMetrics::default(), count: 0 },
            Predicts::Pairs => Self::Pairs { loss: 0.0, count: 0 },
        }
    }

    pub fn add(&mut self, scores: &[f32], labels: &[f32]) {
        for (score, label) in scores.iter().zip(labels) {
            match self {
                Self::Clicks { metrics, correct, count } => {
                    metrics.add(*score, *label);
                    *correct += u64::from((*score > 0.0) == (*label > 0.5));
                    *count += 1;
                }
                Self::Numbers { metrics, count } => {
                    metrics.add(*score, *label);
                    *count += 1;
                }
                Self::Pairs { loss, count } => {
                    *loss += f64::from(*score);
                    *count += 1;
                }
            }
        }
    }

    /// Loss and accuracy, and what else there is.
    pub fn result(&self) -> (Evaluation, Metrics) {
        let metric =
            |name: &str, value: Option<f64>| value.filter(|v| v.is_finite()).map(|v| (name.to_string(), v));
        match self {
            Self::Clicks { metrics, correct, count } => {
                let loss_sum = metrics.log_loss().unwrap_or(0.0) * *count as f64;
                let all = [
                    metric("auc", metrics.auc().map(|area| area.value)),
                    metric("normalized_entropy", metrics.normalized_entropy()),
                ];
                let e = Evaluation { loss_sum, correct: *correct, count: *count };
                (e, all.into_iter().flatten().collect())
            }
            Self::Numbers { metrics, count } => {
                let rmse = metrics.rmse();
                let loss_sum = rmse.map_or(0.0, |r| r * r) * *count as f64;
                let e = Evaluation { loss_sum, correct: 0, count: *count };
                (e, metric("rmse", rmse).into_iter().collect())
            }
            Self::Pairs { loss, count } => {
                (Evaluation { loss_sum: *loss, correct: 0, count: *count }, Metrics::new())
            }
        }
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
