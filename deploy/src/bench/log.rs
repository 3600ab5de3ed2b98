//! `paraft bench log`: what the two ways into the log cost, under the same asynchronous load.

use super::{
    figure::{self, Figure},
    load::{Bed, Seat, Shape, ended},
};
use crate::{failure::Failure, fleet::Fleet, statistics::median, status::ask_all, train};
use clap::Args;
use paraft_client::ClientError;
use paraft_common::{BucketId, LogForm};
use paraft_worker::exit;
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
    #[arg(long, default_value_t = 3, value_parser = super::replicas)]
    pub replicas: u32,
    /// Seconds of each run.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Runs of each case, interleaved; the median counts.
    #[arg(long, default_value_t = 3, value_parser = super::repeats)]
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
        for repeat in 0..args.repeats {
            for form in FORMS {
                let dir = scratch.path().join(format!("{form}-{workers}-{repeat}"));
                std::fs::create_dir_all(&dir).map_err(|e| super::write(&dir, e))?;
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

/// One run: a fleet of its own, `workers` clients in threads of this process. Bytes replicated for each byte pushed,
/// and pushes a second.
fn one(
    args: &LogBenchArgs,
    workers: u32,
    form: LogForm,
    dir: &Path,
    interrupted: &AtomicI32,
) -> Result<(f64, f64), Failure> {
    let (values, replicas, optimizer) = (args.values as usize, args.replicas, args.optimizer.as_str());
    let shape = Shape { values, workers, replicas, optimizer, log: form, set: &args.set, ..Shape::default() };
    let bed = Bed::start(shape, dir)?;
    // One more than the workers: this thread reads the servers' counters before the load begins and after it.
    let (joined, done) = (Barrier::new(workers as usize + 1), Barrier::new(workers as usize + 1));
    let (before, after, took) = thread::scope(|s| {
        let load: Vec<_> = (0..workers)
            .map(|w| {
                let (seat, joined, done) = (bed.seat(w), &joined, &done);
                s.spawn(move || {
                    push(seat, values, Duration::from_secs(args.seconds), joined, done, interrupted)
                })
            })
            .collect();
        joined.wait();
        let before = counters(&bed.fleet);
        let began = Instant::now();
        joined.wait();
        done.wait();
        let took = began.elapsed();
        for l in load {
            ended(l.join())?;
        }
        Ok::<_, Failure>((before, counters(&bed.fleet), took))
    })?;
    let number = interrupted.load(Relaxed);
    if number != 0 {
        return Err(Failure::new(128 + number, "interrupted; the fleet has ended"));
    }
    let [logged, pushed, pushes] = [0, 1, 2].map(|i| (after[i] - before[i]) as f64);
    if pushed == 0.0 {
        return Err(Failure::new(exit::FAILED, "the servers count no push"));
    }
    let followers = f64::from(bed.job.cluster.replicas.saturating_sub(1));
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

/// One client: steps as fast as the servers let it.
fn push(
    seat: Seat,
    values: usize,
    time: Duration,
    joined: &Barrier,
    done: &Barrier,
    interrupted: &AtomicI32,
) -> Result<(), ClientError> {
    let mut weights = vec![0.0; values];
    let began = seat.join(&mut weights);
    // Whatever happened: nobody may wait for this one for ever.
    joined.wait();
    joined.wait();
    let result = began.and_then(|(mut client, mut step)| {
        let until = Instant::now() + time;
        let buckets = client.layout().buckets().to_vec();
        let gradient = vec![1e-3; values];
        while Instant::now() < until && interrupted.load(Relaxed) == 0 {
            step = step.next();
            for (i, b) in buckets.iter().enumerate().rev() {
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
