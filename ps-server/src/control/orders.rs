//! Orders: a person's requests to the fleet. Each carries a random token of its sender. The agreed state
//! keeps the tokens and outcomes of the last orders, so an order that is sent again is executed once.

pub use paraft_changes::order::{Done, Order};

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Maximum number of kept orders. A retry comes within seconds; a fleet whose sweeps submit and delete a
/// hundred trials per second still keeps ten seconds of orders, in 32 KiB.
pub const MAX_ORDERS: usize = 1024;

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
