//! Orders: a person's requests to the fleet. Each carries a random token of its sender. The agreed state
//! keeps the tokens and outcomes of the last orders, so an order that is sent again is executed once.

use super::{
    jobs::{JobState, Submission},
    state::{Command, Place},
};
use paraft_common::{JobId, JobShard, ServerId};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Maximum number of kept orders. A retry comes within seconds; a fleet whose sweeps submit and delete a
/// hundred trials per second still keeps ten seconds of orders, in 32 KiB.
pub const MAX_ORDERS: usize = 1024;

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

/// The last executed orders, the latest last; at most [`MAX_ORDERS`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Orders(VecDeque<(u64, Done)>);

impl Orders {
    /// The outcome of the order with this token, if it was executed.
    pub fn of(&self, token: u64) -> Option<Done> {
        self.0.iter().rev().find(|(t, _)| *t == token).map(|(_, done)| *done)
    }

    pub(super) fn keep(&mut self, token: u64, done: Done) {
        self.0.push_back((token, done));
        while self.0.len() > MAX_ORDERS {
            self.0.pop_front();
        }
    }

    /// Number of kept orders.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no order is kept.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
