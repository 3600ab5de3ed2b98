//! `paraft verify sync`: a fleet in BSP, and one process.

use crate::{failure::Failure, train};
use clap::Args;
use paraft_checkpoint::{MODEL_FILE, weights};
use paraft_proof::{OracleError, Order, distance, oracle};
use paraft_worker::{Job, exit};
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
         [train]\nmode = \"bsp\"\nworkers = {}\nbatch = 16\nepochs = 1000\nmax_steps = {}\n\
         [optimizer]\nkind = \"momentum\"\nlr = 0.02\n[eval]\nevery_epoch = false\n[cluster]\nbucket_bytes = 1024\n",
        args.workers, args.steps
    );
    let job = Job::parse(&text, Path::new("verify-sync.toml"), &[])?;
    let scratch =
        tempfile::tempdir().map_err(|e| Failure::new(exit::IO, format!("no temporary folder: {e}")))?;
    train::launch(&job, scratch.path(), None, true, &train::interrupts())?;
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
    // A fleet and an oracle that both learn nothing would be equal too.
    let held = differ == 0 && apart <= ROUNDING && moved > 0.05;
    if args.json {
        let line = json!({
            "verdict": if held { "held" } else { "BROKEN" }, "workers": args.workers, "steps": args.steps,
            "values": fleet.len(), "values_that_differ": differ, "apart_from_one_large_batch": apart,
            "moved": moved,
        });
        out!("{line}");
    } else {
        let (n, steps, values) = (args.workers, args.steps, fleet.len());
        out!("{n} workers, {steps} steps, {values} values, 3 servers");
        out!("one process, share by share   {differ} values differ in any bit");
        out!("one process, {n} times the batch   {apart:.1e} apart at most (rounding: up to {ROUNDING:.0e})");
        match (held, moved > 0.05) {
            (true, _) => out!("the promise held"),
            (false, true) => out!("BROKEN: synchronous training is not training in one process"),
            (false, false) => out!("BROKEN: the weights moved by {moved:.1e} only; nothing was learned"),
        }
    }
    Ok(if held { exit::OK } else { exit::FAILED })
}

fn layout(job: &Job) -> Result<paraft_common::Layout, Failure> {
    let bad = |e: &dyn std::fmt::Display| Failure::new(exit::FAILED, e);
    let data = job.data.as_ref().ok_or_else(|| bad(&"the job has no data"))?;
    let data = data.load(&job.base_dir).map_err(|e| bad(&e))?;
    let model = job.model.as_ref().ok_or_else(|| bad(&"the job has no model"))?;
    let model = model.build(data.train.input_len(), data.train.classes()).map_err(|e| bad(&e))?;
    job.layout(model.tensors()).map_err(|e| bad(&e))
}
