//! What a comparison says, in sentences that follow from rules which stand on the page beside them.

use super::{Figures, Group, Spread};
use crate::report::text;

/// How the verdict comes about. Also in docs/metrics.md.
pub const RULES: [&str; 5] = [
    "A run counts when it ended in order with a loss that is a number; the others are named as diverged. A group (one mode, \
     one number of workers, one algorithm, all seeds) can win only when each of its seeds counts.",
    "The fastest group has the least mean time to the target accuracy among those of which every seed reached it. \
     Likewise the group that needed the fewest samples.",
    "The best group at the end has the highest mean final accuracy; where nothing is classified, the least mean final loss.",
    "Two groups differ clearly when each seed of the one beats each seed of the other, and both have two seeds at least. \
     Otherwise nothing is to be concluded from their difference.",
    "The group to use is the fastest one to the target (where no group reached it, or there is none: the one with the shortest \
     training time) among those whose mean final accuracy is at most 0.5 points below the best one's, or whose mean final \
     loss is at most 5 % above it. It must differ clearly from each other group: from those in that time, from the rest in \
     accuracy or loss.",
];

/// Of accuracy, 0 to 1: rule 5.
const POINTS: f64 = 0.005;
/// Of the loss: rule 5.
const LOSS_SHARE: f64 = 0.05;

/// What follows from [`RULES`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The most important first.
    pub sentences: Vec<String>,
    /// The group to use, by its place among the groups.
    pub recommended: Option<usize>,
}

/// A group that can win, with its figures.
struct Candidate<'a> {
    place: usize,
    label: &'a str,
    figures: Figures,
    runs: usize,
}

type Get = fn(&Figures) -> Option<Spread>;

impl Verdict {
    pub(super) fn of(groups: &[Group<'_>]) -> Self {
        let mut sentences = Vec::new();
        let diverged: Vec<String> = groups
            .iter()
            .filter(|g| g.diverged() > 0)
            .map(|g| format!("{} ({} of {} runs)", g.label, g.diverged(), g.cells.len()))
            .collect();
        let candidates: Vec<Candidate<'_>> = groups
            .iter()
            .enumerate()
            .filter(|(_, g)| g.whole())
            .map(|(place, g)| Candidate { place, label: &g.label, figures: g.figures(), runs: g.cells.len() })
            .collect();
        let target = groups.iter().flat_map(|g| &g.summaries).find_map(|s| s.target_accuracy);

        let seconds: Get = |f| f.seconds_to_target;
        let reached: Vec<&Candidate<'_>> = candidates
            .iter()
            .filter(|c| c.figures.seconds_to_target.is_some_and(|s| s.runs == c.runs))
            .collect();
        if let Some(target) = target.map(text::percent) {
            sentences.extend(target_sentences(&target, &reached));
        }

        // Turned round where more is better, so that there is one order.
        let accuracy = candidates.iter().any(|c| c.figures.final_accuracy.is_some());
        let end: Get = if accuracy { |f| f.final_accuracy.map(Spread::negative) } else { |f| f.final_loss };
        let all: Vec<&Candidate<'_>> = candidates.iter().collect();
        let best = fastest(&all, end);
        if let Some(best) = best {
            let (what, shown): (_, &dyn Fn(f64) -> String) = match accuracy {
                true => ("Most accurate at the end", &|v: f64| text::percent(-v)),
                false => ("Least loss at the end", &text::measured),
            };
            sentences.push(first(what, best, &all, end, shown));
        }

        let good_enough = |c: &&Candidate<'_>| {
            let (Some(own), Some(top)) = (end(&c.figures), best.and_then(|b| end(&b.figures))) else {
                return false;
            };
            own.mean <= if accuracy { top.mean + POINTS } else { top.mean * (1.0 + LOSS_SHARE) }
        };
        let to_target: Vec<_> = reached.iter().copied().filter(|c| good_enough(c)).collect();
        let trained: Vec<_> = all.iter().copied().filter(|c| good_enough(c)).collect();
        let first_in_time = fastest(&to_target, seconds).or_else(|| fastest(&trained, |f| f.seconds));
        let time: Get = if to_target.is_empty() { |f| f.seconds } else { seconds };
        let mut recommended = first_in_time;
        if let Some(r) = first_in_time.filter(|_| groups.len() > 1) {
            let near = if accuracy { "0.5 points of the best accuracy" } else { "5 % of the least loss" };
            let others = all.iter().copied().filter(|c| c.place != r.place);
            let unclear: Vec<&str> = others
                .filter(|c| !clearly_before(r, c, if good_enough(c) { time } else { end }))
                .map(|c| c.label)
                .collect();
            let said = if let [one, more @ ..] = &unclear[..] {
                recommended = None;
                not_clear(r, one, more.len(), all.iter().all(|c| c.runs > 1))
            } else if all.len() == 1 {
                format!("Use {}: no other group has only runs that count.", r.label)
            } else if trained.len() == 1 {
                format!("Use {}: the only group within {near}.", r.label)
            } else {
                let why = match target.filter(|_| !to_target.is_empty()) {
                    Some(target) => format!("the fastest to {}", text::percent(target)),
                    None => "the shortest training time".into(),
                };
                format!("Use {}: {why} of the {} groups within {near}.", r.label, trained.len())
            };
            sentences.insert(0, said);
        }
        if !diverged.is_empty() {
            sentences.push(format!("Diverged: {}.", diverged.join(", ")));
        }
        if candidates.is_empty() {
            sentences.push("No group has only runs that count.".into());
        }
        Self { sentences, recommended: recommended.map(|r| r.place) }
    }
}

impl Spread {
    fn negative(self) -> Self {
        Self { mean: -self.mean, min: -self.max, max: -self.min, ..self }
    }
}

/// Rule 2: who reached the target first, and with the fewest samples.
fn target_sentences(target: &str, reached: &[&Candidate<'_>]) -> Vec<String> {
    let seconds: Get = |f| f.seconds_to_target;
    let Some(best) = fastest(reached, seconds) else {
        return vec![format!("No group reached {target} with each of its seeds.")];
    };
    let mut sentences = vec![first(&format!("Fastest to {target}"), best, reached, seconds, &text::seconds)];
    let samples: Get = |f| f.samples_to_target;
    if let Some(few) = fastest(reached, samples) {
        let count = |n: f64| format!("{} samples", text::count(n.round() as u64));
        sentences.push(first(&format!("Fewest samples to {target}"), few, reached, samples, &count));
    }
    sentences
}

/// The one with the least mean; of equal ones the first.
fn fastest<'a, 'b>(of: &[&'a Candidate<'b>], get: Get) -> Option<&'a Candidate<'b>> {
    let mut with: Vec<_> = of.iter().filter_map(|c| Some((get(&c.figures)?.mean, *c))).collect();
    with.sort_by(|a, b| a.0.total_cmp(&b.0));
    with.first().map(|(_, c)| *c)
}

/// Rule 4: whether the one is clearly before the other.
fn clearly_before(one: &Candidate<'_>, other: &Candidate<'_>, get: Get) -> bool {
    let (Some(own), its) = (get(&one.figures), get(&other.figures)) else { return false };
    // Who has no figure never reached the target.
    one.runs > 1 && other.runs > 1 && own.runs == one.runs && its.is_none_or(|its| own.max < its.min)
}

fn not_clear(first: &Candidate<'_>, other: &str, more: usize, seeds: bool) -> String {
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let advice = if seeds { "" } else { " Add --seeds 3." };
    let first = first.label;
    format!("No recommendation: {first} does not differ clearly from {other}{more}.{advice}")
}

/// Who is first, and how clearly before the next one.
fn first(
    what: &str,
    best: &Candidate<'_>,
    of: &[&Candidate<'_>],
    get: Get,
    shown: &dyn Fn(f64) -> String,
) -> String {
    let others: Vec<&Candidate<'_>> = of.iter().copied().filter(|c| c.place != best.place).collect();
    let (Some(own), next) = (get(&best.figures), fastest(&others, get)) else { return String::new() };
    let mut said = format!("{what}: {}, {}", best.label, shown(own.mean));
    let Some((next, its)) = next.and_then(|n| Some((n, get(&n.figures)?))) else { return said + "." };
    said += &format!("; next is {}, {}", next.label, shown(its.mean));
    said += match () {
        () if own.runs < 2 || its.runs < 2 => ". One seed says nothing about chance.",
        () if own.max < its.min => ". Each seed of the one beats each of the other.",
        () => ". Their seeds overlap: nothing is to be concluded from this difference.",
    };
    said
}
