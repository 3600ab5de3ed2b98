//! Sparse data for scripts: files of samples with a few of very many ids, a stream of clicks, and metrics.

use crate::errors;
use paraft_worker::{
    DataError, WorkerError,
    data::{
        Clicks, ClicksOptions, Hashing, Ids, SparseBatch, SparseDataset, Task, VowpalHash, VowpalOptions,
        metrics::{ClassMetrics, auc},
        read_criteo, read_libsvm, read_ratings, read_vowpal,
    },
};
use pyo3::{prelude::*, types::PyByteArray};
use std::path::PathBuf;

/// Sparse samples, and how their ids are hashed.
#[pyclass(frozen)]
pub struct SparseData(SparseDataset, Option<Hashing>);

/// A field of some samples: offsets (uint32), ids (uint64), values (float32; may be empty).
type FieldBytes<'py> = (Bound<'py, PyByteArray>, Bound<'py, PyByteArray>, Bound<'py, PyByteArray>);
/// Some samples: labels, importances (may be empty), plain values (float32), and fields.
type BatchBytes<'py> =
    (Bound<'py, PyByteArray>, Bound<'py, PyByteArray>, Bound<'py, PyByteArray>, Vec<FieldBytes<'py>>);

fn failed(py: Python<'_>) -> impl Fn(DataError) -> PyErr + '_ {
    move |e| errors::raised(py, &WorkerError::from(e))
}

fn bytes<'py, T, const N: usize>(
    py: Python<'py>,
    values: &[T],
    of: impl Fn(&T) -> [u8; N],
) -> Bound<'py, PyByteArray> {
    let all: Vec<u8> = values.iter().flat_map(of).collect();
    PyByteArray::new(py, &all)
}

#[pymethods]
impl SparseData {
    /// Reads a file: `kind` is libsvm, vowpal, criteo or ratings. `classes`: labels are two classes, not numbers. `vowpal`:
    /// Vowpal Wabbit's `-b` and `--hash strings`. `texts`: ids of ratings are texts. `hash_bits`: ids are hashed to so many
    /// bits, in each field apart; 0: not.
    #[staticmethod]
    fn read(
        py: Python<'_>,
        kind: &str,
        path: PathBuf,
        classes: bool,
        vowpal: (u32, bool),
        texts: bool,
        hash_bits: u32,
    ) -> PyResult<Self> {
        let (bits, strings) = vowpal;
        let task = if classes { Task::Classification } else { Task::Regression };
        let read = py.detach(|| -> Result<Self, DataError> {
            let samples = match kind {
                "libsvm" => read_libsvm(&path, task)?,
                "criteo" => read_criteo(&path)?,
                "ratings" => read_ratings(&path, if texts { Ids::Texts } else { Ids::Numbers })?,
                _ => {
                    let hash = if strings { VowpalHash::Strings } else { VowpalHash::All };
                    read_vowpal(&path, &VowpalOptions { bits, hash, task, ..VowpalOptions::default() })?
                }
            };
            Ok(Self(SparseDataset::new(samples)?, hashing(hash_bits)?))
        });
        read.map_err(failed(py))
    }

    /// A computed stream of clicks.
    #[staticmethod]
    #[allow(clippy::too_many_arguments)]
    fn clicks(
        py: Python<'_>,
        seed: u64,
        first: u64,
        samples: u32,
        max_categories: u64,
        day: u64,
        drift: f64,
        hash_bits: u32,
    ) -> PyResult<Self> {
        let options = ClicksOptions { seed, first, samples, max_categories, day, drift };
        let made = py.detach(|| Ok(Self(SparseDataset::clicks(Clicks::new(options)?), hashing(hash_bits)?)));
        made.map_err(failed(py))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// The number of plain values of a sample.
    fn dense(&self) -> usize {
        self.0.dense()
    }

    /// Some samples, by index.
    fn take<'py>(&self, py: Python<'py>, indices: Vec<u32>) -> PyResult<BatchBytes<'py>> {
        self.check(&indices)?;
        let batch = py.detach(|| {
            let mut batch = SparseBatch::default();
            self.0.fill(&indices, &mut batch);
            if let Some(hashing) = &self.1 {
                batch.hash(hashing);
            }
            batch
        });
        let floats = |values: &[f32]| bytes(py, values, |v| v.to_le_bytes());
        let fields = batch.fields.iter().map(|f| {
            let offsets = bytes(py, &f.offsets, |v| v.to_le_bytes());
            (offsets, bytes(py, &f.ids, |v| v.to_le_bytes()), floats(&f.weights))
        });
        Ok((floats(&batch.labels), floats(&batch.importance), floats(&batch.dense), fields.collect()))
    }

    /// The chances of label 1 that a stream's teacher gives, float32; None: the samples are a file's.
    fn teacher<'py>(&self, py: Python<'py>, indices: Vec<u32>) -> PyResult<Option<Bound<'py, PyByteArray>>> {
        self.check(&indices)?;
        let chances = py.detach(|| self.0.teacher(&indices));
        Ok(chances.map(|all| bytes(py, &all, |v| v.to_le_bytes())))
    }

    /// Two parts: without and with this fraction of the samples, drawn by the seed.
    fn split(&self, py: Python<'_>, fraction: f64, seed: u64) -> PyResult<(Self, Self)> {
        let parts = py.detach(|| self.0.clone().split(fraction, seed));
        parts.map(|(a, b)| (Self(a, self.1), Self(b, self.1))).map_err(failed(py))
    }
}

impl SparseData {
    fn check(&self, indices: &[u32]) -> PyResult<()> {
        match indices.iter().find(|i| **i as usize >= self.0.len()) {
            Some(beyond) => {
                let why = format!("sample {beyond} of {}", self.0.len());
                Err(pyo3::exceptions::PyIndexError::new_err(why))
            }
            None => Ok(()),
        }
    }
}

fn hashing(bits: u32) -> Result<Option<Hashing>, DataError> {
    (bits > 0).then(|| Hashing::new(bits)).transpose()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|v| f32::from_le_bytes(*v)).collect()
}

/// The exact AUC of scores, float32, for labels 0 and 1; None: all labels are the same.
#[pyfunction]
pub fn area_under_curve(scores: &[u8], labels: &[u8]) -> Option<f64> {
    let (scores, labels) = (floats(scores), floats(labels));
    (scores.len() == labels.len()).then(|| auc(&scores, &labels)).flatten()
}

/// Sums over samples with two classes, which add up over workers in any order.
#[pyclass]
#[derive(Default)]
pub struct ClickMetrics(ClassMetrics);

#[pymethods]
impl ClickMetrics {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Adds samples: the log odds of label 1, and the labels, float32.
    fn add(&mut self, logits: &[u8], labels: &[u8]) {
        floats(logits).into_iter().zip(floats(labels)).for_each(|(logit, label)| self.0.add(logit, label));
    }

    /// AUC (to 1e-3), log loss, normalised entropy; None where they have no meaning.
    fn values(&self) -> (Option<f64>, Option<f64>, Option<f64>) {
        (self.0.auc().map(|area| area.value), self.0.log_loss(), self.0.normalized_entropy())
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyByteArray> {
        PyByteArray::new(py, &self.0.to_bytes())
    }

    /// Adds the sums of another worker.
    fn merge(&mut self, py: Python<'_>, theirs: &[u8]) -> PyResult<()> {
        self.0.merge(&ClassMetrics::from_bytes(theirs).map_err(failed(py))?);
        Ok(())
    }
}
