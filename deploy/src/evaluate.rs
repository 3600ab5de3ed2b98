//! `paraft evaluate`: the loss and accuracy of a model on held-out samples, without servers.

use crate::short;
use clap::Args;
use paraft_checkpoint::{Checkpoint, Folder, MODEL_FILE, weights};
use paraft_fleet::{failure::Failure, fleet::JOB_FILE, out};
use paraft_worker::{Job, cli, exit, samples};
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
};

#[derive(Args)]
pub struct EvaluateArgs {
    /// A run's folder (its final weights, else its latest checkpoint), a checkpoint, or a safetensors file.
    pub model: PathBuf,
    /// The job file, which names model and data. Default: that of the run or of the checkpoint.
    #[arg(long, value_name = "FILE")]
    pub job: Option<PathBuf>,
    /// The data to evaluate on: a CSV file (short for --set data.test_path=PATH), or a folder of IDX files (data.path). Default:
    /// the samples that the job holds out.
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Overrides a key of the job; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Weights in a file, and the job that they are of, if it is known.
struct Found {
    weights: PathBuf,
    job: Option<JobSource>,
}

enum JobSource {
    File(PathBuf),
    /// The text in a checkpoint.
    Text(String, PathBuf),
}

impl JobSource {
    fn load(&self, set: &[String]) -> Result<Job, Failure> {
        Ok(match self {
            Self::File(path) => Job::load(path, set)?,
            Self::Text(text, path) => Job::parse(text, path, set)?,
        })
    }
}

/// Evaluates the model and prints the result; returns the exit code.
///
/// # Errors
///
/// There is no model at this path, or no job for it; the job is bad, or the model or the data cannot be read or do not fit it.
pub fn run(args: &EvaluateArgs) -> Result<i32, Failure> {
    let found = find(&args.model)?;
    let Some(source) = args.job.clone().map(JobSource::File).or(found.job) else {
        let why = format!("{}: a weights file does not say which model it is of", args.model.display());
        return Err(Failure::new(exit::USAGE, why).help("name its job file: --job job.toml"));
    };
    let mut set = args.set.clone();
    if let Some(data) = &args.data {
        set.push(with_data(&source.load(&[])?, data, &set)?);
    }
    let job = source.load(&set)?;
    if job.cluster.own_program() {
        let why = format!("only the program that trained the job `{}` knows its model", job.name);
        return Err(Failure::new(exit::CONFIG, why).help("load the weights there"));
    }
    let (mut model, data) = cli::on_device(&job)?;
    if data.test.is_empty() {
        return Err(Failure::new(exit::DATA, "the job holds no samples out").help("name some: --data PATH"));
    }
    let layout = job.layout(model.tensors()).map_err(|e| Failure::new(exit::CONFIG, e))?;
    let (weights, _) = weights::load(&found.weights, &layout)?;
    let e = samples::evaluate(&mut *model, &weights, &data.test, 0..data.test.len())?;
    let n = e.count as f64;
    let accuracy = data.test.classes().filter(|_| job.classifies()).map(|_| e.correct as f64 / n);
    let loss = e.loss_sum / n;
    if args.json {
        let model = found.weights.display().to_string();
        out!("{}", json!({"model": model, "samples": e.count, "loss": loss, "accuracy": accuracy}));
        return Ok(exit::OK);
    }
    let right = accuracy.map(|a| format!(", accuracy {:.2}% ({} of {})", a * 100.0, e.correct, e.count));
    out!("loss {loss:.4}{} on {} samples", right.unwrap_or_default(), e.count);
    Ok(exit::OK)
}

/// The weights that a path names.
fn find(path: &Path) -> Result<Found, Failure> {
    let own = path.join(MODEL_FILE);
    let job = path.join(JOB_FILE);
    if own.is_file() && job.is_file() {
        return Ok(Found { weights: own, job: Some(JobSource::File(job)) });
    }
    if path.is_dir() {
        let checkpoint = Checkpoint::open(&Folder::find(path)?)?;
        checkpoint.verify()?;
        let folder = checkpoint.path();
        let job = JobSource::Text(checkpoint.manifest().job.clone(), folder.to_path_buf());
        return Ok(Found { weights: folder.join(MODEL_FILE), job: Some(job) });
    }
    fs::metadata(path).map_err(|e| {
        Failure::new(exit::DATA, format!("{}: {e}", path.display()))
            .help("give a run's folder, a checkpoint or a safetensors file")
    })?;
    let beside = Some(path.with_file_name(JOB_FILE)).filter(|job| job.is_file());
    Ok(Found { weights: path.to_path_buf(), job: beside.map(JobSource::File) })
}

/// The assignment of the key that holds the data to evaluate on.
fn with_data(job: &Job, data: &Path, set: &[String]) -> Result<String, Failure> {
    let kind = job.data.as_ref().map(|d| d.name()).unwrap_or_default();
    let key = match kind {
        "csv" => "data.test_path",
        "idx" => "data.path",
        _ => {
            let why = format!("--data does not go with data.kind = \"{kind}\"");
            return Err(Failure::new(exit::USAGE, why).help("it takes a CSV file or a folder of IDX files"));
        }
    };
    short::only_once("--data", key, set)?;
    short::assignment(key, data)
}
