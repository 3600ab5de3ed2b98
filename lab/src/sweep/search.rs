//! Which trial trains next, and up to which rung, from the results so far. Independent of settings,
//! jobs and time.
//!
//! A trial is a number; a rung is a budget, and the lowest is 0. A promoted trial resumes where it
//! stopped.
//!
//! - *once*: every trial gets the whole budget.
//! - *halving*: successive halving (Jamieson and Talwalkar 2016): when a rung is complete, the best of
//!   each `eta` trials continue.
//! - *asha*: asynchronous successive halving, algorithm 2 of Li et al. 2018 (arXiv 1810.05934): a free
//!   worker gets a trial among the best of each `eta` of a rung so far, the highest rung first, or else
//!   a new trial on the lowest rung.

use std::collections::{BTreeMap, BTreeSet};

/// The rule of promotion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    Once,
    Halving,
    Asha,
}

/// The next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// This trial trains up to this rung.
    Train { trial: usize, rung: usize },
    /// Wait until another trial has ended.
    Wait,
    /// All trials are done.
    Done,
}

/// A trial's result on a rung: higher is better. `None` if it failed or diverged.
pub type Score = Option<f64>;

/// The trials of a sweep.
#[derive(Clone, Debug)]
pub struct Search {
    rule: Rule,
    /// The total number of trials.
    trials: usize,
    eta: usize,
    /// The trials that have started each rung.
    begun: Vec<BTreeSet<usize>>,
    /// Their results.
    results: Vec<BTreeMap<usize, Score>>,
}

impl Search {
    /// A search over `trials` trials on `rungs` rungs; one of `eta` continues.
    pub fn new(rule: Rule, trials: usize, rungs: usize, eta: usize) -> Self {
        let rungs = if rule == Rule::Once { 1 } else { rungs.max(1) };
        Self {
            rule,
            trials,
            eta: eta.max(2),
            begun: vec![BTreeSet::new(); rungs],
            results: vec![BTreeMap::new(); rungs],
        }
    }

    /// The next action for a free worker; the trial counts as started.
    pub fn next(&mut self) -> Next {
        let found = match self.rule {
            Rule::Once => self.new_trial(),
            Rule::Halving => self.halving(),
            Rule::Asha => self.asha(),
        };
        match found {
            Some((trial, rung)) => {
                self.begin(trial, rung);
                Next::Train { trial, rung }
            }
            None if self.is_idle() => Next::Done,
            None => Next::Wait,
        }
    }

    /// Marks a trial as started: [`Self::next`] does so, and a resumed sweep from its log.
    pub fn begin(&mut self, trial: usize, rung: usize) {
        if let Some(begun) = self.begun.get_mut(rung) {
            begun.insert(trial);
        }
    }

    /// Records a result.
    pub fn ended(&mut self, trial: usize, rung: usize, score: Score) {
        self.begin(trial, rung);
        if let Some(results) = self.results.get_mut(rung) {
            results.insert(trial, score.filter(|s| s.is_finite()));
        }
    }

    /// Trials that a resumed sweep finds started but not ended: they are retried.
    pub fn unfinished(&self) -> Vec<(usize, usize)> {
        let of = |(rung, begun): (usize, &BTreeSet<usize>)| {
            let ended = &self.results[rung];
            begun.iter().filter(|t| !ended.contains_key(t)).map(|t| (*t, rung)).collect::<Vec<_>>()
        };
        self.begun.iter().enumerate().flat_map(of).collect()
    }

    /// The best of the trials that came furthest.
    pub fn best(&self) -> Option<(usize, usize, f64)> {
        let best = |(rung, _): (usize, _)| self.ranked(rung).first().map(|(t, s)| (*t, rung, *s));
        self.results.iter().enumerate().rev().find_map(best)
    }

    fn is_idle(&self) -> bool {
        self.begun.iter().zip(&self.results).all(|(begun, ended)| begun.len() == ended.len())
    }

    fn new_trial(&self) -> Option<(usize, usize)> {
        let next = self.begun[0].last().map_or(0, |last| last + 1);
        (next < self.trials).then_some((next, 0))
    }

    /// Trials with a score, the best first; of equals the earlier one.
    fn ranked(&self, rung: usize) -> Vec<(usize, f64)> {
        let mut all: Vec<_> = self.results[rung].iter().filter_map(|(t, s)| Some((*t, (*s)?))).collect();
        all.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
        all
    }

    /// A trial among the best of each `eta` that have ended on a rung, and that has not started the
    /// next.
    fn promotable(&self, rung: usize) -> Option<(usize, usize)> {
        let above = self.begun.get(rung + 1)?;
        let most = self.results[rung].len() / self.eta;
        let top = self.ranked(rung).into_iter().take(most);
        top.map(|(t, _)| t).find(|t| !above.contains(t)).map(|t| (t, rung + 1))
    }

    fn asha(&self) -> Option<(usize, usize)> {
        (0..self.begun.len()).rev().find_map(|rung| self.promotable(rung)).or_else(|| self.new_trial())
    }

    fn halving(&self) -> Option<(usize, usize)> {
        if let Some(new) = self.new_trial() {
            return Some(new);
        }
        // A rung is complete when all trials that the rung below promotes have ended there.
        let (mut rung, mut size) = (0, self.trials);
        while rung + 1 < self.begun.len() && self.results[rung].len() == size {
            if let Some(next) = self.promotable(rung) {
                return Some(next);
            }
            size = self.begun[rung + 1].len();
            rung += 1;
        }
        None
    }
}

#[cfg(test)]
#[path = "search_tests.rs"]
mod tests;
