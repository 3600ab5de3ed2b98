//! Tests of `pending`.

use super::*;
use paraft_common::{Payload, Seq, Version, optim::Overrides};
use proptest::prelude::*;

fn push(worker: u32, unit: usize, step: u64, bytes: usize) -> Push {
    let (session, seq, pulled) = (SessionId(1), Seq(step), Version(0));
    let contribution =
        Contribution { worker: WorkerId(worker), session, seq, step: Step(step), pulled, samples: 1 };
    let payload = Payload::from(vec![0u8; bytes]);
    let (conn, arrived, sum_of_squares) = (1, Moment(step), 0.0);
    Push {
        conn,
        contribution,
        unit,
        sum_of_squares,
        payload,
        overrides: Overrides::default(),
        skip: false,
        clipped: false,
        arrived,
        precedes_weights: false,
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum PendingKind {
    Room,
    Update,
    Round,
    Norm,
    Outcome,
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Waits(PendingKind, (u32, usize, u64), usize),
    NextForRoom,
    Updated(usize),
    Close(usize, u64),
    Proposed(u32, usize, u64),
    Outcome(u32, usize, u64),
    Forget(u32, u8),
    Says(u32),
}

fn op() -> impl Strategy<Value = Op> {
    let of = || (0u32..3, 0usize..2, 1u64..5);
    let what = prop::sample::select(vec![PendingKind::Room, PendingKind::Update, PendingKind::Round]);
    prop_oneof![
        9 => (what, of(), 1usize..9).prop_map(|(what, of, bytes)| Op::Waits(what, of, bytes)),
        2 => Just(Op::NextForRoom),
        2 => (0usize..2).prop_map(Op::Updated),
        3 => (0usize..2, 1u64..5).prop_map(|(b, s)| Op::Close(b, s)),
        3 => of().prop_map(|(w, b, s)| Op::Proposed(w, b, s)),
        3 => of().prop_map(|(w, b, s)| Op::Outcome(w, b, s)),
        1 => (0u32..3, 0u8..3).prop_map(|(w, n)| Op::Forget(w, n)),
        2 => (0u32..3).prop_map(Op::Says),
    ]
}

/// A plain model: every pending push and every command, in the order of arrival.
#[derive(Default)]
struct Model {
    all: Vec<((u32, usize, u64), PendingKind, u64)>,
    said: Vec<(u32, u32)>,
}

impl Model {
    fn put(&mut self, of: (u32, usize, u64), what: PendingKind, bytes: u64) {
        let place = self.all.iter().position(|(o, ..)| *o == of);
        match place.filter(|at| (self.all[*at].1, what) == (PendingKind::Room, PendingKind::Room)) {
            Some(at) => self.all[at].2 = bytes,
            None => {
                self.all.retain(|(o, ..)| *o != of);
                self.all.push((of, what, bytes));
            }
        }
    }

    fn holds(&self, worker: u32) -> bool {
        self.all.iter().any(|((w, ..), what, _)| *w == worker && *what != PendingKind::Outcome)
    }

    fn free(&mut self) -> Vec<u32> {
        let all = std::mem::take(&mut self.said);
        let (free, rest) = all.into_iter().partition(|(w, _)| !self.holds(*w));
        self.said = rest;
        let free: Vec<(u32, u32)> = free;
        free.into_iter().map(|(_, said)| said).collect()
    }
}

proptest! {
    /// Each push waits for exactly one thing, and every count equals the count over all pushes.
    #[test]
    fn each_push_waits_for_one_thing_and_commands_keep_order(
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let (mut pushes, mut model) = (PendingPushes::<u32>::default(), Model::default());
        for (number, op) in (0u32..).zip(ops) {
            match op {
                Op::Waits(what, (w, b, s), bytes) => {
                    let p = push(w, b, s, bytes);
                    match what {
                        PendingKind::Room => prop_assert!(pushes.wait_for_room(p, 99)),
                        PendingKind::Update => pushes.wait_for_update(p),
                        _ => {
                            let part = RoundPush { contribution: p.contribution, payload: p.payload, overrides: p.overrides, skip: p.skip, clipped: p.clipped };
                            pushes.wait_for_round(b, part, p.arrived);
                        }
                    }
                    model.put((w, b, s), what, bytes as u64);
                }
                Op::NextForRoom => {
                    let at = model.all.iter().position(|(_, what, _)| *what == PendingKind::Room);
                    let expected = at.map(|at| model.all.remove(at).0);
                    let of = |p: Push| (p.contribution.worker.0, p.unit, p.contribution.step.0);
                    prop_assert_eq!(pushes.next_for_room().map(of), expected);
                }
                Op::Updated(unit) => {
                    let mut waited: Vec<_> =
                        model.all.extract_if(.., |((_, b, _), what, _)| *b == unit && *what == PendingKind::Update).collect();
                    waited.sort_unstable_by_key(|(of, ..)| *of);
                    let got = pushes.updated(unit);
                    let got = got.iter().map(|p| (p.contribution.worker.0, p.unit, p.contribution.step.0));
                    prop_assert_eq!(got.collect::<Vec<_>>(), waited.into_iter().map(|(of, ..)| of).collect::<Vec<_>>());
                }
                Op::Close(unit, step) => {
                    let mut closed = Vec::new();
                    for ((w, b, s), what, _) in &mut model.all {
                        if (*b, *s, *what) == (unit, step, PendingKind::Round) {
                            *what = PendingKind::Norm;
                            closed.push(*w);
                        }
                    }
                    closed.sort_unstable();
                    let parts = pushes.close(Step(step), unit, (0..3).map(WorkerId).filter(|w| closed.contains(&w.0)).collect());
                    prop_assert_eq!(parts.iter().map(|p| p.contribution.worker.0).collect::<Vec<_>>(), closed);
                }
                Op::Proposed(w, b, s) => {
                    let waited = model.all.iter().any(|(of, what, _)| *of == (w, b, s) && *what == PendingKind::Norm);
                    let arrived = pushes.proposed(b, &push(w, b, s, 0).contribution);
                    prop_assert_eq!(arrived.map(|(at, _)| at), waited.then_some(Moment(s)));
                    model.put((w, b, s), PendingKind::Outcome, 0);
                }
                Op::Outcome(w, b, s) => {
                    pushes.outcome(b, &push(w, b, s, 0).contribution);
                    model.all.retain(|(of, what, _)| (*of, *what) != ((w, b, s), PendingKind::Outcome));
                }
                Op::Forget(w, n) => {
                    match n {
                        0 => pushes.forget_room(WorkerId(w)),
                        _ => pushes.forget_all(WorkerId(w)),
                    }
                    model.all.retain(|((worker, ..), what, _)| *worker != w || n == 0 && *what != PendingKind::Room);
                }
                Op::Says(w) => {
                    let waits = model.holds(w) || model.said.iter().any(|(worker, _)| *worker == w);
                    prop_assert_eq!(pushes.defer_command(WorkerId(w), number), (!waits).then_some(number));
                    if waits {
                        model.said.push((w, number));
                    }
                }
            }
            prop_assert_eq!(pushes.take_ready_commands(), model.free());
            let held = model.all.iter().filter(|(_, what, _)| *what != PendingKind::Outcome);
            prop_assert_eq!(pushes.bytes(), held.map(|(.., bytes)| bytes).sum::<u64>());
            let taken = |what: PendingKind| !matches!(what, PendingKind::Room | PendingKind::Update);
            prop_assert_eq!(pushes.any_waits_for_room(), model.all.iter().any(|(_, what, _)| *what == PendingKind::Room));
            for w in 0..3 {
                let id = WorkerId(w);
                let own = || model.all.iter().filter(move |((worker, ..), ..)| *worker == w);
                prop_assert_eq!(pushes.holds(id), model.holds(w));
                prop_assert_eq!(pushes.waits_for_room(id), own().any(|(_, what, _)| *what == PendingKind::Room));
                for s in 1..5 {
                    let in_round = own().any(|((_, _, step), what, _)| (*step, *what) == (s, PendingKind::Round));
                    prop_assert_eq!(pushes.waits_in_round(id, Step(s)), in_round);
                }
                for b in 0..2 {
                    let of = || own().filter(move |((_, unit, _), ..)| *unit == b);
                    let last = of().filter(|(_, what, _)| taken(*what)).map(|((.., s), ..)| Step(*s)).max();
                    prop_assert_eq!(pushes.last_taken(id, b), last);
                    for s in 1..5 {
                        let is = of().any(|((.., step), what, _)| *step == s && taken(*what));
                        prop_assert_eq!(pushes.is_taken(id, b, Step(s)), is);
                        let early = of().filter(|((.., step), what, _)| *step < s && *what == PendingKind::Update);
                        let steps: Vec<_> = early.map(|((.., step), ..)| Step(*step)).collect();
                        let expected = (steps.len() as u64, steps.iter().copied().max());
                        prop_assert_eq!(pushes.early(&push(w, b, s, 0).contribution, b), expected);
                    }
                }
            }
        }
    }
}

#[test]
fn waiting_pushes_are_bounded_and_retries_are_not_counted() {
    let mut pushes = PendingPushes::<()>::default();
    assert!((1..=3).all(|s| pushes.wait_for_room(push(0, 0, s, 1), 3)));
    assert!(!pushes.wait_for_room(push(0, 0, 4, 1), 3));
    assert!(pushes.wait_for_room(push(0, 0, 2, 1), 3), "it has its place");
    assert!(pushes.wait_for_room(push(1, 0, 4, 1), 3), "another's");
}
