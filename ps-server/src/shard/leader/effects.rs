//! What a [`Leader`](super::Leader) hears, and what it wants done: all that goes in and out of it.
//!
//! Effects are carried out in their order, before the next input is given in; one that has a number or asks for a computation
//! is answered by an input later. An effect that cannot be carried out may be dropped where its stream is gone; the loss of an
//! outcome is an outcome.

use super::{
    Replication, Wanted,
    messages::{CheckpointImage, ConnId, Liveness, Message, Reply},
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
use paraft_common::{InForce, SessionId, Step, WorkerId};
use paraft_proto::RefusalKind;
use paraft_trace::Moment;
use std::{fmt, sync::Arc, time::Instant};
use tokio::sync::oneshot;

/// When it is. A leader has no clock of its own.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// What deadlines are counted from.
    pub at: Instant,
    /// What spans are measured with.
    pub moment: Moment,
}

/// What a leader may ask of its group at any time: nothing that waits.
pub trait Standing {
    /// Whether this replica leads, as far as it has heard.
    fn leads(&self) -> bool;
    /// The leader's address, if one is known and it is not this replica.
    fn leader_address(&self) -> Option<String>;
    /// Whether this replica sleeps.
    fn is_asleep(&self) -> bool;
    /// Whether it has slept since the last call.
    fn has_slept(&self) -> bool;
}

impl Standing for Arc<dyn Replication> {
    fn leads(&self) -> bool {
        self.leadership().borrow().leads
    }

    fn leader_address(&self) -> Option<String> {
        (**self).leader_address()
    }

    fn is_asleep(&self) -> bool {
        (**self).is_asleep()
    }

    fn has_slept(&self) -> bool {
        (**self).has_slept()
    }
}

/// Who has asked for something and waits for one answer. A leader hands it back with the answer, or lets it go.
pub struct Asker<T>(oneshot::Sender<T>);

impl<T> Asker<T> {
    /// Answers; who asked may be gone.
    pub fn answer(self, answer: T) {
        let _ = self.0.send(answer);
    }
}

impl<T> From<oneshot::Sender<T>> for Asker<T> {
    fn from(tx: oneshot::Sender<T>) -> Self {
        Self(tx)
    }
}

impl<T> fmt::Debug for Asker<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Asker")
    }
}

/// What a switch comes to: the mode in force, or why it is not.
pub type Switched = Result<InForce, RefusalKind>;
/// A checkpoint's image of the shard, or why there is none.
pub type Fetched = Result<Arc<CheckpointImage>, RefusalKind>;

/// What a leader hears.
#[derive(Debug)]
pub enum Input {
    /// Who leads now.
    Leadership(Leadership),
    /// A stream's first message.
    Open {
        /// The stream.
        conn: ConnId,
        /// Who.
        worker: WorkerId,
        /// The session to take up again, or none.
        session: Option<SessionId>,
        /// The job as it is running, or, where none is, as it goes to the log.
        job: String,
        /// What its reader hears.
        liveness: Arc<Liveness>,
    },
    /// A later message.
    Message(ConnId, Message),
    /// The stream has ended, or its worker does not read what it is sent.
    Closed(ConnId),
    /// Somebody asks for a switch of the mode: its number (`None`: the next), and what to.
    SwitchMode(Option<u64>, Wanted, Option<Asker<Switched>>),
    /// A person ends the job.
    Stop,
    /// Who writes the checkpoint of a step asks for the shard's part; or for one of this moment.
    Fetch(Step, bool, Asker<Fetched>),
    /// What has become of the proposal or the confirmation with this number.
    Outcome(u64, Result<Outcome, ProposeError>),
    /// The group was asked to sleep or to wake, and has answered.
    SleepOrWake,
    /// The computation that it has asked for is done.
    Computed(Result<Computed, Panicked>),
    /// The time is past [`Leader::deadline`](super::Leader::deadline).
    Time,
}

/// A computation that a leader wants done elsewhere.
pub type Work = Box<dyn FnOnce() -> Computed + Send>;

/// Its result.
#[derive(Debug)]
pub enum Computed {
    /// A working copy with one push more.
    Copy(Arc<BucketData>),
    /// A round's sum.
    Sum(Sum),
}

/// What a leader wants done.
pub enum Effect {
    /// To the log, behind everything proposed before; then an outcome.
    Propose(u64, Proposal),
    /// Confirm that this replica leads and has applied everything that was committed before; then an outcome.
    Confirm(u64),
    /// To a worker. Where its stream has no room, the stream is closed.
    Send(ConnId, Reply),
    /// The stream ends.
    Close(ConnId),
    /// Do this, which reads or writes so many bytes. Nothing else is done before it is.
    Compute(u64, Work),
    /// Somebody's switch of the mode.
    Switched(Asker<Switched>, Switched),
    /// Somebody's part of a checkpoint.
    Fetched(Asker<Fetched>, Fetched),
    /// Let the group sleep, if all its replicas may.
    Sleep,
    /// Wake the group.
    Wake,
}
