//! The kinds of `[data]` for models of sparse tables: their keys, and how they are loaded.

use super::{
    SparseBatch, SparseDataset,
    clicks::{Clicks, ClicksOptions},
    criteo::read_criteo,
    hashing::Hashing,
    libsvm::read_libsvm,
    ratings::{Ids, read_ratings},
    vowpal::{VowpalHash, VowpalOptions, read_vowpal},
};
use crate::{DataConfig, DataError, Task};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The part of a file that is held out if nothing else is said.
const HELD_OUT: f64 = 0.1;
/// Bits of ids of several fields: so many that none meet, and ids stay below 2^63, as Python has them.
const BITS: u32 = 63;

/// The data of a job with tables.
#[derive(Clone, Debug)]
pub struct SparseSplit {
    /// The data that the workers share.
    pub train: SparseDataset,
    /// The data held out for evaluation.
    pub test: SparseDataset,
    /// Whether labels are the classes 0 and 1.
    pub classes: bool,
    /// How ids are brought into one space; None: they stay.
    pub hashing: Option<Hashing>,
}

/// `kind = "libsvm"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LibsvmConfig {
    /// The file.
    pub path: PathBuf,
    /// The file to evaluate on. Default: a part of `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_path: Option<PathBuf>,
    /// Whether labels are two classes (default) or numbers.
    #[serde(default = "classification")]
    pub task: Task,
    /// Maps ids to so many bits, 1 to 64. Default: they stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash_bits: Option<u32>,
    /// Part of the samples held out, drawn by `split_seed`; above 0, below 1; not beside `test_path`. Default 0.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_fraction: Option<f64>,
    /// Draws what is held out. Default 0.
    #[serde(default)]
    pub split_seed: u64,
}

/// `kind = "vw"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VwConfig {
    /// The file.
    pub path: PathBuf,
    /// The file to evaluate on. Default: a part of `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_path: Option<PathBuf>,
    /// Whether labels are two classes (default) or numbers.
    #[serde(default = "classification")]
    pub task: Task,
    /// Bits of an index (`-b`), 1 to 61. Default 18.
    #[serde(default = "eighteen")]
    pub bits: u32,
    /// Which names are hashed (`--hash`). Default `strings`.
    #[serde(default)]
    pub hash: VowpalHash,
    /// Whether every sample has the constant feature. Default true.
    #[serde(default = "yes")]
    pub constant: bool,
    /// As for `libsvm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_fraction: Option<f64>,
    /// As for `libsvm`.
    #[serde(default)]
    pub split_seed: u64,
}

/// `kind = "criteo"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CriteoConfig {
    /// The file.
    pub path: PathBuf,
    /// The file to evaluate on. Default: a part of `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_path: Option<PathBuf>,
    /// Bits of an id, in a space that the fields share, 1 to 64. Default 63.
    #[serde(default = "all_bits")]
    pub hash_bits: u32,
    /// As for `libsvm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_fraction: Option<f64>,
    /// As for `libsvm`.
    #[serde(default)]
    pub split_seed: u64,
}

/// `kind = "ratings"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RatingsConfig {
    /// The file.
    pub path: PathBuf,
    /// The file to evaluate on. Default: a part of `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_path: Option<PathBuf>,
    /// Whether ids are `numbers` (default) or `texts`.
    #[serde(default)]
    pub ids: Ids,
    /// As for `libsvm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_fraction: Option<f64>,
    /// As for `libsvm`.
    #[serde(default)]
    pub split_seed: u64,
}

/// `kind = "clicks"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClicksConfig {
    /// The seed of the stream. Default 0.
    pub seed: u64,
    /// Samples, the held-out ones among them, from 2. Default 1,000,000.
    pub samples: u32,
    /// Caps the categories of a field, from 1. Default: Criteo's numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_categories: Option<u64>,
    /// Samples in a day, from 1. Default 1,000,000.
    pub day: u64,
    /// The part of categories replaced each day, 0 to 1. Default 0.01.
    pub drift: f64,
    /// Bits of an id, in a space that the fields share, 1 to 64. Default 63.
    pub hash_bits: u32,
    /// Part of the samples held out, from the end; above 0, below 1. Default 0.1.
    pub test_fraction: f64,
}

impl Default for ClicksConfig {
    fn default() -> Self {
        let ClicksOptions { seed, samples, day, drift, .. } = ClicksOptions::default();
        Self { seed, samples, max_categories: None, day, drift, hash_bits: BITS, test_fraction: HELD_OUT }
    }
}

fn classification() -> Task {
    Task::Classification
}

fn eighteen() -> u32 {
    18
}

fn all_bits() -> u32 {
    BITS
}

fn yes() -> bool {
    true
}

/// The file of a kind, and what is held out.
struct Source<'a> {
    path: &'a Path,
    test_path: Option<&'a Path>,
    test_fraction: Option<f64>,
    split_seed: u64,
    hash_bits: Option<u32>,
}

impl DataConfig {
    /// Whether the data is sparse: for models with tables, loaded by [`Self::load_sparse`].
    pub fn is_sparse(&self) -> bool {
        match self {
            Self::Digits {} | Self::Idx { .. } | Self::Csv { .. } | Self::Text { .. } => false,
            Self::Libsvm(_) | Self::Vw(_) | Self::Criteo(_) | Self::Ratings(_) | Self::Clicks(_) => true,
        }
    }

    /// Of sparse data: whether labels are two classes.
    pub fn has_two_classes(&self) -> bool {
        match self {
            Self::Libsvm(LibsvmConfig { task, .. }) | Self::Vw(VwConfig { task, .. }) => {
                *task == Task::Classification
            }
            Self::Criteo(_) | Self::Clicks(_) => true,
            Self::Digits {} | Self::Idx { .. } | Self::Csv { .. } | Self::Text { .. } | Self::Ratings(_) => {
                false
            }
        }
    }

    /// Loads sparse data into memory; a stream is computed as it is read. `base_dir` is the job file's folder.
    ///
    /// # Errors
    /// As the readers', with the file, the place and what to do; an option is out of its range; the data is not sparse.
    pub fn load_sparse(&self, base_dir: &Path) -> Result<SparseSplit, DataError> {
        if let Self::Clicks(stream) = self {
            return stream.load();
        }
        let source = self.source()?;
        let hashing = source.hash_bits.map(Hashing::new).transpose()?;
        let read = |path: &Path| SparseDataset::new(self.read(&base_dir.join(path))?);
        let (train, test) = match (source.test_path, source.test_fraction) {
            (Some(_), Some(_)) => {
                let why = "test_path names the held-out samples already; take one of them out".into();
                return Err(DataError::Option { key: "test_fraction", why });
            }
            (Some(test), None) => (read(source.path)?, read(test)?),
            (None, fraction) => read(source.path)?.split(fraction.unwrap_or(HELD_OUT), source.split_seed)?,
        };
        Ok(SparseSplit { train, test, classes: self.has_two_classes(), hashing })
    }

    fn source(&self) -> Result<Source<'_>, DataError> {
        Ok(match self {
            Self::Libsvm(o) => Source {
                path: &o.path,
                test_path: o.test_path.as_deref(),
                test_fraction: o.test_fraction,
                split_seed: o.split_seed,
                hash_bits: o.hash_bits,
            },
            Self::Vw(o) => Source {
                path: &o.path,
                test_path: o.test_path.as_deref(),
                test_fraction: o.test_fraction,
                split_seed: o.split_seed,
                hash_bits: None,
            },
            Self::Criteo(o) => Source {
                path: &o.path,
                test_path: o.test_path.as_deref(),
                test_fraction: o.test_fraction,
                split_seed: o.split_seed,
                hash_bits: Some(o.hash_bits),
            },
            Self::Ratings(o) => Source {
                path: &o.path,
                test_path: o.test_path.as_deref(),
                test_fraction: o.test_fraction,
                split_seed: o.split_seed,
                hash_bits: None,
            },
            _ => return Err(self.not_sparse()),
        })
    }

    fn read(&self, path: &Path) -> Result<SparseBatch, DataError> {
        match self {
            Self::Libsvm(o) => read_libsvm(path, o.task),
            Self::Vw(VwConfig { bits, hash, constant, task, .. }) => {
                let (bits, hash, constant, task) = (*bits, *hash, *constant, *task);
                read_vowpal(path, &VowpalOptions { bits, hash, constant, task })
            }
            Self::Criteo(_) => read_criteo(path),
            Self::Ratings(o) => read_ratings(path, o.ids),
            _ => Err(self.not_sparse()),
        }
    }

    fn not_sparse(&self) -> DataError {
        let why =
            format!("`{}` has no ids for tables: use libsvm, vw, criteo, ratings or clicks", self.name());
        DataError::Option { key: "kind", why }
    }
}

impl ClicksConfig {
    fn load(&self) -> Result<SparseSplit, DataError> {
        let Self { seed, samples, day, drift, .. } = *self;
        let max_categories = self.max_categories.unwrap_or(u64::MAX);
        let clicks = Clicks::new(ClicksOptions { seed, first: 0, samples, max_categories, day, drift })?;
        let (train, test) = SparseDataset::clicks(clicks).split(self.test_fraction, 0)?;
        Ok(SparseSplit { train, test, classes: true, hashing: Some(Hashing::new(self.hash_bits)?) })
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
