//! What may be written to a shard's log, and what applying it gives back.

use super::delta::{DeltaBucket, DeltaId, DeltaRecord, VectorOf};
use paraft_common::{BucketId, Encoding, Mode, Payload, Seq, SessionId, Step, Version, WorkerId};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A change of the replicated state. It is written by position: a variant is its number, and what a log holds is read by
/// every later release. So new variants come last, none is changed or taken out, and what a new one carries has a version
/// of its own where it may change. The bulk of `Init`, `Update` and `DeltaPart` travels beside it, in
/// [`Proposal::payload`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Fixes the job; the first one counts. The leader has checked it and asked the servers whether they have room.
    Admit {
        /// How the job is written: [`JOB_FORM`](super::begin::JOB_FORM).
        form: u16,
        /// The job, with every key.
        job: String,
    },
    /// Initial state of one bucket; the first whose weights arrive counts. Its slots, where a checkpoint brings
    /// them, come before its weights: a log keeps the order of one leader's proposals, so weights that are in
    /// have their slots.
    Init {
        /// Which bucket.
        bucket: BucketId,
        /// What the payload is.
        part: InitPart,
    },
    /// Registers a worker under a session whose number its leader has drawn.
    Join {
        /// Who.
        worker: WorkerId,
        /// Its session from now on.
        session: SessionId,
    },
    /// Takes a worker out: its session is over, barriers and clocks go on without it.
    Leave {
        /// Who.
        worker: WorkerId,
        /// The session that ends; another one stays untouched.
        session: SessionId,
    },
    /// The worker goes on from `step`: it joined shards whose clocks differ, and starts at the latest.
    Advance {
        /// Who.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
        /// Counts as done, bucket by bucket, where it is later than what is recorded.
        step: Step,
    },
    /// The worker has done all its steps.
    Finish {
        /// Who.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
    },
    /// One update of one bucket: a push, or the sum of a BSP round.
    Update {
        /// Which bucket.
        bucket: BucketId,
        /// Whose pushes the payload holds, by rising worker.
        contributions: Vec<Contribution>,
        /// How the pushes' values are written. The payload of one push is that push, as it came; of several, in f32,
        /// their sum, and in every other encoding what [`Batched`](super::batched::Batched) reads.
        encoding: Encoding,
        /// Multiplies the payload: one over the number of contributions, times the clipping factor. Decided
        /// once, by the leader, so that every replica multiplies by the same number.
        factor: f32,
        /// It closes the round of its step: the pushes of members that are not in it are dropped. (Only where rounds do so.)
        closes: bool,
        /// In the place of the optimizer's rate times the schedule's factor, where its workers have said one. Of a round their
        /// mean, decided once, by the leader.
        rate: Option<f64>,
    },
    /// A worker gets the weights of these buckets as they are at this place in the log. Only for algorithms that keep
    /// what each worker has pulled.
    Pull {
        /// Who.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
        /// By rising id.
        buckets: Vec<BucketId>,
    },
    /// From here on the job goes on in another mode. One whose number is not above that of the last changes nothing.
    SwitchMode {
        /// Counts the switches of the job, from 1.
        number: u64,
        /// The mode.
        mode: Mode,
        /// Pushes up to this step are still of the mode before.
        after: Step,
        /// A rule has chosen it, or is to choose from here on: the loosest mode that it may still choose.
        auto: Option<Mode>,
    },
    /// A part of a state delta; takes effect with the marker.
    DeltaPart {
        /// Of which delta.
        delta: DeltaId,
        /// Its position in the delta, from 0.
        part: u32,
        /// What the payload holds, one behind the other.
        vectors: Vec<VectorOf>,
    },
    /// The marker of a state delta: its parts take effect, all together.
    Delta {
        /// Which.
        delta: DeltaId,
        /// The delta before it, as its leader knew it.
        after: Option<DeltaId>,
        /// Parts that must have come.
        parts: u32,
        /// The buckets that changed.
        buckets: Vec<DeltaBucket>,
        /// Who pushed what, and the counts.
        record: DeltaRecord,
    },
    /// A worker's share of a held-out evaluation (shard 0 only).
    Report {
        /// Who.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
        /// Which epoch was evaluated.
        epoch: u64,
        /// What it found.
        sums: EvalSums,
    },
    /// Changes nothing. Where its leader has applied it, everything that it proposed before is applied, or never will
    /// be.
    Fence,
    /// The worker asks for a chunk of the data (shard 0 only, leased sampler).
    Acquire {
        /// Who.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
        /// Counts the asks of the session, from 1; one that came before changes nothing.
        request: u64,
        /// The epoch for which it is ready, from 0: the work between the epochs before it is done.
        epoch: u64,
        /// The chunk that it has trained.
        done: Option<u64>,
    },
    /// The worker has nothing to train: clocks and barriers go on without it.
    Pause {
        /// Who.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
    },
    /// The worker trains again.
    Resume {
        /// Who.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
        /// From the furthest step of all members, not from where the others are.
        level: bool,
    },
    /// Pushes of which one or more bring nothing, so that none is applied: of a worker alone, or of a round. They count as
    /// pushed, and the schedule's clock goes on; weights, state and version stay.
    Skip {
        /// Which bucket.
        bucket: BucketId,
        /// Whose, by rising worker.
        contributions: Vec<Contribution>,
        /// As in [`Command::Update`].
        closes: bool,
    },
    /// A person has ended the job: its workers finish where they hear of it.
    Stop,
}

/// An entry of pushes that are applied, whatever its kind.
#[derive(Clone, Copy, Debug)]
pub struct PushEntry<'a> {
    /// Which bucket.
    pub bucket: BucketId,
    /// Whose.
    pub contributions: &'a [Contribution],
    /// How the pushes' values are written.
    pub encoding: Encoding,
    /// Multiplies the payload.
    pub factor: f32,
    /// It closes the round of its step.
    pub closes: bool,
    /// In the place of the job's own.
    pub rate: Option<f64>,
}

/// What an `Init` brings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum InitPart {
    /// The weights; with them the bucket is initialised.
    Weights {
        /// Updates that are in them; 0 for fresh ones.
        version: Version,
        /// The schedule's clock, in steps of the fleet.
        clock: f64,
    },
    /// One state vector of the optimizer, from 0.
    Slot(u32),
}

impl InitPart {
    /// Weights that nothing was applied to.
    pub const FRESH: InitPart = InitPart::Weights { version: Version(0), clock: 0.0 };
}

/// One worker's part of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contribution {
    /// Who pushed.
    pub worker: WorkerId,
    /// In which session.
    pub session: SessionId,
    /// The push's number in that session.
    pub seq: Seq,
    /// The worker's step.
    pub step: Step,
    /// The bucket's version in the weights that the gradient was computed from.
    pub pulled: Version,
    /// Samples that the gradient was computed from.
    pub samples: u32,
}

/// Sums over held-out samples; shares add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalSums {
    /// Sum of the loss over the samples.
    pub loss_sum: f64,
    /// Samples classified right.
    pub correct: u64,
    /// Samples seen.
    pub count: u64,
}

/// A finished evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// Which epoch.
    pub epoch: u64,
    /// Over all members.
    pub sums: EvalSums,
    /// The job's early-stopping rule says: stop.
    pub stop: bool,
}

/// An evaluation for which nobody is waited for any more.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Closed {
    /// What it has come to.
    pub evaluated: Evaluated,
    /// A worker was lost while it went on, with a share that nobody has evaluated: its mean is of other samples.
    pub incomplete: bool,
}

/// What applying a command gave. Only the leader that proposed it reads this.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Outcome {
    /// Nothing to say (a blank or membership entry).
    None,
    /// Done, or it was so already.
    Done,
    /// The command does not fit the state; nothing changed.
    Refused(String),
    /// A new session.
    Joined {
        /// Whose.
        worker: WorkerId,
        /// Its number.
        session: SessionId,
    },
    /// The bucket's version now; `applied` is false when every contribution was in already.
    Updated {
        /// Version of the bucket after the update.
        version: Version,
        /// Whether this entry changed the weights.
        applied: bool,
    },
    /// A member that rested goes on.
    Resumed {
        /// From this step.
        clock: Step,
    },
    /// Evaluations that became complete.
    Evaluated(Vec<Closed>),
}

/// A command and its bulk.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    /// What to change.
    pub command: Command,
    /// For an `Update` values in its encoding, for `Init` and `DeltaPart` little-endian `f32`, else empty. Skipped by serde: the network sends it beside
    /// the header, or it would be copied byte by byte.
    #[serde(skip)]
    pub payload: Payload,
}

impl Command {
    /// An entry of pushes.
    pub fn of_pushes(entry: PushEntry<'_>) -> Self {
        let PushEntry { bucket, contributions, encoding, factor, closes, rate } = entry;
        let contributions = contributions.to_vec();
        Command::Update { bucket, contributions, encoding, factor, closes, rate }
    }

    /// Likewise, read; `None`: it holds none, a delta of them, or such as are not applied.
    pub fn pushes(&self) -> Option<PushEntry<'_>> {
        let Command::Update { bucket, contributions, encoding, factor, closes, rate } = self else {
            return None;
        };
        let (bucket, encoding, factor, closes, rate) = (*bucket, *encoding, *factor, *closes, *rate);
        Some(PushEntry { bucket, contributions, encoding, factor, closes, rate })
    }

    /// The latest step of the pushes that it holds; `None` where it holds none, or does not say.
    pub fn latest_step(&self) -> Option<Step> {
        match self {
            Command::Update { contributions, .. } | Command::Skip { contributions, .. } => {
                contributions.iter().map(|c| c.step).max()
            }
            Command::Delta { record, .. } => {
                record.members.values().flat_map(|m| &m.steps).map(|(_, step)| *step).max()
            }
            _ => None,
        }
    }
}

impl From<Command> for Proposal {
    fn from(command: Command) -> Self {
        Proposal { command, payload: Payload::EMPTY }
    }
}

// By hand: openraft prints proposals, and a derived Debug would print a megabyte.
impl fmt::Debug for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} + {} bytes", self.command, self.payload.len())
    }
}

impl fmt::Display for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
