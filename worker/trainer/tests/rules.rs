//! The trainer's actions under any answers of the servers.

use paraft_common::{
    Layout, Step, TensorSpec, WorkerId,
    config::ChunkPlan,
    local::{Diloco, LocalConfig},
};
use paraft_session::{Next, Pulled};
use paraft_trainer::{Action, CheckpointSteps, EvaluationSteps, Options, Steps, Trainer};
use proptest::prelude::*;
use std::collections::BTreeSet;

const BUCKETS: usize = 5;
const BATCH: u64 = 4;
const EACH_EPOCH: EvaluationSteps = EvaluationSteps { epochs: true, every: None };

fn layout() -> Layout {
    Layout::new(vec![TensorSpec::param("w", &[BUCKETS * 2])], 2).expect("a layout")
}

/// A worker's work, collected from its actions.
#[derive(Debug, Default, PartialEq)]
struct ActionLog {
    minibatches: u64,
    /// The clocks of its local minibatches.
    clocks: Vec<u64>,
    /// Completely pushed steps.
    pushed: Vec<Step>,
    evaluated: Vec<u64>,
    checkpoints: Vec<Step>,
    chunks: Vec<(u64, u64)>,
    moved: u64,
    first: bool,
    /// The number of the final evaluation.
    final_number: Option<u64>,
}

/// The servers' answer to the nth pull.
type Answer<'a> = dyn FnMut(u64, &paraft_session::Pull) -> Pulled + 'a;

/// Drives a trainer to its end; panics at an action that makes no sense.
fn drive(options: Options, answer: &mut Answer, chunks: &mut dyn FnMut() -> Next) -> ActionLog {
    let mut trainer = Trainer::new(options, Step(0));
    let mut told = ActionLog::default();
    let (mut pulls, mut finished, mut begun, mut trains) = (0, false, false, true);
    // The buckets that are pushed of the current step.
    let mut open = (Step(0), BTreeSet::new());
    for n in 0u64.. {
        assert!(n < 100_000, "it does not come to an end");
        let mut pushes = |step: Step, buckets: std::ops::Range<usize>| {
            if open.0 != step {
                open = (step, BTreeSet::new());
            }
            for b in buckets {
                assert!(open.1.insert(b), "bucket {b} is pushed twice as {step}");
            }
        };
        match trainer.next_action() {
            Action::Pull(pull) => {
                assert_eq!(pull.last, finished, "the last pull comes behind Finish, and no other");
                assert!(!trains || !pull.barrier, "the clock stands still while it waits for the others");
                pulls += 1;
                trainer.pulled(answer(pulls, &pull));
            }
            Action::Begin(_) => {
                (begun, trains) = (true, true);
                open.0 = Step(0); // buckets may be pushed again
            }
            Action::Gradient { step, .. } => {
                assert!(begun && trains);
                pushes(step, 0..BUCKETS);
                told.minibatches += 1;
                trainer.trained(Some((2.0 * BATCH as f64, BATCH)));
            }
            Action::Local { clock, .. } => {
                told.minibatches += 1;
                told.clocks.push(clock);
                trainer.trained(Some((2.0 * BATCH as f64, BATCH)));
            }
            Action::Apply(_) | Action::WriteResults { .. } => panic!("the model has no results"),
            Action::Push { step, .. } => pushes(step, 0..BUCKETS),
            Action::PushFragment { step, buckets, .. } => pushes(step, buckets),
            Action::TakeOver(buckets) => assert!(!buckets.is_empty()),
            Action::Pushed { step, loss, .. } => {
                assert_eq!((open.0, open.1.len()), (step, BUCKETS), "every bucket once");
                assert_eq!(loss, 2.0, "the mean of its samples");
                told.pushed.push(step);
            }
            Action::Stepped(s) => assert!(s.done.0 >= 1 && s.epoch >= 1),
            Action::Evaluate { number, .. } => told.evaluated.push(number),
            Action::Checkpoint(pulled) => told.checkpoints.push(pulled.done),
            Action::TakeChunk { done, .. } => {
                assert_eq!(done, told.chunks.last().map(|(_, c)| *c).filter(|_| done.is_some()));
                trainer.chunk(chunks());
            }
            Action::Chunk { .. } => trainer.prepared(3),
            Action::ChunkDone { epoch, chunk } => told.chunks.push((epoch, chunk)),
            Action::Moved { .. } => told.moved += 1,
            Action::Trained => trains = false,
            Action::Finish(_) => {
                assert!(!trains);
                finished = true;
            }
            Action::End { first, evaluated, .. } => {
                (told.first, told.final_number) = (first, evaluated);
                return told;
            }
            Action::DropChunk | Action::WriteAfter { .. } | Action::EpochOver { .. } | Action::Wait(_) => {}
        }
    }
    told
}

fn in_order(_: u64, pull: &paraft_session::Pull) -> Pulled {
    let finishers = if pull.last { vec![WorkerId(0)] } else { Vec::new() };
    Pulled { done: pull.done, checkpoint: pull.checkpoint, finishers, ..Pulled::default() }
}

fn no_chunks() -> Next {
    panic!("no chunk is to be taken")
}

fn a_rule() -> impl Strategy<Value = LocalConfig> {
    prop_oneof![
        Just(LocalConfig::default()),
        (1u64..5).prop_map(|steps| LocalConfig(Some(Diloco { steps, ..Diloco::default() }))),
        (1u64..5, 1u64..4).prop_map(|(steps, fragments)| {
            LocalConfig(Some(Diloco { steps, fragments, ..Diloco::default() }))
        }),
    ]
}

fn options(rule: LocalConfig, an_epoch: u64, epochs: u64) -> Options {
    let a_step = rule.minibatches();
    let steps = Steps::new(an_epoch, a_step, epochs, None).expect("some steps");
    let due = Some(CheckpointSteps::new(Some(3), None, &steps, None));
    Options { evaluates: EACH_EPOCH, due, ..Options::new(WorkerId(0), steps, rule, layout()) }
}

#[test]
fn a_worker_that_rests_asks_only_for_the_last_checkpoint() {
    // From this step on it does not rest; an epoch has four steps.
    for (from, asked) in [(9, &[Step(8)][..]), (5, &[Step(8)]), (3, &[Step(4), Step(8)])] {
        let steps = Steps::new(4, 1, 2, None).expect("some steps");
        let due = Some(CheckpointSteps::new(None, Some(1), &steps, None));
        let options = Options { due, ..Options::new(WorkerId(0), steps, LocalConfig::default(), layout()) };
        let mut trainer = Trainer::new(options, Step(0));
        let mut told = Vec::new();
        loop {
            match trainer.next_action() {
                Action::Pull(pull) => {
                    told.extend(pull.checkpoint.then_some(pull.done));
                    trainer.pulled(in_order(0, &pull));
                }
                Action::Gradient { .. } => trainer.trained(Some((1.0, 1))),
                Action::Begin(_) => trainer.rest_checkpoints(true),
                Action::Stepped(s) => trainer.rest_checkpoints(s.done < Step(from)),
                Action::End { .. } => break,
                _ => {}
            }
        }
        assert_eq!(told, asked, "from {from}");
    }
}

#[test]
fn steps_of_a_resumed_job_go_on_and_keep_their_place() {
    // Ten steps an epoch were done to step 25, and this job has five: it is at its step 12.
    let steps = Steps::new(5, 1, 4, None).expect("some steps").leaving_out(13);
    assert_eq!((steps.total, steps.place_of(Step(25))), (33, 12));
    assert_eq!([26, 28, 29, 33].map(|s| steps.epoch_of(Step(s))), [3, 3, 4, 4]);
    let ends: Vec<u64> = (25..=33).filter(|s| steps.ends_epoch(Step(*s))).collect();
    assert_eq!(ends, [28, 33]);
    assert_eq!(steps.minibatches_before(Step(26)), 12);
    let due = CheckpointSteps::new(Some(9), Some(1), &steps, None);
    assert_eq!((26..=33).filter(|s| due.at(Step(*s))).collect::<Vec<_>>(), [27, 28, 33]);
    let number = |e: EvaluationSteps, s| e.number(Step(s), &steps);
    let within = EvaluationSteps { every: Some(2), ..EACH_EPOCH };
    assert_eq!((number(EACH_EPOCH, 28), number(within, 28)), (3, 28));
    assert_eq!((EACH_EPOCH.step_of(3, &steps), EACH_EPOCH.place_of(3, &steps)), (Step(28), (3, None)));
    assert_eq!(within.place_of(27, &steps), (2, Some(Step(27))));
    // It may begin before the end of its first epoch, which is no end of one.
    assert!(!Steps::new(5, 1, 4, None).expect("some steps").leaving_out(3).ends_epoch(Step(3)));
}

proptest! {
    /// Without faults a worker trains each of the job's minibatches once, pushes every bucket once per step,
    /// evaluates each epoch once, and cuts each due checkpoint.
    #[test]
    fn every_minibatch_is_trained_once_and_every_step_pushed_whole(
        rule in a_rule(), an_epoch in 1u64..12, epochs in 1u64..4,
    ) {
        prop_assume!(rule.validate().is_ok());
        let options = options(rule.clone(), an_epoch, epochs);
        let steps = options.steps;
        let told = drive(options, &mut in_order, &mut no_chunks);
        prop_assert_eq!(told.minibatches, an_epoch * epochs);
        if rule.is_local() {
            prop_assert_eq!(told.clocks, (0..told.minibatches).collect::<Vec<_>>());
        }
        prop_assert_eq!(told.pushed, (1..=steps.total).map(Step).collect::<Vec<_>>());
        prop_assert_eq!(told.evaluated, (1..=epochs).collect::<Vec<_>>());
        prop_assert_eq!(told.final_number, Some(epochs));
        let due = |s: &u64| s.is_multiple_of(3) || *s == steps.total;
        prop_assert_eq!(told.checkpoints, (1..=steps.total).filter(due).map(Step).collect::<Vec<_>>());
        prop_assert!(told.first && told.moved == 0);
    }

    /// With an interval in steps the multiples are evaluated too, once each, with the step as their number.
    #[test]
    fn each_multiple_and_each_epochs_end_is_evaluated_once(
        rule in a_rule(), an_epoch in 1u64..12, epochs in 1u64..4, every in 1u64..7, ends in any::<bool>(),
        start in 0u64..9,
    ) {
        prop_assume!(rule.validate().is_ok());
        let evaluates = EvaluationSteps { epochs: ends, every: Some(every) };
        let options = Options { evaluates, ..options(rule, an_epoch, epochs) };
        let steps = options.steps;
        prop_assume!(start < steps.total);
        // The servers know of this many steps before: it resumes.
        let mut answer = |n: u64, pull: &paraft_session::Pull| {
            let pulled = in_order(n, pull);
            Pulled { done: if n == 1 { Step(start) } else { pulled.done }, ..pulled }
        };
        let told = drive(options, &mut answer, &mut no_chunks);
        let at = |s: &u64| *s > 0 && (s.is_multiple_of(every) || ends && s.is_multiple_of(steps.per_epoch));
        let want: Vec<u64> = (start..=steps.total).filter(|s| at(s) || *s == steps.total).collect();
        prop_assert_eq!(told.evaluated, want);
        prop_assert_eq!(told.final_number, Some(steps.total));
    }

    /// Pulls may report a lost session, rounds closed without this worker, or an early stop. The trainer still
    /// ends. It never calls a partly pushed step complete, and never cuts a given-up step into a checkpoint.
    #[test]
    fn whatever_pulls_say_the_worker_goes_on_from_there_and_ends(
        rule in a_rule(), an_epoch in 1u64..8,
        odd in prop::collection::btree_map(1u64..30, (0u64..4, any::<bool>(), any::<bool>()), 0..5),
    ) {
        prop_assume!(rule.validate().is_ok());
        let (mut stopped, mut rejoined_at_barrier) = (false, false);
        let mut answer = |n: u64, pull: &paraft_session::Pull| {
            let mut pulled = in_order(n, pull);
            if let Some((ahead, rejoined, stop)) = odd.get(&n).filter(|_| !pull.last) {
                pulled.done = Step(pulled.done.0 + ahead);
                pulled.rejoined = *rejoined;
                pulled.stop = *stop && *ahead == 1;
                stopped |= pulled.stop && !pull.barrier;
                rejoined_at_barrier |= pulled.rejoined && pull.barrier;
            }
            pulled
        };
        let told = drive(options(rule, an_epoch, 3), &mut answer, &mut no_chunks);
        prop_assert!(told.pushed.is_sorted_by(|a, b| a < b), "{:?}", told.pushed);
        prop_assert!(told.checkpoints.iter().all(|c| told.pushed.contains(c)), "{:?}", told);
        let last = told.evaluated.last().copied();
        let want = last.filter(|_| !stopped && !rejoined_at_barrier);
        prop_assert_eq!(told.final_number, want, "{:?}", told);
    }

    /// An evaluation is not final if the weights change after it or a worker trains on. No share is evaluated
    /// twice. Without evaluations between epochs there is only the final one.
    #[test]
    fn evaluation_is_final_only_if_nothing_changed_after(
        rule in a_rule(), an_epoch in 1u64..8, epochs in 1u64..4, every_epoch in any::<bool>(),
        changed in any::<bool>(), back in 0u64..3,
    ) {
        prop_assume!(rule.validate().is_ok());
        let evaluates = EvaluationSteps { epochs: every_epoch, every: None };
        let options = Options { evaluates, ..options(rule, an_epoch, epochs) };
        let total = options.steps.total;
        let mut barriers = 0;
        let mut answer = |n: u64, pull: &paraft_session::Pull| {
            let mut pulled = in_order(n, pull);
            if pull.barrier {
                barriers += 1;
                if barriers == 1 {
                    pulled.done = Step(pulled.done.0 - back.min(total - 1));
                }
            }
            if pull.last && changed {
                pulled.changed.insert(paraft_common::BucketId(0));
            }
            pulled
        };
        let told = drive(options, &mut answer, &mut no_chunks);
        prop_assert_eq!(barriers, 1 + u64::from(back.min(total - 1) > 0));
        prop_assert_eq!(told.evaluated.iter().filter(|e| **e == epochs).count(), 1, "{:?}", told);
        prop_assert_eq!(told.evaluated.len() > 1, every_epoch && epochs > 1);
        prop_assert_eq!(told.final_number, Some(epochs).filter(|_| !changed));
    }

    /// The leased sampler: every assigned chunk is trained and reported, unless it is lost with the session.
    #[test]
    fn chunks_are_trained_and_accounted_for(
        given in prop::collection::vec((0u64..3, any::<bool>(), 0u8..6), 1..20), lost in 0u64..40,
    ) {
        let mut queue: Vec<Next> = given
            .iter()
            .enumerate()
            .map(|(i, (epoch, pause, kind))| match kind {
                0 => Next::Over { epochs: epoch + 1, write: true, step: Step(3 * i as u64) },
                1 => Next::Rejoined(Step(3 * i as u64)),
                _ => Next::Train { epoch: *epoch, chunk: i as u64, resumed: pause.then_some(Step(3 * i as u64)) },
            })
            .rev()
            .collect();
        let trained = queue.iter().filter(|n| matches!(n, Next::Train { .. })).count();
        let chunks = ChunkPlan { per_epoch: 7, epochs: 3 };
        let base = options(LocalConfig::default(), 7, 3);
        let due = Some(CheckpointSteps::new(None, Some(1), &base.steps, Some(chunks)));
        let options = Options { leased: Some(chunks), due, ..base };
        let mut answer = |n: u64, pull: &paraft_session::Pull| {
            Pulled { rejoined: n == lost && !pull.last, ..in_order(n, pull) }
        };
        let told = drive(options, &mut answer, &mut || queue.pop().unwrap_or(Next::Ended));
        prop_assert!(told.chunks.len() <= trained);
        prop_assert!(told.chunks.len() + 1 >= trained, "at most one is lost with the session: {:?}", told);
        prop_assert!(told.minibatches <= 3 * trained as u64);
    }
}

/// Workers that run the optimizer themselves, each on the mean gradient.
#[test]
fn a_step_on_the_mean_pulls_twice_and_writes_between() {
    let tensors = vec![TensorSpec::param("mean", &[4]), TensorSpec::result("w", &[4])];
    let layout = Layout::new(tensors, 2).expect("a layout");
    let steps = Steps::new(3, 1, 1, None).expect("some steps");
    let options = Options::new(WorkerId(0), steps, LocalConfig::default(), layout);
    let mut trainer = Trainer::new(options, Step(0));
    let (mut did, mut lost) = (Vec::new(), false);
    loop {
        match trainer.next_action() {
            // The session is lost while it waits for the mean of step 2: it continues with the others' step 2.
            Action::Pull(pull) if pull.done == Step(2) && !pull.only.is_empty() && !lost => {
                lost = true;
                trainer.pulled(Pulled { done: Step(2), rejoined: true, ..Pulled::default() });
            }
            Action::Pull(pull) => {
                did.push(if pull.only.is_empty() { "pull" } else { "mean" });
                assert!(pull.only.iter().all(|b| b.0 < 2), "the results are not pulled with the mean");
                trainer.pulled(Pulled { done: pull.done, ..Pulled::default() });
            }
            Action::Gradient { ask_ahead, .. } => {
                assert!(!ask_ahead, "what follows are not the weights");
                did.push("gradient");
                trainer.trained(Some((1.0, 1)));
            }
            Action::Apply(_) => {
                did.push("apply");
                trainer.applied();
            }
            Action::WriteResults { .. } => did.push("write"),
            Action::Begin(_) => did.push("begin"),
            Action::End { .. } => break,
            _ => {}
        }
    }
    let step = ["gradient", "mean", "apply", "write", "pull"];
    let mut expected = vec!["pull", "begin"];
    expected.extend(step);
    expected.extend(["gradient", "begin"]); // lost
    expected.extend(step);
    expected.extend(["pull", "pull"]); // at the barrier, and the final one
    assert_eq!(did, expected);
}
