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
mod tests {
    use super::*;

    /// Known learning curves: the score of trial `t` on rung `r`.
    fn curve(t: usize, r: usize) -> f64 {
        // Some learn slowly and end high.
        [0.5, 0.9, 0.2, 0.7, 0.6, 0.1, 0.8, 0.3, 0.4][t]
            + r as f64 * [0.3, 0.01, 0.1, 0.2, 0.0, 0.5, 0.05, 0.1, 0.2][t]
    }

    fn run(search: &mut Search) -> Vec<(usize, usize)> {
        let mut order = Vec::new();
        while let Next::Train { trial, rung } = search.next() {
            order.push((trial, rung));
            search.ended(trial, rung, Some(curve(trial, rung)));
        }
        order
    }

    #[test]
    fn halving_sends_the_best_third_of_each_full_rung_on() {
        let mut search = Search::new(Rule::Halving, 9, 3, 3);
        let first: Vec<_> = (0..9).map(|t| (t, 0)).collect();
        // Best on rung 0: 1 (0.9), 6 (0.8), 3 (0.7); on rung 1: 1 has 0.91, 6 0.85, 3 0.9.
        assert_eq!(run(&mut search), [&first[..], &[(1, 1), (6, 1), (3, 1), (1, 2)]].concat());
        assert_eq!(search.best().map(|(t, r, _)| (t, r)), Some((1, 2)));
        assert_eq!(search.next(), Next::Done);
    }

    #[test]
    fn halving_waits_for_a_full_rung_in_any_order_of_ends() {
        let mut search = Search::new(Rule::Halving, 9, 3, 3);
        let begun: Vec<_> = (0..9).map(|_| search.next()).collect();
        assert_eq!(begun.len(), 9);
        for t in (1..9).rev() {
            search.ended(t, 0, Some(curve(t, 0)));
            assert_eq!(search.next(), Next::Wait, "trial 0 is not there");
        }
        search.ended(0, 0, Some(curve(0, 0)));
        assert_eq!(run(&mut search), [(1, 1), (6, 1), (3, 1), (1, 2)]);
    }

    /// Algorithm 2 by hand, with one worker: after each third result of a rung its best continues at
    /// once, even if a better one follows.
    #[test]
    fn asha_promotes_early_and_the_highest_rung_first() {
        let mut search = Search::new(Rule::Asha, 9, 3, 3);
        let first = [(0, 0), (1, 0), (2, 0), (1, 1)]; // the best of three
        let then = [(3, 0), (4, 0), (5, 0), (3, 1)]; // the best two of six are 1 and 3
        let last = [(6, 0), (6, 1), (1, 2), (7, 0), (8, 0)]; // of seven 1 and 6; of three on rung 1 it is 1
        assert_eq!(run(&mut search), [&first[..], &then, &last].concat());
        assert_eq!(search.next(), Next::Done);
    }

    /// A trial that was promoted early stays promoted, and counts.
    #[test]
    fn asha_gives_a_free_worker_a_trial_while_others_train() {
        let mut search = Search::new(Rule::Asha, 4, 2, 2);
        let all: Vec<_> = (0..4).map(|_| search.next()).collect();
        assert!(all.iter().enumerate().all(|(i, n)| *n == Next::Train { trial: i, rung: 0 }));
        assert_eq!(search.next(), Next::Wait);
        search.ended(2, 0, Some(0.1));
        assert_eq!(search.next(), Next::Wait, "one of one is not one of two");
        search.ended(3, 0, Some(0.0));
        assert_eq!(search.next(), Next::Train { trial: 2, rung: 1 });
        search.ended(0, 0, Some(0.9));
        assert_eq!(search.next(), Next::Train { trial: 0, rung: 1 }, "it is the best of three by now");
        search.ended(1, 0, None);
        assert_eq!(search.next(), Next::Wait, "the best two of four have gone on");
        search.ended(0, 1, Some(0.9));
        search.ended(2, 1, Some(0.95));
        assert_eq!(search.next(), Next::Done);
        assert_eq!(search.best(), Some((2, 1, 0.95)));
    }

    #[test]
    fn what_has_failed_goes_nowhere_and_is_counted() {
        let mut search = Search::new(Rule::Asha, 4, 2, 2);
        for t in 0..4 {
            search.begin(t, 0);
            search.ended(t, 0, None);
        }
        assert_eq!(search.next(), Next::Done);
        assert_eq!(search.best(), None);
    }

    #[test]
    fn a_resumed_sweep_knows_unfinished_trials() {
        let mut search = Search::new(Rule::Once, 3, 1, 2);
        assert_eq!(search.next(), Next::Train { trial: 0, rung: 0 });
        assert_eq!(search.next(), Next::Train { trial: 1, rung: 0 });
        search.ended(1, 0, Some(1.0));
        assert_eq!(search.unfinished(), [(0, 0)]);
        assert_eq!(search.next(), Next::Train { trial: 2, rung: 0 });
        search.ended(2, 0, Some(0.0));
        assert_eq!(search.next(), Next::Wait);
        search.ended(0, 0, Some(f64::NAN));
        assert_eq!(search.next(), Next::Done);
        assert_eq!(search.best(), Some((1, 0, 1.0)));
    }
}
