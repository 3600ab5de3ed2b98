//! Between data sets, which know no models, and models, which know no files.

use paraft_data::Dataset;
use paraft_models::{Batch, DataShape, Sample};

/// What a model must know of a data set.
pub fn shape_of(data: &Dataset) -> DataShape {
    let sample = match data.vocab() {
        Some(vocab) => Sample::Tokens { time: data.input_len(), vocab },
        None => Sample::Values(data.input_len()),
    };
    DataShape { sample, classes: data.classes() }
}

/// Replaces what is in `batch` by these samples.
///
/// # Panics
/// When an index is not below the data set's length, and when the data is in a file that can't be read any more: nothing can
/// be trained then. (A [`paraft_data::Prefetcher`] makes an error of it.)
pub fn fill(data: &Dataset, indices: &[u32], batch: &mut Batch) {
    let filled = data.fill(indices, &mut batch.inputs, &mut batch.tokens, &mut batch.labels);
    filled.unwrap_or_else(|e| panic!("{e}"));
    batch.n = indices.len();
}
