//! The `[data]` table of a job.

use crate::csv_file::{self, Column, CsvOptions, LabelColumn, Task};
use crate::sparse::config::{ClicksConfig, CriteoConfig, LibsvmConfig, RatingsConfig, VwConfig};
use crate::text::TextCorpus;
use crate::{Cache, DataError, Dataset, Split, digits, idx, input};
use paraft_common::kind::NoOptions;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The source of the data: `kind` and its options; other keys are refused. Paths are relative to the job file's
/// folder.
///
/// ```
/// use paraft_data::DataConfig;
/// let data: DataConfig = toml::from_str("kind = \"digits\"").expect("valid");
/// assert_eq!(data.load(std::path::Path::new(".")).expect("embedded").test.len(), 360);
/// assert!(toml::from_str::<DataConfig>("kind = \"digits\"\npath = \"x\"").is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum DataConfig {
    /// The embedded images of digits.
    Digits {},
    /// MNIST and similar data, see [`crate::read_idx_folder`].
    Idx {
        /// The folder with the four files.
        path: PathBuf,
    },
    /// A table, see [`crate::read_csv`].
    Csv {
        /// The file.
        path: PathBuf,
        /// The file to evaluate on. Default: a part of `path`.
        #[serde(skip_serializing_if = "Option::is_none")]
        test_path: Option<PathBuf>,
        /// The label's column: its name or index from 0, `first`, `last` (default) or `none`.
        label: LabelColumn,
        /// `classification` (default), or `regression`: the label is a number to predict.
        task: Task,
        /// Columns that are neither label nor feature, by name or index.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        ignore: Vec<Column>,
        /// Part of the rows held out, above 0 and below 1; not beside `test_path`. Default 0.2.
        #[serde(skip_serializing_if = "Option::is_none")]
        test_fraction: Option<f64>,
        /// Multiplies every feature. Default 1.
        scale: f64,
    },
    /// Plain text, for a transformer: see [`Dataset::text`].
    Text {
        /// The file.
        path: PathBuf,
        /// Tokens in a window, 1 or more. Default 128.
        context: usize,
        /// Part of the text held out, from its end; above 0 and below 1. Default 0.1.
        test_fraction: f64,
    },
    /// Samples of one field, see [`crate::read_libsvm`].
    Libsvm(LibsvmConfig),
    /// Samples of one field, see [`crate::read_vowpal`].
    Vw(VwConfig),
    /// Clicks with 13 plain values and 26 fields, see [`crate::read_criteo`].
    Criteo(CriteoConfig),
    /// Users, items and ratings, see [`crate::read_ratings`].
    Ratings(RatingsConfig),
    /// Computed clicks with Criteo's cardinalities, see [`crate::Clicks`].
    Clicks(ClicksConfig),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Idx {
    path: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Csv {
    path: PathBuf,
    #[serde(default)]
    test_path: Option<PathBuf>,
    #[serde(default)]
    label: LabelColumn,
    #[serde(default)]
    task: Task,
    #[serde(default)]
    ignore: Vec<Column>,
    #[serde(default)]
    test_fraction: Option<f64>,
    #[serde(default = "one")]
    scale: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    path: PathBuf,
    #[serde(default = "context")]
    context: usize,
    #[serde(default = "tenth")]
    test_fraction: f64,
}

paraft_common::kinds!(DataConfig {
    "digits" => |_: NoOptions| Self::Digits {},
    "idx" => |o: Idx| Self::Idx { path: o.path },
    "csv" => |o: Csv| {
        let Csv { path, test_path, label, task, ignore, test_fraction, scale } = o;
        Self::Csv { path, test_path, label, task, ignore, test_fraction, scale }
    },
    "text" => |o: Text| {
        let Text { path, context, test_fraction } = o;
        Self::Text { path, context, test_fraction }
    },
    "libsvm" => Self::Libsvm,
    "vw" => Self::Vw,
    "criteo" => Self::Criteo,
    "ratings" => Self::Ratings,
    "clicks" => Self::Clicks,
});

fn one() -> f64 {
    1.0
}

fn context() -> usize {
    128
}

fn tenth() -> f64 {
    0.1
}

impl Default for DataConfig {
    /// The digits, which are always available.
    fn default() -> Self {
        Self::Digits {}
    }
}

impl DataConfig {
    /// The kind, as in the job file.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Digits {} => "digits",
            Self::Idx { .. } => "idx",
            Self::Csv { .. } => "csv",
            Self::Text { .. } => "text",
            Self::Libsvm(_) => "libsvm",
            Self::Vw(_) => "vw",
            Self::Criteo(_) => "criteo",
            Self::Ratings(_) => "ratings",
            Self::Clicks(_) => "clicks",
        }
    }

    /// Makes relative paths absolute, relative to `base`, so that the configuration can be moved.
    pub fn rebase(&mut self, base: &Path) {
        match self {
            Self::Digits {} => {}
            Self::Idx { path } | Self::Text { path, .. } => *path = base.join(&*path),
            Self::Csv { path, test_path, .. }
            | Self::Libsvm(LibsvmConfig { path, test_path, .. })
            | Self::Vw(VwConfig { path, test_path, .. })
            | Self::Criteo(CriteoConfig { path, test_path, .. })
            | Self::Ratings(RatingsConfig { path, test_path, .. }) => {
                *path = base.join(&*path);
                if let Some(t) = test_path {
                    *t = base.join(&*t);
                }
            }
            Self::Clicks(_) => {}
        }
    }

    /// Loads the data, with the user's [`Cache`]; `base_dir` is the job file's folder. Errors name the file, the
    /// place and what to do.
    pub fn load(&self, base_dir: &Path) -> Result<Split, DataError> {
        self.load_with(base_dir, &Cache::of_user())
    }

    /// Likewise, with this cache.
    pub fn load_with(&self, base_dir: &Path, cache: &Cache) -> Result<Split, DataError> {
        match self {
            Self::Digits {} => digits::digits(),
            Self::Idx { path } => {
                let folder = base_dir.join(path);
                let files = idx::files(&folder)?;
                let [train, _, test, _] = &files;
                // Uncompressed files are read in place.
                if input::is_plain(train) && input::is_plain(test) {
                    return idx::read_idx_folder(&folder);
                }
                cache.split(&files.each_ref().map(PathBuf::as_path), "idx", || idx::read_idx_folder(&folder))
            }
            Self::Csv { path, test_path, label, task, ignore, test_fraction, scale } => {
                let options = CsvOptions {
                    label: label.clone(),
                    task: *task,
                    ignore: ignore.clone(),
                    test_fraction: *test_fraction,
                    scale: *scale,
                };
                let (path, test_path) = (base_dir.join(path), test_path.as_ref().map(|p| base_dir.join(p)));
                let files: Vec<&Path> =
                    [Some(path.as_path()), test_path.as_deref()].into_iter().flatten().collect();
                let read = || csv_file::read_csv(&path, test_path.as_deref(), &options);
                cache.split(&files, &format!("{options:?}"), read)
            }
            Self::Text { path, context, test_fraction } => {
                let path = base_dir.join(path);
                let how = format!("text {context} {test_fraction}");
                cache.split(&[&path], &how, || {
                    let (train, test) = TextCorpus::read(&path, *context)?.split(*test_fraction)?;
                    Ok(Split { train: Dataset::text(train)?, test: Dataset::text(test)? })
                })
            }
            Self::Libsvm(_) | Self::Vw(_) | Self::Criteo(_) | Self::Ratings(_) | Self::Clicks(_) => {
                let why = format!("`{}` is sparse: it is for models with [[table]] entries", self.name());
                Err(DataError::Option { key: "kind", why })
            }
        }
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
