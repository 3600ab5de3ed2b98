//! How a shard comes to its job: by a command of the log, or with a snapshot. Both take room for all that the job may come
//! to need here before anything is allocated; where there is none, this replica stops and nothing has changed.

use super::{
    bucket::{Bucket, BucketData},
    chunks::Chunks,
    command::Outcome,
    configured::{self, Configured},
    image::Image,
    state::{Shard, State},
};
use crate::{
    raft::Unable,
    room::{Reserved, Room},
};
use paraft_common::{
    InForce, Mode, ModeChoice, ShardId, TensorKind, config::ServerJob, need::Need, placement,
};
use std::sync::Arc;

/// The form in which admitted jobs are written to the log: the job's text with every key, defaults too, as TOML. A later
/// one is read by later releases alone.
///
/// A key that a release adds gets, where it is missing, the meaning that jobs had before it: [`ServerJob::decode`] gives
/// what the leader that admitted the job meant.
pub const JOB_FORM: u16 = 1;

/// What is known of this replica's part in the server's memory, beside what its job has of it.
#[derive(Debug, Default)]
pub(super) struct Claim {
    /// What its job was last found to need.
    need: Option<Need>,
    /// Set aside before anything of it was read, until its job is known here.
    expected: Option<Reserved>,
    /// Why it cannot go on here at present.
    lacks: Option<String>,
}

impl Shard {
    /// Has this set aside until its job is found, in a snapshot or in the log.
    pub fn expects(&self, aside: Reserved) {
        self.claim.lock().expected = Some(aside);
    }

    /// What its job needs here, once it has one or could not begin it.
    pub fn need(&self) -> Option<Need> {
        self.claim.lock().need
    }

    /// Whether all its workers have been here and none has anything left to do, or the job was ended.
    pub fn is_over(&self) -> bool {
        self.read(|m| {
            let ended = m.stop || m.started && m.members.iter().next().is_some();
            ended && m.members.unfinished().next().is_none()
        })
    }

    /// Why it cannot go on, where that is for want of memory.
    pub fn lacks_room(&self) -> Option<String> {
        self.claim.lock().lacks.clone()
    }

    /// Remembers a want of memory: of what stops a replica, only words get through Raft.
    pub(super) fn noted<T>(&self, done: Result<T, Unable>) -> Result<T, Unable> {
        if let Err(Unable::NoRoom(why)) = &done {
            self.claim.lock().lacks = Some(why.clone());
        }
        done
    }

    fn reserve(&self, job: &ServerJob) -> Result<Reserved, Unable> {
        let need = Need::of(job, self.id(), self.shards());
        self.claim.lock().need = Some(need);
        self.room().reserve(self.name(), &need)
    }

    /// What is set aside now is what was expected.
    pub(super) fn is_here(&self) {
        self.claim.lock().expected = None;
    }

    /// A job that a leader has checked and admitted: no rule is asked here.
    pub(super) fn admit(&self, form: u16, text: &str) -> Result<Outcome, Unable> {
        if let Some(outcome) = self.is_configured(text) {
            return Ok(outcome);
        }
        if form > JOB_FORM {
            return Err(Unable::Newer(format!(
                "the log of {} holds a job in form {form}, and this version of paraft reads forms up to {JOB_FORM}: start \
                 this server with the version that its fleet runs",
                self.id()
            )));
        }
        let job = ServerJob::decode(text).map_err(|e| {
            Unable::Newer(format!(
                "the log of {} holds a job that this version of paraft cannot read: start this server with the version \
                 that its fleet runs. {e}",
                self.id()
            ))
        })?;
        self.begin(text, job)
    }

    /// What a second job gets.
    fn is_configured(&self, text: &str) -> Option<Outcome> {
        self.read(|m| match m.job.as_str() {
            "" => None,
            job if job == text => Some(Outcome::Done),
            _ => Some(Outcome::Refused("another job is configured".into())),
        })
    }

    fn begin(&self, text: &str, job: ServerJob) -> Result<Outcome, Unable> {
        let aside = self.reserve(&job)?;
        self.is_here();
        let buckets = configured::blank(placement::buckets_of(&job.layout(), self.id(), self.shards()), &job);
        let state = &mut *self.state.write();
        let meta = &mut state.meta;
        meta.job = text.to_string();
        let auto = job.mode == ModeChoice::Auto && self.id() == ShardId(0);
        meta.in_force = InForce::first(job.first_mode(), auto.then_some(Mode::Asp));
        meta.chunks = job.chunks.filter(|_| self.id() == ShardId(0)).map(Chunks::new);
        if let Some(start) = &job.start {
            meta.begin_at(start);
        }
        state.configured = Some(Configured::new(job, buckets, aside));
        Ok(Outcome::Done)
    }

    /// Room for the job of a snapshot with this text; none is needed where there is no job.
    pub(super) fn set_aside(&self, job: &str) -> Result<Option<(ServerJob, Reserved)>, Unable> {
        if job.is_empty() {
            return Ok(None);
        }
        let job = ServerJob::decode(job).map_err(|e| {
            Unable::Newer(format!(
                "the snapshot of {} holds a job that this version cannot read: {e}",
                self.id()
            ))
        })?;
        let aside = self.reserve(&job)?;
        Ok(Some((job, aside)))
    }

    /// Replaces the whole state by a snapshot's.
    pub fn install(&self, image: &Image) -> Result<(), Unable> {
        let aside = self.set_aside(&image.meta.job)?;
        self.install_into(aside, image)
    }

    /// Likewise, into the room that was set aside for it.
    pub(super) fn install_into(
        &self,
        aside: Option<(ServerJob, Reserved)>,
        image: &Image,
    ) -> Result<(), Unable> {
        let configured = match aside {
            None => None,
            Some((job, aside)) => Some(self.conf_of(job, aside, image)?),
        };
        if let Some(conf) = &configured
            && !image.staged.as_ref().is_none_or(|s| s.fits(conf))
        {
            return Err(
                format!("the snapshot of {} holds a part of a delta that does not fit", self.id()).into()
            );
        }
        *self.staged.write() = image.staged.clone().filter(|_| configured.is_some());
        // Together: who reads clocks must not find other buckets with them.
        *self.state.write() = State { configured, meta: image.meta.clone() };
        Ok(())
    }

    fn conf_of(&self, job: ServerJob, aside: Reserved, image: &Image) -> Result<Arc<Configured>, Unable> {
        let places = placement::buckets_of(&job.layout(), self.id(), self.shards());
        let slots = |kind| if kind == TensorKind::Param { job.slots() } else { 0 };
        let (keeps, own_slots) = (job.keeps(), job.on_shard().slots());
        let own = |kind| if kind == TensorKind::Param && keeps.own_slots { own_slots } else { 0 };
        let fits = places.len() == image.buckets.len()
            && places.iter().zip(&image.buckets).all(|((_, s), d)| {
                s.len == d.weights.len()
                    && slots(s.kind) == d.slots.len()
                    && d.kept.values().all(|k| k.fits(s.len, keeps.pulled, own(s.kind)))
            })
            && image.meta.chunks.as_ref().map(Chunks::plan) == job.chunks.filter(|_| self.id() == ShardId(0))
            && image.meta.members.iter().all(|(_, m)| {
                let remembered = if job.round.drops_late() { 2 * places.len() } else { 0 };
                m.steps().len() == places.len() && m.remembered() == remembered
            });
        if !fits {
            return Err(format!("the snapshot of {} does not fit its job's buckets", self.id()).into());
        }
        let bucket = |((id, spec), d): (_, &Arc<BucketData>)| Bucket::with_data(id, spec, d.clone());
        let buckets = places.into_iter().zip(&image.buckets).map(bucket).collect();
        Ok(Configured::new(job, buckets, aside))
    }

    pub(super) fn room(&self) -> &Arc<Room> {
        &self.room
    }
}
