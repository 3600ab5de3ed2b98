//! One trial: its job, its run on the fleet, and its result.

use super::{MAX_ATTEMPTS, RETRY_DELAY, Sweep, log::TrialEnd, space};
use paraft_checkpoint::Folder;
use paraft_fleet::{ask, existing::ExistingFleet, failure::Failure, fleet::Extras, launch, run_dir::RunDir};
use paraft_proto::JobInfo;
use paraft_record::RunRecord;
use paraft_worker::{Job, exit};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicI32, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// The epochs after which a trial has ended, if that is before all of its job's. `before`: the epochs
/// at its start; `last`: the last evaluated epoch; `share`: the share of its samples that it has
/// trained. Either number alone may be low: for unreported samples, pushes that a round left out, or a
/// short last minibatch.
fn ended_early(job: &Job, before: u64, last: Option<u64>, share: f64) -> Option<u64> {
    let train = &job.train;
    let epochs = train.epochs;
    let is_exact = train.drop_last && train.backup_workers == 0;
    let lacks = share < if is_exact { 0.999 } else { 1.0 - 0.5 / epochs.max(1) as f64 };
    match (lacks && train.max_steps.is_none(), job.eval.every_epoch) {
        (true, true) => Some(last.unwrap_or(before)).filter(|last| *last < epochs),
        (true, false) if is_exact => Some(before + (share * epochs.saturating_sub(before) as f64) as u64),
        _ => None,
    }
}

impl Sweep<'_> {
    /// The job of a trial up to a rung.
    pub(super) fn job(&self, trial: usize, rung: usize) -> Result<Job, Failure> {
        let point = self.space.set(&self.points[trial]);
        let mut set: Vec<String> = self.args.set.iter().cloned().chain(point.clone()).collect();
        let several = self.rungs.len() > 1;
        if several {
            set.push(format!("train.epochs={}", self.rungs[rung]));
            set.push(format!("checkpoint.every_epochs={}", self.rungs[rung]));
        }
        let mut job = Job::load(&self.args.job, &set).map_err(|e| {
            let failure = Failure::from(e);
            Failure::new(exit::CONFIG, format!("trial {trial} ({}): {}", point.join(", "), failure.message()))
        })?;
        if let Some(checkpoint) = &mut job.checkpoint {
            // Trials have their own checkpoints, and continue from those of the rung below.
            checkpoint.dir = None;
            checkpoint.keep = if several { checkpoint.keep.max(1) } else { checkpoint.keep };
        }
        Ok(job)
    }

    /// The checkpoint that a trial resumes from. If the loss or move of a leader prevented it, the
    /// trial trains from the start.
    fn checkpoint_before(&self, trial: usize, rung: usize) -> Option<PathBuf> {
        let below = self.dir.join(self.trial_dir(trial, rung.checked_sub(1)?)).join("checkpoints");
        let found = Folder::find(&below).map_err(|e| e.to_string());
        match found.and_then(|path| fs::canonicalize(path).map_err(|e| e.to_string())) {
            Ok(path) => Some(path),
            Err(why) => {
                eprintln!("trial {trial} trains from the start: {why}");
                None
            }
        }
    }

    /// Another job that trains on this machine now, according to the shared fleet.
    fn beside(&self, servers: &[String]) -> Option<String> {
        self.args.standing.fleet.as_ref()?;
        let own = fs::canonicalize(&self.dir).ok()?;
        let is_others = |job: &JobInfo| {
            let run = job.run.split_once(':').filter(|(host, _)| *host == paraft_host::name());
            job.state == "running" && run.is_some_and(|(_, dir)| !Path::new(dir).starts_with(&own))
        };
        ask::jobs(servers).ok()?.into_iter().find(is_others).map(|job| job.name)
    }

    /// Takes what the record says of a trial that has ended in order; it began after `before` epochs.
    fn take(&self, ended: &mut TrialEnd, job: &Job, record: &RunRecord, before: u64) {
        let summary = record.summarize();
        ended.value = match self.space.metric {
            space::Metric::Accuracy => summary.final_accuracy,
            space::Metric::Loss => summary.final_loss,
            space::Metric::Auc => summary.final_metrics.get("auc").copied(),
        };
        ended.start_seconds = summary.first_step_seconds;
        if ended.value.is_none() {
            ended.why = format!("it has no held-out {}", self.space.metric.name());
        }
        let last = record.evals.iter().filter(|e| !e.is_final).map(|e| e.epoch).max();
        let share = summary.samples as f64 / record.run.samples_budget.max(1) as f64;
        ended.stopped = ended_early(job, before, last, share);
        // The job's own early stopping belongs to its settings; a stop by a user says nothing about
        // them.
        if let Some(after) = ended.stopped.filter(|_| job.eval.early_stop.is_none()) {
            ended.value = None;
            ended.why = format!("a user has stopped it after {after} epochs");
        }
        if let Some(mode) = &summary.switched_to {
            eprintln!(
                "trial {}: its mode was switched to {mode}: with its settings alone the result would be another",
                ended.trial
            );
        }
    }

    /// Trains one trial up to a rung. A failure of its setting is its result; a failure of the fleet is
    /// an error.
    pub(super) fn train(
        &self,
        trial: usize,
        rung: usize,
        servers: &[String],
        interrupted: &AtomicI32,
    ) -> Result<TrialEnd, Failure> {
        let job = self.job(trial, rung)?;
        let name = self.trial_dir(trial, rung);
        let mut ended = TrialEnd {
            trial,
            rung,
            value: None,
            seconds: 0.0,
            start_seconds: None,
            tries: 0,
            why: String::new(),
            stopped: None,
            beside: None,
            dir: name.clone(),
            ended_ms: 0,
        };
        while ended.tries < MAX_ATTEMPTS {
            ended.tries += 1;
            ended.why.clear();
            let beside = self.beside(servers);
            let began = Instant::now();
            let resume = self.checkpoint_before(trial, rung);
            let path = self.dir.join(&name);
            // Checkpoints of a failed attempt.
            match fs::remove_dir_all(path.join("checkpoints")) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Failure::write(&path, e)),
                _ => {}
            }
            // The record may also be set aside by an attempt that was killed before it began another.
            let dir = match path.exists() {
                true => RunDir::again(&path)?,
                false => RunDir::new(Some(&path), &job.name)?,
            };
            // The sweep's own servers, and their jobs, end with it.
            let remember = self.args.standing.fleet.is_some();
            let on = ExistingFleet { servers: servers.to_vec(), keep: None, delete: true, remember };
            let of = self.tracked.clone();
            let extras = Extras { on: Some(on), of_many: true, of, ..Extras::default() };
            let launched = launch::launch_with(&job, &dir, resume.as_deref(), true, interrupted, extras);
            match launched.map(|launched| launched.record) {
                // A run that lost a worker was another job.
                Ok(record) if !record.leaves.is_empty() => {
                    ended.why = "a worker was lost".into();
                    ended.seconds = began.elapsed().as_secs_f64();
                    eprintln!("trial {trial}: {}; try {} of {MAX_ATTEMPTS}", ended.why, ended.tries);
                }
                Ok(record) => {
                    ended.seconds = began.elapsed().as_secs_f64();
                    let before =
                        resume.as_ref().and(rung.checked_sub(1)).map_or(0, |below| self.rungs[below]);
                    self.take(&mut ended, &job, &record, before);
                    ended.beside = beside.or_else(|| self.beside(servers));
                    if let Some(other) = &ended.beside {
                        eprintln!(
                            "trial {trial}: job {other} trains on this machine too: they share its cores, and the times are not the trial's own"
                        );
                    }
                    return Ok(ended);
                }
                Err(e) if interrupted.load(Relaxed) != 0 || e.code() == exit::IO => return Err(e),
                Err(e) if e.code() == exit::UNAVAILABLE => {
                    // The setting is not at fault: a resumed sweep retries the trial.
                    if ended.tries == MAX_ATTEMPTS {
                        return Err(e);
                    }
                    eprintln!("trial {trial}: {}; try {} of {MAX_ATTEMPTS}", e.message(), ended.tries);
                    let until = Instant::now() + RETRY_DELAY;
                    while Instant::now() < until && interrupted.load(Relaxed) == 0 {
                        std::thread::sleep(Duration::from_millis(50));
                    }
                }
                Err(e) => {
                    ended.why = e.message().to_string();
                    ended.seconds = began.elapsed().as_secs_f64();
                    if e.diverged() {
                        ended.beside = beside;
                        return Ok(ended);
                    }
                    // Also for a worker's error about its job or its servers: a restarted server may
                    // not know the job yet.
                    eprintln!("trial {trial}: {}; try {} of {MAX_ATTEMPTS}", ended.why, ended.tries);
                }
            }
        }
        Ok(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_trial_differs_from_a_finished_one() {
        let job = |set: &[&str]| {
            let base =
                "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"digits\"\n[train]\nworkers = 2\n";
            let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
            Job::parse(base, "job.toml".as_ref(), &set).expect("valid")
        };
        let whole = job(&["train.epochs=8", "eval.every_epoch=true"]);
        assert_eq!(ended_early(&whole, 0, Some(8), 1.0), None);
        assert_eq!(ended_early(&whole, 0, Some(7), 1.0), None, "the last evaluation was not heard");
        assert_eq!(ended_early(&whole, 0, Some(5), 0.7), Some(5));
        assert_eq!(ended_early(&whole, 2, None, 0.1), Some(2));
        let short = job(&["train.epochs=8", "eval.every_epoch=true", "train.drop_last=false"]);
        assert_eq!(ended_early(&short, 0, Some(8), 0.93), None, "short minibatches");
        assert_eq!(ended_early(&short, 0, Some(5), 0.6), Some(5));
        let unseen = job(&["train.epochs=16", "eval.every_epoch=false"]);
        assert_eq!(ended_early(&unseen, 4, None, 1.0), None);
        assert_eq!(ended_early(&unseen, 4, None, 0.5), Some(10));
        assert_eq!(ended_early(&job(&["train.max_steps=10"]), 0, None, 0.1), None);
        let skips = job(&["train.epochs=8", "eval.every_epoch=false", "train.backup_workers=1"]);
        assert_eq!(ended_early(&skips, 0, None, 0.6), None, "what a round did not wait for is skipped");
    }
}
