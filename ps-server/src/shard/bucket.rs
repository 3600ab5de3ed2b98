//! One bucket: weights, optimizer slots, version. The unit of locking, of publishing and of copy-on-write.

use super::{
    command::{Contribution, InitPart},
    partition::{Partition, RowsImage},
    shard_config::ShardConfig,
    weights::{Slots, Weights, read_elsewhere},
    worker_state::{FLEET, WorkerState, WorkerStates},
};
use crate::{raft::ApplyError, room::Room};
use bytes::Bytes;
use paraft_common::{
    BucketId, BucketSpec, Payload, TensorKind, Version, WorkerId, algorithm,
    codec::value_bytes,
    config::ServerJob,
    need,
    optim::{Gradient, Hyper, Overrides, apply_buffer, take_mean, take_result},
    table::{RowRate, Rows},
};
use paraft_lanes::shared::Memory;
use parking_lot::RwLock;
use std::{collections::TryReserveError, sync::Arc};

/// The replicated data of a bucket. A clone shares the vectors; a change copies only the vectors that it changes.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketData {
    /// `spec.len` values.
    pub weights: Weights,
    /// The state vectors of the optimizer and the algorithm, each as long as `weights`.
    pub slots: Slots,
    /// State that the algorithm keeps per worker.
    pub kept: WorkerStates,
    /// Updates applied.
    pub version: Version,
    /// The schedule's clock, in steps of the whole fleet. Each update adds contributions / members, so it advances
    /// by one per step of the fleet in every mode.
    pub clock: f64,
    /// Whether the initial weights are in.
    pub initialised: bool,
}

/// One update of a bucket.
#[derive(Clone, Copy, Debug)]
pub struct BucketUpdate<'a> {
    /// The job.
    pub job: &'a ServerJob,
    /// The gradient, or the mean of several.
    pub gradient: Gradient<'a>,
    /// The pushes in the gradient.
    pub contributions: &'a [Contribution],
    /// What its workers set in place of the job's options.
    pub overrides: Overrides,
    /// Number of members that train.
    pub members: usize,
    /// Workers with kept state that no longer train.
    pub gone: &'a [WorkerId],
}

impl BucketUpdate<'_> {
    /// Bound on the size of each gradient value.
    fn clip_value(&self) -> Option<f32> {
        self.overrides.clip_value.map(|bound| bound as f32).or(self.job.clip.value)
    }
}

impl BucketData {
    /// The number of vectors: the weights (0), the state vectors (from 1), and those kept per worker.
    pub fn vectors(&self) -> usize {
        1 + self.slots.len() + self.kept.values().map(|k| k.vectors().count()).sum::<usize>()
    }

    /// The number of vectors in a checkpoint: without those kept per worker.
    pub fn trained_vectors(&self) -> usize {
        1 + self.slots.len()
    }

    /// Bytes of all vectors.
    pub fn bytes(&self) -> usize {
        self.vectors() * self.weights.len() * size_of::<f32>()
    }

    /// A bucket without initial state: zero weights, and the optimizer's initial slots.
    pub(super) fn blank(spec: BucketSpec, job: &ServerJob) -> Self {
        let slots = match spec.kind {
            TensorKind::Param => job.new_slots(spec.group, spec.len),
            TensorKind::Buffer | TensorKind::Result | TensorKind::Rows => Vec::new(),
        };
        let (weights, kept) = (vec![0.0; spec.len].into(), WorkerStates::new());
        // Rows begin with the values that their ids give, unless workers bring them.
        let initialised = spec.kind == TensorKind::Rows && !job.start.as_ref().is_some_and(|s| s.rows);
        Self { weights, slots: slots.into(), kept, version: Version(0), clock: 0.0, initialised }
    }

    /// A copy without shared vectors, if there is memory for it.
    fn try_copy(&self) -> Result<Self, TryReserveError> {
        let (weights, slots) = (self.weights.try_copy()?, self.slots.try_copy()?);
        Ok(Self { weights, slots, kept: self.kept.clone(), ..*self })
    }

    /// Bytes of the state kept per worker. Workers that pulled the same version share it.
    pub fn kept_bytes(&self) -> u64 {
        let mut vectors: Vec<_> =
            self.kept.values().flat_map(WorkerState::vectors).map(Arc::as_ptr).collect();
        vectors.sort_unstable();
        vectors.dedup();
        (vectors.len() * self.weights.len() * size_of::<f32>()) as u64
    }

    /// Applies one update; returns the version that contains it. Every update of every bucket uses this function,
    /// both when a replica applies it from the log and when a leader applies it to its working copy.
    pub(super) fn update(&mut self, spec: BucketSpec, update: BucketUpdate<'_>) -> Version {
        let BucketUpdate { gradient, contributions, members, .. } = update;
        match spec.kind {
            TensorKind::Buffer => apply_buffer(&mut self.weights, gradient),
            TensorKind::Result => take_result(&mut self.weights, gradient),
            TensorKind::Rows => {} // `Bucket::update_rows`
            TensorKind::Param if update.job.takes_means() => {
                take_mean(&mut self.weights, gradient, update.clip_value())
            }
            TensorKind::Param => self.train(spec, update),
        }
        self.skip_update(contributions.len(), members);
        self.version.0 += 1;
        self.version
    }

    /// Advances the schedule's clock by this many applied or skipped pushes.
    pub(super) fn skip_update(&mut self, pushes: usize, members: usize) {
        self.clock += pushes as f64 / members.max(1) as f64;
    }

    fn train(&mut self, spec: BucketSpec, update: BucketUpdate<'_>) {
        let BucketUpdate { job, gradient, contributions, overrides, gone, .. } = update;
        let clip_value = update.clip_value();
        gone.iter().for_each(|w| self.forget(job, *w));
        let optimizer = job.optimizer_of(spec.group);
        // The leader has checked that the optimizer has these options.
        let optimizer = optimizer.overridden(&overrides).unwrap_or(optimizer);
        let gradient = Gradient { scale: gradient.scale * job.sign_of(spec.group), ..gradient };
        let rate = match overrides.rate {
            Some(rate) => rate * job.schedule.scale.factor(contributions.len()),
            None => optimizer.lr() * job.schedule.factor(self.clock, contributions.len()),
        };
        let (keeps, t) = (job.keeps(), self.version.0 + 1);
        // A round of several pushes has no delay, and no worker of its own.
        let (whose, from) = match contributions {
            [one] => (one.worker, one.pulled.min(self.version)),
            _ => (FLEET, self.version),
        };
        let mut kept = if keeps.of_workers() {
            self.kept.remove(&whose).unwrap_or_default()
        } else {
            WorkerState::default()
        };
        let mut own: Vec<Vec<f32>> =
            std::mem::take(&mut kept.slots).into_iter().map(Arc::unwrap_or_clone).collect();
        if keeps.own_slots && own.is_empty() {
            own = job.on_shard().new_slots(self.weights.len());
        }
        kept.updates += 1;
        // The named and the sent version are the same, except after a change of leader.
        let pulled = kept.pulled.as_ref().filter(|(v, _)| *v == from && from < self.version);
        let own_t = if keeps.own_slots { kept.updates } else { t };
        let update = algorithm::Update {
            hyper: Hyper { lr: rate as f32, t: own_t, clip_value },
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

    /// Drops the state kept of a worker that no longer trains.
    fn forget(&mut self, job: &ServerJob, worker: WorkerId) {
        let Some(kept) = self.kept.remove(&worker) else { return };
        let own: Vec<&[f32]> = kept.slots.iter().map(|s| s.as_slice()).collect();
        job.algorithm.algorithm().own_changes(&own, false, &mut self.slots);
    }

    /// Records that a worker gets the current weights.
    fn record_pull(&mut self, worker: WorkerId) {
        let version = self.version;
        let same = |k: &WorkerState| k.pulled.clone().filter(|(v, _)| *v == version);
        // Workers that pull the same version share the copy.
        let copy = self.kept.values().find_map(same);
        let copy = copy.unwrap_or_else(|| (version, Arc::new(self.weights.to_vec())));
        self.kept.entry(worker).or_default().pulled = Some(copy);
    }

    /// The look-ahead weights for a pull; `None` if it gets the weights themselves.
    pub fn look_ahead(&self, job: &ServerJob, spec: BucketSpec) -> Option<Vec<f32>> {
        let algorithm = job.algorithm.algorithm();
        if spec.kind != TensorKind::Param || !algorithm.looks_ahead() {
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

/// A vector as little-endian bytes for the network. The bytes share this vector only; an update before they are
/// sent copies it first (as for a snapshot).
pub fn vector_bytes(data: &BucketData, vector: usize) -> Bytes {
    struct SlotVector(Slots, usize);

    impl AsRef<[f32]> for SlotVector {
        fn as_ref(&self) -> &[f32] {
            &self.0[self.1]
        }
    }

    let Some(slot) = vector.checked_sub(1) else { return value_bytes(data.weights.clone()) };
    if slot < data.slots.len() {
        return value_bytes(SlotVector(data.slots.clone(), slot));
    }
    let kept = data.kept.values().flat_map(WorkerState::vectors).nth(slot - data.slots.len());
    kept.map_or_else(Bytes::new, |kept| value_bytes(Shared(kept.clone())))
}

/// A shared vector as an owner of bytes.
pub struct Shared(pub Arc<Vec<f32>>);

impl AsRef<[f32]> for Shared {
    fn as_ref(&self) -> &[f32] {
        &self.0
    }
}

/// The weights for a worker as bytes for the network.
pub fn pulled_bytes(job: &ServerJob, spec: BucketSpec, data: &BucketData) -> Bytes {
    data.look_ahead(job, spec).map_or_else(|| vector_bytes(data, 0), value_bytes)
}

/// A bucket's range and data. Readers hold the lock only to clone the `Arc` (a pull reads bucket by bucket while
/// others change: the Hogwild read).
#[derive(Debug)]
pub struct Bucket {
    /// Its id in the job.
    pub id: BucketId,
    /// Its range and kind.
    pub spec: BucketSpec,
    data: RwLock<Arc<BucketData>>,
    /// The content of a bucket of rows.
    rows: Option<Arc<Partition>>,
}

impl Bucket {
    /// A bucket with this data, which may be shared.
    pub fn with_data(id: BucketId, spec: BucketSpec, data: Arc<BucketData>) -> Self {
        Self { id, spec, data: RwLock::new(data), rows: None }
    }

    /// With these rows.
    pub fn with_rows(self, rows: Option<Arc<Partition>>) -> Self {
        Self { rows, ..self }
    }

    /// The content of a bucket of rows.
    pub fn rows(&self) -> Option<&Arc<Partition>> {
        self.rows.as_ref()
    }

    /// The weights of these rows, and the version that they have; `None` if it is no bucket of rows.
    pub fn pull_rows(&self, ids: &[u64]) -> Option<(Version, Bytes)> {
        let rows = self.rows.as_ref()?;
        let data = self.data.read();
        Some((data.version, rows.pull(ids).into()))
    }

    /// The rows at one moment, and the version that they have; `None` if it is no bucket of rows.
    pub fn image_rows(&self) -> Option<(Version, RowsImage)> {
        let rows = self.rows.as_ref()?;
        let data = self.data.read();
        Some((data.version, RowsImage::of(rows)))
    }

    /// These rows, whole, of those that there are, and the version that they have.
    pub fn find_rows(&self, ids: &[u64]) -> Option<(Version, Vec<u8>)> {
        let rows = self.rows.as_ref()?;
        let data = self.data.read();
        Some((data.version, rows.whole(ids)))
    }

    /// Changes rows as a person has asked, once for each token; returns how many, or why the edit does not fit.
    pub(super) fn edit_rows(
        &self,
        token: u64,
        put: bool,
        payload: &Payload,
    ) -> Result<Result<u64, String>, ApplyError> {
        let Some(rows) = &self.rows else {
            return Ok(Err(format!("{} is no partition of a table", self.id)));
        };
        let (data, bytes) = (self.data.write(), payload.to_bytes());
        if let Err(why) = rows.check_edit(put, &bytes) {
            return Ok(Err(why));
        }
        // A reader of this version must see the change as a later one.
        rows.edit(token, put, &bytes, data.version.0 + 1).map(Ok)
    }

    /// Applies the rows of one update; returns the version that contains it.
    pub(super) fn update_rows(&self, rows: &Rows, update: BucketUpdate<'_>) -> Result<Version, ApplyError> {
        let mut data = self.data.write();
        let data = Arc::make_mut(&mut data);
        let BucketUpdate { job, gradient, contributions, overrides, members, .. } = update;
        let factor = match overrides.rate {
            Some(_) => job.schedule.scale.factor(contributions.len()),
            None => job.schedule.factor(data.clock, contributions.len()),
        };
        let rate = RowRate { factor, set: overrides.rate.map(|rate| rate * factor) };
        if let Some(partition) = &self.rows {
            partition.update(rows, data.version.0 + 1, gradient.scale, rate)?;
        }
        data.skip_update(contributions.len(), members);
        data.version.0 += 1;
        Ok(data.version)
    }

    /// The current data; later updates do not change it (copy on write).
    pub fn image(&self) -> Arc<BucketData> {
        self.data.read().clone()
    }

    /// Reads the data without sharing it. The data cannot change meanwhile.
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

    /// Moves the weights into memory that workers of this host map, unless they are there, a reader uses them, or
    /// there is no room.
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

    /// Allocates the bucket's own data, at its final size, unless the initial state has arrived.
    ///
    /// # Errors
    /// This server lacks the memory at present.
    pub(super) fn allocate(&self, room: &Room) -> Result<(), ApplyError> {
        let blank = {
            let data = self.data.read();
            if data.initialised || Arc::strong_count(&data) == 1 {
                return Ok(());
            }
            data.clone()
        };
        room.take(blank.bytes() as u64)?;
        let own = blank.try_copy().map_err(|e| {
            ApplyError::NoRoom(format!("{} needs {}: {e}", self.id, need::Bytes(blank.bytes() as u64)))
        })?;
        *self.data.write() = Arc::new(own);
        Ok(())
    }

    /// Accepts a part of the initial state, unless the weights are initialised. The error says why the part fits no
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
            InitPart::Rows { part: at, parts, version, clock }
            | InitPart::History { part: at, parts, version, clock } => {
                let rows =
                    self.rows.as_ref().ok_or_else(|| format!("{} is no partition of a table", self.id))?;
                let is_next = match part {
                    InitPart::History { .. } => rows.add_history(at, payload)?,
                    _ => rows.add(at, payload)?,
                };
                if is_next && at + 1 == parts {
                    (data.version, data.clock, data.initialised) = (version, clock, true);
                }
            }
            InitPart::Slot(i) => {
                let slots = data.slots.len();
                let slot = data.slots.get_mut(i as usize);
                let slot = slot.ok_or_else(|| format!("{} has {slots} slots, not slot {i}", self.id))?;
                payload.reader().values(slot).map_err(|e| e.to_string())?;
                if job.keeps().own_slots {
                    // This slot sums up what workers hold, and no worker holds anything yet.
                    slot.fill(0.0);
                }
            }
        }
        Ok(())
    }

    /// Applies one update; returns the version that contains it. A vector with other readers is copied first; the
    /// readers' vector is tracked in `replaced`.
    pub(super) fn update(&self, update: BucketUpdate<'_>, conf: &ShardConfig) -> Version {
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
            conf.update_kept_bytes(before, data.kept_bytes());
        }
        version
    }

    /// Records skipped pushes and returns the unchanged version. No vector changes, and none is copied.
    pub(super) fn skip_update(&self, pushes: usize, members: usize) -> Version {
        let mut data = self.data.write();
        let data = Arc::make_mut(&mut data);
        data.skip_update(pushes, members);
        data.version
    }

    /// Records that a worker gets the current weights; later updates do not change its copy.
    pub(super) fn record_pull(&self, worker: WorkerId, conf: &ShardConfig) {
        let mut data = self.data.write();
        let data = Arc::make_mut(&mut data);
        let before = data.kept_bytes();
        data.record_pull(worker);
        conf.update_kept_bytes(before, data.kept_bytes());
    }

    /// Workers with kept state that are not `active`.
    pub(super) fn gone(&self, active: impl Fn(WorkerId) -> bool) -> Vec<WorkerId> {
        let data = self.data.read();
        data.kept.keys().copied().filter(|w| *w != FLEET && !active(*w)).collect()
    }

    /// Replaces the data by that of a state delta.
    pub(super) fn install(&self, data: Arc<BucketData>) {
        *self.data.write() = data;
    }
}
