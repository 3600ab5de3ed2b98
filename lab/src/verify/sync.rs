//! `paraft verify sync`: a fleet in BSP, and one process.

use clap::Args;
use paraft_checkpoint::{MODEL_FILE, weights};
use paraft_fleet::{failure::Failure, launch};
use paraft_proof::{OracleError, Order, distance, oracle};
use paraft_worker::{Job, exit, samples::shape_of};
use serde_json::json;
use std::path::Path;

#[derive(Args)]
pub struct SyncArgs {
    /// Workers of the fleet.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub workers: u32,
    /// Steps.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub steps: u64,
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
}

/// The mean of n means and the mean over the union are the same sum in another order; where the update is linear in
/// the gradient, their difference of a few units in the last place of an `f32` (6e-8) only adds up.
const ROUNDING: f64 = 1e-5;

pub fn run(args: &SyncArgs) -> Result<i32, Failure> {
    let text = format!(
        "name = \"verify-sync\"\n[model]\nkind = \"mlp\"\nhidden = [24, 16]\n[data]\nkind = \"digits\"\n\
         [train]\ndevice = \"cpu\"\nmode = \"bsp\"\nworkers = {}\nbatch = 16\nepochs = 1000\nmax_steps = {}\n\
         [optimizer]\nkind = \"momentum\"\nlr = 0.02\n[eval]\nevery_epoch = false\n[cluster]\nbucket_bytes = 1024\n",
        args.workers, args.steps
    );
    let job = Job::parse(&text, Path::new("verify-sync.toml"), &[])?;
    let scratch =
        tempfile::tempdir().map_err(|e| Failure::new(exit::IO, format!("no temporary folder: {e}")))?;
    launch::launch(&job, scratch.path(), None, true, &launch::interrupts())?;
    let failed = |e: OracleError| Failure::new(exit::FAILED, e);
    let layout = layout(&job)?;
    let (fleet, _) = weights::load(&scratch.path().join(MODEL_FILE), &layout)?;
    let shares = oracle(&job, Order::Shares).map_err(failed)?;
    let union = oracle(&job, Order::Union).map_err(failed)?;
    let differ = fleet.iter().zip(&shares).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let apart = distance(&union, &fleet);
    let mut still = job.clone();
    still.optimizer = paraft_common::optim::OptimizerConfig::sgd(0.0);
    let moved = distance(&union, &oracle(&still, Order::Union).map_err(failed)?);
    let (verdict, code) = verdict(differ, apart, moved);
    if args.json {
        let line = json!({
            "verdict": verdict, "workers": args.workers, "steps": args.steps,
            "values": fleet.len(), "values_that_differ": differ, "apart_from_one_large_batch": apart,
            "moved": moved,
        });
        out!("{line}");
    } else {
        let (n, steps, values) = (args.workers, args.steps, fleet.len());
        out!("{n} workers, {steps} steps, {values} values, 3 servers");
        out!("one process, share by share   {differ} values differ in any bit");
        out!("one process, {n} times the batch   {apart:.1e} apart at most (rounding: up to {ROUNDING:.0e})");
        match code {
            exit::OK => out!("the promise held"),
            exit::DOES_NOT_COUNT => out!(
                "the promise held, but the run does not count: in {steps} steps the weights moved by {moved:.1e} only, and \
                 a fleet that learns nothing would look the same; use more --steps (60 are enough)"
            ),
            _ => out!("BROKEN: synchronous training is not training in one process"),
        }
    }
    Ok(code)
}

/// Weights that moved less than this were hardly trained.
const TRAINED: f64 = 0.05;

/// In a word and as exit code: `differ` values of the weights are not those of the sum share by share, they are `apart`
/// from those of one large batch, and `moved` from where they began.
fn verdict(differ: usize, apart: f64, moved: f64) -> (&'static str, i32) {
    // Whatever is not a number is no proof.
    match (differ == 0 && apart <= ROUNDING, moved > TRAINED) {
        (false, _) => ("BROKEN", exit::FAILED),
        // A fleet and an oracle that both learn nothing would be equal too.
        (true, false) => ("does not count", exit::DOES_NOT_COUNT),
        (true, true) => ("held", exit::OK),
    }
}

fn layout(job: &Job) -> Result<paraft_common::Layout, Failure> {
    let bad = |e: &dyn std::fmt::Display| Failure::new(exit::FAILED, e);
    let data = job.data.as_ref().ok_or_else(|| bad(&"the job has no data"))?;
    let data = data.load(&job.base_dir).map_err(|e| bad(&e))?;
    let model = job.model.as_ref().ok_or_else(|| bad(&"the job has no model"))?;
    let model = model.build(shape_of(&data.train)).map_err(|e| bad(&e))?;
    job.layout(model.tensors()).map_err(|e| bad(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_steps_prove_nothing() {
        for (differ, apart, moved, word, code) in [
            (0, 0.0, 1.0, "held", 0),
            (0, 0.0, 0.01, "does not count", 75),
            (0, 0.0, f64::NAN, "does not count", 75),
            (1, 0.0, 1.0, "BROKEN", 1),
            (1, 0.0, 0.01, "BROKEN", 1),
            (0, 1e-3, 0.01, "BROKEN", 1),
            (0, f64::NAN, 1.0, "BROKEN", 1),
        ] {
            assert_eq!(verdict(differ, apart, moved), (word, code), "{differ} {apart} {moved}");
        }
    }
}
