//! Properties of simulated runs: determinism, the consistency rule under failures, the weights of one
//! process, and exactly-once application of pushes.

mod common;

use common::bits;
use paraft_common::{TensorSpec, optim::OptimizerConfig};
use paraft_data::{Dataset, Samples, Split};
use paraft_models::{Batch, Evaluation, Model, ModelError};
use paraft_record::{Event, Run, RunRecord, Train};
use paraft_sim::{Outcome, Setup, SimError, Straggle, simulate, simulate_watched, watched::FleetSnapshot};
use paraft_worker::Job;
use std::{
    path::Path,
    sync::{Arc, Mutex},
};

/// A job on the digits; each line of `set` is an assignment as `--set` takes it.
fn job(set: &[&str]) -> Job {
    let text = "[model]\nkind = \"mlp\"\nhidden = [16]\n[data]\nkind = \"digits\"\n[train]\nworkers = 4\nbatch = 16\n\
                epochs = 2\n[optimizer]\nkind = \"momentum\"\nlr = 0.02\n[cluster]\nshards = 3\n";
    let set: Vec<String> = set.iter().map(ToString::to_string).collect();
    Job::parse(text, Path::new("test.toml"), &set).expect("a job")
}

fn own(job: &Job) -> (Box<dyn Model>, Split) {
    common::own(job, Path::new("."))
}

/// The outcome and the record, as lines and as events.
fn run_with(
    job: &Job,
    setup: &Setup,
    (model, data): (Box<dyn Model>, Split),
) -> Result<(Outcome, Vec<Event>), SimError> {
    let events = Arc::new(Mutex::new(Vec::new()));
    let written = events.clone();
    let sink = move |e: &Event| {
        written.lock().expect("no panic").push(e.clone());
        Ok(())
    };
    let outcome = simulate(job, setup, model, data, Box::new(sink))?;
    let events = std::mem::take(&mut *events.lock().expect("no panic"));
    Ok((outcome, events))
}

fn run(job: &Job, setup: &Setup) -> (Outcome, Vec<Event>) {
    run_with(job, setup, own(job)).expect("it ends")
}

fn record(events: &[Event]) -> RunRecord {
    let run = Event::Run(Run { workers: 4, ..Run::default() });
    RunRecord::from_events(std::iter::once(run).chain(events.iter().cloned())).expect("a run")
}

/// A setup with every kind of failure.
fn troubled() -> Setup {
    Setup {
        compute_spread: 0.5,
        worker_spread: 0.3,
        straggle: Some(Straggle { probability: 0.05, factor: 8.0 }),
        jitter: 0.8,
        mttf_s: Some(0.6),
        restart_s: Some(0.2),
        server_mttf_s: Some(0.8),
        server_restart_s: 0.5,
        ..Setup::default()
    }
}

#[test]
fn a_seed_is_a_run_bit_for_bit_and_another_seed_is_another() {
    for mode in ["bsp", "ssp:2", "asp"] {
        let job = job(&[&format!("train.mode={mode}")]);
        let (first, events) = run(&job, &troubled());
        let (again, same) = run(&job, &troubled());
        let apart = events.iter().zip(&same).find(|(a, b)| a != b);
        assert_eq!(apart, None, "{mode}");
        assert_eq!(events.len(), same.len(), "{mode}");
        assert_eq!(bits(&first.weights), bits(&again.weights), "{mode}");
        assert_eq!((first.seconds, first.happened), (again.seconds, again.happened), "{mode}");
        let failures = (first.worker_failures, first.server_failures);
        assert!(failures.0 > 0 && failures.1 > 0, "{mode}: {failures:?}");
        let (other, _) = run(&job, &Setup { seed: 2, ..troubled() });
        assert_ne!(first.seconds, other.seconds, "{mode}");
    }
}

#[test]
fn observing_changes_nothing_and_shows_failovers() {
    let (job, setup) =
        (job(&["train.epochs=4", "cluster.servers=3"]), Setup { server_mttf_s: Some(0.6), ..troubled() });
    let (alone, events) = run(&job, &setup);
    let (written, said) =
        (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::<FleetSnapshot>::new())));
    let (lines, looks) = (written.clone(), said.clone());
    let sink = move |e: &Event| {
        lines.lock().expect("no panic").push(e.clone());
        Ok(())
    };
    let (model, data) = own(&job);
    let began = std::time::Instant::now();
    let watcher = move |s| looks.lock().expect("no panic").push(s);
    let watched =
        simulate_watched(&job, &setup, model, data, Box::new(sink), Box::new(watcher)).expect("it ends");
    let took = began.elapsed().as_secs_f64();
    assert!(took >= watched.seconds - 0.1, "{} simulated seconds in {took}", watched.seconds);
    assert_eq!(*written.lock().expect("no panic"), events);
    assert_eq!((watched.seconds, bits(&watched.weights)), (alone.seconds, bits(&alone.weights)));

    let said = said.lock().expect("no panic");
    assert!(said.is_sorted_by_key(|s| s.at), "time goes on");
    let states: Vec<&str> = said.iter().map(|s| s.fleet.jobs[0].state.as_str()).collect();
    assert_eq!((states.last(), states.contains(&"running")), (Some(&"finished"), true), "{states:?}");
    let down = said.iter().filter(|s| s.fleet.servers.iter().any(|s| s.state == "silent"));
    assert!(down.clone().count() > 0, "no server was seen to fail in {} looks", said.len());
    for s in down {
        let silent: Vec<u64> =
            s.fleet.servers.iter().filter(|s| s.state == "silent").map(|s| s.server).collect();
        assert!(s.servers.values().all(|r| !silent.contains(&r.server)), "who is down says nothing");
        for shard in &s.fleet.shards {
            assert!(shard.leader.is_none_or(|l| !silent.contains(&l)), "{shard:?}");
            assert_eq!(shard.state == "no-majority", 2 * shard.silent.len() > 3, "{shard:?}");
        }
    }
    let last = said.last().expect("looks");
    let led: Vec<_> = last.servers.values().flat_map(|r| &r.shards).collect();
    let first = led.iter().find(|s| s.shard == 0).expect("shard 0 is led");
    assert!(led.iter().any(|s| s.term > 1), "nobody was elected");
    assert!(
        first.samples > 0 && first.losses > 0 && first.evaluated.is_some() && first.pushes > 0,
        "{first:?}"
    );
}

#[test]
fn ssp_keeps_its_bound_under_stragglers_and_failures() {
    for (bound, seed) in [(0, 1), (1, 2), (3, 3), (3, 4), (8, 5)] {
        let job = job(&[&format!("train.mode=ssp:{bound}"), "train.epochs=3"]);
        let slow = [(1, 4.0)].into();
        let (outcome, events) = run(&job, &Setup { seed, slow, ..troubled() });
        assert!(
            outcome.largest_lead <= bound,
            "ssp:{bound}, seed {seed}: a lead of {}",
            outcome.largest_lead
        );
        // The run must reach the bound, or the test proves nothing.
        assert_eq!(outcome.largest_lead, bound, "ssp:{bound}, seed {seed}");
        let delay = record(&events).delays().max().expect("pushes");
        assert!(outcome.worker_failures > 0 && delay > 0);
        // The bound of docs/consistency.md, which holds while no worker restarts: failures only add
        // pushes of others.
        let (quiet, events) = run(&job, &Setup { seed, slow: [(1, 4.0)].into(), ..Setup::default() });
        let delay = record(&events).delays().max().expect("pushes");
        assert!(delay <= 3 * (2 * bound + 1), "ssp:{bound}: a delay of {delay}");
        assert_eq!(quiet.largest_lead, bound);
    }
    let slow = [(1, 4.0)].into();
    let (free, _) = run(&job(&["train.mode=asp"]), &Setup { slow, ..Setup::default() });
    assert!(free.largest_lead > 8, "nobody waits in ASP: {}", free.largest_lead);
}

#[test]
fn synchronous_stragglers_match_one_process_bit_for_bit() {
    for (workers, set) in [
        (1, vec![]),
        (4, vec![]),
        (3, vec!["train.encoding=bf16", "optimizer.kind=adam"]),
        (4, vec!["cluster.shards=5", "optimizer.momentum=0.9"]),
    ] {
        let workers = format!("train.workers={workers}");
        let job = job(&[&["train.mode=bsp", &workers], &set[..]].concat());
        let oracle = paraft_proof::oracle(&job, paraft_proof::Order::Shares).expect("an oracle");
        let even = Setup { compute_spread: 0.0, jitter: 0.0, ..Setup::default() };
        let uneven = Setup { mttf_s: None, server_mttf_s: Some(0.5), ..troubled() };
        for setup in [even, uneven] {
            let (outcome, events) = run(&job, &setup);
            assert_eq!(bits(&outcome.weights), bits(&oracle), "{workers} {set:?}");
            assert_eq!(record(&events).delays().max(), Some(0));
            assert_eq!(outcome.largest_lead, 0);
        }
    }
}

#[test]
fn clipping_by_the_global_norm_equals_one_process() {
    for (mode, workers) in [("bsp", 4), ("bsp", 1), ("asp", 1)] {
        let set = [format!("train.mode={mode}"), format!("train.workers={workers}"), "clip.norm=0.3".into()];
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let job = job(&set);
        let oracle = paraft_proof::oracle(&job, paraft_proof::Order::Union).expect("an oracle");
        let (outcome, _) = run(&job, &Setup::default());
        let apart = paraft_proof::distance(&oracle, &outcome.weights);
        // With one worker every bit is equal; with several, sums have another order.
        assert!(apart <= if workers == 1 { 0.0 } else { 1e-5 }, "{mode}, {workers} workers: {apart}");
    }
}

#[test]
fn a_round_waits_for_its_slowest_worker_and_asp_does_not() {
    let still = Setup {
        compute_spread: 0.0,
        latency_ms: 0.0,
        worker_gbit: 0.0,
        server_gbit: 0.0,
        slow: [(2, 5.0)].into(),
        ..Setup::default()
    };
    let steps = 2.0 * 22.0; // epochs of 1437 samples for 4 workers in minibatches of 16
    let (bsp, _) = run(&job(&["train.mode=bsp"]), &still);
    assert!((bsp.seconds - steps * 0.05).abs() < 1e-6, "{}", bsp.seconds);
    let (_, events) = run(&job(&["train.mode=asp"]), &still);
    let mut clocks: Vec<_> = record(&events).workers.iter().map(|w| (w.worker.0, w.seconds)).collect();
    clocks.sort_by_key(|(w, _)| *w);
    for (worker, seconds) in clocks {
        let want = steps * if worker == 2 { 0.05 } else { 0.01 };
        assert!((seconds - want).abs() < 1e-6, "worker {worker}: {seconds}");
    }
}

#[test]
fn a_link_carries_one_message_after_the_other() {
    // 1,220 parameters in buckets of 1,024: two pushes of 4,880 bytes in all, and two headers. At a megabit a second
    // that is the step.
    let narrow = Setup {
        compute_ms: 0.0,
        compute_spread: 0.0,
        latency_ms: 0.0,
        worker_gbit: 0.001,
        server_gbit: 0.0,
        ..Setup::default()
    };
    let job = job(&[
        "train.workers=1",
        "train.mode=asp",
        "train.max_steps=10",
        "cluster.replicas=1",
        "model.hidden=[16]",
    ]);
    let (_, events) = run(&job, &narrow);
    let worker = record(&events).workers[0].clone();
    let buckets = (1210f64 / 1024.0).ceil();
    let pushed = worker.bytes_pushed as f64 + 10.0 * 64.0 * buckets;
    // Pulled weights follow the pull in the other direction, one shard after the other.
    let least = pushed * 8.0 / 1e6;
    assert!(worker.seconds >= least && worker.seconds <= 2.6 * least, "{} and {least}", worker.seconds);
}

#[test]
fn a_failed_worker_is_removed_and_the_others_continue() {
    for mode in ["bsp", "asp"] {
        let job = job(&[&format!("train.mode={mode}"), "cluster.grace_ms=200"]);
        let setup = Setup { mttf_s: Some(0.8), restart_s: None, seed: 3, ..Setup::default() };
        let (outcome, events) = run(&job, &setup);
        let r = record(&events);
        let left = r.leaves.len();
        assert!((1..4).contains(&left), "{mode}: {left} of four workers failed");
        assert_eq!(outcome.worker_failures as usize, left);
        assert_eq!(r.workers.len(), 4 - left, "{mode}: the others come to the end");
        assert!(r.workers.iter().all(|w| w.steps == 44), "{mode}");
        assert_eq!(r.summarize().workers_lost as usize, left);
        let whole = 44 * 16 * 4;
        let trained: u64 = r.summarize().samples;
        assert!(trained < whole, "{mode}: what the lost ones would have trained is not trained: {trained}");
        let (all, _) = run(&job, &Setup::default());
        if mode == "bsp" {
            // The others wait for the end of its lease, less the rest of the step.
            assert!(outcome.seconds > all.seconds + 0.18, "{} and {}", outcome.seconds, all.seconds);
        }
    }
}

#[test]
fn a_run_without_any_worker_left_says_so() {
    let job = job(&["train.workers=2"]);
    let failed = run_with(&job, &Setup { mttf_s: Some(0.01), ..Setup::default() }, own(&job));
    assert!(matches!(failed, Err(SimError::AllLost)), "{failed:?}");
}

/// The ledger: the gradient of a minibatch is 1 at the place of each of its samples, plain SGD at rate 1. So a weight ends as
/// minus the number of times that its sample was applied.
struct Ledger(usize);

impl Model for Ledger {
    fn tensors(&self) -> Vec<TensorSpec> {
        vec![TensorSpec::param("ledger", &[self.0])]
    }

    fn init(&self, _: u64, params: &mut [f32]) {
        params.fill(0.0);
    }

    fn step(
        &mut self,
        _: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError> {
        grads.fill(0.0);
        batch.inputs.iter().for_each(|i| grads[*i as usize] += 1.0);
        ready(0, grads);
        Ok(0.0)
    }

    fn evaluate(&mut self, _: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        Ok(Evaluation { loss_sum: 0.0, correct: 0, count: batch.n as u64 })
    }
}

fn ledger(places: usize) -> (Box<dyn Model>, Split) {
    let set = |n: usize| {
        let values = (0..n).map(|i| i as f32).collect();
        Dataset::new(Samples::Floats(values), vec![1], None).expect("a data set")
    };
    (Box::new(Ledger(places)), Split { train: set(places), test: set(1) })
}

#[test]
fn every_push_is_applied_exactly_once_under_failovers() {
    const PLACES: usize = 960;
    for (i, mode) in ["asp", "ssp:2"].into_iter().enumerate() {
        for seed in 0..4 {
            let mode = format!("train.mode={mode}");
            let mut job = job(&[
                &mode,
                "train.epochs=3",
                "train.batch=4",
                "cluster.bucket_bytes=400",
                "cluster.timeout_ms=60000",
            ]);
            job.optimizer = OptimizerConfig::sgd(1.0);
            let setup = Setup {
                seed: seed + 10 * i as u64,
                server_mttf_s: Some(0.7),
                server_restart_s: 0.3,
                latency_ms: 2.0,
                mttf_s: None,
                ..troubled()
            };
            let (outcome, events) = run_with(&job, &setup, ledger(PLACES)).expect("it ends");
            assert!(outcome.server_failures >= 3, "{mode} seed {seed}: {}", outcome.server_failures);
            let wrong: Vec<_> = (0..PLACES).filter(|i| outcome.weights[*i] != -3.0).collect();
            assert!(wrong.is_empty(), "{mode} seed {seed}: {wrong:?} are not applied once in each epoch");
            let r = record(&events);
            let pushes: u64 = r.shards.iter().map(|s| s.pushes).sum();
            let steps: u64 = r.workers.iter().map(|w| w.steps).sum();
            assert_eq!(pushes, steps * outcome.layout.buckets().len() as u64);
            assert_eq!(outcome.duplicates, 0, "the leaders recognise what comes again");
        }
    }
}

#[test]
fn acknowledged_pushes_of_failing_workers_apply_once() {
    // A worker that rejoins continues at the others' step, so some samples may be left out. No sample
    // is applied twice in an epoch. Steps that its predecessor pushed with an acknowledgement are
    // applied once.
    const PLACES: usize = 960;
    for seed in 0..6 {
        let mut job = job(&[
            "train.mode=asp",
            "train.epochs=1",
            "train.batch=4",
            "cluster.bucket_bytes=400",
            "cluster.grace_ms=100",
        ]);
        job.optimizer = OptimizerConfig::sgd(1.0);
        let setup = Setup { seed, latency_ms: 2.0, ..troubled() };
        let (outcome, events) = run_with(&job, &setup, ledger(PLACES)).expect("it ends");
        assert!(outcome.worker_failures > 0);
        let trained: f32 = outcome.weights.iter().map(|w| -w).sum();
        let pushes: u64 = record(&events).shards.iter().map(|s| s.pushes).sum();
        assert!(outcome.weights.iter().all(|w| *w <= 0.0 && w.fract() == 0.0));
        // Each applied push of the bucket that holds a sample counts it once; a step has ten buckets.
        assert!(trained as u64 <= pushes * 4, "{trained} samples in {pushes} pushes");
        assert_eq!(outcome.duplicates, 0);
    }
}

#[test]
fn evaluations_within_epochs_are_simulated() {
    let (_, events) = run(&job(&["train.mode=ssp:2", "eval.every_steps=15"]), &Setup::default());
    let evals = record(&events).evals;
    let at: Vec<_> = evals.iter().map(|e| (e.epoch, e.step.map(|s| s.0), e.is_final)).collect();
    // An epoch has 22 steps.
    let due = [(0, 15, false), (1, 22, false), (1, 30, false), (2, 44, false), (2, 44, true)];
    assert_eq!(at, due.map(|(epoch, step, is_final)| (epoch, Some(step), is_final)));
    assert!(evals.iter().all(|e| e.count == 360), "each is whole: {evals:?}");
}

#[test]
fn the_record_has_what_a_real_one_has() {
    let job = job(&["train.mode=asp"]);
    let (outcome, events) = run(&job, &Setup::default());
    let r = record(&events);
    let s = r.summarize();
    assert_eq!(s.samples, 2 * 22 * 16 * 4);
    assert_eq!((r.workers.len(), r.shards.len()), (4, 2), "1,210 parameters are two buckets");
    let epochs: Vec<_> = r.evals.iter().map(|e| (e.epoch, e.is_final, e.count)).collect();
    assert_eq!(epochs, [(1, false, 360), (2, false, 360), (2, true, 360)]);
    let evaluation = outcome.evaluation.expect("the final weights are evaluated");
    assert_eq!(s.final_accuracy, Some(evaluation.correct as f64 / 360.0));
    assert!(s.final_accuracy > Some(0.5), "{s:?}");
    assert!(s.delay_max > Some(0) && s.wait_seconds > 0.0 && s.bytes_pulled > 0);
    assert_eq!(s.bytes_pushed, s.samples / 16 * 1210 * 4);
    let mut last = 0.0;
    for wall in events
        .iter()
        .filter_map(|e| if let Event::Train(Train { wall, .. }) = e { Some(*wall) } else { None })
    {
        assert!(wall >= last, "simulated time goes on");
        last = wall;
    }
}

#[test]
fn what_the_simulator_does_not_have_is_refused() {
    for (set, setup, word) in [
        (vec!["train.sampler=leased"], Setup::default(), "leased"),
        (vec!["train.group_size=2"], Setup::default(), "group"),
        (vec!["cluster.replicas=1"], Setup { server_mttf_s: Some(1.0), ..Setup::default() }, "replicas"),
        (vec![], Setup { compute_ms: -1.0, ..Setup::default() }, "compute-ms"),
    ] {
        let job = job(&set);
        let refused = run_with(&job, &setup, own(&job)).expect_err("refused").to_string();
        assert!(refused.contains(word), "{refused}");
    }
}

/// The modes that the rule of `train.mode = "auto"` chose, as worker 0 received them.
fn chosen(set: &[&str], setup: &Setup) -> (Vec<String>, Outcome) {
    let auto = ["train.mode=auto", "train.batch=4", "train.epochs=20", "optimizer.lr=0.01"];
    let (outcome, events) = run(&job(&[&auto[..], set].concat()), setup);
    let switch = |e: &Event| match e {
        Event::Mode(m) if m.worker.0 == 0 => Some((m.number, m.mode.clone())),
        _ => None,
    };
    let heard: Vec<(u64, String)> = events.iter().filter_map(switch).collect();
    assert!(
        heard.is_sorted()
            && heard.iter().map(|h| h.0).collect::<std::collections::BTreeSet<_>>().len() == heard.len()
    );
    (heard.into_iter().map(|h| h.1).collect(), outcome)
}

#[test]
fn auto_gives_way_to_stragglers_and_tightens_near_convergence() {
    let straggler = Setup { slow: [(1, 6.0)].into(), ..Setup::default() };
    let (modes, _) = chosen(&[], &straggler);
    assert_eq!(modes[0], "asp", "stragglers dominate from the first window: {modes:?}");
    // With a rate of 0 the loss no longer falls.
    let tight = &["optimizer.lr=0"];
    let (modes, _) = chosen(tight, &straggler);
    assert_eq!(modes[0], "asp", "{modes:?}");
    assert!(
        modes.ends_with(&["ssp:16", "ssp:8", "ssp:4", "ssp:2", "ssp:1", "ssp:0"].map(String::from)),
        "{modes:?}"
    );
    // With steps of equal length no bound needs to be wider than the initial one.
    let even = Setup { compute_spread: 0.0, jitter: 0.0, ..Setup::default() };
    let (modes, outcome) = chosen(&[], &even);
    assert!(modes.iter().all(|m| m == "ssp:0") && outcome.largest_lead <= 1, "{modes:?}");
    // Leaders fail and recover; each starts with its own window, and keeps to the limit in the log.
    let failing = Setup { server_mttf_s: Some(4.0), server_restart_s: 0.3, ..straggler };
    let (modes, outcome) = chosen(tight, &failing);
    let bound = |m: &String| m.strip_prefix("ssp:").map_or(u64::MAX, |s| s.parse().expect("a number"));
    let bounds: Vec<u64> = modes.iter().map(bound).collect();
    assert!(outcome.server_failures > 0 && bounds.len() > 3, "{modes:?}");
    assert!(bounds.contains(&u64::MAX), "it gave way: {modes:?}");
    let loosest = bounds.iter().rposition(|b| *b >= 16).expect("the loosest bound or none");
    assert!(bounds[loosest..].is_sorted_by(|a, b| a >= b), "tight for good: {modes:?}");
}
