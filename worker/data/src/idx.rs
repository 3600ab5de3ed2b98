//! IDX, the format of MNIST and its kin: unsigned bytes behind a small header, plain or gzip.
//!
//! ```text
//!  byte  0        4        8         12       16
//!        | 2051   | images | height  | width  | pixels ...        (images)
//!        | 2049   | labels | labels ...                           (labels)   all numbers big-endian u32
//! ```

use crate::input::{self, MAX_BYTES};
use crate::{DataError, Dataset, Place, Samples, Split};
use std::path::{Path, PathBuf};

const IMAGES: u32 = 2051;
const LABELS: u32 = 2049;
const AGAIN: &str = "fetch the file again";

/// Reads the four files of a data set from a folder: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and
/// the same with `t10k`, each plain or with `.gz`; `-idx` may be `.idx`.
pub fn read_idx_folder(folder: &Path) -> Result<Split, DataError> {
    let file = |stem: &str, kind: &str| find(folder, stem, kind);
    let train = (file("train-images", "idx3-ubyte")?, file("train-labels", "idx1-ubyte")?);
    let test = (file("t10k-images", "idx3-ubyte")?, file("t10k-labels", "idx1-ubyte")?);
    let (train, test) = (read_parts(&train.0, &train.1)?, read_parts(&test.0, &test.1)?);
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

/// Reads one file of images and the file of their labels. The classes are 0 up to the largest label.
pub fn read_idx_pair(images: &Path, labels: &Path) -> Result<Dataset, DataError> {
    let parts = read_parts(images, labels)?;
    let classes = parts.classes();
    parts.dataset(classes)
}

struct Parts {
    pixels: Vec<u8>,
    labels: Vec<u8>,
    shape: Vec<usize>,
}

impl Parts {
    fn classes(&self) -> usize {
        self.labels.iter().max().map_or(0, |&l| usize::from(l) + 1)
    }

    fn dataset(self, classes: usize) -> Result<Dataset, DataError> {
        let labels = self.labels.iter().map(|&l| u32::from(l)).collect();
        let samples = Samples::Bytes { values: self.pixels, divisor: 255.0 };
        Dataset::new(samples, self.shape, Some((labels, classes)))
    }
}

fn find(folder: &Path, stem: &str, kind: &str) -> Result<PathBuf, DataError> {
    let names: Vec<String> =
        ["-", "."].iter().flat_map(|dash| ["", ".gz"].map(|gz| format!("{stem}{dash}{kind}{gz}"))).collect();
    let found = names.iter().map(|n| folder.join(n)).find(|p| p.exists());
    found.ok_or_else(|| DataError::Missing { folder: folder.to_owned(), names })
}

fn read_parts(images: &Path, labels: &Path) -> Result<Parts, DataError> {
    let (dims, pixels) = read_file(images, IMAGES)?;
    let (label_dims, label_values) = read_file(labels, LABELS)?;
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

/// The dimensions and the values of one file.
fn read_file(path: &Path, magic: u32) -> Result<(Vec<u32>, Vec<u8>), DataError> {
    let mut input = input::open(path)?;
    let rank = (magic & 0xff) as usize;
    let header = input.read_up_to(4 + 4 * rank as u64)?;
    let (words, _) = header.as_chunks::<4>();
    let words: Vec<u32> = words.iter().map(|w| u32::from_be_bytes(*w)).collect();
    let name = |m| match m {
        IMAGES => "images (2051)",
        LABELS => "labels (2049)",
        _ => "no IDX file of bytes",
    };
    // The magic comes first: of a short file of another format it says more than that the header is short.
    if let Some(&found) = words.first().filter(|&&m| m != magic) {
        let what = format!("expected {}, found {} with magic number {found}", name(magic), name(found));
        return Err(input.malformed(Place::Byte(0), what, "check that images and labels are not mixed up"));
    }
    if words.len() <= rank {
        let (n, need) = (header.len(), 4 + 4 * rank);
        return Err(input.malformed(
            Place::Byte(n as u64),
            format!("the header of {need} bytes is cut off"),
            AGAIN,
        ));
    }
    let dims = words[1..].to_vec();
    if let Some(zero) = dims.iter().position(|&d| d == 0) {
        let at = Place::Byte(4 + 4 * zero as u64);
        return Err(input.malformed(at, format!("a dimension of {dims:?} is 0"), AGAIN));
    }
    // Three u32 may not fit a u64.
    let claimed = dims.iter().fold(1u64, |a, &d| a.saturating_mul(u64::from(d)));
    if claimed > MAX_BYTES {
        return Err(input.too_large(claimed, MAX_BYTES));
    }
    let values = input.read_up_to(claimed + 1)?;
    let found = values.len() as u64;
    let end = Place::Byte(header.len() as u64 + found.min(claimed));
    if found < claimed {
        let what = format!("the header {dims:?} promises {claimed} bytes but only {found} follow");
        return Err(input.malformed(end, what, AGAIN));
    }
    if found > claimed {
        let what = format!("the header {dims:?} promises {claimed} bytes but more follow");
        return Err(input.malformed(end, what, AGAIN));
    }
    Ok((dims, values))
}
