//! The runs of a matrix: their number, their budgets and their names.

use super::*;
use paraft_common::Mode;
use std::path::Path;

const JOB: &str = "[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"digits\"\n[train]\nbatch = 16\nepochs = 3\n\
                   [algorithm]\nkind = \"dc-asgd-c\"\nlambda = 0.5\n[optimizer]\nkind = \"sgd\"\nlr = 0.1\n";

fn load(set: &[String]) -> Result<Job, JobError> {
    Job::parse(JOB, Path::new("t.toml"), set)
}

fn axes(algorithms: &[&str]) -> Axes {
    Axes {
        modes: vec![Mode::Bsp.into(), Mode::Asp.into()],
        workers: vec![2, 4],
        seeds: vec![1, 2],
        algorithms: algorithms.iter().map(|a| Algorithm::named(a).expect(a)).collect(),
    }
}

fn expanded(axes: &Axes) -> (Vec<Planned>, Vec<LeftOut>) {
    expand(axes, &load, &|_| Ok(())).expect("a matrix")
}

#[test]
fn the_matrix_is_the_product_without_what_the_job_refuses() {
    let (runs, left) = expanded(&axes(&["asgd", "dc-asgd-c", "dana-zero", "top-k:0.1"]));
    // DANA does not support plain SGD: of 2 × 4 × 2 groups, 4.
    assert_eq!((runs.len(), left.len()), (2 * (16 - 4), 4));
    let dirs: BTreeSet<_> = runs.iter().map(|r| r.dir.as_str()).collect();
    assert!(dirs.contains("bsp_asgd") && dirs.contains("asp_top-k-0.1_w4_s2"), "{dirs:?}");
    for l in &left {
        let why = match l.algorithm.as_str() {
            "dana-zero" => "optimizer.kind",
            other => panic!("{other}: {}", l.reason),
        };
        assert!(l.reason.contains(why), "{}", l.reason);
    }
    let of = |name: &str| &runs.iter().find(|r| r.algorithm == name).expect(name).job;
    // The job's own kind keeps its options; another kind has its defaults.
    assert_eq!(of("dc-asgd-c").algorithm, load(&[]).expect("a job").algorithm);
    assert_eq!(of("asgd").algorithm, AlgorithmConfig::default());
    assert_eq!(of("top-k:0.1").train.encoding.to_string(), "top-k:0.1");
}

#[test]
fn every_run_has_the_samples_of_the_job_to_less_than_a_step() {
    let base = load(&[]).expect("a job");
    let train = base.data.as_ref().expect("data").load(Path::new(".")).expect("digits").train;
    let budget = |job: &Job| Plan::new(job, &train).expect("a plan").budget(job, None);
    let all = budget(&base);
    let axes = Axes { workers: vec![1, 2, 3, 5, 7, 32], ..axes(&["asgd"]) };
    for run in expanded(&axes).0 {
        let own = budget(&run.job);
        let step = 16 * u64::from(run.workers);
        assert!(own <= all && all - own < step, "{} workers: {own} of {all}", run.workers);
    }
}

#[test]
fn what_is_no_matrix_is_refused_with_what_to_write() {
    let said = |f: Failure| f.message().to_string();
    let unknown = said(Algorithm::named("dc-asgd").expect_err("no such kind"));
    assert!(unknown.contains("dc-asgd-c") && unknown.contains("train.encoding"), "{unknown}");
    for (text, why) in [
        ("algorithm.kind=asgd", "no `:`"),
        ("x:", "changes nothing"),
        ("x: lambda", "KEY=VALUE"),
        ("x: train.workers=3", "comparison's own"),
        (": a=1", "1 to 60"),
    ] {
        let said = said(Algorithm::own(text).expect_err(text));
        assert!(said.contains(why), "{said}");
    }
    let own = Algorithm::own("mix: clip={ value = 1, norm = 2 }, train.encoding=top-k:0.1").expect("own");
    assert_eq!(
        own.set(&load(&[]).expect("job")),
        ["clip={ value = 1, norm = 2 }", "train.encoding=top-k:0.1"]
    );
    let same = Axes { seeds: vec![3, 3], ..axes(&["asgd"]) };
    assert!(said(expand(&same, &load, &|_| Ok(())).expect_err("twice")).contains("--seeds 3 twice"));
    let none = expand(&axes(&["asgd"]), &load, &|_| Err("not here".into()));
    assert!(said(none.expect_err("nothing left")).contains("not here"));
    assert_eq!("3".parse(), Ok(Seeds(vec![1, 2, 3])));
    assert_eq!("7,".parse(), Ok(Seeds(vec![7])));
    assert_eq!("4,9".parse(), Ok(Seeds(vec![4, 9])));
    assert!(["0", "", "x", "5000"].into_iter().all(|t| t.parse::<Seeds>().is_err()));
}
