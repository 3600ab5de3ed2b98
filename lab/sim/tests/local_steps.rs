//! Workers with weights of their own, in simulated time: the bits of one process, the rule's bound, the bytes.

mod common;

use common::{bits, run_in};
use paraft_sim::{Outcome, Setup};
use paraft_worker::Job;
use std::path::Path;

fn job(set: &[&str]) -> Job {
    let text = "[model]\nkind = \"mlp\"\nhidden = [16]\n[data]\nkind = \"digits\"\n[train]\nworkers = 4\nbatch = 16\n\
                epochs = 2\n[optimizer]\nkind = \"sgd\"\nlr = 0.05\n[cluster]\nshards = 3\n";
    let set: Vec<String> = set.iter().map(ToString::to_string).collect();
    Job::parse(text, Path::new("test.toml"), &set).expect("a job")
}

/// The outcome, and how many bytes were pushed.
fn run(job: &Job, setup: &Setup) -> (Outcome, u64) {
    use std::sync::{Arc, atomic::AtomicU64, atomic::Ordering::Relaxed};
    let pushed = Arc::new(AtomicU64::new(0));
    let sum = pushed.clone();
    let sink = move |e: &paraft_record::Event| {
        if let paraft_record::Event::Worker(w) = e {
            sum.fetch_add(w.bytes_pushed, Relaxed);
        }
        Ok(())
    };
    let outcome = run_in(job, setup, Path::new("."), Box::new(sink)).expect("it ends");
    (outcome, pushed.load(Relaxed))
}

fn uneven() -> Setup {
    Setup {
        compute_spread: 0.5,
        worker_spread: 0.3,
        jitter: 0.8,
        server_mttf_s: Some(0.8),
        server_restart_s: 0.5,
        ..Setup::default()
    }
}

#[test]
fn lock_step_training_equals_one_process_despite_stragglers() {
    for local in [
        vec!["local.steps=5", "optimizer.kind=adam", "optimizer.lr=0.005"],
        vec!["local.steps=6", "local.fragments=3"],
    ] {
        let job = job(&[&["train.mode=bsp"], &local[..]].concat());
        let oracle = paraft_proof::oracle(&job, paraft_proof::Order::Shares).expect("an oracle");
        for setup in [Setup::default(), uneven()] {
            let (outcome, _) = run(&job, &setup);
            assert_eq!(bits(&outcome.weights), bits(&oracle), "{local:?}");
            assert_eq!(outcome.largest_lead, 0);
        }
    }
}

#[test]
fn eleven_local_steps_push_an_eleventh_of_the_bytes() {
    let quiet = Setup {
        compute_spread: 0.0,
        jitter: 0.0,
        latency_ms: 0.0,
        worker_gbit: 0.0,
        server_gbit: 0.0,
        ..Setup::default()
    };
    let (every, bytes) = run(&job(&[]), &quiet);
    // 22 minibatches an epoch.
    let (diloco, fewer) = run(&job(&["local.steps=11"]), &quiet);
    assert_eq!((every.steps, diloco.steps, bytes), (44, 4, 11 * fewer));
    assert!((every.seconds - diloco.seconds).abs() < 1e-6, "{} and {}", every.seconds, diloco.seconds);
}

#[test]
fn fragments_push_the_same_bytes_and_are_each_waited_for() {
    // 1210 values over a link that takes 77 ms each way for all of them.
    let narrow = Setup { compute_spread: 0.0, jitter: 0.0, worker_gbit: 0.000_5, ..Setup::default() };
    let set = ["local.steps=22", "cluster.bucket_bytes=512", "train.workers=1"];
    let (whole, bytes) = run(&job(&set), &narrow);
    let (turns, same) = run(&job(&[&set[..], &["local.fragments=2"]].concat()), &narrow);
    assert_eq!(bytes, same, "each value once a step");
    // A worker waits for each half as for the whole, and longer: less of the two ways is used at once.
    assert!(turns.seconds >= whole.seconds, "{} and {}", turns.seconds, whole.seconds);
}

#[test]
fn ssp_keeps_its_bound_and_every_job_ends_under_failures() {
    let troubled = Setup { mttf_s: Some(0.6), restart_s: Some(0.2), slow: [(1, 4.0)].into(), ..uneven() };
    for local in [vec!["local.steps=3"], vec!["local.steps=6", "local.fragments=3"]] {
        for (mode, bound) in [("bsp", 0), ("ssp:1", 1), ("asp", u64::MAX)] {
            let mode = format!("train.mode={mode}");
            let job = job(&[&[mode.as_str(), "train.epochs=3"], &local[..]].concat());
            let (outcome, _) = run(&job, &troubled);
            assert!(outcome.largest_lead <= bound, "{mode} {local:?}: a lead of {}", outcome.largest_lead);
            assert!(outcome.worker_failures > 0, "{mode} {local:?}");
            let (again, _) = run(&job, &troubled);
            assert_eq!(
                (outcome.seconds, bits(&outcome.weights)),
                (again.seconds, bits(&again.weights)),
                "{mode} {local:?}"
            );
        }
    }
}
