//! PyTorch is the oracle: the vectors of `tools/golden/optimizers.py`.
//!
//! Tolerance. PyTorch's vector kernels fuse multiply and add and divide where we multiply by an inverse, so a
//! single update may differ by a few units in the last place of the largest number in it, and the state carries
//! that on. Over 20 updates we allow `8 * 2^-23` of the weight or of the way it has moved, whichever is larger
//! (an error enters through the way moved; a weight that ends near zero is no more exact for it). A wrong
//! formula, such as `eps` inside the root or `1 - beta2` rounded to `f32` first, is off by more than that where the weights start near zero.

use super::*;
use crate::{codec::put_f32_le, encoding::Encoding, payload::Payload};
use serde::Deserialize;

const TOLERANCE: f32 = 8.0 * f32::EPSILON;

#[derive(Deserialize)]
struct Optimizers {
    start: String,
    grads: Vec<String>,
    case: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    optimizer: OptimizerConfig,
    clip: Option<f32>,
    rates: String,
    after: Vec<String>,
}

#[derive(Deserialize)]
struct Schedules {
    case: Vec<ScheduleCase>,
}

#[derive(Deserialize)]
struct ScheduleCase {
    name: String,
    schedule: ScheduleConfig,
    factors: Vec<f64>,
}

fn floats(hex: &str) -> Vec<f32> {
    hex.split(' ').map(|h| f32::from_bits(u32::from_str_radix(h, 16).expect("hex"))).collect()
}

fn le(values: &[f32]) -> Payload {
    let mut out = Vec::new();
    put_f32_le(values, &mut out);
    out.into()
}

#[test]
fn every_optimizer_follows_pytorch_for_twenty_updates() {
    let file: Optimizers = toml::from_str(include_str!("golden/optimizers.toml")).expect("golden file");
    let grads: Vec<Payload> = file.grads.iter().map(|g| le(&floats(g))).collect();
    let start = floats(&file.start);
    let mut kinds = std::collections::BTreeSet::new();
    for case in &file.case {
        case.optimizer.validate().expect("golden options are valid");
        kinds.insert(case.optimizer.kind());
        let mut weights = start.clone();
        let mut slots = case.optimizer.new_slots(weights.len());
        let mut way = vec![0f32; weights.len()];
        let mut worst = 0f32;
        for (i, lr) in floats(&case.rates).into_iter().enumerate() {
            let hyper = Hyper { lr, t: i as u64 + 1, clip_value: case.clip };
            let before = weights.clone();
            // Half the gradient with scale 2 is the gradient: the scale must come before clip and decay.
            let half: Vec<f32> = floats(&file.grads[i]).iter().map(|g| g / 2.0).collect();
            let (payload, scale) = if i % 2 == 0 { (grads[i].clone(), 1.0) } else { (le(&half), 2.0) };
            case.optimizer.apply(
                &hyper,
                &mut weights,
                &mut slots,
                Gradient { payload: &payload, encoding: Encoding::F32, scale },
            );
            for (k, expected) in floats(&case.after[i]).into_iter().enumerate() {
                way[k] += (weights[k] - before[k]).abs();
                let unit = expected.abs().max(way[k]);
                let off = (weights[k] - expected).abs() / unit;
                worst = worst.max(off);
                assert!(
                    off <= TOLERANCE,
                    "{}: update {}, weight {k}: {} but PyTorch has {expected}",
                    case.name,
                    i + 1,
                    weights[k]
                );
            }
        }
        println!("{}: worst {:.2} * 2^-23", case.name, worst / f32::EPSILON);
    }
    assert_eq!(kinds.len(), 11, "every kind has a case");
}

/// PyTorch computes its schedules from the factor before, so its own rounding adds up: 1e-12 over 20 steps.
#[test]
fn every_schedule_follows_pytorch() {
    let file: Schedules = toml::from_str(include_str!("golden/schedules.toml")).expect("golden file");
    for case in &file.case {
        case.schedule.validate().expect("golden options are valid");
        for (clock, expected) in case.factors.iter().enumerate() {
            let ours = case.schedule.factor(clock as f64, 1);
            assert!(
                (ours - expected).abs() < 1e-12,
                "{} at {clock}: {ours} but PyTorch has {expected}",
                case.name
            );
        }
    }
}
