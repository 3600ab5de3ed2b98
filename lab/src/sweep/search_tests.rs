//! Tests of `search`.

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
