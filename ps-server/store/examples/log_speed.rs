//! Speed of durable appends to the log, compared with plain writes of the same bytes.
//!
//! ```text
//! cargo run --release -p paraft-store --example log_speed [FOLDER]
//! ```
//!
//! The folder (default: the current one) must be on the disk in question. Each row: `append` of records of one size
//! with so many in flight, while the log is purged; then, with one write and one fdatasync per record, a growing
//! file, and the same file overwritten. MB are 10^6 bytes. Rows are the median of five interleaved passes, with the
//! lowest and highest of the log's in brackets.

use bytes::Bytes;
use paraft_store::{Access, Disk, Log, LogOptions, RealDisk, Record, SharedLog};
use std::{
    env,
    error::Error,
    io::{self, IoSlice},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::Instant,
};

const PASSES: usize = 5;
/// Record bytes, and number of records per pass.
const SIZES: [(usize, u64); 3] = [(4 << 10, 1000), (64 << 10, 800), (1 << 20, 200)];
const IN_FLIGHT: [usize; 3] = [1, 4, 16];
/// Approximate size to which the log is purged, as by a replica that takes snapshots.
const KEPT_BYTES: u64 = 64 << 20;

fn mb_per_s(bytes: u64, since: Instant) -> f64 {
    bytes as f64 / 1e6 / since.elapsed().as_secs_f64()
}

/// One log, open over all passes.
struct Run {
    log: Log,
    next: u64,
}

impl Run {
    fn open(dir: &Path) -> Result<Run, Box<dyn Error>> {
        let (shared, _) = SharedLog::open(Arc::new(RealDisk), dir, LogOptions::default())?;
        let log = shared.begin(0)?;
        let mut run = Run { log, next: 0 };
        // Until writes reuse purged segments, as in a log that has run for a while.
        while run.log.shared().stats().recycled < 4 {
            run.pass(&vec![1; 1 << 20].into(), 64, 16)?;
        }
        Ok(run)
    }

    fn pass(&mut self, payload: &Bytes, count: u64, in_flight: usize) -> Result<f64, Box<dyn Error>> {
        let (send, done) = mpsc::channel::<io::Result<()>>();
        let (began, mut waiting) = (Instant::now(), 0);
        for _ in 0..count {
            if waiting == in_flight {
                done.recv()??;
                waiting -= 1;
            }
            let header = Bytes::from_static(b"a header of the size of a real one....");
            let record = Record { index: self.next, header, payload: payload.clone().into() };
            let send = send.clone();
            // The receiver is gone only if a pass failed.
            self.log.append(vec![record], Box::new(move |outcome| drop(send.send(outcome))));
            (self.next, waiting) = (self.next + 1, waiting + 1);
        }
        for _ in 0..waiting {
            done.recv()??;
        }
        let rate = mb_per_s(count * payload.len() as u64, began);
        if let Some(upto) = self.next.checked_sub(1 + KEPT_BYTES / payload.len() as u64) {
            self.log.purge(upto, Bytes::new())?;
        }
        Ok(rate)
    }
}

/// Writes and syncs block by block, over an existing file or in a new one.
fn plain(path: &Path, access: Access, payload: &Bytes, count: u64) -> io::Result<f64> {
    let mut file = RealDisk.open(path, access)?;
    let began = Instant::now();
    for place in 0..count {
        file.write_at(place * payload.len() as u64, &mut [IoSlice::new(payload)])?;
        file.sync()?;
    }
    Ok(mb_per_s(count * payload.len() as u64, began))
}

fn median(mut of: Vec<f64>) -> (f64, f64, f64) {
    of.sort_by(f64::total_cmp);
    (of[of.len() / 2], of[0], of[of.len() - 1])
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = env::args_os().nth(1).map_or_else(|| PathBuf::from("."), PathBuf::from);
    let folder = folder.join(format!("log_speed.{}", std::process::id()));
    let measured = measure(&folder);
    std::fs::remove_dir_all(&folder)?;
    measured
}

fn measure(folder: &Path) -> Result<(), Box<dyn Error>> {
    println!(
        "   record  in flight       log MB/s [low-high]  records/sync  growing MB/s  ratio  over MB/s  ratio"
    );
    for (bytes, count) in SIZES {
        let payload: Bytes = (0..bytes).map(|i| (i * 2_654_435_761) as u8).collect::<Vec<_>>().into();
        for in_flight in IN_FLIGHT {
            let dir = folder.join(format!("{bytes}-{in_flight}"));
            let mut run = Run::open(&dir)?;
            let file = dir.join("plain");
            let (mut log, mut growing, mut over) = (Vec::new(), Vec::new(), Vec::new());
            let before = run.log.shared().stats();
            for _ in 0..PASSES {
                let rate = run.pass(&payload, count, in_flight)?;
                let grown = plain(&file, Access::Create, &payload, count)?;
                let again = plain(&file, Access::Write, &payload, count)?;
                log.push(rate);
                growing.push(grown);
                over.push(again);
            }
            let stats = run.log.shared().stats();
            let batch = (stats.records - before.records) as f64 / (stats.batches - before.batches) as f64;
            let ((log, low, high), growing, over) = (median(log), median(growing).0, median(over).0);
            println!(
                "{:>5} KiB {in_flight:>10} {log:>14.0} [{low:.0}-{high:.0}] {batch:>13.1} {growing:>13.0} {:>6.2} \
                 {over:>10.0} {:>6.2}",
                bytes >> 10,
                log / growing,
                log / over,
            );
            drop(run);
            std::fs::remove_dir_all(&dir)?;
        }
    }
    Ok(())
}
