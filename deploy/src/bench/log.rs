//! `paraft bench log`: what the two ways into the log cost, under the same asynchronous load.

use super::{
    figure::{self, Figure},
    median,
};
use crate::{failure::Failure, fleet::Fleet, status::ask_all, train};
use clap::Args;
use paraft_client::{Client, ClientError, ClientOptions, Transport};
use paraft_common::{BucketId, LogForm, Step, TensorSpec, WorkerId, config::ServerJob};
use paraft_worker::{Job, WorkerError, exit, job::JobError};
use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Barrier,
        atomic::{AtomicI32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct LogBenchArgs {
    /// Values of the model; each push carries 4 bytes for each.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    pub values: u32,
    /// Numbers of workers, comma-separated; each pushes as fast as it can.
    #[arg(long, value_delimiter = ',', default_value = "1,4,8")]
    pub workers: Vec<u32>,
    /// The optimizer: images carry its state too.
    #[arg(long, default_value = "sgd")]
    pub optimizer: String,
    /// Servers and replicas of the one shard.
    #[arg(long, default_value_t = 3)]
    pub replicas: u32,
    /// Seconds of each run.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Runs of each case, interleaved; the median counts.
    #[arg(long, default_value_t = 3)]
    pub repeats: usize,
    /// Overrides a key of the job; may be given often (cluster.durability=leader, say).
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// The figures of one form under one number of workers.
#[derive(Default)]
struct Case {
    /// Payload that went to followers, for each byte pushed.
    replicated: Vec<f64>,
    /// Buckets applied a second.
    pushes_per_s: Vec<f64>,
}

const FORMS: [LogForm; 2] = [LogForm::Updates, LogForm::Images];

pub fn run(args: &LogBenchArgs) -> Result<i32, Failure> {
    let scratch = tempfile::tempdir().map_err(|e| Failure::new(exit::IO, e))?;
    let interrupted = train::interrupts();
    let mut figures = Vec::new();
    for workers in &args.workers {
        let mut cases: BTreeMap<&str, Case> = BTreeMap::new();
        for repeat in 0..args.repeats.max(1) {
            for form in FORMS {
                let dir = scratch.path().join(format!("{form}-{workers}-{repeat}"));
                std::fs::create_dir_all(&dir).map_err(|e| Failure::write(&dir, e))?;
                let (replicated, pushes_per_s) = one(args, *workers, form, &dir, &interrupted)?;
                let name = if form == LogForm::Images { "images" } else { "updates" };
                let case = cases.entry(name).or_default();
                case.replicated.push(replicated);
                case.pushes_per_s.push(pushes_per_s);
            }
        }
        let from = figures.len();
        report(*workers, &cases, &mut figures);
        if args.json {
            figure::print_json(&figures[from..]);
        }
    }
    if !args.json {
        figure::print(&figures);
    }
    Ok(exit::OK)
}

fn job(args: &LogBenchArgs, workers: u32, form: LogForm) -> Result<Job, JobError> {
    let text = format!(
        "name = \"bench-log\"\n[train]\nworkers = {workers}\nmode = \"asp\"\n[optimizer]\nkind = {:?}\nlr = 1e-9\n\
         [cluster]\nservers = {r}\nreplicas = {r}\nshards = 1\nlog = \"{form}\"\n",
        args.optimizer,
        r = args.replicas,
    );
    Job::parse(&text, Path::new("bench"), &args.set)
}

/// One run: a fleet of its own, `workers` clients in threads of this process. Bytes replicated for each byte pushed,
/// and pushes a second.
fn one(
    args: &LogBenchArgs,
    workers: u32,
    form: LogForm,
    dir: &Path,
    interrupted: &AtomicI32,
) -> Result<(f64, f64), Failure> {
    let job = job(args, workers, form)?;
    let file = dir.join("job.toml");
    std::fs::write(&file, job.to_toml()).map_err(|e| Failure::write(&file, e))?;
    let fleet = Fleet::servers(&job, dir, false)?;
    let server_job = job.server_job(&[TensorSpec::param("values", &[args.values as usize])]);
    // One more than the workers: this thread reads the servers' counters before the load begins and after it.
    let (joined, done) = (Barrier::new(workers as usize + 1), Barrier::new(workers as usize + 1));
    let (before, after, took) = thread::scope(|s| {
        let load: Vec<_> = (0..workers)
            .map(|w| {
                let load = Load { server_job: &server_job, job: &job, fleet: &fleet, worker: w };
                let (joined, done) = (&joined, &done);
                s.spawn(move || load.run(Duration::from_secs(args.seconds), joined, done, interrupted))
            })
            .collect();
        joined.wait();
        let before = counters(&fleet);
        let began = Instant::now();
        joined.wait();
        done.wait();
        let took = began.elapsed();
        for l in load {
            l.join()
                .map_err(|_| Failure::new(exit::FAILED, "a worker of the benchmark panicked"))?
                .map_err(WorkerError::from)?;
        }
        Ok::<_, Failure>((before, counters(&fleet), took))
    })?;
    let number = interrupted.load(Relaxed);
    if number != 0 {
        return Err(Failure::new(128 + number, "interrupted; the fleet has ended"));
    }
    let [logged, pushed, pushes] = [0, 1, 2].map(|i| (after[i] - before[i]) as f64);
    if pushed == 0.0 {
        return Err(Failure::new(exit::FAILED, "the servers count no push"));
    }
    let followers = f64::from(job.cluster.replicas.saturating_sub(1));
    Ok((logged * followers / pushed, pushes / took.as_secs_f64()))
}

/// Payload proposed to the log, payload pushed, pushes: of the only shard.
fn counters(fleet: &Fleet) -> [u64; 3] {
    let mut all = [0; 3];
    for s in ask_all(&fleet.addresses, false).into_iter().flatten().flat_map(|r| r.shards) {
        all[0] += s.bytes_logged; // each server counts what it proposed itself
        all[1] = all[1].max(s.bytes_pushed); // replicated: the leader is furthest
        all[2] = all[2].max(s.pushes);
    }
    all
}

/// One client.
struct Load<'a> {
    server_job: &'a ServerJob,
    job: &'a Job,
    fleet: &'a Fleet,
    worker: u32,
}

impl Load<'_> {
    fn run(
        &self,
        time: Duration,
        joined: &Barrier,
        done: &Barrier,
        interrupted: &AtomicI32,
    ) -> Result<(), ClientError> {
        let mut weights = vec![0.0; self.server_job.params_len];
        let began = self.begin(&mut weights);
        // Whatever happened: nobody may wait for this one for ever.
        joined.wait();
        joined.wait();
        let result = began.and_then(|(mut client, mut step)| {
            let until = Instant::now() + time;
            let gradient = vec![1e-3; weights.len()];
            while Instant::now() < until && interrupted.load(Relaxed) == 0 {
                step = step.next();
                for (i, b) in client.layout().buckets().to_vec().iter().enumerate().rev() {
                    client.push(BucketId(i as u32), step, &gradient[b.range()]);
                }
                client.pull(step, &mut weights)?;
            }
            // Everything that was pushed is in the log of a majority when the final weights come.
            client.finish();
            client.pull_final(step, &mut weights)?;
            Ok(())
        });
        done.wait();
        result
    }

    fn begin(&self, weights: &mut [f32]) -> Result<(Client, Step), ClientError> {
        let options = ClientOptions {
            servers: self.fleet.addresses.clone(),
            shards: self.job.shards(),
            replicas: self.job.cluster.replicas,
            worker: WorkerId(self.worker),
            job: self.server_job.clone(),
            transport: Transport::Tcp,
            patience: Duration::from_millis(self.job.cluster.patience_ms),
        };
        let (mut client, step) = Client::join(options, weights)?;
        client.pull(step, weights)?;
        Ok((client, step))
    }
}

fn report(workers: u32, cases: &BTreeMap<&str, Case>, figures: &mut Vec<Figure>) {
    type Of = fn(&Case) -> &[f64];
    let what: [(&str, &str, Of); 2] = [
        ("replicated", "bytes to followers/byte pushed", |c| &c.replicated),
        ("pushes", "pushes/s", |c| &c.pushes_per_s),
    ];
    for (what, unit, of) in what {
        let updates = cases.get("updates").and_then(|c| median(of(c))).map(|m| m.0);
        for (form, case) in cases {
            let Some((value, spread)) = median(of(case)) else { continue };
            let own = *form == "updates";
            figures.push(Figure {
                bench: "log",
                case: format!("{form}/{workers} workers"),
                what,
                value,
                unit,
                reference: "updates".into(),
                ratio: if own { Some(1.0) } else { updates.filter(|u| *u > 0.0).map(|u| value / u) },
                spread,
            });
        }
    }
}
