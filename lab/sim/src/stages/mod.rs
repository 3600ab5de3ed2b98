//! A worker whose ranks hold one pipeline stage each (`[parallel]`), in simulated time.
//!
//! Each rank has its own session with the shards of its stage. `paraft_worker`'s stages decide the
//! order of micro-batches, the pulls, the versions and the waits. A step's time is divided among stages
//! by the cost of their layers, and among micro-batches by samples.
//!
//! The gradient is that of the whole model, micro-batch by micro-batch, at the weights with which the
//! ranks started it. It is computed once, when its first bucket is pushed.
//!
//! - this file: the leading rank. `cut`: the division of the model. `rank`: the actions of each rank.
//!   `shared`: their shared state.

pub(crate) mod cut;
mod rank;
mod shared;

pub(crate) use rank::Rank;
pub(crate) use shared::{OfRank, Shared};

use crate::{client::Client, error::SimError, lines::Message};
use paraft_common::Step;
use paraft_session::{Pull, Pulled};
use paraft_worker::worker::Minibatches;
use std::{collections::VecDeque, sync::Arc};

/// The leading rank.
pub(crate) struct Leader {
    shared: Arc<Shared>,
    rank: Rank,
    /// The samples of the next steps.
    ahead: VecDeque<Vec<u32>>,
}

impl Leader {
    pub fn new(shared: &Arc<Shared>, rank: Rank) -> Self {
        Self { shared: shared.clone(), rank, ahead: VecDeque::new() }
    }

    /// The next steps use new minibatches.
    pub fn begins(&mut self) {
        self.ahead.clear();
    }

    /// Makes all ranks pull; after a step that another step overlaps, each pulls alone.
    pub async fn pull(&mut self, client: &mut Client, pull: Pull) -> Result<Pulled, SimError> {
        let together = !self.rank.has_begun(pull.done.next());
        if together {
            self.rank.say(Message::Pull(pull.clone()));
        }
        let pulled = self.rank.pull_own(client, pull).await?;
        if together {
            self.rank.level(pulled.done).await?;
        }
        self.rank.lend().await;
        Ok(pulled)
    }

    /// Makes all ranks take a step; returns its loss and its number of samples. `continues`: the next
    /// step follows at once.
    pub async fn step(
        &mut self,
        client: &mut Client,
        (step, continues): (Step, bool),
        minibatches: &mut Minibatches,
    ) -> Result<(f32, usize), SimError> {
        let continues = continues && self.rank.overlaps_minibatches();
        self.know(step, minibatches);
        if continues {
            self.know(step.next(), minibatches);
        }
        if !self.rank.has_begun(step) {
            self.rank.say(Message::Step(step));
        }
        let samples = self.shared.lens(step).0;
        let loss = self.rank.step(client, step, Some(continues)).await?;
        Ok((loss, samples))
    }

    fn know(&mut self, step: Step, minibatches: &mut Minibatches) {
        if self.shared.knows(step) {
            return;
        }
        while self.ahead.len() < 2 {
            self.ahead.push_back(minibatches.next());
        }
        let samples = self.ahead.pop_front().unwrap_or_default();
        self.shared.has(step, samples, self.ahead.front().map_or(0, Vec::len));
    }

    /// The newest weights of all stages, while no step is in progress.
    pub fn whole(&self) -> Vec<f32> {
        self.shared.whole.lock().clone()
    }

    /// Ends the job. Returns the results of each rank.
    pub fn over(&mut self) -> Vec<OfRank> {
        self.rank.say(Message::Over);
        self.shared.of_ranks()
    }
}
