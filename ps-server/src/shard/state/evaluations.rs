//! The evaluations of a shard, and the early stop that they lead to.

use super::{Meta, Shard, State};
use crate::shard::command::{Closed, EvalSums, Evaluated, Outcome};
use paraft_common::{
    SessionId, WorkerId,
    config::{EarlyStop, LastEvaluation, Stopping},
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Represents a lost worker among those that reported. (A job has at most 65,536 workers.)
const LOST_WORKER: WorkerId = WorkerId(u32::MAX);

/// Bound on the open evaluations. A worker that is further ahead loses the oldest one, so that no worker can grow
/// the state without end.
const MAX_OPEN_EVALUATIONS: usize = 1024;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct OpenEvaluation {
    from: BTreeSet<WorkerId>,
    sums: EvalSums,
}

impl Meta {
    /// Marks the worker's shares of the open evaluations as missing: its session is over.
    pub(super) fn mark_missing_shares(&mut self, worker: WorkerId) {
        let unreported = self.evaluations.values_mut().filter(|open| !open.from.contains(&worker));
        unreported.for_each(|open| _ = open.from.insert(LOST_WORKER));
    }

    /// The early-stopping state that a checkpoint stores, by the job's `rule`. It excludes open evaluations,
    /// because workers that resume report them again. It excludes a person's stop request, because a resumed
    /// job must run.
    pub fn stopping(&self, rule: Option<EarlyStop>) -> Stopping {
        let (best_loss, bad) = self.best.unwrap_or((f64::INFINITY, 0));
        let evaluated = self.evaluated.map(|e| LastEvaluation {
            number: e.epoch,
            loss_sum: e.sums.loss_sum,
            correct: e.sums.correct,
            count: e.sums.count,
        });
        let stop = self.stop && rule.is_some_and(|rule| bad >= rule.patience);
        Stopping { best_loss, bad, stop, evaluated }
    }
}

impl Shard {
    /// Adds a worker's share to the evaluation of an epoch.
    pub(super) fn report(&self, worker: WorkerId, session: SessionId, epoch: u64, sums: EvalSums) -> Outcome {
        let state = &mut *self.state.write();
        let meta = &mut state.meta;
        if meta.members.in_session(worker, session).is_none() {
            return Outcome::Evaluated(Vec::new());
        }
        if let Some(last) = meta.evaluated.filter(|last| epoch <= last.epoch)
            && !meta.evaluations.contains_key(&epoch)
        {
            // Already complete. The answer may have been lost with a leader, so the latest one is repeated.
            let again = (last.epoch == epoch).then_some(Closed { evaluated: last, incomplete: false });
            return Outcome::Evaluated(again.into_iter().collect());
        }
        let open = meta.evaluations.entry(epoch).or_default();
        if open.from.insert(worker) {
            open.sums.loss_sum += sums.loss_sum;
            // Workers choose these numbers: an overflow must not stop a replica.
            open.sums.correct = open.sums.correct.saturating_add(sums.correct);
            open.sums.count = open.sums.count.saturating_add(sums.count);
        }
        if meta.evaluations.len() > MAX_OPEN_EVALUATIONS {
            meta.evaluations.pop_first();
        }
        Outcome::Evaluated(close_evaluations(state))
    }
}

/// Closes the evaluations that wait for no active member, and applies the early-stopping rule to those with all
/// shares: a mean over other samples shows neither improvement nor the lack of it. A worker that reported a later
/// epoch reports no earlier one. If all workers with shares are gone and none has reported, the epoch may still be
/// evaluated again.
pub(super) fn close_evaluations(state: &mut State) -> Vec<Closed> {
    let State { configured, meta } = state;
    let mut reported: BTreeMap<WorkerId, u64> = BTreeMap::new();
    let of_each = meta.evaluations.iter().flat_map(|(epoch, o)| o.from.iter().map(move |w| (*w, *epoch)));
    of_each.for_each(|(worker, epoch)| _ = reported.insert(worker, epoch));
    let is_beyond = |w: &WorkerId, epoch: u64| reported.get(w).is_some_and(|last| *last > epoch);
    let mut done = Vec::new();
    for (epoch, open) in &meta.evaluations {
        let has_gap = open.from.contains(&LOST_WORKER);
        if has_gap && open.sums == EvalSums::default() {
            continue;
        }
        let mut missing =
            meta.members.unfinished().map(|(w, _)| w).filter(|w| !open.from.contains(w)).peekable();
        let is_whole = !has_gap && missing.peek().is_none();
        if missing.all(|w| is_beyond(&w, *epoch)) {
            done.push((*epoch, is_whole));
        }
    }
    let (rule, workers) =
        configured.as_ref().map_or((None, 1), |c| (c.job.early_stop, u64::from(c.job.workers).max(1)));
    // Half of an equal share of one worker.
    let half = |count: u64| count / (2 * workers);
    done.into_iter()
        .filter_map(|(epoch, is_whole)| {
            let sums = meta.evaluations.remove(&epoch)?.sums;
            let loss = sums.loss_sum / sums.count.max(1) as f64;
            if let Some(rule) = rule.filter(|_| is_whole) {
                // A worker that was lost before any report leaves no trace except the count. An evaluation with
                // more or fewer samples than the previous one restarts the comparison.
                let known = meta.evaluated.map_or(sums.count, |last| last.sums.count);
                let is_alike = sums.count >= known - half(known) && sums.count - half(sums.count) <= known;
                let (best, bad) = meta.best.filter(|_| is_alike).unwrap_or((f64::INFINITY, 0));
                meta.best = Some(if loss < best - rule.min_delta { (loss, 0) } else { (best, bad + 1) });
                meta.stop |= meta.best.is_some_and(|(_, bad)| bad >= rule.patience);
            }
            let evaluated = Evaluated { epoch, sums, stop: meta.stop };
            if is_whole && meta.evaluated.is_none_or(|last| last.epoch < epoch) {
                meta.evaluated = Some(evaluated);
            }
            Some(Closed { evaluated, incomplete: !is_whole })
        })
        .collect()
}
