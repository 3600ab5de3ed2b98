//! Sums gradients and sends weights on the ranks' ring, in host memory.

use super::GroupResult;
use paraft_compute::collective::{GroupError, Ring};
use std::{ops::Range, sync::mpsc, thread};

enum Order {
    Reduce(usize, Vec<f32>),
    Broadcast(Vec<f32>, Vec<Range<usize>>),
}

enum Done {
    Reduced(usize, Vec<f32>),
    Broadcast(Vec<f32>, GroupResult),
    Failed(GroupError),
}

/// Sums gradients and sends weights on the ring, on its own thread, during the backward pass.
pub(crate) struct Reducer {
    orders: mpsc::Sender<Order>,
    done: mpsc::Receiver<Done>,
    pending: usize,
    /// Buffers for reuse.
    spare: Vec<Vec<f32>>,
}

fn ended() -> GroupError {
    GroupError::Broken("its ring has ended".into())
}

impl Reducer {
    pub(super) fn start(mut ring: Ring) -> std::io::Result<Self> {
        let (orders, received) = mpsc::channel();
        let (say, done) = mpsc::channel();
        let work = move || {
            let share = 1.0 / ring.size() as f32;
            while let Ok(order) = received.recv() {
                let done = match order {
                    Order::Reduce(i, mut values) => match ring.all_reduce(&mut values) {
                        Ok(()) => {
                            values.iter_mut().for_each(|v| *v *= share);
                            Done::Reduced(i, values)
                        }
                        Err(e) => Done::Failed(e),
                    },
                    Order::Broadcast(mut weights, ranges) => {
                        let all = ranges.into_iter().try_for_each(|r| ring.broadcast(&mut weights[r]));
                        Done::Broadcast(weights, all)
                    }
                };
                if say.send(done).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("paraft-ring".into()).spawn(work)?;
        Ok(Self { orders, done, pending: 0, spare: Vec::new() })
    }

    /// Starts to average bucket `i` over the ranks. It copies the bucket, because the model's next step overwrites
    /// the gradient.
    pub fn reduce(&mut self, i: usize, gradients: &[f32]) {
        let mut values = self.spare.pop().unwrap_or_default();
        values.clear();
        values.extend_from_slice(gradients);
        self.pending += 1;
        // If the thread has ended, `take` reports it.
        let _ = self.orders.send(Order::Reduce(i, values));
    }

    /// Takes the next bucket, in the order of the `reduce` calls: if one is ready or, with `wait`, as soon as one
    /// is.
    pub fn take(&mut self, wait: bool, with: impl FnOnce(usize, &[f32])) -> GroupResult<bool> {
        if self.pending == 0 {
            return Ok(false);
        }
        let done = match wait {
            true => self.done.recv().map_err(|_| ended())?,
            false => match self.done.try_recv() {
                Ok(done) => done,
                Err(mpsc::TryRecvError::Empty) => return Ok(false),
                Err(mpsc::TryRecvError::Disconnected) => return Err(ended()),
            },
        };
        self.pending -= 1;
        match done {
            Done::Reduced(i, values) => {
                with(i, &values);
                self.spare.push(values);
                Ok(true)
            }
            Done::Failed(e) => Err(e),
            Done::Broadcast(..) => Err(ended()),
        }
    }

    /// Copies these parts of the leader's weights to all ranks.
    pub fn broadcast(&mut self, weights: &mut Vec<f32>, ranges: &[Range<usize>]) -> GroupResult {
        let len = weights.len();
        let order = Order::Broadcast(std::mem::take(weights), ranges.to_vec());
        if let Err(mpsc::SendError(Order::Broadcast(back, _))) = self.orders.send(order) {
            *weights = back;
            return Err(ended());
        }
        while let Ok(done) = self.done.recv() {
            if let Done::Broadcast(back, all) = done {
                *weights = back;
                return all;
            }
        }
        // The thread died with the weights. They arrive again with the next group's first pull.
        weights.resize(len, 0.0);
        Err(ended())
    }
}
