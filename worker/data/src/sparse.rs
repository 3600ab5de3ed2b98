//! Sparse data: of a huge number of ids, a sample has a few. For models whose parameters are tables of rows by id.
//!
//! ```text
//!  libsvm, Vowpal Wabbit, Criteo, ratings --read--> SparseBatch (all samples) --+
//!                                                                               +--> SparseDataset --fill--> SparseBatch
//!  Clicks: (seed, i) --> sample i ----------------------------------------------+
//! ```
//!
//! Ids are 64-bit keys, never columns: nothing is counted, shifted or numbered anew, so two files of one data set
//! have the same ids whatever else they hold. A field may name an id twice in one sample (Vowpal Wabbit's text, and any
//! field after [`Hashing`]); both count.

pub(crate) mod clicks;
pub(crate) mod config;
pub(crate) mod criteo;
pub(crate) mod hashing;
mod law;
pub(crate) mod libsvm;
mod lines;
mod murmur;
pub(crate) mod ratings;
mod targets;
pub(crate) mod vowpal;

use crate::DataError;
use clicks::Clicks;
use hashing::Hashing;
use paraft_common::draws::draw;

/// One field's ids of some samples, in compressed sparse rows: sample `i` has `ids[offsets[i]..offsets[i + 1]]`, of
/// which there may be none.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// `[n + 1]` places in `ids`, rising from 0. As PyTorch's `EmbeddingBag` takes with `include_last_offset`.
    pub offsets: Vec<u32>,
    /// The ids of all samples.
    pub ids: Vec<u64>,
    /// The value of each id; may be empty if all are 1.
    pub weights: Vec<f32>,
}

/// Some samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SparseBatch {
    /// `[n]` numbers to predict; 0 and 1 for classes.
    pub labels: Vec<f32>,
    /// `[n]` factors, 0 or more, of the samples' losses; may be empty if all are 1.
    pub importance: Vec<f32>,
    /// `[n, dense]` row-major plain values; empty for data without.
    pub dense: Vec<f32>,
    /// The fields, each with all samples.
    pub fields: Vec<Field>,
}

/// The sparse samples of a file, or those of a stream that is computed.
#[derive(Clone, Debug)]
pub struct SparseDataset(Source);

#[derive(Clone, Debug)]
enum Source {
    Rows(SparseBatch),
    Clicks(Clicks),
}

impl Default for Field {
    fn default() -> Self {
        Self { offsets: vec![0], ids: Vec::new(), weights: Vec::new() }
    }
}

impl Field {
    /// Sample `i`'s ids and their values, which may be empty if all are 1.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn row(&self, i: usize) -> (&[u64], &[f32]) {
        let range = self.offsets[i] as usize..self.offsets[i + 1] as usize;
        (&self.ids[range.clone()], self.weights.get(range).unwrap_or_default())
    }

    /// Adds an id to the sample that [`SparseBatch::end`] will close.
    fn push(&mut self, id: u64, weight: f32) {
        push_or_one(&mut self.weights, self.ids.len(), weight);
        self.ids.push(id);
    }

    fn clear(&mut self) {
        self.offsets.truncate(1);
        self.ids.clear();
        self.weights.clear();
    }
}

/// Adds a value to a list of `len` that is empty as long as all are 1.
fn push_or_one(values: &mut Vec<f32>, len: usize, value: f32) {
    if values.is_empty() && value != 1.0 {
        values.resize(len, 1.0);
    }
    if values.len() == len && (len > 0 || value != 1.0) {
        values.push(value);
    }
}

impl SparseBatch {
    /// No samples, of this many fields.
    pub fn new(fields: usize) -> Self {
        Self { fields: vec![Field::default(); fields], ..Self::default() }
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Replaces the ids as `hashing` says, each by its field's index.
    pub fn hash(&mut self, hashing: &Hashing) {
        for (at, field) in self.fields.iter_mut().enumerate() {
            field.ids.iter_mut().for_each(|id| *id = hashing.id(at, *id));
        }
    }

    /// Closes the sample whose ids and dense values were added. False if it is one more than 32-bit offsets can name.
    fn end(&mut self, label: f32, importance: f32) -> bool {
        push_or_one(&mut self.importance, self.labels.len(), importance);
        self.labels.push(label);
        let mut fits = u32::try_from(self.labels.len()).is_ok();
        for field in &mut self.fields {
            let end = u32::try_from(field.ids.len());
            fits &= end.is_ok();
            field.offsets.push(end.unwrap_or(u32::MAX));
        }
        fits
    }

    /// Removes all samples and keeps the memory.
    fn clear(&mut self, fields: usize) {
        self.labels.clear();
        self.importance.clear();
        self.dense.clear();
        self.fields.resize_with(fields, Field::default);
        self.fields.iter_mut().for_each(Field::clear);
    }

    /// Adds sample `i` of `from`, which has as many fields and `dense` plain values a sample. All samples of a batch
    /// are copied from the same one, so that fields have weights for all of them or for none.
    fn copy(&mut self, from: &Self, i: usize, dense: usize) {
        for (to, from) in self.fields.iter_mut().zip(&from.fields) {
            let (ids, weights) = from.row(i);
            to.ids.extend_from_slice(ids);
            to.weights.extend_from_slice(weights);
        }
        self.dense.extend_from_slice(&from.dense[i * dense..(i + 1) * dense]);
        self.end(from.labels[i], from.importance.get(i).copied().unwrap_or(1.0));
    }
}

impl SparseDataset {
    /// Samples in memory.
    ///
    /// The error says which numbers do not fit.
    pub fn new(samples: SparseBatch) -> Result<Self, DataError> {
        let n = samples.len();
        let bad = |why: String| Err(DataError::Mismatch(why));
        if u32::try_from(n).is_err() {
            return bad(format!("{n} samples are more than a 32-bit index can name"));
        }
        if !samples.dense.len().is_multiple_of(n.max(1)) {
            return bad(format!("{} dense values are no whole number a sample of {n}", samples.dense.len()));
        }
        if !samples.importance.is_empty() && samples.importance.len() != n {
            return bad(format!("{n} samples but {} factors of importance", samples.importance.len()));
        }
        for (at, f) in samples.fields.iter().enumerate() {
            let rising = f.offsets.is_sorted() && f.offsets.first() == Some(&0);
            if !rising
                || f.offsets.len() != n + 1
                || f.offsets.last().map(|o| *o as usize) != Some(f.ids.len())
            {
                let ids = f.ids.len();
                return bad(format!("offsets of field {at} do not rise from 0 to {ids} in {n} steps"));
            }
            if !f.weights.is_empty() && f.weights.len() != f.ids.len() {
                return bad(format!("field {at} has {} ids but {} weights", f.ids.len(), f.weights.len()));
            }
        }
        Ok(Self(Source::Rows(samples)))
    }

    /// A synthetic stream.
    pub fn clicks(clicks: Clicks) -> Self {
        Self(Source::Clicks(clicks))
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        match &self.0 {
            Source::Rows(rows) => rows.len(),
            Source::Clicks(clicks) => clicks.options().samples as usize,
        }
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of fields.
    pub fn fields(&self) -> usize {
        match &self.0 {
            Source::Rows(rows) => rows.fields.len(),
            Source::Clicks(_) => clicks::FIELDS,
        }
    }

    /// Plain values a sample.
    pub fn dense(&self) -> usize {
        match &self.0 {
            Source::Rows(rows) => rows.dense.len() / rows.len().max(1),
            Source::Clicks(_) => clicks::DENSE,
        }
    }

    /// The mean of the labels of a file; of a stream, whose labels are clicks, None.
    pub fn mean_label(&self) -> Option<f64> {
        match &self.0 {
            Source::Rows(rows) => {
                let sum: f64 = rows.labels.iter().map(|l| f64::from(*l)).sum();
                (!rows.is_empty()).then(|| sum / rows.len() as f64)
            }
            Source::Clicks(_) => None,
        }
    }

    /// All content as words, for a digest; of a stream what determines it.
    pub(crate) fn words(&self, mut word: impl FnMut(u64)) {
        let rows = match &self.0 {
            Source::Clicks(clicks) => {
                let o = clicks.options();
                let all = [o.seed, o.first, u64::from(o.samples), o.max_categories, o.day, o.drift.to_bits()];
                return all.into_iter().for_each(word);
            }
            Source::Rows(rows) => rows,
        };
        let mut floats = |values: &[f32]| {
            word(values.len() as u64);
            values.iter().for_each(|v| word(u64::from(v.to_bits())));
        };
        floats(&rows.labels);
        floats(&rows.importance);
        floats(&rows.dense);
        rows.fields.iter().for_each(|f| floats(&f.weights));
        for field in &rows.fields {
            field.offsets.iter().for_each(|o| word(u64::from(*o)));
            field.ids.iter().for_each(|id| word(*id));
        }
    }

    /// Replaces the content of `batch` by the samples of these indices, in their order. It keeps its memory from batch
    /// to batch.
    ///
    /// # Panics
    /// If an index is not below [`Self::len`]; a [`crate::Sampler`] of the same length returns none.
    pub fn fill(&self, indices: &[u32], batch: &mut SparseBatch) {
        batch.clear(self.fields());
        let dense = self.dense();
        for &i in indices {
            match &self.0 {
                Source::Rows(rows) => batch.copy(rows, i as usize, dense),
                Source::Clicks(clicks) => {
                    assert!((i as usize) < self.len(), "sample {i} of {}", self.len());
                    clicks.push(clicks.options().first + u64::from(i), batch);
                }
            }
        }
    }

    /// The chances of label 1 that the teacher of a stream gives these samples; `None`: they are a file's.
    ///
    /// # Panics
    /// If an index is not below [`Self::len`].
    pub fn teacher(&self, indices: &[u32]) -> Option<Vec<f32>> {
        let Source::Clicks(clicks) = &self.0 else { return None };
        let mut batch = SparseBatch::new(clicks::FIELDS);
        let chance = |i: &u32| {
            assert!((*i as usize) < self.len(), "sample {i} of {}", self.len());
            batch.clear(clicks::FIELDS);
            clicks.push(clicks.options().first + u64::from(*i), &mut batch) as f32
        };
        Some(indices.iter().map(chance).collect())
    }

    /// Splits off a `fraction` (above 0, below 1) to evaluate on: of a file the samples that `seed` draws, both parts in
    /// the file's order; of a stream its end, since in life what is predicted comes later. Both parts hold at least one.
    ///
    /// # Errors
    /// [`DataError::Option`] of `test_fraction`.
    pub fn split(self, fraction: f64, seed: u64) -> Result<(Self, Self), DataError> {
        let option = |why| Err(DataError::Option { key: "test_fraction", why });
        if !(fraction > 0.0 && fraction < 1.0) {
            return option(format!("{fraction} is not above 0 and below 1"));
        }
        let n = self.len();
        let held_out = (n as f64 * fraction).round() as usize;
        if held_out == 0 || held_out >= n {
            return option(format!(
                "of {n} samples {held_out} would be held out; training and test need one each at least"
            ));
        }
        let dense = self.dense();
        match self.0 {
            Source::Clicks(clicks) => {
                let (train, test) = clicks.split(held_out as u32);
                Ok((Self::clicks(train), Self::clicks(test)))
            }
            Source::Rows(rows) => {
                let mut drawn: Vec<u32> = (0..n as u32).collect();
                drawn.sort_unstable_by_key(|i| (draw(seed, u64::from(*i)), *i));
                let mut is_test = vec![false; n];
                drawn[..held_out].iter().for_each(|i| is_test[*i as usize] = true);
                let mut parts = [SparseBatch::new(rows.fields.len()), SparseBatch::new(rows.fields.len())];
                for (i, test) in is_test.iter().enumerate() {
                    parts[usize::from(*test)].copy(&rows, i, dense);
                }
                let [train, test] = parts;
                Ok((Self(Source::Rows(train)), Self(Source::Rows(test))))
            }
        }
    }
}

#[cfg(test)]
#[path = "sparse_tests.rs"]
mod tests;
