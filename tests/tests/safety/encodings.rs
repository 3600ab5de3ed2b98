//! Gradients in compressed encodings.

use anyhow::{Context, Result};
use paraft_proof::Order;
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    train::{distance, job, oracle, train, worker},
};
use std::thread;

/// The last three keep residuals.
const ENCODINGS: [&str; 7] = ["f32", "bf16", "f16", "int8", "sign", "top-k:0.02", "powersgd:2"];

/// The servers decode a push while they apply it, on any replica: the result is that of one process that
/// decodes, sums and applies the same bytes. In BSP the log holds pushes one by one if that is fewer bytes.
/// BatchNorm's statistics (the convnet has some) are not encoded.
#[test]
fn encoded_pushes_are_applied_as_by_one_process() -> Result<()> {
    let mlp = "[model]\nkind = \"mlp\"\nhidden = [24, 16]";
    for encoding in ENCODINGS {
        for (model, workers, mode, optimizer, clip) in [
            (mlp, 3, "bsp", "adam", None),
            (mlp, 1, "bsp", "momentum", Some(0.3)),
            (mlp, 1, "ssp:3", "momentum", Some(0.3)),
            (mlp, 1, "asp", "adam", None),
            ("[model]\nkind = \"convnet\"", 2, "bsp", "sgd", None),
        ] {
            let fleet = FleetOptions { servers: 3, shards: 2, replicas: 3, ..FleetOptions::default() };
            let fleet = Fleet::start(fleet)?;
            let mut set = vec![
                format!("train.workers={workers}"),
                format!("train.mode={mode}"),
                format!("optimizer.kind={optimizer}"),
            ];
            set.push(format!("train.encoding={encoding}"));
            set.extend(clip.map(|norm| format!("clip.norm={norm}")));
            let rest =
                ["train.max_steps=20", "train.batch=16", "optimizer.lr=0.02", "cluster.bucket_bytes=6000"];
            let set: Vec<&str> = set.iter().map(String::as_str).chain(rest).collect();
            let job = job(&fleet.at, model, &set)?;
            let cluster = train(&job)?;
            let single = paraft_proof::oracle(&job, Order::Shares)?;
            let differ = cluster.iter().zip(&single).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(differ, 0, "{set:?}: {:e} apart", distance(&single, &cluster));
            // If nothing were encoded, the oracle that rounds nothing would be as near as the order of its
            // sums (3e-7).
            let apart = distance(&oracle(&job)?, &cluster);
            assert!(encoding == "f32" || apart > 5e-6, "{set:?}: {apart:e} from training in f32");
        }
    }
    Ok(())
}

/// The cost of rounding in training (docs/convergence.md has the encodings that leave most of a gradient
/// out): f32 gets 342 of the 360 held-out digits right, and the others may get 0.02 fewer or more of them
/// (seven digits).
#[test]
fn the_digits_are_learned_as_well_in_every_encoding_that_rounds() -> Result<()> {
    const MARGIN: f64 = 0.02;
    let mut exact = 0.0;
    for encoding in &ENCODINGS[..4] {
        let fleet = Fleet::start(FleetOptions { servers: 1, shards: 1, replicas: 1, ..Default::default() })?;
        let own = format!("train.encoding={encoding}");
        let set = ["train.workers=2", "train.batch=16", "train.epochs=6", &own];
        let text = "[model]\nkind = \"mlp\"\nhidden = [32]\n[optimizer]\nkind = \"momentum\"\nlr = 0.05";
        let job = job(&fleet.at, text, &set)?;
        let reports = thread::scope(|s| {
            let workers = [0, 1].map(|rank| {
                let job = &job;
                s.spawn(move || worker(job, rank))
            });
            workers.map(|w| w.join().expect("no panic"))
        });
        let mut evaluated = None;
        for report in reports {
            evaluated = report?.evaluation.or(evaluated);
        }
        let e = evaluated.context("the final weights are evaluated")?;
        let accuracy = e.correct as f64 / e.count as f64;
        println!("{encoding}: {} of {} right", e.correct, e.count);
        if exact == 0.0 {
            exact = accuracy;
            assert!(exact > 0.9, "f32 learned {exact}");
        }
        assert!((accuracy - exact).abs() <= MARGIN, "{encoding}: {accuracy}, f32 has {exact}");
    }
    Ok(())
}
