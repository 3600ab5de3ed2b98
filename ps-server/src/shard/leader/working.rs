//! The copies to which a leader applies pushes at once at the level `leader`, and what it must write down of them.
//! Leader-only: may vanish at any moment. What of it has been acknowledged is bounded by the window.
//!
//! ```text
//!  push ─▶ open window ──becomes a delta──▶ window under way ──marker committed──▶ replicated
//! ```
//!
//! One delta is under way at a time: pushes that come meanwhile share the next one. The leader is the only one
//! that calls, so the copies that `delta` takes between two pushes are consistent with each other and with the record.

use crate::shard::{
    bucket::{BucketData, Incoming, vector_bytes},
    command::{Command, Contribution, Proposal},
    delta::{DeltaBucket, DeltaId, DeltaMember, DeltaRecord, VectorOf},
    members::{Member, Members},
    state::Configured,
};
use paraft_common::{Payload, SessionId, Step, Version, WorkerId, optim::Gradient};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Instant,
};

/// Everything ahead of the replicated state.
#[derive(Debug, Default)]
pub struct Working {
    /// Local buckets that are ahead.
    buckets: BTreeMap<usize, Arc<BucketData>>,
    /// Members as they are with the pushes applied here.
    members: BTreeMap<WorkerId, Member>,
    /// What no delta holds yet.
    open: Window,
    under_way: Option<UnderWay>,
    /// Of the members' steps, those that were skipped. The log does not have them: with the leader that took them goes their
    /// count.
    skipped: BTreeMap<(WorkerId, SessionId), u64>,
}

#[derive(Debug, Default)]
struct Window {
    buckets: BTreeSet<usize>,
    record: DeltaRecord,
    /// When the first push came.
    since: Option<Instant>,
}

impl Window {
    fn is_empty(&self) -> bool {
        self.since.is_none()
    }
}

/// A delta that is being proposed, part by part, or waits for its marker to be committed.
#[derive(Debug)]
struct UnderWay {
    window: Window,
    delta: DeltaId,
    images: BTreeMap<usize, Arc<BucketData>>,
    /// Parts to come: local buckets and vectors.
    parts: VecDeque<Vec<(usize, u32)>>,
    proposed: u32,
    marker: Option<Command>,
}

/// What to propose next of a delta.
#[derive(Debug, PartialEq)]
pub enum Piece {
    /// A part.
    Part(Proposal),
    /// The marker: nothing comes behind it.
    Marker(Proposal),
}

impl Working {
    /// The member as it is with the pushes applied here; `replicated` is the same worker's replicated record.
    pub fn member<'a>(&'a self, worker: WorkerId, replicated: &'a Member) -> &'a Member {
        self.members.get(&worker).filter(|m| m.session == replicated.session).unwrap_or(replicated)
    }

    /// A local bucket as it is with the pushes applied here.
    pub fn data(&self, conf: &Configured, bucket: usize) -> Arc<BucketData> {
        self.buckets.get(&bucket).cloned().unwrap_or_else(|| conf.buckets[bucket].image())
    }

    /// The working copy of a bucket, for a push. Until it comes back with [`Self::pushed`] there is none here.
    pub fn lend(&mut self, conf: &Configured, bucket: usize) -> Arc<BucketData> {
        self.buckets.remove(&bucket).unwrap_or_else(|| conf.buckets[bucket].image())
    }

    /// Takes back what [`Self::lend`] gave and [`add`] has changed, and writes the push down; gives the version that
    /// contains it.
    #[allow(clippy::too_many_arguments)] // what a push is, and the time
    pub fn pushed(
        &mut self,
        conf: &Configured,
        replicated: &Member,
        bucket: usize,
        c: &Contribution,
        bytes: usize,
        data: Arc<BucketData>,
        now: Instant,
    ) -> Version {
        let version = data.version;
        let before = Version(version.0.saturating_sub(1));
        self.is_in(conf, replicated, bucket, c, data, now);
        let record = &mut self.open.record;
        record.delays.record(before.0.saturating_sub(c.pulled.0));
        record.pushes += 1;
        record.bytes += bytes as u64;
        version
    }

    /// Takes a push in that brings nothing: of the copy the schedule's clock alone goes on. `active`: members that train.
    pub fn skipped(
        &mut self,
        conf: &Configured,
        replicated: &Member,
        active: usize,
        bucket: usize,
        c: &Contribution,
        now: Instant,
    ) -> Version {
        let mut data = self.lend(conf, bucket);
        Arc::make_mut(&mut data).pass(1, active);
        let version = data.version;
        self.is_in(conf, replicated, bucket, c, data, now);
        if bucket == 0 {
            *self.skipped.entry((c.worker, c.session)).or_default() += 1;
        }
        version
    }

    /// How many steps of a session were skipped here.
    pub fn skips_of(&self, worker: WorkerId, session: SessionId) -> u64 {
        self.skipped.get(&(worker, session)).copied().unwrap_or_default()
    }

    /// A push is in this copy of its bucket.
    fn is_in(
        &mut self,
        conf: &Configured,
        replicated: &Member,
        bucket: usize,
        c: &Contribution,
        data: Arc<BucketData>,
        now: Instant,
    ) {
        self.buckets.insert(bucket, data);
        self.open.buckets.insert(bucket);
        self.step(conf, replicated, c.worker, bucket, c.step, now);
        let member = self.member_mut(c.worker, replicated);
        member.last_seq = member.last_seq.max(c.seq);
        let last_seq = member.last_seq;
        if let Some(pushed) = self.open.record.members.get_mut(&c.worker) {
            pushed.last_seq = last_seq;
        }
    }

    /// Counts the steps between the member's last one and `upto` as lost: an earlier leader acknowledged them and went
    /// down before a majority had them. Gives how many pushes that is.
    pub fn skip(
        &mut self,
        conf: &Configured,
        replicated: &Member,
        worker: WorkerId,
        bucket: usize,
        upto: Step,
        now: Instant,
    ) -> u64 {
        let at = self.member(worker, replicated).step(bucket).unwrap_or_default();
        let lost = upto.0.saturating_sub(at.0);
        if lost > 0 {
            self.step(conf, replicated, worker, bucket, upto, now);
            self.open.record.lost += lost;
        }
        lost
    }

    fn step(
        &mut self,
        conf: &Configured,
        replicated: &Member,
        worker: WorkerId,
        bucket: usize,
        step: Step,
        now: Instant,
    ) {
        self.member_mut(worker, replicated).take(bucket, step);
        let pushed = self.open.record.members.entry(worker).or_default();
        if pushed.session != replicated.session {
            *pushed = DeltaMember { session: replicated.session, ..Default::default() };
        }
        pushed.steps.insert(conf.buckets[bucket].id, step);
        self.open.since.get_or_insert(now);
    }

    fn member_mut(&mut self, worker: WorkerId, replicated: &Member) -> &mut Member {
        let m = self.members.entry(worker).or_insert_with(|| replicated.clone());
        if m.session != replicated.session {
            *m = replicated.clone();
        }
        m
    }

    /// Takes over what the log has changed in the members meanwhile: who joined, left or went on.
    pub fn follow(&mut self, members: &Members) {
        self.members.retain(|w, m| {
            let Some(now) = members.in_session(*w, m.session) else { return false };
            m.follow(now);
            true
        });
        self.skipped.retain(|(w, s), _| members.in_session(*w, *s).is_some());
    }

    /// Closes the open window into a delta: its pieces come from [`Self::next`], its parts hold at most `part_bytes`, or one
    /// vector. False where there is nothing to write, or
    /// a delta is under way.
    pub fn delta(
        &mut self,
        conf: &Configured,
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
        self.under_way = Some(UnderWay { window, delta, images, parts, proposed: 0, marker: Some(marker) });
        true
    }

    /// What to propose next of the delta under way, if anything is left of it.
    pub fn next(&mut self, conf: &Configured) -> Option<Piece> {
        let u = self.under_way.as_mut()?;
        let Some(part) = u.parts.pop_front() else {
            return u.marker.take().map(|m| Piece::Marker(m.into()));
        };
        let payload = payload(&u.images, &part);
        let vectors: Vec<VectorOf> = part.iter().map(|(b, v)| (conf.buckets[*b].id, *v)).collect();
        let command = Command::DeltaPart { delta: u.delta, part: u.proposed, vectors };
        u.proposed += 1;
        Some(Piece::Part(Proposal { command, payload }))
    }

    /// The marker of the delta under way is committed and applied.
    pub fn committed(&mut self) {
        let Some(u) = self.under_way.take() else { return };
        for bucket in u.images.keys().filter(|b| !self.open.buckets.contains(b)) {
            self.buckets.remove(bucket);
        }
    }

    /// Pushes applied here that no majority is known to hold.
    pub fn unreplicated(&self) -> u64 {
        let under_way = self.under_way.as_ref().map_or(0, |u| u.window.record.pushes);
        self.open.record.pushes + under_way
    }

    /// When the oldest of them came.
    pub fn oldest(&self) -> Option<Instant> {
        self.under_way.as_ref().and_then(|u| u.window.since).or(self.open.since)
    }

    /// The open window: when its first push came, how many pushes and payload bytes it holds. `None` where it is empty.
    pub fn open(&self) -> Option<(Instant, u64, u64)> {
        self.open.since.map(|s| (s, self.open.record.pushes, self.open.record.bytes))
    }

    /// Whether a delta is being proposed or waits for its commit.
    pub fn cutting(&self) -> bool {
        self.under_way.is_some()
    }

    /// Whether a part or the marker of the delta under way is still to be proposed.
    pub fn proposing(&self) -> bool {
        self.under_way.as_ref().is_some_and(|u| u.marker.is_some())
    }

    /// Whether it knows any member otherwise than the log does.
    pub fn has_members(&self) -> bool {
        !self.members.is_empty()
    }

    /// Whether the replicated state holds everything.
    pub fn is_level(&self) -> bool {
        self.open.is_empty() && self.under_way.is_none()
    }
}

/// Adds a push to a working copy, with the arithmetic of every replica. `active` is the number of members that train.
pub fn add(
    data: &mut Arc<BucketData>,
    conf: &Configured,
    bucket: usize,
    active: usize,
    c: &Contribution,
    rate: Option<f64>,
    gradient: Gradient<'_>,
) {
    let contributions = std::slice::from_ref(c);
    let update = Incoming { job: &conf.job, gradient, contributions, rate, members: active, gone: &[] };
    Arc::make_mut(data).update(conf.buckets[bucket].spec, update);
}

/// Vectors into parts: large ones alone, small ones together, which saves entries.
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
