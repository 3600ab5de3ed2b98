//! `paraft checkpoint`: shows a checkpoint or a model file, compares two, and exports weights.

use crate::{jobs, save};
use clap::{Args, Subcommand};
use comfy_table::Table;
use paraft_checkpoint::{
    Checkpoint, CheckpointError, Folder, MANIFEST_FILE,
    compare::{self, Difference},
    tensors::{Entry, TensorFile},
    weights::{self, Precision},
};
use paraft_common::{TensorKind, TensorSpec};
use paraft_fleet::{failure::Failure, out, table};
use paraft_worker::exit;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(Args)]
pub struct CheckpointArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show a checkpoint or a safetensors file: is it whole, tensors, shapes, norms, step, versions.
    Inspect {
        /// A checkpoint, a folder of checkpoints, a run's folder, or a safetensors file.
        path: PathBuf,
        /// One JSON object instead of tables.
        #[arg(long)]
        json: bool,
    },
    /// Write a checkpoint's weights as one safetensors file with PyTorch's names.
    Export {
        /// A checkpoint, a folder of checkpoints or a run's folder.
        path: PathBuf,
        /// The file to write; one that is there is replaced.
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        /// f32, f16 or bf16.
        #[arg(long, default_value = "f32")]
        dtype: Precision,
    },
    /// Have a job that trains save a checkpoint, and wait until it is whole.
    Save(save::SaveArgs),
    /// List the checkpoints of a fleet's jobs, as the control group knows them: also when no worker is left.
    List(jobs::ListArgs),
    /// Compare two checkpoints or safetensors files tensor by tensor. Ends with 0 if all are equal, bit for bit, else
    /// with 1.
    Diff {
        /// The first.
        a: PathBuf,
        /// The second.
        b: PathBuf,
        /// One JSON object instead of a table.
        #[arg(long)]
        json: bool,
    },
}

pub fn run(args: &CheckpointArgs) -> Result<i32, Failure> {
    match &args.command {
        Command::Inspect { path, json } => inspect(path, *json),
        Command::Save(args) => save::run(args),
        Command::List(args) => jobs::list(args),
        Command::Export { path, to, dtype } => export(path, to, *dtype),
        Command::Diff { a, b, json } => diff(a, b, *json),
    }
}

/// The meaning of a path: a whole checkpoint, or a single file.
enum NamedPath {
    Checkpoint(Box<Checkpoint>),
    File(TensorFile),
}

impl NamedPath {
    fn open(path: &Path) -> Result<Self, Failure> {
        if path.is_file() {
            return Ok(Self::File(TensorFile::open(path)?));
        }
        let checkpoint = Checkpoint::open(&Folder::find(path)?)?;
        checkpoint.verify()?;
        Ok(Self::Checkpoint(Box::new(checkpoint)))
    }

    /// Its files.
    fn files(self) -> Result<Vec<TensorFile>, Failure> {
        Ok(match self {
            Self::File(f) => vec![f],
            Self::Checkpoint(c) => vec![c.model()?, c.optimizer()?],
        })
    }
}

fn inspect(path: &Path, as_json: bool) -> Result<i32, Failure> {
    let named = NamedPath::open(path)?;
    let about = match &named {
        NamedPath::Checkpoint(c) => describe(c),
        NamedPath::File(f) => json!({ "file": path, "metadata": f.notes() }),
    };
    let mut tensors = Vec::new();
    for file in named.files()? {
        for e in file.entries() {
            let stats = if e.is_float() { Some(compare::stats(&file, &e.name)?) } else { None };
            tensors.push((e, stats));
        }
    }
    if as_json {
        let list: Vec<Value> = tensors
            .iter()
            .map(|(e, s)| {
                json!({
                    "name": e.name, "shape": e.shape, "dtype": format!("{:?}", e.dtype), "values": e.len(),
                    "norm": s.map(|s| s.norm), "max_abs": s.map(|s| s.max_abs),
                    "not_finite": s.map(|s| s.not_finite),
                })
            })
            .collect();
        let mut about = about;
        about["tensors"] = list.into();
        out!("{about}");
        return Ok(exit::OK);
    }
    for (key, value) in about.as_object().into_iter().flatten() {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
        out!("{key:15} {text}");
    }
    let mut t = plain_table(&["tensor", "shape", "type", "norm", "largest", "not finite"]);
    for (e, s) in &tensors {
        let figure = |f: Option<f64>| f.map_or("-".into(), |f| format!("{f:.6}"));
        t.add_row(vec![
            e.name.clone(),
            shape(&e.shape),
            format!("{:?}", e.dtype),
            figure(s.map(|s| s.norm)),
            figure(s.map(|s| s.max_abs)),
            s.map_or("-".into(), |s| s.not_finite.to_string()),
        ]);
    }
    out!("{t}");
    Ok(exit::OK)
}

fn describe(c: &Checkpoint) -> Value {
    let m = c.manifest();
    let versions = || m.buckets.iter().map(|b| b.version);
    let clocks = || m.clocks.iter().map(|c| c.step);
    let range = |low: Option<u64>, high: Option<u64>| match (low, high) {
        (Some(a), Some(b)) if a == b => a.to_string(),
        (Some(a), Some(b)) => format!("{a} to {b}"),
        _ => "-".into(),
    };
    let mut about = json!({
        "checkpoint": c.path(),
        "job": m.name,
        "step": m.step,
        "resume_step": m.resume_step,
        "epochs": m.epochs_done.map_or_else(|| m.place() as f64 / m.steps_per_epoch.max(1) as f64, |n| n as f64),
        "mode": m.mode.to_string(),
        "workers": m.workers,
        "worker_clocks": range(clocks().min(), clocks().max()),
        "versions": range(versions().min(), versions().max()),
        "shards": m.shards,
        "buckets": m.buckets.len(),
        "optimizer": m.optimizer.kind(),
        "lr": m.optimizer.lr(),
        "parameters": m.tensors.iter().filter(|t| t.kind == TensorKind::Param).map(TensorSpec::len).sum::<usize>(),
        "bytes": table::bytes(m.files.values().map(|f| f.bytes).sum()),
        "paraft": m.paraft,
    });
    // The reference of early stopping, if the job uses it. The checkpoint's own loss becomes known only
    // after the write; its folder shows it (`best`).
    if let Some(loss) = m.early_stop.best_loss {
        about["best_loss"] = loss.into();
    }
    about
}

/// Checks that weights may be written to this file: not into a checkpoint, whose manifest seals its
/// files.
pub fn may_write(to: &Path) -> Result<(), Failure> {
    let folder = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.join(MANIFEST_FILE).exists() {
        return Ok(());
    }
    let why =
        format!("{} lies in a checkpoint, {}: a file put there may ruin it", to.display(), folder.display());
    Err(Failure::new(exit::USAGE, why).help("choose a file in another folder with --to"))
}

/// The failure of a write to the file of --to.
pub fn unwritten(to: &Path, e: CheckpointError) -> Failure {
    match e {
        CheckpointError::Io { path, error } if path == to => {
            Failure::new(exit::IO, format!("{} cannot be written: {error}", to.display()))
                .help("choose a file in a folder that is there, and that this user may write to, with --to")
        }
        e => e.into(),
    }
}

fn export(path: &Path, to: &Path, dtype: Precision) -> Result<i32, Failure> {
    may_write(to)?;
    let (file, tensors, step) = match NamedPath::open(path)? {
        NamedPath::Checkpoint(c) => (c.model()?, c.manifest().tensors.clone(), c.manifest().step),
        NamedPath::File(f) => {
            // As a buffer it gets its counter.
            let spec = |e: Entry| match e.name.ends_with("running_mean") {
                true => TensorSpec::buffer(e.name, &e.shape),
                false => TensorSpec::param(e.name, &e.shape),
            };
            let tensors = f.entries().into_iter().filter(Entry::is_float).map(spec).collect();
            let step = f.notes().get("step").and_then(|s| s.parse().ok()).unwrap_or(0);
            (f, tensors, step)
        }
    };
    weights::export(&file, &tensors, step, to, dtype).map_err(|e| unwritten(to, e))?;
    let written = TensorFile::open(to)?;
    let values: usize = tensors.iter().map(TensorSpec::len).sum();
    out!("{}  {} tensors, {values} values", to.display(), written.entries().len());
    Ok(exit::OK)
}

fn diff(a: &Path, b: &Path, as_json: bool) -> Result<i32, Failure> {
    let (first, second) = (NamedPath::open(a)?.files()?, NamedPath::open(b)?.files()?);
    // A checkpoint and a model file share only weights; two checkpoints also share the optimizer state.
    let mut all = Vec::new();
    for (x, y) in first.iter().zip(&second) {
        all.extend(compare::diff(x, y)?);
    }
    let equal = all.iter().all(|(_, d)| *d == Difference::Equal);
    let words = |d: &Difference| match d {
        Difference::Equal => "equal".to_string(),
        Difference::Values { .. } => "differs".into(),
        Difference::Shape(x, y) => format!("shapes {} and {}", shape(x), shape(y)),
        Difference::OnlyFirst => "only in the first".into(),
        Difference::OnlySecond => "only in the second".into(),
    };
    let figures = |d: &Difference| match d {
        Difference::Values { max_abs, relative, count } => (Some(*max_abs), Some(*relative), *count),
        _ => (None, None, 0),
    };
    if as_json {
        let list: Vec<Value> = all
            .iter()
            .map(|(name, d)| {
                let (max_abs, relative, count) = figures(d);
                json!({ "name": name, "verdict": words(d), "max_abs": max_abs, "relative": relative, "values": count })
            })
            .collect();
        out!("{}", json!({ "equal": equal, "tensors": list }));
    } else {
        let mut t = plain_table(&["tensor", "verdict", "largest difference", "relative", "values"]);
        for (name, d) in all.iter().filter(|(_, d)| *d != Difference::Equal) {
            let (max_abs, relative, count) = figures(d);
            let figure = |f: Option<f64>| f.map_or("-".into(), |f| format!("{f:.3e}"));
            t.add_row(vec![name.clone(), words(d), figure(max_abs), figure(relative), count.to_string()]);
        }
        if equal {
            out!("equal: {} tensors, bit for bit", all.len());
        } else {
            out!("{t}");
        }
    }
    Ok(if equal { exit::OK } else { exit::FAILED })
}

fn plain_table(header: &[&str]) -> Table {
    let mut t = table::plain(header.to_vec());
    table::align_right(&mut t, 2);
    t
}

fn shape(dims: &[usize]) -> String {
    dims.iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
}
