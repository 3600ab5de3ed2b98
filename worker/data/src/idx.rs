//! IDX, the format of MNIST and similar data: unsigned bytes after a small header, plain or gzip.
//!
//! ```text
//!  byte  0        4        8         12       16
//!        | 2051   | images | height  | width  | pixels ...        (images)
//!        | 2049   | labels | labels ...                           (labels)   all numbers big-endian u32
//! ```

use crate::input::{self, Input, MAX_BYTES};
use crate::values::{FileValues, Source, ValueFormat};
use crate::{DataError, Dataset, Place, Samples, Split};
use std::cmp::Ordering;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const IMAGES: u32 = 2051;
const LABELS: u32 = 2049;
/// The divisor of pixels, as in PyTorch's `ToTensor`.
const WHITE: f32 = 255.0;
const FETCH_AGAIN: &str = "fetch the file again";

/// Reads the four files of a data set from a folder: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and
/// the same with `t10k`, each plain or with `.gz`; `-idx` may be `.idx`.
pub fn read_idx_folder(folder: &Path) -> Result<Split, DataError> {
    let [images, labels, test_images, test_labels] = files(folder)?;
    let (train, test) = (read_parts(&images, &labels)?, read_parts(&test_images, &test_labels)?);
    if train.shape != test.shape {
        return Err(DataError::Mismatch(format!(
            "{}: training images are {:?} but test images are {:?}",
            folder.display(),
            train.shape,
            test.shape
        )));
    }
    let classes = train.classes().max(test.classes());
    Ok(Split { train: train.dataset(classes)?, test: test.dataset(classes)? })
}

/// The four files: images and labels to train on, images and labels held out.
pub(crate) fn files(folder: &Path) -> Result<[PathBuf; 4], DataError> {
    let file = |stem: &str, kind: &str| find(folder, stem, kind);
    Ok([
        file("train-images", "idx3-ubyte")?,
        file("train-labels", "idx1-ubyte")?,
        file("t10k-images", "idx3-ubyte")?,
        file("t10k-labels", "idx1-ubyte")?,
    ])
}

/// Reads a file of images and the file of their labels. The classes are 0 up to the largest label.
pub fn read_idx_pair(images: &Path, labels: &Path) -> Result<Dataset, DataError> {
    let parts = read_parts(images, labels)?;
    let classes = parts.classes();
    parts.dataset(classes)
}

struct Parts {
    pixels: Samples,
    labels: Vec<u8>,
    shape: Vec<usize>,
}

impl Parts {
    fn classes(&self) -> usize {
        self.labels.iter().max().map_or(0, |&l| usize::from(l) + 1)
    }

    fn dataset(self, classes: usize) -> Result<Dataset, DataError> {
        let labels = self.labels.iter().map(|&l| u32::from(l)).collect();
        Dataset::new(self.pixels, self.shape, Some((labels, classes)))
    }
}

fn find(folder: &Path, stem: &str, kind: &str) -> Result<PathBuf, DataError> {
    let names: Vec<String> =
        ["-", "."].iter().flat_map(|dash| ["", ".gz"].map(|gz| format!("{stem}{dash}{kind}{gz}"))).collect();
    let found = names.iter().map(|n| folder.join(n)).find(|p| p.exists());
    found.ok_or_else(|| DataError::Missing { folder: folder.to_owned(), names })
}

fn read_parts(images: &Path, labels: &Path) -> Result<Parts, DataError> {
    let (dims, pixels) = read_pixels(images)?;
    let (label_dims, label_values) = {
        let mut input = input::open(labels)?;
        let (dims, claimed) = read_header(&mut input, LABELS)?;
        let values = read_values(&mut input, &dims, claimed)?;
        (dims, values)
    };
    if dims[0] != label_dims[0] {
        return Err(DataError::Mismatch(format!(
            "{} has {} images but {} has {} labels; they are not of the same set",
            images.display(),
            dims[0],
            labels.display(),
            label_dims[0]
        )));
    }
    let shape = std::iter::once(1).chain(dims[1..].iter().map(|&d| d as usize)).collect();
    Ok(Parts { pixels, labels: label_values, shape })
}

/// From this many bytes on, uncompressed pixels stay in their file.
const LARGE: u64 = 1 << 20;

/// The dimensions of a file of images, and its values: in memory, or in place.
fn read_pixels(path: &Path) -> Result<(Vec<u32>, Samples), DataError> {
    let mut input = input::open(path)?;
    let (dims, claimed) = read_header(&mut input, IMAGES)?;
    let at = input.at();
    if !input::is_plain(path) || claimed < LARGE {
        let values = read_values(&mut input, &dims, claimed)?;
        return Ok((dims, Samples::Bytes { values, divisor: WHITE }));
    }
    let read = |source| DataError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(read)?;
    let there = file.metadata().map_err(read)?.len().saturating_sub(at);
    check_length(&input, &dims, claimed, there)?;
    let of = ValueFormat::Bytes { divisor: WHITE };
    let values = FileValues::new(Source::Read(Arc::new(file)), Arc::from(path), at, claimed as usize, of)
        .map_err(read)?;
    Ok((dims, Samples::File(values)))
}

/// The dimensions of a file of this kind, and the number of following bytes.
fn read_header(input: &mut Input<'_>, magic: u32) -> Result<(Vec<u32>, u64), DataError> {
    let rank = (magic & 0xff) as usize;
    let header = input.read_up_to(4 + 4 * rank as u64)?;
    let (words, _) = header.as_chunks::<4>();
    let words: Vec<u32> = words.iter().map(|w| u32::from_be_bytes(*w)).collect();
    let name = |m| match m {
        IMAGES => "images (2051)",
        LABELS => "labels (2049)",
        _ => "no IDX file of bytes",
    };
    // First the magic number: for a short file of another format it says more than the header's length.
    if let Some(&found) = words.first().filter(|&&m| m != magic) {
        let what = format!("expected {}, found {} with magic number {found}", name(magic), name(found));
        return Err(input.malformed(Place::Byte(0), what, "check that images and labels are not mixed up"));
    }
    if words.len() <= rank {
        let (n, need) = (header.len(), 4 + 4 * rank);
        return Err(input.malformed(
            Place::Byte(n as u64),
            format!("the header of {need} bytes is cut off"),
            FETCH_AGAIN,
        ));
    }
    let dims = words[1..].to_vec();
    if let Some(zero) = dims.iter().position(|&d| d == 0) {
        let at = Place::Byte(4 + 4 * zero as u64);
        return Err(input.malformed(at, format!("a dimension of {dims:?} is 0"), FETCH_AGAIN));
    }
    // The product of three u32 may exceed a u64.
    let claimed = dims.iter().fold(1u64, |a, &d| a.saturating_mul(u64::from(d)));
    if claimed > MAX_BYTES {
        return Err(input.too_large(claimed, MAX_BYTES));
    }
    Ok((dims, claimed))
}

/// The values after the header, as many as it claims.
fn read_values(input: &mut Input<'_>, dims: &[u32], claimed: u64) -> Result<Vec<u8>, DataError> {
    let values = input.read_up_to(claimed + 1)?;
    check_length(input, dims, claimed, values.len() as u64)?;
    Ok(values)
}

/// Checks that as many bytes follow as the header claims.
fn check_length(input: &Input<'_>, dims: &[u32], claimed: u64, found: u64) -> Result<(), DataError> {
    let end = Place::Byte(4 + 4 * dims.len() as u64 + found.min(claimed));
    let what = match found.cmp(&claimed) {
        Ordering::Equal => return Ok(()),
        Ordering::Less => format!("the header {dims:?} promises {claimed} bytes but only {found} follow"),
        Ordering::Greater => format!("the header {dims:?} promises {claimed} bytes but more follow"),
    };
    Err(input.malformed(end, what, FETCH_AGAIN))
}
