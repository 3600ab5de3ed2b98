//! A cache file: how it is written and read.

use super::MAGIC;
use crate::dataset::Samples;
use crate::values::{FileValues, Source, ValueFormat};
use crate::{Dataset, Split};
use paraft_host::Mapped;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Maximum length of a description: shapes and lengths of two parts.
const MAX_DESCRIPTION: u64 = 1 << 16;

/// A file's description of a part.
#[derive(Serialize, Deserialize)]
struct Part {
    kind: Kind,
    shape: Vec<usize>,
    classes: Option<usize>,
    labels: Option<usize>,
    values: usize,
}

#[derive(Serialize, Deserialize)]
enum Kind {
    /// The bits of the divisor.
    Bytes(u32),
    Floats,
    Tokens {
        context: usize,
        vocab: usize,
    },
}

/// Writes a file, whole or not at all.
pub(super) fn write(path: &Path, split: &Split) -> io::Result<()> {
    let part = path.with_extension("part");
    let written = write_to(&part, split).and_then(|()| fs::rename(&part, path));
    if written.is_err() {
        let _ = fs::remove_file(&part); // the disk is full, or not ours to write
    }
    written
}

fn write_to(path: &Path, split: &Split) -> io::Result<()> {
    let mut out =
        HashingWriter { out: BufWriter::with_capacity(1 << 20, File::create(path)?), hash: Xxh3::new() };
    let parts = [&split.train, &split.test];
    let description = serde_json::to_vec(&parts.map(Part::of))?;
    out.write_all(MAGIC)?;
    out.write_all(&(description.len() as u64).to_le_bytes())?;
    out.write_all(&description)?;
    for data in parts {
        for label in data.labels() {
            out.write_all(&label.to_le_bytes())?;
        }
        match data.samples() {
            Samples::Bytes { values, .. } => out.write_all(values)?,
            Samples::Floats(values) => values.iter().try_for_each(|v| out.write_all(&v.to_le_bytes()))?,
            Samples::Tokens { tokens, .. } => {
                tokens.iter().try_for_each(|t| out.write_all(&t.to_le_bytes()))?;
            }
            Samples::File(values) => values.pieces(|b| out.write_all(b)).map_err(io::Error::other)?,
        }
    }
    let hash = out.hash.digest();
    out.out.write_all(&hash.to_le_bytes())?;
    out.out.flush()
}

/// Hashes the bytes that it writes.
struct HashingWriter {
    out: BufWriter<File>,
    hash: Xxh3,
}

impl Write for HashingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.hash.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Part {
    fn of(data: &Dataset) -> Self {
        let kind = match data.of() {
            ValueFormat::Bytes { divisor } => Kind::Bytes(divisor.to_bits()),
            ValueFormat::Floats => Kind::Floats,
            ValueFormat::Tokens { context, vocab } => Kind::Tokens { context, vocab },
        };
        let labels = data.has_labels().then(|| data.labels().len());
        let (shape, classes) = (data.shape().to_vec(), data.classes());
        Self { kind, shape, classes, labels, values: data.samples().values() }
    }

    /// The part that starts at `at`, which is advanced behind it.
    fn open(self, file: &Arc<Mapped>, path: &Arc<Path>, at: &mut u64) -> io::Result<Dataset> {
        let end = |at: u64, n: usize, width: usize| {
            (n as u64).checked_mul(width as u64).and_then(|n| n.checked_add(at)).ok_or(ErrorKind::InvalidData)
        };
        let mut labels = None;
        if let Some(n) = self.labels {
            let after = end(*at, n, 4)?;
            let bytes = file.get(*at as usize..after as usize).ok_or(ErrorKind::UnexpectedEof)?;
            labels = Some(crate::values::words(bytes).collect::<Vec<u32>>());
            *at = after;
        }
        let of = match self.kind {
            Kind::Bytes(bits) => ValueFormat::Bytes { divisor: f32::from_bits(bits) },
            Kind::Floats => ValueFormat::Floats,
            Kind::Tokens { context: 0, .. } => return Err(ErrorKind::InvalidData.into()),
            Kind::Tokens { context, vocab } => ValueFormat::Tokens { context, vocab },
        };
        let values = FileValues::new(Source::Mapped(file.clone()), path.clone(), *at, self.values, of)?;
        *at = end(*at, self.values, of.width())?;
        let samples = Samples::File(values);
        let data = match (labels, self.classes) {
            (Some(bits), None) => {
                let targets: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
                Dataset::with_targets(samples, self.shape, &targets)
            }
            (labels, classes) => Dataset::new(samples, self.shape, labels.zip(classes)),
        };
        data.map_err(io::Error::other)
    }
}

/// The data of a file with a valid hash.
pub(super) fn open(path: &Path) -> io::Result<Split> {
    if !fs::metadata(path)?.is_file() {
        return Err(ErrorKind::InvalidData.into()); // reading a pipe could block
    }
    let file = File::open(path)?;
    let mapped = Mapped::whole(&file)?;
    let (content, hash) = mapped.split_last_chunk().ok_or(ErrorKind::UnexpectedEof)?;
    if u64::from_le_bytes(*hash) != xxh3_64(content) {
        return Err(ErrorKind::InvalidData.into());
    }
    let (magic, behind) = content.split_first_chunk::<8>().ok_or(ErrorKind::InvalidData)?;
    let (length, behind) = behind.split_first_chunk().ok_or(ErrorKind::InvalidData)?;
    let length = u64::from_le_bytes(*length);
    if magic != MAGIC || length > MAX_DESCRIPTION {
        return Err(ErrorKind::InvalidData.into());
    }
    let description = behind.get(..length as usize).ok_or(ErrorKind::InvalidData)?;
    let [train, test]: [Part; 2] = serde_json::from_slice(description)?;
    let end = content.len() as u64;
    // Record the last use. A readable cache of another user keeps its time.
    let _ = file.set_modified(SystemTime::now());
    let (mapped, path, mut at) = (Arc::new(mapped), Arc::from(path), 16 + length);
    let (train, test) = (train.open(&mapped, &path, &mut at)?, test.open(&mapped, &path, &mut at)?);
    if at != end {
        return Err(ErrorKind::InvalidData.into());
    }
    Ok(Split { train, test })
}
