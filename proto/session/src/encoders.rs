//! How this worker's pushes are encoded: the state of each bucket from one push to the next, which is what an
//! [`Encoder`] holds back.

use paraft_common::{
    BucketId, Encoding, Layout, Step, WorkerId,
    config::ServerJob,
    encoding::{Encoder, stretches},
};

/// The encoders of all buckets.
#[derive(Debug)]
pub struct Encoders {
    /// `None`: the bucket's encoding has no state.
    of: Vec<Option<Encoder>>,
}

impl Encoders {
    /// For the buckets of a layout with the job's lengths; matrices are those of its tensors.
    pub fn new(job: &ServerJob, layout: &Layout, worker: WorkerId) -> Self {
        let buckets = (0u64..).zip(layout.buckets());
        let of = buckets.map(|(i, spec)| {
            let encoding = job.encoding(spec.kind);
            if !encoding.feeds_back() {
                return None;
            }
            let matrices = match encoding {
                Encoding::PowerSgd(rank) => stretches(layout, *spec, rank),
                _ => Vec::new(),
            };
            Some(Encoder::new(encoding, spec.len, matrices, u64::from(worker.0) << 32 | i))
        });
        Self { of: of.collect() }
    }

    /// The encoder of a bucket.
    pub fn of(&self, bucket: BucketId) -> Option<&Encoder> {
        self.of.get(bucket.0 as usize)?.as_ref()
    }

    /// Encodes a push of a bucket; without an encoder, by `encoding`.
    pub fn encode(
        &mut self,
        bucket: BucketId,
        step: Step,
        gradient: &[f32],
        encoding: Encoding,
        out: &mut Vec<u8>,
    ) {
        match self.of.get_mut(bucket.0 as usize) {
            Some(Some(encoder)) => encoder.encode(step, gradient, out),
            _ => encoding.encode(gradient, out),
        }
    }

    /// Resets them, as for a new worker.
    pub fn forget(&mut self) {
        self.of.iter_mut().flatten().for_each(Encoder::forget);
    }
}
