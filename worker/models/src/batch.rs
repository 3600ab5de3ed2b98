//! A model's inputs and outputs, and their checks.

use paraft_compute::DeviceError;
use std::ops::AddAssign;

/// One minibatch, or a part of the held-out set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// `[n, d]` row-major, `d` values per sample; empty if samples are tokens.
    pub inputs: Vec<f32>,
    /// `[n, t]` row-major, `t` tokens per sample; empty if samples are values.
    pub tokens: Vec<u32>,
    /// `[n]` class labels, or `[n, t]` next tokens; empty if the data has none.
    pub labels: Vec<u32>,
    /// `[n]` numbers to predict; empty if the data has none.
    pub targets: Vec<f32>,
    /// Number of samples.
    pub n: usize,
}

impl Batch {
    /// The samples `range`.
    ///
    /// # Panics
    /// If the batch has fewer samples.
    pub fn part(&self, range: std::ops::Range<usize>) -> Self {
        fn rows<T: Clone>(of: &[T], n: usize, range: &std::ops::Range<usize>) -> Vec<T> {
            let row = of.len() / n.max(1);
            of[range.start * row..range.end * row].to_vec()
        }
        Self {
            inputs: rows(&self.inputs, self.n, &range),
            tokens: rows(&self.tokens, self.n, &range),
            labels: rows(&self.labels, self.n, &range),
            targets: rows(&self.targets, self.n, &range),
            n: range.len(),
        }
    }

    /// Parts of at most this many samples each.
    pub(crate) fn parts(&self, most: usize) -> impl Iterator<Item = Self> {
        (0..self.n).step_by(most).map(move |at| self.part(at..self.n.min(at + most)))
    }
}

/// Sums over a part of the held-out set. The sums of parts add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// Sum of the loss over the samples (of a language model, over the tokens); divide by `count` for the mean.
    pub loss_sum: f64,
    /// Correctly classified samples (for a language model, tokens); 0 for models that do not classify.
    pub correct: u64,
    /// Number of samples, or tokens.
    pub count: u64,
}

impl AddAssign for Evaluation {
    fn add_assign(&mut self, part: Self) {
        self.loss_sum += part.loss_sum;
        self.correct += part.correct;
        self.count += part.count;
    }
}

/// An error of a model or its data.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct ModelError {
    text: String,
    group: bool,
}

/// The maximum number of samples that an evaluation computes at once. It bounds the workspace.
pub(crate) const EVALUATION_CHUNK: usize = 256;

impl ModelError {
    /// An error with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), group: false }
    }

    /// Whether the group of ranks broke: the same step may succeed in another group, or alone.
    pub fn is_group(&self) -> bool {
        self.group
    }
}

impl From<DeviceError> for ModelError {
    fn from(e: DeviceError) -> Self {
        Self { group: matches!(e, DeviceError::Group(_)), text: e.to_string() }
    }
}

/// The kind of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// This many values, with one label if the model has classes.
    Values(usize),
    /// This many tokens below `vocab`, each labelled with its successor.
    Tokens {
        /// Tokens per sample.
        time: usize,
        /// All tokens are below this number.
        vocab: usize,
    },
}

/// A model's input: checks for steps and evaluations.
#[derive(Clone, Copy, Debug)]
pub struct InputSpec {
    /// Length of the flat vector.
    pub len: usize,
    /// The kind of a sample.
    pub sample: Sample,
    /// Labels must be below this; `None` for models without classes.
    pub classes: Option<usize>,
    /// Whether each sample needs a number to predict.
    pub targets: bool,
}

impl InputSpec {
    /// Checks the input of a training step.
    pub fn check_step(&self, params: &[f32], grads: &[f32], batch: &Batch) -> Result<(), ModelError> {
        if grads.len() != self.len {
            return Err(ModelError::new(format!(
                "the gradient buffer holds {} values, the model {}",
                grads.len(),
                self.len
            )));
        }
        if params.len() != self.len {
            return self.check(params, batch);
        }
        self.check_step_batch(batch)
    }

    /// Checks the batch of a training step.
    pub fn check_step_batch(&self, batch: &Batch) -> Result<(), ModelError> {
        if batch.n == 0 {
            return Err(ModelError::new("a training batch needs at least one sample"));
        }
        self.check_batch(batch)
    }

    /// Checks the input of an evaluation.
    pub fn check(&self, params: &[f32], batch: &Batch) -> Result<(), ModelError> {
        if params.len() != self.len {
            return Err(ModelError::new(format!(
                "the parameter buffer holds {} values, the model {}",
                params.len(),
                self.len
            )));
        }
        self.check_batch(batch)
    }

    /// Checks that a batch fits the model.
    pub fn check_batch(&self, batch: &Batch) -> Result<(), ModelError> {
        let n = batch.n;
        let labels = match self.sample {
            Sample::Values(len) => {
                expect(n, len, "values", batch.inputs.len())?;
                n
            }
            Sample::Tokens { time, vocab } => {
                expect(n, time, "tokens", batch.tokens.len())?;
                below("token", &batch.tokens, vocab, "tokens")?;
                n * time
            }
        };
        if self.targets && batch.targets.len() != n {
            return Err(ModelError::new(format!(
                "the model needs a number to predict for each sample: {n} samples, {} numbers",
                batch.targets.len()
            )));
        }
        let Some(classes) = self.classes else { return Ok(()) };
        if batch.labels.len() != labels {
            return Err(ModelError::new(format!(
                "the model needs one label a sample: {labels} samples, {} labels",
                batch.labels.len()
            )));
        }
        below("label", &batch.labels, classes, "classes")
    }
}

fn expect(n: usize, each: usize, what: &str, there: usize) -> Result<(), ModelError> {
    if n.checked_mul(each) == Some(there) {
        return Ok(());
    }
    Err(ModelError::new(format!("{n} samples of {each} {what} expected, the batch holds {there} {what}")))
}

fn below(what: &str, ids: &[u32], limit: usize, of: &str) -> Result<(), ModelError> {
    match ids.iter().position(|&l| l as usize >= limit) {
        Some(i) => Err(ModelError::new(format!(
            "{what} {} of sample {i} is out of range, the model has {limit} {of}",
            ids[i]
        ))),
        None => Ok(()),
    }
}
