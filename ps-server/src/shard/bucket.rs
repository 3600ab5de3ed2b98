//! One bucket: weights, optimizer slots, version. The unit of locking, of publishing and of copy-on-write.

use super::{
    command::{Contribution, InitPart},
    configured::Configured,
    kept::{FLEET, Kept, OfWorker},
    weights::{Slots, Weights, read_elsewhere},
};
use crate::{raft::Unable, room::Room};
use bytes::Bytes;
use paraft_common::{
    BucketId, BucketSpec, Payload, TensorKind, Version, WorkerId, algorithm,
    codec::value_bytes,
    config::ServerJob,
    need,
    optim::{Gradient, Hyper, apply_buffer},
};
use paraft_lanes::shared::Memory;
use parking_lot::RwLock;
use std::{collections::TryReserveError, sync::Arc};

/// What is replicated of a bucket. A clone shares the vectors: a change of one of the two copies what it changes, and no more.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketData {
    /// `spec.len` values.
    pub weights: Weights,
    /// The state vectors of the optimizer and the algorithm, each as long as `weights`.
    pub slots: Slots,
    /// What the algorithm keeps of each worker.
    pub kept: Kept,
    /// Updates applied.
    pub version: Version,
    /// The schedule's clock: steps of the whole fleet. Grows by contributions over members with each update,
    /// so by one per step of the fleet in every mode.
    pub clock: f64,
    /// Whether the initial weights are in.
    pub initialised: bool,
}

/// An update, as a bucket takes it.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'a> {
    /// The job.
    pub job: &'a ServerJob,
    /// The gradient, or the mean of several.
    pub gradient: Gradient<'a>,
    /// Whose.
    pub contributions: &'a [Contribution],
    /// In the place of the job's own.
    pub rate: Option<f64>,
    /// Members that train.
    pub members: usize,
    /// Those of whom something is kept, and who train no more.
    pub gone: &'a [WorkerId],
}

impl BucketData {
    /// The vectors of a bucket: its weights (0), its state vectors (from 1), and what is kept of workers.
    pub fn vectors(&self) -> usize {
        1 + self.slots.len() + self.kept.values().map(|k| k.vectors().count()).sum::<usize>()
    }

    /// Vector `i`, or `None` where there are fewer.
    pub fn vector(&self, i: usize) -> Option<&[f32]> {
        let Some(slot) = i.checked_sub(1) else { return Some(&self.weights) };
        let kept = || self.kept.values().flat_map(OfWorker::vectors).nth(slot - self.slots.len());
        self.slots.get(slot).map(Vec::as_slice).or_else(|| kept().map(|v| v.as_slice()))
    }

    /// Bytes of all vectors.
    pub fn bytes(&self) -> usize {
        self.vectors() * self.weights.len() * size_of::<f32>()
    }

    /// A bucket that nothing has come for: zeroed weights, and slots as the optimizer begins with them.
    pub(super) fn blank(spec: BucketSpec, job: &ServerJob) -> Self {
        let slots = match spec.kind {
            TensorKind::Param => job.new_slots(spec.len),
            TensorKind::Buffer => Vec::new(),
        };
        let (weights, kept) = (vec![0.0; spec.len].into(), Kept::new());
        Self { weights, slots: slots.into(), kept, version: Version(0), clock: 0.0, initialised: false }
    }

    /// A copy of its own, where there is memory for it.
    fn try_copy(&self) -> Result<Self, TryReserveError> {
        let (weights, slots) = (self.weights.try_copy()?, self.slots.try_copy()?);
        Ok(Self { weights, slots, kept: self.kept.clone(), ..*self })
    }

    /// Bytes of what is kept of workers. Who pulled the same version shares it.
    pub fn kept_bytes(&self) -> u64 {
        let mut vectors: Vec<_> = self.kept.values().flat_map(OfWorker::vectors).map(Arc::as_ptr).collect();
        vectors.sort_unstable();
        vectors.dedup();
        (vectors.len() * self.weights.len() * size_of::<f32>()) as u64
    }

    /// Applies one update; returns the version that contains it. Every update of every bucket goes through here,
    /// whether a replica applies it from the log or a leader to its working copy.
    pub(super) fn update(&mut self, spec: BucketSpec, update: Incoming<'_>) -> Version {
        let Incoming { gradient, contributions, members, .. } = update;
        match spec.kind {
            TensorKind::Buffer => apply_buffer(&mut self.weights, gradient),
            TensorKind::Param => self.train(spec, update),
        }
        self.pass(contributions.len(), members);
        self.version.0 += 1;
        self.version
    }

    /// So many pushes are in, or skipped: the schedule's clock goes on.
    pub(super) fn pass(&mut self, pushes: usize, members: usize) {
        self.clock += pushes as f64 / members.max(1) as f64;
    }

    fn train(&mut self, spec: BucketSpec, update: Incoming<'_>) {
        let Incoming { job, gradient, contributions, rate, gone, .. } = update;
        gone.iter().for_each(|w| self.forget(job, *w));
        let optimizer = job.optimizer_of(spec.group);
        let rate = match rate {
            Some(rate) => rate * job.schedule.scale.factor(contributions.len()),
            None => optimizer.lr() * job.schedule.factor(self.clock, contributions.len()),
        };
        let (keeps, t) = (job.keeps(), self.version.0 + 1);
        // A round of several has no delay, and no worker of its own.
        let (whose, from) = match contributions {
            [one] => (one.worker, one.pulled.min(self.version)),
            _ => (FLEET, self.version),
        };
        let mut kept = if keeps.of_workers() {
            self.kept.remove(&whose).unwrap_or_default()
        } else {
            OfWorker::default()
        };
        let mut own: Vec<Vec<f32>> =
            std::mem::take(&mut kept.slots).into_iter().map(Arc::unwrap_or_clone).collect();
        if keeps.own_slots && own.is_empty() {
            own = job.on_shard().new_slots(self.weights.len());
        }
        kept.updates += 1;
        // What it says it pulled and what it was sent are the same, but where it comes from another leader.
        let pulled = kept.pulled.as_ref().filter(|(v, _)| *v == from && from < self.version);
        let own_t = if keeps.own_slots { kept.updates } else { t };
        let update = algorithm::Update {
            hyper: Hyper { lr: rate as f32, t: own_t, clip_value: job.clip.value },
            base_lr: optimizer.lr() as f32,
            t,
            delay: self.version.0 - from.0,
        };
        let state = algorithm::State {
            weights: &mut self.weights,
            slots: &mut self.slots,
            own: keeps.own_slots.then_some(own.as_mut_slice()),
            pulled: pulled.map(|(_, w)| w.as_slice()),
        };
        job.algorithm.apply(&optimizer, &update, state, gradient);
        job.constrain(spec, &mut self.weights);
        if keeps.of_workers() {
            kept.slots = own.into_iter().map(Arc::new).collect();
            self.kept.insert(whose, kept);
        }
    }

    /// Drops what is kept of a worker that trains no more.
    fn forget(&mut self, job: &ServerJob, worker: WorkerId) {
        let Some(kept) = self.kept.remove(&worker) else { return };
        let own: Vec<&[f32]> = kept.slots.iter().map(|s| s.as_slice()).collect();
        job.algorithm.algorithm().own_changes(&own, false, &mut self.slots);
    }

    /// Notes that a worker gets the weights as they are.
    fn record_pull(&mut self, worker: WorkerId) {
        let version = self.version;
        let same = |k: &OfWorker| k.pulled.clone().filter(|(v, _)| *v == version);
        // Who pulls the same version shares the copy.
        let copy = self.kept.values().find_map(same);
        let copy = copy.unwrap_or_else(|| (version, Arc::new(self.weights.to_vec())));
        self.kept.entry(worker).or_default().pulled = Some(copy);
    }

    /// What a pull gets where that is not the weights as they are.
    pub fn look_ahead(&self, job: &ServerJob, spec: BucketSpec) -> Option<Vec<f32>> {
        let algorithm = job.algorithm.algorithm();
        if spec.kind == TensorKind::Buffer || !algorithm.looks_ahead() {
            return None;
        }
        let optimizer = job.optimizer_of(spec.group);
        let rate = optimizer.lr() * job.schedule.factor(self.clock, 1);
        let mut out = vec![0.0; self.weights.len()];
        algorithm.look_ahead(&optimizer, rate as f32, &self.weights, &self.slots, &mut out);
        job.constrain(spec, &mut out);
        Some(out)
    }
}

/// A vector of a bucket as the little-endian bytes that travel: they share this vector alone, and an update that comes
/// before they are sent copies it first (as it does for a snapshot).
pub fn vector_bytes(data: &BucketData, vector: usize) -> Bytes {
    struct SlotOf(Slots, usize);

    impl AsRef<[f32]> for SlotOf {
        fn as_ref(&self) -> &[f32] {
            &self.0[self.1]
        }
    }

    let Some(slot) = vector.checked_sub(1) else { return value_bytes(data.weights.clone()) };
    if slot < data.slots.len() {
        return value_bytes(SlotOf(data.slots.clone(), slot));
    }
    let kept = data.kept.values().flat_map(OfWorker::vectors).nth(slot - data.slots.len());
    kept.map_or_else(Bytes::new, |kept| value_bytes(Shared(kept.clone())))
}

/// A shared vector, as the owner of bytes.
pub struct Shared(pub Arc<Vec<f32>>);

impl AsRef<[f32]> for Shared {
    fn as_ref(&self) -> &[f32] {
        &self.0
    }
}

/// The weights that a worker gets, as the bytes that travel.
pub fn pulled_bytes(job: &ServerJob, spec: BucketSpec, data: &BucketData) -> Bytes {
    data.look_ahead(job, spec).map_or_else(|| vector_bytes(data, 0), value_bytes)
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
    /// A bucket with this data, which others may share.
    pub fn with_data(id: BucketId, spec: BucketSpec, data: Arc<BucketData>) -> Self {
        Self { id, spec, data: RwLock::new(data) }
    }

    /// The data as it is now; later updates do not change it (copy on write).
    pub fn image(&self) -> Arc<BucketData> {
        self.data.read().clone()
    }

    /// Looks at the data, which cannot change meanwhile, without sharing it.
    pub fn peek<T>(&self, look: impl FnOnce(&BucketData) -> T) -> T {
        look(&self.data.read())
    }

    /// Updates applied so far.
    pub fn version(&self) -> Version {
        self.data.read().version
    }

    /// Whether the initial weights are in.
    pub fn initialised(&self) -> bool {
        self.data.read().initialised
    }

    /// Brings the weights into memory that workers of this host read, unless they are there, somebody reads them where they
    /// are, or there is no room.
    pub(super) fn share(&self, memory: &Arc<Memory>) {
        if self.data.read().weights.is_shared() {
            return;
        }
        if let Some(data) = Arc::get_mut(&mut self.data.write())
            && data.weights.read_elsewhere().is_none()
            && let Some(shared) = data.weights.to_shared(memory)
        {
            data.weights = shared;
        }
    }

    /// Gives the bucket data of its own, as large as its state will be, unless it has been given its initial state.
    ///
    /// # Errors
    /// This server has not so much memory at present.
    pub(super) fn allocate(&self, room: &Room) -> Result<(), Unable> {
        let blank = {
            let data = self.data.read();
            if data.initialised || Arc::strong_count(&data) == 1 {
                return Ok(());
            }
            data.clone()
        };
        room.take(blank.bytes() as u64)?;
        let own = blank.try_copy().map_err(|e| {
            Unable::NoRoom(format!("{} needs {}: {e}", self.id, need::Bytes(blank.bytes() as u64)))
        })?;
        *self.data.write() = Arc::new(own);
        Ok(())
    }

    /// Takes a part of the initial state, unless the weights are in already. The error says why it fits no
    /// bucket of this job.
    pub(super) fn init(&self, job: &ServerJob, part: InitPart, payload: &Payload) -> Result<(), String> {
        let mut data = self.data.write();
        if data.initialised {
            return Ok(());
        }
        let data = Arc::make_mut(&mut data);
        match part {
            InitPart::Weights { version, clock } => {
                payload.reader().values(&mut data.weights).map_err(|e| e.to_string())?;
                if self.spec.kind == TensorKind::Param {
                    job.constrain(self.spec, &mut data.weights);
                }
                (data.version, data.clock, data.initialised) = (version, clock, true);
            }
            InitPart::Slot(i) => {
                let slots = data.slots.len();
                let slot = data.slots.get_mut(i as usize);
                let slot = slot.ok_or_else(|| format!("{} has {slots} slots, not slot {i}", self.id))?;
                payload.reader().values(slot).map_err(|e| e.to_string())?;
                if job.keeps().own_slots {
                    // It sums up what workers have, and no worker has anything.
                    slot.fill(0.0);
                }
            }
        }
        Ok(())
    }

    /// Applies one update; returns the version that contains it. A vector that a reader still has is copied first, and
    /// what the reader has stays among `replaced`.
    pub(super) fn update(&self, update: Incoming<'_>, conf: &Configured) -> Version {
        let mut data = self.data.write();
        let keeps = update.job.keeps().of_workers();
        let data = Arc::make_mut(&mut data);
        conf.replaced.add(data.weights.read_elsewhere());
        conf.replaced.add(data.slots.read_elsewhere());
        if keeps && let [one] = update.contributions {
            let slots = data.kept.get(&one.worker).into_iter().flat_map(|kept| &kept.slots);
            slots.for_each(|slot| conf.replaced.add(read_elsewhere(slot)));
        }
        let before = if keeps { data.kept_bytes() } else { 0 };
        let version = data.update(self.spec, update);
        if keeps {
            conf.keeps(before, data.kept_bytes());
        }
        version
    }

    /// So many pushes are skipped; gives the version that was there and stays. No vector changes, and none is copied.
    pub(super) fn pass(&self, pushes: usize, members: usize) -> Version {
        let mut data = self.data.write();
        let data = Arc::make_mut(&mut data);
        data.pass(pushes, members);
        data.version
    }

    /// Notes that a worker gets the weights as they are; later updates do not change what it got.
    pub(super) fn record_pull(&self, worker: WorkerId, conf: &Configured) {
        let mut data = self.data.write();
        let data = Arc::make_mut(&mut data);
        let before = data.kept_bytes();
        data.record_pull(worker);
        conf.keeps(before, data.kept_bytes());
    }

    /// Those of whom something is kept and who are not `active`.
    pub(super) fn gone(&self, active: impl Fn(WorkerId) -> bool) -> Vec<WorkerId> {
        let data = self.data.read();
        data.kept.keys().copied().filter(|w| *w != FLEET && !active(*w)).collect()
    }

    /// Takes a state delta's data in the place of what is here.
    pub(super) fn install(&self, data: Arc<BucketData>) {
        *self.data.write() = data;
    }
}
