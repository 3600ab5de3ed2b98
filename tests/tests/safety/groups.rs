//! A group of ranks acts as one worker.

use anyhow::{Context, Result};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    train::{distance, job, oracle, train, worker, worker_until},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

const MLP: &str = "[model]\nkind = \"mlp\"\nhidden = [24, 16]";
const CONVNET: &str = "[model]\nkind = \"convnet\"";

fn run(text: &str, set: &[&str]) -> Result<(Vec<f32>, Vec<f32>)> {
    let fleet = Fleet::start(FleetOptions::replicated(3))?;
    let mut all = vec!["train.batch=16", "train.epochs=9", "train.max_steps=40"];
    all.extend(set);
    let job = job(&fleet.at, text, &all)?;
    Ok((train(&job)?, oracle(&job)?))
}

#[test]
fn two_ranks_of_a_worker_learn_the_same_bits_as_two_workers() -> Result<()> {
    // A sum of two is the same in any order.
    for kind in ["sgd", "adam"] {
        let kind = format!("optimizer.kind={kind}");
        let more = ["optimizer.lr=0.02", "cluster.bucket_bytes=1024", kind.as_str()];
        let with = |who: [&'static str; 2]| run(MLP, &[&who[..], &more].concat());
        let (group, _) = with(["train.workers=1", "train.group_size=2"])?;
        let (workers, _) = with(["train.workers=2", "train.group_size=1"])?;
        assert!(group == workers, "{kind}: {:e}", distance(&group, &workers));
    }
    Ok(())
}

#[test]
fn groups_learn_as_one_process_with_the_batches_of_all_ranks() -> Result<()> {
    for (workers, size) in [(1, 3), (2, 2)] {
        let who = [format!("train.workers={workers}"), format!("train.group_size={size}")];
        let set =
            [who[0].as_str(), &who[1], "optimizer.kind=sgd", "optimizer.lr=0.1", "cluster.bucket_bytes=4096"];
        let (groups, single) = run(MLP, &set)?;
        let apart = distance(&single, &groups);
        assert!(apart < 1e-6, "{who:?}: {apart:e}");
    }
    Ok(())
}

#[test]
fn batch_norm_sees_the_batches_of_all_ranks() -> Result<()> {
    let few = ["optimizer.kind=sgd", "optimizer.lr=0.05", "train.max_steps=12"];
    let with = |who: &[&str]| run(CONVNET, &[who, &few].concat());
    let (group, single) = with(&["train.workers=1", "train.group_size=2"])?;
    let apart = distance(&single, &group);
    assert!(apart < 2e-5, "{apart:e}");
    // Workers that form no group each have their own statistics.
    let (workers, _) = with(&["train.workers=2"])?;
    let without = distance(&single, &workers);
    assert!(without > 100.0 * apart, "{without:e} and {apart:e}");
    Ok(())
}

/// Runs ranks of one worker in threads; `work` observes them.
fn ranks(
    set: &[&str],
    leaves: &[(u32, Duration)],
    back: &[u32],
) -> Result<Vec<(u32, Result<paraft_worker::WorkerReport>)>> {
    let fleet = Fleet::start(FleetOptions::replicated(3))?;
    let mut all = vec![
        "train.batch=16",
        "train.epochs=999",
        "train.workers=1",
        "optimizer.kind=sgd",
        "optimizer.lr=0.1",
    ];
    all.extend(set);
    let job = job(&fleet.at, MLP, &all)?;
    let stops: Vec<Arc<AtomicBool>> = (0..job.ranks()).map(|_| Arc::default()).collect();
    thread::scope(|s| {
        let job = &job;
        let mut threads: Vec<_> = (0..job.ranks())
            .map(|rank| {
                let stop = stops[rank as usize].clone();
                (rank, s.spawn(move || worker_until(job, rank, stop)))
            })
            .collect();
        for (rank, after) in leaves {
            thread::sleep(*after);
            stops[*rank as usize].store(true, Relaxed);
        }
        for rank in back {
            // Its predecessor has ended: a rank is one process.
            let (at, _) = threads.iter().enumerate().find(|(_, t)| t.0 == *rank).context("it was there")?;
            let (_, before) = threads.swap_remove(at);
            let ended = before.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?;
            assert!(ended.is_err_and(|e| format!("{e:#}").contains("interrupted")));
            threads.push((*rank, s.spawn(move || worker(job, *rank))));
        }
        let end = |(rank, t): (u32, thread::ScopedJoinHandle<'_, Result<_>>)| {
            Ok((rank, t.join().map_err(|_| anyhow::anyhow!("rank {rank} panicked"))?))
        };
        threads.into_iter().map(end).collect()
    })
}

#[test]
fn whoever_leaves_the_others_go_on_to_the_last_step() -> Result<()> {
    let soon = Duration::from_millis(500);
    for leaves in [&[(2, soon)][..], &[(0, soon)], &[(1, soon), (0, soon)]] {
        for (rank, report) in ranks(&["train.group_size=3", "train.max_steps=1500"], leaves, &[])? {
            if leaves.iter().any(|(l, _)| *l == rank) {
                let error = report.expect_err("it left");
                assert!(format!("{error:#}").contains("interrupted"), "{leaves:?}: {error:#}");
            } else {
                let report = report.with_context(|| format!("rank {rank} of {leaves:?}"))?;
                assert!(report.steps > 0 && report.weights.iter().all(|w| w.is_finite()));
            }
        }
    }
    Ok(())
}

#[test]
fn who_comes_back_is_taken_in_and_ends_with_the_same_weights() -> Result<()> {
    let soon = Duration::from_millis(500);
    for gone in [0, 1] {
        let set = ["train.group_size=2", "train.max_steps=2000"];
        let all = ranks(&set, &[(gone, soon)], &[gone])?;
        let reports = all.into_iter().map(|(_, r)| r).collect::<Result<Vec<_>>>()?;
        assert_eq!(reports.len(), 2);
        assert!(
            reports.iter().all(|r| r.steps > 0),
            "{:?}",
            reports.iter().map(|r| r.steps).collect::<Vec<_>>()
        );
        assert!(reports[0].weights == reports[1].weights, "without rank {gone} for a while");
    }
    Ok(())
}

#[test]
fn ranks_applying_gradients_learn_what_servers_learn() -> Result<()> {
    for (kind, more) in [
        ("momentum", "[clip]\nnorm = 0.5"),
        ("adamw", "[schedule]\nkind = \"cosine\"\nsteps = 40\nwarmup = 5"),
        ("adagrad", "[clip]\nvalue = 0.01"),
    ] {
        let kind = format!("optimizer.kind={kind}");
        let set = |exchange: &'static str| {
            [
                "train.workers=1",
                "train.group_size=2",
                "optimizer.lr=0.02",
                "cluster.bucket_bytes=2048",
                exchange,
            ]
        };
        let text = format!("{MLP}\n{more}");
        let with = |exchange| run(&text, &[&set(exchange)[..], &[kind.as_str()]].concat());
        let (servers, _) = with("train.exchange=servers")?;
        let (own, single) = with("train.exchange=all-reduce")?;
        // Clipping by the norm sums the squares in another order.
        let apart = distance(&servers, &own);
        assert!(apart <= if more.contains("norm") { 1e-6 } else { 0.0 }, "{kind}: {apart:e}");
        assert!(distance(&single, &own) < 1e-4, "{kind}: {:e}", distance(&single, &own));
    }
    let set = ["train.workers=1", "train.group_size=2", "train.exchange=all-reduce", "train.max_steps=12"];
    let sgd = ["optimizer.kind=sgd", "optimizer.lr=0.05"];
    let (group, single) = run(CONVNET, &[&set[..], &sgd].concat())?;
    assert!(distance(&single, &group) < 2e-5, "{:e}", distance(&single, &group));
    Ok(())
}

#[test]
fn ranks_with_own_weights_continue_without_leaving_ones() -> Result<()> {
    let soon = Duration::from_millis(500);
    let set = ["train.group_size=3", "train.max_steps=8000", "train.exchange=all-reduce"];
    for (leaves, back) in [(&[(0, soon), (1, soon)][..], &[][..]), (&[(0, soon)], &[0])] {
        let all = ranks(&set, leaves, back)?;
        let ended: Vec<_> = all.into_iter().filter_map(|(_, r)| r.ok()).collect();
        assert_eq!(ended.len(), 3 - leaves.len() + back.len());
        assert!(ended.iter().all(|r| r.steps > 0 && r.weights == ended[0].weights), "{leaves:?} {back:?}");
    }
    Ok(())
}
