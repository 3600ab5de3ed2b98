//! Checkpoints: a job that continues from one equals a job that was never stopped.

use anyhow::{Context, Result, ensure};
use paraft_checkpoint::{Checkpoint, Folder, compare, tensors::TensorFile, weights};
use paraft_client::{
    ClientError, Pull, SessionError, Transport,
    checkpoint_parts::{CheckpointParts, JobShards},
};
use paraft_common::{Durability, Mode, Step};
use paraft_tests::{
    fleet::{ELECTION, Fleet, FleetOptions},
    ledger::Ledger,
    train::{job, train, train_from, worker, worker_from, worker_until},
    wait,
};
use paraft_worker::Job;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

const MLP: &str = "[model]\nkind = \"mlp\"\nhidden = [24, 16]";
const CONVNET: &str = "[model]\nkind = \"convnet\"";
/// Everything with a state: two slots, a clock, a warm-up, the global norm.
const STATEFUL: &str = "[optimizer]\nkind = \"adam\"\nlr = 0.004\n[schedule]\nkind = \"cosine\"\nsteps = 60\nwarmup = 9\n[clip]\nnorm = 0.4";

const ONE: FleetOptions = FleetOptions {
    servers: 1,
    shards: 1,
    replicas: 1,
    durability: Durability::QuorumMemory,
    election: ELECTION,
    proxies: false,
    closed: false,
};
const THREE_SHARDS: FleetOptions = FleetOptions {
    servers: 1,
    shards: 3,
    replicas: 1,
    durability: Durability::QuorumMemory,
    election: ELECTION,
    proxies: false,
    closed: false,
};

/// A job with checkpoints in `dir`, by default every ten steps, on a fleet of its own; the fleet ends with
/// the guard. No checkpoint starts while another is being written, so only the first and the last are
/// certain.
fn begin(fleet: FleetOptions, dir: &Path, text: &str, set: &[&str]) -> Result<(Fleet, Job)> {
    let fleet = Fleet::start(fleet)?;
    let place = format!("checkpoint.dir=\"{}\"", dir.display());
    let base = ["train.batch=16", "train.epochs=9", "train.max_steps=50", "cluster.bucket_bytes=1024"];
    let every = ["checkpoint.every_steps=10", "checkpoint.keep=99", &place];
    let job = job(&fleet.at, text, &[&base[..], &every, set].concat())?;
    Ok((fleet, job))
}

fn run(fleet: FleetOptions, dir: &Path, text: &str, set: &[&str]) -> Result<Vec<f32>> {
    let (_fleet, job) = begin(fleet, dir, text, set)?;
    train(&job)
}

fn resume(fleet: FleetOptions, dir: &Path, from: &Path, text: &str, set: &[&str]) -> Result<Vec<f32>> {
    let (_fleet, job) = begin(fleet, dir, text, set)?;
    train_from(&job, from)
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

fn step(dir: &Path, n: u64) -> PathBuf {
    dir.join(Folder::name(n))
}

fn same_files(a: &Path, b: &Path) -> Result<bool> {
    let all = compare::diff(&TensorFile::open(a)?, &TensorFile::open(b)?)?;
    ensure!(!all.is_empty(), "{} holds nothing", a.display());
    Ok(all.iter().all(|(_, d)| *d == compare::Difference::Equal))
}

#[test]
fn a_synchronous_job_goes_on_bit_for_bit() -> Result<()> {
    for (workers, fleet) in [(1, ONE), (2, THREE_SHARDS)] {
        let (a, b) = (tempfile::tempdir()?, tempfile::tempdir()?);
        let text = format!("{MLP}\n{STATEFUL}");
        let workers = format!("train.workers={workers}");
        let whole = run(fleet, a.path(), &text, &[&workers])?;
        for from in [10, 40] {
            let every = format!("checkpoint.every_steps={from}");
            ensure!(bits(&whole) == bits(&run(fleet, a.path(), &text, &[&workers, &every])?));
            let rest = resume(fleet, b.path(), &step(a.path(), from), &text, &[&workers, &every])?;
            ensure!(bits(&whole) == bits(&rest), "{workers} from step {from}");
        }
        // The optimizer's state is equal, too, and later checkpoints have the same facts.
        for piece in ["model.safetensors", "optimizer.safetensors"] {
            let (x, y) = (step(a.path(), 50).join(piece), step(b.path(), 50).join(piece));
            ensure!(same_files(&x, &y)?, "{piece} of step 50");
        }
        let (x, y) = (Checkpoint::open(&step(a.path(), 50))?, Checkpoint::open(&step(b.path(), 50))?);
        assert_eq!(x.manifest().buckets, y.manifest().buckets);
        assert!(x.manifest().buckets.iter().all(|s| s.version == 50 && s.clock == 50.0));
        // The test must be able to fail: another start gives other weights.
        ensure!(!same_files(
            &step(a.path(), 10).join("model.safetensors"),
            &step(a.path(), 40).join("model.safetensors")
        )?);
    }
    Ok(())
}

#[test]
fn it_goes_on_with_other_shards_and_buckets() -> Result<()> {
    let (a, b) = (tempfile::tempdir()?, tempfile::tempdir()?);
    // Without the global norm, whose sum goes bucket by bucket, no bit depends on how buckets are cut.
    let text =
        format!("{MLP}\n[optimizer]\nkind = \"adam\"\nlr = 0.004\n[schedule]\nkind = \"step\"\nsteps = 15");
    let set = ["train.workers=2"];
    let whole = run(ONE, a.path(), &text, &[set[0], "checkpoint.every_steps=20"])?;
    let other = [set[0], "cluster.bucket_bytes=400"];
    for fleet in [THREE_SHARDS, FleetOptions::replicated(2)] {
        let rest = resume(fleet, b.path(), &step(a.path(), 20), &text, &other)?;
        ensure!(bits(&whole) == bits(&rest), "{fleet:?}");
    }
    Ok(())
}

#[test]
fn running_statistics_go_on_with_the_weights() -> Result<()> {
    let (a, b) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let text =
        format!("{CONVNET}\n[optimizer]\nkind = \"rmsprop\"\nmomentum = 0.5\ncentered = true\nlr = 0.001");
    let set = ["train.workers=2", "train.max_steps=20", "cluster.bucket_bytes=16384"];
    let whole = run(THREE_SHARDS, a.path(), &text, &set)?;
    let rest = resume(THREE_SHARDS, b.path(), &step(a.path(), 10), &text, &set)?;
    ensure!(bits(&whole) == bits(&rest));
    let file = TensorFile::open(&step(a.path(), 10).join("model.safetensors"))?;
    let names: Vec<String> = file.entries().into_iter().map(|e| e.name).collect();
    for part in ["running_mean", "running_var", "num_batches_tracked"] {
        ensure!(names.iter().any(|n| n.ends_with(part)), "{part} is not in {names:?}");
    }
    let state = Checkpoint::open(&step(a.path(), 10))?;
    assert_eq!(state.manifest().slots, ["square_avg", "grad_avg", "momentum_buffer"]);
    Ok(())
}

#[test]
fn early_stopping_goes_on_where_it_was() -> Result<()> {
    let (a, b) = (tempfile::tempdir()?, tempfile::tempdir()?);
    // No evaluation is better than the first by 100: the rule fires after the fourth, whatever stops in
    // between.
    let rule = "eval.early_stop={ patience = 3, min_delta = 100.0 }";
    let set = [
        "train.workers=2",
        "train.epochs=30",
        "train.max_steps=100000",
        "eval.every_epoch=true",
        rule,
        "checkpoint.every_steps=100000",
    ];
    for epoch in [1, 3] {
        let every = format!("checkpoint.every_epochs={epoch}");
        let set = [&set[..], &[&every]].concat();
        let whole = run(ONE, a.path(), MLP, &set)?;
        let from = step(a.path(), 44 * epoch);
        ensure!(from.exists(), "a checkpoint at the end of epoch {epoch}");
        let rest = resume(ONE, b.path(), &from, MLP, &set)?;
        ensure!(bits(&whole) == bits(&rest), "from epoch {epoch}");
    }
    ensure!(!step(a.path(), 44 * 5).exists(), "it has stopped early");
    ensure!(Folder::new(a.path()).best().is_some(), "a checkpoint with a held-out loss is the best");
    Ok(())
}

#[test]
fn asynchronous_jobs_continue_from_the_slowest_version() -> Result<()> {
    for mode in ["ssp:2", "asp"] {
        let (a, b) = (tempfile::tempdir()?, tempfile::tempdir()?);
        let mode = format!("train.mode={mode}");
        let set = ["train.workers=2", "train.max_steps=30", mode.as_str()];
        let text = format!("{MLP}\n[optimizer]\nkind = \"adam\"\nlr = 0.002");
        run(THREE_SHARDS, a.path(), &text, &set)?;
        let c = Checkpoint::open(&step(a.path(), 10))?;
        c.verify()?;
        let m = c.manifest();
        assert_eq!(m.clocks.len(), 2 * 3, "each worker on each shard");
        let slowest = m.clocks.iter().map(|c| c.step).min().context("clocks")?;
        assert_eq!(m.resume_step, slowest);
        assert!(m.buckets.iter().all(|s| s.version >= 10 && s.version <= 60), "{:?}", m.buckets);
        // Other shards, another mode, another number of workers: the epoch stays, and the position in it is
        // mapped.
        for other in [
            &["train.workers=2", "train.max_steps=30", "train.mode=bsp"][..],
            &["train.workers=1", "train.max_steps=60"],
        ] {
            resume(ONE, b.path(), c.path(), &text, other)?;
        }
    }
    Ok(())
}

#[test]
fn more_workers_resume_with_higher_step_numbers() -> Result<()> {
    let dir = tempfile::tempdir()?;
    // One worker has 89 steps an epoch, two have 44.
    run(ONE, dir.path(), MLP, &["train.workers=1", "train.max_steps=40"])?;
    let folder = Folder::new(dir.path());
    let mut newest = step(dir.path(), 40);
    // Step 40 of 89 is step 19 of 44. There are 31 more up to the fiftieth.
    for (set, last, place) in [
        (["train.workers=2", "train.max_steps=50"], 71, 50),
        // The fiftieth of two, in the second epoch, is step 101 of one.
        (["train.workers=1", "train.max_steps=105"], 105, 105),
    ] {
        resume(ONE, dir.path(), &newest, MLP, &set)?;
        newest = step(dir.path(), last);
        let m = Checkpoint::open(&newest)?.manifest().clone();
        assert_eq!((m.step, m.resume_step, m.place()), (last, last, place));
        assert_eq!(folder.latest().as_ref(), Some(&newest));
        let highest = folder.manifests().into_iter().filter_map(|(_, m)| Some(m?.step)).max();
        assert_eq!(highest, Some(last), "the newest has the highest number");
    }
    Ok(())
}

#[test]
fn what_servers_hold_after_a_resume_is_what_the_checkpoint_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let text = format!("{MLP}\n[optimizer]\nkind = \"adagrad\"\nlr = 0.01");
    run(ONE, dir.path(), &text, &["train.workers=1", "train.max_steps=30"])?;
    let from = Checkpoint::open(&step(dir.path(), 30))?; // the last
    // One step with rate 0 changes neither weights nor the job's position; the version counts it.
    let other = tempfile::tempdir()?;
    let set = ["train.workers=1", "train.max_steps=31", "optimizer.lr=0", "checkpoint.every_steps=1"];
    let (fleet, job) = begin(ONE, other.path(), &text, &set)?;
    let weights = train_from(&job, from.path())?;
    ensure!(bits(&weights) == bits(&from.load()?.weights));
    let s = fleet.shard();
    assert_eq!((s.members[0].clock, s.pushes), (31, u64::from(s.buckets)), "one step and no more");
    assert_eq!(s.version, 31 * u64::from(s.buckets));
    Ok(())
}

#[test]
fn who_writes_may_be_lost_and_the_next_writes() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let set = ["train.workers=2", "train.max_steps=3000", "train.epochs=99", "cluster.grace_ms=100"];
    let (_fleet, job) = begin(ONE, dir.path(), MLP, &set)?;
    let stop = Arc::new(AtomicBool::new(false));
    thread::scope(|s| {
        let first = s.spawn(|| worker_until(&job, 0, stop.clone()));
        let second = s.spawn(|| worker(&job, 1));
        wait::until("a checkpoint", || Folder::new(dir.path()).latest(), Option::is_some);
        stop.store(true, Relaxed);
        ensure!(first.join().is_ok_and(|r| r.is_err()), "it was interrupted");
        second.join().map_err(|_| anyhow::anyhow!("the second worker panicked"))??;
        Ok(())
    })?;
    let last = Checkpoint::open(&step(dir.path(), 3000))?;
    last.verify()?;
    assert_eq!(
        last.manifest().clocks.iter().filter(|c| !c.finished).map(|c| c.worker).collect::<Vec<_>>(),
        [1]
    );
    Ok(())
}

#[test]
fn checkpoints_are_made_after_a_leader_is_lost() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let set = ["train.workers=2", "train.max_steps=300", "train.epochs=20", "cluster.grace_ms=5000"];
    let (mut fleet, job) = begin(FleetOptions::replicated(3), dir.path(), MLP, &set)?;
    let weights = thread::scope(|s| {
        let job = &job;
        let training = s.spawn(move || train(job));
        wait::until("a checkpoint", || Folder::new(dir.path()).latest(), Option::is_some);
        fleet.kill(1);
        training.join().map_err(|_| anyhow::anyhow!("training panicked"))?
    })?;
    let last = Checkpoint::open(&step(dir.path(), 300))?;
    last.verify()?;
    ensure!(bits(&last.load()?.weights) == bits(&weights), "the last checkpoint is the end of the job");
    Ok(())
}

/// The leader keeps one image. While a reader fetches it, no other image is cut; otherwise memory would grow
/// with every slow writer.
#[test]
fn no_second_image_while_one_is_being_fetched() -> Result<()> {
    let fleet = Fleet::start(ONE)?;
    // More than the windows of a connection let through to a reader that does not read.
    let ledger = Ledger { bucket_len: 1 << 18, extra: 16 << 20, ..Ledger::new(Mode::Bsp, 1, 9) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    let step_and_keep = |page: &mut paraft_tests::ledger::Page| {
        page.push();
        let mut weights = std::mem::take(&mut page.weights);
        let pulled = page.client.pull_by(Pull { checkpoint: true, ..Pull::of(page.done) }, &mut weights);
        page.weights = weights;
        pulled.map(|p| p.checkpoint)
    };
    ensure!(step_and_keep(&mut page)?, "an image of step 1");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let open = |step: u64| {
        let (servers, job) = (&fleet.at.addresses, ledger.job());
        let of = JobShards { servers, shards: 1, transport: Transport::Tcp, job: &job };
        runtime.block_on(CheckpointParts::open(of, Step(step)))
    };
    let Err(ClientError::Session(SessionError::Unreachable { causes, .. })) = open(7).map(drop) else {
        anyhow::bail!("there is no image of step 7")
    };
    ensure!(causes[0].1.contains("keeps no image of step 7"), "{causes:?}");
    ensure!(!step_and_keep(&mut page)?, "the image of step 1 waits for its writer");
    let mut first = open(1)?;
    ensure!(!step_and_keep(&mut page)?, "the image of step 1 is still being fetched");
    let mut values = 0;
    while let Some(p) = runtime.block_on(first.next())? {
        let place = ledger.place(0, Step(1));
        if p.offset == 0 {
            let le = p.payload.to_bytes();
            assert_eq!(&le[place * 4..place * 4 + 4], (-1f32).to_le_bytes(), "step 1 is in");
            assert_eq!(&le[place * 4 + 4..place * 4 + 8], 0f32.to_le_bytes(), "step 2 is not");
        }
        values += p.payload.len() / 4;
    }
    assert_eq!(values, ledger.len());
    ensure!(step_and_keep(&mut page)?, "an image of the next step, at once");
    Ok(())
}

/// A worker that asks for an image between two of its steps gets exactly its step's, whatever other workers
/// have pushed since: no image contains a step that some worker has not done.
#[test]
fn an_image_of_now_is_of_the_askers_step() -> Result<()> {
    let fleet = Fleet::start(THREE_SHARDS)?;
    let ledger = Ledger::in_every_bucket(Mode::Bsp, 2, 3, 6);
    let (mut early, mut late) = (ledger.join(&fleet.at, 0)?, ledger.join(&fleet.at, 1)?);
    thread::scope(|s| {
        let begun = s.spawn(|| early.begin());
        late.begin()?;
        begun.join().expect("no panic")
    })?;
    early.push();
    late.push();
    let (_, _) = (early.pull()?, late.pull()?);
    // In flight, and not complete without the other worker's push.
    early.push();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let take = |step: u64| {
        let (servers, job) = (&fleet.at.addresses, ledger.job());
        let of = JobShards { servers, shards: 3, transport: Transport::Tcp, job: &job };
        runtime.block_on(CheckpointParts::take(of, Step(step)))
    };
    for step in [0, 2] {
        let Err(ClientError::Session(SessionError::Unreachable { causes, .. })) = take(step).map(drop) else {
            anyhow::bail!("nobody is at step {step}")
        };
        ensure!(causes[0].1.contains(&format!("keeps no image of step {step}")), "{causes:?}");
    }
    let read = |mut parts: CheckpointParts| -> Result<Vec<f32>> {
        let mut weights = vec![0.0; ledger.len()];
        while let Some(p) = runtime.block_on(parts.next())? {
            let le = p.payload.to_bytes();
            for (i, v) in le.as_chunks::<4>().0.iter().enumerate().filter(|_| p.part == 0) {
                weights[p.offset + i] = f32::from_le_bytes(*v);
            }
        }
        Ok(weights)
    };
    for _ in 0..2 {
        let weights = read(take(1)?)?;
        for worker in 0..2 {
            ensure!(ledger.missing(worker, Step(1), &weights).is_none(), "step 1 of worker {worker} is in");
            ensure!(ledger.missing(worker, Step(2), &weights).is_some(), "step 2 of worker {worker} is not");
        }
    }
    late.push();
    let (_, _) = (early.pull()?, late.pull()?);
    ensure!(ledger.missing(0, Step(2), &read(take(2)?)?).is_none(), "step 2");
    Ok(())
}

#[test]
fn checkpoint_of_another_model_is_refused_with_difference() -> Result<()> {
    let dir = tempfile::tempdir()?;
    run(ONE, dir.path(), MLP, &["train.workers=1", "train.max_steps=10"])?;
    let from = step(dir.path(), 10);
    let wrong = [
        (MLP.replace("16", "17"), "`2.weight` is a Param [16, 24] in it, the model's is a Param [17, 24]"),
        (
            format!("{MLP}\n[optimizer]\nkind = \"adam\""),
            "it was trained with sgd, the job says optimizer.kind = \"adam\"",
        ),
    ];
    for (text, words) in wrong {
        let error = resume(ONE, dir.path(), &from, &text, &["train.workers=1"]).expect_err("refused");
        let error = format!("{error:#}");
        ensure!(error.contains(words), "`{words}` is not in: {error}");
    }
    let error = resume(ONE, dir.path(), &from, MLP, &["train.workers=1", "train.max_steps=10"]);
    let error = format!("{:#}", error.expect_err("nothing is left"));
    ensure!(error.contains("nothing is left to train"), "{error}");
    // Another rate is allowed.
    resume(
        ONE,
        dir.path(),
        &from,
        MLP,
        &["train.workers=1", "train.max_steps=12", "optimizer.lr=0.5", "optimizer.kind=sgd"],
    )?;
    Ok(())
}

#[test]
fn workers_with_different_checkpoints_do_not_train_together() -> Result<()> {
    let dir = tempfile::tempdir()?;
    run(ONE, dir.path(), MLP, &["train.workers=1"])?;
    let set = ["train.workers=1", "train.max_steps=60"];
    let (_fleet, job) = begin(ONE, &dir.path().join("other"), MLP, &set)?;
    train_from(&job, &step(dir.path(), 10))?;
    let others = [(worker(&job, 0), "[start]"), (worker_from(&job, 0, &step(dir.path(), 50)), "from = ")];
    for (other, difference) in others {
        let error = format!("{:#}", other.expect_err("another beginning"));
        ensure!(error.contains("this fleet trains another job") && error.contains(difference), "{error}");
    }
    Ok(())
}

#[test]
fn a_job_begins_with_a_model_file() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let trained = run(ONE, dir.path(), MLP, &["train.workers=1", "train.max_steps=10"])?;
    let file = step(dir.path(), 10).join("model.safetensors");
    let init = format!("train.init=\"{}\"", file.display());
    let set = ["train.workers=2", "train.max_steps=10", "optimizer.kind=sgd", "optimizer.lr=0", &init];
    let (_fleet, job) = begin(THREE_SHARDS, &dir.path().join("other"), MLP, &set)?;
    let after = train(&job)?;
    ensure!(bits(&after) == bits(&trained), "a rate of 0 leaves what the file gave");
    let layout = job.layout(
        job.model
            .as_ref()
            .context("model")?
            .build(paraft_models::DataShape { sample: paraft_models::Sample::Values(64), classes: Some(10) })?
            .tensors(),
    )?;
    let (loaded, _) = weights::load(&file, &layout)?;
    ensure!(bits(&loaded) == bits(&trained));
    fs::write(&file, &fs::read(&file)?[..1000])?;
    let error = format!("{:#}", train(&job).expect_err("cut off"));
    ensure!(error.contains("is cut off: 1000 bytes"), "{error}");
    Ok(())
}
