//! A transformer that one worker trains on a server beside it: what the benchmarks of large models measure.

use super::load::go_on;
use paraft_fleet::{
    failure::Failure,
    fleet::{Extras, Fleet, JOB_FILE},
};
use paraft_record::{Event, METRICS_FILE, read_events};
use paraft_worker::{Job, exit};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::AtomicI32,
    thread,
    time::Duration,
};

/// What is trained, and how long.
#[derive(Clone, Copy, Debug)]
pub struct Transformer {
    /// Blocks.
    pub layers: u32,
    /// A multiple of 64.
    pub width: u32,
    /// Tokens of a sample.
    pub context: u32,
    /// Samples of a minibatch.
    pub batch: u32,
    pub steps: u64,
}

/// What one run came to.
pub struct Run {
    pub samples_per_s: f64,
    /// Of the process of the worker that had most.
    pub peak_bytes: f64,
}

impl Transformer {
    /// Bytes of a block's weights and biases, norms without biases: what `resident` counts.
    pub fn block(&self) -> f64 {
        let w = f64::from(self.width);
        4.0 * (12.0 * w * w + 11.0 * w)
    }

    /// Its text, in a folder.
    pub fn text(&self, folder: &Path) -> Result<PathBuf, Failure> {
        let path = folder.join("text.txt");
        // Samples do not overlap, and one in ten is held out.
        let tokens = u64::from(self.context) * u64::from(self.batch) * self.steps * 2 + 4096;
        fs::write(&path, "the quick brown fox jumps over the lazy dog. ".repeat(tokens as usize / 45 + 1))
            .map_err(|e| super::write(&path, e))?;
        Ok(path)
    }

    /// The job, with more tables and keys. One worker, one server, TCP: what is on its way is in the worker's own memory.
    pub fn job(&self, text: &Path, shards: u32, more: &str, set: &[String]) -> Result<Job, Failure> {
        let Self { layers, width, context, batch, steps } = self;
        let text = format!(
            "name = \"large\"\n[model]\nkind = \"transformer\"\nlayers = {layers}\nheads = {}\nwidth = {width}\n\
             [data]\nkind = \"text\"\npath = {text:?}\ncontext = {context}\n{more}[train]\ndevice = \"cpu\"\nworkers = 1\n\
             batch = {batch}\nepochs = 1000\nmax_steps = {steps}\n[optimizer]\nkind = \"sgd\"\nlr = 0.01\n[eval]\nevery_epoch = false\n\
             [cluster]\nservers = 1\nreplicas = 1\nshards = {shards}\ntransport = \"tcp\"\ntimeout_ms = 300000\n",
            width / 64,
        );
        Ok(Job::parse(&text, Path::new("bench"), set)?)
    }
}

/// Trains it, in a folder of its own.
pub fn train(job: &Job, dir: &Path, trace: Option<u64>, interrupted: &AtomicI32) -> Result<Run, Failure> {
    fs::create_dir_all(dir).map_err(|e| super::write(dir, e))?;
    let file = dir.join(JOB_FILE);
    fs::write(&file, job.to_toml()).map_err(|e| super::write(&file, e))?;
    let mut fleet = Fleet::servers(job, dir, Extras { trace, ..Extras::default() })?;
    fleet.start_workers(job, None, true)?;
    let mut peak_bytes = 0.0f64;
    loop {
        go_on(interrupted)?;
        let mut ended = true;
        for worker in &mut fleet.workers {
            peak_bytes = peak_bytes.max(anonymous(worker.id()));
            match worker.ended() {
                Some(status) if !status.success() => {
                    let (how, words) = (worker.obituary(), worker.last_words());
                    return Err(Failure::new(exit::FAILED, format!("the worker {how}: {words}")));
                }
                status => ended &= status.is_some(),
            }
        }
        if ended {
            break;
        }
        thread::sleep(Duration::from_millis(2));
    }
    let events = read_events(dir.join(METRICS_FILE)).map_err(|e| Failure::new(exit::IO, e))?;
    let worker = events.into_iter().find_map(|e| if let Event::Worker(w) = e { Some(w) } else { None });
    let Some(worker) = worker.filter(|w| w.seconds > 0.0) else {
        return Err(Failure::new(exit::FAILED, "the worker has not said how long it took"));
    };
    Ok(Run { samples_per_s: worker.samples as f64 / worker.seconds, peak_bytes })
}

/// What a process has in anonymous memory now, in bytes; 0 where it has ended.
fn anonymous(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(0.0) * 1024.0
}
