//! Tests of `pulls`.

use super::*;
use paraft_common::{Seq, SessionId};
use proptest::prelude::*;

const UNITS: usize = 3;
const WORKERS: u32 = 3;

#[derive(Clone, Debug)]
enum Op {
    /// A worker's push to a unit is applied.
    Applied(u32, usize),
    /// A worker pulls: its lag behind its pushes, for a checkpoint or not, at the barrier or not, some units
    /// or all.
    Ask(u32, u64, bool, bool, Vec<usize>),
    /// A worker asks for the final weights.
    Last(u32),
    Pause(u32),
    Resume(u32),
    Finish(u32),
    Leave(u32),
    Join(u32),
    Closed(u32),
}

fn op() -> impl Strategy<Value = Op> {
    let only = prop_oneof![3 => Just(Vec::new()), 1 => prop::sample::subsequence(vec![0, 1, 2], 1..3)];
    prop_oneof![
        10 => (0..WORKERS, 0..UNITS).prop_map(|(w, b)| Op::Applied(w, b)),
        5 => (0..WORKERS, 0u64..2, prop::bool::weighted(0.2), prop::bool::weighted(0.2), only)
            .prop_map(|(w, s, c, b, o)| Op::Ask(w, s, c, b && o.is_empty(), o)),
        1 => (0..WORKERS).prop_map(Op::Last),
        1 => (0..WORKERS).prop_map(Op::Pause),
        1 => (0..WORKERS).prop_map(Op::Resume),
        1 => (0..WORKERS).prop_map(Op::Finish),
        1 => (0..WORKERS).prop_map(Op::Leave),
        2 => (0..WORKERS).prop_map(Op::Join),
        1 => (0..WORKERS).prop_map(Op::Closed),
    ]
}

fn conn_of(worker: WorkerId) -> Option<ConnId> {
    Some(u64::from(worker.0))
}

proptest! {
    /// The scan of candidates releases the same pulls as a scan of all: each unit once, never before the rule
    /// holds for it, and with the worker's own push in it.
    #[test]
    fn a_pull_that_nobody_looks_at_is_one_that_may_not_go(
        ops in prop::collection::vec(op(), 1..150), mode in prop::sample::select(vec![Mode::Bsp, Mode::Ssp(1), Mode::Asp]),
        // The first events, before the shard has its weights, are not scanned.
        unseen in 0..6usize,
    ) {
        let mut m = Meta::default();
        m.started = true;
        m.in_force = InForce::first(mode, None);
        (0..WORKERS).for_each(|w| m.members.join(WorkerId(w), SessionId(1), UNITS, false));
        let (mut some, mut all) = (WaitingPulls::default(), WaitingPulls::default());
        let mut owed: BTreeMap<ConnId, BTreeSet<usize>> = BTreeMap::new();
        let mut barriers = BTreeSet::new();
        let now = Instant::now();
        for (i, op) in ops.into_iter().enumerate() {
            let changed = match op {
                Op::Applied(w, unit) => {
                    let worker = WorkerId(w);
                    let Some(step) = m.members.get(worker).filter(|m| m.is_active()).and_then(|m| m.step(unit)) else { continue };
                    m.members.pushed(worker, SessionId(1), Seq(1), unit, step.next());
                    PullTrigger::Unit(unit, vec![worker])
                }
                Op::Ask(w, ahead, checkpoint, barrier, only) => {
                    let (worker, conn) = (WorkerId(w), u64::from(w));
                    let clock = m.members.get(worker).map_or(Step(0), |m| m.clock());
                    let part = !only.is_empty();
                    let todo: BTreeSet<usize> = if part { only.into_iter().collect() } else { (0..UNITS).collect() };
                    owed.insert(conn, todo.clone());
                    if barrier { barriers.insert(conn) } else { barriers.remove(&conn) };
                    for pulls in [&mut some, &mut all] {
                        let done = Step(clock.0 + ahead);
                        let have = Vec::new();
                        let pull = Pull { conn, worker, done, last: false, checkpoint, barrier, records: false, have, part, rows: BTreeMap::new() };
                        pulls.ask(pull, todo.clone());
                    }
                    PullTrigger::Pull(conn)
                }
                Op::Last(w) => {
                    let (worker, conn) = (WorkerId(w), u64::from(w));
                    owed.insert(conn, (0..UNITS).collect());
                    for pulls in [&mut some, &mut all] {
                        let (done, have) = (Step(0), Vec::new());
                        let pull =
                            Pull { conn, worker, done, last: true, checkpoint: false, barrier: false, records: false, have, part: false, rows: BTreeMap::new() };
                        pulls.ask(pull, (0..UNITS).collect());
                    }
                    PullTrigger::Pull(conn)
                }
                Op::Pause(w) => { m.members.pause(WorkerId(w), SessionId(1)); PullTrigger::Member(WorkerId(w)) }
                Op::Resume(w) => { m.members.resume(WorkerId(w), SessionId(1), false); PullTrigger::Member(WorkerId(w)) }
                Op::Finish(w) => { m.members.finish(WorkerId(w), SessionId(1)); PullTrigger::Member(WorkerId(w)) }
                Op::Leave(w) => { m.members.leave(WorkerId(w), SessionId(1)); PullTrigger::Member(WorkerId(w)) }
                Op::Join(w) if m.members.get(WorkerId(w)).is_some() => continue,
                Op::Join(w) => { m.members.join(WorkerId(w), SessionId(1), UNITS, false); PullTrigger::Member(WorkerId(w)) }
                Op::Closed(w) => {
                    [&mut some, &mut all].into_iter().for_each(|p| p.closed(u64::from(w)));
                    owed.remove(&u64::from(w));
                    PullTrigger::Initial
                }
            };
            if i < unseen {
                continue;
            }
            let view = View { working: None, level: true, conn_of: &conn_of, waits_in_round: &|_, _| false, now };
            let said = |looked: &PullScan| {
                looked.go.iter().map(|g| (g.pull.conn, g.units.clone(), g.whole, g.slowest)).collect::<Vec<_>>()
            };
            let few = some.scan(changed, &m, &view);
            let many = all.scan(PullTrigger::All, &m, &view);
            prop_assert_eq!(said(&few), said(&many));
            prop_assert_eq!(some.waiting().count(), all.waiting().count());
            for go in few.go {
                let todo = owed.get_mut(&go.pull.conn).expect("it is owed something");
                for unit in &go.units {
                    prop_assert!(todo.remove(unit), "{unit} goes twice");
                    if go.pull.last {
                        prop_assert!(m.members.iter().all(|(_, m)| m.finished));
                        continue;
                    }
                    let own = m.members.get(go.pull.worker).and_then(|m| m.step(*unit));
                    prop_assert!(own >= Some(go.pull.done));
                    let rule = if barriers.contains(&go.pull.conn) { Mode::Bsp } else { mode };
                    prop_assert!(rule.may_proceed(m.members.slowest_in(*unit), go.pull.done));
                }
                prop_assert_eq!(go.whole, todo.is_empty());
            }
            prop_assert_eq!(some.is_empty(), owed.values().all(BTreeSet::is_empty));
        }
    }
}
