//! A data set: labels in memory, and values in memory or in a file.

use crate::values::{FileValues, ValueFormat, words};
use crate::{
    DataError,
    text::{TextCorpus, VOCAB},
};
use paraft_common::codec::{get_f32_le, put_quotients};

/// Samples of one shape, with or without labels: classes, or numbers to predict.
#[derive(Clone, Debug, PartialEq)]
pub struct Dataset {
    samples: Samples,
    /// Classes; without `classes` the bits of numbers to predict.
    labels: Option<Vec<u32>>,
    shape: Vec<usize>,
    input_len: usize,
    len: usize,
    classes: Option<usize>,
}

/// The values of all samples, concatenated.
#[derive(Clone, Debug, PartialEq)]
pub enum Samples {
    /// Pixels as in the file, with a quarter of the memory of `f32`. Divided when a batch is filled.
    Bytes {
        /// The values.
        values: Vec<u8>,
        /// The divisor of each value: 255 for IDX, as in PyTorch's `ToTensor`.
        divisor: f32,
    },
    /// Plain values.
    Floats(Vec<f32>),
    /// Tokens of a text, below `vocab`. A sample has `context` of them; the next one starts where it ends.
    Tokens {
        /// The text.
        tokens: Vec<u32>,
        /// Tokens per sample.
        context: usize,
        /// Number of distinct tokens.
        vocab: usize,
    },
    /// Any of these, in a file: see [`crate::DataConfig::load`].
    File(FileValues),
}

/// The data of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    /// The data that the workers share.
    pub train: Dataset,
    /// The data held out for evaluation.
    pub test: Dataset,
}

impl Samples {
    /// Number of values.
    pub(crate) fn values(&self) -> usize {
        match self {
            Self::Bytes { values, .. } => values.len(),
            Self::Floats(values) => values.len(),
            Self::Tokens { tokens, .. } => tokens.len(),
            Self::File(values) => values.len(),
        }
    }

    /// Their format.
    fn of(&self) -> ValueFormat {
        match self {
            Self::Bytes { divisor, .. } => ValueFormat::Bytes { divisor: *divisor },
            Self::Floats(_) => ValueFormat::Floats,
            Self::Tokens { context, vocab, .. } => ValueFormat::Tokens { context: *context, vocab: *vocab },
            Self::File(values) => values.of(),
        }
    }

    /// Number of values of whole samples.
    fn len(&self) -> usize {
        match self.of() {
            // A sample's last token needs a successor, as its label.
            ValueFormat::Tokens { context, .. } => self.values().saturating_sub(1) / context * context,
            ValueFormat::Bytes { .. } | ValueFormat::Floats => self.values(),
        }
    }
}

impl Dataset {
    /// Samples of `shape`, with one label below `classes` for each where there are labels.
    ///
    /// The error says which numbers do not fit.
    pub fn new(
        samples: Samples,
        shape: Vec<usize>,
        labels: Option<(Vec<u32>, usize)>,
    ) -> Result<Self, DataError> {
        let input_len = shape.iter().try_fold(1usize, |a, &d| a.checked_mul(d)).unwrap_or(0);
        if input_len == 0 || !samples.len().is_multiple_of(input_len) {
            let values = samples.len();
            return Err(DataError::Mismatch(format!(
                "{values} values are no whole number of {shape:?} samples"
            )));
        }
        let len = samples.len() / input_len;
        if u32::try_from(len).is_err() {
            return Err(DataError::Mismatch(format!("{len} samples are more than a 32-bit index can name")));
        }
        let (labels, classes) = labels.unzip();
        if let (Some(labels), Some(classes)) = (&labels, classes) {
            if labels.len() != len {
                let n = labels.len();
                return Err(DataError::Mismatch(format!(
                    "{len} samples but {n} labels; they must be as many"
                )));
            }
            if let Some(at) = labels.iter().position(|&l| l as usize >= classes) {
                let label = labels[at];
                return Err(DataError::Mismatch(format!(
                    "label {label} of sample {at} is not below {classes}"
                )));
            }
        }
        let classes = match samples.of() {
            ValueFormat::Tokens { vocab, .. } => Some(vocab),
            ValueFormat::Bytes { .. } | ValueFormat::Floats => classes,
        };
        Ok(Self { samples, labels, shape, input_len, len, classes })
    }

    /// Samples of `shape`, with one number to predict for each.
    ///
    /// The error says which numbers do not fit.
    pub fn with_targets(samples: Samples, shape: Vec<usize>, targets: &[f32]) -> Result<Self, DataError> {
        let plain = Self::new(samples, shape, None)?;
        if targets.len() != plain.len {
            return Err(DataError::Mismatch(format!(
                "{} samples but {} numbers to predict; they must be as many",
                plain.len,
                targets.len()
            )));
        }
        Ok(Self { labels: Some(targets.iter().map(|t| t.to_bits()).collect()), ..plain })
    }

    /// A text in samples of its context; each token is labelled with its successor.
    pub fn text(corpus: TextCorpus) -> Result<Self, DataError> {
        let (tokens, context) = corpus.into_parts();
        Self::new(Samples::Tokens { tokens, context, vocab: VOCAB }, vec![context], None)
    }

    /// The values of all samples.
    pub fn samples(&self) -> &Samples {
        &self.samples
    }

    /// The format of the values.
    pub(crate) fn of(&self) -> ValueFormat {
        self.samples.of()
    }

    /// Whether each sample has a label in addition to its values.
    pub(crate) fn has_labels(&self) -> bool {
        self.labels.is_some()
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The number of distinct tokens, if samples are tokens.
    pub fn vocab(&self) -> Option<usize> {
        match self.of() {
            ValueFormat::Tokens { vocab, .. } => Some(vocab),
            ValueFormat::Bytes { .. } | ValueFormat::Floats => None,
        }
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Values, or tokens, of one sample.
    pub fn input_len(&self) -> usize {
        self.input_len
    }

    /// Shape of one sample: `[channels, height, width]` for images, `[columns]` for tables.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Whether each sample has a number to predict.
    pub fn has_targets(&self) -> bool {
        self.labels.is_some() && self.classes.is_none()
    }

    /// Number of classes, or for a text of distinct tokens; `None` if the data has no classes.
    pub fn classes(&self) -> Option<usize> {
        self.classes
    }

    /// All labels: classes, or the bits of the numbers to predict ([`Self::has_targets`]). Empty if the data has
    /// none, and for a text, whose labels are its tokens.
    pub fn labels(&self) -> &[u32] {
        self.labels.as_deref().unwrap_or(&[])
    }

    /// Replaces the content of `inputs` (`[indices.len(), input_len]` row-major) and `labels` (`[indices.len()]`, as
    /// in [`Self::labels`]). For a text it fills `tokens`, not `inputs`, and `labels` has one per token.
    /// The buffers keep their memory from batch to batch. Fails if the values' file cannot be read.
    ///
    /// # Panics
    /// If an index is not below [`Self::len`]; a [`crate::Sampler`] of the same length returns none.
    pub fn fill(
        &self,
        indices: &[u32],
        inputs: &mut Vec<f32>,
        tokens: &mut Vec<u32>,
        labels: &mut Vec<u32>,
    ) -> Result<(), DataError> {
        // The content of `inputs` is overwritten, so only its length matters.
        let values = if self.vocab().is_none() { indices.len() * self.input_len } else { 0 };
        inputs.resize(values, 0.0);
        tokens.clear();
        labels.clear();
        let (mut room, mut rows) = (Vec::new(), inputs.chunks_exact_mut(self.input_len));
        for &i in indices {
            let i = i as usize;
            let range = i * self.input_len..(i + 1) * self.input_len;
            // A text has no rows, and uses none.
            let mut row = || rows.next().unwrap_or_default();
            match &self.samples {
                Samples::Bytes { values, divisor } => put_quotients(&values[range], *divisor, row()),
                Samples::Floats(values) => row().copy_from_slice(&values[range]),
                Samples::Tokens { tokens: all, .. } => {
                    tokens.extend_from_slice(&all[range.clone()]);
                    labels.extend_from_slice(&all[range.start + 1..range.end + 1]);
                }
                Samples::File(values) => match values.of() {
                    ValueFormat::Bytes { divisor } => {
                        put_quotients(values.bytes(range, &mut room)?, divisor, row())
                    }
                    ValueFormat::Floats => get_f32_le(values.bytes(range, &mut room)?, row()),
                    ValueFormat::Tokens { .. } => {
                        let bytes = values.bytes(range.start..range.end + 1, &mut room)?;
                        tokens.extend(words(&bytes[..bytes.len() - 4]));
                        labels.extend(words(&bytes[4..]));
                    }
                },
            }
            if let Some(all) = &self.labels {
                labels.push(all[i]);
            }
        }
        Ok(())
    }

    /// Splits into the samples for which `held_out(index)` is false, and those for which it is true, in order.
    pub(crate) fn split(&self, held_out: impl Fn(usize) -> bool) -> Split {
        let part = |test: bool| {
            let chosen: Vec<usize> = (0..self.len).filter(|&i| held_out(i) == test).collect();
            let rows = |i: usize| i * self.input_len..(i + 1) * self.input_len;
            let samples = match &self.samples {
                Samples::Bytes { values, divisor } => Samples::Bytes {
                    values: chosen.iter().flat_map(|&i| &values[rows(i)]).copied().collect(),
                    divisor: *divisor,
                },
                Samples::Floats(values) => {
                    Samples::Floats(chosen.iter().flat_map(|&i| &values[rows(i)]).copied().collect())
                }
                // Unreachable: a text is split before it becomes samples, because neighbours share tokens, and a
                // file has parts.
                Samples::Tokens { .. } | Samples::File(_) => self.samples.clone(),
            };
            let labels = self.labels.as_ref().map(|all| chosen.iter().map(|&i| all[i]).collect());
            Self { samples, labels, shape: self.shape.clone(), len: chosen.len(), ..*self }
        };
        Split { train: part(false), test: part(true) }
    }
}

#[cfg(test)]
#[path = "dataset_tests.rs"]
mod tests;
