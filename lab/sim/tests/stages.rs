//! Workers whose ranks hold a stage of the model each, in simulated time: the bits of one process, the papers' idle shares, what versions
//! gradients are of, and what goes where.

mod common;

use common::{bits, run_in};
use paraft_sim::{Outcome, Setup, SimError};
use paraft_worker::Job;
use std::path::Path;

fn job(hidden: &str, set: &[&str]) -> Job {
    let text = format!(
        "[model]\nkind = \"mlp\"\nhidden = {hidden}\n[data]\nkind = \"digits\"\n[train]\ndevice = \"cpu\"\nworkers = 1\nbatch = 32\n\
         epochs = 9\nmax_steps = 24\n[optimizer]\nkind = \"adam\"\nlr = 0.002\n[eval]\nevery_epoch = false\n[cluster]\nshards = 8\nbucket_bytes = 1024\n"
    );
    let set: Vec<String> = set.iter().map(ToString::to_string).collect();
    Job::parse(&text, Path::new("test.toml"), &set).expect("a job")
}

const UNEVEN: &str = "[24, 30, 17, 20, 24, 11, 16]";

fn run(job: &Job, setup: &Setup) -> Result<Outcome, SimError> {
    run_in(job, setup, Path::new("."), Box::new(|_| Ok(())))
}

/// No time passes but that of computation.
fn quiet() -> Setup {
    Setup {
        compute_spread: 0.0,
        jitter: 0.0,
        latency_ms: 0.0,
        worker_gbit: 0.0,
        server_gbit: 0.0,
        ..Setup::default()
    }
}

fn uneven() -> Setup {
    Setup {
        compute_spread: 0.5,
        worker_spread: 0.3,
        jitter: 0.8,
        worker_gbit: 0.1,
        server_mttf_s: Some(0.5),
        server_restart_s: 0.3,
        ..Setup::default()
    }
}

#[test]
fn stages_learn_the_bits_of_one_process_at_equal_versions() {
    for (workers, set) in [
        (1, &["parallel.pipeline=2", "parallel.micro_batches=5"][..]),
        (3, &["parallel.pipeline=4", "parallel.schedule=gpipe"]),
        (1, &["parallel.pipeline=4", "parallel.schedule=2bw", "train.batch=29", "train.drop_last=false"]),
        (3, &["parallel.pipeline=3", "parallel.schedule=2bw", "parallel.micro_batches=3"]),
        (2, &["parallel.pipeline=8", "parallel.schedule=2bw", "eval.every_epoch=true", "train.batch=180"]),
        (1, &["parallel.pipeline=3", "parallel.schedule=2bw", "train.mode=asp"]),
    ] {
        let workers = format!("train.workers={workers}");
        let job = job(UNEVEN, &[set, &[&workers]].concat());
        let oracle = paraft_proof::oracle(&job, paraft_proof::Order::Shares).expect("an oracle");
        for setup in [Setup::default(), uneven()] {
            let outcome = run(&job, &setup).expect("it ends");
            assert!(bits(&outcome.weights) == bits(&oracle), "{set:?}, {setup:?}");
            assert_eq!(outcome.steps, 24);
        }
    }
}

/// The first stage lends the last its embedding: what that adds to the sums comes in another order.
#[test]
fn stages_with_a_shared_embedding_learn_like_one_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let sum = |i: u32| format!("{} and {} are {}; ", i % 7, i % 11, i % 7 + i % 11);
    std::fs::write(folder.path().join("sums.txt"), (0..900).map(sum).collect::<String>()).expect("a text");
    let text = "[model]\nkind = \"transformer\"\nlayers = 3\nheads = 1\nwidth = 16\n[data]\nkind = \"text\"\npath = \"sums.txt\"\ncontext = 16\n\
                [train]\ndevice = \"cpu\"\nworkers = 2\nbatch = 8\nmax_steps = 20\n[optimizer]\nkind = \"sgd\"\nlr = 0.1\n[eval]\n\
                every_epoch = false\n[cluster]\nshards = 4\nbucket_bytes = 4096\n";
    let job = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(ToString::to_string).collect();
        Job::parse(text, &folder.path().join("job.toml"), &set).expect("a job")
    };
    let run = |job: &Job| run_in(job, &uneven(), folder.path(), Box::new(|_| Ok(()))).expect("it ends");
    let whole = run(&job(&[]));
    let cut = run(&job(&["parallel.pipeline=3", "parallel.micro_batches=4"]));
    let far = paraft_proof::distance(&whole.weights, &cut.weights);
    assert!(far < 1e-4, "{far} away");
    // 256 tokens of 16 values, lent with each pull, and its gradient back; beside 16 tokens of a sample there, and back.
    let (lent, edges) = (256 * 16 * 4, 2 * 8 * 16 * 16 * 4);
    let [first, _, last] = &cut.stages[..] else { panic!("{:?}", cut.stages) };
    assert_eq!(last.sent, 2 * 20 * (lent + edges / 2));
    assert!(first.sent >= 2 * 20 * (lent + edges / 2), "{first:?}");
}

#[test]
fn ranks_are_idle_as_long_as_their_schedule_says() {
    for stages in [2, 4, 8] {
        for micro in [8, 16, 48] {
            for schedule in ["gpipe", "1f1b", "2bw"] {
                let set = [
                    format!("parallel.pipeline={stages}"),
                    format!("parallel.micro_batches={micro}"),
                    format!("parallel.schedule={schedule}"),
                ];
                let of_steps = ["train.batch=48", "train.max_steps=8"];
                let job = job(UNEVEN, &[&set.each_ref().map(String::as_str)[..], &of_steps].concat());
                let out = run(&job, &quiet()).expect("it ends");
                let costs: Vec<f64> = out.stages.iter().map(|s| s.cost).collect();
                let want = job.parallel.schedule.bubble_of(&costs, micro, 8);
                let idle = out.stages.iter().map(|s| s.idle).sum::<f64>() / out.stages.len() as f64;
                assert!((idle - want).abs() < 1e-3, "{set:?}: {idle} for {want}");
            }
        }
    }
}

#[test]
fn overlapping_minibatches_are_late_by_one_update_per_worker() {
    for (workers, schedule, mode, least, most) in [
        (1, "1f1b", "bsp", 0.0, 0.0),
        (1, "2bw", "asp", 0.8, 1.0),
        (4, "1f1b", "asp", 2.0, 4.0),
        (4, "2bw", "asp", 5.0, 8.0),
    ] {
        let set = [
            format!("train.workers={workers}"),
            format!("parallel.schedule={schedule}"),
            format!("train.mode={mode}"),
            "parallel.pipeline=4".into(),
        ];
        let out = run(&job(UNEVEN, &set.each_ref().map(String::as_str)), &Setup::default()).expect("it ends");
        for stage in &out.stages {
            assert!((least..=most).contains(&stage.delay), "{set:?}: {stage:?}");
        }
    }
}

#[test]
fn each_stage_moves_its_own_values_and_its_neighbours_inputs() {
    let set = ["parallel.pipeline=2", "parallel.micro_batches=4", "train.max_steps=10"];
    let out = run(&job(UNEVEN, &set), &Setup::default()).expect("it ends");
    let [first, second] = &out.stages[..] else { panic!("{:?}", out.stages) };
    let values = |sizes: &[u64]| sizes.windows(2).map(|w| w[0] * w[1] + w[1]).sum::<u64>();
    let sizes: [u64; 9] = [64, 24, 30, 17, 20, 24, 11, 16, 10];
    let cut = first.layers.end;
    let (of_first, of_second) = (values(&sizes[..=cut]), values(&sizes[cut..]));
    assert_eq!((first.pushed, second.pushed), (10 * 4 * of_first, 10 * 4 * of_second));
    assert!(first.pulled >= 11 * 4 * of_first && second.pulled >= 11 * 4 * of_second, "{:?}", out.stages);
    // The last layer's outputs for each sample on the way there, and as many back.
    let sent = 10 * 32 * sizes[cut] * 4;
    assert_eq!((first.sent, second.sent), (sent, sent));
    assert_eq!((first.layers.clone(), second.layers.clone()), (0..cut, cut..8));
}

#[test]
fn what_the_simulator_has_no_stages_for_is_refused_by_name() {
    let stages = ["parallel.pipeline=2"];
    let failing = Setup { mttf_s: Some(1.0), ..Setup::default() };
    let servers = Setup { server_mttf_s: Some(1.0), ..Setup::default() };
    let early = [
        "parallel.pipeline=2",
        "parallel.schedule=2bw",
        "eval.every_epoch=true",
        "eval.early_stop={ patience = 2, min_delta = 0.0 }",
    ];
    for (set, setup, said) in [
        (&stages[..], &failing, "--mttf-s"),
        (
            &["parallel.pipeline=2", "cluster.durability=leader", "train.mode=asp"],
            &servers,
            "cluster.durability",
        ),
        (&early, &Setup::default(), "early_stop"),
        (&["parallel.pipeline=9", "cluster.shards=9"], &Setup::default(), "parallel.pipeline"),
    ] {
        let why = match run(&job(UNEVEN, set), setup) {
            Err(e) => e.to_string(),
            Ok(_) => panic!("{set:?} is taken"),
        };
        assert!(why.contains(said), "{set:?}: {why}");
    }
}
