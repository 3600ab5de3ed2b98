//! Groups: ranks that reduce among themselves and act as one worker.
//!
//! ```text
//!  Rendezvous (who is in the group, from the control plane)
//!    └─ Group::form ─┬─ watch: a connection to each other rank; who dies is noticed at once, and ends every wait
//!                    ├─ Ring for gradients and weights (on the CPU; GPUs have NCCL for them)
//!                    ├─ Ring for what is small: statistics of a batch, losses, words of the leader
//!                    └─ Lines, where ranks hold stages of a model: activations and gradients from one to the next
//! ```
//!
//! A group never changes. When a rank is lost every call of every other rank fails, and they form a new group: smaller, or with
//! the rank that has come back.

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

/// What became of a group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// A rank is gone.
    #[error("rank {rank} of the group is gone: {how}")]
    Lost {
        /// Its rank.
        rank: u32,
        /// What was seen.
        how: String,
    },
    /// The group cannot be formed, or go on.
    #[error("the group is broken: {0}")]
    Broken(String),
}

impl From<GroupError> for DeviceError {
    fn from(e: GroupError) -> Self {
        DeviceError::Group(e.to_string())
    }
}

/// Sums over the ranks of a group, of few values: every rank calls it at the same place of the same program.
pub trait RankSums: Send + Sync + Debug {
    /// Each value becomes the sum over the ranks, the same bits on all of them.
    fn sum(&self, values: &mut [f64]) -> Result;
}

/// This process's part in a group.
#[derive(Debug)]
pub struct Group {
    rendezvous: Rendezvous,
    watch: Arc<Watch>,
    small: Arc<Mutex<Ring>>,
}

impl Group {
    /// Meets the others within the time; an error says who was not there. The second value reduces gradients, on whatever thread
    /// does that.
    pub fn form(
        rendezvous: Rendezvous,
        listener: &mut Listener,
        within: Duration,
    ) -> std::result::Result<(Self, Ring), GroupError> {
        let (group, ring, _) = Self::form_with(rendezvous, listener, within, None)?;
        Ok((group, ring))
    }

    /// Likewise, with lines between each two ranks for messages of at most so many values; `None`: there are none.
    ///
    /// # Errors
    /// As there.
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

    /// Who is in it.
    pub fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        self.rendezvous.ranks.len()
    }

    /// Whether this rank speaks for the group.
    pub fn leads(&self) -> bool {
        self.rendezvous.place == 0
    }

    /// Who looks after the others.
    pub fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// For a device's statistics.
    pub fn sums(&self) -> Arc<dyn RankSums> {
        Arc::new(SmallRing(self.small.clone()))
    }

    /// The leader's words, on every rank.
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
