//! The replicated state machine of a shard.
//!
//! Snapshot and digest contain everything here. It changes only in [`Shard::apply`], from committed commands,
//! deterministically: no clock, no randomness, no map whose order depends on the process.

mod evaluations;

use super::{
    chunks::Chunks,
    command::{Command, EvalSums, Evaluated, InitPart, Outcome, Proposal},
    members::Members,
    staged_delta::StagedDelta,
    versions::Versions,
};
use crate::{
    raft::ApplyError,
    room::{Reserved, Room},
};
use evaluations::{OpenEvaluation, close_evaluations};
use paraft_changes::delta::DeltaId;
use paraft_common::{
    BucketId, Encoding, InForce, JobId, JobShard, Mode, Payload, SessionId, ShardId, Step, TensorKind,
    WorkerId, codec::F32_BYTES, config::Start, histogram::DelayHistogram, need::Need,
};
use parking_lot::{MappedRwLockWriteGuard, Mutex, RwLock, RwLockWriteGuard};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Acquire},
    },
};

pub use super::shard_config::ShardConfig;

/// A shard. One task applies; any number of tasks read.
#[derive(Debug)]
pub struct Shard {
    name: JobShard,
    shards: u32,
    /// One lock for both, so that a reader never combines clocks and buckets of two snapshots.
    pub(super) state: RwLock<State>,
    /// The parts of a state delta that waits for its marker. Only the apply task reads it.
    pub(super) staged: RwLock<Option<StagedDelta>>,
    pub(super) room: Arc<Room>,
    pub(super) claim: Mutex<Claim>,
    pub(super) term: AtomicU64,
    pub(super) versions: Versions,
}

/// This replica's claim on the server's memory, beside its job's reservation.
#[derive(Debug, Default)]
pub(super) struct Claim {
    /// The memory that its job was last found to need.
    pub need: Option<Need>,
    /// Memory reserved before anything of the job was read, until its job is known here.
    pub expected: Option<Reserved>,
    /// Why it cannot run here at present.
    pub lacks: Option<String>,
}

/// The job's buckets, and the members' clocks.
#[derive(Debug, Default)]
pub(super) struct State {
    pub configured: Option<Arc<ShardConfig>>,
    pub meta: Meta,
}

/// The replicated state except the vectors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// The job as TOML; empty before it is admitted.
    pub job: String,
    /// Who takes part.
    pub members: Members,
    /// All expected workers have joined at some time; from then on rounds are applied.
    pub started: bool,
    /// Delay of every applied push.
    pub delays: DelayHistogram,
    /// Pushes applied.
    pub pushes: u64,
    /// Pushes that rounds were closed without.
    pub dropped: u64,
    /// Payload bytes of the applied pushes, before aggregation.
    pub bytes_pushed: u64,
    /// Entries that `apply` recognised as duplicates.
    pub duplicates: u64,
    /// Members that left without finishing.
    pub workers_lost: u64,
    /// Acknowledged pushes that a failed leader lost (only at the level `leader`).
    pub pushes_lost: u64,
    /// The mode in force.
    pub in_force: InForce,
    /// The last state delta that took effect.
    pub last_cut: Option<DeltaId>,
    /// Which worker has which chunk of the data (shard 0, leased sampler).
    pub chunks: Option<Chunks>,
    /// Open evaluations, by number (the epoch; in a job that evaluates within epochs, the step): a bounded number of them.
    evaluations: BTreeMap<u64, OpenEvaluation>,
    /// The latest evaluation that is complete, with all shares. Workers resend a report after a failover: without this
    /// field an old evaluation would be made twice, and count twice for early stopping.
    pub(super) evaluated: Option<Evaluated>,
    /// The best mean loss so far and the evaluations since.
    best: Option<(f64, u32)>,
    /// The job ends early, by its rule or by a person's request.
    pub stop: bool,
    /// Skipped steps of each member, counted in its first bucket.
    pub skipped: BTreeMap<WorkerId, u64>,
}

impl Meta {
    /// Starts from a checkpoint. Evaluations count on shard 0 only, to which workers report.
    pub(super) fn begin_at(&mut self, start: &Start) {
        let s = &start.stopping;
        if let Some(chunks) = &mut self.chunks {
            chunks.begin_at(start.epochs);
        }
        self.members.begin_at(Step(start.step));
        self.best = (s.best_loss.is_finite() || s.bad > 0).then_some((s.best_loss, s.bad));
        self.stop = s.stop;
        self.evaluated = s.evaluated.map(|e| Evaluated {
            epoch: e.number,
            sums: EvalSums { loss_sum: e.loss_sum, correct: e.correct, count: e.count },
            stop: s.stop,
        });
    }

    /// Returns the worker's chunk: its session is over, or it has finished.
    fn give_back(&mut self, worker: WorkerId) {
        if let Some(chunks) = &mut self.chunks {
            chunks.give_back(worker);
        }
    }

    /// Assigns chunks. Called after every change of chunks or members.
    fn assign_chunks(&mut self) {
        if let Some(chunks) = &mut self.chunks {
            chunks.assign(&self.members, self.started);
        }
    }
}

impl Shard {
    /// An empty shard, number `id` of `shards`.
    pub fn new(id: ShardId, shards: u32) -> Self {
        let name = JobShard::new(JobId(0), id).unwrap_or_default();
        Self::within(Room::unlimited(), name, shards)
    }

    /// As [`Self::new`], on a server with this room.
    pub fn within(room: Arc<Room>, name: JobShard, shards: u32) -> Self {
        let (state, staged) = (RwLock::default(), RwLock::default());
        let (claim, term) = (Mutex::default(), AtomicU64::new(0));
        Self { name, shards, state, staged, room, claim, term, versions: Versions::default() }
    }

    /// The shard's number in its job.
    pub fn id(&self) -> ShardId {
        self.name.shard()
    }

    /// The shard's name in the fleet.
    pub fn name(&self) -> JobShard {
        self.name
    }

    /// The number of shards of the job.
    pub fn shards(&self) -> u32 {
        self.shards
    }

    /// The job and the buckets, once there are any.
    pub fn configured(&self) -> Option<Arc<ShardConfig>> {
        self.state.read().configured.clone()
    }

    /// Reads the small state. `f` must be quick: the next apply waits for it.
    pub fn read<T>(&self, f: impl FnOnce(&Meta) -> T) -> T {
        f(&self.state.read().meta)
    }

    /// Reads the small state together with its buckets, at one moment. Buckets that were fetched earlier could be
    /// older than the clocks after a snapshot was installed. `f` must be quick.
    pub fn view<T>(&self, f: impl FnOnce(Option<&Arc<ShardConfig>>, &Meta) -> T) -> T {
        let state = self.state.read();
        f(state.configured.as_ref(), &state.meta)
    }

    /// The latest term with an applied entry. If a caller reads the state first and this second, the state
    /// contained nothing of a later term.
    pub fn term(&self) -> u64 {
        self.term.load(Acquire)
    }

    /// Bytes of the parts of a state delta that wait for its marker.
    pub fn staged_bytes(&self) -> u64 {
        let of = |s: &StagedDelta| s.vectors.iter().map(|(_, v)| (v.len() * F32_BYTES) as u64).sum();
        self.staged.read().as_ref().map_or(0, of)
    }

    pub(super) fn meta_mut(&self) -> MappedRwLockWriteGuard<'_, Meta> {
        RwLockWriteGuard::map(self.state.write(), |s| &mut s.meta)
    }

    /// Sum of the buckets' versions: the number of updates applied to the shard.
    pub fn version(&self) -> u64 {
        self.configured().map_or(0, |c| c.buckets.iter().map(|b| b.version().0).sum())
    }

    /// As [`Self::carry_out`], for callers without a replica to stop: an error of this host becomes a refusal.
    pub fn apply(&self, proposal: &Proposal) -> Outcome {
        self.carry_out(proposal).unwrap_or_else(|e| Outcome::Refused(e.to_string()))
    }

    /// Applies one committed proposal. Only this function changes the replicated state.
    ///
    /// # Errors
    /// This host cannot apply it. Other replicas may have applied it, so this replica must stop.
    pub fn carry_out(&self, proposal: &Proposal) -> Result<Outcome, ApplyError> {
        Ok(match &proposal.command {
            Command::Admit { form, job } => self.admit(*form, job)?,
            Command::Init { bucket, part } => self.init(*bucket, *part, &proposal.payload)?,
            Command::Join { worker, session } => self.join(*worker, *session),
            Command::Leave { worker, session } => {
                let state = &mut *self.state.write();
                let meta = &mut state.meta;
                let unfinished = meta.members.in_session(*worker, *session).is_some_and(|m| !m.finished);
                if meta.members.leave(*worker, *session) {
                    meta.mark_missing_shares(*worker);
                    meta.skipped.remove(worker);
                    meta.workers_lost += u64::from(unfinished);
                    meta.give_back(*worker);
                    meta.assign_chunks();
                }
                Outcome::Evaluated(close_evaluations(state))
            }
            Command::Advance { worker, session, step } => {
                self.meta_mut().members.advance(*worker, *session, *step);
                Outcome::Done
            }
            Command::Finish { worker, session } => {
                let state = &mut *self.state.write();
                let meta = &mut state.meta;
                if meta.members.finish(*worker, *session) {
                    meta.mark_missing_shares(*worker);
                    meta.give_back(*worker);
                    meta.assign_chunks();
                }
                Outcome::Evaluated(close_evaluations(state))
            }
            Command::Update { .. } | Command::UpdateWith { .. } => self.update(proposal)?,
            Command::Skip { bucket, contributions, closes } => self.skip(*bucket, contributions, *closes)?,
            Command::Pull { worker, session, buckets } => self.pull(*worker, *session, buckets),
            Command::SwitchMode { number, mode, after, auto } => {
                self.switch_mode(*number, *mode, *after, *auto)
            }
            Command::Fence => Outcome::Done,
            Command::DeltaPart { delta, part, vectors } => {
                self.delta_part(*delta, *part, vectors, &proposal.payload)
            }
            Command::Delta { delta, after, parts, buckets, record } => {
                self.delta(*delta, *after, *parts, buckets, record)
            }
            Command::Report { worker, session, epoch, sums } => self.report(*worker, *session, *epoch, *sums),
            Command::Acquire { worker, session, request, epoch, done } => {
                let meta = &mut *self.meta_mut();
                if meta.members.in_session(*worker, *session).is_some_and(|m| !m.finished)
                    && let Some(chunks) = &mut meta.chunks
                {
                    chunks.take(*worker, *request, *epoch, *done);
                    meta.assign_chunks();
                }
                Outcome::Done
            }
            Command::Pause { worker, session } => {
                self.meta_mut().members.pause(*worker, *session);
                Outcome::Done
            }
            Command::Resume { worker, session, level } => {
                let clock = self.meta_mut().members.resume(*worker, *session, *level);
                clock.map_or(Outcome::Done, |clock| Outcome::Resumed { clock })
            }
            Command::EditRows { bucket, token, put } => {
                self.edit_rows(*bucket, *token, *put, &proposal.payload)?
            }
            Command::Stop => {
                let meta = &mut *self.meta_mut();
                meta.stop = true;
                meta.assign_chunks();
                Outcome::Done
            }
        })
    }

    fn pull(&self, worker: WorkerId, session: SessionId, buckets: &[BucketId]) -> Outcome {
        let Some(conf) = self.configured().filter(|c| c.job.keeps().pulled) else {
            return Outcome::Refused("the job keeps nothing of what its workers pull".into());
        };
        if self.read(|m| m.members.in_session(worker, session).is_some()) {
            let locals = buckets.iter().filter_map(|id| conf.local(*id)).map(|b| &conf.buckets[b]);
            let trained = locals.filter(|b| b.spec.kind == TensorKind::Param);
            trained.for_each(|b| b.record_pull(worker, &conf));
        }
        Outcome::Done
    }

    fn edit_rows(
        &self,
        id: BucketId,
        token: u64,
        put: bool,
        payload: &Payload,
    ) -> Result<Outcome, ApplyError> {
        let (conf, at) = match self.place(id) {
            Ok(place) => place,
            Err(why) => return Ok(Outcome::Refused(why)),
        };
        let edited = conf.buckets[at].edit_rows(token, put, payload)?;
        Ok(edited.map_or_else(Outcome::Refused, Outcome::Edited))
    }

    fn switch_mode(&self, number: u64, mode: Mode, after: Step, auto: Option<Mode>) -> Outcome {
        let Some(conf) = self.configured() else { return Outcome::Refused("no job is configured".into()) };
        let mut meta = self.meta_mut();
        if number <= meta.in_force.number {
            return Outcome::Done;
        }
        if let Err(e) = conf.job.may_switch(mode) {
            return Outcome::Refused(e.to_string());
        }
        let before = meta.in_force.mode;
        meta.in_force = InForce { number, mode, before, after, auto };
        Outcome::Done
    }

    fn init(&self, id: BucketId, part: InitPart, payload: &Payload) -> Result<Outcome, ApplyError> {
        let fits = match part {
            InitPart::Rows { .. } | InitPart::History { .. } => self.place(id),
            InitPart::Weights { .. } | InitPart::Slot(_) => {
                self.pushes(id, payload, Encoding::F32, &[]).map(|(conf, i, _)| (conf, i))
            }
        };
        let (conf, i) = match fits {
            Ok(fits) => fits,
            Err(e) => return Ok(Outcome::Refused(e)),
        };
        conf.buckets[i].allocate(&self.room)?;
        Ok(match conf.buckets[i].init(&conf.job, part, payload) {
            Ok(()) => Outcome::Done,
            Err(e) => Outcome::Refused(e),
        })
    }

    fn join(&self, worker: WorkerId, session: SessionId) -> Outcome {
        let Some(conf) = self.configured() else {
            return Outcome::Refused("no job is configured".into());
        };
        let mut meta = self.meta_mut();
        if meta.members.in_session(worker, session).is_some() {
            return Outcome::Joined { worker, session }; // a repeated Join
        }
        if meta.members.get(worker).is_some_and(|m| !m.finished) {
            meta.workers_lost += 1;
            meta.mark_missing_shares(worker);
        }
        meta.members.join(worker, session, conf.buckets.len(), conf.job.round.drops_late());
        meta.skipped.remove(&worker);
        meta.started |= meta.members.unfinished().count() >= conf.job.workers as usize;
        meta.give_back(worker);
        meta.assign_chunks();
        Outcome::Joined { worker, session }
    }
}
