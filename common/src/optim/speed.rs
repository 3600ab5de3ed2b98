//! Speed on this machine: `cargo test --release -p paraft-common optim -- --ignored --nocapture`.
//!
//! Every figure is a share of what memory allows: the bytes that an update must touch (the gradient once, weights and
//! slots twice) at the rate of memcpy, which touches two bytes for each that it copies. Rounds of both are interleaved.

use super::{
    identities::{all_kinds, numbers},
    *,
};
use crate::{
    encoding::{Encoding, Values, all_finite, sum_of_squares},
    payload::Payload,
    simd::{at, levels},
};
use std::{hint::black_box, time::Instant};

const BUCKET: usize = (1 << 20) / 4;
const ROUNDS: usize = 15;

fn seconds(work: impl FnOnce()) -> f64 {
    let began = Instant::now();
    work();
    began.elapsed().as_secs_f64()
}

/// The fastest round: what others do on the machine only ever adds to a time.
fn fastest(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}

fn sent(encoding: Encoding, buckets: usize) -> Vec<Payload> {
    let one = |b| {
        let mut out = vec![0xAA];
        encoding.encode(&numbers(BUCKET, b as u32), &mut out);
        let mut rest = bytes::Bytes::from(out).slice(1..);
        // As frames bring it: pieces of 256 KiB, one byte off the grid of values.
        let mut pieces = Vec::new();
        while rest.len() > 256 << 10 {
            pieces.push(rest.split_to(256 << 10));
        }
        pieces.push(rest);
        Payload::from_pieces(pieces)
    };
    (0..buckets).map(one).collect()
}

/// The times of `work` and of a memcpy of `values`, both over all `buckets`.
fn against_memcpy(buckets: usize, mut work: impl FnMut()) -> (f64, f64) {
    let from = vec![1f32; buckets * BUCKET];
    let mut to = vec![0f32; buckets * BUCKET];
    // In a cache one pass is too short to be timed.
    let passes = 64 / buckets;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let a = seconds(|| (0..passes).for_each(|_| work()));
        let b = seconds(|| (0..passes).for_each(|_| to.copy_from_slice(black_box(&from))));
        black_box(&to);
        if round > 0 {
            ours.push(a / passes as f64);
            theirs.push(b / passes as f64);
        }
    }
    (fastest(&ours), fastest(&theirs))
}

#[test]
#[ignore = "a measurement, not a check"]
fn speed_of_updates() {
    for buckets in [64, 1] {
        println!("{buckets} buckets of 1 MiB: gradient GB/s, and the share of what memcpy's rate allows");
        for (config, encoding) in all_kinds().into_iter().map(|c| (c, Encoding::F32)).chain(
            Encoding::ALL[1..]
                .iter()
                .flat_map(|e| [(OptimizerConfig::sgd(0.1), *e), (OptimizerConfig::adam(0.1), *e)]),
        ) {
            let grads = sent(encoding, buckets);
            let mut state: Vec<_> =
                (0..buckets).map(|b| (numbers(BUCKET, b as u32), config.new_slots(BUCKET))).collect();
            let mut t = 0;
            let (ours, copy) = against_memcpy(buckets, || {
                t += 1;
                let hyper = Hyper { lr: 1e-3, t, clip_value: None };
                for ((w, slots), payload) in state.iter_mut().zip(&grads) {
                    config.apply(&hyper, w, slots, Gradient { payload, encoding, scale: 0.5 });
                }
            });
            let f32s = (buckets * BUCKET * 4) as f64;
            let touched: f64 =
                grads.iter().map(|g| g.len() as f64).sum::<f64>() + (2 + 2 * config.slots()) as f64 * f32s;
            let limit = touched / (2.0 * f32s / copy);
            println!(
                "  {:9} {} slots {encoding:4}  {:5.1}  {:.2}",
                config.kind(),
                config.slots(),
                f32s * 1e-9 / ours,
                limit / ours
            );
        }
    }
}

#[test]
#[ignore = "a measurement, not a check"]
fn speed_of_scans_and_codecs() {
    for buckets in [64, 1] {
        println!("{buckets} buckets of 1 MiB: GB/s of f32, and the share of what memcpy's rate allows");
        for encoding in Encoding::ALL {
            let grads = sent(encoding, buckets);
            let values = numbers(BUCKET, 3);
            let mut sum = numbers(BUCKET, 1);
            let mut out = Vec::new();
            let bytes: f64 = grads.iter().map(|g| g.len() as f64).sum();
            let f32s = (buckets * BUCKET * 4) as f64;
            let show = |what: &str, touched: f64, mut work: Box<dyn FnMut(&Payload) + '_>| {
                let (ours, copy) = against_memcpy(buckets, || grads.iter().for_each(&mut work));
                let limit = touched / (2.0 * f32s / copy);
                println!("  {what:14} {encoding:4}  {:5.1}  {:.2}", f32s * 1e-9 / ours, limit / ours);
            };
            show(
                "all_finite",
                bytes,
                Box::new(|p| assert_eq!(all_finite(black_box(p), encoding, BUCKET), Ok(true))),
            );
            show(
                "sum_of_squares",
                bytes,
                Box::new(|p| {
                    black_box(sum_of_squares(black_box(p), encoding, BUCKET)).expect("fits");
                }),
            );
            show(
                "add",
                bytes,
                Box::new(|p| {
                    Values::new(p, encoding, BUCKET).expect("fits").add_to(&mut sum).expect("fits");
                    black_box(&sum);
                }),
            );
            show(
                "encode",
                bytes + f32s,
                Box::new(|_| {
                    out.clear();
                    encoding.encode(black_box(&values), &mut out);
                    black_box(&out);
                }),
            );
        }
    }
}

#[test]
#[ignore = "a measurement, not a check"]
fn speed_by_vector_unit() {
    for buckets in [64, 1] {
        println!("{buckets} buckets of 1 MiB: gradient GB/s");
        for level in levels() {
            let mut line = format!("  {:8}", format!("{level:?}").split('(').next().unwrap_or_default());
            for (config, encoding) in [
                (OptimizerConfig::sgd(0.1), Encoding::F32),
                (OptimizerConfig::adam(0.1), Encoding::F32),
                (OptimizerConfig::sgd(0.1), Encoding::Bf16),
                (OptimizerConfig::sgd(0.1), Encoding::F16),
                (OptimizerConfig::sgd(0.1), Encoding::Int8),
            ] {
                let grads = sent(encoding, buckets);
                let mut state: Vec<_> =
                    (0..buckets).map(|b| (numbers(BUCKET, b as u32), config.new_slots(BUCKET))).collect();
                let (ours, _) = at(level, || {
                    against_memcpy(buckets, || {
                        let hyper = Hyper { lr: 1e-3, t: 9, clip_value: None };
                        for ((w, slots), payload) in state.iter_mut().zip(&grads) {
                            config.apply(&hyper, w, slots, Gradient { payload, encoding, scale: 0.5 });
                        }
                    })
                });
                line +=
                    &format!("  {} {encoding} {:.1}", config.kind(), (buckets << 20) as f64 * 1e-9 / ours);
            }
            println!("{line}");
        }
    }
}
