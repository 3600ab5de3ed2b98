//! `paraft bench latency`: how long a small push and a small pull take, with one caller and with many.
//!
//! A caller is a client of its own, on a thread of its own, that waits for each answer before it goes on: for the
//! acknowledgement of a push of one bucket, or for a pull of the one-bucket model. Before each pull it pushes, untimed, so
//! that there is something to bring; so among many callers some push while others pull. The reference is a bare tonic
//! unary call that carries as many bytes there and back, by as many callers, over the same way, to a server in another
//! process that has nothing else to do.

use super::{
    echo,
    far::FarSide,
    figure::{self, Figure},
    load::{BenchFleet, Pusher, Shape, Via, go_on},
};
use crate::statistics::{median, quantile};
use clap::Args;
use paraft_common::{Durability, codec::F32_BYTES};
use paraft_fleet::{failure::Failure, launch};
use paraft_worker::exit;
use std::{
    path::Path,
    sync::{
        Barrier,
        atomic::{AtomicI32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct LatencyBenchArgs {
    /// Numbers of callers, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub callers: Vec<u32>,
    /// Ways to the server, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "tcp,unix")]
    pub via: Vec<Via>,
    /// Values of the one bucket; each push and each pull carries 4 bytes for each.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 18))]
    pub values: u32,
    /// Replicas, and servers.
    #[arg(long, default_value_t = 1, value_parser = super::replicas)]
    pub replicas: u32,
    /// What an acknowledgement promises.
    #[arg(long, default_value = "quorum-memory")]
    pub durability: Durability,
    /// Milliseconds of each measure in each repeat.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub millis: u64,
    /// Repeats, interleaved; the median counts.
    #[arg(long, default_value_t = 5, value_parser = super::repeats)]
    pub repeats: usize,
    /// Overrides a key of the job; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// What is called, in the order of a repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Echo,
    Push,
    Pull,
}

const CALLS: [Call; 3] = [Call::Echo, Call::Push, Call::Pull];

pub fn run(args: &LatencyBenchArgs) -> Result<i32, Failure> {
    let scratch = tempfile::tempdir().map_err(|e| Failure::new(exit::IO, e))?;
    let interrupted = launch::interrupts();
    for via in &args.via {
        for callers in &args.callers {
            let dir = scratch.path().join(format!("{}-{callers}", via.name()));
            let repeats = one(args, *via, *callers, &dir, &interrupted)?;
            let names = if *callers == 1 { "caller" } else { "callers" };
            let case = format!("{}, {callers} {names}", via.name());
            figure::show(&figures(&case, Duration::from_millis(args.millis), &repeats), args.json);
        }
    }
    Ok(exit::OK)
}

/// The seconds of every call of one repeat, of all callers: by [`Call`].
type Repeat = [Vec<f64>; CALLS.len()];

fn one(
    args: &LatencyBenchArgs,
    via: Via,
    callers: u32,
    dir: &Path,
    interrupted: &AtomicI32,
) -> Result<Vec<Repeat>, Failure> {
    let shape = Shape {
        values: args.values as usize,
        workers: callers,
        replicas: args.replicas,
        set: &args.set,
        ..Shape::timed(args.durability)
    };
    let fleet = BenchFleet::start(shape, &dir.join("fleet"))?;
    let far = FarSide::start(echo::COMMAND, "echo", dir)?;
    let bytes = args.values as usize * F32_BYTES;
    let time = Duration::from_millis(args.millis);
    let together = Barrier::new(callers as usize);
    let of_callers: Vec<Vec<Repeat>> = thread::scope(|s| {
        let threads: Vec<_> = (0..callers)
            .map(|worker| {
                let (fleet, far, together) = (&fleet, &far, &together);
                s.spawn(move || {
                    let opened = fleet.seat_via(worker, via).pusher();
                    let opened = opened.and_then(|p| Ok((p, echo::Caller::connect(far, via, bytes)?)));
                    call_all(opened, args.repeats, time, together, interrupted)
                })
            })
            .collect();
        let panicked = |_| Failure::new(exit::FAILED, "a caller of the benchmark panicked");
        threads.into_iter().map(|t| t.join().map_err(panicked)?).collect::<Result<_, _>>()
    })?;
    go_on(interrupted)?;
    let mut repeats = vec![Repeat::default(); args.repeats];
    for caller in of_callers {
        for (all, own) in repeats.iter_mut().zip(caller) {
            all.iter_mut().zip(own).for_each(|(all, own)| all.extend(own));
        }
    }
    Ok(repeats)
}

/// One caller's part in all repeats. Whatever happens to it, it keeps step with the others: nobody may wait for it for
/// ever.
fn call_all(
    opened: Result<(Pusher, echo::Caller), Failure>,
    repeats: usize,
    time: Duration,
    together: &Barrier,
    interrupted: &AtomicI32,
) -> Result<Vec<Repeat>, Failure> {
    let mut caller = opened;
    let mut all = Vec::new();
    // The first repeat is for connections and caches, and counts for nothing.
    for _ in 0..=repeats {
        let mut repeat = Repeat::default();
        for (call, seconds) in CALLS.into_iter().zip(&mut repeat) {
            together.wait();
            let until = Instant::now() + time;
            while let Ok((pusher, echo)) = &mut caller
                && Instant::now() < until
                && interrupted.load(Relaxed) == 0
            {
                match timed(call, pusher, echo) {
                    Ok(took) => seconds.push(took),
                    Err(e) => caller = Err(e),
                }
            }
        }
        all.push(repeat);
    }
    caller?;
    Ok(all.split_off(1))
}

fn timed(call: Call, pusher: &mut Pusher, echo: &mut echo::Caller) -> Result<f64, Failure> {
    if call == Call::Pull {
        pusher.push()?;
    }
    let began = Instant::now();
    match call {
        Call::Echo => echo.call()?,
        Call::Push => pusher.push()?,
        Call::Pull => pusher.pull_whole()?,
    }
    Ok(began.elapsed().as_secs_f64())
}

fn figures(case: &str, time: Duration, repeats: &[Repeat]) -> Vec<Figure> {
    let per_repeat = |call: Call, of: &dyn Fn(&[f64]) -> Option<f64>| -> Vec<f64> {
        let each = repeats.iter().map(|r| {
            let mut seconds = r[call as usize].clone();
            seconds.sort_by(f64::total_cmp);
            of(&seconds).unwrap_or(f64::NAN)
        });
        each.collect()
    };
    let p50 = |s: &[f64]| quantile(s, 0.5).map(|s| s * 1e6);
    let p99 = |s: &[f64]| quantile(s, 0.99).map(|s| s * 1e6);
    let rate = |s: &[f64]| Some(s.len() as f64 / time.as_secs_f64());
    type Row<'a> = (Call, &'static str, &'static str, &'a dyn Fn(&[f64]) -> Option<f64>);
    let rows: [Row; 8] = [
        (Call::Echo, "bare call p50", "us", &p50),
        (Call::Push, "push p50", "us", &p50),
        (Call::Pull, "pull p50", "us", &p50),
        (Call::Echo, "bare call p99", "us", &p99),
        (Call::Push, "push p99", "us", &p99),
        (Call::Pull, "pull p99", "us", &p99),
        (Call::Echo, "bare calls", "calls/s", &rate),
        (Call::Push, "pushes", "calls/s", &rate),
    ];
    let mut figures = Vec::new();
    for (call, what, unit, of) in rows {
        let values = per_repeat(call, of);
        let figure = Figure::alone("latency", case, what, unit, &values);
        let bare = per_repeat(Call::Echo, of);
        figures.extend(figure.filter(|_| median(&bare).is_some()).map(|f| match call {
            Call::Echo => f,
            _ => f.against("bare tonic call", &values, &bare),
        }));
    }
    figures
}
