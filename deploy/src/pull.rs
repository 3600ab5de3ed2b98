//! `paraft pull`: whole versions of a running job's weights, as files that other programs read.
//!
//! - [`export`]: which tensors, and which versions. [`hf`], [`weight_v`]: two forms of folders; [`delta`]: differences in the
//!   second one. [`disk`]: what is there whole or not at all.

use clap::{Args, ValueEnum};
use export::{Export, Source, Versions, founding};
use hf::Base;
use paraft_client::reader::{ValueType, Want, WholeVersion};
use paraft_fleet::{failure::Failure, out, targets::FleetArg};
use paraft_worker::exit;
use serde_json::json;
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

pub mod delta;
pub mod disk;
pub mod export;
pub mod hf;
pub mod weight_v;

#[derive(Args)]
pub struct PullArgs {
    /// The job's name, as `paraft status` shows it.
    job: String,
    #[command(flatten)]
    fleet: FleetArg,
    /// The safetensors file to write, which is replaced by a whole one or not at all; with another --layout, the folder.
    #[arg(long, value_name = "PATH")]
    to: PathBuf,
    /// What is written.
    #[arg(long, value_enum, default_value_t = Layout::File)]
    layout: Layout,
    /// With --layout hf and weight_v: a Hugging Face folder, of which all but the weights is copied: config.json, the
    /// tokenizer.
    #[arg(long, value_name = "FOLDER")]
    base: Option<PathBuf>,
    /// With --layout weight_v: how many full versions are kept, with the differences after them.
    #[arg(long, value_name = "FULLS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(2..=1000))]
    keep: u64,
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

/// The form of what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Layout {
    /// One safetensors file.
    File,
    /// A Hugging Face folder: model.safetensors, and what --base has beside its weights.
    Hf,
    /// Folders weight_v000001 and so on for SGLang's /pull_weights: full versions, and differences between them.
    #[value(name = "weight_v")]
    WeightV,
}

/// A time on the command line.
pub fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    match (0.1..=86_400.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err("it is from 0.1 to 86400".into()),
    }
}

/// Where versions are written.
enum Place {
    File(PathBuf),
    Hf(hf::Folder),
    WeightV(Box<weight_v::Chain>),
}

impl Place {
    fn open(args: &PullArgs, export: &Export) -> Result<Self, Failure> {
        let base = Base::read(args.base.as_deref(), export)?;
        Ok(match args.layout {
            Layout::File => Self::File(args.to.clone()),
            Layout::Hf => Self::Hf(hf::Folder::open(&args.to, &base)?),
            Layout::WeightV => {
                let keep = usize::try_from(args.keep).unwrap_or(usize::MAX);
                Self::WeightV(Box::new(weight_v::Chain::open(&args.to, export, base, keep)?))
            }
        })
    }

    /// The step of the version that is there, if it has this founding.
    fn step(&self, of: u64) -> Option<u64> {
        let (founding, step) = match self {
            Self::File(_) => return None,
            Self::Hf(folder) => folder.version()?,
            Self::WeightV(chain) => chain.newest().map(|newest| (newest.founding, newest.step))?,
        };
        (founding == of).then_some(step)
    }

    /// Writes a version. Returns where, and for `weight_v` the folder's number and whether it is a full one.
    fn put(&mut self, export: &Export, version: &WholeVersion) -> Result<Written, Failure> {
        match self {
            Self::File(path) => export.save(version, path).map(|()| Written::at(path.clone())),
            Self::Hf(folder) => folder.put(export, version).map(|()| Written::at(folder.file())),
            Self::WeightV(chain) if chain.has(export, version) => Ok(Written::default()),
            Self::WeightV(chain) => {
                let weight_v::Written { folder, number, full } = chain.put(export, version)?;
                Ok(Written { path: Some(folder), number: Some(number), full: Some(full) })
            }
        }
    }
}

/// What was written; no path: it was there before.
#[derive(Default)]
struct Written {
    path: Option<PathBuf>,
    number: Option<u64>,
    full: Option<bool>,
}

impl Written {
    fn at(path: PathBuf) -> Self {
        Self { path: Some(path), ..Self::default() }
    }
}

/// Runs the command; returns the exit code.
///
/// # Errors
///
/// The fleet does not answer, has no such job, or no such version; or the file cannot be written.
pub fn run(args: &PullArgs) -> Result<i32, Failure> {
    if args.layout == Layout::File && args.base.is_some() {
        return Err(Failure::new(exit::USAGE, "--base is for --layout hf and weight_v"));
    }
    let servers = args.fleet.to_ask()?.servers()?;
    let within = Duration::from_secs_f64(args.timeout);
    runtime()?.block_on(async {
        let source =
            Source { servers: &servers, job: &args.job, dtype: args.dtype, only: &args.only, within };
        let want = match (args.exactly, args.at_least) {
            (Some(step), _) => Want::Exactly(step),
            (None, least) => Want::AtLeast(least.unwrap_or(0)),
        };
        let mut versions = Versions::open(&source, want, args.follow.then_some(args.every)).await?;
        let mut place = Place::open(args, versions.export())?;
        loop {
            let began = Instant::now();
            let Some(version) = versions.next().await? else { return Ok(exit::OK) };
            // A replica may be behind what was written before this process began.
            if let Some(step) = place.step(founding(&version)).filter(|step| *step > version.step)
                && args.exactly.is_none()
            {
                versions.not_before(step);
                continue;
            }
            let written = place.put(versions.export(), &version)?;
            tell(args, &version, &written, began.elapsed());
            if !args.follow {
                return Ok(exit::OK);
            }
        }
    })
}

/// What reads versions.
///
/// # Errors
/// The machine has no threads or file descriptors left.
pub fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.map_err(|e| Failure::new(exit::FAILED, format!("no runtime: {e}")))
}

fn tell(args: &PullArgs, version: &WholeVersion, written: &Written, took: Duration) {
    let (step, digest, seconds) = (version.step, version.digest, took.as_secs_f64());
    let path = written.path.as_ref();
    if args.json {
        let mut line = json!({ "job": args.job, "version": step, "founding": founding(version), "digest": format!("{digest:016x}"),
                    "reached": version.reached, "bytes": version.received, "seconds": seconds, "file": path });
        if args.layout == Layout::WeightV {
            line["number"] = json!(written.number);
            line["full"] = json!(written.full);
        }
        out!("{line}");
    } else {
        let path = path.map_or_else(|| "was there before".into(), |path| path.display().to_string());
        out!("version {step}  digest {digest:016x}  {seconds:.3} s  {path}");
    }
}
