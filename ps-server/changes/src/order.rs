//! A person's orders to the fleet, and their outcomes.

use crate::{
    control::{Command, Place},
    job::{JobState, Submission},
};
use paraft_common::{JobId, JobShard, ServerId};
use serde::{Deserialize, Serialize};

/// A request. It is part of the log format: add a variant at the end; change or remove none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Order {
    /// As [`Command::Drain`].
    Drain {
        /// Which.
        server: ServerId,
        /// Whether the drain starts or ends.
        draining: bool,
    },
    /// As [`Command::Forget`].
    Forget {
        /// Which.
        server: ServerId,
    },
    /// Gives up the shard's state: it is founded again.
    Abandon {
        /// Which.
        shard: JobShard,
        /// The new founding.
        place: Place,
    },
    /// As [`Command::Submit`].
    Submit(Submission),
    /// As [`Command::Stop`].
    Stop {
        /// Which.
        job: JobId,
        /// When, in ms of unix time.
        now_ms: u64,
    },
    /// As [`Command::Delete`].
    Delete {
        /// Which.
        job: JobId,
    },
}

impl From<&Order> for Command {
    fn from(order: &Order) -> Self {
        match order.clone() {
            Order::Drain { server, draining } => Command::Drain { server, draining },
            Order::Forget { server } => Command::Forget { server },
            Order::Abandon { shard, place } => Command::Place { shard, place },
            Order::Submit(submission) => Command::Submit(submission),
            Order::Stop { job, now_ms } => Command::Stop { job, now_ms },
            Order::Delete { job } => Command::Delete { job },
        }
    }
}

/// The outcome of an executed order. It is part of the snapshot format: add a variant at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Done {
    /// Done as requested.
    Done,
    /// The job's number.
    Submitted(JobId),
    /// The job's state before.
    Ended(JobState),
}
