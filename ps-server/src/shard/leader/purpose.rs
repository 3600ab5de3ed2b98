//! The purposes of a leader's proposals and confirmations. Their outcomes are reported by number.

use super::{
    answers::{EditResult, ReplyHandle},
    messages::ConnId,
    pulls::ReleasedPull,
};
use crate::shard::command::{Command, Contribution};
use paraft_common::{Step, WorkerId};
use paraft_trace::Moment;

/// The purpose of a proposal or confirmation.
#[derive(Debug)]
pub enum Purpose {
    /// Fence: everything that this leader proposed before is applied.
    Fence,
    /// Confirms that this replica leads and has applied everything.
    CatchUp,
    /// A worker opens a stream with a session that this leader does not know.
    Session(ConnId),
    /// The first worker brings the job.
    Configure {
        /// Its stream.
        conn: ConnId,
        /// Its job.
        job: String,
    },
    /// A worker joins.
    Join(ConnId),
    /// An update.
    Update {
        /// The local bucket.
        bucket: usize,
        /// The pushes in it.
        contributions: Vec<Contribution>,
        /// For its span.
        of: ProposalSpan,
    },
    /// A worker's session ends.
    Leave {
        /// The worker.
        worker: WorkerId,
        /// The stream on which the worker asked for it, if it did.
        asks: Option<ConnId>,
    },
    /// A pull that the log must hold.
    Pull(ReleasedPull),
    /// The mode is switched.
    SwitchMode,
    /// A person ends the job.
    Stop,
    /// A person changes rows of a table.
    EditRows(ReplyHandle<EditResult>),
    /// A worker resumes.
    Resume(ConnId),
    /// A part of a state delta.
    DeltaPart,
    /// The marker of a state delta.
    Delta(ProposalSpan),
    /// A bucket's initial state.
    Init,
    /// A member reports its progress: it advances, pauses or finishes.
    Member(WorkerId),
    /// No round or pull waits for the outcome.
    Other,
}

/// A command that waits behind its worker's pushes.
pub type DeferredCommand = (Purpose, Command);

/// The span of a proposal.
#[derive(Clone, Copy, Debug)]
pub struct ProposalSpan {
    /// When it was proposed, or its delta was started.
    pub began: Moment,
    /// The latest step in it.
    pub step: Step,
    /// Payload bytes.
    pub bytes: u64,
}
