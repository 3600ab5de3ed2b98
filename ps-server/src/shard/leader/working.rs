//! The working copies to which a leader applies pushes at once at the level `leader`, and the record for the next
//! delta. Leader-only: it may be lost at any moment. The window bounds how much of it is acknowledged.
//!
//! ```text
//!  push ─▶ open window ──becomes a delta──▶ window in flight ──marker committed──▶ replicated
//! ```
//!
//! One delta is in flight at a time: pushes that arrive meanwhile share the next one. Only the leader calls this
//! module, so the copies that `delta` takes between two pushes are consistent with each other and with the record.

use crate::shard::{
    bucket::{BucketData, BucketUpdate, vector_bytes},
    command::{Command, Contribution, Proposal},
    delta::{DeltaBucket, DeltaId, DeltaMember, DeltaRecord, VectorId},
    members::{Member, Members},
    state::ShardConfig,
};
use paraft_common::{
    Payload, SessionId, Step, Version, WorkerId,
    optim::{Gradient, Overrides},
};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Instant,
};

/// All state that is ahead of the replicated state.
#[derive(Debug, Default)]
pub struct WorkingCopies {
    /// Local buckets that are ahead.
    buckets: BTreeMap<usize, Arc<BucketData>>,
    /// Members, including the pushes applied here.
    members: BTreeMap<WorkerId, Member>,
    /// The pushes that no delta holds yet.
    open: Window,
    under_way: Option<DeltaInFlight>,
    /// Skipped steps per session. The log does not hold them: the count is lost with the leader.
    skipped: BTreeMap<(WorkerId, SessionId), u64>,
}

#[derive(Debug, Default)]
struct Window {
    buckets: BTreeSet<usize>,
    record: DeltaRecord,
    /// When the first push arrived.
    since: Option<Instant>,
}

impl Window {
    fn is_empty(&self) -> bool {
        self.since.is_none()
    }
}

/// A delta whose parts are being proposed, or whose marker is not committed yet.
#[derive(Debug)]
struct DeltaInFlight {
    window: Window,
    delta: DeltaId,
    images: BTreeMap<usize, Arc<BucketData>>,
    /// Parts still to propose: local buckets and vectors.
    parts: VecDeque<Vec<(usize, u32)>>,
    proposed: u32,
    marker: Option<Command>,
}

/// The next proposal of a delta.
#[derive(Debug, PartialEq)]
pub enum DeltaPiece {
    /// A part.
    Part(Proposal),
    /// The marker, which is the last.
    Marker(Proposal),
}

/// Where and when a push comes in.
#[derive(Clone, Copy)]
pub struct PushPlace<'a> {
    /// The fixed part of the shard.
    pub conf: &'a ShardConfig,
    /// The worker's replicated record.
    pub replicated: &'a Member,
    /// The local bucket.
    pub bucket: usize,
    /// The current time.
    pub now: Instant,
}

impl WorkingCopies {
    /// The member including the pushes applied here; `replicated` is the worker's replicated record.
    pub fn member<'a>(&'a self, worker: WorkerId, replicated: &'a Member) -> &'a Member {
        self.members.get(&worker).filter(|m| m.session == replicated.session).unwrap_or(replicated)
    }

    /// A local bucket including the pushes applied here.
    pub fn data(&self, conf: &ShardConfig, bucket: usize) -> Arc<BucketData> {
        self.buckets.get(&bucket).cloned().unwrap_or_else(|| conf.buckets[bucket].image())
    }

    /// Lends the working copy of a bucket for a push. Until [`Self::pushed`] returns it there is no copy here.
    pub fn lend(&mut self, conf: &ShardConfig, bucket: usize) -> Arc<BucketData> {
        self.buckets.remove(&bucket).unwrap_or_else(|| conf.buckets[bucket].image())
    }

    /// Takes back the copy that [`Self::lend`] returned and [`add`] changed, and records the push. Returns the
    /// version that contains the push.
    pub fn pushed(
        &mut self,
        at: PushPlace<'_>,
        c: &Contribution,
        bytes: usize,
        data: Arc<BucketData>,
    ) -> Version {
        let version = data.version;
        let before = Version(version.0.saturating_sub(1));
        self.is_in(at, c, data);
        let record = &mut self.open.record;
        record.delays.record(before.0.saturating_sub(c.pulled.0));
        record.pushes += 1;
        record.bytes += bytes as u64;
        version
    }

    /// Records a push without a gradient: only the copy's schedule clock advances. `active`: members that train.
    pub fn skipped(&mut self, at: PushPlace<'_>, active: usize, c: &Contribution) -> Version {
        let mut data = self.lend(at.conf, at.bucket);
        Arc::make_mut(&mut data).skip_update(1, active);
        let version = data.version;
        self.is_in(at, c, data);
        if at.bucket == 0 {
            *self.skipped.entry((c.worker, c.session)).or_default() += 1;
        }
        version
    }

    /// Number of steps of a session that were skipped here.
    pub fn skips_of(&self, worker: WorkerId, session: SessionId) -> u64 {
        self.skipped.get(&(worker, session)).copied().unwrap_or_default()
    }

    /// Records that this copy of the bucket contains a push.
    fn is_in(&mut self, at: PushPlace<'_>, c: &Contribution, data: Arc<BucketData>) {
        self.buckets.insert(at.bucket, data);
        self.open.buckets.insert(at.bucket);
        self.step(at, c.worker, c.step);
        let member = self.member_mut(c.worker, at.replicated);
        member.last_seq = member.last_seq.max(c.seq);
        let last_seq = member.last_seq;
        if let Some(pushed) = self.open.record.members.get_mut(&c.worker) {
            pushed.last_seq = last_seq;
        }
    }

    /// Counts the steps between the member's last one and `upto` as lost: an earlier leader acknowledged them and
    /// failed before a majority had them. Returns the number of lost pushes.
    pub fn skip(&mut self, at: PushPlace<'_>, worker: WorkerId, upto: Step) -> u64 {
        let last = self.member(worker, at.replicated).step(at.bucket).unwrap_or_default();
        let lost = upto.0.saturating_sub(last.0);
        if lost > 0 {
            self.step(at, worker, upto);
            self.open.record.lost += lost;
        }
        lost
    }

    fn step(&mut self, at: PushPlace<'_>, worker: WorkerId, step: Step) {
        self.member_mut(worker, at.replicated).take(at.bucket, step);
        let pushed = self.open.record.members.entry(worker).or_default();
        if pushed.session != at.replicated.session {
            *pushed = DeltaMember { session: at.replicated.session, ..Default::default() };
        }
        pushed.steps.insert(at.conf.buckets[at.bucket].id, step);
        self.open.since.get_or_insert(at.now);
    }

    fn member_mut(&mut self, worker: WorkerId, replicated: &Member) -> &mut Member {
        let m = self.members.entry(worker).or_insert_with(|| replicated.clone());
        if m.session != replicated.session {
            *m = replicated.clone();
        }
        m
    }

    /// Adopts the changes of the members in the log: joins, leaves and resumes.
    pub fn follow(&mut self, members: &Members) {
        self.members.retain(|w, m| {
            let Some(now) = members.in_session(*w, m.session) else { return false };
            m.follow(now);
            true
        });
        self.skipped.retain(|(w, s), _| members.in_session(*w, *s).is_some());
    }

    /// Turns the open window into a delta. [`Self::next`] returns its pieces; a part holds at most `part_bytes`, or
    /// one vector. Returns false if there is nothing to write, or a delta is in flight.
    pub fn delta(
        &mut self,
        conf: &ShardConfig,
        delta: DeltaId,
        after: Option<DeltaId>,
        part_bytes: usize,
    ) -> bool {
        if self.under_way.is_some() || self.open.is_empty() {
            return false;
        }
        let mut window = std::mem::take(&mut self.open);
        let images: BTreeMap<usize, Arc<BucketData>> =
            window.buckets.iter().map(|b| (*b, self.data(conf, *b))).collect();
        let parts = pack(&images, part_bytes);
        let buckets = images
            .iter()
            .map(|(b, data)| DeltaBucket {
                bucket: conf.buckets[*b].id,
                base: conf.buckets[*b].version(),
                version: data.version,
                clock: data.clock,
            })
            .collect();
        let record = std::mem::take(&mut window.record);
        let marker =
            Command::Delta { delta, after, parts: parts.len() as u32, buckets, record: record.clone() };
        window.record = DeltaRecord { pushes: record.pushes, ..DeltaRecord::default() };
        self.under_way =
            Some(DeltaInFlight { window, delta, images, parts, proposed: 0, marker: Some(marker) });
        true
    }

    /// The next proposal of the delta in flight, if any remains.
    pub fn next(&mut self, conf: &ShardConfig) -> Option<DeltaPiece> {
        let u = self.under_way.as_mut()?;
        let Some(part) = u.parts.pop_front() else {
            return u.marker.take().map(|m| DeltaPiece::Marker(m.into()));
        };
        let payload = payload(&u.images, &part);
        let vectors: Vec<VectorId> = part.iter().map(|(b, v)| (conf.buckets[*b].id, *v)).collect();
        let command = Command::DeltaPart { delta: u.delta, part: u.proposed, vectors };
        u.proposed += 1;
        Some(DeltaPiece::Part(Proposal { command, payload }))
    }

    /// Records that the marker of the delta in flight is committed and applied.
    pub fn committed(&mut self) {
        let Some(u) = self.under_way.take() else { return };
        for bucket in u.images.keys().filter(|b| !self.open.buckets.contains(b)) {
            self.buckets.remove(bucket);
        }
    }

    /// Pushes applied here that may not be on a majority.
    pub fn unreplicated(&self) -> u64 {
        let under_way = self.under_way.as_ref().map_or(0, |u| u.window.record.pushes);
        self.open.record.pushes + under_way
    }

    /// When the oldest of them arrived.
    pub fn oldest(&self) -> Option<Instant> {
        self.under_way.as_ref().and_then(|u| u.window.since).or(self.open.since)
    }

    /// The open window: the time of its first push, its pushes and its payload bytes. `None` if it is empty.
    pub fn open(&self) -> Option<(Instant, u64, u64)> {
        self.open.since.map(|s| (s, self.open.record.pushes, self.open.record.bytes))
    }

    /// Whether a delta is being proposed or waits for its commit.
    pub fn cutting(&self) -> bool {
        self.under_way.is_some()
    }

    /// Whether a part or the marker of the delta in flight is not proposed yet.
    pub fn proposing(&self) -> bool {
        self.under_way.as_ref().is_some_and(|u| u.marker.is_some())
    }

    /// Whether any member here differs from the log.
    pub fn has_members(&self) -> bool {
        !self.members.is_empty()
    }

    /// Whether the replicated state contains everything.
    pub fn is_level(&self) -> bool {
        self.open.is_empty() && self.under_way.is_none()
    }
}

/// Adds a push to a working copy, with the same arithmetic as every replica. `active`: members that train.
pub fn add(
    data: &mut Arc<BucketData>,
    conf: &ShardConfig,
    bucket: usize,
    active: usize,
    c: &Contribution,
    overrides: Overrides,
    gradient: Gradient<'_>,
) {
    let contributions = std::slice::from_ref(c);
    let update =
        BucketUpdate { job: &conf.job, gradient, contributions, overrides, members: active, gone: &[] };
    Arc::make_mut(data).update(conf.buckets[bucket].spec, update);
}

/// Groups vectors into parts: a large one alone, small ones together, which saves entries.
fn pack(images: &BTreeMap<usize, Arc<BucketData>>, part_bytes: usize) -> VecDeque<Vec<(usize, u32)>> {
    let mut parts: VecDeque<Vec<(usize, u32)>> = VecDeque::new();
    let mut room = 0;
    for (bucket, data) in images {
        let bytes = data.weights.len() * size_of::<f32>();
        for vector in 0..data.vectors() as u32 {
            match parts.back_mut().filter(|_| bytes <= room) {
                Some(part) => part.push((*bucket, vector)),
                None => {
                    parts.push_back(vec![(*bucket, vector)]);
                    room = part_bytes;
                }
            }
            room = room.saturating_sub(bytes);
        }
    }
    parts
}

fn payload(images: &BTreeMap<usize, Arc<BucketData>>, part: &[(usize, u32)]) -> Payload {
    let vector =
        |(bucket, vector): &(usize, u32)| images.get(bucket).map(|d| vector_bytes(d, *vector as usize));
    part.iter().filter_map(vector).collect()
}
