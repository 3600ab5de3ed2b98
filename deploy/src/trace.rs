//! `paraft trace`: merge what processes have recorded with `--trace`.

use clap::Args;
use paraft_fleet::{failure::Failure, out, track::otlp};
use paraft_trace::Merged;
use paraft_worker::exit;
use std::path::PathBuf;

#[derive(Args)]
pub struct TraceArgs {
    /// The folder that holds the processes' files, collected from all hosts; or a run's folder.
    pub folder: PathBuf,
    /// Where the trace goes. Default: trace.json beside that folder.
    #[arg(long, value_name = "FILE")]
    pub to: Option<PathBuf>,
    /// Send the spans to OpenTelemetry instead: Jaeger, Tempo or a Collector at this address, for example http://localhost:4318.
    #[arg(long, value_name = "URL", conflicts_with = "to")]
    pub otlp: Option<String>,
}

pub fn run(args: &TraceArgs) -> Result<i32, Failure> {
    if let Some(url) = &args.otlp {
        out!("{} spans to {url}", otlp::send(&args.folder, url)?);
        return Ok(exit::OK);
    }
    let merged = paraft_trace::merge(&args.folder, args.to.as_deref())?;
    out!("{}", summary(&merged));
    Ok(exit::OK)
}

/// A line about it, for people.
pub fn summary(merged: &Merged) -> String {
    let Merged { path, processes, spans, missing } = merged;
    let missing = match missing {
        0 => String::new(),
        n => format!(", {n} more could not be recorded"),
    };
    let path = path.display();
    format!("{path}  {spans} spans of {processes} processes{missing}; open it at https://ui.perfetto.dev")
}
