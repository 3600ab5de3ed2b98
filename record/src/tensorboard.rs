//! TensorBoard event files, written without a protobuf library.
//!
//! A file is a row of records: length (u64), its masked CRC (u32), data, its masked CRC (u32), all
//! little-endian. The data is an `Event` message, of which we need five fields:
//!
//! ```text
//! Event   1 wall_time double   2 step int64   3 file_version string (first record only)   5 summary
//! Summary 1 value, repeated:   1 tag string   2 simple_value float    5 histo
//! Histo   1 min  2 max  3 num  4 sum  5 sum_squares  (double)   6 bucket_limit  7 bucket (packed double)
//! ```
//!
//! One run is one folder, so several runs under one `--logdir` overlay by themselves. A process that
//! restarts makes a new file beside the old one; TensorBoard reads them as one run.

use crate::crc32c::masked_crc32c;
use crate::{RecordError, RunRecord, curve};
use paraft_common::histogram::DelayHistogram;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Writes one event file.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    out: BufWriter<File>,
}

impl EventFile {
    /// Makes `events.out.tfevents.<secs>.<host>.<pid>` in `dir`, which is made too when missing. `wall_time`
    /// is unix time in seconds. A file of that name (the same process, the same second) is an error rather
    /// than overwritten.
    pub fn create(dir: impl AsRef<Path>, wall_time: f64) -> Result<Self, RecordError> {
        let dir = dir.as_ref();
        std::fs::create_dir_all(dir).map_err(RecordError::io(dir))?;
        let name = format!("events.out.tfevents.{}.{}.{}", wall_time as u64, host(), std::process::id());
        let path = dir.join(name);
        let file = File::create_new(&path).map_err(RecordError::io(&path))?;
        let mut this = Self { path, out: BufWriter::new(file) };
        let mut event = Message::default();
        event.double(1, wall_time);
        event.bytes(3, b"brain.Event:2");
        this.record(&event)?;
        this.flush()?;
        Ok(this)
    }

    /// Where it writes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// One point of the line `tag`. Tags with a slash are grouped by what is before it: `train/loss`.
    pub fn scalar(&mut self, tag: &str, value: f32, step: u64, wall_time: f64) -> Result<(), RecordError> {
        let mut point = Message::default();
        point.bytes(1, tag.as_bytes());
        point.float(2, value);
        self.summary(&point, step, wall_time)
    }

    /// A histogram of delays under `tag`, one bar a delay.
    pub fn histogram(
        &mut self,
        tag: &str,
        delays: &DelayHistogram,
        step: u64,
        wall_time: f64,
    ) -> Result<(), RecordError> {
        let counts: Vec<f64> = delays.counts().iter().map(|&c| c as f64).collect();
        let weighted = |power: i32| counts.iter().enumerate().map(|(d, c)| c * (d as f64).powi(power)).sum();
        // A bucket reaches up to its limit, the first from minus infinity: one empty bucket below delay 0.
        let limits: Vec<f64> = (0..=counts.len()).map(|i| i as f64 - 0.5).collect();
        let first = counts.iter().position(|&c| c > 0.0).unwrap_or(0);
        let mut histo = Message::default();
        histo.double(1, first as f64);
        histo.double(2, delays.max().unwrap_or(0) as f64);
        histo.double(3, delays.total() as f64);
        histo.double(4, weighted(1));
        histo.double(5, weighted(2));
        histo.packed_doubles(6, &limits);
        histo.packed_doubles(7, &[&[0.0], counts.as_slice()].concat());
        let mut point = Message::default();
        point.bytes(1, tag.as_bytes());
        point.bytes(5, &histo.0);
        self.summary(&point, step, wall_time)
    }

    /// Hands everything written so far to the system, so that a running TensorBoard shows it.
    pub fn flush(&mut self) -> Result<(), RecordError> {
        self.out.flush().map_err(RecordError::io(&self.path))
    }

    fn summary(&mut self, point: &Message, step: u64, wall_time: f64) -> Result<(), RecordError> {
        let mut summary = Message::default();
        summary.bytes(1, &point.0);
        let mut event = Message::default();
        event.double(1, wall_time);
        event.int(2, step);
        event.bytes(5, &summary.0);
        self.record(&event)
    }

    fn record(&mut self, event: &Message) -> Result<(), RecordError> {
        let length = (event.0.len() as u64).to_le_bytes();
        let parts: [&[u8]; 4] = [
            &length,
            &masked_crc32c(&length).to_le_bytes(),
            &event.0,
            &masked_crc32c(&event.0).to_le_bytes(),
        ];
        self.out.write_all(&parts.concat()).map_err(RecordError::io(&self.path))
    }
}

/// Writes a whole run as one event file in `dir`. The step of every point is the fleet's samples, so that
/// modes and batch sizes compare; the wall time is the training clock set at the run's start.
pub fn export(dir: impl AsRef<Path>, record: &RunRecord) -> Result<PathBuf, RecordError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
    let mut file = EventFile::create(dir, now)?;
    let start = record.run.wall;
    for p in curve::train_loss(record) {
        file.scalar("train/loss", p.loss as f32, p.samples as u64, start + p.seconds)?;
    }
    for e in &record.evals {
        file.scalar("eval/loss", e.loss as f32, e.samples, start + e.seconds)?;
        if let Some(accuracy) = e.accuracy {
            file.scalar("eval/accuracy", accuracy as f32, e.samples, start + e.seconds)?;
        }
    }
    let mut samples = 0.0;
    let rates = curve::throughput(record);
    let width = rates.first().map_or(0.0, |p| p.seconds * 2.0);
    for p in &rates {
        let middle = samples + p.samples_per_s * width / 2.0;
        samples += p.samples_per_s * width;
        file.scalar("perf/samples_per_s", p.samples_per_s as f32, middle as u64, start + p.seconds)?;
    }
    let (delays, summary) = (record.delays(), record.summarize());
    if delays.total() > 0 {
        file.histogram("ps/delay", &delays, summary.samples, start + summary.seconds)?;
    }
    file.flush()?;
    Ok(file.path)
}

/// A protobuf message under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.0.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
    }
    fn int(&mut self, field: u64, n: u64) {
        self.varint(field << 3);
        self.varint(n);
    }
    fn double(&mut self, field: u64, x: f64) {
        self.varint(field << 3 | 1);
        self.0.extend(x.to_le_bytes());
    }
    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }
    fn float(&mut self, field: u64, x: f32) {
        self.varint(field << 3 | 5);
        self.0.extend(x.to_le_bytes());
    }
    fn packed_doubles(&mut self, field: u64, xs: &[f64]) {
        let packed: Vec<u8> = xs.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.bytes(field, &packed);
    }
}

/// This host's name with anything a file name might not bear replaced.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let tame = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    match name.trim() {
        "" => "localhost".into(),
        name => name.chars().map(tame).collect(),
    }
}
