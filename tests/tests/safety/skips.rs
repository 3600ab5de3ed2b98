//! Steps for which a worker has no gradient: they count as pushed and change nothing, whichever server leads.

use anyhow::{Context, Result, anyhow, ensure};
use paraft_client::{Client, ClientError, ClientOptions, SessionError, WireKind};
use paraft_common::{
    BucketId, Durability, Mode, ParamGroup, ShardId, Step, WorkerId,
    config::ServerJob,
    optim::{ClipConfig, OptimizerConfig, Overrides},
};
use paraft_tests::fleet::{At, Fleet, FleetOptions};
use std::{
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

const LEN: usize = 40;
/// A plan by the plain job's steps: which of its steps to train, in order; `None`: skip.
type Plan = Vec<Option<u64>>;

fn job(mode: Mode, durability: Durability, clip: Option<f32>) -> ServerJob {
    let group = |values, lr| ParamGroup::new(values, lr, 0.01);
    ServerJob {
        workers: 2,
        durability,
        optimizer: OptimizerConfig::adam(0.5),
        groups: vec![group(14, 0.01), group(26, 0.02)],
        clip: ClipConfig { norm: clip, value: None },
        ..ServerJob::new("skips", mode, LEN, 8)
    }
}

fn gradient(worker: u32, number: u64) -> Vec<f32> {
    let of = |i: usize| ((i as u64 * 7 + number * 13 + u64::from(worker) * 5) % 23) as f32 * 0.1 - 1.0;
    (0..LEN).map(of).collect()
}

fn join(at: &At, job: &ServerJob, worker: u32) -> Result<(Client, Step)> {
    let options = ClientOptions {
        servers: at.addresses.clone(),
        shards: at.shards,
        replicas: at.replicas,
        worker: WorkerId(worker),
        job: job.clone(),
        device: String::new(),
        transport: at.transport,
        timeout: Duration::from_secs(30),
        handover: paraft_client::HANDOVER,
        stages: None,
    };
    Ok(Client::join(options, &[0.5; LEN])?)
}

/// Trains by a plan; returns the final weights, and the number of skipped steps after each.
fn train(
    at: &At,
    job: &ServerJob,
    worker: u32,
    plan: &Plan,
    pushed: impl Fn(u64),
) -> Result<(Vec<u32>, Vec<u64>)> {
    let (mut client, mut done) = join(at, job, worker)?;
    let (mut weights, mut skipped) = (vec![0.0; LEN], Vec::new());
    client.pull(done, &mut weights)?;
    for number in plan {
        done = done.next();
        match number {
            Some(number) => push(&mut client, done, &gradient(worker, *number)),
            None => client.skip(done),
        }
        pushed(done.0);
        done = client.pull(done, &mut weights)?.done;
        skipped.push(client.counters().skipped);
    }
    client.finish();
    client.pull_final(done, &mut weights)?;
    Ok((weights.iter().map(|w| w.to_bits()).collect(), skipped))
}

type Ends = [(Vec<u32>, Vec<u64>); 2];

/// Runs both workers. Worker 0 waits at `meet` after its pushes of `at_step`, worker 1 before its own of that
/// step.
fn both(fleet: &mut Fleet, job: &ServerJob, plans: &[Plan; 2], kill_at: Option<u64>) -> Result<Ends> {
    let meet = Arc::new(Barrier::new(2));
    let workers: Vec<_> = (0u32..)
        .zip(plans.clone())
        .map(|(worker, plan)| {
            let (at, job, meet) = (fleet.at.clone(), job.clone(), meet.clone());
            thread::spawn(move || {
                train(&at, &job, worker, &plan, |step| {
                    if worker == 0 && Some(step) == kill_at {
                        meet.wait();
                    }
                })
            })
        })
        .collect();
    if kill_at.is_some() {
        meet.wait();
        let (leader, _) = fleet.leader(ShardId(0));
        fleet.kill(leader);
    }
    let ends = workers.into_iter().map(|w| w.join().map_err(|_| anyhow!("a worker panicked"))?);
    let ends: Vec<_> = ends.collect::<Result<_>>()?;
    ends.try_into().map_err(|_| anyhow!("two workers"))
}

/// Whether a worker skips this step of the plans.
fn skips(plans: &[Plan; 2], step: usize) -> bool {
    plans.iter().any(|p| p[step].is_none())
}

#[test]
fn skipped_round_equals_no_round_despite_leader_kills() -> Result<()> {
    // Skipped by one, by the other, and by both. The leader is killed after worker 0's pushes of a step that
    // worker 1 skips, and after its own skip.
    let plans: [Plan; 2] = [
        vec![Some(1), Some(2), Some(3), None, Some(5), None, Some(7), Some(8)],
        vec![Some(1), Some(2), None, Some(4), Some(5), None, Some(7), Some(8)],
    ];
    let without = plans.clone().map(|plan| {
        let kept = plan.iter().enumerate().filter(|(step, _)| !skips(&plans, *step));
        kept.map(|(_, number)| *number).collect::<Plan>()
    });
    for clip in [None, Some(1.5)] {
        let job = job(Mode::Bsp, Durability::QuorumMemory, clip);
        let expected =
            both(&mut Fleet::start(FleetOptions { shards: 2, ..Default::default() })?, &job, &without, None)?;
        for kill_at in [3, 4] {
            let mut fleet = Fleet::start(FleetOptions::replicated(2))?;
            let ends = both(&mut fleet, &job, &plans, Some(kill_at))?;
            for ((weights, skipped), (want, none)) in ends.iter().zip(&expected) {
                ensure!(weights == want, "killed at {kill_at}, clip {clip:?}: other bits");
                ensure!(none.iter().all(|n| *n == 0));
                let counts = (0..plans[0].len()).scan(0, |n, step| {
                    *n += u64::from(skips(&plans, step));
                    Some(*n)
                });
                ensure!(*skipped == counts.collect::<Vec<_>>(), "{skipped:?}");
            }
            fleet.replicas_agree().context("replicas differ")?;
        }
    }
    Ok(())
}

#[test]
fn asynchronous_skip_leaves_out_only_its_own_workers_push() -> Result<()> {
    for durability in [Durability::QuorumMemory, Durability::Leader] {
        let job = ServerJob { workers: 1, ..job(Mode::Asp, durability, Some(1.5)) };
        let fleet = Fleet::start(FleetOptions { durability, ..FleetOptions::replicated(2) })?;
        let plan = vec![Some(1), None, Some(3), None];
        let (weights, skipped) = train(&fleet.at, &job, 0, &plan, |_| {})?;
        let other = Fleet::start(FleetOptions { shards: 2, durability, ..Default::default() })?;
        let (want, _) = train(&other.at, &job, 0, &vec![Some(1), Some(3)], |_| {})?;
        ensure!(weights == want, "{durability}");
        ensure!(skipped == [0, 1, 1, 2], "{durability}: {skipped:?}");
    }
    Ok(())
}

/// The other workers of its round wait for a worker whose push was refused, until it skips the step.
#[test]
fn worker_with_refused_push_skips_and_continues() -> Result<()> {
    for (mode, clip) in [(Mode::Bsp, None), (Mode::Asp, None), (Mode::Asp, Some(1.5))] {
        let fleet = Fleet::start(FleetOptions { shards: 2, ..Default::default() })?;
        let job = job(mode, Durability::QuorumMemory, clip);
        let workers: Vec<_> = (0u32..2)
            .map(|worker| {
                let (at, job) = (fleet.at.clone(), job.clone());
                thread::spawn(move || train_with_refused_push(&at, &job, worker))
            })
            .collect();
        let ends = workers.into_iter().map(|w| w.join().map_err(|_| anyhow!("a worker panicked"))?);
        let ends: Vec<_> = ends.collect::<Result<_>>()?;
        ensure!(ends[0].0 == 0 && ends[1].0 > 0, "{mode} {clip:?}: {} {}", ends[0].0, ends[1].0);
        ensure!(ends[0].1 == ends[1].1 && ends[0].1.iter().all(|w| w.is_finite()), "{mode} {clip:?}");
    }
    Ok(())
}

/// Four steps, of which worker 1's second is not finite in one bucket. Returns the number of refused pushes,
/// and the final weights.
fn train_with_refused_push(at: &At, job: &ServerJob, worker: u32) -> Result<(u64, Vec<f32>)> {
    let (mut client, mut done) = join(at, job, worker)?;
    let (mut weights, mut refused) = (vec![0.0; LEN], 0);
    client.pull(done, &mut weights)?;
    for number in 1..=4 {
        done = done.next();
        let mut gradient = gradient(worker, number);
        if (worker, number) == (1, 2) {
            gradient[9] = f32::INFINITY;
        }
        push(&mut client, done, &gradient);
        done = loop {
            match client.pull(done, &mut weights) {
                Ok(pulled) => break pulled.done,
                Err(ClientError::Session(SessionError::Refused { kind: WireKind::NotFinite, .. })) => {
                    refused += 1;
                    client.skip(done);
                }
                Err(e) => return Err(e.into()),
            }
        };
    }
    client.finish();
    client.pull_final(done, &mut weights)?;
    Ok((refused, weights))
}

fn push(client: &mut Client, step: Step, gradient: &[f32]) {
    for (i, b) in (0..).zip(client.layout().buckets().to_vec()) {
        client.push(BucketId(i), step, &gradient[b.range()]);
    }
}

#[test]
fn a_rate_that_the_worker_says_is_that_of_a_job_with_it() -> Result<()> {
    let run = |job: &ServerJob, rates: &[f64]| -> Result<Vec<f32>> {
        let fleet = Fleet::start(FleetOptions { shards: 2, ..Default::default() })?;
        let (mut client, mut done) = join(&fleet.at, job, 0)?;
        let mut weights = vec![0.0; LEN];
        client.pull(done, &mut weights)?;
        client.override_options(rates.iter().map(|rate| Overrides::rate(Some(*rate))).collect());
        for number in 1..=3 {
            done = done.next();
            push(&mut client, done, &gradient(0, number));
            client.pull(done, &mut weights)?;
        }
        Ok(weights)
    };
    for (mode, durability) in [(Mode::Bsp, Durability::QuorumMemory), (Mode::Asp, Durability::Leader)] {
        let mut job = ServerJob { workers: 1, ..job(mode, durability, None) };
        let said = run(&job, &[0.25, 0.125])?;
        let own = run(&job, &[])?;
        (job.groups[0].lr, job.groups[1].lr) = (0.25, 0.125);
        let want = run(&job, &[])?;
        ensure!(said == want && said != own, "{mode} {durability}");
    }
    Ok(())
}
