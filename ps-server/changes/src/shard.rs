//! The commands of a shard's log, and the outcomes of applying them.

pub use crate::delta::{DeltaBucket, DeltaId, DeltaMember, DeltaRecord, VectorId};
use paraft_common::{
    BucketId, Encoding, Mode, Payload, Seq, SessionId, Step, Version, WorkerId, optim::Overrides,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A change of the replicated state. It is encoded by position: a variant is its number, and every later release
/// reads old logs. So new variants are added at the end, none is changed or removed, and the fields of a new one
/// have a version of their own if they may change. The bulk of `Init`, `Update` and `DeltaPart` travels separately,
/// in [`Proposal::payload`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Fixes the job; the first one counts. The leader has checked it, and the servers have confirmed their room.
    Admit {
        /// Format of the job's text: `JOB_FORM` of the server.
        form: u16,
        /// The job, with every key.
        job: String,
    },
    /// Initial state of one bucket; the first whose weights arrive counts. Slots from a checkpoint come before the
    /// weights: a log keeps the order of one leader's proposals, so initialised weights have their slots.
    Init {
        /// Which bucket.
        bucket: BucketId,
        /// What the payload is.
        part: InitPart,
    },
    /// Registers a worker under a session id that the leader has drawn.
    Join {
        /// The worker.
        worker: WorkerId,
        /// Its session from now on.
        session: SessionId,
    },
    /// Removes a worker: its session is over, and barriers and clocks no longer wait for it.
    Leave {
        /// The worker.
        worker: WorkerId,
        /// The session that ends; any other is not affected.
        session: SessionId,
    },
    /// The worker continues at `step`: it joined shards with different clocks, and starts at the latest.
    Advance {
        /// The worker.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
        /// Counts as done in each bucket whose recorded step is earlier.
        step: Step,
    },
    /// The worker has done all its steps.
    Finish {
        /// The worker.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
    },
    /// One update of one bucket: a push, or the sum of a BSP round.
    Update {
        /// Which bucket.
        bucket: BucketId,
        /// The pushes in the payload, ascending by worker.
        contributions: Vec<Contribution>,
        /// Encoding of the pushes' values. The payload of one push is the push as it arrived. The payload of
        /// several is their sum if the encoding is f32, otherwise the format that
        /// the server's `BatchedPushes` reads.
        encoding: Encoding,
        /// Multiplies the payload: one over the number of contributions, times the clipping factor. The leader
        /// computes it once, so that every replica multiplies by the same number.
        factor: f32,
        /// Closes the round of its step: the pushes of members outside it are dropped. (Only if the mode's rounds
        /// do so.)
        closes: bool,
        /// Replaces the optimizer's rate times the schedule's factor, if workers sent a rate. For a round, the mean
        /// of their rates, computed once by the leader.
        rate: Option<f64>,
    },
    /// A worker gets the weights of these buckets as of this place in the log. Only for algorithms that keep what
    /// each worker has pulled.
    Pull {
        /// The worker.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
        /// Ascending by id.
        buckets: Vec<BucketId>,
    },
    /// Switches the mode of the job. A number that is not above the last switch's changes nothing.
    SwitchMode {
        /// Counts the switches of the job, from 1.
        number: u64,
        /// The mode.
        mode: Mode,
        /// Pushes up to this step are still of the old mode.
        after: Step,
        /// The rule chose the mode, or chooses it from here on: the loosest mode that it may choose.
        auto: Option<Mode>,
    },
    /// A part of a state delta; takes effect with the marker.
    DeltaPart {
        /// The delta that it belongs to.
        delta: DeltaId,
        /// Its position in the delta, from 0.
        part: u32,
        /// The vectors in the payload, in order.
        vectors: Vec<VectorId>,
    },
    /// The marker of a state delta: all its parts take effect together.
    Delta {
        /// The delta.
        delta: DeltaId,
        /// The delta before it, as its leader knew it.
        after: Option<DeltaId>,
        /// Number of parts that must have arrived.
        parts: u32,
        /// The buckets that changed.
        buckets: Vec<DeltaBucket>,
        /// The pushes in the delta, and the counts.
        record: DeltaRecord,
    },
    /// A worker's share of a held-out evaluation (shard 0 only).
    Report {
        /// The worker.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
        /// Numbers the evaluation: the epoch; in a job that evaluates within epochs, the step.
        epoch: u64,
        /// The results.
        sums: EvalSums,
    },
    /// Changes nothing. Once its leader has applied it, everything that the leader proposed before is applied or
    /// never will be.
    Fence,
    /// The worker requests a chunk of the data (shard 0 only, leased sampler).
    Acquire {
        /// The worker.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
        /// Counts the session's requests, from 1; a repeated one changes nothing.
        request: u64,
        /// The epoch for which the worker is ready, from 0: its work between the epochs before is done.
        epoch: u64,
        /// The chunk that it has finished.
        done: Option<u64>,
    },
    /// The worker has nothing to train: clocks and barriers do not wait for it.
    Pause {
        /// The worker.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
    },
    /// The worker trains again.
    Resume {
        /// The worker.
        worker: WorkerId,
        /// Its session.
        session: SessionId,
        /// Start from the furthest step of all members instead of from where the others are.
        level: bool,
    },
    /// Pushes that are not applied because at least one has no gradient: those of one worker, or of a round. They
    /// count as pushed and the schedule's clock advances; weights, state and version stay.
    Skip {
        /// Which bucket.
        bucket: BucketId,
        /// The pushes, ascending by worker.
        contributions: Vec<Contribution>,
        /// As in [`Command::Update`].
        closes: bool,
    },
    /// A person has ended the job: its workers finish when they learn of it.
    Stop,
    /// As [`Command::Update`], with other options than the rate, too.
    UpdateWith {
        /// Which bucket.
        bucket: BucketId,
        /// As in [`Command::Update`].
        contributions: Vec<Contribution>,
        /// As in [`Command::Update`].
        encoding: Encoding,
        /// As in [`Command::Update`].
        factor: f32,
        /// As in [`Command::Update`].
        closes: bool,
        /// For a round, the mean of what its workers set.
        overrides: Overrides,
    },
    /// A person removes rows of a partition of a table, whose ids are the payload, or writes rows.
    EditRows {
        /// Which bucket.
        bucket: BucketId,
        /// Names the edit: a second one of the same token changes nothing.
        token: u64,
        /// The payload is rows to write, as [`InitPart::Rows`] has them.
        put: bool,
    },
}

/// An entry with pushes to apply, of any kind.
#[derive(Clone, Copy, Debug)]
pub struct PushEntry<'a> {
    /// Which bucket.
    pub bucket: BucketId,
    /// The pushes in it.
    pub contributions: &'a [Contribution],
    /// How the pushes' values are written.
    pub encoding: Encoding,
    /// Multiplies the payload.
    pub factor: f32,
    /// Closes the round of its step.
    pub closes: bool,
    /// What its workers set in place of the job's options.
    pub overrides: Overrides,
}

/// The content of an `Init`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum InitPart {
    /// The weights, which initialise the bucket.
    Weights {
        /// Updates that they contain; 0 for fresh ones.
        version: Version,
        /// The schedule's clock, in steps of the fleet.
        clock: f64,
    },
    /// One state vector of the optimizer; the index starts at 0.
    Slot(u32),
    /// Rows of a partition, from a checkpoint. Parts come in order; the last one initialises it.
    Rows {
        /// Which part, from 0.
        part: u32,
        /// How many there are.
        parts: u32,
        /// Updates that the rows contain.
        version: Version,
        /// The schedule's clock, in steps of the fleet.
        clock: f64,
    },
    /// What a partition knows of ids that are no rows, from a checkpoint. Its parts follow those of the rows and are counted
    /// with them.
    History {
        /// Which part, from 0.
        part: u32,
        /// How many there are.
        parts: u32,
        /// Updates that the rows contain.
        version: Version,
        /// The schedule's clock, in steps of the fleet.
        clock: f64,
    },
}

impl InitPart {
    /// Weights before any update.
    pub const FRESH: InitPart = InitPart::Weights { version: Version(0), clock: 0.0 };
}

/// One worker's part of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contribution {
    /// The worker.
    pub worker: WorkerId,
    /// Its session.
    pub session: SessionId,
    /// The sequence number of the push in that session.
    pub seq: Seq,
    /// The worker's step.
    pub step: Step,
    /// The bucket's version of the weights behind the gradient.
    pub pulled: Version,
    /// Samples behind the gradient.
    pub samples: u32,
}

/// Sums over held-out samples; shares add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalSums {
    /// Sum of the loss over the samples.
    pub loss_sum: f64,
    /// Correctly classified samples.
    pub correct: u64,
    /// Evaluated samples.
    pub count: u64,
}

/// A finished evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// The epoch.
    pub epoch: u64,
    /// Over all members.
    pub sums: EvalSums,
    /// The job's early-stopping rule ends the job.
    pub stop: bool,
}

/// An evaluation that waits for no more workers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Closed {
    /// Its result.
    pub evaluated: Evaluated,
    /// A worker was lost during the evaluation, and its share was not evaluated: the mean is over other samples.
    pub incomplete: bool,
}

/// The outcome of a command. Only the leader that proposed it reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Outcome {
    /// No outcome (a blank or membership entry).
    None,
    /// Done, now or before.
    Done,
    /// The command does not fit the state; nothing has changed.
    Refused(String),
    /// A new session.
    Joined {
        /// The worker.
        worker: WorkerId,
        /// Its id.
        session: SessionId,
    },
    /// The bucket's version; `applied` is false if every contribution was a duplicate.
    Updated {
        /// Version of the bucket after the update.
        version: Version,
        /// Whether this entry changed the weights.
        applied: bool,
    },
    /// An idle member trains again.
    Resumed {
        /// It starts at this step.
        clock: Step,
    },
    /// Evaluations that became complete.
    Evaluated(Vec<Closed>),
    /// So many rows were removed or written, now or before.
    Edited(u64),
}

/// A command and its bulk data.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    /// What to change.
    pub command: Command,
    /// Values in their encoding for an `Update`, little-endian `f32` for `Init` and `DeltaPart`, else empty. Serde
    /// skips it: the network sends it beside the header, since serde would copy it byte by byte.
    #[serde(skip)]
    pub payload: Payload,
}

impl Command {
    /// Creates an entry of pushes.
    pub fn of_pushes(entry: PushEntry<'_>) -> Self {
        let PushEntry { bucket, contributions, encoding, factor, closes, overrides } = entry;
        let contributions = contributions.to_vec();
        match overrides.is_rate_alone() {
            true => {
                let rate = overrides.rate;
                Command::Update { bucket, contributions, encoding, factor, closes, rate }
            }
            false => Command::UpdateWith { bucket, contributions, encoding, factor, closes, overrides },
        }
    }

    /// The pushes in it; `None` if it holds none, a delta, or pushes that are not applied.
    pub fn pushes(&self) -> Option<PushEntry<'_>> {
        let (bucket, contributions, encoding, factor, closes, overrides) = match self {
            Command::Update { bucket, contributions, encoding, factor, closes, rate } => {
                (bucket, contributions, encoding, factor, closes, Overrides::rate(*rate))
            }
            Command::UpdateWith { bucket, contributions, encoding, factor, closes, overrides } => {
                (bucket, contributions, encoding, factor, closes, *overrides)
            }
            _ => return None,
        };
        let (bucket, encoding, factor, closes) = (*bucket, *encoding, *factor, *closes);
        Some(PushEntry { bucket, contributions, encoding, factor, closes, overrides })
    }

    /// The latest step of its pushes; `None` if it holds none or does not record it.
    pub fn latest_step(&self) -> Option<Step> {
        match self {
            Command::Update { contributions, .. }
            | Command::UpdateWith { contributions, .. }
            | Command::Skip { contributions, .. } => contributions.iter().map(|c| c.step).max(),
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

// Written by hand: openraft prints proposals, and a derived Debug would print a megabyte.
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
