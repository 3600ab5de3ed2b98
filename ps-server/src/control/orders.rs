//! Orders: what a person asks of the fleet. Each carries a token, drawn at random by who gives it; the agreed state keeps the tokens of
//! the last orders with what came of them, so that one that is sent again is carried out once.

use super::{
    jobs::{JobState, Submission},
    state::{Command, Place},
};
use paraft_common::{JobId, JobShard, ServerId};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Orders that are kept, at most. A second try comes within seconds; a fleet whose sweeps submit and delete a hundred trials a second
/// still keeps ten seconds of them, in 32 KiB.
pub const MAX_ORDERS: usize = 1024;

/// What is asked for. It stands in the log: a new one is the last variant, none is changed or removed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Order {
    /// As [`Command::Drain`].
    Drain {
        /// Which.
        server: ServerId,
        /// Begins, or ends.
        draining: bool,
    },
    /// As [`Command::Forget`].
    Forget {
        /// Which.
        server: ServerId,
    },
    /// What the shard held is given up: it is founded anew.
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

/// What came of an order that was carried out. It stands in snapshots: a new one is the last variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Done {
    /// As was asked.
    Done,
    /// The job has this number.
    Submitted(JobId),
    /// The job was in this state before.
    Ended(JobState),
}

/// The last orders that were carried out, the latest last; at most [`MAX_ORDERS`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Orders(VecDeque<(u64, Done)>);

impl Orders {
    /// What came of the order with this token, if it was carried out.
    pub fn of(&self, token: u64) -> Option<Done> {
        self.0.iter().rev().find(|(t, _)| *t == token).map(|(_, done)| *done)
    }

    pub(super) fn keep(&mut self, token: u64, done: Done) {
        self.0.push_back((token, done));
        while self.0.len() > MAX_ORDERS {
            self.0.pop_front();
        }
    }

    /// How many are kept.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
