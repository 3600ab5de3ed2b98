//! Inputs and effects of a [`Leader`](super::Leader).
//!
//! Effects run in their order, before the next input. An effect with a number or a computation is answered by an
//! input later. An effect whose stream is gone may be dropped; a lost outcome is reported as an outcome.

use super::{
    RequestedMode,
    answers::{EditResult, FetchResult, ReplyHandle, SwitchResult},
    messages::{ConnId, Liveness, Message, Reply},
};
use crate::{
    compute::Panicked,
    raft::{Leadership, ProposeError},
    shard::{
        bucket::BucketData,
        command::{Outcome, Proposal},
        round::Sum,
    },
};
use paraft_common::{SessionId, Step, WorkerId};
use paraft_trace::Moment;
use std::{sync::Arc, time::Instant};

/// The current time. A leader has no clock of its own.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// For deadlines.
    pub at: Instant,
    /// For spans.
    pub moment: Moment,
}

/// What a leader receives.
#[derive(Debug)]
pub enum Input {
    /// The current leadership.
    Leadership(Leadership),
    /// A stream's first message.
    Open {
        /// The stream.
        conn: ConnId,
        /// The worker.
        worker: WorkerId,
        /// The session to resume, or none.
        session: Option<SessionId>,
        /// The job that runs, or the job to write to the log.
        job: String,
        /// Signs of life that the stream's reader notes.
        liveness: Arc<Liveness>,
    },
    /// A later message.
    Message(ConnId, Message),
    /// The stream has ended, or its worker does not read its replies.
    Closed(ConnId),
    /// Request to switch the mode: its number (`None`: the next), and the mode.
    SwitchMode(Option<u64>, RequestedMode, Option<ReplyHandle<SwitchResult>>),
    /// Request of a person to end the job.
    Stop,
    /// Request of a person to change rows of a table: the command with its payload.
    EditRows(Proposal, ReplyHandle<EditResult>),
    /// Request of a checkpoint writer for the shard's part of a step; the flag requires an image of this moment.
    Fetch(Step, bool, ReplyHandle<FetchResult>),
    /// The outcome of the proposal or confirmation with this number.
    Outcome(u64, Result<Outcome, ProposeError>),
    /// The group was asked to sleep or to wake, and has answered.
    SleepOrWake,
    /// The result of the requested computation.
    Computed(Result<Computed, Panicked>),
    /// The time is past [`Leader::deadline`](super::Leader::deadline).
    Time,
}

/// A computation that runs outside the leader.
pub type Work = Box<dyn FnOnce() -> Computed + Send>;

/// The result of a computation.
#[derive(Debug)]
pub enum Computed {
    /// A working copy with one more push.
    Copy(Arc<BucketData>),
    /// A round's sum.
    Sum(Sum),
}

/// What a leader requests.
pub enum Effect {
    /// Propose to the log, behind everything proposed before; an outcome follows.
    Propose(u64, Proposal),
    /// Confirm that this replica leads and has applied everything that was committed before; an outcome follows.
    Confirm(u64),
    /// Send to a worker. If its stream has no room, close the stream.
    Send(ConnId, Reply),
    /// Close the stream.
    Close(ConnId),
    /// Run this computation, which reads or writes so many bytes. No other input is handled before it ends.
    Compute(u64, Work),
    /// Answer a request to switch the mode.
    SwitchResult(ReplyHandle<SwitchResult>, SwitchResult),
    /// Answer a request to change rows.
    EditResult(ReplyHandle<EditResult>, EditResult),
    /// Answer a request for a checkpoint part.
    FetchResult(ReplyHandle<FetchResult>, FetchResult),
    /// Let the group sleep, if all its replicas may.
    Sleep,
    /// Wake the group.
    Wake,
}
