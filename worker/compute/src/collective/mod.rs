//! Groups of ranks that reduce among themselves and act as one worker.
//!
//! ```text
//!  Rendezvous (the group's members, from the control plane)
//!    └─ Group::form ─┬─ watch: a connection to each other rank; it notices a death at once, and ends every wait
//!                    ├─ Ring for gradients and weights (on the CPU; GPUs use NCCL)
//!                    ├─ Ring for small data: statistics of a batch, losses, the leader's messages
//!                    └─ Lines, between ranks with stages of a model: activations and gradients
//! ```
//!
//! A group never changes. When a rank is lost, every call of every other rank fails, and they form a new group:
//! smaller, or with the rank that has returned.

mod lines;
mod rendezvous;
mod ring;
mod watch;

pub use lines::{Lines, Tag};
pub use rendezvous::{Listener, Peer, Rendezvous};
pub use ring::Ring;
pub use watch::Watch;

use crate::error::{DeviceError, Result};
use std::{
    fmt::Debug,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// Why a group failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// A rank is gone.
    #[error("rank {rank} of the group is gone: {how}")]
    Lost {
        /// Its rank.
        rank: u32,
        /// The observed cause.
        how: String,
    },
    /// The group cannot be formed, or cannot continue.
    #[error("the group is broken: {0}")]
    Broken(String),
}

impl From<GroupError> for DeviceError {
    fn from(e: GroupError) -> Self {
        DeviceError::Group(e.to_string())
    }
}

/// Sums of few values over the ranks of a group. All ranks call it at the same points of the same program.
pub trait RankSums: Send + Sync + Debug {
    /// Replaces each value by its sum over the ranks, with the same bits on all of them.
    fn sum(&self, values: &mut [f64]) -> Result;
}

/// This process's membership in a group.
#[derive(Debug)]
pub struct Group {
    rendezvous: Rendezvous,
    watch: Arc<Watch>,
    small: Arc<Mutex<Ring>>,
}

impl Group {
    /// Connects to the other ranks within the time; an error names the missing ones. The second value reduces
    /// gradients, on any thread.
    pub fn form(
        rendezvous: Rendezvous,
        listener: &mut Listener,
        within: Duration,
    ) -> std::result::Result<(Self, Ring), GroupError> {
        let (group, ring, _) = Self::form_with(rendezvous, listener, within, None)?;
        Ok((group, ring))
    }

    /// Likewise, with lines between each two ranks for messages of at most this many values; `None`: without lines.
    ///
    /// # Errors
    /// See [`Self::form`].
    pub fn form_with(
        rendezvous: Rendezvous,
        listener: &mut Listener,
        within: Duration,
        lines: Option<usize>,
    ) -> std::result::Result<(Self, Ring, Lines), GroupError> {
        let met = rendezvous::connect(&rendezvous, listener, within, lines.is_some())?;
        let watch = Arc::new(Watch::start(&rendezvous, met.peers, [&met.bulk, &met.small])?);
        let ring = |pair: Option<rendezvous::Neighbours>| {
            Ring::new(rendezvous.place, rendezvous.ranks.len(), pair, watch.clone())
        };
        let (bulk, small) = (ring(met.bulk)?, ring(met.small)?);
        let lines = Lines::new(met.lines, lines.unwrap_or_default(), watch.clone())?;
        Ok((Self { small: Arc::new(Mutex::new(small)), rendezvous, watch }, bulk, lines))
    }

    /// The group's members.
    pub fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.rendezvous.ranks.len()
    }

    /// Whether this rank leads the group.
    pub fn leads(&self) -> bool {
        self.rendezvous.place == 0
    }

    /// The observer of the other ranks.
    pub fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// Sums for a device's statistics.
    pub fn sums(&self) -> Arc<dyn RankSums> {
        Arc::new(SmallRing(self.small.clone()))
    }

    /// Copies the leader's words to every rank.
    pub fn words(&self, words: &mut [u64]) -> std::result::Result<(), GroupError> {
        self.small.lock().unwrap_or_else(PoisonError::into_inner).broadcast(words)
    }

    /// Sums over the ranks.
    pub fn sum(&self, values: &mut [f64]) -> std::result::Result<(), GroupError> {
        self.small.lock().unwrap_or_else(PoisonError::into_inner).all_reduce(values)
    }
}

#[derive(Debug)]
struct SmallRing(Arc<Mutex<Ring>>);

impl RankSums for SmallRing {
    fn sum(&self, values: &mut [f64]) -> Result {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).all_reduce(values)?)
    }
}
