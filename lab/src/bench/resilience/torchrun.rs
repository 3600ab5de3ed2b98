//! PyTorch DDP under torchrun, with restarts.

use super::{Measured, Resilience, Run};
use crate::bench::scratch::write;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use paraft_fleet::failure::Failure;
use paraft_worker::{Job, cli, exit, worker::Plan};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicI32, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

/// A run of PyTorch DDP under torchrun.
pub(super) fn torchrun(
    python: &str,
    job: &Job,
    peers: &Path,
    dir: &Path,
    fire: Option<Resilience>,
    interrupted: &AtomicI32,
) -> Result<Run, Failure> {
    let model = match job.model.as_ref().map_or("convnet", |m| m.name()) {
        "logistic-regression" => "logreg",
        other => other,
    };
    let workers = job.train.workers;
    let steps = samples(job)? / (u64::from(workers) * job.train.batch as u64);
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
    let port = port.map_err(|e| Failure::new(exit::IO, e))?.port();
    let log = dir.join("stderr");
    let file = || fs::File::options().create(true).append(true).open(&log).map_err(|e| write(&log, e));
    let mut command = Command::new(python);
    command.args([
        "-m",
        "torch.distributed.run",
        "--max-restarts=100000",
        "--nnodes=1",
        "--rdzv-backend=c10d",
    ]);
    command.arg(format!("--nproc-per-node={workers}")).arg(format!("--rdzv-endpoint=127.0.0.1:{port}"));
    command.args(["--rdzv-id=1", "--local-addr=127.0.0.1"]).arg(peers.join("fault_ddp.py")).arg("--worker");
    command.env("FAULT_DIR", dir).env("FAULT_EVERY", "50").env("FAULT_MODEL", model);
    command
        .env("FAULT_STEPS", steps.to_string())
        .env("OMP_NUM_THREADS", "1")
        .env("PYTHONDONTWRITEBYTECODE", "1");
    command.stdin(Stdio::null()).stdout(file()?).stderr(file()?);
    let began = Instant::now();
    let mut child = command.spawn().map_err(|e| Failure::new(exit::CONFIG, format!("{python}: {e}")))?;
    let wait = || loop {
        match child.try_wait() {
            Ok(Some(status)) => break Ok(Some(status)),
            Ok(None) if fire.is_some_and(|f| began.elapsed() > f.most) => {
                let pid = Pid::from_raw(child.id() as i32);
                let _ = kill(pid, Signal::SIGTERM);
                let _ = child.wait();
                break Ok(None);
            }
            Ok(None) if interrupted.load(Relaxed) != 0 => {
                let _ = child.kill();
                break Err(Failure::new(128 + interrupted.load(Relaxed), "interrupted"));
            }
            Ok(None) => thread::sleep(Duration::from_millis(20)),
            Err(e) => break Err(Failure::new(exit::IO, e)),
        }
    };
    let Measured { result, seconds, kills } = Measured::of(fire, || victims(dir), || (), wait);
    let status = result?;
    if let Some(status) = status.filter(|s| !s.success()) {
        let text = fs::read_to_string(&log).unwrap_or_default();
        let last = text.lines().rev().find(|l| l.contains("Error")).unwrap_or_default();
        return Err(Failure::new(exit::FAILED, format!("torchrun ended with {status}: {last}")));
    }
    let done = if status.is_some() { steps } else { furthest(dir) };
    let useful = (done * u64::from(workers) * job.train.batch as u64) as f64;
    Ok(Run { seconds, useful, accuracy: None, kills })
}

/// The workers that live: each writes a file named after its process.
fn victims(dir: &Path) -> Vec<(String, u32)> {
    let names = fs::read_dir(dir).into_iter().flatten().flatten();
    let pid = |n: &str| n.strip_prefix("ev-")?.strip_suffix(".jsonl")?.parse::<u32>().ok();
    let pids = names.filter_map(|e| pid(e.file_name().to_str()?));
    let lives = |p: &u32| Path::new(&format!("/proc/{p}/cmdline")).exists();
    pids.filter(lives).map(|p| (format!("worker {p}"), p)).collect()
}

/// The furthest step that a torchrun worker has recorded.
fn furthest(dir: &Path) -> u64 {
    let files =
        fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|e| fs::read_to_string(e.path()).ok());
    let step = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?.get("step")?.as_u64();
    files.flat_map(|f| f.lines().filter_map(step).max()).max().unwrap_or(0)
}

/// The samples of the whole job.
fn samples(job: &Job) -> Result<u64, Failure> {
    let (_, data) = cli::built_in(job)?;
    let plan = Plan::new(job, &data.train)?;
    Ok(plan.total * job.train.batch as u64 * u64::from(job.shares()))
}
