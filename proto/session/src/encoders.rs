//! How this worker's pushes are written: what it keeps of each bucket from one push to the next. That is the momentum, where
//! the job's algorithm leaves it to the workers, and what an [`Encoder`] holds back.

use paraft_common::{
    BucketId, Encoding, Layout, Step, TensorKind, WorkerId,
    algorithm::WorkerMomentum,
    config::ServerJob,
    encoding::{Encoder, stretches},
};

/// Of all buckets.
#[derive(Debug)]
pub struct Encoders {
    /// `None`: the bucket's values are written by its encoding alone.
    of: Vec<Option<Encoder>>,
    momentum: Option<WorkerMomentum>,
    /// Of each bucket, where this worker has momentum; empty before the first push.
    momenta: Vec<Vec<f32>>,
    /// A gradient that the momentum has changed.
    moved: Vec<f32>,
}

impl Encoders {
    /// For the buckets of a layout that has the job's lengths; matrices are those of its tensors. `feedback`: what is not sent
    /// is kept for the next push.
    pub fn new(job: &ServerJob, layout: &Layout, worker: WorkerId, feedback: bool) -> Self {
        let buckets = (0u64..).zip(layout.buckets());
        let of = buckets.map(|(i, spec)| {
            let encoding = job.encoding(spec.kind);
            // Running statistics are sent as they are.
            let feedback = feedback && spec.kind == TensorKind::Param && encoding != Encoding::F32;
            if !feedback && !encoding.feeds_back() {
                return None;
            }
            let matrices = match encoding {
                Encoding::PowerSgd(rank) => stretches(layout, *spec, rank),
                _ => Vec::new(),
            };
            Some(Encoder::new(encoding, spec.len, matrices, feedback, u64::from(worker.0) << 32 | i))
        });
        let of: Vec<_> = of.collect();
        let momentum = job.algorithm.algorithm().worker_momentum(&job.optimizer);
        let momenta = vec![Vec::new(); of.len()];
        Self { of, momentum, momenta, moved: Vec::new() }
    }

    /// Whether something of each push of the bucket is kept here.
    pub fn keeps(&self, bucket: BucketId, kind: TensorKind) -> bool {
        self.of(bucket).is_some() || self.momentum.is_some() && kind == TensorKind::Param
    }

    /// That of a bucket.
    pub fn of(&self, bucket: BucketId) -> Option<&Encoder> {
        self.of.get(bucket.0 as usize)?.as_ref()
    }

    /// Writes a push of a bucket of this kind; where it has no encoder, by `encoding`.
    pub fn encode(
        &mut self,
        (bucket, kind): (BucketId, TensorKind),
        step: Step,
        gradient: &[f32],
        encoding: Encoding,
        out: &mut Vec<u8>,
    ) {
        let i = bucket.0 as usize;
        let mut pushed = gradient;
        if let (Some(rule), Some(momentum)) = (self.momentum, self.momenta.get_mut(i))
            && kind == TensorKind::Param
        {
            momentum.resize(gradient.len(), 0.0);
            self.moved.clear();
            self.moved.extend_from_slice(gradient);
            rule.apply(momentum, &mut self.moved);
            pushed = &self.moved;
        }
        match self.of.get_mut(i) {
            Some(Some(encoder)) => encoder.encode(step, pushed, out),
            _ => encoding.encode(pushed, out),
        }
    }

    /// As those of a worker that begins anew.
    pub fn forget(&mut self) {
        self.of.iter_mut().flatten().for_each(Encoder::forget);
        self.momenta.iter_mut().for_each(Vec::clear);
    }
}
