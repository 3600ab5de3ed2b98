//! Fair queueing: the jobs of a server share its cores evenly while several want more than there is, however
//! many pushes, shards or workers each has.
//!
//! Start-time fair queueing (Goyal, Vin and Cheng, 1996). A piece of work costs its bytes. In a virtual time
//! that counts only bytes, it starts where its job's last one ends, or now if that is over. Of the waiting
//! pieces the earliest start goes first. An idle job saves up no credit, and without competition no job
//! waits.

use parking_lot::Mutex;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};
use tokio::sync::oneshot;

/// Jobs that are remembered without work in progress: the end of their last work may be in the future.
const MAX_IDLE_JOBS: usize = 1024;

/// The slots of one pool.
#[derive(Clone, Debug)]
pub struct FairQueue(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Pieces of work that may start at once.
    free: usize,
    now: u64,
    jobs: HashMap<u32, Job>,
}

#[derive(Debug, Default)]
struct Job {
    /// The virtual end of its last piece of work.
    ends: u64,
    /// By rising start.
    waiting: VecDeque<(u64, oneshot::Sender<FairSlot>)>,
}

/// A slot for a piece of work; dropping it frees the slot.
#[derive(Debug)]
pub struct FairSlot(Option<FairQueue>);

impl FairQueue {
    /// With this many slots.
    pub fn new(at_a_time: usize) -> Self {
        Self(Arc::new(Mutex::new(State { free: at_a_time.max(1), now: 0, jobs: HashMap::new() })))
    }

    /// Waits for a slot for this job, for work of `bytes` bytes. Dropping the future takes no slot from
    /// another job.
    pub async fn of(&self, job: u32, bytes: u64) -> Option<FairSlot> {
        let waits = {
            let mut state = self.0.lock();
            let State { free, now, jobs } = &mut *state;
            let of = jobs.entry(job).or_default();
            let start = of.ends.max(*now);
            of.ends = start.saturating_add(bytes.max(1));
            if *free > 0 {
                *free -= 1;
                *now = start;
                return Some(FairSlot(Some(self.clone())));
            }
            let (tx, rx) = oneshot::channel();
            of.waiting.push_back((start, tx));
            rx
        };
        waits.await.ok()
    }

    /// Passes a slot to the next piece of work, or keeps it until one comes.
    fn over(&self) {
        loop {
            let (tx, turn) = {
                let mut state = self.0.lock();
                let first = |job: &Job| job.waiting.front().map(|(start, _)| *start);
                let next = state.jobs.iter().filter_map(|(id, job)| Some((first(job)?, *id))).min();
                let Some((start, next)) = next else {
                    state.free += 1;
                    if state.jobs.len() > MAX_IDLE_JOBS {
                        let now = state.now;
                        state.jobs.retain(|_, job| job.ends > now);
                    }
                    return;
                };
                state.now = state.now.max(start);
                let waiting = state.jobs.get_mut(&next).and_then(|job| job.waiting.pop_front());
                let Some((_, tx)) = waiting else { continue };
                (tx, FairSlot(Some(self.clone())))
            };
            match tx.send(turn) {
                Ok(()) => return,
                // The waiting future was dropped: the slot is passed on by this loop, not by its drop.
                Err(mut turn) => turn.0 = None,
            }
        }
    }
}

impl Drop for FairSlot {
    fn drop(&mut self) {
        if let Some(turns) = self.0.take() {
            turns.over();
        }
    }
}

#[cfg(test)]
#[path = "fair_queue_tests.rs"]
mod tests;
