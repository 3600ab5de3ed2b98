//! What one slice computes together with the others.

use super::{Slice, SliceRanks};
use crate::net::NetResult;
use paraft_compute::{Device, DeviceError, device::Sums};
use std::{ops::Range, sync::Arc};

/// A slice, and the ranks with the other slices.
#[derive(Clone, Debug)]
pub(crate) struct SliceMember {
    pub slice: Slice,
    pub ranks: Arc<dyn SliceRanks>,
}

impl SliceMember {
    /// Replaces each value by its sum over the slices.
    pub fn sum<D: Device>(&self, d: &mut D, values: &mut D::Values) -> NetResult {
        let sum = self.sum_of(&d.read(values)?)?;
        d.load_values(&sum, values)
    }

    /// Likewise, for values on the host.
    pub fn sum_of(&self, own: &[f32]) -> NetResult<Vec<f32>> {
        let mut all = self.gather(own)?.into_iter();
        let mut sum = all.next().unwrap_or_default();
        for part in all {
            sum.iter_mut().zip(&part).for_each(|(s, v)| *s += v);
        }
        Ok(sum)
    }

    /// Assembles rows of which each slice has a part, on all slices.
    pub fn columns(&self, own: &[f32], cols: usize) -> NetResult<Vec<f32>> {
        let part = self.slice.part(cols);
        let rows = own.len() / part.len().max(1);
        let mut all = vec![0.0; rows * cols];
        for (row, own) in all.chunks_exact_mut(cols.max(1)).zip(own.chunks_exact(part.len().max(1))) {
            row[part.clone()].copy_from_slice(own);
        }
        self.sum_of(&all)
    }

    /// This slice's part of rows that [`Self::columns`] has assembled.
    pub fn own_columns(&self, all: &[f32], cols: usize) -> Vec<f32> {
        let part = self.slice.part(cols);
        all.chunks_exact(cols.max(1)).flat_map(|row| &row[part.clone()]).copied().collect()
    }

    /// The values of all slices, which have equally many, in the slices' order.
    fn gather(&self, own: &[f32]) -> NetResult<Vec<Vec<f32>>> {
        let all = self.ranks.gather(own)?;
        if all.len() != self.slice.of || all.iter().any(|part| part.len() != own.len()) {
            let lens: Vec<usize> = all.iter().map(Vec::len).collect();
            return Err(DeviceError::Group(format!(
                "slices with {lens:?} values, where each has {}",
                own.len()
            )));
        }
        Ok(all)
    }

    /// Softmax and cross-entropy over the classes of all slices. This slice has `classes` of them: `logits` is
    /// `[rows, classes]`, and becomes the gradient of the mean loss.
    pub fn cross_entropy(
        &self,
        logits: &mut [f32],
        classes: Range<usize>,
        labels: &[u32],
    ) -> NetResult<Sums> {
        let cols = classes.len();
        let of = |label: u32| (label as usize).checked_sub(classes.start).filter(|at| *at < cols);
        let rows = || logits.chunks_exact(cols.max(1));
        // For each row the largest value, its index (exact: fewer than 2^24 classes), and the label's logit.
        let mut own = Vec::with_capacity(3 * labels.len());
        for (row, &label) in rows().zip(labels) {
            let mut best = 0;
            for (i, v) in row.iter().enumerate() {
                if *v > row[best] {
                    best = i;
                }
            }
            let of_label = of(label).map_or(0.0, |at| row[at]);
            own.extend([row[best], (classes.start + best) as f32, of_label]);
        }
        let mut most = vec![(f32::NEG_INFINITY, f32::NAN, 0.0f32); labels.len()];
        for part in self.gather(&own)? {
            for (most, of_slice) in most.iter_mut().zip(part.chunks_exact(3)) {
                if of_slice[0] > most.0 {
                    (most.0, most.1) = (of_slice[0], of_slice[1]);
                }
                most.2 += of_slice[2];
            }
        }
        let mut sums = Vec::with_capacity(labels.len());
        for (row, (largest, ..)) in logits.chunks_exact_mut(cols.max(1)).zip(&most) {
            row.iter_mut().for_each(|v| *v = (*v - largest).exp());
            sums.push(row.iter().map(|v| f64::from(*v)).sum::<f64>() as f32);
        }
        let (sums, mean) = (self.sum_of(&sums)?, 1.0 / labels.len().max(1) as f32);
        let mut result = Sums::default();
        for (i, row) in logits.chunks_exact_mut(cols.max(1)).enumerate() {
            let (largest, best, of_label) = most[i];
            result.loss += f64::from(sums[i]).ln() - f64::from(of_label - largest);
            result.correct += u64::from(best == labels[i] as f32);
            let scale = mean / sums[i];
            row.iter_mut().for_each(|v| *v *= scale);
            if let Some(at) = of(labels[i]) {
                row[at] -= mean;
            }
        }
        Ok(result)
    }
}
