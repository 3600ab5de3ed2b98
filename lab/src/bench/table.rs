//! `paraft bench table`: rows of a sparse table, pulled and updated on one core.
//!
//! A batch names ids as a recommender's does: some often (Zipf), or all alike (uniform). Its distinct rows are read, then
//! updated by row-wise Adagrad. The limit is the same accesses without a table: rows in one vector whose places are known. In
//! PyTorch, where one is named, the same batch goes through `EmbeddingBag(sparse=True)` with Adagrad, per id of the batch before
//! repeated ones are summed.
//!
//! The image: the same updates while another thread reads the whole partition, as a snapshot or a checkpoint does.

use super::{
    figure::{self, Figure},
    flags::repeats,
    meter::printed,
};
use clap::Args;
use paraft_common::table::{RowInit, RowOptimizer, RowRate, Rows, TableSpec, hash_id, put_rows};
use paraft_fleet::{failure::Failure, launch};
use paraft_server::{
    raft::LazyPart,
    shard::partition::{Partition, RowsImage},
};
use paraft_worker::exit;
use std::{
    hint::black_box,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

const SCRIPT: &str = include_str!("../../../tools/bench/torch_table.py");
/// Exponent of the Zipf distribution.
const SKEW: f64 = 1.05;
/// Batches that are made before the measurement.
const BATCHES: u64 = 40;
const RATE: RowRate = RowRate { factor: 1.0, set: None };

#[derive(Args)]
pub struct TableBenchArgs {
    /// Rows of the table.
    #[arg(long, default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(1000..=500_000_000))]
    rows: u64,
    /// Values of a row.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    dim: u32,
    /// Ids of a batch, before repeated ones are summed.
    #[arg(long, default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batch: u32,
    /// Repeats, interleaved; the median counts.
    #[arg(long, default_value_t = 7, value_parser = repeats)]
    repeats: usize,
    /// A Python with PyTorch.
    #[arg(long)]
    torch: Option<PathBuf>,
    /// One JSON object for each figure.
    #[arg(long)]
    json: bool,
}

/// A batch: its distinct ids, rising, and a gradient for each.
struct Batch {
    ids: Vec<u64>,
    rows: Rows,
    /// The places of the ids in a plain vector.
    places: Vec<u32>,
}

fn uniform(i: u64) -> f64 {
    (hash_id(i) >> 11) as f64 / (1u64 << 53) as f64
}

/// The ranks of a batch's ids, from 0.
fn ranks(args: &TableBenchArgs, zipf: bool, number: u64) -> Vec<u64> {
    let n = args.rows as f64;
    let rank = |u: f64| match zipf {
        // The inverse of the continuous distribution's integral.
        true => ((n.powf(1.0 - SKEW) - 1.0) * u + 1.0).powf(1.0 / (1.0 - SKEW)) - 1.0,
        false => u * n,
    };
    let first = number * u64::from(args.batch);
    (first..first + u64::from(args.batch)).map(|i| (rank(uniform(i)) as u64).min(args.rows - 1)).collect()
}

fn batch(args: &TableBenchArgs, zipf: bool, number: u64) -> Batch {
    let mut named: Vec<(u64, u32)> =
        ranks(args, zipf, number).into_iter().map(|rank| (hash_id(rank), rank as u32)).collect();
    named.sort_unstable();
    named.dedup();
    let (ids, places): (Vec<u64>, Vec<u32>) = named.into_iter().unzip();
    let dim = args.dim as usize;
    let values: Vec<f32> = (0..ids.len() * dim).map(|i| (i % 7) as f32 * 1e-3 - 3e-3).collect();
    let rows = Rows::of(&put_rows(&ids, &values, dim), dim).expect("rows of this table");
    Batch { ids, rows, places }
}

fn filled(args: &TableBenchArgs) -> Result<Arc<Partition>, Failure> {
    let optimizer = RowOptimizer::RowwiseAdagrad { lr: 0.01, eps: 1e-8 };
    let table = TableSpec::new("bench", args.dim as usize, args.rows);
    let table = TableSpec { partitions: 1, init: RowInit::Uniform { range: 0.05 }, optimizer, ..table };
    let failed = |e: &dyn std::fmt::Display| Failure::new(exit::FAILED, e);
    let partition = Partition::new((0, Arc::new(table)), 0).map_err(|e| failed(&e))?;
    let (dim, zeros) = (args.dim as usize, vec![0.0; 65_536 * args.dim as usize]);
    for first in (0..args.rows).step_by(65_536) {
        let mut ids: Vec<u64> = (first..(first + 65_536).min(args.rows)).map(hash_id).collect();
        ids.sort_unstable();
        let rows =
            Rows::of(&put_rows(&ids, &zeros[..ids.len() * dim], dim), dim).expect("rows of this table");
        partition.update(&rows, 1, 1.0, RATE).map_err(|e| failed(&e))?;
    }
    Ok(Arc::new(partition))
}

/// Nanoseconds a distinct row of a pull and an update of each batch.
fn table(partition: &Partition, batches: &[Batch], version: &mut u64) -> f64 {
    let (began, mut rows) = (Instant::now(), 0);
    for batch in batches {
        black_box(partition.pull(&batch.ids));
        *version += 1;
        partition.update(&batch.rows, *version, 1.0, RATE).expect("there is memory");
        rows += batch.ids.len();
    }
    began.elapsed().as_nanos() as f64 / rows as f64
}

/// The same in a vector whose places are known.
fn limit(rows: &mut [f32], len: usize, dim: usize, batches: &[Batch]) -> f64 {
    let optimizer = RowOptimizer::RowwiseAdagrad { lr: 0.01, eps: 1e-8 };
    let (began, mut count) = (Instant::now(), 0);
    for batch in batches {
        let mut pulled = Vec::with_capacity(batch.places.len() * dim);
        for place in &batch.places {
            pulled.extend_from_slice(&rows[*place as usize * len..][..dim]);
        }
        black_box(&pulled);
        for (place, gradient) in batch.places.iter().zip(batch.rows.values()) {
            optimizer.update(RATE, 1, 1.0, &mut rows[*place as usize * len..][..dim + 1], gradient);
        }
        count += batch.places.len();
    }
    began.elapsed().as_nanos() as f64 / count as f64
}

pub fn run(args: &TableBenchArgs) -> Result<i32, Failure> {
    let interrupted = launch::interrupts();
    let partition = filled(args)?;
    let (dim, len) = (args.dim as usize, args.dim as usize + 1);
    let mut plain = vec![0.0f32; args.rows as usize * len];
    plain.iter_mut().step_by(len).for_each(|v| *v = 1e-3); // every page is there
    let mut figures = Vec::new();
    let held = partition.bytes() as f64 / args.rows as f64;
    let needed = (len * 4) as f64;
    figures.extend(
        Figure::alone("table", "memory", "bytes a row", "B", &[held])
            .map(|f| f.against("weights and state alone", &[held], &[needed])),
    );
    let mut version = 1;
    for (name, zipf) in [("zipf", true), ("uniform", false)] {
        let batches: Vec<Batch> = (0..BATCHES).map(|number| batch(args, zipf, number)).collect();
        let case = format!("{} rows of {dim}, {name}", args.rows);
        let (mut ours, mut limits, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..args.repeats {
            launch::check_interrupted(&interrupted)?;
            ours.push(table(&partition, &batches, &mut version));
            limits.push(limit(&mut plain, len, dim, &batches));
            if let Some(python) = &args.torch {
                theirs.push(torch(python, args, zipf)?);
            }
        }
        // How many times as fast: a ratio above 1 is good.
        let rate = |ns: &[f64]| ns.iter().map(|ns| 1e3 / ns).collect::<Vec<_>>();
        let (ours, limits) = (rate(&ours), rate(&limits));
        let figure = Figure::alone("table", &case, "pull and update", "M rows/s", &ours);
        figures.extend(figure.map(|f| f.against("the same without a table", &ours, &limits)));
        if !theirs.is_empty() {
            let ids = f64::from(args.batch) * BATCHES as f64;
            let distinct: usize = batches.iter().map(|b| b.ids.len()).sum();
            let ours: Vec<f64> = ours.iter().map(|r| r * ids / distinct as f64).collect();
            let figure = Figure::alone("table", &case, "ids", "M ids/s", &ours);
            figures.extend(figure.map(|f| f.against("PyTorch's EmbeddingBag", &ours, &rate(&theirs))));
        }
        figures.extend(under_an_image(args, &partition, (&case, &batches), &mut version, &interrupted)?);
    }
    figure::show(&figures, args.json);
    Ok(exit::OK)
}

/// Updates while an image of the partition is read.
fn under_an_image(
    args: &TableBenchArgs,
    partition: &Arc<Partition>,
    (case, batches): (&str, &[Batch]),
    version: &mut u64,
    interrupted: &AtomicI32,
) -> Result<Vec<Figure>, Failure> {
    let (mut alone, mut beside, mut longest, mut kept) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let updates = |version: &mut u64, until: &dyn Fn() -> bool| {
        let (began, mut done, mut slowest, mut most) = (Instant::now(), 0usize, Duration::ZERO, 0);
        for batch in batches.iter().cycle() {
            let one = Instant::now();
            *version += 1;
            partition.update(&batch.rows, *version, 1.0, RATE).expect("there is memory");
            slowest = slowest.max(one.elapsed());
            most = most.max(partition.outdated().0);
            done += batch.ids.len();
            if until() {
                break;
            }
        }
        (done as f64 / began.elapsed().as_secs_f64(), slowest, most)
    };
    for _ in 0..args.repeats {
        launch::check_interrupted(interrupted)?;
        let until = Instant::now() + Duration::from_millis(300);
        alone.push(updates(version, &|| Instant::now() >= until).0);
        let over = AtomicBool::new(false);
        let (rate, slowest, most) = thread::scope(|s| {
            let image = RowsImage::of(partition);
            let over = &over;
            s.spawn(move || {
                image.into_tiles().for_each(|tile| drop(black_box(tile.read())));
                over.store(true, Relaxed);
            });
            updates(version, &|| over.load(Relaxed))
        });
        beside.push(rate);
        longest.push(slowest.as_secs_f64() * 1e3);
        kept.push(most as f64);
    }
    let case = format!("{case}, an image read");
    let state = vec![partition.bytes() as f64; kept.len()];
    let rate = Figure::alone("table", &case, "updates", "rows/s", &beside);
    let pause = Figure::alone("table", &case, "longest batch", "ms", &longest);
    let bytes = Figure::alone("table", &case, "rows kept for it", "B", &kept);
    let figures = [
        rate.map(|f| f.against("no image", &beside, &alone)),
        pause,
        bytes.map(|f| f.against("the partition", &kept, &state)),
    ];
    Ok(figures.into_iter().flatten().collect())
}

/// Nanoseconds an id of the batch, in PyTorch on one thread.
fn torch(python: &Path, args: &TableBenchArgs, zipf: bool) -> Result<f64, Failure> {
    let mut command = Command::new(python);
    let skew = if zipf { SKEW } else { 0.0 };
    command.args(["-c", SCRIPT, &args.rows.to_string(), &args.dim.to_string()]);
    command.args([args.batch.to_string(), skew.to_string()]);
    // Milliseconds of a batch.
    Ok(printed(command)? * 1e6 / f64::from(args.batch))
}
