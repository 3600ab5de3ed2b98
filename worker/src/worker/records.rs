//! Writes the driver's events into the record: steps, evaluations, switches of the mode, the end.

use super::driver::{Driver, End, Scores};
use crate::{
    checkpoints,
    recorder::{LINE_INTERVAL, Progress, wall},
    worker::WorkerError,
};
use paraft_client::Reported;
use paraft_common::{Step, optim::Descent};
use paraft_models::Evaluation;
use paraft_record::{Event, event};
use paraft_trainer::Stepped;
use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

impl Driver {
    /// Records the worker's progress after a step: at intervals, and at the end of an epoch or the job.
    pub(super) fn note_step(&mut self, s: Stepped) -> Result<(), WorkerError> {
        let counters = self.client.counters();
        let progress = Progress {
            step: s.done,
            epoch: s.epoch,
            samples: self.samples,
            seconds: self.clock.seconds(),
            wait_seconds: (counters.waited - self.waited_at_start).as_secs_f64(),
        };
        if let Some(rate) = self.learning_rate(s.done) {
            self.recorder.value(event::LEARNING_RATE, rate);
        }
        self.gauges.bytes_pushed.store(counters.bytes_pushed, Relaxed);
        self.gauges.bytes_pulled.store(counters.bytes_pulled, Relaxed);
        Ok(self.recorder.step(progress, s.loss, s.ends)?)
    }

    /// The learning rate at which the servers applied this step's gradient. They compute it from their own count of updates, which
    /// is the worker's step or close to it.
    fn learning_rate(&self, step: Step) -> Option<f64> {
        let by_job = |descent: &Descent| {
            let pushes = if self.client.mode().1.averages() { self.scores.workers as usize } else { 1 };
            descent.optimizer.lr() * descent.schedule.factor(step.0.saturating_sub(1) as f64, pushes)
        };
        self.rate.or_else(|| self.descent.as_ref().map(by_job))
    }

    /// Measures the norm of the next gradient, about as often as lines are written. In a large model that takes long: then
    /// more rarely, so that it costs at most a hundredth of the time.
    pub(super) fn begin_norm(&mut self) {
        let is_due = |(at, took): (Instant, Duration)| at.elapsed() >= LINE_INTERVAL.max(took * 100);
        if self.norm.is_none_or(is_due) {
            self.client.begin_norm();
        }
    }

    pub(super) fn end_norm(&mut self) {
        if let Some((norm, took)) = self.client.end_norm() {
            self.norm = Some((Instant::now(), took));
            self.recorder.value(event::GRADIENT_NORM, norm);
        }
    }

    /// The evaluation of the final weights, if all workers' shares contributed to it and cover this many samples,
    /// or tokens. Otherwise the first worker evaluates.
    pub fn shared(&self, end: End, samples: u64) -> Option<Evaluation> {
        let r = self.reported.as_ref().filter(|r| Some(r.epoch) == end.evaluated && r.count == samples)?;
        Some(Evaluation { loss_sum: r.loss_sum, correct: r.correct, count: r.count })
    }

    /// Records this worker's result. `evaluation`: that of the final weights, if this worker writes it.
    pub fn end(&mut self, end: End, evaluation: Option<&Evaluation>) -> Result<(), WorkerError> {
        let counters = self.at_end;
        if let Some(e) = evaluation {
            self.note_final(end.done, e)?;
        }
        let usage = paraft_host::usage();
        Ok(self.recorder.write(&Event::Worker(event::Worker {
            wall: wall(),
            worker: self.worker(),
            steps: self.steps,
            samples: self.samples,
            seconds: self.clock.seconds(),
            wait_seconds: (counters.waited - self.waited_at_start).as_secs_f64(),
            bytes_pushed: counters.bytes_pushed,
            bytes_pulled: counters.bytes_pulled,
            cpu_seconds: self.clock.cpu_seconds(),
            peak_rss_bytes: usage.peak_rss_bytes,
        }))?)
    }

    /// Records a switch of the mode.
    pub(super) fn note_mode(&mut self, step: Step) -> Result<(), WorkerError> {
        let (number, mode) = self.client.mode();
        if number == self.switches {
            return Ok(());
        }
        self.switches = number;
        tracing::info!(%mode, number, %step, "the mode was switched");
        Ok(self.recorder.write(&Event::Mode(event::ModeSwitch {
            wall: wall(),
            worker: self.worker(),
            step,
            samples: self.samples,
            seconds: self.clock.seconds(),
            number,
            mode: mode.to_string(),
        }))?)
    }

    /// The number of the evaluation at the job's end.
    pub(super) fn number_at(&self, done: Step) -> u64 {
        match self.plan.leased {
            Some(_) => self.ends.keys().next_back().copied().unwrap_or(self.begun),
            None => self.scores.at.number(done, &self.plan),
        }
    }

    /// The epochs that are over at an evaluation; and its step, if there are several in an epoch.
    pub(super) fn place_of(&self, number: u64) -> (u64, Option<Step>) {
        self.scores.at.place_of(number, &self.plan)
    }

    fn note_final(&mut self, done: Step, e: &Evaluation) -> Result<(), WorkerError> {
        let all = Reported {
            epoch: self.number_at(done),
            loss_sum: e.loss_sum,
            correct: e.correct,
            count: e.count,
            ..Reported::default()
        };
        self.write_evaluation(&all, true)
    }

    pub(super) fn note_evaluations(&mut self) -> Result<(), WorkerError> {
        for e in self.client.evaluations() {
            // The mean over other samples is equally good. A worker lost before any report does not change the
            // count. The tolerance is half of one worker's share.
            let is_like_others =
                !e.incomplete && e.count + self.most / (2 * self.scores.workers.max(1)) >= self.most;
            self.most = self.most.max(e.count);
            if let Some(c) = self.checkpoints.as_ref().filter(|_| is_like_others) {
                let step = match self.plan.leased {
                    Some(_) => self.ends.get(&e.epoch).copied(),
                    None => Some(self.scores.at.step_of(e.epoch, &self.plan)),
                };
                if let Some(step) = step {
                    c.loss(step, e.loss_sum / e.count.max(1) as f64);
                }
            }
            if self.scores.at.any() {
                self.write_evaluation(&e, false)?;
            }
            self.reported = Some(e);
        }
        Ok(())
    }

    /// Records the checkpoint thread's events. `wait`: first waits for all of them, at the end.
    pub(super) fn note_checkpoints(&mut self, wait: bool) -> Result<(), WorkerError> {
        checkpoints::note(&mut self.checkpoints, &mut self.recorder, wait)
    }

    fn write_evaluation(&mut self, e: &Reported, is_final: bool) -> Result<(), WorkerError> {
        let n = e.count.max(1) as f64;
        let Scores { workers, samples, classifies, .. } = self.scores;
        let (epoch, step) = self.place_of(e.epoch);
        let metrics = match &self.measured {
            None => Default::default(),
            Some(of) => match of.get(&e.epoch) {
                Some(metrics) => metrics.clone(),
                None => return Ok(()),
            },
        };
        let event = event::Eval {
            wall: wall(),
            epoch,
            step,
            samples: match self.plan.leased {
                Some(_) => e.epoch.saturating_sub(self.begun) * samples,
                None => self.samples * workers,
            },
            seconds: self.clock.seconds(),
            loss: e.loss_sum / n,
            accuracy: classifies.then(|| e.correct as f64 / n),
            count: e.count,
            metrics,
            is_final,
        };
        Ok(self.recorder.write(&Event::Eval(event))?)
    }
}
