//! How a shard gets its job: from a command of the log, or with a snapshot. Both reserve all the memory that the
//! job may need here before they allocate. If there is too little, this replica stops and nothing has changed.

use super::{
    bucket::{Bucket, BucketData},
    chunks::Chunks,
    command::Outcome,
    cut::Cut,
    partition::RowsImage,
    shard_config::{self, ShardConfig},
    state::{Shard, State},
};
use crate::{
    raft::ApplyError,
    room::{Reserved, Room},
};
use paraft_common::{
    InForce, Mode, ModeChoice, ShardId, TensorKind, config::ServerJob, need::Need, placement,
};
use std::sync::Arc;

/// The format in which the log holds admitted jobs: TOML with every key, including defaults. Only later releases
/// read a later format.
///
/// If a key that a release adds is missing, it has the meaning that jobs had before: [`ServerJob::decode`] returns
/// what the leader that admitted the job meant.
pub const JOB_FORM: u16 = 1;

impl Shard {
    /// Keeps this reservation until the job is found, in a snapshot or in the log.
    pub fn expects(&self, aside: Reserved) {
        self.claim.lock().expected = Some(aside);
    }

    /// The memory that its job needs here, once it has one or could not start it.
    pub fn need(&self) -> Option<Need> {
        self.claim.lock().need
    }

    /// Whether all its workers have joined and none has anything left to do, or the job was ended.
    pub fn is_over(&self) -> bool {
        self.read(|m| {
            let ended = m.stop || m.started && m.members.iter().next().is_some();
            ended && m.members.unfinished().next().is_none()
        })
    }

    /// Why it cannot run, if that is lack of memory.
    pub fn lacks_room(&self) -> Option<String> {
        self.claim.lock().lacks.clone()
    }

    /// Remembers a lack of memory: Raft passes only the text of an error that stops a replica.
    pub(super) fn noted<T>(&self, done: Result<T, ApplyError>) -> Result<T, ApplyError> {
        if let Err(ApplyError::NoRoom(why)) = &done {
            self.claim.lock().lacks = Some(why.clone());
        }
        done
    }

    fn reserve(&self, job: &ServerJob) -> Result<Reserved, ApplyError> {
        let need = Need::of(job, self.id(), self.shards());
        self.claim.lock().need = Some(need);
        self.room().reserve(self.name(), &need)
    }

    /// Drops the expected reservation: the job's own one has replaced it.
    pub(super) fn is_here(&self) {
        self.claim.lock().expected = None;
    }

    /// Applies a job that a leader has checked and admitted; it is not checked again here.
    pub(super) fn admit(&self, form: u16, text: &str) -> Result<Outcome, ApplyError> {
        if let Some(outcome) = self.is_configured(text) {
            return Ok(outcome);
        }
        if form > JOB_FORM {
            return Err(ApplyError::Newer(format!(
                "the log of {} holds a job in form {form}, and this version of paraft reads forms up to {JOB_FORM}: start \
                 this server with the version that its fleet runs",
                self.id()
            )));
        }
        let job = ServerJob::decode(text).map_err(|e| {
            ApplyError::Newer(format!(
                "the log of {} holds a job that this version of paraft cannot read: start this server with the version \
                 that its fleet runs. {e}",
                self.id()
            ))
        })?;
        self.begin(text, job)
    }

    /// The outcome of a second job.
    fn is_configured(&self, text: &str) -> Option<Outcome> {
        self.read(|m| match m.job.as_str() {
            "" => None,
            job if job == text => Some(Outcome::Done),
            _ => Some(Outcome::Refused("another job is configured".into())),
        })
    }

    fn begin(&self, text: &str, job: ServerJob) -> Result<Outcome, ApplyError> {
        let aside = self.reserve(&job)?;
        self.is_here();
        let buckets = shard_config::blank(&job, self.id(), self.shards())?;
        let state = &mut *self.state.write();
        let meta = &mut state.meta;
        meta.job = text.to_string();
        let auto = job.mode == ModeChoice::Auto && self.id() == ShardId(0);
        meta.in_force = InForce::first(job.first_mode(), auto.then_some(Mode::Asp));
        meta.chunks = job.chunks.filter(|_| self.id() == ShardId(0)).map(Chunks::new);
        if let Some(start) = &job.start {
            meta.begin_at(start);
        }
        state.configured = Some(ShardConfig::new(job, buckets, aside));
        Ok(Outcome::Done)
    }

    /// Reserves memory for the job of a snapshot with this text; without a job none is needed.
    pub(super) fn set_aside(&self, job: &str) -> Result<Option<(ServerJob, Reserved)>, ApplyError> {
        if job.is_empty() {
            return Ok(None);
        }
        let job = ServerJob::decode(job).map_err(|e| {
            ApplyError::Newer(format!(
                "the snapshot of {} holds a job that this version cannot read: {e}",
                self.id()
            ))
        })?;
        let aside = self.reserve(&job)?;
        Ok(Some((job, aside)))
    }

    /// Replaces the whole state by a snapshot's.
    pub fn install(&self, cut: &Cut) -> Result<(), ApplyError> {
        let aside = self.set_aside(&cut.meta.job)?;
        self.install_into(aside, cut)
    }

    /// As [`Self::install`], into the reserved memory.
    pub(super) fn install_into(
        &self,
        aside: Option<(ServerJob, Reserved)>,
        cut: &Cut,
    ) -> Result<(), ApplyError> {
        let configured = match aside {
            None => None,
            Some((job, aside)) => Some(self.conf_of(job, aside, cut)?),
        };
        if let Some(conf) = &configured
            && !cut.staged.as_ref().is_none_or(|s| s.fits(conf))
        {
            return Err(
                format!("the snapshot of {} holds a part of a delta that does not fit", self.id()).into()
            );
        }
        *self.staged.write() = cut.staged.clone().filter(|_| configured.is_some());
        // Both at once: a reader of clocks must not combine them with other buckets.
        *self.state.write() = State { configured, meta: cut.meta.clone() };
        Ok(())
    }

    fn conf_of(&self, job: ServerJob, aside: Reserved, cut: &Cut) -> Result<Arc<ShardConfig>, ApplyError> {
        let layout = job.layout();
        let places = placement::buckets_of(&layout, self.id(), self.shards());
        let partitions = places.iter().filter_map(|(id, _)| layout.partition(*id));
        let of_cut = cut.rows.iter().map(RowsImage::named_header);
        let slots = |kind| if kind == TensorKind::Param { job.slots() } else { 0 };
        let (keeps, own_slots) = (job.keeps(), job.on_shard().slots());
        let own = |kind| if kind == TensorKind::Param && keeps.own_slots { own_slots } else { 0 };
        let fits = partitions.eq(of_cut.map(|(table, number, _)| (usize::from(table), number)))
            && places.len() == cut.buckets.len()
            && places.iter().zip(&cut.buckets).all(|((_, s), d)| {
                s.len == d.weights.len()
                    && slots(s.kind) == d.slots.len()
                    && d.kept.values().all(|k| k.fits(s.len, keeps.pulled, own(s.kind)))
            })
            && cut.meta.chunks.as_ref().map(Chunks::plan) == job.chunks.filter(|_| self.id() == ShardId(0))
            && cut.meta.members.iter().all(|(_, m)| {
                let remembered = if job.round.drops_late() { 2 * places.len() } else { 0 };
                m.steps().len() == places.len() && m.remembered() == remembered
            });
        if !fits {
            return Err(format!("the snapshot of {} does not fit its job's buckets", self.id()).into());
        }
        let dense = cut.buckets.len() - cut.rows.len();
        let bucket = |(at, ((id, spec), d)): (usize, (_, &Arc<BucketData>))| {
            let rows = at.checked_sub(dense).map(|at| cut.rows[at].partition()).transpose()?;
            Ok::<_, ApplyError>(Bucket::with_data(id, spec, d.clone()).with_rows(rows))
        };
        let buckets =
            places.into_iter().zip(&cut.buckets).enumerate().map(bucket).collect::<Result<_, _>>()?;
        Ok(ShardConfig::new(job, buckets, aside))
    }

    pub(super) fn room(&self) -> &Arc<Room> {
        &self.room
    }
}
