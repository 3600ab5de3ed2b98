//! What goes into a model and what comes out, and the checks on both.

/// One minibatch, or a part of the held-out set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// `[n, d]` row-major, `d` values a sample.
    pub inputs: Vec<f32>,
    /// `[n]` class labels; empty where the data has none.
    pub labels: Vec<u32>,
    /// Number of samples.
    pub n: usize,
}

/// Sums over a part of the held-out set; parts add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// Sum of the loss over the samples (divide by `count` for the mean).
    pub loss_sum: f64,
    /// Samples classified right; 0 for models that do not classify.
    pub correct: u64,
    /// Samples seen.
    pub count: u64,
}

/// What a model or its data did wrong.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ModelError(pub String);

/// Most samples that an evaluation takes at once: it bounds the workspace.
pub(crate) const EVALUATION_CHUNK: usize = 256;

impl ModelError {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// What a model takes: the checks of a step and of an evaluation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Takes {
    /// Values of the flat vector.
    pub len: usize,
    /// Values of one sample.
    pub inputs: usize,
    /// Labels must be below this; `None` for models without labels.
    pub classes: Option<usize>,
}

impl Takes {
    pub fn check_step(&self, params: &[f32], grads: &[f32], batch: &Batch) -> Result<(), ModelError> {
        if grads.len() != self.len {
            return Err(ModelError(format!(
                "the gradient buffer holds {} values, the model {}",
                grads.len(),
                self.len
            )));
        }
        if batch.n == 0 {
            return Err(ModelError::new("a training batch needs at least one sample"));
        }
        self.check(params, batch)
    }

    pub fn check(&self, params: &[f32], batch: &Batch) -> Result<(), ModelError> {
        if params.len() != self.len {
            return Err(ModelError(format!(
                "the parameter buffer holds {} values, the model {}",
                params.len(),
                self.len
            )));
        }
        if batch.n.checked_mul(self.inputs) != Some(batch.inputs.len()) {
            return Err(ModelError(format!(
                "{} samples of {} values expected, the batch holds {} values",
                batch.n,
                self.inputs,
                batch.inputs.len()
            )));
        }
        let Some(classes) = self.classes else { return Ok(()) };
        if batch.labels.len() != batch.n {
            return Err(ModelError(format!(
                "the model needs one label a sample: {} samples, {} labels",
                batch.n,
                batch.labels.len()
            )));
        }
        match batch.labels.iter().position(|&l| l as usize >= classes) {
            Some(i) => Err(ModelError(format!(
                "label {} of sample {i} is out of range, the model has {classes} classes",
                batch.labels[i]
            ))),
            None => Ok(()),
        }
    }
}
