//! Tests of `shares`.

use super::*;
fn at(shares: &mut Shares, worker: u32, done: u64, members: &[u32]) -> (u32, u32) {
    let share = shares.of(WorkerId(worker), (Step(done), false), members.iter().map(|w| WorkerId(*w)));
    (share.place, share.of)
}

#[test]
fn who_is_there_takes_over_what_is_left() {
    let mut shares = Shares::default();
    assert_eq!(at(&mut shares, 1, 8, &[0, 1, 2]), (1, 3));
    assert_eq!(at(&mut shares, 2, 8, &[0, 1, 2]), (2, 3));
    // The first worker is lost before it asks: the others take its share of this evaluation and of the next.
    assert_eq!(at(&mut shares, 2, 8, &[1, 2]), (2, 3));
    assert_eq!(at(&mut shares, 1, 16, &[1, 2]), (0, 2));
    assert_eq!(at(&mut shares, 2, 16, &[1, 2]), (1, 2));
}

#[test]
fn who_joins_has_nothing_of_what_the_others_have_cut() {
    let mut shares = Shares::default();
    assert_eq!(at(&mut shares, 0, 8, &[0]), (0, 1));
    assert_eq!(at(&mut shares, 3, 8, &[0, 3]), (1, 1), "the first has it all");
    assert_eq!(at(&mut shares, 0, 9, &[0, 3]), (0, 2));
    // Slower workers ask for a step that the fastest asked for long ago.
    assert_eq!(at(&mut shares, 3, 7, &[0, 3]), (1, 1));
    assert_eq!(at(&mut shares, 3, 9, &[3]), (1, 2));
}

#[test]
fn behind_the_last_step_those_that_all_have_waited_for_share_it() {
    let mut shares = Shares::default();
    let mut met = |worker, members: &[u32]| {
        let share = shares.of(WorkerId(worker), (Step(8), true), members.iter().map(|w| WorkerId(*w)));
        (share.place, share.of)
    };
    assert_eq!(met(1, &[1, 2]), (0, 2));
    assert_eq!(met(2, &[2]), (1, 2), "the other has its share");
    let mut shares = Shares::default();
    assert_eq!(
        at(&mut shares, 1, 8, &[0, 1, 2]),
        (1, 3),
        "who came by first does not know who will be there"
    );
    let members = [1, 2].map(WorkerId);
    let mut met = |worker| shares.of(WorkerId(worker), (Step(8), true), members.into_iter());
    assert_eq!([met(1), met(2)].map(|s| (s.place, s.of)), [(0, 2), (1, 2)]);
}

#[test]
fn it_stays_small() {
    let mut shares = Shares::default();
    for step in 0..1000 {
        at(&mut shares, 0, step, if step % 2 == 0 { &[0, 1] } else { &[0] });
    }
    assert_eq!(shares.cuts.len(), MAX_CUTS);
    assert_eq!(at(&mut shares, 0, 3, &[0]), (0, 2), "as the oldest that is known");
}
