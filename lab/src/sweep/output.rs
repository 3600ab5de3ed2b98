//! The output of a sweep: a line for each trial, its page during the sweep, and the best trial and the
//! report at the end.

use super::{
    BEST_FILE, REPORT_FILE, Sweep,
    log::{LOG_FILE, Log, TrialEnd},
    search::Search,
    space,
};
use paraft_fleet::{failure::Failure, launch, out};
use paraft_record::sweep::{self, write_sweep};
use paraft_worker::{Job, exit};
use serde_json::json;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

impl Sweep<'_> {
    pub(super) fn say(&self, e: &TrialEnd, n: usize) {
        let set = self.space.set(&self.points[e.trial]).join(" ");
        if self.args.json {
            out!(
                "{}",
                json!({
                    "trial": e.trial, "epochs": self.epochs(e), "value": e.value, "seconds": e.seconds, "tries": e.tries,
                    "why": e.why, "beside": e.beside, "set": self.space.set(&self.points[e.trial]), "dir": e.dir,
                })
            );
            return;
        }
        let value = match e.value {
            Some(v) => self.shown(v),
            None => e.why.clone(),
        };
        out!("{n:4}  trial {:4}  {:4} epochs  {value}  {:.1} s  {set}", e.trial, self.epochs(e), e.seconds);
    }

    /// Updates its page.
    pub(super) fn show(&self, search: &Search, log: &Log) {
        // There is no page.
        if self.args.dashboard.is_none() {
            return;
        }
        self.seen.send_replace(sweep::data(&self.picture(search, log)));
    }

    /// Writes and prints the results.
    pub(super) fn tell(&self, search: &Search, log: &Log) -> Result<(), Failure> {
        let Some((trial, rung, _)) = search.best() else {
            return Err(Failure::new(
                exit::FAILED,
                format!("none of {} trials has a result", self.points.len()),
            )
            .help(format!("{} says why for each", self.dir.join(LOG_FILE).display())));
        };
        let ended = log.ended.iter().rfind(|e| (e.trial, e.rung) == (trial, rung));
        let point = self.space.set(&self.points[trial]);
        let set: Vec<String> = self.args.set.iter().cloned().chain(point.clone()).collect();
        let mut best = Job::load(&self.args.job, &set)?;
        launch::absolute_paths(&mut best)?;
        let file = self.dir.join(BEST_FILE);
        fs::write(&file, best.to_toml()).map_err(|e| Failure::write(&file, e))?;
        let value = ended.and_then(|e| e.value);
        let epochs = self.epochs_on(log, trial, rung);
        let report = self.dir.join(REPORT_FILE);
        write_sweep(&report, &self.picture(search, log))?;
        if self.args.json {
            out!(
                "{}",
                json!({ "best": { "trial": trial, "epochs": epochs, "value": value, "set": point, "job": file } })
            );
            return Ok(());
        }
        let value = value.map(|v| self.shown(v)).unwrap_or_default();
        out!(
            "best    trial {trial}, {} {} after {epochs} epochs: {}",
            self.space.metric.name(),
            value.trim(),
            point.join(" ")
        );
        out!("job     {}", file.display());
        out!("report  {}", report.display());
        Ok(())
    }

    fn shown(&self, value: f64) -> String {
        match self.space.metric {
            space::Metric::Accuracy => format!("{:6.2} %", 100.0 * value),
            space::Metric::Loss | space::Metric::Auc => format!("{value:.4}"),
        }
    }

    /// The sweep as data for its page.
    fn picture(&self, search: &Search, log: &Log) -> sweep::Sweep {
        let best = search.best().map(|(trial, rung, score)| {
            format!(
                "Best: trial {trial}, {} {} after {} epochs, with {}.",
                self.space.metric.name(),
                self.shown(self.space.metric.score(score)).trim(),
                self.epochs_on(log, trial, rung),
                self.space.set(&self.points[trial]).join(", ")
            )
        });
        let axes = self.space.axes.iter();
        let axis = |a: &space::Axis| sweep::Axis { key: a.key.clone(), ticks: a.ticks() };
        let mut by_trial: BTreeMap<usize, Vec<&TrialEnd>> = BTreeMap::new();
        log.ended.iter().for_each(|e| by_trial.entry(e.trial).or_default().push(e));
        let trial = |(&trial, ended): (&usize, &Vec<&TrialEnd>)| {
            let last = ended.iter().max_by_key(|e| e.rung)?;
            let set = self.points[trial].iter().zip(&self.space.axes);
            Some(sweep::Trial {
                trial,
                set: set.map(|(value, axis)| (space::shown(value), axis.place(value))).collect(),
                epochs: self.epochs(last),
                first: ended.iter().find(|e| e.rung == 0).and_then(|e| self.score(e)),
                value: last.value,
                seconds: ended.iter().map(|e| e.seconds).sum(),
                why: last.why.clone(),
            })
        };
        let trials: Vec<_> = by_trial.iter().filter_map(trial).collect();
        let whole = trials.iter().filter(|t| Some(&t.epochs) == self.rungs.last()).count();
        let epochs: u64 = log
            .ended
            .iter()
            .map(|e| self.epochs(e).saturating_sub(if e.rung > 0 { self.rungs[e.rung - 1] } else { 0 }))
            .sum();
        let all = self.rungs.last().copied().unwrap_or_default() * trials.len() as u64;
        let mut headline = vec![
            best.unwrap_or_else(|| "No trial has a result yet.".into()),
            format!(
                "{} of {} trials had all {} epochs; {epochs} epochs were trained, where a grid would have trained {all}.",
                whole,
                trials.len(),
                self.rungs.last().copied().unwrap_or_default()
            ),
        ];
        let others: BTreeSet<&str> = log.ended.iter().filter_map(|e| e.beside.as_deref()).collect();
        if self.shares_cores {
            headline.push("Trials shared cores (--share-cores): their times are not their own.".into());
        }
        if !others.is_empty() {
            let some: Vec<&str> = others.iter().take(3).copied().collect();
            let more = others.len() - some.len();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            headline.push(format!(
                "Jobs trained on this machine at the same time ({}{more}): the times of {} trials are not their own.",
                some.join(", "),
                log.ended.iter().filter(|e| e.beside.is_some()).map(|e| e.trial).collect::<BTreeSet<_>>().len()
            ));
        }
        sweep::Sweep {
            job: self.job.clone(),
            metric: self.space.metric.name().into(),
            least: self.space.metric == space::Metric::Loss,
            headline,
            axes: axes.map(axis).collect(),
            trials,
        }
    }

    /// The epochs that the trial was trained for.
    fn epochs(&self, e: &TrialEnd) -> u64 {
        e.stopped.unwrap_or(self.rungs[e.rung])
    }

    /// The epochs of a trial on a rung.
    fn epochs_on(&self, log: &Log, trial: usize, rung: usize) -> u64 {
        let ended = log.ended.iter().rfind(|e| (e.trial, e.rung) == (trial, rung));
        ended.map_or(self.rungs[rung], |e| self.epochs(e))
    }
}
