//! How long the steps of a worker take.

use crate::{
    chance::{Chance, Draws},
    world::World,
};
use paraft_common::WorkerId;
use parking_lot::Mutex;

/// The share of the forward pass in a step's time.
pub(crate) const FORWARD: f64 = 1.0 / 3.0;
/// The maximal number of events in which a backward pass completes its buckets, for each step of each
/// worker.
pub(crate) const TURNS: usize = 8;

/// The compute speed of a worker.
pub(crate) struct Speed {
    /// Mean seconds.
    mean: f64,
    chance: Mutex<Chance>,
}

impl Speed {
    /// The speed of a worker's rank, which is the same after restarts.
    pub fn new(world: &World, worker: WorkerId, at: usize) -> Self {
        let setup = &world.setup;
        let own = Chance::new(world.seed, Draws::Worker(worker.0)).log_normal(1.0, setup.worker_spread);
        let slow = setup.slow.get(&worker.0).copied().unwrap_or(1.0);
        let place = worker.0 as usize * world.ranks() + at;
        let chance = Mutex::new(Chance::new(world.seed, Draws::Compute(place as u32)));
        Self { mean: setup.compute_ms / 1e3 * own * slow, chance }
    }

    /// Seconds of a step.
    pub(crate) fn step(&self, world: &World) -> f64 {
        let mut chance = self.chance.lock();
        let drawn = chance.log_normal(self.mean, world.setup.compute_spread);
        match world.setup.straggle {
            Some(s) if chance.uniform() < s.probability => drawn * s.factor,
            _ => drawn,
        }
    }
}
