//! TensorBoard event files, written without a protobuf library.
//!
//! A file is a row of records: length (u64), its masked CRC (u32), data, its masked CRC (u32), all
//! little-endian. The data is an `Event` message, of which we need these fields:
//!
//! ```text
//! Event   1 wall_time double   2 step int64   3 file_version string (first record only)   5 summary   7 session
//! Session 1 status (1: start)
//! Summary 1 value, repeated:   1 tag string   2 simple_value float    5 histo   8 tensor   9 metadata
//! Histo   1 min  2 max  3 num  4 sum  5 sum_squares  (double)   6 bucket_limit  7 bucket (packed double)
//! Tensor  1 dtype (7: string)   2 shape (empty: a scalar)   8 string_val
//! Metadata 1 plugin_data: 1 plugin_name string   4 data_class (2: tensor)
//! ```
//!
//! One run is one folder, so several runs under one `--logdir` overlay by themselves. A process that
//! restarts makes a new file beside the old one; TensorBoard reads them as one run, and at the start of a session forgets the points from
//! its step on, which the new file has too.

use crate::crc32c::masked_crc32c;
use crate::{Point, RecordError, Value};
use paraft_common::histogram::DelayHistogram;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

/// The number of this process's next file: two files may have the same second.
static FILES: AtomicU32 = AtomicU32::new(0);

/// Writes one event file.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    out: BufWriter<File>,
}

impl EventFile {
    /// Creates `events.out.tfevents.<secs>.<host>.<pid>.<n>` in `dir`, and `dir` itself if missing.
    /// `wall_time` is Unix time in seconds. An existing file of that name is an error.
    pub fn create(dir: impl AsRef<Path>, wall_time: f64) -> Result<Self, RecordError> {
        let dir = dir.as_ref();
        std::fs::create_dir_all(dir).map_err(RecordError::io(dir))?;
        let (host, pid, n) = (host(), std::process::id(), FILES.fetch_add(1, Relaxed));
        let name = format!("events.out.tfevents.{:010}.{host}.{pid}.{n}", wall_time as u64);
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

    /// Creates a file with all points of a run from `step` on; TensorBoard forgets those of other files
    /// in the folder from there.
    pub fn restart(dir: impl AsRef<Path>, step: u64) -> Result<Self, RecordError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        let mut this = Self::create(dir, now)?;
        let mut session = Message::default();
        session.int(1, 1);
        let mut event = Message::default();
        event.double(1, now);
        event.int(2, step);
        event.bytes(7, &session.0);
        this.record(&event)?;
        Ok(this)
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes one point of a run.
    pub fn point(&mut self, p: &Point) -> Result<(), RecordError> {
        match &p.value {
            Value::Number(x) => self.scalar(&p.tag, *x as f32, p.step, p.wall),
            Value::Delays(delays) => self.histogram(&p.tag, delays, p.step, p.wall),
            Value::Text(text) => self.text(&p.tag, text, p.step, p.wall),
        }
    }

    /// Writes one point of the curve `tag`. TensorBoard groups tags by the text before a slash:
    /// `train/loss`.
    pub fn scalar(&mut self, tag: &str, value: f32, step: u64, wall_time: f64) -> Result<(), RecordError> {
        let mut point = Message::default();
        point.bytes(1, tag.as_bytes());
        point.float(2, value);
        self.summary(&point, step, wall_time)
    }

    /// Writes a text under `tag`, for TensorBoard's text page, which renders it as Markdown.
    pub fn text(&mut self, tag: &str, text: &str, step: u64, wall_time: f64) -> Result<(), RecordError> {
        let mut tensor = Message::default();
        tensor.int(1, 7);
        tensor.bytes(2, b"");
        tensor.bytes(8, text.as_bytes());
        let mut plugin = Message::default();
        plugin.bytes(1, b"text");
        let mut metadata = Message::default();
        metadata.bytes(1, &plugin.0);
        metadata.int(4, 2);
        let mut point = Message::default();
        point.bytes(1, tag.as_bytes());
        point.bytes(8, &tensor.0);
        point.bytes(9, &metadata.0);
        self.summary(&point, step, wall_time)
    }

    /// Writes a histogram of delays under `tag`, with one bar per delay.
    pub fn histogram(
        &mut self,
        tag: &str,
        delays: &DelayHistogram,
        step: u64,
        wall_time: f64,
    ) -> Result<(), RecordError> {
        let counts: Vec<f64> = delays.counts().iter().map(|&c| c as f64).collect();
        let weighted = |power: i32| counts.iter().enumerate().map(|(d, c)| c * (d as f64).powi(power)).sum();
        // A bucket ends at its limit, and the first starts at minus infinity: one empty bucket below
        // delay 0.
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

    /// Flushes to the system, so that a running TensorBoard shows the points.
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

/// This host's name, with characters that are invalid in file names replaced.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let tame = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    match name.trim() {
        "" => "localhost".into(),
        name => name.chars().map(tame).collect(),
    }
}
