//! A checkpoint is complete, or it is refused with the faulty part and the newest complete one in the folder.

use paraft_checkpoint::{
    Checkpoint, CheckpointError, Folder, MANIFEST_FILE, MODEL_FILE, Manifest, OPTIMIZER_FILE, Writer,
    manifest::{Clock, EarlyStopState, FORMAT, Stamp},
};
use paraft_common::{
    Layout, Mode, ParamGroup, TensorSpec,
    codec::put_f32_le,
    constraint::{Constraint, Rule},
    optim::OptimizerConfig,
};
use std::{
    collections::BTreeMap,
    error::Error,
    fs,
    path::{Path, PathBuf},
};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const BUCKET: usize = 6;

fn tensors() -> Vec<TensorSpec> {
    vec![
        TensorSpec::param("0.weight", &[4, 3]),
        TensorSpec::param("0.bias", &[3]),
        TensorSpec::buffer("1.running_mean", &[3]),
    ]
}

fn layout() -> Layout {
    Layout::new(tensors(), BUCKET).expect("valid")
}

fn manifest(step: u64) -> Manifest {
    let optimizer = OptimizerConfig::adam(0.1);
    Manifest {
        format: FORMAT,
        paraft: "test".into(),
        written: step as f64,
        name: "test".into(),
        step,
        resume_step: step,
        mode: Mode::Bsp.into(),
        workers: 1,
        batch: 4,
        steps_per_epoch: 10,
        steps_left_out: 0,
        epochs_done: None,
        shards: 2,
        bucket_len: BUCKET,
        groups: Vec::new(),
        tables: Vec::new(),
        stages: Vec::new(),
        // JSON has no infinity.
        constraints: vec![Constraint {
            offset: 0,
            values: 2,
            rule: Rule::Clamp { min: None, max: Some(0.5) },
        }],
        slots: optimizer.slot_names().iter().map(ToString::to_string).collect(),
        optimizer,
        tensors: tensors(),
        buckets: vec![Stamp { version: step, clock: step as f64 }; layout().buckets().len()],
        clocks: vec![Clock { shard: 0, worker: 0, step, finished: false }],
        early_stop: EarlyStopState::default(),
        rates: Vec::new(),
        note: String::new(),
        job: String::new(),
        files: BTreeMap::new(),
        seal: String::new(),
    }
}

/// The value at `i` of a part, different for each step.
fn value(step: u64, part: usize, i: usize) -> f32 {
    step as f32 + part as f32 * 100.0 + i as f32 * 0.25
}

fn writer(folder: &Folder, step: u64) -> std::result::Result<Writer, CheckpointError> {
    Writer::create(folder, step, &tensors(), &OptimizerConfig::adam(0.1).slot_names(), &[])
}

fn fill(w: &mut Writer, step: u64, buckets: usize) -> std::result::Result<(), CheckpointError> {
    let layout = layout();
    for b in layout.buckets().iter().take(buckets) {
        let parts = if b.offset < layout.params_len() { 3 } else { 1 };
        for part in 0..parts {
            let mut le = Vec::new();
            put_f32_le(&b.range().map(|i| value(step, part, i)).collect::<Vec<_>>(), &mut le);
            w.put(part, b.offset, &le.into())?;
        }
    }
    Ok(())
}

fn write(folder: &Folder, step: u64, keep: usize) -> std::result::Result<PathBuf, CheckpointError> {
    let mut w = writer(folder, step)?;
    fill(&mut w, step, usize::MAX)?;
    w.finish(manifest(step), keep)
}

/// Opens and verifies; returns the error of an incomplete checkpoint.
fn refused(path: &Path) -> Result<(String, String, Option<PathBuf>)> {
    match Checkpoint::open(path).and_then(|c| c.verify()) {
        Err(CheckpointError::NotWhole { piece, why, offer, .. }) => Ok((piece, why, offer)),
        Err(other) => Err(other.into()),
        Ok(()) => Err("it was taken for whole".into()),
    }
}

#[test]
fn what_was_written_is_what_is_read() -> Result {
    let dir = tempfile::tempdir()?;
    let folder = Folder::new(dir.path().join("made/on/the/way"));
    let c = Checkpoint::open(&write(&folder, 20, 3)?)?;
    c.verify()?;
    let state = c.load()?;
    // Into the caller's vectors: the weights, then each state vector.
    let mut asked = Vec::new();
    let (weights, slots) = c.load_into(|len| {
        asked.push(len);
        Ok::<_, CheckpointError>(vec![f32::NAN; len])
    })?;
    assert_eq!((&weights, &slots), (&state.weights, &state.slots));
    let lens: Vec<usize> = std::iter::once(&weights).chain(&slots).map(Vec::len).collect();
    assert_eq!(asked, lens);
    let no_room =
        || CheckpointError::Io { path: c.path().into(), error: std::io::ErrorKind::StorageFull.into() };
    assert!(c.load_into(|_| Err::<Vec<f32>, _>(no_room())).is_err());
    let layout = layout();
    assert_eq!(state.weights, (0..layout.len()).map(|i| value(20, 0, i)).collect::<Vec<_>>());
    for (s, slot) in state.slots.iter().enumerate() {
        assert_eq!(*slot, (0..layout.params_len()).map(|i| value(20, s + 1, i)).collect::<Vec<_>>());
    }
    let names: Vec<String> = c.optimizer()?.entries().into_iter().map(|e| e.name).collect();
    assert_eq!(names, ["exp_avg.0.weight", "exp_avg.0.bias", "exp_avg_sq.0.weight", "exp_avg_sq.0.bias"]);
    // Any reader of the format accepts the files.
    for (piece, n) in [(MODEL_FILE, 4), (OPTIMIZER_FILE, 4)] {
        let bytes = fs::read(c.path().join(piece))?;
        assert_eq!(safetensors::SafeTensors::deserialize(&bytes)?.len(), n, "{piece}");
    }
    Ok(())
}

#[test]
fn a_cut_at_any_byte_of_any_file_is_refused_with_its_name() -> Result {
    let dir = tempfile::tempdir()?;
    let folder = Folder::new(dir.path());
    let older = write(&folder, 10, 9)?;
    let newest = write(&folder, 20, 9)?;
    for piece in [MODEL_FILE, OPTIMIZER_FILE, MANIFEST_FILE] {
        let path = newest.join(piece);
        let whole = fs::read(&path)?;
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len])?;
            let (named, why, offer) = refused(&newest).map_err(|e| format!("{piece} cut at {len}: {e}"))?;
            assert_eq!((&*named, offer.as_deref()), (piece, Some(older.as_path())), "cut at {len}");
            assert!(why.contains("cut off"), "{piece} cut at {len}: {why}");
        }
        fs::remove_file(&path)?;
        let (named, why, _) = refused(&newest)?;
        assert_eq!((&*named, why.as_str()), (piece, "is missing"));
        let text = Checkpoint::open(&newest).expect_err("refused").to_string();
        assert!(text.contains(&format!("help: the newest whole one is {}", older.display())), "{text}");
        fs::write(&path, [&whole[..], &[0; 8]].concat())?;
        assert_eq!(refused(&newest)?.0, piece, "longer than it should be");
        fs::write(&path, &whole)?;
    }
    Checkpoint::open(&newest)?.verify()?;
    Ok(())
}

#[test]
fn a_changed_byte_and_a_mixed_checkpoint_are_refused() -> Result {
    let dir = tempfile::tempdir()?;
    let folder = Folder::new(dir.path());
    let (a, b) = (write(&folder, 10, 9)?, write(&folder, 20, 9)?);
    for piece in [MODEL_FILE, OPTIMIZER_FILE] {
        let path = b.join(piece);
        let whole = fs::read(&path)?;
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 4;
            fs::write(&path, changed)?;
            assert_eq!(refused(&b).map_err(|e| format!("byte {at}: {e}"))?.0, piece);
        }
        fs::copy(a.join(piece), &path)?;
        let (named, why, offer) = refused(&b)?;
        assert_eq!((&*named, why.as_str()), (piece, "is of step 10, checkpoint.json of step 20"));
        assert_eq!(offer, Some(a.clone()));
        fs::write(&path, whole)?;
    }
    let path = b.join(MANIFEST_FILE);
    let text = fs::read_to_string(&path)?;
    for (from, to) in [
        ("\"version\": 20", "\"version\": 21"),
        ("\"clock\": 20.0", "\"clock\": 20.5"),
        ("\"mode\"", "\"mood\""),
    ] {
        fs::write(&path, text.replacen(from, to, 1))?;
        assert_eq!(refused(&b)?.0, MANIFEST_FILE, "{to}");
    }
    fs::copy(a.join(MANIFEST_FILE), &path)?;
    assert_eq!(refused(&b)?.1, "is of step 20, checkpoint.json of step 10");
    // If none is complete, none is named.
    fs::remove_file(a.join(MODEL_FILE))?;
    assert_eq!(refused(&b)?.2, None);
    Ok(())
}

#[test]
fn a_writer_that_is_killed_or_fails_leaves_the_one_before() -> Result {
    let dir = tempfile::tempdir()?;
    let folder = Folder::new(dir.path());
    let before = write(&folder, 10, 9)?;
    for buckets in 0..layout().buckets().len() {
        let mut killed = writer(&folder, 20)?;
        fill(&mut killed, 20, buckets)?;
        std::mem::forget(killed);
        assert_eq!(folder.latest().as_deref(), Some(before.as_path()));
        assert_eq!(folder.list(), std::slice::from_ref(&before), "what is not whole is no checkpoint");
    }
    // A missing part makes no checkpoint either, and leaves no files.
    let mut short = writer(&folder, 30)?;
    fill(&mut short, 30, 2)?;
    let error = short.finish(manifest(30), 9).expect_err("a bucket is missing").to_string();
    assert!(error.contains("part 0 ends after 12 of 18 values"), "{error}");
    let mut wrong = writer(&folder, 30)?;
    assert!(wrong.put(0, 1, &vec![0; 4].into()).is_err(), "out of place");
    assert!(wrong.put(0, 0, &vec![0; 4 * 19].into()).is_err(), "too much");
    assert!(wrong.put(3, 0, &vec![0; 4].into()).is_err(), "no such slot");
    drop(wrong);
    write(&folder, 40, 9)?;
    let left: Vec<_> = fs::read_dir(dir.path())?.flatten().map(|e| e.file_name()).collect();
    assert_eq!(left.len(), 3, "two checkpoints and `latest`: {left:?}");
    Ok(())
}

#[test]
fn the_newest_stay_and_so_do_latest_and_best() -> Result {
    let dir = tempfile::tempdir()?;
    let folder = Folder::new(dir.path());
    let at = |step| dir.path().join(Folder::name(step));
    let steps = |folder: &Folder| -> Vec<String> {
        folder
            .list()
            .iter()
            .map(|p| p.file_name().unwrap_or_default().to_string_lossy().into_owned())
            .collect()
    };
    for (step, loss) in [(10, 0.9), (20, 0.5), (30, 0.7), (40, f64::NAN), (50, 0.6)] {
        write(&folder, step, 2)?;
        assert_eq!(folder.latest(), Some(at(step)));
        assert_eq!(folder.note_loss(step, loss)?, step <= 20, "{step}");
    }
    assert_eq!(steps(&folder), [Folder::name(50), Folder::name(40), Folder::name(20)]);
    assert_eq!(folder.best(), Some((at(20), 0.5)));
    assert!(!folder.note_loss(60, 0.1)?, "one that was not made is not the best");
    // The best is gone: the next recorded one becomes the best, although it is worse.
    fs::remove_dir_all(at(20))?;
    assert!(folder.note_loss(50, 0.6)?);
    assert_eq!(fs::read_to_string(dir.path().join("best"))?, "step-0000000050\nloss 0.6\n");
    Ok(())
}

#[test]
fn a_job_that_went_back_replaces_what_it_comes_by_again() -> Result {
    let dir = tempfile::tempdir()?;
    let folder = Folder::new(dir.path());
    for step in [10, 20, 30] {
        write(&folder, step, 9)?;
    }
    let mut again = writer(&folder, 20)?;
    fill(&mut again, 20, usize::MAX)?;
    let path = again.finish(Manifest { written: 99.0, ..manifest(20) }, 2)?;
    assert_eq!(folder.latest(), Some(path.clone()));
    Checkpoint::open(&path)?.verify()?;
    assert_eq!(Checkpoint::open(&path)?.manifest().written, 99.0);
    assert_eq!(folder.list(), [path.clone(), dir.path().join(Folder::name(30))], "by when they were written");
    // With equal weights the loss stays valid; with others it is unknown.
    assert!(folder.note_loss(20, 0.5)?);
    write(&folder, 20, 9)?;
    assert_eq!(folder.best(), Some((path.clone(), 0.5)));
    let mut other = writer(&folder, 20)?;
    fill(&mut other, 21, usize::MAX)?;
    other.finish(manifest(20), 9)?;
    assert_eq!(folder.best(), None);
    assert!(folder.note_loss(20, 0.6)?, "the first that is known");
    Ok(())
}

#[test]
fn a_path_may_name_a_checkpoint_a_folder_of_them_or_a_run() -> Result {
    let dir = tempfile::tempdir()?;
    let run = dir.path().join("run");
    let folder = Folder::new(run.join("checkpoints"));
    assert!(Folder::find(&run).is_err_and(|e| e.to_string().contains("no such checkpoint")));
    fs::create_dir_all(&run)?;
    assert!(Folder::find(&run).is_err_and(|e| e.to_string().contains("no checkpoint in it")));
    let (a, b) = (write(&folder, 10, 9)?, write(&folder, 20, 9)?);
    for (path, found) in [(a.as_path(), &a), (folder.path(), &b), (run.as_path(), &b)] {
        assert_eq!(Folder::find(path)?, *found);
    }
    fs::remove_file(folder.path().join("latest"))?;
    assert_eq!(Folder::find(&run)?, b, "a pointer that was lost is made up for");
    // The file's content may come from anywhere: it must name a checkpoint in the folder.
    fs::write(folder.path().join("latest"), "../../../etc\n")?;
    assert_eq!(Folder::find(&run)?, b);
    Ok(())
}

#[test]
fn a_later_format_is_refused_by_number() -> Result {
    let dir = tempfile::tempdir()?;
    let path = write(&Folder::new(dir.path()), 10, 9)?;
    let text = fs::read_to_string(path.join(MANIFEST_FILE))?;
    fs::write(path.join(MANIFEST_FILE), text.replacen("\"format\": 1", "\"format\": 3", 1))?;
    let error = Checkpoint::open(&path).expect_err("a later format").to_string();
    assert!(error.contains("is of format 3, this paraft reads up to 1"), "{error}");
    Ok(())
}

#[test]
fn another_cut_takes_the_latest_version_it_spans() {
    let mut m = manifest(10);
    // Buckets of 6: parameters 0..6, 6..12, 12..15, buffers 15..18.
    m.buckets = [3, 7, 5, 9].map(|version| Stamp { version, clock: version as f64 / 2.0 }).to_vec();
    let versions = |len| -> Vec<u64> {
        let layout = Layout::new(tensors(), len).expect("valid");
        m.stamps_for(&layout).iter().map(|s| s.version).collect()
    };
    assert_eq!(versions(6), [3, 7, 5, 9]);
    assert_eq!(versions(8), [7, 7, 9], "0..8, 8..15, 15..18");
    assert_eq!(versions(3), [3, 3, 7, 7, 5, 9]);
    assert_eq!(versions(100), [7, 9], "buffers never take a parameter's version");
    // The former layout with groups: parameters 0..6, 6..8, 8..14, 14..15, buffers 15..18.
    let group = |values| ParamGroup::new(values, 0.1, 0.0);
    m.groups = vec![group(8), group(7)];
    m.buckets = [3, 7, 5, 1, 9].map(|version| Stamp { version, clock: 0.5 }).to_vec();
    let versions: Vec<_> = m.stamps_for(&layout()).iter().map(|s| s.version).collect();
    assert_eq!(versions, [3, 7, 5, 9]);
}

#[test]
fn a_step_is_mapped_by_whole_epochs() {
    let m = Manifest { resume_step: 25, ..manifest(25) }; // 2 epochs of 10 and 5 of 10 steps, 4 samples a step
    assert_eq!(m.step_in(10, 4), 25, "the same job");
    assert_eq!(m.step_in(20, 2), 50, "half the samples a step");
    assert_eq!(m.step_in(3, 12), 7, "2 epochs of 3, and half of 3 rounded down");
    assert_eq!(m.step_in(10, 8), 25);
    // The same place, in a job that had resumed and counted on.
    let m = Manifest { resume_step: 32, steps_left_out: 7, ..m };
    assert_eq!((m.place(), m.epochs(), m.step_in(10, 4), m.step_in(20, 2)), (25, 2, 25, 50));
}

/// A manifest may come from anywhere: no memory is allocated for values that its files do not hold.
#[test]
fn model_larger_than_its_files_is_refused_before_allocation() -> Result {
    let dir = tempfile::tempdir()?;
    let folder = Folder::new(dir.path());
    let of = |bucket_len, tensors: Vec<TensorSpec>, slots: usize| -> Result<PathBuf> {
        let mut w = writer(&folder, 20)?;
        fill(&mut w, 20, usize::MAX)?;
        let mut m = Manifest { bucket_len, tensors, ..manifest(20) };
        m.slots.truncate(slots);
        Ok(w.finish(m, 1)?)
    };
    let huge = || vec![TensorSpec::param("0.weight", &[(1 << 40) - 1])];
    let (piece, why, _) = refused(&of(1, huge(), 2)?)?;
    assert!(piece == MANIFEST_FILE && why.contains("buckets"), "{why}");
    let c = Checkpoint::open(&of(1 << 30, huge(), 2)?)?;
    let error = c.load().expect_err("it has 12 values").to_string();
    assert!(error.contains("`0.weight` is [4, 3], the model's is [1099511627775]"), "{error}");
    // The weights are right, a state vector is missing.
    let c = Checkpoint::open(&of(BUCKET, tensors(), 1)?)?;
    let error = c.load().expect_err("it names one state vector of two").to_string();
    assert!(error.contains("`exp_avg_sq.0.bias`") && error.contains("is not in the model"), "{error}");
    Ok(())
}
