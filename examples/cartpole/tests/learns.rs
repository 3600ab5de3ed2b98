//! The learner on a real fleet, with actors in its process and one in a process of its own.

use anyhow::{Context, Result, ensure};
use paraft_common::ShardId;
use paraft_example_cartpole::{
    intake::Intake,
    learner,
    settings::{Acting, Settings},
};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    train, wait,
};
use paraft_worker::WorkerOptions;
use std::{
    process::{Command, Stdio},
    thread,
};

const JOB: &str = "name = \"cartpole\"\nseed = 1\n[train]\nworkers = 1\nbatch = 8\nmax_steps = 3000\n\
                   [optimizer]\nkind = \"adam\"\nlr = 0.001\n[clip]\nnorm = 1.0\n[cluster]\ngrace_ms = 60000\n";
/// A random policy's episodes have a mean reward of about 22.
const LEARNED: f64 = 100.0;

#[test]
fn policy_learns_from_older_ones_while_a_leader_dies() -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions::replicated(1))?;
    let job = train::job_on(&fleet.at, JOB, &[])?;
    let intake = Intake::listen("127.0.0.1:0", job.train.batch)?;
    let learner = intake.address().to_string();
    let defaults = Settings::of_environment().map_err(|why| anyhow::anyhow!(why))?;
    let acting = Acting { refresh: 20, ..defaults.acting };
    let settings = Settings { acting, actors: 3, target: 195.0, ..defaults };
    let options = WorkerOptions::new(0, fleet.at.addresses.clone());
    let mut actor = Command::new(env!("CARGO_BIN_EXE_paraft-example-cartpole"));
    actor.args(["actor", "--servers", &fleet.at.addresses.join(","), "--learner", &learner, "--seed", "99"]);
    actor.args(["--refresh", "20"]).env("PARAFT_INSECURE", "1").stdout(Stdio::piped());
    let actor = actor.spawn()?;
    let report = thread::scope(|s| {
        let learner = s.spawn(|| learner::train_from(&job, &options, &settings, intake));
        let of = |fleet: &Fleet| fleet.leader(ShardId(0));
        wait::until("some updates", || of(&fleet).1.version, |version| *version > 100);
        let (leader, _) = of(&fleet);
        fleet.kill(leader);
        fleet.restart_server(leader)?;
        anyhow::Ok(learner.join().map_err(|_| anyhow::anyhow!("the learner panicked"))??)
    })?;
    let actor = actor.wait_with_output()?;
    let played = String::from_utf8_lossy(&actor.stdout);
    let words: Vec<_> = played.split_whitespace().collect();
    ensure!(actor.status.success(), "the actor's process: {}", actor.status);
    let [fragments, _, versions, _] = words[..] else { anyhow::bail!("the actor says {played}") };
    let fragments: u64 = fragments.parse().context("a number of fragments")?;
    ensure!(fragments > 10 && versions.parse::<u64>()? > 1, "the other process: {played}");
    let mean = report.mean_of_last(20);
    ensure!(mean >= LEARNED, "mean reward {mean} after {} updates: {report:#?}", report.updates);
    let old: u64 = report.ages.iter().filter(|a| a.from > 5).map(|a| a.trained).sum();
    ensure!(old > 0, "no policy was older than 5 updates: {report:#?}");
    Ok(())
}
