//! What a leader has asked of its group, and for what: it hears the outcome by a number.

use super::{messages::ConnId, pulls::Ready};
use crate::shard::command::{Command, Contribution};
use paraft_common::{Step, WorkerId};
use paraft_trace::Moment;

/// What a proposal or a confirmation is for.
#[derive(Debug)]
pub enum Purpose {
    /// Everything that this leader has proposed before is applied.
    Fence,
    /// It leads, and has applied everything.
    CatchUp,
    /// A worker comes with a session that this leader does not know.
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
        /// Of this local bucket.
        bucket: usize,
        /// Whose pushes.
        contributions: Vec<Contribution>,
        /// For its span.
        of: Proposed,
    },
    /// A worker's session ends.
    Leave {
        /// Whose.
        worker: WorkerId,
        /// It has asked for it, on this stream.
        asks: Option<ConnId>,
    },
    /// A pull that the log must hold.
    Pull(Ready),
    /// The mode is switched.
    SwitchMode,
    /// A person ends the job.
    Stop,
    /// A worker goes on.
    Resume(ConnId),
    /// A part of a state delta.
    DeltaPart,
    /// Its marker.
    Delta(Proposed),
    /// A bucket's initial state.
    Init,
    /// A member says how far it is: it advances, pauses or finishes.
    Member(WorkerId),
    /// Nothing that a round or a pull waits for.
    Other,
}

/// What a worker has said behind its pushes.
pub type Said = (Purpose, Command);

/// What the span of a proposal says of it.
#[derive(Clone, Copy, Debug)]
pub struct Proposed {
    /// When it was proposed, or its delta was begun.
    pub began: Moment,
    /// The latest that it has.
    pub step: Step,
    /// Payload.
    pub bytes: u64,
}
