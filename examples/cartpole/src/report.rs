//! What a run did: rewards and importance weights by the age of the policy that played.

use crate::settings::Correct;
use serde::{Deserialize, Serialize};
use std::{collections::VecDeque, fmt::Write};

/// Episodes of a mean that says whether CartPole is solved.
pub const WINDOW: usize = 100;
/// The ages, in updates, at which a row of the report begins.
const FROM: [u64; 5] = [0, 1, 6, 21, 51];

/// Fragments whose policies were of about the same age when the learner took them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ages {
    /// The youngest, in updates.
    pub from: u64,
    /// The oldest; `None`: any.
    pub to: Option<u64>,
    /// Fragments, dropped ones too.
    pub fragments: u64,
    /// Episodes that ended in these fragments.
    pub episodes: u64,
    /// Sum of their rewards.
    pub rewards: f64,
    /// Fragments that were trained on.
    pub trained: u64,
    /// Sum of their mean truncated importance weights.
    pub weights: f64,
}

impl Ages {
    /// Mean reward of an episode; `None` without episodes.
    pub fn mean_reward(&self) -> Option<f64> {
        (self.episodes > 0).then(|| self.rewards / self.episodes as f64)
    }

    /// Mean of min(ρ̄, ratio) over the fragments trained on; `None` without any.
    pub fn mean_weight(&self) -> Option<f64> {
        (self.trained > 0).then(|| self.weights / self.trained as f64)
    }

    fn name(&self) -> String {
        match self.to {
            Some(to) if to == self.from => to.to_string(),
            Some(to) => format!("{}-{to}", self.from),
            None => format!("{}-", self.from),
        }
    }
}

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The job's seed.
    pub seed: u64,
    /// The correction.
    pub correct: Correct,
    /// The age at which actors took a version, in updates.
    pub refresh: u64,
    /// The oldest policy whose fragments were trained on, in updates.
    pub max_age: u64,
    /// Updates of the weights.
    pub updates: u64,
    /// Seconds of training.
    pub seconds: f64,
    /// Steps of the environment that were trained on.
    pub steps: u64,
    /// Fragments of policies that were too old.
    pub dropped: u64,
    /// Updates when the last [`WINDOW`] episodes, and then as many new ones of the newest weights, had the wanted mean reward;
    /// `None`: never.
    pub solved_at: Option<u64>,
    /// The highest mean reward of [`WINDOW`] successive episodes; `None`: there were fewer.
    pub best_mean: Option<f64>,
    /// Mean reward of the last episodes, at most [`WINDOW`].
    pub last_mean: f64,
    /// Mean reward of [`WINDOW`] new episodes of the final weights.
    pub final_mean: f64,
    /// By age.
    pub ages: Vec<Ages>,
    /// Rewards of the last episodes, at most [`WINDOW`], in the order in which they reached the learner.
    pub last: VecDeque<u32>,
}

impl Report {
    /// Before training.
    pub fn new(seed: u64, correct: Correct, refresh: u64, max_age: u64) -> Self {
        let to = FROM.iter().skip(1).map(|from| Some(from - 1)).chain([None]);
        Self {
            seed,
            correct,
            refresh,
            max_age,
            updates: 0,
            seconds: 0.0,
            steps: 0,
            dropped: 0,
            solved_at: None,
            best_mean: None,
            last_mean: 0.0,
            final_mean: 0.0,
            ages: FROM.iter().zip(to).map(|(from, to)| Ages { from: *from, to, ..Ages::default() }).collect(),
            last: VecDeque::new(),
        }
    }

    fn of_age(&mut self, age: u64) -> Option<&mut Ages> {
        self.ages.iter_mut().rev().find(|ages| ages.from <= age)
    }

    /// A fragment has come, and these episodes ended in it.
    pub fn came(&mut self, age: u64, episodes: &[u32]) {
        if let Some(ages) = self.of_age(age) {
            ages.fragments += 1;
            ages.episodes += episodes.len() as u64;
            ages.rewards += episodes.iter().map(|r| f64::from(*r)).sum::<f64>();
        }
        for reward in episodes {
            self.last.push_back(*reward);
            if self.last.len() > WINDOW {
                self.last.pop_front();
            }
            self.last_mean = self.mean_of_last(WINDOW);
            if self.last.len() == WINDOW {
                self.best_mean = Some(self.last_mean.max(self.best_mean.unwrap_or(0.0)));
            }
        }
    }

    /// A fragment was trained on, with this mean truncated importance weight.
    pub fn trained(&mut self, age: u64, weight: f32) {
        if let Some(ages) = self.of_age(age) {
            ages.trained += 1;
            ages.weights += f64::from(weight);
        }
    }

    /// Mean reward of the last `n` episodes, or of all if there were fewer; 0 without any.
    pub fn mean_of_last(&self, n: usize) -> f64 {
        let n = n.min(self.last.len());
        self.last.iter().rev().take(n).map(|r| f64::from(*r)).sum::<f64>() / n.max(1) as f64
    }

    /// Whether the last [`WINDOW`] episodes have at least this mean reward.
    pub fn reaches(&self, target: f64) -> bool {
        self.last.len() == WINDOW && self.last_mean >= target
    }
}

/// A table with a row for each run, and below it one by age for each correction.
pub fn table(reports: &[Report]) -> String {
    let mut text = String::from(
        "seed  correct  refresh  updates  solved at    seconds    steps  dropped  best 100  last 100  final 100\n",
    );
    for r in reports {
        let solved = r.solved_at.map_or("-".into(), |at| at.to_string());
        let best = r.best_mean.map_or("-".into(), |m| format!("{m:.1}"));
        let _ = writeln!(
            text,
            "{:<5} {:<8} {:>7} {:>8} {:>10} {:>10.1} {:>8} {:>8} {:>9} {:>9.1} {:>10.1}",
            r.seed,
            r.correct.name(),
            r.refresh,
            r.updates,
            solved,
            r.seconds,
            r.steps,
            r.dropped,
            best,
            r.last_mean,
            r.final_mean
        );
    }
    text.push_str("\ncorrect  refresh  policy age  fragments  episodes  mean reward  mean weight\n");
    let mut kinds: Vec<(Correct, u64)> = Vec::new();
    for r in reports {
        if !kinds.contains(&(r.correct, r.refresh)) {
            kinds.push((r.correct, r.refresh));
        }
    }
    for (correct, refresh) in kinds {
        let of_kind: Vec<_> =
            reports.iter().filter(|r| r.correct == correct && r.refresh == refresh).collect();
        for i in 0..FROM.len() {
            let rows = of_kind.iter().filter_map(|r| r.ages.get(i));
            let sum = rows.fold(Ages::default(), |sum, row| Ages {
                from: row.from,
                to: row.to,
                fragments: sum.fragments + row.fragments,
                episodes: sum.episodes + row.episodes,
                rewards: sum.rewards + row.rewards,
                trained: sum.trained + row.trained,
                weights: sum.weights + row.weights,
            });
            let mean = |m: Option<f64>, digits: usize| m.map_or("-".into(), |m| format!("{m:.digits$}"));
            let _ = writeln!(
                text,
                "{:<8} {:>7}  {:>10} {:>10} {:>9} {:>12} {:>12}",
                correct.name(),
                refresh,
                sum.name(),
                sum.fragments,
                sum.episodes,
                mean(sum.mean_reward(), 1),
                mean(sum.mean_weight(), 3)
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report::new(1, Correct::Vtrace, 50, 50)
    }

    #[test]
    fn fragments_are_counted_by_the_age_of_their_policy() {
        let mut report = report();
        for age in [0, 1, 5, 6, 20, 21, 50, 51, 1000] {
            report.came(age, &[10, 20]);
            report.trained(age, 0.5);
        }
        let counts: Vec<_> = report.ages.iter().map(|a| (a.fragments, a.episodes)).collect();
        assert_eq!(counts, [(1, 2), (2, 4), (2, 4), (2, 4), (2, 4)]);
        assert!(report.ages.iter().all(|a| a.mean_reward() == Some(15.0) && a.mean_weight() == Some(0.5)));
    }

    #[test]
    fn only_a_full_window_reaches_the_target() {
        let mut report = report();
        report.came(0, &[500; WINDOW - 1]);
        assert!(!report.reaches(475.0) && report.best_mean.is_none());
        report.came(0, &[0]);
        assert!(report.reaches(475.0) && report.best_mean == Some(495.0));
        report.came(0, &[0; 10]);
        assert_eq!(
            (report.last_mean, report.best_mean, report.mean_of_last(20)),
            (445.0, Some(495.0), 225.0)
        );
    }

    #[test]
    fn table_has_a_row_for_each_run_and_age() {
        let mut not = Report { correct: Correct::None, ..report() };
        not.came(30, &[100]);
        let text = table(&[report(), Report { seed: 2, ..report() }, not]);
        assert_eq!(text.lines().count(), 1 + 3 + 2 + 2 * FROM.len(), "{text}");
        assert!(
            text.contains("none          50       21-50          1         1        100.0            -"),
            "{text}"
        );
    }

    #[test]
    fn report_survives_json() {
        let mut report = report();
        report.came(3, &[77]);
        let text = serde_json::to_string(&report).expect("JSON");
        assert_eq!(serde_json::from_str::<Report>(&text).expect("a report"), report);
    }
}
