//! State deltas, which replicate pushes at the level `leader`: their entries, and how a replica applies them.
//!
//! A leader at this level applies pushes to working copies (`working.rs`). From time to time it writes the changes
//! to the log: the images of the changed buckets in parts of at most [`MAX_PART_BYTES`], then one marker with the
//! rest: versions, schedule clocks, the pushes in it, the counts.
//!
//! ```text
//!  DeltaPart 0 ─▶ DeltaPart 1 ─▶ ... ─▶ Delta (marker)
//!     staged      staged              all parts here? then all of it takes effect at once; else nothing does
//! ```
//!
//! Staged parts are replicated state: a snapshot between two parts holds them, and every replica with the same log
//! has the same bytes. A part or marker that does not continue the staged delta drops it, so an incomplete delta of
//! a failed leader never takes effect. A marker takes effect only on the exact state that its leader started from:
//! each bucket at its base version, after the same last delta.

use super::{
    bucket::BucketData,
    command::Outcome,
    shard_config::ShardConfig,
    staged_delta::{StagedDelta, Vector, vector_len},
    state::{Meta, Shard},
};
pub use paraft_changes::delta::{DeltaBucket, DeltaId, DeltaMember, DeltaRecord, VectorId};
use paraft_common::Payload;
use std::{collections::BTreeMap, sync::Arc};

/// Maximum payload of one part: larger entries replicated more slowly and cost leaders their lease.
pub const MAX_PART_BYTES: usize = 1 << 20;

/// Reads a part's payload: the vectors in order.
fn read_part(conf: &ShardConfig, vectors: &[VectorId], payload: &Payload) -> Result<Vec<Vector>, String> {
    let mut rest = payload.reader();
    let mut read = Vec::with_capacity(vectors.len());
    for of in vectors {
        let len =
            vector_len(conf, *of).ok_or_else(|| format!("the shard has no vector {} of {}", of.1, of.0))?;
        let mut values = vec![0.0; len];
        rest.values(&mut values).map_err(|_| "the part is shorter than its vectors")?;
        read.push((*of, Arc::new(values)));
    }
    if rest.left() > 0 {
        return Err("the part is longer than its vectors".into());
    }
    Ok(read)
}

/// Assembles the images of a complete delta, or returns what is missing. Changes nothing.
fn images(
    conf: &ShardConfig,
    staged: Option<StagedDelta>,
    delta: DeltaId,
    parts: u32,
    buckets: &[DeltaBucket],
) -> Result<Vec<(usize, Arc<BucketData>)>, String> {
    let here = staged.filter(|s| s.delta == delta);
    let staged = here.unwrap_or(StagedDelta { delta, parts: 0, vectors: Vec::new() });
    if staged.parts != parts {
        return Err(format!("{} of {parts} parts of the delta are here", staged.parts));
    }
    let count = staged.vectors.len();
    let mut by_place: BTreeMap<VectorId, Arc<Vec<f32>>> = staged.vectors.into_iter().collect();
    if by_place.len() != count {
        return Err("the delta holds a vector twice".into());
    }
    let mut all = Vec::with_capacity(buckets.len());
    for b in buckets {
        let local = conf.local(b.bucket).ok_or_else(|| format!("{} is not on this shard", b.bucket))?;
        let bucket = &conf.buckets[local];
        if bucket.version() != b.base || b.version < b.base {
            let (here, from, to) = (bucket.version(), b.base, b.version);
            return Err(format!("{} is at {here}, the delta goes from {from} to {to}", b.bucket));
        }
        let mut vector = |i: u32| {
            let v =
                by_place.remove(&(b.bucket, i)).ok_or_else(|| format!("{} lacks vector {i}", b.bucket))?;
            Ok::<_, String>(Arc::unwrap_or_clone(v))
        };
        let weights = vector(0)?;
        let slots =
            (1..=conf.slots(bucket.spec.kind) as u32).map(&mut vector).collect::<Result<Vec<_>, _>>()?.into();
        let (version, clock) = (b.version, b.clock);
        let kept = Default::default(); // jobs that keep state per worker have no deltas
        let data = BucketData { weights: weights.into(), slots, kept, version, clock, initialised: true };
        all.push((local, Arc::new(data)));
    }
    if by_place.is_empty() {
        Ok(all)
    } else {
        Err("the delta holds vectors that its marker does not name".into())
    }
}

impl Shard {
    /// Stages one part. A part that does not continue the staged delta ends that delta.
    pub(super) fn delta_part(
        &self,
        delta: DeltaId,
        part: u32,
        vectors: &[VectorId],
        payload: &Payload,
    ) -> Outcome {
        let mut slot = self.staged.write();
        let before = slot.take();
        let Some(conf) = self.configured() else { return Outcome::Refused("no job is configured".into()) };
        if self.read(|m| m.last_cut >= Some(delta)) {
            return Outcome::Refused(format!("{delta:?} is in already, or a later one"));
        }
        let mut staged = match before {
            _ if part == 0 => StagedDelta { delta, parts: 0, vectors: Vec::new() },
            Some(s) if (s.delta, s.parts) == (delta, part) => s,
            _ => return Outcome::Refused(format!("part {part} of {delta:?} does not follow what is staged")),
        };
        match read_part(&conf, vectors, payload) {
            Ok(read) => staged.vectors.extend(read),
            Err(why) => return Outcome::Refused(why),
        }
        staged.parts += 1;
        *slot = Some(staged);
        Outcome::Done
    }

    /// Applies a marker: the whole delta takes effect, or nothing. The staged parts are dropped in both cases.
    pub(super) fn delta(
        &self,
        delta: DeltaId,
        after: Option<DeltaId>,
        parts: u32,
        buckets: &[DeltaBucket],
        record: &DeltaRecord,
    ) -> Outcome {
        let staged = self.staged.write().take();
        let Some(conf) = self.configured() else { return Outcome::Refused("no job is configured".into()) };
        let mut meta = self.meta_mut();
        if !conf.job.durability.is_leader() || meta.last_cut != after || Some(delta) <= after {
            let (level, last) = (conf.job.durability, meta.last_cut);
            return Outcome::Refused(format!(
                "{delta:?} after {after:?} meets level {level}, last delta {last:?}"
            ));
        }
        let images = match images(&conf, staged, delta, parts, buckets) {
            Ok(images) => images,
            Err(why) => return Outcome::Refused(why),
        };
        for (local, data) in images {
            conf.buckets[local].install(data);
        }
        meta.last_cut = Some(delta);
        take_record(&mut meta, &conf, record);
        Outcome::Done
    }
}

fn take_record(meta: &mut Meta, conf: &ShardConfig, record: &DeltaRecord) {
    for (worker, pushed) in &record.members {
        // A session that is over needs no record: no worker can push in it again.
        let (members, session) = (&mut meta.members, pushed.session);
        members.has_pushed(*worker, session, pushed.last_seq);
        for (bucket, step) in &pushed.steps {
            let at = |b| members.in_session(*worker, session)?.step(b);
            if let Some(b) = conf.local(*bucket).filter(|b| at(*b).is_some_and(|s| s < *step)) {
                members.pushed(*worker, session, pushed.last_seq, b, *step);
            }
        }
    }
    meta.delays.merge(&record.delays);
    meta.pushes = meta.pushes.saturating_add(record.pushes);
    meta.bytes_pushed = meta.bytes_pushed.saturating_add(record.bytes);
    meta.pushes_lost = meta.pushes_lost.saturating_add(record.lost);
}
