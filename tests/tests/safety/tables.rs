//! Sparse tables on a fleet: rows against naive code in one process, replicas that die, join and restart, and messages that
//! no correct worker sends.

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use paraft_common::{
    Durability, Mode, ShardId, Step, TableSpec,
    config::ServerJob,
    table::{RowInit, RowOptimizer, RowRate, put_rows},
};
use paraft_proof::LedgerRows;
use paraft_proto::{Init, Pull, Push, WireKind as RefusalKind, from_shard, to_shard};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    stream::{Stream, open},
    train::job_on,
};
use paraft_worker::{Job, OpenRun, Setup, TensorSpec, WorkerOptions};
use std::{
    collections::BTreeMap,
    sync::{Barrier, Mutex},
    thread,
};

const DIM: usize = 3;
const IDS: u64 = 60;

fn table(optimizer: RowOptimizer) -> TableSpec {
    let init = RowInit::Normal { std: 0.5 };
    TableSpec { partitions: 5, init, seed: 4, optimizer, ..TableSpec::new("t", DIM, 100) }
}

fn join(job: &Job, rank: u32, table: TableSpec) -> Result<OpenRun> {
    let options = WorkerOptions::new(rank, job.cluster.addresses.clone());
    let tensors = vec![TensorSpec::param("w", &[2])];
    let setup = Setup { tables: vec![table], ..Setup::new(tensors, 0, |_, w| w.fill(0.0)) };
    Ok(OpenRun::join(job, &options, setup, Box::new(vec![0.0; 2]))?)
}

/// The rows of a worker's step, some of them twice.
fn named(rank: u32, step: u64) -> Vec<u64> {
    let seed = u64::from(rank) * 7919 + step * 104_729;
    (0..8).map(|i| (seed + i * i * 13) % IDS).collect()
}

/// The gradient of a row: depends on its value, so that a stale or lost update shows later.
fn gradient(row: &[f32], step: u64) -> Vec<f32> {
    row.iter().zip(1..).map(|(v, i)| v * 0.5 + ((step * i) % 7) as f32 * 0.1 - 0.3).collect()
}

fn step(run: &mut OpenRun, rank: u32, step: u64) -> Result<()> {
    let ids = named(rank, step);
    let mut rows = vec![0.0; ids.len() * DIM];
    run.rows(0, &ids, &mut rows)?;
    let gradients: Vec<f32> = rows.chunks(DIM).flat_map(|row| gradient(row, step)).collect();
    run.add_rows(0, &ids, &gradients)?;
    run.ready(0, &[0.1, 0.2])?;
    run.step(0.0, 1)?;
    Ok(())
}

fn all_rows(run: &mut OpenRun) -> Result<Vec<f32>> {
    let ids: Vec<u64> = (0..IDS).collect();
    let mut rows = vec![0.0; ids.len() * DIM];
    run.rows(0, &ids, &mut rows)?;
    Ok(rows)
}

/// Lock-step training of several workers in one map.
fn naive(spec: &TableSpec, workers: u32, steps: u64) -> Vec<f32> {
    let mut rows: BTreeMap<u64, (u64, Vec<f32>)> = BTreeMap::new();
    let initial = |id| {
        let mut row = vec![0.0; DIM];
        spec.initial(id, &mut row);
        row.resize(DIM + spec.slots(), 0.0);
        row
    };
    for step in 1..=steps {
        let mut sums: BTreeMap<u64, Vec<f32>> = BTreeMap::new();
        for rank in 0..workers {
            let mut own: BTreeMap<u64, Vec<f32>> = BTreeMap::new();
            for id in named(rank, step) {
                let row = rows.get(&id).map_or_else(|| initial(id), |(_, row)| row.clone());
                let add = gradient(&row[..DIM], step);
                let sum = own.entry(id).or_insert_with(|| vec![0.0; DIM]);
                sum.iter_mut().zip(add).for_each(|(s, g)| *s += g);
            }
            for (id, add) in own {
                let sum = sums.entry(id).or_insert_with(|| vec![0.0; DIM]);
                sum.iter_mut().zip(add).for_each(|(s, g)| *s += g);
            }
        }
        for (id, sum) in sums {
            let (t, row) = rows.entry(id).or_insert_with(|| (0, initial(id)));
            *t += 1;
            let bytes: Vec<[u8; 4]> = sum.iter().map(|g| g.to_le_bytes()).collect();
            spec.optimizer.update(RowRate { factor: 1.0, set: None }, *t, 1.0 / workers as f32, row, &bytes);
        }
    }
    (0..IDS)
        .flat_map(|id| rows.get(&id).map_or_else(|| initial(id), |r| r.1.clone()).into_iter().take(DIM))
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Trains with two workers; `between` happens before a step, when nobody trains. Returns the rows that each reads behind
/// its last step.
fn train(
    job: &Job,
    spec: &TableSpec,
    steps: u64,
    between: (u64, &(dyn Fn() -> Result<()> + Sync)),
) -> Result<Vec<Vec<f32>>> {
    let (barrier, happened) = (Barrier::new(2), Mutex::new(Ok(())));
    let work = |rank: u32| -> Result<Vec<f32>> {
        let mut run = join(job, rank, spec.clone())?;
        for at in 1..=steps {
            if at == between.0 {
                if barrier.wait().is_leader() {
                    *happened.lock().expect("no panic") = between.1();
                }
                barrier.wait();
            }
            step(&mut run, rank, at).with_context(|| format!("worker {rank}, step {at}"))?;
        }
        let rows = all_rows(&mut run)?;
        run.finish()?;
        Ok(rows)
    };
    let work = &work;
    let all = thread::scope(|s| {
        let threads = [0, 1].map(|rank| s.spawn(move || work(rank)));
        threads.into_iter().map(|t| t.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?).collect()
    });
    happened.into_inner().expect("no panic")?;
    all
}

const NOTHING: (u64, &(dyn Fn() -> Result<()> + Sync)) = (0, &|| Ok(()));

#[test]
fn rows_have_the_bits_of_lock_step_training_in_one_process() -> Result<()> {
    for optimizer in [
        RowOptimizer::Sgd { lr: 0.1 },
        RowOptimizer::Adagrad { lr: 0.1, eps: 1e-10 },
        RowOptimizer::RowwiseAdagrad { lr: 0.1, eps: 1e-8 },
        RowOptimizer::Adam { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8 },
    ] {
        let fleet = Fleet::start(FleetOptions::replicated(2))?;
        let spec = table(optimizer);
        let job = job_on(&fleet.at, "", &["train.workers=2", "train.mode=bsp"])?;
        let read = train(&job, &spec, 25, NOTHING)?;
        let expected = bits(&naive(&spec, 2, 25));
        ensure!(read.iter().all(|rows| bits(rows) == expected), "{optimizer:?}: {read:?}");
        fleet.replicas_agree()?;
    }
    Ok(())
}

#[test]
fn rows_survive_a_leader_and_return_from_a_disk() -> Result<()> {
    let durability = Durability::QuorumDisk;
    let mut fleet = Fleet::start(FleetOptions { durability, ..FleetOptions::replicated(2) })?;
    let spec = table(RowOptimizer::Adagrad { lr: 0.1, eps: 1e-10 });
    let set = ["train.workers=2", "train.mode=bsp", "cluster.durability=\"quorum-disk\""];
    let job = job_on(&fleet.at, "", &set)?;
    let (victim, _) = fleet.leader(ShardId(0));
    let at = fleet.at.clone();
    let shared = Mutex::new(&mut fleet);
    let kill = || {
        shared.lock().expect("no panic").kill(victim);
        Ok(())
    };
    let read = train(&job, &spec, 25, (12, &kill))?;
    let expected = bits(&naive(&spec, 2, 25));
    ensure!(read.iter().all(|rows| bits(rows) == expected), "{read:?}");
    fleet.restart_on_its_disk(victim, true)?;
    fleet.whole()?;
    fleet.replicas_agree()?;
    ensure!(at == fleet.at);
    Ok(())
}

#[test]
fn server_that_joins_gets_the_rows_as_a_snapshot() -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions::replicated(1))?;
    // More entries than a log keeps.
    let rows = LedgerRows { rows: 60_000, per_step: 16, partitions: 4, workers: 1 };
    let ledger =
        Ledger { rows: Some(rows), grace_ms: 60_000, whole: true, ..Ledger::new(Mode::Asp, 1, 1_100) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    for _ in 0..1_000 {
        page.step()?;
    }
    let new = fleet.join_server()?;
    fleet.drain(0, false)?;
    while page.done.0 < ledger.steps {
        page.step()?;
    }
    fleet.whole()?;
    let (_, read) = page.finish_with_rows()?;
    let mut expected = vec![0.0f32; 60_000];
    for step in (1..=ledger.steps).map(Step) {
        rows.named(0, step).into_iter().for_each(|id| expected[id as usize] += 1.0);
    }
    ensure!(read == expected, "rows differ");
    let installed = fleet.status(new, false)?.shards.iter().map(|s| s.snapshots_installed).sum::<u64>();
    ensure!(installed > 0, "the rows came entry by entry");
    Ok(())
}

#[test]
fn pushes_of_rows_that_cannot_be_are_refused() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let spec = TableSpec { partitions: 2, ..TableSpec::new("t", 1, 100) };
    let job = ServerJob { tables: vec![spec.clone()], ..ServerJob::new("t", Mode::Asp, 1, 1) };
    let mut worker = 0;
    // A refusal may end its stream.
    let mut opened = || -> Result<Stream> {
        let mut stream = Stream::connect(&fleet.at.addresses[0])?;
        stream.send(to_shard::Kind::Open(open(&job, worker)?));
        worker += 1;
        ensure!(matches!(stream.receive()?, Some(from_shard::Kind::Opened(_))));
        Ok(stream)
    };
    // Bucket 0 is the vector; 1 and 2 are the partitions.
    let spec = &spec;
    let of = |partition: u32| (0u64..).filter(move |id| spec.partition_of(*id) == partition);
    let (a, b) = (of(0).next().context("an id")?, of(0).nth(1).context("an id")?);
    let other = of(1).next().context("an id")?;
    let one = 1f32;
    let cases = [
        (put_rows(&[b, a], &[one; 2], 1).to_bytes(), RefusalKind::BadPayload),
        (put_rows(&[a, a], &[one; 2], 1).to_bytes(), RefusalKind::BadPayload),
        (put_rows(&[other], &[one], 1).to_bytes(), RefusalKind::BadPayload),
        (put_rows(&[a], &[f32::NAN], 1).to_bytes(), RefusalKind::NotFinite),
        (put_rows(&[a], &[one], 1).to_bytes().slice(..11), RefusalKind::BadPayload),
        (vec![0; (1 << 20) + 12].into(), RefusalKind::BucketLength),
    ];
    for (seq, (payload, kind)) in (1..).zip(cases) {
        let mut stream = opened()?;
        stream.send(to_shard::Kind::Push(Push { seq, step: 1, bucket: 1, payload, ..Push::default() }));
        let refused = stream.refused()?;
        ensure!((refused.kind(), refused.seq) == (kind, seq), "{refused:?}");
    }
    let mut stream = opened()?;
    stream.send(to_shard::Kind::Init(Init { payload: vec![0; 4].into(), ..Init::default() }));
    let payload = put_rows(&[a], &[one], 1).to_bytes();
    stream.send(to_shard::Kind::Push(Push { seq: 9, step: 1, bucket: 1, payload, ..Push::default() }));
    ensure!(stream.ack()? == (9, 1));
    let wanted = |ids: &[u64]| Bytes::from(ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
    let pull = |only: &[u32], rows: Vec<Bytes>| {
        to_shard::Kind::Pull(Pull { done: 0, only: only.to_vec(), rows, ..Pull::default() })
    };
    stream.send(pull(&[1], vec![wanted(&[b, a, b])]));
    let Some(from_shard::Kind::Weights(w)) = stream.receive()? else { anyhow::bail!("no rows") };
    ensure!(w.payload == [0f32, -1.0, 0.0].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    for (only, rows, kind) in [
        (&[1][..], vec![wanted(&[other])], RefusalKind::BadPayload),
        (&[0], vec![wanted(&[a])], RefusalKind::BadPayload),
        (&[1, 2], vec![wanted(&[a])], RefusalKind::BadVersions),
        (&[1], vec![wanted(&[a]).slice(..7)], RefusalKind::BadPayload),
    ] {
        let mut stream = opened()?;
        stream.send(pull(only, rows));
        let refused = stream.refused()?;
        ensure!(refused.kind() == kind, "{refused:?}");
    }
    Ok(())
}
