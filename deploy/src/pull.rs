//! `paraft pull`: whole versions of a running job's weights, as a file.

use clap::Args;
use paraft_checkpoint::weights::{Precision, save_as};
use paraft_client::reader::{ReadError, Reader, ValueType, Want, WholeVersion};
use paraft_common::TensorSpec;
use paraft_fleet::{failure::Failure, out, targets::FleetArg};
use paraft_worker::{exit, job::matches};
use serde_json::json;
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct PullArgs {
    /// The job's name, as `paraft status` shows it.
    job: String,
    #[command(flatten)]
    fleet: FleetArg,
    /// The safetensors file to write. It is replaced by a whole one or not at all.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// The newest version, of this step or a later one.
    #[arg(long, value_name = "STEP")]
    at_least: Option<u64>,
    /// This version. Ask before the job reaches it: versions are kept only for their readers.
    #[arg(long, value_name = "STEP", conflicts_with = "at_least")]
    exactly: Option<u64>,
    /// Write each new version until the job has ended, its last one too.
    #[arg(long, conflicts_with = "exactly")]
    follow: bool,
    /// With --follow: after a version, the next one is at least so many steps later.
    #[arg(long, value_name = "STEPS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..), requires = "follow")]
    every: u64,
    /// The type of the values: f32, bf16 or f16, rounded by the servers.
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    dtype: ValueType,
    /// Only tensors with such a name; * stands for any text. May be given often.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Seconds to wait for a version.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    timeout: f64,
    /// One JSON object a version.
    #[arg(long)]
    json: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    match (0.1..=86_400.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err("it is from 0.1 to 86400".into()),
    }
}

/// Runs the command; returns the exit code.
///
/// # Errors
///
/// The fleet does not answer, has no such job, or no such version; or the file cannot be written.
pub fn run(args: &PullArgs) -> Result<i32, Failure> {
    let servers = args.fleet.to_ask()?.servers()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(exit::FAILED, format!("no runtime: {e}")))?;
    let within = Duration::from_secs_f64(args.timeout);
    runtime.block_on(async {
        let mut reader = Reader::open(&servers, &args.job, args.dtype, within).await.map_err(failure)?;
        if !args.only.is_empty() && reader.only(|name| args.only.iter().any(|only| matches(only, name))) == 0
        {
            let names: Vec<_> = reader.layout().tensors().iter().take(10).map(|t| t.name.as_str()).collect();
            let why = format!("no tensor of job `{}` is named {}", args.job, args.only.join(" or "));
            return Err(
                Failure::new(exit::CONFIG, why).help(format!("some of its names: {}", names.join(", ")))
            );
        }
        let mut want = match (args.exactly, args.at_least) {
            (Some(step), _) => Want::Exactly(step),
            (None, least) => Want::AtLeast(least.unwrap_or(0)),
        };
        let mut written = None;
        loop {
            let began = Instant::now();
            let version = match reader.next(want, within).await {
                Ok(version) => version,
                Err(ReadError::Ended { last, .. }) if args.follow && written == Some(last) => {
                    return Ok(exit::OK);
                }
                // Its last version is written, however soon it comes.
                Err(ReadError::Ended { last, .. }) if args.follow && written < Some(last) => {
                    want = Want::AtLeast(last);
                    continue;
                }
                Err(error) => return Err(failure(error)),
            };
            write(args, &reader, &version)?;
            tell(args, &version, began.elapsed());
            if !args.follow {
                return Ok(exit::OK);
            }
            written = Some(version.step);
            want = Want::AtLeast(version.step + args.every);
        }
    })
}

fn write(args: &PullArgs, reader: &Reader, version: &WholeVersion) -> Result<(), Failure> {
    let precision = match args.dtype {
        ValueType::F32 => Precision::F32,
        ValueType::Bf16 => Precision::Bf16,
        ValueType::F16 => Precision::F16,
    };
    let tensors = reader.layout().tensors();
    let chosen = |t: &TensorSpec| args.only.is_empty() || args.only.iter().any(|only| matches(only, &t.name));
    let places: Vec<_> = (0..tensors.len()).filter(|i| chosen(&tensors[*i])).collect();
    let specs: Vec<_> = places.iter().map(|i| tensors[*i].clone()).collect();
    let values = |i: usize| version.tensor(reader.layout(), args.dtype, places[i]);
    save_as(&args.to, &specs, version.step, precision, values)
        .map_err(|e| Failure::new(exit::IO, e.to_string()))
}

fn tell(args: &PullArgs, version: &WholeVersion, took: Duration) {
    let (step, digest, seconds) = (version.step, version.digest, took.as_secs_f64());
    if args.json {
        out!(
            "{}",
            json!({ "job": args.job, "version": step, "founding": version.foundings.get(&0), "digest": format!("{digest:016x}"),
                    "reached": version.reached, "bytes": version.received, "seconds": seconds, "file": args.to })
        );
    } else {
        out!("version {step}  digest {digest:016x}  {:.3} s  {}", seconds, args.to.display());
    }
}

fn failure(error: ReadError) -> Failure {
    let code = match error {
        ReadError::Timeout(_) | ReadError::NotKept { .. } | ReadError::Ended { .. } => exit::UNAVAILABLE,
        ReadError::OtherFounding(_) | ReadError::Refused(_) => exit::CONFIG,
        ReadError::Damaged(_) => exit::DATA,
    };
    Failure::new(code, error.to_string())
}
