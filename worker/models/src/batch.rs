//! What goes into a model and what comes out, and the checks on both.

use paraft_compute::DeviceError;

/// One minibatch, or a part of the held-out set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// `[n, d]` row-major, `d` values a sample; empty where samples are tokens.
    pub inputs: Vec<f32>,
    /// `[n, t]` row-major, `t` tokens a sample; empty where samples are values.
    pub tokens: Vec<u32>,
    /// `[n]` class labels, or `[n, t]` next tokens; empty where the data has none.
    pub labels: Vec<u32>,
    /// Number of samples.
    pub n: usize,
}

impl Batch {
    /// The samples `range` of it.
    ///
    /// # Panics
    /// When it has not so many.
    pub fn part(&self, range: std::ops::Range<usize>) -> Self {
        fn rows<T: Clone>(of: &[T], n: usize, range: &std::ops::Range<usize>) -> Vec<T> {
            let row = of.len() / n.max(1);
            of[range.start * row..range.end * row].to_vec()
        }
        Self {
            inputs: rows(&self.inputs, self.n, &range),
            tokens: rows(&self.tokens, self.n, &range),
            labels: rows(&self.labels, self.n, &range),
            n: range.len(),
        }
    }

    /// Parts of at most so many samples each.
    pub(crate) fn parts(&self, most: usize) -> impl Iterator<Item = Self> {
        (0..self.n).step_by(most).map(move |at| self.part(at..self.n.min(at + most)))
    }
}

/// Sums over a part of the held-out set; parts add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// Sum of the loss over the samples (of a language model, over the tokens); divide by `count` for the mean.
    pub loss_sum: f64,
    /// Samples (of a language model, tokens) classified right; 0 for models that do not classify.
    pub correct: u64,
    /// Samples, or tokens, seen.
    pub count: u64,
}

/// What a model or its data did wrong.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct ModelError {
    text: String,
    group: bool,
}

/// Most samples that an evaluation takes at once: it bounds the workspace.
pub(crate) const EVALUATION_CHUNK: usize = 256;

impl ModelError {
    /// With this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), group: false }
    }

    /// Whether it is the group of ranks that broke: the same step may succeed in another group, or alone.
    pub fn is_group(&self) -> bool {
        self.group
    }
}

impl From<DeviceError> for ModelError {
    fn from(e: DeviceError) -> Self {
        Self { group: matches!(e, DeviceError::Group(_)), text: e.to_string() }
    }
}

/// What a sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// So many values, with one label where the model has classes.
    Values(usize),
    /// So many tokens below `vocab`, each with the one that follows it as its label.
    Tokens {
        /// Tokens of a sample.
        time: usize,
        /// Tokens are below this.
        vocab: usize,
    },
}

/// What a model takes: the checks of a step and of an evaluation.
#[derive(Clone, Copy, Debug)]
pub struct InputSpec {
    /// Values of the flat vector.
    pub len: usize,
    /// What a sample is.
    pub sample: Sample,
    /// Labels must be below this; `None` for models without labels.
    pub classes: Option<usize>,
}

impl InputSpec {
    /// Whether a training step can be made of this.
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

    /// Whether a training step can be made of a batch.
    pub fn check_step_batch(&self, batch: &Batch) -> Result<(), ModelError> {
        if batch.n == 0 {
            return Err(ModelError::new("a training batch needs at least one sample"));
        }
        self.check_batch(batch)
    }

    /// Whether an evaluation can be made of this.
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

    /// Whether a batch is what the model takes.
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
