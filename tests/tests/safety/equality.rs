//! One process is the oracle for the cluster.

use anyhow::Result;
use paraft_client::Transport;
use paraft_tests::{
    fleet::{At, Fleet, FleetOptions},
    train::{distance, job, oracle, train},
};

const LOGISTIC: &str = "[model]\nkind = \"logistic-regression\"";
const MLP: &str = "[model]\nkind = \"mlp\"\nhidden = [24, 16]";
const AUTOENCODER: &str = "[model]\nkind = \"autoencoder\"\nhidden = [16]";
const CONVNET: &str = "[model]\nkind = \"convnet\"";

/// Each with a rate that trains, and the allowed distance from the oracle after 50 steps, as a share of the
/// largest weight.
const OPTIMIZERS: [(&str, &str, f64); 7] = [
    ("sgd", "lr = 0.1", LINEAR),
    ("momentum", "lr = 0.02", LINEAR),
    ("nesterov", "lr = 0.02", LINEAR),
    ("adagrad", "lr = 0.02", ADAPTIVE),
    ("rmsprop", "lr = 0.002", ADAPTIVE),
    ("adam", "lr = 0.005", ADAPTIVE),
    ("adamw", "lr = 0.005", ADAPTIVE),
];
/// The mean of n means and the mean over the union are the same sum in another order: they differ by a few
/// units in the last place of an f32 (6e-8). If the update is linear in the gradient, that error only adds
/// up. Measured: 3e-7 at most.
const LINEAR: f64 = 1e-6;
/// These divide by the root of a mean square: if a gradient cancels to nearly nothing, its rounding error is
/// as large as itself, and the quotient passes it on at the size of the rate. Measured: 4e-6 at most.
const ADAPTIVE: f64 = 1e-4;

fn run(fleet: FleetOptions, text: &str, set: &[&str]) -> Result<(Vec<f32>, Vec<f32>)> {
    let fleet = Fleet::start(fleet)?;
    let mut all = vec!["train.max_steps=50", "train.batch=16", "train.epochs=9"];
    all.extend(set);
    let job = job(&fleet.at, text, &all)?;
    Ok((train(&job)?, oracle(&job)?))
}

fn initial(model: &str) -> Result<Vec<f32>> {
    let nowhere =
        At { addresses: vec!["127.0.0.1:1".into()], shards: 1, replicas: 1, transport: Transport::Tcp };
    oracle(&job(&nowhere, model, &["train.max_steps=1", "optimizer.kind=sgd", "optimizer.lr=0"])?)
}

/// The oracle must be able to fail: an error in one worker's share must show.
#[test]
fn a_worker_that_saw_other_samples_would_be_noticed() -> Result<()> {
    let nowhere =
        At { addresses: vec!["127.0.0.1:1".into()], shards: 1, replicas: 1, transport: Transport::Tcp };
    let set = |batch: &'static str| ["train.max_steps=50", "train.workers=2", "train.epochs=9", batch];
    let right = oracle(&job(&nowhere, LOGISTIC, &set("train.batch=16"))?)?;
    let wrong = oracle(&job(&nowhere, LOGISTIC, &set("train.batch=15"))?)?;
    assert!(distance(&right, &wrong) > 1e-2, "one sample less in each worker's minibatch");
    Ok(())
}

fn bsp_equals_the_oracle(model: &str) -> Result<()> {
    let mut worst: Vec<String> = Vec::new();
    for (kind, rate, allowed) in OPTIMIZERS {
        for workers in 2..=4 {
            let (kind, rate) = (format!("optimizer.kind={kind}"), format!("optimizer.{rate}"));
            let workers = format!("train.workers={workers}");
            let set = [workers.as_str(), &kind, &rate, "cluster.bucket_bytes=1024"];
            let (cluster, single) = run(FleetOptions::default(), model, &set)?;
            let apart = distance(&single, &cluster);
            // A trainer that does nothing would be equal, too.
            let moved = distance(&single, &initial(model)?);
            assert!(moved > 0.05, "{set:?}: it moved by {moved:e} only");
            if apart > allowed {
                worst.push(format!("{set:?}: {apart:e} is more than {allowed:e}"));
            }
        }
    }
    assert!(worst.is_empty(), "{model}: {worst:#?}");
    Ok(())
}

#[test]
fn bsp_logistic_regression_equals_one_process() -> Result<()> {
    bsp_equals_the_oracle(LOGISTIC)
}

#[test]
fn bsp_mlp_equals_one_process() -> Result<()> {
    bsp_equals_the_oracle(MLP)
}

#[test]
fn bsp_autoencoder_equals_one_process() -> Result<()> {
    bsp_equals_the_oracle(AUTOENCODER)
}

#[test]
fn shards_replicas_clipping_and_schedule_change_no_weights() -> Result<()> {
    let schedule =
        "[schedule]\nkind = \"cosine\"\nsteps = 40\nmin_factor = 0.1\nwarmup = 5\nscale = \"linear\"";
    let text = format!("{MLP}\n[optimizer]\nkind = \"momentum\"\nlr = 0.01\n[clip]\nnorm = 0.5\n{schedule}");
    for fleet in [
        FleetOptions::replicated(3),
        FleetOptions { servers: 1, shards: 3, replicas: 1, ..Default::default() },
    ] {
        let set = ["train.workers=2", "cluster.bucket_bytes=1024"];
        let (cluster, single) = run(fleet, &text, &set)?;
        let apart = distance(&single, &cluster);
        assert!(apart <= LINEAR, "{fleet:?}: {apart:e}");
    }
    Ok(())
}

#[test]
fn one_worker_gets_the_same_bits_in_every_mode_and_alone() -> Result<()> {
    let bounds = "\"*bias\" = { clamp = [-0.05, inf] }\n\"*weight\" = { max_norm = 0.6 }";
    let clip = format!("[clip]\nnorm = 0.3\n[constraints]\n{bounds}");
    for (model, kind) in [(LOGISTIC, "adam"), (MLP, "momentum"), (AUTOENCODER, "rmsprop"), (CONVNET, "sgd")] {
        for shards in [1, 2] {
            for mode in ["bsp", "ssp:3", "asp"] {
                let (mode, kind) = (format!("train.mode={mode}"), format!("optimizer.kind={kind}"));
                let set = [
                    "train.workers=1",
                    "train.max_steps=20",
                    "optimizer.lr=0.02",
                    "cluster.bucket_bytes=4096",
                    &mode,
                    &kind,
                ];
                let fleet = FleetOptions { servers: 1, shards, replicas: 1, ..Default::default() };
                let (cluster, single) = run(fleet, &format!("{model}\n{clip}"), &set)?;
                let same = cluster.iter().zip(&single).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{model} {set:?} {shards} shards: {:e}", distance(&single, &cluster));
            }
        }
    }
    Ok(())
}
