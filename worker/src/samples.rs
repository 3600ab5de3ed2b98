//! Connects data sets, which know no models, with models, which know no files.

use paraft_data::{DataError, Dataset};
use paraft_models::{Batch, DataShape, Sample};

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
