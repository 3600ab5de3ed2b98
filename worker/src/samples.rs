//! Connects data sets, which know no models, with models, which know no files.

use crate::WorkerError;
use paraft_data::{DataError, Dataset};
use paraft_models::{Batch, DataShape, Evaluation, Model, Sample};

/// The shape of a data set, as a model needs it.
pub fn shape_of(data: &Dataset) -> DataShape {
    let sample = match data.vocab() {
        Some(vocab) => Sample::Tokens { time: data.input_len(), vocab },
        None => Sample::Values(data.input_len()),
    };
    DataShape { sample, classes: data.classes() }
}

/// Replaces the content of `batch` with these samples.
///
/// # Errors
/// The data is in a file that can no longer be read.
///
/// # Panics
/// If an index is not below the data set's length.
pub fn fill(data: &Dataset, indices: &[u32], batch: &mut Batch) -> Result<(), DataError> {
    data.fill(indices, &mut batch.inputs, &mut batch.tokens, &mut batch.labels)?;
    batch.targets.clear();
    if data.has_targets() {
        batch.targets.extend(batch.labels.drain(..).map(f32::from_bits));
    }
    batch.n = indices.len();
    Ok(())
}

/// Loss and correct predictions over these samples, with the model's weights in flat order.
///
/// # Errors
/// The data can no longer be read, or the model does not fit it.
pub fn evaluate(
    model: &mut dyn Model,
    weights: &[f32],
    data: &Dataset,
    samples: impl Iterator<Item = usize>,
) -> Result<Evaluation, WorkerError> {
    /// At once.
    const CHUNK: usize = 256;
    let samples: Vec<u32> = samples.map(|i| i as u32).collect();
    let (mut sum, mut batch) = (Evaluation::default(), Batch::default());
    for chunk in samples.chunks(CHUNK) {
        fill(data, chunk, &mut batch)?;
        sum += model.evaluate(weights, &batch)?;
    }
    Ok(sum)
}
