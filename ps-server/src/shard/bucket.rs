//! One bucket: weights, optimizer slots, version. The unit of locking, of publishing and of copy-on-write.

use bytes::Bytes;
use paraft_common::{
    BucketId, BucketSpec, TensorKind, Version,
    codec::get_f32_le,
    config::ServerJob,
    optim::{Gradient, Hyper, apply_buffer},
};
use parking_lot::RwLock;
use std::sync::Arc;

/// What is replicated of a bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketData {
    /// `spec.len` values.
    pub weights: Vec<f32>,
    /// The optimizer's state vectors, each as long as `weights`.
    pub slots: Vec<Vec<f32>>,
    /// Updates applied.
    pub version: Version,
    /// The schedule's clock: steps of the whole fleet. Grows by contributions over members with each update,
    /// so by one per step of the fleet in every mode.
    pub clock: f64,
    /// Whether the initial weights are in.
    pub initialised: bool,
}

/// A bucket's place and data. Readers hold the lock only to clone the `Arc` (a pull reads bucket by bucket while
/// others change: that is the Hogwild read).
#[derive(Debug)]
pub struct Bucket {
    /// Its id in the job.
    pub id: BucketId,
    /// Its range and kind.
    pub spec: BucketSpec,
    data: RwLock<Arc<BucketData>>,
}

impl Bucket {
    /// Zeroed weights and slots.
    pub fn new(id: BucketId, spec: BucketSpec, job: &ServerJob) -> Self {
        let slots = match spec.kind {
            TensorKind::Param => job.optimizer.new_slots(spec.len),
            TensorKind::Buffer => Vec::new(),
        };
        let weights = vec![0.0; spec.len];
        let data = BucketData { weights, slots, version: Version(0), clock: 0.0, initialised: false };
        Self::with_data(id, spec, Arc::new(data))
    }

    /// A bucket from a snapshot.
    pub fn with_data(id: BucketId, spec: BucketSpec, data: Arc<BucketData>) -> Self {
        Self { id, spec, data: RwLock::new(data) }
    }

    /// The data as it is now; later updates do not change it (copy on write).
    pub fn image(&self) -> Arc<BucketData> {
        self.data.read().clone()
    }

    /// Updates applied so far.
    pub fn version(&self) -> Version {
        self.data.read().version
    }

    /// Whether the initial weights are in.
    pub fn initialised(&self) -> bool {
        self.data.read().initialised
    }

    /// The weights as little-endian bytes, with their version. On a little-endian host nothing is copied: the
    /// bytes share the weights, and an update that comes before they are sent copies them first (as it does
    /// for a snapshot).
    pub fn encode(&self) -> (Version, Bytes) {
        let image = self.image();
        (image.version, shared(image, 0))
    }

    /// Takes the initial weights, unless they are in already.
    pub(super) fn init(&self, payload: &[u8]) {
        let mut data = self.data.write();
        if !data.initialised {
            let data = Arc::make_mut(&mut data);
            get_f32_le(payload, &mut data.weights);
            data.initialised = true;
        }
    }

    /// Applies one update; returns the version that contains it.
    pub(super) fn update(
        &self,
        job: &ServerJob,
        payload: &[u8],
        factor: f32,
        contributions: usize,
        members: usize,
    ) -> Version {
        let mut guard = self.data.write();
        let data = Arc::make_mut(&mut guard);
        let gradient = Gradient { le: payload, scale: factor };
        match self.spec.kind {
            TensorKind::Buffer => apply_buffer(&mut data.weights, gradient),
            TensorKind::Param => {
                let rate = job.optimizer.lr() * job.schedule.factor(data.clock, contributions);
                let hyper = Hyper { lr: rate as f32, t: data.version.0 + 1, clip_value: job.clip.value };
                job.optimizer.apply(&hyper, &mut data.weights, &mut data.slots, gradient);
            }
        }
        data.clock += contributions as f64 / members.max(1) as f64;
        data.version.0 += 1;
        data.version
    }
}

impl BucketData {
    /// Weights, then slots, as little-endian bytes that share this data's memory (on a little-endian host).
    pub fn shared(self: &Arc<Self>) -> impl Iterator<Item = Bytes> + '_ {
        (0..=self.slots.len()).map(|i| shared(self.clone(), i))
    }

    /// Vector 0 is the weights, vector i slot i - 1.
    fn vector(&self, i: usize) -> &[f32] {
        match i.checked_sub(1) {
            None => &self.weights,
            Some(slot) => &self.slots[slot],
        }
    }
}

#[cfg(target_endian = "little")]
fn shared(data: Arc<BucketData>, vector: usize) -> Bytes {
    /// A vector of a bucket, readable as the bytes that travel.
    struct VectorBytes(Arc<BucketData>, usize);

    impl AsRef<[u8]> for VectorBytes {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(self.0.vector(self.1))
        }
    }

    Bytes::from_owner(VectorBytes(data, vector))
}

#[cfg(target_endian = "big")]
fn shared(data: Arc<BucketData>, vector: usize) -> Bytes {
    let mut le = Vec::new();
    paraft_common::codec::put_f32_le(data.vector(vector), &mut le);
    le.into()
}
