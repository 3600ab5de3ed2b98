//! What the servers get when they have no weights yet: fresh weights, or the state of a checkpoint.

use paraft_common::{
    BucketId, BucketSpec, TensorKind,
    codec::{F32_BYTES, put_f32_le},
};
use paraft_proto::Init;

/// The initial state of a whole job, as flat vectors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Initial {
    /// All weights, buffers included.
    pub weights: Vec<f32>,
    /// The optimizer's state vectors, each as long as the parameters; empty for fresh weights, or as many as the
    /// optimizer keeps.
    pub slots: Vec<Vec<f32>>,
    /// For each bucket of the job, the updates that are in it and the schedule's clock; empty for fresh weights.
    pub stamps: Vec<(u64, f64)>,
}

impl Initial {
    /// Weights that nothing was applied to.
    pub fn fresh(weights: Vec<f32>) -> Self {
        Self { weights, ..Self::default() }
    }

    /// The messages that give `buckets` their state: for each its slots, then its weights.
    pub(crate) fn messages<'a>(
        &'a self,
        buckets: &'a [(BucketId, BucketSpec)],
    ) -> impl Iterator<Item = Init> + 'a {
        buckets.iter().flat_map(move |(id, spec)| {
            let range = spec.range();
            let slots = self.slots.iter().filter(|_| spec.kind == TensorKind::Param);
            let slots = (1u32..).zip(slots).map({
                let range = range.clone();
                move |(part, slot)| Init {
                    bucket: id.0,
                    payload: le(&slot[range.clone()]),
                    part,
                    ..Init::default()
                }
            });
            let (version, clock) = self.stamps.get(id.0 as usize).copied().unwrap_or_default();
            let payload = le(&self.weights[range]);
            slots.chain([Init { bucket: id.0, payload, part: 0, version, clock }])
        })
    }
}

fn le(values: &[f32]) -> bytes::Bytes {
    let mut le = Vec::with_capacity(values.len() * F32_BYTES);
    put_f32_le(values, &mut le);
    le.into()
}
