//! One bucket: weights, optimizer slots, version. The unit of locking, of publishing and of copy-on-write.

use super::{command::InitPart, replaced::Replaced};
use bytes::Bytes;
use paraft_common::{
    BucketId, BucketSpec, Payload, TensorKind, Version,
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

impl BucketData {
    /// The vectors of a bucket: its weights (0) and its optimizer slots (from 1).
    pub fn vectors(&self) -> usize {
        1 + self.slots.len()
    }

    /// Vector `i`, or `None` where there are fewer.
    pub fn vector(&self, i: usize) -> Option<&[f32]> {
        match i.checked_sub(1) {
            None => Some(&self.weights),
            Some(slot) => self.slots.get(slot).map(Vec::as_slice),
        }
    }

    /// Bytes of all vectors.
    pub fn bytes(&self) -> usize {
        self.vectors() * self.weights.len() * size_of::<f32>()
    }

    /// Applies one update; returns the version that contains it. Every update of every bucket goes through here,
    /// whether a replica applies it from the log or a leader to its working copy.
    pub(super) fn update(
        &mut self,
        kind: TensorKind,
        job: &ServerJob,
        gradient: Gradient<'_>,
        contributions: usize,
        members: usize,
    ) -> Version {
        match kind {
            TensorKind::Buffer => apply_buffer(&mut self.weights, gradient),
            TensorKind::Param => {
                let rate = job.optimizer.lr() * job.schedule.factor(self.clock, contributions);
                let hyper = Hyper { lr: rate as f32, t: self.version.0 + 1, clip_value: job.clip.value };
                job.optimizer.apply(&hyper, &mut self.weights, &mut self.slots, gradient);
            }
        }
        self.clock += contributions as f64 / members.max(1) as f64;
        self.version.0 += 1;
        self.version
    }
}

/// A vector of a bucket as the little-endian bytes that travel: they share the bucket, and an update that comes
/// before they are sent copies it first (as it does for a snapshot).
pub fn vector_bytes(data: &Arc<BucketData>, vector: usize) -> Bytes {
    struct VectorOf(Arc<BucketData>, usize);

    impl AsRef<[f32]> for VectorOf {
        fn as_ref(&self) -> &[f32] {
            self.0.vector(self.1).unwrap_or_default()
        }
    }

    value_bytes(VectorOf(data.clone(), vector))
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

    /// Takes a part of the initial state, unless the weights are in already. The error says why it fits no
    /// bucket of this job.
    pub(super) fn init(&self, part: InitPart, payload: &Payload) -> Result<(), String> {
        let mut data = self.data.write();
        if data.initialised {
            return Ok(());
        }
        let data = Arc::make_mut(&mut data);
        match part {
            InitPart::Weights { version, clock } => {
                payload.reader().values(&mut data.weights).map_err(|e| e.to_string())?;
                (data.version, data.clock, data.initialised) = (version, clock, true);
            }
            InitPart::Slot(i) => {
                let slots = data.slots.len();
                let slot = data.slots.get_mut(i as usize);
                let slot = slot.ok_or_else(|| format!("{} has {slots} slots, not slot {i}", self.id))?;
                payload.reader().values(slot).map_err(|e| e.to_string())?;
            }
        }
        Ok(())
    }

    /// Applies one update; returns the version that contains it. Where somebody still reads the data as it was, it is
    /// copied first and stays among `replaced`.
    pub(super) fn update(
        &self,
        job: &ServerJob,
        gradient: Gradient<'_>,
        contributions: usize,
        members: usize,
        replaced: &Replaced,
    ) -> Version {
        let mut data = self.data.write();
        if Arc::strong_count(&data) > 1 {
            replaced.add(&data);
        }
        Arc::make_mut(&mut data).update(self.spec.kind, job, gradient, contributions, members)
    }

    /// Takes an image cut's data in the place of what is here.
    pub(super) fn install(&self, data: Arc<BucketData>) {
        *self.data.write() = data;
    }
}

/// The values as the little-endian bytes that travel. On a little-endian host nothing is copied: the bytes share
/// what holds the values.
#[cfg(target_endian = "little")]
pub fn value_bytes<T: AsRef<[f32]> + Send + 'static>(values: T) -> Bytes {
    struct ValueBytes<T>(T);

    impl<T: AsRef<[f32]>> AsRef<[u8]> for ValueBytes<T> {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(self.0.as_ref())
        }
    }

    Bytes::from_owner(ValueBytes(values))
}

/// The values as the little-endian bytes that travel.
#[cfg(target_endian = "big")]
pub fn value_bytes<T: AsRef<[f32]> + Send + 'static>(values: T) -> Bytes {
    let mut le = Vec::new();
    paraft_common::codec::put_f32_le(values.as_ref(), &mut le);
    le.into()
}
